"""The unsharded parameters of one segment: the gathered copy that forwards and backwards read.

[Note: stable storage] The copy is one storage object for the life of the segment, resized to nothing when it is freed
and back when it is gathered, never exchanged: the views that autograd saved between a forward and its backward see the
data again. Where parameters are stored at level N, the shard is the copy and nothing is gathered.

[Note: a freed parameter reads NaN] While a unit is freed its parameters show one NaN, expanded to their shape: a read
outside the engine is seen, a write raises, and nothing touches memory that is not there.

[Note: a gather on two streams] What the host launches, from left to right. e0 is the end of the last sync of
parameters, if that is in flight.

    host      GATHER u     F of t      WHOLE u    F of u      FREE u    GATHER v
    compute   record e1    kernels t   wait e2    kernels u             record e3
    lane      wait e1, e0, all-gather inter, all-gather intra, record e2          wait e3, all-gather inter, ...
    memory    of u allocated                                  freed     of v allocated

The memory is the compute stream's: the host takes it from that stream's pool and returns it there.

    e1   the all-gather writes after every kernel that was launched before GATHER u. Some of them may read this memory
         as the copy of a unit that has been freed since.
    e2   kernels u read after the all-gather has written.
    e3   does for v what e1 does for u: v may get the memory of u, which kernels u still read. So FREE waits for nothing
         and records nothing. Without e3 the all-gather of v could overwrite weights that F of u reads.

Where the lane is threads, GATHER queues a job and WHOLE waits for it; on a GPU its stream has the same events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from functools import partial

import torch

from atoll.base._torch import local_part
from atoll.plans.layouts import GATHER_PARAMETER, Level, Move
from atoll.program.host import IN
from atoll.runtime import lanes
from atoll.runtime.sharding import coding
from atoll.runtime.sharding.collectives import Collectives, Purpose
from atoll.runtime.sharding.flat_group import FlatGroup
from atoll.runtime.sharding.shards import ParameterShards
from atoll.runtime.sharding.tensors import lay_in


class GatherState(Enum):
    """State of the gathered copy. A segment whose shard is the copy is always UNSHARDED.

        SHARDED --begin_gather--> IN_FLIGHT --gather--> UNSHARDED --free--> SHARDED
        SHARDED ----------------gather----------------> UNSHARDED
        IN_FLIGHT or UNSHARDED --drop--> SHARDED        where a program runs again from its beginning

    SHARDED: the parameters read NaN, and the copy has no memory.  IN_FLIGHT: they still do; a lane writes to the copy,
    or to the buffer that is staged for it.  UNSHARDED: they are views of the copy.
    """

    SHARDED = 0
    IN_FLIGHT = 1
    UNSHARDED = 2


class UnshardedParameters:
    """The gathered copy, and what the module's parameters show."""

    def __init__(self, flat: FlatGroup, shards: ParameterShards, collectives: Collectives) -> None:
        self._flat, self._shards, self._collectives = flat, shards, collectives
        # The moves of a gather along axes with peers. Without any, a gather is a copy or a cast on the device.
        self._moves = flat.sharding.real(GATHER_PARAMETER[flat.layout.parameters])
        # Whether the shard is the copy, so that nothing is gathered or freed.
        self.is_permanent = flat.sharding.rests_whole(flat.shape)
        # Its size alone changes: [Note: stable storage]. Memory from a gather to `free`, on the compute stream's pool.
        if self.is_permanent:
            assert shards.parameter is not None, "level N stores the parameters"
            self.buffer = shards.parameter
        else:
            self.buffer = torch.empty(flat.map.padded, dtype=flat.compute, device=flat.around.device)
        # Made once, while there is memory behind them. They refer to the storage: each gather makes them valid again.
        self._views = flat.views_of(self.buffer)
        # What freed parameters show: [Note: a freed parameter reads NaN].
        self._absent = torch.full((), torch.nan, dtype=flat.compute, device=flat.around.device)
        # Whether a gather has run since the shards last changed: if so, the blocks of the other ranks are where it
        # found them. Cleared by `invalidate`.
        self._is_known = False
        # The I-shard between the two moves of a gather, in lent memory: the job sets it, `gather` or `drop` returns it.
        self._staged: torch.Tensor | None = None
        # From `begin_gather` until `gather` or `drop` has waited.
        self._gathering: lanes.Job | None = None
        # The tensors whose `.data` a gather or a free replaces: the parameter, or the local part of a DTensor.
        self._local = self._adopt()
        # The copy has the first values. The builder frees the unit before the first use, so the first forward gathers.
        self.state = GatherState.UNSHARDED

    def _adopt(self) -> dict[str, torch.Tensor]:
        """Copy the first values and make the parameters views of the copy; return the tensors that show it."""
        weights, found = self._flat.around.weights, {}
        with torch.no_grad():
            for name, parameter in self._flat.parameters.items():
                # Values of a file are in the shards alone, one of which may be the copy.
                if weights is None or name not in weights:
                    self._views[name].copy_(local_part(parameter))
                lay_in(parameter, self._views[name])
                found[name] = local_part(parameter)  # a DTensor has a new one
        return found

    @property
    def _stages(self) -> bool:
        """True if the first of a gather's two moves writes to memory that the other ranks then read in place."""
        moves, around = self._moves, self._flat.around
        return len(moves) > 1 and around.transport.memory.sees(around.peers(moves[1].axis))

    def begin_gather(self) -> None:
        """Begin to gather the parameters; `gather` waits for it."""
        if self.is_permanent:
            return
        assert self.state is GatherState.SHARDED, "a program gathers what is not gathered"
        # With staging the job makes the first move only. `gather` makes the second, into memory that it allocates then:
        # it is a copy on the CPU, which beside the computation would slow that down.
        if not self._stages:
            self._allocate()
        # Wait for the previous step's parameter sync: until it ends the sharded parameters are stale. A gather may wait
        # for a sync and never the reverse, so the lanes cannot wait for each other (`STEP_LANES` in runtime/lanes.py).
        self._gathering = self._collectives.start("gather", self._all_gather, after=self._shards.syncing)
        self.state = GatherState.IN_FLIGHT

    def gather(self) -> None:
        """Unshard the parameters, up to date: wait for the gather in flight, or run it here."""
        if self.state is GatherState.UNSHARDED:
            self._shards.wait()
            return
        with torch.no_grad():
            if self._gathering is not None:
                self._gathering.wait()
                self._gathering = None
            else:  # FETCH
                self._collectives.run("gather", self._all_gather, after=self._shards.syncing)
            self._shards.mark_synced()  # the gather was behind the sync
            # The peers read this rank's staged shard in place. It is lent again once all of them have set their byte.
            if self._staged is not None:
                self._fill(GATHER_PARAMETER[Level.I], self._staged)
                self._flat.around.transport.memory.give_back(self._staged)
                self._staged = None
        # Not before the copy is complete: until now a read has shown NaN.
        for name, local in self._local.items():
            local.data = self._views[name]
        self.state = GatherState.UNSHARDED

    def free(self) -> None:
        """Free the copy."""
        if self.is_permanent or self.state is not GatherState.UNSHARDED:
            return  # a copy in flight stays, since a lane writes to it: `drop` waits, and then frees
        # Before the storage goes: who reads a parameter now sees NaN, and not memory that is not there.
        for name, local in self._local.items():
            local.data = self._absent.expand(self._views[name].shape)
        self.buffer.untyped_storage().resize_(0)
        self.state = GatherState.SHARDED

    def drop(self) -> None:
        """Free the copy, gathered or in flight."""
        if self._gathering is not None:
            self._gathering.wait()  # a lane still writes to it
            self._gathering = None
            if self._staged is None:
                self.buffer.untyped_storage().resize_(0)
            else:  # the second move, which tells the peers where to read, has not begun: none of them will set its byte
                self._flat.around.transport.memory.give_back(self._staged, was_read=False)
                self._staged = None
            self.state = GatherState.SHARDED
        self.free()

    def invalidate(self) -> None:
        """Free the copy because the shards are about to change: it is stale, and peers' blocks have to be told anew."""
        self.drop()
        self._is_known = False

    def _all_gather(self) -> None:
        """Run the part of a gather that sends messages: all of it, or the first of two moves."""
        own = self._shards.gathered_from
        if self._shards.rests_on_host:
            self._flat.around.transport.count(IN, own.nbytes)
        if self._stages:
            around = self._flat.around
            readers = around.peers(self._moves[1].axis)
            self._staged = around.transport.memory.lend(len(self._flat.range(Level.I)), self._flat.compute, readers)
        if self._staged is not None:
            self._move(self._staged, self._moves[0], own=own)
        else:  # one move; or both, if nothing could be lent since others still read what was lent before
            self._fill(self._moves, own)

    def _fill(self, moves: Sequence[Move], own: torch.Tensor) -> None:
        """Fill the copy by `moves`, from this rank's part."""
        self._allocate()  # on a GPU a job finds it allocated: see `begin_gather`
        # The first gather after an update waits for a message of each owner, which says that its block is up to date.
        # Until the next update, blocks in shared permanent memory are then read without one.
        again, self._is_known = self._is_known, True
        flat = self._flat
        if not moves or (own is self._shards.parameter and self._shards.rests_on_host):
            # From pinned memory a lane's stream copies, in order with the moves: the host does not wait.
            own = flat.part(self.buffer, Level.N, flat.layout.parameters).copy_(own, non_blocking=True)
        for at, move in enumerate(moves):
            buffer = flat.part(self.buffer, Level.N, move.coarse)
            self._move(buffer, move, own=own if at == 0 else None, again=again)

    def _move(self, buffer: torch.Tensor, move: Move, *, own: torch.Tensor | None, again: bool = False) -> None:
        """All-gather along an axis. Between groups parameters may be encoded; they are rounded to nearest, so that
        forward and backward use the same."""
        codec = self._flat.sharding.codec("parameter", move)
        if codec is None:
            self._collectives.move(buffer, move, Purpose.GATHER, own=own, again=again)
            return
        assert own is not None, "parameters cross groups before they are gathered inside them"
        collective = partial(coding.gather, replace(codec, rounding="nearest"), own.to(buffer.dtype), buffer)
        self._collectives.move_encoded(collective, move, Purpose.GATHER)

    def _allocate(self) -> None:
        """Give the copy its memory, on a GPU from the compute stream's pool, never from a lane's: see [Note: streams
        and memory] in runtime/lanes.py."""
        if self.buffer.untyped_storage().nbytes() == 0:
            self.buffer.untyped_storage().resize_(self.buffer.numel() * self.buffer.itemsize)
