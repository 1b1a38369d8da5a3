"""Conversion between Hugging Face folders and checkpoints.

A checkpoint holds master weights under the names of the model's parameters. A folder holds the same in the dtype of
its config.json, with the files that `from_pretrained` needs: config.json and the tokenizer. Both conversions run in
one process, with at most one safetensors file in memory.

[Note: not HuggingFaceStorageWriter] The writer of Distributed Checkpoint saves a state dict, so all of the model is in
memory, and a file twice more while it is written. The map from names to files that it takes must be there before: here
a file's names are known when its tensors have been converted, since a folder has experts fused or split that a
checkpoint has not (`conversion.py`). For one file it writes an index, and another name than `save_pretrained`. Boxes
and digests are those of the checkpoint, and are checked while it is read; a folder has neither in either way.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.base.documents import parse_toml
from atoll.base.errors import CheckpointError, ConfigError, DamageError, PlanError
from atoll.plans.layouts import Box
from atoll.runtime import checkpoint
from atoll.runtime.assemble.ties import untie_as_stored
from atoll.runtime.checkpoint import Piece
from atoll.runtime.checkpoint.meeting import list_problems
from atoll.runtime.models import adapter_for, initial_values, shared_parameters
from atoll.runtime.models.buffers import kept_in_fp32, persistent_buffers
from atoll.runtime.models.conversion import plain_name, saved, saved_together
from atoll.runtime.models.safetensors_folder import INDEX, SINGLE, has_weights
from atoll.runtime.models.saving import PREFIX, saved_names
from atoll.runtime.models.tied import tied_names, untie_parameter
from atoll.runtime.models.weights import weights_for
from atoll.training.config import Config, from_dict
from atoll.training.data.tokenizer import FileTokenizer
from atoll.training.models.pretrained import (
    ADAPTERS,
    adapted_config,
    check_adapters,
    hugging_face_config,
    hugging_face_model,
)
from atoll.training.models.sources import FAMILY
from atoll.training.output.folder import RunFolder

ADAPTERS_FILE = "adapter_model.safetensors"
SHARD_BYTES = 5_000_000_000
"""Largest file of an export in bytes."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class Moved:
    """Result: number of tensors and bytes, the files, and what of a folder was not used or not as its config says."""

    folder: Path
    tensors: int
    nbytes: int
    files: tuple[str, ...]
    read_whole: bool = False
    notes: tuple[str, ...] = ()


def import_folder(source: Path, target: Path, *, objective: str = "causal") -> Moved:
    """Write the weights of a Hugging Face folder as a checkpoint at step 0, from which a run starts (`weights`).

    Parameters and persistent buffers are copied one by one, in the dtype of the file, and are converted by the tables
    of `transformers` where the files have other names or forms, such as one tensor for each expert. Files that these do
    not cover, such as quantized ones, are read as a whole by `from_pretrained`.
    A folder of the `peft` package is imported with its base model.

    Raises ConfigError for a folder that Atoll cannot read as a model, CheckpointError for adapters of another model.
    """
    is_adapted = (source / ADAPTERS).is_file()
    sections = adapted_config(source) if is_adapted else {"model": {"source": str(source)}}
    config = from_dict({**sections, "train": {"objective": objective}})
    with torch.device("meta"):
        model = hugging_face_model(config, None)
    base = Path(config.model.source)
    notes = untie_as_stored(model, base)
    adapter = adapter_for(model)
    later = shared_parameters(adapter)
    names = [name for block in adapter.blocks() for name, _ in block.named_parameters() if name not in later]
    names = list(dict.fromkeys([*names, *persistent_buffers(adapter, adapter.blocks())]))
    added = _adapters_in(source, model, later) if is_adapted else {}
    others = [name for name in names if name not in added]
    pieces = [_piece(name, tensor) for name, tensor in added.items()]
    try:
        weights = weights_for(adapter, base)
    except Exception:
        if not has_weights(base):
            raise
        loaded = _loaded(adapter.model, base)  # type: ignore[attr-defined]
        pieces += [_piece(name, loaded[plain_name(name)]) for name in others]
        read_whole = True
    else:
        notes += weights.notes
        pieces += [
            _piece(name, part, within=box) for name in others if name in weights for box, part in weights.parts(name)
        ]
        pieces += [_piece(name, _initial(adapter, name)) for name in others if name not in weights]
        read_whole = False
    state: dict[str, Any] = {"step": 0, "scaler": None, "groups": [], "caller": {"config": config.dump()}}
    checkpoint.save(target, pieces, state)
    return Moved(
        target,
        len(names),
        sum(piece.tensor.nbytes for piece in pieces),
        files=tuple(sorted(file.name for file in target.iterdir())),
        read_whole=read_whole,
        notes=tuple(notes),
    )


