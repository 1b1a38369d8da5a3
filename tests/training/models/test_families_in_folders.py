"""Folders of many families into an engine, into a checkpoint and out again: parameters and buffers, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import Engine, Layout, MeshShape, Plan
from atoll.base.errors import PlanError
from atoll.plans import schedules
from atoll.runtime.models import adapter_for
from atoll.testing import run_ranks
from atoll.training.config.load import from_dict
from atoll.training.models.interchange import export_folder, import_folder
from atoll.training.setup.build import build_engine, build_model
from tests.families import IN_FOLDERS, Family, quietly

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers looks at whatever else is installed


def plan(pipeline: int = 1, tensor: int = 1) -> Plan:
    return Plan(
        MeshShape(pipeline=pipeline, tensor=tensor),
        Layout("NNN"),
        schedules.build("gpipe", ranks=pipeline, microbatches=pipeline),
        microbatch=2,
    )


def on_meta(name: str) -> Any:
    with torch.device("meta"), quietly():
        return Family(name).build()


def saved(name: str, folder: Path) -> Any:
    """A model of a family, with random values in all its persistent buffers, and its folder."""
    torch.manual_seed(0)
    model: Any = Family(name).build()
    kept = model.state_dict(keep_vars=True)
    for key, buffer in model.named_buffers():
        if key in kept:
            is_float = buffer.is_floating_point()
            buffer.copy_(torch.randn(buffer.shape) if is_float else torch.randint(0, 2, buffer.shape))
    transformers.utils.logging.disable_progress_bar()
    with quietly():
        model.save_pretrained(folder)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(file, framework="pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return found


def in_engine(name: str, folder: Path, pipeline: int = 1, tensor: int = 1) -> dict[str, Any]:
    """All that an engine has of a model that starts from a folder, and the buffers of its modules."""
    model = on_meta(name)
    own = plan(pipeline, tensor)
    engine = Engine(model, own, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), weights=folder)
    logits = engine.logits({"input_ids": torch.arange(3, 9)[None]}) if name in LOSSES else None
    state = engine.state_dict()
    engine.close()
    return {"state": state, "buffers": dict(model.named_buffers()), "logits": logits}


LOSSES = ("deepseek_v3", "minimax_m2", "apertus", "falcon_h1")
"""Families whose logits follow from buffers."""


def assert_equal(found: dict[str, torch.Tensor], model: Any) -> None:
    wanted = {**model.state_dict(), **dict(model.named_buffers())}
    wrong = [name for name, value in found.items() if not torch.equal(value.to(wanted[name].dtype), wanted[name])]
    assert not wrong


@pytest.mark.wide(8)
@pytest.mark.parametrize(
    "name", ["deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", *IN_FOLDERS))]
)
def test_a_family_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Files of transformers, also with a tensor for each expert; the engine takes the folder and the checkpoint."""
    model = saved(name, tmp_path / "given")
    moved = import_folder(tmp_path / "given", tmp_path / "checkpoint")
    assert (moved.read_whole, moved.notes) == (False, ())
    export_folder(tmp_path / "checkpoint", tmp_path / "back")
    given, back = tensors_of(tmp_path / "given"), tensors_of(tmp_path / "back")
    assert back.keys() == given.keys()
    assert [key for key in given if back[key].dtype != given[key].dtype or not torch.equal(back[key], given[key])] == []
    stored = {key for key, parameter in model.named_parameters()} | {
        key for key, _ in model.named_buffers() if key in model.state_dict()
    }
    for folder in (tmp_path / "given", tmp_path / "checkpoint"):
        found = in_engine(name, folder)
        assert stored <= found["state"].keys() | set(model.all_tied_weights_keys)
        assert_equal({**found["buffers"], **found["state"]}, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_stages_and_parts_have_the_buffers_of_the_folder(name: str, tmp_path: Path) -> None:
    """In a pipeline each stage its own; logits are those of transformers."""
    model = saved(name, tmp_path).eval()
    with torch.no_grad():
        wanted = model(input_ids=torch.arange(3, 9)[None]).logits
    held = run_ranks(in_engine, 2, name, tmp_path, pipeline=2)
    assert {key for each in held for key in each["state"]} >= {key for key, _ in model.named_parameters()}
    for found in held:
        assert_equal(found["state"], model)
    assert torch.allclose(held[1]["logits"], wanted, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_bias_of_a_router_is_whole_on_each_tensor_parallel_rank(tmp_path: Path) -> None:
    model = saved("deepseek_v3", tmp_path).eval()
    for found in run_ranks(in_engine, 2, "deepseek_v3", tmp_path, tensor=2):
        assert_equal(found["state"], model)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("zaya", (), "layer 1 takes more of what layer 0 returns than the hidden state"),
        ("zamba2", (), "layer 0 takes another input that depends on an embedding"),
        (
            "gemma4_text",
            (("hidden_size_per_layer_input", 4), ("vocab_size_per_layer_input", 48)),
            "layer 0 takes another input that depends on an embedding",
        ),
    ],
    ids=["states between layers", "the embedding again", "an embedding for each layer"],
)
def test_a_family_whose_layers_need_more_than_the_hidden_state_is_refused_in_one_line(
    name: str, options: tuple[tuple[str, Any], ...], reason: str
) -> None:
    with torch.device("meta"), quietly():
        model = Family(name, options).build()
    with pytest.raises(PlanError) as caught:
        adapter_for(model)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(f"{type(model).__name__} does not split at 'model.layers': {reason}")
    assert "docs/adapters.md" in said


@pytest.mark.slow
def test_parameters_that_a_constructor_gives_values_are_those_of_the_folder(tmp_path: Path) -> None:
    """DiffLlama draws some on the CPU, and a run was refused with advice for whoever builds the model."""
    model = saved("diffllama", tmp_path).eval()
    with torch.device("meta"), quietly():
        assert not all(parameter.is_meta for parameter in Family("diffllama").build().parameters())
    for weights in (None, "initial"):
        config = from_dict(
            {"model": {"source": str(tmp_path), "weights": weights}, "train": {"global_batch": 2, "microbatch": 1}}
        )
        found = build_model(config, 48)
        assert all(parameter.is_meta for parameter in found.parameters())
        engine = build_engine(found, config.to_plan(), config, torch.device("cpu"))
        state, ids = engine.state_dict(), torch.arange(3, 9)[None]
        logits = engine.logits({"input_ids": ids})
        engine.close()
        assert state.keys() == model.state_dict().keys()
        if weights is None:
            assert_equal(state, model)
            with torch.no_grad():
                assert torch.allclose(logits, model(input_ids=ids).logits, rtol=0, atol=1e-6)
        else:
            drawn = state["model.layers.0.self_attn.lambda_q1"]
            assert 0.01 < float(drawn.std()) < 1
            assert not torch.equal(drawn, model.state_dict()["model.layers.0.self_attn.lambda_q1"])
