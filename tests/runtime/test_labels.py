"""What a label stands for: the next token, or its own as transformers has it; a copy of the input is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll import Engine, Layout, MeshShape, Plan
from atoll.base.errors import PlanError, RankError
from atoll.plans import schedules
from atoll.testing import run_ranks

VOCABULARY = 48


def plan_of(pipeline: int = 1) -> Plan:
    schedule = schedules.build("1f1b", ranks=pipeline, microbatches=2)
    return Plan(mesh=MeshShape(pipeline=pipeline), layout=Layout("NNN"), schedule=schedule, microbatch=2)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCABULARY))


def engine_of(model: nn.Module, pipeline: int = 1, **options: Any) -> Engine:
    return Engine(model, plan_of(pipeline), optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), **options)


def some_ids() -> Tensor:
    return torch.randint(VOCABULARY, (4, 10), generator=torch.Generator().manual_seed(1))


def loss_of(batch: Mapping[str, Any], **options: Any) -> float:
    engine = engine_of(chain(), **options)
    try:
        return engine.step(batch).loss
    finally:
        engine.close()


def is_counted(ids: Tensor) -> dict[str, Tensor]:
    """Labels at their own positions, of which the first few of each sample do not count, as those of a prompt."""
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("hides", [False, True])
def test_a_copy_of_the_input_is_refused_with_both_ways_out(hides: bool) -> None:
    """Past bug: whoever came from transformers trained a machine that copies, without a word."""
    ids = some_ids()
    batch = is_counted(ids) if hides else {"input_ids": ids, "labels": ids}
    with pytest.raises(PlanError, match=r"input_ids\[:, t \+ 1\].*labels=\"unshifted\""):
        loss_of(batch)


def refused_on_a_rank(pipeline: int) -> str:
    engine = engine_of(chain(), pipeline)
    ids = some_ids()
    try:
        engine.step({"input_ids": ids, "labels": ids})
    except (PlanError, RankError) as error:  # of the rank that found it, and of the others
        again = engine.step({"input_ids": ids, "labels": ids.roll(-1, dims=1)})
        return f"{type(error).__name__} {again.step}"
    finally:
        engine.close()
    return ""


def test_every_rank_refuses_it_and_goes_on() -> None:
    assert run_ranks(refused_on_a_rank, 2, 2) == ["PlanError 1", "RankError 1"]


def test_labels_that_say_nothing_of_it_are_taken() -> None:
    same = torch.full((4, 10), 7)
    few = some_ids()
    labels = torch.full_like(few, -100)
    labels[0, 2] = few[0, 2]  # one label, equal by chance
    assert loss_of({"input_ids": same, "labels": same}) > 0
    assert loss_of({"input_ids": few, "labels": labels}) > 0


def test_unshifted_labels_are_the_next_tokens() -> None:
    batch = is_counted(some_ids())
    labels = torch.cat([batch["labels"][:, 1:], torch.full((4, 1), -100)], dim=1)
    assert loss_of(batch, labels="unshifted") == loss_of({**batch, "labels": labels})


def test_unshifted_labels_have_the_loss_of_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24
    )
    model = LlamaForCausalLM(sizes).double()
    batch = is_counted(some_ids())
    expected = model(**batch).loss.item()
    engine = Engine(
        model,
        plan_of(),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        labels="unshifted",
    )
    assert engine.evaluate(batch).loss == pytest.approx(expected, abs=1e-6)
    engine.close()


def test_what_cannot_be_shifted_is_refused() -> None:
    with pytest.raises(PlanError, match="no sequence to be shifted along"):
        loss_of({"input_ids": some_ids(), "labels": torch.zeros(4, dtype=torch.long)}, labels="unshifted")
    with pytest.raises(PlanError, match='labels = \'next\'; it is "shifted" or "unshifted"'):
        engine_of(chain(), labels="next")
