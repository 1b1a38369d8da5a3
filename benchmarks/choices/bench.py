"""The plans that predictions choose, beside what every plan of a measured sweep takes: nothing is run.

A sweep is a race of `benchmarks/islands`. Some of its settings calibrate the device and the links, as
`atoll doctor --calibrate` does; all others are predicted, and the one with the fewest predicted seconds is held
against the one with the fewest measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

from atoll.prediction.cost import Cluster
from atoll.prediction.cost.calibration import LIMITS, Step, calibrate
from benchmarks import provenance
from benchmarks.choices import judge, sweeps
from benchmarks.islands import tables
from benchmarks.islands.cases import Course
from benchmarks.islands.work import Sleeping

SWEEPS = ("two_islands", "two_islands_a100", "two_islands_text", "one_machine", "one_machine_a100", "one_machine_text")

NEAR = 1.05
"""A choice is near the best if its step takes at most this many times as long."""

SHOWN = 8
"""How many settings of each race the page lists."""

Found = dict[str, Any]


def run(arguments: argparse.Namespace) -> Found:
    """Calibrate and predict every race of every sweep."""
    machine = Cluster.of(provenance.load("predictions")["cluster"])
    found: Found = {"sweeps": {}}
    for name in SWEEPS[-1:] if arguments.quick else SWEEPS:
        raw = provenance.load(name)
        races = {course: _race(raw, course, machine) for course in raw["races"]}
        kept = ("commit", "date", "cpu", "cores")
        found["sweeps"][name] = {"environment": {key: raw["environment"][key] for key in kept}, "races": races}
    return found


def _race(raw: Mapping[str, Any], name: str, machine: Cluster) -> Found:
    race, work = raw["races"][name], sweeps.trained(raw["work"])
    course, sleeps = Course(**race["course"]), isinstance(work, Sleeping)
    cluster = sweeps.cluster_of(machine, course, cores=raw["environment"]["cores"], sleeps=sleeps)
    workload = sweeps.workload_of(work, cluster)
    seen = {each.setting.name: each for each in sweeps.measured(race)}
    steps = {
        name: Step(((1.0, sweeps.predicted(each.setting, work, workload, course, cluster)),), each.seconds, name)
        for name, each in seen.items()
    }
    drawn = sweeps.calibrating(steps)
    constants = [key for key in LIMITS if not (sleeps and key == "device.efficiency.attention")]
    fitted = calibrate([step for name, step in steps.items() if name in drawn], constants)
    settings = []
    for name, step in steps.items():
        prediction = step.on(fitted.cluster).played[0][1]
        settings.append(
            {
                "name": name,
                "is_fitted": name in drawn,
                "measured_seconds": seen[name].seconds,
                "visit_seconds": seen[name].again,
                "predicted_seconds": prediction.seconds,
                "measured_peak": seen[name].peak,
                "predicted_peak": prediction.peak(0).allocated,
            }
        )
    return {
        "course": race["course"],
        "settings": settings,
        "constants": [
            {"name": key, "before": fitted.before[key], "after": after} for key, after in fitted.constants.items()
        ],
    }


# ---- the page


class Sweep(NamedTuple):
    """A race: its sweep, its course, and all of its settings."""

    name: str
    course: str
    settings: list[Found]

    @property
    def judged(self) -> list[Found]:
        """The settings that were predicted and not used to calibrate."""
        return [each for each in self.settings if not each["is_fitted"]]


def races(result: Mapping[str, Any]) -> Iterator[Sweep]:
    """Return the races of every sweep."""
    for name, sweep in result["sweeps"].items():
        for course, race in sweep["races"].items():
            yield Sweep(name, course, race["settings"])


def report(result: Mapping[str, Any]) -> str:
    """Write the page."""
    parts = [
        "# Choices",
        "Written by `python benchmarks/run.py choices`. A planner chooses the fastest plan of a sweep in which all "
        "plans were measured. Nothing is run: measured step times and peaks are read from the raw files of the races.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        "\n".join(
            [
                "| sweep | measured | commit | machine |",
                "|---|---|---|---|",
                *(_source(name, sweep["environment"]) for name, sweep in result["sweeps"].items()),
            ]
        ),
        f"A third of Atoll's settings in each race, and at most {sweeps.FEW}, calibrate the constants of the device "
        "and the links, as `atoll doctor --calibrate` does. They are drawn by a hash of their names. "
        "The others are judged. "
        "The constants start from those that [predictions](../predictions/README.md) measured on its machine. "
        "Settings with other transports, which a plan cannot select, are left out. The emulated device sleeps for "
        "its given durations.",
        "Measured step times are those of the turns in the race. For settings without turns it is the time of their "
        "visit, multiplied by the median ratio of turns to visits. *noise*: the remaining difference between a "
        "setting's visit and its turns, median and worst; smaller differences between a choice and the best are not "
        "significant.",
        "## The fastest plan",
        "*over the best*: measured step time of the setting with the fastest prediction, relative to the fastest "
        f"measured one. *pairs*: share of pairs of settings with measured times more than {judge.CLOSE - 1:.0%} apart "
        "in which the faster one is predicted to be faster. *error*: of predicted step times, median and worst. All "
        "are over the judged settings, except *of all*, where settings of the calibration can also be chosen.",
        "\n".join(
            [
                "| race | settings | judged | over the best | of all | pairs | error | noise |",
                "|---|--:|--:|--:|--:|--:|--:|--:|",
                *map(_fastest, races(result)),
            ]
        ),
        "## Within a limit of memory",
        "For each limit equal to the measured peak of a judged setting: the setting with the fastest prediction "
        "whose predicted peak fits, relative to the fastest measured one whose measured peak fits. *within 5 %*: "
        "limits at which it is at most 5 % slower. *too large*: limits that its measured peak exceeds by more than 2 "
        "%. *none*: limits at which no setting is predicted to fit. *peak*: error of predicted peaks, median and "
        "worst.",
        "\n".join(
            [
                "| race | limits | median | worst | within 5 % | too large | none | peak |",
                "|---|--:|--:|--:|--:|--:|--:|--:|",
                *map(_limited, races(result)),
            ]
        ),
        "## The fastest settings of each race",
        *(_settings(each) for each in races(result)),
        "## Constants",
        *(
            f"{name}, {course}: "
            + ", ".join(f"{each['name']} {each['before']:.4g} → {each['after']:.4g}" for each in race["constants"])
            + "."
            for name, sweep in result["sweeps"].items()
            for course, race in sweep["races"].items()
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _source(name: str, measured_in: Mapping[str, Any]) -> str:
    machine = f"{measured_in['cores']} cores of {measured_in['cpu']}"
    return f"| [{name}](../{name}/README.md) | {measured_in['date'][:10]} | `{measured_in['commit'][:8]}` | {machine} |"


def _both(found: list[float]) -> str:
    absolute = [abs(each) for each in found]
    return f"{median(absolute):.1%}, {max(absolute):.1%}"


def _fastest(race: Sweep) -> str:
    judged = race.judged
    cells = [f"{race.name}, {race.course}", str(len(race.settings)), str(len(judged))]
    cells += [f"{judge.unlimited(each):.3f}" for each in (judged, race.settings)]
    cells += [f"{judge.order(judged):.0%}", _both(judge.errors(judged)), _both(judge.noise(race.settings))]
    return f"| {' | '.join(cells)} |"


def _limited(race: Sweep) -> str:
    found = judge.choices(race.judged)
    ratios = [each.ratio for each in found if each.ratio is not None]
    cells = [f"{race.name}, {race.course}", str(len(found)), f"{median(ratios):.3f}", f"{max(ratios):.3f}"]
    cells += [str(sum(each <= NEAR for each in ratios)), str(sum(each.overruns for each in found))]
    cells += [str(len(found) - len(ratios)), _both(judge.errors(race.judged, "peak"))]
    return f"| {' | '.join(cells)} |"


def _settings(race: Sweep) -> str:
    lines = [
        f"{race.name}, {race.course}:",
        "",
        "| setting | | measured s | predicted s | measured MB | predicted MB |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for each in sorted(race.settings, key=lambda each: float(each["measured_seconds"]))[:SHOWN]:
        cells = [each["name"], "fit" if each["is_fitted"] else ""]
        cells += [f"{each[f'{what}_seconds']:.3f}" for what in ("measured", "predicted")]
        cells += [f"{each[f'{what}_peak'] / 1e6:.1f}" for what in ("measured", "predicted")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
