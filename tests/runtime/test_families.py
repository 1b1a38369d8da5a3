"""Models of Hugging Face's families, split and sharded, train like the unsplit ones."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.errors import RankError
from atoll.models import adapter_for, initialise_model
from atoll.testing import run_ranks
from atoll.testing.families import CAUSAL, MASKED, Family
from atoll.testing.parity import Case, assert_parity, difference

pytest.importorskip("transformers")

MAIN = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "gpt2", "gpt_neox", "opt", "olmo2")
"""Those that the documentation promises first."""

SINGLE_PRECISION = {
    "gemma3_text": "its norms of heads",
    "mamba2": "its scan",
}
"""What computes in fp32 inside an fp64 model, and on other parts of it where heads are split."""

PIPELINE = Case(layout="IIG", pipeline=2, intra=2, schedule="zb-h1", microbatches=4, steps=2)
TENSOR = Case(pipeline=2, tensor=2, schedule="zb-h1", microbatches=2, steps=2)


@pytest.mark.parametrize("name", [*CAUSAL, *MASKED])
def test_pipeline_and_sharding(name: str) -> None:
    assert_parity(replace(PIPELINE, model=Family(name, padded=True)))


@pytest.mark.parametrize("name", [name for name in (*CAUSAL, *MASKED) if name != "llama4_text"])
def test_pipeline_and_tensor_parallelism(name: str) -> None:
    tolerance = 1e-5 if name in SINGLE_PRECISION else 1e-10
    assert_parity(replace(TENSOR, model=Family(name, padded=True)), tolerance=tolerance)


SPLIT_ENDS = [*CAUSAL, "distilbert", "electra", "modernbert", "eurobert"]
"""Heads that are a block of their own."""


@pytest.mark.parametrize("name", SPLIT_ENDS)
def test_vocabulary_parallelism(name: str) -> None:
    case = Case(pipeline=2, vocabulary_parallel=True, schedule="zb-h1", microbatches=2, steps=2)
    tolerance = 1e-5 if name == "mamba2" else 1e-10  # its logits are fp32 in an fp64 model
    assert_parity(replace(case, model=Family(name, padded=True)), tolerance=tolerance)


def test_vocabulary_parallelism_with_a_scale_of_its_logits() -> None:
    case = Case(pipeline=2, vocabulary_parallel=True, schedule="zb-v", layout="GGG", intra=2, microbatches=4, steps=2)
    assert_parity(replace(case, model=Family("granite", (("logits_scaling", 4.0), ("embedding_multiplier", 3.0)))))


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


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_low_rank_adapters_beside_split_ends(name: str) -> None:
    pytest.importorskip("peft")
    case = replace(PIPELINE, layout="ING", vocabulary_parallel=True)
    assert_parity(replace(case, model=Family(name, lora=True)))


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "gpt_neox", "starcoder2"])
def test_sequence_parallelism(name: str) -> None:
    assert_parity(replace(TENSOR, sequence_parallel=True, layout="GGG", model=Family(name, padded=True)))


def logits_and_gradients(case: Case) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    engine = case.engine()
    batch = case.share(engine, 0)
    found: dict[str, torch.Tensor] = {}
    logits = engine.logits({"input_ids": case.model.batch(0, case.samples)["input_ids"][:1]})
    engine.step(batch, before_update=lambda: found.update(engine.full_gradients("*")))
    engine.close()
    return logits, found


@pytest.mark.parametrize("case", [PIPELINE, TENSOR], ids=["pp2-IIG", "pp2-tp2"])
@pytest.mark.parametrize("name", MAIN)
def test_logits_and_gradients_are_those_of_the_model_itself(name: str, case: Case) -> None:
    """Against transformers alone: its forward, and the loss of it that shifts no labels."""
    undropped = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"), "opt": ("dropout",)}.get(name, ())
    case = replace(case, model=Family(name, tuple((key, 0.0) for key in undropped)), clip=None)
    model: Any = case.model.build()
    initialise_model(adapter_for(model), case.seed)
    model.double()
    batch = case.model.batch(0, case.samples)
    with torch.no_grad():
        wanted = model.eval()(input_ids=batch["input_ids"][:1], use_cache=False).logits
    out = model(input_ids=batch["input_ids"], use_cache=False).logits
    torch.nn.functional.cross_entropy(out.flatten(0, 1), batch["labels"].flatten()).backward()
    seen = set()
    for logits, gradients in run_ranks(logits_and_gradients, case.ranks, case):
        if logits is not None:
            assert difference(logits, wanted) <= 1e-10
        for each, value in gradients.items():
            # One batch here, microbatches there: norms in fp32 round otherwise.
            assert difference(value, model.get_parameter(each).grad) <= 1e-6, each
            seen.add(each)
    assert seen == {each for each, _ in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("case", [replace(PIPELINE, layout="ING"), TENSOR], ids=["pp2-ING", "pp2-tp2"])
def test_low_rank_adapters(name: str, case: Case) -> None:
    pytest.importorskip("peft")
    assert_parity(replace(case, model=Family(name, lora=True)))


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
