"""A model as the reference sees it: its parameters by name, and its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router has decided. index: [T, k]; scores, logits: [T, E]; bias: [E], added when it chooses, or None."""

    index: Tensor
    scores: Tensor
    logits: Tensor
    bias: Tensor | None


class Recipe(Protocol):
    """The job of a test: a model and its batches.

    `nn.Sequential` and models of transformers need no more. Others may have

        loss(outputs, batch)      a sum over what counts, in plain torch, or a pair of it and its count; without it,
                                  token cross-entropy of logits
        engine_loss               the `loss` argument of `Engine`; without it, the adapter has one
        initialise(name, module)  sets the module's own parameters with torch's default generator, which is seeded;
                                  without it the model starts as `build` returns it, and the engine gets those values
        blocks                    names of the blocks in the order of execution, for a model that draws random numbers
                                  or is trained with Muon
        routing(module, output)   what a router has decided: a `Routing`; None for every other module
    """

    def build(self) -> nn.Module:
        """Return the model, on torch's current device. Its forward takes the batch without labels, by keyword; that of
        an `nn.Sequential` takes `input_ids`."""
        ...

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        """Return a step's samples: tensors, or mappings of tensors, by name."""
        ...


def base_of(model: nn.Module) -> nn.Module:
    """Return the model itself, without the wrapper of the `peft` package."""
    get_base: Any = getattr(model, "get_base_model", None)
    base: nn.Module = model if get_base is None else get_base()
    return base


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the model's parameters, a shared one by its first name."""
    later = tied(model)
    named = base_of(model).named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if name not in later}


def tied(model: nn.Module) -> dict[str, str]:
    """Return each later name of a shared parameter with its first one, as declared by a transformers model."""
    base = base_of(model)
    said: Mapping[str, str] = getattr(base, "all_tied_weights_keys", {})
    firsts: dict[nn.Parameter, str] = {}
    named = dict(base.named_parameters(remove_duplicate=False))
    for name in sorted(named, key=lambda name: name in said):
        firsts.setdefault(named[name], name)
    return {name: firsts[parameter] for name, parameter in named.items() if firsts[parameter] != name}


def blocks_of_family(model: nn.Module) -> list[nn.Module]:
    """Return modules with parameters beside the lists of layers, and the layers; one inside another is not a block."""
    around, lists = around_layers(model), _layers_of_family(model)
    inside = {module for layers in lists for layer in layers for module in layer.modules()}
    inside -= {layer for layers in lists for layer in layers}
    found = [m for m in model.modules() if m not in around and m not in inside and any(True for _ in m.parameters())]
    nested = {inner for module in found for inner in module.modules() if inner is not module}
    return [module for module in found if module not in nested] if lists else []


def around_layers(model: nn.Module) -> list[nn.Module]:
    """Return modules of a family's model that contain layers."""
    lists = _layers_of_family(model)
    return [
        module for module in model.modules() if any(each is layers for each in module.modules() for layers in lists)
    ]


def _layers_of_family(model: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of layers: as long as the configuration requires, and two if an encoder has a decoder."""
    if not hasattr(model, "_init_weights"):
        return []
    config: Any = model.config
    configs = [config, config.get_text_config(), getattr(config, "vision_config", config)]
    keys = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
    counts = {getattr(each, key, None) for each in configs for key in keys}
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) in counts]
    inner = {id(module) for each in lists for layer in each for module in layer.modules()}
    return [each for each in lists if id(each) not in inner][: 2 if config.is_encoder_decoder else 1]
