"""A pipeline that computes sequences in slices trains like one process: kept keys and values, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from atoll.base.errors import ConfigError, PlanError, RankError, RunError
from atoll.plans.host import HostState
from atoll.plans.layouts import EFFECTIVE
from atoll.plans.plan import Plan
from atoll.runtime.models.attention import AttentionFunction, attend, divide_attention, register_attention
from atoll.runtime.models.documents import dense_mask
from atoll.runtime.models.part import SequencePart
from atoll.runtime.models.slices import KeptKeys
from atoll.runtime.pipeline.routing import Balance
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_parity
from tests.families import Family
from tests.mixtures import MIXTURES
from tests.runtime.test_balance import Mixture
from tests.runtime.test_sequence import FAMILIES, OTHERS, Rows, Texts, assert_all, look, rows_of

CASE = Case(pipeline=2, slices=3, microbatches=4, steps=2, model=Rows(documents=True))

TWO = [
    replace(CASE, slices=2, model=Rows()),
    replace(CASE, slices=8, model=Rows(tokens=16), schedule="gpipe"),
    replace(CASE, schedule="interleaved", recompute="block", microbatch=2),
    replace(CASE, schedule="zb-v", recompute="selective"),
    replace(CASE, schedule="zb-h1", slice_work=0.5, model=Rows(tokens=13)),
    replace(CASE, model=Rows(tokens=13)),  # padded
    replace(CASE, compile="block-eager", schedule="zb-h1"),
    replace(CASE, vocabulary_parallel=True, schedule="zb-h1", slice_work=0.5),
    replace(CASE, post_validation=True),
    replace(CASE, host=HostState("update-on-host", activations=1.0), schedule="zb-v"),
    replace(CASE, model=MIXTURES["softmax"], optimizer="Muon", slices=2),
    replace(CASE, model=MIXTURES["groups"], slices=2),
    replace(CASE, pipeline=1, intra=2, sequence=2, recompute="block"),
    replace(CASE, pipeline=1, intra=2, layout="GGG", reduction="run"),
]
FOUR: list[dict[str, Any]] = [
    {"intra": 2, "sequence": 2, "schedule": "zb-v"},
    {"intra": 2, "sequence": 2, "schedule": "zb-h1", "slice_work": 0.4, "recompute": "selective"},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": True, "schedule": "zb-v", "layout": "NGG"},
    {"intra": 2, "layout": "IGG", "schedule": "interleaved"},
    {"inter": 2, "layout": "GGG", "schedule": "zb-h1", "slice_work": 0.1},
    {"intra": 2, "expert": 2, "model": MIXTURES["groups"], "slices": 2},
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo reads of what is no leaf
def test_two_ranks_compute_slices() -> None:
    assert_all(TWO)


def test_selection_biases_step_by_the_tokens_of_all_slices() -> None:
    assert_parity(replace(CASE, model=Mixture(), steps=3, slices=2, schedule="zb-h1", balance=Balance(bias_rate=2**-7)))


@pytest.mark.slow
def test_slices_beside_other_axes() -> None:
    assert_all([replace(CASE, **way) for way in FOUR])


@pytest.mark.slow
@pytest.mark.wide(3)
@pytest.mark.parametrize("layout", [each.name for each in EFFECTIVE])
def test_every_layout_with_slices(layout: str) -> None:
    case = replace(CASE, layout=layout, intra=2)
    assert_all([replace(case, schedule=schedule) for schedule in ("1f1b", "zb-v")])


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "modernbert"])
def test_families_compute_slices(name: str) -> None:
    pytest.importorskip("transformers")
    assert_family(name, *FAMILIES[name])


@pytest.mark.slow
@pytest.mark.wide(1)
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_compute_slices(name: str) -> None:
    pytest.importorskip("transformers")
    assert_family(name, *OTHERS[name])


def assert_family(name: str, options: tuple[tuple[str, Any], ...], tolerance: float) -> None:
    packed = Texts(Family(name, options))
    ways = [
        replace(CASE, slices=2, model=Family(name, options, padded=True)),
        replace(CASE, slices=3, model=packed, schedule="zb-v", recompute="block"),
        replace(CASE, slices=8, model=packed, slice_work=0.1),
        # Without documents there is no mask: causal attention of fewer queries than keys.
        replace(CASE, slices=3, model=Texts(Family(name, options), documents=False), recompute="selective"),
    ]
    assert_all(ways, tolerance)


@pytest.mark.slow
def test_low_rank_adapters_compute_slices() -> None:
    pytest.importorskip("peft")
    model = Texts(Family("llama", lora=True))
    assert_all([replace(CASE, model=model), replace(CASE, model=model, schedule="zb-h1", recompute="block")])


@pytest.mark.parametrize("model", [Rows(), Texts(Family("qwen3"), documents=False)], ids=["decoder", "qwen3"])
def test_evaluations_and_logits_are_of_whole_sequences(model: Any) -> None:
    pytest.importorskip("transformers")
    alone = run_ranks(look, 1, replace(CASE, pipeline=1, slices=1, model=model))[0]
    for rank, seen in enumerate(run_ranks(look, 4, replace(CASE, intra=2, sequence=2, model=model, slice_work=0.2))):
        for own, wanted in zip(seen, alone, strict=True):
            assert own.tokens == wanted.tokens
            assert own.loss == pytest.approx(wanted.loss, rel=1e-12)
            assert (own.logits is None) == (rank < 2)
            if own.logits is not None and wanted.logits is not None:
                assert own.logits.shape == wanted.logits.shape
                assert float((own.logits - wanted.logits).abs().max()) < 1e-10


# ---- what is refused


def test_models_that_attend_to_later_tokens_are_refused() -> None:
    pytest.importorskip("transformers")
    from atoll.runtime.models import adapter_for

    for name in ("modernbert", "bert"):
        with torch.device("meta"):
            model = Family(name).build()
        with pytest.raises(PlanError, match=r"slices = 2: layer 0 of .* attends to later tokens"):
            adapter_for(model).divide_sequences(SequencePart(slices=2), 1)  # type: ignore[attr-defined]


def test_what_slices_cannot_compute_is_refused() -> None:
    with pytest.raises(ConfigError, match="'breadth-first' runs whole sequences, not slices"):
        assert replace(CASE, schedule="breadth-first").plan
    with pytest.raises(PlanError, match=r"slice_work = -1\.0"):
        assert replace(CASE, slice_work=-1.0).plan
    with pytest.raises(RankError, match="losses of routers are of whole sequences"):
        assert_all([replace(CASE, model=MIXTURES["groups"], balance=Balance(z_loss=0.1))])
    with pytest.raises(RankError, match=r"slices = 3: .*SequentialAdapter computes a part"):
        assert_all([replace(CASE, model=Case().model)])
    with pytest.raises(PlanError, match="12000 slices of microbatches a rank and step: at most 8191"):
        assert replace(CASE, microbatches=4_000, schedule="gpipe").plan


def test_a_batch_too_short_for_its_slices_is_padded() -> None:
    assert_all([replace(CASE, model=Rows(tokens=2), slice_work=work) for work in (0.0, 0.5)])


# ---- the number of microbatches


def test_a_plan_counts_microbatches_and_not_slices() -> None:
    plan: Plan = CASE.plan
    assert plan.schedule.microbatches == 12
    assert plan.global_batch == 4
    assert replace(CASE, slices=1, pipeline=1).plan.slice_lengths is None
    lengths = replace(CASE, slice_work=0.5).plan.slice_lengths
    assert lengths is not None
    assert sum(lengths(64)) == 64
    assert sorted(lengths(64), reverse=True) == [*lengths(64)]
    assert lengths(64)[0] > lengths(64)[-1]


# ---- attention


def parts(slices: int, **options: Any) -> SequencePart:
    return SequencePart(slices=slices, **options)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def by_slices(
    function: AttentionFunction,
    part: SequencePart,
    tensors: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    **kw: Any,
) -> torch.Tensor:
    """Return the output of attention that is computed slice by slice, and let `backward` run from the last."""
    module = torch.nn.Module()
    module.num_key_value_groups = tensors[0].shape[1] // tensors[1].shape[1]
    module.is_causal = True
    block = torch.nn.Module()
    length = tensors[0].shape[2]
    batch = {"input_ids": torch.zeros(1, length)}
    divide_attention([module], None, lambda: KeptKeys(part, block))
    outputs = []
    for number in range(part.slices):
        part.enter(number, batch)
        own = [part.of(each, 2) for each in tensors]
        found = attend(function, module, *own, mask, **kw)
        outputs.append(found[0] if isinstance(found, tuple) else found)
    torch.manual_seed(1)
    weights = torch.randn(tensors[0].shape[0], length, *outputs[0].shape[2:], dtype=torch.float64)
    for number in reversed(range(part.slices)):  # each slice is a graph of its own, up to the leaves
        part.enter(number, batch)
        (outputs[number] * part.of(weights, 1)).sum().backward()
    return torch.cat(outputs, 1)


def plainly(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kw: Any
) -> torch.Tensor:
    options = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": True}
    return F.scaled_dot_product_attention(query, key, value, **options, **kw).transpose(1, 2)


MASKS = {
    "causal": None,
    "windows": torch.ones(10, 10, dtype=torch.bool).tril().triu(-3)[None, None],
    "biases": torch.randn(2, 4, 10, 10, dtype=torch.float64).masked_fill(
        torch.ones(10, 10, dtype=torch.bool).triu(1), float("-inf")
    ),
}


@pytest.mark.parametrize("lengths", [None, (6, 3, 1), (1, 1, 8)], ids=["equal", "shorter", "longer"])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_of_slices_is_that_of_the_sequence(mask: str, lengths: tuple[int, ...] | None) -> None:
    part = parts(3, lengths=lambda length: lengths) if lengths else parts(5)
    torch.manual_seed(0)
    tensors = [drawn(2, 4, 10, 6), drawn(2, 2, 10, 6), drawn(2, 2, 10, 3)]
    found = by_slices(plainly, part, tensors, MASKS[mask])
    sliced = [each.grad for each in tensors]
    for each in tensors:
        each.grad = None
    wanted = by_slices(plainly, parts(1), tensors, MASKS[mask])
    assert torch.allclose(found, wanted, atol=1e-12)
    for own, each in zip(sliced, tensors, strict=True):
        assert own is not None
        assert each.grad is not None
        assert torch.allclose(own, each.grad, atol=1e-12)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_each_kind_of_attention_of_a_family(name: str) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    from atoll.runtime.models import adapter_for

    register_attention()
    sizes: dict[str, Any] = {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation=name)
    model = LlamaForCausalLM(config)
    batch = {key: value for key, value in rows_of(0, 2, 12, documents=True).items() if key != "labels"}
    with torch.no_grad():
        wanted = model(**batch, use_cache=False).logits
    adapter: Any = adapter_for(model)
    part = parts(3)
    adapter.divide_sequences(part, 1)
    block = torch.nn.Module()
    divide_attention(model.modules(), None, lambda: KeptKeys(part, block))
    found = []
    for number in range(3):
        part.enter(number, batch)
        with torch.no_grad():
            found.append(adapter.forward(0, len(adapter.blocks()), None, batch))
    assert torch.allclose(torch.cat(found, 1), wanted, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:_compile flag")
def test_block_masks_of_flex_attention_are_those_of_a_slice() -> None:
    part, module = parts(3), torch.nn.Module()
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 1, 1, 1]])

    def sees(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (documents[row, query] == documents[row, key])

    def flex(module: Any, query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        found: Any = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
        return found.transpose(1, 2)

    mask = create_block_mask(sees, 2, None, 9, 9, device="cpu")
    assert torch.equal(dense_mask(mask)[:, 0], (documents[:, :, None] == documents[:, None]).tril())
    torch.manual_seed(0)
    tensors = [drawn(2, heads, 9, 16).detach() for heads in (4, 2, 2)]
    divide_attention([module], None, lambda: KeptKeys(part, None))
    with torch.no_grad():
        wanted = flex(module, *tensors, mask)
        found = []
        for number in range(3):
            part.enter(number, {"input_ids": documents})
            found.append(attend(flex, module, *(part.of(each, 2) for each in tensors), mask))
    assert torch.allclose(torch.cat(found, 1), wanted, atol=1e-12)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seqlens", "cache"])
def test_rows_of_lengths_of_their_own_are_refused(name: str) -> None:
    part, module = parts(2), torch.nn.Module()
    divide_attention([module], None, lambda: KeptKeys(part, None))
    part.enter(0, {"input_ids": torch.zeros(1, 4)})
    own = [drawn(1, 2, 2, 4) for _ in range(3)]
    with pytest.raises(RunError, match=f"attention is given {name}, which describes rows of a length of their own"):
        attend(plainly, module, *own, None, **{name: torch.zeros(2)})


def test_what_is_kept_is_released() -> None:
    part, module, block = parts(2), torch.nn.Module(), torch.nn.Module()
    batch = {"input_ids": torch.zeros(1, 4)}
    kept = KeptKeys(part, block)
    divide_attention([module], None, lambda: kept)

    def run() -> None:
        for number in range(4):
            part.enter(number, batch)
            attend(plainly, module, *(drawn(1, 2, 2, 4) for _ in range(3)), None)

    run()
    assert set(kept._kept) == {0, 1}  # until their backward
    kept.release(0)
    assert set(kept._kept) == {1}
    kept.clear()
    block.eval()
    run()
    assert not kept._kept


def test_half_precisions_add_gradients_in_full_precision() -> None:
    part, module = parts(4), torch.nn.Module()
    block, batch = torch.nn.Module(), {"input_ids": torch.zeros(1, 4)}
    kept = KeptKeys(part, block)
    divide_attention([module], None, lambda: kept)
    keys = torch.ones(1, 1, 4, 1, dtype=torch.bfloat16, requires_grad=True)
    weights = [0.0, 2**-8, 2**-8, 1.0]  # in bf16, 1 + 2^-8 is 1

    def first(module: Any, query: Any, key: torch.Tensor, value: Any, mask: Any) -> torch.Tensor:
        return key[:, :, :1].transpose(1, 2) * weights[part.at]

    outputs = []
    for number in range(4):
        part.enter(number, batch)
        own = part.of(keys, 2)
        outputs.append(attend(first, module, own, own, own.detach(), None))
    for number in reversed(range(4)):
        part.enter(number, batch)
        outputs[number].sum().backward()
    assert keys.grad is not None
    assert float(keys.grad[0, 0, 0, 0]) == 1 + 2**-7
