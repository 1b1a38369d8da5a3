"""The optimizer's state of one segment that rests in host memory, and its copy on the device during a step.

    home   flat buffers in host memory, at level os: the master, and one for each tensor that the optimizer keeps of a
           parameter. Pinned where the device is a GPU, so that copies overlap with the computation
    here   as many buffers on the device, from ONLOAD to OFFLOADED

[Note: who sees which] torch's optimizer has slices of the parameters, and their states in a dictionary. From STEP_UNIT
to OFFLOAD they are views of `here`. At any other time the slices read NaN, as freed parameters do, and the states are
views of `home`, which checkpoints read and write without the device.

    ONLOAD      allocates `here` and begins to copy `home` to it
    ONLOADED    waits for that
    STEP_UNIT   lets the optimizer see `here`, and steps
    RETURN      copies the stepped master to the parameters, from `here`
    OFFLOAD     lets the optimizer see `home` again, and begins to copy `here` to it
    OFFLOADED   waits for that, and frees `here`

[Note: a step on the host] Where the host's processors make the step, the optimizer always sees `home`, and `here` is
empty. The computation only begins each of these:

    OFFLOAD_GRAD  copies the gradients to `gradient`
    STEP_ON_HOST  on a thread, behind that: steps, and casts the master to `raised` if the forward has another dtype
    ONLOAD_PARAM  behind the thread's step: copies `raised`, or the master, to the parameters, and sends them to where
                  they are stored

[Note: parameters at home] If parameters are stored in host memory too, `resting` is their shard, which gathers copy to
the device. Three ways lead there (`ParameterShards._begin_return`):

    stepped on the device       RETURN casts the master to `along`, and OFFLOAD copies that together with the state
    stepped on the host         the thread casts the master to `resting`; nothing is copied
    and exchanged among ranks   in a buffer on the device, which OFFLOAD or a copy of its own then brings to `resting`

A gather copies `resting` in its job, behind `ParameterShards.syncing`: the last of these jobs, also across programs.

A step ahead of its verdict copies `home` to other buffers first, and steps those. Whoever reads parameters between two
programs does the work of ONLOAD_PARAM himself (`Unit.bring_up`).

Both copies are jobs of lanes of their own, one for each direction of the link. `here` is allocated and freed by the
computation, as [Note: streams and memory] in runtime/lanes.py demands. Whoever reads `home` first waits for the way
back, on the host: a copy from a GPU has only been launched when its job has.

A step ahead of its verdict goes back to other buffers, and `home` stays as it was. If the step is taken unchanged, both
change places (`take`); if not, it is made again from `home`, or nothing is left to undo.

The optimizer makes its states with the first gradient of a parameter. They then have no buffer here and are copied home
one by one; from the next step on they are part of the flat buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from atoll.base.errors import RunError
from atoll.base.units import format_bytes
from atoll.plans.layouts import Slice
from atoll.program.host import IN, OUT
from atoll.runtime import lanes
from atoll.runtime.sharding.flat_group import FlatGroup

MASTER = "master"
"""Key of the master among the buffers; those of states have the optimizer's, with a prefix."""

_STATE = "state."

_WAYS: Mapping[lanes.LaneKind, str] = {"onload": IN, "offload": OUT}
"""The direction of the link to host memory, as `Transport.sent` counts it."""


