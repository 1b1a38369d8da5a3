"""Experts that the ranks of a group divide, and what takes the place of their forward.

With `expert` = e and `tensor` = t a rank has E / (e t) of the E experts: the parts are in the order of the expert
ranks, and within one of the tensor-parallel ranks. Stacked parameters are DTensors over these e t ranks, split along
their first dimension, so checkpoints, edits and norms know them as they know other split parameters.

    sort       the (token, expert) pairs by expert
    dispatch   rows to the ranks that have their experts
    sort       by expert
    compute    the two products and the gate; biases
    sort back, combine
    weigh      each row by the router's weight, where its token is, and add up

Ranks of a tensor-parallel group have the same tokens. Each exchanges and computes the pairs of its own experts, and the
outputs are added up over the group, as are the gradients of hidden state and weights: no row is sent twice. With
`sequence_parallel` they have tokens of their own, and all e t ranks send each other rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from atoll.plans.plan import Plan
from atoll.runtime.experts.exchange import Exchange
from atoll.runtime.experts.grouped import GroupedWeight
from atoll.runtime.experts.kinds import check_division, experts_in, weight_of
from atoll.runtime.models import Adapter, Block
from atoll.runtime.pipeline.deferred import Collector
from atoll.runtime.sharding.tensors import Spread
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.transport import Transport

EXCHANGES = 2
"""Exchanges of a forward: dispatch and combine."""


@dataclass(frozen=True)
class Experts:
    """The experts of a model under a plan.

    mesh: the ranks that divide them; None if each has all.  tensor: the tensor-parallel ranks among these, if they have
    the same tokens.  axes: those of the mesh along which rows are exchanged.
    """

    blocks: tuple[Block, ...]
    plan: Plan
    transport: Transport
    mesh: DeviceMesh | None
    tensor: DeviceMesh | None
    axes: tuple[str, ...]
    _divisions: list[Division] = field(default_factory=list)

    @staticmethod
    def of(adapter: Adapter, plan: Plan, transport: Transport, tensor: DeviceMesh | None) -> Experts:
        """Find the experts of a model. Raises PlanError if the plan cannot divide them."""
        blocks, mesh = tuple(adapter.blocks()), plan.mesh
        check_division(blocks, plan)
        has_any = any(True for block in blocks for _ in experts_in(block))
        axes = tuple(axis for axis, size in (("expert", mesh.expert), ("tp", mesh.tensor)) if size > 1 and has_any)
        exchanging = axes if plan.sequence_parallel else tuple(axis for axis in axes if axis == "expert")
        if exchanging:
            transport.open_swaps(*exchanging)
        return Experts(
            blocks,
            plan,
            transport,
            transport.mesh_along(*axes) if axes else None,
            None if plan.sequence_parallel or not has_any else tensor,
            exchanging,
        )

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters that are a unit of their own in each block."""
        if not self.plan.divides_experts:
            return frozenset()
        return frozenset(
            f"{name}.{key}"
            for block in self.blocks
            for name, module in experts_in(block)
            for key, _ in module.named_parameters(recurse=False)
        )

    @property
    def exchanges(self) -> Mapping[int, int]:
        """For each block that exchanges rows, how often a forward does."""
        if not self.axes:
            return {}
        counts = {at: sum(1 for _ in experts_in(block)) for at, block in enumerate(self.blocks)}
        return {at: EXCHANGES * count for at, count in counts.items() if count}

    def apply(self, at: int) -> dict[str, Spread]:
        """Keep this rank's experts of a block with real parameters; what became of each parameter."""
        found: dict[str, Spread] = {}
        if self.mesh is None:
            return found
        for name, module in experts_in(self.blocks[at]):
            for key, parameter in list(module.named_parameters(recurse=False)):
                own = parameter.detach().chunk(self.mesh.size())[self.mesh.get_local_rank()].clone()
                parts = DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False)
                module.register_parameter(key, nn.Parameter(parts, requires_grad=parameter.requires_grad))
                found[f"{name}.{key}"] = Spread.SPLIT
        return found

    def install(self, at: int, units: Sequence[Unit], collector: Collector, *, waits: bool) -> bool:
        """Replace the forward of a block's experts where the ranks divide them, or their weights' gradients wait for W.

        Return True if any gradient waits.
        """
        if self.mesh is None and not waits:
            return False
        owners = {id(p): (unit, name) for unit in units for name, p in unit.parameters.items()}
        exchange = Exchange(self.transport, self.axes, at) if self.axes else None
        any_waits = False
        for _, module in experts_in(self.blocks[at]):
            weights = {}
            for key in (weight_of(module), "down_proj"):
                parameter = module.get_parameter(key)
                owner = owners.get(id(parameter)) if parameter.requires_grad else None
                weights[key] = GroupedWeight(module, key, owner, collector, waits=waits)
                any_waits |= waits and owner is not None
            self._divisions.append(Division(module, weights, exchange, self.tensor))
        return any_waits


