"""Sizes of transformers, and their workloads: the embedding, layers (`atoll.prediction.cost.layer`) and the head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from atoll.prediction.cost.ends import Embedding, HeadBlock
from atoll.prediction.cost.experts import Mixture
from atoll.prediction.cost.implementation import DECODER, DECODER_ON_CPU, MEGATRON, Implementation
from atoll.prediction.cost.latent import Latent
from atoll.prediction.cost.layer import TransformerLayer
from atoll.prediction.cost.mixture import MixtureConfig
from atoll.prediction.cost.vocabulary import EmbeddingSlice, HeadSlice, LookedUp, Scored
from atoll.prediction.cost.work import BlockOf, Use, VocabularyRows, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Sizes of a decoder or an encoder.

    width: of a head; hidden / heads if None.  kv_heads: of keys and values; heads if None.  gated: an activation of two
    products, as SwiGLU.  norm: parameters of a norm, an element of the hidden size.  biases: whether
    linear layers have them, or "qkv" for those of queries, keys and values alone.  positions: rows of a learned
    embedding of positions.  rotary: positions rotate queries and keys.
    head_norms: whether queries and keys are normalized, "head" by head or over "all" of them.
    sinks: whether each head of attention has a logit of its own.  eager: whether attention is eager by default.
    latent: where queries, keys and values come from latent vectors.  mixture: experts in place of the feed-forward.
    order: "pre" normalizes before attention and before the feed-forward, "post" their sums with the residual;
    "parallel" adds both to the same residual.
    types: rows of an embedding of token types, which is followed by a norm.
    transform: whether the head has a linear layer, an activation and a norm, and biases, instead of a norm alone.
    pooled: whether a second head maps a pooled token to two classes.
    """

    name: str = "transformer"
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    kv_heads: int | None = None
    width: int | None = None
    gated: bool = False
    norm: int = 2
    biases: bool | Literal["qkv"] = True
    positions: int = 0
    rotary: bool = False
    tied: bool = False
    dropout: bool = False
    causal: bool = True
    head_norms: Literal["head", "all"] | None = None
    sinks: bool = False
    eager: bool = False
    latent: Latent | None = None
    mixture: Mixture | None = None
    order: Literal["pre", "post", "parallel"] = "pre"
    types: int = 0
    transform: bool = False
    pooled: bool = False
    implementation: Implementation = MEGATRON

    @staticmethod
    def gpt(*, layers: int, hidden: int, heads: int, vocabulary: int, positions: int, ffn: int | None = None,
            dropout: bool = True) -> Transformer:  # fmt: skip
        """Return GPT-2 or GPT-3: layer norms, biases, GELU, learned positions, tied ends."""
        return Transformer(
            name="gpt",
            layers=layers,
            hidden=hidden,
            heads=heads,
            ffn=4 * hidden if ffn is None else ffn,
            vocabulary=vocabulary,
            positions=positions,
            tied=True,
            dropout=dropout,
        )

    @staticmethod
    def llama(*, layers: int, hidden: int, heads: int, ffn: int, vocabulary: int, kv_heads: int | None = None,
              width: int | None = None, tied: bool = False) -> Transformer:  # fmt: skip
        """Return Llama or a similar model: root mean square norms, SwiGLU, rotary positions, no biases."""
        return Transformer(
            name="llama",
            layers=layers,
            hidden=hidden,
            heads=heads,
            ffn=ffn,
            vocabulary=vocabulary,
            kv_heads=kv_heads,
            width=width,
            gated=True,
            norm=1,
            biases=False,
            rotary=True,
            tied=tied,
        )

    @staticmethod
    def decoder(*, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, tied: bool = False,
                dropout: bool = False, on_cpu: bool = False,
                mixture: MixtureConfig | None = None) -> Transformer:  # fmt: skip
        """Return Atoll's own decoder, with the tensors that its code saves on CUDA or on the CPU."""
        sizes = Transformer.llama(
            layers=layers, hidden=hidden, heads=heads, ffn=ffn, vocabulary=vocabulary, kv_heads=kv_heads, tied=tied
        )
        implementation = DECODER_ON_CPU if on_cpu else DECODER
        experts = None
        if mixture is not None:
            inner = ffn if mixture.expert_ffn is None else mixture.expert_ffn
            experts = Mixture(
                experts=mixture.experts,
                chosen=mixture.experts_per_token,
                ffn=inner,
                shared=mixture.shared_experts * inner,
                dense=tuple(range(mixture.dense_layers)),
                has_precise_router=True,
            )
        return replace(sizes, name="decoder", dropout=dropout, mixture=experts, implementation=implementation)

    @staticmethod
    def bert(*, layers: int, hidden: int, heads: int, vocabulary: int, positions: int,
             ffn: int | None = None) -> Transformer:  # fmt: skip
        """Return BERT as in Megatron-LM: a GPT with attention in both directions, a transform before the logits, and a
        second head that predicts whether two sentences follow each other."""
        decoder = Transformer.gpt(
            layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, positions=positions, ffn=ffn
        )
        return replace(decoder, name="bert", causal=False, transform=True, pooled=True)

    @property
    def queries(self) -> int:
        """Number of elements of a token's queries."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Number of elements of a token's keys, and of its values."""
        return (self.heads if self.kv_heads is None else self.kv_heads) * self.head_width

    @property
    def head_width(self) -> int:
        """Number of elements of a head."""
        return self.hidden // self.heads if self.width is None else self.width

    @property
    def values(self) -> int:
        """Number of elements of a token's values."""
        return self.keys if self.latent is None else self.heads * self.latent.values

    @property
    def attended(self) -> int:
        """Number of elements of attention's output."""
        return self.queries if self.latent is None else self.values

    def is_eager(self, use: Use) -> bool:
        """Return True if attention is eager."""
        return self.eager if use.attention is None else use.attention == "eager"

    @property
    def attention(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of attention, the last one at its end."""
        if self.latent is not None:
            return self.latent.linear(self.hidden, self.heads, self.head_width)
        return {"qkv": (self.hidden, self.queries + 2 * self.keys), "out": (self.queries, self.hidden)}

    @property
    def up(self) -> int:
        """Number of outputs of the first part of the feed-forward."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def workload(self) -> Workload:
        """Return the workload: embedding, layers, head."""
        shared = self.vocabulary * self.hidden if self.tied else 0
        whole = self._around_layers(Embedding("embedding", self), HeadBlock("head", self), self.vocabulary)
        return replace(whole, shared=shared, split=self.split)

    def split(self, ranks: int) -> Workload:
        """Return the same with a vocabulary whose rows are split over so many pipeline ranks."""
        rest = self._around_layers(LookedUp("embedding", self, ranks), Scored("head", self, ranks), 0)
        slices = EmbeddingSlice("embedding's rows", self, ranks), HeadSlice("head's rows", self, ranks)
        return replace(rest, vocabulary=VocabularyRows(self.vocabulary, *slices, is_tied=self.tied))

    def _around_layers(self, first: BlockOf, last: BlockOf, rows: int) -> Workload:
        """Return the workload of layers between two ends. rows: of the head that its block multiplies by."""
        dense = () if self.mixture is None else self.mixture.dense
        plain = replace(self, mixture=None)
        layers = [TransformerLayer(f"layers.{at}", plain if at in dense else self) for at in range(self.layers)]
        head = rows * self.hidden + (self.hidden**2 if self.transform else 0)
        costs = (0.0, *(3.0 * layer.cost for layer in layers), 3.0 * head)
        blocks, every = (first, *layers, last), range(1, self.layers + 1)
        return Workload(self.name, blocks, every, costs=costs, mixture=self.mixture)

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model; tied ends count once."""
        return self.workload.parameters
