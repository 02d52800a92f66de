"""Signatures: what the program of a device loop is specialised on, besides the form of its call (`runtime/dispatch.py`).

In: the variables of a loop. Out: the sizes that may be compiled in, and snapshots of functions, classes, modules and objects.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from serrate.errors import DeviceError, GradientError
from serrate.frontend.dependencies import snapshot
from serrate.frontend.python_objects import PLAIN
from serrate.frontend.trace import described
from serrate.tensor import JaggedTensor
from serrate.tensor.torch_private import has_tangent, in_dual_level, version
from serrate.tiles.sources import CONTAINERS, Container, Env, Items, Path

# --- forms ---------------------------------------------------------------------------------------------------------------


class ByIdentity:
    """An unhashable object as a key, compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        # Kept alive, so that its id is not reused.
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def sizes_of(items: Items) -> tuple[list[int], tuple[bool, ...]]:
    """The sizes that a program may be specialised on, in the order of `paths_of`, and which dims have size 1.

    A dim of size 1 broadcasts, so programs are always specialised on it.

    >>> sizes_of([torch.zeros(2, 1), 4, 0.5])
    ([2, 1, 4], (False, True))
    """
    dims: list[int] = []
    numbers: list[int] = []
    for x in items:
        if isinstance(x, torch.Tensor):
            dims += x.shape
        elif isinstance(x, JaggedTensor):
            dims += x.values.shape[1:]
        elif isinstance(x, int):
            numbers.append(x)
    single = tuple([size == 1 for size in dims])
    dims += numbers
    return dims, single


def paths_of(names: Sequence[str], items: Items) -> list[Path | None]:
    """The paths of sizes; None for first dims, which are not compiled in.

    >>> paths_of(["x", "n"], [torch.zeros(2, 1), 4])
    [None, ('x', 'shape', 1), ('n',)]
    """
    dims: list[Path | None] = []
    numbers: list[Path | None] = []
    for name, x in zip(names, items, strict=True):
        if isinstance(x, torch.Tensor):
            dims += [(name, "shape", k) if k else None for k in range(x.dim())]
        elif isinstance(x, JaggedTensor):
            dims += [(name, "values", "shape", k) for k in range(1, x.values.dim())]
        elif isinstance(x, int):
            numbers.append((name,))
    return dims + numbers


def widths(env: Env) -> set[Path]:
    """The sizes of regular dims of ragged tensors: they are the same in every batch."""
    found: set[Path] = set()
    for name, value in env.items():
        if isinstance(value, JaggedTensor):
            structure = value.structure
            taken = {
                d for dim, rows in zip(structure.dims, structure.rows, strict=True) for d in range(dim, dim + rows.storage_dims)
            }
            found |= {(name, "values", "shape", k) for k in range(1, value.values.dim()) if k not in taken}
    return found


def counts_of(env: Env) -> set[int]:
    """Numbers of rows, lengths and first dims that do not equal another dim: an integer argument with the same value probably
    varies with them. Numbers that the host does not know are omitted."""
    found: set[int] = set()
    widths: set[int] = set()
    for value in env.values():
        if isinstance(value, JaggedTensor):
            structure, longest = value.structure, value.structure.known_max_length()
            found |= {value.num_rows, value.num_groups, value.values.shape[0]}
            found |= {value.total_elements} if structure.knows_total() else set()
            found |= set() if longest is None else {longest}
            widths |= set(value.values.shape[1:])
        elif isinstance(value, torch.Tensor) and value.dim():
            found |= {value.shape[0], value.shape[0] - 1}
            widths |= set(value.shape[1:])
    return found - widths


def key_of(value: Any) -> Any:
    """The key of a value that is not a number, tensor or container."""
    try:
        hash(value)
    except TypeError:
        return ByIdentity(value)
    return described(value) if isinstance(value, complex) else value


# --- functions, classes, modules and objects -----------------------------------------------------------------------------


def is_read(value: Any) -> bool:
    """Whether a trace may read attributes of a value: a function, class, module or object of the user's."""
    if isinstance(value, (*PLAIN, torch.Tensor, JaggedTensor, Container, *CONTAINERS, types.BuiltinFunctionType)):
        return False
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    return module.split(".")[0] not in ("torch", "serrate", "builtins")


def nothing() -> None:
    """A function that reads nothing."""


class ObjectSnapshot:
    """The contents of objects that a trace has read; the program is valid as long as they are unchanged."""

    def __init__(self, objects: Sequence[Any], names: frozenset[str], number: int) -> None:
        self.number = number
        """Identifies the snapshot in the keys of programs."""
        self._count = len(objects)
        self._snapshot, self._tensors = snapshot(nothing, tuple(objects), names)
        self._versions = [version(_values(t)) for t in self._tensors]

    def holds(self, objects: Sequence[Any]) -> bool:
        """Whether nothing has changed. Tensors must be the same objects and unmodified: a trace may embed their contents."""
        if len(objects) != self._count:
            return False
        found = self._snapshot.read(nothing, objects)
        if type(found) is not tuple:
            return False
        return all(
            now is then and version(_values(now)) == known
            for now, then, known in zip(found, self._tensors, self._versions, strict=True)
        )


def _values(x: torch.Tensor | JaggedTensor) -> torch.Tensor:
    return x.values if isinstance(x, JaggedTensor) else x


def attributes(code: types.CodeType) -> frozenset[str]:
    """The attribute names that code, and the functions defined in it, may read."""
    return frozenset(code.co_names).union(*(attributes(c) for c in code.co_consts if isinstance(c, types.CodeType)))


# --- argument checks -----------------------------------------------------------------------------------------------------


def check_rows(ragged: Iterable[JaggedTensor]) -> None:
    """Raises for rows that do not fit their values or are wrong."""
    for x in ragged:
        structure, values = x._structure, x._values
        if not structure.fits(values):
            structure.check_values(values)
            if not all(rows.verified() for rows in structure.rows):
                structure.check_rows(values)


def check(items: Items) -> None:
    """Raises for tensors that compiled kernels do not accept, and for rows that do not fit their values or are wrong."""
    grad, dual = torch.is_grad_enabled(), in_dual_level()
    for x in items:
        if isinstance(x, JaggedTensor):
            check_rows((x,))
            x = x.values
        elif not isinstance(x, torch.Tensor):
            continue
        if not x.is_cpu and not x.is_cuda:
            raise DeviceError(f"compiled kernels run on a CPU or a CUDA device, but an argument is on {x.device}")
        if grad and x.requires_grad:
            raise GradientError(
                "this kernel has no gradient: write @serrate.kernel(backward=...), or call it under torch.no_grad() or with "
                "detached tensors"
            )
        if dual and has_tangent(x):
            raise GradientError(
                "a kernel has no forward-mode gradient, but an argument has a tangent: call it with detached tensors"
            )
