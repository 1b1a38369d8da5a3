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
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

from atoll.base.errors import ConfigError
from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.placement import Placement
from atoll.program import Instruction, Operation, Partners, Phase, Program, Programs, way_of
from atoll.program.fold import FactKeys, Key, Resolved
from atoll.program.operation import OPERATIONS, Fact, Lane, Side, operation_of
from atoll.program.parts import parts_of
from atoll.program.trace import Span, Trace, action_lane

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

    compute: seconds by operation, or its name, and block or unit (-1: the stage's own, such as FINISH_F). Missing ones
    take no time; for waiting instructions it is the part that nothing hides. `Engine.timing` measures them.
    message: bytes that a stage sends for a microbatch, forward or backward.  messages: bytes of sends that differ from
    it, by operation and stage, such as those of a split vocabulary; the total of all copies if several ranks get one.
    links: by axis ("pp", "inter", "intra"); a missing one takes no time.
    to: links to single pipeline ranks, for messages to a neighbouring stage there, instead of that of "pp".
    of_slices: the same for each slice of a microbatch's sequences, if they differ and actions count slices: of these
    `compute`, `message` and `messages` count.

    Raises ConfigError for a name that no operation has.
    """

    compute: Mapping[tuple[Any, int], float] = field(default_factory=dict)
    message: float = 0.0
    links: Mapping[str, Speed] = field(default_factory=dict)
    messages: Mapping[tuple[Any, int], float] = field(default_factory=dict)
    to: Mapping[int, Speed] = field(default_factory=dict)
    of_slices: tuple[Rates, ...] = ()

    def of_slice(self, number: int | None) -> Rates:
        """Return the rates for a slice of a microbatch. number: of all slices, as actions count; None: of no one."""
        return self.of_slices[(number or 0) % len(self.of_slices)] if self.of_slices else self

    def __post_init__(self) -> None:
        for name in ("compute", "messages"):
            given = getattr(self, name)
            if any(isinstance(do, str) for do, _ in given):
                rows = {
                    (operation_of(do) if isinstance(do, str) else do, of): value for (do, of), value in given.items()
                }
                object.__setattr__(self, name, rows)

    def link(self, axis: str) -> Speed:
        """Return a link by its axis."""
        return self.links.get(axis, _NONE)

    @property
    def every(self) -> Iterator[tuple[str | int, Speed]]:
        """All links, by axis or by destination rank."""
        yield from self.links.items()
        yield from self.to.items()


_NONE = Speed()

_SHOWN_AS = {"gathers": Op.UNSHARD, "reductions": Op.REDUCE_GRAD, "sync": Op.REDUCE_GRAD}
"""The action of a timeline by what a transfer carries."""

_OFFSET = {Side.NEXT: 1, Side.PREVIOUS: -1}

_Message = tuple[str, int, int, int]
"""A message: its kind (F, B, L, S or T; sums: A to all, P along the chain), the sending stage or rank, the microbatch,
and the step."""


@dataclass(frozen=True, slots=True)
class RankTiming:
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
class PlayedPrograms:
    """The result of simulating programs: the last step's timing on each rank, and its trace."""

    programs: Programs
    timings: tuple[RankTiming, ...]
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
                yield Span(rank, action_lane(part.action.op), part.action, start, timing.ends[part.stop - 1])


def play_programs(programs: Programs, rates: Sequence[Rates] | Rates, *, steps: int = 1) -> PlayedPrograms:
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
    arrived: dict[_Message, tuple[float, float]] = {}
    waiting: dict[_Message, list[int]] = {}
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
    return PlayedPrograms(
        programs, tuple(rank.timing for rank in ranks), tuple(span for rank in ranks for span in rank.travelled)
    )


class _Messages:
    """The messages that receives wait for, and the names of sends."""

    def __init__(self, programs: Sequence[Program], placement: Placement) -> None:
        self.last = placement.stages - 1
        self.ranks = placement.ranks
        self.rank_of = [placement.rank_of(stage) for stage in range(placement.stages)]
        self.senders: dict[tuple[str, int], list[int]] = {}
        for rank, program in enumerate(programs):
            for do, action, _, _ in program.instructions:
                if do.stands_for:
                    self.senders.setdefault((do.sends, action.microbatch or 0), []).append(rank)

    def sent(self, rank: int, instruction: Instruction, step: int) -> _Message:
        do, action = instruction.do, instruction.action
        return do.sends, rank if do.stands_for else action.stage, action.microbatch or 0, step

    def receiver(self, instruction: Instruction) -> int | None:
        """Return the rank of the neighbouring stage of a send; None for messages of slices of a vocabulary."""
        to = instruction.do.to
        stage = -1 if to is None else instruction.action.stage + _OFFSET[to]
        return self.rank_of[stage] if 0 <= stage <= self.last else None

    def needs(self, instruction: Instruction, step: int) -> list[_Message]:
        do, stage, microbatch = instruction.do, instruction.action.stage, instruction.action.microbatch or 0
        assert do.source is not None, "a receive has a source"
        kind, source = do.source
        sender = {Side.FIRST: 0, Side.LAST: self.last}.get(source)
        if sender is None:
            sender = stage + _OFFSET[source]
        if 0 <= sender <= self.last:
            return [(kind, sender, microbatch, step)]
        others = next((row.sends for row in OPERATIONS.values() if row.stands_for == do.name), "")
        return [(others, rank, microbatch, step) for rank in self.senders.get((others, microbatch), ())]


_Flights = tuple[tuple[tuple[list[float], bool], ...], tuple[tuple[list[float], bool], ...]]
"""Times at which flights end: those that an instruction ends, each with whether it takes the first alone; and those
that it begins, each with whether they are kept in order."""


def _end(times: list[float], is_in_turn: bool) -> float:
    """End the first flight, or all, and return when."""
    if is_in_turn:
        return times.pop(0)
    ended = max(times, default=0.0)
    times.clear()
    return ended


class _Missing(Exception):  # noqa: N818  (no error: another rank goes on first)
    """Raised if a message has not been sent yet."""

    def __init__(self, message: _Message) -> None:
        self.message = message


class _Rank:
    """State of a rank in its program. begin, ends, received: see `RankTiming`.

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
        self._seconds = [
            rates.of_slice(action.microbatch).compute.get((do, of), 0.0) for do, action, of, _ in self.instructions
        ]
        self.begin = 0.0
        self.ends = [0.0] * len(self.instructions)
        self.received: list[float] = []
        self.travelled: list[Span] = []
        self.at = 0
        self.now = 0.0
        self.sent: list[_Message] = []
        self._step, self._steps = 0, steps
        self._free: dict[str | int, list[float]] = {
            name: [0.0] if link.pool is None else pools.setdefault(link.pool, [0.0]) for name, link in rates.every
        }
        self._pooled = {name for name, link in rates.every if link.pool in shared}
        self._facts = FactKeys(self.program.shape)
        self._flights: defaultdict[tuple[Fact, Key], list[float]] = defaultdict(list)
        self._known: dict[tuple[Operation, int, Phase | int | None], _Flights] = {}
        self._told: dict[str, int] = {}
        self._ways: dict[tuple[Operation, int, Phase | None], tuple[tuple[str, float], ...]] = {}
        self._arrived: dict[_Message, tuple[float, float]] = {}
        self._acts = {do: self._act_of(do) for do in {each.do for each in self.instructions}}

    def _act_of(self, do: Operation) -> Callable[[Instruction, float], float] | None:
        """Return what an instruction does to other times than its own rank's; None if nothing."""
        if do.sends:
            return self._send
        if do.receives:
            return self._receive
        if do.tells:
            return self._tell
        if do.hears is not None:
            return self._hear
        return self._fly if do.sent is not None or any(fact.is_flight for fact in do.ends) else None

    @property
    def is_over(self) -> bool:
        """True if all steps have been played."""
        return self.at == len(self.instructions)

    @property
    def timing(self) -> RankTiming:
        """The timing of the last simulated step."""
        return RankTiming(self.begin, tuple(self.ends), tuple(self.received))

    def run(self, arrived: dict[_Message, tuple[float, float]], until: float) -> _Message | None:
        """Continue until a message is missing, or a transfer on a shared link starts after `until`. Return the missing
        message, or None."""
        self._arrived = arrived
        seconds, instructions, acts = self._seconds, self.instructions, self._acts
        ends, last = self.ends, len(self.instructions)
        at, now = self.at, self.now
        missing = None
        while at < last:
            step = instructions[at]
            begun = now
            now += seconds[at]
            act = acts[step[0]]
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
                self.travelled.clear()
                self.received.clear()
            if self._pooled and self.sent:
                break  # ranks that waited for it may come to the shared link before this rank does again
        self.at, self.now = at, now
        return missing

    def _shares(self, step: Instruction) -> bool:
        """Return True if an instruction starts a transfer on a link that pipeline ranks share."""
        if step.do.sends:
            return self._leads_to(step) in self._pooled
        return any(axis in self._pooled for axis, _ in self._way(step))

    # ---- instructions: their effect, and when the rank continues

    def _fly(self, step: Instruction, now: float) -> float:
        """Begin an instruction's transfer after the flights that it ends, or wait for those first."""
        do = step.do
        ends, gives = self._flights_of(step)
        ended = max((_end(*each) for each in ends), default=0.0)
        if not do.begins:
            # What computes begins when its slices are there; of other waits `compute` is the part that nothing hides.
            compute = self.rates.of_slice(step.action.microbatch).compute
            own = compute.get((do, step.of), 0.0) if do.lane is Lane.COMPUTE else 0.0
            now = max(now, ended + own)
        if do.sent is None:
            return now
        end = self._travel(step, now, after=ended)
        for times, is_in_order in gives:
            times[:] = [*times, end] if is_in_order else [max([end, *times])]
        now += self._copied(step)
        return max(now, end) if do.waits else now

    def _flights_of(self, step: Instruction) -> _Flights:
        """Return the flights that an instruction ends, and those that it begins."""
        do, action, of, phase = step
        known = do, of, action.microbatch if do.is_of_passage else phase
        found = self._known.get(known)
        if found is None:
            resolved = Resolved.of(step, self.program.shape)

            def flights(facts: Iterable[Fact]) -> Iterator[tuple[Fact, list[float]]]:
                for fact in facts:
                    if fact.is_flight:
                        yield from ((fact, self._flights[fact, key]) for key in self._facts.of(resolved, fact))

            found = self._known[known] = (
                tuple((times, do.is_in_turn(fact)) for fact, times in flights(do.ends)),
                tuple((times, fact.is_in_order) for fact, times in flights(do.gives)),
            )
        return found

    def _send(self, step: Instruction, now: float) -> float:
        name = self._leads_to(step)
        link = self.rates.link(PIPELINE) if isinstance(name, str) else self.rates.to[name]
        free = self._free.setdefault(name, [0.0])
        own = self.rates.of_slice(step.action.microbatch)
        count = own.messages.get((step.do, step.action.stage), own.message)
        leaves = link.carry(free, now, link.seconds(count))
        self._give(self.messages.sent(self.number, step, self._step), leaves + link.latency, now)
        return now + link.busy * link.seconds(count)

    def _receive(self, step: Instruction, now: float) -> float:
        return self._wait(self.messages.needs(step, self._step), now)

    def _tell(self, step: Instruction, now: float) -> float:
        """Send a sum of a few numbers."""
        message = step.do.tells, self.number, 0, self._step
        self._give(message, now + self.rates.link(PIPELINE).latency, now)
        self._told[step.do.tells] = self._step
        return now

    def _hear(self, step: Instruction, now: float) -> float:
        """Wait for sums: of the rank before, or those of all ranks in the last step that told them, if one did."""
        assert step.do.hears is not None, "such an instruction hears sums"
        kind, peers = step.do.hears
        if peers is Partners.NEIGHBOUR:
            return self._wait([(kind, self.number - 1, 0, self._step)], now)
        told = self._told.get(kind)
        ranks = () if told is None else range(self.messages.ranks)
        return self._wait([(kind, rank, 0, told or 0) for rank in ranks], now)

    # ----

    def _leads_to(self, step: Instruction) -> str | int:
        """Return the link of a send: that to a rank, or that of the axis."""
        receiver = self.messages.receiver(step)
        return PIPELINE if receiver is None or receiver not in self.rates.to else receiver

    def _give(self, message: _Message, arrives: float, now: float) -> None:
        self._arrived[message] = arrives, now
        self.sent.append(message)

    def _wait(self, messages: Sequence[_Message], now: float) -> float:
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
        op = _SHOWN_AS.get(step.do.carries)
        if way and op is not None:
            self.travelled.append(Span(self.number, action_lane(op), Action(step.action.stage, op), begun, at))
        return at

    def _copied(self, step: Instruction) -> float:
        """Return the time for which the rank's own processor copies an instruction's bytes."""
        return sum(self.rates.link(axis).busy * seconds for axis, seconds in self._way(step))

    def _way(self, step: Instruction) -> tuple[tuple[str, float], ...]:
        """Return the links of an instruction's transfer, with its duration on each."""
        key = (step.do.sent or step.do, step.of, step.phase)
        way = self._ways.get(key)
        if way is None:
            links = self.rates.link
            way = tuple((axis, links(axis).seconds(count)) for axis, count in way_of(step, self.program.shape))
            self._ways[key] = way
        return way
