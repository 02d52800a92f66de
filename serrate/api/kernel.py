"""`@serrate.kernel`: functions with loops over tiles.

In: a Python function that uses `serrate.language`. Out: an object that is called like it.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from serrate import settings
from serrate.api.kernel_gradients import DerivedGradients, KernelPair, check_backward
from serrate.api.pickling import global_name
from serrate.errors import BackendError, CallError, IgnoredWarning, StrategyError, choices
from serrate.frontend.kernel.machine import activate, deactivate
from serrate.frontend.leaves import Leaf, mapped
from serrate.interpret.interpreter import interpret, prepare
from serrate.interpret.source import AnnotatedKernel
from serrate.modes import is_batch_invariant
from serrate.schedule.heuristic import invariant
from serrate.schedule.plan import Plan
from serrate.schedule.strategies import STRATEGIES
from serrate.schedule.target import CPU
from serrate.settings import EFFORTS
from serrate.tensor import JaggedTensor
from serrate.tiles.host import CompiledKernel
from serrate.tiles.stage import Options
from serrate.tuner.policy import USUAL, Policy, retuning
from serrate.tuner.record import Tuning

if TYPE_CHECKING:
    from serrate.report.data import Report

BACKENDS = ("cpp", "reference", "triton")
LAUNCH = {"num_stages": tuple(range(1, 9)), "num_warps": (1, 2, 4, 8, 16, 32)}
"""Configuration keys for GPU programs, and their values."""
FOR_GPUS = (
    "flatten_loops", "indexing", "l2_groupings", "load_eviction_policies", "loop_orders", "pid_type", "range_flattens",
    "range_multi_buffers", "range_num_stages", "range_unroll_factors", "range_warp_specializes", "reduction_loops",
    "static_ranges",
)  # fmt: skip
"""Helion's other configuration keys; they have no effect yet."""
SETTINGS = (
    "allow_warp_specialize", "autotune_accuracy_check", "autotune_compile_timeout", "autotune_log_level",
    "autotune_max_generations", "autotune_precompile", "autotune_random_seed", "debug_dtype_asserts", "dot_precision",
    "ignore_warnings", "index_dtype", "print_output_code", "use_default_config",
)  # fmt: skip
"""Helion's other decorator arguments; they have no effect yet."""


@dataclass(frozen=True, init=False)
class Config:
    """Performance settings of a kernel, which do not change its meaning.

    `block_sizes` are for the dims of `hl.tile` and for `hl.register_block_size` that the kernel leaves open, in the order in
    which they first run; None leaves one open. `lanes` sets them by axis name, as shown by `Kernel.program`, for the compiler
    only: `lanes={"k": 64}`. On a GPU, `num_warps` is the number of warps of each program, and `num_stages` the most blocks that
    its loops keep in flight; where they are left out, the plan decides. Helion's other names (`indexing`, `pid_type` ...) are
    accepted; the first compilation warns once that they have no effect yet, and `Kernel.explain` lists them.

    >>> Config(block_sizes=[16, None], num_warps=4)
    Config(block_sizes=(16, None), strategy=None, others={'num_warps': 4})
    >>> Config(num_warps=3)
    Traceback (most recent call last):
    serrate.errors.CallError: num_warps must be one of 1, 2, 4, 8, 16, 32, got 3
    >>> Config(block_size=[16])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    serrate.errors.CallError: Config has no block_size: did you mean 'block_sizes'? Choose from block_sizes, strategy, ...
    """

    block_sizes: tuple[int | None, ...] = ()
    strategy: str | None = None
    others: dict[str, Any] = field(default_factory=dict, hash=False)

    def __init__(
        self,
        *,
        block_sizes: Sequence[int | None] = (),
        strategy: str | None = None,
        jagged_strategy: str | None = None,
        **others: Any,
    ) -> None:
        for size in block_sizes:
            if size is not None and (not isinstance(size, int) or size < 1):
                raise CallError(f"block sizes must be positive ints or None, got {size!r}")
        for name in others.keys() - _KNOWN:
            raise CallError(f"Config has no {name}: {choices(name, ('block_sizes', 'strategy', 'jagged_strategy', *_KNOWN))}")
        lanes = others.get("lanes", {})
        if not isinstance(lanes, Mapping) or any(not isinstance(n, int) or n < 1 for n in lanes.values()):
            raise CallError(f"lanes must map axis names to positive ints, got {lanes!r}")
        for name in LAUNCH.keys() & others.keys():
            given = others[name]
            if given is not None and (type(given) is not int or given not in LAUNCH[name]):
                raise CallError(f"{name} must be one of {', '.join(map(str, LAUNCH[name]))}, got {given!r}")
        object.__setattr__(self, "block_sizes", tuple(block_sizes))
        object.__setattr__(self, "strategy", _strategy(strategy, jagged_strategy))
        object.__setattr__(self, "others", others)


