"""Divided experts inside compiled blocks: one registered operator, which a compiler neither traces nor breaks at.

    experts            computes, with a graph of its own that waits for the backward under a number
    experts_gradient   runs the backward of that graph

Sizes of exchanged rows are known at run time alone, so a compiler could trace little of it. A forward without gradients
keeps no graph: an evaluation, or the first forward of a block that runs again.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from atoll.base._torch import recording_history, run_backward


class Computing(Protocol):
    """Experts that compute."""

    slot: int
    anchor: Tensor

    def compute(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None) -> Tensor:
        """Compute the experts of all tokens."""
        ...


_SLOTS = itertools.count()
_TICKETS = itertools.count()
_EXPERTS: WeakValueDictionary[int, Computing] = WeakValueDictionary()
"""Experts of a call by their number, because operators take numbers rather than objects."""
_OPEN: dict[int, tuple[Tensor, list[Tensor]]] = {}
"""By ticket: the output of a forward, with its graph, and the leaves of that, until the backward."""


def enter(experts: Computing) -> int:
    """Return a number for some experts, which is of these alone in the whole process."""
    slot = next(_SLOTS)
    _EXPERTS[slot] = experts
    return slot


def as_operator(experts: Computing, hidden: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    """Compute experts as one operator of a compiled graph."""
    given = hidden.new_ones(0) if weights is None else weights
    out: Tensor
    out, _ = divided_experts(hidden, index, given, experts.anchor, experts.slot, torch.is_grad_enabled())
    return out


@torch.library.custom_op("atoll::divided_experts", mutates_args=())
def divided_experts(
    hidden: Tensor, index: Tensor, weights: Tensor, anchor: Tensor, slot: int, keeps: bool
) -> tuple[Tensor, Tensor]:
    """Return the output of the experts `slot`, and the ticket of its graph if that is kept."""
    experts, leaves = _EXPERTS[slot], [hidden.detach(), weights.detach()]
    ticket = next(_TICKETS) if keeps else -1
    with torch.set_grad_enabled(keeps), recording_history():
        leaves = [leaf.requires_grad_(keeps) for leaf in leaves]
        out = experts.compute(leaves[0], index, leaves[1] if weights.numel() or not index.numel() else None)
    if keeps:
        _OPEN[ticket] = out, leaves
    return out.detach().clone(), torch.tensor([ticket])


@divided_experts.register_fake
def _(hidden: Tensor, index: Tensor, weights: Tensor, anchor: Tensor, slot: int, keeps: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty(1, dtype=torch.long, device="cpu")


@torch.library.custom_op("atoll::divided_experts_gradient", mutates_args=())
def divided_experts_gradient(
    gradient: Tensor, ticket: Tensor, hidden: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden state and weights. hidden, weights: for their sizes."""
    out, leaves = _OPEN.pop(int(ticket))
    with torch.enable_grad(), recording_history():
        run_backward((out,), (gradient,))
    first, second = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
    return first, second


@divided_experts_gradient.register_fake
def _(gradient: Tensor, ticket: Tensor, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weights)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, _, weights, *_ = inputs
    ctx.save_for_backward(output[1], hidden, weights)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    ticket, hidden, weights = ctx.saved_tensors
    first, second = divided_experts_gradient(gradient, ticket, hidden, weights)
    # The anchor keeps the operation in the graph where no input needs a gradient: [Note: the anchor] in deferred.py.
    return first, None, second, first.new_zeros(1, dtype=torch.float32), None, None


divided_experts.register_autograd(_backward, setup_context=_keep)
