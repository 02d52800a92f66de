"""The host side of a kernel: the Python around its device loops.

In: a kernel's function. Out: a `CompiledKernel`, which runs the function with each device loop replaced by a launch
(`launch_site.py`). It also implements `serrate.language` outside of device loops.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from serrate import settings
from serrate.errors import CallError, KernelError, choices
from serrate.frontend.kernel.machine import (
    BlockSize,
    BlockSizes,
    LazyMachine,
    NamedBlock,
    activate,
    current,
    deactivate,
    refuse,
    running,
    user_frame,
)
from serrate.frontend.kernel.tunables import Fragment
from serrate.ir.tile import TileProgram
from serrate.runtime.locks import making
from serrate.tiles.launch_site import LaunchSite
from serrate.tiles.source import split
from serrate.tiles.sources import Fixed, Items
from serrate.tiles.specialise import LoopPrograms
from serrate.tiles.stage import LoopStage, Options, Variant
from serrate.tiles.trace import DEFAULT_BLOCK
from serrate.tiles.tunables import TunableHost, current_values
from serrate.tuner.candidates import Space
from serrate.tuner.measure import ProgramMeasurer
from serrate.tuner.record import Tuning

if TYPE_CHECKING:
    from serrate.report.collect import StageFacts


class Host(BlockSizes):
    """Implements `serrate.language` outside of device loops."""

    def __init__(self, blocks: tuple[int | None, ...], register: Callable[[str, Fragment], None] = lambda *_: None) -> None:
        super().__init__(blocks, DEFAULT_BLOCK)
        self._register = register
        self.first: dict[int, int] = {}
        """The number of block sizes taken before each device loop."""

    def passed(self, loop: int, count: int) -> None:
        """Records that a device loop has run and taken `count` block sizes."""
        if loop not in self.first:
            self.first[loop] = self.taken
            self.taken += count

    def number(self, value: Any, what: str) -> Any:
        """`hl.specialize`."""
        return Fixed(value)

    def block_size(self, low: Any, high: Any) -> int:
        """`hl.register_block_size`."""
        frame = user_frame()
        assert frame is not None
        extent, least = int(low if high is None else high), 1 if high is None else int(low)
        size = min(max(least, self.block_of(self.registered(frame), extent)), max(extent, 1))
        return BlockSize(size, NamedBlock(f"the block of line {frame.f_lineno}"))

    def tunable(self, name: str, fragment: Fragment) -> Any:
        """`hl.register_tunable`."""
        self._register(name, fragment)
        values = current_values()
        return fragment.default if values is None else values.get(name, fragment.default)

    def full(self, shape: Any, value: Any, dtype: torch.dtype) -> Any:
        """A value without tile dims is a plain number."""
        if len(shape):
            self.zeros()
        return value if dtype == torch.bool else float(value) if dtype.is_floating_point else int(value)

    def ranges(self, what: str, *_: Any, **__: Any) -> Any:
        """`hl.tile` and `hl.grid` outside the source that the compiler sees."""
        refuse(f"{what} must be used in a `for` statement of the kernel itself, not in a function it calls")

    def __getattr__(self, name: str) -> Any:
        refuse(
            "tile values must stay inside a loop over tiles. Programs run in any order, so they cannot carry values from one to "
            "the next: put a loop inside, or use hl.atomic_add"
        )


class CompiledKernel:
    """A kernel on one backend: its function, with device loops replaced by launches."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        if not isinstance(function, types.FunctionType):
            raise KernelError(f"@serrate.kernel takes a plain function, not a {type(function).__name__}")
        self._function, self._plans = function, settings.current().plans
        with making:
            self._parts = split(function)
            options = self._options = replace(options, shares=len(self._parts.loops))
            self.sites = [self._made(number, options) for number in range(len(self._parts.loops))]
            # Loops that take block sizes from the configuration first look up which.
            by_number = [functools.partial(self._launch, number) for number in range(len(self.sites))]
            self.host = self._parts.host(by_number if options.blocks else self.sites)
            """The function with device loops replaced by launches; it runs while `machine` is current."""
        self.machine = LazyMachine(functools.partial(Host, options.blocks, self._tunable))
        self._tunables: dict[str, Fragment] = {}
        self._axes: dict[int, frozenset[str]] = {}
        """The names of axes of the device loops that were traced."""
        self._later_sites: dict[tuple[int, int], LaunchSite] = {}
        """Device loops before which a call registered block sizes; the loops take the next ones of the configuration."""

    def refresh(self) -> None:
        """Drops all bindings if plans were replaced since the last call. They are not part of the keys of launches, which are
        made for every loop of a call."""
        plans = settings.current().plans
        if plans is not self._plans:
            self._plans = plans
            for site in (*self.sites, *self._later_sites.values()):
                site.forget()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.refresh()
        token = activate(self.machine)
        try:
            return self.host(*args, **kwargs)
        finally:
            deactivate(token)

    def _tunable(self, name: str, fragment: Fragment) -> None:
        """Notes a tunable. From the next call on, the host code runs with values that are chosen for its arguments."""
        if self._tunables.get(name) != fragment:
            self._tunables[name] = fragment
            host = self.host.host if isinstance(self.host, TunableHost) else self.host
            backend = self._options.backend or "cpp"
            source = inspect.getsource(self._function)
            self.host = TunableHost(host, self._function.__name__, source, backend, self._tunables, self._options.policy)

    def _launch(self, number: int, env: dict[str, Any]) -> None:
        host: Host = current("a kernel")
        site = self._site(number, host)
        site(env)
        host.passed(number, site.programs.open_blocks)

    def _site(self, number: int, host: Host) -> LaunchSite:
        """The launch site of a device loop, with the remaining block sizes of the configuration."""
        first = host.first.get(number, host.taken)
        if not first:
            return self.sites[number]
        if (number, first) not in self._later_sites:
            options = replace(self._options, blocks=self._options.blocks[first:])
            self._later_sites.setdefault((number, first), self._made(number, options))
        return self._later_sites[number, first]

    def _made(self, number: int, options: Options) -> LaunchSite:
        check = functools.partial(self._require_used, number)
        return LaunchSite(self._function.__name__, self._function, self._parts.loops[number], options, check)

    def _require_used(self, number: int, programs: LoopPrograms, program: TileProgram) -> None:
        """Raises for lanes of unknown axes, and for more block sizes than all device loops take.

        This is known only once every loop has been traced; a loop that is never reached might have any axis.
        """
        self._axes[number] = frozenset(axis.name for axis in program.axes)
        if len(self._axes) < len(self.sites):
            return
        names = ("chunk", *sorted(frozenset[str]().union(*self._axes.values())))
        for name in sorted(self._options.lanes.keys() - names):
            raise CallError(f"lanes: {self._function.__name__} has no axis {name!r}: {choices(name, names)}")
        host: Host = current("a kernel")
        taken, given = host.taken + (0 if number in host.first else programs.open_blocks), len(self._options.blocks)
        if len(host.first.keys() | {number}) == len(self.sites) and taken < given:
            raise CallError(
                f"block_sizes: {self._function.__name__} leaves {taken} open, got {given}; they are for the dims of hl.tile that "
                "have no block_size, and for hl.register_block_size"
            )

    def variants(self, *args: Any, **kwargs: Any) -> list[Variant]:
        """Builds the programs for these arguments without running them."""
        return [program.variant(items) for program, items in self._programs_for(args, kwargs)]

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The code that runs for these arguments; nothing is run."""
        return "\n".join(v.executable.source for v in self.variants(*args, **kwargs))

    def program(self, *args: Any, **kwargs: Any) -> str:
        """The device loops as tile programs, before tile sizes are chosen."""
        return "\n".join(str(v.program) for v in self.variants(*args, **kwargs))

    def facts(self, *args: Any, **kwargs: Any) -> list[StageFacts]:
        """The facts that `explain` reports for every device loop."""
        return [program.facts(items) for program, items in self._programs_for(args, kwargs)]

    def tunings(self, *args: Any, **kwargs: Any) -> list[Tuning]:
        """The tuning records of the device loops for these arguments; nothing is measured."""
        found = [known for program, items in self._programs_for(args, kwargs) if (known := program.known(items)) is not None]
        return [*([self.host.tuning(args, kwargs, measure=False)] if isinstance(self.host, TunableHost) else []), *found]

    def ready(self, *args: Any, **kwargs: Any) -> list[Callable[[], None]]:
        """These programs, each bound to its arguments, for timing them without the rest of a call."""
        return [program.ready(items) for program, items in self._programs_for(args, kwargs)]

    def measurers(self, *args: Any, **kwargs: Any) -> list[tuple[Space, ProgramMeasurer]]:
        """All candidates of each device loop, and the measurer for them; for benchmarks of the tuner."""
        return [program.measurer(items) for program, items in self._programs_for(args, kwargs)]

    def with_launches(self, launch: Callable[[LaunchSite, dict[str, Any]], None], *, measure: bool = False) -> Callable[..., Any]:
        """The function, with `launch` called for each device loop and its variables. Tunables have the best known values; with
        `measure`, they are measured first, as in any call."""

        def at(number: int, given: dict[str, Any]) -> None:
            host: Host = current("a kernel")
            site = self._site(number, host)
            launch(site, given)
            host.passed(number, site.programs.open_blocks)

        with making:
            function = self._parts.host([functools.partial(at, number) for number in range(len(self.sites))])

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._chosen(args, kwargs, measure), running(Host(self._options.blocks, self._tunable)):
                return function(*args, **kwargs)

        return run

    def _chosen(self, args: Sequence[Any], kwargs: Mapping[str, Any], measure: bool) -> AbstractContextManager[None]:
        """Within this context, tunables have the values for these arguments."""
        if not isinstance(self.host, TunableHost):
            return nullcontext()
        token = activate(self.machine)
        try:
            return self.host.chosen(args, kwargs, measure=measure)
        finally:
            deactivate(token)

    def _programs_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[LoopStage, Items]]:
        found: list[tuple[LoopStage, Items]] = []
        with torch.no_grad():  # the programs are looked at, not run, so a kernel without a gradient has them too
            self.with_launches(lambda site, given: found.append(site.asked(given)))(*args, **kwargs)
        return found
