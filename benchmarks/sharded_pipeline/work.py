"""Layers that sleep where a device would compute, on 4 pipeline x 2 data-parallel ranks, in float64 by SGD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.emulated.work import Device
from benchmarks.emulated.work import Work as Sleeping

PIPELINE, DATA = 4, 2
FLOAT64 = 8
BURST_BYTES = 1 << 20
"""The burst of the emulated link, in bytes: `benchmarks.islands.network.BURST`, which `tc` reads as 1 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Sleeping):
    """What is trained: `samples` of each data-parallel rank a step, in as many microbatches as a contender likes.

    seconds: F, I and W of a rank's share of the layers each, where there are `microbatches`; with others, each takes
    as much longer or shorter.  kept: of a sample; a layer keeps as many bytes of one of `microbatches` as it has of
    parameters, where dense layers of 7B parameters in bf16 keep 0.5 to 1.3 times as many.
    """

    layers: int = 16
    ranks: int = PIPELINE
    microbatches: int = 16
    samples: int = 32
    seconds: float = 0.030
    width: int = 160
    sequence: int = 4
    kept: int = 160 * 160 // 2
    lr: float = 1e-3

    @property
    def tokens(self) -> int:
        """Tokens of a step on all ranks; all count."""
        return DATA * self.samples * self.sequence

    @property
    def layers_a_rank(self) -> int:
        """Layers of a pipeline rank."""
        return self.layers // self.ranks

    @property
    def layer_bytes(self) -> int:
        """A layer's parameters."""
        return self.width * self.width * FLOAT64

    @property
    def kept_bytes(self) -> int:
        """What a layer keeps of one of `microbatches` from F to W."""
        return self.kept * self.samples // self.microbatches * FLOAT64

    @property
    def compute_seconds(self) -> float:
        """What a rank computes in a step."""
        return 3 * self.seconds * self.microbatches

    def layer_seconds(self, microbatches: int) -> float:
        """F, I and W of a layer each, where a step has so many microbatches."""
        return self.seconds * self.microbatches / microbatches / self.layers_a_rank

    @property
    def bytes_a_microbatch(self) -> float:
        """What an island sends across for a microbatch where everything is gathered twice and reduced once."""
        return 3 * self.layer_bytes * self.layers / DATA

    def rate(self, share: float) -> float:
        """Bits a second at which that takes `share` of the time of a rank's computation."""
        return 8 * self.bytes_a_microbatch / (share * 3 * self.seconds)

    def share(self, step: int, data: int) -> dict[str, Tensor]:
        """A data-parallel rank's samples of a step."""
        return {name: value[data * self.samples :][: self.samples] for name, value in self.whole(step).items()}

    def whole(self, step: int) -> dict[str, Tensor]:
        """All samples of a step."""
        generator = torch.Generator().manual_seed(step)
        shape = (DATA * self.samples, self.sequence)
        return {name: torch.randint(self.vocabulary, shape, generator=generator) for name in ("input_ids", "labels")}

    def gradients_of_one_process(self) -> dict[str, Tensor]:
        """The first step's gradients without pipeline, sharding and sleep."""
        model, batch = self.filled_model(Device(), stages=self.layers), self.whole(0)
        for ids, labels in zip(batch["input_ids"].split(1), batch["labels"].split(1), strict=True):
            (self.loss(Device(), model(ids), labels) / self.tokens).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
