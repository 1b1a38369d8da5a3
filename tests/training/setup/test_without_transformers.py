"""Models whose sizes a config names are predicted and planned without transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from atoll.runtime.models.sizes import FAMILY_DEFAULTS, SIZES, known_config, transformer_of
from atoll.training.config import Config
from atoll.training.setup import prediction
from atoll.training.setup.prediction import expected_vocabulary, workload_of

VALUES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 48,
    "num_key_value_heads": 2,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size_mlp": 80,
}


def values_of(family: str) -> dict[str, Any]:
    return {key: VALUES[key] for key in (*SIZES[family], "vocab_size")}


@pytest.mark.parametrize("family", SIZES)
def test_what_a_config_does_not_say_is_as_transformers_has_it(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **values_of(family))
    assert {key: getattr(config, key) for key in FAMILY_DEFAULTS[family]} == FAMILY_DEFAULTS[family]
    known, own = (transformer_of(each) for each in (known_config(family, values_of(family)), config))
    assert known.width in (None, own.width)  # by default that of the hidden size over the heads
    assert replace(known, width=own.width) == own
    assert known.workload.parameters == own.workload.parameters


def test_sizes_that_are_not_named_need_transformers() -> None:
    assert known_config("falcon", VALUES) is None
    for key in (*SIZES["llama"], "vocab_size"):
        assert known_config("llama", {name: value for name, value in VALUES.items() if name != key}) is None


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_config_is_predicted_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_folder: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **values_of("llama")}))
    named = {"source": "transformers:llama", "config": values_of("llama")}
    config = Config.model_validate({"model": {"source": str(tmp_path)} if is_folder else named})
    with_it = workload_of(config, 48).parameters if util.find_spec("transformers") else None
    monkeypatch.setattr(prediction, "find_spec", lambda name: None)
    monkeypatch.setattr("atoll.training.models.pretrained.hugging_face_config", None)  # needs transformers
    assert expected_vocabulary(config) == 48
    assert workload_of(config, 48).parameters == (with_it or workload_of(config, 48).parameters)
