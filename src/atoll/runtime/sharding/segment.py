"""One flat buffer of a unit: storage of its parameters, gradients and optimizer weights, and their moves.

[Note: the storages of a segment]

    same dtype for compute and master   one storage at the coarser level of p and os; p and master are views of it
    other dtype, p and os at one level  the master alone; p is cast from it when gathered
    other dtype, other levels           p and master
    frozen                              p alone
    post-validated steps                p and master, whatever their dtypes and levels: p is a step ahead of it

`whole` is what the module's parameters view. Where p rests whole it is that storage itself; elsewhere it is a
transient storage, resized to nothing and back, never exchanged: the views that autograd saved between a forward and
its backward see the data again [Note: stable storage].

[Note: a freed parameter reads NaN] While a unit is freed its parameters show one NaN, expanded to their shape: a read
outside the engine is seen, a write raises, and nothing touches memory that is not there.

[Note: phases] Gradients come out in two phases of a backward: I, through autograd, and W, where the weight gradients
of linear layers are computed. A segment's parameters belong to one phase, so that a pending W holds no gradient
buffer; a shared parameter that this rank uses in both has an accumulator for each, added once a step, so that the sum
does not depend on the order in which a schedule runs I and W.

[Note: copies and residuals] Where parameters rest coarser than the optimizer's state and cross groups with a codec,
they are a copy of the master that follows it: the owner encodes the difference, and all ranks, the owner too, add what
they decode, so copies stay equal and the next difference has what this one lost. What encoded gradients lose is the
residual of the rank that encoded them, as large as its part at level I. Its blocks for other ranks are those of a
reduction, its own block is that of the all-gather that may follow. A step that is not taken clears it. Gradients are
encoded times the loss scale; residuals are divided by it, so they outlive a change of the scale or of the precision.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from functools import partial
from typing import Any

import torch
from torch import nn

from atoll.base._torch import local_part
from atoll.plans.layouts import (
    GATHER_PARAMETER,
    REDUCE_GRADIENT,
    SYNC_GRADIENT,
    SYNC_PARAMETER,
    Axis,
    FlatMap,
    Kind,
    Level,
    Matrix,
    Move,
    SegmentShape,
    Sharding,
    Stored,
)
from atoll.program import Phase
from atoll.runtime import lanes
from atoll.runtime.models import Weights
from atoll.runtime.sharding import coding
from atoll.runtime.sharding.room import Room
from atoll.runtime.sharding.tensors import Spread, box_of, lay_in, part_of, split_dim, whole_of
from atoll.runtime.transport import Channel, Peers, Tag, Transport

# One job has at most one move of each kind along each axis, so its own messages differ in the channel. NCCL ignores
# tags: there messages match by the order of launches, which is the program's, the same on all ranks of a collective.
_CHANNEL: Mapping[tuple[Kind, Axis], Channel] = {
    (Kind.GATHER, Axis.INTRA): Channel.GATHER_INTRA,
    (Kind.GATHER, Axis.INTER): Channel.GATHER_INTER,
    (Kind.REDUCE, Axis.INTRA): Channel.REDUCE_INTRA,
    (Kind.REDUCE, Axis.INTER): Channel.REDUCE_INTER,
}

_AT_A_TIME = 1 << 14
"""Elements that are squared and summed in one dtype: they stay in the cache, and so few lose nothing that counts."""

_SAFE = (1e-20, 1e30)
"""Between these a sum of squares in fp32 has neither overflowed nor lost what is small."""


class State(Enum):
    """State of a segment's gathered copy. A segment stored in full is always WHOLE.

        FREED --begin_gather--> COMING --gather--> WHOLE --free--> FREED
        FREED ----------------gather-------------> WHOLE
        COMING or WHOLE --drop--> FREED            where a row is played again from its beginning

    FREED: the parameters read NaN.  COMING: they still do; a lane writes to the copy, or to what is staged for it.
    WHOLE: they are views of the copy.
    """

    FREED = 0
    COMING = 1
    WHOLE = 2


class _Purpose(IntEnum):
    """Why something travels: two of a unit's may be under way at once, and must not be taken for each other."""

    # A job that runs behind another of its segment begins when this rank has finished the first. Its peers may still
    # receive messages of that one, so the order on one rank does not keep the two apart.
    GATHER = 0  # starts behind the SYNC_PARAMETER before it
    REDUCE = 1  # of both phases: `reduce_gradients` lines them up
    SYNC_GRADIENT = 2  # starts behind the last REDUCE of the step
    SYNC_PARAMETER = 3  # one at a time: the next one first waits for it
    READ = 4  # in no lane: the computing thread runs it


