"""Names and forms in which tensors leave a model: as `transformers` saves it, with low-rank adapters of the `peft`
package merged into its weights, or those alone, as `peft` saves them.

[Note: merging] The product of an adapter's factors is that of `peft` (`get_delta_weight`), with gathered tensors in the
place of the module's parameters. It is added in fp32 at least, and the sum is cast: to add to a weight in bf16 what is
smaller than its last bit would leave no trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from atoll.base.errors import PlanError
from atoll.runtime.models.conversion import plain_name, saved, saved_together

PREFIX = "base_model.model."
"""Prefix that `peft` adds to the names of the base model."""
_FACTORS = ("lora_A.", "lora_B.", "lora_embedding_A.", "lora_embedding_B.")
Adapters = Literal["merged", "apart"]
"""How adapters are streamed."""


def saved_names(adapted: Any) -> dict[str, str]:
    """Return the names with which `peft` saves an adapted model, each with that in a checkpoint of Atoll."""
    from peft import get_peft_model_state_dict

    own = {name: name.removeprefix(PREFIX) for name in adapted.state_dict()}
    found: dict[str, str] = get_peft_model_state_dict(adapted, state_dict=own, save_embedding_layers=False)
    return found


class SavedForm:
    """The form of a model without adapters, of `transformers` or not."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._has_rules = hasattr(model, "base_model_prefix")

    def together(self, names: Iterable[str]) -> list[list[str]]:
        """Return groups of names, each of which `saved` takes as a whole. What is in none is not saved."""
        return saved_together(self._model, names) if self._has_rules else [[name] for name in names]

    def needed(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which `saved` takes a tensor that is saved in `dtype`."""
        return dtype

    def saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what is saved of a group. The caller casts it to the dtype in which it is saved."""
        return saved(self._model, tensors) if self._has_rules else dict(tensors)


class ApartForm(SavedForm):
    """Adapters alone, and the modules that are trained whole beside them, as `peft` saves them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._names = {own: name for name, own in saved_names(model).items()}

    def together(self, names: Iterable[str]) -> list[list[str]]:
        return [[name] for name in names if name in self._names]

    def saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self._names[name]: tensor for name, tensor in tensors.items()}


class MergedForm(SavedForm):
    """The base model, with adapters merged into its weights, and the modules that are trained whole in their place."""

    def __init__(self, model: Any) -> None:
        base = model.get_base_model()
        super().__init__(base)
        names = [name.removeprefix(PREFIX) for name in model.state_dict()]
        modules = dict(base.named_modules())
        self._products: dict[str, _Product] = {}
        self._layers: dict[str, str] = {}  # of each tensor of an adapter, the layer's name
        for name in names:
            layer, found, rest = name.partition(".lora_")
            if found:
                self._products[layer] = _product_of(layer, modules[layer], f"lora_{rest}")
                self._layers[name] = layer
        self._changed = {f"{layer}.weight" for layer in self._products}
        _check_shared(model.state_dict(keep_vars=True), self._products.keys())

    def together(self, names: Iterable[str]) -> list[list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for name in names:
            if ".original_module." not in name:  # peft trains a copy in its place
                found[self._plain(name)].append(name)
        return [[name for plain in group for name in found[plain]] for group in super().together(found)]

    def needed(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32) if self._plain(name) in self._changed else dtype

    def saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        factors: dict[str, dict[str, Tensor]] = defaultdict(dict)
        plain = {}
        for name, tensor in tensors.items():
            layer = self._layers.get(name)
            if layer is None:
                plain[self._plain(name)] = tensor
            else:
                factors[layer][name.removeprefix(f"{layer}.")] = tensor
        for layer, own in factors.items():
            name = f"{layer}.weight"
            plain[name] = plain[name] + self._products[layer].of(own)
        return super().saved(plain)

    def _plain(self, name: str) -> str:
        """Return the name in the base model of what a tensor becomes, or is added to."""
        layer = self._layers.get(name)
        return plain_name(name) if layer is None else f"{layer}.weight"


def saving_form(model: nn.Module, adapters: Adapters) -> SavedForm:
    """Return the form in which a model's tensors leave it. Raises PlanError for adapters that it does not have, or that
    cannot be merged."""
    if adapters not in ("merged", "apart"):
        raise PlanError(f"adapters = {adapters!r}: stream them 'merged' into the weights, or 'apart'")
    if hasattr(model, "peft_config"):
        return ApartForm(model) if adapters == "apart" else MergedForm(model)
    if adapters == "apart":
        raise PlanError(f"adapters = 'apart': {type(model).__name__} has no adapters of the peft package")
    return SavedForm(model)


class _Product(nn.Module):
    """The product of an adapter's factors, which is added to the weight of its layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        (self._name,) = layer.active_adapters

    def forward(self) -> Tensor:
        """Return it, of the shape of the weight."""
        product: Tensor = self.layer.get_delta_weight(self._name)
        return product

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return it with tensors in the place of the layer's parameters. tensors: by their names in the layer."""
        found: Tensor = functional_call(self, {f"layer.{name}": each for name, each in tensors.items()}, ())
        return found


def _product_of(name: str, layer: Any, part: str) -> _Product:
    """Return the product of a layer's adapter. Raises PlanError if that is not all that it adds.

    part: a tensor of the adapter, by its name in the layer.
    """
    from peft.tuners.lora.layer import ParamWrapper

    many = len(layer.active_adapters) != 1
    if many or isinstance(layer, ParamWrapper) or not part.startswith(_FACTORS) or part.endswith("bias"):
        what = "several adapters" if many else f"{part} of {type(layer).__name__}"
        raise PlanError(f"{name}: {what} cannot be merged while weights are streamed; use adapters='apart'")
    return _Product(layer)


def _check_shared(tensors: Mapping[str, Tensor], layers: Collection[str]) -> None:
    """Raise PlanError if a weight that adapters change is that of another module too: what is added is not its own."""
    names = defaultdict(list)
    for name, tensor in tensors.items():
        names[id(tensor)].append(name.removeprefix(PREFIX))
    for layer in layers:
        own = f"{layer}.base_layer.weight"
        others = [name for same in names.values() if own in same for name in same if name != own]
        if others:
            raise PlanError(f"{layer}: its weight is also {others[0]}, and adapters would change both; use 'apart'")
