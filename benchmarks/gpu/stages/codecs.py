"""Kernels of codecs and Muon on the device against plain formulas of the reference, which imports nothing of Atoll."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from atoll.plans.layouts import CODES, Codec
from atoll.runtime.sharding import coding
from atoll.testing.coded import CodecKind, coded
from atoll.testing.parity import Case, reference, train_case
from atoll.testing.tiny import TinyConfig
from benchmarks.gpu.compared import compared
from benchmarks.gpu.stage import Run, attempt

SIZES = (1, 7, 65, 3000)
BLOCK = 8


def run(run: Run) -> None:
    """What arrives is what the formula says; bytes a second of a large message; Muon's parity in float64."""
    rows = []
    for name in CODES:
        failed = {"worst": math.inf, "worst_fp32": math.inf}
        rows.append({"codec": name, **failed, **attempt(partial(_worst, Codec(name, BLOCK), run.device))})
        run.keep("codecs", rows)

    speeds = []
    for name in CODES:
        with run.emptied():
            speeds.append({"codec": name, **attempt(partial(_speed, run, Codec(name)))})
            run.keep("speeds", speeds)

    found = []
    for layout in ("NNN", "GGG"):
        case = Case(layout, microbatches=4, optimizer="Muon", steps=2, model=TinyConfig(), device=run.device.type,
                    options=(("adamw", (("lr", 1e-3),)),))  # fmt: skip
        alone = replace(case, layout="NNN")
        found.append({"layout": layout, **compared(partial(train_case, case), partial(reference, alone))})
        run.keep("muon", found)


def _worst(codec: Codec, device: torch.device) -> dict[str, float]:
    """In float64, and in fp32, for which kernels are compiled."""
    return {
        name: max(_difference(*_both(codec, numel, device, dtype)) for numel in SIZES)
        for name, dtype in (("worst", torch.float64), ("worst_fp32", torch.float32))
    }


def _both(codec: Codec, numel: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random values after encoding and decoding on the device, and after the reference formula."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=dtype)
    values[::5] *= 1e-3
    values[3::11] = 0.0
    sent = torch.zeros(codec.nbytes(numel), dtype=torch.uint8, device=device)
    coding.encode(codec, values.to(device), sent)
    out = torch.full((numel,), torch.nan, dtype=dtype, device=device)
    coding.decode(codec, sent, out)
    return out.cpu(), coded(values, CodecKind(codec.name, codec.block))


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value. NaN is infinitely far."""
    found = float((got - wanted).abs().max() / wanted.abs().max())
    return found if found == found else float("inf")


def _speed(run: Run, codec: Codec) -> dict[str, float]:
    """Bytes of fp32 a second that are encoded, and decoded."""
    numel = run.choose(2**26, 2**12)
    values = torch.randn(numel, device=run.device)
    message = torch.zeros(codec.nbytes(numel), dtype=torch.uint8, device=run.device)
    found = {}
    for what, call in (
        ("encode", lambda: coding.encode(codec, values, message)),
        ("decode", lambda: coding.decode(codec, message, values)),
    ):
        call()
        seconds = []
        for _ in range(run.choose(7, 1)):
            clock = run.clock()
            call()
            seconds.append(clock.stop()[0])
        found[f"{what}_bytes_per_second"] = values.nbytes / median(seconds)
    return found
