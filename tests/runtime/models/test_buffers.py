"""Buffers of a model that was built on meta have values, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll import Engine, Layout, MeshShape, Plan
from atoll.base.errors import PlanError
from atoll.plans import schedules
from atoll.runtime.models import Block, reset_module, token_cross_entropy
from atoll.runtime.models.buffers import _constructed, construct_buffers, on_meta, persistent_buffers, written
from tests.families import Family, quietly

PLAN = Plan(MeshShape(), Layout("NNN"), schedules.build("gpipe", ranks=1, microbatches=1), microbatch=2)


class Scaled(nn.Module):
    """A linear with buffers of several kinds; `leaves` is one that reset_parameters does not set."""

    def __init__(self, leaves: str = "", width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.leaves = leaves
        self.register_buffer("scale", torch.full((width,), 2.0))
        self.register_buffer("brief", torch.ones(width, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, value in (("scale", 2.0), ("brief", 1.0), ("count", 3)):
            if name != self.leaves:
                self.get_buffer(name).fill_(value)
        if self.leaves == "part of scale":
            self.get_buffer("scale")[1:] = torch.nan
        if self.leaves != "mask":
            self.get_buffer("mask").copy_(torch.tensor([True, False]))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden) * self.get_buffer("scale")


def engine_of(model: nn.Module) -> Engine:
    return Engine(model, PLAN, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))


@pytest.mark.parametrize("leaves", ["scale", "brief", "count", "mask", "part of scale"])
def test_memory_that_nobody_wrote_is_refused_by_name(leaves: str) -> None:
    """Past bug: a reset_parameters that does not know a buffer left memory as found, and the model trained on it."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(16, 8), Scaled(leaves), nn.Linear(8, 16))
    with pytest.raises(PlanError, match=rf"1 buffers .* nothing sets them: 1\.{leaves.split()[-1]} \(Scaled\)"):
        engine_of(model)


def test_buffers_of_every_kind_keep_value_dtype_and_persistence() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(16, 8), Scaled(), nn.Linear(8, 16))
    engine = engine_of(model)
    wanted = Scaled()
    for name, buffer in model[1].named_buffers():
        assert buffer.dtype == wanted.get_buffer(name).dtype
        assert torch.equal(buffer, wanted.get_buffer(name))
    state = engine.state_dict()
    assert {"1.scale", "1.count"} == {name for name in state if name.count(".") == 1 and "weight" not in name} - {
        "2.bias"
    }
    engine.close()


def test_a_buffer_that_has_values_keeps_them() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(16, 8), Scaled(), nn.Linear(8, 16))
    own = torch.arange(8.0)
    model[1].scale = own
    engine = engine_of(model)
    assert torch.equal(engine.state_dict()["1.scale"], torch.arange(8.0))
    assert model[1].scale is own
    engine.close()


def test_a_module_that_is_listed_twice_keeps_one_buffer() -> None:
    with torch.device("meta"):
        counted = nn.BatchNorm1d(6)
        model = nn.Sequential(nn.Embedding(16, 8), counted, nn.Linear(8, 8), counted, nn.Linear(8, 16))
    engine = engine_of(model)
    assert model[1] is not model[3]
    assert model[1].running_mean is model[3].running_mean
    ids = torch.randint(16, (2, 6))
    engine.step({"input_ids": ids, "labels": ids.roll(-1, 1)})
    assert model[3].num_batches_tracked == 2
    engine.close()


class Outer(nn.Module):
    """A model that adds a persistent buffer of its own to its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.register_buffer("shift", torch.linspace(0.0, 1.0, 16))

    def blocks(self) -> list[Block]:
        return [Block("embed", self.embed), Block("head", self.head)]

    def atoll_adapter(self) -> Any:
        return OuterAdapter(self)


class OuterAdapter:
    def __init__(self, model: Outer) -> None:
        self.model = model

    def blocks(self) -> list[Block]:
        return self.model.blocks()

    def forward(self, first: int, last: int, hidden: Tensor | None, batch: Any) -> Tensor:
        for block in self.blocks()[first:last]:
            hidden = block.module(batch["input_ids"] if hidden is None else hidden)
        assert hidden is not None
        return hidden + self.model.shift if last == 2 else hidden  # type: ignore[operator]

    def loss(self, logits: Tensor, batch: Any) -> Tensor:
        return token_cross_entropy(logits, batch)

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        if isinstance(module, Outer):
            module.get_buffer("shift").copy_(torch.linspace(0.0, 1.0, 16))
        else:
            reset_module(module, generator)


def test_buffers_outside_of_blocks_are_set_saved_and_loaded(tmp_path: Any) -> None:
    """Past bug: only buffers of blocks were; BART's bias of logits, for example, was not."""
    with torch.device("meta"):
        model = Outer()
    engine = engine_of(model)
    assert torch.equal(engine.state_dict()["shift"], torch.linspace(0.0, 1.0, 16))
    model.get_buffer("shift").fill_(7.0)
    engine.save(tmp_path / "saved")
    model.get_buffer("shift").zero_()
    engine.load(tmp_path / "saved")
    assert (model.get_buffer("shift") == 7.0).all()
    engine.close()


