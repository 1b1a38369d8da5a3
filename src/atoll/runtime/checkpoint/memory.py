"""Checkpoints in the memory of the hosts, which outlives the processes of a run: `checkpoint.memory`.

    <memory>/<run>/identity                     where the run's folder says that it is this run: a path
                   rank-3/step-000008           all that rank 3 holds after 8 steps: `generation.py`
                   rank-3/.writing              being written

[Note: two generations] A rank overwrites its older generation, so it needs twice its state. The ranks agree before,
and each does so once it has written the newer one: that is complete on all of them by then. So at any moment there is a
step of which every rank has a generation.

[Note: replicas] Ranks whose pieces are equal in name, range and dtype hold the same bits. Which ones these are is found
when a generation is written, and is in its header. A rank without a file takes that of a replica: on its own host it
reads it, otherwise it receives it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atoll.base.digests import digest
from atoll.base.documents import read_text
from atoll.base.errors import CheckpointError, DamageError
from atoll.base.machine import free_memory
from atoll.base.units import format_bytes
from atoll.runtime.checkpoint.folders import step_folder
from atoll.runtime.checkpoint.generation import Generation, size_of_body, write_generation
from atoll.runtime.checkpoint.meeting import Meeting
from atoll.runtime.checkpoint.pieces import Claim, Piece

_LONGEST = timedelta(hours=1)
"""Time limit for a rank that copies its state; silent ones are detected by the run's watch."""
_SLACK = 1 << 16
"""Bytes for a header, at first; it may need more."""
_LOST = "the state in host memory"
_IDENTITY, _WRITING = "identity", ".writing"
_RANK, _STEP = re.compile(r"rank-(\d{1,9})"), re.compile(r"step-(\d{1,15})")


class KeptFile(NamedTuple):
    """A generation that a rank sees on its host. rank: whose state it is.  replicas: for whom it is good."""

    rank: int
    step: int
    nbytes: int
    replicas: Sequence[int]


class StateSource(NamedTuple):
    """Where a rank's state comes from: a rank that sees it, and whose file it is."""

    by: int
    rank: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """The newest step of which every rank has its state.

    path: this rank's generation, or that of a replica on its host; None if there is no such step.
    received: rank -> the replica whose state it takes.  notes: why newer ones, or some files, are not used.
    """

    step: int
    path: Path | None
    received: Mapping[int, int]
    notes: tuple[str, ...]


