"""The problem of an automatic scheduler: sizes, times, bytes, and the objective."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from atoll.base.errors import ConfigError
from atoll.plans.ir.placement import Placement
from atoll.plans.schedules.memory import Memory, RankMemory
from atoll.plans.schedules.timing import StageCosts, Timing

Objective = Literal["makespan", "span"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

TOLERANCE = 1e-9
"""Tolerance of a limit, because sums of thirds of a microbatch are not exact."""


@dataclass(frozen=True)
class Problem:
    """The problem of the best order of F, I and W on `placement`, within the memory of every rank.

    objective        "makespan", from the first start to the last end of any rank, or "span", the largest of the ranks'
                     own, which is the cost of a step if steps overlap
    fused_backward   a full backward releases the input's gradient at its end

    Raises ConfigError for a limit under which a rank cannot run one microbatch.
    """

    placement: Placement
    microbatches: int
    timing: Timing
    memory: Memory
    objective: Objective = "makespan"
    fused_backward: bool = False

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"objective {self.objective!r} does not exist: choose one of {', '.join(OBJECTIVES)}")
        short = []
        for rank, bytes_of in enumerate(self.bytes_of):
            least = bytes_of.static + bytes_of.activation
            if least > bytes_of.limit * (1 + TOLERANCE):
                short.append(f"rank {rank} needs at least {least:.15g} bytes and may hold {bytes_of.limit:.15g}")
        if short:
            raise ConfigError(
                f"the memory limit leaves no order: {'; '.join(short)}; one microbatch's activations must fit beside "
                "the static bytes: raise the limit, shard more, or take smaller microbatches"
            )

    @classmethod
    def of(
        cls,
        placement: Placement,
        microbatches: int,
        *,
        costs: StageCosts | None = None,
        memory: Memory | None = None,
        objective: Objective = "makespan",
    ) -> Problem:
        """Return the problem with `costs` (F = I = W = 1 and no hop without them)."""
        return cls(
            placement,
            microbatches,
            Timing.of(placement, costs),
            memory or Memory(),
            objective,
            getattr(costs, "fused_backward", False),
        )

    @cached_property
    def bytes_of(self) -> tuple[RankMemory, ...]:
        """Return the bytes of each rank's whole share."""
        return self.memory.per_rank(self.placement.ranks)

    def forwards_that_fit(self, rank: int) -> int:
        """Return the number of forwards of a chunk that fit, with nothing else kept, at most all."""
        chunks, bytes_of = self.placement.chunks, self.bytes_of[rank]
        everything = chunks * self.microbatches
        if bytes_of.activation == 0 or math.isinf(bytes_of.room):
            return everything
        return math.floor(min(everything, bytes_of.room * chunks / bytes_of.activation * (1 + TOLERANCE)))
