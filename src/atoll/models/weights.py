"""Weights of a Hugging Face folder, read by range: a rank reads only its own parts."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from atoll.documents import read_json
from atoll.errors import PlanError
from atoll.layouts import Box
from atoll.models.adapter import Adapter
from atoll.models.initialise import shared_parameters
from atoll.models.text_part import renaming_of_part

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes of safetensors that parameters are read from."""


class Weights:
    """The safetensors of a folder, by the names of a model's parameters.

    Files are memory-mapped, so only requested ranges are read. The files' names may lack or have the prefix of the
    headless model, such as "model." or "transformer.".

    rename: returns the name in the model of a tensor of an older file.

    Raises PlanError for a folder without safetensors, and for one that lacks some of `names`, except those that `added`
    lists, which are initialized as in a new model.
    """

    def __init__(
        self,
        folder: Path,
        names: Mapping[str, tuple[int, ...]],
        *,
        prefix: str = "",
        added: Iterable[str] = (),
        rename: Callable[[str], str] = str,
    ) -> None:
        self.folder = Path(folder)
        self._files = _open_files(self.folder)
        self._stored: dict[str, str] = {}
        known = {rename(name): name for name in self._files} | {name: name for name in self._files}
        skipped = set(added)
        missing = []
        for name in names:
            plain = name.replace(".base_layer.", ".")
            shorter = plain.removeprefix(f"{prefix}.")
            found = next((each for each in (plain, shorter, f"{prefix}.{plain}") if each in known), None)
            if found is not None:
                self._stored[name] = known[found]
            elif name not in skipped:
                missing.append(name)
        if missing:
            raise PlanError(
                f"{self.folder} lacks {len(missing)} of the model's {len(names)} parameters: {', '.join(missing[:4])}"
                f"{', ...' if len(missing) > 4 else ''}; it has {', '.join(sorted(self._files)[:4])}, .... Files of an "
                "older form are read by `atoll import`, whole"
            )
        kinds = [
            f"{name} is {kind}" for name in self._stored if (kind := str(self._slice(name).get_dtype())) not in FLOATS
        ]
        if kinds:
            raise PlanError(
                f"{self.folder} stores parameters as other than floating-point numbers, which are not cast: "
                f"{'; '.join(kinds[:4])}. Quantized weights are not read; use those of the model they were made from"
            )
        wrong = [
            f"{name} is {tuple(self._slice(name).get_shape())} there and {shape} here"
            for name, shape in names.items()
            if name in self._stored and tuple(self._slice(name).get_shape()) != tuple(shape)
        ]
        if wrong:
            raise PlanError(f"{self.folder} is of another size: {'; '.join(wrong[:4])}")

    def __contains__(self, name: object) -> bool:
        """Return True if the folder has a parameter."""
        return name in self._stored

    def read_into(self, target: torch.Tensor, name: str, within: Box, start: int, stop: int) -> None:
        """Fill a 1-D tensor with elements `start`..`stop` of the flattened part `within` of a parameter."""
        at = 0
        for offsets, sizes in within.boxes(start, stop):
            box = self._box(name, offsets, sizes)
            target.narrow(0, at, box.numel()).view(box.shape).copy_(box)
            at += box.numel()

    def whole(self, name: str) -> torch.Tensor:
        """Return all of a parameter, as a view of the file."""
        shape = tuple(self._slice(name).get_shape())
        return self._box(name, (0,) * len(shape), shape)

    def _slice(self, name: str) -> Any:
        stored = self._stored[name]
        return self._files[stored].get_slice(stored)

    def _box(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        stored = self._stored[name]
        ranges = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        found: torch.Tensor = self._slice(name)[ranges] if ranges else self._files[stored].get_tensor(stored)
        return found


def weights_for(adapter: Adapter, folder: Path) -> Weights:
    """Return the weights of a folder for a model, by the first name of each parameter.

    The folder may lack those of adapters of the `peft` package, and the head that an adapter declares as a task's.
    """
    shared = shared_parameters(adapter)
    named = [pair for block in adapter.blocks() for pair in block.named_parameters() if pair[0] not in shared]
    model = getattr(adapter, "model", None)
    heads = tuple(f"{head}." for head in getattr(adapter, "task_heads", ()))
    real = [name for name, parameter in named if not parameter.is_meta]
    if len(real) == len(named):
        raise PlanError(f"weights = {str(folder)!r} for a model that has values already; build it on the meta device")
    if real:
        raise PlanError(
            f"weights = {str(folder)!r}: {len(real)} of {len(named)} parameters are not on the meta device, such as "
            f"{real[0]!r}: the model's constructor gives them values itself. Move the model there: model.to('meta')"
        )
    return Weights(
        folder,
        {name: tuple(parameter.shape) for name, parameter in named},
        prefix=getattr(model, "base_model_prefix", ""),
        added=[name for name, _ in named if "lora_" in name or name.startswith(heads)],
        rename=renaming_of_part(model, Path(folder), _renaming),
    )


def _renaming(model: Any) -> Callable[[str], str]:
    """Return transformers' renaming of tensors in older files. Tensors that it also transforms keep their names."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # not installed, or a version without renaming
        return str
    if not hasattr(model, "base_model_prefix"):
        return str
    found = get_model_conversion_mapping(model)
    names = [each for each in found if isinstance(each, WeightRenaming)]
    computed = [each for each in found if isinstance(each, WeightConverter)]

    def rename(name: str) -> str:
        renamed, converter = rename_source_key(name, names, computed)
        return str(renamed) if converter is None else name

    return rename


def has_weights(folder: Path) -> bool:
    """Return True if a folder holds safetensors."""
    return (Path(folder) / INDEX).is_file() or (Path(folder) / SINGLE).is_file()


def _open_files(folder: Path) -> dict[str, Any]:
    """Return each name in the files with its open file."""
    from safetensors import SafetensorError, safe_open

    if not has_weights(folder):
        raise PlanError(
            f"{folder} is neither a checkpoint nor a folder with {SINGLE} or {INDEX}; give one of a model that was "
            "saved as safetensors, or by Atoll"
        )
    listed = _listed(folder / INDEX) if (folder / INDEX).is_file() else {SINGLE: None}
    opened: dict[str, Any] = {}
    for file, names in listed.items():
        try:
            handle = safe_open(folder / file, framework="pt")
            held = handle.keys()
        except (OSError, ValueError, SafetensorError) as error:
            raise PlanError(f"{folder / file} cannot be read as safetensors: {error}") from error
        lacking = sorted(set(names or ()) - set(held))
        if lacking:
            raise PlanError(
                f"{folder / INDEX} lists {len(lacking)} tensors of {file} that it does not have, such as "
                f"{reprlib.repr(lacking[0])}; copy index and files again from one place"
            )
        opened.update(dict.fromkeys(held, handle))
    return opened


def _listed(index: Path) -> dict[str, list[str]]:
    """Return each file with its names of tensors, from an index. Raises PlanError for an invalid index.

    A file must be a plain name in the index's folder: the author of the index must not choose other files to read.
    """
    try:
        listed = read_json(index)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{index} is not an index of safetensors: {type(error).__name__}: {error}; copy it again"
        ) from error
    if not isinstance(listed, dict) or not listed:
        raise PlanError(f"{index}: weight_map is {reprlib.repr(listed)}, not a table of names and files")
    found: dict[str, list[str]] = {}
    for name, file in listed.items():
        if not (isinstance(file, str) and file and Path(file).name == file and "\0" not in file):
            raise PlanError(f"{index}: {reprlib.repr(name)} is in {reprlib.repr(file)}, not a file of that folder")
        found.setdefault(file, []).append(name)
    return dict(sorted(found.items()))
