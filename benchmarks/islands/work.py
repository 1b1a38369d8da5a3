"""The work that every contender does: one model, its batches, its loss and its optimizer, in fp32.

Eight blocks `x + Linear(Linear(LayerNorm(x)))` with a gelu between, each a unit of its own. The loss is the mean square
of the outputs over all tokens of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.models import Adapter, SequentialAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Sizes. `microbatches` are of one rank and step, each of `samples` x `tokens` x `hidden` numbers.

    low_rank: of adapters of the `peft` package on both linear layers of every block, the rest frozen; 0 for none.
    """

    blocks: int = 8
    hidden: int = 384
    inner: int = 1536
    microbatches: int = 8
    samples: int = 2
    tokens: int = 16
    lr: float = 1e-3
    seed: int = 0
    low_rank: int = 0

    @property
    def parameters(self) -> int:
        """How many the model has: a norm and two linear layers a block."""
        norm = 2 * self.hidden
        linears = 2 * self.hidden * self.inner + self.inner + self.hidden
        return self.blocks * (norm + linears)

    def model(self) -> nn.Module:
        """The model with its initial values, the same on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            chain = Chain(*(Block(self.hidden, self.inner) for _ in range(self.blocks)))
            if not self.low_rank:
                return chain
            import peft

            return peft.get_peft_model(chain, peft.LoraConfig(r=self.low_rank, target_modules=["up", "down"]))

    def batch(self, step: int, rank: int) -> Tensor:
        """A rank's inputs of a step, [microbatches * samples, tokens, hidden]."""
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        return torch.randn(self.microbatches * self.samples, self.tokens, self.hidden, generator=generator)

    def pieces(self, batch: Tensor) -> tuple[Tensor, ...]:
        """The microbatches of a batch."""
        return batch.split(self.samples)

    def loss(self, outputs: Tensor) -> Tensor:
        """A microbatch's part of the mean over a rank's step."""
        return outputs.square().mean() / self.microbatches

    @property
    def kept_bytes(self) -> int:
        """What a rank holds besides the model: its batch, and what autograd keeps of one microbatch."""
        model, batch = self.model(), self.batch(0, 0)
        own = {parameter.data_ptr() for parameter in model.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in own:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.loss(model(self.pieces(batch)[0]))
        kept.pop(batch.untyped_storage().data_ptr(), None)
        return batch.nbytes + sum(kept.values())

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Fused AdamW."""
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.1, fused=True)


class Block(nn.Module):
    """x + down(gelu(up(norm(x))))."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Chain(nn.Sequential):
    """The blocks with the work's loss, as Atoll takes it: summed over tokens."""

    def atoll_adapter(self) -> Adapter:
        """The model as Atoll splits it."""
        return SequentialAdapter(self, lambda outputs, batch: outputs.square().mean(-1).sum())
