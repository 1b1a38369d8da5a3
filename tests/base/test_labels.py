"""The label that no loss counts."""

from __future__ import annotations

import torch

from atoll.base.labels import IGNORED_LABEL


def test_the_label_that_is_not_counted_is_that_of_torchs_losses() -> None:
    """Data of others have it already: transformers' collators write what torch's losses leave out."""
    assert torch.nn.CrossEntropyLoss().ignore_index == IGNORED_LABEL
