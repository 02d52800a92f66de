"""What a program is given beside what its loop uses: arrays that are made of others, and memory between its phases.

In: arrays with recipes and tensors of a loop program; ways to the arrays and numbers they are made of. Out: ways to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from serrate.ir.expr import Array, Environment, Symbol
from serrate.ir.values import Role, Tensor
from serrate.runtime.arrays import derive
from serrate.tiles.forms import Env, Given, made_of

CPU = torch.device("cpu")


class Derived:
    """The ways to derived arrays and scratch, given ways to plain arrays and to numbers."""

    def __init__(self, array: Callable[[str], Given], number: Callable[[Symbol], Given]) -> None:
        self._array, self._number = array, number

    def array(self, array: Array) -> Given:
        """An array as it is at a call; a derived one is made once for each tensor it is made of, and remembered."""
        if array.recipe is None:
            return self._array(array.name)
        sources = {a.name: self._array(a.name) for a in array.sources}
        symbols = {s: self._number(s) for s in array.recipe.symbols}

        def made(env: Env) -> torch.Tensor:
            numbers = {s: each.get(env) for s, each in symbols.items()}
            found = derive(array, {n: each.get(env) for n, each in sources.items()}, numbers, CPU)
            return found if found.numel() > 1 else torch.cat([found, found.new_zeros(2 - found.numel())])

        return made_of(made, (*sources.values(), *symbols.values()))

    def scratch(self, tensor: Tensor) -> Given:
        """Memory for a tensor that lives inside a program; of a private one only its shape."""
        exprs = [d.extent_expr for d in tensor.storage]
        arrays = {a: self.array(a) for e in exprs for a in e.arrays}
        symbols = {s: self._number(s) for e in exprs for s in e.symbols}

        def shape(env: Env) -> list[int]:
            numbers: Mapping[Symbol, int] = {s: int(each.get(env)) for s, each in symbols.items()}
            known = Environment(numbers, lambda a, k: int(arrays[a].get(env)[k]))
            return [max(0, int(e.evaluate(known))) for e in exprs]

        return made_of(shape, (*arrays.values(), *symbols.values()), memory=tensor.dtype, private=tensor.role is Role.PRIVATE)
