"""Initial weights depend on the seed and the names only."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from atoll.base.errors import PlanError
from atoll.runtime.models import (
    Adapter,
    Block,
    Decoder,
    DecoderConfig,
    adapter_for,
    initialise_block,
    initialise_model,
    name_seed,
    shared_parameters,
)

SMALL = DecoderConfig(vocabulary=29, layers=3, hidden=16, heads=4, kv_heads=2, ffn=20)
TIED = dataclasses.replace(SMALL, tie_embeddings=True)


def _whole(config: DecoderConfig = SMALL, *, seed: int = 7, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    model = Decoder(config).to(dtype)
    initialise_model(adapter_for(model), seed)
    return dict(model.named_parameters(remove_duplicate=False))


def _block(adapter: Adapter, name: str) -> Block:
    return next(block for block in adapter.blocks() if block.name == name)


def _from_meta(config: DecoderConfig, *names: str) -> dict[str, Tensor]:
    """The parameters of some blocks of a model built on meta, as one stage makes them."""
    with torch.device("meta"):
        model = Decoder(config)
    adapter = adapter_for(model)
    shared = shared_parameters(adapter)
    found = {}
    for name in names:
        block = _block(adapter, name)
        block.module.to_empty(device="cpu")
        initialise_block(adapter, block, 7, shared=shared)
        found.update(block.named_parameters())
    return found


@pytest.mark.parametrize("names", [("layers.1",), ("head",), ("layers.2", "embed")])
def test_a_stage_built_on_meta_equals_the_whole_model_bit_for_bit(names: tuple[str, ...]) -> None:
    whole, stage = _whole(), _from_meta(SMALL, *names)
    assert {name for name in whole if name.startswith(names)} == stage.keys()
    assert all(torch.equal(stage[name], whole[name]) for name in stage)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_precisions_start_from_the_same_values(dtype: torch.dtype) -> None:
    single, other = _whole(), _whole(dtype=dtype)
    assert all(torch.equal(other[name], single[name].to(dtype)) for name in single)


def test_the_last_stage_gives_a_tied_head_the_embeddings_values() -> None:
    """to_empty makes new parameters, so on that stage nothing shows any more that the head is tied."""
    whole, stage = _whole(TIED), _from_meta(TIED, "head")
    assert torch.equal(stage["head.output.weight"], whole["embed.weight"])
    assert whole["head.output.weight"] is whole["embed.weight"]


def test_a_tied_parameter_starts_by_the_rule_of_its_first_use() -> None:
    """An embedding is normal and a linear is uniform: the first use decides, whichever block is set last."""

    def build() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50, bias=True))
        model[2].weight = model[0].weight
        return model

    model = build()
    initialise_model(adapter_for(model), 1)
    untied = nn.Sequential(nn.Embedding(50, 8))
    initialise_model(adapter_for(untied), 1)
    assert torch.equal(model[2].weight, untied[0].weight)

    alone = build()
    adapter = adapter_for(alone)
    assert shared_parameters(adapter) == {"2.weight": "0.weight"}
    initialise_block(adapter, _block(adapter, "2"), 1)
    assert torch.equal(alone[2].weight, model[2].weight)
    assert torch.equal(alone[2].bias, model[2].bias)


def test_seed_and_name_both_matter() -> None:
    first, second = _whole(seed=7), _whole(seed=8)
    assert not torch.equal(first["embed.weight"], second["embed.weight"])
    assert not torch.equal(first["layers.0.attention.query.weight"], first["layers.1.attention.query.weight"])
    assert not torch.equal(first["layers.0.attention.key.weight"], first["layers.0.attention.value.weight"])


def test_the_seed_of_a_name_is_the_same_on_every_machine() -> None:
    assert name_seed(0, "layers.0.attention.query") == 5751651865988455694
    assert name_seed(1, "layers.0.attention.query") != name_seed(0, "layers.0.attention.query")


def test_spreads_of_the_decoder() -> None:
    model = Decoder(DecoderConfig(vocabulary=500, layers=8, hidden=128, heads=4, kv_heads=2, ffn=352, initial_std=0.05))
    initialise_model(adapter_for(model), 0)
    layer = model.layers[5]
    for weight in (model.embed.weight, model.head.output.weight, layer.attention.query.weight):
        assert weight.std().item() == pytest.approx(0.05, rel=0.03)
    for weight in (layer.attention.output.weight, layer.feed_forward.down.weight):
        assert weight.std().item() == pytest.approx(0.05 / math.sqrt(16), rel=0.03)
    assert torch.equal(layer.attention_norm.weight, torch.ones(128))


def test_the_global_generator_is_left_alone() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    initialise_model(adapter_for(model), 0)
    assert torch.equal(torch.rand(3), expected)


def test_a_sequential_does_not_depend_on_what_was_there_or_on_other_modules() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Embedding(5, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.GRU(4, 3))

    first, second = build(), build().double()
    initialise_model(adapter_for(first), 2)
    adapter = adapter_for(second)
    for block in reversed(adapter.blocks()):
        initialise_block(adapter, block, 2)
    for name, parameter in first.named_parameters():
        assert torch.equal(second.get_parameter(name), parameter.double()), name


def test_parameters_keep_their_identity_and_whether_they_train() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    model[1].weight.requires_grad_(False)
    before = copy.copy(dict(model.named_parameters()))
    initialise_model(adapter_for(model), 0)
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert not model[1].weight.requires_grad
    assert model[1].bias.requires_grad


def test_running_statistics_are_set_again() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    model[0].running_var.fill_(torch.nan)
    initialise_model(adapter_for(model), 0)
    assert torch.equal(model[0].running_var, torch.ones(4))


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.amount = nn.Parameter(torch.ones(3))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.amount


class _ForgetfulScale(_Scale):
    def reset_parameters(self) -> None:
        """Sets nothing."""


def test_a_module_without_a_rule_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(_Scale()))
    with pytest.raises(PlanError, match=r"module '1\.0' .*_Scale has parameters \(amount\) and no reset_parameters"):
        initialise_model(adapter_for(model), 0)
    assert isinstance(model[1][0].amount, nn.Parameter)


def test_a_rule_that_forgets_a_parameter_is_named() -> None:
    with pytest.raises(PlanError, match=r"module '0' \(_ForgetfulScale\).* leaves amount without"):
        initialise_model(adapter_for(nn.Sequential(_ForgetfulScale())), 0)


class Nested(nn.Module):
    """Draws for the module inside it too, as some families do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.inner.weight)
        nn.init.normal_(self.scale)


