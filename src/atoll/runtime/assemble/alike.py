"""Ranks that build an engine are alike: the same software, plan, options and model, and equal initial values."""

from __future__ import annotations

import re
from dataclasses import fields

from torch import nn

from atoll.base.digests import digest
from atoll.plans.ir import Schedule
from atoll.plans.plan import Plan
from atoll.runtime.models import Adapter
from atoll.runtime.same import DIGEST, check_same, software
from atoll.runtime.sharding.replicas import digest_of
from atoll.runtime.transport import world_rank, world_size, world_store


def check_alike(model: nn.Module | Adapter, plan: Plan, **options: object) -> None:
    """Raise ConfigError on every rank unless all have the same software, plan, options and model, and equal initial
    values."""
    store = world_store()
    if store is None or world_size() == 1:
        return
    facts = software() | facts_of(plan)
    facts |= {f"{name} =": str(value) for name, value in options.items()}
    for part, parameters in _parts(model).items():
        outline = [(name, *each.shape, str(each.dtype), each.requires_grad, each.is_meta) for name, each in parameters]
        facts[f"the model's {part}.*"] = DIGEST + digest(repr(outline).encode())
        facts[f"the initial state of {part}.*"] = DIGEST + digest_of(each for _, each in parameters if not each.is_meta)
    check_same(
        store,
        world_rank(),
        world_size(),
        facts=facts,
        advice="build the same model by the same plan on every rank: on the meta device, where Atoll draws its values "
        "from the seed, or with the same values",
    )


def facts_of(plan: Plan) -> dict[str, str]:
    """Return what is compared of a plan."""
    return {f"plan.{each.name} =": _fact(getattr(plan, each.name)) for each in fields(plan)}


def _fact(value: object) -> str:
    """Return a comparable fact. Orders are left out: they are compared as programs, which are lowered from them."""
    if not isinstance(value, Schedule):
        return str(value)
    counts = f"{value.whole_microbatches} microbatches, {value.slices} slices"
    return f"{value.name}, {value.ranks} ranks, {value.chunks} chunks, {counts}"


def _parts(model: nn.Module | Adapter) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Return parameters grouped by layer: by name up to the first number, or by the first word."""
    found: dict[str, list[tuple[str, nn.Parameter]]] = {}
    owners = [model] if isinstance(model, nn.Module) else model.blocks()
    for name, parameter in (each for owner in owners for each in owner.named_parameters()):
        numbered = re.match(r"(.*?\.\d+)\.", name)
        found.setdefault(numbered[1] if numbered else name.partition(".")[0], []).append((name, parameter))
    return found
