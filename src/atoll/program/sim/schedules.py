"""Simulation of a schedule with costs. Pure, exact, and linear in the number of actions.

[Note: what the simulator assumes] A rank runs its actions in order, one at a time. A result reaches another rank one
hop after it is released; the sender is not blocked, directions do not contend, and inside one rank it is available
immediately. F and I release at their end, B after its I part, or at its end where `fused_backward`. Sends and receives
take no time of their own. If the hop is given as `Links`, a message occupies its link, one at a time
(atoll.plans.schedules.links); messages of a split vocabulary between ranks that are not neighbours take the longest hop
of all, and no link.

Gathers and reductions have a lane each on every rank, concurrent with the computation: an UNSHARD begins when the rank
reaches it and the previous one has ended, and uses of the stage wait for its end; nothing waits for a REDUCE_GRAD.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial

from atoll.base.errors import ConfigError
from atoll.plans.ir.action import COMPUTE_CODES, Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.schedule import Schedule
from atoll.plans.ir.table import (
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    UNSHARD,
    B,
    F,
    G,
    I,
    L,
    S,
    T,
    Table,
    W,
)
from atoll.plans.schedules.links import Hop, Hops, Links
from atoll.plans.schedules.memory import Memory, Occupancy, RankMemory, levels_of, scaled
from atoll.plans.schedules.problem import TOLERANCE
from atoll.program.trace import MemorySample, Span, Trace, action_lane

_Cost = float | Sequence[float]
"""One number for all ranks, or one per rank. F, I and W also one per stage: then of that stage, not of a rank's
share."""


_WORK = ("forward", "input_grad", "weight_grad")


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds (or any one unit) of each rank's whole share of a microbatch: a chunk takes 1/chunks of them, and a slice
    of its sequences 1/slices.

    hop              latency of a message between two ranks, or the `Links` between them
    gather, reduce   an UNSHARD and a REDUCE_GRAD of all parameters of the rank; 1/chunks of it for a chunk
    look_up          an L, and a G: the rank's slice of the embedding
    score            an S, which computes scores and the gradient of its input; score_grad a T, the slice's own gradient
    fused_backward   a full backward releases the input's gradient at its end, not after its I part
    slices           shares (F, I, W) of a microbatch that each slice takes, if they are not equal: under causal
                     attention a later slice attends to more (atoll.plans.slices)

    Raises ConfigError for a cost that is negative, infinite or not a number.
    """

    forward: _Cost = 1.0
    input_grad: _Cost = 1.0
    weight_grad: _Cost = 1.0
    hop: float | Links = 0.0
    fused_backward: bool = False
    gather: _Cost = 0.0
    reduce: _Cost = 0.0
    look_up: _Cost = 0.0
    score: _Cost = 0.0
    score_grad: _Cost = 0.0
    slices: tuple[tuple[float, float, float], ...] = ()

    def __post_init__(self) -> None:
        for number in (share for shares in self.slices for share in shares):
            if not (math.isfinite(number) and number >= 0):
                raise ConfigError(f"a slice's share of a cost is {number}: it must be a finite number, 0 or more")
        for name in (f.name for f in fields(self) if f.name not in ("fused_backward", "slices")):
            value = getattr(self, name)
            if isinstance(value, Links):
                continue
            for number in value if isinstance(value, Sequence) else (value,):
                if not (math.isfinite(number) and number >= 0):
                    raise ConfigError(f"cost {name} is {number}: it must be a finite number, 0 or more")

    def of_slice(self, slices: int, number: int | None = None) -> Costs:
        """Return the costs of one of `slices` slices of a microbatch, of an equal one without its number.

        Raises ConfigError if this has shares of another number of slices.
        """
        if self.slices and len(self.slices) != slices:
            raise ConfigError(f"costs have shares for {len(self.slices)} slices, and the schedule has {slices}: "
                              "give the shares of each of its slices, or none")  # fmt: skip
        if slices == 1 and not self.slices:
            return self
        each = 1 / slices
        forward, input_grad, weight_grad = self.slices[number] if self.slices and number is not None else (each,) * 3
        return replace(
            self,
            forward=scaled(self.forward, forward),
            input_grad=scaled(self.input_grad, input_grad),
            weight_grad=scaled(self.weight_grad, weight_grad),
            hop=self.hop.of_slice(slices) if isinstance(self.hop, Links) else self.hop,
            look_up=scaled(self.look_up, each),
            score=scaled(self.score, each),
            score_grad=scaled(self.score_grad, each),
            slices=(),
        )

    def per_rank(self, ranks: int) -> tuple[tuple[float, float, float], ...]:
        """Return (forward, input_grad, weight_grad) of each rank. Raises ConfigError for a list of another length."""
        return tuple((f, i, w) for f, i, w in self._columns(ranks, "forward", "input_grad", "weight_grad"))

    def per_stage(self, placement: Placement) -> tuple[tuple[float, float, float], ...]:
        """Return (forward, input_grad, weight_grad) of each stage. Raises ConfigError for a list of another length."""
        return tuple((f, i, w) for f, i, w, _ in self.stage_times(placement))

    def stage_times(self, placement: Placement) -> tuple[tuple[float, float, float, float], ...]:
        """Return the same and a full backward, which is rounded once if its parts are those of a rank."""
        columns, parts = [], []
        for name in _WORK:
            value = getattr(self, name)
            if isinstance(value, Sequence) and len(value) == placement.stages:
                columns.append(tuple(value))
                parts.append(1)
            else:
                shares = [share for (share,) in self._columns(placement.ranks, name)]
                columns.append(tuple(shares[placement.rank_of(stage)] for stage in range(placement.stages)))
                parts.append(placement.chunks)
        times = []
        for forward, input_grad, weight_grad in zip(*columns, strict=True):
            split = (forward / parts[0], input_grad / parts[1], weight_grad / parts[2])
            full = (input_grad + weight_grad) / parts[1] if parts[1] == parts[2] else split[1] + split[2]
            times.append((*split, full))
        return tuple(times)

    def sharding_per_rank(self, ranks: int) -> tuple[tuple[float, float], ...]:
        """Return (gather, reduce) of each rank. Raises ConfigError for a list of another length."""
        return tuple((gather, reduce) for gather, reduce in self._columns(ranks, "gather", "reduce"))

    def vocabulary_per_rank(self, ranks: int) -> tuple[tuple[float, float, float], ...]:
        """Return (look_up, score, score_grad) of each rank. Raises ConfigError for a list of another length."""
        return tuple(
            (look, score, grad) for look, score, grad in self._columns(ranks, "look_up", "score", "score_grad")
        )

    def _columns(self, ranks: int, *names: str) -> Iterator[tuple[float, ...]]:
        columns = []
        for name in names:
            value = getattr(self, name)
            column = tuple(value) if isinstance(value, Sequence) else (value,) * ranks
            if len(column) != ranks:
                raise ConfigError(f"cost {name} has {len(column)} numbers for {ranks} ranks: give one, or one a rank")
            columns.append(column)
        return zip(*columns, strict=True)