class Division:
    """One module of experts, whose forward is replaced.

    exchange: between the expert ranks, if there are several.  tensor: the tensor-parallel group, if there is one.
    rows: those that this rank's experts computed since `rows` was last set, for metrics.
    """

    def __init__(
        self,
        module: Any,
        weights: Mapping[str, GroupedWeight],
        exchange: Exchange | None,
        tensor: DeviceMesh | None,
    ) -> None:
        self._module, self._exchange, self._tensor = module, exchange, tensor
        first, self._down = weights.values()
        self._up, self._weight = first, weight_of(module)
        self._experts = module.num_experts
        self._groups = 1 if exchange is None else len(exchange.peers.ranks)
        self._tensors = 1 if tensor is None else tensor.size()
        self._each = self._experts // (self._groups * self._tensors)
        self.rows = 0
        module.forward = self.forward

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts of all tokens: [T, H], with k experts for each, [T, k], and their weights."""
        hidden, weights = _copied(hidden_states, self._tensor), _copied(top_k_weights, self._tensor)
        tokens, k = top_k_index.shape
        # Sorted by expert, so by rank: all rows of a rank are one range, and in it those of an expert.
        experts, pairs = torch.sort(top_k_index.reshape(-1), stable=True)
        counts = torch.bincount(experts, minlength=self._experts).view(self._groups, self._tensors, self._each)
        if self._tensors > 1:
            assert self._tensor is not None, "it has several ranks"
            at = self._tensor.get_local_rank()
            pairs = pairs[(experts // self._each) % self._tensors == at]
            counts = counts[:, at]
        counts = counts.reshape(self._groups, self._each)
        tokens_of_pairs = pairs // k
        if self._exchange is None:
            own: Sequence[int] = counts[0].tolist()
            out = self._compute(hidden.index_select(0, tokens_of_pairs), own)
        else:
            route = self._exchange.route(counts.contiguous())
            own = route.experts
            out = self._compute(self._exchange.dispatch(hidden, tokens_of_pairs, route), own)
            out = self._exchange.combine(out, route)
        self.rows += sum(own)
        weighed = out * weights.reshape(-1).index_select(0, pairs)[:, None]
        if self._tensors == 1:
            every = weighed.index_select(0, torch.argsort(pairs))
        else:
            every = weighed.new_zeros(tokens * k, weighed.shape[1]).index_copy(0, pairs, weighed)
        total = every.view(tokens, k, -1).sum(1)
        return _summed(total, self._tensor).to(hidden_states.dtype)

    def _compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the outputs of rows that are sorted by expert, before they are weighed."""
        module = self._module
        up = self._biased(self._up.multiply(rows, counts), f"{self._weight}_bias", counts)
        inner = module._apply_gate(up) if getattr(module, "has_gate", True) else module.act_fn(up)
        out = self._biased(self._down.multiply(inner, counts), "down_proj_bias", counts)
        return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out

    def _biased(self, rows: Tensor, key: str, counts: Sequence[int]) -> Tensor:
        if not getattr(self._module, "has_bias", False):
            return rows
        bias = self._module.get_parameter(key)
        own: Tensor = bias.to_local() if isinstance(bias, DTensor) else bias
        each = torch.tensor(counts, device=rows.device)
        return rows + own.repeat_interleave(each, dim=0, output_size=rows.shape[0])


def _copied(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return a tensor that all ranks of a tensor-parallel group have, and whose gradients they add up."""
    if mesh is None:
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _summed(part: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return the sum of the parts of a tensor-parallel group."""
    if mesh is None:
        return part
    return (
        DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
    )
