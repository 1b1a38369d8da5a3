"""The ceilings of the card: a copy inside its memory, and a bf16 product of random matrices."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from benchmarks.gpu.stage import Run

ROUNDS = 5


def run(run: Run) -> None:
    """Bytes a second, read and written, and operations a second: medians of rounds of several calls."""
    device = run.device
    if not run.rehearse:
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        run.keep("memory_bytes", total)
        run.keep("context_bytes", total - free)
        run.keep("multiprocessors", properties.multi_processor_count)
        run.keep("capability", f"{properties.major}.{properties.minor}")

    with run.emptied():
        _copy(run, run.choose(10**9, 10**5))  # 4 GB of fp32
    with run.emptied():
        _product(run, run.choose(8192, 64))


def _copy(run: Run, numel: int) -> None:
    source = torch.randn(numel, device=run.device)
    target = torch.empty_like(source)
    seconds = _seconds(run, lambda: target.copy_(source), calls=run.choose(5, 1))
    run.keep("copy_bytes", source.nbytes)
    run.keep("copy_bytes_per_second", 2 * source.nbytes / seconds)


def _product(run: Run, size: int) -> None:
    # Random values: with zeros a card draws less power and runs faster than in training.
    left, right = (torch.randn(size, size, device=run.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    seconds = _seconds(run, lambda: torch.mm(left, right, out=out), calls=run.choose(20, 1))
    run.keep("product_size", size)
    run.keep("product_flops_per_second", 2 * size**3 / seconds)


def _seconds(run: Run, call: Callable[[], object], *, calls: int) -> float:
    for _ in range(3):
        call()
    found = []
    for _ in range(ROUNDS):
        run.synchronize()
        clock = run.clock()
        for _ in range(calls):
            call()
        found.append(clock.stop()[0] / calls)
    return median(found)
