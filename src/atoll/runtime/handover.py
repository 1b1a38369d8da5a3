"""Weights to processes without an engine, such as those of a sampler: over a process group of torch.

    trainer, the rank that gets the stream          each other process of the group
    give(engine.stream(to=0), group)         ->     for name, dtype, shape, tensor in take(group): ...

The processes of the group may be of one torch.distributed world, or of several: `weight_group` makes a group of
processes that know a store. Tensors that share memory, as those of a bucket do, travel together and without a copy; the
receiver has views of a bucket as well.

With `held` (`atoll.runtime.changes`) only what has changed since is sent.

[Note: a message] Three broadcasts: the bytes of the next two, JSON with a row for each tensor (`WeightPart`), and the
memory itself. Two zeros end a stream. What arrives is checked before it is used, and nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from enum import StrEnum
from itertools import chain, groupby, islice
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from atoll.base.errors import RunError

if TYPE_CHECKING:
    from atoll.runtime.changes import HeldWeights

MOST_HEADER = 2**26
"""Most bytes of a header that a receiver takes."""
_ALIGNED = 16
"""Bytes to which changes are aligned in a message: the largest item of any dtype."""


class StreamedTensor(NamedTuple):
    """A whole weight of a model, as `transformers` would save it."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    tensor: Tensor

    @property
    def begin(self) -> int:
        """Where it begins in its memory, in bytes. Raises RunError if it does not lie there in one piece."""
        if not self.tensor.is_contiguous():
            raise RunError(f"{self.name} is not contiguous, and weights travel as they lie in memory")
        return int(self.tensor.storage_offset()) * self.tensor.itemsize


class WeightForm(StrEnum):
    """How a tensor is sent: all its elements; a bit for each element and the changed values; or the indices of the
    changed elements and their values."""

    WHOLE = "whole"
    BITS = "bits"
    NUMBERS = "numbers"


