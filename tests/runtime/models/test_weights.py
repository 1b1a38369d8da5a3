"""Folders of safetensors that are not what they should be: one PlanError that names the file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.base.errors import PlanError
from atoll.runtime.models.adapter import SequentialAdapter
from atoll.runtime.models.conversion import saved, tensors_of
from atoll.runtime.models.safetensors_folder import INDEX, SINGLE
from atoll.runtime.models.weights import Weights, weights_for

save_file = pytest.importorskip("safetensors.torch").save_file

NAMES = {"a": (2, 3), "b": (4,)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files and their index."""
    for name, shape in NAMES.items():
        save_file({name: torch.ones(shape)}, tmp_path / f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in NAMES}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


def test_weights_are_found_by_the_index(folder: Path) -> None:
    assert torch.equal(Weights(folder, NAMES).whole("a"), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not an index"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "is not an index"),
        ('{"weight_map": [1]}', r"weight_map is \[1\]"),
        ('{"weight_map": {}}', "weight_map is"),
        ('{"weight_map": {"a": 3}}', "'a' is in 3, not a file"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "not a file of that folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not a file of that folder"),
        ('{"weight_map": {"a": "none.safetensors"}}', r"none\.safetensors cannot be read"),
        ('{"weight_map": {"a": "\\ud800"}}', "cannot be read"),
        ('{"weight_map": {"a": "a.safetensors", "b": "a.safetensors"}}', "1 tensors of a.safetensors that it does not"),
    ],
)
def test_an_index_that_is_wrong_is_named(folder: Path, content: str, words: str) -> None:
    """4,088 of 5,000 damaged ones were not one clear error."""
    (folder / INDEX).write_text(content)
    with pytest.raises(PlanError, match=words):
        Weights(folder, NAMES)


def test_an_index_with_random_damage_gives_the_weights_or_one_error(folder: Path) -> None:
    chance = random.Random(0)
    whole = (folder / INDEX).read_bytes()
    refused = 0
    for _ in range(500):
        content = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        (folder / INDEX).write_bytes(content[: chance.choice((len(content), chance.randrange(len(content))))])
        try:
            found = Weights(folder, NAMES)
        except PlanError:
            refused += 1
            continue
        assert all(torch.equal(found.whole(name), torch.ones(shape)) for name, shape in NAMES.items())
    assert refused > 250


@pytest.mark.parametrize("kind", [torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_parameters_that_are_no_floats_are_not_cast(tmp_path: Path, kind: Any) -> None:
    """Weights stored as I32 became floats of the same numbers, without a word."""
    save_file({"a": torch.ones(2, 3).to(kind), "b": torch.ones(4)}, tmp_path / SINGLE)
    with pytest.raises(PlanError, match=r"other than floating-point numbers.*a is"):
        Weights(tmp_path, NAMES)


def test_parameters_that_a_constructor_makes_off_the_meta_device_are_named(folder: Path) -> None:
    """DiffLlama draws some of its parameters on the CPU; it was said to have values, and to be built on meta."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4))
    model[1].bias = torch.nn.Parameter(torch.ones(4, device="cpu"))
    with pytest.raises(PlanError, match=r"1 of 4 parameters are not on the meta device, such as '1.bias'"):
        weights_for(SequentialAdapter(model), folder)
    with pytest.raises(PlanError, match="has values already; build it on the meta device"):
        weights_for(SequentialAdapter(torch.nn.Sequential(torch.nn.Linear(2, 3))), folder)


def test_a_conversion_that_asks_for_a_parameter_finds_it_beside_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of a folder are turned as the model's parameter lies, which adapters have renamed."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    from transformers import conversion_mapping, core_model_loading

    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, num_local_experts=2,
    )  # fmt: skip
    name = "model.layers.0.mlp.experts.down_proj"
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    experts = torch.randn(model.get_parameter(name).shape)
    save_file({name: experts.mT.contiguous()}, tmp_path / SINGLE)
    pattern = "mlp.experts.down_proj"
    turned = core_model_loading.WeightConverter(
        source_patterns=pattern,
        target_patterns=pattern,
        operations=[core_model_loading.Transpose(1, 2, check_dims=True)],
    )
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: [turned])
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=[], target_parameters=[pattern]), model)
    assert torch.equal(tensors_of(model, tmp_path)[name].whole(), experts)
    assert torch.equal(saved(model, {name: experts})[name], experts)
