"""Activation offloading: the calls that execute OFFLOAD_ACT, OFFLOADED_ACT, ONLOAD_ACT and ONLOADED_ACT, and those of
what I keeps for W, with OWED in place of ACT.

Storages are offloaded, of four kinds of tensors:

    saved     what autograd saves of the block's forward, seen by hooks: an alias of each tensor, with its version
    input     the leaf that the block before has handed to it, which that one needs only as a place for a gradient
    products  outputs of linear layers that selective recompute keeps
    owed      of a unit, inputs of its linear layers and gradients of their outputs, from I to W

[Note: whose memory it is] A storage may leave only if nothing but the block's backward reads it until it is back. A
parameter, a message's buffer, a mask, a table of positions, or a tensor that the model passes on to a later block may
not. That is not asked of names but of references: the aliases are known, and whoever else may read the memory holds a
reference to it. So memory that has more references than are known stays where it is. Of the input this is asked when
its copy has ended, and not before: until the next block is called, the model's own forward refers to it.

[Note: the device's memory] Storages are freed and allocated again by the computation, as the parameters' are
([Note: streams and memory] in runtime/lanes.py): tensors and views of them stay what they are, without their memory.

    OFFLOAD_ACT    finds what the block has saved, and begins to copy it to a buffer in host memory
    OFFLOADED_ACT  waits for that, and frees what is its own
    ONLOAD_ACT     allocates it, and begins to copy it back
    ONLOADED_ACT   waits for that; the buffer is free for another block

Buffers in host memory are made when a block leaves for the first time, as many as are in use at once, and kept: the
sizes of a step's blocks are those of the step before. The program says how many there will be of a block's size, so
that too many are an error in the first microbatch, and not a kill by the system in a later one.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from atoll.base._torch import local_part, storage_references, tensor_references, version
from atoll.base.errors import RunError
from atoll.base.machine import free_memory
from atoll.base.units import format_bytes
from atoll.program.host import IN, OUT
from atoll.program.kept import Kept, most_away
from atoll.program.operation import Operation
from atoll.runtime.lanes import Job, JobLane, LaneKind
from atoll.runtime.models.operations import nested_tensors
from atoll.runtime.pipeline.block import BlockArguments, Passage
from atoll.runtime.sharding.hosted import host_zeros
from atoll.runtime.transport import Transport

_Place = tuple[Operation, int, int]
"""The row that copies it to host memory, a block or a unit, and a microbatch."""

_PLAIN = (Tensor, torch.nn.Parameter)

_ALIGNED = 64
"""Bytes at whose multiples a storage begins in a buffer."""


class _Piece(NamedTuple):
    """A storage that leaves, and its place in the buffer."""

    storage: torch.UntypedStorage
    offset: int
    nbytes: int


class _Leaving:
    """Offloaded tensors of one microbatch: activations of a block, until I, or the inputs of a unit's W, until W."""

    def __init__(self) -> None:
        # As autograd has them. `arrive` drops them with this object, so that the backward can free them one by one.
        self.aliases: list[Tensor] = []
        self.pieces: list[_Piece] = []
        # The leaves that it was handed, while it is not known whether another one reads them.
        self.given: Sequence[Tensor] = ()
        # How often the arguments, with which a forward will be run again, have such a leaf.
        self.again = 0
        self.buffer: Tensor | None = None
        self.job: Job | None = None

    def pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Return an alias of a tensor that autograd saves. It has the tensor's version, and not its history."""
        alias = tensor.detach()
        self.aliases.append(alias)
        return alias, version(alias)


def _by_storage(tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """Return tensors by their storage, each tensor once; those of other kinds than plain ones have none to free."""
    found: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)
    for tensor in tensors:
        own = local_part(tensor)
        if type(own) in _PLAIN and own.layout is torch.strided:
            found[own.untyped_storage()._cdata].setdefault(id(own), own)
    return {key: list(each.values()) for key, each in found.items()}


def _unpack(saved: tuple[Tensor, int]) -> Tensor:
    alias, written = saved
    if version(alias) != written:
        raise RunError(
            f"a tensor {tuple(alias.shape)} that is needed for the backward was modified in place after it was saved; "
            "use an operation that is not in place"
        )
    return alias