@pytest.mark.slow
def test_a_bias_outside_of_blocks_is_read_from_a_folder(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "vocab_size": 48, "max_position_embeddings": 64, "encoder_layers": 1, "decoder_layers": 1}
    heads = {f"{each}_attention_heads": 2 for each in ("encoder", "decoder")}
    config = transformers.BartConfig(**sizes, **heads, encoder_ffn_dim=16, decoder_ffn_dim=16)
    with quietly():
        whole = transformers.BartForConditionalGeneration(config)
        whole.final_logits_bias.normal_()
        whole.save_pretrained(tmp_path)
        with torch.device("meta"):
            model = transformers.BartForConditionalGeneration(config)
    engine = Engine(model, PLAN, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), weights=tmp_path)
    assert torch.equal(engine.state_dict()["final_logits_bias"], whole.final_logits_bias)
    engine.close()


def lost_model(name: str) -> Any:
    with torch.device("meta"), quietly():
        return Family(name).build()


@pytest.mark.parametrize("name", ["falcon_h1", "gemma", "gptj", "deepseek_v3"])
def test_a_constructor_gives_what_it_gives_on_the_cpu(name: str) -> None:
    pytest.importorskip("transformers")
    model, whole = lost_model(name), Family(name).build()
    assert construct_buffers(model) == ""
    assert all(parameter.is_meta for parameter in model.parameters())
    for key, buffer in whole.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key


def test_a_model_that_is_constructed_again_has_no_memory_for_its_parameters() -> None:
    """Only its buffers are wanted, and parameters that are small enough to be compared."""
    pytest.importorskip("transformers")
    model = lost_model("gemma")
    assert all(parameter.is_meta for parameter in _constructed(model).parameters())
    sizes = {parameter.numel() for parameter in model.parameters()}
    keeps = min(sizes)
    found = {parameter.numel(): parameter.is_meta for parameter in _constructed(model, keeps=keeps).parameters()}
    assert found == {size: size > keeps for size in sizes}


def test_the_bias_of_a_router_is_kept_in_fp32() -> None:
    """As `from_pretrained` keeps it: files of bf16 models have it in fp32."""
    pytest.importorskip("transformers")
    model = lost_model("deepseek_v3").to(torch.bfloat16)
    construct_buffers(model)
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    assert model.dtype == torch.bfloat16


def test_a_class_that_cannot_be_constructed_again_is_named() -> None:
    transformers = pytest.importorskip("transformers")

    class Odd(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any, *, factor: float) -> None:
            super().__init__(config)
            self.model.layers[0].register_buffer("factor", torch.tensor(factor))

    with torch.device("meta"), quietly():
        model = Odd(Family("llama").build().config, factor=2.0)
    with pytest.raises(PlanError, match=r"model\.layers\.0\.factor .*Odd\(config\) fails: TypeError") as caught:
        engine_of(model)
    assert "\n" not in str(caught.value)


def test_what_is_read_afterwards_need_not_be_written() -> None:
    with torch.device("meta"):
        module = Scaled()
    with written([("a", module)], read={"a.scale"}, made={}):
        for name in ("brief", "count", "mask"):
            module.get_buffer(name).fill_(1)
    assert not on_meta(module)
    assert set(persistent_buffers(Held(module), [Block("a", module)])) == {"a.scale", "a.count"}


class Held:
    """An adapter of one block."""

    def __init__(self, module: nn.Module) -> None:
        self._block = Block("a", module)

    def blocks(self) -> list[Block]:
        return [self._block]
