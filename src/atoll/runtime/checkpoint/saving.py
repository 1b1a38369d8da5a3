"""Writes pieces as a Distributed Checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from atoll._torch import SeenItems
from atoll.digests import Digest, digest
from atoll.errors import CheckpointError
from atoll.layouts.flat import Box
from atoll.runtime.checkpoint import folders
from atoll.runtime.checkpoint.collective import alone, listing, picklable, quiet, raise_everywhere
from atoll.runtime.checkpoint.manifest import Manifest, Range
from atoll.runtime.checkpoint.pieces import Claim, Piece


def save(
    folder: Path,
    pieces: Sequence[Piece],
    state: Mapping[str, Any],
    *,
    identity: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint of every rank's `pieces` and rank 0's `state` to `folder`, or change nothing.

    identity: rank 0's, for the manifest; whose the checkpoint is, as JSON.

    Every rank of `process_group` (default: all ranks; without torch.distributed: this process) calls it with
    the same folder, on a file system that they share. The pieces of all ranks must cover each tensor; a range
    that several ranks hold is written by one of them. A checkpoint of that name is replaced in the end.
    A group whose backend is NCCL sends the plans through the current CUDA device.

    Raises the same error on every rank: CheckpointError for what the caller can mend, else RankError.
    """
    folder = Path(folder).absolute()
    writer = _Writer(folder, state, identity or {})
    try:
        with quiet():
            dcp_save(
                {},
                storage_writer=writer,
                planner=_Planner(pieces),
                process_group=process_group,
                no_dist=alone(),
            )
    except CheckpointException as failure:
        if writer.is_coordinator:
            folders.discard(folder)
        raise_everywhere(failure, f"checkpoint {folder} was not saved")


class _Planner(SavePlanner):
    """Offers this rank's claims; on rank 0 chooses who writes what; hands out boxes as views."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._boxes: dict[MetadataIndex, Piece] = {}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the pieces came with the constructor."""

    def create_local_plan(self) -> SavePlan:
        with picklable():
            offered = {piece.claim: piece for piece in self._pieces}
            for claim, piece in offered.items():
                for offsets, _ in claim.boxes:
                    self._boxes[MetadataIndex(claim.name, offsets)] = piece
            return SavePlan([], planner_data=[claim for claim in offered if claim.says_something])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        with picklable():
            return _global_plan([plan.planner_data for plan in all_plans])

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        return self._boxes[write_item.index].box(tuple(chunk.offsets), tuple(chunk.sizes))


@dataclass(frozen=True)
class _Written(WriteResult):
    """What a rank tells rank 0 of a box, and its digest."""

    digest: str


