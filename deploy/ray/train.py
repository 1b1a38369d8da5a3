"""Train under Ray Train: Ray starts the ranks and joins them, and Atoll's engine trains.

    python deploy/ray/train.py --workers 16 --gpu --storage /shared/runs
    python deploy/ray/train.py --workers 2 --steps 20

It needs `pip install "ray[train]"`. A group of ranks is what Ray packs on a node. Where a worker is lost, Ray starts
all of them again, and they go on from the newest checkpoint in the storage, which every node must see.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

GLOBAL_BATCH, SEQUENCE = 32, 32


def train_rank(options: dict[str, Any]) -> dict[str, float | None]:
    """One rank. Ray has initialised torch.distributed, and given it a GPU of its own if it was asked to.

    Gives the last step and its loss, None where the run was complete before.
    """
    import ray.train
    import torch

    import atoll
    from atoll.runtime.models import Decoder, DecoderConfig

    context = ray.train.get_context()
    world, local = context.get_world_size(), context.get_local_world_size()
    mesh = atoll.MeshShape(inter=world // local, intra=local)
    share = GLOBAL_BATCH // world
    schedule = atoll.schedule("1f1b", ranks=1, microbatches=1)
    plan = atoll.Plan(mesh, atoll.Layout("IIG"), schedule, microbatch=share)
    sizes = DecoderConfig(vocabulary=256, layers=2, hidden=64, heads=4, kv_heads=4, ffn=176)
    with torch.device("meta"):
        model = Decoder(sizes)
    engine = atoll.Engine(model, plan, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3), clip=1.0)

    folder = Path(options["storage"]) / "checkpoints"
    saved = sorted(folder.glob("step-*"))  # a checkpoint has its name once it is whole
    if saved:
        engine.load(saved[-1])

    samples = torch.tensor(list(b"Any layout under any schedule. " * 100)).unfold(0, SEQUENCE + 1, 16)
    loss = None
    while engine.step_number < options["steps"]:
        first = engine.step_number * GLOBAL_BATCH + engine.place.data * share
        mine = samples[torch.arange(first, first + share) % len(samples)]
        out = engine.step({"input_ids": mine[:, :-1], "labels": mine[:, 1:]})
        loss = out.loss
        if out.step % options["every"] == 0 or out.step == options["steps"]:
            engine.save(folder / f"step-{out.step:06}")
            ray.train.report({"step": out.step, "loss": loss})
    engine.close()
    return {"step": engine.step_number, "loss": loss}


def main() -> None:
    """Start the ranks, and say how they ended."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="ranks")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each rank")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--storage", type=Path, default=Path("runs/ray"), help="a folder that every node sees")
    given = parser.parse_args()

    storage = given.storage.absolute()
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={"steps": given.steps, "every": given.every, "storage": str(storage)},
        torch_config=TorchConfig(backend="nccl" if given.gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpu, placement_strategy="PACK"),
        run_config=RunConfig(name="atoll", storage_path=str(storage), failure_config=FailureConfig(max_failures=3)),
    )
    last = trainer.fit().return_value  # of rank 0
    print(f"step {last['step']}  " + ("complete before" if last["loss"] is None else f"loss {last['loss']:.4f}"))


if __name__ == "__main__":
    main()
