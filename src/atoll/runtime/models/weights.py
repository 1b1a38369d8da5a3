"""Weights of a Hugging Face folder, read by range: a rank reads only its own parts.

Files may have the names and forms of the version that wrote them, such as one tensor for each expert. The tables of
`transformers` say which tensors of a model they become; see `unread.py` for how only ranges of those are read.
"""

from __future__ import annotations

import copy
import re
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base.documents import read_json
from atoll.base.errors import PlanError
from atoll.plans.layouts import Box
from atoll.runtime.models.adapter import Adapter
from atoll.runtime.models.buffers import persistent_buffers
from atoll.runtime.models.initialise import shared_parameters
from atoll.runtime.models.text_part import name_in_part, whole_of
from atoll.runtime.models.unread import Computed, NotNoted, Stored, Unread

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "C64": torch.complex64,
    }
)
"""Dtypes of safetensors that are read. Others are those of quantized weights."""
FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Dtypes that parameters are read from."""
_SHOWN = 4
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


class Weights:
    """The safetensors of a folder, by the names of a model's parameters and persistent buffers.

    Files are memory-mapped, so only requested ranges are read.

    names: shape of each parameter.  buffers: persistent buffers, by name.  shared: other names of a parameter, under
    which it may be stored.  found: the folder's tensors by names of the model; by default by their own, which may lack
    or have the `prefix` of the headless model, such as "model." or "transformer.".

    Raises PlanError for a folder without safetensors, and for one that lacks some of `names`, except those that `added`
    lists, which are initialized as in a new model. Buffers that it lacks keep the values of a new model.
    """

    notes: tuple[str, ...] = ()
    """Sentences about tensors that are not used, or not as the config says; see `weights_for`."""

    def __init__(
        self,
        folder: Path,
        names: Mapping[str, tuple[int, ...]],
        *,
        buffers: Mapping[str, Tensor] = MappingProxyType({}),
        shared: Mapping[str, Sequence[str]] = MappingProxyType({}),
        prefix: str = "",
        added: Iterable[str] = (),
        found: Mapping[str, Unread] | None = None,
    ) -> None:
        self.folder = Path(folder)
        tensors = read_folder(self.folder) if found is None else found
        self._stored: dict[str, Unread] = {}
        skipped = set(added)
        missing = []
        for name in (*names, *buffers):
            known = [plain for each in (name, *shared.get(name, ())) for plain in _spellings(each, prefix)]
            at = next((each for each in known if each in tensors), None)
            if at is not None:
                self._stored[name] = tensors[at]
            elif name not in skipped and name in names:
                missing.append(name)
        if missing:
            raise PlanError(
                f"{self.folder} lacks {len(missing)} of the model's {len(names)} parameters: "
                f"{', '.join(missing[:_SHOWN])}{', ...' if len(missing) > _SHOWN else ''}; it has "
                f"{', '.join(sorted(tensors)[:_SHOWN])}, .... Give the folder of the same model, or set the sizes of "
                "the folder's config"
            )
        self.lacking = tuple(name for name in (*names, *buffers) if name not in self._stored)
        self._check_kinds(buffers)
        shapes = {**names, **{name: tuple(buffer.shape) for name, buffer in buffers.items()}}
        wrong = [
            f"{name} is {tuple(tensor.shape)} there and {tuple(shapes[name])} here"
            for name, tensor in self._stored.items()
            if tuple(tensor.shape) != tuple(shapes[name])
        ]
        if wrong:
            raise PlanError(f"{self.folder} is of another size: {'; '.join(wrong[:_SHOWN])}")

    def _check_kinds(self, buffers: Mapping[str, Tensor]) -> None:
        """Raise PlanError for stored numbers that a cast would change to another kind."""
        kinds = [
            f"{name} is {_said(tensor.dtype)}"
            for name, tensor in self._stored.items()
            if name not in buffers and tensor.dtype not in FLOATS
        ]
        if kinds:
            raise PlanError(
                f"{self.folder} stores parameters as other than floating-point numbers, which are not cast: "
                f"{'; '.join(kinds[:_SHOWN])}. Quantized weights are not read; use those of the model they were made "
                "from"
            )
        others = [
            f"{name} is {_said(self._stored[name].dtype)} there and {_said(buffer.dtype)} here"
            for name, buffer in buffers.items()
            if name in self._stored and _kind(self._stored[name].dtype) != _kind(buffer.dtype)
        ]
        if others:
            raise PlanError(f"{self.folder} stores buffers of another kind: {'; '.join(others[:_SHOWN])}")

    def __contains__(self, name: object) -> bool:
        """Return True if the folder has a parameter or buffer."""
        return name in self._stored

    def read_into(self, target: Tensor, name: str, within: Box, start: int, stop: int) -> None:
        """Fill a 1-D tensor with elements `start`..`stop` of the flattened part `within` of a parameter."""
        at = 0
        for offsets, sizes in within.boxes(start, stop):
            count = torch.Size(sizes).numel()
            self._stored[name].fill(target.narrow(0, at, count).view(sizes), tuple(offsets))
            at += count

    def whole(self, name: str) -> Tensor:
        """Return all of a parameter or buffer; where it is one tensor of a file, as a view of the file."""
        return self._stored[name].whole()

    def parts(self, name: str) -> Iterator[tuple[Box, Tensor]]:
        """Yield all of a parameter or buffer in boxes: where possible, views of the file."""
        tensor = self._stored[name]
        for offsets, part in tensor.boxes():
            yield Box(tuple(tensor.shape), offsets, tuple(part.shape)), part.whole()


def _spellings(name: str, prefix: str) -> list[str]:
    plain = plain_name(name)
    return [plain, plain.removeprefix(f"{prefix}."), f"{prefix}.{plain}"] if prefix else [plain]


def plain_name(name: str) -> str:
    """Return the name that a tensor of a `peft` model has without adapters: of a layer that has some, and of a module
    that is trained whole, or its frozen original."""
    return _WRAPPED.sub("", name)


def weights_for(adapter: Adapter, folder: Path) -> Weights:
    """Return the weights of a folder for a model, by the first name of each parameter.

    The folder may lack those of adapters of the `peft` package, the head that an adapter declares as a task's, and the
    head of a language model that does not tie it, all of which are initialized; and persistent buffers, which keep the
    values of a new model. `Weights.notes` says so of heads and buffers, and of tensors that the model does not have,
    except those that `transformers` ignores as well.
    """
    folder = Path(folder)
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
    found = tensors_of(model, folder)
    others: dict[str, list[str]] = defaultdict(list)
    for later, first in shared.items():
        others[first].append(later)
        one, two = found.get(plain_name(first)), found.get(plain_name(later))
        if one is not None and two is not None and not _are_equal(one, two):
            raise PlanError(
                f"{folder} has different values for {first} and {later}, which are one parameter of the model; build "
                "it without tying them"
            )
    # A module that is trained whole beside adapters starts as its original, which may be tied to another one.
    tied = {plain_name(later): first for later, first in shared.items()}
    for name, _ in named:
        if (first := tied.get(plain_name(name), name)) != name:
            others[name].append(first)
    untied = _untied_head(model, [name for name, _ in named if name not in others], found)
    buffers = persistent_buffers(adapter, adapter.blocks())
    weights = Weights(
        folder,
        {name: tuple(parameter.shape) for name, parameter in named},
        buffers=buffers,
        shared=others,
        prefix=getattr(model, "base_model_prefix", ""),
        added=[*untied, *(name for name, _ in named if "lora_" in name or name.startswith(heads))],
        found=found,
    )
    weights.notes = tuple(_notes(model, weights, untied, buffers=buffers, shared=shared, found=found))
    return weights


def _notes(
    model: Any,
    weights: Weights,
    untied: Sequence[str],
    *,
    buffers: Mapping[str, Tensor],
    shared: Mapping[str, str],
    found: Mapping[str, Unread],
) -> list[str]:
    used = {plain_name(name) for name in shared} | {
        spelling
        for name in (*weights._stored, *shared)
        for spelling in _spellings(name, getattr(model, "base_model_prefix", ""))
    }
    keys = SimpleNamespace(
        missing_keys={name for name in weights.lacking if name in buffers}, unexpected_keys=set(found) - used
    )
    ignore = getattr(model, "_adjust_missing_and_unexpected_keys", None)
    if ignore is not None:
        ignore(keys)  # what transformers ignores, such as positions and layers that predict several tokens
    notes = [f"{weights.folder} has no {name}, and its config does not tie it: it is initialized" for name in untied]
    heads = [each for each in weights.lacking if each not in buffers and each not in untied and "lora_" not in each]
    if heads:
        notes.append(f"{weights.folder} lacks {_some(heads, 'parameters of the head')}, which are initialized")
    if keys.missing_keys:
        notes.append(
            f"{weights.folder} lacks {_some(keys.missing_keys, 'persistent buffers')}, which keep the values of a new "
            "model"
        )
    if keys.unexpected_keys:
        notes.append(
            f"{weights.folder} has {_some(keys.unexpected_keys, 'tensors')} that are none of the model's; they are not "
            "read"
        )
    return notes


def _some(names: Iterable[str], what: str) -> str:
    ordered = sorted(names)
    more = ", ..." if len(ordered) > _SHOWN else ""
    return f"{len(ordered)} {what} ({', '.join(ordered[:_SHOWN])}{more})"


def untie(model: Any, found: Mapping[str, Unread]) -> list[str]:
    """Untie parameters of a model on `meta` for which a folder has different values, as `from_pretrained` does; the
    config then says so too. Return a sentence for each.

    found: the folder's tensors by names of the model, see `tensors_of`.
    """
    notes = []
    for target, source in tied_names(model).items():
        one, two = found.get(source), found.get(target)
        if one is None or two is None or _are_equal(one, two):
            continue
        untie_parameter(model, target)
        notes.append(
            f"the folder's config ties {target} to {source}, and the folder has both with different values: they are "
            "not tied"
        )
    return notes


def untie_parameter(model: Any, target: str) -> None:
    """Give a model on `meta` a parameter of its own under a name that is tied to another one; its config says so."""
    above, _, leaf = target.rpartition(".")
    for name, module in model.named_modules():
        parameter = dict(module.named_parameters(recurse=False)).get(leaf)
        if plain_name(f"{name}.") == f"{above}." and parameter is not None:
            setattr(module, leaf, nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad))
    for config in {id(each): each for each in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    getattr(model, "all_tied_weights_keys", {}).pop(target, None)


def tied_names(model: Any) -> dict[str, str]:
    """Return the names of a model's tied parameters, each with that of its source, as its class and config say."""
    expanded = getattr(model, "get_expanded_tied_weights_keys", None)
    return {} if expanded is None else dict(expanded(all_submodels=True))


