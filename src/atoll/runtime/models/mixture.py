"""Feed-forward layers of the built-in decoder: dense, and a mixture of experts.

    tokens [T, H] -> router -> index, weights [T, k]
    experts:   out[t] = sum over j of weights[t, j] * expert index[t, j] (tokens[t])
    shared:    out += shared(tokens)

`Experts` has the attributes, parameters and signature of the experts of transformers (`ExpertsInterface` in its
`integrations/moe.py`), so that whatever replaces the forward of those replaces this one too.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.prediction.cost.mixture import MixtureConfig as MixtureConfig


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position by itself: [B, S, hidden] -> [B, S, hidden]."""
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Experts(nn.Module):
    """Feed-forwards (SwiGLU) with stacked weights; each token takes some of them.

    gate_up_proj: [E, 2I, H].  down_proj: [E, H, I].
    """

    has_gate = True
    has_bias = False
    is_transposed = False

    def __init__(self, experts: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * ffn, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, ffn))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights as those of an `nn.Linear`."""
        _reset(self.gate_up_proj)
        _reset(self.down_proj)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts: [T, H], index and weights [T, k] -> [T, H]."""
        order = top_k_index.flatten().argsort(stable=True)
        token = order // top_k_index.shape[-1]
        # Without tokens the product of an expert has no rows and a gradient of zeros. Unbinding makes one gradient of
        # the stack; an index for each expert would make one as large as the stack each.
        runs = hidden_states.index_select(0, token).split(self._sizes(top_k_index))
        weights = zip(runs, self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        each = torch.cat([F.linear(self._apply_gate(F.linear(run, up)), down) for run, up, down in weights])
        weighted = each * top_k_weights.flatten()[order, None]
        # Back in the order of the tokens, and summed. An index_add would save the weighted rows for its backward, and
        # add them in no fixed order on a GPU.
        back = weighted.to(hidden_states.dtype).index_select(0, order.argsort())
        return back.view(*top_k_index.shape, hidden_states.shape[-1]).sum(1)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def _sizes(self, top_k_index: Tensor) -> list[int]:
        """Return the number of tokens of each expert: on `meta`, which has no values, as equal as possible."""
        if top_k_index.is_meta:
            bounds = [top_k_index.numel() * at // self.num_experts for at in range(self.num_experts + 1)]
            return [stop - start for start, stop in pairwise(bounds)]
        sizes: list[int] = top_k_index.flatten().bincount(minlength=self.num_experts).tolist()
        return sizes


class Routing(NamedTuple):
    """The output of a router: the experts of each token and their weights [T, k]; scores and logits [T, E] of all
    experts. Floats are fp32, or fp64."""

    top_k_index: Tensor
    top_k_weights: Tensor
    scores: Tensor
    logits: Tensor


class Router(nn.Module):
    """The choice of each token's experts; see `MixtureConfig`. weight: [E, H]."""

    selection_bias: Tensor | None

    def __init__(self, hidden: int, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.top_k = config.experts_per_token
        self.weight = nn.Parameter(torch.empty(config.experts, hidden))
        self.register_buffer(
            "selection_bias", torch.zeros(config.experts, dtype=torch.float32) if config.selection_bias else None
        )
        _reset(self.weight)

    def forward(self, hidden: Tensor) -> Routing:
        """Score and choose for each token of [T, H], in fp32 (fp64 for fp64 states)."""
        precise = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logits = F.linear(hidden.to(precise), self.weight.to(precise))
        scores = logits.sigmoid() if self.config.scoring == "sigmoid" else logits.softmax(-1)
        index = self._choose(scores.detach())
        weights = scores.gather(-1, index)
        if self.config.normalise_weights:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # every sigmoid may be 0
        return Routing(index, weights * self.config.route_scale, scores, logits)

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the experts of each token: scores [T, E] -> [T, k]."""
        config = self.config
        if self.selection_bias is not None:
            scores = scores + self.selection_bias
        if config.groups_per_token < config.groups:
            grouped = scores.unflatten(-1, (config.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(config.groups_per_token, dim=-1).indices
            is_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, value=False)
            scores = grouped.masked_fill(is_out[..., None], -torch.inf).flatten(-2)
        return scores.topk(config.experts_per_token, dim=-1).indices


class MixtureFeedForward(nn.Module):
    """A mixture of experts, and experts shared by all tokens: [B, S, hidden] -> [B, S, hidden]."""

    def __init__(self, hidden: int, ffn: int, config: MixtureConfig) -> None:
        super().__init__()
        inner = ffn if config.expert_ffn is None else config.expert_ffn
        self.router = Router(hidden, config)
        self.experts = Experts(config.experts, hidden, inner)
        self.shared = FeedForward(hidden, config.shared_experts * inner) if config.shared_experts else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position by its experts and the shared ones."""
        tokens = hidden.flatten(0, -2)
        routing: Routing = self.router(tokens)
        mixed: Tensor = self.experts(tokens, routing.top_k_index, routing.top_k_weights)
        mixed = mixed.unflatten(0, hidden.shape[:-1])
        return mixed if self.shared is None else mixed + self.shared(hidden)


def _reset(weight: nn.Parameter) -> None:
    """Set a weight [..., out, in] as that of an `nn.Linear`."""
    bound = weight.shape[-1] ** -0.5
    nn.init.uniform_(weight, -bound, bound)
