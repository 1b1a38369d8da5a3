"""Kinds of model.source. Imports no torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from atoll.base.errors import ConfigError
from atoll.training.config import Config

FAMILY = "transformers:"
"""Prefix of a model.source that names a family."""


def package(name: str) -> Any:
    """Import a package of an extra. Raises ConfigError if it is not installed."""
    try:
        return __import__(name)
    except ImportError as error:
        raise ConfigError(f'this needs the package {name}: pip install "atoll[hf]"') from error


def check_source(config: Config) -> None:
    """Raise ConfigError for a source that does not exist, before a corpus is prepared for it.

    Packages are imported only for a family that is not found among their files.
    """
    source = config.model.source
    if config.model.is_builtin:
        return
    if not source.startswith(FAMILY):
        check_folder(source)
        _check_tokenizer(config)
        return
    installed = importlib.util.find_spec("transformers")
    family = source.removeprefix(FAMILY).replace("-", "_")
    folders = [] if installed is None else installed.submodule_search_locations or []
    if not any((Path(folder) / "models" / family / f"configuration_{family}.py").is_file() for folder in folders):
        from atoll.training.models.pretrained import hugging_face_config

        hugging_face_config(config)


def check_folder(source: str) -> None:
    """Raise ConfigError for a folder without a model."""
    folder = Path(source)
    if (folder / "config.json").is_file():
        return
    what = "has no config.json" if folder.is_dir() else "is no folder"
    raise ConfigError(
        f'model.source = {source!r} {what}, and Atoll downloads nothing: use "builtin", "{FAMILY}" and a family such '
        "as llama, or the folder of a model with its config.json"
    )


def _check_tokenizer(config: Config) -> None:
    """Raise ConfigError if weights of a folder would be used with a tokenizer trained on the corpus."""
    own, name = Path(config.model.source) / "tokenizer.json", config.data.tokenizer
    is_made = name == "bytes" or name.startswith("bpe-")
    if not is_made or not own.is_file() or config.model.weights is not None:
        return
    from atoll.runtime.models.safetensors_folder import has_weights

    if has_weights(own.parent):
        raise ConfigError(
            f"data.tokenizer = {name!r} with the weights of model.source = {config.model.source!r}, which were trained "
            f"with {own}: its ids mean other text; leave data.tokenizer out to use the model's own, or begin with "
            'model.weights = "initial"'
        )
