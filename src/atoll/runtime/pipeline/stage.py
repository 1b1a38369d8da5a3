"""A stage: consecutive blocks of the model on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atoll.runtime.models import Adapter, Batch
from atoll.runtime.pipeline.block import LocalBlock
from atoll.runtime.sharding.unit import Unit


class StageEntry(Protocol):
    """A module of the first stage whose output is received, and not computed from the batch.

    rows: its output for the running microbatch; set before its block runs, and cleared after it.
    """

    rows: torch.Tensor | None


class StageExit(Protocol):
    """A module of the last stage that is computed elsewhere: its input is the output of the stage."""

    def taken(self, output: torch.Tensor) -> torch.Tensor:
        """Return its input for the running microbatch, and release it. output: of the model's forward."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks `run` of the model, and the units they use in the order of the backward.

    entry, exit: replacements of the model's first and last modules, if other ranks have a part in these.
    """

    index: int
    run: range
    is_last: bool
    adapter: Adapter
    units: tuple[Unit, ...]
    blocks: tuple[LocalBlock, ...]
    entry: StageEntry | None = None
    exit: StageExit | None = None

    def forward(self, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """Return the hidden state after the stage, usually [B, S, hidden], or the logits on the last stage.

        A stage with an entry is given what its entry returns, and one with an exit returns the input of that.
        """
        if self.entry is None:
            output = self.adapter.forward(self.run.start, self.run.stop, hidden, batch)
        else:
            self.entry.rows = hidden
            output = self.adapter.forward(self.run.start, self.run.stop, None, batch)
            self.entry.rows = None
        return output if self.exit is None else self.exit.taken(output)

    @property
    def has_loss(self) -> bool:
        """True if the loss is computed from the stage's output."""
        return self.is_last and self.exit is None

    def train(self, mode: bool) -> None:
        """Set the training mode of dropout and other modules."""
        for block in self.blocks:
            block.module.train(mode)
