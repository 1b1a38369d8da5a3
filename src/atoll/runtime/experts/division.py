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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from atoll.base._torch import local_part
from atoll.base.errors import PlanError
from atoll.plans.plan import Plan
from atoll.runtime.experts.adapters import LowRank, adapters_of, check_wrappers, wrappers_of
from atoll.runtime.experts.compiled import as_operator, enter
from atoll.runtime.experts.exchange import RowExchange
from atoll.runtime.experts.grouped import GroupedWeight
from atoll.runtime.experts.kinds import Kind, check_division, experts_in, kind_of, stacked_in
from atoll.runtime.experts.routers import BlockRouter, routers_of, watch
from atoll.runtime.models import Adapter, Block
from atoll.runtime.pipeline.deferred import Collector
from atoll.runtime.pipeline.routing import Balance, ExpertWork, Routers
from atoll.runtime.sharding.tensors import Spread
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.transport import Transport

_EXCHANGES = 2
"""Exchanges of a forward: dispatch and combine."""


@dataclass(frozen=True)
class DividedExperts:
    """The experts of a model under a plan.

    mesh: the ranks that divide them; None if each has all.  tensor: the tensor-parallel ranks among these, if they have
    the same tokens.  axes: those of the mesh along which rows are exchanged.
    parts: the ranks that have parts of the same sequences: those that divide them, and tensor-parallel ones that do not
    have the same tokens.
    routers: what this rank's report.  watched: those of the model that do.
    """

    blocks: tuple[Block, ...]
    plan: Plan
    transport: Transport
    mesh: DeviceMesh | None
    tensor: DeviceMesh | None
    axes: tuple[str, ...]
    parts: DeviceMesh | None
    routers: Routers
    watched: tuple[BlockRouter, ...] = ()

    @staticmethod
    def of(
        adapter: Adapter, plan: Plan, transport: Transport, *, tensor: DeviceMesh | None, balance: Balance
    ) -> DividedExperts:
        """Find the experts of a model. Raises PlanError if the plan cannot divide or balance them."""
        blocks, mesh = tuple(adapter.blocks()), plan.mesh
        check_division(blocks, plan)
        has_any = any(True for block in blocks for _ in experts_in(block))
        is_replaced = has_any and (mesh.expert > 1 or mesh.world > mesh.data)
        if is_replaced and plan.recompute == "selective" and plan.compile != "none":
            raise PlanError(
                f'recompute = "selective" with compile = "{plan.compile}" and experts that the ranks divide, or whose '
                "gradients wait for W: compiled experts are one operator, of which no products can be kept. Use "
                'recompute = "block", or compile = "none"'
            )
        axes = tuple(axis for axis, size in (("expert", mesh.expert), ("tp", mesh.tensor)) if size > 1 and has_any)
        exchanging = axes if plan.sequence_parallel else tuple(axis for axis in axes if axis == "expert")
        if exchanging:
            transport.open_swaps(*exchanging)
        routers = Routers.of(balance, plan, transport.place)
        routers.work = ExpertWork(transport.device) if axes else None
        return DividedExperts(
            blocks,
            plan,
            transport,
            mesh=transport.mesh_along(*axes) if axes else None,
            tensor=None if plan.sequence_parallel or not has_any else tensor,
            axes=exchanging,
            parts=_parts(plan, transport, tensor) if has_any else None,
            routers=routers,
            watched=routers_of(blocks, balance),
        )

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters that are a unit of their own in each block."""
        return frozenset(stacked_in(self.blocks)) if self.plan.divides_experts else frozenset()

    def replaces(self, at: int, *, waits: bool) -> bool:
        """Return True if `install` replaces the forward of a block's experts: where ranks divide them, or gradients of
        their weights wait for W."""
        return (self.mesh is not None or waits) and any(True for _ in experts_in(self.blocks[at]))

    @property
    def exchanges(self) -> Mapping[int, int]:
        """For each block that exchanges rows, how often a forward does."""
        if not self.axes:
            return {}
        counts = {at: sum(1 for _ in experts_in(block)) for at, block in enumerate(self.blocks)}
        return {at: _EXCHANGES * count for at, count in counts.items() if count}

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
                parameter.data = parameter.new_empty(0)  # the outline still refers to the whole one
                found[f"{name}.{key}"] = Spread.SPLIT
            if self.plan.mesh.tensor > 1:
                found.update(self._beside(at, name, module))
        return found

    def _beside(self, at: int, name: str, module: nn.Module) -> dict[str, Spread]:
        """Prepare what is computed beside divided experts in a tensor-parallel group; return what becomes of its
        parameters, whose gradients are those of a rank's own experts."""
        kind = kind_of(module)
        if kind is not None and kind.takes_all:
            block = self.blocks[at]
            outer = name.removeprefix(f"{block.name}.")
            while outer.endswith(".base_layer"):  # peft wraps a module once for each of its target parameters
                outer = outer.removesuffix(".base_layer")
            parent = block.module.get_submodule(outer.rpartition(".")[0])
            for child in parent.children():
                child.register_forward_hook(_writable)
        inside = [f"{name}.{key}" for key, _ in module.named_parameters() if "." in key]
        return dict.fromkeys((*inside, *adapters_of(module, self.blocks[at])), Spread.SUMMED)

    def install(self, at: int, units: Sequence[Unit], collector: Collector, *, waits: bool) -> bool:
        """Replace the forward of a block's experts where the ranks divide them, or their weights' gradients wait for W.

        Return True if any gradient waits.
        """
        own = [router for router in self.watched if router.block == at]
        watch(own, self.routers, self.plan, collector=collector, parts=self.parts)
        if not self.replaces(at, waits=waits):
            return False
        owners = {id(p): (unit, name) for unit in units for name, p in unit.parameters.items()}
        work = self.routers.work
        exchange = None
        if self.axes:
            assert work is not None, "ranks divide the experts"
            exchange = RowExchange(self.transport, self.axes, at, work=work)
        any_waits = False
        for name, module in experts_in(self.blocks[at]):
            kind = kind_of(module)
            assert kind is not None, "it is experts"
            weights = []
            wrappers = wrappers_of(module, self.blocks[at].module)
            check_wrappers(wrappers, name, (kind.first, "down_proj"))
            for key in (kind.first, "down_proj"):
                parameter = module.get_parameter(key)
                owner = owners.get(id(parameter)) if parameter.requires_grad else None
                of_weight = [each for each in wrappers if each.parameter_name == key]
                adapters = LowRank(of_weight, self._own(module), is_transposed=kind.is_transposed)
                given = module, key, owner, collector, adapters
                weights.append(GroupedWeight(*given, is_transposed=kind.is_transposed, waits=waits))
                any_waits |= waits and owner is not None
            measured = None if work is None else (work, collector)
            Division(module, kind, weights, exchange=exchange, tensor=self.tensor, measured=measured)
            for wrapper in wrappers:
                wrapper.forward = module.forward
        return any_waits

    def _own(self, module: Any) -> slice:
        """This rank's experts of a module."""
        if self.mesh is None:
            return slice(None)
        each, at = module.num_experts // self.mesh.size(), self.mesh.get_local_rank()
        return slice(at * each, (at + 1) * each)


