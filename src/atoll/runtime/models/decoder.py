"""A decoder-only transformer: the built-in model, with its sizes as data.

    embed -> layers.0 -> ... -> layers.n-1 -> head          each is a block; only the hidden state is passed on

    layer:  x = x + dropout(attention(norm(x)))             RMSNorm: arXiv:1910.07467, pre-norm
            x = x + dropout(feed_forward(norm(x)))          SwiGLU: arXiv:2002.05202, or a mixture of experts

Attention has rotary positions (arXiv:2104.09864) and grouped queries (arXiv:2305.13245). There are no buffers but the
selection biases of a mixture: rotary angles are computed from the sequence length, so a model built on the meta device
needs nothing but its parameters.

Position ids that restart inside a row separate documents: each has rotary positions of its own, and attention does not
cross from one to another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias

from atoll.base.errors import PlanError
from atoll.runtime.models.attention import attend
from atoll.runtime.models.mixture import FeedForward, MixtureConfig, MixtureFeedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder. Raises PlanError with all problems for impossible sizes.

    initial_std: standard deviation of the initial linear and embedding weights; the two linears of a layer that write
    to the residual stream start smaller, by 1/sqrt(2 * layers).
    mixture: the experts that replace the feed-forward; None for a dense decoder.
    """

    vocabulary: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    dropout: float = 0.0
    tie_embeddings: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    initial_std: float = 0.02
    mixture: MixtureConfig | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {getattr(self, name)}: must be at least 1"
            for name in ("vocabulary", "layers", "hidden", "heads", "kv_heads", "ffn")
            if getattr(self, name) < 1
        ]
        problems += [
            f"{name} = {getattr(self, name)}: must be positive"
            for name in ("rope_theta", "norm_eps", "initial_std")
            if not getattr(self, name) > 0
        ]
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout = {self.dropout}: must be at least 0 and less than 1")
        if not problems:
            problems = self._misfits()
        if problems:
            raise PlanError("decoder sizes that cannot be built:\n  " + "\n  ".join(problems))

    def _misfits(self) -> list[str]:
        problems = []
        if self.hidden % self.heads:
            problems.append(f"hidden = {self.hidden} is not a multiple of heads = {self.heads}")
        elif self.head_size % 2:
            problems.append(
                f"hidden / heads = {self.hidden} / {self.heads} = {self.head_size} is odd: rotary positions turn "
                "pairs of features, choose an even head size"
            )
        if self.heads % self.kv_heads:
            problems.append(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        if self.mixture is not None and (problem := self.mixture.layer_problem(self.layers)) is not None:
            problems.append(problem)
        return problems

    @property
    def head_size(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads


def rotate(states: Tensor, theta: float, positions: Tensor | None = None) -> Tensor:
    """Apply rotary positions to [batch, heads, S, head size]: `positions` [batch, S], or 0..S-1.

    Angles are computed in fp32 (fp64 for fp64 states), so that half precisions do not lose late positions.
    """
    precise = torch.float64 if states.dtype == torch.float64 else torch.float32
    length, size = states.shape[-2], states.shape[-1]
    exponents = torch.arange(0, size, 2, device=states.device, dtype=precise) / size
    if positions is None:
        at = torch.arange(length, device=states.device, dtype=precise)
    else:
        at = positions[:, None].to(precise)
    angles = at[..., None] * theta**-exponents
    cosine, sine = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def document_mask(positions: Tensor) -> Tensor:
    """Return the attention mask, bool [B, 1, S, S]: causal, inside each document.

    positions: [B, S]. A document begins at each position that does not follow the previous one.

    With a mask CUDA has no flash kernel.
    """
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    document = begins.cumsum(-1)
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def _has_grouped_kernel(states: Tensor, mask: Tensor | None) -> bool:
    """Return True if the fast attention kernels take fewer key heads than query heads.

    On CUDA the fp32 and fp64 kernels do not, nor those with a mask: grouped queries would fall back to a kernel that
    stores all S x S scores.
    """
    is_plain = mask is None or isinstance(mask, CausalBias)
    return states.device.type != "cuda" or (is_plain and states.dtype in (torch.bfloat16, torch.float16))


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Return causal attention, [batch, S, heads, head size], of [batch, heads, S, head size]; mask: see
    `document_mask`."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and not _has_grouped_kernel(query, mask):
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        repeats = 1
    dropout = module.config.dropout if module.training else 0.0
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=repeats > 1
    )
    return mixed.transpose(1, 2)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries: [B, S, hidden] -> [B, S, hidden]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.key = nn.Linear(config.hidden, config.kv_heads * config.head_size, bias=False)
        self.value = nn.Linear(config.hidden, config.kv_heads * config.head_size, bias=False)
        self.output = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, hidden: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Attend from each position to itself and earlier ones; positions, mask: of documents, see `document_mask`."""
        config = self.config
        query = rotate(self._heads(self.query(hidden)), config.rope_theta, positions)
        key = rotate(self._heads(self.key(hidden)), config.rope_theta, positions)
        value = self._heads(self.value(hidden))

        return self.output(attend(_attention, self, query, key, value, mask).flatten(2))

    def _heads(self, projected: Tensor) -> Tensor:
        """Reshape [B, S, heads * head size] -> [B, heads, S, head size]."""
        return projected.unflatten(-1, (-1, self.config.head_size)).transpose(1, 2)


class DecoderLayer(nn.Module):
    """One pre-norm layer: [B, S, hidden] -> [B, S, hidden]."""

    def __init__(self, config: DecoderConfig, mixture: MixtureConfig | None = None) -> None:
        super().__init__()
        self.dropout = config.dropout
        # torch's RMSNorm squares and averages in fp32 for half precisions and in the input's dtype otherwise.
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.feed_forward = (
            FeedForward(config.hidden, config.ffn)
            if mixture is None
            else MixtureFeedForward(config.hidden, config.ffn, mixture)
        )

    def forward(self, hidden: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Add the attention branch, then the feed-forward branch."""
        hidden = hidden + self._drop(self.attention(self.attention_norm(hidden), positions, mask))
        return hidden + self._drop(self.feed_forward(self.feed_forward_norm(hidden)))

    def _drop(self, branch: Tensor) -> Tensor:
        return F.dropout(branch, self.dropout, training=self.training)


class Head(nn.Module):
    """Final norm and projection to the vocabulary: [B, S, hidden] -> logits [B, S, vocabulary]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.output = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize and project."""
        return self.output(self.norm(hidden))


class Decoder(nn.Module):
    """The whole model: token ids [B, S] -> logits [B, S, vocabulary].

    With `tie_embeddings`, `head.output.weight` is the very parameter `embed.weight`.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.hidden)
        mixture = config.mixture
        dense = config.layers if mixture is None else mixture.dense_layers
        self.layers = nn.ModuleList(
            DecoderLayer(config, None if at < dense else mixture) for at in range(config.layers)
        )
        self.head = Head(config)
        if config.tie_embeddings:
            self.head.output.weight = self.embed.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Run all blocks in sequence. position_ids: [B, S], which restart at each document of a row."""
        hidden = self.embed(input_ids)
        mask = None if position_ids is None else document_mask(position_ids)
        for layer in self.layers:
            hidden = layer(hidden) if mask is None else layer(hidden, position_ids, mask)
        return self.head(hidden)