def simulate_schedule(schedule: Schedule, costs: Costs, memory: Memory | None = None) -> Trace:
    """Simulate `schedule`, compute-only or lowered. Raises ConfigError for costs or amounts that do not fit its ranks.

    With `memory` the trace has the bytes of every rank over time, and how long ranks idled for lack of them. A limit
    changes no time: the order is the schedule's, whether it fits or not.
    """
    table = schedule.table
    duration, release = _durations(schedule, costs)
    hops = Hops.of(schedule.placement, costs.of_slice(schedule.slices).hop)
    is_even = len(duration) == schedule.stages and all(
        row == duration[schedule.placement.rank_of(stage)] for stage, row in enumerate(duration)
    )
    if schedule.has_messages or schedule.has_sharding or not (hops.is_even and is_even):
        chunks = schedule.chunks
        travel = [(gather / chunks, reduce / chunks) for gather, reduce in costs.sharding_per_rank(schedule.ranks)]
        start, end, there = _play_any(table, duration, release, hops, travel)
    else:
        ranks = schedule.ranks  # stage r is the first of rank r, and as long as its others
        start, end = _play(table, duration[:ranks], release[:ranks], hops.far)
        there = [time + hops.far for time in end] if memory is not None else []
    lanes = [action_lane(op) for op in Op]
    row = zip(table.rank, [lanes[code] for code in table.code], table.cells, start, end, strict=True)
    with _paused_collector():
        spans = tuple(map(_as_span, row))
    if memory is None:
        return Trace(spans, ranks=schedule.ranks, chunks=schedule.chunks, slices=schedule.slices)
    samples: list[MemorySample] = []
    waits = []
    for rank, bytes_of in enumerate(memory.of_slice(schedule.slices).per_rank(schedule.ranks)):
        mine = [spans[cell] for cell in range(*table.offset[rank : rank + 2]) if table.code[cell] < COMPUTE_CODES]
        levels = levels_of((span.action for span in mine), schedule.chunks, bytes_of)
        samples += _samples(rank, mine, levels, bytes_of)
        inputs = _inputs(schedule, rank, end, there)
        waits.append(_waited(mine, levels, inputs, bytes_of, schedule.chunks))
    return Trace(spans, schedule.ranks, schedule.chunks, tuple(samples), tuple(waits), schedule.slices)