def _parts(plan: Plan, transport: Transport, tensor: DeviceMesh | None) -> DeviceMesh | None:
    """Return the ranks that have parts of the same sequences as this one; None if it has whole ones."""
    if plan.mesh.sequence == 1:
        return tensor if plan.sequence_parallel else None
    return transport.mesh_along("sequence", *(("tp",) if plan.sequence_parallel else ()))


class Division:
    """One module of experts, whose forward is replaced.

    exchange: between the expert ranks, if there are several.  tensor: the tensor-parallel group, if there is one.
    measured: where rows are counted, if they are, and what says that a block runs again.
    """

    def __init__(
        self,
        module: Any,
        kind: Kind,
        weights: Sequence[GroupedWeight],
        *,
        exchange: RowExchange | None,
        tensor: DeviceMesh | None,
        measured: tuple[ExpertWork, Collector] | None,
    ) -> None:
        self._measured = measured
        self._module, self._kind, self._exchange, self._tensor = module, kind, exchange, tensor
        self._up, self._down = weights
        self._experts = module.num_experts
        self._groups = 1 if exchange is None else len(exchange.peers.ranks)
        self._tensors = 1 if tensor is None else tensor.size()
        self._each = self._experts // (self._groups * self._tensors)
        # Of a compiled graph, see compiled.py: the number of this object, and what keeps its operator in the graph.
        self.slot = enter(self)
        device = local_part(module.down_proj).device
        self.anchor = torch.zeros(1, dtype=torch.float32, device=device, requires_grad=True)
        module.forward = self.forward_of_all if kind.takes_all else self.forward

    @torch.compiler.disable  # how many rows are not zero is known at run time alone
    def forward_of_all(self, hidden_states: Tensor) -> Tensor:
        """Compute rows [E T, H] of all tokens for each expert in turn: those that are not zero; see `Kind`."""
        rows = (hidden_states.detach() != 0).any(-1).nonzero().squeeze(-1)
        index = rows // (hidden_states.shape[0] // self._experts)
        out = self.compute(hidden_states[rows], index[:, None], None)
        return torch.zeros_like(hidden_states).index_put((rows,), out)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None) -> Tensor:
        """Compute the experts of all tokens: [T, H], with k experts for each, [T, k], and their weights, if they have
        any."""
        if torch.compiler.is_compiling():
            return as_operator(self, hidden_states, top_k_index, weights=top_k_weights)
        return self.compute(hidden_states, top_k_index, top_k_weights)

    def compute(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None) -> Tensor:
        """Compute the same, outside of compiled code."""
        hidden = _copied(hidden_states, self._tensor)
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
        if self._measured is not None:
            work, collector = self._measured
            work.rows += sum(own) if collector.found is None else 0
        weighed = out
        if top_k_weights is not None:
            weighed = out * _copied(top_k_weights, self._tensor).reshape(-1).index_select(0, pairs)[:, None]
        if self._tensors == 1:
            every = weighed.index_select(0, torch.argsort(pairs))
        else:
            # Unlike index_copy and index_add, which save the rows for their backward.
            every = weighed.new_zeros(tokens * k, weighed.shape[1]).index_put((pairs,), weighed)
        total = every.view(tokens, k, -1).sum(1)
        return _summed(total, self._tensor).to(hidden_states.dtype)

    def _compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the outputs of rows that are sorted by expert, before they are weighed."""
        module, kind = self._module, self._kind
        up = self._biased(self._up.multiply(rows, counts), f"{kind.first}_bias", counts)
        out = self._biased(self._down.multiply(kind.between(module, up), counts), "down_proj_bias", counts)
        return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out

    def _biased(self, rows: Tensor, key: str, counts: Sequence[int]) -> Tensor:
        if not getattr(self._module, "has_bias", False):
            return rows
        bias = self._module.get_parameter(key)
        own: Tensor = bias.to_local() if isinstance(bias, DTensor) else bias
        each = torch.tensor(counts, device=rows.device)
        return rows + own.repeat_interleave(each, dim=0, output_size=rows.shape[0])


def _writable(module: nn.Module, args: Any, output: Any) -> Any:
    """Return a copy of an output that the model adds to in place: what comes out of a DTensor is a view, which autograd
    lets nobody change."""
    return output.clone() if isinstance(output, Tensor) else output


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
