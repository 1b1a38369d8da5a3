"""Layers that do not divide by the stages, and layers by hand: the same numbers as one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atoll import Engine
from atoll.base.errors import RankError
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_parity
from atoll.testing.tiny import TinyConfig

EVERYTHING = TinyConfig.everything()


def blocks_of_stages(case: Case) -> list[list[str]]:
    engine = case.engine()
    blocks = engine.adapter.blocks()
    names = [[blocks[at].name for at in run] for run in engine.runs]
    engine.close()
    return names


def test_every_rank_knows_the_blocks_of_every_stage() -> None:
    """A head of two thirds of a layer is in place of the last stage's third layer."""
    wanted = [["0", "1", "2", "3"], ["4", "5", "6"]]
    assert run_ranks(blocks_of_stages, 2, Case(pipeline=2, model=TinyConfig(layers=5))) == [wanted, wanted]
    by_hand = Case(pipeline=2, model=TinyConfig(layers=5), layers_per_stage=(1, 4))
    assert run_ranks(blocks_of_stages, 2, by_hand)[0] == [["0", "1"], ["2", "3", "4", "5", "6"]]


@pytest.mark.wide(3)
@pytest.mark.parametrize(
    "case",
    [
        Case(pipeline=4, model=TinyConfig(layers=5)),
        Case(pipeline=3, layout="IIG", microbatches=6, model=TinyConfig(layers=7)),
        Case(pipeline=2, intra=2, schedule="interleaved", layout="GGG", model=TinyConfig(layers=5, tied=True)),
        Case(pipeline=3, schedule="zb-v", microbatches=6, model=TinyConfig(layers=7, odd=True)),
        Case(pipeline=2, intra=2, schedule="zb-v", layout="IIG", model=TinyConfig(layers=3, tied=True)),
        Case(pipeline=4, model=TinyConfig(layers=2)),
    ],
    ids=lambda case: f"{case.schedule}-{case.model.layers}-layers-{case.pipeline}-ranks",
)
def test_layers_that_do_not_divide(case: Case) -> None:
    assert_parity(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(layout="NNG", layers_per_stage=(3, 1)),
        Case(schedule="interleaved", layout="GGG", layers_per_stage=(0, 1, 3, 0)),
        Case(schedule="zb-v", layout="IGG", layers_per_stage=(2, 1, 1, 0)),
    ],
    ids=lambda case: case.schedule,
)
def test_layers_by_hand(case: Case) -> None:
    assert_parity(replace(case, pipeline=2, intra=2, model=EVERYTHING))


def test_impossible_layers_by_hand_are_refused() -> None:
    with pytest.raises(RankError, match=r"layers_per_stage = \[3, 3\]: its sum is 6, and there are 4 layers"):
        run_ranks(blocks_of_stages, 2, Case(pipeline=2, layers_per_stage=(3, 3)))


def losses_of_gpt2(case: Case) -> tuple[list[float], list[list[str]]]:
    """Two tables before the layers, and a norm and a head after them, which stay together."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 5, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**sizes, **tokens, **off))
    engine = Engine(model, case.plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    losses = [engine.step(case.share(engine, step)).loss for step in range(case.steps)]
    names = [[engine.adapter.blocks()[at].name.split(".")[-1] for at in run] for run in engine.runs]
    engine.close()
    return losses, names


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_blocks_that_stay_together(schedule: str) -> None:
    pytest.importorskip("transformers")
    wanted, _ = run_ranks(losses_of_gpt2, 1, Case())[0]
    losses, names = run_ranks(losses_of_gpt2, 2, Case(pipeline=2, schedule=schedule))[0]
    assert losses == pytest.approx(wanted, rel=1e-10)
    assert names[0][:2] == ["wte", "wpe"]
    assert names[-1][-2:] == ["ln_f", "lm_head"]
