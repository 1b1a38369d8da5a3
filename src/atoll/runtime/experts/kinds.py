"""Which modules of a model are experts that can be divided, and what they compute.

Most have the interface that transformers' `ExpertsInterface` defines, as `atoll.runtime.models.mixture.Experts` has:

    forward(hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k]) -> [T, H]

with parameters of all experts stacked along their first dimension: `gate_up_proj` or `up_proj`, `down_proj`, and
perhaps a bias of each. `is_transposed` says that a weight is [E, inputs, outputs] instead of [E, outputs, inputs], and
`_apply_gate` what is computed between the two products. A family with another interface is a row of `_OTHERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from atoll.base.errors import PlanError
from atoll.plans.plan import Plan
from atoll.runtime.models import Block
from atoll.runtime.models.operations import has_experts, is_deferrable


@dataclass(frozen=True, slots=True)
class Kind:
    """The products that a module of stacked experts computes.

    first: the weight of the first product; that of the second is `down_proj`.  between: (module, first product) -> rows
    of the second.  takes_all: forward takes rows of every token for every expert, [E T, H], already multiplied by the
    router's scores, which are zero where a token does not go; without biases such rows have zero outputs and gradients.
    """

    first: str
    is_transposed: bool
    between: Callable[[Any, Tensor], Tensor]
    takes_all: bool = False


_OTHERS: Mapping[str, Kind] = MappingProxyType(
    {
        "Llama4TextExperts": Kind(
            "gate_up_proj", is_transposed=True, between=lambda module, up: _gated(module, up), takes_all=True
        )
    }
)
"""By the name of the class."""


def kind_of(module: nn.Module) -> Kind | None:
    """Return what a module of stacked experts computes; None for any other module."""
    if not has_experts(module):
        return None
    found = _OTHERS.get(type(module).__name__)
    if found is None and hasattr(module, "is_transposed"):
        if getattr(module, "has_gate", True):
            found = Kind("gate_up_proj", bool(module.is_transposed), lambda module, up: module._apply_gate(up))
        else:
            found = Kind("up_proj", bool(module.is_transposed), lambda module, up: module.act_fn(up))
    own = dict(module.named_parameters(recurse=False))
    is_known = (
        found is not None
        and all(parameter.shape[0] == module.num_experts for parameter in own.values())
        and {found.first, "down_proj"} <= set(own)
        and set(own) <= {found.first, "down_proj", f"{found.first}_bias", "down_proj_bias"}
    )
    return found if is_known else None


def _gated(module: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    inner: Tensor = up * module.act_fn(gate)
    return inner


def deferred_in(module: nn.Module) -> tuple[str, ...]:
    """Return the module's own parameters whose gradients wait for W in a split backward."""
    if is_deferrable(module):
        return ("weight",)
    kind = kind_of(module)
    names = () if kind is None else (kind.first, "down_proj")
    return tuple(name for name in names if module.get_parameter(name).requires_grad)


def experts_in(block: Block) -> Iterator[tuple[str, Any]]:
    """Yield the experts of a block, by qualified name."""
    yield from ((name, module) for name, module in block.named_modules() if kind_of(module) is not None)


def stacked_in(blocks: Iterable[Block]) -> Mapping[str, nn.Parameter]:
    """Return the parameters of all experts of some blocks, by qualified name."""
    return {
        f"{name}.{key}": parameter
        for block in blocks
        for name, module in experts_in(block)
        for key, parameter in module.named_parameters(recurse=False)
    }


def check_division(blocks: Sequence[Block], plan: Plan) -> None:
    """Raise PlanError if the ranks cannot divide the experts of a model, or it has none to lay out."""
    found = [(name, module) for block in blocks for name, module in experts_in(block)]
    expert, tensor = plan.mesh.expert, plan.mesh.tensor
    if not found and expert > 1:
        named = (pair for block in blocks for pair in block.named_modules())
        others = (
            f"{name} is a {type(module).__name__}. " for name, module in named if "Experts" in type(module).__name__
        )
        raise PlanError(
            f"expert = {expert} ranks divide the experts of a mixture, and the model has none that can be divided: "
            f"stacked parameters with the interface of transformers' experts. {next(others, '')}Use expert = 1"
        )
    if not found and plan.expert_layout is not None:
        raise PlanError(
            f"expert_layout = {plan.expert_layout.name} is of the experts of a mixture, and the model has none that "
            "can be a unit of their own: stacked parameters with the interface of transformers' experts. Leave it out"
        )
    for name, module in found:
        if module.num_experts % (expert * tensor):
            ranks = f"expert x tensor = {expert} x {tensor}" if tensor > 1 else f"expert = {expert}"
            raise PlanError(
                f"{name} has {module.num_experts} experts, which {ranks} ranks cannot divide evenly; use a divisor of "
                f"{module.num_experts}"
            )
