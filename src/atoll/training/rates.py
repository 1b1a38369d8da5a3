"""Learning rates of a run. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable

from atoll.base.errors import ConfigError
from atoll.training.config import Train
from atoll.training.named import load_named

_Rates = Callable[[int], float]
"""Number of finished steps -> factor of train.lr for the next step."""


def learning_rates(train: Train) -> _Rates:
    """Return a linear warm-up followed by `train.lr_schedule`, or the whole schedule from the function that it names.

    After the warm-up "constant" stays at 1, "cosine" and "linear" fall to min_lr_ratio at the last step, and "wsd" does
    so in the last `train.decays` steps.

    Raises ConfigError for a function that cannot be imported, or whose factor for the first or the last step is not a
    non-negative number.
    """
    if ":" in train.lr_schedule:
        return _given(train)
    low, last = train.min_lr_ratio, train.steps - 1
    stable = max(train.warmup, train.steps - train.decays) if train.lr_schedule == "wsd" else train.warmup
    # "wsd" leaves the full rate with its first falling step, the others with the one after.
    begin = stable - 1 if train.lr_schedule == "wsd" else stable
    falling = max(1, last - begin)

    def factor(done: int) -> float:
        if done < train.warmup:
            return (done + 1) / train.warmup
        if train.lr_schedule == "constant" or done < stable:
            return 1.0
        progress = min(1.0, (done - begin) / falling)
        left = 0.5 * (1.0 + math.cos(math.pi * progress)) if train.lr_schedule == "cosine" else 1.0 - progress
        return low + (1.0 - low) * left

    return factor


def _given(train: Train) -> _Rates:
    """Return the factors of a function of a module."""
    name = f"train.lr_schedule = {train.lr_schedule!r}"
    given = load_named("train.lr_schedule", train.lr_schedule)

    def factor(done: int) -> float:
        try:
            value = float(given(done, train.steps))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{name}: it is called with (steps done, {train.steps} steps) and returns a factor of train.lr; that "
                f"raised {type(error).__name__}: {error}"
            ) from error
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name}: the factor after {done} steps is {value}; it must be a number from 0")
        return value

    for done in (0, train.steps - 1):
        factor(done)
    return factor
