"""Sending only the elements of weights that have changed: `HeldWeights`, for `give` and `take`.

    trainer, the rank that gets the stream                   each other process of the group
    held = HeldWeights()                                     held = HeldWeights()
    give(engine.stream(to=0), group, held=held)       ->     for ... in take(group, held=held): ...

The first time everything is sent, afterwards only elements whose bits differ. Both sides then hold the same bits.

[Note: a version] A version is a digest of bits: of names, dtypes, shapes, and two sums over the elements of each tensor
taken as integers modulo 2^64, one plain and one weighted by positions. Both follow changes in as many additions as
there are changes, so neither side reads what has not changed. It tells versions apart, and proves nothing to an
adversary.

[Note: three forms] A tensor is sent in the form of the fewest bytes. With n elements of b bytes, of which c have
changed: all elements take n b, a bit for each element and the changed values n / 8 + c b, the indices of the changed
elements and their values c (4 + b).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.base.errors import RunError
from atoll.runtime.handover import (
    StreamedTensor,
    WeightForm,
    WeightMessage,
    WeightPart,
    message_of,
    number_dtype,
    sharing_memory,
)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = 2**64 - 1
_CHUNK = 2**22
"""Elements that are summed at a time: their integers take eight bytes each."""


_NOTHING = torch.empty(0, dtype=torch.uint8)


class _Change(NamedTuple):
    """How a tensor has changed. where: bits or numbers, uint8; nothing of a whole one.  values: integers."""

    form: WeightForm
    values: Tensor
    changed: int = 0
    where: Tensor = _NOTHING


class HeldWeights:
    """Weights that a process holds, by name, with the digest of their bits.

    weights: what is held at first, such as what was loaded from an export.  device: where weights are held; changes are
    found there. Host memory by default: holding takes as many bytes as the streamed weights.

    Tensors that are already on that device are held as they are, without a copy, and changes are written into them.
    """

    def __init__(self, weights: Mapping[str, Tensor] | None = None, *, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.weights: dict[str, Tensor] = {}
        self._sums: dict[str, tuple[int, int]] = {}
        for name, tensor in (weights or {}).items():
            self._hold(name, tensor.detach().to(self.device).contiguous())

    @property
    def digest(self) -> str:
        """The version, as 64 hexadecimal digits: equal for equal bits under equal names, in any order."""
        rows = [
            [name, str(self.weights[name].dtype), list(self.weights[name].shape), *self._sums[name]]
            for name in sorted(self.weights)
        ]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def clear(self) -> None:
        """Hold nothing: the next time everything travels."""
        self.weights.clear()
        self._sums.clear()

    # ---- on the side that gives

    def messages(self, weights: Iterable[StreamedTensor]) -> Iterator[WeightMessage]:
        """Yield what is new or has changed, and hold it."""
        for found in sharing_memory(weights):
            whole = message_of(found)
            changes = [self._changed(each) for each in found]
            if all(change is not None and change.form == WeightForm.WHOLE for change in changes):
                yield whole
            elif any(changes):
                yield _packed(
                    [(each, change) for each, change in zip(found, changes, strict=True) if change is not None]
                )

    def _changed(self, each: StreamedTensor) -> _Change | None:
        """Hold a tensor. Return how it has changed; None if it has not."""
        held = self.weights.get(each.name)
        new = each.tensor.to(self.device)
        if held is None or (held.dtype, held.shape) != (new.dtype, new.shape):
            self._hold(each.name, new)
            return _Change(WeightForm.WHOLE, values=_integers(new))
        differs = _integers(held) != _integers(new)
        numbers = _places(differs)
        count, numel, item = numbers.numel(), new.numel(), new.itemsize
        if count == 0:
            return None
        values = _integers(new)[numbers]
        self._change(each.name, numbers, values)
        sizes = {
            WeightForm.WHOLE: numel * item,
            WeightForm.BITS: -(-numel // 8) + count * item,
            WeightForm.NUMBERS: count * (number_dtype(numel).itemsize + item),
        }
        form = min(sizes, key=sizes.__getitem__)
        if form == WeightForm.WHOLE:
            return _Change(form, values=_integers(new))
        is_bits = form == WeightForm.BITS
        where = _bits(differs) if is_bits else numbers.to(number_dtype(numel)).view(torch.uint8)
        return _Change(form, values=values, changed=count, where=where)

    # ---- on the side that takes

    def take(self, part: WeightPart, memory: Tensor) -> StreamedTensor:
        """Hold what came, and return the tensor, whole. Raises RunError for changes that do not fit what is held."""
        own = memory[part.begin : part.begin + part.nbytes]
        held = self.weights.get(part.name)
        if part.form == WeightForm.WHOLE:
            self._hold(part.name, own.view(part.dtype).view(part.shape).to(self.device))
        elif held is None or (held.dtype, held.shape) != (part.dtype, part.shape):
            raise RunError(f"{part.name}: changes came of a {part.dtype} of {tuple(part.shape)}, which is not held")
        else:
            numbers = _numbers_of(own[: part.where].to(self.device), part)
            lowest, highest = (int(numbers.min()), int(numbers.max())) if numbers.numel() else (0, 0)
            if numbers.numel() != part.changed or not 0 <= lowest <= highest < max(1, part.numel):
                raise RunError(f"{part.name}: changes came of elements that it does not have")
            self._change(part.name, numbers, own[part.where :].view(_integer(part.dtype)).to(self.device))
        tensor = self.weights[part.name]
        return StreamedTensor(part.name, part.dtype, tensor.shape, tensor=tensor)

    # ---- both

    def _hold(self, name: str, tensor: Tensor) -> None:
        self.weights[name] = tensor
        values, first, second = _integers(tensor), 0, 0
        for begin in range(0, values.numel(), _CHUNK):
            one, two = _sums(values[begin : begin + _CHUNK].to(torch.int64))
            first, second = first + one, second + two + begin * one
        self._sums[name] = first & _MASK, second & _MASK

    def _change(self, name: str, numbers: Tensor, values: Tensor) -> None:
        """Write changed elements into what is held, as integers, and follow the sums."""
        held = _integers(self.weights[name])
        by = values.to(torch.int64) - held[numbers].to(torch.int64)
        first, second = self._sums[name]
        self._sums[name] = (first + int(by.sum())) & _MASK, (second + int((by * (numbers + 1)).sum())) & _MASK
        held[numbers] = values


def _integer(dtype: torch.dtype) -> torch.dtype:
    found = _INTEGERS.get(dtype.itemsize)
    if found is None:
        raise RunError(
            f"changes of {dtype} are not known: an element has {dtype.itemsize} bytes, and at most 8 are compared"
        )
    return found


def _integers(tensor: Tensor) -> Tensor:
    """Return the bits of a contiguous tensor, flat, as integers that share its memory."""
    return tensor.reshape(-1).view(_integer(tensor.dtype))


def _sums(values: Tensor) -> tuple[int, int]:
    """Return the sum, and that weighted by positions counted from 1, both of 64 bits that wrap around."""
    return int(values.sum()), int((values * torch.arange(1, values.numel() + 1, device=values.device)).sum())


def _packed(changes: Sequence[tuple[StreamedTensor, _Change]]) -> WeightMessage:
    """Return changes one after the other, where the tensors are."""
    parts: list[WeightPart] = []
    for each, change in changes:
        begin = parts[-1].following if parts else 0
        parts.append(
            WeightPart(each.name, each.dtype, each.shape, begin=begin, form=change.form, changed=change.changed)
        )
    device = changes[0][0].tensor.device
    memory = torch.zeros(parts[-1].begin + parts[-1].nbytes, dtype=torch.uint8, device=device)
    for part, (_, change) in zip(parts, changes, strict=True):
        own = memory[part.begin : part.begin + part.nbytes]
        own[: change.where.numel()].copy_(change.where)
        own[part.where :].view(change.values.dtype).copy_(change.values)
    return parts, memory


def _places(flags: Tensor) -> Tensor:
    """Return the numbers of the elements that are not zero, int64."""
    if flags.device.type == "cpu":  # half the time of `nonzero`
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return flags.nonzero().view(-1)


def _bits(flags: Tensor) -> Tensor:
    """Return a bit for each element, eight to a byte from the lowest."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.packbits(flags.numpy(), bitorder="little"))
    padded = torch.zeros(-(-flags.numel() // 8) * 8, dtype=torch.uint8, device=flags.device)
    padded[: flags.numel()] = flags
    return (padded.view(-1, 8) << _eight(padded)).sum(1, dtype=torch.uint8)


def _numbers_of(where: Tensor, part: WeightPart) -> Tensor:
    """Return the numbers of the elements that changed, int64."""
    if part.form == WeightForm.NUMBERS:
        dtype = number_dtype(part.numel)
        return where[: part.changed * dtype.itemsize].view(dtype).to(torch.int64)
    packed = where[: -(-part.numel // 8)]
    if packed.device.type == "cpu":
        return _places(torch.from_numpy(np.unpackbits(packed.numpy(), bitorder="little")))
    return _places(((packed[:, None] >> _eight(packed)) & 1).view(-1))


def _eight(near: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=near.device)
