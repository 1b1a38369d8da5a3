"""A weight that a stage uses twice, under a split backward of torch.distributed.pipelining (pytorch issue 180952)."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble


class Twice(nn.Module):  # noqa: D101
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False, dtype=torch.float64)

    def forward(self, x):
        return self.linear(self.linear(x))


def run(rank, file):  # noqa: D103
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(Twice(), Twice())
    x, target = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    nn.functional.mse_loss(model(x), target).backward()  # one process
    expected = model[rank].linear.weight.grad.clone()
    model.zero_grad()
    stage = PipelineStage(model[rank], rank, 2, torch.device("cpu"))
    schedule = ScheduleInterleavedZeroBubble([stage], n_microbatches=2, loss_fn=nn.functional.mse_loss)
    schedule.step(x) if rank == 0 else schedule.step(target=target)
    off = (model[rank].linear.weight.grad - expected).abs().max() / expected.abs().max()
    sys.stdout.write(f"torch {torch.__version__}, stage {rank}: gradient off by {off:.0%}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"{folder}/store",), nprocs=2)
