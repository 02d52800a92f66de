"""Files of safetensors that hold ragged tensors beside plain ones.

In: tensors by name and a path. Out: a file; and from the file the tensors.
The values of a ragged tensor are the entry of its name, so that every reader of such files finds them; structures are entries of
their own (one for tensors that share it), and the metadata under `serrate` says which belongs to which.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError, DtypeError, FormatError
from serrate.tensor.hints import Hints
from serrate.tensor.interop.compositions import package
from serrate.tensor.interop.saving import load_rows, load_structure, rows_apart
from serrate.tensor.jagged import JaggedTensor
from serrate.tensor.structure import Structure

_KEY = "serrate"
_VERSION = 1


def save_safetensors(
    tensors: Mapping[str, JaggedTensor | Tensor], path: str | PathLike[str], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes ragged and plain tensors to a file of safetensors; `metadata` are words of your own, kept with it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_safetensors({"words": JaggedTensor.from_list([torch.zeros(2), torch.zeros(1)])}, f"{folder}/batch.safetensors")
    ...     load_safetensors(f"{folder}/batch.safetensors")["words"].shape
    (2, r0)
    """
    library = package("save_safetensors", "safetensors.torch")
    if metadata is not None and _KEY in metadata:
        raise CallError(f"save_safetensors: the word {_KEY!r} of the metadata is kept for structures: give yours another name")
    entries: dict[str, Tensor] = {}
    structures: list[Structure] = []
    forms: list[list[dict[str, Any]]] = []
    ragged: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if name.startswith(f"{_KEY}."):
            raise CallError(f"save_safetensors: names beginning with {_KEY!r} and a dot are kept for structures, got {name!r}")
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
            raise CallError(f"save_safetensors: {name!r} is a {type(tensor).__name__}, not a JaggedTensor or a tensor")
    about = {"version": _VERSION, "structures": forms, "tensors": ragged}
    try:
        library.save_file(_own_memory(entries), path, metadata={**(metadata or {}), _KEY: json.dumps(about)})
    except KeyError as error:
        # The library looks dtypes up in a table, and says no more than which one is not there.
        raise DtypeError(f"save_safetensors: safetensors has no dtype for {error}: convert the values first") from error


def load_safetensors(path: str | PathLike[str], *, device: torch.device | str = "cpu") -> dict[str, JaggedTensor | Tensor]:
    """The tensors of a file that `save_safetensors` wrote, or the plain tensors of any other file of safetensors.

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
            f"load_safetensors: {path} is of version {about.get('version')}, and this serrate reads version {_VERSION}: "
            "read it with the serrate that wrote it"
        )
    try:
        structures = [_take_structure(form, f"{_KEY}.{k}", entries) for k, form in enumerate(about["structures"])]
        ragged = {
            name: JaggedTensor(entries[name], structures[each["structure"]], hints=Hints(**each["hints"]))
            for name, each in about["tensors"].items()
        }
    except (KeyError, IndexError, TypeError) as error:
        raise FormatError(f"load_safetensors: {path} does not hold what its metadata says: {error!r}") from error
    # Moved only now: everything was checked on the CPU, where that costs one pass.
    found = {name: ragged.get(name, tensor) for name, tensor in entries.items() if not name.startswith(f"{_KEY}.")}
    moved = {id(structure): structure.to(device) for structure in structures}
    return {
        name: JaggedTensor(each.values.to(device), moved[id(each.structure)], hints=each.hints)
        if isinstance(each, JaggedTensor)
        else each.to(device)
        for name, each in found.items()
    }


def _put_structure(structure: Structure, name: str, entries: dict[str, Tensor]) -> list[dict[str, Any]]:
    form = []
    for axis, (dim, rows) in enumerate(zip(structure.dims, structure.rows, strict=True)):
        offsets, starts, (depth, packed, room), _ = rows_apart(rows)
        for level, tensor in enumerate(offsets):
            entries[f"{name}.{axis}.offsets.{level}"] = tensor
        if starts is not None:
            entries[f"{name}.{axis}.starts"] = starts
        form.append({"dim": dim, "levels": len(offsets), "depth": depth, "packed": packed, "room": room})
    return form


def _take_structure(form: list[dict[str, Any]], name: str, entries: dict[str, Tensor]) -> Structure:
    found = []
    for axis, each in enumerate(form):
        offsets = tuple(entries[f"{name}.{axis}.offsets.{level}"] for level in range(each["levels"]))
        starts = entries.get(f"{name}.{axis}.starts")
        found.append(load_rows(offsets, starts, (each["depth"], each["packed"], each["room"]), {}))
    return load_structure(tuple(found), tuple(each["dim"] for each in form))


def _own_memory(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same entries, contiguous and none sharing memory with another, which the format does not allow."""
    seen: set[int] = set()
    found = {}
    for name, tensor in entries.items():
        tensor = tensor.detach().contiguous()
        if tensor.numel() and tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        found[name] = tensor
    return found
