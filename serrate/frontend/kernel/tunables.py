"""Tunables: values that the author of a kernel leaves to be chosen.

In: the arguments of `hl.register_tunable`. Out: a frozen fragment with all its values and the default one. Names are Helion's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serrate.errors import CallError


class Fragment(Protocol):
    """The values that a tunable may have."""

    @property
    def values(self) -> tuple[Any, ...]:
        """All values, in increasing order if they have one."""

    @property
    def default(self) -> Any:
        """The value without tuning."""


@dataclass(frozen=True)
class EnumFragment:
    """One of several values; the first is the default.

    >>> EnumFragment(("rows", "columns")).default
    'rows'
    """

    choices: tuple[Any, ...]

    def __init__(self, choices: Sequence[Any]) -> None:
        if not choices:
            raise CallError("EnumFragment needs at least one choice")
        object.__setattr__(self, "choices", tuple(choices))

    @property
    def values(self) -> tuple[Any, ...]:
        return self.choices

    @property
    def default(self) -> Any:
        return self.choices[0]


MOST = 8
"""The most values of a range of integers that are tried."""


@dataclass(frozen=True)
class IntegerFragment:
    """An integer from `low` to `high`; some of them are tried.

    >>> IntegerFragment(1, 4).values, IntegerFragment(0, 700).values
    ((1, 2, 3, 4), (0, 100, 200, 300, 400, 500, 600, 700))
    """

    low: int
    high: int
    default_value: int | None = None

    def __post_init__(self) -> None:
        _require(type(self).__name__, self.low, self.high, self.default_value)

    @property
    def default(self) -> int:
        return self.low if self.default_value is None else self.default_value

    @property
    def values(self) -> tuple[int, ...]:
        count = min(MOST, self.high - self.low + 1)
        spread = {self.low + (self.high - self.low) * k // max(count - 1, 1) for k in range(count)}
        return tuple(sorted(spread | {self.default}))


@dataclass(frozen=True)
class PowerOfTwoFragment:
    """A power of two from `low` to `high`, which are powers of two.

    >>> PowerOfTwoFragment(16, 128).values
    (16, 32, 64, 128)
    """

    low: int
    high: int
    default_value: int | None = None

    def __post_init__(self) -> None:
        _require(type(self).__name__, self.low, self.high, self.default_value)
        for value in (self.low, self.high, self.default):
            if value < 1 or value & (value - 1):
                raise CallError(f"PowerOfTwoFragment takes powers of two, got {value}")

    @property
    def default(self) -> int:
        return self.low if self.default_value is None else self.default_value

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(1 << k for k in range(self.low.bit_length() - 1, self.high.bit_length()))


def _require(name: str, low: int, high: int, default: int | None) -> None:
    if low > high or not low <= (low if default is None else default) <= high:
        raise CallError(f"{name}: the default is between the least and the greatest value, got {low}, {high}, {default}")


def fragment_of(name: str, choices: Any) -> Fragment:
    """The argument of `hl.register_tunable` as a fragment; a plain sequence is an enumeration.

    >>> fragment_of("unroll", (1, 2, 4)).values
    (1, 2, 4)
    """
    if isinstance(choices, EnumFragment | IntegerFragment | PowerOfTwoFragment):
        return choices
    if isinstance(choices, list | tuple | range) and len(choices):
        return EnumFragment(choices)
    raise CallError(f"hl.register_tunable: {name!r} needs choices, as in hl.register_tunable({name!r}, (1, 2, 4))")
