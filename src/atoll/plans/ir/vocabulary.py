"""Insertion of look-ups and scores of vocabulary slices (Vocabulary Parallelism, arXiv 2411.05288).

Rows of embedding and head are split over the pipeline ranks, so that neither end is the fullest or the slowest:

    L   every rank looks up, before F of stage 0, which uses the sum
    S   every rank scores the output of the last stage's F, before the last stage's backward, which needs all scores
    T   the slice's own gradient of S, some time after
    G   the slice's own gradient of L, after the backward of stage 0

The order of F, I, W and B is unchanged, so no additional microbatch is in flight, unlike in the paper. It is simulated
with the times of the ops, and the actions of slices are inserted when they become ready: S as soon as there is
something to score, since the last stage waits for it; L ahead of its use; G when its gradient has arrived; T when the
rank would wait, and before anything else once `PENDING` are left. An op that would keep the rank busy when the next S
becomes ready lets other ready ones go first.

The result is an order in which all actions were simulated, so it cannot deadlock; like any schedule it is validated. It
can be lowered if the last stage's backward processes microbatches in the order of its forward.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush, heappushpop

from atoll.base.errors import ScheduleError
from atoll.plans.ir.action import VOCABULARY, Action
from atoll.plans.ir.residency import refuse_if
from atoll.plans.ir.schedule import Schedule
from atoll.plans.ir.table import B, F, G, I, L, S, T, W

_AHEAD = 2
"""Number of microbatches that are looked up before stage 0 begins with the one before them."""

PENDING = 2
"""Maximum number of postponed T of a rank: each keeps its logits."""


def insert_vocabulary(schedule: Schedule, *, score: float = 1.0, hop: float = 0.0) -> Schedule:
    """Insert L, S, T and G of every rank into a schedule that has none.

    score: time of an S relative to a rank's forward of a microbatch; a T takes half of it, one product of two.
    hop: latency of a message, in the same unit.

    Raises ScheduleError for a schedule that is lowered already, for one without a backward, and for invalid sizes.
    """
    is_lowered = schedule.has_sharding or schedule.has_messages or schedule.has_vocabulary
    refuse_if(is_lowered, schedule, "insert_vocabulary", "a schedule of F, I, W and B alone")
    if not schedule.has_backward:
        raise ScheduleError(f"insert_vocabulary takes a schedule for training, and {schedule} has no backward")
    for name, value in (("score", score), ("hop", hop)):
        if not (math.isfinite(value) and value >= 0):
            raise ScheduleError(f"{name} = {value}: it must be a finite number, 0 or more")
    cells = _Cells(schedule, score * schedule.chunks, hop * schedule.chunks)
    plays = [_Play(cells, waits=waits) for waits in (False, True)]
    best = min(plays, key=lambda play: play.finish)
    actions = cells.actions()
    rows = tuple(tuple(map(actions.__getitem__, row)) for row in best.rows)
    return replace(schedule, actions=rows)


_TIMES = {F: 1.0, I: 1.0, W: 1.0, B: 2.0, L: 0.0, G: 0.0}


class _Cells:
    """The input of both runs, in flat arrays.

    table           the schedule's own cells; those of the slices follow them in number: op by op, and rank by rank
    times, hop      code of an op -> its duration; the latency of a message
    takes           cell of the table -> its duration
    users, lags     cell of the table -> the cell that uses its result, or -1; how long after its end that arrives
    """

    def __init__(self, schedule: Schedule, score: float, hop: float) -> None:
        self.table = table = schedule.table
        self.times = {**_TIMES, S: score, T: score / 2}
        self.hop = hop
        self.takes = [self.times[code] for code in table.code]
        self.users = [-1] * len(table.cells)
        self.lags = [0.0] * len(table.cells)
        for cell, needed in enumerate(table.need):
            if needed >= 0:
                self.users[needed] = cell
                self.lags[needed] = hop if table.crosses[cell] else 0.0

    def lags_of(self, end: int) -> list[float]:
        """Return the latency of a message between each rank and the rank of stage `end`."""
        home = self.table.rank_of_stage[end]
        return [0.0 if rank == home else self.hop for rank in range(self.table.placement.ranks)]

    def first(self, code: int) -> list[int]:
        """Return for each rank the cell in which its slice runs an op on microbatch 0; other microbatches follow."""
        ranks, size = self.table.placement.ranks, self.table.microbatches
        start = len(self.table.cells) + (code - L) * ranks * size
        return list(range(start, start + ranks * size, size))

    def actions(self) -> list[Action]:
        """Return the action of each cell, including those of the slices."""
        ranks, microbatches = range(self.table.placement.ranks), range(self.table.microbatches)
        of_slices = [Action(rank, op, number) for op in VOCABULARY for rank in ranks for number in microbatches]
        return self.table.cells + of_slices


class _Slices:
    """One op of all slices. Every rank runs it on the microbatches in the order in which they become ready.

    microbatches    those that are ready so far
    times, lags     when each did; rank -> how much later it arrives there
    begun, coming   rank -> how many it has begun; when the next one arrives, infinite while unknown
    users, back     of L and S: microbatch -> the cell that waits for all ranks, or -1; rank -> how much later than its
                    end what it has made arrives there
    missing, all    of L and S: microbatch -> how many ranks have not begun it; when what the others make is there
    """

    def __init__(
        self, cells: _Cells, code: int, lags: list[float], back: list[float] | None = None, users: Sequence[int] = ()
    ) -> None:
        ranks, size = cells.table.placement.ranks, cells.table.microbatches
        self.takes, self.first = cells.times[code], cells.first(code)
        self.microbatches: list[int] = []
        self.times, self.lags = [math.inf] * (size + 1), lags
        self.begun, self.coming = [0] * ranks, [math.inf] * ranks
        self.users, self.back = users, back or lags
        self.missing, self.all = [ranks] * size, [0.0] * size

    def begin(self, rank: int, end: float) -> tuple[int, int, float]:
        """Begin the next microbatch on a rank, which `end`s then. Return its cell and, with the last rank, the user and
        the arrival of all."""
        number = self.begun[rank]
        self.begun[rank] = number + 1
        self.coming[rank] = self.times[number + 1] + self.lags[rank]
        microbatch = self.microbatches[number]
        cell = self.first[rank] + microbatch
        if not self.users:
            return cell, -1, end
        arrival = end + self.back[rank]
        if arrival > self.all[microbatch]:
            self.all[microbatch] = arrival
        self.missing[microbatch] -= 1
        if self.missing[microbatch]:
            return cell, -1, end
        return cell, self.users[microbatch], self.all[microbatch]


class _Play:
    """One run of the schedule. `rows` are the cells that every rank ran, `finish` the end of the last one.

    A rank looks for a cell to run at 0, at the end of each cell, and, if it found none, at the first known or announced
    arrival: its choices change at no other time.

    free, wake: rank -> end of its running cell; when it looks next, which is the same unless it idles.
    due: cell of the table -> when its input arrives, infinite while unknown.
    waits: whether a rank that knows when the next S becomes ready idles rather than be late for it.
    """

    def __init__(self, cells: _Cells, *, waits: bool) -> None:
        self._cells, table = cells, cells.table
        ranks, size, last = table.placement.ranks, table.microbatches, table.placement.stages - 1
        self.rows: list[list[int]] = [[] for _ in range(ranks)]
        self._free, self._wake = [0.0] * ranks, [0.0] * ranks
        self._wakes = [(0.0, rank) for rank in range(ranks)]
        self._due = [0.0 if code == W else math.inf for code in table.code]

        from_first, from_last = cells.lags_of(0), cells.lags_of(last)
        scored = [table.gradient(last * size + microbatch) for microbatch in range(size)]
        self._look_up = _Slices(cells, L, [0.0] * ranks, from_first, table.at[F][:size])
        self._look_up_grad = _Slices(cells, G, from_first)
        self._score = _Slices(cells, S, from_last, from_last, scored)
        self._score_grad = _Slices(cells, T, from_last)
        self._looked_up = deque(sorted(range(size), key=table.at[F].__getitem__))  # in the order of stage 0's forwards
        for _ in range(_AHEAD):
            self._announce_look_up(0.0)
        self._run(waits=waits)
        self.finish = max(self._free)

    def _run(self, *, waits: bool) -> None:
        cells, table = self._cells, self._cells.table
        size, last_stage = table.microbatches, len(table.at[F]) - table.microbatches
        position, stop = table.offset[:-1], table.offset[1:]
        takes, users, lags, home, keys = cells.takes, cells.users, cells.lags, table.rank, table.key
        rows, free, wake, wakes, due = self.rows, self._free, self._wake, self._wakes, self._due
        look_up, look_up_grad, score, score_grad = self._look_up, self._look_up_grad, self._score, self._score_grad
        look_ups, look_up_grads = look_up.coming, look_up_grad.coming
        scores, score_grads = score.coming, score_grad.coming
        slices: _Slices | None
        while wakes:
            now, rank = heappop(wakes)
            while wake[rank] <= now:  # otherwise an earlier arrival was announced and it has looked then
                if look_ups[rank] <= now:
                    slices = look_up
                elif look_up_grads[rank] <= now:
                    slices = look_up_grad
                elif scores[rank] <= now:
                    slices = score
                else:
                    slices, cell = None, position[rank]
                    arrival = due[cell] if cell < stop[rank] else math.inf
                    has_to_wait = arrival > now
                    if waits and not has_to_wait:
                        late = now + takes[cell] - scores[rank]
                        has_to_wait = late > scores[rank] - now
                    pending = len(score_grad.microbatches) - score_grad.begun[rank]
                    if score_grads[rank] <= now and (has_to_wait or pending > PENDING):
                        slices = score_grad
                    elif has_to_wait:
                        soonest = min(look_ups[rank], look_up_grads[rank], scores[rank], score_grads[rank])
                        if now < arrival < soonest:
                            soonest = arrival
                        wake[rank] = soonest
                        if soonest < math.inf:
                            heappush(wakes, (soonest, rank))
                        break

                if slices is None:
                    position[rank] = cell + 1
                    end = now + takes[cell]
                    user, arrival = users[cell], end + lags[cell]
                    if not size <= keys[cell] < last_stage:
                        self._announce_from(cell, now, end)
                else:
                    end = now + slices.takes
                    cell, user, arrival = slices.begin(rank, end)
                rows[rank].append(cell)
                free[rank] = wake[rank] = end
                if user >= 0:
                    due[user] = arrival
                    other = home[user]
                    if free[other] <= arrival < wake[other]:  # it idles: both are equal while it is busy
                        wake[other] = arrival
                        heappush(wakes, (arrival, other))
                # Not necessarily the same rank again after an action without duration: a lower rank may have got an
                # arrival.
                now, rank = heappushpop(wakes, (end, rank))

    def _announce_from(self, cell: int, begin: float, end: float) -> None:
        """Enable the slices' actions that follow an action of the first or last stage."""
        table = self._cells.table
        stage, microbatch = divmod(table.key[cell], table.microbatches)
        is_first, is_last = stage == 0, stage == table.placement.stages - 1
        if table.code[cell] == F:
            if is_first:
                self._announce_look_up(begin)
            if is_last:
                self._announce(self._score, microbatch, end)
        elif table.code[cell] != W:
            if is_first:
                self._announce(self._look_up_grad, microbatch, end)
            if is_last:
                self._announce(self._score_grad, microbatch, end)

    def _announce_look_up(self, time: float) -> None:
        if self._looked_up:
            self._announce(self._look_up, self._looked_up.popleft(), time)

    def _announce(self, slices: _Slices, microbatch: int, time: float) -> None:
        """Enable the op on the microbatch on every rank from `time` on, or when a message with its input arrives."""
        number = len(slices.microbatches)
        slices.microbatches.append(microbatch)
        slices.times[number] = time
        for rank, begun in enumerate(slices.begun):
            if begun == number:  # it is the next one there
                slices.coming[rank] = arrival = time + slices.lags[rank]
                if self._free[rank] <= arrival < self._wake[rank]:
                    self._wake[rank] = arrival
                    heappush(self._wakes, (arrival, rank))
