"""`atoll show program CONFIG`: print the instructions that a rank executes in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.arguments import AsJson, ConfigFile, Overrides

if TYPE_CHECKING:
    from atoll.plans.plan import Plan
    from atoll.runtime.assemble.describe import Described
    from atoll.training.config import Config


def program_command(
    config: ConfigFile,
    overrides: Overrides = None,
    rank: Annotated[int, typer.Option(help="Pipeline rank.")] = 0,
    microbatch: Annotated[int | None, typer.Option(help="Print only the instructions of this microbatch.")] = None,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="The program of an evaluation.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the program of a pipeline rank in columns by lane, with the bytes of gathered parameters and gradients.

    The rank is built without memory and without values, with the code that a run uses; its data-parallel and
    tensor-parallel ranks execute the same program. Nothing runs.

    Keys of the JSON object: rank; units, each with name, blocks, whole_bytes, ahead_bytes and gradient_bytes by phase;
    blocks, their names by number; peak_bytes, the most parameters, staged parameters and gradients at once;
    instructions, each with do, stage, microbatch, of (a block or a unit, or null), phase, lane, and the bytes held
    after it; outer, the work of outer steps in an interval, each with step (counted from the interval's beginning), way
    ("leaves" or "arrives"), fragment, units, and the bytes that a rank sends.
    """
    from atoll.training.setup.choosing import load_chosen

    loaded, _ = load_chosen(config, overrides or ())
    plan = loaded.to_plan()
    found = _described(loaded, plan, rank, training=not evaluation)
    turns = [] if evaluation else outer_turns(found, plan)
    if svg is not None:
        from atoll.program.draw import draw_program

        what = "an evaluation" if evaluation else "a step"
        svg.write_text(draw_program(found.program, title=f"{config.name}: {what} of rank {rank}"), encoding="utf-8")
    if as_json:
        import json

        typer.echo(json.dumps({**_summary(found, rank), "outer": turns}))
        return
    for line in [*_describe(found, microbatch=microbatch), *_outer_lines(turns, plan)]:
        typer.echo(line)


def outer_turns(found: Described, plan: Plan) -> list[dict[str, Any]]:
    """Return the outer work of a rank in an interval, once the first fragments have been applied."""
    from atoll.plans.outer import OuterAction
    from atoll.prediction.cost.outer import outer_message_bytes

    outer, turns = plan.outer, []
    if outer is None:
        return []
    for step, each in outer.interval(found.count):
        for way, fragment in each:
            units = [unit for unit in found.outgoing if outer.fragment_of(unit, found.count) == fragment]
            parts = [numel for unit in units for numel in found.outgoing[unit]] if way is OuterAction.LEAVES else []
            sent = sum(outer_message_bytes(plan, numel) for numel in parts)
            turns.append({"step": step, "way": way.value, "fragment": fragment, "units": units, "bytes": sent})
    return turns


def _outer_lines(turns: Sequence[Mapping[str, Any]], plan: Plan) -> list[str]:
    """Describe the outer work, a line for each fragment."""
    from atoll.base.units import format_bytes

    lines = ["", f"outer steps: {plan.outer}", "after step"] if turns else []
    for turn in turns:
        units = ", ".join(map(str, turn["units"])) or "none of this rank"
        sends = (
            f": {format_bytes(turn['bytes'])} between islands, overlapped with the next steps" if turn["bytes"] else ""
        )
        lines.append(f"{turn['step']:11}  fragment {turn['fragment']} {turn['way']}, units {units}{sends}")
    return lines


def _described(config: Config, plan: Plan, rank: int, *, training: bool) -> Described:
    from atoll.base.errors import UserError
    from atoll.runtime.assemble.describe import describe_rank
    from atoll.training.setup.build import build_as_stored
    from atoll.training.setup.samples import prepare_corpus, vocabulary_of

    if not 0 <= rank < plan.mesh.pipeline:
        raise UserError(f"--rank {rank}: the pipeline has ranks 0 to {plan.mesh.pipeline - 1}")
    corpus = prepare_corpus(config, say=lambda line: typer.echo(line, err=True))
    vocabulary = vocabulary_of(config, corpus)
    in_place = config.parallel.device == "cpu" or not _has_gpus(config)
    model, _ = build_as_stored(config, vocabulary)
    return describe_rank(lambda: model, plan, rank, reads_in_place=in_place, training=training)


def _has_gpus(config: Config) -> bool:
    """Return True if this machine has a GPU for each rank. With fewer, `atoll train` runs on CPUs."""
    import torch

    return torch.cuda.is_available() and torch.cuda.device_count() >= config.parallel.ranks


def _describe(found: Described, *, microbatch: int | None = None) -> list[str]:
    """Yield the units, the listing, and the peak of gathered parameters and gradients."""
    from atoll.base.units import format_bytes
    from atoll.program.draw import listing

    lines = ["unit  blocks     whole  name"]
    for index, unit in sorted(found.program.shape.units.items()):
        whole = format_bytes(unit.whole) if unit.whole else "at rest"
        blocks = ",".join(map(str, unit.blocks)) or "-"
        lines.append(f"{index:4}  {blocks:6} {whole:>9}  {found.units[index]}")
    peaks = found.program.peaks
    lines += ["", *listing(found.program, microbatch=microbatch), ""]
    lines.append(
        f"at most {format_bytes(peaks.parameters + peaks.staged)} of whole parameters and "
        f"{format_bytes(peaks.gradients)} of gradients that are not reduced yet"
    )
    return lines


def _summary(found: Described, rank: int) -> dict[str, Any]:
    """Return the documented JSON object."""
    from atoll.program.memory import Bytes, held_after

    program = found.program
    held = held_after(program.instructions, program.shape)
    return {
        "rank": rank,
        "units": {
            str(index): {
                "name": found.units[index],
                "blocks": list(unit.blocks),
                "whole_bytes": unit.whole,
                "ahead_bytes": unit.ahead,
                "gradient_bytes": dict(unit.flows),
            }
            for index, unit in sorted(program.shape.units.items())
        },
        "blocks": {str(index): name for index, name in sorted(found.blocks.items())},
        "peak_bytes": {name: getattr(program.peaks, name) for name in Bytes._fields},
        "instructions": [
            {
                "do": each.do.name,
                "stage": each.action.stage,
                "microbatch": each.action.microbatch,
                "of": None if each.of < 0 else each.of,
                "phase": each.phase,
                "lane": each.do.lane.value,
                "held": bytes_._asdict(),
            }
            for each, bytes_ in zip(program.instructions, held, strict=True)
        ],
    }
