"""What the code of a transformer saves for the backward: the same sizes, other bytes.

Every implementation saves the inputs of its products, queries, keys and values. The rows below say what else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from atoll.cost.work import Saved, Use


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """What code runs a transformer, and under which runtime.

    runtime: "megatron" keeps what Korthikanti et al. (arXiv 2205.05198) list. "atoll" counts a batch's ids with the
    batch, keeps the logits beside their log-softmax, recomputes every block but tables, and keeps the outputs of
    products where recomputing is selective, instead of all but attention's scores.
    norms: "fused" norms save their input; norms in "parts" save it in fp32, and the normalised hidden state besides.
    statistics: numbers in fp32 that a norm saves for each row.
    results: tensors of the feed-forward's width that the activation saves besides its inputs and its last result.
    softmax: "fp32" where eager attention saves the softmax in fp32 and again in the compute dtype.
    repeats_keys: whether eager attention saves keys and values once for each head of queries.
    is_fused: whether one product makes queries, keys and values.
    heads: "outer" where queries lie head by head, not token by token, when they come to attention.
    keeps_angles: whether each layer saves rotary angles of its own.
    waits: whether the gradients of the layers' weights are made in W.
    ends: "parts" where the tables of the embedding, the last norm and the logits' product are blocks of their own, so
    that what passes between them is kept.
    """

    runtime: Literal["megatron", "atoll"] = "atoll"
    norms: Literal["fused", "parts"] = "fused"
    statistics: int = 0
    results: int = 0
    softmax: Literal["compute", "fp32"] = "compute"
    repeats_keys: bool = False
    is_fused: bool = False
    heads: Literal["inner", "outer"] = "inner"
    keeps_angles: bool = False
    waits: bool = True
    ends: Literal["whole", "parts"] = "whole"

    def saved_by_norm(self, use: Use, name: str, elements: int, width: int, *, is_kept: bool) -> Iterator[Saved]:
        """What a norm saves of `elements` in rows of `width`. is_kept: whether its input is kept for another
        reason."""
        is_copied = self.norms == "parts" and use.item != 4
        if is_copied:
            yield Saved(f"{name}'s input in fp32", 4 * elements, "I")
        elif not is_kept:
            yield Saved(f"{name}'s input", use.item * elements, "I")
        if self.norms == "parts":
            yield Saved(f"{name}'s normalised input", use.item * elements, "I")
        if self.statistics:
            precise = 4 if self.norms == "parts" else max(4, use.item)
            yield Saved(f"{name}'s statistics", self.statistics * precise * (elements // width), "I")


MEGATRON = Implementation(runtime="megatron")
"""Megatron-LM's kernels."""

DECODER = Implementation(statistics=1, results=1, heads="outer", keeps_angles=True)
"""`atoll.models.Decoder` on CUDA."""

LLAMA = Implementation(norms="parts", statistics=1, results=1, softmax="fp32", repeats_keys=True, ends="parts")
"""Llama and its kin in transformers."""

GPT2 = Implementation(statistics=2, results=3, waits=False, ends="parts")
"""GPT-2 in transformers: its activation is computed in steps, and its `Conv1D` is no linear layer that waits for W."""

GPT_NEOX = Implementation(statistics=2, softmax="fp32", is_fused=True, heads="outer", ends="parts")
"""GPT-NeoX in transformers."""

BERT = Implementation(statistics=2)
"""BERT in transformers."""
