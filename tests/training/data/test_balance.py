"""Steps of documents of very different length: microbatches and ranks with about equal attention work."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import ConfigError
from atoll.plans.plan import MeshShape
from atoll.training.config import Config
from atoll.training.config.load import from_dict
from atoll.training.data import Supply
from atoll.training.data.balance import balanced_order, imbalance
from atoll.training.setup.samples import Samples, prepare_corpus


@given(work=st.lists(st.floats(0, 1e6), min_size=1, max_size=24), rows=st.integers(1, 4), seed=st.integers(0, 1000))
@settings(max_examples=200)
def test_an_order_has_every_row_once_and_balances_no_worse(work: list[float], rows: int, seed: int) -> None:
    work *= rows  # a multiple
    order = balanced_order(work, rows)
    assert sorted(order) == list(range(len(work)))
    shuffled = random.Random(seed).sample(work, len(work))
    found = imbalance([work[at] for at in order], rows, 1).microbatches
    # Largest first is at most 4/3 of the best, and no order is better than the best.
    assert found <= 4 / 3 * imbalance(shuffled, rows, 1).microbatches + 1e-9


def test_microbatches_and_any_number_of_ranks_are_balanced() -> None:
    draw = random.Random(0)
    rows = [[draw.choice((512, 1024, 4096, 16384)) for _ in range(40)] for _ in range(64)]
    work = [float(sum(length**2 for length in row[: draw.randint(1, 40)])) for row in rows]
    order = balanced_order(work, 4)
    ordered = [work[at] for at in order]
    for shares in (1, 2, 4, 8, 16):
        before, after = imbalance(work, 4, shares), imbalance(ordered, 4, shares)
        assert after.microbatches < 1.1 < before.microbatches
        assert after.ranks <= min(before.ranks, 1.07)


def test_the_heaviest_row_bounds_what_an_order_can_do() -> None:
    work = [64.0, *[1.0] * 15]
    order = balanced_order(work, 2)
    found = imbalance([work[at] for at in order], 2, 4)
    assert found.microbatches == pytest.approx(65 / (79 / 8))
    assert found.ranks == pytest.approx(67 / (79 / 4))
    assert imbalance([0.0, 0.0], 1, 2) == (1.0, 1.0)


def config_of(folder: Path, **data: Any) -> Config:
    return from_dict(
        {
            "data": {
                "source": str(folder / "texts"),
                "tokenizer": "bytes",
                "sequence": 64,
                "cache": str(folder),
                "validation": 0.0,
                "packing": "documents",
                **data,
            },
            "train": {"global_batch": 16, "microbatch": 2, "seed": 3},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("balance")
    (found / "texts").mkdir()
    draw = random.Random(1)
    for number in range(400):
        length = draw.choice((3, 5, 9, 60))
        (found / "texts" / f"{number:03}.txt").write_text("".join(draw.choices("abcdefgh", k=length)))
    return found


def shares(config: Config, corpus: Supply, ranks: int, steps: int) -> list[list[bytes]]:
    """Return the rows of each step, those of rank 0 first."""
    mesh = MeshShape(intra=ranks)
    every = [Samples(config, corpus, mesh.place(rank)) for rank in range(ranks)]
    found = []
    for _ in range(steps):
        batches = [each.take() for each in every]
        found.append([row.tobytes() for batch in batches for row in batch["input_ids"]])
    return found


@pytest.mark.parametrize("streaming", [False, True])
def test_a_step_has_the_same_rows_in_an_order_that_no_ranks_change(folder: Path, streaming: bool) -> None:
    plain, config = (config_of(folder, balance=way, streaming=streaming) for way in (False, True))
    corpus = prepare_corpus(config)
    alone, four = (shares(config, corpus, ranks, 3) for ranks in (1, 4))
    assert alone == four
    before = shares(plain, corpus, 2, 3)
    assert [sorted(rows) for rows in alone] == [sorted(rows) for rows in before]
    assert alone != before
    ratios = []
    for position in range(0, 96, 16):
        was, now = (Samples(each, corpus, MeshShape(intra=4).place(0)).imbalance(position) for each in (plain, config))
        assert was is not None
        assert now is not None
        assert now.microbatches <= was.microbatches + 1e-9
        ratios.append(now.ranks / was.ranks)
    assert sum(ratios) < 0.99 * len(ratios)
    whole = Samples(config, corpus, MeshShape().place(0))
    assert [corpus.names(whole.position_of(16, at), 1)[0] for at in range(16)] == whole.sequences(16, range(16))
    assert Samples(plain, corpus, MeshShape().place(0)).position_of(16, 3) == 19
    names = whole.sequences(16, range(16))
    assert sorted(names, key=str) == sorted(corpus.names(16, 16), key=str)
    assert names != corpus.names(16, 16)
    corpus.close()


def test_the_work_of_a_row_is_that_of_its_documents(folder: Path) -> None:
    corpus = prepare_corpus(config_of(folder))
    batch, work = corpus.take(0, 40), corpus.work(0, 40)
    for positions, own in zip(batch["position_ids"], work.tolist(), strict=True):
        begins = [*np.flatnonzero(positions == 0).tolist(), 64]
        assert own == sum((end - begin) ** 2 for begin, end in pairwise(begins))
    again = corpus.at([7, 3])
    assert np.array_equal(again["input_ids"], batch["input_ids"][[7, 3]])
    blocks = prepare_corpus(config_of(folder, packing="blocks"))
    assert blocks.work(0, 3).tolist() == [64.0**2] * 3


def test_balance_is_for_rows_of_documents(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r'packing = "pad" all rows have the same attention work'):
        config_of(folder, packing="pad", balance=True)
