"""Loading of pieces from a Distributed Checkpoint with any partition."""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from atoll.base.errors import CheckpointError, DamageError, UnverifiedWarning
from atoll.plans.layouts.flat import Shape
from atoll.runtime.checkpoint.archive import Archive
from atoll.runtime.checkpoint.meeting import Meeting, list_problems
from atoll.runtime.checkpoint.metadata import Stored
from atoll.runtime.checkpoint.pieces import Piece


def load_pieces(
    folder: Path,
    pieces: Sequence[Piece],
    *,
    process_group: dist.ProcessGroup | None = None,
    strict: bool = True,
    optional: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Fill every rank's `pieces` from the checkpoint in `folder`. Return the saved state.

    Every rank of `process_group` calls it. A rank reads only the boxes that its pieces touch; values are cast
    to the dtype of the piece. Before any tensor is touched, all names and shapes of all ranks are compared with
    the checkpoint: missing names and different shapes are errors, and if `strict` so are names that no rank requests,
    except those that begin with one of `optional`. Data is compared with its digest first. Only a damaged box can leave
    pieces partly filled. A checkpoint without digests, of an older version, is loaded with an UnverifiedWarning on the
    first rank.

    Raises the same error on every rank: DamageError for a damaged checkpoint, CheckpointError for a missing or
    different one, otherwise RankError.
    """
    folder = Path(folder).absolute()
    meeting = Meeting(process_group)
    lost = f"checkpoint {folder} was not loaded"
    reader = _Reader(folder, pieces)
    state: dict[str, Any] = meeting.round(lost, reader.open, lambda asked: reader.compare(asked, strict, optional))
    meeting.round(lost, reader.read)
    if meeting.rank == 0 and reader.archive.manifest is None:
        warnings.warn(UnverifiedWarning(f"{folder} was not verified: it was saved without digests"), stacklevel=2)
    return state


@dataclass(frozen=True, slots=True)
class _Request:
    """A name that a rank requests."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @staticmethod
    def of(words: Sequence[Any]) -> _Request:
        name, shape, dtype = words
        return _Request(name, tuple(shape), getattr(torch, dtype))

    @property
    def words(self) -> tuple[Any, ...]:
        """The request as plain values for JSON."""
        return self.name, self.shape, str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class _Target:
    """A box of a piece to fill."""

    piece: Piece
    offsets: Shape
    sizes: Shape


class _Reader:
    """Reads the boxes that the pieces of this rank touch: metadata by the allow-list, tensors with `weights_only`."""

    def __init__(self, folder: Path, pieces: Sequence[Piece]) -> None:
        self._folder = folder
        self._pieces = pieces
        self._archive: Archive | None = None
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._targets: list[_Target] = []

    @property
    def archive(self) -> Archive:
        """The opened checkpoint."""
        assert self._archive is not None
        return self._archive

    def open(self) -> list[Any]:
        """Open the checkpoint. Return this rank's requests."""
        self._archive = Archive(self._folder)
        self._tensors = dict(self.archive.contents.tensors)
        requests = (_Request(piece.name, tuple(piece.shape), piece.tensor.dtype) for piece in self._pieces)
        return [request.words for request in dict.fromkeys(requests)]

    def compare(self, asked: Sequence[Any], strict: bool, optional: tuple[str, ...]) -> list[Any]:
        """Compare the requests of all ranks with the checkpoint. Return the saved state for each rank."""
        requests = list(dict.fromkeys(_Request.of(words) for each in asked for words in each))
        required = {n: t for n, t in self._tensors.items() if not n.startswith(optional)}
        problems = _problems(requests, self._tensors, required if strict else {})
        if problems:
            raise CheckpointError(f"it is of another model: {list_problems(problems)}")
        return [self.archive.state] * len(asked)

    def read(self) -> None:
        """Fill the pieces, file by file and each box once."""
        stored = self.archive.contents.stored
        by_file: dict[str, dict[Stored, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for piece in self._pieces:
            if piece.stop > piece.start:
                for item in self._read_items(piece, self._tensors.get(piece.name)):
                    at = stored[item.storage_index]
                    by_file[at.file][at].append(item)
        for file, wanted in sorted(by_file.items()):
            self._read_file(file, wanted)

    def _read_items(self, piece: Piece, tensor: TensorStorageMetadata | None) -> list[ReadItem]:
        """Return the reads for a piece; they are complete, because `read_contents` accepts only tilings."""
        assert tensor is not None, "it was compared"
        first = len(self._targets)
        self._targets.extend(_Target(piece, offsets, sizes) for offsets, sizes in piece.claim.boxes)
        chunks = [
            ChunkStorageMetadata(torch.Size(target.offsets), torch.Size(target.sizes))
            for target in self._targets[first:]
        ]
        found = create_read_items_for_chunk_list(piece.name, tensor, chunks)
        return [_renumbered(item, first) for item in found]

    def _read_file(self, file: str, wanted: dict[Stored, list[ReadItem]]) -> None:
        path = self._folder / file
        try:
            stream = path.open("rb")
        except OSError as error:
            raise DamageError(f"{path} cannot be read: {error}") from error
        with stream:
            for stored in sorted(wanted, key=lambda stored: stored.offset):
                items = wanted[stored]
                box = tensor_of(self.archive.read(stream, path, stored), path, stored)
                self._check_box(path, box, items[0].storage_index)
                for item in items:
                    self._target(item).copy_(_narrow(box, item.storage_offsets, item.lengths))

    def _target(self, item: ReadItem) -> torch.Tensor:
        assert item.dest_index.index is not None
        target = self._targets[item.dest_index.index]
        return _narrow(target.piece.box(target.offsets, target.sizes), item.dest_offsets, item.lengths)

    def _check_box(self, path: Path, box: torch.Tensor, index: MetadataIndex) -> None:
        tensor = self._tensors[index.fqn]
        assert index.index is not None
        sizes = tensor.chunks[index.index].sizes
        if box.shape != sizes or box.dtype != tensor.properties.dtype:
            raise DamageError(
                f"{path} has {box.dtype} {tuple(box.shape)} where the metadata says"
                f" {tensor.properties.dtype} {tuple(sizes)}, a box of {index.fqn!r}"
            )


def tensor_of(content: bytes, path: Path, stored: Stored) -> torch.Tensor:
    """Return the tensor of one stored box, on the CPU. Raises an error for any other content."""
    try:
        box = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise DamageError(f"{path}, from byte {stored.offset}: {type(error).__name__}: {error}") from error
    if type(box) is not torch.Tensor:
        raise DamageError(f"{path}, from byte {stored.offset}: {type(box).__name__} instead of a tensor")
    return box


def _narrow(box: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        box = box.narrow(dim, offset, length)
    return box


def _renumbered(item: ReadItem, first: int) -> ReadItem:
    """Return `item` with its target's number counted over all pieces of the rank."""
    index = item.dest_index
    assert index.index is not None
    return dataclasses.replace(item, dest_index=MetadataIndex(index.fqn, index.offset, first + index.index))


def _problems(
    asked: Sequence[_Request], tensors: Mapping[str, TensorStorageMetadata], required: Iterable[str]
) -> list[str]:
    """Return the differences between the requested names and shapes and the checkpoint's, and what is required of it
    that nobody asks for."""
    problems = []
    for request in asked:
        tensor = tensors.get(request.name)
        if tensor is None:
            problems.append(f"it lacks {request.name!r} of shape {request.shape}")
        elif tuple(tensor.size) != request.shape:
            problems.append(f"{request.name!r} has shape {tuple(tensor.size)} there and {request.shape} here")
        elif _kind(tensor.properties.dtype) != _kind(request.dtype):
            problems.append(f"{request.name!r} is {tensor.properties.dtype} there and {request.dtype} here")
    names = {request.name for request in asked}
    problems.extend(f"it has {name!r}, which this model does not have" for name in required if name not in names)
    return list(dict.fromkeys(problems))


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    """Return the kind of number, which a cast keeps: floating, complex or integer."""
    return dtype.is_floating_point, dtype.is_complex