class _Writer(FileSystemWriter):
    """Writes into the saving folder, which rank 0 makes before the data and names after it."""

    def __init__(self, folder: Path, state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        super().__init__(folders.saving_folder(folder))
        self.is_coordinator = False
        self.transforms = SeenItems(self._digest)
        self._folder = folder
        self._state = state
        self._identity = identity
        self._encoded = b""
        self._digests: dict[MetadataIndex, Digest] = {}

    def _digest(self, index: MetadataIndex) -> Callable[[Any], None]:
        self._digests[index] = Digest()
        return self._digests[index].update

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator = is_coordinator
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with picklable():
            self._encoded = folders.encode_state(self._state)
            folders.prepare(self._folder)
            return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with picklable():
            if not Path(self.path).is_dir():
                raise CheckpointError(f"{self.path}, made by rank 0, is not here: all ranks must share a file system")
            with without_crc32():
                results = super().write_data(plan, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result([_Written(**vars(result), digest=self._digests[result.index].value) for result in results])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with picklable():
            super().finish(metadata, results)
            folders.publish(self._folder, self._manifest(results).encode(), self._encoded)

    def _manifest(self, results: list[list[WriteResult]]) -> Manifest:
        content = Path(self.path, folders.METADATA).read_bytes()
        files: dict[str, list[Range]] = {
            folders.METADATA: [(0, len(content), digest(content))],
            folders.STATE: [(0, len(self._encoded), digest(self._encoded))],
        }
        for written in chain.from_iterable(results):
            assert isinstance(written, _Written)
            at = written.storage_data
            files.setdefault(at.relative_path, []).append((at.offset, at.length, written.digest))
        return Manifest(self._identity, files)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._folder.name, save_id=self.save_id)


@contextmanager
def without_crc32() -> Iterator[None]:
    """A section in which `torch.save` leaves the CRC32 of its zip records out.

    torch.load never compares it, and it takes several times as long as the digest, which is compared.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _global_plan(offers: Sequence[Sequence[Claim]]) -> tuple[list[SavePlan], Metadata]:
    """Each rank's write items, and the metadata of the whole."""
    by_name: dict[str, dict[Claim, list[int]]] = {}
    for rank, claims in enumerate(offers):
        for claim in claims:
            by_name.setdefault(claim.name, {}).setdefault(claim, []).append(rank)
    problems = [problem for claims in by_name.values() for problem in _problems(list(claims))]
    if problems:
        raise CheckpointError(listing(problems))
    owner = _owners({claim: ranks for claims in by_name.values() for claim, ranks in claims.items()}, len(offers))
    plans = [SavePlan([]) for _ in offers]
    tensors = {}
    for name, holders in by_name.items():
        chunks: list[ChunkStorageMetadata] = []
        for claim in sorted(holders, key=lambda claim: (claim.within.offsets, claim.start)):
            for item in _write_items(claim, first=len(chunks)):
                plans[owner[claim]].items.append(item)
                assert item.tensor_data is not None
                chunks.append(item.tensor_data.chunk)
        any_claim = next(iter(holders))
        properties = TensorProperties(dtype=any_claim.dtype)
        tensors[name] = TensorStorageMetadata(properties, torch.Size(any_claim.shape), chunks)
    paths = {name: next(iter(claims)).path for name, claims in by_name.items()}
    return plans, Metadata(dict(tensors), planner_data=paths)


def _problems(claims: Sequence[Claim]) -> list[str]:
    """Why the claims on one name do not make up one tensor; empty if they do."""
    name = claims[0].name
    for what in ("path", "shape", "dtype"):
        values = sorted({str(getattr(claim, what)) for claim in claims})
        if len(values) > 1:
            return [f"{name!r} is offered with more than one {what}: {', '.join(values)}"]
    parts: dict[Box, list[Claim]] = {}
    for claim in claims:
        parts.setdefault(claim.within, []).append(claim)
    for part, inside in parts.items():
        where = name if len(parts) == 1 else f"{name} {part.sizes} at {part.offsets}"
        reached = 0
        for claim in sorted(inside, key=lambda claim: (claim.start, claim.stop)):
            if claim.start > reached:
                return [f"{where!r}: no rank offers elements {reached}..{claim.start}"]
            if claim.start < reached:
                return [f"{where!r}: elements {claim.start}..{reached} are offered twice, by pieces that are not equal"]
            reached = claim.stop
        if reached < part.numel:
            return [f"{where!r}: no rank offers elements {reached}..{part.numel}"]
    if any(a.overlaps(b) for a, b in combinations(parts, 2)):
        return [f"{name!r}: parts are offered that overlap: {', '.join(f'{p.sizes} at {p.offsets}' for p in parts)}"]
    missing = math.prod(claims[0].shape) - sum(part.numel for part in parts)
    return [f"{name!r}: no rank offers {missing} of {math.prod(claims[0].shape)} elements"] if missing else []


def _owners(offers: Mapping[Claim, Sequence[int]], ranks: int) -> dict[Claim, int]:
    """Who writes each claim: its only holder, or of several the one with the least to write so far."""
    load = [0] * ranks
    owner = {}
    for claim, holders in sorted(offers.items(), key=lambda offer: (len(offer[1]) > 1, -offer[0].nbytes)):
        chosen = min(holders, key=lambda rank: (load[rank], rank))
        load[chosen] += claim.nbytes
        owner[claim] = chosen
    return owner


def _write_items(claim: Claim, first: int) -> list[WriteItem]:
    """The claim's boxes; `first` is the position of the first among the tensor's chunks (a hint for lookups)."""
    items = []
    for number, (offsets, sizes) in enumerate(claim.boxes, start=first):
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            properties=TensorProperties(dtype=claim.dtype),
            size=torch.Size(claim.shape),
        )
        index = MetadataIndex(claim.name, offsets, number)
        items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    return items
