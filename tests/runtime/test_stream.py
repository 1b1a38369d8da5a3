"""Whole weights from any layout and pipeline: what each rank is shown, in which names, dtypes and order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.base.errors import PlanError, RankError, RunError
from atoll.runtime.handover import StreamedTensor
from atoll.runtime.services.stream import BUCKET
from atoll.testing import run_ranks
from atoll.testing.parity import Case, unsplit
from atoll.testing.tiny import TinyConfig
from tests.families import Family
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


def adapted(case: Case) -> None:
    case.engine().stream()


def test_adapters_are_refused_by_name() -> None:
    pytest.importorskip("peft")
    with pytest.raises(RankError, match="adapters of peft"):
        run_ranks(adapted, 1, Case(microbatches=2, model=Family("llama", lora=True)))
