"""Adapters: blocks that cover the model, forward by parts, summed losses, and refusals."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.base.errors import PlanError
from atoll.runtime.models import (
    Adapter,
    Batch,
    Block,
    Decoder,
    DecoderAdapter,
    DecoderConfig,
    SequentialAdapter,
    adapter_for,
    token_cross_entropy,
)
from atoll.runtime.models.adapter import run_blocks

SMALL = DecoderConfig(vocabulary=31, layers=3, hidden=16, heads=4, kv_heads=2, ffn=20)


def _sequential() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(31, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 31))


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    "model",
    [Decoder(SMALL), Decoder(dataclasses.replace(SMALL, tie_embeddings=True)), _sequential()],
    ids=["decoder", "tied", "sequential"],
)
def test_blocks_cover_every_parameter_by_its_name(model: nn.Module) -> None:
    blocks = adapter_for(model).blocks()
    named = {name: parameter for block in blocks for name, parameter in block.named_parameters()}
    expected = dict(model.named_parameters(remove_duplicate=False))
    assert named.keys() == expected.keys()
    assert all(named[name] is expected[name] for name in expected)


def test_blocks_of_the_decoder() -> None:
    assert [block.name for block in adapter_for(Decoder(SMALL)).blocks()] == [
        "embed",
        "layers.0",
        "layers.1",
        "layers.2",
        "head",
    ]


def test_blocks_of_a_sequential_keep_their_names_and_repeats() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(OrderedDict([("first", nn.Embedding(5, 4)), ("mix", shared), ("again", shared)]))
    blocks = adapter_for(model).blocks()
    assert [block.name for block in blocks] == ["first", "mix", "again"]
    assert blocks[1].module.weight is blocks[2].module.weight


@pytest.mark.parametrize("model", [Decoder(SMALL), _sequential()], ids=["decoder", "sequential"])
def test_any_cut_into_parts_gives_the_whole_models_logits(model: nn.Module) -> None:
    adapter, batch = adapter_for(model), _batch()
    total = len(adapter.blocks())
    whole = model(batch["input_ids"])
    for cut in range(1, total):
        hidden = adapter.forward(0, cut, None, batch)
        assert torch.equal(adapter.forward(cut, total, hidden, {"labels": batch["labels"]}), whole)


def test_forward_fires_the_hooks_of_blocks() -> None:
    model = Decoder(SMALL)
    adapter, fired = adapter_for(model), []
    for block in adapter.blocks():
        block.module.register_forward_pre_hook(lambda *_, name=block.name: fired.append(name))
    adapter.forward(0, 5, None, _batch())
    assert fired == [block.name for block in adapter.blocks()]


def test_a_sequential_reads_inputs_where_there_are_no_input_ids() -> None:
    def squares(outputs: Tensor, batch: Batch) -> Tensor:
        return (outputs - batch["targets"]).square().sum()

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    adapter = SequentialAdapter(model, loss=squares)
    batch = {"inputs": torch.randn(5, 3), "targets": torch.randn(5, 2)}
    outputs = adapter.forward(0, 2, None, batch)
    assert torch.equal(outputs, model(batch["inputs"]))
    torch.testing.assert_close(adapter.loss(outputs, batch), F.mse_loss(outputs, batch["targets"], reduction="sum"))


def test_loss_is_the_sum_over_counted_labels() -> None:
    batch = _batch()
    logits = torch.randn(2, 7, 31, generator=torch.Generator().manual_seed(4))
    chances = logits.double().log_softmax(-1)
    expected = -sum(chances[row, column, batch["labels"][row, column]] for row in range(2) for column in range(6))
    torch.testing.assert_close(token_cross_entropy(logits, batch).double(), expected, rtol=1e-6, atol=0)


def test_loss_takes_arrays() -> None:
    batch = _batch()
    logits = torch.randn(2, 7, 31)
    arrays = {name: np.asarray(value) for name, value in batch.items()}
    assert torch.equal(token_cross_entropy(logits, arrays), token_cross_entropy(logits, batch))


@pytest.mark.parametrize(
    ("dtype", "loss_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_loss_is_computed_in_fp32_or_fp64(dtype: torch.dtype, loss_dtype: torch.dtype) -> None:
    logits = torch.randn(2, 7, 31, generator=torch.Generator().manual_seed(4)).to(dtype)
    loss = token_cross_entropy(logits, _batch())
    assert loss.dtype == loss_dtype
    torch.testing.assert_close(loss.double(), token_cross_entropy(logits.double(), _batch()), rtol=1e-6, atol=0)


def test_no_counted_label_gives_zero_loss_and_zero_gradient() -> None:
    logits = torch.randn(2, 7, 31, requires_grad=True)
    loss = token_cross_entropy(logits, {"labels": torch.full((2, 7), -100)})
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_built_in_adapters_satisfy_the_protocol_and_pass_through() -> None:
    for adapter in (DecoderAdapter(Decoder(SMALL)), SequentialAdapter(_sequential())):
        assert isinstance(adapter, Adapter)
        assert adapter_for(adapter) is adapter


class _OwnAdapter(nn.Module):
    """A model that splits itself, and may forget its scale."""

    def __init__(self, *, forget: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(31, 31))
        if forget:
            self.scale = nn.Parameter(torch.ones(1))

    def atoll_adapter(self) -> _Split:
        return _Split(self)


class _Split(DecoderAdapter):
    def __init__(self, model: _OwnAdapter) -> None:
        self._blocks = (Block("body", model.body),)


def test_a_model_may_bring_its_adapter() -> None:
    adapter = adapter_for(_OwnAdapter())
    assert isinstance(adapter, _Split)
    assert [block.name for block in adapter.blocks()] == ["body"]


def test_a_parameter_in_no_block_is_named() -> None:
    with pytest.raises(PlanError, match="are in no block: scale"):
        adapter_for(_OwnAdapter(forget=True))


def test_an_unknown_model_is_told_the_protocol() -> None:
    with pytest.raises(PlanError, match=r"no adapter for a Linear.*atoll_adapter\(\)"):
        adapter_for(nn.Linear(2, 2))


def test_an_atoll_adapter_that_gives_something_else_is_refused() -> None:
    class Wrong(nn.Module):
        def atoll_adapter(self) -> int:
            return 3

    with pytest.raises(PlanError, match="gave a int, which is not an Adapter"):
        adapter_for(Wrong())


def test_wrong_calls_of_forward_are_refused() -> None:
    adapter, batch = adapter_for(Decoder(SMALL)), _batch()
    hidden = torch.zeros(2, 7, 16)
    with pytest.raises(PlanError, match="needs the hidden state of block 1"):
        adapter.forward(2, 3, None, batch)
    with pytest.raises(PlanError, match="also given a hidden state"):
        adapter.forward(0, 1, hidden, batch)
    with pytest.raises(PlanError, match=r"blocks 4\.\.5 do not exist: the model has 5"):
        adapter.forward(4, 6, hidden, batch)
    with pytest.raises(PlanError, match="only labels"):
        adapter.forward(0, 1, None, {"labels": batch["labels"]})
    blocks = adapter.blocks()
    for first, last in ((-1, 1), (2, 2), (3, 2), (0, 6)):
        with pytest.raises(PlanError, match=rf"blocks {first}\.\.{last - 1} do not exist"):
            run_blocks(blocks, first, last, hidden)


def test_buffers_lost_on_meta_are_refused() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("amount", torch.ones(3))

    adapter_for(nn.Sequential(nn.Linear(3, 3), Shift()))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Shift())
    with pytest.raises(PlanError, match=r"1\.amount"):
        adapter_for(model)


def test_an_empty_sequential_is_refused() -> None:
    with pytest.raises(PlanError, match="empty"):
        adapter_for(nn.Sequential())


def test_a_repeated_module_is_two_blocks_with_the_same_parameters() -> None:
    """Each block has its own forward; replaced twice, each of the two would run inside the other."""
    shared, activation = nn.Linear(4, 4), nn.Tanh()
    model = nn.Sequential(nn.Embedding(8, 4), shared, activation, shared, activation)
    ids = torch.arange(8)
    before = model(ids)
    blocks = SequentialAdapter(model).blocks()
    assert len({id(block.module) for block in blocks}) == 5
    assert blocks[3].module.weight is shared.weight
    assert torch.equal(model(ids), before)
    assert [block.module for block in SequentialAdapter(model).blocks()] == [block.module for block in blocks]


class Repeats(nn.Module):
    """A model whose own adapter lists one module as two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def atoll_adapter(self) -> Adapter:
        adapter = SequentialAdapter(nn.Sequential(OrderedDict(first=self.first)))
        adapter.blocks = lambda: [Block("first", self.first), Block("second", self.second)]  # type: ignore[method-assign]
        return adapter


def test_one_module_as_two_blocks_is_refused() -> None:
    with pytest.raises(PlanError, match="one module is the blocks first, second; give each block its own module"):
        adapter_for(Repeats())
