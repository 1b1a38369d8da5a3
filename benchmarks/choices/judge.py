"""How good a choice by prediction is among settings that were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from benchmarks.islands.front import OVERRUN

Setting = Mapping[str, Any]
"""`name`, measured and predicted seconds and peaks; see `bench.run`."""

CLOSE = 1.03
"""Two steps whose seconds differ by a smaller factor count as equally fast."""


class Choice(NamedTuple):
    """What is picked and what is best under a memory limit.

    picked: the setting with the fewest predicted seconds whose predicted peak fits; None where none fits.  best: the
    setting with the fewest measured seconds whose measured peak fits."""

    limit: float
    picked: Setting | None
    best: Setting

    @property
    def ratio(self) -> float | None:
        """Measured seconds of the picked setting divided by those of the best; None where nothing was picked."""
        return None if self.picked is None else self.picked["measured_seconds"] / self.best["measured_seconds"]  # type: ignore[no-any-return]

    @property
    def overruns(self) -> bool:
        """Whether the picked setting's measured peak exceeds the limit by more than peaks vary between runs."""
        return self.picked is not None and self.picked["measured_peak"] > OVERRUN * self.limit


def choose(settings: Sequence[Setting], limit: float) -> Choice:
    """Return the choice under a limit in bytes. At least one measured peak must fit it."""
    fitting = [each for each in settings if each["predicted_peak"] <= limit]
    picked = min(fitting, key=lambda each: each["predicted_seconds"], default=None)
    held = [each for each in settings if each["measured_peak"] <= limit]
    return Choice(limit, picked, min(held, key=lambda each: each["measured_seconds"]))


def choices(settings: Sequence[Setting]) -> list[Choice]:
    """Return the choice at each measured peak taken as the limit, smallest limit first."""
    return [choose(settings, limit) for limit in sorted({each["measured_peak"] for each in settings})]


def unlimited(settings: Sequence[Setting]) -> float:
    """Return the measured seconds of the setting predicted fastest, divided by the fewest measured."""
    ratio = choose(settings, float("inf")).ratio
    assert ratio is not None, "everything fits"
    return ratio


def order(settings: Sequence[Setting]) -> float:
    """Return the share of pairs in the predicted order, of those whose measured seconds differ by more than `CLOSE`."""
    pairs = [sorted(pair, key=lambda each: each["measured_seconds"]) for pair in combinations(settings, 2)]
    apart = [(fast, slow) for fast, slow in pairs if slow["measured_seconds"] > CLOSE * fast["measured_seconds"]]
    right = [pair for pair in apart if pair[0]["predicted_seconds"] < pair[1]["predicted_seconds"]]
    return len(right) / len(apart)


def errors(settings: Sequence[Setting], what: str = "seconds") -> list[float]:
    """Return the signed relative errors of predicted seconds or peaks."""
    return [each[f"predicted_{what}"] / each[f"measured_{what}"] - 1.0 for each in settings]


def noise(settings: Sequence[Setting]) -> list[float]:
    """Return by how much a setting's visit differs from its turns, relative to the median difference of all."""
    both = [each for each in settings if each["visit_seconds"]]
    return [abs(each["visit_seconds"] / each["measured_seconds"] - 1.0) for each in both]
