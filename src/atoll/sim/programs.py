"""Simulation of programs with the durations of their instructions. Pure, and linear in the number of instructions.

[Note: what the player assumes] A rank executes its program as the runtime does: computing and waiting instructions run
one after the other, and those that start a transfer return immediately, except for the time in which the rank's own
processor copies (`Speed.busy`). A link of a rank makes one transfer at a time, in the order of their starts; a gather
over two levels uses the second link after the first, so two units may be on two links. A message occupies its link for
the time of its bytes, and arrives a latency later. Ranks that share parameters execute the same program at the same
time, and a link that they share gives each its part (`Speed.shared`). A message to the next or the last stage uses the
link to that rank (`Rates.to`), if there is one, otherwise that of the axis. Pipeline ranks that share a link take turns
on it, first come, first served (`Speed.pool`); a gather over two levels has its turn on the second link from its start.
Sums of a few numbers take a link's latency. The first post-validated step begins with the previous one settled.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush

from atoll.errors import ConfigError
from atoll.ir.action import Action, Op
from atoll.ir.placement import Placement
from atoll.program import Do, Instruction, Phase, Program, Programs, way_of
from atoll.program.parts import parts_of
from atoll.trace import Span, Trace, lane_of

PIPELINE = "pp"
"""The axis of messages between stages."""


@dataclass(frozen=True, slots=True)
class Speed:
    """A link of a rank: seconds until the first byte arrives, bytes a second, and how many ranks share it.

    shared: number of data-parallel ranks that use it at the same time.  pool: its name if pipeline ranks share it:
    those with one name take turns.  burst: bytes that it transfers at once after a pause, like a token bucket (`tc
    tbf`, the limits of cloud machines); they count against its rate.
    busy: share of its transfer time during which the rank cannot compute, because its own processor copies.
    """

    latency: float = 0.0
    rate: float = math.inf
    shared: int = 1
    pool: str | None = None
    burst: float = 0.0
    busy: float = 0.0

    def __post_init__(self) -> None:
        is_timed = math.isfinite(self.latency) and self.latency >= 0 and self.rate > 0
        if not (
            is_timed and self.shared >= 1 and math.isfinite(self.burst) and self.burst >= 0 and 0 <= self.busy <= 1
        ):
            raise ConfigError(
                f"a link of latency {self.latency} s and {self.rate} bytes a second, shared by {self.shared}, with a "
                f"burst of {self.burst} bytes, busy for {self.busy} of its time: the rate is above 0, the ranks are at "
                "least 1, busy is at most 1, the others 0 or more"
            )

    def seconds(self, count: float) -> float:
        """Return the seconds for which `count` bytes occupy the link."""
        return count * self.shared / self.rate

    def carry(self, free: list[float], now: float, seconds: float) -> float:
        """Return when a transfer of this duration has left, if it starts at `now` or later. free: end of all earlier
        transfers, which is updated; with a burst, a transfer leaves up to the burst's time before it."""
        free[0] = max(now, free[0]) + seconds
        return max(now, free[0] - self.burst / self.rate)


@dataclass(frozen=True, slots=True)
class Rates:
    """The durations of one rank's instructions, and the speeds of its links.

    compute: seconds by operation and block or unit (-1: the stage's own, such as FINISH_F). Missing ones take no time;
    for waiting instructions it is the part that nothing hides. `Engine.timing` measures them.
    message: bytes that a stage sends for a microbatch, forward or backward.  messages: bytes of sends that differ from
    it, by operation and stage, such as those of a split vocabulary; the total of all copies if several ranks get one.
    links: by axis ("pp", "inter", "intra"); a missing one takes no time.
    to: links to single pipeline ranks, for messages to a neighbouring stage there, instead of that of "pp".
    """

    compute: Mapping[tuple[Do, int], float] = field(default_factory=dict)
    message: float = 0.0
    links: Mapping[str, Speed] = field(default_factory=dict)
    messages: Mapping[tuple[Do, int], float] = field(default_factory=dict)
    to: Mapping[int, Speed] = field(default_factory=dict)

    def link(self, axis: str) -> Speed:
        """Return a link by its axis."""
        return self.links.get(axis, _NONE)

    @property
    def every(self) -> Iterator[tuple[str | int, Speed]]:
        """All links, by axis or by destination rank."""
        yield from self.links.items()
        yield from self.to.items()


