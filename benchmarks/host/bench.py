"""Host memory on an emulated device: step time beside the simulation, and beside a step without it.

Compute sleeps, so that neither of a machine's few processors computes while another one copies. F, I and W of a block
take equally long; on one rank, where I computes the gradients of weights too, it takes the time of both. The first
block has no I, as its input needs no gradient. The copies are real, of real masters, states and activations; each takes
at least the time that a link of the case's speed would, one at a time in each direction, and a step on the host at
least that of its memory. Loss, norm, gradients and updates are real too.

    without      the same plan with all state on the device
    simulated    atoll.program.sim, with the seconds of each instruction as timed in other steps of the same engine, and
                 the link's speed: no fitted constant
    hidden       a link so fast that its copies fit beside the computation. Nothing hides the chain between two steps:
                 the last gradients' copy, the first unit's step, and the copy of its parameters
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from atoll.plans import schedules
from atoll.plans.host import HostState
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.program import BlockShape, Do, Hosted, Kept, Operation, Partial, Program, Programs, UnitShape
from atoll.program.host import IN, OUT, STEPS
from atoll.program.kept import travel_of
from atoll.program.sim import Rates, Speed, play_programs
from atoll.runtime.engine import Engine
from atoll.runtime.models.adapter import SequentialAdapter
from atoll.runtime.pipeline import kept as activations
from atoll.runtime.pipeline import microbatches
from atoll.runtime.pipeline.kept import KeptActivations
from atoll.runtime.sharding import hosted
from atoll.runtime.sharding.host_steps import HostSteps
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.sharding.unsharded import UnshardedParameters
from atoll.testing import run_ranks
from benchmarks.islands import tables
from benchmarks.saving.bench import Block, Sleep

STEPPED = 7
"""Elements that a step reads and writes for each one that is gathered or reduced: gradient, master and two states."""

TURNS = 3
"""How often the steps with host memory and those without take turns, so that a change of the machine's load affects
both. The first two steps of a turn are not measured."""

TIMED = 2
"""Steps of a turn with host memory whose instructions are timed. A step is simulated with those of each; the median
counts."""

SIMULATED = 3
"""Steps that are simulated; the last one counts, as in `atoll.prediction.cost`."""


@dataclass(frozen=True, slots=True)
class Case:
    """One plan on a link.

    seconds: that a block's state, its parameters or gradients, or what it keeps of a microbatch, takes over the link in
    one direction, or its step on the host.  slept: that each of a block's F, I and W takes.
    """

    name: str
    host: HostState
    seconds: float
    pipeline: int = 1
    schedule: str = "1f1b"
    post_validation: bool = False
    blocks: int = 8
    width: int = 384
    microbatches: int = 4
    slept: float = 0.012
    steps: int = 12


ON_DEVICE, ON_HOST = HostState("update-on-device"), HostState("update-on-host")
TIGHT = HostState("update-on-device", budget=0)
ACTIVATIONS = HostState(activations=1.0)
PARAMETERS, GRADIENTS = replace(ON_HOST, parameters="all"), replace(ON_HOST, gradients=True)
PIPELINE: dict[str, Any] = {"pipeline": 2, "schedule": "zb-h1"}

CASES = (
    Case("on the device, fast link", ON_DEVICE, 0.004),
    Case("on the device, slow link", ON_DEVICE, 0.030),
    Case("on the device, slow link, one unit at a time", TIGHT, 0.030),
    Case("on the device, half of the units", replace(ON_DEVICE, fraction=0.5), 0.030),
    Case("on the device, pipeline", ON_DEVICE, 0.020, **PIPELINE),
    Case("on the device, pipeline, post-validated", ON_DEVICE, 0.020, **PIPELINE, post_validation=True),
    Case("on the host, hidden", ON_HOST, 0.004),
    Case("on the host, slow memory", ON_HOST, 0.080),
    Case("on the host, pipeline", ON_HOST, 0.020, **PIPELINE),
    Case("parameters, hidden", PARAMETERS, 0.005, microbatches=8),
    Case("parameters, slow link", PARAMETERS, 0.030),
    Case("gradients, hidden", GRADIENTS, 0.005, microbatches=8),
    Case("gradients, slow link", GRADIENTS, 0.030),
    Case("parameters and gradients, pipeline", replace(PARAMETERS, gradients=True), 0.008, **PIPELINE),
    Case("activations, hidden", ACTIVATIONS, 0.008),
    Case("activations, slow link", ACTIVATIONS, 0.030),
    Case("activations, half of them, slow link", replace(ACTIVATIONS, activations=0.5), 0.030),
    Case("activations, pipeline, hidden", ACTIVATIONS, 0.008, **PIPELINE),
    Case("activations and states on the host, pipeline", replace(ON_HOST, activations=1.0), 0.008, **PIPELINE),
)
HIDDEN = (
    *("on the host, hidden", "parameters, hidden", "gradients, hidden"),
    *("activations, hidden", "activations, pipeline, hidden"),
)
"""Cases whose link, or memory, hides behind the computation."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every case."""
    cases = [replace(each, steps=TURNS, blocks=4) for each in CASES[:2]] if arguments.quick else CASES
    rows = []
    for case in cases:
        per_rank = run_ranks(measure, case.pipeline, case, timeout=600.0)
        row = _row(case, per_rank)
        rows.append(row)
        print(_line(row), flush=True)
    return {"device": "emulated: compute sleeps, copies are paced", "rows": rows}


