"""`atoll import` and `atoll export`: convert between Hugging Face folders and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.base.units import format_bytes

if TYPE_CHECKING:
    from atoll.training.interchange import Moved

_AsJson = Annotated[bool, typer.Option("--json", help="Print what was written as one JSON object.")]


def import_command(
    source: Annotated[Path, typer.Argument(help="A folder with config.json and safetensors.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The checkpoint to write.", show_default=False)],
    masked: Annotated[bool, typer.Option("--masked", help="The model predicts hidden tokens, as BERT does.")] = False,
    as_json: _AsJson = False,
) -> None:
    """Write the weights of the Hugging Face folder SOURCE as the checkpoint TARGET.

    A folder of adapters that the `peft` package has saved is written with its base model.

    `atoll train` starts from it with model.weights, and an engine loads it under any layout. Training does not need an
    import: set model.source to the folder, and each rank reads its own shards.

    Names and forms of the files, such as a tensor for each expert, are converted by the tables of `transformers`. What
    is not used, or not as the config says, is noted.

    Keys of the JSON object: folder; tensors; bytes; files; read_whole, whether the model was loaded whole; notes.
    """
    from atoll.training.interchange import import_folder

    _say(import_folder(source, target, objective="masked" if masked else "causal"), as_json=as_json)


def export_command(
    source: Annotated[Path, typer.Argument(help="A run, or a checkpoint of train or import.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the tensors, such as bfloat16; by default that of the model's config.")
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Write the checkpoint SOURCE, or the newest one of a run, as the Hugging Face folder TARGET, for
    `from_pretrained`.

    For a run with low-rank adapters, writes only the adapters and the modules trained whole beside them, in the format
    of the `peft` package.

    Tensors have the names and form in which the installed `transformers` saves the model.

    Keys of the JSON object: folder; tensors; bytes; files; read_whole, false; notes, none.
    """
    from atoll.training.interchange import export_folder

    _say(export_folder(source, target, dtype=dtype), as_json=as_json)


def _say(moved: Moved, *, as_json: bool) -> None:
    if as_json:
        found: dict[str, object] = {"folder": str(moved.folder), "tensors": moved.tensors, "bytes": moved.nbytes}
        found |= {"files": list(moved.files), "read_whole": moved.read_whole, "notes": list(moved.notes)}
        typer.echo(json.dumps(found))
        return
    for note in moved.notes:
        typer.echo(f"note: {note}", err=True)
    how = ", read whole by transformers" if moved.read_whole else ""
    typer.echo(f"{moved.folder}: {moved.tensors} tensors, {format_bytes(moved.nbytes)}{how}")
