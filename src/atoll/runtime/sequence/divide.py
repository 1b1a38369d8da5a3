"""Sequences that the ranks of a group divide, for one model and plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atoll.base.errors import PlanError
from atoll.plans.plan import Place, Plan
from atoll.runtime.models import Adapter, Batch, Loss
from atoll.runtime.models.attention import divide_attention
from atoll.runtime.models.heads import EXCHANGES
from atoll.runtime.models.part import SequencePart
from atoll.runtime.pipeline.block import LocalBlock
from atoll.runtime.sequence.exchange import RankExchange
from atoll.runtime.transport import Channel, Peers, Tag, Transport


@dataclass(frozen=True, slots=True)
class DividedSequences:
    """The part of each sequence that a rank has. attentions: number of attentions in each block.

    exchanges: of this rank's blocks, once they are installed.
    """

    part: SequencePart
    attentions: Mapping[int, int]
    _exchanges: list[RankExchange] = field(default_factory=list)

    @staticmethod
    def of(adapter: Adapter, plan: Plan, place: Place) -> DividedSequences | None:
        """Have a model compute a part of each sequence; None if ranks divide none. Raises PlanError if it cannot."""
        if plan.mesh.sequence == 1:
            return None
        divide: Callable[..., Mapping[int, int]] | None = getattr(adapter, "divide_sequences", None)
        if divide is None:
            raise PlanError(
                f"sequence = {plan.mesh.sequence}: it is not known how a {type(adapter).__name__} computes a part of "
                "each sequence: it has no divide_sequences(); docs/adapters.md shows how. Use sequence = 1"
            )
        part = SequencePart(place.sequence, plan.mesh.sequence)
        return DividedSequences(part, divide(part, plan.mesh.tensor))

    @property
    def exchanges(self) -> Mapping[int, int]:
        """For each block that exchanges heads for positions, how often a forward does."""
        return {at: EXCHANGES * count for at, count in self.attentions.items()}

    def install(self, blocks: Iterable[LocalBlock], transport: Transport) -> None:
        """Have the attention in this rank's blocks exchange."""
        for block in blocks:
            if block.index in self.attentions:
                exchange = RankExchange(transport, block.index)
                self._exchanges.append(exchange)
                divide_attention(block.module.modules(), exchange)

    def loss_of(self, loss: Loss) -> Loss:
        """Return a loss of the outputs of a part, whose batch has the same part."""
        part = self.part

        def of_part(outputs: Any, batch: Batch) -> Tensor | tuple[Tensor, Tensor | float]:
            return loss(outputs, part.of_batch(batch))

        return of_part

    def whole(self, outputs: Any, transport: Transport, length: int) -> Any:
        """Return the outputs of whole sequences, [B, length, ...], from those of this rank's part; all of the ranks
        that divide them call it."""
        if not isinstance(outputs, Tensor):
            raise PlanError(f"outputs of a part of each sequence are a {type(outputs).__name__}, not one tensor")
        place = transport.place
        peers = Peers("sequence", place.peers("sequence"), place.sequence)
        own = outputs.contiguous()
        rows = own.view(1, -1).expand(len(peers.ranks), -1).contiguous()
        each = [1] * len(peers.ranks)
        with transport.exchange_rows(rows, (each, each), peers, tag=Tag(Channel.EXCHANGE, Tag.LAST)) as parts:
            found = torch.cat([part.view(own.shape) for part in parts], dim=1)
        return found[:, :length]
