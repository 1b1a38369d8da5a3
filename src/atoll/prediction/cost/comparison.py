"""Comparison of a measured step with its prediction, instruction by instruction.

A rank executes its instructions one after the other, so their times add up to its step, both measured and predicted.
The difference of two steps is therefore the sum of the differences of their instructions, and of the time between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atoll.base.errors import ConfigError
from atoll.prediction.cost.breakdown import Breakdown
from atoll.prediction.cost.prediction import Prediction
from atoll.program import Operation

LATE = 0.5
"""The link, not the sender, is the likely cause if the shortest wait explains more than this share of the extra time of
all waits."""

_PARTS = Breakdown._fields


class Taken(NamedTuple):
    """Duration of an instruction in a step of one rank.

    times: number of executions.  seconds: total time.  shortest: time of the shortest one.
    """

    times: int
    seconds: float
    shortest: float

    @staticmethod
    def of(each: Sequence[float]) -> Taken:
        """Return the count, total and minimum of durations."""
        return Taken(len(each), sum(each), min(each))


Timed = Mapping[tuple[Operation, int], Taken]
"""Durations by operation, and block or unit (-1: neither)."""

_NONE = Taken(0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Difference:
    """An instruction of a pipeline rank, as predicted and as measured. of: a block or a unit; -1 for neither."""

    rank: int
    do: Operation
    of: int
    predicted: Taken
    measured: Taken

    @property
    def seconds(self) -> float:
        """Seconds per step by which it took longer than predicted."""
        return self.measured.seconds - self.predicted.seconds

    @property
    def part(self) -> str:
        """Its field of `Breakdown`."""
        return self.do.cause

    @property
    def cause(self) -> str:
        """The likely cause of the difference."""
        predicted, measured = self.predicted, self.measured
        match self.part:
            case "forward" | "backward" | "weights" if predicted.seconds:
                times = measured.seconds / predicted.seconds
                return f"kernels take {times:.2f} times as long as the device's constants predict"
            case "optimizer" if predicted.seconds:
                times = measured.seconds / predicted.seconds
                return f"the optimizer takes {times:.2f} times as long as device.efficiency.update predicts"
            case "messages" | "sums" if self.seconds < 0:
                return "waits less for other pipeline ranks"
            case "messages" | "sums":
                always = measured.shortest * measured.times - predicted.shortest * predicted.times
                return (
                    "every message is late: the link between stages is slower"
                    if measured.times > 1 and always > LATE * self.seconds
                    else "waits longer for other pipeline ranks, which send later"
                )
            case "gathers" | "reductions":
                if self.seconds < 0:
                    return "data-parallel links are faster, or computation hides more"
                return "data-parallel links are slower, their other ranks later, or computation hides less"
        return "the host, or kernels that have no predicted seconds"


def taken(prediction: Prediction, rank: int) -> dict[tuple[Operation, int], Taken]:
    """Return the durations of a pipeline rank's instructions in the predicted step."""
    timing, program = prediction.played.timings[rank], prediction.played.programs.ranks[rank]
    found: dict[tuple[Operation, int], list[float]] = {}
    before = timing.begin
    for instruction, end in zip(program.instructions, timing.ends, strict=True):
        found.setdefault((instruction.do, instruction.of), []).append(end - before)
        before = end
    return {key: Taken.of(each) for key, each in found.items()}


def compare(prediction: Prediction, measured: Sequence[Timed]) -> tuple[Difference, ...]:
    """Return the instructions of all pipeline ranks, the largest differences first.

    measured: one per pipeline rank. Instructions without time in both are left out.

    Raises ConfigError if their number differs from the prediction's pipeline ranks.
    """
    ranks = prediction.plan.mesh.pipeline
    if len(measured) != ranks:
        raise ConfigError(f"{len(measured)} ranks have been timed and the plan has {ranks} pipeline ranks: time each")
    found = []
    for rank, own in enumerate(measured):
        wanted = taken(prediction, rank)
        for key in {**wanted, **own}:
            each = Difference(rank, *key, wanted.get(key, _NONE), own.get(key, _NONE))
            if each.predicted.seconds or each.measured.seconds:
                found.append(each)
    return tuple(sorted(found, key=lambda each: -abs(each.seconds)))


def by_part(differences: Sequence[Difference], rank: int) -> dict[str, tuple[float, float]]:
    """Return predicted and measured seconds of a pipeline rank, by the fields of `Breakdown`.

    Tensor-parallel collectives count in the part that contains them, and waits for a late sender count as messages.
    """
    found = dict.fromkeys(_PARTS, (0.0, 0.0))
    for each in differences:
        if each.rank == rank:
            predicted, measured = found[each.part]
            found[each.part] = predicted + each.predicted.seconds, measured + each.measured.seconds
    return {part: pair for part, pair in found.items() if any(pair)}
