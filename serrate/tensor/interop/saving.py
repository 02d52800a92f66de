"""Ragged tensors in pickles, in `torch.save` files, and in safetensors files.

In: a ragged tensor. Out: its parts, without the unused rest of their storage; and the same tensor, read back.
"""

from __future__ import annotations

import copyreg
import json
from collections.abc import Mapping
from dataclasses import asdict, astuple
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError, DtypeError, FormatError
from serrate.tensor.checks.validate import CheckTime, check_dim, check_layout, check_offsets, check_products, check_starts
from serrate.tensor.hints import Hints
from serrate.tensor.interop.common import package
from serrate.tensor.jagged import JaggedTensor
from serrate.tensor.keyed_tensor import KeyedJaggedTensor
from serrate.tensor.rows import Rows, rows_of
from serrate.tensor.structure import Ahead, Structure
from serrate.tensor.sync import on_host

_Facts = dict[tuple[str, int], float]
_Form = tuple[int, bool, int | None]


def load_rows(offsets: tuple[Tensor, ...], starts: Tensor | None, form: _Form, facts: _Facts) -> Rows:
    """Rows from a file: offsets of every level, `form` = (depth, packed, room), and known facts.

    >>> load_rows((torch.tensor([0, 2, 3]),), None, (1, True, None), {})
    2 > 3
    >>> load_rows((torch.tensor([0, 2, 1]),), None, (1, True, None), {})
    Traceback (most recent call last):
    serrate.errors.StructureError: offsets must not decrease: offsets[2] = 1 < offsets[1] = 2
    """
    depth, packed, room = form
    if not isinstance(depth, int) or not isinstance(packed, bool) or not isinstance(room, int | None):
        raise FormatError(f"the form of rows is (depth, packed, room), not {form!r}: the file is damaged")
    check_layout("offsets", offsets)
    if not 1 <= depth <= len(offsets) <= depth + 1 or any(level.dim() != 1 for level in offsets):
        raise FormatError(f"rows of {depth} levels cannot have {len(offsets)} tensors of offsets: the file is damaged")
    readable = all(map(on_host, offsets))
    # Facts from the file are trusted only if the offsets cannot be read.
    rows = rows_of(tuple(level.contiguous() for level in offsets), depth, packed, starts, room, {} if readable else facts)
    if readable:
        rows.note("total", depth - 1, check_offsets(offsets[:depth], None)[-1].end)
        if rows.columns is not None:
            check_offsets(offsets[depth:], None)
            if rows.columns.shape != offsets[depth - 1].shape:
                raise FormatError("rows and the counts of their columns differ in number: the file is damaged")
            check_products(rows.host_lengths(depth - 1, "loading rows"), rows.host_lengths(depth, "loading rows"))
    if starts is not None:
        check_layout("starts", (starts,))
        if readable and on_host(starts):
            check_starts(starts, rows.host_sizes("loading rows"), None, CheckTime.NOW)
    return rows


def load_structure(rows: tuple[Rows, ...], dims: tuple[int, ...], ahead: Ahead | None = None) -> Structure:
    """A structure from a file.

    >>> load_structure((Rows((torch.tensor([0, 2]),)),), (0,))
    Structure(1 > ?)
    """
    if not all(isinstance(each, Rows) for each in rows):
        raise FormatError("a structure must contain rows: the file is damaged")
    for dim in dims:
        check_dim(dim)
    found = Structure.independent(*(Structure((each,), (dim,)) for each, dim in zip(rows, dims, strict=True)))
    return found.transposed(ahead)


def load_tensor(values: Tensor, structure: Structure, hints: tuple[str | None, ...]) -> JaggedTensor:
    """A ragged tensor from a file.

    >>> load_tensor(torch.zeros(2), Structure.from_lengths(torch.tensor([2])), ("uniform", None, None)).hints.distribution
    'uniform'
    """
    if not isinstance(values, Tensor) or not isinstance(structure, Structure):
        raise FormatError("a ragged tensor must contain values and a structure: the file is damaged")
    return JaggedTensor(values, structure.to(values.device), hints=Hints(*hints))


