"""The work that every contender does: a model, its batches, its loss and its optimizer, in fp32, in three sizes.

Chain      blocks `x + Linear(Linear(LayerNorm(x)))` on a few tokens: little compute, many bytes
Text       a decoder of 100 million parameters on sequences of 512 tokens
Sleeping   an emulated device: blocks that sleep where a device would compute, with a given ratio of compute to bytes

A work says what a rank trains on in a step (`samples`); a setting says in how many microbatches. The loss is the mean
over all tokens of all ranks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.runtime.models import Adapter, Decoder, DecoderConfig, MixtureConfig, SequentialAdapter

Batch = Mapping[str, Tensor]
BYTES = 4
"""Of a number in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(ABC):
    """What is trained. `samples` are of one rank and step."""

    samples: int = 16
    lr: float = 1e-3
    seed: int = 0

    @abstractmethod
    def build(self) -> nn.Module:
        """The model with random values."""

    @abstractmethod
    def batch(self, step: int, rank: int) -> dict[str, Tensor]:
        """A rank's samples of a step, with `labels` that all count."""

    @abstractmethod
    def loss(self, model: nn.Module, piece: Batch) -> Tensor:
        """The mean loss of a microbatch."""

    def units(self, model: Any) -> Sequence[nn.Module]:
        """The blocks in the order of the forward, each gathered and freed as one."""
        return list(model)

    def wraps(self, model: Any) -> Sequence[nn.Module]:
        """The units, and before each what an expert of FSDP2 wraps apart inside it: in the order their forwards end."""
        return self.units(model)

    def model(self) -> nn.Module:
        """The model with its initial values, the same on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.build()

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())

    @property
    def blocks(self) -> int:
        """Blocks of the model."""
        with torch.device("meta"):
            return len(self.units(self.build()))

    def pieces(self, batch: Batch, microbatches: int) -> list[Batch]:
        """The microbatches of a batch."""
        each = self.samples // microbatches
        return [{name: value[at * each :][:each] for name, value in batch.items()} for at in range(microbatches)]

    def kept_bytes(self, microbatches: int) -> int:
        """What a rank holds besides the model: its batch, and what autograd keeps of one of its microbatches."""
        model, batch = self.model(), self.batch(0, 0)
        own = {parameter.data_ptr() for parameter in model.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in own:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # an output that its own node saved would keep the node, and all, for good

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.loss(model, self.pieces(batch, microbatches)[0])
        for value in batch.values():
            kept.pop(value.untyped_storage().data_ptr(), None)
        return sum(value.nbytes for value in batch.values()) + sum(kept.values())

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Fused AdamW."""
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.1, fused=True)

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return {"kind": type(self).__name__, **asdict(self), "parameters": self.parameters, "units": self.blocks}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain(Work):
    """Eight blocks `x + down(gelu(up(norm(x))))`; the loss is the mean square of the outputs.

    low_rank: of adapters of the `peft` package on both linear layers of every block, the rest frozen; 0 for none.
    """

    count: int = 8
    hidden: int = 384
    inner: int = 1536
    tokens: int = 16
    low_rank: int = 0

    def build(self) -> nn.Module:
        chain = Blocks(*(Block(self.hidden, self.inner) for _ in range(self.count)))
        if not self.low_rank:
            return chain
        import peft

        return peft.get_peft_model(chain, peft.LoraConfig(r=self.low_rank, target_modules=["up", "down"]))

    def units(self, model: Any) -> Sequence[nn.Module]:
        return list(model.base_model.model if self.low_rank else model)

    def batch(self, step: int, rank: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        inputs = torch.randn(self.samples, self.tokens, self.hidden, generator=generator)
        return {"inputs": inputs, "labels": torch.zeros(inputs.shape[:2], dtype=torch.long)}

    def loss(self, model: nn.Module, piece: Batch) -> Tensor:
        outputs: Tensor = model(piece["inputs"])
        return outputs.square().mean()


class Block(nn.Module):
    """x + down(gelu(up(norm(x))))."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Blocks(nn.Sequential):
    """Blocks with the mean square of their output, as Atoll takes a loss: summed over tokens."""

    def atoll_adapter(self) -> Adapter:
        """The model as Atoll splits it."""
        return SequentialAdapter(self, lambda outputs, batch: outputs.square().mean(-1).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Work):
    """The built-in decoder with 100 million parameters, on random sequences of 512 tokens."""

    samples: int = 2
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    ffn: int = 2048
    vocabulary: int = 10_240
    tokens: int = 512
    lr: float = 1e-4

    @property
    def mixture(self) -> MixtureConfig | None:
        """The experts in place of the feed-forwards; None for dense ones."""
        return None

    def build(self) -> nn.Module:
        sizes = DecoderConfig(
            vocabulary=self.vocabulary,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.heads,
            ffn=self.ffn,
            mixture=self.mixture,
        )
        model = Decoder(sizes)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        return model

    def units(self, model: Any) -> Sequence[nn.Module]:
        return [model.embed, *model.layers, model.head]

    def batch(self, step: int, rank: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        tokens = torch.randint(self.vocabulary, (self.samples, self.tokens + 1), generator=generator)
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def loss(self, model: nn.Module, piece: Batch) -> Tensor:
        logits: Tensor = model(piece["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), piece["labels"].flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleeping(Work):
    """A model of 7 billion parameters on two nodes of eight A100, in small: compute sleeps, and keeps activations.

    What is emulated, of one rank's sample of 4096 tokens: 6 x 6.74e9 x 4096 FLOPs at half of 312 TFLOP/s take 1.06 s;
    half of the 13.5 GB of parameters in bf16 cross between two nodes in 0.54 s at 100 Gb/s; a sample keeps
    34 x 4096 x 4096 x 32 bytes = 18.2 GB of activations (arXiv 2205.05198, without attention scores), 1.35 times the
    parameters. Here a sample's compute takes `seconds`, the link's rate follows from it (`rate`), and each block keeps
    1.35 times its parameters a sample. What is fast inside a node there is fast here: ranks share memory or a loopback.
    """

    samples: int = 8
    count: int = 8
    width: int = 512
    tokens: int = 2
    seconds: float = 0.160
    kept: float = 1.35

    def build(self) -> nn.Module:
        block_bytes = BYTES * (self.width * self.width + self.width)
        keeps = int(self.kept * block_bytes / BYTES)
        return Blocks(*(Pausing(self.width, self.seconds / self.count, keeps) for _ in range(self.count)))

    def batch(self, step: int, rank: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        inputs = torch.randn(self.samples, self.tokens, self.width, generator=generator)
        return {"inputs": inputs, "labels": torch.zeros(inputs.shape[:2], dtype=torch.long)}

    def loss(self, model: nn.Module, piece: Batch) -> Tensor:
        outputs: Tensor = model(piece["inputs"])
        return outputs.square().mean()

    def rate(self, gigabits: float) -> float:
        """Bits a second of the link between two islands that take the part of the compute's time which `gigabits` a
        second take there."""
        there = (13.48e9 / 2 * 8 / (gigabits * 1e9)) / 1.06
        return BYTES * self.parameters / 2 * 8 / (there * self.seconds)


class Pausing(nn.Module):
    """x + linear(x) that takes a device's time: a third of `seconds` a sample forward, two thirds backward."""

    def __init__(self, width: int, seconds: float, keeps: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds, self.keeps = seconds, keeps

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + Pause.apply(self.linear(hidden), self.seconds, self.keeps)


_PACE = {"sleeps": True}


def sleep_where_compute_would(sleeps: bool) -> None:
    """Whether the emulated device takes its time in this process; it need not while nothing is timed."""
    _PACE["sleeps"] = sleeps


class Pause(torch.autograd.Function):
    """Sleeps where a device computes, and keeps `keeps` numbers a sample from its forward to its backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float, keeps: int) -> Tensor:
        ctx.seconds = seconds * len(hidden)
        ctx.save_for_backward(hidden.new_empty(keeps * len(hidden)))
        time.sleep(ctx.seconds / 3 * _PACE["sleeps"])
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds * 2 / 3 * _PACE["sleeps"])
        _ = ctx.saved_tensors
        return gradients[0], None, None
