"""Compiled fusions: fusion -> stages -> results.

In: a fusion, and the arguments of calls. Out: results. `Compiled` cuts a fusion into stages, binds arguments to it and runs it;
its gradients are compiled fusions too. Importing this module installs `Fusion.evaluate` and `Fusion.compile`.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from serrate.analysis.library_calls import library_calls
from serrate.autograd.function import Differentiable
from serrate.autograd.saved import Save, check_save
from serrate.engine import (
    BACKENDS,
    default_backend,
)
from serrate.errors import BackendError, StrategyError, StructureMismatch
from serrate.fusion_stage import FusionStage, LibraryStage
from serrate.ir import hooks
from serrate.ir.fusion import Fusion
from serrate.ir.tile import TileProgram
from serrate.ir.traversal import arrays_of
from serrate.ir.values import Tensor
from serrate.lower.stages import stages
from serrate.runtime.arguments import NOTHING_KNOWN, BoundCall, KnownRows
from serrate.runtime.bind import Binder
from serrate.runtime.dispatch import Binding, CallLeaves, Key, Leaves, Prepared, Seen, bound, key_of, refuse_capture, remember
from serrate.runtime.indices import require_inside
from serrate.runtime.launch import CppExecutable, TensorExecutable, load_together
from serrate.runtime.locks import making
from serrate.runtime.results import Result, ResultReader, known_rows, remember_rows
from serrate.runtime.seeds import drawing, placeholders
from serrate.schedule.by_hand import by_hand
from serrate.schedule.hand import schedule_of
from serrate.schedule.loop_handle import LoopHandle
from serrate.schedule.plan import Plan
from serrate.schedule.strategies import STRATEGIES, check
from serrate.schedule.strategies.library import LIBRARY
from serrate.tensor import JaggedTensor, Structure
from serrate.tensor.checks.deferred import Arrival, install_device_checks
from serrate.tensor.hints import NO_HINTS, Hints
from serrate.tensor.torch_private import is_captured, version
from serrate.tuner.policy import NEVER, Policy, paused, retuning
from serrate.tuner.record import Tuning

if TYPE_CHECKING:
    from serrate.report.collect import StageFacts
    from serrate.report.data import Report


class Compiled:
    """A fusion compiled for one backend. Plans are chosen by strategy, or by the rows of a call when none is named.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None, 2), torch.float32), f.input((None,), torch.int64)
    ...     f.output(ops.sum(ops.as_nested(x, offsets), 1))
    >>> f.compile("reference")(torch.ones(3, 2), torch.tensor([0, 2, 2, 3]))
    tensor([[2., 2.],
            [0., 0.],
            [1., 1.]])
    """

    def __init__(
        self,
        fusion: Fusion,
        backend: str | None = None,
        strategy: str | None = None,
        *,
        save: Save = "auto",
        effort: str | None = None,
        tune: str | None = None,
        policy: Policy | None = None,
        **options: Any,
    ) -> None:
        if backend is not None and backend not in BACKENDS:
            raise BackendError(f"no backend is called {backend!r}; there are {', '.join(BACKENDS)}")
        if strategy is not None:
            check(strategy, options)
        elif options:
            raise StrategyError(f"{', '.join(options)}: options belong to a strategy; name one of {', '.join(STRATEGIES)}")
        check_save(save)
        self.fusion, self.backend, self.strategy, self.options, self.save = fusion, backend, strategy, options, save
        self.policy = policy or Policy(tune, effort)
        self.binder = Binder(fusion)
        # Raises, before anything is built, if no values can hold a result.
        self.results = tuple(ResultReader(self.binder, view) for view in fusion.results)
        self.result_names = frozenset(view.tensor.memory.name for view in fusion.results)
        cut = stages(fusion)
        shares = sum(isinstance(s, TileProgram) for s in cut)
        self.stages = tuple(
            FusionStage(self, s, shares) if isinstance(s, TileProgram) else LibraryStage.of(s, self.binder) for s in cut
        )
        self.hand = schedule_of(fusion) if strategy is None and fusion.schedule is not None else None
        for stage in self.stages:
            if isinstance(stage, FusionStage) and self.hand is not None:
                # Report an illegal schedule here, not at the first call.
                by_hand(stage.naive, self.hand, BACKENDS[backend or "reference"])
        given = {t.name for t in self.binder.inputs}
        hidden = {a.name for view in fusion.results for a in arrays_of(view.tensor.logical)} - given
        first = self.stages[0]
        self._bindings: OrderedDict[Key, Binding] = OrderedDict()
        self._seen = Seen()
        self._gradients: dict[tuple[int, ...], Differentiable] = {}
        """With gradients of these arguments."""
        self._whole = first if len(self.stages) == 1 and isinstance(first, FusionStage) and not hidden else None

    def __call__(self, *args: Any) -> Any:
        if is_captured():
            refuse_capture()
        args, ragged = self._plain(args)
        leaves = CallLeaves()
        key = key_of(args, leaves, [], _unknown)
        every = args if len(args) == len(self.binder.inputs) - self.binder.seeds else ()
        offsets = [every[k] for k in self.binder.offsets if every and isinstance(every[k], torch.Tensor)]
        for each in offsets:
            # Their values are part of the key of a binding.
            key += (id(each), version(each))
        exact = tuple(key)
        binding = self._bindings.get(exact)
        if binding is None:
            known = known_rows(ragged)
            if not self._seen.note(exact, offsets):
                return self.once(args, range(len(args)), _handed_out, known=known)([*args])
            binding = self.bind(args, range(len(args)), _handed_out, known=known)
            remember(self._bindings, exact, binding)
        return binding(leaves)

    def _plain(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[tuple[Structure, int]]]:
        """Arguments with the values of every JaggedTensor, and the tensors that describe its rows, in its place; and the
        structures, each with the number of the first argument that describes it."""
        ragged: list[tuple[Structure, int]] = []
        if not any(type(arg) is JaggedTensor for arg in args):
            return args, ragged
        found: list[Any] = []
        seen: dict[int, JaggedTensor] = {}
        declared = {r.values: r for r in self.fusion.ragged}
        for k, arg in enumerate(args):
            at, entry = len(found), declared.get(len(found))
            if not isinstance(arg, JaggedTensor):
                found.append(arg)
                continue
            form = arg.structure if entry is None else entry.structure
            if isinstance(form, Structure) and arg.structure.form != form.form:
                raise StructureMismatch(
                    f"argument {k} of {self.fusion.name} was declared with rows like {form}, got {arg.structure}: convert it, as "
                    "with jt.contiguous(), or declare it with structure=jt.structure"
                )
            seen[at] = arg
            if entry is None or entry.like is None:
                ragged.append((arg.structure, at + 1))
                found += [arg.values, *arg.structure.buffers()]
                continue
            found.append(arg.values)
            other = seen.get(entry.like)
            if other is not None and not other.structure.agrees(arg.structure, f"arguments of {self.fusion.name}"):
                raise StructureMismatch(
                    f"argument {k} of {self.fusion.name} must have the rows of another: {other.structure}, got {arg.structure}"
                )
        return tuple(found), ragged

    def bind(
        self,
        args: Sequence[Any],
        sources: Sequence[int | torch.Tensor],
        finish: Callable[[list[Any]], Any] = list,
        *,
        hints: tuple[Structure, Hints] | None = None,
        keep: Sequence[object] = (),
        known: KnownRows = NOTHING_KNOWN,
    ) -> Binding:
        """A binding for these arguments, and for others with the same shapes and offsets.

        `sources` locate each argument among the leaves of a call, and `finish` turns the results into the return value. Results
        over the structure in `hints` get those hints; `keep` lives as long as the binding; `known` are rows that need no check.
        Seeds are drawn at every call, and are its last leaves.
        """
        wanted = _requiring_gradients(args)
        if wanted:
            return self._differentiable(args, wanted, sources, finish, hints, keep, known)
        if not self.binder.seeds:
            return self._bind(args, sources, finish, hints, keep, known)
        drawn = range(-self.binder.seeds, 0)
        binding = self._bind(self._seeded(args), (*sources, *drawn), finish, hints, keep, known)
        return drawing(binding, self.binder.seeds, _device_of(args))

    def _differentiable(
        self,
        args: Sequence[Any],
        wanted: tuple[int, ...],
        sources: Sequence[int | torch.Tensor],
        finish: Callable[[list[Any]], Any],
        hints: tuple[Structure, Hints] | None,
        keep: Sequence[object],
        known: KnownRows,
        once: bool = False,
    ) -> Binding:
        """A binding that records gradients of some arguments, or one for a single call."""
        remember_rows(known, args)
        own = self._gradients.get(wanted)
        if own is None:
            with making:
                own = self._gradients.get(wanted)
                if own is None:
                    own = self._gradients[wanted] = Differentiable(self.fusion, wanted, self._like_this, self.save)
        drawn = range(-self.binder.seeds, 0)
        every: Sequence[int | torch.Tensor] = (*sources, *drawn)
        with torch.no_grad():
            if once and drawn:
                # The seeds are among the leaves.
                binding = functools.partial(own.forward._unbound, every, list, hints, known, False)
            elif once:
                binding = own.forward.once(args, every, hints=hints, known=known)
            else:
                binding = own.forward.bind(self._seeded(args), every, hints=hints, keep=keep, known=known)
        recorded = own.bound(binding, every, finish)
        return drawing(recorded, len(drawn), _device_of(args)) if drawn else recorded

    def _like_this(self, fusion: Fusion) -> Compiled:
        """Another fusion, compiled in the same way. One that is derived from a library call need not be such a call, and then has
        its usual plan."""
        if self.strategy == LIBRARY:
            call = self.options.get("call")
            found = [library_calls(stage) for stage in stages(fusion) if isinstance(stage, TileProgram)]
            if not all(calls if call is None else call in calls for calls in found):
                return Compiled(fusion, self.backend, save=self.save, policy=NEVER)
        return Compiled(fusion, self.backend, self.strategy, save=self.save, policy=self.policy, **self.options)

    def is_outlined(self, args: Sequence[Any]) -> bool:
        """Whether `rerun` serves calls with the outline of this one: it records no gradients and draws no seeds, and takes the
        arguments as they are."""
        is_plain = bool(args) and all(isinstance(arg, torch.Tensor) and arg.is_contiguous() for arg in args)
        return is_plain and not self.binder.seeds and not _requiring_gradients(args)

    def rerun(
        self,
        args: Sequence[Any],
        finish: Callable[[list[Any]], Any],
        hints: tuple[Structure, Hints] | None,
        known: KnownRows,
        sizes: dict[Any, Any],
    ) -> Any:
        """A call with the outline of an earlier one; `sizes` is what those have left."""
        call = self.binder.rebind(args, known, args[0].device)
        call.sizes = sizes
        if hints is not None:
            call.hints = hints[1]
        if self._whole is None:
            return self._run_staged(call, finish, hints)
        results = self._whole.outlined(call) if hints is None else None
        if results is None:
            return self._run_whole(call, finish, hints, again=False)
        return self._finished(call, results, finish)

    def once(
        self,
        args: Sequence[Any],
        sources: Sequence[int | torch.Tensor],
        finish: Callable[[list[Any]], Any] = list,
        *,
        hints: tuple[Structure, Hints] | None = None,
        known: KnownRows = NOTHING_KNOWN,
    ) -> Binding:
        """As `bind`, for a single call: nothing is prepared for others."""
        wanted = _requiring_gradients(args)
        if wanted:
            return self._differentiable(args, wanted, sources, finish, hints, (), known, once=True)
        seeds = self.binder.seeds
        if not seeds:
            return lambda leaves, into=(): self._run(args, finish, hints, known, again=False)
        every = (*sources, *range(-seeds, 0))
        return drawing(functools.partial(self._unbound, every, finish, hints, known, False), seeds, _device_of(args))

    def _seeded(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments, and something for the seeds that are drawn in a call."""
        return [*args, *placeholders(self.binder.seeds, _device_of(args))] if self.binder.seeds else args

    def _bind(
        self,
        args: Sequence[Any],
        sources: Sequence[int | torch.Tensor],
        finish: Callable[[list[Any]], Any],
        hints: tuple[Structure, Hints] | None,
        keep: Sequence[object],
        known: KnownRows,
    ) -> Binding:
        call = self._called(args, known, hints)
        clean = all(given is arg for given, arg in zip(call.args, args, strict=True))
        ready = None if self._whole is None or not clean else self._whole.bound(call)
        indices = None if ready is None else self._index_places(ready, args, sources)
        if self._whole is None and clean and args:
            return functools.partial(self._staged, sources, finish, hints, known, {})
        if ready is None or indices is None:
            return functools.partial(self._unbound, sources, finish, hints, known, True)
        results, count = _hinted(ready.results, hints), len(self.fusion.outputs)
        found, require = [r.place for r in results[count:]], functools.partial(require_inside, self.fusion)
        # Offsets are compared by identity.
        keep = (*keep, *(args[k] for k in self.binder.offsets))
        return bound(
            ready,
            sources,
            args,
            results=results[:count],
            require=require if found else None,
            found=found,
            finish=finish,
            indices=indices,
            keep=keep,
        )

    def _index_places(
        self, ready: Prepared, args: Sequence[Any], sources: Sequence[int | torch.Tensor]
    ) -> list[tuple[int, int]] | None:
        """The arrays of indices that programs read from, each with the argument that it is; None if one must be made in every
        call."""
        found = [(k, self.binder.place_of(array)) for k, array in ready.indices]
        places = [(k, place) for k, place in found if place is not None and isinstance(sources[place], int)]
        whole = len(places) == len(found) and all(args[place].is_contiguous() and args[place].numel() > 1 for _, place in places)
        return places if whole else None

    def ready(self, *args: Any) -> Binding:
        """A binding for these arguments that returns a list of results."""
        return self.bind(args, range(len(args)))

    def _staged(
        self,
        sources: Sequence[int | torch.Tensor],
        finish: Callable[[list[Any]], Any],
        hints: tuple[Structure, Hints] | None,
        known: KnownRows,
        sizes: dict[Any, Any],
        leaves: Leaves,
        into: Sequence[torch.Tensor] = (),
    ) -> Any:
        """As `rerun`, given the leaves of a call and where its arguments are among them."""
        return self.rerun([leaves[s] if isinstance(s, int) else s for s in sources], finish, hints, known, sizes)

    def _unbound(
        self,
        sources: Sequence[int | torch.Tensor],
        finish: Callable[[list[Any]], Any],
        hints: tuple[Structure, Hints] | None,
        known: KnownRows,
        again: bool,
        leaves: Leaves,
        into: Sequence[torch.Tensor] = (),
    ) -> Any:
        """As `_run`, given the leaves of a call and where its arguments are among them."""
        return self._run([leaves[s] if isinstance(s, int) else s for s in sources], finish, hints, known, again)

    def _run(
        self,
        args: Sequence[Any],
        finish: Callable[[list[Any]], Any],
        hints: tuple[Structure, Hints] | None,
        known: KnownRows,
        again: bool,
    ) -> Any:
        """Runs a call without a binding: the first with these rows, or one that must be bound anew every time (stages with
        computed extents, checks of indices, arguments that must be copied first). `again` if there may be others like it."""
        call = self._called(args, known, hints)
        if self._whole is not None:
            return self._run_whole(call, finish, hints, again)
        return self._run_staged(call, finish, hints)

    def _run_staged(self, call: BoundCall, finish: Callable[[list[Any]], Any], hints: tuple[Structure, Hints] | None) -> Any:
        """As `_run`, where there are several stages."""
        call, env = self._run_stages(call)
        read = tuple([reader(call) for reader in self.results])
        return self._finished(call, [r.of(env[r.tensor]) for r in _hinted(read, hints)], finish)

    def _run_whole(
        self, call: BoundCall, finish: Callable[[list[Any]], Any], hints: tuple[Structure, Hints] | None, again: bool
    ) -> Any:
        """As `_run`, where one program is the whole fusion."""
        assert self._whole is not None
        ready = self._whole.prepared(call) if again else self._whole.bound(call)
        tensors = self._whole.run(call, call.args, ready)
        return self._finished(call, [r.of(tensors[r.place]) for r in _hinted(ready.results, hints)], finish)

    def _finished(self, call: BoundCall, results: list[Any], finish: Callable[[list[Any]], Any]) -> Any:
        """The return value of a call; raises if its results say that an index was out of range."""
        if self.fusion.index_checks:
            count = len(self.fusion.outputs)
            require_inside(self.fusion, call.args, results[count:])
            del results[count:]
        return finish(results)

    def _called(self, args: Sequence[Any], known: KnownRows, hints: tuple[Structure, Hints] | None) -> BoundCall:
        call = self.binder.bind(args, known)
        if hints is not None:
            call.hints = hints[1]
        return call

    def _run_stages(
        self, call: BoundCall, seen: Callable[[FusionStage, BoundCall, Prepared], None] | None = None
    ) -> tuple[BoundCall, dict[str, torch.Tensor]]:
        """Runs all stages. Returns the call with everything that was computed, and all tensors by name; `seen` is told of each
        stage."""
        computed: dict[str, torch.Tensor] = {}
        call = BoundCall(call.args, call.numbers, call.device, call.known, computed, hints=call.hints, sizes=call.sizes)
        env = dict(zip(self.binder.names, call.args, strict=True))
        self.binder.check(call)
        for stage in self.stages:
            if isinstance(stage, FusionStage):
                inputs = [env[name] for name in stage.input_names]
                ran = None if seen is not None or call.sizes is None else stage.run_new(call, inputs)
                if ran is None:
                    ready = stage.prepared(call)
                    ran = ready.executable, stage.run(call, inputs, ready)
                    if seen is not None:
                        seen(stage, call, ready)
                executable, tensors = ran
                made = {name: tensors[k] for name, k in stage.output_places(executable)}
            else:
                results = stage.run(call, env, self.backend or default_backend(call.device))
                made = {t.name: self._narrowed(call, t, x) for t, x in zip(stage.targets, results, strict=True)}
            computed.update(made)
            env.update(made)
        return call, env

    def _narrowed(self, call: BoundCall, tensor: Tensor, made: torch.Tensor) -> torch.Tensor:
        """The output of a library call; if it is returned to the user, cut to the positions that exist."""
        if tensor.name not in self.result_names:
            return made
        shape = [self.binder.extent(call, d.extent_expr) for d in tensor.storage]
        for dim, size in enumerate(shape if list(made.shape) != shape else ()):
            made = made.narrow(dim, 0, size)
        return made.contiguous()

    def _prepared(self, *args: Any) -> list[Prepared]:
        """The `Prepared` of every stage of a call; runs earlier stages, because later ones need their results."""
        return [ready for _, _, ready in self._visited(*args)]

    def _visited(self, *args: Any, hints: Hints = NO_HINTS) -> list[tuple[FusionStage, BoundCall, Prepared]]:
        """The stages of a call, with what each is called with. Nothing is measured."""
        plain, ragged = self._plain(args)
        call = self.binder.bind(self._seeded(plain), known_rows(ragged))
        call.hints = hints
        found: list[tuple[FusionStage, BoundCall, Prepared]] = []
        with paused():
            if self._whole is not None:
                return [(self._whole, call, self._whole.prepared(call))]
            self._run_stages(call, lambda *visited: found.append(visited))
        return found

    def tunings(self, *args: Any, hints: Hints = NO_HINTS) -> list[Tuning]:
        """What is known about the plans for these arguments, one record per stage unless the user has named a plan; nothing is
        measured."""
        return [known for stage, call, _ in self._visited(*args, hints=hints) if (known := stage.known(call)) is not None]

    def tune(self, *args: Any, effort: str | None = None) -> list[Tuning]:
        """Measures plans for these arguments, also if they were measured before; returns what was found."""
        with retuning(effort):
            self(*args)
        return self.tunings(*args)

    def explain(self, *args: Any, html: str | Path | None = None) -> Report:
        """What runs for these arguments, and why; prints as text. With `html`, it is also written to that file, as a page."""
        from serrate.report.collect import report, rows_of_structures  # imported here because `import serrate` must stay fast

        visited = self._visited(*args)
        rows = rows_of_structures(self.binder.structures(self.fusion, visited[0][1]) if visited else ())
        return report(self.fusion.name, [stage.facts(call, ready) for stage, call, ready in visited], rows, html=html)

    def facts(self, *args: Any, hints: Hints = NO_HINTS) -> list[StageFacts]:
        """What `explain` reads, for every stage."""
        return [stage.facts(call, ready) for stage, call, ready in self._visited(*args, hints=hints)]

    def executables(self, *args: Any) -> list[CppExecutable | TensorExecutable]:
        """The programs that run for these arguments, one for each stage."""
        return [ready.executable for ready in self._prepared(*args)]

    def source(self, *args: Any) -> str:
        """The code that runs for these arguments."""
        return "\n".join(executable.source for executable in self.executables(*args))

    def plan(self, *args: Any) -> Plan:
        """The plan for these arguments; if there are several stages, that of the last."""
        return self.plans(*args)[-1]

    def plans(self, *args: Any) -> list[Plan]:
        """The plans of all stages."""
        return [ready.plan for ready in self._prepared(*args)]


