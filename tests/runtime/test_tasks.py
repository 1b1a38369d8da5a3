"""Models of Hugging Face with other heads than those of language models, split and sharded, train like the unsplit."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll import Engine
from atoll.base.errors import CostWarning, PlanError, WeightsWarning
from atoll.runtime.models import adapter_for, initialise_model
from atoll.testing.parity import Case, assert_parity, whole_parameters
from atoll.testing.reference import named_parameters
from tests.runtime.test_families import PIPELINE, TENSOR, Check, assert_the_model_itself, by_turns
from tests.tasks import CLASSIFIERS, IMAGES, LISTENERS, TRANSLATORS, Headed

pytest.importorskip("transformers")

MODELS = [
    *(Headed(name) for name in CLASSIFIERS),
    *(Headed(name, problem="multi_label_classification") for name in ("bert", "llama")),
    *(Headed(name, problem="regression") for name in ("roberta", "qwen3")),
    *(Headed(name, "tokens") for name in CLASSIFIERS),
    *(Headed(name, "spans") for name in ("bert", "roberta", "distilbert", "electra", "qwen2")),
    *(Headed(name, "image") for name in IMAGES),
    *(Headed(name, "translation") for name in TRANSLATORS),
    *(Headed(name, "speech") for name in LISTENERS),
]


def tolerance(model: Headed) -> float:
    """The bias of a head for answers shifts all scores of an end alike: its gradient is rounding, which AdamW divides
    by its eps."""
    return 1e-8 if model.head == "spans" else 1e-10


def label(model: Headed) -> str:
    return "-".join(filter(None, (model.name, model.head, model.problem)))


WAYS = {"sharding": PIPELINE, "tensor parallelism": TENSOR}


@pytest.mark.wide(8)
@pytest.mark.parametrize(
    ("model", "way"), by_turns(MODELS, lambda _: list(WAYS)), ids=lambda value: value if value in WAYS else label(value)
)
def test_a_model(model: Headed, way: str) -> None:
    """Sharding in a pipeline, or tensor parallelism."""
    assert_the_model_itself(model, Check(WAYS[way], tolerance(model)))


@dataclass(frozen=True)
class Encoder:
    """Layers of torch, which start by a private name."""

    def build(self) -> nn.Module:
        layers = [nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True) for _ in range(2)]
        return nn.Sequential(nn.Embedding(16, 8), *layers, nn.Linear(8, 16))

    def batch(self, step: int, samples: int) -> dict[str, Tensor]:
        ids = torch.randint(16, (samples, 6), generator=torch.Generator().manual_seed(step))
        return {"input_ids": ids, "labels": (ids * 3 + 1) % 16}


def test_layers_of_torch() -> None:
    assert_parity(replace(PIPELINE, model=Encoder()))


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize("model", [Headed("t5", "translation"), Headed("vit", "image")], ids=label)
@pytest.mark.parametrize("recompute", ["block", "selective"])
def test_recompute_and_chunks(model: Headed, recompute: str) -> None:
    case = replace(PIPELINE, schedule="zb-v", layout="GGG", recompute=recompute, residency="run")
    assert_parity(replace(case, model=model))


@dataclass(frozen=True)
class FrozenEncoder(Headed):
    """The decoder alone is trained."""

    def build(self) -> nn.Module:
        model: Any = Headed.build(self)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("decoder.layers" in name)
        return model


def test_a_frozen_encoder() -> None:
    assert_parity(replace(PIPELINE, model=FrozenEncoder("bart", "translation")))


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize("cut", [(1, 5), (3, 3), (4, 2), (5, 1)])
def test_every_cut_of_two_stacks(cut: tuple[int, int]) -> None:
    """Of three layers of the encoder, what runs between the stacks, and two layers of the decoder."""
    assert_parity(replace(PIPELINE, layers_per_stage=cut, model=Headed("t5", "translation")))


def engine_of(model: Headed, **options: Any) -> Engine:
    with torch.device("meta"):
        built = model.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CostWarning)
        return Engine(built, Case().plan, optimizer=lambda groups: torch.optim.AdamW(groups), seed=3, **options)


@pytest.mark.parametrize("model", [Headed("t5", "translation"), Headed("bart", "translation"), Headed("vit", "image")])
def test_weights_of_a_folder(model: Headed, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole: Any = model.build()
    whole.save_pretrained(tmp_path)
    engine = engine_of(model, weights=tmp_path)
    got, wanted = whole_parameters(engine), named_parameters(whole)
    engine.close()
    assert got.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name].to(value.dtype)) for name, value in got.items())


def test_a_head_that_a_folder_lacks_starts_anew(tmp_path: Path) -> None:
    """As for fine-tuning: the folder is of a language model, the head of a classifier."""
    import transformers

    model = Headed("bert")
    torch.manual_seed(0)
    whole: Any = transformers.AutoModelForMaskedLM.from_config(model.config())
    whole.save_pretrained(tmp_path)
    fresh = model.build()
    initialise_model(adapter_for(fresh), 3)
    with pytest.warns(WeightsWarning):
        engine = engine_of(model, weights=tmp_path)
    initialized, unread = engine.notes
    assert "lacks 4 parameters of the head (bert.pooler.dense.bias, " in initialized
    assert "has 5 tensors (cls.predictions.bias, " in unread
    got = whole_parameters(engine)
    engine.close()
    for name, value in got.items():
        is_new = name.startswith(("classifier.", "bert.pooler."))
        wanted = fresh.get_parameter(name) if is_new else whole.get_parameter(name)
        assert torch.equal(value, wanted.to(value.dtype)), name


@pytest.mark.parametrize("model", [Headed("bart", "translation"), Headed("bert", "tokens")], ids=label)
def test_labels_that_stand_where_they_are_predicted_are_not_shifted(model: Headed) -> None:
    with pytest.raises(PlanError, match='labels = "unshifted" applies to models that predict the next token'):
        engine_of(model, labels="unshifted")


def test_the_vocabulary_of_other_heads_is_not_split() -> None:
    with pytest.raises(PlanError, match="BertForSequenceClassification is not a language model"):
        adapter_for(Headed("bert").build()).vocabulary()  # type: ignore[attr-defined]
