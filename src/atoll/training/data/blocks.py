"""Files of a token cache that are verified block by block when they are read.

    <cache>/<key>/manifest.json    {"content": {"version": 1, "block": 65536, "files": {"train.npy": [bytes, digests]}},
                                    "digest": that of the content}

`digests` has 16 hexadecimal digits of XXH3 per block, concatenated. Samples are read in random order, so a block is
verified when its first sample is read: over an epoch, each byte is read once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.base.digests import read_sealed, seal
from atoll.base.errors import DataError

CORPUS_MANIFEST = "manifest.json"
VERSION = 1
BLOCK_BYTES = 1 << 16
"""Number of bytes with one digest. Verifying a sample reads little more than the sample, and 16 digits are few."""

MARK = "damaged"
"""File in which a run records the damage that it has found."""

_DIGITS = 16


class DamagedCorpusError(DataError):
    """A token cache whose content differs from what was written. reason: the file and its fault."""

    def __init__(self, folder: Path, reason: object) -> None:
        super().__init__(
            f"{folder}: this cached corpus is damaged ({reason}); start again: the next run creates it again"
        )
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Blocks:
    """The length of each file in bytes, and the digests of its blocks."""

    files: Mapping[str, tuple[int, str]]

    @classmethod
    def of(cls, folder: Path, names: Iterable[str]) -> Blocks:
        """Return the digests of files in their present state."""
        return cls({name: _digests(folder / name) for name in names})

    @classmethod
    def read(cls, folder: Path) -> Blocks:
        """Return the digests in the manifest of `folder`. Raises OSError or ValueError if it cannot be read."""
        content = read_sealed(folder / CORPUS_MANIFEST)
        if (content["version"], content["block"]) != (VERSION, BLOCK_BYTES):
            raise ValueError(f"version {content['version']!r} with blocks of {content['block']!r} bytes")
        return cls({name: (int(size), str(digests)) for name, (size, digests) in content["files"].items()})

    def encode(self) -> bytes:
        """Return the content of the manifest."""
        return seal({"version": VERSION, "block": BLOCK_BYTES, "files": dict(self.files)})

    def open(self, path: Path, *, marks: bool = False) -> CheckedFile:
        """Open a file of the folder. Raises DamagedCorpusError if its length differs.

        marks: see `CheckedFile`.
        """
        size, digests = self.files.get(path.name, (0, ""))
        return CheckedFile(path, size, digests, marks=marks)


class CheckedFile:
    """A memory-mapped file whose blocks are verified before they are returned.

    marks: whether damage is recorded in the folder, so that the next reader detects it when it opens the file.
    """

    def __init__(self, path: Path, size: int, digests: str, *, marks: bool = False) -> None:
        self.path = path
        self._digests = digests
        self._marks = marks
        found = path.stat().st_size
        if found != size or len(digests) != -(-size // BLOCK_BYTES) * _DIGITS:
            raise self._damage(f"{found} bytes instead of {size}")
        self._bytes: NDArray[np.uint8] = (
            np.memmap(path, dtype=np.uint8, mode="r") if size else np.empty(0, dtype=np.uint8)
        )
        self._is_checked = np.zeros(-(-size // BLOCK_BYTES), dtype=np.bool_)

    def check(self, blocks: NDArray[np.integer[Any]] | None = None) -> None:
        """Raise DataError unless these blocks, or all, match their digests."""
        wanted = np.arange(len(self._is_checked)) if blocks is None else blocks
        if self._is_checked[wanted].all():
            return
        for block in np.unique(wanted[~self._is_checked[wanted]]).tolist():
            content = self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            if xxhash.xxh3_64_hexdigest(content.data) != self._digests[block * _DIGITS : (block + 1) * _DIGITS]:
                raise self._damage(f"its digest does not match in bytes {block * BLOCK_BYTES} to +{len(content)}")
            self._is_checked[block] = True

    def read(self) -> bytes:
        """Return the whole content."""
        self.check()
        return self._bytes.tobytes()

    def _damage(self, words: str) -> DamagedCorpusError:
        reason = f"{self.path.name}: {words}"
        if self._marks:
            with suppress(OSError):  # a read-only cache
                (self.path.parent / MARK).write_text(reason, encoding="utf-8")
        return DamagedCorpusError(self.path.parent, reason)


TOKENS: tuple[type[np.unsignedinteger[Any]], ...] = (np.uint16, np.uint32)
"""Dtypes of stored tokens."""


class CheckedTokens:
    """A read-only array of tokens in an .npy file. Each part is verified when it is read.

    kinds: allowed types of its elements.
    """

    def __init__(self, file: CheckedFile, kinds: tuple[type[np.unsignedinteger[Any]], ...] = TOKENS) -> None:
        self._file = file
        file.check(np.zeros(1, dtype=np.int64))  # verify the header before numpy reads it
        is_empty = file.path.stat().st_size <= 128  # an empty array cannot be mapped
        try:
            self._array: NDArray[np.integer[Any]] = np.load(
                file.path, mmap_mode=None if is_empty else "r", allow_pickle=False
            )
        except Exception as error:  # the header is Python's text, whose tokenizer has errors of its own
            raise ValueError(f"{file.path.name} is no array: {error}") from error
        if self._array.ndim != 1 or self._array.dtype not in kinds:
            raise ValueError(f"{file.path.name} is an array of shape {self._array.shape} and {self._array.dtype}")
        self._header = file.path.stat().st_size - self._array.nbytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the elements."""
        return self._array.dtype

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, at: int | slice | NDArray[np.integer[Any]]) -> Any:
        if isinstance(at, slice):
            start, stop, _ = at.indices(len(self))
            ends = self._block_of(np.array([start, max(start, stop - 1)]))
            self._file.check(np.arange(ends[0], ends[1] + 1) if stop > start else np.empty(0, dtype=np.int64))
        else:
            self._file.check(self._block_of(np.atleast_1d(at) % max(1, len(self))))
        return self._array[at]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.integer[Any]]:
        self._file.check()
        array: NDArray[np.integer[Any]] = np.array(self._array, dtype=dtype, copy=copy)
        return array

    def _block_of(self, at: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
        """Return the blocks of elements. Header and blocks are multiples of an element's size, so none is split."""
        blocks: NDArray[np.integer[Any]] = (at * self._array.itemsize + self._header) // BLOCK_BYTES
        return blocks


def _digests(path: Path) -> tuple[int, str]:
    parts = []
    with path.open("rb") as file:
        while content := file.read(BLOCK_BYTES):
            parts.append(xxhash.xxh3_64_hexdigest(content))
    return path.stat().st_size, "".join(parts)