_KNOWN = ("lanes", *LAUNCH, *FOR_GPUS)


def _strategy(strategy: str | None, jagged_strategy: str | None) -> str | None:
    if strategy is not None and jagged_strategy is not None and strategy != jagged_strategy:
        raise CallError(f"strategy= and jagged_strategy= are the same, but got {strategy!r} and {jagged_strategy!r}")
    found = strategy if strategy is not None else jagged_strategy
    if found is not None and found not in STRATEGIES:
        raise StrategyError(f"unknown strategy {found!r}: {choices(found, tuple(STRATEGIES))}")
    return found


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, IgnoredWarning, stacklevel=4)


class Kernel:
    """A function with loops over tiles. Created by `serrate.kernel`.

    Calls run compiled; under `SERRATE_CHECK=1` they run on the interpreter, which checks every store and index.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        config: Config,
        asked: Mapping[str, Any] = types.MappingProxyType({}),
        policy: Policy = USUAL,
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self.fn = function
        """The plain Python function."""
        self.config = config
        self.asked = dict(asked)
        """Other arguments of the decorator."""
        self.policy = policy
        """When plans are measured."""
        self._compiled: dict[tuple[str | None, bool], CompiledKernel] = {}
        self._now: tuple[settings.Settings | None, bool, CompiledKernel | None] = (None, False, None)
        """The settings and the mode at the last call, and the compiled kernel for them; None for the interpreter."""

    @functools.cached_property
    def _source(self) -> AnnotatedKernel:
        return prepare(self.fn)

    def on(self, backend: str) -> CompiledKernel:
        """The kernel compiled for a backend: "cpp", "triton", or "reference", which runs its loop program with plain torch. It is
        called like the kernel, and has `source` and `program`."""
        if backend not in BACKENDS:
            raise BackendError(f"no backend is called {backend!r}: {choices(backend, BACKENDS)}")
        return self._on(backend)

    def _on(self, backend: str | None) -> CompiledKernel:
        """The kernel on a backend; None for the default backend of its arguments' device."""
        alone = is_batch_invariant()
        if (backend, alone) not in self._compiled:
            for name, value in self._without_effect().items():
                _warn_once(f"{name}={value!r} has no effect on a kernel yet")
            others, strategy, static = self.config.others, self.config.strategy, self.asked.get("static_shapes")
            if alone:
                strategy, _ = invariant(strategy, {}, CPU, self.fn.__name__)
            options = Options(
                strategy,
                backend,
                self.config.block_sizes,
                lanes=others.get("lanes", {}),
                warps=others.get("num_warps"),
                stages=others.get("num_stages"),
                static_shapes=static,
                alone=alone,
                policy=self.policy,
            )
            # Concurrent threads all get the one that was created first.
            self._compiled.setdefault((backend, alone), CompiledKernel(self.fn, options))
        return self._compiled[backend, alone]

    def _without_effect(self) -> dict[str, Any]:
        """Requested settings that do nothing on any device."""
        effective = ("lanes", "static_shapes", *LAUNCH)
        return {n: x for n, x in {**self.config.others, **self.asked}.items() if n not in effective}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        read, alone, compiled = self._now
        if read is not settings.current() or alone is not is_batch_invariant():
            _, _, compiled = self._now = self._chosen()
        if compiled is None:
            return interpret(self._source, args, kwargs, block_sizes=self.config.block_sizes, check=True)
        # Inlined from `CompiledKernel.__call__`, to keep warm calls short.
        token = activate(compiled.machine)
        try:
            return compiled.host(*args, **kwargs)
        finally:
            deactivate(token)

    def _chosen(self) -> tuple[settings.Settings, bool, CompiledKernel | None]:
        now = settings.current()
        compiled = None if now.check else self._on(now.backend)
        if compiled is not None:
            compiled.refresh()
        return now, is_batch_invariant(), compiled

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The programs for these arguments; nothing is run.

        >>> import serrate, torch
        >>> import serrate.language as hl
        >>> @serrate.kernel
        ... def double(x):
        ...     out = torch.empty_like(x)
        ...     for tile in hl.tile(x.size(0)):
        ...         out[tile] = x[tile] * 2
        ...     return out
        >>> " * 2.0f)" in double.on("cpp").source(torch.ones(3))
        True
        """
        return self._on(settings.current().backend).source(*args, **kwargs)

    def program(self, *args: Any, **kwargs: Any) -> str:
        """The kernel's device loops as tile programs, before tile sizes are chosen."""
        return self._on(settings.current().backend).program(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments; if there are several outermost loops, that of the last."""
        return self._on(settings.current().backend).variants(*args, **kwargs)[-1].plan

    def explain(self, *args: Any, html: str | Path | None = None, **kwargs: Any) -> Report:
        """A report on what runs for these arguments, and why: rows, plan, tiles, guards, other candidates, source, and settings
        without effect. It prints as text, and its fields hold the same facts. With `html`, it is also written to that file as a
        page. Nothing is run or measured."""
        from serrate.report.collect import report, rows_of_arguments  # imported here because `import serrate` must stay fast

        facts = self._on(settings.current().backend).facts(*args, **kwargs)
        ignored = [f"{name}={value!r}" for name, value in self._without_effect().items()]
        if not any(stage.backend == "triton" for stage in facts):
            ignored += [f"{name}={value!r}" for name, value in self.config.others.items() if name in LAUNCH]
        return report(self.fn.__name__, facts, rows_of_arguments(self.fn, args, kwargs), ignored, html)

    def tunings(self, *args: Any, **kwargs: Any) -> list[Tuning]:
        """The tuning records of the device loops for these arguments; nothing is run or measured."""
        return self._on(settings.current().backend).tunings(*args, **kwargs)

    def tune(self, *args: Any, effort: str | None = None, **kwargs: Any) -> list[Tuning]:
        """Measures plans on a call with these arguments, even if they were measured before; returns the records."""
        with retuning(effort):
            self(*args, **kwargs)
        return self.tunings(*args, **kwargs)

    def interpreted(self, *, tile: int | str | None = None, check: bool = True) -> Callable[..., Any]:
        """The kernel on the reference interpreter, with tiles of this many lanes where the kernel leaves them open.

        `"whole"` makes every loop a single tile. The result must not depend on it.

        >>> import serrate, torch
        >>> import serrate.language as hl
        >>> @serrate.kernel
        ... def double(x):
        ...     out = torch.empty_like(x)
        ...     for tile in hl.tile(x.size(0)):
        ...         out[tile] = x[tile] * 2
        ...     return out
        >>> double.interpreted(tile=2)(torch.arange(3))
        tensor([0, 2, 4])
        """
        if tile is not None and tile != "whole" and (not isinstance(tile, int) or tile < 1):
            raise CallError(f'tile= must be a positive int or "whole", got {tile!r}')
        sizes = self.config.block_sizes if tile is None else ()
        return lambda *args, **kwargs: interpret(self._source, args, kwargs, block_sizes=sizes, block=tile, check=check)

    def __reduce__(self) -> str | tuple[Callable[..., Any], tuple[Any, ...]]:
        """Like a function, it is copied and pickled by name if its module holds it; otherwise, with its function and settings."""
        return global_name(self) or (type(self), (self.fn, self.config, self.asked, self.policy))

    def __repr__(self) -> str:
        return f"<kernel {self.__name__}>"  # type: ignore[attr-defined]


class DerivedKernel(Kernel):
    """A kernel whose gradients are derived from its loops. Created by `serrate.kernel(backward="auto")`."""

    def __init__(self, function: Callable[..., Any], config: Config, asked: Mapping[str, Any], policy: Policy) -> None:
        super().__init__(function, config, asked, policy)
        self._derived = DerivedGradients(function, lambda: self._on(settings.current().backend))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._derived.are_wanted(args, kwargs):
            return super().__call__(*args, **kwargs)
        if settings.current().check:
            # What is recorded is compiled; the interpreter checks the call first, on copies.
            copies = mapped((args, kwargs), _detached_copy)
            interpret(self._source, *copies, block_sizes=self.config.block_sizes, check=True)
        return self._derived(args, kwargs)


def _detached_copy(leaf: Leaf) -> Leaf:
    return leaf.with_values(leaf.values.detach().clone()) if isinstance(leaf, JaggedTensor) else leaf.detach().clone()


class DifferentiableKernel(Kernel):
    """A kernel with a backward kernel. Created by `serrate.kernel(backward=...)`."""

    def __init__(
        self, function: Callable[..., Any], config: Config, asked: Mapping[str, Any], policy: Policy, backward: Callable[..., Any]
    ) -> None:
        super().__init__(function, config, asked, policy)
        self.backward = backward
        """The function that computes the gradients."""
        self._pair = KernelPair(function.__name__, super().__call__, function, backward)

    def __reduce__(self) -> str | tuple[Callable[..., Any], tuple[Any, ...]]:
        return global_name(self) or (type(self), (self.fn, self.config, self.asked, self.policy, self.backward))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._pair(args, kwargs)


def kernel(
    function: Callable[..., Any] | None = None,
    *,
    backward: Callable[..., Any] | Literal["auto"] | None = None,
    config: Config | None = None,
    strategy: str | None = None,
    jagged_strategy: str | None = None,
    static_shapes: bool | None = None,
    effort: str | None = None,
    autotune_effort: str | None = None,
    tune: str | None = None,
    **others: Any,
) -> Any:
    """A decorator, with or without arguments, for functions with loops over tiles (`serrate.language`).

    The loops are compiled on the first call with a new signature. `strategy` (or `jagged_strategy`, an alias) determines how
    ragged rows become loops, and `config` fixes block sizes; neither changes the meaning of a kernel. Sizes are compiled in
    until they change; `static_shapes=True` always compiles them in, `static_shapes=False` never, unless the kernel needs one.
    Helion's other settings are accepted and have no effect, as in `Config`.

    If no strategy is named, plans are measured on the first call with a new kind of arguments, and the fastest is cached:
    `effort` (or `autotune_effort`) is "none", "quick" (3 s on a CPU) or "full"; `tune` is "first_call", "background" or "never".

    `backward` computes gradients: a kernel, or any function, that gets the arguments, the results and the gradients of the
    results, and returns one gradient for each argument that is a floating-point tensor. `backward="auto"` derives gradients from
    the loops, and raises `GradientError`, naming the line, if one of them cannot be differentiated.

    >>> import serrate, torch
    >>> import serrate.language as hl
    >>> @serrate.kernel
    ... def row_sums(jt):
    ...     out = torch.empty(jt.num_rows)
    ...     for tile_b in hl.tile(jt.num_rows):
    ...         total = hl.zeros([tile_b])
    ...         for tile_k in hl.tile(jt.max_length):
    ...             total = total + jt[tile_b, tile_k].sum(1)
    ...         out[tile_b] = total
    ...     return out
    >>> row_sums(serrate.JaggedTensor.from_lengths(torch.arange(5.0), [2, 0, 3]))
    tensor([1., 0., 9.])
    """
    if autotune_effort is not None and autotune_effort not in EFFORTS:
        raise CallError(f"autotune_effort={autotune_effort!r}: {choices(autotune_effort, EFFORTS)}")
    policy = Policy(tune, effort if effort is not None else autotune_effort)
    if static_shapes not in (None, True, False):
        raise CallError(f"static_shapes is True, False or None: got {static_shapes!r}")
    for name in others.keys() - {*SETTINGS, *_KNOWN}:
        own = ("backward", "config", "strategy", "jagged_strategy", "static_shapes", "effort", "autotune_effort", "tune")
        known = (*own, *SETTINGS, *_KNOWN)
        raise CallError(f"serrate.kernel has no setting {name}: {choices(name, known)}")
    base = config or Config()
    if not isinstance(base, Config):
        raise CallError(f"config= is a serrate.Config, not a {type(base).__name__}")
    chosen = _strategy(strategy, jagged_strategy) or base.strategy
    of_config = {name: value for name, value in others.items() if name in _KNOWN}
    given = {"static_shapes": static_shapes, **others}
    asked = {name: value for name, value in given.items() if value is not None and name not in _KNOWN}
    made = Config(block_sizes=base.block_sizes, strategy=chosen, **base.others | of_config)
    if backward is None:
        return Kernel(function, made, asked, policy) if function is not None else lambda f: Kernel(f, made, asked, policy)
    check_backward(backward)

    def differentiable(f: Callable[..., Any]) -> Kernel:
        if isinstance(backward, str):
            return DerivedKernel(f, made, asked, policy)
        return DifferentiableKernel(f, made, asked, policy, backward)

    return differentiable(function) if function is not None else differentiable
