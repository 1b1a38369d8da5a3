"""List scheduling: whenever a rank is free, its most urgent forward or input gradient that may run, else a W.

[Note: list scheduling]
1. Every rank has queues of F and I. Only the head of a queue can run; a smaller key is more urgent.
2. A head may run when its input has arrived, when its key is within `look_ahead` of the smallest of the rank's heads,
and, an F, when the rank keeps fewer than `cap` chunks between F and W.
3. If none may run, the oldest pending W runs; or, with `is_patient`, the rank waits if a head that may run arrives
   before that W would end.
4. An idle rank waits for an arrival. If no event is left but actions are, it is a deadlock without a result.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.schedule import ActionRows
from atoll.plans.schedules.timing import Timing


class Keyed(NamedTuple):
    """A forward or an input gradient and its urgency."""

    key: float
    action: Action


@dataclass(frozen=True, slots=True)
class ListRules:
    """Choice rules of a list scheduler: see the note above. `cap` is in chunks."""

    cap: int
    look_ahead: float = math.inf
    is_patient: bool = False


class Listed(NamedTuple):
    """An order, the end of its last action, and the largest span of a rank."""

    rows: ActionRows
    makespan: float
    span: float


def list_schedule(
    placement: Placement, queues: Sequence[Sequence[Sequence[Keyed]]], timing: Timing, rules: ListRules
) -> Listed | None:
    """Return the order of every rank from its queues, `queues[rank]`, or None if it deadlocks."""
    lister = _Lister(placement, queues, timing, rules)
    return lister.run()


class _Lister:
    """The state of one run."""

    def __init__(
        self, placement: Placement, queues: Sequence[Sequence[Sequence[Keyed]]], timing: Timing, rules: ListRules
    ) -> None:
        self.rules, self.timing = rules, timing
        self.last_stage = placement.stages - 1
        self.rank_of = [placement.rank_of(stage) for stage in range(placement.stages)]
        self.queues = [[deque(queue) for queue in of_rank] for of_rank in queues]
        self.left = sum(len(queue) for of_rank in queues for queue in of_rank)
        ranks = placement.ranks
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.free = [0.0] * ranks
        self.began = [0.0] * ranks
        self.pending: list[deque[Action]] = [deque() for _ in range(ranks)]
        self.kept = [0] * ranks
        self.busy = [0.0] * timing.hops.links  # until when, per link
        self.arrived: dict[tuple[int, Op, int | None], float] = {}
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in range(ranks)]

    def run(self) -> Listed | None:
        """Process events in the order of (time, rank) until none is left."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.free[rank] > now:
                continue
            head, can_wait = self.choose(rank, now)
            if head is not None:
                self.start(rank, now, head.popleft().action)
            elif self.pending[rank] and not can_wait:
                self.start(rank, now, self.pending[rank].popleft())
        if self.left:
            return None
        spans = [end - began for end, began in zip(self.free, self.began, strict=True)]
        return Listed(tuple(map(tuple, self.rows)), max(self.free), max(spans))

    def choose(self, rank: int, now: float) -> tuple[deque[Keyed] | None, bool]:
        """Return the queue whose head runs, if any, and whether to wait for an arriving head instead of running a W."""
        heads = [queue for queue in self.queues[rank] if queue]
        if not heads:
            return None, False
        limit = min(queue[0].key for queue in heads) + self.rules.look_ahead
        is_full = self.kept[rank] >= self.rules.cap
        patience = self.timing.takes[rank][Op.W.code] if self.rules.is_patient else 0.0
        best, can_wait = None, False
        for queue in heads:
            key, action = queue[0]
            if key > limit or (is_full and action.op is Op.F):
                continue
            arrival = self.arrival(action)
            if arrival <= now:
                if best is None or key < best[0].key:
                    best = queue
            elif arrival < now + patience:
                can_wait = True
        return best, can_wait

    def arrival(self, action: Action) -> float:
        """Return the time at which the action's input is available; infinite before it is computed."""
        if action.op is Op.F and action.stage == 0:
            return 0.0
        return self.arrived.get((action.stage, action.op, action.microbatch), math.inf)

    def start(self, rank: int, now: float, action: Action) -> None:
        """Run the action, and announce the arrival of its result to its user."""
        row = self.rows[rank]
        if not row:
            self.began[rank] = now
        row.append(action)
        end = now + self.timing.stages[action.stage][action.op.code]
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))
        if action.op is Op.W:
            self.kept[rank] -= 1
            return
        self.left -= 1
        stage, op = action.stage, action.op
        hop = (self.timing.hops.forward if op is Op.F else self.timing.hops.backward)[stage]
        if op is Op.F:
            self.kept[rank] += 1
            stage, op = (stage, Op.I) if stage == self.last_stage else (stage + 1, op)
        else:
            self.pending[rank].append(Action(stage, Op.W, action.microbatch))
            stage -= 1
            if stage < 0:
                return
        user = self.rank_of[stage]
        arrival = end
        if hop.link >= 0:
            arrival = self.busy[hop.link] = max(end, self.busy[hop.link]) + hop.seconds
        arrival += hop.latency
        self.arrived[stage, op, action.microbatch] = arrival
        heapq.heappush(self.events, (arrival, user))
