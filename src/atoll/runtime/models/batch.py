"""Batches: tensors by name, in mappings that may be nested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from atoll.base.errors import PlanError
from atoll.base.labels import IGNORED_LABEL

Batch = Mapping[str, Any]
"""Tensors (or arrays) by name; values may be mappings of tensors themselves. Every tensor has a sample in each row."""


def tensors_in(batch: Batch, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its path, such as `image.pixels`."""
    for name, value in batch.items():
        if isinstance(value, Mapping):
            yield from tensors_in(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return the same nested structure with every tensor changed."""
    return {
        name: map_tensors(value, change) if isinstance(value, Mapping) else change(value)
        for name, value in batch.items()
    }


def as_tensors(batch: Batch, prefix: str = "") -> dict[str, Any]:
    """Return the batch as tensors, which stay where they are.

    Raises PlanError for values that are neither a mapping nor a tensor or an array with a row for each sample.
    """
    if not isinstance(batch, Mapping):
        raise PlanError(
            f"the batch is a {type(batch).__name__}; give tensors by name, such as "
            '{"input_ids": ..., "labels": ...}: a dict, in which values may be dicts of tensors'
        )
    found: dict[str, Any] = {}
    for name, value in batch.items():
        path = f"{prefix}{name}"
        if not isinstance(name, str):
            raise PlanError(f"the batch has the key {path} of type {type(name).__name__}; keys are strings")
        if isinstance(value, Mapping):
            found[name] = as_tensors(value, f"{path}.")
            continue
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PlanError(
                f"the batch's {path} is a {type(value).__name__} that cannot become a tensor ({error}); give tensors, "
                "arrays, or dicts of these"
            ) from error
        if tensor.dim() == 0:
            raise PlanError(f"the batch's {path} is a single number; every tensor of a batch has a row for each sample")
        found[name] = tensor
    return found


def on_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    """Return the batch on a device. Copies to a GPU are from pinned memory, so the host does not wait for them; the
    allocator of pinned memory keeps a copy's source until the GPU has read it."""

    def move(tensor: Tensor) -> Tensor:
        if tensor.device == device:
            return tensor
        if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return map_tensors(batch, move)


def count_labels(batch: Batch) -> Tensor:
    """Return the number of labels that count, on the batch's device: integers except -100, all others, or samples if
    there are no labels.

    A mapping of `labels` counts as none: only the loss knows its meaning.
    """
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        return (labels != IGNORED_LABEL).sum()
    _, first = next(tensors_in(batch))
    count = labels.numel() if isinstance(labels, Tensor) else first.shape[0]
    return torch.tensor(count, device=first.device)
