"""What a user may promise the tuner about a ragged tensor.

In: words given to `JaggedTensor.with_hint`. Out: a frozen record of them, every word checked.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from serrate.errors import CallError

_WORDS = {
    "distribution": ("uniform", "exponential", "bimodal"),
    "access_pattern": ("row_major", "random", "streaming"),
    "reuse": ("low", "medium", "high"),
}


@dataclass(frozen=True)
class Hints:
    """Advice that may change which plan is chosen and never what is computed; None where nothing was said.

    >>> Hints(reuse="high").reuse
    'high'
    >>> Hints(reuse="often")
    Traceback (most recent call last):
    serrate.errors.CallError: reuse='often' is not a hint: use one of 'low', 'medium', 'high'
    """

    distribution: str | None = None
    access_pattern: str | None = None
    reuse: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            word = getattr(self, field.name)
            if word is not None and word not in _WORDS[field.name]:
                raise CallError(f"{field.name}={word!r} is not a hint: use one of {', '.join(map(repr, _WORDS[field.name]))}")


NO_HINTS = Hints()
