"""Clusters of several islands: what `atoll plan`, `predict` and `explain` print for all of them, or for one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from atoll.prediction.cost import Archipelago
    from atoll.prediction.cost.federation import FederatedPrediction
    from atoll.training.config import Config

Island = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Of a cluster file with islands: the one to take; all of them if not given."),
]


def archipelago_of(config: Config) -> Archipelago | None:
    """Return the islands of run.cluster; None if it is one cluster, or not set."""
    from atoll.prediction.cost import Archipelago, read_hardware

    found = None if config.run.cluster is None else read_hardware(config.run.cluster)
    return found if isinstance(found, Archipelago) else None


def refuse_island(island: str | None) -> None:
    """Raise ConfigError if an island is named, and the cluster has none."""
    from atoll.base.errors import ConfigError

    if island is not None:
        raise ConfigError(f"--island {island}: the cluster describes no islands; name a file with [[island]] tables")


def report_islands(found: FederatedPrediction, *, as_json: bool, explains: bool = False) -> None:
    """Print the prediction of all islands. explains: with other settings of outer steps."""
    from atoll.prediction.explain.islands import describe_islands, describe_outer_alternatives, islands_summary

    if as_json:
        _echo_json(islands_summary(found, explains=explains))
        return
    lines = [*describe_islands(found)]  # print nothing if the config is refused
    if explains:
        lines += ["", *describe_outer_alternatives(found)]
    typer.echo("\n".join(lines))


def plan_all(
    config: Config, every: Archipelago, *, path: Path, sets: Sequence[str], output: Path | None, as_json: bool
) -> None:
    """Print plans of all islands, and write the config of each beside `output`, with the island's name.

    path, sets: of the config, and its overrides.
    """
    from atoll.prediction.explain.islands import describe_islands, islands_summary
    from atoll.prediction.planner import choices, settings
    from atoll.prediction.planner.answer import MAIN
    from atoll.training.config import load
    from atoll.training.setup.islands import island_overrides, plan_islands

    found = plan_islands(config, every)
    overrides = {name: island_overrides(config, name, each) for name, each in found.choices.items()}
    if output is not None:
        for name, given in overrides.items():
            file = output.with_name(f"{output.stem}.{name}{output.suffix}")
            file.write_text(load(path, [*sets, *given]).dump(), encoding="utf-8")
            typer.echo(f"note: wrote {file}", err=True)
    if config.federation is None:
        typer.echo("note: the config has no [federation] yet, which an island needs to train with others", err=True)
    if as_json:
        plans = {
            name: {
                "plan": choices(each.answer.best),
                "settings": settings(each.answer.best),
                "set": list(overrides[name]),
            }
            for name, each in found.choices.items()
        }
        _echo_json({**islands_summary(found.federated), "plans": plans})
        return
    lines = [*describe_islands(found.federated)]
    for name, each in found.choices.items():
        own = choices(each.answer.best)
        plan = ", ".join(f"{choice} {own[choice]}" for choice in MAIN)
        lines += ["", f"island {name}: {plan}", *(f"  --set {quote(given)}" for given in overrides[name])]
    typer.echo("\n".join(lines))


def _echo_json(found: object) -> None:
    import json

    typer.echo(json.dumps(found))
