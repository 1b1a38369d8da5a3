"""`atoll schedule NAME`: build, draw and simulate one schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from atoll.ir.schedule import Schedule
    from atoll.trace import Trace

_COST = "of a rank's whole share of a microbatch: one number, or one a rank separated by commas."


def command(
    name: Annotated[str, typer.Argument(help="gpipe, 1f1b, ... An unknown name lists all.")],
    ranks: Annotated[int, typer.Option(help="Pipeline ranks.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches a step.")] = 8,
    forward: Annotated[str, typer.Option(help=f"Time of F {_COST}")] = "1",
    input_grad: Annotated[str, typer.Option(help=f"Time of I, the backward for the input, {_COST}")] = "1",
    weight_grad: Annotated[str, typer.Option(help=f"Time of W, the backward for the weights, {_COST}")] = "1",
    hop: Annotated[float, typer.Option(help="Latency of a message between two ranks.")] = 0.0,
    fused_backward: Annotated[
        bool, typer.Option("--fused-backward", help="B sends the input's gradient at its end, not after its I part.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="Write torch.distributed.pipelining's format here.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Build one schedule, draw it, and play it with costs.

    Keys of the JSON object: schedule, ranks, chunks, microbatches; makespan; bubble_rate, the makespan's share in which
    the busiest rank computes nothing; span, the largest of the ranks' own spans (end of the last action - start of the
    first); span_bubble_rate, the same of it; peak_microbatches, per rank; actions, per rank, in torch's notation.
    """
    from atoll import schedules
    from atoll.ir.text import to_csv
    from atoll.sim import Costs, simulate

    costs = Costs(
        forward=_cost("--forward", forward),
        input_grad=_cost("--input-grad", input_grad),
        weight_grad=_cost("--weight-grad", weight_grad),
        hop=hop,
        fused_backward=fused_backward,
    )
    schedule = schedules.build(name, ranks=ranks, microbatches=microbatches)
    trace = simulate(schedule, costs)
    if csv is not None:
        _write(csv, to_csv(schedule))
    if svg is not None:
        from atoll.ir.draw import draw_svg

        _write(svg, draw_svg(trace))
    typer.echo(json.dumps(summary(schedule, trace)) if as_json else _describe(schedule, trace))


def summary(schedule: Schedule, trace: Trace) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
        "makespan": trace.makespan,
        "bubble_rate": trace.bubble_rate,
        "span": trace.span,
        "span_bubble_rate": trace.span_bubble_rate,
        "peak_microbatches": list(trace.peak_microbatches),
        "actions": [[str(action) for action in row] for row in schedule.compute_only().actions],
    }


def _describe(schedule: Schedule, trace: Trace) -> str:
    from atoll.ir.draw import draw

    lines = [str(schedule), "", draw(schedule, trace), ""]
    lines.append(f"makespan {trace.makespan:g}, bubble {trace.bubble_rate:.2%}")
    lines.append(f"largest span of a rank {trace.span:g}, bubble {trace.span_bubble_rate:.2%}")
    lines.append("")
    lines.append("rank    busy  before first   waiting    at end  peak microbatches")
    for rank, (busy, peak) in enumerate(zip(trace.busy, trace.peak_microbatches, strict=True)):
        idle = trace.idle(rank)
        lines.append(
            f"{rank:4d}  {busy:6.4g}  {idle.before:12.4g}  {idle.waiting:8.4g}  {idle.after:8.4g}  {peak:17.4g}"
        )
    return "\n".join(lines)


def _cost(option: str, text: str) -> float | tuple[float, ...]:
    """`"1"` -> 1.0, `"1,2"` -> (1.0, 2.0). Raises ConfigError for what is not a number."""
    from atoll.errors import ConfigError

    try:
        numbers = tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{option} is {text!r}: give a number, or one a rank separated by commas, as in 1,1.5"
        ) from None
    return numbers if len(numbers) > 1 else numbers[0]


def _write(path: Path, text: str) -> None:
    from atoll.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name a file in a folder that exists") from None
    typer.echo(f"wrote {path}", err=True)