class MemoryCheckpoints:
    """The generations of this rank; every rank creates it and calls its methods.

    root: a folder of this user's own in memory, or None if this host has none.  plan: digest of the plan.
    """

    def __init__(self, root: Path | None, *, plan: str) -> None:
        self._meeting = Meeting.apart(_LONGEST)
        self._root, self._plan, self._run = root, plan, ""
        self._problem: CheckpointError | None = None
        self._lock = -1

    @property
    def _folder(self) -> Path:
        assert self._root is not None, "the ranks have agreed that they have one"
        return self._root / self._run

    @property
    def _own(self) -> Path:
        return self._folder / f"rank-{self._meeting.rank}"

    def open(self, run: str | None, identity: Path) -> None:
        """Use the generations of a run, and remove those of this user's runs that are gone.

        run: its id, on the first rank at least.  identity: a file that has the id for as long as the run's folder is
        there.

        Raises CheckpointError on every rank if any has no memory to keep state in.
        """
        self._run = self._meeting.round(_LOST, lambda: run, lambda said: [said[0] or ""] * len(said))
        self.close()
        self._meeting.round(_LOST, lambda: self._open(identity))

    def _open(self, identity: Path) -> None:
        if self._root is None:
            raise CheckpointError("this host has no folder in memory: /dev/shm, or the one that ATOLL_MEMORY names")
        if not self._run:
            return
        try:
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._folder, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_SH)  # before it could be taken for one of a run that is gone
            (self._folder / _IDENTITY).write_text(str(identity.absolute()))
        except OSError as error:
            raise CheckpointError(f"{self._own} cannot be written: {error.strerror}") from error
        for other in sorted(self._root.iterdir()):
            if other.name != self._run and _is_left(other):
                shutil.rmtree(other, ignore_errors=True)

    # ---- during the run

    def keep(
        self, path: Path, pieces: Sequence[Piece], state: Mapping[str, Any], *, identity: Mapping[str, Any]
    ) -> None:
        """Write what this rank holds and the state as a generation with the name of `path`.

        Raises CheckpointError on every rank, before anything is written, if any has no room.
        """
        offered = {piece.claim: piece for piece in pieces}
        replicas = self._meeting.round(_LOST, lambda: self._prepare(list(offered)), _equal)
        older = sorted(self._steps())[:-1]
        draft = self._own / _WRITING
        try:
            if older:  # see [Note: two generations]; the memory is this rank's already
                self._path(older[0]).rename(draft)
                _reserve(draft, size_of_body(offered))
            facts = {"run": self._run, "plan": self._plan, "step": identity["step"], "rank": self._meeting.rank}
            write_generation(
                draft, offered, {**facts, "replicas": replicas, "state": dict(state), "identity": dict(identity)}
            )
            draft.rename(self._own / path.name)
        except (OSError, ValueError, TypeError) as error:  # the others are told when they keep the next one
            self._problem = CheckpointError(f"rank {self._meeting.rank} could not write {draft}: {error}")

    def _prepare(self, claims: Sequence[Claim]) -> str:
        """Make room for a generation where there is none to overwrite. Return a digest of what this rank holds."""
        if self._problem is not None:
            raise self._problem
        count = len(self._steps())
        if count < 2:
            self._make_room(size_of_body(claims), files=2 - count)
        return digest(repr([claim.words for claim in claims]).encode())

    def _make_room(self, size: int, files: int = 1) -> None:
        """Reserve memory for a file that is written next. files: how many of the size are to come.

        Raises CheckpointError if there is not enough.
        """
        rank = self._meeting.rank
        try:
            with _locked(self._folder.parent):  # ranks of a host ask one after the other
                found = os.statvfs(self._folder)
                left, draft = min(found.f_bavail * found.f_frsize, free_memory()), self._own / _WRITING
                left += draft.stat().st_size if draft.exists() else 0
                if left < files * size:
                    raise CheckpointError(
                        f"rank {rank} needs {format_bytes(files * size)} in {self._folder.parent}, and "
                        f"{format_bytes(left)} are left"
                    )
                _reserve(draft, size)
        except OSError as error:
            raise CheckpointError(f"rank {rank} cannot write to {self._own}: {error.strerror}") from error

    def drop_after(self, step: int) -> None:
        """Remove this rank's generations of later steps."""
        for later in [each for each in self._steps() if each > step]:
            self._path(later).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all generations of the run on this host, once no rank needs them."""
        self.close()
        if self._root is not None and self._run:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Leave the generations to the next start."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _steps(self) -> list[int]:
        return [step for _, step, _ in _files(self._folder, self._own.name)]

    def _path(self, step: int, rank: int | None = None) -> Path:
        return step_folder(self._own if rank is None else self._folder / f"rank-{rank}", step)

    # ---- at the start

    def recover(self, after: int) -> Recovery:
        """Return the newest step later than `after` of which every rank has its state; ranks whose hosts lost it have
        received it from a replica.

        Raises CheckpointError on every rank if any has no room for what it would receive.
        """
        notes: list[str] = []
        while True:
            step, sources, said = self._meeting.round(_LOST, self._look, lambda each: _agreed(each, after))
            notes += said
            if step is None:
                return Recovery(0, None, {}, notes=tuple(dict.fromkeys(notes)))
            chosen = [StateSource(*each) for each in sources]
            damaged = self._meeting.round(_LOST, partial(self._verify, step, chosen), _all)
            if not damaged:
                break
            notes += damaged
        path = self._take(step, chosen)
        self.drop_after(step)
        received = {rank: source.rank for rank, source in enumerate(chosen) if source.rank != rank}
        return Recovery(step, path, received, notes=tuple(dict.fromkeys(notes)))

    def _look(self) -> tuple[list[KeptFile], list[str]]:
        """Return the generations that this rank sees, and what it removes because no rank can use it."""
        seen, notes = [], []
        for rank, step, path in _files(self._folder):
            try:
                found = Generation(path)
                if (found.run, found.step) != (self._run, step) or rank not in found.replicas:
                    raise DamageError(f"{path} is step {found.step} of rank {found.rank} of the run {found.run}")
                if found.plan == self._plan:
                    seen.append(KeptFile(rank, step, found.nbytes, replicas=found.replicas))
                    continue
                notes.append(f"the state of step {step} in host memory is of another plan")
            except FileNotFoundError:  # another rank of this host has removed it
                continue
            except DamageError as error:
                notes.append(str(error))
            path.unlink(missing_ok=True)
        return seen, notes

    def _verify(self, step: int, sources: Sequence[StateSource]) -> list[str]:
        """Check the files that this rank reads, remove damaged ones, and make room for the one that it receives."""
        notes, rank = [], self._meeting.rank
        for file in sorted({source.rank for source in sources if source.by == rank}):
            try:
                Generation(self._path(step, file)).verify()
            except (DamageError, OSError) as error:
                notes.append(str(error))
                self._path(step, file).unlink(missing_ok=True)
        if sources[rank].by != rank:
            self._make_room(sources[rank].nbytes)
        return notes

    def _take(self, step: int, sources: Sequence[StateSource]) -> Path:
        """Return this rank's generation of a step, once those that ranks receive are there and have been checked."""
        own, draft = self._meeting.rank, self._own / _WRITING
        for rank, source in enumerate(sources):  # in one order on all ranks, so that no two wait for each other
            if source.by != rank and own in (rank, source.by):
                path = draft if own == rank else self._path(step, source.rank)
                content = torch.from_file(str(path), shared=own == rank, size=source.nbytes, dtype=torch.uint8)
                self._meeting.hand(content, source=source.by, target=rank)
        source = sources[own]
        if source.by == own:
            path = self._path(step, source.rank)
        else:
            os.truncate(draft, source.nbytes)
            path = draft.rename(self._path(step))
        self._meeting.round(_LOST, lambda: Generation(path).verify() if source.by != own else None)
        return path