def _untied_head(model: Any, names: Sequence[str], found: Mapping[str, Unread]) -> list[str]:
    """Return the parameters of a language model's head if a folder has all but it. names: parameters that are not tied.

    The folder is of a model that ties its head, and `transformers` initializes it as well.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not found:
        return []
    own = {id(parameter) for parameter in head.parameters()}
    mine = [name for name, parameter in model.named_parameters() if id(parameter) in own and name in names]
    lacking = [name for name in mine if plain_name(name) not in found]
    others = [name for name in names if name not in mine and "lora_" not in name]
    return lacking if all(plain_name(name) in found for name in others) else []


def _are_equal(one: Unread, two: Unread) -> bool:
    if one.names == two.names:
        return True
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    rows = max(1, _COMPARED // max(1, one.shape[1:].numel())) if one.shape else 1
    for at in range(0, one.shape[0] if one.shape else 1, rows):
        offsets = (at, *(0 for _ in one.shape[1:])) if one.shape else ()
        sizes = (min(rows, one.shape[0] - at), *one.shape[1:]) if one.shape else ()
        if not torch.equal(one.box(offsets, sizes), two.box(offsets, sizes)):
            return False
    return True


_COMPARED = 1 << 24
"""Elements that are compared at once."""


def tensors_of(model: Any, folder: Path) -> dict[str, Unread]:
    """Return a folder's tensors by the names of a model of `transformers`, converted by its tables; those of any other
    model, and what the model does not have, by their own names.

    If the model is the text part of the folder's, the tables are those of the whole, and its other parts are left out.
    """
    whole = whole_of(model, Path(folder)) if hasattr(model, "base_model_prefix") else None
    if whole is None:
        return _tensors_of(model, folder)
    own, parts = name_in_part(model, whole), whole.state_dict()
    named = ((own(name) if name in parts else name, tensor) for name, tensor in _tensors_of(whole, folder).items())
    return {name: tensor for name, tensor in named if name is not None}


def _tensors_of(model: Any, folder: Path) -> dict[str, Unread]:
    stored = read_folder(Path(folder))
    found: dict[str, Unread] = dict(stored)
    if not hasattr(model, "base_model_prefix"):
        return found
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:  # not installed, or a version without tables
        return found
    table = get_model_conversion_mapping(model)
    renamings = [each for each in table if isinstance(each, WeightRenaming)]
    converters = [each for each in table if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    rename = partial(rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=known)
    groups: dict[str, _Group] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename(key, renamings, converters)
        if name not in known and key in known:
            name, pattern = rename(key, [], [])
        if name not in known:
            continue
        if pattern is None:
            found[name] = found.pop(key)
            continue
        group = groups.setdefault(name, _Group(name, by_pattern[pattern], _WithoutAdapters(model, known)))
        group.add(pattern, found.pop(key))
    for group in groups.values():
        found.update(group.converted(folder))
    return found


def saved_together(model: Any, names: Iterable[str]) -> list[list[str]]:
    """Return groups of a model's parameters and buffers, each of which `saved` takes as a whole."""
    table = _table_of_saving(model)
    groups: dict[str, list[str]] = defaultdict(list)
    if table is None:
        return [[name] for name in names]
    from transformers.core_model_loading import WeightConverter, rename_source_key

    reverse = [each.reverse_transform() for each in reversed(table)]
    converters = [each for each in reverse if isinstance(each, WeightConverter)]
    for name in names:
        groups[rename_source_key(name, [], converters)[0]].append(name)
    return list(groups.values())