def dtype_of(name: str) -> torch.dtype:
    """Torch's dtype called `name`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """The sum of squares of a 1-D tensor in float64, on its device, right to about seven digits.

    On a GPU squares are added in fp32, `_AT_A_TIME` at a time, in one pass and without a copy: torch's norm in float64
    would first convert all values, 8 bytes for each. As in `clip_grad_norm_`, squares that overflow fp32 give infinity.
    On the CPU torch's norm of another dtype takes six times as long as this: it converts element by element.
    """
    if values.dtype == torch.float64:
        return torch.linalg.vector_norm(values).square()
    if values.is_cuda:
        return _sum_by_rows(values)
    chunks = values.split(_AT_A_TIME)
    if values.dtype == torch.float32:
        total = torch.stack([torch.dot(chunk, chunk) for chunk in chunks]).sum(dtype=torch.float64)
        if _SAFE[0] < float(total) < _SAFE[1]:
            return total
        # NaN fails both comparisons, and the sum in float64 returns it.
    room = torch.empty(min(len(values), _AT_A_TIME), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for chunk in chunks:
        part = room[: len(chunk)].copy_(chunk)
        total += torch.dot(part, part)
    return total


def _sum_by_rows(values: torch.Tensor) -> torch.Tensor:
    """The sum of squares, from one norm in fp32 of every `_AT_A_TIME` elements."""
    whole = len(values) - len(values) % _AT_A_TIME
    rows = values[:whole].view(-1, _AT_A_TIME)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).double().square().sum()
    if whole == len(values):
        return norms
    return norms + torch.linalg.vector_norm(values[whole:], dtype=torch.float32).double().square()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The context of a segment: what it needs from the run.

    lanes: where what travels does so beside the computation.
    weights: where the parameters' first values are read; those that are not there are what the model brings.
    seed, moment: what random bits of codecs follow from.
    """

    sharding: Sharding
    transport: Transport
    device: torch.device
    lanes: Mapping[lanes.Kind, lanes.Lane]
    weights: Weights | None = None
    seed: int = 0
    moment: coding.Moment = field(default_factory=coding.Moment)

    def peers(self, axis: Axis) -> Peers:
        """The ranks along a data-parallel axis that share the layout with this one."""
        place = self.transport.place
        # An island's nest has one group while the mesh has several: along `inter` it has no peers within a step.
        if self.sharding.nest.size(axis) == 1:
            return Peers(axis.value, (place.rank,), 0)
        return Peers.along(axis.value, place)