def _agreed(said: Sequence[Any], after: int) -> list[Any]:
    """Return, for each rank, the step that all continue from, the source of each, and what there is to say."""
    seen = [[KeptFile(*file) for file in files] for files, _ in said]
    notes = [note for _, own in said for note in own]
    step, sources, missing = choose_sources(seen, after)
    for each, ranks in missing.items():
        several = "s" * (len(ranks) > 1)
        notes.append(
            f"the state of step {each} in host memory is not whole: there is none of rank{several} "
            f"{', '.join(map(str, ranks))} or of a rank that holds the same"
        )
    return [[step, sources, notes]] * len(said)


def choose_sources(
    seen: Sequence[Sequence[KeptFile]], after: int
) -> tuple[int | None, list[StateSource], dict[int, list[int]]]:
    """Return the newest step later than `after` of which every rank has a source, and these sources.

    seen: the files that each rank sees on its host.

    A rank reads its own file, otherwise one of a replica on its host; otherwise one is sent, by the rank that sends the
    fewest. Also returns, of each newer step, the ranks without a source.
    """
    missing: dict[int, list[int]] = {}
    for step in sorted({file.step for files in seen for file in files if file.step > after}, reverse=True):
        offers = [(by, file) for by, files in enumerate(seen) for file in files if file.step == step]
        own = {rank: StateSource(rank, rank, file.nbytes) for rank, file in offers if file.rank == rank}
        sent = Counter[int]()
        for rank in range(len(seen)):
            good = [] if rank in own else [(by, file) for by, file in offers if rank in file.replicas]
            if good:
                by, file = min(good, key=lambda each: (each[0] != rank, each[1].rank != rank, sent[each[0]], each[0]))
                own[rank] = StateSource(by, file.rank, file.nbytes)
                sent[by] += by != rank
        if len(own) == len(seen):
            return step, [own[rank] for rank in range(len(seen))], missing
        missing[step] = [rank for rank in range(len(seen)) if rank not in own]
    return None, [], missing


def _equal(held: Sequence[str]) -> list[list[int]]:
    """Return, for each rank, the ranks that hold the same."""
    by_digest: dict[str, list[int]] = {}
    for rank, each in enumerate(held):
        by_digest.setdefault(each, []).append(rank)
    return [by_digest[each] for each in held]


def _all(said: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[each for own in said for each in own]] * len(said)


def _files(folder: Path, owner: str = "*") -> list[tuple[int, int, Path]]:
    """Return the rank, the step and the path of the generations in a run's folder."""
    found = []
    for path in sorted(folder.glob(f"{owner}/step-*")):
        rank, step = _RANK.fullmatch(path.parent.name), _STEP.fullmatch(path.name)
        if rank is not None and step is not None:
            found.append((int(rank[1]), int(step[1]), path))
    return found


def _reserve(path: Path, size: int) -> None:
    """Give a file the memory of `size` bytes and a header, so that no write to its pages fails. Raises OSError."""
    with path.open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, size + _SLACK)


def _is_left(folder: Path) -> bool:
    """Return True for generations of a run whose ranks have ended and whose folder is gone, or of another run."""
    try:
        with _locked(folder, waits=False):
            identity = Path(read_text(folder / _IDENTITY, limit=1 << 16))
            return folder.name not in read_text(identity, limit=1 << 16)
    except BlockingIOError:
        return False
    except (OSError, ValueError):
        return (folder / _IDENTITY).is_file()


@contextmanager
def _locked(folder: Path, *, waits: bool = True) -> Iterator[None]:
    """Context in which no other process has the folder locked. Raises BlockingIOError instead of waiting."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)
