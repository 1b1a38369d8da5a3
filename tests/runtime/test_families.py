"""Models of Hugging Face's families, split and sharded, train like the unsplit ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.errors import RankError
from atoll.testing import run_ranks
from atoll.testing.families import CAUSAL, MASKED, Family
from atoll.testing.parity import (
    Case,
    History,
    assert_parity,
    difference,
    reference,
    unsplit,
    whole_parameters,
    worst_difference,
)
from atoll.testing.reference import forward, named_parameters

pytest.importorskip("transformers")

SINGLE_PRECISION = {
    "gemma3_text": 1e-5,  # its norms of heads
    "mamba2": 5e-5,  # its scan, beside holes in the mask
}
"""What computes in fp32 inside an fp64 model, and on other parts of it where heads are split: within what bound."""

PIPELINE = Case(layout="IIG", pipeline=2, intra=2, schedule="zb-h1", microbatches=4, steps=2)
TENSOR = Case(pipeline=2, tensor=2, schedule="zb-h1", microbatches=2, steps=2)


FAMILIES = [*CAUSAL, *MASKED]
SPLIT_HEADS = [name for name in FAMILIES if name != "llama4_text"]  # its experts add in place


@dataclass
class Seen:
    """What a rank saw. first: initial values.  logits: of one sample, before the first step, on the last stage."""

    first: dict[str, Tensor]
    logits: Tensor | None
    history: History


def train_and_look(case: Case) -> Seen:
    engine = case.engine()
    history = History()
    first = whole_parameters(engine)
    logits = engine.logits(one_sample(case))

    def note() -> None:
        history.gradients = history.gradients or engine.full_gradients("*")

    for step in range(case.steps):
        result = engine.step(case.share(engine, step), before_update=note)
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.parameters = whole_parameters(engine)
    engine.close()
    return Seen(first, logits, history)


def one_sample(case: Case) -> dict[str, Any]:
    """Tokens alone of a language model, else all that a batch has."""
    batch = case.model.batch(0, 1)
    return {"input_ids": batch["input_ids"]} if isinstance(case.model, Family) else batch


@lru_cache
def what_ranks_saw(case: Case) -> list[Seen]:
    return run_ranks(train_and_look, case.ranks, case, timeout=180)


def assert_the_family_itself(case: Case, tolerance: float) -> None:
    """Loss, norm, gradients and parameters are those of the unsplit model of transformers, and so are logits."""
    wanted = reference(case)
    model = unsplit(case).eval()
    with torch.no_grad():
        logits = forward(model, one_sample(case))
    ranks = what_ranks_saw(case)
    for seen in ranks:
        worst, where = worst_difference(seen.history, wanted)
        assert worst <= tolerance, where
        if seen.logits is not None:
            assert difference(seen.logits, logits) <= tolerance
    assert {seen.logits is None for seen in ranks} == {True, False}
    assert set().union(*(seen.history.gradients for seen in ranks)) >= set(wanted.gradients)
    assert set().union(*(seen.history.parameters for seen in ranks)) == set(wanted.parameters)


@pytest.mark.parametrize("name", FAMILIES)
def test_pipeline_and_sharding(name: str) -> None:
    assert_the_family_itself(replace(PIPELINE, model=Family(name, padded=True)), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT_HEADS)
def test_pipeline_and_tensor_parallelism(name: str) -> None:
    assert_the_family_itself(replace(TENSOR, model=Family(name, padded=True)), SINGLE_PRECISION.get(name, 1e-10))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_starts_as_transformers_starts_it(name: str) -> None:
    """What transformers sets to the same under any seed is equal, what it leaves zero is zero, what it draws is spread
    as much."""
    case = replace(PIPELINE, model=Family(name, padded=True))
    draws = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        draws.append({key: value.detach().double() for key, value in named_parameters(case.model.build()).items()})
    got = {key: value for seen in what_ranks_saw(case) for key, value in seen.first.items()}
    assert got.keys() == draws[0].keys()
    for key, value in got.items():
        one, other = draws[0][key], draws[1][key]
        is_drawn = one != other
        assert torch.equal(value[~is_drawn], one[~is_drawn]), key
        if is_drawn.any():
            numbers = int(is_drawn.sum())
            spread = torch.log(value[is_drawn].std() / torch.cat([one[is_drawn], other[is_drawn]]).std())
            assert abs(float(spread)) < 5 * (0.75 / numbers) ** 0.5, key  # five standard deviations, of normal values


SPLIT_ENDS = [*CAUSAL, "distilbert", "electra", "modernbert", "eurobert"]
"""Heads that are a block of their own."""


@pytest.mark.parametrize("name", SPLIT_ENDS)
def test_vocabulary_parallelism(name: str) -> None:
    case = Case(pipeline=2, vocabulary_parallel=True, schedule="zb-h1", microbatches=2, steps=2)
    tolerance = 1e-5 if name == "mamba2" else 1e-10  # its logits are fp32 in an fp64 model
    assert_parity(replace(case, model=Family(name, padded=True)), tolerance=tolerance)


@pytest.mark.slow
def test_vocabulary_parallelism_with_a_scale_of_its_logits() -> None:
    case = Case(pipeline=2, vocabulary_parallel=True, schedule="zb-v", layout="GGG", intra=2, microbatches=4, steps=2)
    assert_parity(replace(case, model=Family("granite", (("logits_scaling", 4.0), ("embedding_multiplier", 3.0)))))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bloom", "cohere"])
def test_vocabulary_parallelism_beside_tensor_parallelism(name: str) -> None:
    case = replace(TENSOR, pipeline=2, vocabulary_parallel=True, schedule="zb-h1")
    assert_parity(replace(case, model=Family(name, padded=True)))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Family("bert"), "the head of BertForMaskedLM .cls.predictions.decoder. is part of a larger block"),
    ],
)
def test_heads_inside_of_blocks_are_refused(model: Family, words: str) -> None:
    with pytest.raises(RankError, match=words):
        run_ranks(build_only, 2, Case(pipeline=2, vocabulary_parallel=True, microbatches=2, model=model))


def build_only(case: Case) -> None:
    case.engine().close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_low_rank_adapters_beside_split_ends(name: str) -> None:
    pytest.importorskip("peft")
    case = replace(PIPELINE, layout="ING", vocabulary_parallel=True)
    assert_parity(replace(case, model=Family(name, lora=True)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "gpt_neox", "starcoder2"])
def test_sequence_parallelism(name: str) -> None:
    assert_parity(replace(TENSOR, sequence_parallel=True, layout="GGG", model=Family(name, padded=True)))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("case", [replace(PIPELINE, layout="ING"), TENSOR], ids=["pp2-ING", "pp2-tp2"])
def test_low_rank_adapters(name: str, case: Case) -> None:
    pytest.importorskip("peft")
    assert_parity(replace(case, model=Family(name, lora=True)))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["block", "selective"])
@pytest.mark.parametrize("schedule", ["zb-v", "interleaved"])
def test_recompute_and_chunks(schedule: str, recompute: str) -> None:
    case = replace(PIPELINE, schedule=schedule, layout="GGG", recompute=recompute, residency="run")
    assert_parity(replace(case, model=Family("gpt2", padded=True)))
    assert_parity(replace(case, model=Family("gemma2", padded=True)))


def test_the_documented_adapter() -> None:
    examples = Path(__file__).parents[2] / "docs" / "examples"
    sys.path.insert(0, str(examples))
    try:
        from ranker import Pairs  # type: ignore[import-not-found]

        assert_parity(replace(PIPELINE, model=Pairs()))
        assert_parity(replace(PIPELINE, layout="GGG", schedule="zb-v", model=Pairs()))
    finally:
        sys.path.remove(str(examples))
