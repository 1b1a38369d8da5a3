"""Verification of a whole checkpoint against its digests, in one process and without a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.base.errors import CheckpointError, DamageError
from atoll.runtime.checkpoint.archive import Archive
from atoll.runtime.checkpoint.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of verifying a checkpoint.

    nbytes: number of verified bytes.  has_digests: False for a checkpoint of an older version, of which only sizes are
    checked.  identity: that of its manifest.  problems: empty if the checkpoint is intact.
    """

    folder: Path
    nbytes: int
    has_digests: bool
    identity: Mapping[str, Any]
    problems: tuple[str, ...]


def verify(folder: Path) -> Verification:
    """Compare every byte of a checkpoint with its digests. Reports all problems, not only the first.

    Raises CheckpointError if there is no checkpoint.
    """
    try:
        opened = Archive(folder)
        contents = opened.contents
    except DamageError as error:
        return Verification(folder, 0, has_digests=True, identity={}, problems=(str(error),))
    if opened.manifest is None:
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        ends = [(stored.file, stored.offset + stored.length) for stored in contents.stored.values()]
        lacking = (f"{folder / file} ends before byte {end}" for file, end in ends if end > sizes.get(file, 0))
        return Verification(folder, 0, has_digests=False, identity={}, problems=tuple(lacking))
    problems = list(_damage(folder, opened.manifest))
    known = {(file, at, length) for file, ranges in opened.manifest.files.items() for at, length, _ in ranges}
    problems += [
        f"{folder / stored.file}: the manifest has no box at byte {stored.offset}"
        for stored in contents.stored.values()
        if (stored.file, stored.offset, stored.length) not in known
    ]
    nbytes = sum(length for _, _, length in known)
    return Verification(folder, nbytes, has_digests=True, identity=opened.manifest.identity, problems=tuple(problems))


def _damage(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield the damaged ranges."""
    for file, ranges in manifest.files.items():
        path = folder / file
        try:
            with path.open("rb") as stream:
                for at, length, _ in ranges:
                    stream.seek(at)
                    try:
                        manifest.check(path, at, stream.read(length))
                    except CheckpointError as error:
                        yield str(error)
                end = max(at + length for at, length, _ in ranges)
                if (found := path.stat().st_size) != end:
                    yield f"{path} has {found} bytes, and {end} were written"
        except OSError as error:
            yield f"{path} cannot be read: {error}"
