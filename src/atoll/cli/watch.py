"""`atoll watch CONFIG`: the islands of a federation, while they train."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.arguments import AsJson, ConfigFile, Overrides

if TYPE_CHECKING:
    from atoll.training.report.federation import FederationState
    from atoll.training.watch import FederationReader

REFRESH_SECONDS = 2.0
"""Seconds between two looks at a federation."""


def watch_command(
    config: ConfigFile,
    overrides: Overrides = None,
    once: Annotated[bool, typer.Option("--once", help="Print the state once, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the federation of CONFIG while it trains: the round that is to be decided, each island, and the last rounds.

    Every two seconds the notice of each island in federation.islands is read, with the secret of federation.secret,
    until Ctrl-C. Nothing is written, and training is not disturbed. The config of any island will do.

    An island trains, is joining or leaving, is silent (its notice has not changed for federation.silent seconds, which
    takes more than one look), is unreachable, or is refused: it has another secret, trains something else, or what it
    shows is no notice. Anchors are after a round; an island is behind by the decided rounds that its anchors miss.
    Samples left are those that it may read before the next round grants more.

    With --once or --json the exit code is 1 if no island answers.

    Keys of the JSON object: round, that is to be decided, null if no island answers; fragment, that it sets; fragments,
    of the model; averaged, rounds so far that averaged; quorum; members and contributed, islands; islands, with island,
    address, state, problem, round, anchors, behind, contributed, samples and tokens; records, the last ones, with
    round, fragment, counted (tokens by island), tokens, members and restored.
    """
    from atoll.base.errors import ConfigError
    from atoll.training.config import load
    from atoll.training.watch import FederationReader

    if config.is_dir():
        raise ConfigError(
            f"{config} is a folder: follow a run with `atoll report {config} --live`, and give `atoll watch` the "
            f"config of its federation, such as {config / 'config.toml'}"
        )
    reader = FederationReader(load(config, tuple(overrides or ())), config)
    if not once and not as_json:
        _follow(reader)
        return
    state = reader.state()
    typer.echo(json.dumps(state.to_json()) if as_json else _text(state))
    if not state.answering:
        raise typer.Exit(1)


def _follow(reader: FederationReader) -> None:
    """Print the state every two seconds until Ctrl-C, on a terminal in place of the one before."""
    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
    try:
        while True:
            begin = time.monotonic()
            typer.echo(f"{clear}{time.strftime('%H:%M:%S')}  {_text(reader.state())}{'' if clear else chr(10)}")
            time.sleep(max(0.0, REFRESH_SECONDS - (time.monotonic() - begin)))
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)


def _text(state: FederationState) -> str:
    from atoll.training.report.federation import describe_federation

    return "\n".join(describe_federation(state))
