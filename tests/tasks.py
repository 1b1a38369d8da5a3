"""Tiny Hugging Face models with other heads than those of language models, and encoders with decoders.

Losses are implemented here again, in plain torch: those of transformers compute in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.testing.reference import IGNORED, token_loss
from tests.families import CAUSAL, MASKED, family_config, quietly

CLASSES = 5
IMAGE = 8

_SEES = {"image_size": IMAGE, "patch_size": 4, "num_channels": 3, "num_hidden_layers": 4, "hidden_size": 16}
_VIT = {**_SEES, "num_attention_heads": 4, "intermediate_size": 24}
_TWO = {
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": 48,
    "decoder_start_token_id": 0,
}

CLASSIFIERS = ("bert", "roberta", "distilbert", "electra", "modernbert", "llama", "qwen2", "qwen3", "mistral", "gpt2")
"""Families with heads for classes of samples and of tokens, of the sizes of their language models."""

IMAGES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "vit": _VIT,
        "deit": {**_VIT, "architectures": ["DeiTForImageClassification"]},
        "dinov2": {**_VIT, "mlp_ratio": 2},
        "dinov2_with_registers": {**_VIT, "mlp_ratio": 2, "num_register_tokens": 2},
        "beit": {**_VIT, "use_relative_position_bias": True},
        "siglip": {"vision_config": {**_VIT, "vision_use_head": False}, "text_config": {"num_hidden_layers": 3}},
        "clip": {"vision_config": _VIT, "text_config": {"num_hidden_layers": 3}},
    }
)
"""Families with a head for image classification."""

TRANSLATORS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "t5": _T5,
        "mt5": {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "umt5": _T5,
        "bart": _TWO,
        "mbart": _TWO,
        "pegasus": _TWO,
        "marian": _TWO,
        "blenderbot": _TWO,
        "blenderbot-small": _TWO,
        "plbart": _TWO,
    }
)
"""Families with an encoder and a decoder of tokens."""

LISTENERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"whisper": {**_TWO, "num_mel_bins": 6, "max_source_positions": 8, "max_target_positions": 32}}
)
"""Families with an encoder of sound and a decoder of tokens."""

_HEADS = MappingProxyType(
    {
        "sequence": "AutoModelForSequenceClassification",
        "tokens": "AutoModelForTokenClassification",
        "spans": "AutoModelForQuestionAnswering",
        "image": "AutoModelForImageClassification",
        "translation": "AutoModelForSeq2SeqLM",
        "speech": "AutoModelForSpeechSeq2Seq",
    }
)


@dataclass(frozen=True, slots=True)
class Headed:
    """A tiny model of a family with a head.

    head: "sequence", "tokens", "spans", "image", "translation" or "speech".
    problem: of classification, as transformers names it; None: one class.
    """

    name: str
    head: str = "sequence"
    problem: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def build(self) -> nn.Module:
        """Return the model on torch's current device, in training mode."""
        import transformers

        with quietly():
            model: nn.Module = getattr(transformers, _HEADS[self.head]).from_config(self.config())
        return model.train()

    def config(self) -> Any:
        """The model's configuration."""
        import transformers

        own = dict(self.options)
        if self.head in ("sequence", "tokens", "image"):
            own |= {"num_labels": 1 if self.problem == "regression" else CLASSES, "problem_type": self.problem}
        if self.name in (*CAUSAL, *MASKED):
            return family_config(self.name, **own)
        sizes = {**IMAGES, **TRANSLATORS, **LISTENERS}[self.name]
        with quietly():
            return transformers.AutoConfig.for_model(
                self.name, **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **sizes, **own}
            )

    def batch(self, step: int, samples: int, sequence: int = 6) -> dict[str, Any]:
        """Return a step's samples, some with ignored labels."""
        draw = torch.Generator().manual_seed(1000 + step)
        lengths = torch.randint(sequence // 2, sequence + 1, (samples, 1), generator=draw)
        is_there = torch.arange(sequence)[None, :] < lengths
        ids = torch.randint(3, 48, (samples, sequence), generator=draw).masked_fill(~is_there, 0)
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": is_there.long()}
        match self.head:
            case "image":
                batch = {"pixel_values": torch.randn(samples, 3, IMAGE, IMAGE, generator=draw, dtype=torch.float64)}
            case "speech":
                batch = {"input_features": torch.randn(samples, 6, 16, generator=draw, dtype=torch.float64)}
            case "tokens":
                labels = torch.randint(CLASSES, (samples, sequence), generator=draw)
                return {**batch, "labels": labels.masked_fill(~is_there, IGNORED)}
            case "spans":
                first, last = torch.randint(sequence + 1, (2, samples), generator=draw)  # some are after the text
                return {**batch, "start_positions": first, "end_positions": last}
        if self.head in ("translation", "speech"):
            labels = torch.randint(3, 48, (samples, 4), generator=draw)
            return {**batch, "labels": labels.masked_fill(torch.rand(samples, 4, generator=draw) < 0.2, IGNORED)}
        return {**batch, "labels": self._labels(samples, draw)}

    def _labels(self, samples: int, draw: torch.Generator) -> Tensor:
        if self.problem == "regression":
            return torch.randn(samples, generator=draw, dtype=torch.float64)
        if self.problem == "multi_label_classification":
            return torch.randint(2, (samples, CLASSES), generator=draw).double()
        labels = torch.randint(CLASSES, (samples,), generator=draw)
        labels[0] = IGNORED
        return labels

    def loss(self, outputs: Tensor, batch: Mapping[str, Any]) -> Tensor | tuple[Tensor, int]:
        """Return the loss summed over what counts; for answers, the mean of both ends and the samples whose answer is
        in the text."""
        if self.head == "spans":
            ends = (batch["start_positions"], batch["end_positions"])
            has_answer = (ends[0] < outputs.shape[1]) & (ends[1] < outputs.shape[1])
            each = [
                F.cross_entropy(outputs[has_answer, :, at], end[has_answer], reduction="sum")
                for at, end in enumerate(ends)
            ]
            return sum(each, outputs.new_zeros(())) / 2, int(has_answer.sum())
        labels = batch["labels"]
        if self.problem == "regression":
            return ((outputs[:, 0] - labels) ** 2).sum()
        if self.problem == "multi_label_classification":
            return -(labels * F.logsigmoid(outputs) + (1 - labels) * F.logsigmoid(-outputs)).sum()
        return token_loss(outputs, labels)