def export_folder(source: Path, target: Path, *, dtype: str | None = None) -> Moved:
    """Write a checkpoint as a Hugging Face folder; for a model with low-rank adapters, only those, as `peft` does.

    Names and form are those in which the installed `transformers` saves the model: where it splits fused experts, so
    does the folder. Buffers keep their dtype.

    source: a checkpoint, or a run, whose newest one is used.
    dtype: of the tensors; by default that of config.json, otherwise that of the checkpoint.
    Raises CheckpointError if the checkpoint does not identify its model.
    """
    source = checkpoint.find(source)
    config = config_of(source)
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty; give a new folder")
    with torch.device("meta"):
        model = hugging_face_model(config, None)
    stored = checkpoint.Archive(source).contents.tensors
    # Earlier versions saved buffers that are not persistent, which a folder does not have.
    spare = {name for name, _ in model.named_buffers(remove_duplicate=False)} - model.state_dict().keys()
    names = {name.removeprefix("model."): name for name in stored if name.startswith("model.")}
    names = {name: key for name, key in names.items() if name not in spare}
    sizes = hugging_face_config(config)
    _fit_vocabulary(sizes, model, stored, names=names)
    target.mkdir(parents=True, exist_ok=True)
    if config.lora.rank:
        return _export_adapters(source, target, config, model=model, names=names, stored=stored)
    for tied in tied_names(model):
        if tied in names:  # an engine untied it, as the weights were: see `untie`
            untie_parameter(model, tied)
            sizes.tie_word_embeddings = sizes.get_text_config().tie_word_embeddings = False
    own: Any = getattr(torch, dtype) if dtype is not None else sizes.dtype
    moved = _write(source, target, names, stored=stored, dtypes=_dtypes(model, names, stored, own), model=model)
    sizes.dtype = own
    sizes.architectures = [type(model).__name__]
    sizes.save_pretrained(target)
    _copy_tokenizer(config, source, target)
    return moved


def config_of(folder: Path) -> Config:
    """Return the config that a checkpoint was trained with."""
    if not checkpoint.is_complete(folder):
        raise CheckpointError(
            f"{folder} is neither a finished checkpoint nor a run with one; give a run, or a folder such as "
            "<run>/checkpoints/step-..."
        )
    caller = checkpoint.read_state(folder).get("caller")
    text = caller.get("config") if isinstance(caller, dict) else None
    if not isinstance(text, str):
        raise CheckpointError(
            f"{folder} does not name its model: only checkpoints of atoll train and atoll import can be exported"
        )
    try:
        values = parse_toml(text)
    except ValueError as error:
        raise DamageError(f"{folder}: the config of its run cannot be read: {error}") from error
    config = from_dict(values, source=f"{folder}, the config of its run")
    if config.model.is_builtin:
        raise CheckpointError(f"{folder} holds the built-in decoder, which is not a transformers model")
    return config


def _loaded(model: nn.Module, source: Path) -> dict[str, torch.Tensor]:
    whole = type(model).from_pretrained(source, local_files_only=True)  # type: ignore[attr-defined]
    return {**dict(whole.named_parameters(remove_duplicate=False)), **dict(whole.named_buffers())}


def _piece(name: str, tensor: torch.Tensor, within: Box | None = None) -> Piece:
    shape = tuple(tensor.shape) if within is None else within.shape
    return Piece(("model", name), shape, 0, tensor.numel(), tensor.detach().reshape(-1), within=within)


def _initial(adapter: Any, name: str) -> torch.Tensor:
    """Return a parameter or buffer that a folder lacks, as a new model has it. Raises PlanError if it has no rule."""
    module, _, key = name.rpartition(".")
    owner = adapter.model.get_submodule(module)
    buffer: torch.Tensor | None = dict(owner.named_buffers(recurse=False)).get(key)
    if buffer is None:
        return initial_values(adapter, owner, 0, name=module)[key]
    if buffer.is_meta:
        raise PlanError(f"{name} is in no file, and its value is only known while an engine is built; set model.source")
    return buffer


