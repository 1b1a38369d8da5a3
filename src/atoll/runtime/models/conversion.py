"""Tensors of a folder under the names of a model, and back: by the conversion tables of `transformers`."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.base.errors import PlanError
from atoll.runtime.models.safetensors_folder import read_folder
from atoll.runtime.models.text_part import name_in_part, whole_model_of
from atoll.runtime.models.unread import Computed, NotNoted, Unread

_SHOWN = 4
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def plain_name(name: str) -> str:
    """Return the name that a tensor of a `peft` model has without adapters: of a layer that has some, and of a module
    that is trained whole, or its frozen original."""
    return _WRAPPED.sub("", name)


def tensors_of(model: Any, folder: Path) -> dict[str, Unread]:
    """Return a folder's tensors by the names of a model of `transformers`, converted by its tables; those of any other
    model, and what the model does not have, by their own names.

    If the model is the text part of the folder's, the tables are those of the whole, and its other parts are left out.
    """
    whole = whole_model_of(model, Path(folder)) if hasattr(model, "base_model_prefix") else None
    if whole is None:
        return _tensors_of(model, folder)
    own, parts = name_in_part(model, whole), whole.state_dict()
    named = ((own(name) if name in parts else name, tensor) for name, tensor in _tensors_of(whole, folder).items())
    return {name: tensor for name, tensor in named if name is not None}


def _tensors_of(model: Any, folder: Path) -> dict[str, Unread]:
    stored = read_folder(Path(folder))
    found: dict[str, Unread] = dict(stored)
    if not hasattr(model, "base_model_prefix"):
        return found
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:  # not installed, or a version without tables
        return found
    table = get_model_conversion_mapping(model)
    renamings = [each for each in table if isinstance(each, WeightRenaming)]
    converters = [each for each in table if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    rename = partial(rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=known)
    groups: dict[str, _Group] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename(key, renamings, converters)
        if name not in known and key in known:
            name, pattern = rename(key, [], [])
        if name not in known:
            continue
        if pattern is None:
            found[name] = found.pop(key)
            continue
        group = groups.setdefault(name, _Group(name, by_pattern[pattern], _WithoutAdapters(model, known)))
        group.add(pattern, found.pop(key))
    for group in groups.values():
        found.update(group.converted(folder))
    return found


def saved_together(model: Any, names: Iterable[str]) -> list[list[str]]:
    """Return groups of a model's parameters and buffers, each of which `saved` takes as a whole."""
    table = _table_of_saving(model)
    groups: dict[str, list[str]] = defaultdict(list)
    if table is None:
        return [[name] for name in names]
    from transformers.core_model_loading import WeightConverter, rename_source_key

    reverse = [each.reverse_transform() for each in reversed(table)]
    converters = [each for each in reverse if isinstance(each, WeightConverter)]
    for name in names:
        groups[rename_source_key(name, [], converters)[0]].append(name)
    return list(groups.values())


def saved(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model in the names and form in which the installed `transformers` saves them."""
    if _table_of_saving(model) is None:
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    plain: Any = _WithoutAdapters(model, tensors)
    return {name: each.contiguous() for name, each in revert_weight_conversion(plain, dict(tensors)).items()}


def _table_of_saving(model: Any) -> list[Any] | None:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:
        return None
    table = get_model_conversion_mapping(model, add_legacy=False)
    return [each for each in table if not isinstance(each, PrefixChange)] or None


class _WithoutAdapters:
    """A model for a converter, which may ask for a parameter by the name that it has without adapters of `peft`."""

    def __init__(self, model: Any, known: Mapping[str, Any]) -> None:
        self._model, self._known = model, known

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, target: str) -> Any:
        """Return a parameter, as `torch.nn.Module.get_parameter` does."""
        return self._known[target] if target in self._known else self._model.get_parameter(target)


class _Group:
    """Tensors of a folder that a converter of `transformers` turns into some of a model's. name: of the first one."""

    def __init__(self, name: str, converter: Any, model: Any) -> None:
        self._name, self._converter, self._model = name, converter, model
        self._tensors: list[tuple[str, Unread]] = []

    def add(self, pattern: str, tensor: Unread) -> None:
        """Add a tensor that matches one of the converter's patterns, in the order of the names."""
        self._tensors.append((pattern, tensor))

    def converted(self, folder: Path) -> dict[str, Unread]:
        """Return the model's tensors by name, not read yet."""
        names = tuple(name for _, tensor in self._tensors for name in tensor.names)
        try:
            try:
                return self._convert(lambda tensor: tensor)
            except NotNoted:
                shapes = self._convert(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        except (RuntimeError, ValueError, IndexError) as error:
            raise PlanError(
                f"{folder}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''} do not become "
                f"{self._name}: {error}; copy the files again from one place"
            ) from error
        return {
            name: Computed(made.shape, made.dtype, names, partial(self._compute, name)) for name, made in shapes.items()
        }

    def _compute(self, name: str) -> Tensor:
        found: Tensor = self._convert(lambda tensor: tensor.whole())[name]
        return found

    def _convert(self, given: Callable[[Unread], Any]) -> dict[str, Any]:
        converter = copy.deepcopy(self._converter)
        for pattern, tensor in self._tensors:
            converter.add_tensor(self._name, tensor.names[0], pattern, given(tensor))
        made = converter.convert(self._name, model=self._model, config=self._model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}
