"""How good a choice by prediction is among settings that were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from benchmarks.islands.front import OVERRUN

Setting = Mapping[str, Any]
"""`name`, measured and predicted seconds and peaks; see `bench.run`."""

CLOSE = 1.03
"""Two steps that differ by less are as fast as each other."""


class Choice(NamedTuple):
    """Of the settings within a limit of bytes. picked: the fastest by prediction whose predicted peak fits; None where
    none fits.  best: the fastest that was measured whose measured peak fits."""

    limit: float
    picked: Setting | None
    best: Setting

    @property
    def ratio(self) -> float | None:
        """Measured seconds of what was picked over those of the best; None where nothing was."""
        return None if self.picked is None else self.picked["measured_seconds"] / self.best["measured_seconds"]  # type: ignore[no-any-return]

    @property
    def overruns(self) -> bool:
        """Whether what was picked holds more than the limit, by more than peaks differ from run to run."""
        return self.picked is not None and self.picked["measured_peak"] > OVERRUN * self.limit


def choose(settings: Sequence[Setting], limit: float) -> Choice:
    """The choice within a limit, which at least one measured peak fits."""
    fitting = [each for each in settings if each["predicted_peak"] <= limit]
    picked = min(fitting, key=lambda each: each["predicted_seconds"], default=None)
    held = [each for each in settings if each["measured_peak"] <= limit]
    return Choice(limit, picked, min(held, key=lambda each: each["measured_seconds"]))


def choices(settings: Sequence[Setting]) -> list[Choice]:
    """At every limit that is a measured peak, the smallest first."""
    return [choose(settings, limit) for limit in sorted({each["measured_peak"] for each in settings})]


def unlimited(settings: Sequence[Setting]) -> float:
    """Measured seconds of the fastest by prediction over the fewest measured."""
    ratio = choose(settings, float("inf")).ratio
    assert ratio is not None, "everything fits"
    return ratio


def order(settings: Sequence[Setting]) -> float:
    """Share of the pairs whose measured seconds differ by more than `CLOSE` that predictions put in the right order."""
    pairs = [sorted(pair, key=lambda each: each["measured_seconds"]) for pair in combinations(settings, 2)]
    apart = [(fast, slow) for fast, slow in pairs if slow["measured_seconds"] > CLOSE * fast["measured_seconds"]]
    right = [pair for pair in apart if pair[0]["predicted_seconds"] < pair[1]["predicted_seconds"]]
    return len(right) / len(apart)


def errors(settings: Sequence[Setting], what: str = "seconds") -> list[float]:
    """Relative errors of predicted seconds or peaks, with their signs."""
    return [each[f"predicted_{what}"] / each[f"measured_{what}"] - 1.0 for each in settings]


def noise(settings: Sequence[Setting]) -> list[float]:
    """By how much a setting's visit differs from its turns, once the median by which all do is taken off."""
    both = [each for each in settings if each["visit_seconds"]]
    return [abs(each["visit_seconds"] / each["measured_seconds"] - 1.0) for each in both]
