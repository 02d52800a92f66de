"""Hints that a user may give the tuner about a ragged tensor.

In: the arguments of `JaggedTensor.with_hint`. Out: a frozen, validated record of them.

Hints survive every operation that keeps a tensor's rows or selects from them: a change of device, dtype, values, features or
format, and every kind of indexing. Computed results have no hints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from serrate.errors import CallError

Distribution = Literal["uniform", "exponential", "bimodal", "giant"]
"""How lengths are distributed: all similar, many short and few long, bimodal, or one row that dwarfs the rest."""
AccessPattern = Literal["row_major", "random", "streaming"]
"""How rows are visited: in order, in any order, or in order and only once."""
Reuse = Literal["low", "medium", "high"]
"""How often the same rows are read again."""

_WORDS: dict[str, tuple[str, ...]] = {
    "distribution": get_args(Distribution),
    "access_pattern": get_args(AccessPattern),
    "reuse": get_args(Reuse),
}


@dataclass(frozen=True)
class Hints:
    """Advice that may change which plan is chosen, never the result; None for hints that were not given.

    >>> Hints(reuse="high")
    Hints(reuse='high')
    >>> Hints(reuse="often")
    Traceback (most recent call last):
    serrate.errors.CallError: reuse='often' is not a hint: use one of 'low', 'medium', 'high'
    """

    distribution: str | None = None
    access_pattern: str | None = None
    reuse: str | None = None

    def __post_init__(self) -> None:
        for name, word in self.as_dict().items():
            if word not in _WORDS[name]:
                raise CallError(f"{name}={word!r} is not a hint: use one of {', '.join(map(repr, _WORDS[name]))}")

    def as_dict(self) -> dict[str, str]:
        """The hints that were given.

        >>> Hints(distribution="giant").as_dict()
        {'distribution': 'giant'}
        """
        words = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: word for name, word in words if word is not None}

    def __repr__(self) -> str:
        return f"Hints({', '.join(f'{name}={word!r}' for name, word in self.as_dict().items())})"


NO_HINTS = Hints()


def more_hints(before: Hints, words: Mapping[str, str | None]) -> Hints:
    """Earlier hints updated with new ones; None leaves a hint unchanged.

    >>> more_hints(Hints(reuse="high"), {"distribution": "uniform", "reuse": None})
    Hints(distribution='uniform', reuse='high')
    >>> more_hints(NO_HINTS, {"layout": "rows"})
    Traceback (most recent call last):
    serrate.errors.CallError: with_hint does not know layout='rows': use distribution=, access_pattern=, reuse=
    """
    for name, word in words.items():
        if name not in _WORDS:
            known = ", ".join(f"{each}=" for each in _WORDS)
            raise CallError(f"with_hint does not know {name}={word!r}: use {known}")
    return replace(before, **{name: word for name, word in words.items() if word is not None})
