"""`atoll import` and `atoll export`: Hugging Face folders to checkpoints, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.units import format_bytes

if TYPE_CHECKING:
    from atoll.training.interchange import Moved

AsJson = Annotated[bool, typer.Option("--json", help="Print what was written as one JSON object.")]


def import_command(
    source: Annotated[Path, typer.Argument(help="A folder with config.json and safetensors.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The checkpoint to write.", show_default=False)],
    masked: Annotated[bool, typer.Option("--masked", help="The model predicts hidden tokens, as BERT does.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the weights of the Hugging Face folder SOURCE as the checkpoint TARGET.

    `atoll train` starts from it with model.weights, and an engine loads it on any layout. To be trained, a folder needs
    no import: model.source names it, and each rank reads what it keeps.

    Keys of the JSON object: folder; tensors; bytes; files; read_whole, whether the model was loaded whole.
    """
    from atoll.training.interchange import import_folder

    _say(import_folder(source, target, objective="masked" if masked else "causal"), as_json=as_json)


def export_command(
    source: Annotated[Path, typer.Argument(help="A checkpoint of atoll train or import.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    dtype: Annotated[
        str | None, typer.Option(help="Of the tensors, such as bfloat16; if not given, what the model's config says.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the checkpoint SOURCE as the Hugging Face folder TARGET, for `from_pretrained`.

    Of a run with low-rank adapters these alone, as the `peft` package writes them.

    Keys of the JSON object: folder; tensors; bytes; files; read_whole, false.
    """
    from atoll.training.interchange import export_folder

    _say(export_folder(source, target, dtype=dtype), as_json=as_json)


def _say(moved: Moved, *, as_json: bool) -> None:
    if as_json:
        found = {"folder": str(moved.folder), "tensors": moved.tensors, "bytes": moved.nbytes}
        typer.echo(json.dumps({**found, "files": list(moved.files), "read_whole": moved.read_whole}))
        return
    how = ", read whole by transformers" if moved.read_whole else ""
    typer.echo(f"{moved.folder}: {moved.tensors} tensors, {format_bytes(moved.nbytes)}{how}")
