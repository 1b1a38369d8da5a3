"""Weights to processes without an engine, such as those of a sampler: over a process group of torch.

    trainer, the rank that gets the stream          each other process of the group
    give(engine.stream(to=0), group)         ->     for name, dtype, shape, tensor in take(group): ...

The processes of the group may be of one torch.distributed world, or of several: `weight_group` makes a group of
processes that know a store. Tensors that share memory, as those of a bucket do, travel together and without a copy; the
receiver has views of a bucket as well.

[Note: a message] Three broadcasts: the bytes of the next two, JSON that says name, dtype, shape and place of each
tensor, and the memory itself. Two zeros end a stream. What arrives is checked before it is used, and nothing is
unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import groupby
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.base.errors import RunError

MOST_HEADER = 2**26
"""Most bytes of a header that a receiver takes."""


class StreamedTensor(NamedTuple):
    """A whole weight of a model, as `transformers` would save it."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    tensor: Tensor


class WeightGroup(Protocol):
    """Interface of a process group that weights are sent over: a `torch.distributed.ProcessGroup`, or the result of
    `weight_group`."""

    def rank(self) -> int:
        """Return the number of this process in the group."""

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions, /) -> Any:
        """Begin to broadcast from `options.rootRank`."""


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


def give(weights: Iterable[StreamedTensor], group: WeightGroup) -> int:
    """Send weights to all other processes of a group, which call `take`. Return the bytes of tensors and gaps."""
    total, device = 0, torch.device("cpu")
    for _, together in groupby(weights, key=lambda each: each.tensor.untyped_storage().data_ptr()):
        found = list(together)
        device = found[0].tensor.device
        first = min(_begin(each) for each in found)
        parts = [
            [each.name, str(each.dtype).removeprefix("torch."), list(each.shape), _begin(each) - first]
            for each in found
        ]
        memory = torch.empty(0, dtype=torch.uint8, device=device).set_(found[0].tensor.untyped_storage())
        last = max(_begin(each) + each.tensor.nbytes for each in found)
        header = torch.frombuffer(bytearray(json.dumps(parts).encode()), dtype=torch.uint8).to(device)
        sizes = torch.tensor([header.numel(), last - first], device=device)
        for each in (sizes, header, memory[first:last]):
            _broadcast(each, group, group.rank())
        total += last - first
    _broadcast(torch.zeros(2, dtype=torch.int64, device=device), group, group.rank())
    return total


def take(group: WeightGroup, *, source: int = 0, device: torch.device | str = "cpu") -> Iterator[StreamedTensor]:
    """Yield the weights that the process `source` of the group gives, on `device`. Read to the end.

    Tensors are views of the memory that came with them, which nothing writes again.
    Raises RunError for what is not a stream.
    """
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
        parts = list(_parts(bytes(said.cpu().numpy()), nbytes, source))
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        _broadcast(memory, group, source)
        for name, dtype, shape, begin in parts:
            tensor = memory[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            yield StreamedTensor(name, dtype, tensor.shape, tensor=tensor)


def _begin(each: StreamedTensor) -> int:
    if not each.tensor.is_contiguous():
        raise RunError(f"{each.name} is not contiguous, and weights travel as they lie in memory")
    return int(each.tensor.storage_offset()) * each.tensor.itemsize


def _broadcast(tensor: Tensor, group: WeightGroup, source: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = source
    group.broadcast([tensor], options).wait()


def _parts(text: bytes, nbytes: int, source: int) -> Iterator[tuple[str, torch.dtype, list[int], int]]:
    """Yield what a header says. Raises RunError if that is not of a stream."""
    try:
        rows: Any = json.loads(text)
        for name, kind, shape, begin in rows:
            dtype = getattr(torch, kind)
            numbers = [begin, *shape]
            if not (isinstance(name, str) and isinstance(dtype, torch.dtype)) or not all(
                type(n) is int for n in numbers
            ):
                raise ValueError(name)
            if min(numbers) < 0 or begin % dtype.itemsize or begin + prod(shape) * dtype.itemsize > nbytes:
                raise ValueError(name)
            yield name, dtype, shape, begin
    except (ValueError, TypeError, AttributeError) as error:
        raise RunError(f"process {source} of the group gives no weights: its header is {text[:80]!r}") from error