def load_keyed(
    keys: tuple[str, ...], rows: JaggedTensor, weights: Tensor | None, rows_per_key: tuple[int, ...]
) -> KeyedJaggedTensor:
    """A keyed tensor from a file.

    >>> load_keyed(("a",), JaggedTensor.from_lengths(torch.arange(2), [2, 0]), None, (2,))["a"].tolist()
    [[0, 1], []]
    """
    if not isinstance(rows, JaggedTensor) or not isinstance(weights, Tensor | None):
        raise FormatError("a keyed tensor must contain rows and weights: the file is damaged")
    return KeyedJaggedTensor(keys, rows, weights=weights, rows_per_key=rows_per_key)


def load_arguments(rows: Rows) -> tuple[Any, ...]:
    """The arguments of `load_rows`. Derived arrays are not saved: they can be recomputed.

    >>> load_arguments(Rows((torch.tensor([0, 2]),)))
    ((tensor([0, 2]),), None, (1, True, None), {})
    """
    return rows.offsets, rows.starts, (rows.depth, rows.packed, rows.room), rows.facts()


def _reduce_rows(rows: Rows) -> tuple[Any, ...]:
    return load_rows, load_arguments(rows)


def _reduce_structure(structure: Structure) -> tuple[Any, ...]:
    return load_structure, (structure.rows, structure.dims, structure.ahead)


def _reduce_tensor(jt: JaggedTensor) -> tuple[Any, ...]:
    return load_tensor, (jt.values, jt.structure, astuple(jt.hints))


def _reduce_keyed(keyed: KeyedJaggedTensor) -> tuple[Any, ...]:
    return load_keyed, (keyed.keys(), keyed.flat, keyed.weights, keyed.rows_per_key)


copyreg.pickle(Rows, _reduce_rows)
copyreg.pickle(Structure, _reduce_structure)
copyreg.pickle(JaggedTensor, _reduce_tensor)
copyreg.pickle(KeyedJaggedTensor, _reduce_keyed)
torch.serialization.add_safe_globals([load_rows, load_structure, load_tensor, load_keyed])


_KEY = "serrate"
_VERSION = 1


