"""Reading of `.metadata` without trusting it.

The file is a pickle, and a pickle can name any function of any module. Here each name that Distributed Checkpoint
writes becomes an inert record, and any other name is refused. The records are then checked field by field and converted
to the real values.
"""

from __future__ import annotations

import io
import math
import pickle
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from atoll.base._torch import CHECKPOINT_RECORDS
from atoll.base.errors import DamageError
from atoll.runtime.checkpoint.opcodes import check_opcodes

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@dataclass(frozen=True, slots=True)
class BoxLocation:
    """The location of a box: `length` bytes at `offset` of `file`, a name inside the checkpoint's folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a checkpoint: its tensors, and the location of each of their boxes."""

    tensors: Mapping[str, TensorStorageMetadata]
    stored: Mapping[MetadataIndex, BoxLocation]

    @property
    def metadata(self) -> Metadata:
        """The contents as Distributed Checkpoint's own type."""
        return Metadata(dict(self.tensors), storage_data=dict(self.stored))


def read_contents(path: Path, content: bytes) -> Contents:
    """Read the `content` of the `.metadata` file at `path`.

    Raises DamageError if it contains a name outside the allow-list, or is not consistent.
    """
    try:
        check_opcodes(content)
        return _contents(_RecordUnpickler(content).load())
    except DamageError as error:
        raise DamageError(f"{path}: {error}") from error
    except Exception as error:
        raise DamageError(f"{path} is not a checkpoint's metadata: {type(error).__name__}: {error}") from error


class _Record:
    """An object of the pickle as data: the arguments of its constructor and its state."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        # Also prevents the pickle from writing to the class: that call lacks an argument.
        self.state = state


class _RecordUnpickler(pickle.Unpickler):
    """Returns a record class for each allowed name, new ones for each file."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._classes: dict[tuple[str, str], type] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch" and global_name in _DTYPES:
            return _DTYPES[global_name]
        key = (module_name, global_name)
        if key not in CHECKPOINT_RECORDS:
            raise DamageError(
                f"names {module_name}.{global_name}, which no checkpoint needs: it may run code and was not loaded"
            )
        if key not in self._classes:
            self._classes[key] = type(global_name, (_Record,), {"__slots__": ()})
        return self._classes[key]


def _contents(root: Any) -> Contents:
    fields = _fields(root, "Metadata")
    tensors = {}
    for name, record in _mapping(fields.get("state_dict_metadata"), "state_dict_metadata").items():
        _expect(isinstance(name, str), "a tensor's name is", name)
        if type(record).__name__ == "BytesStorageMetadata":
            raise DamageError(f"{name!r} is a pickled object; Atoll loads tensors only and did not read it")
        tensors[name] = _tensor(name, record)
    stored = {}
    for index, info in _mapping(fields.get("storage_data"), "storage_data").items():
        at = _fields(index, "MetadataIndex")
        stored[MetadataIndex(str(at.get("fqn")), _size(at.get("offset"), "offset"))] = _stored(info)
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            _expect(MetadataIndex(name, chunk.offsets) in stored, f"{name!r}: no file for box", tuple(chunk.offsets))
    return Contents(tensors, stored)


def _tensor(name: str, record: Any) -> TensorStorageMetadata:
    fields = _fields(record, "TensorStorageMetadata")
    properties = _state(fields.get("properties"), "TensorProperties")
    _expect(isinstance(properties, tuple) and bool(properties), f"{name!r} has no properties but", properties)
    dtype = properties[0]
    _expect(isinstance(dtype, torch.dtype), f"{name!r} has dtype", dtype)
    shape = _size(fields.get("size"), f"size of {name!r}")
    chunks: Any = fields.get("chunks")
    _expect(isinstance(chunks, list), f"{name!r} has no list of boxes but", chunks)
    found = [_chunk(name, shape, chunk) for chunk in chunks]
    held = sum(math.prod(chunk.sizes) for chunk in found)
    _expect(held == math.prod(shape), f"{name!r}: boxes hold {held} of {math.prod(shape)} elements")
    _expect(_disjoint(shape, found), f"{name!r}: boxes overlap")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), shape, found)


def _chunk(name: str, shape: torch.Size, record: Any) -> ChunkStorageMetadata:
    fields = _fields(record, "ChunkStorageMetadata")
    offsets = _size(fields.get("offsets"), f"offsets of {name!r}")
    sizes = _size(fields.get("sizes"), f"sizes of {name!r}")
    inside = len(offsets) == len(sizes) == len(shape) and all(
        offset + size <= full for offset, size, full in zip(offsets, sizes, shape, strict=True)
    )
    _expect(inside, f"{name!r}: box at {tuple(offsets)} of {tuple(sizes)} is not inside {tuple(shape)}")
    return ChunkStorageMetadata(offsets, sizes)


def _disjoint(shape: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return True if no two boxes overlap: a sweep along the dim with the most cuts, over the boxes open at each
    position."""
    full = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if not shape or len(full) < 2:
        return len(full) < 2
    dim = max(range(len(shape)), key=lambda dim: len({chunk.offsets[dim] for chunk in full}))
    opened: list[ChunkStorageMetadata] = []
    for chunk in sorted(full, key=lambda chunk: chunk.offsets[dim]):
        opened = [other for other in opened if other.offsets[dim] + other.sizes[dim] > chunk.offsets[dim]]
        if any(_overlap(chunk, other) for other in opened):
            return False
        opened.append(chunk)
    return True


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        max(low, start) < min(low + size, start + length)
        for low, size, start, length in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def _stored(record: Any) -> BoxLocation:
    fields = _fields(record, "_StorageInfo")
    file: Any = fields.get("relative_path")
    offset: Any = fields.get("offset")
    length: Any = fields.get("length")
    plain = (
        isinstance(file, str)
        and bool(file)
        and PurePath(file).name == file
        and file[:1] != "."
        and not set(file) & {"\\", "\0"}
    )
    _expect(plain, "not a plain name of a file in the folder:", file)
    _expect(_counts(offset) and _counts(length), f"range of {file!r}:", (offset, length))
    _expect(not fields.get("transform_descriptors"), f"{file!r} is transformed (compressed), which Atoll does not read")
    return BoxLocation(file, offset, length)


def _size(record: Any, what: str) -> torch.Size:
    _expect(isinstance(record, _Record) and type(record).__name__ == "Size", f"{what} is", record)
    values: Any = record.arguments[0] if len(record.arguments) == 1 else None
    _expect(isinstance(values, tuple) and all(_counts(value) for value in values), f"{what} is", values)
    return torch.Size(values)


def _counts(value: Any) -> bool:
    return type(value) is int and value >= 0


def _state(record: Any, kind: str) -> Any:
    _expect(isinstance(record, _Record) and type(record).__name__ == kind, f"expected {kind}, found", record)
    _expect(hasattr(record, "state"), f"{kind} without content")
    return record.state


def _fields(record: Any, kind: str) -> Mapping[str, Any]:
    return _mapping(_state(record, kind), kind)


def _mapping(value: Any, what: str) -> Mapping[Any, Any]:
    _expect(isinstance(value, dict), f"{what} is not a table but", value)
    table: Mapping[Any, Any] = value
    return table


def _expect(holds: bool, otherwise: str, *found: Any) -> None:
    """Raise DamageError unless a condition holds.

    A few characters of the value are shown, and formatted only then: sixty bytes of a pickle can hold a tuple of tuples
    that takes minutes to print.
    """
    if not holds:
        raise DamageError(" ".join(["broken metadata:", otherwise, *map(reprlib.repr, found)]))
