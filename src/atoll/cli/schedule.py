"""`atoll show schedule NAME`: build, draw and simulate one schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.arguments import AsJson

if TYPE_CHECKING:
    from atoll.plans.ir.schedule import Schedule
    from atoll.plans.schedules import Links, Memory
    from atoll.plans.schedules.problem import Objective
    from atoll.program.sim import Costs
    from atoll.program.trace import Trace

_COST = "for a rank's full share of a microbatch: one number, or one for each rank separated by commas."
_BYTES = "one number, or one for each rank separated by commas."

_KINDS = ("line", "loop", "v")
_OBJECTIVES = ("makespan", "span")


def schedule_command(
    name: Annotated[str, typer.Argument(help="gpipe, 1f1b, ... An unknown name lists all.")],
    ranks: Annotated[int, typer.Option(help="Pipeline ranks.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches a step.")] = 8,
    chunks: Annotated[int | None, typer.Option(help="Stages of each rank, on a loop.")] = None,
    placement: Annotated[
        str | None, typer.Option(help=f"{', '.join(_KINDS)}: the placement of stages. Most schedules have their own.")
    ] = None,
    unit: Annotated[int | None, typer.Option(help="Maximum number of microbatches in a unit.")] = None,
    slices: Annotated[int, typer.Option(help="Slices of each sequence, which ranks run one by one.")] = 1,
    forward: Annotated[str, typer.Option(help=f"Time of F {_COST}")] = "1",
    input_grad: Annotated[str, typer.Option(help=f"Time of I, the backward for the input, {_COST}")] = "1",
    weight_grad: Annotated[str, typer.Option(help=f"Time of W, the backward for the weights, {_COST}")] = "1",
    hop: Annotated[
        str, typer.Option(help="Latency of a message between two ranks, or a TOML file with the link of each pair.")
    ] = "0",
    fused_backward: Annotated[
        bool, typer.Option("--fused-backward", help="B sends the input gradient when it ends, not after its I part.")
    ] = False,
    objective: Annotated[
        str,
        typer.Option(help=f"{' or '.join(_OBJECTIVES)}: the objective of automatic schedules."),
    ] = "makespan",
    memory_limit: Annotated[
        str | None, typer.Option(help=f"Memory limit in bytes: {_BYTES} zb-1p and zb-2p have their own by default.")
    ] = None,
    static_bytes: Annotated[str, typer.Option(help=f"Bytes that a rank always holds: {_BYTES}")] = "0",
    activation_bytes: Annotated[
        str, typer.Option(help=f"Bytes that a microbatch keeps on a rank from F to I: {_BYTES}")
    ] = "1",
    weight_grad_bytes: Annotated[
        str, typer.Option(help=f"Bytes that a microbatch keeps on a rank from I to W: {_BYTES}")
    ] = "1",
    split_head: Annotated[
        float | None,
        typer.Option(help="Time of F of the head for a microbatch, equal to its I and W, split over all ranks."),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write torch.distributed.pipelining's format to this file.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Build one schedule, draw it, and simulate it with costs.

    Every schedule accepts every option but --slices; a note names options without effect. For a schedule with a fixed
    order, a note states where it exceeds the memory limit. Costs and bytes are of a whole microbatch: a slice has its
    share of them. In drawings 0F2.1 is slice 1 of microbatch 2; in torch's notation its number is 2 * slices + 1.

    Keys of the JSON object: schedule, ranks, chunks, microbatches, slices; makespan; bubble_rate, the makespan's share
    in which the busiest rank computes nothing; span, the largest of the ranks' own spans (end of the last action -
    start of the first); span_bubble_rate, the same of it; peak_microbatches, per rank; peak_bytes, per rank;
    lower_bound, below which no order on these ranks has its objective, a split head not counted; critical_path, the
    actions of the chain that ends last, in its order; actions, per rank, in torch's notation.
    """
    from atoll.plans.schedules import Memory
    from atoll.program.sim import Costs, simulate

    costs = Costs(
        forward=_numbers("--forward", forward),
        input_grad=_numbers("--input-grad", input_grad),
        weight_grad=_numbers("--weight-grad", weight_grad),
        hop=_hop(hop),
        fused_backward=fused_backward,
    )
    memory = Memory(
        activation=_numbers("--activation-bytes", activation_bytes),
        weight_grad=_numbers("--weight-grad-bytes", weight_grad_bytes),
        static=_numbers("--static-bytes", static_bytes),
        limit=None if memory_limit is None else _numbers("--memory-limit", memory_limit),
    )
    sizes = {"ranks": ranks, "microbatches": microbatches, "slices": slices}
    asked = {"chunks": chunks, "placement": placement, "unit": unit, "objective": objective}
    schedule, bound = _build(name, sizes, asked, costs, memory)
    if split_head is not None:
        schedule, costs = _split_head(schedule, costs, split_head)
    trace = simulate(schedule, costs, memory)
    _note_excess(schedule, memory)
    _write_files(schedule, trace, csv, svg)
    typer.echo(
        json.dumps(_summary(schedule, trace, bound)) if as_json else _describe(schedule, trace, bound, objective)
    )