def last_end(
    schedule: Schedule, duration: Sequence[Sequence[float]], release: Sequence[Sequence[float]], hops: Hops
) -> float:
    """When a compute-only schedule ends, whose actions take `duration` and give their result after `release`, both by
    stage and code. A rank's slice of a vocabulary has the name of its first stage."""
    _, end, _ = _play_any(schedule.table, duration, release, hops, [(0.0, 0.0)] * schedule.ranks)
    return max(end)


_as_span: Callable[[tuple[int, str, Action, float, float]], Span] = partial(tuple.__new__, Span)
"""Span._make without a Python frame a span."""


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Spans are many and in no cycle: looking for cycles among them would take half of a simulation's time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _samples(rank: int, spans: list[Span], levels: list[Occupancy], memory: RankMemory) -> list[MemorySample]:
    """Bytes of one rank from each change on: more from the start of an action, less from its end."""
    samples = [MemorySample(rank, 0.0, memory.static)]
    for span, level in zip(spans, levels, strict=True):
        if level.during != samples[-1].bytes:
            samples.append(MemorySample(rank, span.start, level.during))
        if level.after != level.during:
            samples.append(MemorySample(rank, span.end, level.after))
    return samples


def _inputs(schedule: Schedule, rank: int, end: list[float], there: list[float]) -> dict[int, list[float]]:
    """Stage -> when the input of each of its forwards is there. there: when what a cell makes is on the next rank."""
    table, arrivals = schedule.table, {}
    for stage in schedule.placement.stages_of(rank):
        if stage == 0:
            arrivals[stage] = [0.0] * schedule.microbatches
            continue
        times = there if table.rank_of_stage[stage - 1] != rank else end
        first = (stage - 1) * schedule.microbatches
        made = table.at[SEND_F if table.has_messages and times is there else F]
        arrivals[stage] = [times[cell] for cell in made[first : first + schedule.microbatches]]
    return arrivals


def _waited(
    spans: list[Span], levels: list[Occupancy], inputs: dict[int, list[float]], memory: RankMemory, chunks: int
) -> float:
    """Return the seconds that a rank idles for lack of memory, while the input of a forward is available."""
    if math.isinf(memory.limit):
        return 0.0
    fitting = memory.limit * (1 + TOLERANCE) - memory.activation / chunks
    done = dict.fromkeys(inputs, 0)
    waits = []
    for at, span in enumerate(spans):
        idle_from = spans[at - 1].end if at else span.start
        if span.start > idle_from and levels[at - 1].after > fitting:
            there = [times[done[stage]] for stage, times in inputs.items() if done[stage] < len(times)]
            waits.append(span.start - max(idle_from, min(there, default=span.start)))
        if span.action.op is Op.F:
            done[span.action.stage] += 1
    return math.fsum(max(0.0, wait) for wait in waits)


def _durations(schedule: Schedule, costs: Costs) -> tuple[list[list[float]], list[list[float]]]:
    """stage, code -> how long it takes, and after how long of it the result is released. A rank's slice of a vocabulary
    has the name of its first stage. Where slices of sequences differ: stage * slices + slice, code."""
    duration, release = [], []
    numbers = range(schedule.slices) if costs.slices else (None,)
    of_each = [costs.of_slice(schedule.slices, number) for number in numbers]
    times_of = [each.stage_times(schedule.placement) for each in of_each]
    slices_of = [each.vocabulary_per_rank(schedule.ranks) for each in of_each]
    for stage in range(schedule.stages):
        for times, slices in zip(times_of, slices_of, strict=True):
            look_up, score, score_grad = slices[schedule.placement.rank_of(stage)]
            shares = [0.0] * COMPUTE_CODES
            shares[F], shares[I], shares[W], shares[B] = times[stage]
            shares[L] = shares[G] = look_up
            shares[S], shares[T] = score, score_grad
            duration.append(shares)
            early = list(shares)
            if not costs.fused_backward:
                early[B] = early[I]
            release.append(early)
    return duration, release


