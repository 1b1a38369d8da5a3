"""Samples of a large source whose shards are encoded shortly before they are used.

    epoch       the shards in a new random order; the first epoch begins with the first shard
    window      WINDOW consecutive shards of that order; the first window of a run has one, to start early
    sample      the samples of a window, shuffled

    <cache>/<key>.stream/<shard>/   token arrays, see `store.py`; the KEPT most recently opened, and the first
    <cache>/<key>.stream/index...   number of samples of each visited shard, per packing

The location of a position is computed from the numbers of samples before it, so a resumed run opens only the window
that contains its position. The next window is encoded in a thread while the current one is used for training. All
ranks do the same; of the processes that share the cache, one encodes a shard and the others wait for its lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from atoll.base.digests import read_sealed, seal
from atoll.base.errors import DataError
from atoll.training.data.order import TokenBatch, scatter, shuffled
from atoll.training.data.recipe import Report
from atoll.training.data.rows import Packing, Rows, rows_of
from atoll.training.data.shards import Shard
from atoll.training.data.store import Corpus, writing_cache

_WINDOW = 3
"""Number of shards whose samples are shuffled together."""

KEPT = 3 * _WINDOW
"""Number of shards on disk: the current and next window, and the previous one, which another rank may still use."""

NOTED_SECONDS = 1.0
"""Minimum wait for the encoder that is reported, in seconds."""

_SHARDS, _SAMPLES = 1 << 31, (1 << 31) + 1
"""Words of the seeds of shard and sample orders, distinct from the number of any source."""

Encode = Callable[[int], Corpus]
"""Returns the token arrays of a shard, from the cache or after encoding it."""


@dataclass(frozen=True, slots=True)
class _Window:
    """Shards of an epoch that are shuffled together.

    start: position of its first sample.  passed: bytes of the epoch before it.  counts: number of samples of each
    shard.
    """

    epoch: int
    number: int
    shards: tuple[int, ...]
    start: int
    passed: int
    counts: tuple[int, ...]

    @property
    def samples(self) -> int:
        return sum(self.counts)

    def has(self, position: int) -> bool:
        return self.start <= position < self.start + self.samples


class _Opened:
    """A window whose shards are in the cache."""

    def __init__(self, window: _Window, rows: Sequence[Rows], seed: int, feed: int) -> None:
        self.window = window
        self._rows = rows
        self._order = shuffled(window.samples, seed, window.epoch, feed, _SAMPLES, window.number)
        self._ends = np.cumsum(window.counts)

    def find(self, position: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shard of each position of the window from `position` on, and the index of the sample in that
        shard."""
        offset = position - self.window.start
        samples = self._order[offset : offset + count]
        shards = np.searchsorted(self._ends, samples, side="right")
        begins = self._ends - np.array(self.window.counts, dtype=np.int64)
        return shards, samples - begins[shards]

    def take(self, position: int, count: int) -> list[tuple[NDArray[np.int64], TokenBatch]]:
        """Return the samples from `position` on, with their places among them."""
        shards, samples = self.find(position, count)
        places = [(at, np.flatnonzero(shards == at)) for at in np.unique(shards).tolist()]
        return [(place, self._rows[at].take(samples[place])) for at, place in places]

    def work(self, position: int, count: int) -> NDArray[np.float64]:
        """Return the attention work of each of these samples."""
        shards, samples = self.find(position, count)
        found = np.zeros(count)
        for at in np.unique(shards).tolist():
            found[shards == at] = self._rows[at].work(samples[shards == at])
        return found


