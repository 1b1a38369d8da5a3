"""The page's content for one run or plan, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from atoll.base.units import format_bytes, format_count, format_rate, format_seconds
from atoll.plans.layouts import Level
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Held, Prediction
from atoll.prediction.cost.breakdown import busiest_rank
from atoll.training.report.timeline import StepTimeline, predicted_timeline
from atoll.training.report.traffic import Flow, predicted_flows


@dataclass(frozen=True)
class MemoryCurves:
    """Bytes that pipeline ranks hold over a step, by component.

    unit: "s", or "instructions" if seconds are unknown.
    times: for each rank, when its bytes change.  held: for each rank and component, the bytes from each of these times
    on.
    limits: bytes of the device of each rank, if known.  peaks: measured, of each rank.  measured: their kind.
    """

    unit: str
    components: tuple[str, ...]
    times: tuple[Sequence[float], ...]
    held: tuple[tuple[Sequence[float], ...], ...]
    limits: tuple[int, ...] = ()
    peaks: tuple[int, ...] = ()
    measured: str = ""


@dataclass(frozen=True)
class StageState:
    """A pipeline rank: the names of its blocks, stage by stage, and bytes of the states that its first rank stores."""

    blocks: tuple[tuple[str, ...], ...]
    states: Mapping[str, int]


@dataclass(frozen=True)
class StateLayout:
    """Storage of state: levels of the states, on a mesh.  stages: of each pipeline rank."""

    name: str
    levels: Mapping[str, Level]
    mesh: MeshShape
    stages: tuple[StageState, ...]


@dataclass(frozen=True)
class Curves:
    """Measured values by step: names and columns of one length, NaN where a value is missing."""

    training: Mapping[str, Sequence[float]] = field(default_factory=dict)
    validation: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sheet:
    """The content of a page for one run or plan.

    words: the plan, as pairs of statement and subject.  figures: predicted and measured, "" if unknown.
    timelines: predicted before measured.  blocks, units: names by index.  notes: missing data, with the reasons.
    """

    name: str
    kind: str
    words: tuple[tuple[str, str], ...] = ()
    figures: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    timelines: tuple[StepTimeline, ...] = ()
    memory: MemoryCurves | None = None
    traffic: tuple[Flow, ...] = ()
    layout: StateLayout | None = None
    curves: Curves = Curves()
    blocks: tuple[str, ...] = ()
    units: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def predicted_sheet(prediction: Prediction, name: str, kind: str = "plan") -> Sheet:
    """Return the sheet of a prediction. Without a cluster it has no seconds, and memory is by instruction."""
    is_timed = prediction.cluster is not None
    model = prediction.ranks.model
    names = tuple(block.name for block in model.blocks)
    return Sheet(
        name,
        kind,
        words=tuple(_words(prediction)),
        figures=_figures(prediction),
        timelines=(predicted_timeline(prediction),) if is_timed else (),
        memory=memory(prediction),
        traffic=predicted_flows(prediction),
        layout=layout(prediction),
        blocks=names,
        units={
            unit: _joined([names[at] for at in blocks])
            for unit, (blocks, is_shared, _) in enumerate(prediction.ranks.shape.units)
            if blocks and not is_shared
        },
        notes=() if is_timed else ("No cluster is named, so seconds are not predicted: name one with --cluster.",),
    )


def memory(prediction: Prediction) -> MemoryCurves:
    """Return the memory of each pipeline rank within and after each instruction."""
    is_timed = prediction.cluster is not None
    times: list[list[float]] = []
    held: list[tuple[list[float], ...]] = []
    origin = min(timing.begin for timing in prediction.played.timings) if is_timed else 0.0
    for rank in range(prediction.plan.mesh.pipeline):
        instructions = prediction.ranks.programs.ranks[rank].instructions
        starts: Sequence[float] = [*range(len(instructions) + 1)]
        if is_timed:
            timing = prediction.played.timings[rank]
            starts = [0.0, timing.begin - origin, *(end - origin for end in timing.ends)]
        own_times, own, before = [], [], None
        for start, each in zip(starts, prediction.held(rank), strict=False):
            if each != before:
                own_times.append(float(start))
                own.append(each)
                before = each
        times.append(own_times)
        held.append(tuple([float(count) for count in column] for column in zip(*own, strict=True)))
    limits = tuple(map(prediction.seats.memory, range(len(times)))) if is_timed else ()
    used = [at for at in range(len(Held._fields)) if any(any(rank[at]) for rank in held)]
    components = tuple(Held._fields[at] for at in used)
    kept = tuple(tuple(rank[at] for at in used) for rank in held)
    return MemoryCurves("s" if is_timed else "instructions", components, tuple(times), kept, limits)


def layout(prediction: Prediction) -> StateLayout:
    """Return the storage of each state."""
    plan, names = prediction.plan, [block.name for block in prediction.ranks.model.blocks]
    levels = {
        "parameters": plan.layout.parameters,
        "gradients": plan.layout.gradients,
        "optimizer": plan.layout.optimizer,
    }
    stages = []
    for rank in range(plan.mesh.pipeline):
        held = prediction.ranks.of(rank).footprint()
        blocks = tuple(
            tuple(names[at] for at in prediction.ranks.runs[stage]) for stage in prediction.ranks.shape.stages_of(rank)
        )
        stages.append(StageState(blocks, {state: int(getattr(held, state)) for state in levels}))
    return StateLayout(plan.layout.name, levels, plan.mesh, tuple(stages))


def with_measurements(sheet: Sheet, figures: Mapping[str, str], **changes: object) -> Sheet:
    """Return the sheet with measured figures beside the predicted ones, and some fields replaced."""
    found = dict(sheet.figures)
    for name, value in figures.items():
        found[name] = found.get(name, ("", ""))[0], value
    return replace(sheet, figures=found, **changes)  # type: ignore[arg-type]


# ---- text


LEVELS = {
    Level.N: "whole on each data-parallel rank",
    Level.I: "sharded inside each group",
    Level.G: "sharded over all data-parallel ranks",
}


def _words(prediction: Prediction) -> list[tuple[str, str]]:
    plan, use, model = prediction.plan, prediction.use, prediction.workload
    mesh, schedule = plan.mesh, plan.schedule
    name = f"{model.name}, {format_count(model.parameters)} parameters in {len(model.blocks)} blocks"
    states = {"parameters": plan.layout.parameters, "gradients": plan.layout.gradients}
    rests = "; ".join(f"{state} {LEVELS[level]}" for state, level in states.items())
    found = [
        ("model", name),
        ("mesh", _mesh(mesh)),
        ("layout", f"{plan.layout.name}: {rests}; optimizer state {LEVELS[plan.layout.optimizer]}"),
        ("schedule", _schedule(plan)),
        (
            "batch",
            f"{plan.global_batch} sequences of {use.sequence} tokens a step: {schedule.counted} of "
            f"{plan.microbatch}" + (f" on each of {mesh.data} data-parallel ranks" if mesh.data > 1 else ""),
        ),
        ("gathering", _gathering(plan)),
        *([("codecs", str(plan.codecs))] if plan.codecs else []),
        *([] if plan.outer is None else [("outer steps", _outer(plan))]),
        ("precision", f"computes in {plan.precision}, optimizer in {plan.precision.master}"),
        ("recompute", {"none": "nothing", "block": "all activations of a block"}.get(plan.recompute, plan.recompute)),
    ]
    if prediction.cluster is not None:
        found += [("on", _cluster(prediction)), ("bottleneck", _bottleneck(prediction))]
    return found


def _outer(plan: Plan) -> str:
    return f"{plan.islands} islands, {plan.outer}" if plan.has_islands else str(plan.outer)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _mesh(mesh: MeshShape) -> str:
    parts = [
        (mesh.pipeline, "pipeline rank"),
        (mesh.inter, "group"),
        (mesh.intra, "rank in a group"),
        (mesh.tensor, "tensor-parallel rank"),
    ]
    words = [
        f"{number} {'ranks in a group' if noun == 'rank in a group' else noun + 's'}"
        for number, noun in parts
        if number > 1
    ]
    return _count(mesh.world, "rank") + (f": {' × '.join(words)}" if words else "")


def _schedule(plan: Plan) -> str:
    schedule = plan.schedule
    stages = f"{schedule.placement.stages} stages" if schedule.placement.stages > 1 else "one stage"
    ending = ", optimizer step before the global norm is known" if plan.post_validation else ""
    return f"{schedule.name}, {stages}, placement {schedule.placement.kind}{ending}"


def _gathering(plan: Plan) -> str:
    stays = {"action": "for one action", "run": "while their stage fits in memory", "step": "for the step"}
    reduced = {"microbatch": "each microbatch", "run": "before those of another stage", "step": "once a step"}
    unit = f", {plan.unit} blocks together" if plan.unit > 1 else ""
    return f"gathered parameters stay {stays[plan.stays]}; gradients are reduced {reduced[plan.reduction]}{unit}"


def _cluster(prediction: Prediction) -> str:
    dtype = prediction.use.compute
    links = ", ".join(
        f"{axis} {format_bytes(speed.rate, decimal=True)}/s"
        + (f" shared by {speed.shared}" if speed.shared > 1 else "")
        for axis, speed in prediction.durations.links.items()
    )
    devices = ", ".join(
        f"{kind.name + ': ' if kind.name else ''}devices of {format_bytes(kind.device.memory)} and "
        f"{kind.device.rate(dtype) / 1e12:.4g} TFLOP/s in {dtype}"
        for kind in prediction.seats.kinds
    )
    return devices + (f"; links: {links}" if links else "")


def _bottleneck(prediction: Prediction) -> str:
    """Return the rank with the highest peak, and the waits of the busiest one."""
    ranks = range(prediction.plan.mesh.pipeline)
    fullest = min(ranks, key=prediction.margin)
    margin = prediction.margin(fullest)
    fits = f"leaves {format_bytes(margin)} free" if margin >= 0 else f"needs {format_bytes(-margin)} too much"
    waits = {
        "bubble": "waiting for other pipeline ranks",
        "messages": "waiting for messages",
        "gathers": "waiting for gathers",
        "reductions": "waiting for reductions",
        "tensor": "tensor-parallel collectives",
        "exchanges": "exchanging rows or heads",
        "sums": "waiting for sums",
        "host": "waiting for host memory",
    }
    busiest = busiest_rank(prediction.breakdown)
    parts = prediction.breakdown[busiest]._asdict()
    most = max(waits, key=parts.__getitem__)
    share = parts[most] / sum(parts.values())
    wait = f"spends {share:.1%} {waits[most]}, its largest wait" if share > 5e-4 else "does not wait"
    memory = f"memory: pipeline {prediction.seats.name(fullest)} {prediction.seats.is_fullest} and {fits}"
    return f"{memory}. Time: pipeline {prediction.seats.name(busiest)}, the busiest, {wait}"


def _figures(prediction: Prediction) -> dict[str, tuple[str, str]]:
    ranks = range(prediction.plan.mesh.pipeline)
    peak = max((prediction.peak(rank).total for rank in ranks), default=0)
    found: dict[str, tuple[str, str]] = {}
    if prediction.cluster is not None:
        low, high = prediction.interval
        between = f" ({format_seconds(low)} to {format_seconds(high)})" if high > low else ""
        found["step"] = format_seconds(prediction.seconds) + between, ""
        if (outer := prediction.outer) is not None:
            found["outer steps"] = f"{format_seconds(outer.seconds)} a step, {format_seconds(outer.worst)} at worst", ""
        found["tokens"] = format_rate(prediction.tokens_a_second, "tokens"), ""
        found["MFU"] = f"{prediction.mfu:.1%}", ""
        found["bubble, mean over ranks"] = f"{_bubble(prediction):.1%}", ""
    found["peak memory"] = format_bytes(peak), ""
    if prediction.plan.host is not None:
        found["in host memory"] = format_bytes(max(map(prediction.on_host, ranks))), ""
    if prediction.cluster is not None:
        found["fits"] = "yes" if prediction.fits else "no", ""
    return found


def _bubble(prediction: Prediction) -> float:
    shares = [part.bubble / part.total if part.total else 0.0 for part in prediction.breakdown]
    return math.fsum(shares) / len(shares)
