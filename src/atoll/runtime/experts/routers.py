"""The routers of a model's experts, which report their choices and have losses: `atoll.runtime.pipeline.routing`.

A router is the module beside stacked experts that has a weight [E, H]. It returns

    Routing                   of the built-in decoder
    (logits, weights, index)  [T, E], [T, k], [T, k], as routers of transformers do

Its selection bias is a buffer of the router, or of the module that has router and experts, with one of the names of
`BIASES`. A router of transformers does not return its scores: they are the function of its logits that gives the
weights, which a copy of the router shows on random values.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from atoll.base.errors import PlanError
from atoll.plans.plan import Plan
from atoll.runtime.experts.kinds import experts_in
from atoll.runtime.models import Block
from atoll.runtime.models.mixture import Routing
from atoll.runtime.pipeline.deferred import Collector
from atoll.runtime.pipeline.routing import Balance, Load, Routers

BIASES = ("selection_bias", "e_score_correction_bias")
"""Names of selection biases: of the built-in decoder, and of transformers."""

ScoresOf = Callable[[Tensor], Tensor]

SCORINGS: Mapping[str, ScoresOf] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt of softplus": lambda logits: F.softplus(logits).sqrt(),
}
"""Functions that return the scores [T, E] of the logits [T, E]."""


@dataclass(frozen=True, slots=True)
class BlockRouter:
    """A router of a block.

    bias: module and name of its selection bias, if it has one.
    scoring: for a router that has losses and does not return its scores.
    """

    block: int
    name: str
    module: Any
    bias: tuple[nn.Module, str] | None
    scoring: ScoresOf | None = None


def routers_of(blocks: Sequence[Block], balance: Balance) -> tuple[BlockRouter, ...]:
    """Return the routers of a model that its balance concerns. Raises PlanError if they cannot be balanced."""
    if balance == Balance():
        return ()
    found = tuple(router for at, block in enumerate(blocks) for router in _routers_in(at, block))
    if not found:
        raise PlanError(f"{balance} is for a mixture of experts, and the model has no router of experts; leave it out")
    biased = tuple(router for router in found if router.bias is not None)
    if balance.bias_rate and not biased:
        raise PlanError(
            f"bias_rate = {balance.bias_rate} steps selection biases, and {found[0].name} "
            f"({type(found[0].module).__name__}) has none: no buffer {' or '.join(BIASES)}. Use sequence_loss, or a "
            "model with biases (selection_bias = true of the built-in decoder)"
        )
    return tuple(map(_with_scoring, found)) if balance.has_losses else biased


def _routers_in(at: int, block: Block) -> Iterator[BlockRouter]:
    modules = dict(block.named_modules())
    for name, experts in experts_in(block):
        above = name.partition(".base_layer")[0].rpartition(".")[0]  # experts with adapters are inside wrappers
        parent = modules[above]
        for key, child in parent.named_children():
            weight = dict(child.named_parameters(recurse=False)).get("weight")
            if child is experts or weight is None or weight.shape[0] != experts.num_experts:
                continue
            biases = [path for path, _ in parent.named_buffers() if path.rpartition(".")[2] in BIASES]
            owner, _, last = biases[0].rpartition(".") if biases else ("", "", "")
            bias = (parent.get_submodule(owner), last) if biases else None
            yield BlockRouter(at, f"{above}.{key}", child, bias=bias)


def _with_scoring(router: BlockRouter) -> BlockRouter:
    """Find out what the scores of a router are."""
    twin = copy.deepcopy(router.module).to_empty(device="cpu").double()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.zero_()
        experts, size = twin.weight.normal_(std=twin.weight.shape[1] ** -0.5, generator=random).shape
        hidden = torch.randn(64, size, dtype=torch.float64, generator=random)
        required = [each for each in inspect.signature(twin.forward).parameters.values() if each.default is each.empty]
        choice = RouterChoice.of(twin(hidden, *(torch.zeros(experts) for _ in required[1:])))
    if choice is not None and choice.scores is not None:
        return router
    if choice is not None:
        shares = _shares(choice.weights.double())
        for scoring in SCORINGS.values():
            if torch.allclose(_shares(scoring(choice.logits.double()).gather(-1, choice.index)), shares, rtol=1e-4):
                return replace(router, scoring=scoring)
    raise PlanError(
        f"{router.name} ({type(router.module).__name__}) gets no losses (sequence_loss, z_loss): it does not return "
        f"(logits, weights, index) with weights that are in proportion to {' or '.join(SCORINGS)} of the logits. Use "
        "bias_rate, if it has a selection bias"
    )


def _shares(scores: Tensor) -> Tensor:
    """Return scores in proportion to their sum; one alone stays as it is."""
    return scores / scores.sum(-1, keepdim=True) if scores.shape[-1] > 1 else scores


@dataclass(frozen=True, slots=True)
class RouterChoice:
    """Output of a router: the experts of each token and their weights [T, k]; logits, for some also scores [T, E]."""

    index: Tensor
    weights: Tensor
    logits: Tensor
    scores: Tensor | None = None

    @staticmethod
    def of(made: Any) -> RouterChoice | None:
        """Return the parts of a router's output, or None if they are not all there."""
        match made:
            case Routing():
                return RouterChoice(made.top_k_index, made.top_k_weights, made.logits, scores=made.scores)
            case (Tensor() as logits, Tensor() as weights, Tensor() as index, *_) if not index.is_floating_point():
                return RouterChoice(index, weights, logits)
        return None


