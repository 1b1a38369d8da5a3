"""Embedding and head of a model, and what replaces them where they are computed in another way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import nn

from atoll.base._torch import parameter_replaced
from atoll.base.errors import PlanError
from atoll.runtime.models import Adapter, Block, Vocabulary
from atoll.runtime.models.part import SequencePart


def ends_of(adapter: Adapter, option: str) -> Vocabulary:
    """Return embedding and head of a model. Raises PlanError if its adapter does not name them.

    option: of the plan that needs them.
    """
    asked: Callable[[], Vocabulary] | None = getattr(adapter, "vocabulary", None)
    if asked is None:
        raise PlanError(
            f"{option}: a {type(adapter).__name__} has no vocabulary(), which says which modules are embedding and "
            "head; turn it off, or give the model an adapter that has one"
        )
    try:
        return asked()
    except PlanError as error:
        raise PlanError(f"{option}: {error}") from None


def check_ids(name: str, ids: torch.Tensor, size: int) -> None:
    """Raise PlanError for ids outside a vocabulary of `size` rows. name: of the batch's tensor."""
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < size):
        raise PlanError(f"{name} from {int(ids.min())} to {int(ids.max())}: the vocabulary has {size} rows")


def finished_logits(scored: torch.Tensor, vocabulary: Vocabulary) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply a model's scale and cap to its head's output; also return the derivative if it is not 1."""
    scale, cap = vocabulary.scale, vocabulary.cap
    if scale != 1.0:
        scored = scored * scale
    if cap is not None:
        scored = torch.tanh(scored / cap)
        return scored * cap, (1.0 - scored.square()) * scale
    return scored, None if scale == 1.0 else torch.full_like(scored[:1, :1], scale).expand_as(scored)


class End(ABC):
    """Replaces embedding or head if the vocabulary is split over the ranks, or the loss is computed in chunks."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        module.forward = self.forward

    @abstractmethod
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Forward in place of the module's own."""

    def lies_in(self, block: Block) -> bool:
        """Return True if a block has the module."""
        return any(module is self.module for module in block.module.modules())


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
        rows, module = self._rows, self.module
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

    def taken(self, output: torch.Tensor) -> torch.Tensor:
        """Return the input of the head. output: what the model's forward makes of it, which nobody needs."""
        assert self.given is not None, "the last stage runs the head"
        given, self.given = self.given, None
        return given
