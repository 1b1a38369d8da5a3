"""Folders of text and images give their text part, or one line that says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.base.errors import ConfigError
from atoll.runtime.models import adapter_for
from atoll.runtime.models.weights import weights_for
from atoll.training.models.interchange import export_folder, import_folder

transformers: Any = pytest.importorskip("transformers")

TEXT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 48}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
FAMILIES = {
    "gemma3": {"text_config": {"model_type": "gemma3_text", **TEXT},
               "vision_config": {"model_type": "siglip_vision_model", **VISION}, "mm_tokens_per_image": 4},
    "llava": {"text_config": {"model_type": "llama", **TEXT}, "image_token_index": 40,
              "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **VISION}},
    "gemma4": {"text_config": {"model_type": "gemma4_text", **TEXT, "global_head_dim": 8, "sliding_window": 4,
                               "layer_types": ["sliding_attention", "full_attention"],
                                "hidden_size_per_layer_input": 0},
               "vision_config": {"model_type": "gemma4_vision", **VISION, "num_key_value_heads": 2, "head_dim": 8},
               "audio_config": None},
}  # fmt: skip
CLASSES = {"gemma3": "Gemma3ForCausalLM", "llava": "LlamaForCausalLM", "gemma4": "Gemma4ForCausalLM"}


def saved(family: str, folder: Path) -> tuple[Any, Any]:
    """Write a whole model with random values. Return it and its text part as transformers computes it."""
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    torch.manual_seed(0)
    whole = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for name, buffer in whole.named_buffers():
        if name in whole.state_dict() and "language_model" in name:
            buffer.normal_()
    whole.save_pretrained(folder)
    return whole, config


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_part_goes_through_a_checkpoint_and_out_as_a_model_of_text(family: str, tmp_path: Path) -> None:
    whole, _ = saved(family, tmp_path / "whole")
    import_folder(tmp_path / "whole", tmp_path / "checkpoint")
    export_folder(tmp_path / "checkpoint", tmp_path / "text", dtype="float32")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32).eval()
    assert type(loaded).__name__ == CLASSES[family]
    ids = torch.arange(1, 13).view(2, 6)
    torch.testing.assert_close(loaded(input_ids=ids).logits, whole(input_ids=ids).logits, rtol=1e-5, atol=1e-6)
    assert "vision_config" not in json.loads((tmp_path / "text" / "config.json").read_text())


@pytest.mark.parametrize("prefixes", [("language_model.model.", "language_model."), ("model.language_model.", "")])
def test_names_of_older_and_newer_folders_are_those_of_the_text_part(prefixes: tuple[str, str], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    config = transformers.AutoConfig.for_model("gemma3", **FAMILIES["gemma3"])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        text = transformers.AutoModelForCausalLM.from_config(config.text_config)
    inside, outside = prefixes
    tensors = {
        inside + name.removeprefix("model.") if name.startswith("model.") else outside + name: torch.randn(each.shape)
        for name, each in text.named_parameters()
    }
    save_file({**tensors, "vision_tower.x": torch.zeros(1)}, tmp_path / "model.safetensors")
    weights = weights_for(adapter_for(text), tmp_path)
    for name, stored in zip(dict(text.named_parameters()), tensors.values(), strict=True):
        assert torch.equal(weights.whole(name), stored)


def test_a_run_says_what_it_leaves_out_and_a_part_without_a_language_model_is_refused_in_one_line() -> None:
    from atoll.training.config import Config
    from atoll.training.models.pretrained import hugging_face_config, notes_of_source

    def config(family: str) -> Config:
        return Config.model_validate(
            {"model": {"source": f"transformers:{family}", "config": FAMILIES.get(family, {})}}
        )

    assert notes_of_source(config("gemma3")) == (
        "model.source = 'transformers:gemma3': the text part, a gemma3_text, without vision_config",
    )
    assert hugging_face_config(config("gemma3"), 48).model_type == "gemma3_text"
    assert notes_of_source(config("llama")) == ()
    with pytest.raises(ConfigError, match="has no language model for its text part, a mllama_text_model") as found:
        hugging_face_config(config("mllama"))
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 500
