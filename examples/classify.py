"""Train a classifier: an `nn.Sequential` on generated points, of which some have no label.

It shows an `nn.Sequential`, `Engine(loss=...)`, labels of shape [B] instead of one for each token, and predictions
by `Engine.logits`. A point lies on one of three arms of a spiral, and the label says on which.

    python examples/classify.py
    torchrun --nproc-per-node 2 examples/classify.py

They print

    step   1  loss 1.1081  accuracy on unseen points 44.5%
    step  20  loss 0.6815  accuracy on unseen points 58.6%
    ...
    step 100  loss 0.0956  accuracy on unseen points 96.9%
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import atoll

ARMS, BATCH = 3, 256
UNLABELLED = -100  # a label that does not count


def cross_entropy(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """The SUM over the points with a label: the engine divides by the number of labels that count, on all ranks."""
    return F.cross_entropy(logits.float(), batch["labels"], ignore_index=UNLABELLED, reduction="sum")


def classifier(width: int) -> nn.Sequential:
    """Point [B, 2] -> logits [B, ARMS]. Each module of it is a block, which the engine shards as one unit."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(2, width), nn.GELU()),
        nn.Sequential(nn.Linear(width, width), nn.GELU()),
        nn.Linear(width, ARMS),
    )


def points(seed: int, count: int = BATCH) -> dict[str, Tensor]:
    """Points on the arms, with some noise. `inputs` goes into the first module."""
    generator = torch.Generator().manual_seed(seed)
    arms = torch.randint(ARMS, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 4 * radius + arms * 2 * math.pi / ARMS + 0.1 * torch.randn(count, generator=generator)
    inputs = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return {"inputs": inputs, "labels": arms}


def labelled_in_part(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same points; every fourth has no label."""
    labels = batch["labels"].clone()
    labels[::4] = UNLABELLED
    return {**batch, "labels": labels}


def build(world: int, width: int) -> atoll.Engine:
    """The engine of this rank: no pipeline, parameters, gradients and optimizer state sharded over all ranks."""
    mesh = atoll.MeshShape(intra=world)
    schedule = atoll.schedule("1f1b", ranks=1, microbatches=1)
    plan = atoll.Plan(mesh, atoll.Layout("GGG"), schedule, microbatch=BATCH // world)
    with torch.device("meta"):
        model = classifier(width)
    return atoll.Engine(model, plan, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2), loss=cross_entropy)


def accuracy(engine: atoll.Engine) -> float:
    """The share of unseen points whose arm is found. Every rank calls it, and gets the same."""
    unseen = points(seed=0)
    logits = engine.logits(unseen)
    assert logits is not None, "without a pipeline every rank has the last stage"
    return float((logits.argmax(1).cpu() == unseen["labels"]).float().mean())


def join() -> int:
    """Meet the other ranks of torchrun, if it started this process; how many there are."""
    if not dist.is_torchelastic_launched():
        return 1
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_world_size()


def main() -> None:
    """One rank of the run, or the only one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    world = join()
    engine = build(world, width=64)
    mine = slice(engine.place.data * BATCH // world, (engine.place.data + 1) * BATCH // world)
    for step in range(1, options.steps + 1):
        batch = labelled_in_part(points(seed=step))
        out = engine.step({name: values[mine] for name, values in batch.items()})
        if step == 1 or step % 20 == 0 or step == options.steps:
            found = accuracy(engine)
            if engine.place.rank == 0:
                print(f"step {step:3}  loss {out.loss:.4f}  accuracy on unseen points {found:.1%}")
    engine.close()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