_Times = tuple[list[float], list[float]]
_NOT_YET = -1.0  # times start at 0


def _play(table: Table, duration: list[list[float]], release: list[list[float]], hop: float) -> _Times:
    """Start and end of every cell of a compute-only schedule, where messages take one time between any two ranks and a
    rank's stages are equally long: `duration` and `release` by rank.

    Each rank runs on until it needs what has not been made; whoever makes it wakes it. Which ready rank goes first
    does not matter: the times are a function of the order of actions alone. It ends, since the schedule is valid.
    """
    need, crosses, others = table.need, table.crosses, table.others
    code, offset = table.code, table.offset
    start = [0.0] * len(code)
    end = [0.0] * len(code)
    released = [_NOT_YET] * len(code)
    position, clock = offset[:-1], [0.0] * len(duration)
    waiters: dict[int, list[int]] = {}
    ready = list(range(len(duration)))
    while ready:
        rank = ready.pop()
        now, takes, gives = clock[rank], duration[rank], release[rank]
        stop = offset[rank + 1]
        for cell in range(position[rank], stop):
            needed = need[cell]
            if needed >= 0:
                arrival = released[needed]
                if arrival < 0:
                    waiters.setdefault(needed, []).append(rank)
                    position[rank] = cell
                    break
                if crosses[cell]:
                    arrival += hop
                if arrival > now:
                    now = arrival
            if cell in others:
                missing, arrival = _gathered(others[cell], released)
                if missing >= 0:
                    waiters.setdefault(missing, []).append(rank)
                    position[rank] = cell
                    break
                now = max(now, arrival + hop)
            kind = code[cell]
            start[cell] = now
            released[cell] = now + gives[kind]
            now += takes[kind]
            end[cell] = now
            if cell in waiters:
                ready.extend(waiters.pop(cell))
        clock[rank] = now
    return start, end


def _gathered(needs: Sequence[int], released: Sequence[float]) -> tuple[int, float]:
    """The first of some cells that has not been released, or -1, and when the last of them was."""
    missing = next((cell for cell in needs if released[cell] < 0), -1)
    return missing, max(released[cell] for cell in needs)


class _Walk:
    """The state of a simulation on any links, in which each rank is at one of its actions."""

    def __init__(self, table: Table, release: Sequence[Sequence[float]], hops: Hops) -> None:
        ranks, cells = table.placement.ranks, len(table.code)
        self.table, self.release, self.hops = table, release, hops
        slices = len(release) // table.placement.stages  # 1, unless they differ
        self.row = [action.stage * slices + (action.microbatch or 0) % slices for action in table.cells]
        self.position, self.clock = table.offset[:-1], [0.0] * ranks
        self.last_compute = [-1] * ranks
        self.released = [_NOT_YET] * cells
        self.there = [_NOT_YET] * cells  # when what a cell makes or sends is on the neighbour's rank
        self.whole = [0.0] * table.placement.stages  # when a stage that was opened is there

    def begins(self, rank: int, cell: int) -> tuple[int, float]:
        """The cell whose result is missing, or -1, and when the action can begin, as far as that is known."""
        table, released = self.table, self.released
        needed, now = table.need[cell], self.clock[rank]
        if needed >= 0:
            if released[needed] < 0:
                return needed, now
            arrival = released[needed]
            if table.crosses[cell]:
                is_next = table.code[cell] in _STEPS and table.code[needed] in _STEPS
                arrival = self.there[needed] if is_next else arrival + self.hops.far
            now = max(now, arrival)
        if cell in table.others:
            missing, arrival = _gathered(table.others[cell], released)
            if missing >= 0:
                return missing, now
            now = max(now, arrival + self.hops.far)
        if table.code[cell] in (F, I, B):
            now = max(now, self.whole[table.cells[cell].stage])
        return -1, now

    def asks(self, rank: int) -> float:
        """Return the earliest time at which a rank's next action requests a link."""
        cell = self.position[rank]
        kind = self.table.code[cell]
        if kind in (SEND_F, SEND_B) and self.table.source(cell) == self.last_compute[rank]:
            return self.released[self.table.source(cell)]
        missing, now = self.begins(rank, cell)
        return now + self.release[self.row[cell]][kind] if missing < 0 and kind < COMPUTE_CODES else now


