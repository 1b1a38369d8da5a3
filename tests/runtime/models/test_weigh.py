"""What blocks weigh: what is multiplied, and what is held."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.plans.stages import layers_of
from atoll.runtime.models import Decoder, DecoderConfig, adapter_for, relative_score, weigh_blocks

HIDDEN, FFN, VOCABULARY = 8, 12, 32
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * FFN


def decoder(*, tied: bool = False) -> Decoder:
    with torch.device("meta"):
        return Decoder(
            DecoderConfig(
                vocabulary=VOCABULARY, layers=2, hidden=HIDDEN, heads=2, kv_heads=1, ffn=FFN, tie_embeddings=tied
            )
        )


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder(tied: bool) -> None:
    """The table is looked up and not multiplied, the head is, whoever's weight it is."""
    weights = weigh_blocks(adapter_for(decoder(tied=tied)).blocks())
    assert [weight.name for weight in weights] == ["embed", "layers.0", "layers.1", "head"]
    assert [weight.kind for weight in weights] == ["Embedding", "DecoderLayer", "DecoderLayer", "Head"]
    assert [weight.cost for weight in weights] == [0, 3 * LAYER, 3 * LAYER, 3 * HIDDEN * VOCABULARY]
    table = 4 * 4 * HIDDEN * VOCABULARY
    layer = 4 * 4 * (LAYER + 2 * HIDDEN)
    assert [weight.memory for weight in weights] == [table, layer, layer, table + 4 * 4 * HIDDEN]


def test_frozen_parameters_have_no_gradient_of_their_own() -> None:
    model = decoder()
    model.layers[0].requires_grad_(False)
    _, frozen, trained, _ = weigh_blocks(adapter_for(model).blocks())
    assert (frozen.cost, trained.cost) == (2 * LAYER, 3 * LAYER)
    assert 4 * frozen.memory == trained.memory


class Shared(nn.Module):
    """Multiplies one matrix twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight


def test_what_is_multiplied_twice_counts_twice_and_is_held_once() -> None:
    (weight,) = weigh_blocks(adapter_for(nn.Sequential(Shared())).blocks())
    assert (weight.cost, weight.memory) == (2 * 3 * 16, 4 * 4 * 16)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks for a name that transformers has given up
def test_a_model_of_transformers_with_adapters() -> None:
    """GPT-2 has a matrix class of its own, and blocks that stay together; its adapters are small matrices."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    weights = weigh_blocks(adapter_for(model).blocks())
    layer = (3 + 1 + 4 + 4) * 64
    assert [weight.cost for weight in weights] == [0, 0, 3 * layer, 3 * layer, 0, 3 * 8 * 32]
    assert [weight.is_joined for weight in weights] == [False, True, False, False, False, True]
    assert layers_of(weights) == range(2, 4)

    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    lora = 2 * 8 + 2 * 24
    costs = [weight.cost for weight in weigh_blocks(adapter_for(adapted).blocks())]
    assert costs == [0, 0, *[2 * layer + 3 * lora] * 2, 0, 2 * 8 * 32]


@pytest.mark.parametrize("tied", [False, True])
def test_ends_that_every_rank_has_a_part_of_weigh_nothing(tied: bool) -> None:
    blocks = adapter_for(decoder(tied=tied)).blocks()
    weights = weigh_blocks(blocks, apart=("embed", "head.output"))
    assert [weight.cost for weight in weights] == [0, 3 * LAYER, 3 * LAYER, 0]
    assert weights[0].memory == 0
    assert weights[3].memory == 4 * 4 * HIDDEN  # the final norm
    assert relative_score(blocks, weights, "head.output") == 2 * VOCABULARY * HIDDEN / (2 * LAYER)
