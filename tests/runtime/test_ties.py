"""Models whose config ties two parameters, and folders that have one value of them or two."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.runtime.assemble.ties import untie_as_stored
from atoll.runtime.models import tied
from atoll.runtime.models.unread import Unread
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


class Noted(Unread):
    """A tensor in memory that notes the largest box that is read."""

    def __init__(self, values: torch.Tensor, name: str) -> None:
        super().__init__(values.shape, values.dtype, (name,))
        self.values, self.largest = values, 0

    def fill(self, target: torch.Tensor, offsets: tuple[int, ...]) -> None:
        ends = [at + size for at, size in zip(offsets, target.shape, strict=True)]
        target.copy_(self.values[tuple(map(slice, offsets, ends))])
        self.largest = max(self.largest, target.numel())


@pytest.mark.parametrize("shape", [(7, 3), (5, 2, 2), (20,), (3, 50), ()], ids=str)
def test_large_tensors_are_compared_a_few_rows_at_a_time(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as are allowed at once, and at least one row."""
    monkeypatch.setattr(tied, "_COMPARED", 10)
    values = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    one, two = Noted(values, "one"), Noted(values.clone(), "two")
    assert tied.are_equal(one, two)
    assert one.largest == two.largest <= max(10, math.prod(shape[1:]))
    two.values.view(-1)[-1] += 1
    assert not tied.are_equal(one, two)
    assert not tied.are_equal(one, Noted(values.double(), "three"))


def test_a_folder_without_weights_unties_nothing(tmp_path: Path) -> None:
    model = model_of(ties=True)
    assert untie_as_stored(model, tmp_path) == []
    assert model.lm_head.weight is model.model.embed_tokens.weight
