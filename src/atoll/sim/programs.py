"""Plays programs with what their instructions take -> Trace. Pure, and linear in the number of instructions.

[Note: what the player assumes]
A rank plays its program as the runtime does: what computes and what waits goes one after the other, and what begins
something on a link returns at once. A link of a rank carries one thing at a time, in the order in which it was begun; a
gather over two levels takes the second link when the first is done with it, so two units may be on two links. A message
takes its link for as long as its bytes need, and arrives a latency later. Ranks that share parameters play the same
program, so each link of a rank is its own, or a part of one that several share (`Speed.shared`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
    """A link of a rank: seconds until the first byte arrives, bytes a second, and how many ranks share it."""

    latency: float = 0.0
    rate: float = math.inf
    shared: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0 and self.rate > 0 and self.shared >= 1):
            raise ConfigError(
                f"a link of latency {self.latency} s and {self.rate} bytes a second, shared by {self.shared}: the "
                "first is 0 or more, the second above 0, the third at least 1"
            )

    def seconds(self, count: float) -> float:
        """How long it is taken by so many bytes."""
        return count * self.shared / self.rate


@dataclass(frozen=True, slots=True)
class Rates:
    """What the instructions of one rank take.

    compute: seconds by what is done and the block or unit that it is done with (-1: the stage's own, as FINISH_F); what
    is not there takes none.
    message: bytes that a stage sends for a microbatch, forward or backward.
    links: by axis ("pp", "inter", "intra"); one that is not there takes no time.
    """

    compute: Mapping[tuple[Do, int], float] = field(default_factory=dict)
    message: float = 0.0
    links: Mapping[str, Speed] = field(default_factory=dict)

    def link(self, axis: str) -> Speed:
        """A link by its axis."""
        return self.links.get(axis, _NONE)


_NONE = Speed()

Message = tuple[str, int, int]
"""What is sent (F, B, L, S or T), the stage or the rank that sends it, and the microbatch."""


def play(programs: Programs, rates: Sequence[Rates] | Rates) -> Trace:
    """Play the programs of all pipeline ranks, with the same rates on each or one a rank.

    Raises ConfigError where there are not as many rates as ranks.
    """
    placement = programs.placement
    each = [rates] * placement.ranks if isinstance(rates, Rates) else list(rates)
    if len(each) != placement.ranks:
        raise ConfigError(f"{len(each)} rates for {placement.ranks} pipeline ranks: give one, or one a rank")
    table = _Messages(programs.ranks, placement)
    ranks = [
        _Rank(rank, program, own, table) for rank, (program, own) in enumerate(zip(programs.ranks, each, strict=True))
    ]
    arrived: dict[Message, float] = {}
    waiting: dict[Message, list[int]] = {}
    ready = list(range(len(ranks)))
    while ready:
        rank = ready.pop()
        missing = ranks[rank].run(arrived)
        for message in ranks[rank].sent:
            ready += waiting.pop(message, [])
        ranks[rank].sent.clear()
        if missing is not None:
            waiting.setdefault(missing, []).append(rank)
    stuck = [rank for rank in ranks if rank.at < len(rank.instructions)]
    if stuck:
        where = ", ".join(f"rank {rank.number} at {rank.instructions[rank.at]}" for rank in stuck)
        raise ConfigError(f"the programs wait for each other: {where}; lower them from one schedule")
    return Trace(tuple(span for rank in ranks for span in rank.spans()), placement.ranks, placement.chunks)


class _Messages:
    """Which messages a receive waits for, and what a send is called."""

    def __init__(self, programs: Sequence[Program], placement: Placement) -> None:
        self.last = placement.stages - 1
        self.looked: dict[int, list[int]] = {}
        self.scored: dict[int, list[int]] = {}
        for rank, program in enumerate(programs):
            for do, action, _, _ in program.instructions:
                if do is Do.SEND_L:
                    self.looked.setdefault(action.microbatch or 0, []).append(rank)
                elif do is Do.SEND_S:
                    self.scored.setdefault(action.microbatch or 0, []).append(rank)

    def sent(self, rank: int, instruction: Instruction) -> Message:
        kind = instruction.do[-1]
        return kind, rank if kind in "LS" else instruction.action.stage, instruction.action.microbatch or 0

    def needs(self, instruction: Instruction) -> list[Message]:
        stage, microbatch = instruction.action.stage, instruction.action.microbatch or 0
        do = instruction.do
        if do is Do.RECV_F and stage == 0:
            return [("L", rank, microbatch) for rank in self.looked.get(microbatch, ())]
        if do is Do.RECV_B and stage == self.last:
            return [("S", rank, microbatch) for rank in self.scored.get(microbatch, ())]
        if do is Do.RECV_F:
            return [("F", stage - 1, microbatch)]
        if do is Do.RECV_B:
            return [("B", stage + 1, microbatch)]
        return [{Do.RECV_S: ("F", self.last, microbatch), Do.RECV_T: ("T", self.last, microbatch)}.get(
            do, ("B", 0, microbatch)
        )]  # fmt: skip


class _Rank:
    """A rank on its way through its program. starts, ends: of each instruction."""

    def __init__(self, number: int, program: Program, rates: Rates, messages: _Messages) -> None:
        self.number, self.program, self.rates, self.messages = number, program, rates, messages
        self.instructions = program.instructions
        self.starts = [0.0] * len(self.instructions)
        self.ends = [0.0] * len(self.instructions)
        self.at = 0
        self.now = 0.0
        self.sent: list[Message] = []
        self._free: dict[str, float] = {}
        self._coming: dict[int, float] = {}
        self._reducing: dict[tuple[int, Phase | None], list[float]] = {}
        self._travelled: list[Span] = []
        self._ways: dict[tuple[Do, int, Phase | None], tuple[tuple[str, float], ...]] = {}

    def run(self, arrived: dict[Message, float]) -> Message | None:
        """Play on as far as messages have come; the one that is missing, or None at the end."""
        compute, instructions = self.rates.compute, self.instructions
        while self.at < len(instructions):
            step = instructions[self.at]
            do = step.do
            self.starts[self.at] = self.now
            if do is Do.GATHER or do is Do.FETCH:
                end = self._travel(step)
                if do is Do.GATHER:
                    self._coming[step.of] = end
                else:
                    self.now = max(self.now, end)
            elif do is Do.WHOLE:
                self.now = max(self.now, self._coming.pop(step.of, self.now))
            elif do is Do.REDUCE:
                self._reducing.setdefault((step.of, step.phase), []).append(self._travel(step))
            elif do is Do.SYNC:
                self._travel(step)
            elif do is Do.REDUCED:
                self.now = max(self.now, self._reducing[step.of, step.phase].pop(0))
            elif do.startswith("SEND_"):
                self._send(step, arrived)
            elif do.startswith("RECV_"):
                for message in self.messages.needs(step):
                    if message not in arrived:
                        return message
                    self.now = max(self.now, arrived[message])
            else:
                self.now += compute.get((do, step.of), 0.0)
            self.ends[self.at] = self.now
            self.at += 1
        return None

    def _send(self, step: Instruction, arrived: dict[Message, float]) -> None:
        link = self.rates.link(PIPELINE)
        leaves = max(self.now, self._free.get(PIPELINE, 0.0)) + link.seconds(self.rates.message)
        self._free[PIPELINE] = leaves
        message = self.messages.sent(self.number, step)
        arrived[message] = leaves + link.latency
        self.sent.append(message)

    def _travel(self, step: Instruction) -> float:
        """When what a gather, reduction or sync moves is there."""
        key = (Do.GATHER if step.do is Do.FETCH else step.do, step.of, step.phase)
        way = self._ways.get(key)
        if way is None:
            links = self.rates.link
            way = tuple(
                (axis, links(axis).seconds(count) + links(axis).latency)
                for axis, count in way_of(step, self.program.shape)
            )
            self._ways[key] = way
        at = self.now
        for axis, seconds in way:
            at = max(at, self._free.get(axis, 0.0)) + seconds
            self._free[axis] = at
        if way:
            op = Op.UNSHARD if key[0] is Do.GATHER else Op.REDUCE_GRAD
            self._travelled.append(Span(self.number, lane_of(op), Action(step.action.stage, op), self.now, at))
        return at

    def spans(self) -> Iterator[Span]:
        """One for each action, as the runtime's clock has them, and one for what travelled."""
        for part in parts_of(self.instructions):
            start, end = self.starts[part.start], self.ends[part.stop - 1]
            yield Span(self.number, lane_of(part.action.op), part.action, start, end)
        yield from self._travelled