class WeightPart(NamedTuple):
    """A tensor of a message, or its changes: `nbytes` from `begin` on. changed: elements that changed, if not WHOLE."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    begin: int
    form: WeightForm = WeightForm.WHOLE
    changed: int = 0

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)

    @property
    def where(self) -> int:
        """Bytes before the values: of bits or numbers, and the gap after them."""
        if self.form == WeightForm.WHOLE:
            return 0
        taken = (
            -(-self.numel // 8) if self.form == WeightForm.BITS else self.changed * number_dtype(self.numel).itemsize
        )
        return -(-taken // _ALIGNED) * _ALIGNED

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.where + self.dtype.itemsize * (self.numel if self.form == WeightForm.WHOLE else self.changed)

    @property
    def following(self) -> int:
        """Where the next part may begin."""
        return -(-(self.begin + self.nbytes) // _ALIGNED) * _ALIGNED

    def to_json(self) -> list[Any]:
        """Return it as a row of a header."""
        row = [self.name, str(self.dtype).removeprefix("torch."), list(self.shape), self.begin]
        return row if self.form == WeightForm.WHOLE else [*row, self.form, self.changed]

    @classmethod
    def of(cls, row: Any, nbytes: int) -> WeightPart:
        """Read a row of a header of a message of so many bytes. Raises ValueError, TypeError or AttributeError."""
        name, kind, shape, begin, form, changed = row if len(row) == 6 else (*row, WeightForm.WHOLE, 0)
        dtype, numbers = getattr(torch, kind), [begin, changed, *shape]
        if not (isinstance(name, str) and isinstance(dtype, torch.dtype)):
            raise ValueError(name)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(name)
        part = cls(name, dtype, torch.Size(shape), begin=begin, form=WeightForm(form), changed=changed)
        aligned = dtype.itemsize if form == WeightForm.WHOLE else _ALIGNED
        if begin % aligned or begin + part.nbytes > nbytes or changed > part.numel:
            raise ValueError(name)
        return part


WeightMessage = tuple[list[WeightPart], Tensor]
"""Tensors, or changes of some, and the memory in which they are: uint8."""


class WeightGroup(Protocol):
    """Interface of a process group that weights are sent over: a `torch.distributed.ProcessGroup`, or the result of
    `weight_group`."""

    def rank(self) -> int:
        """Return the number of this process in the group."""

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions, /) -> Any:
        """Begin to broadcast from `options.rootRank`."""

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions, /) -> Any:
        """Begin to reduce by `options.reduceOp`. Only where changes are given."""


def weight_group(
    store: dist.Store, rank: int, size: int, *, device: torch.device | str = "cpu", timeout: timedelta | None = None
) -> WeightGroup:
    """Return a group of `size` processes that know a store, of whatever torch.distributed worlds they are, or of none.
    All of them call it. NCCL carries tensors of a CUDA device, gloo those of others.

    timeout: for others to come, and for each message; torch's default without it.
    """
    limit = dist.default_pg_timeout if timeout is None else timeout
    kind: Any = dist.ProcessGroupNCCL if torch.device(device).type == "cuda" else dist.ProcessGroupGloo
    made: WeightGroup = kind(dist.PrefixStore("atoll handover", store), rank, size, timeout=limit)
    return made


def give(weights: Iterable[StreamedTensor], group: WeightGroup, *, held: HeldWeights | None = None) -> int:
    """Send weights to all other processes of a group, which call `take`. Return the bytes of tensors and gaps.

    held: the weights that this process has sent before. Only what has changed since is sent; the others pass theirs to
    `take`. If the versions differ, every process of the group raises RunError, this one after it has read `weights` to
    the end: clear what is held on all of them, and everything is sent again.
    """
    total, stream = 0, iter(weights)
    begun = list(islice(stream, 1))  # it says where messages lie
    device = begun[0].tensor.device if begun else torch.device("cpu")
    if held is not None:
        _agree(group, group.rank(), held, device=device, unread=stream)
    given = chain(begun, stream)
    for parts, memory in map(message_of, sharing_memory(given)) if held is None else held.messages(given):
        text = json.dumps([part.to_json() for part in parts]).encode()
        header = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        sizes = torch.tensor([header.numel(), memory.numel()], device=device)
        for each in (sizes, header, memory):
            _broadcast(each, group, group.rank())
        total += memory.numel()
    _broadcast(torch.zeros(2, dtype=torch.int64, device=device), group, group.rank())
    return total


def take(
    group: WeightGroup, *, source: int = 0, device: torch.device | str = "cpu", held: HeldWeights | None = None
) -> Iterator[StreamedTensor]:
    """Yield the weights that the process `source` of the group gives, on `device`. Read to the end.

    Tensors are views of the memory that came with them, which nothing writes again.
    held: the weights that this process has received before, required if the source passes its own to `give`. Only
    tensors that have changed are yielded then: whole, as they are held, and written again by later changes.
    Raises RunError for what is not a stream, and for changes of another version than the held one.
    """
    if held is not None:
        _agree(group, source, held, device=device)
    while True:
        sizes = torch.empty(2, dtype=torch.int64, device=device)
        _broadcast(sizes, group, source)
        header, nbytes = sizes.tolist()
        if (header, nbytes) == (0, 0):
            return
        if not 0 < header <= MOST_HEADER or nbytes < 0:
            raise RunError(f"process {source} of the group gives no weights: a header of {header} and {nbytes} bytes")
        said = torch.empty(header, dtype=torch.uint8, device=device)
        _broadcast(said, group, source)
        parts = _parts(bytes(said.cpu().numpy()), nbytes, source)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        _broadcast(memory, group, source)
        for part in parts:
            if held is not None:
                yield held.take(part, memory)
            elif part.form == WeightForm.WHOLE:
                tensor = memory[part.begin : part.begin + part.nbytes].view(part.dtype).view(part.shape)
                yield StreamedTensor(part.name, part.dtype, part.shape, tensor=tensor)
            else:
                raise RunError(f"process {source} of the group gives changes: take them with what is `held`")


def copy_weights(weights: Iterable[StreamedTensor], model: nn.Module) -> list[str]:
    """Copy weights into a model's parameters and persistent buffers of the same names; of a DTensor, such as a
    tensor-parallel process has, its own part. Return the names.

    Raises RunError for a tensor that the model does not have, or not in this shape; those before it are copied.
    """
    own, names = model.state_dict(keep_vars=True), []
    for name, _, shape, tensor in weights:
        target = own.get(name)
        if target is None or target.shape != shape:
            has = "none of this name" if target is None else f"one of {tuple(target.shape)}"
            raise RunError(f"{name} of shape {tuple(shape)} has no place in {type(model).__name__}: it has {has}")
        with torch.no_grad():
            if isinstance(target, DTensor):
                near = tensor.to(target.device)
                tensor = distribute_tensor(near, target.device_mesh, target.placements, src_data_rank=None)
            target.copy_(tensor)
        names.append(name)
    return names


def sharing_memory(weights: Iterable[StreamedTensor]) -> Iterator[list[StreamedTensor]]:
    """Yield weights in their order; those that share memory, as the tensors of a bucket do, in one list."""
    for _, found in groupby(weights, key=lambda each: each.tensor.untyped_storage().data_ptr()):
        yield list(found)


def message_of(found: Sequence[StreamedTensor]) -> WeightMessage:
    """Return tensors that share memory, without a copy. Raises RunError for one that is not contiguous."""
    begins = [each.begin for each in found]
    first, last = min(begins), max(begin + each.tensor.nbytes for begin, each in zip(begins, found, strict=True))
    parts = [
        WeightPart(each.name, each.dtype, each.shape, begin=begin - first)
        for begin, each in zip(begins, found, strict=True)
    ]
    memory = torch.empty(0, dtype=torch.uint8, device=found[0].tensor.device)
    return parts, memory.set_(found[0].tensor.untyped_storage())[first:last]


def number_dtype(numel: int) -> torch.dtype:
    """Return the dtype of the numbers of a tensor's elements."""
    return torch.int32 if numel < 2**31 else torch.int64


def _agree(
    group: WeightGroup,
    source: int,
    held: HeldWeights,
    *,
    device: torch.device | str,
    unread: Iterable[StreamedTensor] = (),
) -> None:
    """Raise RunError on every process of the group unless all hold the same version.

    unread: read before that, since other ranks of an engine take part in its stream.
    """
    own = held.digest
    given = torch.frombuffer(bytearray(bytes.fromhex(own)), dtype=torch.uint8).to(device)
    _broadcast(given, group, source)
    version = bytes(given.cpu().numpy()).hex()
    equal = torch.tensor([int(version == own)], device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
    group.allreduce([equal], options).wait()
    if int(equal) == 1:
        return
    for _ in unread:
        pass
    raise RunError(
        f"processes of the group hold different versions of the weights: this one {own[:12]}, and changes are of "
        f"{version[:12]}; clear what is held on all of them, and everything is given"
    )


def _broadcast(tensor: Tensor, group: WeightGroup, source: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = source
    group.broadcast([tensor], options).wait()


def _parts(text: bytes, nbytes: int, source: int) -> list[WeightPart]:
    """Return what a header says. Raises RunError if that is not of a stream."""
    try:
        return [WeightPart.of(row, nbytes) for row in json.loads(text)]
    except (ValueError, TypeError, AttributeError) as error:
        raise RunError(f"process {source} of the group gives no weights: its header is {text[:80]!r}") from error
