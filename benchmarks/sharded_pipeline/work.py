"""48 layers that sleep where a device would compute, on 4 pipeline x 2 data-parallel ranks, in float64 by SGD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.emulated.work import Device
from benchmarks.emulated.work import Work as Sleeping

PIPELINE, DATA = 4, 2
FLOAT64 = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Sleeping):
    """What is trained. `seconds`: F, I and W of a rank's share of the layers each; `microbatches` are of one rank."""

    layers: int = 48
    together: int = 4
    ranks: int = PIPELINE
    microbatches: int = 16
    seconds: float = 0.060
    lr: float = 1e-6

    @property
    def tokens(self) -> int:
        """Tokens of a step on all ranks; all count."""
        return DATA * self.microbatches * self.sequence

    @property
    def layers_a_rank(self) -> int:
        """Layers of a pipeline rank."""
        return self.layers // self.ranks

    @property
    def compute_seconds(self) -> float:
        """What a rank computes in a step."""
        return 3 * self.seconds * self.microbatches

    @property
    def bytes_a_microbatch(self) -> float:
        """What an island sends across for a microbatch where everything is gathered twice and reduced once."""
        layer = self.width * self.width * FLOAT64
        return 3 * layer * self.layers / DATA

    def rate(self, share: float) -> float:
        """Bits a second at which that takes `share` of the time of a rank's computation."""
        return 8 * self.bytes_a_microbatch / (share * 3 * self.seconds)

    def share(self, step: int, data: int) -> dict[str, Tensor]:
        """A data-parallel rank's samples of a step."""
        whole = self.whole(step)
        return {name: value[data * self.microbatches :][: self.microbatches] for name, value in whole.items()}

    def whole(self, step: int) -> dict[str, Tensor]:
        """All samples of a step, one a microbatch."""
        generator = torch.Generator().manual_seed(step)
        shape = (DATA * self.microbatches, self.sequence)
        return {name: torch.randint(self.vocabulary, shape, generator=generator) for name in ("input_ids", "labels")}

    def gradients_of_one_process(self) -> dict[str, Tensor]:
        """The first step's gradients without pipeline, sharding and sleep."""
        model, batch = self.filled_model(Device(), stages=self.layers), self.whole(0)
        for ids, labels in zip(batch["input_ids"].split(1), batch["labels"].split(1), strict=True):
            (self.loss(Device(), model(ids), labels) / self.tokens).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