class Stream:
    """Sample sequence of a source in shards.

    folder: contains the shards' token arrays, which `encode_source` creates.  first: name of the first shard's folder,
    which is used for validation and kept.  number: index of the source among those of the run.
    """

    def __init__(
        self,
        name: str,
        shards: Sequence[Shard],
        encode: Encode,
        *,
        packing: Packing,
        folder: Path,
        first: str,
        seed: int,
        number: int,
        notes: Sequence[str],
        report: Report,
    ) -> None:
        self.name = name
        self.samples = None
        self.size = sum(shard.nbytes for shard in shards)
        self.notes = notes
        self.waited = 0.0
        """Seconds that steps have waited for shards."""
        self._shards, self._encode, self._packing = shards, encode, packing
        self._seed, self._number, self._say = seed, number, report
        self._index = _Index(folder, packing)
        self._folder, self._first = folder, first
        self._recent: tuple[_Opened, ...] = ()
        self._ahead: Future[_Opened] | None = None
        self._is_closed = threading.Event()

    def take(self, position: int, count: int) -> TokenBatch:
        """Return the samples at positions position .. position+count-1."""
        parts: list[tuple[NDArray[np.int64], TokenBatch]] = []
        done = 0
        while done < count:
            opened = self._at(position + done)
            taken = min(count - done, opened.window.start + opened.window.samples - position - done)
            parts += [(done + places, batch) for places, batch in opened.take(position + done, taken)]
            done += taken
        return scatter(parts, count)

    def work(self, position: int, count: int) -> NDArray[np.float64]:
        """Return the attention work of each of these samples, as `Rows.work`."""
        parts: list[NDArray[np.float64]] = []
        done = 0
        while done < count:
            opened = self._at(position + done)
            taken = min(count - done, opened.window.start + opened.window.samples - position - done)
            parts.append(opened.work(position + done, taken))
            done += taken
        return np.concatenate(parts) if parts else np.zeros(0)

    def names(self, position: int, count: int) -> list[int | str]:
        """Return each sample's number in its shard, and the shard's."""
        found: list[int | str] = []
        while len(found) < count:
            window = self._find(position + len(found))
            opened = _Opened(window, (), self._seed, self._number)
            for shard, sample in zip(*opened.find(position + len(found), count - len(found)), strict=True):
                found.append(f"{sample} of {self._shards[window.shards[shard]].source.name}")
        return found

    def epoch(self, position: int) -> float:
        """Return how often the source's bytes have been passed before a position, as far as sample counts are known."""
        if position == 0:
            return 0.0
        last, window = position - 1, None
        for window in self._nearby(position - 1, counts=False):
            if window.has(last):
                share = (position - window.start) / window.samples
                return window.epoch + (window.passed + share * self._bytes(window.shards)) / self.size
        return 0.0 if window is None else window.epoch + (window.passed + self._bytes(window.shards)) / self.size

    def _bytes(self, shards: Sequence[int]) -> int:
        return sum(self._shards[shard].nbytes for shard in shards)

    def close(self) -> None:
        """Stop encoding. The process ends when the shard being encoded is done."""
        self._is_closed.set()

    # ---- location of positions

    def _find(self, position: int) -> _Window:
        """Return the window that contains a position. Encodes shards whose samples have not been counted yet."""
        found = next((window for window in self._nearby(position) if window.has(position)), None)
        # Once every shard is counted, epochs after the first are found by their number.
        found = found or next((window for window in self._nearby(position) if window.has(position)), None)
        assert found is not None, "every position is in a window once all shards are counted"
        return found

    def _nearby(self, position: int, *, counts: bool = True) -> Iterator[_Window]:
        """Return the opened window that contains a position, or the result of `_walk`."""
        opened = [each.window for each in self._recent if each.window.has(position)]
        yield from opened or self._walk(position, counts=counts)

    def _walk(self, position: int, *, counts: bool = True) -> Iterator[_Window]:
        """Yield the windows of a position's epoch, from its first on; of the first epoch, until all shards are counted.

        counts: whether shards that were never counted are counted; otherwise the walk ends before them.
        """
        epoch = start = passed = 0
        total = self._index.total(len(self._shards))
        if total == 0:
            raise DataError(
                f"data.source = {self.name!r} has no sample of data.sequence = {self._packing.sequence}; take more "
                "text or a shorter sequence"
            )
        if total is not None:
            epoch = position // total
            start = epoch * total
        for number, shards in enumerate(self._windows(epoch)):
            if not counts and any(self._index.get(shard) is None for shard in shards):
                return
            window = _Window(epoch, number, shards, start, passed, tuple(self._count(shard) for shard in shards))
            yield window
            start += window.samples
            passed += self._bytes(shards)

    def _windows(self, epoch: int) -> list[tuple[int, ...]]:
        """Return the shards of each window."""
        order = shuffled(len(self._shards), self._seed, epoch, self._number, _SHARDS).tolist()
        if epoch == 0:
            order.remove(0)
            order.insert(0, 0)
        ends = [0, *range(1 if epoch == 0 else _WINDOW, len(order), _WINDOW), len(order)]
        return [tuple(order[a:b]) for a, b in pairwise(ends)]

    def _count(self, shard: int) -> int:
        known = self._index.get(shard)
        if known is not None:
            return known[0]
        self._say(f"encoding {self._shards[shard].source.name}, to count its samples")
        return len(self._open_shard(shard))

    # ---- contents of the cache

    def _at(self, position: int) -> _Opened:
        """Return the window of a position, opened. Starts to encode the next one."""
        for opened in self._recent:
            if opened.window.has(position):
                return opened
        begin = time.monotonic()
        found = None if self._ahead is None else self._ahead.result()
        if found is None or not found.window.has(position):
            found = self._open(self._find(position))
        if self._recent:
            waited = time.monotonic() - begin
            self.waited += waited
            if waited > NOTED_SECONDS:
                self._say(f"note: a step waited {waited:.1f} s for shards of {self.name} to be encoded")
        self._recent = (found, *self._recent[:1])
        window = found.window
        self._ahead = _in_background(lambda: self._open_after(window))
        return found

    def _open_after(self, window: _Window) -> _Opened:
        """Open the next window that has a sample."""
        number, epoch = window.number + 1, window.epoch
        start, passed = window.start + window.samples, window.passed + self._bytes(window.shards)
        while True:
            windows = self._windows(epoch)
            if number == len(windows):
                number, epoch, passed = 0, epoch + 1, 0
                continue
            shards = windows[number]
            rows = []
            for shard in shards:
                if self._is_closed.is_set():
                    raise CancelledError
                rows.append(self._open_shard(shard))
            found = _Window(epoch, number, shards, start, passed, tuple(map(len, rows)))
            if found.samples:
                return _Opened(found, rows, self._seed, self._number)
            number, passed = number + 1, passed + self._bytes(shards)

    def _open(self, window: _Window) -> _Opened:
        return _Opened(window, [self._open_shard(shard) for shard in window.shards], self._seed, self._number)

    def _open_shard(self, shard: int) -> Rows:
        """Return the samples of a shard. Raises DataError if it has changed since it was counted."""
        corpus = self._encode(shard)
        rows = rows_of(corpus.trained, self._packing)
        if self._index.get(shard) is None:
            for note in corpus.notes:
                self._say(f"note: {self._shards[shard].source.name}: {note}")
        self._index.note(shard, len(rows), corpus.fingerprint, self._shards[shard].source.name)
        with suppress(OSError):  # a read-only cache
            os.utime(corpus.folder)
        self._trim()
        return rows

    def _trim(self) -> None:
        """Delete the least recently opened shards, except the KEPT newest and the first, which is used for
        validation."""
        with suppress(OSError):  # another process may delete the same
            found = [path for path in self._folder.iterdir() if path.is_dir() and ".part-" not in path.name]
            found = sorted(
                (path for path in found if path.name != self._first), key=lambda path: -path.stat().st_mtime_ns
            )
            for path in found[KEPT:]:
                aside = tempfile.mkdtemp(prefix=f"{path.name}.part-", dir=self._folder)
                os.replace(path, aside)
                shutil.rmtree(aside, ignore_errors=True)


