"""DDP and FSDP2 under a split backward of torch.distributed.pipelining: two stages, two data-parallel ranks."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble


def run(rank, file, how):  # noqa: D103
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=4)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    at, part = mesh.get_coordinate()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))) for _ in range(2)))
    x, target = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    nn.functional.mse_loss(model(x), target).backward()  # one process
    expected = [parameter.grad.clone() for parameter in model[at].parameters()]
    model.zero_grad()
    if how == "ddp":
        own = nn.parallel.DistributedDataParallel(model[at], process_group=mesh["dp"].get_group())
    else:
        for own in (*model[at], model[at]):
            fully_shard(own, mesh=mesh["dp"], reshard_after_forward=how == "resharded")
    stage = PipelineStage(own, at, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleInterleavedZeroBubble([stage], n_microbatches=2, loss_fn=nn.functional.mse_loss)
    schedule.step(x.chunk(2)[part]) if at == 0 else schedule.step(target=target.chunk(2)[part])
    whole = [each.grad.full_tensor() if hasattr(each.grad, "full_tensor") else each.grad for each in own.parameters()]
    there = [(grad, right) for grad, right in zip(whole, expected, strict=True) if grad is not None and grad.any()]
    wrong = sum(not torch.allclose(grad, right) for grad, right in there)
    missing = f"{len(whole) - len(there)} missing, {wrong} wrong"
    sys.stdout.write(f"torch {torch.__version__}, {how}, stage {at}, rank {part}: of 6 gradients {missing}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"{folder}/store", sys.argv[1]), nprocs=4)