_NONE = Speed()

_TRAVELS_AS = {Do.FETCH: Do.GATHER, Do.AHEAD: Do.RETURN}
_SHOWN_AS = {Do.GATHER: Op.UNSHARD, Do.REDUCE: Op.REDUCE_GRAD, Do.SYNC: Op.REDUCE_GRAD}

_NEIGHBOUR = {Do.SEND_F: 1, Do.SEND_B: -1}
"""Offset from the sending stage to the receiving one."""

Message = tuple[str, int, int, int]
"""A message: its kind (F, B, L, S or T; sums: A to all, P along the chain), the sending stage or rank, the microbatch,
and the step."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Start and end of a rank's instructions in a step, in seconds from the start of the first step.

    begin: end of the previous step.  ends: of each instruction, which starts at the end of the previous one, the first
    one at `begin`.
    sent: for each instruction that waits for messages or sums of other pipeline ranks, in order, the send time of the
    one that arrives last.
    """

    begin: float
    ends: tuple[float, ...]
    sent: tuple[float, ...]


@dataclass(frozen=True)
class Played:
    """The result of simulating programs: the last step's timing on each rank, and its trace."""

    programs: Programs
    timings: tuple[Timing, ...]
    travelled: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """Seconds from the end of the previous step, on the rank that ends last, to the end of this step."""
        return max(each.ends[-1] for each in self.timings) - max(each.begin for each in self.timings)

    @cached_property
    def trace(self) -> Trace:
        """One span for each action, as recorded by the runtime's clock, and one for each transfer."""
        placement = self.programs.placement
        return Trace((*self._actions(), *self.travelled), placement.ranks, placement.chunks)

    def _actions(self) -> Iterator[Span]:
        for rank, (program, timing) in enumerate(zip(self.programs.ranks, self.timings, strict=True)):
            for part in parts_of(program.instructions):
                start = timing.ends[part.start - 1] if part.start else timing.begin
                yield Span(rank, lane_of(part.action.op), part.action, start, timing.ends[part.stop - 1])


def play(programs: Programs, rates: Sequence[Rates] | Rates, *, steps: int = 1) -> Played:
    """Simulate the programs of all pipeline ranks, with the same rates on each or one for each rank.

    steps: number of consecutive steps; the result is that of the last one.

    Raises ConfigError if the number of rates differs from the number of ranks.
    """
    placement = programs.placement
    each = [rates] * placement.ranks if isinstance(rates, Rates) else list(rates)
    if len(each) != placement.ranks:
        raise ConfigError(f"{len(each)} rates for {placement.ranks} pipeline ranks: give one, or one a rank")
    if steps < 1:
        raise ConfigError(f"{steps} steps: at least one is needed")
    table = _Messages(programs.ranks, placement)
    users = Counter(name for own in each for name in {link.pool for _, link in own.every})
    shared = {name for name, count in users.items() if name is not None and count > 1}
    pools: dict[str, list[float]] = {}
    ranks = [
        _Rank(rank, program, own, table, pools, shared, steps)
        for rank, (program, own) in enumerate(zip(programs.ranks, each, strict=True))
    ]
    arrived: dict[Message, tuple[float, float]] = {}
    waiting: dict[Message, list[int]] = {}
    ready = [(0.0, rank.number) for rank in ranks]
    while ready:
        _, rank = heappop(ready)
        # The next rank on a shared link has to be the first in time that may use it.
        missing = ranks[rank].run(arrived, ready[0][0] if ready and shared else math.inf)
        for message in ranks[rank].sent:
            for other in waiting.pop(message, ()):
                heappush(ready, (ranks[other].now, other))
        ranks[rank].sent.clear()
        if missing is not None:
            waiting.setdefault(missing, []).append(rank)
        elif not ranks[rank].is_over:
            heappush(ready, (ranks[rank].now, rank))
    stuck = [rank for rank in ranks if not rank.is_over]
    if stuck:
        where = ", ".join(f"rank {rank.number} at {rank.instructions[rank.at]}" for rank in stuck)
        raise ConfigError(f"the programs wait for each other: {where}; lower them from one schedule")
    return Played(
        programs, tuple(rank.timing for rank in ranks), tuple(span for rank in ranks for span in rank.travelled)
    )


