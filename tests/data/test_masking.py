"""Masked language modelling: which tokens are hidden, by what, and what the model has to say."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.data.masking import hide
from atoll.data.order import IGNORED_LABEL

TOKEN = 1000
LENGTH = 40_000


def batch(rows: int = 2, padding: int = 0) -> dict[str, np.ndarray]:
    """Tokens that stand for themselves: none is `TOKEN`, and none is below it."""
    ids = np.arange(TOKEN + 1, TOKEN + 1 + LENGTH, dtype=np.int64) * np.ones((rows, 1), dtype=np.int64)
    labels = ids.copy()
    labels[:, LENGTH - padding :] = IGNORED_LABEL
    return {"input_ids": ids, "labels": labels}


def hidden(positions: list[int], *, seed: int = 0, padding: int = 0, ratio: float = 0.15) -> dict[str, np.ndarray]:
    return hide(batch(len(positions), padding), positions, seed=seed, ratio=ratio, token=TOKEN)


def test_of_the_chosen_tokens_eight_tenths_are_hidden_and_one_is_another() -> None:
    given, found = batch(1), hidden([5])
    chosen = found["labels"] != IGNORED_LABEL
    assert (found["labels"][chosen] == given["input_ids"][chosen]).all()
    assert (found["input_ids"][~chosen] == given["input_ids"][~chosen]).all()
    count = chosen.sum()
    assert count / LENGTH == pytest.approx(0.15, abs=0.01)
    now = found["input_ids"][chosen]
    assert (now == TOKEN).sum() / count == pytest.approx(0.8, abs=0.03)
    assert (now < TOKEN).sum() / count == pytest.approx(0.1, abs=0.02)
    assert ((now == given["input_ids"][chosen]) | (now <= TOKEN)).all()
    others = now[now < TOKEN]
    assert others.min() >= 0
    assert len(np.unique(others)) > 400  # of about 600 draws among a thousand


def test_a_sample_is_hidden_by_its_position_wherever_it_stands() -> None:
    together, alone = hidden([3, 8]), hidden([8])
    for name, rows in together.items():
        assert (rows[1] == alone[name][0]).all()
        assert (rows[0] != rows[1]).any()
    assert (hidden([8], seed=1)["labels"] != alone["labels"]).any()


def test_what_has_no_label_is_not_chosen_and_the_batch_stays_as_it_was() -> None:
    given = batch(1, padding=LENGTH // 2)
    before = {name: rows.copy() for name, rows in given.items()}
    found = hide(given, [0], seed=0, ratio=1.0, token=TOKEN)
    half = LENGTH // 2
    assert (found["labels"][0, :half] == before["input_ids"][0, :half]).all()
    assert (found["labels"][0, half:] == IGNORED_LABEL).all()
    assert (found["input_ids"][0, half:] == before["input_ids"][0, half:]).all()
    for name, rows in before.items():
        assert (given[name] == rows).all()
