"""Models whose config ties two parameters, and folders that have one value of them or two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.runtime.assemble.ties import untie_as_stored
from tests.families import Family

pytest.importorskip("transformers")
save_file = pytest.importorskip("safetensors.torch").save_file

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def model_of(*, ties: bool) -> Any:
    return Family("llama", (("tie_word_embeddings", ties),)).build()


def folder_of(folder: Path, *, differ: bool) -> Path:
    """A folder that has both names."""
    tensors = {name: value.clone() for name, value in model_of(ties=False).state_dict().items()}
    tensors[HEAD] = tensors[EMBEDDING] + (1.0 if differ else 0.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_a_tie_that_a_folder_contradicts_ends_with_a_sentence(ties: bool, differ: bool, tmp_path: Path) -> None:
    model = model_of(ties=ties)
    notes = untie_as_stored(model, folder_of(tmp_path, differ=differ))
    assert len(notes) == (ties and differ)
    assert all(HEAD in note and EMBEDDING in note for note in notes)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (ties and not differ)
    if ties and differ:
        with torch.no_grad():
            model.lm_head.weight.fill_(3.0)
        assert not (model.model.embed_tokens.weight == 3.0).all()


def test_a_folder_without_weights_unties_nothing(tmp_path: Path) -> None:
    model = model_of(ties=True)
    assert untie_as_stored(model, tmp_path) == []
    assert model.lm_head.weight is model.model.embed_tokens.weight
