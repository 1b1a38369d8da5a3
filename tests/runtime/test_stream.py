"""Whole weights from any layout and pipeline: what each rank is shown, in which names, dtypes and order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.base.errors import PlanError, RunError
from atoll.runtime.handover import StreamedTensor
from atoll.runtime.models.saving import saving_form
from atoll.runtime.services.stream import BUCKET
from atoll.testing import run_ranks
from atoll.testing.parity import Case, unsplit
from atoll.testing.tiny import TinyConfig
from tests.families import Family, quietly
from tests.matrix import case_of, name_of, sample

MODEL = TinyConfig(layers=3)
SMALL = 3000
"""Bytes of a bucket: a few tensors of the tiny model."""
CASES = {
    "one rank": Case(model=MODEL),
    "shards": Case("GGG", inter=2, intra=2, model=MODEL),
    "pipeline": Case("IGG", pipeline=4, microbatches=8, model=MODEL),
    "v": Case("III", pipeline=2, intra=2, schedule="zb-v", model=MODEL),
    "tensor": Case("GGG", pipeline=2, tensor=2, intra=2, model=MODEL),
    "vocabulary": Case("IIG", pipeline=2, tensor=2, vocabulary_parallel=True, schedule="zb-h1", model=MODEL),
}


def walk(case: Case, **options: Any) -> tuple[list[StreamedTensor], dict[str, Tensor]]:
    """Return what this rank receives after a step, and what its stages store: parameters, in the dtype of the stream,
    and buffers."""
    engine = case.engine()
    engine.step(case.share(engine, 0))
    shown = [each._replace(tensor=each.tensor.clone()) for each in engine.stream(**options)]
    with engine.full_parameters() as values:
        own = {name: value.to(options.get("dtype", value.dtype)).clone() for name, value in values.items()}
    own |= {name: buffer.clone() for name, buffer in engine._buffers.own().items()}
    engine.step(case.share(engine, 1))
    engine.close()
    return shown, own


def assert_right(found: list[tuple[list[StreamedTensor], dict[str, Tensor]]]) -> None:
    every = {name: value for _, own in found for name, value in own.items()}
    order = [each.name for each in found[0][0]]
    assert sorted(order) == sorted(every), "each once"
    for shown, _ in found:
        assert [each.name for each in shown] == order
        for name, own_dtype, shape, tensor in shown:
            assert (own_dtype, shape) == (tensor.dtype, tensor.shape) == (every[name].dtype, every[name].shape)
            assert torch.equal(tensor, every[name]), name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "bucket"), [(torch.float64, SMALL), (torch.bfloat16, BUCKET)], ids=["small", "bf16"])
def test_every_rank_is_shown_the_whole_model(name: str, dtype: torch.dtype, bucket: int) -> None:
    assert_right(run_ranks(walk, CASES[name].ranks, CASES[name], dtype=dtype, bucket=bucket))


@pytest.mark.parametrize("to", [0, 3, 5, 7])
def test_one_rank_is_shown_it(to: int) -> None:
    case = Case("GGG", pipeline=4, intra=2, model=MODEL)
    found = run_ranks(walk, 8, case, to=to, bucket=SMALL)
    assert [at for at, (shown, _) in enumerate(found) if shown] == [to]
    assert_right([(found[to][0], {name: value for _, own in found for name, value in own.items()})])


@pytest.mark.slow
@pytest.mark.wide(6)
@pytest.mark.parametrize("choice", sample(), ids=name_of)
def test_the_sample(choice: Any) -> None:
    case = case_of(choice)
    case = replace(case, model=replace(case.model, layers=3), outer=None)
    assert_right(run_ranks(walk, case.ranks, case, dtype=torch.float64, bucket=SMALL))


# ---- of transformers


def before_a_step(case: Case, **options: Any) -> list[StreamedTensor]:
    engine = case.engine()
    shown = [each._replace(tensor=each.tensor.clone()) for each in engine.stream(**options)]
    engine.close()
    return shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("qwen3_moe", {"intra": 2, "expert": 2, "pipeline": 2}),  # experts are fused in the model, and not in files
        ("deepseek_v3", {"pipeline": 2, "schedule": "zb-v"}),  # a buffer is saved
        ("gemma3_text", {"pipeline": 2, "tensor": 2}),  # embedding and head are one parameter, of two stages
    ],
)
def test_names_and_forms_are_those_of_save_pretrained(name: str, axes: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from safetensors.torch import load_file

    case = Case("GGG", microbatches=4, model=Family(name), **axes)
    model: Any = unsplit(case)
    model.save_pretrained(tmp_path)
    saved = {key: value for path in tmp_path.glob("*.safetensors") for key, value in load_file(path).items()}
    for shown in run_ranks(before_a_step, case.ranks, case, bucket=SMALL):
        assert {each.name for each in shown} == saved.keys()
        assert len(shown) == len(saved)
        for each in shown:
            # The model was cast whole to float64; an engine leaves buffers as they are.
            is_buffer = each.name in dict(model.named_buffers())
            assert is_buffer or each.dtype == saved[each.name].dtype == torch.float64
            assert torch.equal(each.tensor.double(), saved[each.name]), each.name


def adapted(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return what a rank is shown after a step, with adapters merged and apart, and what its stages store."""
    engine = case.engine()
    engine.step(case.share(engine, 0))
    merged = {each.name: each.tensor.clone() for each in engine.stream(bucket=SMALL)}
    apart = {each.name: each.tensor.clone() for each in engine.stream(adapters="apart")}
    own = engine.state_dict()
    engine.close()
    return merged, apart, own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "saved", "axes"),
    [
        ("llama", (), {"pipeline": 2}),
        ("llama", ("lm_head",), {"pipeline": 2, "tensor": 2}),
        ("gpt2", ("ln_1", "mlp.c_proj"), {"intra": 2}),  # weights that peft transposes
    ],
)
def test_adapters_are_merged_or_apart_as_peft_has_them(name: str, saved: tuple[str, ...], axes: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    case = Case("ING", microbatches=4, lr=0.1, model=Family(name, lora=True, saved=saved), **axes)
    found = run_ranks(adapted, case.ranks, case)
    model: Any = unsplit(case)
    own = {key: value for _, _, each in found for key, value in each.items()}
    model.load_state_dict({f"base_model.model.{key}": value for key, value in own.items()}, strict=False)
    assert any("lora_B" in key and value.any() for key, value in own.items())
    apart = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    whole = model.merge_and_unload()
    merged = whole.state_dict()
    tied = {"lm_head.weight"} if whole.config.tie_word_embeddings else set()
    for shown, alone, _ in found:
        assert shown.keys() == merged.keys() - tied
        for key, value in shown.items():
            torch.testing.assert_close(value, merged[key], rtol=1e-12, atol=1e-14)
        assert alone.keys() == apart.keys()
        assert all(torch.equal(alone[key], value) for key, value in apart.items())


# ---- what is asked, and what is refused


def some(case: Case) -> dict[str, list[str]]:
    engine = case.engine()
    found = {
        "some": [each.name for each in engine.stream("0.*", bucket=1)],
        "two": [each.name for each in engine.stream(["1.up.weight", "0.*"])],
    }
    stream = engine.stream(bucket=1)
    next(stream)
    if engine.place.pp == 1:
        del stream  # it is read no further, and the others have all of it
    else:
        found["rest"] = [each.name for each in stream]
    engine.step(case.share(engine, 0))
    engine.close()
    return found


def test_names_are_chosen_and_a_rank_may_stop_early() -> None:
    first, second = run_ranks(some, 2, Case("NNN", pipeline=2, model=MODEL))
    assert first["some"] == second["some"]
    assert first["some"]
    assert all(name.startswith("0.") for name in first["some"])
    assert first["two"] == [*first["some"], "1.up.weight"]
    assert len(first["rest"]) > 10


def wrong(case: Case) -> list[str]:
    engine = case.engine()
    said: list[str] = []
    for options in ({"names": "nothing"}, {"bucket": 0}, {"to": 2}, {"dtype": torch.int8}, {"to": engine.place.rank}):
        try:
            engine.stream(**options)
        except PlanError as error:
            said.append(str(error))
    stream = engine.stream()
    for act in (lambda: engine.step(case.share(engine, 0)), engine.stream, lambda: engine.load("no folder")):
        try:
            act()
        except RunError as error:
            said.append(str(error))
    list(stream)
    engine.step(case.share(engine, 0))
    engine.close()
    return said


def test_what_cannot_be_streamed_is_refused_on_every_rank() -> None:
    for said in run_ranks(wrong, 2, Case("GGG", intra=2, model=MODEL)):
        words = ("no parameter is called 'nothing'", "bucket = 0", "to = 2: the mesh has ranks 0 to 1", "torch.int8",
                 "ask for different streams", *["to its end"] * 3)  # fmt: skip
        assert len(said) == len(words)
        assert all(word in each for word, each in zip(words, said, strict=True))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, "lora_magnitude_vector.default.weight of Linear cannot be merged"),
        ({"lora_bias": True}, "lora_B.default.bias of Linear cannot be merged"),
        ({"target_modules": ["lm_head", "q_proj"]}, "its weight is also model.embed_tokens.weight"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_adapters_that_cannot_be_merged_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    peft = pytest.importorskip("peft")
    with quietly():
        lora = peft.LoraConfig(r=2, **{"target_modules": ["q_proj"]} | options)
        model = peft.get_peft_model(Family("gemma3_text").build(), lora)
    with pytest.raises(PlanError, match=said):
        saving_form(model, "merged")
    assert saving_form(model, "apart").together(["model.layers.0.self_attn.q_proj.lora_A.default.weight"])


@pytest.mark.parametrize(("adapters", "said"), [("apart", "_Tiny has no adapters"), ("both", "adapters = 'both'")])
def test_adapters_that_are_not_there_are_refused(adapters: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        saving_form(MODEL.build(), adapters)
