"""Models of Hugging Face's families, split and sharded, train like the unsplit ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from atoll.base.errors import RankError
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_parity
from atoll.testing.reference import Recipe, named_parameters
from tests.families import CAUSAL, IN_FOLDERS, MASKED, Family, family_config
from tests.looks import Check, Seen, problems_of, train_and_look

pytest.importorskip("transformers")

SINGLE_PRECISION = {
    "gemma3_text": 1e-5,  # its norms of heads
    "llama4_text": 1e-5,  # its norms and rotations of heads
    "mamba2": 5e-5,  # its scan, beside holes in the mask
}
"""What computes in fp32 inside an fp64 model, and on other parts of it where heads are split: within what bound."""

SINGLE_LOGITS = {"mamba2": 1e-5}
"""Bounds for models with fp32 logits inside an fp64 model, which a split vocabulary adds in another order."""

PIPELINE = Case(layout="IIG", pipeline=2, intra=2, schedule="zb-h1", microbatches=4, steps=2)
TENSOR = Case(pipeline=2, tensor=2, schedule="zb-h1", microbatches=2, steps=1)
BOTH = replace(TENSOR, steps=2)

FAMILIES = [*CAUSAL, *MASKED]
SPLIT_ENDS = [*CAUSAL, "distilbert", "electra", "modernbert", "eurobert"]
"""Heads that are a block of their own, so that a vocabulary can be split."""


T = TypeVar("T")


def checks_of(name: str) -> dict[str, Check]:
    """The ways to train a family. A head that can be split is, in the pipeline; it is whole beside split heads of
    attention."""
    if name in SPLIT_ENDS:
        found = {"sharding": Check(replace(PIPELINE, vocabulary_parallel=True), SINGLE_LOGITS.get(name, 1e-10))}
    else:
        found = {"sharding": Check(PIPELINE)}
    found["tensor parallelism"] = Check(TENSOR, SINGLE_PRECISION.get(name, 1e-10))
    return found


def unusual_values(model: Recipe, ranks: Sequence[Seen]) -> Iterator[str]:
    """What transformers sets to the same under any seed is equal, what it leaves zero is zero, what it draws is spread
    as much."""
    draws = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        draws.append({key: value.detach().double() for key, value in named_parameters(model.build()).items()})
    got = {key: value for seen in ranks for key, value in seen.first.items()}
    if got.keys() != draws[0].keys():
        yield f"other parameters: {sorted(got.keys() ^ draws[0].keys())}"
        return
    for key, value in got.items():
        one, other = draws[0][key], draws[1][key]
        is_drawn = one != other
        if not torch.equal(value[~is_drawn], one[~is_drawn]):
            yield f"{key} has other fixed values"
        if is_drawn.any():
            numbers = int(is_drawn.sum())
            spread = float(torch.log(value[is_drawn].std() / torch.cat([one[is_drawn], other[is_drawn]]).std()))
            if not abs(spread) < 5 * (0.75 / numbers) ** 0.5:  # five standard deviations, of normal values
                yield f"{key} is spread e^{spread:.2g} times as much"


def assert_the_model_itself(model: Recipe, check: Check, *, starts_alike: bool = False) -> None:
    """Train a model, and say all that differs from the unsplit model."""
    own = replace(check, case=replace(check.case, model=model))
    ranks = run_ranks(train_and_look, own.case.ranks, own.case)
    found = list(problems_of(own, ranks))
    if starts_alike:
        found += [f"initial values: {problem}" for problem in unusual_values(model, ranks)]
    assert not found, "\n".join([str(model), *found])


def by_turns(models: Sequence[T], ways: Callable[[T], Sequence[str]]) -> list[tuple[T, str]]:
    """Every model in each of two ways; every other case is a model each, with one way after the other."""
    return [(model, way) for at, model in enumerate(models) for way in list(ways(model))[:: -1 if at % 2 else 1]]


@pytest.mark.parametrize("names", [list(CAUSAL), list(MASKED), IN_FOLDERS], ids=["causal", "masked", "in folders"])
def test_every_family_is_tiny(names: Sequence[str]) -> None:
    """Each config class has its own names of the four sizes; one that is not known leaves a model of gigabytes."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 16, "vocab_size": 48, "num_attention_heads": 4}
    for name in names:
        config = family_config(name)
        wanted = sizes if hasattr(config, "num_attention_heads") else {**sizes, "num_attention_heads": None}
        assert {key: getattr(config, key, None) for key in sizes} == wanted, name


@pytest.mark.wide(19)
@pytest.mark.parametrize(("name", "way"), by_turns(FAMILIES, lambda name: list(checks_of(name))))
def test_a_family(name: str, way: str) -> None:
    """Sharding in a pipeline, with a split vocabulary, or tensor parallelism: results and initial values."""
    assert_the_model_itself(Family(name, padded=True), checks_of(name)[way], starts_alike=True)


@pytest.mark.slow
def test_vocabulary_parallelism_with_a_scale_of_its_logits() -> None:
    case = Case(pipeline=2, vocabulary_parallel=True, schedule="zb-v", layout="GGG", intra=2, microbatches=4, steps=2)
    assert_parity(replace(case, model=Family("granite", (("logits_scaling", 4.0), ("embedding_multiplier", 3.0)))))


@pytest.mark.wide(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bloom", "cohere"])
def test_vocabulary_parallelism_beside_tensor_parallelism(name: str) -> None:
    assert_parity(replace(BOTH, vocabulary_parallel=True, model=Family(name, padded=True)))


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


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_low_rank_adapters_beside_split_ends(name: str) -> None:
    pytest.importorskip("peft")
    case = replace(PIPELINE, layout="ING", vocabulary_parallel=True)
    assert_parity(replace(case, model=Family(name, lora=True)))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "gpt_neox", "starcoder2"])
def test_sequence_parallelism(name: str) -> None:
    assert_parity(replace(BOTH, sequence_parallel=True, layout="GGG", model=Family(name, padded=True)))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("case", [replace(PIPELINE, layout="ING"), BOTH], ids=["pp2-ING", "pp2-tp2"])
def test_low_rank_adapters(name: str, case: Case) -> None:
    pytest.importorskip("peft")
    assert_parity(replace(case, model=Family(name, lora=True)))


ENDS = {"llama": ("embed_tokens", "lm_head"), "gpt2": ("wte", "ln_1", "mlp.c_proj"), "bert": ("cls",)}
"""Modules that `peft` trains whole beside adapters: embedding, head, norms and layers inside a block."""


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("case", [replace(PIPELINE, layout="ING"), TENSOR], ids=["pp2-ING", "pp2-tp2"])
def test_modules_trained_whole_beside_adapters(name: str, case: Case) -> None:
    """GPT-2's head shares the frozen original of the embedding, of which `peft` trains a copy."""
    pytest.importorskip("peft")
    assert_parity(replace(case, model=Family(name, lora=True, saved=ENDS[name])))


@pytest.mark.wide(1)
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
