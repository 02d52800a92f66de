"""What a program is given beside what its loop uses: arrays that are made of others, and memory between its phases.

In: arrays with recipes and tensors of a loop program; ways to the arrays and numbers they are made of. Out: ways to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from serrate.ir.expr import Array, Environment, Symbol
from serrate.ir.values import Role, Tensor
from serrate.runtime.arrays import derive

Env = dict[str, Any]
CPU = torch.device("cpu")


class Derived:
    """The ways to derived arrays and scratch, given ways to plain arrays and to numbers."""

    def __init__(
        self, array: Callable[[str], Callable[[Env], torch.Tensor]], number: Callable[[Symbol], Callable[[Env], int]]
    ) -> None:
        self._array, self._number = array, number

    def array(self, array: Array) -> Callable[[Env], torch.Tensor]:
        """An array as it is at a call; a derived one is made once for each tensor it is made of, and remembered."""
        if array.recipe is None:
            return self._array(array.name)
        sources = {a.name: self._array(a.name) for a in array.sources}
        symbols = {s: self._number(s) for s in array.recipe.symbols}

        def made(env: Env) -> torch.Tensor:
            found = derive(array, {n: get(env) for n, get in sources.items()}, {s: get(env) for s, get in symbols.items()}, CPU)
            return found if found.numel() > 1 else torch.cat([found, found.new_zeros(2 - found.numel())])

        return made

    def scratch(self, tensor: Tensor) -> Callable[[Env], torch.Tensor]:
        """Memory for a tensor that lives inside a program; of a private one only its shape."""
        exprs = [d.extent_expr for d in tensor.storage]
        arrays = {a: self.array(a) for e in exprs for a in e.arrays}
        symbols = {s: self._number(s) for e in exprs for s in e.symbols}
        device = "meta" if tensor.role is Role.PRIVATE else "cpu"

        def made(env: Env) -> torch.Tensor:
            numbers: Mapping[Symbol, int] = {s: int(get(env)) for s, get in symbols.items()}
            known = Environment(numbers, lambda a, k: int(arrays[a](env)[k]))
            return torch.empty([max(0, int(e.evaluate(known))) for e in exprs], dtype=tensor.dtype, device=device)

        return made
