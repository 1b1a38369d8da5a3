"""The models of the other scripts under a split backward of Atoll, two stages by two data-parallel ranks."""

import sys
import tempfile

import torch
import torch.distributed as dist
from shared_weight import Twice
from torch import nn

import atoll


def loss(outputs, batch):  # noqa: D103
    return (outputs - batch["labels"]).square().sum()


def run(rank, file, layout):  # noqa: D103
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=4)
    for name in ("linears", "twice"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Twice() if name == "twice" else nn.Linear(4, 4) for _ in range(6))).double()
        x, target = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
        nn.functional.mse_loss(model(x), target).backward()  # one process
        expected = {key: value.grad.clone() for key, value in model.named_parameters()}
        model.zero_grad()
        mesh, schedule = atoll.MeshShape(2, 1, 2), atoll.schedule("zb-h1", ranks=2, microbatches=2)
        plan = atoll.Plan(mesh, atoll.Layout(layout), schedule, microbatch=2, precision=atoll.Precision.preset("fp64"))
        engine = atoll.Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0), loss=loss)
        part, seen = engine.place.data, {}
        share = {"inputs": x.chunk(2)[part], "labels": target.chunk(2)[part]}
        engine.step(share, before_update=lambda e=engine, s=seen: s.update(e.full_gradients("*")))
        wrong = sum(not torch.allclose(value, expected[key]) for key, value in seen.items())
        sys.stdout.write(f"{name}, {layout}, rank {rank}: {wrong} of {len(seen)} gradients wrong\n")
        engine.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"{folder}/store", sys.argv[1]), nprocs=4)
