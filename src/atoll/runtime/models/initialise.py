"""Initial weights that depend only on the seed and on names.

Each module draws from a generator of its own, seeded from (seed, qualified name), in fp32 on the CPU. The values are
then copied to the parameter's device and dtype. So a stage equals the whole model bit for bit, with any blocks, layout
or device, and a bf16 or fp64 model starts from the values of the fp32 one.

[Note: shared parameters start by their first use] A parameter with several names takes the values of its first name in
the model's order, also on a stage that does not own the block of that first name. Moving a model off the meta device
may break the identity by which sharing is detected: call `shared_parameters(adapter)` before, and pass its result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn

from atoll.base.errors import PlanError
from atoll.runtime.models.adapter import Adapter, Block


def name_seed(seed: int, name: str) -> int:
    """Return a 63-bit seed from (seed, name), equal on every machine, process and Python version."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def shared_parameters(adapter: Adapter) -> dict[str, str]:
    """Return each later name of a shared parameter with the name of its first use, in the model's order."""
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

    The block's parameters may be of any dtype and on any device; on meta they stay without values. A module may also
    set those of modules inside it. shared: later name -> first name of shared parameters, if the model's identities no
    longer show it. known: first names of parameters whose values come from elsewhere; they are skipped.
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
    """Return the initial values of a module's own parameters, fp32 on the CPU, by their names in the module.

    Buffers are set in place. The module's parameters are not changed, so they may be on meta, sharded or of any dtype.
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
    """Return the values of a block's names, all or those that are `wanted`, fp32 on the CPU, as its own modules draw
    them.

    Buffers are set in place. Other values of a module are also drawn and discarded, so that later values are the same.
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
    """Return the value of a shared parameter, as drawn by the block of its first name.

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
    """Context with fp32 CPU drafts in place of the modules' own parameters, which are restored at the end.

    Drafts, by qualified name, start as NaN, so that one which is never set is noticed. Modules `beside` get drafts that
    are discarded: values drawn for them, perhaps by one of `modules` that contains them, have no effect.
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
