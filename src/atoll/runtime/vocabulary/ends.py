"""Replacements of embedding and head for a split vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from atoll.base._torch import parameter_replaced
from atoll.runtime.models import Block
from atoll.runtime.models.part import SequencePart


class End(ABC):
    """Replaces embedding or head if the vocabulary is split over the ranks."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        module.forward = self.forward

    @abstractmethod
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Forward in place of the module's own."""

    def lies_in(self, block: Block) -> bool:
        """Return True if a block has the module."""
        return any(module is self._module for module in block.module.modules())


class EmbeddingEntry(End):
    """Returns the looked-up rows of the running microbatch, also for a recomputed forward.

    rows: the looked-up rows; set before the block runs, and cleared after it.
    part: of each sequence whose rows are looked up, if sequences are divided; the others are zero.
    """

    def __init__(self, module: nn.Module, part: SequencePart | None = None) -> None:
        super().__init__(module)
        self.rows: torch.Tensor | None = None
        self._part = part

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if self._part is None or given.shape[1] == self._rows.shape[1]:
            return self._embedded(given)
        return self._part.among_zeros(self._embedded(self._part.of(given, 1)), 1, given.shape[1])

    @property
    def _rows(self) -> torch.Tensor:
        assert self.rows is not None, "it is set before the block runs"
        return self.rows

    def _embedded(self, given: torch.Tensor) -> torch.Tensor:
        rows, module = self._rows, self._module
        if type(module) is nn.Embedding:
            return rows
        # The embedding's class may transform its rows: apply it with these rows as its table.
        padding, module.padding_idx = module.padding_idx, None  # type: ignore[assignment]
        try:
            with parameter_replaced(module, "weight", rows.flatten(0, -2)):
                found: torch.Tensor = type(module).forward(module, torch.arange(given.numel(), device=given.device))
        finally:
            module.padding_idx = padding
        return found.view(*given.shape, -1)


class HeadExit(End):
    """Passes on the input of the head and keeps it, because it is the output of the stage."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.given: torch.Tensor | None = None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.given = given
        return given.detach()

    def taken(self) -> torch.Tensor:
        """Return the input of the head."""
        assert self.given is not None, "the last stage runs the head"
        given, self.given = self.given, None
        return given
