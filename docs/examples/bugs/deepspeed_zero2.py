"""DeepSpeed's ZeRO-2 on two ranks, with gradients that are accumulated over four calls (DeepSpeed issue 7718)."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn


def run(rank, file):  # noqa: D103
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    import deepspeed

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    x, target = torch.randn(2, 4, 2, 4), torch.randn(2, 4, 2, 4)  # ranks, calls, samples
    nn.functional.mse_loss(model(x), target).backward()  # one process
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}}
    adam = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    for at in range(4):
        engine.backward(nn.functional.mse_loss(engine(x[rank, at]), target[rank, at]))
        found = [deepspeed.utils.safe_get_full_grad(each) for each in model.parameters()] if at == 3 else []
        engine.step()
    off = max(((own - one).abs().max() / one.abs().max()).item() for own, one in zip(found, expected, strict=True))
    sys.stdout.write(f"deepspeed {deepspeed.__version__}, rank {rank}: gradients off by {off:.0%}\n")
    sys.stdout.flush()
    os._exit(0)  # its threads would not end


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"{folder}/store",), nprocs=2)
