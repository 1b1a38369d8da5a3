"""DeepSpeed's pipeline of two stages with four microbatches, without data parallelism (DeepSpeed issue 8152)."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn


def run(rank, file):  # noqa: D103
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    import deepspeed
    from deepspeed.pipe import PipelineModule

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    nn.functional.mse_loss(layers(x), target).backward()  # one process
    own = layers[2 * rank : 2 * rank + 2]
    expected = [(parameter, parameter.grad.clone(), parameter.detach().clone()) for parameter in own.parameters()]
    layers.zero_grad()
    model = PipelineModule(list(layers), 2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)  # moves each parameter by its gradient
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    engine.train_batch(iter(zip(x.chunk(4), target.chunk(4), strict=True)))
    off = max(((start - now - right).abs().max() / right.abs().max()).item() for now, right, start in expected)
    sys.stdout.write(f"deepspeed {deepspeed.__version__}, stage {rank}: gradients off by {off:.0%}\n")
    sys.stdout.flush()
    os._exit(0)  # its threads would not end


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"{folder}/store",), nprocs=2)