_BOTH = ("with", "without")


def _row(case: Case, per_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    programs = Programs(per_rank[0]["placement"], tuple(each["program"] for each in per_rank))
    of_ranks = zip(*(each["timed"] for each in per_rank), strict=True)
    simulated = median(_simulated(programs, per_rank, seconds) for seconds in of_ranks)
    slowest = {name: [max(each) for each in zip(*(own[name] for own in per_rank), strict=True)] for name in _BOTH}
    measured, plain = median(slowest["with"]), median(slowest["without"])
    return {
        "name": case.name,
        "host": case.host.words,
        "link_seconds": case.seconds,
        "steps": [list(map(float, each["with"])) for each in per_rank],
        "measured": measured,
        "without": plain,
        "simulated": simulated,
        "over_simulation": measured / simulated - 1.0,
        "over_without": measured / plain - 1.0,
        "megabytes": per_rank[0]["bytes"] / 1e6,
        "worst_difference": max(each["difference"] for each in per_rank),
    }


def _simulated(
    programs: Programs, per_rank: Sequence[Mapping[str, Any]], seconds: Sequence[Mapping[tuple[Operation, int], float]]
) -> float:
    """Return the seconds of a step. seconds: of each rank's instructions in one step."""
    rates = [Rates(own, each["message"], each["links"]) for own, each in zip(seconds, per_rank, strict=True)]
    return play_programs(programs, rates, steps=SIMULATED).seconds


class SleepOnce(Sleep):
    """Takes its seconds, and as many backward."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sleep as long."""
        time.sleep(ctx.seconds)
        return gradients[0], None


class SplitBlock(Block):
    """A block whose W is apart from its I, and sleeps there: see `paced`."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__(width, 0.0)
        self._slept = seconds

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """[B, width] -> [B, width]."""
        return super().forward(SleepOnce.apply(value, self._slept))


def engine_of(case: Case, host: HostState | None) -> Engine:
    """Return this rank's engine."""
    kind = SplitBlock if case.pipeline > 1 else Block
    with torch.device("meta"):
        model = nn.Sequential(*(kind(case.width, case.slept) for _ in range(case.blocks)))
    schedule = schedules.build(case.schedule, ranks=case.pipeline, microbatches=case.microbatches)
    plan = Plan(
        MeshShape(case.pipeline),
        Layout("NNN"),
        schedule,
        1,
        precision=Precision.preset("fp32"),
        post_validation=case.post_validation,
        host=host,
    )
    adapter = SequentialAdapter(model, lambda outputs, batch: (outputs - batch["labels"]).square().mean(1).sum())
    return Engine(adapter, plan, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-4), clip=1e6)