def watch(
    routers: Sequence[BlockRouter], of: Routers, plan: Plan, *, collector: Collector, parts: DeviceMesh | None
) -> None:
    """Have routers of this rank report. parts: the ranks that have parts of the same sequences."""
    for router in routers:
        load = None
        if of.balance.bias_rate and router.bias is not None:
            owner, key = router.bias
            bias = owner.get_buffer(key)
            load = Load(owner, key, torch.zeros(bias.shape, dtype=torch.int64, device=bias.device))
            of.loads.append(load)
        _Watch(router, of, load, sequences=plan.microbatch, collector=collector, parts=parts)


class _Watch:
    """Takes the place of a router's forward.

    load: where the router has a bias that is stepped.  sequences: of a microbatch.
    """

    def __init__(
        self,
        router: BlockRouter,
        of: Routers,
        load: Load | None,
        *,
        sequences: int,
        collector: Collector,
        parts: DeviceMesh | None,
    ) -> None:
        self._router, self._of, self._load = router, of, load
        self._sequences, self._collector, self._parts = sequences, collector, parts
        self._forward = router.module.forward
        router.module.forward = self.forward

    @torch.compiler.disable
    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the router returns; the backward of its weights is then also that of its losses."""
        made = self._forward(hidden, *args, **kwargs)
        if not self._router.module.training:
            return made
        is_first = self._collector.found is None  # otherwise the block runs again, within its backward
        if self._load is not None and is_first:
            index = _index_in(made).flatten()
            self._load.counts.scatter_add_(0, index, torch.ones_like(index))  # of a known size: the host does not wait
        if not self._of.balance.has_losses:
            return made
        choice = RouterChoice.of(made)
        assert choice is not None, "its twin has returned one"
        loss = self._loss(choice, torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        if is_first:
            self._of.add_loss(loss)
        weights = self._of.attach(choice.weights, loss)
        if isinstance(made, Routing):
            return made._replace(top_k_weights=weights)
        return (made[0], weights, *made[2:])

    def _loss(self, choice: RouterChoice, dtype: torch.dtype) -> Tensor:
        """Return the losses of the router, summed over the sequences of a microbatch; with parts of these, this rank's
        part."""
        balance, logits = self._of.balance, choice.logits.to(dtype)
        count, experts, k = self._sequences, logits.shape[-1], choice.index.shape[-1]
        length = len(logits) // count * (1 if self._parts is None else self._parts.size())
        loss = logits.new_zeros(())
        if balance.sequence_loss:
            scores = logits if choice.scores is None else choice.scores.to(dtype)
            scores = scores if self._router.scoring is None else self._router.scoring(scores)
            shares = (scores / scores.sum(-1, keepdim=True)).view(count, -1, experts).sum(1) / length
            index = choice.index.view(count, -1)
            tokens = shares.new_zeros(count, experts).scatter_add_(1, index, torch.ones_like(index, dtype=dtype))
            loss = loss + balance.sequence_loss * experts / (k * length) * (_summed(tokens, self._parts) * shares).sum()
        if balance.z_loss:
            loss = loss + balance.z_loss / length * logits.logsumexp(-1).square().sum()
        return loss


def _index_in(made: Any) -> Tensor:
    """Return the chosen experts in a router's output: what is not floating-point."""
    tensors = made if isinstance(made, tuple) else (made,)
    return next(each for each in tensors if isinstance(each, Tensor) and not each.is_floating_point())


def _summed(counts: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return counts that are added up over the ranks of a mesh."""
    if mesh is None:
        return counts
    return DTensor.from_local(counts, mesh, [Partial()], run_check=False).full_tensor()
