"""Which results to measure again first, and how: `python benchmarks/run.py --due MINUTES`.

Results that are older than their code are measured worst first, as long as the next one fits into what is left:

    urgency = days since it was measured × weight on the README ÷ minutes that it takes

A result that a short measurement can confirm (`benchmarks/confirmations.py`) is confirmed where the full one does not
fit or takes much longer, unless the same code has already failed to repeat it. Raw files say how long their runs took;
`MINUTES` and `CONFIRMATIONS` are for those that do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

MINUTES: Mapping[str, float] = {
    "chaos": 60.0,
    "codecs": 15.0,
    "emulated": 11.0,
    "fuzz": 90.0,
    "hangs": 20.0,
    "matrix": 96.0,
    "mutants": 120.0,
    "one_machine": 57.0,
    "one_machine_a100": 25.0,
    "one_machine_text": 27.0,
    "outer": 11.0,
    "paired": 28.0,
    "precision": 30.0,
    "predictions": 75.0,
    "quality": 120.0,
    "sharded_pipeline": 24.0,
    "two_islands": 43.0,
    "two_islands_a100": 129.0,
    "two_islands_text": 91.0,
    "who_gets_it_right": 12.0,
}
"""Of a full measurement: estimates from the logs of earlier sessions, and from when raw files were committed."""

OTHER_MINUTES = 10.0
"""Estimate for every other result."""

CONFIRMATIONS: Mapping[str, float] = {
    "matrix": 6.0,
    "experts": 10.0,
    "mixtures": 5.0,
    "one_machine": 11.0,
    "one_machine_a100": 8.0,
    "one_machine_text": 7.0,
    "sharded_pipeline": 10.0,
    "two_islands": 9.0,
    "two_islands_a100": 27.0,
    "two_islands_text": 36.0,
}
"""Of a confirmation, computed from the published seconds of what it measures; the results that have one."""

MUCH_LONGER = 2.0
"""A full measurement that takes more than so many times as long as a confirmation is left for another day."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A result that is older than its code, and a way to measure it again.

    links: how often the README links to it.  confirms: whether only what decides its figures is measured.
    """

    name: str
    days: float
    links: int
    minutes: float
    confirms: bool = False

    @property
    def urgency(self) -> float:
        """Age, weighted by links on the README, for each minute that it takes."""
        return max(self.days, 0.1) * (1 + self.links) / self.minutes


@dataclass(frozen=True, slots=True)
class Result:
    """A result that is older than its code. full, short: how it can be measured again, short None if not so."""

    full: Measurement
    short: Measurement | None = None

    def within(self, minutes: float) -> Measurement | None:
        """Return the full measurement if it fits and is not much longer than the short one; else the short, or None."""
        ways = [self.full] if self.short is None else [self.full, self.short]
        if self.short is not None and self.full.minutes > MUCH_LONGER * self.short.minutes:
            ways = [self.short]
        return next((way for way in ways if way.minutes <= minutes), None)


def minutes_of(name: str, measured_in: Mapping[str, object]) -> float:
    """Return the minutes of a full measurement, given the raw file's environment."""
    return _minutes(measured_in) or MINUTES.get(name, OTHER_MINUTES)


def short_minutes_of(name: str, confirmed_in: Mapping[str, object]) -> float:
    """Return the minutes of a confirmation, given the environment of the last one; it may be empty."""
    return _minutes(confirmed_in) or CONFIRMATIONS.get(name, OTHER_MINUTES)


def _minutes(measured_in: Mapping[str, object]) -> float | None:
    seconds = measured_in.get("seconds")
    return max(float(seconds) / 60.0, 0.1) if isinstance(seconds, int | float) else None


def result(
    name: str,
    measured_in: Mapping[str, object],
    readme: str,
    now: datetime,
    *,
    confirmed_in: Mapping[str, object] | None = None,
) -> Result:
    """Return a result, given its raw file's environment and the README.

    confirmed_in: the environment of its last confirmation, or nothing if there was none; None where it has no short
    way, or where the short way was refuted.
    """
    measured = datetime.fromisoformat(str(measured_in["date"])).astimezone(UTC)
    days = (now - measured).total_seconds() / 86_400.0
    links = readme.count(f"evidence.md#{name})") + readme.count(f"benchmarks/{name}/")
    full = Measurement(name, days, links, minutes_of(name, measured_in))
    if confirmed_in is None:
        return Result(full)
    return Result(full, Measurement(name, days, links, short_minutes_of(name, confirmed_in), confirms=True))


def order(results: Iterable[Result], minutes: float) -> list[Measurement]:
    """Return what fits, the most urgent first; by name where they are equal."""
    fitting = [way for each in results if (way := each.within(minutes)) is not None]
    return sorted(fitting, key=lambda way: (-way.urgency, way.name))


def following(results: Iterable[Result], minutes: float) -> Measurement | None:
    """Return the most urgent measurement that fits into what is left, or None."""
    return next(iter(order(results, minutes)), None)
