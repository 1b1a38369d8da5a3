"""A run of a mixture whose experts are divided and balanced: one process's losses, and its load in the metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.plans.plan import MeshShape
from atoll.training.output.folder import RunFolder, read_records
from atoll.training.run.oddities import expert_load
from tests.training.run.test_train import TEXT, settings, train_on_ranks

MODEL = {"config": {"experts": 4, "experts_per_token": 2, "scoring": "sigmoid", "selection_bias": True}}
ROUTER = {"bias_rate": 0.0625, "sequence_loss": 0.01, "z_loss": 0.01}


@pytest.mark.slow
def test_a_balanced_run_on_two_ranks(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(TEXT)
    train = {"steps": 4, "router": ROUTER}
    one = settings(tmp_path / "one", corpus, model=MODEL, train=train)
    two = settings(tmp_path / "two", corpus, model=MODEL, train=train)
    two["parallel"] |= {"ranks": 2, "intra": 2, "expert": 2, "recompute": "block"}
    del two["train"]["prompt"], one["train"]["prompt"]
    train_on_ranks(one)
    train_on_ranks(two)
    alone, together = (read_records(RunFolder(tmp_path / name).metrics) for name in ("one", "two"))
    assert [each["loss"] for each in together] == pytest.approx([each["loss"] for each in alone], rel=1e-10)
    assert not [key for each in alone for key in each if key.startswith(("expert", "exchange"))]
    for each in together:
        # 8 sequences of 16 tokens, two experts for each token, two layers, two ranks.
        assert each["expert_rows"] / each["expert_imbalance"] == pytest.approx(8 * 16 * 2 * 2 / 2)
        assert (each["expert_dropped"], each["exchange_seconds"] > 0) == (0, True)


def test_the_load_is_compared_among_peers() -> None:
    mesh = MeshShape(pipeline=2, intra=2)
    found = expert_load([30.0, 10.0, 6.0, 6.0], [0.5, 0.25, 0.0, 0.0], mesh)
    assert found == {"expert_rows": 30.0, "expert_imbalance": 1.5, "expert_dropped": 0, "exchange_seconds": 0.5}