def saved(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model in the names and form in which the installed `transformers` saves them."""
    if _table_of_saving(model) is None:
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    plain: Any = _WithoutAdapters(model, tensors)
    return {name: each.contiguous() for name, each in revert_weight_conversion(plain, dict(tensors)).items()}


def _table_of_saving(model: Any) -> list[Any] | None:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:
        return None
    table = get_model_conversion_mapping(model, add_legacy=False)
    return [each for each in table if not isinstance(each, PrefixChange)] or None


class _WithoutAdapters:
    """A model for a converter, which may ask for a parameter by the name that it has without adapters of `peft`."""

    def __init__(self, model: Any, known: Mapping[str, Any]) -> None:
        self._model, self._known = model, known

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, target: str) -> Any:
        """Return a parameter, as `torch.nn.Module.get_parameter` does."""
        return self._known[target] if target in self._known else self._model.get_parameter(target)


class _Group:
    """Tensors of a folder that a converter of `transformers` turns into some of a model's. name: of the first one."""

    def __init__(self, name: str, converter: Any, model: Any) -> None:
        self._name, self._converter, self._model = name, converter, model
        self._tensors: list[tuple[str, Unread]] = []

    def add(self, pattern: str, tensor: Unread) -> None:
        """Add a tensor that matches one of the converter's patterns, in the order of the names."""
        self._tensors.append((pattern, tensor))

    def converted(self, folder: Path) -> dict[str, Unread]:
        """Return the model's tensors by name, not read yet."""
        names = tuple(name for _, tensor in self._tensors for name in tensor.names)
        try:
            try:
                return self._convert(lambda tensor: tensor)
            except NotNoted:
                shapes = self._convert(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        except (RuntimeError, ValueError, IndexError) as error:
            raise PlanError(
                f"{folder}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''} do not become "
                f"{self._name}: {error}; copy the files again from one place"
            ) from error
        return {
            name: Computed(made.shape, made.dtype, names, partial(self._compute, name)) for name, made in shapes.items()
        }

    def _compute(self, name: str) -> Tensor:
        found: Tensor = self._convert(lambda tensor: tensor.whole())[name]
        return found

    def _convert(self, given: Callable[[Unread], Any]) -> dict[str, Any]:
        converter = copy.deepcopy(self._converter)
        for pattern, tensor in self._tensors:
            converter.add_tensor(self._name, tensor.names[0], pattern, given(tensor))
        made = converter.convert(self._name, model=self._model, config=self._model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """Return the kind of number, which a cast keeps: floating, complex, boolean or integer."""
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_weights(folder: Path) -> bool:
    """Return True if a folder holds safetensors."""
    return (Path(folder) / INDEX).is_file() or (Path(folder) / SINGLE).is_file()


def read_folder(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a folder's files by their names, not read yet.

    Raises PlanError for a folder without safetensors, and for files that are damaged.
    """
    return {name: _stored(name, handle) for name, handle in _open_files(folder).items()}


def _stored(name: str, handle: Any) -> Stored:
    piece = handle.get_slice(name)
    said = str(piece.get_dtype())

    def read(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        ranges = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        found: Tensor = handle.get_slice(name)[ranges] if ranges else handle.get_tensor(name)
        return found

    dtype = DTYPES.get(said) or getattr(torch, _QUANTIZED.get(said, "uint8"))
    return Stored(name, tuple(piece.get_shape()), dtype, read)


_QUANTIZED: Mapping[str, str] = MappingProxyType({"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"})


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
