"""Where each rank looks up and scores its slice of the vocabulary (Vocabulary Parallelism, arXiv 2411.05288).

Rows of embedding and head are split over the pipeline's ranks, so that neither end is the fullest or the slowest:

    L   every rank looks up, before F of stage 0, which works on the sum
    S   every rank scores what F of the last stage gave, before the last stage's backward, which needs all scores
    T   the slice's own gradient of S, some time after
    G   the slice's own gradient of L, after the backward of stage 0

The order of F, I, W and B stays as it is. It is played, with the times that the ops take, and what a slice has to do is
put where it comes up: S as soon as there is something to score, since the last stage waits for it; L ahead of its use;
G when its gradient is there; T where the rank would wait, and before anything else once `PENDING` are left. An op that
would keep the rank busy when the next S comes up lets what else is there go first.

What is written down is an order in which everything was run, so it cannot deadlock; like any schedule it is checked.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from atoll.errors import ScheduleError
from atoll.ir.action import Action, Op
from atoll.ir.residency import refuse_if
from atoll.ir.schedule import Schedule

AHEAD = 2
"""Microbatches that are looked up before stage 0 begins with the one before them."""

PENDING = 2
"""Scores whose gradient for the slice a rank puts off at a time: each keeps its logits."""


def insert_vocabulary(schedule: Schedule, *, score: float = 1.0, hop: float = 0.0) -> Schedule:
    """L, S, T and G of every rank, in a schedule that has none.

    score: how long an S takes against a rank's forward of a microbatch; a T takes half of it, one product of two.
    hop: latency of a message, likewise.

    Raises ScheduleError for a schedule that is lowered already, for one that runs no backward, and for other sizes.
    """
    is_lowered = schedule.has_sharding or schedule.has_messages or schedule.has_vocabulary
    refuse_if(is_lowered, schedule, "insert_vocabulary", "a schedule of F, I, W and B alone")
    if not schedule.has_backward:
        raise ScheduleError(f"insert_vocabulary takes a schedule for training, and {schedule} runs nothing backward")
    for name, value in (("score", score), ("hop", hop)):
        if not (math.isfinite(value) and value >= 0):
            raise ScheduleError(f"{name} = {value}: it must be a finite number, 0 or more")
    plays = [_Play(schedule, score * schedule.chunks, hop * schedule.chunks, waits=waits) for waits in (False, True)]
    best = min(plays, key=lambda play: play.finish)
    return Schedule(schedule.name, schedule.placement, schedule.microbatches, tuple(map(tuple, best.rows)))


_TIMES = {Op.F: 1.0, Op.I: 1.0, Op.W: 1.0, Op.B: 2.0, Op.L: 0.0, Op.G: 0.0}


class _Play:
    """One run of the schedule. `rows` is what every rank did, `finish` when the last of them was done.

    A rank is looked at when it is free and something may have arrived.  waits: whether a rank that knows when the next
    S comes up idles rather than be late for it.
    """

    def __init__(self, schedule: Schedule, score: float, hop: float, *, waits: bool) -> None:
        table, self._ranks = schedule.table, schedule.ranks
        self._table, self._hop, self._waits, self._size = table, hop, waits, schedule.microbatches
        self._times = {**_TIMES, Op.S: score, Op.T: score / 2}
        self.rows: list[list[Action]] = [[] for _ in range(self._ranks)]
        self.finish = 0.0
        self._next = table.offset[:-1]
        self._free = [0.0] * self._ranks
        self._end: dict[Action, float] = {}
        # Of look-ups and scores: how many ranks have run a microbatch's, and when the last of them arrives.
        self._done = {op: [0] * self._size for op in (Op.L, Op.S)}
        self._all = {op: [0.0] * self._size for op in (Op.L, Op.S)}
        self._coming: list[dict[Op, deque[tuple[float, int]]]] = [
            {op: deque() for op in (Op.L, Op.G, Op.S, Op.T)} for _ in range(self._ranks)
        ]
        last = schedule.stages - 1
        self._first, self._last = 0, last
        self._looked_up = deque(a.microbatch or 0 for a in schedule.actions[0] if (a.stage, a.op) == (0, Op.F))
        self._wakes: list[tuple[float, int]] = []
        for _ in range(AHEAD):
            self._announce_look_up(0.0)
        for rank in range(self._ranks):
            heapq.heappush(self._wakes, (0.0, rank))
        while self._wakes:
            now, rank = heapq.heappop(self._wakes)
            if now >= self._free[rank]:
                self._look(now, rank)

    def _announce_look_up(self, time: float) -> None:
        if self._looked_up:
            self._announce(Op.L, self._looked_up.popleft(), time, source=-1)

    def _announce(self, op: Op, microbatch: int, time: float, *, source: int) -> None:
        """Every rank can run `op` from `time` on, those other than `source` a hop later."""
        for rank in range(self._ranks):
            arrival = time if rank == source or source < 0 else time + self._hop
            self._coming[rank][op].append((arrival, microbatch))
            heapq.heappush(self._wakes, (max(arrival, self._free[rank]), rank))

    def _look(self, now: float, rank: int) -> None:
        """Begin what the rank should do now, if there is anything."""
        coming = self._coming[rank]

        def is_there(op: Op) -> bool:
            return bool(coming[op]) and coming[op][0][0] <= now

        for op in (Op.L, Op.G, Op.S):
            if is_there(op):
                self._begin(Action(rank, op, coming[op].popleft()[1]), now, rank)
                return
        cell = self._next[rank]
        action = self._table.cells[cell] if cell < self._table.offset[rank + 1] else None
        arrival = math.inf if action is None else self._arrival(cell, rank)
        has_to_wait = arrival > now
        if action is not None and self._waits and coming[Op.S] and not has_to_wait:
            due = coming[Op.S][0][0]
            late = now + self._times[action.op] - due
            has_to_wait = late > due - now
        if is_there(Op.T) and (has_to_wait or len(coming[Op.T]) > PENDING):
            self._begin(Action(rank, Op.T, coming[Op.T].popleft()[1]), now, rank)
        elif action is not None and not has_to_wait:
            self._next[rank] += 1
            self._begin(action, now, rank)
        elif math.isfinite(arrival) and arrival > now:
            heapq.heappush(self._wakes, (arrival, rank))

    def _begin(self, action: Action, now: float, rank: int) -> None:
        end = now + self._times[action.op]
        self.rows[rank].append(action)
        self._free[rank] = end
        self.finish = max(self.finish, end)
        heapq.heappush(self._wakes, (end, rank))
        microbatch = action.microbatch or 0
        if action.op is Op.L or action.op is Op.S:
            self._gather(action.op, microbatch, end, rank)
            return
        self._end[action] = end
        if action.op is Op.F:
            if action.stage == self._first:
                self._announce_look_up(now)
            if action.stage == self._last:
                self._announce(Op.S, microbatch, end, source=rank)
        elif action.op in (Op.I, Op.B):
            if action.stage == self._first:
                self._announce(Op.G, microbatch, end, source=rank)
            if action.stage == self._last:
                self._announce(Op.T, microbatch, end, source=rank)
        for woken in self._woken(action):
            heapq.heappush(self._wakes, (max(end, self._free[woken]), woken))

    def _gather(self, op: Op, microbatch: int, end: float, rank: int) -> None:
        """A rank has run its look-up or score, which the first or the last stage waits for together with all others."""
        hub = self._table.rank_of_stage[self._first if op is Op.L else self._last]
        arrival = end if rank == hub else end + self._hop
        self._all[op][microbatch] = max(self._all[op][microbatch], arrival)
        self._done[op][microbatch] += 1
        if self._done[op][microbatch] == self._ranks:
            heapq.heappush(self._wakes, (max(self._all[op][microbatch], self._free[hub]), hub))

    def _woken(self, action: Action) -> Sequence[int]:
        """Ranks that may wait for what an action gives."""
        match action.op:
            case Op.F:
                stage = min(action.stage + 1, self._last)
            case Op.I | Op.B:
                stage = max(action.stage - 1, 0)
            case _:
                return ()
        return (self._table.rank_of_stage[stage],)

    def _arrival(self, cell: int, rank: int) -> float:
        """When what a compute action works on is there; infinite while that is not known."""
        action = self._table.cells[cell]
        gathered = None
        if action.op is Op.F and action.stage == self._first:
            gathered = Op.L
        elif action.op in (Op.I, Op.B) and action.stage == self._last:
            gathered = Op.S
        if gathered is not None:
            microbatch = action.microbatch or 0
            is_complete = self._done[gathered][microbatch] == self._ranks
            return self._all[gathered][microbatch] if is_complete else math.inf
        needed = self._table.need[cell]
        if needed < 0:
            return 0.0
        hop = self._hop if self._table.crosses[cell] else 0.0
        return self._end.get(self._table.cells[needed], math.inf) + hop
