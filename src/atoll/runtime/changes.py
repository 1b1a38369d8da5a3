"""What has changed of weights since processes last held equal ones: `HeldWeights`, for `give` and `take`.

    trainer, the rank that gets the stream                   each other process of the group
    held = HeldWeights()                                     held = HeldWeights()
    give(engine.stream(to=0), group, held=held)       ->     for ... in take(group, held=held): ...

The first time everything travels, and afterwards only elements whose bits differ. Both sides hold the same bits then.

[Note: a version] A version is a digest of bits: of names, dtypes, shapes, and two sums over the elements of each tensor
taken as integers modulo 2^64, one plain and one weighted by positions. Both follow changes in as many additions as
there are changes, so neither side reads what has not changed. It tells versions apart, and proves nothing to an
adversary.

[Note: three forms] Of a tensor travels what needs the fewest bytes: all of its n elements of b bytes, a bit for each
element and the c that changed, n / 8 + b c, or a number for each of these, (4 + b) c.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping

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


class HeldWeights:
    """Weights that a process holds, by name, with the digest of their bits.

    weights: what is held at first, such as what was loaded from an export.  device: where weights are held; changes are
    found there. Host memory by default: holding takes as many bytes as the streamed weights.

    What is held may be a tensor that was streamed or taken; changes are written into it.
    """

    def __init__(self, weights: Mapping[str, Tensor] | None = None, *, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.weights: dict[str, Tensor] = {}
        self._sums: dict[str, tuple[int, int]] = {}
        for name, tensor in (weights or {}).items():
            self._hold(name, tensor.contiguous())

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
            made = [(each, *self._changed(each)) for each in found]
            if all(form == WeightForm.WHOLE for _, form, _ in made):
                yield whole
            elif any(form for _, form, _ in made):
                yield self._packed([(each, form, numbers) for each, form, numbers in made if form])

    def _changed(self, each: StreamedTensor) -> tuple[WeightForm | None, Tensor | None]:
        """Hold a tensor. Return the form in which it travels, None if not at all, and the numbers of what changed."""
        held = self.weights.get(each.name)
        new = each.tensor.to(self.device)
        if held is None or (held.dtype, held.shape) != (new.dtype, new.shape):
            self._hold(each.name, new)
            return WeightForm.WHOLE, None
        numbers = (_integers(held) != _integers(new)).nonzero().view(-1)
        count, numel, item = numbers.numel(), new.numel(), new.itemsize
        if count == 0:
            return None, None
        self._change(each.name, numbers, _integers(new)[numbers])
        sizes = {
            WeightForm.WHOLE: numel * item,
            WeightForm.BITS: -(-numel // 8) + count * item,
            WeightForm.NUMBERS: count * (number_dtype(numel).itemsize + item),
        }
        return min(sizes, key=sizes.__getitem__), numbers

    def _packed(self, made: list[tuple[StreamedTensor, WeightForm, Tensor | None]]) -> WeightMessage:
        parts: list[WeightPart] = []
        for each, form, numbers in made:
            begin = parts[-1].following if parts else 0
            count = 0 if form == WeightForm.WHOLE or numbers is None else numbers.numel()
            parts.append(WeightPart(each.name, each.dtype, each.shape, begin, form=form, changed=count))
        memory = torch.zeros(parts[-1].begin + parts[-1].nbytes, dtype=torch.uint8, device=made[0][0].tensor.device)
        for part, (each, form, numbers) in zip(parts, made, strict=True):
            own = memory[part.begin : part.begin + part.nbytes]
            values = _integers(each.tensor)
            if form != WeightForm.WHOLE and numbers is not None:
                at = numbers.to(own.device)
                flat = at.to(number_dtype(part.numel)).view(torch.uint8)
                where = _bits(at, part.numel) if form == WeightForm.BITS else flat
                own[: where.numel()].copy_(where)
                values = values[at]
            own[part.where :].view(values.dtype).copy_(values)
        return parts, memory

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


def _bits(numbers: Tensor, numel: int) -> Tensor:
    """Return a bit for each of `numel` elements, set for those with these numbers, eight to a byte from the lowest."""
    found = torch.zeros(-(-numel // 8) * 8, dtype=torch.uint8, device=numbers.device)
    found[numbers] = 1
    return (found.view(-1, 8) << _eight(found)).sum(1, dtype=torch.uint8)


def _numbers_of(where: Tensor, part: WeightPart) -> Tensor:
    """Return the numbers of the elements that changed, int64."""
    if part.form == WeightForm.NUMBERS:
        dtype = number_dtype(part.numel)
        return where[: part.changed * dtype.itemsize].view(dtype).to(torch.int64)
    bits = (where[: -(-part.numel // 8), None] >> _eight(where)) & 1
    return bits.view(-1).nonzero().view(-1)


def _eight(near: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=near.device)
