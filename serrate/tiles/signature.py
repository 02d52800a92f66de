"""Signatures: what the program of a device loop is made for.

In: what a loop uses, by name. Out: its form (dtypes, numbers of dims, how rows are described, what is no number), the sizes in it
that may be compiled in, and what a trace read of functions, classes, modules and objects.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch

from serrate.errors import DeviceError, GradientError
from serrate.frontend.dependencies import PLAIN, snapshot
from serrate.frontend.kernel.machine import BlockSize
from serrate.frontend.trace import described
from serrate.tensor import JaggedTensor
from serrate.tensor.structure import Structure
from serrate.tensor.torch_private import has_tangent, version
from serrate.tiles.memory import rows_key
from serrate.tiles.sources import CONTAINERS, Container, Env, Path


class Fixed(int):
    """A size that the user wants compiled in."""


# --- forms ---------------------------------------------------------------------------------------------------------------


class Same:
    """Something that cannot be hashed, as a key: the very same thing."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        # Kept alive, so that nothing else has its identity.
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def signature(env: Env) -> tuple[Any, dict[Path, int]]:
    """The form of what a loop uses, and the sizes in it that may be compiled in.

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
            # Two blocks of one size are the same only if they are of one axis.
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
    """How the rows of a structure are described."""
    dtypes = [(r.form, *(each.dtype for each in r.offsets), None if r.starts is None else r.starts.dtype) for r in structure.rows]
    return (structure.dims, structure.ahead, *dtypes)


def widths(env: Env) -> set[Path]:
    """The sizes of dims of ragged tensors that no row has a part in: they are the same in every batch."""
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
    """Which dims have size 1: a tile that reads one reads its one element in every lane, so programs are made for it."""
    return tuple([size == 1 for size in x.shape])


def counts_of(env: Env) -> set[int]:
    """Numbers of rows, their lengths, and first dims, that are no other dim: an integer that is one will change with them."""
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
    """What stands for something that is no number, tensor or container."""
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return described(value) if isinstance(value, complex) else value


# --- what a trace reads of functions, classes, modules and objects -----------------------------------------------------------


def is_read(value: Any) -> bool:
    """Whether a trace may read more of something than itself: functions, classes, modules and objects of the user's."""
    if isinstance(value, (*PLAIN, torch.Tensor, JaggedTensor, Container, *CONTAINERS, types.BuiltinFunctionType)):
        return False
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    return module.split(".")[0] not in ("torch", "serrate", "builtins")


def nothing() -> None:
    """A function that reads nothing."""


class Reading:
    """What a trace read of some objects: the same objects give the same program as long as it is as it was."""

    def __init__(self, objects: Sequence[Any], names: frozenset[str], number: int) -> None:
        self.number = number
        """Programs are made for a reading, and know it by this number."""
        self._count = len(objects)
        self._snapshot, self._tensors = snapshot(nothing, tuple(objects), names)
        self._versions = [version(_values(t)) for t in self._tensors]

    def holds(self, objects: Sequence[Any]) -> bool:
        """Whether everything is as it was. Tensors are the same ones, and were not written to: a trace holds their numbers."""
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
    """The names of attributes that code, and the functions made in it, may read."""
    return frozenset(code.co_names).union(*(attributes(c) for c in code.co_consts if isinstance(c, types.CodeType)))


# --- what programs take --------------------------------------------------------------------------------------------------


def check(x: torch.Tensor) -> None:
    """Raises for tensors that compiled kernels do not take."""
    if not (x.is_cpu or x.is_cuda):
        raise DeviceError(f"compiled kernels run on a CPU or a CUDA device, and an argument is on {x.device}")
    if x.requires_grad and torch.is_grad_enabled():
        raise GradientError("a kernel has no gradient: call it under torch.no_grad(), or with detached tensors")
    if has_tangent(x):
        raise GradientError("a kernel has no forward-mode gradient, but an argument has a tangent: call it with detached tensors")


def check_rows(x: JaggedTensor) -> None:
    """Raises for rows that are not what they were when they were checked, and are wrong: offsets may have been written to."""
    structure = x.structure
    if not all(rows.verified() for rows in structure.rows):
        structure.check_rows(x.values)
