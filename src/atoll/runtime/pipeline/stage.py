"""A stage: consecutive blocks of the model that one rank runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from atoll.models import Adapter, Batch
from atoll.runtime.pipeline.deferred import DeferredWeight
from atoll.runtime.sharding.hooks import Reducer, ShardedBlock
from atoll.runtime.sharding.lookahead import Lookahead
from atoll.runtime.sharding.unit import Unit


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks `blocks` of the model, and the units they use in the order of the backward.

    kept: units that stay whole while the stage is open.
    """

    index: int
    blocks: range
    is_first: bool
    is_last: bool
    adapter: Adapter
    units: tuple[Unit, ...]
    sharded: tuple[ShardedBlock, ...]
    deferred: tuple[DeferredWeight, ...]
    reducer: Reducer
    lookahead: Lookahead
    kept: list[Unit] = field(default_factory=list)

    def forward(self, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """The hidden state after the stage, [B, S, hidden] as a rule, or the logits on the last stage."""
        return self.adapter.forward(self.blocks.start, self.blocks.stop, hidden, batch)

    def open(self, *, stays: bool) -> None:
        """UNSHARD. The first blocks may be gathered from now on, each at last when it is come to; with `stays` they are
        whole until RESHARD."""
        if stays:
            for unit in self.units:
                unit.keep()
            self.kept.extend(self.units)
        self.lookahead.look()

    def close(self) -> None:
        """RESHARD: free what was kept, and what an early stop or an input without gradient left whole."""
        while self.kept:
            self.kept.pop().let_go()
        for block in self.sharded:
            block.free()

    def end_input_backward(self) -> None:
        """The end of I: reduce what its microbatch left unreduced of phase I."""
        self.reducer.flush()

    @property
    def is_recomputed(self) -> bool:
        """Whether blocks run their forward again in the backward."""
        return any(block.is_recomputed for block in self.sharded)

    def train(self, mode: bool) -> None:
        """Switch dropout and the like on or off."""
        for block in self.sharded:
            block.module.train(mode)


def owners_of(blocks: Sequence[int], runs: Sequence[range], rank_of_stage: Sequence[int]) -> tuple[int, ...]:
    """Pipeline ranks that hold any of `blocks`, in the order of their stages."""
    found: list[int] = []
    for stage, run in enumerate(runs):
        if any(block in run for block in blocks) and rank_of_stage[stage] not in found:
            found.append(rank_of_stage[stage])
    return tuple(found)