def _build(
    name: str, sizes: dict[str, int], asked: dict[str, Any], costs: Costs, memory: Memory
) -> tuple[Schedule, float]:
    """Return the schedule and the lower bound of its problem. Prints a note for each option without effect."""
    from atoll.plans import schedules

    _check_words(asked)
    entry = schedules.CATALOGUE.get(name)
    known = entry.options if entry is not None else ()
    options = asked | {
        "memory_limit": memory.limit,
        "static_bytes": memory.static,
        "activation_bytes": memory.activation,
        "weight_grad_bytes": memory.weight_grad,
    }
    given = {option: value for option, value in options.items() if option in known}
    schedule = schedules.build(name, **sizes, costs=costs, **given)
    bound = _bound(schedule, asked["objective"], costs, memory)
    for option, own in (("chunks", schedule.chunks), ("placement", schedule.placement.kind), ("unit", None)):
        if option not in known and asked[option] not in (None, own):
            typer.echo(f"note: {name} ignores --{option}", err=True)
    return schedule, bound


def _split_head(schedule: Schedule, costs: Costs, head: float) -> tuple[Schedule, Costs]:
    """Return the schedule with the look-ups and scores of a split vocabulary, and their costs."""
    from dataclasses import replace

    from atoll.plans.ir import insert_vocabulary
    from atoll.plans.schedules import Links

    each = head / schedule.ranks
    found = replace(costs, score=2 * each, score_grad=each)
    one = found.of_slice(schedule.slices)
    forward = sum(takes for takes, _, _ in one.per_rank(schedule.ranks)) / schedule.ranks
    score = 2 * each / schedule.slices
    relative = {"score": score / forward, "hop": Links.of(one.hop).longest / forward} if forward else {}
    return insert_vocabulary(schedule, **relative), found


def _bound(schedule: Schedule, objective: Objective, costs: Costs, memory: Memory) -> float:
    """Return the lower bound within the schedule's or the user's memory limit, or without one if it exceeds that."""
    from dataclasses import replace

    from atoll.plans.schedules import Problem, lower_bound
    from atoll.plans.schedules.automatic import own_limit

    limited = own_limit(schedule.name, memory, schedule.ranks, schedule.whole_microbatches)
    if _excess(schedule, limited):
        limited = replace(limited, limit=None)
    each, kept = costs.of_slice(schedule.slices), limited.of_slice(schedule.slices)
    return lower_bound(
        Problem.of(schedule.placement, schedule.microbatches, costs=each, memory=kept, objective=objective)
    )


def _excess(schedule: Schedule, memory: Memory) -> list[tuple[int, float, float]]:
    """Return the excess of each rank above its memory limit, and the limit."""
    from atoll.plans.schedules.memory import peak_of
    from atoll.plans.schedules.problem import TOLERANCE

    found = []
    for rank, bytes_of in enumerate(memory.of_slice(schedule.slices).per_rank(schedule.ranks)):
        peak = peak_of(schedule.compute_only().actions[rank], schedule.chunks, bytes_of)
        if peak > bytes_of.limit * (1 + TOLERANCE):
            found.append((rank, peak, bytes_of.limit))
    return found


