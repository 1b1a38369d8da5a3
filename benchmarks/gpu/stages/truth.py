"""Whether Atoll is right on the device, and how its step compares with plain PyTorch and FSDP2 on model A."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from atoll.testing.parity import Case, History, reference, train_case
from atoll.testing.tiny import TinyConfig
from benchmarks.gpu import jobs
from benchmarks.gpu.compared import compared, on_cpu
from benchmarks.gpu.stage import Run

LAYOUTS = ("NNN", "NNG", "IIG", "GGG")
RECOMPUTE = ("none", "block")


def run(run: Run) -> None:
    """Parity in float64, the device against the CPU in fp32, then model A."""
    rows = []
    for layout in run.choose(LAYOUTS, LAYOUTS[-1:]):
        for recompute in RECOMPUTE:
            case = Case(
                layout, recompute=recompute, microbatches=4, model=TinyConfig.everything(), device=run.device.type
            )
            case = replace(case, residency="action")  # gathered and freed for each use, as on several ranks
            # On the same device, so that dropout draws from the same generator.
            alone = replace(case, layout="NNN", recompute="none")
            found = compared(partial(train_case, case), partial(reference, alone))
            rows.append({"layout": layout, "recompute": recompute, **found})
    run.keep("parity", rows)

    rows = []
    for precision in ("fp64", "fp32"):
        case = Case("IIG", microbatches=4, precision=precision, model=TinyConfig(tied=True, odd=True))
        alone = replace(case, layout="NNN")
        found = compared(partial(_on_device, case, run.device.type), partial(reference, alone))
        rows.append({"precision": precision, **found})
    run.keep("against_cpu", rows)

    job = run.choose(jobs.MODEL_A, jobs.TINY)
    run.keep("job", jobs.sizes(job) | {"parameters": job.parameters, "tokens": job.tokens, "flops": job.flops})
    contenders = (
        ("torch", jobs.plain),
        ("atoll NNG", jobs.atoll_engine("NNG")),
        ("atoll NNN", jobs.atoll_engine("NNN")),
        ("torch FSDP2", jobs.fully_sharded),
        ("torch again", jobs.plain),
    )
    measured = []
    for name, make in contenders:
        measured.append(jobs.measured(run, job, make, steps=run.choose(6, 1), warmup=run.choose(2, 1), name=name))
        run.keep("contenders", measured)


def _on_device(case: Case, device: str) -> History:
    return on_cpu(train_case(replace(case, device=device)))
