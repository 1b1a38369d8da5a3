"""`atoll verify PATH`: compare stored files with their digests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.base.errors import CheckpointError, DataError
from atoll.base.units import format_bytes


def command(
    path: Annotated[
        Path, typer.Argument(help="A checkpoint, the folder of a run, or a token cache.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """Compare every byte of a checkpoint, of all checkpoints of a run, or of a token cache with the digests that were
    written with it. The exit code is 1 if anything is damaged.

    A load and a training run compare only what they read; this command reads everything, in one process. For
    checkpoints without digests, the sizes of files are checked; a token cache without digests is compared with its
    fingerprint.

    Keys of each JSON object: path; kind, checkpoint or cache; bytes, compared with digests; verified, false where there
    are no digests; identity, what the manifest says of the run; problems, a list of sentences.
    """
    found = list(_findings(path))
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found]))
    else:
        for each in found:
            typer.echo(each.describe())
    if any(each.problems for each in found):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Finding:
    """Result for one checkpoint or cache; its fields are the keys of the JSON object."""

    path: str
    kind: str
    bytes: int = 0
    verified: bool = True
    identity: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return one line, followed by one line per problem."""
        if self.problems:
            return "\n  ".join([f"{self.path}: damaged", *self.problems])
        if not self.verified:
            return f"{self.path}: saved without digests; its files are long enough, their content was not verified"
        whose = ", ".join(f"{key} {value}" for key, value in self.identity.items())
        return f"{self.path}: {format_bytes(self.bytes)} as they were written{f' ({whose})' if whose else ''}"


def _findings(path: Path) -> Iterator[Finding]:
    from atoll.runtime import checkpoint
    from atoll.training.data.store import is_cache
    from atoll.training.folder import RunFolder

    if is_cache(path):
        yield _cache(path)
        return
    several = [*checkpoint.candidates(path), *RunFolder(path).candidates()]
    if not several and not checkpoint.is_one(path):
        raise CheckpointError(
            f"{path} is not a checkpoint, a run folder with checkpoints, or a token cache; give a folder such as "
            "<run>/checkpoints/step-..."
        )
    for each in several or [path]:
        verdict = checkpoint.verify(each)
        yield Finding(
            str(each),
            "checkpoint",
            bytes=verdict.nbytes,
            verified=verdict.has_digests,
            identity=dict(verdict.identity),
            problems=verdict.problems,
        )


def _cache(path: Path) -> Finding:
    from atoll.training.data.store import verify_cache

    try:
        return Finding(str(path), "cache", bytes=verify_cache(path))
    except DataError as error:
        return Finding(str(path), "cache", problems=(str(error),))
