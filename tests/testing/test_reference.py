"""The judge of parity: its own rules, and that it sees what an adapter does wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.runtime.models import Block, SequentialAdapter, reset_module, token_cross_entropy
from atoll.testing.parity import Case, assert_parity, difference, reference, unsplit
from atoll.testing.reference import module_seed, reference_seed, start, tied, token_loss
from atoll.testing.tiny import TinyConfig

TINY = TinyConfig(layers=2, dropout=0.2)


def test_the_seeds_are_the_documented_ones() -> None:
    """Numbers from the digests' definitions: no code of this repository made them."""
    assert module_seed(0, "layers.0.attention.query") == 5751651865988455694
    assert reference_seed(3, 1, 2, 5) == 1066496651769241505


def test_the_loss_is_a_sum_over_labels_that_count() -> None:
    logits = torch.tensor([[[0.0, 0.0, math.log(2.0)], [5.0, 1.0, 2.0]]], dtype=torch.float64)
    assert float(token_loss(logits, torch.tensor([[2, -100]]))) == pytest.approx(math.log(2.0))
    assert float(token_loss(logits, torch.tensor([[0, -100]]))) == pytest.approx(math.log(4.0))
    assert token_loss(logits.half(), torch.tensor([[0, 1]])).dtype == torch.float32


def test_a_shared_parameter_starts_by_its_first_name() -> None:
    model = start(TinyConfig(tied=True), 3)
    assert tied(model) == {"5.out.weight": "0.table.weight"}
    assert model[5].out.weight is model[0].table.weight  # type: ignore[index, union-attr]
    alone = start(TinyConfig(), 3)
    assert torch.equal(model[0].table.weight, alone[0].table.weight)  # type: ignore[index, union-attr]


class _Unset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def reset_parameters(self) -> None:
        """Sets nothing."""


class _Incomplete:
    """A recipe whose rule forgets a module."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), _Unset())


def test_a_rule_that_leaves_a_parameter_is_refused() -> None:
    """Both sides of a comparison would be NaN."""
    recipe: Any = _Incomplete()
    with pytest.raises(ValueError, match=r"the recipe's rule leaves 1\.scale without values"):
        start(recipe, 0)


# ---- adapters that are wrong


class Faulty(SequentialAdapter):
    """Does something wrong, as one says."""

    def __init__(self, model: nn.Sequential, fault: str) -> None:
        super().__init__(model)
        self._fault = fault

    def forward(self, first: int, last: int, hidden: Tensor | None, batch: Mapping[str, Any]) -> Tensor:
        if self._fault == "skips a layer" and first == 0:
            return super().forward(2, last, super().forward(0, 1, hidden, batch), batch)
        return super().forward(first, last, hidden, batch)

    def loss(self, logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
        summed = token_cross_entropy(logits, batch)
        if self._fault == "a factor":
            return summed * 1.001
        if self._fault == "counts what does not count":
            labels = torch.as_tensor(batch["labels"])
            return summed + token_cross_entropy(logits, {"labels": torch.where(labels == -100, 0, -100)})
        return summed

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        reset_module(module, generator)
        if self._fault == "another spread" and isinstance(module, nn.Embedding):
            module.weight.mul_(1.1)


class FaultyModel(nn.Sequential):
    fault = ""

    def atoll_adapter(self) -> Faulty:
        return Faulty(self, self.fault)


@dataclass(frozen=True)
class Wrong:
    """A tiny model with such an adapter."""

    fault: str

    def build(self) -> nn.Module:
        model = FaultyModel(*TINY.build().children())
        model.fault = self.fault
        return model

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        return TINY.batch(step, samples)


@pytest.mark.parametrize("fault", ["skips a layer", "a factor", "counts what does not count", "another spread"])
def test_a_wrong_adapter_is_seen(fault: str) -> None:
    assert_parity(Case(microbatches=2, steps=2, model=Wrong("none")))
    with pytest.raises(AssertionError, match="differs by"):
        assert_parity(Case(microbatches=2, steps=2, model=Wrong(fault)))


# ---- models of one's own


class Own(nn.Module):
    """A model of no known kind: its adapter says how it splits, and its constructor how it starts."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 8)
        self.mixes = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout)) for _ in range(2))
        self.total = nn.Linear(8, 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.scale(input_ids[..., None].to(self.scale.weight.dtype))
        for mix in self.mixes:
            hidden = hidden + mix(hidden)
        out: Tensor = self.total(hidden)
        return out

    def atoll_adapter(self) -> OwnAdapter:
        return OwnAdapter(self)


class OwnAdapter:
    def __init__(self, model: Own) -> None:
        mixes = [Block(f"mixes.{at}", mix) for at, mix in enumerate(model.mixes)]
        self._blocks = [Block("scale", model.scale), *mixes, Block("total", model.total)]

    def blocks(self) -> list[Block]:
        return self._blocks

    def forward(self, first: int, last: int, hidden: Tensor | None, batch: Mapping[str, Any]) -> Tensor:
        for at in range(first, last):
            module: Any = self._blocks[at].module
            if at == 0:
                hidden = module(batch["input_ids"][..., None].to(module.weight.dtype))
            else:
                hidden = hidden + module(hidden) if at < 3 else module(hidden)
        assert hidden is not None
        return hidden

    def loss(self, logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
        counts = batch["labels"] != -100
        return (logits[..., 0] - batch["labels"])[counts].square().sum()

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        reset_module(module, generator)


@dataclass(frozen=True)
class OwnRecipe:
    dropout: float = 0.0

    def build(self) -> nn.Module:
        return Own(self.dropout)

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        return TINY.batch(step, samples)

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        return torch.where(labels == -100, 0.0, (outputs.squeeze(-1) - labels) ** 2).sum()


@dataclass(frozen=True)
class Named(OwnRecipe):
    dropout: float = 0.2
    blocks: tuple[str, ...] = ("scale", "mixes.0", "mixes.1", "total")


@pytest.mark.parametrize("model", [OwnRecipe(), Named()], ids=["plain", "with dropout"])
def test_a_model_of_no_known_kind_gives_the_engine_its_values(model: OwnRecipe) -> None:
    assert_parity(Case(layout="GGG", pipeline=2, intra=2, microbatches=4, steps=2, model=model))


def test_random_numbers_need_the_names_of_blocks() -> None:
    with pytest.raises(ValueError, match="the model draws random numbers: name its blocks"):
        reference(Case(microbatches=2, steps=1, model=OwnRecipe(dropout=0.2)))


# ---- models of transformers


@pytest.mark.parametrize("name", ["gpt2", "xlm-roberta"])
def test_a_family_is_run_by_transformers_alone(name: str) -> None:
    """The first loss is that of the model with the weights of `unsplit`, by hand; without dropout, all at once."""
    pytest.importorskip("transformers")
    from tests.families import Family

    options = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    options["xlm-roberta"] = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    case = Case(microbatches=4, steps=1, model=Family(name, tuple((key, 0.0) for key in options[name])))
    model: Any = unsplit(case)
    batch = case.model.batch(0, case.samples)
    logits = model(input_ids=batch["input_ids"]).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
    history = reference(case)
    assert history.gradients
    for key, gradient in history.gradients.items():
        assert difference(gradient, model.get_parameter(key).grad) <= 1e-10, key
