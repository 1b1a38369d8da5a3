"""Which results to measure again first: `python benchmarks/run.py --due MINUTES`.

Results that are older than their code are measured worst first, as long as the next one fits into what is left:

    urgency = days since it was measured × weight on the README ÷ minutes that it takes

A raw file says how long its run took; `MINUTES` is for those that were measured before they did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

RACE = 57.0
MINUTES: Mapping[str, float] = {
    "chaos": 60.0,
    "fuzz": 90.0,
    "hangs": 20.0,
    "matrix": 86.0,
    "mutants": 120.0,
    "one_machine": RACE,
    "one_machine_a100": RACE,
    "one_machine_text": RACE,
    "quality": 120.0,
    "two_islands": RACE,
    "two_islands_a100": RACE,
    "two_islands_text": RACE,
}
"""Estimates from the logs of earlier sessions."""

OTHER_MINUTES = 10.0
"""Estimate for every other result."""


@dataclass(frozen=True, slots=True)
class Result:
    """A result that is older than its code. links: how often the README links to it.  minutes: of its run."""

    name: str
    days: float
    links: int
    minutes: float

    @property
    def urgency(self) -> float:
        """Age, weighted by links on the README, for each minute that the run takes."""
        return max(self.days, 0.1) * (1 + self.links) / self.minutes


def result(name: str, measured_in: Mapping[str, object], readme: str, now: datetime) -> Result:
    """Return a result, given its raw file's environment and the README."""
    seconds = measured_in.get("seconds")
    minutes = float(seconds) / 60.0 if isinstance(seconds, int | float) else MINUTES.get(name, OTHER_MINUTES)
    measured = datetime.fromisoformat(str(measured_in["date"])).astimezone(UTC)
    links = readme.count(f"evidence.md#{name})") + readme.count(f"benchmarks/{name}/")
    return Result(name, (now - measured).total_seconds() / 86_400.0, links, max(minutes, 0.1))


def order(results: Iterable[Result]) -> list[Result]:
    """Return the most urgent first; by name where they are equal."""
    return sorted(results, key=lambda each: (-each.urgency, each.name))


def following(results: Iterable[Result], minutes: float) -> Result | None:
    """Return the most urgent result that fits into what is left, or None."""
    return next((each for each in order(results) if each.minutes <= minutes), None)
