"""Breakdown of a step's time for each rank: compute, and waits by cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from atoll.program import Operation
from atoll.program.sim import PlayedPrograms, Rates


class Breakdown(NamedTuple):
    """Seconds of one pipeline rank in a step. They add up to the step.

    forward, backward, weights: F, I and W without the collectives within blocks. Without a pipeline no rank
    waits for I, which then also computes the weights' gradients. Recomputing is part of I. Of a split vocabulary,
    look-ups (L), their sum and scores (S) are part of F, the gradient that is combined from scores is part of I, and
    the slices' gradients (T, G) are part of W.
    tensor: time of collectives of tensor parallelism.  exchanges: of rows between ranks that divide experts,
    and of heads between those that divide sequences.
    optimizer: its step, and waits for slices of matrices that it transforms whole.
    other: pauses, and everything else with a time.
    bubble: waits for a message or a sum that another pipeline rank has not sent yet.
    messages: waits for messages between stages that are in flight, and their coding.
    gathers, reductions: waits for parameters and gradients on the data-parallel links, and copies and casts of gathers.
    sums: waits for the sums at a step's end that are in flight.
    host: waits for copies to host memory and from it, and for steps that its processors make.
    """

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0
    tensor: float = 0.0
    exchanges: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0
    bubble: float = 0.0
    messages: float = 0.0
    gathers: float = 0.0
    reductions: float = 0.0
    sums: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self)


PARTS = {
    "forward": "forward (F)",
    "backward": "backward (I)",
    "weights": "weights' gradients (W)",
    "tensor": "tensor-parallel collectives",
    "exchanges": "exchanges of rows and heads",
    "optimizer": "optimizer",
    "other": "other",
    "bubble": "pipeline bubble",
    "messages": "messages between stages",
    "gathers": "gathers of parameters",
    "reductions": "reductions of gradients",
    "sums": "sums at the step's end",
    "host": "host memory",
}
"""Names of a breakdown's fields."""

_WAITS = frozenset({"gathers", "reductions", "messages", "sums", "host"})
"""Causes of waits; other instructions that wait count to what they compute."""

_FROM_OTHERS = frozenset({"messages", "sums"})

Seconds = Mapping[tuple[Operation, int], float]
"""Seconds by operation, and block or unit."""

Inside = Mapping[str, Seconds]
"""Seconds that collectives add to instructions, by the field of `Breakdown` that they are part of."""

NO_COLLECTIVES: tuple[Inside, ...] = ({},)


def break_down(
    played: PlayedPrograms, rates: Sequence[Rates], inside: Sequence[Sequence[Inside]] | None = None
) -> tuple[Breakdown, ...]:
    """Return the breakdown of the last step of simulated programs, on each pipeline rank.

    rates: those of the simulation, one per rank.
    inside: for each rank, the time that collectives add to its instructions, of each slice of a microbatch; None if
    there are none.

    A rank's seconds add up to the time between its own ends of two steps, which is the step's length once the ranks
    are in a steady state.
    """
    parts = [NO_COLLECTIVES] * len(rates) if inside is None else inside
    return tuple(_of_rank(played, rank, own, part) for rank, (own, part) in enumerate(zip(rates, parts, strict=True)))


class Period(NamedTuple):
    """A period in which a pipeline rank does one thing. nth: the instruction of its program.  part: of `Breakdown`."""

    nth: int
    part: str
    start: float
    end: float


def pieces(
    played: PlayedPrograms, rank: int, rates: Rates, inside: Sequence[Inside] = NO_COLLECTIVES
) -> Iterator[Period]:
    """Yield the pieces of a rank's last simulated step, in order and without gaps.

    A wait for another rank is the bubble until that rank has sent, and then its own cause.  rates, inside: as in
    `break_down`, of this rank.
    """
    timing, program = played.timings[rank], played.programs.ranks[rank]
    sent = iter(timing.sent)
    before = timing.begin
    for nth, ((do, action, of, _), end) in enumerate(zip(program.instructions, timing.ends, strict=True)):
        cause, within = do.cause, inside[(action.microbatch or 0) % len(inside)]
        if not do.waits or cause not in _WAITS:
            both = _within(cause, before, end, {part: own.get((do, of), 0.0) for part, own in within.items()})
        elif cause in _FROM_OTHERS:
            own = min(end - before, rates.of_slice(action.microbatch).compute.get((do, of), 0.0))
            travels = min(end - before - own, end - next(sent))
            middle = end - own - travels
            both = [("bubble", before, middle), (cause, middle, end)]
        else:
            both = [(cause, before, end)]
        for part, start, stop in both:
            if stop > start:
                yield Period(nth, part, start, stop)
        before = end


def _within(cause: str, before: float, end: float, parts: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Return an instruction that computes and then communicates, though it does both in turns: parts with start and
    end."""
    found = []
    for part, seconds in parts.items():
        found.append((part, end - seconds, end))
        end -= seconds
    return [(cause, before, end), *reversed(found)]


def _of_rank(played: PlayedPrograms, rank: int, rates: Rates, inside: Sequence[Inside]) -> Breakdown:
    found: defaultdict[str, float] = defaultdict(float)
    for _, part, start, end in pieces(played, rank, rates, inside):
        found[part] += end - start
    return Breakdown(**found)


def busiest_rank(breakdown: Sequence[Breakdown]) -> int:
    """Return the pipeline rank that waits least for others. It sets the pace."""
    return min(range(len(breakdown)), key=lambda rank: breakdown[rank].bubble)


def mean(breakdown: Sequence[Breakdown]) -> Breakdown:
    """Return the mean over all pipeline ranks."""
    return Breakdown(*(sum(column) / len(breakdown) for column in zip(*breakdown, strict=True)))
