"""The masked-language objective (arXiv 1810.04805): the choice of masked tokens and of their replacements.

A share of a sample's tokens is chosen. Of these, 80 % become the mask token, 10 % become another token, and 10 % are
unchanged. The label of a chosen position is its original token; other positions have no label. The choice depends on
the seed and on the sample's position in the order, never on ranks or batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from atoll.base.labels import IGNORED_LABEL
from atoll.training.data.order import TokenBatch

HIDDEN, OTHER = 0.8, 0.1
"""Shares of the chosen tokens that become the mask token, and that become another token."""


def hide(
    batch: TokenBatch, positions: Iterable[int], *, seed: int, ratio: float, token: int, kept: Sequence[int] = ()
) -> TokenBatch:
    """Mask some tokens of the batch. `positions` are those of its samples in the order.

    token: id of the mask token. Replacements are ids below it, or all ids if it is the largest.  kept: ids that are
    never masked, such as those that begin and end documents.
    """
    ids = batch["input_ids"].copy()
    labels = np.full_like(ids, IGNORED_LABEL)
    for row, position in enumerate(positions):
        chance = np.random.default_rng((seed, position))
        is_there = batch["labels"][row] != IGNORED_LABEL
        chosen = (chance.random(ids.shape[1]) < ratio) & is_there & ~np.isin(ids[row], kept)
        labels[row, chosen] = ids[row, chosen]
        how = chance.random(ids.shape[1])
        others = chance.integers(token, size=ids.shape[1])
        ids[row] = np.where(chosen & (how < HIDDEN), token, ids[row])
        ids[row] = np.where(chosen & (how >= HIDDEN) & (how < HIDDEN + OTHER), others, ids[row])
    return {**batch, "input_ids": ids, "labels": labels}
