"""The loss in chunks of tokens: every schedule, layout and kind of model gives one process's result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from atoll.base.errors import PlanError, RankError
from atoll.plans import schedules
from atoll.runtime.engine import Engine
from atoll.runtime.models import Batch
from atoll.runtime.vocabulary.chunked import ChunkedLoss
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_parity, difference, train_case
from atoll.testing.tiny import TinyConfig
from tests.drawn import drawn
from tests.families import Family
from tests.mixtures import MIXTURES
from tests.runtime.test_sequence import IDS, Rows, Texts, assert_all
from tests.runtime.test_vocabulary import Small, evaluate

EVERYTHING = TinyConfig(layers=6, vocabulary=17, tied=True, frozen=True, odd=True, small=True, unused=True, dropout=0.2)
EVEN = replace(EVERYTHING, odd=False, vocabulary=16)
CHUNKED = Case(pipeline=2, loss_chunks=3, microbatches=4, steps=2, model=EVERYTHING)
NAMES = list(schedules.CATALOGUE)
LAYOUTS = ["NNN", "NNG", "IIG", "GGG", "ING"]


@pytest.mark.parametrize("count", [2, 5, 1000])
def test_without_a_pipeline(count: int) -> None:
    assert_parity(replace(CHUNKED, pipeline=1, intra=2, layout="GGG", loss_chunks=count, recompute="block"))


@pytest.mark.wide(6)
@pytest.mark.parametrize(("name", "pipeline"), drawn(len(NAMES), NAMES, [2, 3]))
def test_every_schedule(name: str, pipeline: int) -> None:
    assert_parity(replace(CHUNKED, schedule=name, pipeline=pipeline, microbatches=2 * pipeline))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "recompute"), drawn(len(LAYOUTS), LAYOUTS, ["none", "selective", "block"]))
def test_layouts_and_recompute(layout: str, recompute: str) -> None:
    assert_parity(replace(CHUNKED, layout=layout, intra=2, schedule="zb-v", microbatches=8, recompute=recompute))


ENDS = {
    "only the head": TinyConfig(vocabulary=17, trained=(5,)),
    "only the embedding": TinyConfig(vocabulary=17, trained=(0,)),
    "neither end": TinyConfig(vocabulary=17, trained=(1, 3)),
}


@pytest.mark.parametrize("ends", ENDS)
def test_which_ends_are_trained(ends: str) -> None:
    assert_parity(replace(CHUNKED, model=ENDS[ends], schedule="zb-h1", layout="IIG", intra=2))


BESIDE = [
    replace(CHUNKED, tensor=2, model=EVEN, schedule="zb-h1", recompute="selective"),
    replace(CHUNKED, tensor=2, model=Small(tied=True), sequence_parallel=True),
    replace(CHUNKED, intra=2, sequence=2, slices=2, model=Rows(documents=True), schedule="zb-v"),
    replace(CHUNKED, intra=2, expert=2, model=MIXTURES["groups"]),
    replace(CHUNKED, inter=2, microbatch=3, model=Small(tied=False), compile="block-eager"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo reads of what is no leaf
def test_beside_other_axes() -> None:
    assert_all(BESIDE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("llama", 1e-10), ("gemma2", 1e-5), ("cohere", 1e-6), ("granite", 1e-10)],  # one with a cap, two with a scale
)
def test_families(name: str, tolerance: float) -> None:
    pytest.importorskip("transformers")
    model = Texts(Family(name))
    assert_all([replace(CHUNKED, model=model), replace(CHUNKED, model=model, slices=2, schedule="zb-h1")], tolerance)


@pytest.mark.slow
def test_low_rank_adapters() -> None:
    pytest.importorskip("peft")
    assert_parity(replace(CHUNKED, model=Family("llama", lora=True), schedule="zb-h1"))


def test_post_validated_steps_that_are_taken_back() -> None:
    assert_parity(replace(CHUNKED, post_validation=True, clip=0.05, steps=4, schedule="zb-h2"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_near_what_it_is_without(precision: str) -> None:
    model = TinyConfig(vocabulary=17, tied=True)
    case = replace(CHUNKED, precision=precision, layout="IIG", intra=2, microbatches=8, schedule="zb-h1", model=model)
    chunks = run_ranks(train_case, 4, case)
    whole = run_ranks(train_case, 4, replace(case, loss_chunks=1))
    assert chunks[0].losses == pytest.approx(whole[0].losses, rel=2e-3)
    assert chunks[0].norms == pytest.approx(whole[0].norms, rel=2e-2)


@pytest.mark.parametrize("tensor", [1, 2])
def test_evaluation_and_logits(tensor: int) -> None:
    case = replace(CHUNKED, model=EVEN, tensor=tensor, microbatch=2)
    whole = run_ranks(evaluate, case.ranks, replace(case, loss_chunks=1))
    for (loss, logits), (wanted_loss, wanted) in zip(run_ranks(evaluate, case.ranks, case), whole, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-12)
        assert (logits is None) == (wanted is None)
        if logits is not None and wanted is not None:
            assert difference(logits, wanted) < 1e-12


# ---- what exists at a time


@contextmanager
def seeing(seen: list[int]) -> Iterator[None]:
    """Context that notes the tokens of each call of the loss."""
    computed = ChunkedLoss._chunk

    def loss(self: ChunkedLoss, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
        seen.append(len(hidden))
        return computed(self, hidden, labels, **options)

    with patch.object(ChunkedLoss, "_chunk", loss):
        yield


def tokens_of_losses(case: Case) -> tuple[list[int], list[int]]:
    """Return the tokens of each loss in a step and in an evaluation."""
    engine = case.engine()
    share, trained, evaluated = case.share(engine, 0), list[int](), list[int]()
    with seeing(trained):
        engine.step(share)
    with seeing(evaluated):
        engine.evaluate({name: value[:2] for name, value in share.items()})
    engine.close()
    return trained, evaluated


def test_each_loss_is_of_one_chunk() -> None:
    first, last = run_ranks(tokens_of_losses, 2, replace(CHUNKED, model=Rows(tokens=13), microbatch=2, microbatches=2))
    assert first == ([], [])
    assert last == ([9, 9, 8] * 2, [9, 9, 8])


# ---- what is refused


def test_what_has_no_chunks_is_refused() -> None:
    plan = CHUNKED.plan
    with pytest.raises(PlanError, match="loss_chunks = 0: 1 to compute"):
        replace(plan, loss_chunks=0)
    with pytest.raises(PlanError, match=r"loss_chunks = 3 with vocabulary_parallel.*leave one of them out"):
        replace(plan, vocabulary_parallel=True)
    blocks = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7))
    with pytest.raises(RankError, match=r"loss_chunks: it is not defined which modules of this nn.Sequential"):
        run_ranks(built, 2, plan, blocks)
    with pytest.raises(RankError, match="loss_chunks computes token cross-entropy on parts of the logits"):
        run_ranks(built, 2, plan, blocks, loss=mean_square)


@dataclass(frozen=True)
class Outside(Rows):
    """Rows whose labels are not all in the vocabulary."""

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        found = Rows.batch(self, step, samples)
        found["labels"][0, 1] = IDS
        return found


def test_labels_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(RankError, match=f"labels from 3 to {IDS}: the vocabulary has {IDS} rows"):
        run_ranks(train_case, 2, replace(CHUNKED, model=Outside()))


def test_heads_that_are_no_linear_layer_are_refused() -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model: Any = Family("llama").build()
    model.lm_head = Doubled(model.lm_head.in_features, model.lm_head.out_features, device="meta", bias=False)
    with pytest.raises(RankError, match=r"loss_chunks computes the logits from an nn.Linear, and lm_head is a Doubled"):
        run_ranks(built, 2, CHUNKED.plan, model)


class Doubled(nn.Linear):
    """A head of a class of its own."""


def built(plan: Any, model: nn.Module, **options: Any) -> None:
    Engine(model, plan, optimizer=torch.optim.SGD, device="cpu", **options).close()


def mean_square(outputs: Any, batch: Batch) -> Tensor:
    return outputs.square().sum()
