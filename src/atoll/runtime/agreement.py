"""Agreement between the ranks of a run before they act, and propagation of the first error to all ranks.

a refusal   found before anything is sent: every rank raises it, and continues with the next call
an error    inside a guarded section: the first one is reported to the run's monitor; every rank raises it, and the
            watch ends a rank that hangs (`atoll.runtime.failure`)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed import Store

from atoll.base.errors import AtollError, DamageError, RankError, RunError
from atoll.runtime.failure import CAUSE_SECONDS, UNKNOWN, Doing, Pace, Watch
from atoll.runtime.rendezvous import host_of_ranks, watch_by
from atoll.runtime.transport import Later, Transport, world_store
from atoll.runtime.verdict import named

DIGESTS = 1 << 16
"""Digests are below this number, so sums of their squares over many ranks are exact in float64."""


@dataclass(frozen=True, slots=True)
class Question:
    """An agreement in progress: whether any rank has a problem, and the sum of a count."""

    key: str
    problem: Exception | None
    totals: Later


class Agreement:
    """Owns the watch of one rank, or shares that of its process; `close` ends its own.

    steps, evaluations: durations of these. An agreement before a step may take as long as the step.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._rank = transport.place.rank
        store = world_store()
        # Ranks count their engines in the store: a process may have been a rank of other worlds before.
        self._name = 0 if store is None else store.add(f"atoll/engines/{self._rank}", 1)
        self._watch = Watch.current or _new_watch(store, transport, f"engine {self._name}")
        self.steps, self.evaluations = Pace(), Pace()
        self._asked = 0
        self._refusal: Exception | None = None

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not Watch.current:
            self._watch.stop()

    @contextmanager
    def guard(
        self, what: str, doing: Callable[[], Doing | None] | None = None, *, pace: Pace = UNKNOWN
    ) -> Iterator[None]:
        """Context in which this rank may wait for others. An error in it becomes the first error of any rank.

        what: the current work of this rank.  doing: a more exact description, if known; otherwise it waits for all
        others.
        pace: time limit of the section, measured from the durations of the more exact work.
        """
        begin = time.monotonic()
        try:
            with self._watch.section(what, doing, pace):
                yield
            if doing is not None and pace is not UNKNOWN:
                pace.took(time.monotonic() - begin)
        except BaseException as error:
            if error is self._refusal:
                raise
            if isinstance(error, (SystemExit, KeyboardInterrupt)):
                # No rank may leave alone, whatever its exit code.
                left = RunError(f"rank {self._rank} left in {what}: {type(error).__name__}: {error}")
                self._watch.report(left)
                self.close()
                if isinstance(error, SystemExit):
                    raise left from error
                raise
            other = None
            if isinstance(error, Exception) and not isinstance(error, RankError):
                other = self._fail(error, what)
            self.close()
            if other is not None:
                raise other from error
            raise

    def begin(self, problem: Exception | None, count: float = 0.0, *, together: bool = False) -> Question:
        """Ask all ranks whether they have a problem, and for the sum of `count`; all ask in one order.

        together: ask only those that take a step together with this one.
        """
        self._asked += 1
        key = f"engine {self._name} refusal {self._asked}"
        if problem is not None:
            self._watch.report(problem, key=key)
        is_damage = isinstance(problem, DamageError)
        said = torch.tensor([float(problem is not None), float(is_damage), count], dtype=torch.float64)
        ask = self._transport.total_together_later if together else self._transport.total_later
        return Question(key, problem, ask(said))

    def end(self, question: Question) -> float:
        """Return the sum, or raise the first rank's problem on every rank; a DamageError if all problems are.

        If it raises, nothing has been sent or changed, so the ranks can continue with the next call.
        """
        problems, damages, count = question.totals.wait().tolist()
        if not problems:
            return float(count)
        problem = question.problem
        only_damage = problems == damages
        if problem is None or (isinstance(problem, DamageError) and not only_damage):
            found = self._watch.first(wait=5.0, key=question.key)
            problem = found or RunError("another rank refused without a message")
            if only_damage:
                problem = DamageError(str(problem))
        self.refuse(problem)
        raise problem

    def agree(self, problem: Exception | None) -> float:
        """Start an agreement and wait for its result."""
        return self.end(self.begin(problem))

    def total(self, value: float) -> float:
        """Return the sum of a number over all ranks."""
        with self.guard("agreeing on a number", pace=self.steps):
            return float(self._transport.total(torch.tensor([value], dtype=torch.float64)))

    def agree_on(self, digests: Sequence[int], problem: Exception) -> None:
        """Raise a problem on every rank unless all ranks with a value have equal digests at each place.

        digests: a number for each place; -1 for places without a value on this rank.
        """
        own = torch.tensor([max(0, digest) % DIGESTS for digest in digests], dtype=torch.float64)
        has = torch.tensor([float(digest >= 0) for digest in digests], dtype=torch.float64)
        holders, total, square = self._transport.total(torch.cat([has, own * has, own * own * has])).chunk(3)
        # Only equal numbers have a sum whose square is their count times the sum of their squares.
        if bool((total * total != holders * square).any()):
            self.refuse(problem)
            raise problem

    def refuse(self, problem: Exception) -> None:
        """Record a refusal that all ranks are about to raise; the run continues with the next call."""
        self._refusal = problem

    def _fail(self, error: Exception, what: str) -> AtollError | None:
        """Return the error that this rank raises instead of `error` in `what`: the first one of any rank."""
        if not isinstance(error, AtollError) or "Connection" in str(error) or "Timed out" in str(error):
            earlier = self._watch.first(wait=CAUSE_SECONDS)
            if earlier is not None and (earlier.rank != self._rank or earlier.speaker is not None):
                return earlier
            orphaned = self._watch.orphaned(what) if "Connection" in str(error) else None
            if orphaned is not None:
                return RunError(f"{orphaned} ({error})")
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
    """Create the watch of an engine in a script that another launcher started; all ranks call it in the same order."""
    rank, world = transport.place.rank, transport.place.mesh.world
    if store is None:
        return Watch(None, rank, world)
    host = host_of_ranks()
    watch, _ = watch_by(store, rank, world, host=host, limit=None, name=name)
    return watch
