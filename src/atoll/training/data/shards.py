"""Division of a large source into shards of a given size, which are encoded one by one.

Files are used in order. Small files share a shard. A large file of JSON lines is cut at the beginning of a line,
parquet between row groups, a datasets folder between rows. A large file that cannot be cut is a shard of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from atoll.training.data.corpus import Source, SourceKind, dataset_rows, unreadable
from atoll.training.data.files import RecordRange, file_parts


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a source, of about `nbytes`."""

    source: Source
    nbytes: int


_Piece = tuple[Path, RecordRange | None, int]
"""A file, a part of it, and the number of bytes of that part."""


def identity_of(source: Source) -> str:
    """Return a hash of the relative paths and sizes of the files, which identifies a source without reading it."""
    total = hashlib.sha256()
    for file in source.files:
        total.update(source.relative(file).encode("utf-8", errors="surrogateescape") + b"\0")
        total.update(f"{_size(file)}\0".encode())
    return total.hexdigest()


def cut(source: Source, nbytes: int) -> tuple[Shard, ...]:
    """Return the shards of a source whose `identity` is known."""
    if source.kind is SourceKind.DATASETS:
        size, rows = sum(_size(file) for file in source.files), dataset_rows(source)
        parts = pairwise([*range(0, rows, max(1, rows * nbytes // max(1, size))), rows])
        groups: list[list[_Piece]] = [[(source.root, part, size * (part[1] - part[0]) // rows)] for part in parts]
    else:
        groups = list(_groups(_pieces(source, nbytes), nbytes))
    return tuple(_shard(source, number, group, len(groups)) for number, group in enumerate(groups))


def _pieces(source: Source, nbytes: int) -> Iterator[_Piece]:
    for file in source.files:
        size = _size(file)
        try:
            parts = file_parts(file, nbytes) if size > nbytes else None
        except OSError as error:
            raise unreadable(file, error) from error
        if parts is None:
            yield file, None, size
        else:
            for part in parts:
                yield file, part, size * (part[1] - part[0]) // max(1, parts[-1][1])


def _groups(pieces: Iterator[_Piece], nbytes: int) -> Iterator[list[_Piece]]:
    """Yield groups of consecutive pieces, up to a number of bytes each."""
    group: list[_Piece] = []
    total = 0
    for piece in pieces:
        if group and total + piece[2] > nbytes:
            yield group
            group, total = [], 0
        group.append(piece)
        total += piece[2]
    if group:
        yield group


def _shard(source: Source, number: int, group: Sequence[_Piece], count: int) -> Shard:
    begin = group[0][0] if source.kind is SourceKind.FILES else None
    where = "" if begin is None else f" from {source.relative(begin)} on"
    # If a file changes and keeps its size, its shard is encoded again, and the index reports the difference.
    times = [path.stat().st_mtime_ns for path, _, _ in group]
    about = (source.identity, number, [part for _, part, _ in group], times)
    return Shard(
        replace(
            source,
            name=f"{source.name}, shard {number + 1} of {count}{where}",
            files=tuple(path for path, _, _ in group),
            parts=tuple(part for _, part, _ in group),
            identity=hashlib.sha256(repr(about).encode()).hexdigest(),
        ),
        sum(size for _, _, size in group),
    )


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise unreadable(file, error) from error
