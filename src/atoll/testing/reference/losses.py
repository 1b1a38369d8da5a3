"""The forward of a microbatch, its loss, and what counts in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.testing.reference.model import Recipe, base_of

IGNORED = -100
_LABELS = ("labels", "start_positions", "end_positions")


def forward(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the logits, or other outputs, of the model's own forward. A decoder beside an encoder also takes the
    labels."""
    config: Any = getattr(base_of(model), "config", None)
    reads_labels = getattr(config, "is_encoder_decoder", False)
    inputs = {
        name: value for name, value in batch.items() if name not in _LABELS or (reads_labels and name == "labels")
    }
    if hasattr(config, "use_cache"):
        config.use_cache = False
    first = inputs.get("input_ids", inputs.get("inputs"))
    output: Any = model(first) if isinstance(model, nn.Sequential) else model(**inputs)
    if hasattr(output, "start_logits"):
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    logits: Tensor = getattr(output, "logits", output)
    return logits


def summed_loss(recipe: Recipe, outputs: Any, batch: Mapping[str, Any]) -> Any:
    """Return the recipe's loss, or token cross-entropy; a pair if the recipe's loss returns a count."""
    own: Callable[[Any, Mapping[str, Any]], Any] | None = getattr(recipe, "loss", None)
    return token_loss(outputs, batch["labels"]) if own is None else own(outputs, batch)


def _count(batch: Mapping[str, Any]) -> int:
    """Return the number of labels that count: integers except -100, all others; samples if there are no labels."""
    labels = batch.get("labels")
    if isinstance(labels, Tensor):
        return labels.numel() if labels.is_floating_point() else int((labels != IGNORED).sum())
    value: Any = batch
    while not isinstance(value, Tensor):
        value = next(iter(value.values()))
    return len(value)


def rows(batch: Mapping[str, Any], first: int, count: int, device: str) -> dict[str, Any]:
    """Return some samples of a batch."""
    return {
        name: value[first:][:count].to(device) if isinstance(value, Tensor) else rows(value, first, count, device)
        for name, value in batch.items()
    }


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return cross-entropy summed over the labels that are not -100, in fp32 (fp64 for fp64 logits)."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
