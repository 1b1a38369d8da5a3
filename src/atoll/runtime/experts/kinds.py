"""Which modules of a model are experts that can be divided.

They have the interface that transformers' `ExpertsInterface` defines, as `atoll.runtime.models.mixture.Experts` has:

    forward(hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k]) -> [T, H]

with parameters of all experts stacked along their first dimension: `gate_up_proj` or `up_proj`, `down_proj`, and
perhaps a bias of each. `is_transposed` says that a weight is [E, inputs, outputs] instead of [E, outputs, inputs], and
`_apply_gate` what is computed between the two products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from atoll.base.errors import PlanError
from atoll.plans.plan import Plan
from atoll.runtime.models import Block
from atoll.runtime.models.operations import is_deferrable


def is_experts(module: nn.Module) -> bool:
    """Return True for a module of stacked experts with the interface above."""
    count, down = getattr(module, "num_experts", None), getattr(module, "down_proj", None)
    own = dict(module.named_parameters(recurse=False))
    return (
        isinstance(count, int)
        and isinstance(down, nn.Parameter)
        and hasattr(module, "is_transposed")
        and all(parameter.shape[0] == count for parameter in own.values())
        and {weight_of(module), "down_proj"} <= set(own)
        and set(own) <= {weight_of(module), "down_proj", f"{weight_of(module)}_bias", "down_proj_bias"}
    )


def weight_of(module: nn.Module) -> str:
    """Return the name of the weight of the first product."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def deferred_in(module: nn.Module) -> tuple[str, ...]:
    """Return the module's own parameters whose gradients wait for W in a split backward."""
    if is_deferrable(module):
        return ("weight",)
    names = (weight_of(module), "down_proj") if is_experts(module) else ()
    return tuple(name for name in names if module.get_parameter(name).requires_grad)


def experts_in(block: Block) -> Iterator[tuple[str, Any]]:
    """Yield the experts of a block, by qualified name."""
    yield from ((name, module) for name, module in block.named_modules() if is_experts(module))


def check_division(blocks: Iterator[Block] | tuple[Block, ...], plan: Plan) -> None:
    """Raise PlanError if the ranks cannot divide the experts of a model, or it has none to lay out."""
    found = [(name, module) for block in blocks for name, module in experts_in(block)]
    expert, tensor = plan.mesh.expert, plan.mesh.tensor
    if not found and expert > 1:
        raise PlanError(
            f"expert = {expert} ranks divide the experts of a mixture, and the model has none that can be divided: "
            "stacked parameters with the interface of transformers' experts. Use expert = 1"
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