def _fit_vocabulary(sizes: Any, model: nn.Module, stored: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Set the number of ids of a family's model to that of its tokenizer, as recorded in the checkpoint."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    name = next((n for n, module in model.named_modules() if module is embedding), "").replace("base_model.model.", "")
    found = names.get(f"{name}.weight")
    if found is not None:
        sizes.get_text_config().vocab_size = int(stored[found].size[0])


def _dtypes(
    model: Any, names: Mapping[str, str], stored: Mapping[str, Any], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Return the dtype in which each tensor is written: parameters in that of the model, buffers in their own."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    in_fp32 = kept_in_fp32(model, dtype) if dtype is not None else lambda name: False
    own = {name: stored[key].properties.dtype for name, key in names.items()}
    chosen = {name: torch.float32 if in_fp32(name) else dtype for name in names}
    return {name: own[name] if name in buffers else chosen[name] or own[name] for name in names}


def _write(
    source: Path,
    target: Path,
    names: Mapping[str, str],
    stored: Mapping[str, Any],
    dtypes: Mapping[str, torch.dtype],
    model: Any,
) -> Moved:
    """Write the tensors in the form in which the installed `transformers` saves the model, to files of bounded size,
    with an index if there are several."""
    from safetensors.torch import save_file

    files = list(_files(saved_together(model, names), names, stored, dtypes=dtypes))
    index: dict[str, str] = {}
    total = 0
    for at, group in enumerate(files, start=1):
        file = SINGLE if len(files) == 1 else f"model-{at:05d}-of-{len(files):05d}.safetensors"
        tensors = saved(model, _read(source, {name: names[name] for name in group}, stored, dtypes=dtypes))
        save_file(tensors, target / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (target / INDEX).write_text(text + "\n", encoding="utf-8")
    return Moved(target, len(index), total, files=tuple(sorted({*index.values()})))


def _files(
    together: Sequence[Sequence[str]],
    names: Mapping[str, str],
    stored: Mapping[str, Any],
    dtypes: Mapping[str, torch.dtype],
) -> Iterator[list[str]]:
    """Yield the names of each file. together: names that are converted together, and so are in one file."""
    group: list[str] = []
    size = 0
    for own in together:
        nbytes = sum(stored[names[name]].size.numel() * dtypes[name].itemsize for name in own)
        if group and size + nbytes > SHARD_BYTES:
            yield group
            group, size = [], 0
        group += own
        size += nbytes
    yield group


def _read(
    source: Path, names: Mapping[str, str], stored: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """Return whole tensors by their new names. dtypes: by name; others are read in their own."""
    found = {}
    pieces = []
    for name, key in names.items():
        shape = tuple(stored[key].size)
        found[name] = torch.empty(shape, dtype=dtypes.get(name, stored[key].properties.dtype))
        pieces.append(Piece(tuple(_path(key)), shape, 0, stop=found[name].numel(), tensor=found[name].view(-1)))
    checkpoint.load_pieces(source, pieces, strict=False)
    return found


def _path(key: str) -> Sequence[str]:
    return ("model", key.removeprefix("model."))


def _export_adapters(
    source: Path,
    target: Path,
    config: Config,
    model: Any,
    names: Mapping[str, str],
    stored: Mapping[str, Any],
) -> Moved:
    """Write the adapters and the modules that were trained whole, with the names of `peft`, and its config."""
    from safetensors.torch import save_file

    (lora,) = model.peft_config.values()
    shared = shared_parameters(adapter_for(model))
    added = {key: names[shared.get(name, name)] for key, name in saved_names(model).items()}
    plain = _read(source, added, stored, dtypes={})
    save_file(plain, target / ADAPTERS_FILE, metadata={"format": "pt"})
    lora.inference_mode = True
    is_family = config.model.source.startswith(FAMILY)
    lora.base_model_name_or_path = None if is_family else str(Path(config.model.source).absolute())
    lora.save_pretrained(target)
    nbytes = sum(tensor.nbytes for tensor in plain.values())
    return Moved(target, len(plain), nbytes, files=(ADAPTERS, ADAPTERS_FILE))


def _adapters_in(source: Path, model: Any, shared: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the tensors in a folder of `peft` by the model's names. shared: see `shared_parameters`.

    Raises CheckpointError unless they are all those that the model has beside its base.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_adapters(source, model)
    file = source / ADAPTERS_FILE
    try:
        found = load_file(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
    names, values = saved_names(model), dict(model.state_dict())
    problems = [f"it lacks {name}" for name in names if name not in found]
    problems += [f"it has {name}, which the model does not have" for name in found if name not in names]
    problems += [
        f"{name} is {tuple(found[name].shape)} there and {tuple(values[PREFIX + own].shape)} here"
        for name, own in names.items()
        if name in found and found[name].shape != values[PREFIX + own].shape
    ]
    if problems:
        raise CheckpointError(f"{file} is of another model: {list_problems(problems)}")
    return {shared.get(own, own): found[name] for name, own in names.items()}


def _copy_tokenizer(config: Config, checkpoint_folder: Path, target: Path) -> None:
    """Copy the tokenizer of the model's folder, otherwise that of the run."""
    source = Path(config.model.source)
    for file in TOKENIZER_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, target / file)
    own = RunFolder(checkpoint_folder.parent.parent).tokenizer
    if own.is_file() and not any((target / file).exists() for file in TOKENIZER_FILES):
        from transformers import PreTrainedTokenizerFast

        known = FileTokenizer.read(own)
        end = None if known.end_of_text is None else known.decode([known.end_of_text])
        PreTrainedTokenizerFast(tokenizer_file=str(own), eos_token=end).save_pretrained(target)
