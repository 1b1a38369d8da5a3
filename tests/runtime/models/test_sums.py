"""A mean is told from a sum by the two parts of a microbatch, and from what is neither."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from atoll.base.errors import PlanError
from atoll.runtime.models.sums import check_sum

CLASSES = 5


def entropy(how: str) -> Any:
    return lambda outputs, batch: F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), reduction=how)


def drawn(samples: int, *, hidden: float = 0.0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Outputs [samples, 6, CLASSES] and labels, of which a share is -100."""
    generator = torch.Generator().manual_seed(samples)
    labels = torch.randint(CLASSES, (samples, 6), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < hidden] = -100
    return torch.randn(samples, 6, CLASSES, generator=generator), {"labels": labels}


def told(loss: Any, outputs: Any, batch: Any) -> bool:
    return check_sum(loss, outputs, batch, found=loss(outputs, batch))


@pytest.mark.parametrize("hidden", [0.0, 0.5])
@pytest.mark.parametrize("samples", range(2, 8))
def test_a_mean_is_refused_and_a_sum_is_not(samples: int, hidden: float) -> None:
    outputs, batch = drawn(samples, hidden=hidden)
    assert told(entropy("sum"), outputs, batch)
    with pytest.raises(PlanError, match=rf"microbatch of {samples} samples, .*first {samples // 2} and .*: a mean"):
        told(entropy("mean"), outputs, batch)


def test_outputs_may_be_nested_and_parts_without_a_row_for_each_sample_stay() -> None:
    outputs, batch = drawn(4)
    nested = {"scores": (outputs, [torch.ones(3)]), "more": "words"}

    def loss(how: str) -> Any:
        return lambda given, batch: entropy(how)(given["scores"][0] * given["scores"][1][0][0], batch)

    assert told(loss("sum"), nested, batch)
    with pytest.raises(PlanError, match="a mean"):
        told(loss("mean"), nested, batch)


def test_what_tells_nothing_is_taken() -> None:
    outputs, batch = drawn(4)
    one, of_one = drawn(1)
    assert told(entropy("mean"), one, of_one)  # one sample has no parts
    assert told(lambda outputs, batch: (entropy("mean")(outputs, batch), 24), outputs, batch)  # it has its count
    weights = torch.ones(4, 1, 1)  # of all samples: parts have another shape
    assert told(lambda outputs, batch: (outputs * weights).mean(), outputs, batch)


def test_samples_against_one_another_are_no_mean() -> None:
    outputs, batch = drawn(6)

    def contrast(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        vectors = outputs.flatten(1)
        return F.cross_entropy(vectors @ vectors.T / 30, torch.arange(len(vectors)), reduction="sum")

    assert told(contrast, outputs, batch)


def test_it_is_asked_again_where_values_tell_nothing_yet() -> None:
    outputs, batch = drawn(4)
    batch["labels"][:2] = -100
    assert math.isnan(entropy("mean")(outputs[:2], {"labels": batch["labels"][:2]}))
    assert not told(entropy("mean"), outputs, batch)
    assert not told(lambda outputs, batch: outputs.sum() * 0, outputs, batch)