def _hinted(results: tuple[Result, ...], hints: tuple[Structure, Hints] | None) -> tuple[Result, ...]:
    """Adds hints to the results that have the hinted rows."""
    if hints is None:
        return results
    structure, given = hints
    return tuple(r._replace(hints=given) if r.structure is structure else r for r in results)


def _requiring_gradients(args: Sequence[Any]) -> tuple[int, ...]:
    """The arguments whose gradients are recorded."""
    if not torch.is_grad_enabled():
        return ()
    return tuple([k for k, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.requires_grad])


def _device_of(args: Sequence[Any]) -> torch.device:
    return next((arg.device for arg in args if isinstance(arg, torch.Tensor)), torch.device("cpu"))


def _handed_out(results: list[Any]) -> Any:
    """The return value of a fusion."""
    return results[0] if len(results) == 1 else tuple(results)


def _unknown(value: Any, key: list[Any], leaves: Leaves, objects: list[Any]) -> None:
    """A key that matches no other: a fusion takes only tensors, and binding raises for anything else."""
    key.append(object())


def evaluate(fusion: Fusion, *args: Any) -> Any:
    """Runs a fusion on the reference backend, a whole row at a time."""
    return Compiled(fusion, "reference", "maskless", keep_rows=False)(*args)


def prebuild(*calls: tuple[Compiled, tuple[Any, ...]]) -> None:
    """Builds the programs that these calls need in one compiler run; the calls then start without a build.

    >>> from serrate import ir, ops
    >>> programs = []
    >>> for operation in (ops.sum, ops.amax):
    ...     with ir.Fusion() as f:
    ...         x, offsets = f.input((None, 2), torch.float32), f.input((None,), torch.int64)
    ...         f.output(operation(ops.as_nested(x, offsets), 1))
    ...     programs.append(f.compile())
    >>> args = (torch.ones(3, 2), torch.tensor([0, 2, 3]))
    >>> prebuild(*((program, args) for program in programs))
    """
    executables = [executable for compiled, args in calls for executable in compiled.executables(*args)]
    load_together([e for e in executables if isinstance(e, CppExecutable)])


def _draw(fusion: Fusion) -> Any:
    from serrate.draw import draw_fusion  # imported here because `import serrate` must stay fast

    return draw_fusion(fusion)


@functools.cache
def _device_checks() -> ModuleType:
    from serrate.runtime import device_checks  # triton is optional: only its backend may import it

    return device_checks


def _summarise(offsets: Sequence[torch.Tensor]) -> Arrival | None:
    found: Arrival | None = _device_checks().summarise(offsets)
    return found


def _report(numbers: Sequence[torch.Tensor]) -> Arrival | None:
    found: Arrival | None = _device_checks().report(numbers)
    return found


install_device_checks(_summarise, _report)
hooks.install(evaluate=evaluate, compile=Compiled, draw=_draw, loop_handle=LoopHandle)
