"""The masked objective: what is hidden depends on the seed and a sample's position, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.training.data import IGNORED_LABEL, TokenBatch, hide

TOKEN = 1000
"""What hides: the ids below it are tokens."""


def one_text(samples: int, length: int = 400) -> TokenBatch:
    """The same tokens in every sample, so that only positions can tell them apart."""
    ids = np.tile(np.arange(length) % 7, (samples, 1))
    return {"input_ids": ids, "labels": np.roll(ids, -1, axis=1)}


def chosen(hidden: TokenBatch) -> NDArray[np.bool_]:
    """Which positions are to be predicted, [samples, length]."""
    mask: NDArray[np.bool_] = hidden["labels"] != IGNORED_LABEL
    return mask


def assert_independent(one: NDArray[np.bool_], other: NDArray[np.bool_], ratio: float) -> None:
    """Two masks of `ratio` meet as often as chance has it, within six standard deviations."""
    share = ratio * ratio
    deviation = (one.size * share * (1 - share)) ** 0.5
    assert abs(int((one & other).sum()) - one.size * share) < 6 * deviation


@given(first=st.integers(0, 2**40), samples=st.integers(1, 9), cut=st.integers(0, 9), seed=st.integers(0, 2**31))
def test_ranks_hide_what_one_process_hides(first: int, samples: int, cut: int, seed: int) -> None:
    """However a batch is cut, a sample is hidden by its position alone."""
    batch, cut = one_text(samples, 24), min(cut, samples)
    whole = hide(batch, range(first, first + samples), seed=seed, ratio=0.4, token=TOKEN)
    for part in (slice(0, cut), slice(cut, samples)):
        share = {name: values[part] for name, values in batch.items()}
        mine = hide(share, range(first, first + samples)[part], seed=seed, ratio=0.4, token=TOKEN)
        assert all(np.array_equal(mine[name], whole[name][part]) for name in whole)


def test_any_two_positions_are_hidden_independently() -> None:
    ratio = 0.3
    masks = chosen(hide(one_text(24), range(24), seed=5, ratio=ratio, token=TOKEN))
    for at, one in enumerate(masks):
        for other in masks[at + 1 :]:
            assert_independent(one, other, ratio)
    assert len({mask.tobytes() for mask in masks}) == 24


def test_another_seed_hides_other_tokens() -> None:
    one, other = (hide(one_text(8), range(8), seed=seed, ratio=0.3, token=TOKEN) for seed in (0, 1))
    assert_independent(chosen(one), chosen(other), 0.3)
    # The position and the seed are not added up.
    moved = hide(one_text(8), range(1, 9), seed=0, ratio=0.3, token=TOKEN)
    assert_independent(chosen(other), chosen(moved), 0.3)


@pytest.mark.parametrize("ratio", [0.15, 0.5])
def test_shares(ratio: float) -> None:
    """`ratio` of the tokens are chosen: four in five are hidden, one in ten becomes any token, the rest stay."""
    given_batch = one_text(200)
    made = hide(given_batch, range(200), seed=0, ratio=ratio, token=TOKEN)
    mask, before, after = chosen(made), given_batch["input_ids"], made["input_ids"]
    count = int(mask.sum())

    def is_share(found: int, of: int, share: float) -> bool:
        return abs(found - of * share) < 6 * (of * share * (1 - share)) ** 0.5

    assert is_share(count, mask.size, ratio)
    assert is_share(int((after[mask] == TOKEN).sum()), count, 0.8)
    assert is_share(int((after[mask] == before[mask]).sum()), count, 0.1 + 0.1 / TOKEN)
    others = after[mask & (after != TOKEN) & (after != before)]
    assert is_share(int((others >= TOKEN // 2).sum()), len(others), 0.5)
    assert others.max() < TOKEN


def test_labels_are_what_was_there_and_nothing_else_changes() -> None:
    before = one_text(5)
    kept = {name: values.copy() for name, values in before.items()}
    made = hide(before, range(5), seed=0, ratio=0.3, token=TOKEN)
    mask = chosen(made)
    assert np.array_equal(made["labels"][mask], kept["input_ids"][mask])
    assert np.array_equal(made["input_ids"][~mask], kept["input_ids"][~mask])
    assert all(np.array_equal(before[name], kept[name]) for name in kept), "what was given stays as it is"


def test_padding_is_never_chosen() -> None:
    batch = one_text(6)
    batch["labels"][:, 150:] = IGNORED_LABEL
    made = hide(batch, range(6), seed=0, ratio=0.5, token=TOKEN)
    assert chosen(made)[:, :150].any(axis=1).all()
    assert not chosen(made)[:, 150:].any()
    assert np.array_equal(made["input_ids"][:, 150:], batch["input_ids"][:, 150:])


def test_tokens_that_begin_and_end_documents_stay() -> None:
    batch = one_text(4)
    hidden = hide(batch, range(4), seed=0, ratio=0.5, token=TOKEN, kept=[0, 6])
    without = hide(batch, range(4), seed=0, ratio=0.5, token=TOKEN)
    stays = np.isin(batch["input_ids"], [0, 6])
    assert not chosen(hidden)[stays].any()
    assert np.array_equal(chosen(hidden)[~stays], chosen(without)[~stays])
    assert np.array_equal(hidden["input_ids"][~stays], without["input_ids"][~stays])
