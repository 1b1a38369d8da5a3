"""Tied parameters of a model beside those of the weights that it starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.runtime.checkpoint import Archive, is_complete
from atoll.runtime.models.conversion import plain_name, tensors_of
from atoll.runtime.models.safetensors_folder import has_weights
from atoll.runtime.models.tied import tied_names, untie, untie_parameter


def untie_as_stored(model: Any, folder: Path) -> list[str]:
    """Untie parameters of which a folder or checkpoint has different values. Return a sentence for each.

    A checkpoint has a shared parameter once, so that one which has both names is of a model without the tie.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    tied = tied_names(base)
    if not tied:
        return []
    if not is_complete(folder):
        return untie(base, tensors_of(base, folder)) if has_weights(folder) else []
    names = (name.removeprefix("model.") for name in Archive(folder).contents.tensors)
    # What is trained whole beside adapters is there besides its original.
    stored = {plain_name(name) for name in names if ".modules_to_save." not in name}
    notes = []
    for target, source in tied.items():
        if target in stored and source in stored:
            untie_parameter(base, target)
            notes.append(f"{folder} has {target} besides {source}: they are not tied, as the model's config says")
    return notes
