"""Tensors that implementations of a transformer save for the backward: the same sizes, different bytes.

Every implementation saves the inputs of its products, queries, keys and values. The rows below add the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from atoll.prediction.cost.work import Saved, Use


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """The implementation of a transformer, and its runtime.

    runtime: "megatron" keeps what Korthikanti et al. (arXiv 2205.05198) list. "atoll" counts a batch's ids with the
    batch, keeps the logits beside their log-softmax, recomputes every block but tables, and under selective recompute
    keeps the outputs of products instead of all but attention's scores.
    norms: "fused" norms save their input. Norms in "parts" save it in fp32, and also the normalized hidden state in the
    compute dtype; "precise" ones save both in fp32, or in fp64 if that is the compute dtype.
    statistics: numbers in fp32 that a norm saves for each row.
    results: tensors of the feed-forward's width that the activation saves besides its inputs and its last result.
    softmax: "fp32" if eager attention saves the softmax in fp32 and again in the compute dtype.
    repeats_keys: whether eager attention saves keys and values once for each head of queries.
    is_fused: whether one product computes queries, keys and values.
    heads: "outer" if attention receives queries head by head, not token by token.
    copies: dtypes in which fused attention writes its output in the queries' memory order, so that "outer" heads are
    copied afterwards: "half" precisions, as CUDA's kernels, or "all", as the CPU's.
    keeps_angles: whether each layer saves rotary angles of its own.
    waits: whether the gradients of the layers' weights are computed in W.
    splits: how tensor parallelism splits linear layers: "paired", one by its outputs and the next by its inputs, so
    that the tensors between them are split as well, or each by its outputs, which are "gathered" immediately.
    ends: "parts" if the tables of the embedding, the last norm and the logits' product are separate blocks, so that the
    tensors between them are kept.
    """

    runtime: Literal["megatron", "atoll"] = "atoll"
    norms: Literal["fused", "parts", "precise"] = "fused"
    statistics: int = 0
    results: int = 0
    softmax: Literal["compute", "fp32"] = "compute"
    repeats_keys: bool = False
    is_fused: bool = False
    heads: Literal["inner", "outer"] = "inner"
    copies: Literal["half", "all"] = "half"
    keeps_angles: bool = False
    waits: bool = True
    splits: Literal["paired", "gathered"] = "paired"
    ends: Literal["whole", "parts"] = "whole"

    def saved_by_norm(self, use: Use, name: str, elements: int, width: int, *, is_kept: bool) -> Iterator[Saved]:
        """Return the bytes that a norm saves for `elements` in rows of `width`. is_kept: whether its input is kept for
        another reason."""
        precise = 4 if self.norms == "parts" else max(4, use.item)
        is_copied = self.norms != "fused" and use.item != precise
        if is_copied:
            yield Saved(f"{name}'s input in fp32", precise * elements, "I")
        elif not is_kept:
            yield Saved(f"{name}'s input", use.item * elements, "I")
        if self.norms != "fused":
            item = precise if self.norms == "precise" else use.item
            yield Saved(f"{name}'s normalised input", item * elements, "I")
        if self.statistics:
            yield Saved(f"{name}'s statistics", self.statistics * precise * (elements // width), "I")


MEGATRON = Implementation(runtime="megatron")
"""Megatron-LM's kernels."""

DECODER = Implementation(statistics=1, results=1, heads="outer", keeps_angles=True)
"""`atoll.runtime.models.Decoder` on CUDA."""

DECODER_ON_CPU = replace(DECODER, norms="precise", copies="all")
"""`atoll.runtime.models.Decoder` on the CPU, which has no fused norm."""

LLAMA = Implementation(norms="parts", statistics=1, results=1, softmax="fp32", repeats_keys=True, ends="parts")
"""Llama and similar models in transformers."""

GPT2 = Implementation(statistics=2, results=3, waits=False, splits="gathered", ends="parts")
"""GPT-2 in transformers. Its activation is computed in steps, the weight gradients of its `Conv1D` are not deferred to
W, and it has no tensor-parallel plan."""

GPT_NEOX = Implementation(statistics=2, softmax="fp32", is_fused=True, heads="outer", ends="parts")
"""GPT-NeoX in transformers."""

BERT = Implementation(statistics=2, splits="gathered")
"""BERT in transformers, which has no tensor-parallel plan."""