class KeptActivations:
    """What this rank's blocks keep, in host memory.

    chosen: the blocks and microbatches of the running program that leave.  needs: the bytes of its buffers, from those
    of each block.  expected: bytes of all buffers, as predicted, or as the blocks that have left so far say.
    """

    def __init__(self, device: torch.device, lanes: Mapping[LaneKind, JobLane], transport: Transport) -> None:
        self._device, self._lanes, self._transport = device, lanes, transport
        self.chosen: Collection[tuple[int, int]] = frozenset()
        self.needs: Callable[[Mapping[tuple[Operation, int], int]], int] = partial(most_away, ())
        self.expected = 0
        self._sizes: dict[tuple[Operation, int], int] = {}
        self._now: dict[_Place, _Leaving] = {}
        # Buffers in host memory by size: those in no use, and how many there are.
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._made: defaultdict[int, int] = defaultdict(int)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it has."""
        return sum(size * count for size, count in self._made.items())

    def begin(self) -> None:
        """Begin a program. What one that was not finished has left is discarded, once its copies have ended."""
        for each in self._now.values():
            if each.job is not None:
                each.job.wait()
            self._recycle(each)
        self._now.clear()

    # ---- a forward

    @contextmanager
    def saving(self, block: int, microbatch: int) -> Iterator[None]:
        """Context of a block's forward, in which autograd saves what may leave."""
        leaving = self._now[Kept.OFFLOAD_ACT, block, microbatch] = _Leaving()
        with saved_tensors_hooks(leaving.pack, _unpack):
            yield

    def keep(
        self, block: int, microbatch: int, passage: Passage | None, given: BlockArguments, before: Passage | None
    ) -> None:
        """Find what leaves, at the end of a block's forward. given: its arguments.  before: of the block before it, if
        that is of the same stage."""
        place = Kept.OFFLOAD_ACT, block, microbatch
        leaving = self._now[place]
        if passage is None:  # nothing needs a gradient
            del self._now[place]
            return
        handed = () if before is None else tuple(before.leaves)
        if passage.again is not None:
            handed_ids = {id(leaf) for leaf in handed}
            again = [tensor for tensor in nested_tensors(given) if id(tensor) in handed_ids]
            leaving.again = len(again)
            leaving.aliases = [*again, *(alias for alias, _ in passage.kept)]
        self._find(leaving, handed)
        leaving.given = (*handed, *(() if before is None else before.made))

    def owe(self, unit: int, microbatch: int, tensors: Iterable[Tensor]) -> None:
        """Find what leaves of what W of a unit needs, once I has computed it."""
        leaving = self._now[Kept.OFFLOAD_OWED, unit, microbatch] = _Leaving()
        leaving.aliases = list(tensors)
        self._find(leaving, ())

    def _find(self, leaving: _Leaving, handed: Sequence[Tensor]) -> None:
        inputs = _by_storage(handed)
        offset = 0
        for key, tensors in {**inputs, **_by_storage(leaving.aliases)}.items():
            storage = tensors[0].untyped_storage()
            is_own = key in inputs or storage_references(storage) == len(tensors)
            is_free = storage.resizable() and storage.device == self._device
            if not (is_own and is_free) or storage.nbytes() == 0:
                continue
            leaving.pieces.append(_Piece(storage, offset, storage.nbytes()))
            offset += -(-storage.nbytes() // _ALIGNED) * _ALIGNED

    # ---- the way there and back

    def offload(self, place: _Place) -> None:
        """Begin to copy the tensors of a place to host memory."""
        leaving = self._now.get(place)
        if leaving is None or not leaving.pieces:
            return
        last = leaving.pieces[-1]
        nbytes = last.offset + last.nbytes
        if nbytes > self._sizes.get(place[:2], 0):
            self._sizes[place[:2]] = nbytes
            self._check_room()
        leaving.buffer = self._take(nbytes)
        leaving.job = self._copying("offload", leaving)

    def free(self, place: _Place) -> None:
        """Wait for that, and free the device's memory."""
        leaving = self._now.get(place)
        if leaving is None or leaving.job is None:
            return
        leaving.job.wait()
        leaving.job = None
        given, leaving.given = leaving.given, ()
        stay = set(_by_storage(_read(given, 2 * leaving.again)))
        row, of, microbatch = place
        before = self._now.get((row, of - 1, microbatch)) if row is Kept.OFFLOAD_ACT else None
        known = _by_storage([*leaving.aliases, *given, *(() if before is None else before.aliases)])
        leaving.pieces = [
            piece
            for piece in leaving.pieces
            if piece.storage._cdata not in stay
            and storage_references(piece.storage) == len(known[piece.storage._cdata])
        ]
        for piece in leaving.pieces:
            piece.storage.resize_(0)

    def onload(self, place: _Place) -> None:
        """Allocate the device's memory again, and begin to copy to it."""
        leaving = self._now.get(place)
        if leaving is None or not leaving.pieces:
            return
        for piece in leaving.pieces:
            piece.storage.resize_(piece.nbytes)
        leaving.job = self._copying("onload", leaving)

    def arrive(self, place: _Place) -> None:
        """Wait for that. The backward, or W, has everything as it was."""
        leaving = self._now.pop(place, None)
        if leaving is None:
            return
        if leaving.job is not None:
            leaving.job.wait()
        self._recycle(leaving)

    def _copying(self, kind: LaneKind, leaving: _Leaving) -> Job:
        assert leaving.buffer is not None, "it has been taken"
        self._transport.count(IN if kind == "onload" else OUT, sum(piece.nbytes for piece in leaving.pieces))
        copy = partial(_copy, tuple(leaving.pieces), leaving.buffer, is_back=kind == "onload")
        return self._lanes[kind].start(copy, unit=-1)

    # ---- buffers

    def _check_room(self) -> None:
        """Raise RunError if the machine has less memory than this rank's buffers will take of it. Its other ranks are
        not asked: a rank cannot wait for them here."""
        needed, left = self.needs(self._sizes), free_memory()
        self.expected = max(self.expected, needed)
        if needed - self.nbytes > left:
            raise RunError(
                f"this rank needs {format_bytes(needed)} of host memory for activations, of which it has "
                f"{format_bytes(self.nbytes)}, and the machine, or the limit of its control group, has "
                f"{format_bytes(left)} left; use a smaller parallel.host.activations, or more nodes"
            )

    def _take(self, nbytes: int) -> Tensor:
        free = self._free[nbytes]
        if free:
            return free.pop()
        try:
            made = host_zeros(self, nbytes, torch.uint8, device=self._device)
        except (RuntimeError, RunError) as error:
            raise RunError(
                f"{format_bytes(nbytes)} of host memory for the activations of a block, beside "
                f"{format_bytes(self.nbytes)} of others, could not be allocated; use a smaller "
                f"parallel.host.activations, or allow more locked memory (`ulimit -l`): {error}"
            ) from error
        self._made[nbytes] += 1
        return made

    def _recycle(self, leaving: _Leaving) -> None:
        if leaving.buffer is not None:
            self._free[leaving.buffer.nbytes].append(leaving.buffer)
            leaving.buffer = None


def _read(given: Sequence[Tensor], again: int) -> list[Tensor]:
    """Return the tensors that somebody may still read, or read again in a backward, of those that the block before has
    handed on. again: how often a forward that will be run again has each, in its arguments and among what it keeps."""
    found = []
    for tensor, (of_torch, of_python) in zip(given, _references(given), strict=True):
        known = _known(is_in_graph=of_torch > 1)
        if of_torch > known[0] or of_python > known[1] + again:
            found.append(tensor)
    return found


def _references(given: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the references to each tensor: those of torch, of which all of Python's are one, and those of Python."""
    return [(tensor_references(tensor), sys.getrefcount(tensor)) for tensor in given]


@cache
def _known(*, is_in_graph: bool) -> tuple[int, int]:
    """Return the references to a tensor that only a passage has, and a graph that accumulates its gradient. They are
    counted, since versions of Python and of torch differ in those of a call."""
    with torch.enable_grad(), saved_tensors_hooks(Tensor.detach, lambda saved: saved):
        tensor = torch.zeros(1).requires_grad_()
        graph = tensor.exp() if is_in_graph else None
        passage = (tensor,)
        given = (tensor,)
        del tensor
    (found,) = _references(given)
    del graph, passage
    return found


def _copy(pieces: Sequence[_Piece], buffer: Tensor, *, is_back: bool) -> None:
    for storage, offset, nbytes in pieces:
        here = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        home = buffer[offset : offset + nbytes]
        if is_back:
            here.copy_(home, non_blocking=True)
        else:
            home.copy_(here, non_blocking=True)
