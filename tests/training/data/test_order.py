"""The order of samples: laws at many sizes, and the batches it makes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atoll.base.errors import DataError
from atoll.training.data import IGNORED_LABEL, SampleOrder, batch, sample_count, validation_batches


@given(samples=st.integers(1, 60), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
@settings(max_examples=50)
def test_each_epoch_takes_each_sample_once(samples: int, seed: int, epoch: int) -> None:
    taken = SampleOrder(samples, seed).take(epoch * samples, samples)
    assert sorted(taken) == list(range(samples))


@given(
    samples=st.integers(1, 40),
    seed=st.integers(0, 1000),
    position=st.integers(0, 150),
    counts=st.lists(st.integers(0, 30), max_size=8),
)
@settings(max_examples=80)
def test_the_order_does_not_depend_on_how_it_is_taken(
    samples: int, seed: int, position: int, counts: list[int]
) -> None:
    order = SampleOrder(samples, seed)
    whole = SampleOrder(samples, seed).take(position, sum(counts))
    parts = []
    for count in counts:
        parts.append(order.take(position, count))
        assert len(parts[-1]) == count
        position += count
    assert np.concatenate([np.empty(0, np.int64), *parts]).tolist() == whole.tolist()


def test_epochs_and_seeds_differ() -> None:
    order = SampleOrder(50, 0)
    first, second = order.take(0, 50), order.take(50, 50)
    assert first.tolist() != second.tolist()
    assert SampleOrder(50, 1).take(0, 50).tolist() != first.tolist()
    assert order.take(0, 50).tolist() == first.tolist()


WORDS = st.tuples(st.integers(0, 2**31), st.integers(0, 40), st.integers(0, 9))
"""Seed, epoch and number of the source."""


@given(samples=st.integers(20, 60), one=WORDS, other=WORDS, at=st.integers(0, 2))
@settings(max_examples=100)
def test_orders_of_two_seeds_epochs_or_sources_differ(
    samples: int, one: tuple[int, int, int], other: tuple[int, int, int], at: int
) -> None:
    """Two that differ in one word, and two that differ in any."""
    assume(one[at] != other[at])

    def order(words: tuple[int, int, int]) -> list[int]:
        seed, epoch, number = words
        return list(SampleOrder(samples, seed, number).take(epoch * samples, samples))

    near = (*one[:at], other[at], *one[at + 1 :])
    assert order(one) != order(near)
    assert order(one) != order(other)


def test_the_order_is_the_same_with_every_version_of_numpy() -> None:
    """A resumed run may not see another order: these values may never change."""
    pinned = [0, 8, 9, 3, 7, 5, 1, 2, 6, 4, 3, 7, 4, 2, 9, 8, 1, 6, 5, 0]
    assert SampleOrder(10, 0).take(0, 20).tolist() == pinned


def test_a_batch_is_cut_as_drawn() -> None:
    r"""Tokens 0..9 and sequence 3: sample 1 reads 3 4 5 and predicts 4 5 6."""
    tokens = np.arange(10, dtype=np.uint16)
    made = batch(tokens, np.array([1, 0, 2]), 3)
    assert made["input_ids"].tolist() == [[3, 4, 5], [0, 1, 2], [6, 7, 8]]
    assert made["labels"].tolist() == [[4, 5, 6], [1, 2, 3], [7, 8, 9]]
    assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in made.values())


@given(total=st.integers(0, 60), sequence=st.integers(1, 9))
@settings(max_examples=50)
def test_all_samples_fit_and_one_more_would_not(total: int, sequence: int) -> None:
    tokens = np.arange(total)
    samples = sample_count(tokens, sequence)
    assert batch(tokens, np.arange(samples), sequence)["labels"].shape == (samples, sequence)
    with pytest.raises(DataError, match=f"samples {samples}"):
        batch(tokens, np.array([samples]), sequence)


@given(total=st.integers(0, 80), sequence=st.integers(1, 9), size=st.integers(1, 5))
@settings(max_examples=80)
def test_validation_counts_every_token_once_in_batches_of_one_shape(total: int, sequence: int, size: int) -> None:
    tokens = np.arange(100, 100 + total, dtype=np.uint16)
    made = list(validation_batches(tokens, sequence, size=size))
    counted = []
    for each in made:
        assert each["input_ids"].shape == each["labels"].shape == (size, sequence)
        valid = each["labels"] != IGNORED_LABEL
        assert valid.any()
        assert (each["labels"][valid] == each["input_ids"][valid] + 1).all()
        counted += each["labels"][valid].tolist()
    assert counted == tokens[1:].tolist()


def test_validation_can_be_limited() -> None:
    whole = list(validation_batches(np.arange(50), 4, size=2))
    some = list(validation_batches(np.arange(50), 4, size=2, limit=3))
    assert len(whole) == 7
    assert [each["labels"].tolist() for each in some] == [each["labels"].tolist() for each in whole[:3]]


def test_impossible_orders_are_refused() -> None:
    with pytest.raises(DataError, match="at least 1 sample, got 0"):
        SampleOrder(0, 0)
    with pytest.raises(DataError, match="seed of at least 0, got -1"):
        SampleOrder(3, -1)
    with pytest.raises(DataError, match="position -1"):
        SampleOrder(3, 0).take(-1, 2)
    with pytest.raises(DataError, match=r"data\.sequence = 0"):
        sample_count(np.arange(5), 0)
