"""A forward and a backward program as one `autograd.Function`.

In: a fusion, and which of its inputs require gradients. Out: a binding that records what torch's autograd needs. The backward
program is compiled when it first runs, once for all lengths, like any other. If gradients of gradients are wanted
(`create_graph=True`), the backward program that saves nothing but inputs runs instead: it is a fusion of those inputs, and is
differentiated by the same path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from serrate.autograd.adjoint import Gradients, gradients
from serrate.autograd.saved import Backward, Save, backward_of, forward_of
from serrate.errors import GradientError
from serrate.ir.fusion import Fusion
from serrate.runtime.dispatch import Binding, Leaves
from serrate.tensor import JaggedTensor
from serrate.tensor.torch_private import is_batched, is_transformed, version


class Differentiable:
    """A fusion with gradients of some of its inputs."""

    def __init__(self, fusion: Fusion, wanted: Sequence[int], compiled: Callable[[Fusion], Any], save: Save = "auto") -> None:
        self.fusion, self.wanted, self._compiled = fusion, tuple(wanted), compiled
        self._made: Gradients = gradients(fusion, wanted)
        results = [view.tensor.memory.name for view in fusion.outputs]
        self.backward = backward_of(self._made, results, save)
        self.pure = backward_of(self._made, results, "inputs")
        self.forward: Any = compiled(forward_of(fusion, self.backward.saved))
        self.inputs = tuple(sorted({*self.backward.inputs, *self.pure.inputs}))
        """The inputs that either backward program needs."""

    @functools.cached_property
    def backward_program(self) -> Any:
        return self._compiled(self.backward.fusion)

    @functools.cached_property
    def pure_program(self) -> Any:
        """As `backward_program`, from inputs only."""
        return self._compiled(self.pure.fusion)

    def bound(self, binding: Binding, sources: Sequence[int | torch.Tensor], finish: Callable[[list[Any]], Any]) -> Binding:
        """A binding that records gradients; `binding` runs the forward program and returns a list."""

        def run(leaves: Leaves, into: Sequence[torch.Tensor] = ()) -> Any:
            if len(into):
                raise GradientError(
                    f"{self.fusion.name}: out= and in-place operations have no gradient, and an argument requires one: use the "
                    "result, or call it under torch.no_grad()"
                )
            args = [leaves[s] if isinstance(s, int) else s for s in sources]
            call = _Recorded(self, binding, leaves, args)
            made = _apply(call, *(args[k] for k in self.wanted))
            return finish([own if jt is None else jt.with_values(own) for own, jt in zip(made, call.ragged, strict=True)])

        return run


class _Recorded:
    """One call: its programs, and the form of its results."""

    def __init__(self, owner: Differentiable, binding: Binding, leaves: Leaves, args: list[torch.Tensor]) -> None:
        self.owner, self.binding, self.leaves, self.args = owner, binding, leaves, args
        self.ragged: list[JaggedTensor | None] = []


class _Function(torch.autograd.Function):
    """Runs the forward program, and later the backward program."""

    @staticmethod
    def forward(ctx: Any, call: _Recorded, *wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        owner = call.owner
        results = call.binding(call.leaves)
        count = len(owner.fusion.outputs)
        saved = [x.values if isinstance(x, JaggedTensor) else x for x in results[count:]]
        call.ragged = [x if isinstance(x, JaggedTensor) else None for x in results[:count]]
        values = tuple(x.values if isinstance(x, JaggedTensor) else x for x in results[:count])
        # Numbers that describe rows, and other integers, are compared by identity: they are kept as they are.
        kept = [call.args[k] for k in owner.inputs]
        floats = [k for k, x in enumerate(kept) if x.dtype.is_floating_point]
        ctx.owner, ctx.count, ctx.floats = owner, len(floats), floats
        ctx.kept = [None if k in floats else x for k, x in enumerate(kept)]
        ctx.versions = [None if x is None else version(x) for x in ctx.kept]
        # Gradients that are zero whatever arrives, such as those of rounded numbers.
        constant = [c and k is None for c, k in zip(owner._made.connected, owner.backward.found, strict=True)]
        ctx.zeros = [(x.shape, x.dtype, x.device) if zero else None for x, zero in zip(wanted, constant, strict=True)]
        ctx.save_for_backward(*(kept[k] for k in floats), *saved)
        ctx.mark_non_differentiable(*(v for v, k in zip(values, owner._made.given, strict=True) if k is None))
        call.leaves, call.args = [], []
        return values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        owner: Differentiable = ctx.owner
        if any(map(is_batched, grads)):
            raise GradientError(
                f"{owner.fusion.name}: a compiled program takes one gradient at a time, not a batch of them: pass "
                "is_grads_batched=False to torch.autograd.grad, vectorize=False to jacobian"
            )
        held = [*ctx.kept]
        stored = ctx.saved_tensors
        for k, x in zip(ctx.floats, stored, strict=False):
            held[k] = x
            if x.data_ptr() == 0 and x.numel() and not is_transformed(x):
                raise GradientError(
                    f"{owner.fusion.name}: the memory of a tensor that the backward program needs was freed since the call, as "
                    "FSDP frees weights between passes: gather them again before backward()"
                )
        for x, before in zip(ctx.kept, ctx.versions, strict=True):
            if x is not None and version(x) != before:
                raise GradientError(
                    f"{owner.fusion.name}: integers that the backward program needs, such as offsets, were changed in place "
                    "since the call: copy them first"
                )
        again = torch.is_grad_enabled()
        part: Backward = owner.pure if again else owner.backward
        named = dict(zip(owner.backward.saved, stored[ctx.count :], strict=True))
        # The forward program has warned of inputs that must be copied.
        args = [held[owner.inputs.index(k)].contiguous() for k in part.inputs]
        args += [named[name] for name in part.saved]
        args += [grads[k].contiguous() for k in part.given]
        found: list[Any] = []
        if any(k is not None for k in part.found):
            program = owner.pure_program if again else owner.backward_program
            made = program(*args)
            # For an input that is ragged in the program, such as a saved tensor, take the gradient of its values.
            found = [x.values if isinstance(x, JaggedTensor) else x for x in (made if isinstance(made, tuple) else (made,))]
        zeros = [None if z is None else torch.zeros(z[0], dtype=z[1], device=z[2]) for z in ctx.zeros]
        return (None, *(zero if k is None else found[k] for k, zero in zip(part.found, zeros, strict=True)))


_apply: Callable[..., tuple[torch.Tensor, ...]] = _Function.apply
