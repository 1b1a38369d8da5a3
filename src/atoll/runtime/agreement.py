"""What the ranks of a run agree on before any of them acts, and how the first error of one becomes that of all.

a refusal   found before anything was sent: every rank raises it, and goes on with the next call
an error    inside a guarded section: the first one is told to the run's monitor; every rank leaves with it, and one
            that hangs is ended by its watch (`atoll.runtime.failure`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed import Store

from atoll.errors import AtollError, DamageError, RankError, RunError
from atoll.runtime.failure import CAUSE_SECONDS, Doing, Watch
from atoll.runtime.launch import SILENCE_SECONDS, host_of_ranks, watch_by
from atoll.runtime.transport import Later, Transport, world_store
from atoll.runtime.verdict import named

DIGESTS = 1 << 16
"""Digests are below it, so that sums of their squares over many ranks are exact in float64."""


@dataclass(frozen=True, slots=True)
class Question:
    """An agreement under way: whether any rank has a problem, and the sum of a count."""

    key: str
    problem: Exception | None
    totals: Later


class Agreement:
    """Owns the watch of one rank, or shares that of its process; `close` ends its own."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._rank = transport.place.rank
        store = world_store()
        # Ranks count their engines in the store: a process may have been a rank of other worlds before.
        self._name = 0 if store is None else store.add(f"atoll/engines/{self._rank}", 1)
        self._watch = Watch.current or _new_watch(store, transport, f"engine {self._name}")
        self._asked = 0
        self._refusal: Exception | None = None

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not Watch.current:
            self._watch.stop()

    @contextmanager
    def guard(self, what: str, doing: Callable[[], Doing | None] | None = None) -> Iterator[None]:
        """A section in which this rank may wait for others; an error there becomes the first error of any rank.

        what: what this rank does in it.  doing: more exactly, where that is known; else it waits for all others.
        """
        everyone = Doing(what, tuple(range(self._watch.world)))
        try:
            with self._watch.section(lambda: (doing and doing()) or everyone):
                yield
        except BaseException as error:
            if error is self._refusal:
                raise
            if isinstance(error, (SystemExit, KeyboardInterrupt)):
                # Nobody may leave alone, whatever exit code was asked for.
                left = RunError(f"rank {self._rank} left in {what}: {type(error).__name__}: {error}")
                self._watch.report(left)
                self.close()
                if isinstance(error, SystemExit):
                    raise left from error
                raise
            other = None
            if isinstance(error, Exception) and not isinstance(error, RankError):
                other = self._fail(error)
            self.close()
            if other is not None:
                raise other from error
            raise

    def begin(self, problem: Exception | None, count: float = 0.0) -> Question:
        """Ask all ranks whether they have a problem, and for the sum of `count`; all ask in one order."""
        self._asked += 1
        key = f"engine {self._name} refusal {self._asked}"
        if problem is not None:
            self._watch.report(problem, key=key)
        is_damage = isinstance(problem, DamageError)
        said = torch.tensor([float(problem is not None), float(is_damage), count], dtype=torch.float64)
        return Question(key, problem, self._transport.total_later(said))

    def end(self, question: Question) -> float:
        """The sum; or raise the first rank's problem on every rank: a DamageError if all problems are.

        Nothing has been sent or changed where it raises, so the ranks go on with the next call.
        """
        problems, damages, count = question.totals.wait().tolist()
        if not problems:
            return float(count)
        problem = question.problem
        only_damage = problems == damages
        if problem is None or (isinstance(problem, DamageError) and not only_damage):
            found = self._watch.first(wait=5.0, key=question.key)
            problem = found or RunError("another rank refused without a word")
            if only_damage:
                problem = DamageError(str(problem))
        self.refuse(problem)
        raise problem

    def agree(self, problem: Exception | None, count: float = 0.0) -> float:
        """Ask, and wait for the answer."""
        return self.end(self.begin(problem, count))

    def agree_on(self, digests: Sequence[int], problem: Exception) -> None:
        """Raise a problem on every rank unless the digests of each place are the same on all ranks that have one there.

        digests: any number for each place; a rank that has nothing to say of a place gives -1 for it.
        """
        own = torch.tensor([max(0, digest) % DIGESTS for digest in digests], dtype=torch.float64)
        has = torch.tensor([float(digest >= 0) for digest in digests], dtype=torch.float64)
        holders, total, square = self._transport.total(torch.cat([has, own * has, own * own * has])).chunk(3)
        # Equal numbers alone have a sum whose square is their count times the sum of their squares.
        if bool((total * total != holders * square).any()):
            self.refuse(problem)
            raise problem

    def refuse(self, problem: Exception) -> None:
        """What all ranks are about to raise: the run goes on with the next call."""
        self._refusal = problem

    def _fail(self, error: Exception) -> AtollError | None:
        """The error that this rank leaves with instead of `error`: the first one of any rank."""
        if not isinstance(error, AtollError) or "Connection" in str(error) or "Timed out" in str(error):
            earlier = self._watch.first(wait=CAUSE_SECONDS)
            if earlier is not None and earlier.rank != self._rank:
                return earlier
            left = self._watch.left() if "Connection" in str(error) else []
            if left:
                error = RunError(
                    f"{named(left)} left the run while rank {self._rank} waits for all: its program ended, as by "
                    f"sys.exit. All ranks leave behind the same step ({error})"
                )
                self._watch.report(error)
                return error
        self._watch.report(error)
        return None


def _new_watch(store: Store | None, transport: Transport, name: str) -> Watch:
    """A watch for an engine of a script that somebody else launched; all ranks ask in one order."""
    rank, world = transport.place.rank, transport.place.mesh.world
    if store is None:
        return Watch(None, rank, world)
    host = host_of_ranks()
    return watch_by(store, rank, world, host=host, limit=SILENCE_SECONDS, name=name)