def _play_any(
    table: Table,
    duration: Sequence[Sequence[float]],
    release: Sequence[Sequence[float]],
    hops: Hops,
    travel: Sequence[tuple[float, float]],
) -> tuple[list[float], list[float], list[float]]:
    """The same on any links, with messages and sharding actions in place if they are there: receives wait, sends take
    what was released. The third list is when what a cell makes or sends is on the neighbour's rank.

    A send that follows its producer leaves at the release, though the rank is still busy with the rest of a B; one
    that is placed later leaves when the rank comes to it. Where ranks share a link, the rank goes on that asks for one
    first, an action at a time: a rank without its input has not asked yet, and is found waiting.
    """
    start = [0.0] * len(table.code)
    end = [0.0] * len(table.code)
    ranks = table.placement.ranks
    walk = _Walk(table, release, hops)
    position, clock, last_compute = walk.position, walk.clock, walk.last_compute
    released, there, whole = walk.released, walk.there, walk.whole
    gathered, reduced = [0.0] * ranks, [0.0] * ranks  # when the lanes are free
    busy = [0.0] * hops.links
    routes = _routes(table, hops)
    waiters: dict[int, list[int]] = {}
    ready = list(range(ranks))

    while ready:
        rank = ready.pop(ready.index(min(ready, key=walk.asks)) if hops.is_shared else -1)
        for cell in range(position[rank], table.offset[rank + 1]):
            kind, begin = table.code[cell], clock[rank]
            missing, now = walk.begins(rank, cell)
            if missing >= 0:
                waiters.setdefault(missing, []).append(rank)
                position[rank] = cell
                break
            if kind < COMPUTE_CODES:
                begin = now
                released[cell] = now + release[walk.row[cell]][kind]
                now += duration[walk.row[cell]][kind]
                last_compute[rank] = cell
            elif kind in (SEND_F, SEND_B):
                source = table.source(cell)
                released[cell] = released[source] if source == last_compute[rank] else now
                begin = released[cell]
            else:
                released[cell] = now
            start[cell] = begin
            end[cell] = begin if kind in (SEND_F, SEND_B) else now
            if kind == UNSHARD:
                start[cell] = max(now, gathered[rank])
                end[cell] = gathered[rank] = whole[table.cells[cell].stage] = start[cell] + travel[rank][0]
            elif kind == REDUCE_GRAD:
                start[cell] = max(now, reduced[rank])
                end[cell] = reduced[rank] = start[cell] + travel[rank][1]
            clock[rank] = now
            route = routes[cell]
            if route is not None:
                there[cell] = _carry(route, busy, released[cell])
            if cell in waiters:
                ready.extend(waiters.pop(cell))
            if hops.is_shared and cell + 1 < table.offset[rank + 1]:
                position[rank] = cell + 1
                ready.append(rank)
                break
    return start, end, there


_STEPS = (F, I, B, SEND_F, RECV_F, SEND_B, RECV_B)
"""Of these ops, those between neighbouring stages: without L, S, T and G."""


def _routes(table: Table, hops: Hops) -> list[Hop | None]:
    """The hop of what each cell sends to its neighbour: a send, or what computes where there are no sends."""
    forward, backward = ((SEND_F,), (SEND_B,)) if table.has_messages else ((F,), (I, B))
    return [
        hops.forward[action.stage] if code in forward else hops.backward[action.stage] if code in backward else None
        for code, action in zip(table.code, table.cells, strict=True)
    ]


def _carry(hop: Hop, busy: list[float], asked: float) -> float:
    """Return the arrival time of a message that requests its link at `asked`."""
    if hop.link >= 0:
        asked = busy[hop.link] = max(asked, busy[hop.link]) + hop.seconds
    return asked + hop.latency