def measure(case: Case) -> dict[str, Any]:
    """Measure one rank: steps with host memory and without, in turns, and the seconds of instructions."""
    torch.set_num_threads(1)
    engine, plain = engine_of(case, case.host), engine_of(case, None)
    generator = torch.Generator().manual_seed(0)
    shape = case.microbatches, case.width
    batch = {name: torch.randn(shape, generator=generator) for name in ("inputs", "labels")}
    program = _with_activations(engine, batch) if case.host.activations else engine.program
    units = [unit for unit in program.shape.units.values() if unit.on_host or unit.is_stepped_on_host]
    own = [_sent(unit, Hosted.ONLOAD) or _sent(unit, Hosted.STEP_ON_HOST) for unit in units]
    kept = [block.leaves for block in program.shape.blocks.values() if block.leaves]
    rates = [max(sizes) / case.seconds if sizes else math.inf for sizes in (own, kept)]
    # One link has one speed: where both leave, that of the states, and activations of this size take their part of it.
    rate = memory = rates[0] if own else rates[1]
    if (
        case.host.parameters or case.host.gradients
    ):  # of four bytes an element; a step reads and writes seven times that
        rate, memory = rate / STEPPED, rate
    speeds = {IN: Speed(rate=rate), OUT: Speed(rate=rate), STEPS: Speed(rate=memory)}
    found: dict[str, Any] = {"with": [], "without": [], "links": speeds, "program": program}
    found["placement"] = engine.plan.schedule.placement
    found["bytes"] = program.sent[OUT]
    found["timed"] = []
    with paced(engine, rate, memory, case.slept):
        for _ in range(TURNS):
            for name, each in (("with", engine), ("without", plain)):
                each.submit(batch, batch)
                each.submit(batch, batch)
                for _ in range(case.steps // TURNS):
                    begin = time.perf_counter()
                    each.submit(batch, batch)
                    found[name].append(time.perf_counter() - begin)
                if each is engine:
                    found["timed"] += [_seconds(engine, batch) for _ in range(TIMED)]
        engine.settle()
        while plain.step_number < engine.step_number:
            plain.submit(batch, batch)
        plain.settle()
    found["message"] = float(case.width * 4)
    found["difference"] = _difference(engine, plain)
    engine.close()
    plain.close()
    return found


def _seconds(engine: Engine, batch: Mapping[str, torch.Tensor]) -> dict[tuple[Operation, int], float]:
    with engine.timing() as seconds:
        engine.submit(batch, batch)
    # Waits of the host's lane are what is simulated.
    return {key: value for key, value in seconds.items() if key[0] not in _OF_HOST}


_OF_HOST = frozenset(row for row in vars(Hosted).values() if isinstance(row, Operation) and row is not Hosted.STEP_UNIT)
_OF_HOST |= {Kept.OFFLOADED_ACT, Kept.ONLOADED_ACT, Kept.OFFLOADED_OWED, Kept.ONLOADED_OWED}
_OF_HOST |= {Partial.OFFLOADED_PART, Partial.ONLOADED_PART, Do.WHOLE, Do.FETCH}


def _with_activations(engine: Engine, batch: Mapping[str, torch.Tensor]) -> Program:
    """Return the engine's program with the bytes that leave: it is lowered without a workload that knows them."""
    sizes: dict[tuple[Operation, int], int] = {}
    own = engine._executor.microbatches.kept
    assert own is not None, "activations leave"
    engine._executor.before = dict.fromkeys(
        (Kept.OFFLOADED_ACT, Kept.OFFLOADED_OWED), lambda: sizes.update(_sizes(own))
    )
    engine.submit(batch, batch)
    engine.settle()
    engine._executor.before = {}
    shape = engine.program.shape

    def block(each: BlockShape) -> BlockShape:
        leaves = sizes.get((Kept.OFFLOAD_ACT, each.index), 0)
        return replace(each, leaves=leaves, travel=travel_of(leaves))

    def unit(each: UnitShape) -> UnitShape:
        owed = travel_of(sizes.get((Kept.OFFLOAD_OWED, each.index), 0), is_owed=True)
        return replace(each, travel={**each.travel, **owed})

    stages = {at: replace(each, blocks=tuple(map(block, each.blocks))) for at, each in shape.stages.items()}
    units = {at: unit(each) for at, each in shape.units.items()}
    return Program(engine.program.instructions, replace(shape, stages=stages, units=units))


def _sizes(kept: KeptActivations) -> dict[tuple[Operation, int], int]:
    return {(row, of): sum(piece.nbytes for piece in each.pieces) for (row, of, _), each in kept._now.items()}


def _sent(unit: Any, do: Operation) -> int:
    return sum(count for _, count in unit.travel.get((do, None), ()))


def _difference(engine: Engine, other: Engine) -> float:
    """Return the largest difference of the parameters of two engines after as many steps."""
    worst = 0.0
    for own, its in zip(engine.units, other.units, strict=True):
        for unit in (own, its):
            unit.gather()
        for name, value in own.parameters.items():
            worst = max(worst, float((value - its.parameters[name]).abs().max()))
    return worst


@contextmanager
def paced(engine: Engine, rate: float, memory: float, slept: float) -> Iterator[None]:
    """Let each copy, and each step on the host, take at least its bytes' time, and each W its own. rate, memory: of the
    link and of host memory, in bytes a second.  slept: of a W, in seconds."""
    copy, step, copy_kept = hosted._copy, HostSteps._step_there, activations._copy
    compute_weights = microbatches.compute_weights
    gather = UnshardedParameters._all_gather

    def paced_gather(self: UnshardedParameters) -> None:
        begin = time.perf_counter()
        gather(self)
        if self._shards.rests_on_host:
            _sleep_until(begin + self._shards.gathered_from.nbytes / rate)

    def paced_copy(pairs: Any) -> None:
        begin = time.perf_counter()
        copy(pairs)
        _sleep_until(begin + sum(source.nbytes for _, source in pairs) / rate)

    def paced_kept(pieces: Any, *rest: Any, **options: Any) -> None:
        begin = time.perf_counter()
        copy_kept(pieces, *rest, **options)
        _sleep_until(begin + sum(piece.nbytes for piece in pieces) / rate)

    def paced_weights(unit: Unit, pending: list[tuple[str, Any]]) -> None:
        if pending:  # on one rank, I has computed them
            time.sleep(slept)
        compute_weights(unit, pending)

    def paced_step(self: HostSteps, unit: Unit, *rest: Any, **options: Any) -> None:
        begin = time.perf_counter()
        step(self, unit, *rest, **options)
        shape = engine.program.shape.units[unit.spec.index]
        _sleep_until(begin + _sent(shape, Hosted.STEP_ON_HOST) / memory)

    with (
        patch.object(hosted, "_copy", paced_copy),
        patch.object(activations, "_copy", paced_kept),
        patch.object(microbatches, "compute_weights", paced_weights),
        patch.object(HostSteps, "_step_there", paced_step),
        patch.object(UnshardedParameters, "_all_gather", paced_gather),
    ):
        yield


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


# ---- the page


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    return "\n\n".join(
        [
            "# Host memory on an emulated device",
            "Written by `python benchmarks/run.py host`. **The device and the link are emulated**: compute sleeps, "
            "equally long in F, I and W; copies of masters, states, parameters, gradients and activations are real, "
            "and take at least as long as over a link of the given speed, as do steps on the host. *link*: "
            "milliseconds of the largest unit over the link in one direction, or on the host; of activations, of what "
            "one block keeps of a microbatch. *MB a rank*: to host memory in a step. *simulated*: `atoll.program.sim` "
            "with timed instructions and that speed. Medians of steps back to back, with and without in turns. "
            "The parameters of the two differ, after as many steps, by at most "
            f"{max(row['worst_difference'] for row in result['rows']):g}.",
            tables.measured_in(result["environment"]) if "environment" in result else "",
            "\n".join(
                [
                    "| plan | MB a rank | link ms | without ms | with ms | simulated ms | over it | over without |",
                    "|---|--:|--:|--:|--:|--:|--:|--:|",
                    *map(_line, result["rows"]),
                ]
            ),
        ]
    ) + "\n"  # fmt: skip


def _line(row: Mapping[str, Any]) -> str:
    cells = [row["name"], f"{row['megabytes']:.1f}", f"{row['link_seconds'] * 1e3:g}"]
    cells += [f"{row[name] * 1e3:.1f}" for name in ("without", "measured", "simulated")]
    cells += [f"{row[name]:+.1%}" for name in ("over_simulation", "over_without")]
    return f"| {' | '.join(cells)} |"
