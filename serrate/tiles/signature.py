"""Signatures: what the program of a device loop is specialised on.

In: the variables that a loop uses, by name. Out: their form (dtypes, ranks, row formats, constants), the sizes that may be
compiled in, and what a trace read of functions, classes, modules and objects.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch

from serrate.errors import DeviceError, GradientError
from serrate.frontend.dependencies import snapshot
from serrate.frontend.kernel.machine import BlockSize
from serrate.frontend.python_objects import PLAIN
from serrate.frontend.trace import described
from serrate.tensor import JaggedTensor
from serrate.tensor.structure import Structure
from serrate.tensor.torch_private import has_tangent, version
from serrate.tiles.memory import rows_key
from serrate.tiles.sources import CONTAINERS, Container, Env, Path


class Fixed(int):
    """A size that the user asked to be compiled in."""


# --- forms ---------------------------------------------------------------------------------------------------------------


class ByIdentity:
    """An unhashable object as a key, compared by identity."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        # Kept alive, so that its id is not reused.
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def signature(env: Env) -> tuple[Any, dict[Path, int]]:
    """The form of a loop's variables, and the sizes among them that may be compiled in.

    >>> signature({"x": torch.zeros(2, 3), "n": 4, "scale": 0.5})
    ((('x', torch.float32, (False, False)), ('n', <class 'int'>), ('scale', <class 'float'>)), {('x', 'shape', 1): 3, ('n',): 4})
    """
    form: list[Any] = []
    sizes: dict[Path, int] = {}
    axes: list[Any] = []
    rows: dict[int, Any] = {}
    first: dict[Any, str] = {}
    for name, value in env.items():
        if isinstance(value, torch.Tensor):
            check(value)
            form.append((name, value.dtype, single(value)))
            for k, size in enumerate(value.shape[1:], 1):
                sizes[name, "shape", k] = size
        elif isinstance(value, JaggedTensor):
            values, structure = value.values, value.structure
            check(values)
            structure.check_values(values)
            if id(structure) not in rows:
                check_rows(value)
                rows[id(structure)] = rows_form(structure)
            form.append((name, values.dtype, single(values)[1:], rows[id(structure)], first.setdefault(rows_key(value), name)))
            for k, size in enumerate(values.shape[1:], 1):
                sizes[name, "values", "shape", k] = size
        elif not isinstance(value, (int, float)):
            form.append((name, type(value), key_of(value)))
        elif isinstance(value, BlockSize):
            # Two blocks of equal size are the same only if they belong to the same axis.
            own = next((k for k, axis in enumerate(axes) if axis is value.axis), len(axes))
            axes.append(value.axis)
            form.append((name, BlockSize, int(value), own))
        elif isinstance(value, (bool, Fixed)):
            form.append((name, type(value), value))
        elif isinstance(value, int):
            form.append((name, type(value)))
            sizes[(name,)] = value
        else:
            form.append((name, type(value)))
    return tuple(form), sizes


def rows_form(structure: Structure) -> tuple[Any, ...]:
    """The form of a structure's rows."""
    dtypes = [(r.form, *(each.dtype for each in r.offsets), None if r.starts is None else r.starts.dtype) for r in structure.rows]
    return (structure.dims, structure.ahead, *dtypes)


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


def single(x: torch.Tensor) -> tuple[bool, ...]:
    """Which dims have size 1. Programs are specialised on that, because such dims broadcast to all lanes of a tile."""
    return tuple([size == 1 for size in x.shape])


def counts_of(env: Env) -> set[int]:
    """Numbers of rows, lengths and first dims that are not also another dim: an equal integer will vary with them."""
    found: set[int] = set()
    widths: set[int] = set()
    for value in env.values():
        if isinstance(value, JaggedTensor):
            found |= {value.num_rows, value.num_groups, value.max_length, value.total_elements}
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
    """What a trace read of some objects; as long as it is unchanged, the same program serves them."""

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


def check(x: torch.Tensor) -> None:
    """Raises for tensors that compiled kernels do not accept."""
    if not (x.is_cpu or x.is_cuda):
        raise DeviceError(f"compiled kernels run on a CPU or a CUDA device, but an argument is on {x.device}")
    if x.requires_grad and torch.is_grad_enabled():
        raise GradientError("a kernel has no gradient: call it under torch.no_grad(), or with detached tensors")
    if has_tangent(x):
        raise GradientError("a kernel has no forward-mode gradient, but an argument has a tangent: call it with detached tensors")


def check_rows(x: JaggedTensor) -> None:
    """Raises if rows are invalid now: their offsets may have been written to since they were checked."""
    structure = x.structure
    if not all(rows.verified() for rows in structure.rows):
        structure.check_rows(x.values)
