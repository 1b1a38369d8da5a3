"""Initial values: each module's own rule, from a generator seeded from (seed, name)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from atoll.testing.reference.model import Recipe, around_layers, base_of, blocks_of_family, tied

_Rule = Callable[[str, nn.Module], None]
"""(qualified name, module) -> None; sets the module's own parameters from torch's default generator."""


def seed_generators(value: int) -> None:
    """As torch.manual_seed, which also formats a stack trace for every kind of device that is not in use: up to 2 ms
    for each module, and for each block and microbatch."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


def start(recipe: Recipe, seed: int) -> nn.Module:
    """Return the unsplit model with its initial values, in fp32 on the CPU."""
    with torch.random.fork_rng(devices=[]):
        seed_generators(seed)
        model = recipe.build()
        rule = rule_of(recipe, model)
        if rule is not None:
            _draw(model, rule, seed)
    return model


def rule_of(recipe: Recipe, model: nn.Module) -> _Rule | None:
    """Return the initialization of this model's modules, if it is known without the adapter."""
    own: _Rule | None = getattr(recipe, "initialise", None)
    if own is not None:
        return own
    family: Any = getattr(base_of(model), "_init_weights", None)
    if family is not None:
        return lambda name, module: _start_as_family(family, module)
    return (lambda name, module: _reset(module)) if isinstance(model, nn.Sequential) else None


def _draw(model: nn.Module, rule: _Rule, seed: int) -> None:
    """Set all parameters, each module from a generator of its own, inner modules first.

    A shared parameter is drawn under each of its names and keeps the values of the first. A family's rule of a module
    that contains the layers is then run for each block, with the block's seed, and sets the parameters in this block.
    """
    base = base_of(model)
    with torch.no_grad(), _untied(base):
        for parameter in base.parameters():
            parameter.fill_(torch.nan)
        outside, blocks = around_layers(base), blocks_of_family(base)
        for name, module in reversed(list(base.named_modules())):
            if module in outside:
                continue
            seed_generators(module_seed(seed, name))
            rule(name, module)
            if any(parameter.isnan().any() for parameter in module.parameters(recurse=False)):
                seed_generators(module_seed(seed, name))
                _reset(module)
        names = {module: name for name, module in base.named_modules()}
        for block in blocks:
            with _marked(base, but=block):
                for module in reversed(outside):
                    seed_generators(module_seed(seed, names[block]))
                    rule(names[module], module)
    unset = [name for name, parameter in base.named_parameters() if parameter.isnan().any()]
    if unset:
        raise ValueError(f"the recipe's rule leaves {', '.join(unset)} without values")


@contextmanager
def _untied(model: nn.Module) -> Iterator[None]:
    """Context in which later names of shared parameters have parameters of their own. A module with two names has one
    parameter under both."""

    def owner(name: str) -> nn.Module:
        return model.get_submodule(name.rpartition(".")[0])

    def put(name: str, parameter: nn.Parameter) -> None:
        setattr(owner(name), name.rpartition(".")[2], parameter)

    apart = [name for name, first in tied(model).items() if owner(name) is not owner(first)]
    later = {name: model.get_parameter(name) for name in apart}

    for name, parameter in later.items():
        put(name, nn.Parameter(torch.empty_like(parameter)))
    yield
    for name, parameter in later.items():
        put(name, parameter)


@contextmanager
def _marked(model: nn.Module, but: nn.Module) -> Iterator[None]:
    """Context in which rules of transformers skip parameters outside a module."""
    own = {*but.parameters(), *but.buffers()}
    others: list[Any] = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor not in own]
    for tensor in others:
        tensor._is_hf_initialized = True
    yield
    for tensor in others:
        del tensor._is_hf_initialized


def module_seed(seed: int, name: str) -> int:
    """Return the upper 63 bits of the first 8 bytes of SHA-256("seed NUL name"), little-endian."""
    return int.from_bytes(hashlib.sha256(b"%d\0%b" % (seed, name.encode())).digest()[:8], "little") // 2


def _start_as_family(family: Callable[[nn.Module], None], module: nn.Module) -> None:
    """Run the rule of a transformers family, and that of low-rank adapters of `peft`."""
    family(module)
    restart: Any = getattr(module, "reset_lora_parameters", None)
    adapters: Any = module.active_adapters if restart is not None else ()
    for adapter in adapters:
        restart(adapter, True)


def _reset(module: nn.Module) -> None:
    """Initialize a module as torch does; a `MultiheadAttention` has another name for it."""
    name = "_reset_parameters" if isinstance(module, nn.MultiheadAttention) else "reset_parameters"
    reset: Any = getattr(module, name, None)
    if reset is not None:
        reset()
