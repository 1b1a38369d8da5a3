"""Saving of pieces as a Distributed Checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from atoll.base._torch import SeenItems, written_box
from atoll.base.digests import Digest, digest
from atoll.base.errors import CheckpointError
from atoll.plans.layouts.flat import Box
from atoll.runtime.checkpoint import folders
from atoll.runtime.checkpoint.manifest import DigestedRange, Manifest
from atoll.runtime.checkpoint.meeting import Meeting, list_problems
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

    identity: of the run as JSON, for the manifest; rank 0's is used.

    Every rank of `process_group` (default: all ranks; without torch.distributed: this process) calls it with the same
    folder, on a file system that they share. The pieces of all ranks must cover each tensor; a range that several ranks
    hold is written by one of them. A checkpoint of that name is replaced at the end.

    Raises the same error on every rank: CheckpointError for what the caller can fix, otherwise RankError.
    """
    Saving(folder, pieces, state, identity=identity, meeting=Meeting(process_group)).write()


class Saving:
    """A checkpoint whose ranks have agreed on the writer of each range, but which is not written yet.

    owned: the pieces that this rank writes. They are read when they are written; a caller that changes them meanwhile
    passes copies of them to `write_from`.

    Every rank creates it and writes it. Both raise the errors of `save`.
    """

    def __init__(
        self,
        folder: Path,
        pieces: Sequence[Piece],
        state: Mapping[str, Any],
        *,
        identity: Mapping[str, Any] | None,
        meeting: Meeting,
    ) -> None:
        self.folder = Path(folder).absolute()
        self._lost = f"checkpoint {self.folder} was not saved"
        self._meeting = meeting
        self._state, self._identity = state, identity or {}
        self._encoded = b""
        self._metadata = Metadata({})
        self._items: list[list[WriteItem]] = []  # of every rank, on rank 0
        offered = {piece.claim: piece for piece in pieces}
        claims = [claim for claim in offered if claim.says_something]
        mine = meeting.round(self._lost, lambda: [claim.words for claim in claims], self._begin)
        self.owned = [offered[claims[at]] for at, _ in mine]
        self._first_chunks = [first for _, first in mine]

    @property
    def nbytes(self) -> int:
        """Number of bytes that this rank writes."""
        return sum(piece.claim.nbytes for piece in self.owned)

    def write(self) -> None:
        """Write this rank's pieces; rank 0 publishes the checkpoint."""
        self.write_from(self.owned)

    def write_from(self, owned: Sequence[Piece]) -> None:
        """Write the same from copies of the pieces, in that order."""
        try:
            self._meeting.round(self._lost, lambda: self._write(owned), self._end)
        except BaseException:
            if self._meeting.rank == 0:
                folders.discard(self.folder)
            raise

    def again(self) -> None:
        """Create the saving folder again after `write_from` failed, for another attempt."""
        self._meeting.round(self._lost, self._prepare)

    # ---- on every rank

    def _write(self, owned: Sequence[Piece]) -> list[list[Any]]:
        """Write the boxes. Return the number, file, offset, length and digest of each."""
        writer = _Writer(self.folder)
        if not Path(writer.path).is_dir():
            raise CheckpointError(
                f"{writer.path}, created by rank 0, does not exist on this rank: all ranks must share a file system"
            )
        items = [
            item
            for piece, first in zip(owned, self._first_chunks, strict=True)
            for item in _write_items(piece.claim, first)
        ]
        numbers = {item.index: number for number, item in enumerate(items)}
        found = []
        for result in writer.write(items, owned, rank=self._meeting.rank):
            at = result.storage_data
            found.append([numbers[result.index], at.relative_path, at.offset, at.length, writer.digest(result.index)])
        return found

    # ---- on rank 0

    def _begin(self, offers: list[Any]) -> list[Any]:
        """Check that the offers form whole tensors. Return for each rank its claims to write, and the number of its
        first chunk."""
        claims = [[Claim.of(words) for words in offer] for offer in offers]
        shares, self._metadata = _shares(claims)
        self._items = [
            [item for at, first in share for item in _write_items(claims[rank][at], first)]
            for rank, share in enumerate(shares)
        ]
        self._encoded = folders.encode_state(self._state)
        folders.prepare_folder(self.folder)
        return shares

    def _prepare(self) -> None:
        if self._meeting.rank == 0:
            folders.prepare_folder(self.folder)

    def _end(self, written: list[Any]) -> list[None]:
        writer = _Writer(self.folder)
        files: dict[str, list[DigestedRange]] = {}
        results: list[list[WriteResult]] = []
        for items, boxes in zip(self._items, written, strict=True):
            results.append([])
            for number, file, offset, length, value in boxes:
                results[-1].append(WriteResult(items[number].index, length, written_box(file, offset, length)))
                files.setdefault(file, []).append((offset, length, value))
        writer.finish(replace(self._metadata), results)
        content = Path(writer.path, folders.METADATA).read_bytes()
        files[folders.METADATA] = [(0, len(content), digest(content))]
        files[folders.STATE] = [(0, len(self._encoded), digest(self._encoded))]
        folders.publish(self.folder, Manifest(self._identity, files).encode(), self._encoded)
        return [None] * len(written)


