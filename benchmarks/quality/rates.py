"""Learning rates of all steps for a run that ends before the last one."""

import math

from benchmarks.quality.bench import JOB, STEPS

LEAST = 0.1
"""Factor of the last step: that of `train.min_lr_ratio` where none is given."""


def cosine(done: int, steps: int) -> float:
    """The factor of `lr_schedule = "cosine"` of `STEPS` steps, however many the run has."""
    del steps
    warmup = JOB["train"]["warmup"]
    if done < warmup:
        return float((done + 1) / warmup)
    progress = min(1.0, (done - warmup) / (STEPS - 1 - warmup))
    return LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * progress))
