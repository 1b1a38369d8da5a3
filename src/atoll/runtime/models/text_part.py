"""The text part of models of text and images or sound, by what transformers says about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_KINDS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
"""Classes of transformers that know which class a configuration with several parts has."""


def text_part_of(config: Any) -> Any | None:
    """Return the configuration of the text part of one with several parts; None if it is of text alone, or has a class
    for its text part that takes it as it is. Raises ValueError if transformers has no language model for the part."""
    import transformers

    text = config.get_text_config()
    causal = transformers.AutoModelForCausalLM._model_mapping
    if text is config or type(text) is type(config):
        return None
    if type(text) not in causal:
        raise ValueError(
            f"{config.model_type} has parts besides text ({', '.join(parts_besides(config))}), and transformers "
            f"{transformers.__version__} has no language model for its text part, a {text.model_type}; use a model of "
            "text alone"
        )
    if type(config) in causal and causal[type(config)] is causal[type(text)]:
        return None
    # Whether embedding and head are one parameter, and the dtype, are said of the whole model.
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    text.dtype = text.dtype or config.dtype
    return text


def parts_besides(config: Any) -> list[str]:
    """Return the names of the parts of a configuration that are not its text part."""
    text = config.get_text_config()
    return [name for name in config.sub_configs if getattr(config, name, None) not in (None, text)]


def whole_model(config: Any) -> Any | None:
    """Return the model with all parts on `meta`, or None if transformers has no class for it."""
    import transformers

    for kind in (getattr(transformers, name, None) for name in _KINDS):
        if kind is not None and type(config) in kind._model_mapping:
            with torch.device("meta"):
                return kind.from_config(config)
    return None


def whole_model_of(model: Any, folder: Path) -> Any | None:
    """Return the model of a folder's configuration if `model` is its text part, else None."""
    if not (folder / "config.json").is_file() or not hasattr(model, "get_decoder"):
        return None
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        text = text_part_of(config)
    except (OSError, ValueError):  # weights of something else are refused by their names
        return None
    return whole_model(config) if text is not None and type(text) is type(model.config) else None


def name_in_part(model: Any, whole: Any) -> Callable[[str], str | None]:
    """Return the function from the name of a tensor of the whole model to that in its text part; None in the others."""
    inside, outside = (
        [_name_in(each, module) for module in (each.get_decoder(), each.get_output_embeddings())]
        for each in (model, whole)
    )
    moved = [(f"{far}.", f"{near}.".removeprefix(".")) for far, near in zip(outside, inside, strict=True) if far]

    def name_of(name: str) -> str | None:
        return next((near + name.removeprefix(far) for far, near in moved if name.startswith(far)), None)

    return name_of


def _name_in(model: Any, module: Any) -> str:
    """Return the name of a module in a model; an empty text if it is not in it."""
    return next((name for name, each in model.named_modules() if each is module), "")
