"""Tied parameters of a model of `transformers`, and those that a folder stores with values of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from atoll.runtime.models.conversion import plain_name
from atoll.runtime.models.unread import Unread

_COMPARED = 1 << 24
"""Elements that are compared at once."""


def untie(model: Any, found: Mapping[str, Unread]) -> list[str]:
    """Untie parameters of a model on `meta` for which a folder has different values, as `from_pretrained` does; the
    config then says so too. Return a sentence for each.

    found: the folder's tensors by names of the model, see `tensors_of`.
    """
    notes = []
    for target, source in tied_names(model).items():
        one, two = found.get(source), found.get(target)
        if one is None or two is None or are_equal(one, two):
            continue
        untie_parameter(model, target)
        notes.append(
            f"the folder's config ties {target} to {source}, and the folder has both with different values: they are "
            "not tied"
        )
    return notes


def untie_parameter(model: Any, target: str) -> None:
    """Give a model on `meta` a parameter of its own under a name that is tied to another one; its config says so."""
    above, _, leaf = target.rpartition(".")
    for name, module in model.named_modules():
        parameter = dict(module.named_parameters(recurse=False)).get(leaf)
        if plain_name(f"{name}.") == f"{above}." and parameter is not None:
            setattr(module, leaf, nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad))
    for config in {id(each): each for each in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    getattr(model, "all_tied_weights_keys", {}).pop(target, None)


def tied_names(model: Any) -> dict[str, str]:
    """Return the names of a model's tied parameters, each with that of its source, as its class and config say."""
    expanded = getattr(model, "get_expanded_tied_weights_keys", None)
    return {} if expanded is None else dict(expanded(all_submodels=True))


def untied_head(model: Any, names: Sequence[str], found: Mapping[str, Unread]) -> list[str]:
    """Return the parameters of a language model's head if a folder has all but it. names: parameters that are not tied.

    The folder is of a model that ties its head, and `transformers` initializes it as well.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not found:
        return []
    own = {id(parameter) for parameter in head.parameters()}
    mine = [name for name, parameter in model.named_parameters() if id(parameter) in own and name in names]
    lacking = [name for name in mine if plain_name(name) not in found]
    others = [name for name in names if name not in mine and "lora_" not in name]
    return lacking if all(plain_name(name) in found for name in others) else []


def are_equal(one: Unread, two: Unread) -> bool:
    """Return True if two tensors of a folder have the same values, read a few rows at a time."""
    if one.names == two.names:
        return True
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    rows = max(1, _COMPARED // max(1, one.shape[1:].numel())) if one.shape else 1
    for at in range(0, one.shape[0] if one.shape else 1, rows):
        offsets = (at, *(0 for _ in one.shape[1:])) if one.shape else ()
        sizes = (min(rows, one.shape[0] - at), *one.shape[1:]) if one.shape else ()
        if not torch.equal(one.box(offsets, sizes), two.box(offsets, sizes)):
            return False
    return True


def share_position_bias(model: nn.Module) -> None:
    """Give each layer the bias table that in T5 and similar models only the first one has. The first layer computes the
    bias and passes it to the others; if a stage begins with another layer, that one computes it. The table is then a
    shared parameter of all layers."""
    for layers in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
        if len({type(layer) for layer in layers}) != 1:
            continue
        tables = [name for name, each in layers[0].named_modules() if _has_table(each)]
        for name, layer in product(tables, layers[1:]):
            attention: Any = layer.get_submodule(name)
            if not _has_table(attention):
                attention.has_relative_attention_bias = True
                attention.relative_attention_bias = layers[0].get_submodule(name).relative_attention_bias


def _has_table(attention: nn.Module) -> bool:
    return bool(getattr(attention, "has_relative_attention_bias", False))
