"""Weights of a Hugging Face folder, read by range: a rank reads only its own parts.

Files may have the names and forms of the version that wrote them, such as one tensor for each expert. The tables of
`transformers` say which tensors of a model they become; see `unread.py` for how only ranges of those are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from atoll.base.errors import PlanError
from atoll.plans.layouts import Box
from atoll.runtime.models.adapter import Adapter
from atoll.runtime.models.buffers import persistent_buffers
from atoll.runtime.models.conversion import plain_name, tensors_of
from atoll.runtime.models.initialise import shared_parameters
from atoll.runtime.models.safetensors_folder import read_folder
from atoll.runtime.models.tied import are_equal, untied_head
from atoll.runtime.models.unread import Unread

FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Dtypes that parameters are read from."""
_SHOWN = 4


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
        if one is not None and two is not None and not are_equal(one, two):
            raise PlanError(
                f"{folder} has different values for {first} and {later}, which are one parameter of the model; build "
                "it without tying them"
            )
    # A module that is trained whole beside adapters starts as its original, which may be tied to another one.
    tied = {plain_name(later): first for later, first in shared.items()}
    for name, _ in named:
        if (first := tied.get(plain_name(name), name)) != name:
            others[name].append(first)
    untied = untied_head(model, [name for name, _ in named if name not in others], found)
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


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """Return the kind of number, which a cast keeps: floating, complex, boolean or integer."""
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
