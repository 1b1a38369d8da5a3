"""Reads pieces from a Distributed Checkpoint, however it was cut."""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from atoll.errors import AtollError, CheckpointError, DamageError, UnverifiedWarning
from atoll.layouts.flat import Shape
from atoll.runtime.checkpoint.archive import Archive
from atoll.runtime.checkpoint.collective import alone, listing, picklable, quiet, raise_everywhere
from atoll.runtime.checkpoint.metadata import Contents, Stored
from atoll.runtime.checkpoint.pieces import Piece


def load(
    folder: Path,
    pieces: Sequence[Piece],
    *,
    process_group: dist.ProcessGroup | None = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Fill every rank's `pieces` from the checkpoint in `folder`; returns the saved state.

    Every rank of `process_group` calls it. A rank reads only the boxes that its pieces touch; values are cast
    to the dtype of the piece. Before any tensor is touched, all names and shapes of all ranks are compared with
    the checkpoint: names that it lacks and other shapes are errors, and if `strict` also names no rank asks for.
    What is read is compared with its digest first. Only a box that turns out to be damaged can leave pieces half
    filled. A checkpoint from before there were digests is loaded with an UnverifiedWarning on the first rank.

    Raises the same error on every rank: DamageError for a damaged checkpoint, CheckpointError for a missing or
    different one, else RankError.
    """
    folder = Path(folder).absolute()
    planner = _Planner(pieces, strict=strict)
    reader = _Reader(folder)
    try:
        with quiet():
            dcp_load(
                {},
                storage_reader=reader,
                planner=planner,
                process_group=process_group,
                no_dist=alone(),
            )
    except CheckpointException as failure:
        raise_everywhere(failure, f"checkpoint {folder} was not loaded")
    if reader.is_coordinator and reader.archive.manifest is None:
        warnings.warn(UnverifiedWarning(f"{folder} was not verified: it was saved without digests"), stacklevel=2)
    return planner.state


@dataclass(frozen=True, slots=True)
class _Request:
    """A name that a rank asks for."""

    name: str
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Target:
    """A box of a piece that is to be filled."""

    piece: Piece
    offsets: Shape
    sizes: Shape


class _Planner(LoadPlanner):
    """Asks for this rank's boxes; on rank 0 compares what all ranks ask for with what there is."""

    def __init__(self, pieces: Sequence[Piece], *, strict: bool) -> None:
        self.state: dict[str, Any] = {}
        self._pieces = pieces
        self._strict = strict
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._targets: list[_Target] = []

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the checkpoint's metadata; tensors only, as `read_contents` made it."""
        assert metadata is not None
        self._tensors = {
            name: tensor
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }

    def create_local_plan(self) -> LoadPlan:
        with picklable():
            requests = [_Request(piece.name, tuple(piece.shape), piece.tensor.dtype) for piece in self._pieces]
            items: list[ReadItem] = []
            for piece in self._pieces:
                tensor = self._tensors.get(piece.name)
                if tensor is not None and tuple(tensor.size) == tuple(piece.shape) and piece.stop > piece.start:
                    items.extend(self._read_items(piece, tensor))
            return LoadPlan(items, planner_data=list(dict.fromkeys(requests)))

    def _read_items(self, piece: Piece, tensor: TensorStorageMetadata) -> list[ReadItem]:
        """What to read for a piece; complete, because `read_contents` lets only tilings pass."""
        first = len(self._targets)
        self._targets.extend(_Target(piece, offsets, sizes) for offsets, sizes in piece.claim.boxes)
        chunks = [
            ChunkStorageMetadata(torch.Size(target.offsets), torch.Size(target.sizes))
            for target in self._targets[first:]
        ]
        found = create_read_items_for_chunk_list(piece.name, tensor, chunks)
        return [_renumbered(item, first) for item in found]

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        with picklable():
            asked = list(dict.fromkeys(request for plan in global_plan for request in plan.planner_data))
            problems = _problems(asked, self._tensors, strict=self._strict)
            if problems:
                raise CheckpointError(f"it is of another model: {listing(problems)}")
            return [dataclasses.replace(plan, planner_data=None) for plan in global_plan]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        self.state = central_plan.planner_data
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn!r} is a pickled object; Atoll loads tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert read_item.dest_index.index is not None
        target = self._targets[read_item.dest_index.index]
        box = target.piece.box(target.offsets, target.sizes)
        return _narrow(box, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: `resolve_tensor` gave a view of the piece."""


class _Reader(StorageReader):
    """Reads the files of a checkpoint: metadata by the allow-list, tensors with `weights_only`."""

    def __init__(self, folder: Path) -> None:
        self.is_coordinator = False
        self._folder = folder
        self._archive: Archive | None = None
        self._contents = Contents({}, {})
        self._failure: AtollError | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads: a reader serves one."""

    def read_metadata(self, *args: Any) -> Metadata:
        # Distributed Checkpoint takes an exception here for "try a file of this rank's own", which
        # would leave the other ranks in a collective: keep it for the next hook.
        try:
            with picklable():
                self._archive = Archive(self._folder)
                self._contents = self._archive.contents
        except AtollError as error:
            self._failure = error
        return self._contents.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        with picklable():
            if self._failure is not None:
                raise self._failure
        self.is_coordinator = is_coordinator

    @property
    def archive(self) -> Archive:
        """The checkpoint, once it is open."""
        assert self._archive is not None
        return self._archive

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        with picklable():
            return [dataclasses.replace(plan, planner_data=self.archive.state) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with picklable():
            for file, wanted in sorted(self._by_file(plan).items()):
                self._read_file(file, wanted, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _by_file(self, plan: LoadPlan) -> dict[str, dict[Stored, list[ReadItem]]]:
        """Read items by file and stored box, so that each box is read once."""
        by_file: dict[str, dict[Stored, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            stored = self._contents.stored[item.storage_index]
            by_file[stored.file][stored].append(item)
        return by_file

    def _read_file(self, file: str, wanted: dict[Stored, list[ReadItem]], planner: LoadPlanner) -> None:
        path = self._folder / file
        try:
            stream = path.open("rb")
        except OSError as error:
            raise DamageError(f"{path} cannot be read: {error}") from error
        with stream:
            for stored in sorted(wanted, key=lambda stored: stored.offset):
                items = wanted[stored]
                box = _tensor_of(self.archive.read(stream, path, stored), path, stored)
                self._check_box(path, box, items[0].storage_index)
                for item in items:
                    target = planner.resolve_tensor(item)
                    target.copy_(_narrow(box, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)

    def _check_box(self, path: Path, box: torch.Tensor, index: MetadataIndex) -> None:
        tensor = self._contents.tensors[index.fqn]
        assert index.index is not None
        sizes = tensor.chunks[index.index].sizes
        if box.shape != sizes or box.dtype != tensor.properties.dtype:
            raise DamageError(
                f"{path} has {box.dtype} {tuple(box.shape)} where the metadata says"
                f" {tensor.properties.dtype} {tuple(sizes)}, a box of {index.fqn!r}"
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return Path(checkpoint_id).is_dir()


def _tensor_of(content: bytes, path: Path, stored: Stored) -> torch.Tensor:
    """The tensor of one stored box, on the CPU. Anything else is refused."""
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
    """`item` with its target's number counted over all pieces of the rank."""
    index = item.dest_index
    assert index.index is not None
    return dataclasses.replace(item, dest_index=MetadataIndex(index.fqn, index.offset, first + index.index))


def _problems(asked: Sequence[_Request], tensors: dict[str, TensorStorageMetadata], *, strict: bool) -> list[str]:
    """Where the names and shapes that the ranks ask for differ from the checkpoint's."""
    problems = []
    for request in asked:
        tensor = tensors.get(request.name)
        if tensor is None:
            problems.append(f"it lacks {request.name!r} of shape {request.shape}")
        elif tuple(tensor.size) != request.shape:
            problems.append(f"{request.name!r} has shape {tuple(tensor.size)} there and {request.shape} here")
        elif _kind(tensor.properties.dtype) != _kind(request.dtype):
            problems.append(f"{request.name!r} is {tensor.properties.dtype} there and {request.dtype} here")
    if strict:
        names = {request.name for request in asked}
        problems.extend(f"it has {name!r}, which nothing here takes" for name in tensors if name not in names)
    return list(dict.fromkeys(problems))


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    """Casting keeps the kind of number: floating, complex or whole."""
    return dtype.is_floating_point, dtype.is_complex
