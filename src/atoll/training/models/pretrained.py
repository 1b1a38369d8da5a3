"""Models of the `transformers` package and low-rank adapters of `peft`, as set in a config."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.base.documents import read_json
from atoll.base.errors import ConfigError
from atoll.runtime.models.safetensors_folder import has_weights
from atoll.runtime.models.saving import PREFIX, saved_names
from atoll.runtime.models.text_part import parts_besides, text_part_of
from atoll.training.config import Config
from atoll.training.models.sources import FAMILY, check_folder, package

MOST_MODULES = 1000
"""Maximum number of layers, or experts of a layer, the same as for the built-in decoder."""
ADAPTERS = "adapter_config.json"
_ANY = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "modules_to_save",
        "peft_version",
        "revision",
        "target_modules",
        "target_parameters",
        "task_type",
    }
)
"""Options of `peft` that change no value of an adapter, or that the config was made from."""
_COUNTS = re.compile("layers?$|expert(?!.*(size|dim|capacity|factor)$)|depth|blocks$")
"""Keys of a configuration that count modules; the width of an expert does not."""


def hugging_face_model(config: Config, vocabulary: int | None) -> nn.Module:
    """Return the model of model.source on torch's current device, with adapters if they are configured.

    vocabulary: see `hugging_face_config`.

    Raises ConfigError for a source that does not exist, a vocabulary that does not fit, and missing packages.
    """
    transformers = package("transformers")
    sizes = hugging_face_config(config, vocabulary)
    kind = transformers.AutoModelForMaskedLM if config.train.is_masked else transformers.AutoModelForCausalLM
    attention = config.model.config.get("attn_implementation")
    try:
        given = {} if attention is None else {"attn_implementation": attention}
        model: nn.Module = kind.from_config(sizes, **given)
    except Exception as error:  # errors of a configuration's values differ between families
        named = "" if attention is None else f", attn_implementation = {attention!r}"
        raise ConfigError(
            f"model.source = {config.model.source!r}{named} with train.objective = {config.train.objective!r}: {error}"
        ) from error
    if torch.get_default_device().type == "meta":
        _leave_values(model)
    return with_adapters(model, config) if config.lora.rank else model


def _leave_values(model: nn.Module) -> None:
    """Move parameters to `meta` to which the model's constructor gave values, on any device; such as DiffLlama's. A run
    reads or initializes them as all others."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_meta:
                own = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                setattr(module, name, moved.setdefault(parameter, own))


def hugging_face_config(config: Config, vocabulary: int | None = None) -> Any:
    """Return the `transformers` configuration of model.source with the values of model.config.

    vocabulary: number of ids that the model must have: a family's model gets it, a folder's must have it; None to
    ignore it.
    """
    transformers = package("transformers")
    model = config.model
    given = {key: value for key, value in model.config.items() if key != "attn_implementation"}
    _check_source(model.source, transformers)
    if model.source.startswith(FAMILY) and vocabulary is not None:
        given = {"vocab_size": vocabulary, **given}
    try:
        found = _read_config(model.source, transformers, given)
        if not config.train.is_masked and (text := text_part_of(found)) is not None:
            for key in given.keys() - found.sub_configs.keys():
                setattr(text, key, given[key])
            found = text
        if model.source.startswith(FAMILY):
            # Token ids of the family, which belong to its own tokenizer.
            for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
                if key not in given:
                    setattr(found, key, None)
        known = found.get_text_config().vocab_size
        _check_counts(found.to_dict())
    except Exception as error:  # exceptions of transformers and of its validators have no common class
        raise ConfigError(
            f'model.source = {model.source!r}: {error}. Use "builtin", "{FAMILY}" and a family such as llama, or the '
            "folder of a model with a config.json"
        ) from error
    if vocabulary is not None and known < vocabulary:
        raise ConfigError(
            f"the model of {model.source!r} knows {known} ids, and data.tokenizer = {config.tokenizer!r} needs "
            f"{vocabulary}; use the model's own tokenizer"
        )
    return found


