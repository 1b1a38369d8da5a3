"""A checkpoint opened for reading. Its content is verified: if it differs from what was written, DamageError is
raised."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from atoll.base.documents import LARGEST_JSON, parse_json, read
from atoll.base.errors import CheckpointError, DamageError
from atoll.runtime.checkpoint.folders import FIRST_VERSION, FORMAT_VERSION, METADATA, STATE, is_complete
from atoll.runtime.checkpoint.manifest import MANIFEST, Manifest
from atoll.runtime.checkpoint.metadata import BoxLocation, Contents, read_contents


class Archive:
    """The checkpoint in `folder`: its state, its tensors' metadata, and the bytes of its boxes.

    manifest: None for a checkpoint of an older version without digests, for which only consistency is checked.
    version: of its format, see `folders.FORMAT_VERSION`.

    Raises CheckpointError if there is no checkpoint, DamageError if it is incomplete or its manifest or state has
    changed since it was written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise CheckpointError(f"no checkpoint at {folder}")
        if not is_complete(folder):
            missing = [name for name in (METADATA, STATE) if not (folder / name).is_file()]
            raise DamageError(
                f"{folder} is not a complete checkpoint (without {', '.join(missing) or 'its end'}): its save was "
                "interrupted, or files were lost; take an earlier one"
            )
        self.manifest = Manifest.read(folder) if (folder / MANIFEST).exists() else None
        self.version, self.state = self._read_state()

    @cached_property
    def contents(self) -> Contents:
        """Return the tensors and the location of each of their boxes. Raises DamageError."""
        return read_contents(self.folder / METADATA, self._read_file(METADATA))

    def read(self, stream: BinaryIO, path: Path, stored: BoxLocation) -> bytes:
        """Return the bytes of a box from the open file at `path`. Raises DamageError."""
        try:
            stream.seek(stored.offset)
            content = stream.read(stored.length)
        except OSError as error:
            raise DamageError(f"{path} cannot be read from byte {stored.offset} on: {error}") from error
        if len(content) != stored.length:
            raise DamageError(f"{path} ends inside a box: {len(content)} of {stored.length} bytes from {stored.offset}")
        self._check(path, stored.offset, content)
        return content

    def _read_state(self) -> tuple[int, dict[str, Any]]:
        path = self.folder / STATE
        try:
            document = parse_json(self._read_file(STATE))
            version, state = document["version"], document["state"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamageError(f"{path} cannot be read: {error}") from error
        if version not in range(FIRST_VERSION, FORMAT_VERSION + 1) or not isinstance(state, dict):
            raise DamageError(f"{path} has version {version!r}; this Atoll reads {FIRST_VERSION} to {FORMAT_VERSION}")
        if version > FIRST_VERSION and self.manifest is None:
            raise DamageError(
                f"{self.folder / MANIFEST} is missing: it was saved with the checkpoint and has its digests"
            )
        return version, state

    def _read_file(self, name: str) -> bytes:
        path = self.folder / name
        try:
            content = read(path, limit=LARGEST_JSON)
        except (OSError, ValueError) as error:
            raise DamageError(f"{path} cannot be read: {error}") from error
        self._check(path, 0, content)
        return content

    def _check(self, path: Path, offset: int, content: bytes) -> None:
        if self.manifest is not None:
            self.manifest.check(path, offset, content)


def read_state(folder: Path) -> dict[str, Any]:
    """Return the JSON state of the checkpoint in `folder`. Raises the errors of `Archive`."""
    return Archive(folder).state