class HostedState:
    """Master and states of a segment at home, and here while they are.

    The computing thread calls every method; copies run in jobs of the lanes.
    """

    def __init__(self, flat: FlatGroup, dtype: torch.dtype) -> None:
        self._flat = flat
        self._held = flat.range(flat.layout.optimizer)
        self.parts = tuple(flat.map.slices(self._held))  # the slices of parameters in each buffer
        self.steps_there = flat.sharding.steps_on_host  # whether the host's processors make the step
        # Never replaced: pieces of a checkpoint and the optimizer's states are views. A state's is made when the
        # optimizer has made the state, or a checkpoint has it.
        self._home: dict[str, torch.Tensor] = {MASTER: self._at_home(dtype)}
        # The same of a step ahead of its verdict, from the first such step on.
        self._ahead: dict[str, torch.Tensor] = {}
        # From `onload` to `land`.
        self._here: dict[str, torch.Tensor] = {}
        # The gradients that have come back from host memory with the state, as long as `here`.
        self.gradient_here: torch.Tensor | None = None
        # States that the optimizer has made in this step, until they are at home.
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Whether the optimizer sees `here`.
        self.is_here = False
        # Of a step on the host: its gradients, once there have been any, and the copy of them in flight.
        self.gradient: torch.Tensor | None = None
        self._lowering: lanes.Job | None = None
        # The step, until somebody has waited for it on the host; whether its parameters have yet to come up, and from
        # `ahead`.
        self.stepping: lanes.Job | None = None
        self.is_due = False
        self.is_due_ahead = False
        # The last copy of parameters to the device, and the one that reads what the step in flight writes.
        self._raising: lanes.Job | None = None
        self._raised_before: lanes.Job | None = None
        # The master in the dtype of the forward, in pinned memory, where that is another one.
        self._raised: torch.Tensor | None = None
        # The shard of `ParameterShards`, if parameters are stored in host memory.
        self.resting: torch.Tensor | None = None
        # Updated parameters on the device, from RETURN to OFFLOADED, and the sync that completes them. OFFLOAD copies
        # them to `resting`.
        self.along: tuple[torch.Tensor, lanes.Job | None] | None = None
        # That copy, for which gathers wait.
        self.carrying: lanes.Job | None = None
        # The copy in flight: one at a time, since a state does not leave before it has come. Until the computation has
        # waited for it, it keeps what is here.
        self._job: lanes.Job | None = None
        # The last way back, until the host has waited for it.
        self._returning: lanes.Job | None = None

    def _at_home(self, dtype: torch.dtype, numel: int | None = None) -> torch.Tensor:
        return host_zeros(self, len(self._held) if numel is None else numel, dtype, device=self._flat.around.device)

    # ---- what is where

    @property
    def master(self) -> torch.Tensor:
        """The master: here while the optimizer sees it here, otherwise at home, where it has arrived."""
        if self.is_here:
            return self._here[MASTER]
        self.land()
        return self._home[MASTER]

    def at_home(self, key: str, part: Slice, dtype: torch.dtype, *, is_ahead: bool = False) -> torch.Tensor:
        """Return a parameter's state in host memory, zero if there has been none. is_ahead: of a step ahead."""
        buffers, name = self._ahead if is_ahead else self._home, _STATE + key
        if name not in buffers:
            buffers[name] = self._at_home(dtype)
        return _view(buffers[name], part)

    def here(self, key: str, part: Slice) -> torch.Tensor | None:
        """Return the copy of a parameter's state on the device, or of the master's slice for `MASTER`; None if there is
        no buffer for it."""
        buffer = self._here.get(key if key == MASTER else _STATE + key)
        return None if buffer is None else _view(buffer, part)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers in host memory."""
        rest = (each for each in (self.gradient, self._raised) if each is not None)
        return [*self._home.values(), *self._ahead.values(), *rest]

    # ---- the way here and back

    def onload(self) -> None:
        """Begin to copy everything to the device. On a GPU this is behind the way back, for which `leave` waits."""
        self.leave()
        device = self._flat.around.device
        self._here = {key: torch.empty_like(held, device=device) for key, held in self._home.items()}
        pairs = [(here, self._home[key]) for key, here in self._here.items()]
        if self._flat.sharding.gradients_on_host:
            assert self.gradient is not None, "they have left"
            self.gradient_here = torch.empty_like(self.gradient, device=device)
            pairs.append((self.gradient_here, self.gradient))
        self._job = begin_copy(self._flat, "onload", pairs)

    def arrive(self) -> None:
        """Wait until everything is here."""
        if self._job is not None:
            self._job.wait()
            self._job = None

    def makes(self, key: str, part: Slice, value: torch.Tensor, *, is_ahead: bool) -> torch.Tensor:
        """Return the place at home of a state after the step. value: what the optimizer has: the buffer's view, or a
        tensor that it has made."""
        home, here = self.at_home(key, part, value.dtype, is_ahead=is_ahead), self.here(key, part)
        if here is None:
            self._made.append((home, value))
        elif value.data_ptr() != here.data_ptr():
            here.copy_(value)
        return home

    def offload(self, *, is_ahead: bool) -> None:
        """Begin to copy everything back, once the optimizer sees `home` again."""
        self.is_here = False
        to = self._ahead if is_ahead else self._home
        for key, here in self._here.items():
            if key not in to:
                to[key] = self._at_home(here.dtype)
        pairs = [*((to[key], here) for key, here in self._here.items()), *self._made]
        after = None
        if self.along is not None:
            assert self.resting is not None, "parameters leave for where they rest"
            stepped, after = self.along
            pairs.append((self.resting, stepped))
        self._job = self._returning = begin_copy(self._flat, "offload", pairs, after=after)
        self.carrying = None if self.along is None else self._job

    def take(self) -> None:
        """Keep the step ahead: it is at home from now on."""
        self._home, self._ahead = self._ahead, self._home
        self.is_due_ahead = False

    def forget(self) -> None:
        """Discard a step ahead on the host whose parameters have not come up."""
        if self.is_due_ahead:
            self.end_step()
            self.is_due = self.is_due_ahead = False

    def leave(self) -> None:
        """Wait for the copy in flight, and free what is here. The device waits; the host goes on."""
        if self._job is not None:
            self._job.wait()
            self._job = None
        self._here, self._made, self.along, self.carrying, self.gradient_here = {}, [], None, None, None

    def land(self) -> None:
        """Wait on the host until everything is at home: this processor may read it."""
        if self.is_here:
            return
        self.leave()
        self.end_step()
        if self._returning is not None:
            self._returning.finish()
            self._returning = None

    # ---- a step on the host

    def lower(self, gradient: torch.Tensor) -> None:
        """Begin to copy the gradients to host memory."""
        if self.gradient is None:
            self.gradient = self._at_home(gradient.dtype)
        self._lowering = begin_copy(self._flat, "offload", [(self.gradient, gradient)])

    def lowered(self) -> None:
        """Wait until the gradients have left the device: they may be freed."""
        if self._lowering is not None:
            self._lowering.wait()

    def arrived(self) -> torch.Tensor:
        """Wait on the host for the gradients, and return them. The thread that steps calls it."""
        assert self._lowering is not None, "gradients were offloaded"
        assert self.gradient is not None, "gradients were offloaded"
        self._lowering.finish()
        if self._raised_before is not None:
            self._raised_before.finish()
        return self.gradient

    def expect_step(self, *, is_ahead: bool) -> None:
        """Allocate what a step on the host writes, before it is submitted: its thread may begin at once, and whoever
        copies the parameters to the device may begin before it has ended."""
        self._raised_before = self._raising  # and not that behind this step
        if is_ahead and MASTER not in self._ahead:
            self._ahead[MASTER] = self._at_home(self._home[MASTER].dtype)
        flat, master = self._flat, self._home[MASTER]
        rests = self.resting is not None and not flat.sharding.is_spread
        casts = flat.compute != master.dtype and not flat.sharding.keeps_copy(flat.shape)
        if self._raised is None and casts and not rests:
            self._raised = self._at_home(flat.compute, len(_updated(flat, master)))

    def begin_step(self, job: lanes.Job, *, is_ahead: bool) -> None:
        """Record a step on the host that has been submitted."""
        self.stepping, self.is_due, self.is_due_ahead = job, True, is_ahead

    def end_step(self) -> None:
        """Wait for the step on the host, and raise its error."""
        if self.stepping is not None:
            job, self.stepping = self.stepping, None
            job.finish()

    def copy_ahead(self) -> None:
        """Copy `home` to the buffers that a step ahead writes."""
        for key, held in self._home.items():
            if key not in self._ahead:
                self._ahead[key] = self._at_home(held.dtype)
            self._ahead[key].copy_(held)

    def there(self, key: str, part: Slice, *, is_ahead: bool) -> torch.Tensor | None:
        """Return a parameter's part of a buffer in host memory; None if there is no such buffer."""
        buffer = (self._ahead if is_ahead else self._home).get(key if key == MASTER else _STATE + key)
        return None if buffer is None else _view(buffer, part)

    def cast(self, *, is_ahead: bool) -> None:
        """Cast what the parameters take of a stepped master to where they rest, or, if they have another dtype, for the
        copy to the device."""
        part = _updated(self._flat, (self._ahead if is_ahead else self._home)[MASTER])
        if self.resting is not None and not self._flat.sharding.is_spread:
            self.resting.copy_(part)
        elif self._raised is not None:
            self._raised.copy_(part)

    def come_up(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the master of the step on the host, and what the parameters take of it in their dtype: both are
        complete behind `stepping`. They are then no longer due."""
        master = (self._ahead if self.is_due_ahead else self._home)[MASTER]
        self.is_due = self.is_due_ahead = False
        return master, _updated(self._flat, master) if self._raised is None else self._raised

    def raise_to(self, own: torch.Tensor, raised: torch.Tensor) -> lanes.Job:
        """Begin to copy what comes up to the parameters, behind the step. The next step on the host, which writes that
        memory again, waits for it: one that is made again after a verdict needs no gradients of these values."""
        self._raising = begin_copy(self._flat, "onload", [(own, raised)], after=self.stepping)
        return self._raising


def _updated(flat: FlatGroup, master: torch.Tensor) -> torch.Tensor:
    """Return the part of a master of which the parameters are a cast."""
    return flat.part(master, flat.layout.optimizer, max(flat.layout.parameters, flat.layout.optimizer))


def begin_copy(
    flat: FlatGroup,
    kind: lanes.LaneKind,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    after: lanes.Job | None = None,
) -> lanes.Job:
    """Begin to copy the second of each pair to the first over the link to host memory, behind another job."""
    around = flat.around
    around.transport.count(_WAYS[kind], sum(source.nbytes for _, source in pairs))
    return around.lanes[kind].start(partial(_copy, tuple(pairs)), unit=flat.tag[0], after=after)


def visiting(hosted: HostedState) -> list[torch.Tensor]:
    """Return the buffers of a state that are on the device until OFFLOADED."""
    along = () if hosted.along is None else hosted.along[:1]
    return [*hosted._here.values(), *(each for each in (hosted.gradient_here, *along) if each is not None)]


def host_zeros(owner: object, count: int, dtype: torch.dtype, *, device: torch.device) -> torch.Tensor:
    """Allocate zeros in host memory, pinned where the device is a GPU, and unpinned with their owner, which keeps them
    until then. Zeros: nothing writes the gaps between parameters, and comparisons of replicas read them."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=dtype, device="meta" if device.type == "meta" else "cpu")
    made = torch.zeros(count, dtype=dtype)
    pin(made)
    weakref.finalize(owner, unpin, made)
    return made


def pin(tensor: torch.Tensor) -> None:
    """Pin memory where it is, so that copies from and to a GPU overlap with computation.

    torch's own pinned memory is rounded up to a power of two, which for buffers of this size is up to twice as much.
    """
    if tensor.numel():
        error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        if int(error) != 0:
            raise RunError(
                f"{format_bytes(tensor.nbytes)} of host memory could not be pinned ({error}): allow more locked memory "
                "(`ulimit -l unlimited`, or the limit of the container), or use a smaller parallel.host.fraction"
            )


def unpin(tensor: torch.Tensor) -> None:
    """Undo `pin`."""
    if tensor.numel():
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


def _view(buffer: torch.Tensor, part: Slice) -> torch.Tensor:
    return buffer.narrow(0, part.offset, part.stop - part.start)


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for to, source in pairs:
        to.copy_(source, non_blocking=True)
