"""`atoll convert FILE`: convert another system's config to one of Atoll."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.base.errors import ConfigError

if TYPE_CHECKING:
    from atoll.training.settings.convert import Conversion


def convert_command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="DeepSpeed's JSON, Accelerate's YAML or torchtitan's TOML.", show_default=False
        ),
    ],
    out: Annotated[Path | None, typer.Option("-o", help="The file to write.", show_default=False)] = None,
) -> None:
    """Convert a config of DeepSpeed, Accelerate or torchtitan to a config of Atoll.

    The config is printed, or written to the file of -o, which must not exist. What the file leaves out has the default
    of its own system. Each such default, each setting without an equivalent, and each key that the file does not
    decide is printed to stderr, one a line, and written as a comment at the end of the config.
    """
    from atoll.base.toml import to_toml
    from atoll.training.settings.convert import VERSIONS

    found = converted(path)
    told = {
        "not carried over": found.left,
        f"default of {VERSIONS[found.system]}": list(found.filled.values()),
        "not in the file": [f"{key}: {why}" for key, why in found.open.items()],
    }
    text = f"# From {path.name}, of {found.system}.\n\n{to_toml(found.tables)}"
    for title, lines in told.items():
        if lines:
            text += "\n".join([f"\n# {title[0].upper()}{title[1:]}:", *(f"# {line}" for line in lines)]) + "\n"
        for line in lines:
            typer.echo(f"{title}: {line}", err=True)
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{out} exists; name another file") from None


def converted(path: Path) -> Conversion:
    """Return the config converted from a file of a known system. Raises ConfigError for other files, and if the values
    do not fit together."""
    from atoll.training.config import from_dict
    from atoll.training.settings.convert import convert

    found = convert(_document(path))
    from_dict(found.tables)
    return found


def _document(path: Path) -> dict[str, Any]:
    """Read a config file. Raises ConfigError if it cannot be read."""
    from atoll.base.documents import LARGEST_TOML, parse_yaml, read_json, read_text, read_toml

    try:
        match path.suffix.lower():
            case ".json":
                found = read_json(path, limit=LARGEST_TOML)
            case ".toml":
                found = read_toml(path)
            case ".yaml" | ".yml":
                found = parse_yaml(read_text(path, limit=LARGEST_TOML))
            case _:
                raise ConfigError(f"{path}: supported are .json (DeepSpeed), .yaml (Accelerate) and .toml (torchtitan)")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ImportError as error:
        raise ConfigError(f'{path}: YAML needs the package PyYAML; pip install "atoll[hf]"') from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: a {type(found).__name__}, not a table of settings")
    return found