class _Messages:
    """The messages that receives wait for, and the names of sends."""

    def __init__(self, programs: Sequence[Program], placement: Placement) -> None:
        self.last = placement.stages - 1
        self.ranks = placement.ranks
        self.rank_of = [placement.rank_of(stage) for stage in range(placement.stages)]
        self.looked: dict[int, list[int]] = {}
        self.scored: dict[int, list[int]] = {}
        for rank, program in enumerate(programs):
            for do, action, _, _ in program.instructions:
                if do is Do.SEND_L:
                    self.looked.setdefault(action.microbatch or 0, []).append(rank)
                elif do is Do.SEND_S:
                    self.scored.setdefault(action.microbatch or 0, []).append(rank)

    def sent(self, rank: int, instruction: Instruction, step: int) -> Message:
        kind = instruction.do[-1]
        return kind, rank if kind in "LS" else instruction.action.stage, instruction.action.microbatch or 0, step

    def receiver(self, instruction: Instruction) -> int | None:
        """Return the rank of the neighbouring stage of a send; None for messages of slices of a vocabulary."""
        step = _NEIGHBOUR.get(instruction.do)
        if step is None or not 0 <= instruction.action.stage + step <= self.last:
            return None
        return self.rank_of[instruction.action.stage + step]

    def needs(self, instruction: Instruction, step: int) -> list[Message]:
        stage, microbatch = instruction.action.stage, instruction.action.microbatch or 0
        do = instruction.do
        if do is Do.RECV_F and stage == 0:
            return [("L", rank, microbatch, step) for rank in self.looked.get(microbatch, ())]
        if do is Do.RECV_B and stage == self.last:
            return [("S", rank, microbatch, step) for rank in self.scored.get(microbatch, ())]
        if do is Do.RECV_F:
            return [("F", stage - 1, microbatch, step)]
        if do is Do.RECV_B:
            return [("B", stage + 1, microbatch, step)]
        kind, sender = {Do.RECV_S: ("F", self.last), Do.RECV_T: ("T", self.last)}.get(do, ("B", 0))
        return [(kind, sender, microbatch, step)]


class _Missing(Exception):  # noqa: N818  (no error: another rank goes on first)
    """Raised if a message has not been sent yet."""

    def __init__(self, message: Message) -> None:
        self.message = message


