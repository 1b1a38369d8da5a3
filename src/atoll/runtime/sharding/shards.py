"""The parameter shards of one segment: what a rank stores between steps, and their sync after an optimizer step.

[Note: copies and residuals] Where parameters are sharded coarser than the optimizer's state and cross groups with a
codec, they are a copy of the master that follows it: the owner encodes the difference, and all ranks, the owner too,
add what they decode, so copies stay equal and the next difference includes what this one lost. What encoded gradients
lose is the residual of the rank that encoded them, as large as its part at level I. Its blocks for other ranks are
those of a reduction, its own block is that of the all-gather that may follow. A step that is not applied clears it.
Gradients are encoded times the loss scale; residuals are divided by it, so they outlive a change of the scale or of
the precision.

[Note: rolling back shards] A post-validated step syncs parameters before the ranks have agreed
that its gradients were finite. Masters and states are restored at once (`ShardedOptimizer.step_ahead`); the shards are
kept or rolled back when the verdict is known:

    no codec       parameter = cast(master); to roll back, sync the restored master again
    with a codec   parameter = sum of all decoded differences, which does not follow from the master: `previous` is the
                   copy without the step, and to roll back is to copy it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from atoll.base._torch import local_part
from atoll.plans.layouts import SYNC_PARAMETER, Level, StoredCopies
from atoll.runtime import lanes
from atoll.runtime.sharding import coding
from atoll.runtime.sharding.collectives import Collectives, Purpose
from atoll.runtime.sharding.flat_group import FlatGroup
from atoll.runtime.sharding.hosted import HostedState, begin_copy, host_zeros
from atoll.runtime.sharding.tensors import dtype_of


class ParameterShards:
    """The parameters at level p and the masters at level os, as [Note: the storages of a segment] in segment.py says.

    The computing thread calls every method; a sync runs in a job of the sync lane.
    """

    def __init__(self, flat: FlatGroup, collectives: Collectives) -> None:
        self._flat, self._collectives = flat, collectives
        # The parameters between steps, in the compute dtype at level p. Gathers read it, syncs write it. None where
        # gathers cast the master. Allocated once, as the master is: the ranks of a group map this memory.
        self.parameter: torch.Tensor | None = None
        # At level os. The optimizer steps views of it, so it is never moved or replaced. None if frozen, and where it
        # rests in host memory.
        self._master: torch.Tensor | None = None
        # Master and states, where they rest in host memory.
        self.hosted: HostedState | None = None
        self._allocate()
        if self.hosted is not None and self.rests_on_host:
            self.hosted.resting = self.parameter
        # Whether the parameters follow the master by encoded differences: [Note: copies and residuals].
        self.keeps_copy = flat.sharding.keeps_copy(flat.shape)
        # The copy without the step that was applied before its verdict; valid while `_is_ahead`. Adding a decoded
        # difference and subtracting it would not restore the copy's bits.
        self.previous: torch.Tensor | None = None
        if self.keeps_copy and flat.sharding.keeps_apart:
            assert self.parameter is not None, "a copy is stored"
            self.previous = torch.empty_like(self.parameter)
        # Whether the copy has a step that is neither confirmed nor rolled back.
        self._is_ahead = False
        # The sync in flight, until waited for: by `wait`, or by a gather, whose job starts behind it.
        self.syncing: lanes.Job | None = None
        # The master that the sync of a copy encodes; a clone for a step ahead. Lives as long as `syncing`: on a GPU the
        # job has only been launched when it is started, see [Note: streams and memory] in runtime/lanes.py.
        self._encoded: torch.Tensor | None = None
        # Stepped parameters on their way over the device to where they rest in host memory; as long as `syncing`.
        self._passing: torch.Tensor | None = None
        with torch.no_grad():
            if self.master is not None:
                self._fill(self.master, flat.layout.optimizer)
            if self.parameter is not None:
                self._fill(self.parameter, flat.layout.parameters)

    def _allocate(self) -> None:
        flat, sharding = self._flat, self._flat.sharding
        p, os = flat.layout.parameters, flat.layout.optimizer
        master_dtype = dtype_of(sharding.precision.master)
        # What the other ranks of the group read in place, before a gather or within a sync. All of it is allocated
        # here: `GroupMemory.share` maps the memory once, and none that is allocated later.
        #     p at I, or at G of one group    each gather reads the stored shard
        #     p at G of several groups        each gather reads what its move along inter has staged
        #     p at N, os finer                the sync after a step reads each rank's part
        is_last_part = p is Level.I or (p is Level.G and sharding.nest.inter == 1)
        is_read = is_last_part or (p is Level.N and os is not p)
        match sharding.stored(flat.shape):
            case StoredCopies.ALONE:
                self.parameter = self._stored_at(p, is_read=is_last_part)
            case StoredCopies.SHARED:
                coarse = min(p, os)
                # One of the two views is the whole storage: the optimizer writes p in place, and a sync only sends it.
                store = flat.zeros(coarse, master_dtype, is_read=is_read)
                self.parameter = flat.part(store, coarse, p)
                self._master = flat.part(store, coarse, os)
            case StoredCopies.CAST:
                self._master = flat.zeros(os, master_dtype, is_read=is_read)
            case StoredCopies.APART:
                if sharding.on_host:
                    self.hosted = HostedState(flat, master_dtype)
                else:
                    self._master = flat.zeros(os, master_dtype, is_read=False)
                self.parameter = self._stored_at(p, is_read=is_last_part if self.rests_on_host else is_read)

    def _stored_at(self, level: Level, *, is_read: bool) -> torch.Tensor:
        """Return memory for the parameters, where they rest. is_read: in place, by the other ranks of the group."""
        flat, device = self._flat, self._flat.around.device
        # Without a GPU the host's processors are the device: others may read in place what rests in its memory.
        if self.rests_on_host and not (is_read and device.type == "cpu"):
            return host_zeros(self, len(flat.range(level)), flat.compute, device=device)
        return flat.zeros(level, flat.compute, is_read=is_read)

    def _fill(self, target: torch.Tensor, level: Level) -> None:
        """Fill a shard with the parameters' first values, at their full precision."""
        # Before the parameters become views of the unsharded buffer, which has the compute dtype.
        flat, weights = self._flat, self._flat.around.weights
        for part in flat.map.slices(flat.range(level)):
            place = target.narrow(0, part.offset, part.stop - part.start)
            if weights is not None and part.name in weights:
                weights.read_into(place, part.name, flat.boxes[part.name], start=part.start, stop=part.stop)
            else:
                first = local_part(flat.parameters[part.name]).detach()
                place.copy_(first.reshape(-1)[part.start : part.stop])

    @property
    def master(self) -> torch.Tensor | None:
        """The master; None if the parameters are frozen. One that rests in host memory is there, except while the
        optimizer steps it."""
        return self._master if self.hosted is None else self.hosted.master

    @property
    def rests_on_host(self) -> bool:
        """True if the parameters rest in host memory, and a gather begins with their copy to the device."""
        return self._flat.sharding.rests_on_host(self._flat.shape)

    @property
    def gathered_from(self) -> torch.Tensor:
        """The shard that gathers read."""
        found = self.parameter if self.parameter is not None else self.master
        assert found is not None, "every segment stores its parameters somewhere"
        return found

    @property
    def values(self) -> tuple[torch.Tensor, Level]:
        """The shard with the most precise values, and its level: the master, or the parameters if they are frozen."""
        if self.master is not None:
            return self.master, self._flat.layout.optimizer
        return self.gathered_from, self._flat.layout.parameters

    @property
    def are_one(self) -> bool:
        """True if parameter and master are views of one storage."""
        return (
            self.parameter is not None
            and self.master is not None
            and self.parameter.untyped_storage().data_ptr() == self.master.untyped_storage().data_ptr()
        )

    def begin_sync(self, *, is_ahead: bool, is_exact: bool) -> None:
        """Begin to update the parameters from the master; see `Segment.sync_parameters`, which has waited for the sync
        before and freed the gathered copy."""
        if self.parameter is None:
            return  # cast from the master by the next gather
        raised: torch.Tensor | None = None
        if self.hosted is not None and self.hosted.is_due:
            # `hosted.stepping` may still write both: only jobs behind it read them.
            master, raised = self.hosted.come_up()
            if is_exact:  # read here
                self.hosted.end_step()
                raised = None
        elif (own := self.master) is not None:
            master = own
        else:
            return  # frozen
        flat = self._flat
        p, os = flat.layout.parameters, flat.layout.optimizer
        if self.keeps_copy and not is_exact:
            if is_ahead:
                self._save_previous()
            came: lanes.Job | None = None
            if raised is not None:
                assert self.hosted is not None, "it has stepped"
                self._encoded = torch.empty_like(master, device=flat.around.device)
                came = self.hosted.raise_to(self._encoded, master)
            else:
                # The optimizer's is restored at once; one whose step was made again may rest in host memory.
                self._encoded = master.clone() if is_ahead else master.to(flat.around.device)
            if self.rests_on_host:  # behind `came`, on the same lane
                self._begin_passing(self._all_gather_differences, self.parameter, level=p, comes=True)
            else:
                sync = partial(self._all_gather_differences, self.parameter)
                self.syncing = self._collectives.start("sync", sync, after=came)
            return
        if self.rests_on_host:
            self._begin_return(master, raised)
            return
        if raised is not None:
            self._raise(raised)
            return
        # Here and not in the job: after a step ahead the optimizer restores the old master as soon as this returns.
        self._is_ahead = False
        with torch.no_grad():
            if self.are_one:
                pass
            elif p < os:  # this rank's part; the job gathers the others'
                flat.part(self.parameter, p, os).copy_(master)
            else:
                self.parameter.copy_(flat.part(master, os, p))
        if SYNC_PARAMETER[os, p]:
            self.syncing = self._collectives.start("sync", partial(self._all_gather, self.parameter), after=None)

    def _raise(self, raised: torch.Tensor) -> None:
        """Begin to copy what the host has stepped to the device, and to send it to the other ranks."""
        flat, parameter = self._flat, self.parameter
        assert parameter is not None, "parameters whose master is on the host are stored apart from it"
        p, os = flat.layout.parameters, flat.layout.optimizer
        assert self.hosted is not None, "it has stepped"
        self._is_ahead = False
        self.syncing = self.hosted.raise_to(flat.part(parameter, p, max(p, os)), raised)
        if SYNC_PARAMETER[os, p]:
            self.syncing = self._collectives.start("sync", partial(self._all_gather, parameter), after=self.syncing)

    def _begin_return(self, master: torch.Tensor, raised: torch.Tensor | None) -> None:
        """Begin to bring parameters to host memory, where they rest: [Note: parameters at home] in hosted.py.

        raised: what the host has stepped, in their dtype.
        """
        flat, resting, hosted = self._flat, self.parameter, self.hosted
        assert resting is not None, "they are stored"
        assert hosted is not None, "trained parameters rest in host memory with their state"
        p, os = flat.layout.parameters, flat.layout.optimizer
        own = flat.part(master, os, max(p, os)) if raised is None else raised
        with torch.no_grad():
            if not flat.sharding.is_spread:
                if hosted.is_here:
                    hosted.along = own.to(flat.compute), None
                elif raised is None:  # written from outside, or restored
                    self._quiet()
                    resting.copy_(own)
                else:  # the thread writes what it steps there
                    self.syncing = hosted.stepping
                return
            self._begin_passing(self._all_gather, own, level=max(p, os), comes=not hosted.is_here)

    def _begin_passing(
        self, sync: Callable[[torch.Tensor], None], first: torch.Tensor, *, level: Level, comes: bool
    ) -> None:
        """Begin to sync parameters on the device that rest in host memory, and to bring them there.

        first: what is known of them before, at a level.  comes: whether that comes from host memory.
        """
        flat, hosted, p = self._flat, self.hosted, self._flat.layout.parameters
        assert hosted is not None, "trained parameters rest in host memory with their state"
        assert self.parameter is not None, "they are stored"
        self._passing = passing = torch.empty(len(flat.range(p)), dtype=flat.compute, device=flat.around.device)
        part, came = flat.part(passing, p, level), None
        if comes:
            came = hosted.raise_to(part, first)
        else:
            part.copy_(first)
        self.syncing = self._collectives.start("sync", partial(sync, passing), after=came)
        if hosted.is_here:
            hosted.along = passing, self.syncing
        else:
            self.syncing = begin_copy(flat, "offload", [(self.parameter, passing)], after=self.syncing)

    def wait_for_host(self) -> None:
        """Let gathers wait for stepped parameters that leave with the state."""
        if self.hosted is not None and self.hosted.carrying is not None:
            self.syncing = self.hosted.carrying

    def _quiet(self) -> None:
        """Wait on the host for copies in flight, before this processor writes what they read, or reads what they
        write."""
        if self.rests_on_host and self._flat.around.device.type == "cuda":  # this stream has waited for each copy
            torch.cuda.current_stream(self._flat.around.device).synchronize()

    def wait(self) -> None:
        """Wait for the sync in flight: until it ends, the parameters are stale."""
        if self.syncing is not None:
            self.syncing.wait()
            self.mark_synced()

    def mark_synced(self) -> None:
        """Release the sync's job and buffer, once somebody has waited for it."""
        self.syncing = self._encoded = self._passing = None

    def confirm(self) -> None:
        """Keep the step that was applied ahead of its verdict."""
        self._is_ahead = False

    def roll_back(self) -> None:
        """Restore the copy as it was without the step ahead, if there is one."""
        if self._is_ahead:
            assert self.parameter is not None, "a copy is stored"
            assert self.previous is not None, "a step was applied ahead"
            self._quiet()
            self.parameter.copy_(self.previous)
            self._is_ahead = False

    def _save_previous(self) -> None:
        assert self.parameter is not None, "a copy is stored"
        assert self.previous is not None, "post-validated steps keep the copy before"
        self.roll_back()  # CORRECT applies a unit's step a second time
        self._quiet()
        self.previous.copy_(self.parameter)
        self._is_ahead = True

    def _all_gather(self, parameter: torch.Tensor) -> None:
        p, os = self._flat.layout.parameters, self._flat.layout.optimizer
        for move in SYNC_PARAMETER[os, p]:
            buffer = self._flat.part(parameter, p, move.coarse)
            self._collectives.move(buffer, move, Purpose.SYNC_PARAMETER)

    def _all_gather_differences(self, parameter: torch.Tensor) -> None:
        """Update copies by encoded differences: [Note: copies and residuals]."""
        assert self._encoded is not None, "the sync of a copy encodes a master"
        flat = self._flat
        p, os = flat.layout.parameters, flat.layout.optimizer
        for move in SYNC_PARAMETER[os, p]:
            buffer = flat.part(parameter, p, move.coarse)
            codec = flat.sharding.codec("parameter", move)
            if codec is None:
                self._collectives.move(buffer, move, Purpose.SYNC_PARAMETER)
                continue
            # An encoded move goes along inter, so it is the first: the copy's own part is still that of the last step.
            dtype = coding.wide(self._encoded.dtype)
            difference = self._encoded.to(dtype) - flat.part(parameter, p, os).to(dtype)
            collective = partial(coding.gather, replace(codec, rounding="nearest"), difference, buffer)
            self._collectives.move_encoded(collective, move, Purpose.SYNC_PARAMETER, adds=True)
