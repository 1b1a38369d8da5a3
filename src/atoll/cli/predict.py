"""`atoll predict CONFIG`: predict step time and memory of a plan before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.base.units import format_bytes, format_count, format_rate, format_seconds
from atoll.cli.arguments import CLUSTER, AsJson, ConfigFile, Overrides, cluster_of, with_cluster
from atoll.cli.islands import Island, archipelago_of, refuse_island, report_islands

if TYPE_CHECKING:
    from atoll.prediction.cost import Held, Prediction
    from atoll.prediction.cost.apart import AnchorBytes
    from atoll.prediction.cost.rounds import ApartCost


def predict_command(
    config: ConfigFile,
    overrides: Overrides = None,
    cluster: Annotated[Path | None, typer.Option(help=CLUSTER)] = None,
    island: Island = None,
    as_json: AsJson = False,
) -> None:
    """Predict step time and peak memory of each rank, for any number of ranks, without running any.

    Weights are not read and the corpus is not prepared: the vocabulary has model.vocabulary ids, or the maximum of the
    tokenizer.

    Keys of the JSON object: parameters; active, those that a token takes; world; seconds of a step, and interval, the
    least and the most; tokens_per_second, tokens_per_second_per_device; mfu; breakdown, with busiest_rank, and the
    seconds by part of that rank and the mean of all; ranks, one object a pipeline rank with rank, peak and rest (bytes
    by component), saved_bytes (of host memory, for saving in the background), fits, margin_bytes, breakdown and, of a
    cluster with nodes of several kinds, nodes (the names of its kinds); fits
    and margin_bytes of the fullest rank; outer, null without outer steps: seconds that they add to a step on average
    (part of `seconds`) and at worst, bytes that a rank sends between islands on average and after one step at most;
    apart, null unless islands are worlds of their own: island_bytes of all ranks a step, exchange (seconds of a round),
    is_overdue, busy (share of the uplink's time), held (bytes of a rank in host memory by component), returns (nbytes
    and seconds of anchors that an island takes over, and whether it catches_up) and notes.

    On a cluster file with islands, without --island: the plan of the config on all devices of each. Keys of the JSON
    object then: seconds of an interval, tokens_per_second of all islands, bound (island, is_uplink), late (islands that
    rounds leave behind), is_overdue, fits, and islands, by name: devices, step, every, batch, interval, waited, tokens,
    share, sent, busy, peak, margin, held and returns.
    """
    from atoll.training.config import load
    from atoll.training.setup.choosing import load_chosen
    from atoll.training.setup.islands import predict_island, predict_islands
    from atoll.training.setup.prediction import predict

    sets = with_cluster(overrides, cluster)
    loaded = load(config, sets)
    every = archipelago_of(loaded)
    if every is not None and island is None:
        report_islands(predict_islands(loaded, every), as_json=as_json)
        return
    if every is not None and island is not None:
        report(predict_island(loaded, every, island), as_json=as_json, keeps=loaded.checkpoint.memory > 0)
        return
    refuse_island(island)
    loaded, _ = load_chosen(config, sets, config=loaded)
    found = cluster_of(loaded)
    for note in loaded.notes:
        typer.echo(f"note: {note}", err=True)
    report(predict(loaded, found), as_json=as_json, keeps=loaded.checkpoint.memory > 0)


def report(prediction: Prediction, *, as_json: bool, keeps: bool = False) -> None:
    """Print a prediction. keeps: ranks keep states in host memory (checkpoint.memory)."""
    if as_json:
        import json

        from atoll.prediction.cost.summary import summary

        typer.echo(json.dumps(summary(prediction)))
        return
    lines = list(describe_prediction(prediction, keeps=keeps))  # print nothing if the config is refused
    typer.echo("\n".join(lines))


# ---- text


def describe_prediction(prediction: Prediction, *, keeps: bool = False) -> Iterator[str]:
    """Yield the plan, its step time by part, and its memory by component."""
    yield from _plan(prediction)
    if prediction.cluster is not None:
        yield from ("", *_seconds(prediction), "", *_parts(prediction))
    ranks = range(prediction.plan.mesh.pipeline)
    seats = None if prediction.cluster is None else prediction.seats
    names = [str(rank) if seats is None else seats.name(rank).removeprefix("rank ") for rank in ranks]
    peaks, rests = [prediction.peak(rank) for rank in ranks], [prediction.rest(rank) for rank in ranks]
    yield from ("", *_components("bytes at the peak, of each pipeline rank", peaks, names))
    yield from ("", *_components("bytes between steps", rests, names))
    saved = max(map(prediction.saved, ranks))
    yield from ("", f"host memory for background saves: at most {format_bytes(saved)} per rank")
    if keeps:
        kept = format_bytes(2 * max(_kept(prediction, rank) for rank in ranks))
        yield f"host memory for two states in memory (checkpoint.memory): at most {kept} per rank"
    anchored = prediction.anchored
    if anchored:
        yield f"outer steps in host memory: {held_words(max(anchored, key=lambda held: held.total))}"
    if prediction.plan.host is not None:
        resting, away = (max(map(each, ranks)) for each in (prediction.on_host, prediction.away))
        activations = f", with {format_bytes(away)} of activations" if away else ""
        yield f"state that rests in host memory: at most {format_bytes(resting)} per rank{activations}"
    if prediction.cluster is not None:
        yield from ("", _fit(prediction))


def _kept(prediction: Prediction, rank: int) -> int:
    """Return the bytes of a state that a pipeline rank keeps in host memory."""
    from atoll.plans.layouts import kept_bytes

    units = prediction.ranks.of(rank).units.values()
    return sum(kept_bytes([segment], sharding) for unit in units for segment, sharding in unit.sharded_segments)


def _plan(prediction: Prediction) -> Iterator[str]:
    from atoll.prediction.cost.outer import outer_words

    plan, use = prediction.plan, prediction.use
    sizes = {name: size for name, size in plan.mesh.sizes.items() if size > 1}
    mesh = " x ".join(f"{name} {size}" for name, size in sizes.items())
    world = "1 rank" if plan.mesh.world == 1 else f"{plan.mesh.world} ranks: {mesh}"
    model = prediction.workload
    active = f" ({format_count(model.active)} active)" if model.experts else ""
    yield f"{model.name}, {format_count(model.parameters)} parameters{active}, on {world}"
    if plan.divides_experts:
        shared = "" if plan.expert_layout is None else f", layout {plan.expert_layout.name}"
        over = f" over {plan.mesh.expert} ranks" if plan.mesh.expert > 1 else ""
        yield f"experts{over}{shared}"
    batch = f"{plan.schedule.counted} of {plan.microbatch} x {use.sequence} tokens a rank"
    recompute = "" if plan.recompute == "none" else f", recompute {plan.recompute}"
    yield f"layout {plan.layout.name}, {plan.schedule.name} with {batch}, {plan.precision}{recompute}"
    if plan.host is not None:
        if plan.host.optimizer is not None:
            share = "" if plan.host.fraction == 1 else f", of a share of {plan.host.fraction:g} of the units"
            yield f"optimizer state in host memory, {plan.host.optimizer}{share}"
        if plan.host.parameters is not None:
            yield f"{plan.host.parameters} parameters in host memory, which every gather copies to the device"
        if plan.host.gradients:
            yield "gradients in host memory between the microbatches that add to them, and until the step"
        if plan.offloads:
            yield f"{plan.host.kept} in host memory from their forward to their backward"
    if plan.outer is not None:
        yield outer_words(plan)
    if plan.matrices is not None:
        yield plan.matrices


def _seconds(prediction: Prediction) -> Iterator[str]:
    low, high = prediction.interval
    between = f", from {format_seconds(low)} to {format_seconds(high)}" if high > low else ""
    yield f"a step  {format_seconds(prediction.seconds)}{between}"
    if (outer := prediction.outer) is not None:
        yield (
            f"outer   {format_seconds(outer.seconds)} of it on average, {format_seconds(outer.worst)} after the worst "
            f"step; {format_bytes(outer.nbytes)} a step between islands, {format_bytes(outer.largest)} after one step"
        )
        if outer.apart is not None:
            yield from _apart(outer.apart)
    rate, devices = prediction.tokens_a_second, prediction.plan.mesh.world
    yield f"tokens  {format_rate(rate, 'tokens')}, {format_rate(rate / devices, 'tokens')} a device"
    dtype = prediction.use.compute
    peak = prediction.given.mean_rate(devices, dtype) / 1e12
    yield f"MFU     {prediction.mfu:.1%} of {peak:.4g} TFLOP/s a device in {dtype}"


def _apart(cost: ApartCost) -> Iterator[str]:
    """Yield what an island needs that is a world of its own."""
    busy = "" if cost.busy is None else f", which is busy for {cost.busy:.1%} of the time"
    late = "; longer than delay and grace, so rounds are followed later" if cost.is_overdue else ""
    yield (
        f"uplink  {format_bytes(cost.island_bytes)} a step of all ranks{busy}; a round takes "
        f"{format_seconds(cost.exchange)} from sending to following{late}"
    )
    seconds = "" if cost.returns.seconds is None else f" in {format_seconds(cost.returns.seconds)}"
    never = "" if cost.returns.catches_up else ", too slowly for the rounds since"
    yield f"return  anchors and momentum, {format_bytes(cost.returns.nbytes)} of all ranks{seconds}{never}"
    yield from (f"note    {note}" for note in cost.notes)


def held_words(held: AnchorBytes) -> str:
    """Return the bytes of outer steps in host memory, by component."""
    names = {
        "anchors": "of anchors",
        "momentum": "of momentum",
        "residuals": "of residuals",
        "own": "of outer gradients",
        "others": "of other islands' outer gradients",
        "newer": "of newer anchors",
    }
    each = [f"{format_bytes(getattr(held, name))} {words}" for name, words in names.items() if getattr(held, name)]
    return f"at most {format_bytes(held.total)} per rank: {', '.join(each)}"


def _parts(prediction: Prediction) -> Iterator[str]:
    from atoll.prediction.cost.breakdown import PARTS, busiest_rank, mean

    breakdown = prediction.breakdown
    busiest = busiest_rank(breakdown)
    columns = {f"{prediction.seats.name(busiest)}, the busiest": breakdown[busiest]}
    if len(breakdown) == 1:
        columns = {"seconds": breakdown[0]}
    else:
        columns["mean of all ranks"] = mean(breakdown)
    yield f"{'time of a step':28}" + "".join(f"{name:>26}" for name in columns)
    for part, name in PARTS.items():
        values = [getattr(each, part) for each in columns.values()]
        shares = [value / each.total for value, each in zip(values, columns.values(), strict=True)]
        if any(share > 1e-6 for share in shares):
            cells = zip(values, shares, strict=True)
            yield f"{name:28}" + "".join(f"{format_seconds(value):>18}{share:>8.1%}" for value, share in cells)


def _components(title: str, held: Sequence[Held], ranks: Sequence[str]) -> Iterator[str]:
    names = [name for name in held[0]._fields if any(getattr(each, name) for each in held)]
    widths = {name: max(11, len(name) + 2) for name in (*names, "total")}
    yield title
    wide = max(4, *map(len, ranks))
    yield "rank".ljust(wide) + "".join(f"{name:>{widths[name]}}" for name in (*names, "total"))
    for rank, each in zip(ranks, held, strict=True):
        cells = "".join(f"{format_bytes(getattr(each, name)):>{widths[name]}}" for name in (*names, "total"))
        yield f"{rank:>{wide}}{cells}"


def _fit(prediction: Prediction) -> str:
    margins: Callable[[int], int] = prediction.margin
    fullest = min(range(prediction.plan.mesh.pipeline), key=margins)
    margin, memory = margins(fullest), prediction.seats.memory(fullest)
    share, own = f"{format_bytes(abs(margin))}, {abs(margin) / memory:.1%}", format_bytes(memory)
    name = prediction.seats.name(fullest)
    host = prediction.host_margin
    if margin >= 0 and host is not None and host < 0:
        own = format_bytes(min(kind.host.memory for kind in prediction.seats.kinds))
        return f"does not fit: state in host memory and saves need {format_bytes(-host)} more than the {own} of a node"
    if margin >= 0:
        return f"fits: {name} {prediction.seats.is_fullest} and leaves {share}, of {own} free"
    return f"does not fit: {name} {prediction.seats.is_fullest} and needs {share}, more than {own}"