class _Rank:
    """State of a rank in its program. begin, ends, received: see `Timing`.

    arrived: arrival and send time of each message.
    """

    def __init__(
        self,
        number: int,
        program: Program,
        rates: Rates,
        messages: _Messages,
        pools: dict[str, list[float]],
        shared: Collection[str],
        steps: int,
    ) -> None:
        self.number, self.program, self.rates, self.messages = number, program, rates, messages
        self.instructions = program.instructions
        self.begin = 0.0
        self.ends = [0.0] * len(self.instructions)
        self.received: list[float] = []
        self.travelled: list[Span] = []
        self.at = 0
        self.now = 0.0
        self.sent: list[Message] = []
        self._step, self._steps = 0, steps
        self._free: dict[str | int, list[float]] = {
            name: [0.0] if link.pool is None else pools.setdefault(link.pool, [0.0]) for name, link in rates.every
        }
        self._pooled = {name for name, link in rates.every if link.pool in shared}
        self._coming: dict[int, float] = {}
        self._reducing: dict[tuple[int, Phase | None], deque[float]] = {}
        self._settled: dict[int, float] = {}
        self._returned: dict[int, float] = {}
        self._exchanged: dict[int, float] = {}
        self._told = -1
        self._ways: dict[tuple[Do, int, Phase | None], tuple[tuple[str, float], ...]] = {}
        self._arrived: dict[Message, tuple[float, float]] = {}
        self._acts: Mapping[Do, Callable[[Instruction, float], float]] = {
            Do.GATHER: self._gather,
            Do.FETCH: self._fetch,
            Do.WHOLE: self._whole,
            Do.REDUCE: self._reduce,
            Do.REDUCED: self._reduced,
            Do.SYNC: self._sync,
            Do.SYNCED: self._synced,
            Do.COLLECT: self._collect,
            Do.TRANSFORM: self._transform,
            Do.UPDATE: self._update,
            Do.AHEAD: self._return,
            Do.RETURN: self._return,
            Do.TOTAL: self._total,
            Do.VERDICT: self._verdict,
            Do.PASS: self._pass,
            Do.JOIN: self._join,
            **dict.fromkeys((do for do in Do if do.startswith("SEND_")), self._send),
            **dict.fromkeys((do for do in Do if do.startswith("RECV_")), self._receive),
        }

    @property
    def is_over(self) -> bool:
        """True if all steps have been played."""
        return self.at == len(self.instructions)

    @property
    def timing(self) -> Timing:
        """The timing of the last simulated step."""
        return Timing(self.begin, tuple(self.ends), tuple(self.received))

    def run(self, arrived: dict[Message, tuple[float, float]], until: float) -> Message | None:
        """Continue until a message is missing, or a transfer on a shared link starts after `until`. Return the missing
        message, or None."""
        self._arrived = arrived
        compute, instructions, acts = self.rates.compute, self.instructions, self._acts
        ends, last = self.ends, len(self.instructions)
        at, now = self.at, self.now
        missing = None
        while at < last:
            step = instructions[at]
            begun = now
            now += compute.get((step[0], step[2]), 0.0)
            act = acts.get(step[0])
            if act is not None:
                if begun > until and self._shares(step):
                    now = begun
                    break
                try:
                    now = act(step, now)
                except _Missing as waited_for:
                    now, missing = begun, waited_for.message
                    break
            ends[at] = now
            at += 1
            if at == last and self._step + 1 < self._steps:
                self._step += 1
                at = 0
                self.begin = now
                self._settled.clear()
                self.travelled.clear()
                self.received.clear()
            if self._pooled and self.sent:
                break  # ranks that waited for it may come to the shared link before this rank does again
        self.at, self.now = at, now
        return missing

    def _shares(self, step: Instruction) -> bool:
        """Return True if an instruction starts a transfer on a link that pipeline ranks share."""
        if step.do.startswith("SEND_"):
            return self._leads_to(step) in self._pooled
        return any(axis in self._pooled for axis, _ in self._way(step))

    # ---- instructions: their effect, and when the rank continues

    def _gather(self, step: Instruction, now: float) -> float:
        self._coming[step.of] = self._travel(step, now, after=self._returned.pop(step.of, 0.0))
        return now + self._copied(step)

    def _fetch(self, step: Instruction, now: float) -> float:
        return max(now + self._copied(step), self._travel(step, now, after=self._returned.pop(step.of, 0.0)))

    def _whole(self, step: Instruction, now: float) -> float:
        return max(now, self._coming.pop(step.of, now), self._returned.pop(step.of, now))

    def _reduce(self, step: Instruction, now: float) -> float:
        end = self._travel(step, now)
        self._reducing.setdefault((step.of, step.phase), deque()).append(end)
        self._settled[step.of] = max(end, self._settled.get(step.of, 0.0))
        return now + self._copied(step)

    def _reduced(self, step: Instruction, now: float) -> float:
        return max(now, self._reducing[step.of, step.phase].popleft())

    def _sync(self, step: Instruction, now: float) -> float:
        after = self._settled.get(step.of, 0.0)
        self._settled[step.of] = max(after, self._travel(step, now, after=after))
        return now + self._copied(step)

    def _synced(self, step: Instruction, now: float) -> float:
        return max(now, self._settled.get(step.of, 0.0))

    def _collect(self, step: Instruction, now: float) -> float:
        self._exchanged[step.of] = self._travel(step, now)
        return now + self._copied(step)

    def _transform(self, step: Instruction, now: float) -> float:
        own = self.rates.compute.get((step.do, step.of), 0.0)
        now = max(now, self._exchanged[step.of] + own)
        self._exchanged[step.of] = self._travel(step, now)
        return now + self._copied(step)

    def _update(self, step: Instruction, now: float) -> float:
        return max(now, self._exchanged.pop(step.of))

    def _return(self, step: Instruction, now: float) -> float:
        self._returned[step.of] = self._travel(step, now)
        return now + self._copied(step)

    def _send(self, step: Instruction, now: float) -> float:
        name = self._leads_to(step)
        link = self.rates.link(PIPELINE) if isinstance(name, str) else self.rates.to[name]
        free = self._free.setdefault(name, [0.0])
        count = self.rates.messages.get((step.do, step.action.stage), self.rates.message)
        leaves = link.carry(free, now, link.seconds(count))
        self._give(self.messages.sent(self.number, step, self._step), leaves + link.latency, now)
        return now + link.busy * link.seconds(count)

    def _receive(self, step: Instruction, now: float) -> float:
        return self._wait(self.messages.needs(step, self._step), now)

    def _total(self, step: Instruction, now: float) -> float:
        self._tell("A", now)
        self._told = self._step
        return now

    def _verdict(self, step: Instruction, now: float) -> float:
        """Return the rank whose sums a rank waits for: none if a program begins with those of the previous step."""
        ranks = range(self.messages.ranks) if self._told >= 0 else ()
        return self._wait([("A", rank, 0, self._told) for rank in ranks], now)

    def _pass(self, step: Instruction, now: float) -> float:
        self._tell("P", now)
        return now

    def _join(self, step: Instruction, now: float) -> float:
        return self._wait([("P", self.number - 1, 0, self._step)], now)

    # ----

    def _leads_to(self, step: Instruction) -> str | int:
        """Return the link of a send: that to a rank, or that of the axis."""
        receiver = self.messages.receiver(step)
        return PIPELINE if receiver is None or receiver not in self.rates.to else receiver

    def _tell(self, kind: str, now: float) -> None:
        """Send a sum of a few numbers."""
        self._give((kind, self.number, 0, self._step), now + self.rates.link(PIPELINE).latency, now)

    def _give(self, message: Message, arrives: float, now: float) -> None:
        self._arrived[message] = arrives, now
        self.sent.append(message)

    def _wait(self, messages: Sequence[Message], now: float) -> float:
        last = now, now
        for message in messages:
            arrival = self._arrived.get(message)
            if arrival is None:
                raise _Missing(message)
            last = max(last, arrival)
        self.received.append(last[1])
        return last[0]

    def _travel(self, step: Instruction, now: float, *, after: float = 0.0) -> float:
        """Return the time at which an instruction's transfer completes if it does not start before `after`."""
        way = self._way(step)
        at = begun = max(now, after)
        for axis, seconds in way:
            link = self.rates.link(axis)
            at = link.carry(self._free.setdefault(axis, [0.0]), at, seconds) + link.latency
        op = _SHOWN_AS.get(_TRAVELS_AS.get(step.do, step.do))
        if way and op is not None:
            self.travelled.append(Span(self.number, lane_of(op), Action(step.action.stage, op), begun, at))
        return at

    def _copied(self, step: Instruction) -> float:
        """Return the time for which the rank's own processor copies an instruction's bytes."""
        return sum(self.rates.link(axis).busy * seconds for axis, seconds in self._way(step))

    def _way(self, step: Instruction) -> tuple[tuple[str, float], ...]:
        """Return the links of an instruction's transfer, with its duration on each."""
        key = (_TRAVELS_AS.get(step.do, step.do), step.of, step.phase)
        way = self._ways.get(key)
        if way is None:
            links = self.rates.link
            way = tuple((axis, links(axis).seconds(count)) for axis, count in way_of(step, self.program.shape))
            self._ways[key] = way
        return way
