"""Heads of Hugging Face models: their outputs as one tensor, and their loss.

The kind of a head is the one by which transformers selects the model's own loss. The losses are the same, as sums:

    tokens   a class per token: language models (causal, masked or with an encoder), token classification
    classes  a class, several classes or a number per sample: sequence and image classification, depending on
             `config.problem_type` and `config.num_labels`
    spans    the first and the last token of an answer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.base.errors import PlanError
from atoll.base.labels import IGNORED_LABEL
from atoll.runtime.models.adapter import token_cross_entropy
from atoll.runtime.models.batch import Batch

SPAN = ("start_positions", "end_positions")
"""Labels of question answering."""

LABELS = ("labels", *SPAN)
"""Keys of labels in a batch, which the model's forward does not receive."""


Summed = Tensor | tuple[Tensor, Tensor]
"""The sum of the losses that count, with their number if labels do not determine it."""


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a head.

    outputs: the result of the model's forward -> one tensor, or None if it has none.
    loss: (that tensor, batch, the model's configuration) -> see `Summed`.
    is_language: whether there is a score for each word of the vocabulary.
    """

    name: str
    outputs: Callable[[Any], Tensor | None]
    loss: Callable[[Tensor, Batch, Any], Summed]
    is_language: bool = False


def task_of(model: nn.Module) -> Task:
    """Return the task of a transformers model; one whose loss has no name of its own is a language model."""
    return _TASKS.get(str(getattr(model, "loss_type", None)), _LANGUAGE)


def _logits(output: Any) -> Tensor | None:
    found: Tensor | None = getattr(output, "logits", None)
    return found


def _span_logits(output: Any) -> Tensor | None:
    """Return [B, S, 2]: the scores of each token as the first and as the last of the answer."""
    if getattr(output, "start_logits", None) is None:
        return None
    return torch.stack([output.start_logits, output.end_logits], dim=-1)


def _token_loss(logits: Tensor, batch: Batch, config: Any) -> Tensor:
    return token_cross_entropy(logits, batch)


def _class_loss(logits: Tensor, batch: Batch, config: Any) -> Summed:
    """Return the loss of [B, num_labels] against labels of [B], or of the logits' shape for several labels and
    regression."""
    labels = torch.as_tensor(batch["labels"], device=logits.device)
    scores = logits if logits.dtype == torch.float64 else logits.float()
    problem = config.problem_type or _problem_of(config.num_labels, labels)
    if problem == "single_label_classification":
        _check_labels(labels.numel() == logits.shape[0] and not labels.is_floating_point(), logits, labels, problem)
        return F.cross_entropy(scores, labels.view(-1), ignore_index=IGNORED_LABEL, reduction="sum")
    _check_labels(labels.numel() == logits.numel(), logits, labels, problem)
    labels = labels.view(scores.shape)
    wanted = labels.to(scores.dtype)
    if problem == "regression":
        losses = F.mse_loss(scores, wanted, reduction="none")
    else:
        losses = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    counts = labels != IGNORED_LABEL
    return torch.where(counts, losses, 0.0).sum(), counts.sum()


def _problem_of(classes: int, labels: Tensor) -> str:
    """Return the problem type that transformers assumes from the labels if the configuration has none."""
    if classes == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def _check_labels(is_right: bool, logits: Tensor, labels: Tensor, problem: str) -> None:
    if not is_right:
        wanted = (
            "an integer for each sample" if problem == "single_label_classification" else "a number for each output"
        )
        raise PlanError(
            f"labels of {labels.dtype} and shape {tuple(labels.shape)} for outputs of shape {tuple(logits.shape)}: "
            f"{problem} takes {wanted}; see config.problem_type and config.num_labels of the model"
        )


def _span_loss(logits: Tensor, batch: Batch, config: Any) -> tuple[Tensor, Tensor]:
    """Return the mean of both cross-entropies, summed over the samples whose answer is inside the sequence, and their
    number."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    length = scores.shape[1]
    first, last = (torch.as_tensor(batch[key], device=logits.device).view(-1) for key in SPAN)
    counts = (first >= 0) & (first < length) & (last >= 0) & (last < length)
    losses = [
        F.cross_entropy(scores[..., at], where.masked_fill(~counts, IGNORED_LABEL), reduction="sum")
        for at, where in enumerate((first, last))
    ]
    return (losses[0] + losses[1]) / 2, counts.sum()


_LANGUAGE = Task("language modelling", _logits, _token_loss, is_language=True)
_CLASSES = Task("classification", _logits, _class_loss)

_TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "ForSequenceClassification": _CLASSES,
        "ForImageClassification": _CLASSES,
        "ForTokenClassification": Task("token classification", _logits, _token_loss),
        "ForQuestionAnswering": Task("question answering", _span_logits, _span_loss),
    }
)
"""Tasks by the name of transformers' loss."""