def save_safetensors(
    tensors: Mapping[str, JaggedTensor | KeyedJaggedTensor | Tensor],
    path: str | PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes ragged, keyed and plain tensors to a safetensors file; `metadata` is stored with them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_safetensors({"words": JaggedTensor.from_list([torch.zeros(2), torch.zeros(1)])}, f"{folder}/batch.safetensors")
    ...     load_safetensors(f"{folder}/batch.safetensors")["words"].shape
    (2, r0)
    """
    library = package("save_safetensors", "safetensors.torch")
    if metadata is not None and _KEY in metadata:
        raise CallError(f"save_safetensors: the metadata key {_KEY!r} is reserved for structures: use another one")
    entries: dict[str, Tensor] = {}
    structures: list[Structure] = []
    forms: list[list[dict[str, Any]]] = []
    ragged: dict[str, dict[str, Any]] = {}
    keyed: dict[str, dict[str, Any]] = {}
    for name, each in tensors.items():
        if name.startswith(f"{_KEY}."):
            raise CallError(f"save_safetensors: names that begin with {_KEY!r} and a dot are reserved, got {name!r}")
        tensor: Any = each
        if isinstance(each, KeyedJaggedTensor):
            keyed[name] = {"keys": each.keys(), "rows_per_key": each.rows_per_key}
            if each.weights is not None:
                entries[f"{_KEY}.weights.{name}"] = each.weights
            tensor = each.flat
        if isinstance(tensor, JaggedTensor):
            number = next((k for k, known in enumerate(structures) if known is tensor.structure), len(structures))
            if number == len(structures):
                structures.append(tensor.structure)
                forms.append(_put_structure(tensor.structure, f"{_KEY}.{number}", entries))
            ragged[name] = {"structure": number, "hints": asdict(tensor.hints)}
            entries[name] = tensor.values
        elif isinstance(tensor, Tensor):
            entries[name] = tensor
        else:
            raise CallError(f"save_safetensors: {name!r} is a {type(tensor).__name__}, not a ragged, keyed or plain tensor")
    about = {"version": _VERSION, "structures": forms, "tensors": ragged, "keyed": keyed}
    try:
        library.save_file(_own_memory(entries), path, metadata={**(metadata or {}), _KEY: json.dumps(about)})
    except KeyError as error:
        # The library looks dtypes up in a table; its KeyError holds only the missing dtype.
        raise DtypeError(f"save_safetensors: safetensors has no dtype for {error}: convert the values first") from error


def load_safetensors(
    path: str | PathLike[str], *, device: torch.device | str = "cpu"
) -> dict[str, JaggedTensor | KeyedJaggedTensor | Tensor]:
    """The tensors of a file that `save_safetensors` wrote, or the plain tensors of any other safetensors file.

    >>> load_safetensors("nowhere.safetensors")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    FileNotFoundError: ...
    """
    library = package("load_safetensors", "safetensors")
    with library.safe_open(path, framework="pt", device="cpu") as file:
        text = (file.metadata() or {}).get(_KEY)
        entries: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- not a mapping
    nothing: dict[str, Any] = {"version": _VERSION, "structures": [], "tensors": {}}
    about = nothing if text is None else json.loads(text)
    if about.get("version") != _VERSION:
        raise FormatError(
            f"load_safetensors: {path} has format version {about.get('version')}, but this serrate reads version {_VERSION}: "
            "read it with the serrate that wrote it"
        )
    try:
        structures = [_take_structure(form, f"{_KEY}.{k}", entries) for k, form in enumerate(about["structures"])]
        ragged = {
            name: JaggedTensor(entries[name], structures[each["structure"]], hints=Hints(**each["hints"]))
            for name, each in about["tensors"].items()
        }
    except (KeyError, IndexError, TypeError) as error:
        raise FormatError(f"load_safetensors: the contents of {path} do not match its metadata: {error!r}") from error
    # Moved only now: checks on the CPU are one pass each.
    found = {name: ragged.get(name, tensor) for name, tensor in entries.items() if not name.startswith(f"{_KEY}.")}
    moved = {id(structure): structure.to(device) for structure in structures}

    def placed(name: str, each: JaggedTensor | Tensor) -> JaggedTensor | KeyedJaggedTensor | Tensor:
        if not isinstance(each, JaggedTensor):
            return each.to(device)
        rows = JaggedTensor(each.values.to(device), moved[id(each.structure)], hints=each.hints)
        form = about.get("keyed", {}).get(name)
        if form is None:
            return rows
        weights = entries.get(f"{_KEY}.weights.{name}")
        weights = None if weights is None else weights.to(device)
        return load_keyed(tuple(form["keys"]), rows, weights, tuple(form["rows_per_key"]))

    return {name: placed(name, each) for name, each in found.items()}


def _put_structure(structure: Structure, name: str, entries: dict[str, Tensor]) -> list[dict[str, Any]]:
    form = []
    for axis, (dim, rows) in enumerate(zip(structure.dims, structure.rows, strict=True)):
        offsets, starts, (depth, packed, room), _ = load_arguments(rows)
        for level, tensor in enumerate(offsets):
            entries[f"{name}.{axis}.offsets.{level}"] = tensor
        if starts is not None:
            entries[f"{name}.{axis}.starts"] = starts
        ahead = [0] * rows.levels if structure.ahead is None else structure.ahead[axis]
        form.append({"dim": dim, "levels": len(offsets), "depth": depth, "packed": packed, "room": room, "ahead": ahead})
    return form


def _take_structure(form: list[dict[str, Any]], name: str, entries: dict[str, Tensor]) -> Structure:
    found = []
    for axis, each in enumerate(form):
        offsets = tuple(entries[f"{name}.{axis}.offsets.{level}"] for level in range(each["levels"]))
        starts = entries.get(f"{name}.{axis}.starts")
        found.append(load_rows(offsets, starts, (each["depth"], each["packed"], each["room"]), {}))
    ahead = tuple(tuple(each.get("ahead", [0] * each["levels"])) for each in form)
    return load_structure(tuple(found), tuple(each["dim"] for each in form), ahead)


def _own_memory(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same entries, contiguous and without shared memory, which the format does not allow."""
    seen: set[int] = set()
    found = {}
    for name, tensor in entries.items():
        tensor = tensor.detach().contiguous()
        if tensor.numel() and tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        found[name] = tensor
    return found