def _note_excess(schedule: Schedule, memory: Memory) -> None:
    for rank, peak, limit in _excess(schedule, memory):
        typer.echo(f"note: rank {rank} holds {peak:g} bytes, more than its limit of {limit:g}", err=True)


def _check_words(asked: dict[str, Any]) -> None:
    from atoll.base.errors import ConfigError

    for option, words in (("placement", _KINDS), ("objective", _OBJECTIVES)):
        if asked[option] is not None and asked[option] not in words:
            raise ConfigError(f"--{option} is {asked[option]!r}: choose one of {', '.join(words)}")


def _summary(schedule: Schedule, trace: Trace, bound: float) -> dict[str, object]:
    """Return the output of `--json`."""
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "chunks": schedule.chunks,
        "microbatches": schedule.whole_microbatches,
        "slices": schedule.slices,
        "makespan": trace.makespan,
        "bubble_rate": trace.bubble_rate,
        "span": trace.span,
        "span_bubble_rate": trace.span_bubble_rate,
        "peak_microbatches": list(trace.peak_microbatches),
        "peak_bytes": list(trace.peak_bytes),
        "lower_bound": bound,
        "critical_path": [str(span.action) for span in trace.critical_path()],
        "actions": [[str(action) for action in row] for row in schedule.compute_only().actions],
    }


def _describe(schedule: Schedule, trace: Trace, bound: float, objective: str) -> str:
    from atoll.plans.ir.draw import draw

    lines = [str(schedule), "", draw(schedule, trace), ""]
    lines.append(f"makespan {trace.makespan:g}, bubble {trace.bubble_rate:.2%}")
    lines.append(f"largest span of a rank {trace.span:g}, bubble {trace.span_bubble_rate:.2%}")
    cost = trace.makespan if objective == "makespan" else trace.span
    over = f"; this one is {max(0.0, cost / bound - 1):.2%} above" if bound else ""
    lines.append(f"lower bound of the {objective} {bound:g}{over}")
    lines.append("")
    lines.append("rank    busy  before first   waiting  no memory    at end  peak microbatches  peak bytes")
    for rank, (busy, peak, held) in enumerate(zip(trace.busy, trace.peak_microbatches, trace.peak_bytes, strict=True)):
        idle = trace.idle(rank)
        lines.append(
            f"{rank:4d}  {busy:6.4g}  {idle.before:12.4g}  {idle.waiting:8.4g}  {idle.memory:9.4g}  {idle.after:8.4g}"
            f"  {peak:17.4g}  {held:10.6g}"
        )
    return "\n".join(lines)


def _numbers(option: str, text: str) -> float | tuple[float, ...]:
    """Parse `"1"` to 1.0 and `"1,2"` to (1.0, 2.0). Raises ConfigError for anything else."""
    from atoll.base.errors import ConfigError

    try:
        numbers = tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{option} is {text!r}: give a number, or one per rank separated by commas, as in 1,1.5"
        ) from None
    return numbers if len(numbers) > 1 else numbers[0]


def _hop(text: str) -> float | Links:
    """Return a number, or the links read from a file."""
    from atoll.plans.schedules import Links

    try:
        return float(text)
    except ValueError:
        return Links.read(text)


def _write_files(schedule: Schedule, trace: Trace, csv: Path | None, svg: Path | None) -> None:
    from atoll.plans.ir.draw import draw_svg
    from atoll.plans.ir.text import to_csv

    if csv is not None:
        _write(csv, to_csv(schedule))
    if svg is not None:
        _write(svg, draw_svg(trace))


def _write(path: Path, text: str) -> None:
    from atoll.base.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name a file in a folder that exists") from None
    typer.echo(f"wrote {path}", err=True)
