"""Folders of models: weights and their index, and what transformers says of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from atoll.runtime.models.safetensors_folder import INDEX, SINGLE
from atoll.runtime.models.weights import Weights
from atoll.training.config import from_dict
from atoll.training.models.pretrained import hugging_face_model
from benchmarks.fuzz.reading import Made, Parser

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def _index(folder: Path) -> Parser:
    _write_weights(folder / "of-two.safetensors")
    seed = {"metadata": {"total_size": 96}, "weight_map": {"a": "of-two.safetensors", "b": "of-two.safetensors"}}
    return _weights(folder, INDEX, json.dumps(seed).encode())


def _safetensors(folder: Path) -> Parser:
    _write_weights(folder / SINGLE)
    return _weights(folder, SINGLE, (folder / SINGLE).read_bytes())


def _write_weights(path: Path) -> None:
    save_file({"a": torch.ones(4, 4), "b": torch.ones(8, dtype=torch.bfloat16)}, path)


def _weights(folder: Path, name: str, seed: bytes) -> Parser:
    def read(content: bytes) -> object:
        (folder / name).unlink(missing_ok=True)  # the last one may be in a memory map still
        (folder / name).write_bytes(content)
        found = Weights(folder, {"a": (4, 4), "b": (8,)})
        return [found.whole(name) for name in ("a", "b") if name in found]

    return Parser([seed], read)


def _model(folder: Path) -> Parser:
    """The model is made without values, as a run and an import begin."""
    config = from_dict({"model": {"source": str(folder)}})

    def read(content: bytes) -> object:
        (folder / "config.json").write_bytes(content)
        with torch.device("meta"):
            return hugging_face_model(config, None)

    return Parser([json.dumps(LLAMA).encode()], read)


PARSERS: Mapping[str, Made] = {
    "safetensors, index": _index,
    "safetensors": _safetensors,
    "Hugging Face config": _model,
}
