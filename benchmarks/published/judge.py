"""What predictions of published steps are worth: errors, the plan that is picked, the order of plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean, median
from typing import NamedTuple

from benchmarks.published.record import Published

CLOSE = 1.03
"""Two steps that differ by less are as fast as each other."""


class Step(NamedTuple):
    """A row with its measured and its predicted seconds."""

    row: Published
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        return self.predicted / self.measured - 1.0


class Errors(NamedTuple):
    """Relative errors without their signs, and how far they lie to one side."""

    rows: int
    mean: float
    median: float
    worst: float
    bias: float


def errors_of(errors: Iterable[float]) -> Errors:
    """Of relative errors with their signs."""
    errors = list(errors)
    sizes = [abs(each) for each in errors]
    return Errors(len(errors), fmean(sizes), median(sizes), max(sizes), fmean(errors))


def job_of(row: Published) -> Hashable:
    """What plans are compared on: the same model, samples and sequence on as many devices."""
    return row.source, row.model, row.use.sequence, row.samples, row.mesh.world


def by_job(steps: Iterable[Step]) -> Mapping[Hashable, Sequence[Step]]:
    """Steps of jobs that two or more plans were measured for."""
    found: defaultdict[Hashable, list[Step]] = defaultdict(list)
    for step in steps:
        found[job_of(step.row)].append(step)
    return {job: own for job, own in found.items() if len(own) > 1}


def regrets(steps: Iterable[Step]) -> list[float]:
    """By job, the measured time of the plan that is predicted fastest over that of the fastest, less one."""
    found = []
    for own in by_job(steps).values():
        picked = min(own, key=lambda step: step.predicted)
        found.append(picked.measured / min(step.measured for step in own) - 1.0)
    return found


def ordered(steps: Iterable[Step]) -> tuple[int, int]:
    """Pairs of plans of a job that are not close, and how many of them are predicted in the order that was measured."""
    pairs = right = 0
    for own in by_job(steps).values():
        for one, other in combinations(own, 2):
            if max(one.measured, other.measured) < CLOSE * min(one.measured, other.measured):
                continue
            pairs += 1
            right += (one.measured < other.measured) == (one.predicted < other.predicted)
    return pairs, right


def by_first(steps: Sequence[Step]) -> list[Step]:
    """All but the first, with predictions multiplied by what is measured over what is predicted of it."""
    first, *others = steps
    factor = first.measured / first.predicted
    return [step._replace(predicted=step.predicted * factor) for step in others]


def scaled(steps: Sequence[Step]) -> list[Step]:
    """With predictions multiplied by one factor, which takes their median error away: for steps measured under settings
    of the machine that nobody has printed."""
    factor = median(step.measured / step.predicted for step in steps)
    return [step._replace(predicted=step.predicted * factor) for step in steps]
