"""Which samples a rank sees, and what is hidden of them: those of one process, cut."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.plans.plan import MeshShape
from atoll.training.config import Config
from atoll.training.config.load import from_dict
from atoll.training.data import IGNORED_LABEL, Supply, TokenBatch
from atoll.training.setup.samples import Samples, prepare_corpus

BATCH = 12


@pytest.fixture(scope="module", params=["causal", "masked 0.4"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Supply]:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text("ab" * 3000)  # all samples are alike: only their positions differ
    config = from_dict(
        {
            "data": {
                "source": str(folder / "text.txt"),
                "tokenizer": "bytes",
                "sequence": 40,
                "cache": str(folder),
                "validation": 0.4,
            },
            "train": {"global_batch": BATCH, "microbatch": 1, "objective": request.param},
        }
    )
    return config, prepare_corpus(config)


def samples(job: tuple[Config, Supply], mesh: MeshShape) -> list[Samples]:
    """Those of every rank."""
    return [Samples(*job, mesh.place(rank)) for rank in range(mesh.world)]


def together(shares: list[TokenBatch]) -> TokenBatch:
    return {name: np.concatenate([share[name] for share in shares]) for name in shares[0]}


def is_same(one: TokenBatch, other: TokenBatch) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("mesh", [MeshShape(intra=2), MeshShape(inter=3), MeshShape(inter=2, intra=3)])
def test_the_shares_of_data_parallel_ranks_are_one_processs_batch(job: tuple[Config, Supply], mesh: MeshShape) -> None:
    (alone,), ranks = samples(job, MeshShape()), samples(job, mesh)
    for _ in range(3):
        assert is_same(together([rank.take() for rank in ranks]), alone.take())
        assert {rank.position for rank in ranks} == {alone.position}
    wanted = list(alone.validation())
    assert wanted
    for shares, (_, whole) in zip(zip(*(rank.validation() for rank in ranks), strict=True), wanted, strict=True):
        assert is_same(together([share for _, share in shares]), whole)


def test_pipeline_ranks_see_the_same(job: tuple[Config, Supply]) -> None:
    first, last = samples(job, MeshShape(pipeline=2))
    assert is_same(first.take(), last.take())


def test_looking_ahead_and_resuming_change_nothing(job: tuple[Config, Supply]) -> None:
    one, other = (samples(job, MeshShape(intra=2))[1] for _ in range(2))
    one.take()
    ahead = one.peek()
    assert one.position == BATCH
    other.position = BATCH  # as a checkpoint restores it
    assert is_same(ahead, one.take())
    assert is_same(ahead, other.take())


def test_no_two_samples_are_masked_alike(job: tuple[Config, Supply]) -> None:
    """Not on two ranks, in two steps or in two batches of the validation split."""
    if job[0].train.objective == "causal":
        return
    ranks = samples(job, MeshShape(inter=2, intra=2))
    for batches in (
        [rank.take() for _ in range(3) for rank in ranks],
        [b for rank in ranks for _, b in rank.validation()],
    ):
        masks = [tuple(row != IGNORED_LABEL) for batch in batches for row in batch["labels"]]
        full = [mask for mask in masks if sum(mask) > 5]  # the last sample may be padding
        assert len(full) > BATCH
        assert len(set(full)) == len(full)
