"""What the ranks of a run agree on before any of them acts, and how the first error of one becomes that of all.

a refusal   found before anything was sent: every rank raises it, and goes on with the next call
an error    inside a guarded section: the first one is written to the store that the ranks met at; every rank leaves
            with it, and one that hangs is ended by its watchdog (`atoll.runtime.failure`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from atoll.errors import AtollError, DamageError, RankError, RunError
from atoll.runtime import failure
from atoll.runtime.transport import Later, Transport, world_store

DIGESTS = 1 << 16
"""Digests are below it, so that sums of their squares over many ranks are exact in float64."""


@dataclass(frozen=True, slots=True)
class Question:
    """An agreement under way: whether any rank has a problem, and the sum of a count."""

    key: str
    problem: Exception | None
    totals: Later


class Agreement:
    """Owns the watchdog and the store of one rank; `close` ends them."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._rank = transport.place.rank
        self._store = world_store()
        self._watchdog = failure.Watchdog(self._store, self._rank).start()
        self._asked = 0
        self._refusal: Exception | None = None

    def close(self) -> None:
        """Stop watching."""
        self._watchdog.stop()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """A section in which this rank may wait for others; an error there becomes the first error of any rank."""
        self._watchdog.enter()
        try:
            yield
        except BaseException as error:
            self._watchdog.leave()
            if error is self._refusal:
                raise
            self._watchdog.stop()
            other = None
            if isinstance(error, Exception) and not isinstance(error, RankError):
                other = self._fail(error)
            if other is not None:
                raise other from error
            raise
        self._watchdog.leave()

    def begin(self, problem: Exception | None, count: float = 0.0) -> Question:
        """Ask all ranks whether they have a problem, and for the sum of `count`; all ask in one order."""
        self._asked += 1
        key = f"atoll/refusal/{self._asked}"
        if problem is not None:
            failure.report(self._store, problem, self._rank, key=key)
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
            found = failure.first(self._store, wait=5.0, key=question.key)
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
            earlier = failure.first(self._store, wait=1.0)
            if earlier is not None and earlier.rank != self._rank:
                return earlier
        failure.report(self._store, error, self._rank)
        return None