class _Writer(FileSystemWriter):
    """Writes boxes into the saving folder of a checkpoint, and computes their digests."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folders.saving_folder(folder))
        self.transforms = SeenItems(self._of_item)
        self._folder = folder
        self._digests: dict[MetadataIndex, Digest] = {}
        self.set_up_storage_writer(is_coordinator=False)

    def write(self, items: list[WriteItem], owned: Sequence[Piece], *, rank: int) -> list[WriteResult]:
        """Write the boxes of pieces to the files of a rank."""
        plans = self.prepare_global_plan([SavePlan(items)] * (rank + 1))
        with without_crc32():
            return self.write_data(plans[rank], _Boxes(owned)).wait()

    def digest(self, index: MetadataIndex) -> str:
        """Return the digest of a written box."""
        return self._digests[index].value

    def _of_item(self, index: MetadataIndex) -> Callable[[Any], None]:
        self._digests[index] = Digest()
        return self._digests[index].update

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._folder.name, save_id=self.save_id)


class _Boxes(DefaultSavePlanner):
    """Passes the boxes of pieces to the writer, as views."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self._pieces = {
            MetadataIndex(piece.name, offsets): piece for piece in pieces for offsets, _ in piece.claim.boxes
        }

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        return self._pieces[write_item.index].box(tuple(chunk.offsets), tuple(chunk.sizes))


@contextmanager
def without_crc32() -> Iterator[None]:
    """Context in which `torch.save` omits the CRC32 of its zip records.

    torch.load never compares it, and it takes several times as long as the digest, which is compared.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _shares(offers: Sequence[Sequence[Claim]]) -> tuple[list[list[tuple[int, int]]], Metadata]:
    """Return the claims that each rank writes, with the number of each one's first chunk, and the metadata of the
    whole."""
    by_name: dict[str, dict[Claim, list[int]]] = {}
    for rank, claims in enumerate(offers):
        for claim in claims:
            by_name.setdefault(claim.name, {}).setdefault(claim, []).append(rank)
    problems = [problem for claims in by_name.values() for problem in _problems(list(claims))]
    if problems:
        raise CheckpointError(list_problems(problems))
    owner = _owners({claim: ranks for claims in by_name.values() for claim, ranks in claims.items()}, len(offers))
    numbers = [{claim: number for number, claim in enumerate(claims)} for claims in offers]
    shares: list[list[tuple[int, int]]] = [[] for _ in offers]
    tensors = {}
    for name, holders in by_name.items():
        chunks: list[ChunkStorageMetadata] = []
        for claim in sorted(holders, key=lambda claim: (claim.within.offsets, claim.start)):
            rank = owner[claim]
            shares[rank].append((numbers[rank][claim], len(chunks)))
            chunks.extend(ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in claim.boxes)
        any_claim = next(iter(holders))
        properties = TensorProperties(dtype=any_claim.dtype)
        tensors[name] = TensorStorageMetadata(properties, torch.Size(any_claim.shape), chunks)
    paths = {name: next(iter(claims)).path for name, claims in by_name.items()}
    return shares, Metadata(dict(tensors), planner_data=paths)


def _problems(claims: Sequence[Claim]) -> list[str]:
    """Return the reasons why the claims on one name do not form one tensor; empty if they do."""
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
    """Assign each claim to a writer: its only holder, or the holder with the fewest bytes to write so far."""
    load = [0] * ranks
    owner = {}
    for claim, holders in sorted(offers.items(), key=lambda offer: (len(offer[1]) > 1, -offer[0].nbytes)):
        chosen = min(holders, key=lambda rank: (load[rank], rank))
        load[chosen] += claim.nbytes
        owner[claim] = chosen
    return owner


def _write_items(claim: Claim, first: int) -> list[WriteItem]:
    """Return the claim's boxes; `first` is the position of the first among the tensor's chunks (a hint for lookups)."""
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
