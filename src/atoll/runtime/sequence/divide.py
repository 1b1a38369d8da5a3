"""Sequences that the ranks of a group divide, or a stage computes in slices, for one model and plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from atoll.runtime.models.slices import KeptKeys
from atoll.runtime.pipeline.block import LocalBlock
from atoll.runtime.sequence.exchange import RankExchange
from atoll.runtime.transport import Channel, Peers, Tag, Transport


@dataclass(slots=True)
class DividedSequences:
    """The part of each sequence that a rank computes at a time. attentions: number of attentions in each block.

    exchanges: of this rank's blocks, once they are installed.  kept: keys and values that its attention keeps, by
    block, where sequences have slices.
    """

    part: SequencePart
    attentions: Mapping[int, int]
    _exchanges: list[RankExchange] = field(default_factory=list)
    _kept: dict[int, list[KeptKeys]] = field(default_factory=dict)

    @staticmethod
    def of(adapter: Adapter, plan: Plan, place: Place) -> DividedSequences | None:
        """Have a model compute a part of each sequence; None if it computes whole ones. Raises PlanError if it
        cannot."""
        if plan.mesh.sequence == plan.schedule.slices == 1:
            return None
        part = SequencePart(place.sequence, plan.mesh.sequence, slices=plan.schedule.slices, lengths=plan.slice_lengths)
        divide: Callable[..., Mapping[int, int]] | None = getattr(adapter, "divide_sequences", None)
        if divide is None:
            raise PlanError(
                f"{part.said}: it is not known how a {type(adapter).__name__} computes a part of each sequence: it has "
                f"no divide_sequences(); docs/adapters.md shows how. Use {part.whole_again}"
            )
        return DividedSequences(part, divide(part, plan.mesh.tensor))

    @property
    def exchanges(self) -> Mapping[int, int]:
        """For each block that exchanges heads for positions, how often a forward does."""
        return {at: EXCHANGES * count for at, count in self.attentions.items()} if self.part.ranks > 1 else {}

    def install(self, blocks: Iterable[LocalBlock], transport: Transport) -> None:
        """Have the attention in this rank's blocks exchange, and keep what later slices attend to."""
        for block in blocks:
            if block.index in self.attentions:
                self._install(block, transport)

    def _install(self, block: LocalBlock, transport: Transport) -> None:
        exchange = None
        if self.part.ranks > 1:
            exchange = RankExchange(transport, block.index)
            self._exchanges.append(exchange)
        own: list[KeptKeys] = []

        def keeping() -> KeptKeys:
            own.append(KeptKeys(self.part, block.module if block.needs_backward else None))
            return own[-1]

        divide_attention(block.module.modules(), exchange, keeping if self.part.slices > 1 else None)
        self._kept[block.index] = own

    # ---- a program

    def lengths(self, batches: Sequence[Batch]) -> list[int]:
        """Return the positions of each action's part. batches: of each action, its whole microbatch."""
        found = []
        for number, batch in enumerate(batches):
            self.part.enter(number, batch)
            begin, end = self.part.run_of(self.part.length)
            found.append(end - begin)
        return found

    def clear(self) -> None:
        """Begin or end a program: release what one that was not finished has left."""
        for own in self._kept.values():
            for each in own:
                each.clear()

    def ended_backward(self, block: int) -> None:
        """Release what a block keeps of a microbatch, after the backward of its first slice."""
        if self.part.at == 0:
            for each in self._kept.get(block, ()):
                each.release(self.part.microbatch)

    def loss_of(self, loss: Loss) -> Loss:
        """Return a loss of the outputs of a part, whose batch has the same part."""
        part = self.part

        def of_part(outputs: Any, batch: Batch) -> Tensor | tuple[Tensor, Tensor | float]:
            return loss(outputs, part.of_batch(batch))

        return of_part

    def whole(self, outputs: Sequence[Any], transport: Transport, length: int) -> Tensor:
        """Return the outputs of whole sequences, [B, length, ...], from those of each slice of this rank's part; all of
        the ranks that divide them call it."""
        for each in outputs:
            if not isinstance(each, Tensor):
                raise PlanError(f"outputs of a part of each sequence are a {type(each).__name__}, not one tensor")
        found = outputs if self.part.ranks == 1 else [self._gathered(each, transport) for each in outputs]
        return torch.cat(list(found), dim=1)[:, :length]

    @staticmethod
    def _gathered(outputs: Tensor, transport: Transport) -> Tensor:
        place = transport.place
        peers = Peers("sequence", place.peers("sequence"), place.sequence)
        own = outputs.contiguous()
        rows = own.view(1, -1).expand(len(peers.ranks), -1).contiguous()
        each = [1] * len(peers.ranks)
        with transport.exchange_rows(rows, (each, each), peers, tag=Tag(Channel.EXCHANGE, Tag.LAST)) as parts:
            return torch.cat([part.view(own.shape) for part in parts], dim=1)
