"""Memory that a microbatch keeps on a rank, and its limit.

[Note: what is kept] A rank's whole share of a microbatch keeps `activation` bytes from F to I and `weight_grad` bytes
from I to W; a chunk keeps 1/chunks of them. A full backward keeps nothing for W: its activation is freed at its end.
`static` bytes are kept all the time: parameters, gradients, optimizer state. If the vocabulary is split, the scores of
a microbatch by a rank's slice keep `score` bytes from S to T. A slice of a microbatch's sequences keeps its share of
these bytes, as much as any other slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from atoll.base.errors import ConfigError
from atoll.plans.ir.action import Action, Op

PerRank = float | Sequence[float]
"""One number for all ranks, or one per rank."""


class RankMemory(NamedTuple):
    """Bytes of one rank. `limit` is infinite without a limit."""

    activation: float
    weight_grad: float
    static: float
    limit: float
    score: float = 0.0

    @property
    def room(self) -> float:
        """Memory available to microbatches."""
        return self.limit - self.static


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes (or any one unit): see the note above.

    Raises ConfigError for an amount that is negative, infinite or not a number.
    """

    activation: PerRank = 1.0
    weight_grad: PerRank = 1.0
    static: PerRank = 0.0
    limit: PerRank | None = None
    score: PerRank = 0.0

    def __post_init__(self) -> None:
        for name in ("activation", "weight_grad", "static", "limit", "score"):
            value = getattr(self, name)
            for number in value if isinstance(value, Sequence) else (value,):
                if number is not None and not (math.isfinite(number) and number >= 0):
                    raise ConfigError(f"memory {name} is {number}: it must be a finite number of bytes, 0 or more")

    def of_slice(self, slices: int) -> Memory:
        """Return what one of `slices` equal slices of a microbatch keeps."""
        if slices == 1:
            return self
        kept = {name: scaled(getattr(self, name), 1 / slices) for name in ("activation", "weight_grad", "score")}
        return replace(self, **kept)

    def per_rank(self, ranks: int) -> tuple[RankMemory, ...]:
        """Return the amounts of each rank. Raises ConfigError for a list of another length."""
        columns = []
        for name in ("activation", "weight_grad", "static", "limit", "score"):
            value = getattr(self, name)
            column = tuple(value) if isinstance(value, Sequence) else (math.inf if value is None else value,) * ranks
            if len(column) != ranks:
                raise ConfigError(f"memory {name} has {len(column)} numbers for {ranks} ranks: give one, or one a rank")
            columns.append(column)
        return tuple(RankMemory(*map(float, row)) for row in zip(*columns, strict=True))


def scaled(amount: PerRank, factor: float) -> PerRank:
    """Return the product of a number, or of each of several, and a factor."""
    return tuple(each * factor for each in amount) if isinstance(amount, Sequence) else amount * factor


class Occupancy(NamedTuple):
    """Bytes that a rank holds while it runs an action, and from its end on."""

    during: float
    after: float


def levels_of(row: Iterable[Action], chunks: int, memory: RankMemory) -> list[Occupancy]:
    """Return the memory after each compute action of a rank, from integer counts, so that thirds add up exactly."""
    kept = pending = scored = 0
    before = memory.static
    levels = []
    for action in row:
        if action.op is Op.F:
            kept += 1
        elif action.op is Op.W:
            pending -= 1
        elif action.op in (Op.I, Op.B):
            kept -= 1
            pending += action.op is Op.I
        else:
            scored += (action.op is Op.S) - (action.op is Op.T)
        after = memory.static + (kept * memory.activation + pending * memory.weight_grad) / chunks
        after += scored * memory.score
        levels.append(Occupancy(max(before, after), after))
        before = after
    return levels


def peak_of(row: Iterable[Action], chunks: int, memory: RankMemory) -> float:
    """Return the peak bytes of a rank in an order of compute actions."""
    return max((level.during for level in levels_of(row, chunks, memory)), default=memory.static)