@pytest.mark.parametrize("known", [{"0.inner.weight"}, {"0.inner.weight", "0.inner.bias"}, {"0.scale"}])
def test_what_is_known_stays_and_changes_nothing_of_what_is_drawn_with_it(known: set[str]) -> None:
    """A weight that comes from elsewhere was drawn over in place, and what followed it was drawn without it."""
    whole = nn.Sequential(Nested())
    initialise_model(adapter_for(whole), 7)
    model = nn.Sequential(Nested())
    for parameter in model.parameters():
        nn.init.constant_(parameter, 5.0)
    adapter = adapter_for(model)
    initialise_block(adapter, _block(adapter, "0"), 7, known=known)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, torch.full_like(parameter, 5.0) if name in known else whole.get_parameter(name))


def test_attention_of_torch_starts_as_torch_starts_it() -> None:
    """`nn.MultiheadAttention` has no `reset_parameters`, but a private one, which also sets the bias of its output."""
    model = nn.Sequential(nn.Embedding(5, 8), nn.TransformerEncoderLayer(8, 2, 12, batch_first=True))
    initialise_model(adapter_for(model), 7)
    found = dict(model[1].self_attn.named_parameters())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(name_seed(7, "1.self_attn"))
        wanted = nn.MultiheadAttention(8, 2)
        torch.manual_seed(name_seed(7, "1.self_attn"))
        wanted._reset_parameters()
    assert torch.equal(found["in_proj_weight"], wanted.in_proj_weight)
    assert not found["in_proj_bias"].any()
    assert not found["out_proj.bias"].any()
    assert found["out_proj.weight"].std() > 0


def test_a_module_without_initial_values_in_a_decoder_is_named() -> None:
    adapter = adapter_for(Decoder(SMALL))
    with pytest.raises(PlanError, match="the decoder has no initial values for a Conv1d"):
        adapter.initialise(nn.Conv1d(2, 2, 1), torch.Generator())
    adapter.initialise(nn.SiLU(), torch.Generator())  # which has none
