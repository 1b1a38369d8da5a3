"""Initial weights that depend on the seed and on names, and on nothing else.

Each module draws from a generator of its own, seeded from (seed, qualified name), in fp32 on the CPU; the values are
then copied to where and what the parameter is. So a stage equals the whole model bit for bit, whichever blocks, layout
or device it has, and a bf16 or fp64 model starts from the values of the fp32 one.

[Note: shared parameters start by their first use]
A parameter with several names takes the values of its first name in the model's order, also on a stage that does not
own the block of that first name. Moving a model off the meta device may break the identity by which sharing is seen:
take `shared_parameters(adapter)` before, and pass it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn

from atoll.errors import PlanError
from atoll.models.adapter import Adapter, Block


def name_seed(seed: int, name: str) -> int:
    """A 63-bit seed from (seed, name), the same on every machine, process and Python version."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def shared_parameters(adapter: Adapter) -> dict[str, str]:
    """Each later name of a shared parameter -> the name of its first use, in the model's order."""
    first_names: dict[int, str] = {}
    later: dict[str, str] = {}
    for block in adapter.blocks():
        for name, parameter in block.named_parameters():
            first = first_names.setdefault(id(parameter), name)
            if first != name:
                later[name] = first
    return later


def initialise_block(
    adapter: Adapter,
    block: Block,
    seed: int,
    *,
    shared: Mapping[str, str] | None = None,
    known: Container[str] = (),
) -> None:
    """Set every parameter of a block, children before parents, from (seed, qualified name).

    The block's parameters may be of any dtype and on any device; on meta they stay without values. A module may set
    those of modules inside it too.
    shared: later name -> first name of shared parameters, where the model's identities no longer show it.
    known: first names of parameters whose values come from elsewhere; they are left alone.
    """
    names = shared_parameters(adapter) if shared is None else shared
    left = {name for name, _ in block.named_parameters() if names.get(name, name) not in known}
    values = _block_values(adapter, block, seed, left)
    for name, parameter in block.named_parameters():
        first = names.get(name, name)
        if name not in left:
            continue
        value = values[first] if first in values else _first_use(adapter, seed, first)
        with torch.no_grad():
            parameter.copy_(value)


def initialise_model(adapter: Adapter, seed: int) -> None:
    """Set every parameter of the whole model."""
    shared = shared_parameters(adapter)
    for block in adapter.blocks():
        initialise_block(adapter, block, seed, shared=shared)


def initial_values(adapter: Adapter, module: nn.Module, seed: int, *, name: str) -> dict[str, Tensor]:
    """The initial values of a module's own parameters, fp32 on the CPU, by their names in the module.

    Buffers are set in place. The module's parameters are untouched, so they may be on meta, sharded or of any dtype.
    """
    with _drawn_in_fp32({name: module}) as drafts, torch.no_grad():
        _draw(adapter, module, seed, name)
        _check_set({name: module}, drafts)
    return {key.rpartition(".")[2]: draft.detach() for key, draft in drafts.items()}


def _draw(adapter: Adapter, module: nn.Module, seed: int, name: str) -> None:
    generator = torch.Generator().manual_seed(name_seed(seed, name))
    try:
        adapter.initialise(module, generator)
    except PlanError as error:
        raise PlanError(f"module {name!r} cannot be initialised: {error}") from error


def _check_set(modules: Mapping[str, nn.Module], drafts: Mapping[str, nn.Parameter]) -> None:
    for name, module in modules.items():
        own = {key: f"{name}.{key}" if name else key for key, _ in module.named_parameters(recurse=False)}
        unset = [key for key, full in own.items() if full in drafts and torch.isnan(drafts[full]).any()]
        if unset:
            raise PlanError(
                f"module {name!r} ({type(module).__name__}): its initialisation leaves {', '.join(unset)} without "
                "values; set every parameter of the module in reset_parameters(), or in the adapter's initialise()"
            )


def _block_values(adapter: Adapter, block: Block, seed: int, wanted: Container[str] | None = None) -> dict[str, Tensor]:
    """The values of a block's names, all or those that are `wanted`, fp32 on the CPU, as its own modules draw them.

    Buffers are set in place. What a module draws besides is drawn too and dropped: what follows is then the same.
    """

    def takes_part(name: str, module: nn.Module) -> bool:
        if wanted is None or any(True for _ in module.buffers(recurse=False)):
            return True
        return any(f"{name}.{key}" in wanted for key, _ in module.named_parameters(remove_duplicate=False))

    every = dict(block.named_modules())
    modules = {name: module for name, module in every.items() if takes_part(name, module)}
    beside = {name: module for name, module in every.items() if name not in modules}
    with _drawn_in_fp32(modules, beside) as drafts, torch.no_grad():
        for name, module in reversed(modules.items()):
            _draw(adapter, module, seed, name)
        drawn = {name: draft for name, draft in drafts.items() if wanted is None or name in wanted}
        _check_set(modules, drawn)
    return {name: draft.detach() for name, draft in drawn.items()}


def _first_use(adapter: Adapter, seed: int, name: str) -> Tensor:
    """The value of a shared parameter, as the block of its first name draws it.

    See [Note: shared parameters start by their first use].
    """
    for block in adapter.blocks():
        if any(name == known for known, _ in block.named_parameters()):
            return _block_values(adapter, block, seed)[name]
    raise PlanError(f"shared parameter {name!r} has its first use in no block of the model")


@contextmanager
def _drawn_in_fp32(
    modules: Mapping[str, nn.Module], beside: Mapping[str, nn.Module] = MappingProxyType({})
) -> Iterator[dict[str, nn.Parameter]]:
    """Put fp32 CPU drafts in the place of the modules' own parameters, and the parameters back at the end.

    Drafts, by qualified name, start as NaN, so that one which nothing sets is seen. Modules `beside` get such that
    nobody looks at: what is drawn for them, perhaps by one of `modules` that they lie in, changes nothing.
    """
    originals = [
        (name, module, key, parameter)
        for name, module in (*modules.items(), *beside.items())
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    drafts: dict[str, nn.Parameter] = {}
    try:
        for name, module, key, parameter in originals:
            draft = nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32, device="cpu"))
            if name in modules:
                drafts[f"{name}.{key}" if name else key] = draft
                draft.detach().fill_(torch.nan)
            setattr(module, key, draft)
        yield drafts
    finally:
        for _, module, key, parameter in originals:
            setattr(module, key, parameter)
