"""Plans: schedules as data. A plan prints, hashes and replays; strategies make plans and the tuner searches them.

In: a tile program and steps. Out: the scheduled program, and the frozen list of steps that made it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from serrate.errors import ScheduleError
from serrate.ir.tile import TileProgram
from serrate.schedule.primitives import PRIMITIVES
from serrate.schedule.short_rows import by_length
from serrate.schedule.target import Target
from serrate.schedule.tree import tree

LOOPS = frozenset(("combine", "delay", "fuse", "gather", "inline", "mark", "merge", "reorder", "repeat", "split"))
"""Primitives whose effect is seen in the loops."""


class Sized(int):
    """A tile size with the reason for it.

    >>> Sized(8, "512 bytes are stored at once") + 1
    9
    """

    why: str

    def __new__(cls, size: int, why: str) -> Sized:
        made = super().__new__(cls, size)
        made.why = why
        return made


@dataclass(frozen=True)
class TileSize:
    """A loop that a plan splits, and why into tiles of this size."""

    loop: str
    size: int
    why: str

    def __str__(self) -> str:
        return f"{self.loop} by {self.size}: {self.why}" if self.why else f"{self.loop} by {self.size}"


@dataclass(frozen=True)
class Step:
    """One primitive with its arguments."""

    primitive: str
    args: tuple[str | int, ...]

    def __str__(self) -> str:
        return f"{self.primitive} {' '.join(map(str, self.args))}"


class LaunchOptions(NamedTuple):
    """How a GPU program is launched, as in `Plan`."""

    warps: int = 4
    stages: int = 1
    product_stages: int | None = None
    resident: int | None = None


ORDERS = ("blocked", "interleaved", "shared")
"""Threads take neighbouring positions, every n-th position, or the next one of a shared counter."""


@dataclass(frozen=True)
class Plan:
    """A strategy's name and the steps it chose.

    >>> print(Plan("maskless", (Step("split", ("T1", "r0", 32)), Step("mark", ("T1", "c0", "grid")))))
    maskless: split T1 r0 32; mark T1 c0 grid
    """

    strategy: str
    steps: tuple[Step, ...]
    warps: int = 4
    """Warps per GPU program; ignored on a CPU."""
    stages: int = 1
    """Blocks of a row that a GPU program keeps in flight."""
    product_stages: int | None = None
    """Blocks of a matrix product that a GPU program keeps in flight; None for what its loops suggest."""
    resident: int | None = None
    """The number of programs of a matrix product on each multiprocessor of a GPU; each computes one block after another. None for
    one program per block."""
    reasons: tuple[str, ...] = ()
    """The reasons for the plan; shown by `explain`."""
    short: Plan | None = None
    """The plan for short rows, if longer ones are cut: one worker processes each from beginning to end."""
    most: int | None = None
    """The length of the longest row that is short."""
    combines_lanes: bool = False
    """Whether a GPU program combines the lanes of each block, rather than once after the loop over a row."""
    threads: int | None = None
    """The most threads that share the work on a CPU; None for all. Results have the same bits for any number."""
    order: str = "blocked"
    """The order in which threads take grid positions, one of `ORDERS`. Results have the same bits in any order."""
    tiles: tuple[TileSize, ...] = field(default=(), compare=False, repr=False)
    """The loops it splits, with reasons; shown by `explain`."""
    scheduled: TileProgram | None = field(default=None, compare=False, repr=False)
    """The program after all steps, for people to read."""

    @property
    def launch_options(self) -> LaunchOptions:
        """How its GPU programs are launched."""
        return LaunchOptions(self.warps, self.stages, self.product_stages, self.resident)

    def lowered_for(self, target: Target) -> Target:
        """The target for which to lower the plan, given that of its backend."""
        return replace(target, factors_blocks=False) if self.combines_lanes else target

    def launched_with(self, warps: int | None, stages: int | None) -> Plan:
        """The plan with so many warps, and so many blocks in flight in all loops, where these are given."""
        made = self if warps is None else replace(self, warps=warps)
        made = made if stages is None else replace(made, stages=stages, product_stages=stages)
        return made if made.short is None else replace(made, short=made.short.launched_with(warps, stages))

    def because(self, reason: str) -> Plan:
        """The plan with one more reason."""
        return replace(self, reasons=(*self.reasons, reason))

    def apply(self, program: TileProgram) -> TileProgram:
        """The program after all steps."""
        made = program
        for step in self.steps:
            if step.primitive not in PRIMITIVES:
                raise ScheduleError(f"unknown primitive {step.primitive!r}: choose from {', '.join(PRIMITIVES)}")
            made = PRIMITIVES[step.primitive](made, *step.args)
        if self.short is None or self.most is None:
            return made
        return by_length(self.short.apply(program), made, self.most)

    def __str__(self) -> str:
        if self.scheduled is not None:
            return "\n".join(self.tree)
        short = "" if self.short is None else f" | rows of at most {self.most} by {self.short}"
        return f"{self.strategy}: {'; '.join(map(str, self.steps))}{short}"

    @property
    def tree(self) -> tuple[str, ...]:
        """The plan as readable text: the rewrites, then the resulting loops, then the reasons."""
        if self.scheduled is None:
            return self.lines
        rewrites = [str(step) for step in self.steps if step.primitive not in LOOPS]
        rewrites += [] if self.order == ORDERS[0] else [f"positions {self.order}"]
        rewrites += [] if self.resident is None else [f"{self.resident} resident on each multiprocessor"]
        rewrites += [] if self.threads is None else [f"at most {self.threads} threads"]
        head = f"{self.strategy}: {'; '.join(rewrites)}" if rewrites else self.strategy
        short = () if self.short is None else (f"  rows of at most {self.most}:", *(f"    {line}" for line in self.short.tree))
        return (head, *(f"  {line}" for line in tree(self.scheduled)), *short, *(f"  # {reason}" for reason in self.reasons))

    @property
    def lines(self) -> tuple[str, ...]:
        """The plan as a list of steps, one per line."""
        short = () if self.short is None else (f"  rows of at most {self.most}:", *(f"  {line}" for line in self.short.lines))
        return (self.strategy, *(f"  {step}" for step in self.steps), *short, *(f"  # {reason}" for reason in self.reasons))


class Recorder:
    """Applies primitives one by one and records them. Strategies write their plans with it."""

    def __init__(self, program: TileProgram) -> None:
        self.program = program
        self.steps: list[Step] = []
        self.reasons: list[str] = []
        self.tiles: list[TileSize] = []

    def do(self, primitive: str, *args: str | int) -> None:
        """Applies a primitive, or raises and changes nothing."""
        self.program = PRIMITIVES[primitive](self.program, *args)
        self.steps.append(Step(primitive, tuple([int(a) if isinstance(a, Sized) else a for a in args])))
        if primitive == "split":
            _, loop, size = args[:3]
            self.tiles.append(TileSize(str(loop), int(size), size.why if isinstance(size, Sized) else ""))

    def attempt(self, primitive: str, *args: str | int) -> bool:
        """Applies a primitive if it is legal; says whether it was."""
        try:
            self.do(primitive, *args)
        except ScheduleError:
            return False
        return True

    def restart(self, program: TileProgram) -> None:
        """Starts over from the original program."""
        self.program = program
        self.steps.clear()
        self.tiles.clear()

    def because(self, reason: str) -> None:
        """Adds a reason to the plan."""
        self.reasons.append(reason)

    def plan(self, strategy: str, warps: int = 4, stages: int = 1, *, combines_lanes: bool = False) -> Plan:
        return Plan(
            strategy,
            tuple(self.steps),
            warps,
            stages,
            reasons=tuple(self.reasons),
            combines_lanes=combines_lanes,
            tiles=tuple(dict.fromkeys(self.tiles)),
            scheduled=self.program,
        )