def _in_background(work: Callable[[], _Opened]) -> Future[_Opened]:
    """Run a function in a thread. Its exception is raised where the result is requested."""
    found: Future[_Opened] = Future()

    def do() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    # Not a daemon: the interpreter must not end while native code encodes.
    threading.Thread(target=do, name="atoll-shards").start()
    return found


class _Index:
    """Number of samples of visited shards, in memory and in a file of the cache."""

    def __init__(self, folder: Path, packing: Packing) -> None:
        about = json.dumps([packing.sequence, packing.how, packing.too_long])
        self._path = folder / f"index-{hashlib.sha256(about.encode()).hexdigest()[:16]}.json"
        self._known: dict[int, tuple[int, str]] = {}
        self._read()

    def get(self, shard: int) -> tuple[int, str] | None:
        """Return the number of samples and the fingerprint of a shard."""
        return self._known.get(shard)

    def total(self, shards: int) -> int | None:
        """Return the number of samples of all shards, if all are counted."""
        return sum(count for count, _ in self._known.values()) if len(self._known) == shards else None

    def note(self, shard: int, samples: int, fingerprint: str, name: str) -> None:
        """Record the samples of a shard. Raises DataError if the shard had others before."""
        known = self._known.get(shard)
        if known is None:
            with writing_cache(self._path.parent), FileLock(self._path.with_suffix(".lock")):
                self._read()
                known = self._known.get(shard, (samples, fingerprint))
                self._known = {**self._known, shard: known}
                draft = self._path.with_suffix(f".part-{os.getpid()}")
                draft.write_bytes(seal({str(each): entry for each, entry in self._known.items()}))
                os.replace(draft, self._path)
        if known != (samples, fingerprint):
            raise DataError(
                f"{name}: its files have changed since it was first encoded; restore them, or delete {self._path} "
                "and begin a new run"
            )

    def _read(self) -> None:
        """Read the file. If it is damaged, its shards are counted again."""
        with suppress(OSError, ValueError, TypeError):
            found = {
                int(shard): (int(count), str(print_)) for shard, (count, print_) in read_sealed(self._path).items()
            }
            self._known = {**found, **self._known}