def _read_config(source: str, transformers: Any, given: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of a family or a folder, with all of its parts."""
    if source.startswith(FAMILY):
        return transformers.AutoConfig.for_model(source.removeprefix(FAMILY), **given)
    if (file := Path(source) / "config.json").is_file():
        read_json(file)  # within the bounds; transformers has none
    return transformers.AutoConfig.from_pretrained(source, local_files_only=True, **given)


def notes_of_source(config: Config) -> tuple[str, ...]:
    """Return what the model of a config leaves out of model.source."""
    if config.model.is_builtin or config.train.is_masked:
        return ()
    whole = _read_config(config.model.source, package("transformers"), config.model.config)
    text = text_part_of(whole)
    if text is None:
        return ()
    parts = ", ".join(parts_besides(whole))
    return (f"model.source = {config.model.source!r}: the text part, a {text.model_type}, without {parts}",)


def _check_source(source: str, transformers: Any) -> None:
    """Raise ConfigError for a family that transformers does not know, and for a folder without a model."""
    if not source.startswith(FAMILY):
        check_folder(source)
        return
    family, known = source.removeprefix(FAMILY), list(transformers.CONFIG_MAPPING)
    if family not in known:
        near = difflib.get_close_matches(family, known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"model.source = {source!r}: transformers {transformers.__version__} has no family {family!r}; {hint}"
            "docs/models.md lists those that are tested"
        )


def _check_counts(values: Mapping[str, Any]) -> None:
    """Raise ValueError for a number of modules that takes minutes to build: `transformers` has no bound of its own."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            _check_counts(value)
        elif isinstance(value, int) and value > MOST_MODULES and _COUNTS.search(key):
            raise ValueError(f"{key} = {value}; at most {MOST_MODULES}")


def with_adapters(model: nn.Module, config: Config) -> nn.Module:
    """Return the model frozen, with low-rank adapters of the `peft` package and copies of the modules to train whole.

    Raises ConfigError for names that the model does not have.
    """
    peft = package("peft")
    lora = config.lora
    targets: Any = list(lora.targets)
    for suffix in lora.target_parameters:
        if not any(name.endswith(suffix) for name, _ in model.named_parameters()):
            raise ConfigError(f"lora.target_parameters: no parameter's name ends in {suffix!r}")
    # peft takes the name from the model, and warns if its configuration has another.
    source = None if config.model.source.startswith(FAMILY) else config.model.source
    model.name_or_path = source  # type: ignore[assignment]
    try:
        adapters = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules="all-linear" if targets == ["all-linear"] else targets,
            target_parameters=list(lora.target_parameters) or None,
            modules_to_save=list(lora.modules_to_save) or None,
            base_model_name_or_path=source,
        )
        with warnings.catch_warnings():
            # peft reads an attribute that transformers has renamed.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            adapted: nn.Module = peft.get_peft_model(model, adapters)
    except ValueError as error:
        given = f" and target_parameters = {list(lora.target_parameters)}" if lora.target_parameters else ""
        raise ConfigError(f"lora.targets = {targets}{given}: {error}") from error
    _check_saved(adapted, lora.modules_to_save)
    return adapted


def _check_saved(adapted: nn.Module, suffixes: Sequence[str]) -> None:
    """Raise ConfigError for a suffix that no module has: `peft` skips it."""
    whole = [name for name, module in adapted.named_modules() if hasattr(module, "modules_to_save")]
    names = [name.removeprefix(PREFIX) for name, _ in adapted.named_modules()]
    for suffix in suffixes:
        if not any(name.endswith(suffix) for name in whole):
            near = difflib.get_close_matches(suffix, {name.rpartition(".")[2] for name in names}, n=3, cutoff=0.4)
            raise ConfigError(
                f"lora.modules_to_save: no module's name ends in {suffix!r}"
                f"{f'; did you mean {near[0]!r}?' if near else ''}"
            )


def check_exported(adapted: nn.Module) -> None:
    """Raise ConfigError if parameters are trained that `peft` does not save."""
    saved = set(saved_names(adapted).values())
    trained = [name.removeprefix(PREFIX) for name, value in adapted.named_parameters() if value.requires_grad]
    others = [name for name in trained if name not in saved]
    if others:
        raise ConfigError(
            f"train.trainable trains {len(others)} parameters of the base beside the adapters, such as {others[0]}, "
            "which `atoll export` would leave out; name their modules in lora.modules_to_save"
        )


def adapted_config(folder: Path) -> dict[str, Any]:
    """Return the sections `model` and `lora` of a config for a folder that `peft` has saved.

    Raises ConfigError if its base is not a folder here, and for options of `peft` that a config does not have.
    """
    peft = package("peft")
    try:
        read_json(folder / ADAPTERS)  # within the bounds; peft has none
        theirs = peft.PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # exceptions of peft have no common class
        raise ConfigError(f"{folder / ADAPTERS}: {error}") from error
    base = theirs.base_model_name_or_path
    if not base or not Path(base).is_dir():
        raise ConfigError(
            f"{folder / ADAPTERS}: base_model_name_or_path is {base!r}, not a folder here; write that of the base "
            "model there"
        )
    stacked = sorted(getattr(theirs, "target_parameters", None) or ())
    is_listed = not isinstance(theirs.target_modules, str) and bool(theirs.target_modules or stacked)
    if theirs.peft_type != "LORA" or not is_listed:
        raise ConfigError(
            f"{folder / ADAPTERS} is of {theirs.peft_type} with target_modules = {theirs.target_modules!r}; Atoll "
            "trains LoRA on layers that are listed"
        )
    lora = {
        "rank": theirs.r,
        "alpha": float(theirs.lora_alpha),
        "dropout": float(theirs.lora_dropout),
        "targets": sorted(theirs.target_modules or ()),
        **({"target_parameters": stacked} if stacked else {}),
        "modules_to_save": sorted(theirs.modules_to_save or ()),
    }
    return {"model": {"source": str(base)}, "lora": lora}


def check_adapters(folder: Path, adapted: Any) -> None:
    """Raise ConfigError if a folder that `peft` has saved has other options than the model of `adapted_config`."""
    theirs = package("peft").PeftConfig.from_pretrained(str(folder)).to_dict()
    (ours,) = (each.to_dict() for each in adapted.peft_config.values())
    others = [key for key in theirs if key not in _ANY and theirs[key] != ours.get(key)]
    if others:
        listed = ", ".join(f"{key} = {theirs[key]!r}" for key in others)
        raise ConfigError(f"{folder / ADAPTERS} has {listed}, which [lora] cannot say; save adapters without")


def first_weights(config: Config) -> Path | None:
    """Return the folder of the initial weights; None if they are initialized at random."""
    model = config.model
    if model.weights is not None:
        return None if model.weights == "initial" else Path(model.weights)
    folder = Path(model.source)
    is_folder = not model.is_builtin and not model.source.startswith(FAMILY)
    return folder if is_folder and has_weights(folder) else None
