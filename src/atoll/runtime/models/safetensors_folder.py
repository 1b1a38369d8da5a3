"""A folder of safetensors: its index, and each tensor with its shape and dtype, not read yet."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from atoll.base.documents import read_json
from atoll.base.errors import PlanError
from atoll.runtime.models.unread import StoredTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "C64": torch.complex64,
    }
)
"""Dtypes of safetensors that are read. Others are those of quantized weights."""
_QUANTIZED: Mapping[str, str] = MappingProxyType({"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"})


def has_weights(folder: Path) -> bool:
    """Return True if a folder holds safetensors."""
    return (Path(folder) / INDEX).is_file() or (Path(folder) / SINGLE).is_file()


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder's files by their names, not read yet.

    Raises PlanError for a folder without safetensors, and for files that are damaged.
    """
    return {name: _stored(name, handle) for name, handle in _open_files(folder).items()}


def _stored(name: str, handle: Any) -> StoredTensor:
    piece = handle.get_slice(name)
    said = str(piece.get_dtype())

    def read(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        ranges = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        found: Tensor = handle.get_slice(name)[ranges] if ranges else handle.get_tensor(name)
        return found

    dtype = _DTYPES.get(said) or getattr(torch, _QUANTIZED.get(said, "uint8"))
    return StoredTensor(name, tuple(piece.get_shape()), dtype, read)


def _open_files(folder: Path) -> dict[str, Any]:
    """Return each name in the files with its open file."""
    from safetensors import SafetensorError, safe_open

    if not has_weights(folder):
        raise PlanError(
            f"{folder} is neither a checkpoint nor a folder with {SINGLE} or {INDEX}; give one of a model that was "
            "saved as safetensors, or by Atoll"
        )
    listed = _listed(folder / INDEX) if (folder / INDEX).is_file() else {SINGLE: None}
    opened: dict[str, Any] = {}
    for file, names in listed.items():
        try:
            handle = safe_open(folder / file, framework="pt")
            held = handle.keys()
        except (OSError, ValueError, SafetensorError) as error:
            raise PlanError(f"{folder / file} cannot be read as safetensors: {error}") from error
        lacking = sorted(set(names or ()) - set(held))
        if lacking:
            raise PlanError(
                f"{folder / INDEX} lists {len(lacking)} tensors of {file} that it does not have, such as "
                f"{reprlib.repr(lacking[0])}; copy index and files again from one place"
            )
        opened.update(dict.fromkeys(held, handle))
    return opened


def _listed(index: Path) -> dict[str, list[str]]:
    """Return each file with its names of tensors, from an index. Raises PlanError for an invalid index.

    A file must be a plain name in the index's folder: the author of the index must not choose other files to read.
    """
    try:
        listed = read_json(index)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{index} is not an index of safetensors: {type(error).__name__}: {error}; copy it again"
        ) from error
    if not isinstance(listed, dict) or not listed:
        raise PlanError(f"{index}: weight_map is {reprlib.repr(listed)}, not a table of names and files")
    found: dict[str, list[str]] = {}
    for name, file in listed.items():
        if not (isinstance(file, str) and file and Path(file).name == file and "\0" not in file):
            raise PlanError(f"{index}: {reprlib.repr(name)} is in {reprlib.repr(file)}, not a file of that folder")
        found.setdefault(file, []).append(name)
    return dict(sorted(found.items()))
