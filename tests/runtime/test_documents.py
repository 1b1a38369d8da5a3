"""Several documents in a row train as the same documents one by one, under any plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from atoll.base.errors import PlanError
from atoll.runtime.models import Decoder, DecoderConfig, adapter_for, check_documents
from atoll.testing import run_ranks
from atoll.testing.parity import Case, train_case, worst_difference
from atoll.testing.reference import Recipe, train_alone
from tests.families import CAUSAL, Family

LENGTHS = ((5, 7), (12,), (3, 3, 6), (1, 11))
"""Of the documents in each row of 12 tokens."""
IDS = 48


@dataclass(frozen=True)
class Packed:
    """A model, and rows of documents."""

    model: Recipe

    def build(self) -> nn.Module:
        return self.model.build()

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        rows = [documents(step, row) for row in range(samples)]
        packed = {name: torch.stack([torch.cat([each[name] for each in row]) for row in rows]) for name in rows[0][0]}
        positions = [torch.cat([torch.arange(len(each["labels"])) for each in row]) for row in rows]
        return {**packed, "position_ids": torch.stack(positions)}


@dataclass(frozen=True)
class Unpacked:
    """The same model, and each of the documents in a row of its own, filled up with what does not count."""

    model: Recipe

    def build(self) -> nn.Module:
        return self.model.build()

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        singles = [each for row in range(samples) for each in documents(step, row)][:samples]
        fills = {"input_ids": 0, "labels": -100}
        return {
            name: torch.stack([torch.cat([each[name], torch.full((12 - len(each[name]),), fill)]) for each in singles])
            for name, fill in fills.items()
        }


def documents(step: int, row: int) -> list[dict[str, torch.Tensor]]:
    """Those of a row; half of their labels do not count."""
    generator = torch.Generator().manual_seed(100 * step + row)
    found = []
    for length in LENGTHS[row % len(LENGTHS)]:
        ids, labels = (torch.randint(IDS, (length,), generator=generator) for _ in range(2))
        labels[torch.rand(length, generator=generator) < 0.5] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


@dataclass(frozen=True)
class Small:
    """The built-in decoder."""

    config: DecoderConfig = field(
        default_factory=lambda: DecoderConfig(vocabulary=IDS, layers=4, hidden=16, heads=4, kv_heads=2, ffn=24)
    )

    def build(self) -> nn.Module:
        return Decoder(self.config)

    def initialise(self, name: str, module: nn.Module) -> None:
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()


def assert_as_if_alone(case: Case, tolerance: float = 1e-10) -> None:
    """The case's rows on its ranks equal their documents, each in a row of its own, in one process."""
    wanted = train_alone(
        Unpacked(case.model.model),  # type: ignore[attr-defined]
        seed=case.seed,
        dtype=torch.float64,
        device="cpu",
        steps=case.steps,
        microbatches=sum(len(LENGTHS[row % len(LENGTHS)]) for row in range(case.samples)),
        microbatch=1,
        optimizer=case.make_optimizer,
        clip=case.clip,
    )
    for history in run_ranks(train_case, case.ranks, case, timeout=180):
        worst, where = worst_difference(history, wanted)
        assert worst <= tolerance, where
        assert history.parameters


BASE = Case(microbatches=4, steps=2, model=Packed(Small()))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        replace(BASE, microbatch=2),
        replace(BASE, layout="IIG", pipeline=2, intra=2, schedule="zb-h1", microbatch=2),
        replace(BASE, layout="GGG", pipeline=2, inter=2, schedule="1f1b", recompute="block"),
        replace(BASE, pipeline=2, tensor=2, sequence_parallel=True, recompute="selective"),
        replace(BASE, pipeline=2, vocabulary_parallel=True, schedule="zb-v", compile="block-eager"),
    ],
    ids=["alone", "IIG", "GGG", "tensor", "vocabulary"],
)
def test_rows_of_documents_train_the_decoder_as_single_documents_do(case: Case) -> None:
    assert_as_if_alone(case)


GPT2 = Family("gpt2", tuple((f"{part}_pdrop", 0.0) for part in ("resid", "embd", "attn")))
"""Without dropout, which would draw otherwise in other rows."""


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [Family("llama"), GPT2, Family("gemma3_text"), Family("mixtral")], ids=lambda each: each.name
)
def test_rows_of_documents_train_a_family_as_single_documents_do(family: Family) -> None:
    case = replace(BASE, layout="IIG", pipeline=2, intra=2, schedule="zb-h1", microbatch=2)
    assert_as_if_alone(replace(case, model=Packed(family)), tolerance=1e-5 if family.name == "gemma3_text" else 1e-10)


# ---- who keeps documents apart

CROSSING = {"opt", "falcon", "bloom", "mpt", "biogpt", "mamba2", "gpt_oss"}
"""Families whose attention, or state, crosses from one document of a row to the next."""
SINGLE = {"gptj": 1e-9, "codegen": 1e-9, "llama4_text": 1e-7, "gemma2": 1e-6}
"""Those that compute positions, or the softmax of attention (gemma2), in fp32: some processors sum rows of another
length in another order."""


def logits(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    adapter = adapter_for(model)
    with torch.no_grad():
        return adapter.forward(0, len(adapter.blocks()), None, batch)


@pytest.mark.wide(4)
@pytest.mark.parametrize("name", CAUSAL)
def test_a_family_keeps_documents_apart_or_is_refused(name: str) -> None:
    torch.manual_seed(0)
    model = Family(name).build().double().eval()
    with torch.device("meta"):
        bare = Family(name).build()
    if name in CROSSING:
        for each in (model, bare):
            with pytest.raises(
                PlanError, match=r"takes no position_ids|nothing that keeps the documents of a row apart"
            ):
                check_documents(each, rows=2)
        return
    check_documents(model, rows=2)
    check_documents(bare, rows=2)
    batch = {key: value for key, value in Packed(Small()).batch(0, 4).items() if key != "labels"}
    together = logits(model, batch)
    alone = [logits(model, {"input_ids": each["input_ids"][None]})[0] for row in range(4) for each in documents(0, row)]
    wanted = torch.cat(alone).view_as(together)
    assert float((together - wanted).abs().max()) <= SINGLE.get(name, 1e-12) * float(wanted.abs().max())


def test_layers_without_attention_are_refused() -> None:
    model = Family("lfm2", (("layer_types", ["full_attention", "conv", "full_attention", "conv"]),)).build()
    with pytest.raises(PlanError, match="layer 1 of Lfm2ForCausalLM is given nothing that keeps"):
        check_documents(model, rows=1)


def test_flash_attention_takes_one_row() -> None:
    """It is given positions and no mask; transformers reads documents off the positions of a single row."""
    model: Any = Family("llama").build()
    model.config._attn_implementation = "flash_attention_2"
    check_documents(model, rows=1)
    with pytest.raises(PlanError, match="of a single row, and a microbatch has 2"):
        check_documents(model, rows=2)


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(PlanError, match="Sequential is not known to separate the documents"):
        check_documents(nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)), rows=1)


def test_positions_of_one_document_change_nothing() -> None:
    torch.manual_seed(0)
    model = Small().build().double()
    ids = torch.randint(IDS, (2, 12))
    plain, placed = model(ids), model(ids, torch.arange(12).expand(2, 12))
    torch.testing.assert_close(placed, plain, rtol=0, atol=1e-13)
