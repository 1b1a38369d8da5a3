"""Train a model of your own: dilated causal convolutions that forecast the next value of a signal.

It shows the adapter that splits a module into blocks for the pipeline, a loss over real-valued labels, and that the
number of ranks does not change the losses: below their first line both commands print the same.

    python examples/own_model.py
    torchrun --nproc-per-node 4 examples/own_model.py

They print

    pipeline stages 2, data-parallel ranks 2
    step   1  loss 2.1006  gradient norm 17.526
    step  10  loss 0.0273  gradient norm 0.390
    ...
    unseen signals: mean squared error 0.0076, of repeating the last value 0.1335
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import atoll
from atoll.runtime.models import Block, reset_module

GLOBAL_BATCH, MICROBATCH = 32, 4


class Layer(nn.Module):
    """A residual convolution that sees the values `dilation` and twice `dilation` before its own."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.mix = nn.Conv1d(width, width, kernel_size=3, dilation=dilation)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, width, T] -> [B, width, T]."""
        return hidden + F.gelu(self.mix(F.pad(hidden, (self.pad, 0))))


class Forecaster(nn.Module):
    """The next value of a signal, at each of its positions."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, width, kernel_size=1)
        self.layers = nn.ModuleList(Layer(width, dilation=2**at) for at in range(layers))
        self.read = nn.Conv1d(width, 1, kernel_size=1)

    def atoll_adapter(self) -> ForecasterAdapter:
        """How Atoll splits it."""
        return ForecasterAdapter(self)


class ForecasterAdapter:
    """Blocks: the lift, the layers, the read-out. A stage of the pipeline is a run of consecutive blocks."""

    def __init__(self, model: Forecaster) -> None:
        layers = [Block(f"layers.{at}", layer) for at, layer in enumerate(model.layers)]
        self._blocks = (Block("lift", model.lift), *layers, Block("read", model.read))

    def blocks(self) -> Sequence[Block]:
        """In the order of execution."""
        return self._blocks

    def forward(self, first: int, last: int, hidden: Tensor | None, batch: Mapping[str, Any]) -> Tensor:
        """Blocks first..last-1; block 0 reads the batch."""
        passed = batch["signal"].unsqueeze(1) if first == 0 else hidden
        for block in self._blocks[first:last]:
            passed = block.module(passed)
        return passed

    def loss(self, outputs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The SUM of the squared errors: the engine divides by the number of labels of the step."""
        return F.mse_loss(outputs.squeeze(1).float(), batch["labels"], reduction="sum")

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        """As torch does, with a seed that depends on the module's name only."""
        reset_module(module, generator)


def join() -> int:
    """Meet the other ranks of torchrun, if it started this process; how many there are."""
    if not dist.is_torchelastic_launched():
        return 1
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_world_size()


def signals(step: int, length: int) -> dict[str, Tensor]:
    """The batch of a step, the same on every rank: sums of two random sines. A label is the next value."""
    generator = torch.Generator().manual_seed(step)
    frequency = 0.1 + 0.5 * torch.rand(GLOBAL_BATCH, 2, 1, generator=generator)
    phase = 6.3 * torch.rand(GLOBAL_BATCH, 2, 1, generator=generator)
    values = torch.sin(frequency * torch.arange(length + 1) + phase).sum(1)
    return {"signal": values[:, :-1], "labels": values[:, 1:]}


def train(engine: atoll.Engine, steps: int, length: int) -> None:
    """Steps, and an evaluation on signals that were not trained on."""
    mesh, rank = engine.plan.mesh, engine.place.rank
    share = GLOBAL_BATCH // mesh.data
    mine = slice(engine.place.data * share, (engine.place.data + 1) * share)
    if rank == 0:
        print(f"pipeline stages {mesh.pipeline}, data-parallel ranks {mesh.data}")

    for step in range(1, steps + 1):
        out = engine.step({name: values[mine] for name, values in signals(step, length).items()})
        if rank == 0 and (step == 1 or step % 10 == 0 or step == steps):
            print(f"step {step:3}  loss {out.loss:.4f}  gradient norm {out.grad_norm:.3f}")

    unseen = signals(0, length)
    found = engine.evaluate({name: values[mine] for name, values in unseen.items()}).loss
    if rank == 0:
        naive = F.mse_loss(unseen["signal"], unseen["labels"])
        print(f"unseen signals: mean squared error {found:.4f}, of repeating the last value {naive:.4f}")


def main() -> None:
    """One rank of the run, or the only one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tiny", action="store_true", help="a model for a test")
    options = parser.parse_args()
    width, layers, length = (8, 4, 32) if options.tiny else (32, 6, 128)

    world = join()
    pipeline = 2 if world % 2 == 0 else 1
    mesh = atoll.MeshShape(pipeline=pipeline, intra=world // pipeline)
    microbatches = GLOBAL_BATCH // mesh.data // MICROBATCH
    schedule = atoll.schedule("1f1b", ranks=pipeline, microbatches=microbatches)
    plan = atoll.Plan(mesh, atoll.Layout("IIG"), schedule, microbatch=MICROBATCH)

    with torch.device("meta"):  # each rank makes the values of its own blocks
        model = Forecaster(width, layers)
    engine = atoll.Engine(model, plan, optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3), clip=1.0)
    train(engine, options.steps, length)
    engine.close()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