class Segment:
    """Parameters that share a flat buffer: of one dtype, one trainability, one spread and the same phases.

    phases: those in which this rank computes their gradients; none for frozen parameters.
    permanent: whether the parameters rest whole, so that nothing is gathered.
    keeps_copy, residuals, before: [Note: copies and residuals]; `before` is the copy without a step taken ahead.
    matrices: those that the parameters are made of, where the optimizer transforms them whole.  matrix_owners: which of
    their holders owns each, see `atoll.plans.layouts.Holders`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        around: Surroundings,
        *,
        phases: tuple[Phase, ...],
        tag: tuple[int, int],
        spread: Spread = Spread.SAME,
        is_whole: bool = False,
    ) -> None:
        # Fixed for the life of the engine, up to `_gathers`.
        self.around = around
        self.sharding, self.layout = around.sharding, around.sharding.layout
        # In the order of a backward. The buffer of the first one takes the step's sum, its residual serves the sync.
        self.phases = phases
        # The module's own objects. Gathers and frees change what they show, never the objects, to which modules, ties
        # between modules and autograd's graphs refer.
        self.parameters = dict(parameters)
        self.spread = spread
        # Where this rank's part is in the whole parameter, under tensor parallelism. Files and checkpoints have whole
        # parameters; the map below has parts.
        self.boxes = {name: box_of(parameter) for name, parameter in parameters.items()}
        # The tensors whose `.data` a gather or a free replaces: the parameter, or the local part of a DTensor.
        self._local = {name: local_part(parameter) for name, parameter in parameters.items()}
        named_shapes = ((name, tuple(p.shape)) for name, p in self._local.items())
        # From names, shapes and the number of ranks alone, so that all ranks that share the buffer build the same map.
        self.map = FlatMap.build(named_shapes, self.sharding.nest.ranks)
        # Whole gradients are allocated uninitialized. What no parameter covers must be zeroed: it counts in the norm.
        self._gaps = self.map.gaps
        # True if a reduction would send nothing: microbatches then accumulate in the stored gradients themselves.
        self._accumulates = self.sharding.accumulates
        whole = self.sharding.whole if is_whole else None
        self.matrices: tuple[Matrix, ...] = ()
        # Set by assemble/build.py once all units exist, since the matrices of all of them are dealt together.
        self.matrix_owners: tuple[int, ...] = ()
        if whole is not None:
            tensor = around.transport.place.mesh.tensor
            self.matrices = tuple(
                matrix
                for name, parameter in parameters.items()
                for matrix in whole.matrices_of(name, tuple(parameter.shape), dim=split_dim(parameter), tensor=tensor)
            )
        # (unit, segment of the unit): places in the model, so they name the same buffer on every rank.
        self.tag = tag
        # The moves of a gather along axes with peers. Without any, a gather is a copy or a cast on the device.
        self._gathers = self.sharding.real(GATHER_PARAMETER[self.layout.parameters])
        # What is in flight. A job on a stream keeps none of its buffers once it has been launched. The attributes below
        # keep them until the computation waits for the job: [Note: streams and memory] in runtime/lanes.py.
        # Whether a gather has run since the parameters last changed: the blocks of the others are where it found them.
        self._is_known = False
        # The I-shard between the two moves of a gather, in lent memory: the job sets it, `gather` or `drop` returns it.
        self._staged: torch.Tensor | None = None
        # From `begin_gather` until `gather` or `drop` has waited.
        self._gathering: lanes.Job | None = None
        # In the order in which they began, each with the whole gradients that it works on, which live as long.
        self._reducing: deque[tuple[lanes.Job, torch.Tensor]] = deque()
        # The sync and its buffer, at the coarser level of g and os, until waited for. `final` may keep a view of it.
        self._syncing_gradients: tuple[lanes.Job, torch.Tensor] | None = None
        # Until the parameters are needed: by a gather, whose job starts behind it, or by `settle_parameters`.
        self._syncing_parameters: lanes.Job | None = None
        # The master that the job of a copy encodes; a clone for a step ahead. Lives as long as the job.
        self._spreading: torch.Tensor | None = None
        self.compute = dtype_of(self.sharding.precision.compute)
        self._allocate()
        self._adopt()

    @property
    def trainable(self) -> bool:
        """True if the parameters are trained."""
        return bool(self.phases)

    @property
    def shape(self) -> SegmentShape:
        """The segment's shape for the layouts."""
        compute = self.sharding.precision.compute
        return SegmentShape(self.map, self.phases, compute, matrices=self.matrices, owners=self.matrix_owners)

    def range(self, level: Level) -> range:
        """Elements of the flat buffer that this rank holds at `level`."""
        return self.sharding.nest.range(level, self.map.padded)

    # ---- storages

    def _allocate(self) -> None:
        device, precision = self.around.device, self.sharding.precision
        p, g, os = self.layout.parameters, self.layout.gradients, self.layout.optimizer
        master_dtype = dtype_of(precision.master)
        # What the other ranks of the group read where it rests: before a gather, and before a reduction of gradients.
        # All of it is allocated here: `Transport.share` maps the memory once, and none that is allocated later.
        #     p at I, or at G of one group    each gather reads the stored shard
        #     p at G of several groups        each gather reads what its move along inter has staged
        #     p at N, os finer                the sync after a step reads each rank's part
        #     g at N                          the sync before a step reads the gradients
        is_last_part = p is Level.I or (p is Level.G and self.sharding.nest.inter == 1)
        p_is_read, g_is_read = is_last_part or (p is Level.N and os is not p), g is Level.N
        # p between steps, at its level. Gathers read it, syncs write it. None where p is cast from the master.
        self.rest: torch.Tensor | None = None
        # At the level of os. The optimizer steps views of it, so it is never moved or replaced. None if frozen.
        self.master: torch.Tensor | None = None
        match self.sharding.stored(self.shape):
            case Stored.ALONE:
                self.rest = self._zeros(p, self.compute, is_read=is_last_part)
            case Stored.SHARED:
                coarse = min(p, os)
                # One of the two views is the whole storage: the optimizer writes p in place, and a sync only sends it.
                store = self._zeros(coarse, master_dtype, is_read=p_is_read)
                self.rest = self._part(store, coarse, p)
                self.master = self._part(store, coarse, os)
            case Stored.CAST:
                self.master = self._zeros(os, master_dtype, is_read=p_is_read)
            case Stored.APART:
                self.master = self._zeros(os, master_dtype, is_read=False)
                self.rest = self._zeros(p, self.compute, is_read=p_is_read)
        self.keeps_copy = self.sharding.keeps_copy(self.shape)
        # Valid while `_is_ahead`. Adding a decoded difference and subtracting it would not restore the copy's bits.
        self.before: torch.Tensor | None = None
        if self.keeps_copy and self.sharding.keeps_apart:
            assert self.rest is not None, "a copy rests"
            self.before = torch.empty_like(self.rest)
        # Whether the copy has a step that is neither confirmed nor taken back.
        self._is_ahead = False
        # phase -> residual of its encoded messages, without the loss scale. Jobs add it to later messages; no other
        # rank reads it. A step that is not taken clears it, since gradients that are not finite leave NaN in it.
        self.residuals = {
            phase: self._zeros(Level.I, master_dtype, is_read=False) for phase in self.sharding.owing(self.shape)
        }
        # Reductions of each phase in this step, so that a codec's random bits differ from microbatch to microbatch.
        self._reductions: Counter[Phase] = Counter()
        self.permanent = self.sharding.rests_whole(self.shape)
        # One storage object for the life of the segment, whose size alone changes: [Note: stable storage].
        if self.permanent:
            assert self.rest is not None
            self.whole = self.rest
        else:
            self.whole = torch.empty(self.map.padded, dtype=self.compute, device=device)
        # `_adopt` fills it. The builder frees the unit before the first use, so the first forward gathers.
        self.state = State.WHOLE
        # Made once, while there is memory behind them. They refer to the storage: each gather makes them valid again.
        self._views = self._views_of(self.whole)
        # What freed parameters show: [Note: a freed parameter reads NaN].
        self._absent = torch.full((), torch.nan, dtype=self.compute, device=device)
        # phase -> whole gradients, from the first `room` after a reduction to the next reduction, which takes them.
        self.flows: dict[Phase, torch.Tensor] = {}
        # Their views, as short-lived; or views of the stored gradients, for good, where nothing is reduced.
        self._flow_views: dict[Phase, dict[str, torch.Tensor]] = {}
        # Names that `room` was asked for since the last reduction. The memory of all others is uninitialized.
        self._written: dict[Phase, set[str]] = {phase: set() for phase in self.phases}
        # Phases whose stored gradients are of this step: the first reduction overwrites, later ones add. Only jobs add
        # to it, one behind the other; it is cleared when none is in flight.
        self._resting: set[Phase] = set()
        # The step's gradients at the level of os, from the sync to `clear_gradients`: with a post-validated step until
        # the verdict, in the next program. May be a view of stored gradients, which others may read in place.
        self.final: torch.Tensor | None = None
        dtype = dtype_of(precision.gradient)
        # phase -> stored gradients, at level g. Between steps they have no memory, unless they are whole.
        self.gradients = {phase: self._zeros(g, dtype, is_read=g_is_read) for phase in self.phases}
        if self._accumulates:
            # Before the storages are freed: views are made of memory that is there, and stay valid.
            self._flow_views = {phase: self._views_of(resting) for phase, resting in self.gradients.items()}
        self._give_gradients_back()

    def _give_gradients_back(self) -> None:
        """Free sharded gradients between steps, so that a forward can use their memory. Those
        that are stored whole are read by others in place, and stay."""
        if self.layout.gradients is not Level.N:
            for resting in self.gradients.values():
                resting.untyped_storage().resize_(0)

    def _resting_gradient(self, phase: Phase) -> torch.Tensor:
        """Return the buffer that stores a phase's gradients; uninitialized if it is new.

        The computation calls it before a job that needs it: see [Note: streams and memory] in runtime/lanes.py.
        """
        resting = self.gradients[phase]
        if resting.untyped_storage().nbytes() == 0:
            resting.untyped_storage().resize_(resting.nbytes)
        return resting

    def _zeros(self, level: Level, dtype: torch.dtype, *, is_read: bool) -> torch.Tensor:
        """Allocate zeros for the part stored at `level`."""
        numel = len(self.range(level))
        # Zeros because nothing ever writes the gaps, and gathers, codecs and comparisons of replicas read them.
        if is_read:
            return self.around.transport.allocate(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=self.around.device)

    def _views_of(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters' parts of a whole buffer, in their shapes."""
        return {entry.name: whole.narrow(0, entry.offset, entry.numel).view(entry.shape) for entry in self.map.entries}

    def _part(self, held: torch.Tensor, held_level: Level, level: Level) -> torch.Tensor:
        """The rank's part at `level` of a buffer that rests at the coarser `held_level`."""
        outer, inner = self.range(held_level), self.range(level)
        return held.narrow(0, inner.start - outer.start, len(inner))

    def _adopt(self) -> None:
        """Copy the first values to where they are stored, and make the parameters permanent views of the whole
        buffer."""
        weights = self.around.weights
        with torch.no_grad():
            for name, local in self._local.items():
                # A file's values are read by `_keep` alone: into `rest`, which is `whole` where it is permanent.
                if weights is None or name not in weights:
                    self._views[name].copy_(local)
            # Before the parameters become views: `_local` still has the values at full precision, the views do not.
            if self.master is not None:
                self._keep(self.master, self.layout.optimizer)
            if self.rest is not None:
                self._keep(self.rest, self.layout.parameters)
            for name, parameter in self.parameters.items():
                lay_in(parameter, self._views[name])
                self._local[name] = local_part(parameter)  # a DTensor has a new one

    def _keep(self, target: torch.Tensor, level: Level) -> None:
        """Fill a permanent buffer from the parameters' first values, at their full precision."""
        weights = self.around.weights
        for part in self.map.slices(self.range(level)):
            place = target.narrow(0, part.offset, part.stop - part.start)
            if weights is not None and part.name in weights:
                weights.read_into(place, part.name, self.boxes[part.name], start=part.start, stop=part.stop)
            else:
                place.copy_(self._local[part.name].detach().reshape(-1)[part.start : part.stop])

    # ---- parameters
    #
    # [Note: a gather on two streams] What the host launches, from left to right. e0 is the end of the last sync of
    # parameters, if that is in flight.
    #
    #     host      GATHER u     F of t      WHOLE u    F of u      FREE u    GATHER v
    #     compute   record e1    kernels t   wait e2    kernels u             record e3
    #     lane      wait e1, e0, all-gather inter, all-gather intra, record e2          wait e3, all-gather inter, ...
    #     memory    of u taken                                      returned  of v taken
    #
    # The memory is the compute stream's: the host takes it from that stream's pool and returns it there.
    #     e1   the all-gather writes after every kernel that was launched before GATHER u. Some of them may read this
    #          memory as the copy of a unit that has been freed since.
    #     e2   kernels u read after the all-gather has written.
    #     e3   does for v what e1 does for u: v may get the memory of u, which kernels u still read. So FREE waits for
    #          nothing and records nothing. Without e3 the all-gather of v could overwrite weights that F of u reads.
    # Where the lane is threads, GATHER queues a job and WHOLE waits for it; on a GPU its stream has the same events.

    @property
    def _stages(self) -> bool:
        """True if the first of a gather's two moves writes to memory that the other ranks then read in place."""
        moves = self._gathers
        return len(moves) > 1 and self.around.transport.sees(self.around.peers(moves[1].axis))

    def begin_gather(self) -> None:
        """Begin to make the parameters whole."""
        if self.permanent:
            return
        assert self.state is State.FREED, "a program gathers what is not there"
        # With staging the job makes the first move only. `gather` makes the second, into memory that it takes then: it
        # is a copy on the CPU, which beside the computation would slow that down.
        if not self._stages:
            self._make_room()
        # After the previous step's parameter sync: until it ends, the sharded parameters are stale. A gather may
        # wait for a sync and never the reverse, so the lanes cannot wait for each other (`KINDS` in runtime/lanes.py).
        self._gathering = self.start("gather", self._bring, after=self._syncing_parameters)
        self.state = State.COMING

    def gather(self) -> None:
        """Make the parameters whole, and up to date: wait for what was begun, or gather them here."""
        if self.state is State.WHOLE:
            self.settle_parameters()
            return
        with torch.no_grad():
            if self._gathering is not None:
                self._gathering.wait()
                self._gathering = None
            else:
                # FETCH: here, on the computing thread and its stream, which wait for the sync and for no other job.
                self.around.lanes["gather"].do(self._bring, unit=self.tag[0], after=self._syncing_parameters)
            self._syncing_parameters = self._spreading = None  # the gather was behind the job that read it
            # The peers read this rank's staged shard in place. It is lent again once all of them have set their byte.
            if self._staged is not None:
                self._fill(GATHER_PARAMETER[Level.I], self._staged)
                self.around.transport.give_back(self._staged)
                self._staged = None
        # Not before the copy is complete: until now a read has shown NaN.
        for name, local in self._local.items():
            local.data = self._views[name]
        self.state = State.WHOLE

    def _bring(self) -> None:
        """Run the part of a gather that sends messages: all of it, or the first of two moves."""
        own = self.rest if self.rest is not None else self.master
        assert own is not None, "every segment keeps its parameters somewhere"
        if self._stages:
            self._staged = self.around.transport.lend(len(self.range(Level.I)), self.compute)
        if self._staged is not None:
            self._gather(self._staged, self._gathers[0], own=own)
        else:  # one move; or both, if nothing could be lent since others still read what was lent before
            self._fill(self._gathers, own)

    def _fill(self, moves: Sequence[Move], own: torch.Tensor) -> None:
        """Make the whole copy by `moves`, from where this rank's part is."""
        self._make_room()  # on a GPU a job finds it made: see `begin_gather`
        # The first gather after an update waits for a message of each owner, which says that its block is up to date.
        # Until the next update, blocks in shared permanent memory are then read without one.
        again, self._is_known = self._is_known, True
        if not moves:
            self._part(self.whole, Level.N, self.layout.parameters).copy_(own)
        for at, move in enumerate(moves):
            buffer = self._part(self.whole, Level.N, move.coarse)
            self._gather(buffer, move, own=own if at == 0 else None, again=again)

    def _gather(self, buffer: torch.Tensor, move: Move, *, own: torch.Tensor | None, again: bool = False) -> None:
        """All-gather parameters along an axis. Between groups they may be encoded; they are rounded to nearest, so that
        forward and backward use the same."""
        codec = self.sharding.codec("parameter", move)
        if codec is None:
            self._move(buffer, move, _Purpose.GATHER, own=own, again=again)
            return
        assert own is not None, "parameters cross groups before they are gathered inside them"
        nearest = replace(codec, rounding="nearest")
        self._code(partial(coding.gather, nearest, own.to(buffer.dtype), buffer), move, _Purpose.GATHER)

    def _make_room(self) -> None:
        """Room for the whole copy, on a GPU taken and given back by the computation's stream, never by a lane's: see
        [Note: streams and memory] in runtime/lanes.py."""
        if self.whole.untyped_storage().nbytes() == 0:
            self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.itemsize)

    def free(self) -> None:
        """Free the whole copy."""
        if self.permanent or self.state is not State.WHOLE:
            return  # a copy that is COMING stays, since a lane writes to it: `drop` waits, and then frees
        # Before the storage goes: who reads a parameter now sees NaN, and not memory that is not there.
        for name, local in self._local.items():
            local.data = self._absent.expand(self._views[name].shape)
        self.whole.untyped_storage().resize_(0)
        self.state = State.FREED

    def drop(self) -> None:
        """Free a copy that is whole or in flight."""
        if self._gathering is not None:
            self._gathering.wait()  # a lane still writes to it
            self._gathering = None
            if self._staged is None:
                self.whole.untyped_storage().resize_(0)
            else:  # the second move, which tells the peers where to read, has not begun: no byte of theirs is to come
                self.around.transport.give_back(self._staged, was_read=False)
                self._staged = None
            self.state = State.FREED
        self.free()

    def sync_parameters(self, *, is_ahead: bool = False, is_exact: bool = False) -> None:
        """Begin to bring what the optimizer wrote to where the parameters rest; `gather` waits for it.

        A copy that was gathered before is given back: it is out of date.

        is_ahead: before the verdict on the step, so that it may be taken back.
        is_exact: without a codec, after masters were written from outside.
        """
        self.forget_gathered()
        if self.master is None or self.rest is None:
            return  # frozen, or cast from the master by the next gather
        p, os = self.layout.parameters, self.layout.optimizer
        master = self.master
        if self.keeps_copy and not is_exact:
            if is_ahead:
                self._begin_ahead()
                master = master.clone()  # the optimizer's is put back at once
            self._spreading = master  # kept until the job has been waited for, whose stream reads it
            self._syncing_parameters = self.start("sync", self._follow, after=None)
            return
        # Here and not in the job: after a step ahead the optimizer puts the old master back as soon as this returns.
        self._is_ahead = False
        with torch.no_grad():
            if self.shares:
                pass
            elif p < os:  # this rank's part; the job gathers the others'
                self._part(self.rest, p, os).copy_(master)
            else:
                self.rest.copy_(self._part(master, os, p))
        if SYNC_PARAMETER[os, p]:
            self._syncing_parameters = self.start("sync", self._spread, after=None)

    def take_back(self, *, was_taken: bool) -> None:
        """Bring right parameters to where they rest, where a step ahead may have written wrong ones.

        was_taken: whether the optimizer has stepped after all.
        """
        if not self.keeps_copy:  # p is a cast of the master, and the master is right: a step ahead has put it back
            self.sync_parameters()
            return
        # A copy does not follow from the master alone, but from all differences so far: it has to be put back.
        self.forget_gathered()
        self._go_back()
        if was_taken:
            self.sync_parameters()

    def confirm(self) -> None:
        """The step ahead was right."""
        self._is_ahead = False

    def forget_gathered(self) -> None:
        """Give back what was gathered: the parameters change where they rest."""
        self.drop()
        self._is_known = False
        self.settle_parameters()

    def _begin_ahead(self) -> None:
        """Keep the copy as it is without the step, or return to it if the step was taken ahead before."""
        assert self.rest is not None, "a copy rests"
        assert self.before is not None, "post-validated steps keep the copy before"
        if self._is_ahead:  # CORRECT steps a unit a second time
            self._go_back()
        self.before.copy_(self.rest)
        self._is_ahead = True

    def _go_back(self) -> None:
        if self._is_ahead:
            assert self.rest is not None, "a copy rests"
            assert self.before is not None, "a step was taken ahead"
            self.rest.copy_(self.before)
            self._is_ahead = False

    def _spread(self) -> None:
        assert self.rest is not None, "parameters that rest nowhere are not synced"
        p, os = self.layout.parameters, self.layout.optimizer
        for move in SYNC_PARAMETER[os, p]:
            self._move(self._part(self.rest, p, move.coarse), move, _Purpose.SYNC_PARAMETER)

    def _follow(self) -> None:
        """Let the copies follow the master: [Note: copies and residuals]."""
        assert self.rest is not None, "a copy rests"
        assert self._spreading is not None, "it follows a master"
        p, os = self.layout.parameters, self.layout.optimizer
        for move in SYNC_PARAMETER[os, p]:
            buffer = self._part(self.rest, p, move.coarse)
            codec = self.sharding.codec("parameter", move)
            if codec is None:
                self._move(buffer, move, _Purpose.SYNC_PARAMETER)
                continue
            # An encoded move goes along inter, so it is the first: the copy's own part is still that of the last step.
            dtype = coding.wide(self._spreading.dtype)
            difference = self._spreading.to(dtype) - self._part(self.rest, p, os).to(dtype)
            nearest = replace(codec, rounding="nearest")
            act = partial(coding.gather, nearest, difference, buffer)
            self._code(act, move, _Purpose.SYNC_PARAMETER, adds=True)

    def settle_parameters(self) -> None:
        """Wait until the parameters are up to date where they rest."""
        if self._syncing_parameters is not None:
            self._syncing_parameters.wait()
            self._syncing_parameters = None
            self._spreading = None

    # ---- gradients
    #
    # [Note: a reduction over two levels] The whole gradients of rank (i, j) = (1, 0), of 2 groups of 2 ranks, g at G:
    #
    #     blocks of the buffer    0   1   2   3
    #     written by I or W       a   a   a   a    this rank's; zeros where it has written nothing
    #     reduce-scatter intra    b   b   .   .    I-shard j: the sums of its group
    #     reduce-scatter inter    .   c   .   .    G-shard (i, j), block j * 2 + i: the sums of all ranks
    #     `gradients`                 c            written by the first reduction of a step, added by later ones
    #
    # A dot is undefined: both moves work in the buffer itself. While a reduction is in flight, the gradients of the
    # next unit are computed; its own whole gradients are freed before those of the unit after that are made:
    #
    #     compute   I of u   REDUCE u   I of v   REDUCE v   REDUCED u   I of w   REDUCE w   REDUCED v
    #     lane               |------ intra u, inter u ------|---- intra v, inter v ---------|-- intra w ...
    #     flows     u        u          u, v     u, v       v           v, w     v, w       w
    #
    # REDUCED waits for the job (on a GPU the compute stream waits for its event), so the memory of u can serve w. Where
    # the lane is two threads, v can go along intra while u still goes along inter. With `prefetch` = 0, REDUCED follows
    # REDUCE at once.

    def room(self, name: str, phase: Phase) -> Room:
        """Return the buffer for the gradient of `name` in a phase. The caller must write to it."""
        self._open_flow(phase)
        written = self._written[phase]
        is_empty = name not in written
        written.add(name)
        return Room(self._flow_views[phase][name], is_empty)

    def gradient(self, name: str, phase: Phase) -> torch.Tensor | None:
        """Return the gradient written to `room`, or None if it was not requested since the last reduction."""
        return self._flow_views[phase][name] if name in self._written.get(phase, ()) else None

    def _open_flow(self, phase: Phase) -> None:
        """Allocate the whole buffer in which a phase accumulates, uninitialized, unless it is there."""
        if self._accumulates:
            self._resting_gradient(phase)
        elif phase not in self._flow_views:
            resting = self.gradients[phase]
            # Lent, so that the group reads it in place; None where nothing is shared, or nothing is free in time.
            flow = self.around.transport.lend(self.map.padded, resting.dtype)
            if flow is None:
                flow = torch.empty(self.map.padded, dtype=resting.dtype, device=resting.device)
            self.flows[phase] = flow
            self._flow_views[phase] = self._views_of(flow)

    def _complete(self, phase: Phase, whole: torch.Tensor) -> None:
        """Write zeros where nothing was written, including the padding."""
        written = self._written[phase]
        if not written:
            whole.zero_()
        else:
            for entry in self.map.entries:
                if entry.name not in written:
                    whole.narrow(0, entry.offset, entry.numel).zero_()
            for gap in self._gaps:
                whole.narrow(0, gap.start, len(gap)).zero_()
        written.clear()

    def reduce_gradients(self, phase: Phase) -> None:
        """Begin to reduce a phase's gradients to where they rest; `end_reduction` gives their whole buffer back."""
        if phase not in self.phases or self._accumulates:
            return
        # Also if nothing was written: other ranks' microbatches may have used the parameters, and all take part.
        self._open_flow(phase)
        # From here on the flow is the job's: the next `room` of this phase opens another one.
        flow = self.flows.pop(phase)
        del self._flow_views[phase]
        self._complete(phase, flow)
        self._resting_gradient(phase)  # here and not in the job: the computation frees it
        # Behind the one before: their tags are the same.
        after = self._reducing[-1][0] if self._reducing else None
        job = self.start("reduce", partial(self._reduce, phase, flow), after=after)
        # On a GPU the job only has been launched: what it works on is held until the computation waits for it, see
        # [Note: streams and memory] in runtime/lanes.py.
        self._reducing.append((job, flow))

    def end_reduction(self, phase: Phase) -> None:
        """Wait for the first reduction of a phase that is under way."""
        # A program waits for reductions in the order in which it began them, so the first one is of this phase.
        # On a GPU its flow returns to the compute stream's pool just before that stream waits for the job. Nothing is
        # allocated in between.
        if phase in self.phases and self._reducing:
            self._reducing.popleft()[0].wait()

    def _reduce(self, phase: Phase, flow: torch.Tensor) -> None:
        level = self.layout.gradients
        total = flow.to(dtype_of(self.sharding.precision.reduce))  # the flow itself if dtypes are equal
        moves = self.sharding.real(REDUCE_GRADIENT[level])
        # Counted in the job: those of a segment run in the order of its microbatches, whatever the timing of others is.
        what = f"{phase}.{self._reductions[phase]}"
        self._reductions[phase] += 1
        for move in moves:
            self._bring_gradients(
                self._part(total, Level.N, move.coarse), move, _Purpose.REDUCE, phase=phase, what=what
            )
        Room(self.gradients[phase], is_empty=phase not in self._resting).add(self._part(total, Level.N, level))
        self._resting.add(phase)
        # Lent memory is free once every rank of the group has said so; any other is freed when `_reducing` drops it.
        self.around.transport.give_back(flow, was_read=bool(moves))

    def sync_gradients(self) -> None:
        """Begin to turn the accumulated gradients into `final`, the optimizer's, at the level of os."""
        if self.trainable and self._syncing_gradients is None:
            # On the computing thread, before the job: a phase that no reduction has opened gets its memory here.
            for phase in self.phases:
                resting = self._resting_gradient(phase)
                if self._accumulates:
                    self._complete(phase, resting)
            g, os = self.layout.gradients, self.layout.optimizer
            # What the optimizer reads outlives the job, so it is allocated here; nothing of it is written before.
            resting = self.gradients[self.phases[0]]
            coarse = min(g, os)
            wide = resting if self.sharding.nest.is_same(coarse, g) else resting.new_empty(len(self.range(coarse)))
            final = torch.empty_like(self._part(wide, coarse, os)) if self.spread is Spread.SUMMED else None
            # Behind the last reduction, and so behind all: each runs behind the one before.
            after = self._reducing[-1][0] if self._reducing else None
            self._syncing_gradients = self.start("sync", partial(self._sync, wide, final), after=after), wide

    def settle_gradients(self) -> None:
        """Wait until `final` is there."""
        # Begins what no SYNC has begun. A program calls it once a step: a second call would add the phases up again.
        self.sync_gradients()
        if self._syncing_gradients is not None:
            self._syncing_gradients[0].wait()
        self._syncing_gradients = None
        self._reducing.clear()  # the sync has waited for them

    def _sync(self, buffer: torch.Tensor, final: torch.Tensor | None) -> None:
        """Sum the phases, and bring the sum to the optimizer's level.

        buffer: of the coarser level of g and os: what rests, or uninitialized.  final: uninitialized, for the sum over
        the tensor-parallel ranks, if there is one.
        """
        g, os = self.layout.gradients, self.layout.optimizer
        if not self._accumulates:
            for phase in self.phases:
                if phase not in self._resting:
                    self.gradients[phase].zero_()
        # Phases are added here and not by microbatch, so the sum does not depend on a schedule's order of I and W.
        resting, *others = (self.gradients[phase] for phase in self.phases)
        for other in others:
            resting.add_(other)
        coarse = min(g, os)
        if buffer is not resting:
            buffer.zero_()
            self._part(buffer, coarse, g).copy_(resting)
        for move in SYNC_GRADIENT[g, os]:
            part, what = self._part(buffer, coarse, move.coarse), "sync" if move.kind is Kind.REDUCE else "gather"
            self._bring_gradients(part, move, _Purpose.SYNC_GRADIENT, phase=self.phases[0], what=what)
        self.final = self._part(buffer, coarse, os)
        if final is not None:
            self.final = final.copy_(self.final)  # what rests may be read by others
            self.around.transport.total_along(self.final, "tp", Tag(Channel.SUM_TENSOR, *self.tag))

    def _bring_gradients(self, buffer: torch.Tensor, move: Move, purpose: _Purpose, *, phase: Phase, what: str) -> None:
        """Move gradients, encoded where the move has a codec. what: as `coding.noise_seed` has it."""
        codec = self.sharding.codec("gradient", move)
        if codec is None:
            self._move(buffer, move, purpose)
            return
        peers, nest, residual = self.around.peers(move.axis), self.sharding.nest, self.residuals.get(phase)
        # Read when the job runs. Scale and step change between programs, and the scale at TAKE_BACK, before a step's
        # first backward: by then the step before has settled all its gradients.
        scale = self.around.moment.scale
        each = buffer.numel() // nest.size(move.axis)
        rank = nest.i * nest.intra + nest.j

        def noise(to: int) -> torch.Tensor | None:
            seed = coding.noise_seed(self.around.seed, self.around.moment.step, *self.tag, what=what, rank=rank, to=to)
            return coding.draw(codec, each, seed, device=buffer.device)

        # The buffer of a move along inter and the residual are both I-shards, so their blocks match. A reduction
        # encodes the blocks of other groups, a gather the own block: no element of a residual serves both.
        if move.kind is Kind.REDUCE:
            act = partial(coding.reduce, codec, buffer, scale=scale)
            self._code(act, move, purpose, noise=noise, residual=residual)
        else:
            own, lost = peers.own(buffer), None if residual is None else peers.own(residual)
            act = partial(coding.gather, codec, own, buffer, scale=scale)
            self._code(act, move, purpose, noise=noise(peers.index), residual=lost)

    def clear_residuals(self) -> None:
        """Forget what encoded gradients lacked."""
        for residual in self.residuals.values():
            residual.zero_()

    def clear_gradients(self) -> None:
        """Discard the step's gradients: stored ones are overwritten, others are freed."""
        # The optimizer's slices have dropped their gradients, which may be views of this memory.
        self._resting.clear()
        self._reductions.clear()
        self._give_gradients_back()
        for phase, flow in self.flows.items():
            del self._flow_views[phase]
            self.around.transport.give_back(flow, was_read=False)
        self.flows.clear()
        for written in self._written.values():
            written.clear()
        self.final = None

    def squared_norm(self) -> torch.Tensor:
        """Sum of squares, in float64 and still on the device, of the gradients that this rank alone accounts for.

        Where several ranks hold the same gradients each accounts for its part at G: were it one of them for all, the
        others would wait for it at the step's end.
        """
        if self.final is None or (self.spread is not Spread.SPLIT and self.around.transport.place.tp != 0):
            return torch.zeros((), dtype=torch.float64, device=self.around.device)
        return sum_of_squares(self._part(self.final, self.layout.optimizer, Level.G))

    # ---- reads and edits

    def read_values(self) -> dict[str, torch.Tensor]:
        """Return whole values by name, as new tensors: of the masters, or of the stored parameters if they are
        frozen."""
        if self.master is not None:
            return self._read(self.master, self.layout.optimizer)
        assert self.rest is not None, "what is frozen rests somewhere"
        return self._read(self.rest, self.layout.parameters)

    def read_gradients(self) -> dict[str, torch.Tensor]:
        """Return the step's whole gradients by name, as new tensors."""
        assert self.final is not None, "asked only between a step's gradients and its update"
        return self._read(self.final, self.layout.optimizer)

    def _read(self, own: torch.Tensor, level: Level) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            # A buffer of its own, in the dtype of what is read: `whole` has that of the forward, and may be freed.
            whole = torch.empty(self.map.padded, dtype=own.dtype, device=own.device)
            self._part(whole, Level.N, level).copy_(own)
            for move in GATHER_PARAMETER[level]:
                self._move(self._part(whole, Level.N, move.coarse), move, _Purpose.READ)
            views = self._views_of(whole)
            return {name: whole_of(self.parameters[name], view) for name, view in views.items()}

    def write_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write whole values to where they rest, and to every copy."""
        layout = self.layout
        target, level = (self.rest, layout.parameters) if self.master is None else (self.master, layout.optimizer)
        assert target is not None, "every segment keeps its parameters somewhere"
        self.settle_parameters()  # a sync in flight may read what is written here
        with torch.no_grad():
            for part in self.map.slices(self.range(level)):
                if part.name in values:
                    own = part_of(values[part.name].detach(), self.boxes[part.name])
                    source = own.reshape(-1)[part.start : part.stop]
                    target.narrow(0, part.offset, part.stop - part.start).copy_(source)
        self.sync_parameters(is_exact=True)

    # ----

    def start(self, kind: lanes.Kind, work: Callable[[], None], *, after: lanes.Job | None) -> lanes.Job:
        """Begin work on this segment in a lane, behind another job."""
        return self.around.lanes[kind].start(work, unit=self.tag[0], after=after)

    def _move(self, buffer: torch.Tensor, move: Move, purpose: _Purpose, **options: Any) -> None:
        """Move a buffer of the move's coarse level; `options` as the transport's `gather` and `reduce` have them."""
        act = self.around.transport.gather if move.kind is Kind.GATHER else self.around.transport.reduce
        act(buffer, self.around.peers(move.axis), self._tag_of(move, purpose), **options)

    def _code(self, act: Callable[..., None], move: Move, purpose: _Purpose, **options: Any) -> None:
        """Run a move of `coding`, given its codec and buffers."""
        tag, peers = self._tag_of(move, purpose), self.around.peers(move.axis)
        act(peers=peers, tag=tag, transport=self.around.transport, **options)

    def _tag_of(self, move: Move, purpose: _Purpose) -> Tag:
        # Unit, segment and purpose: a segment has one job of a purpose in flight, or several that run one behind the
        # other. Outer steps gather with the same channel, but their parts count down from `Tag.LAST`.
        index, part = self.tag
        return Tag(_CHANNEL[move.kind, move.axis], index, part * len(_Purpose) + purpose)

    @property
    def shares(self) -> bool:
        """True if p and master are views of one storage."""
        return (
            self.rest is not None
            and self.master is not None
            and self.rest.untyped_storage().data_ptr() == self.master.untyped_storage().data_ptr()
        )

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Tensors whose storages this segment holds, by component; the optimizer's states are not among them."""
        own: dict[str, list[torch.Tensor | None]] = {
            "parameters": [self.rest, self.before] if self.permanent else [self.rest, self.before, self.whole],
            "gradients": [*self.gradients.values(), *self.flows.values()],
            "optimizer": [*self.residuals.values(), *([] if self.shares else [self.master])],
        }
        return {component: [t for t in tensors if t is not None] for component, tensors in own.items()}
