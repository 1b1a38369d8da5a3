"""The code that each rank runs: one schedule with several splits of the layers, in turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from atoll.plans import schedules
from atoll.program.trace import Span
from atoll.testing.parity import difference
from benchmarks.emulated.contenders import Contender, atoll_contender
from benchmarks.emulated.race import go_first, hop_seconds, together
from benchmarks.emulated.work import Device, Work, gradients_of_one_process, pausing_weights
from benchmarks.islands.ranks import Rank


@dataclass(slots=True)
class Record:
    """One rank's measurements of a split: start and end of each step, and the seconds of its actions by op and step."""

    layers: list[int]
    gradient_difference: float = 0.0
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def note(self, spans: Sequence[Span]) -> None:
        """Add the median seconds of a step's actions."""
        took: dict[str, list[float]] = {}
        for span in spans:
            if span.action.op.is_compute:
                took.setdefault(span.action.op.value, []).append(span.end - span.start)
        for op, each in took.items():
            self.seconds.setdefault(op, []).append(median(each))

    def took(self) -> dict[str, float]:
        """Return the seconds of F, I and W. Of a full backward I and W are half each."""
        half = median(self.seconds["B"]) / 2 if "B" in self.seconds else 0.0
        return {op: median(self.seconds[op]) if op in self.seconds else half for op in ("F", "I", "W")}


def hop(rank: Rank) -> float:
    """Return the seconds of a message between two neighbouring ranks."""
    return hop_seconds(rank.work)


def race(rank: Rank, cases: Sequence[tuple[str, list[int]]], seconds: Sequence[float], rounds: int) -> list[Record]:
    """Run one step of every schedule and split per round. The first step does not sleep and is compared with one
    process. seconds: of an operation of a layer, by rank."""
    work: Work = rank.work
    device, records = Device(), [Record(layers) for _, layers in cases]
    with pausing_weights(work, device):
        contenders = [
            atoll_contender(
                work, device, schedules.build(name, ranks=work.ranks, microbatches=work.microbatches), layers=layers
            )
            for name, layers in cases
        ]
        for record, contender in zip(records, contenders, strict=True):
            contender.step(work.batch(0))
            wanted = gradients_of_one_process(work, stages=sum(record.layers))
            record.gradient_difference = max(
                difference(value, wanted[key]) for key, value in contender.gradients().items()
            )
        go_first()
        for at in range(1, rounds + 1):
            for record, contender in zip(records, contenders, strict=True):
                device.share, device.operations = seconds[rank.number], []
                _step(work, contender, record, at)
                device.share = 0.0
        for contender in contenders:
            contender.close()
    return records


def _step(work: Work, contender: Contender, record: Record, at: int) -> None:
    batch = work.batch(at)
    together()
    record.starts.append(time.monotonic())
    contender.step(batch)
    record.ends.append(time.monotonic())
    record.note(contender.spans())
