"""The manifest of a checkpoint: its identity, and a digest of every byte range that a load reads.

    manifest.json    {"content": {"version": 1, "algorithm": "xxh3-128",
                                  "identity": {"step": 100, "run": ..., "config": ..., "corpus": ...},
                                  "files": {"__0_0.distcp": [[offset, length, digest], ...], ...}},
                      "digest": that of the content}

The ranges of a `.distcp` file are its boxes; `.metadata` and `state.json` are one range each. Ranges follow one another
without gaps, so a file's length is known too. The manifest grows with the number of boxes, and every rank parses it. No
torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.base.digests import ALGORITHM, digest, read_sealed, seal
from atoll.base.errors import DamageError

MANIFEST = "manifest.json"
_VERSION = 1

DigestedRange = tuple[int, int, str]
"""Offset and length in bytes, and the digest."""


@dataclass(frozen=True)
class Manifest:
    """identity: of the run, its config and its corpus, as far as known.  files: the ranges of each file, by offset."""

    identity: Mapping[str, Any]
    files: Mapping[str, Sequence[DigestedRange]]
    _digests: dict[tuple[str, int, int], str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found = {(file, at, length): value for file, ranges in self.files.items() for at, length, value in ranges}
        object.__setattr__(self, "_digests", found)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest in `folder`. Raises DamageError if it cannot be read or its content has changed."""
        try:
            content = read_sealed(folder / MANIFEST)
            if (content["version"], content["algorithm"]) != (_VERSION, ALGORITHM):
                raise DamageError(
                    f"{folder / MANIFEST} has version {content['version']!r} with {content['algorithm']!r}; this Atoll "
                    f"reads {_VERSION} with {ALGORITHM}"
                )
            files = {
                file: [(at, length, value) for at, length, value in each] for file, each in content["files"].items()
            }
            return cls(dict(content["identity"]), files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamageError(f"{folder / MANIFEST} cannot be read: {error}") from error

    def encode(self) -> bytes:
        """Return the content of manifest.json. Raises TypeError or ValueError for an identity that JSON cannot
        express."""
        files = {file: sorted(ranges) for file, ranges in sorted(self.files.items())}
        return seal({"version": _VERSION, "algorithm": ALGORITHM, "identity": dict(self.identity), "files": files})

    def check(self, path: Path, offset: int, content: bytes) -> None:
        """Raise DamageError unless `content` equals the bytes written to the file at `path` from byte `offset` on."""
        expected = self._digests.get((path.name, offset, len(content)))
        if expected is None:
            raise DamageError(
                f"{path}, {len(content)} bytes from {offset}: the manifest has no such range; the file was cut, "
                "extended or exchanged"
            )
        if digest(content) != expected:
            raise DamageError(
                f"{path}, {len(content)} bytes from {offset}: the digest does not match; the bytes were changed after "
                "they were written"
            )


def _range(values: Sequence[Any]) -> DigestedRange:
    at, length, value = values
    return at, length, value
