"""The gradients of one segment: unsharded while a microbatch writes them, sharded at level g, then the optimizer's.

[Note: a reduction over two levels] The unsharded gradients of rank (i, j) = (1, 0), of 2 groups of 2 ranks, g at G:

    blocks of the buffer    0   1   2   3
    written by I or W       a   a   a   a    this rank's; zeros where it has written nothing
    reduce-scatter intra    b   b   .   .    I-shard j: the sums of its group
    reduce-scatter inter    .   c   .   .    G-shard (i, j), block j * 2 + i: the sums of all ranks
    `shards`                    c            written by the first reduction of a step, added by later ones

A dot is undefined: both moves work in the buffer itself. While a reduction is in flight, the gradients of the next unit
are computed; its own unsharded gradients are freed before those of the unit after that are allocated:

    compute     I of u   REDUCE u   I of v   REDUCE v   REDUCED u   I of w   REDUCE w   REDUCED v
    lane                 |------ intra u, inter u ------|---- intra v, inter v ---------|-- intra w ...
    unsharded   u        u          u, v     u, v       v           v, w     v, w       w

REDUCED waits for the job (on a GPU the compute stream waits for its event), so the memory of u can serve w. Where the
lane is two threads, v can go along intra while u still goes along inter. With `prefetch` = 0, REDUCED follows REDUCE at
once.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial

import torch

from atoll.plans.layouts import REDUCE_GRADIENT, SYNC_GRADIENT, Axis, Level, Move, MoveKind
from atoll.plans.layouts.resting import final_is_part
from atoll.program import Phase
from atoll.runtime import lanes
from atoll.runtime.sharding import coding
from atoll.runtime.sharding.collectives import Collectives, Purpose
from atoll.runtime.sharding.flat_group import FlatGroup
from atoll.runtime.sharding.gradient_buffer import GradientBuffer
from atoll.runtime.sharding.hosted import begin_copy, host_zeros
from atoll.runtime.sharding.norm import sum_of_squares
from atoll.runtime.sharding.tensors import Spread, dtype_of
from atoll.runtime.transport import Channel, Tag


class Gradients:
    """The gradients of a segment's parameters; of frozen ones there are none, and every call does nothing.

    A step calls `buffer` and `begin_reduction` for each microbatch, `begin_sync` once, and `clear` at its end.
    """

    def __init__(self, flat: FlatGroup, collectives: Collectives) -> None:
        self._flat, self._collectives = flat, collectives
        sharding, precision, g = flat.sharding, flat.sharding.precision, flat.layout.gradients
        # Unsharded gradients are allocated uninitialized. What no parameter covers must be zeroed: it counts in the
        # norm.
        self._gaps = flat.map.gaps
        # True if a reduction would send nothing: microbatches then accumulate in the shards themselves.
        self._accumulates = sharding.accumulates
        # phase -> residual of its encoded messages, without the loss scale. Jobs add it to later messages; no other
        # rank reads it. A step that is not applied clears it, since gradients that are not finite leave NaN in it.
        self.residuals = {
            phase: flat.zeros(Level.I, dtype_of(precision.master), is_read=False)
            for phase in sharding.owing(flat.shape)
        }
        # Reductions of each phase in this step, so that a codec's random bits differ from microbatch to microbatch.
        self._reductions: Counter[Phase] = Counter()
        # phase -> unsharded gradients, from the first `buffer` after a reduction to the next reduction, which takes
        # them: from then on they are in `reducing`.
        self.unsharded: dict[Phase, torch.Tensor] = {}
        # Their views, as short-lived; or views of the shards, for good, where nothing is reduced.
        self._views: dict[Phase, dict[str, torch.Tensor]] = {}
        # Names that `buffer` was asked for since the last reduction. The memory of all others is uninitialized.
        self._written: dict[Phase, set[str]] = {phase: set() for phase in flat.phases}
        # Phases whose shards have gradients of this step: the first reduction overwrites, later ones add. Only jobs add
        # to it, one behind the other; it is cleared when none is in flight.
        self._filled: set[Phase] = set()
        # Reductions in flight in the order in which they began, each with the unsharded gradients that it works on. A
        # job on a stream keeps no buffer once it has been launched: this does until the computation has waited for it,
        # see [Note: streams and memory] in runtime/lanes.py.
        self.reducing: deque[tuple[lanes.Job, torch.Tensor]] = deque()
        # The sync and its buffer, at the coarser level of g and os, until waited for. `final` may keep a view of it.
        self.syncing: tuple[lanes.Job, torch.Tensor] | None = None
        # What `final` in host memory is to be multiplied with, from `note_squares` to the next one.
        self.factor = 1.0
        # The optimizer's, at the level of os, from the sync to `clear`: with a post-validated step until the verdict,
        # in the next program. May be a view of the shards, which others may read in place.
        self.final: torch.Tensor | None = None
        # phase -> accumulated gradients, at level g. Between steps they have no memory, unless they are at N: then the
        # sync before a step is read in place by the group, whose mappings a new allocation would not have.
        dtype = dtype_of(precision.gradient)
        self._leaves = sharding.gradients_on_host
        self.shards = {phase: flat.zeros(g, dtype, is_read=g is Level.N and not self._leaves) for phase in flat.phases}
        # If gradients are stored in host memory: phase -> those accumulated so far, between two microbatches.
        self.away: dict[Phase, torch.Tensor] = {}
        if self._leaves:
            device, numel = flat.around.device, len(flat.range(g))
            self.away = {phase: host_zeros(self, numel, dtype, device=device) for phase in flat.phases}
        # The copy of a phase in flight, until waited for.
        self._moving: dict[Phase, lanes.Job] = {}
        # The sum of squares of gradients that have left for host memory, until `clear`.
        self._squares: torch.Tensor | None = None
        if self._accumulates:
            # Before the storages are freed: views are made of memory that is there, and stay valid.
            self._views = {phase: flat.views_of(shard) for phase, shard in self.shards.items()}
        self._free_shards()

    def _free_shards(self) -> None:
        """Free the shards between steps, so that a forward can use their memory, unless others read them in place."""
        if self._leaves or self._flat.layout.gradients is not Level.N:
            for shard in self.shards.values():
                shard.untyped_storage().resize_(0)

    def _shard(self, phase: Phase) -> torch.Tensor:
        """Return the shard of a phase, with memory; uninitialized if that is new.

        The computation calls it before a job that needs it: see [Note: streams and memory] in runtime/lanes.py.
        """
        shard = self.shards[phase]
        if shard.untyped_storage().nbytes() == 0:
            shard.untyped_storage().resize_(shard.nbytes)
        return shard

    # ---- a microbatch

    def buffer(self, name: str, phase: Phase) -> GradientBuffer:
        """Return the buffer for the gradient of `name` in a phase. The caller must write to it."""
        self._open(phase)
        written = self._written[phase]
        is_empty = name not in written
        written.add(name)
        return GradientBuffer(self._views[phase][name], is_empty)

    def written(self, name: str, phase: Phase) -> torch.Tensor | None:
        """Return the gradient written to `buffer`, or None if it was not requested since the last reduction."""
        return self._views[phase][name] if name in self._written.get(phase, ()) else None

    def _open(self, phase: Phase) -> None:
        """Allocate the buffer in which a phase accumulates, uninitialized, unless it is there."""
        if self._accumulates:
            self._shard(phase)
        elif phase not in self._views:
            flat, shard, buffer = self._flat, self.shards[phase], None
            # Lent, so that the group reads it in place; None where nothing is shared, or nothing is free in time. A
            # cast copy is sent as messages: nobody would read the lent memory, nor set the bytes that release it.
            if shard.dtype == self._sent:
                buffer = flat.around.transport.memory.lend(flat.map.padded, shard.dtype, flat.around.peers(Axis.INTRA))
            if buffer is None:
                buffer = torch.empty(flat.map.padded, dtype=shard.dtype, device=shard.device)
            self.unsharded[phase] = buffer
            self._views[phase] = flat.views_of(buffer)

    @property
    def _sent(self) -> torch.dtype:
        """The dtype in which reductions send."""
        return dtype_of(self._flat.sharding.precision.reduce)

    def _zero_unwritten(self, phase: Phase, buffer: torch.Tensor) -> None:
        """Write zeros where nothing was written, including the padding."""
        written = self._written[phase]
        if not written:
            buffer.zero_()
        else:
            for entry in self._flat.map.entries:
                if entry.name not in written:
                    buffer.narrow(0, entry.offset, entry.numel).zero_()
            for gap in self._gaps:
                buffer.narrow(0, gap.start, len(gap)).zero_()
        written.clear()

    def begin_reduction(self, phase: Phase) -> None:
        """Begin to reduce a phase's gradients to the shards; `end_reduction` waits and frees their buffer."""
        if phase not in self._flat.phases or self._accumulates:
            return
        # Also if nothing was written: other ranks' microbatches may have used the parameters, and all take part.
        self._open(phase)
        # From here on the buffer is the job's: the next `buffer` of this phase opens another one.
        unsharded = self.unsharded.pop(phase)
        del self._views[phase]
        self._zero_unwritten(phase, unsharded)
        self._shard(phase)  # here and not in the job: the computation frees it
        # Behind the one before: their tags are the same.
        job = self._collectives.start("reduce", partial(self._reduce, phase, unsharded), after=self._last_reduction)
        self.reducing.append((job, unsharded))

    @property
    def _last_reduction(self) -> lanes.Job | None:
        return self.reducing[-1][0] if self.reducing else None

    def end_reduction(self, phase: Phase) -> None:
        """Wait for the first reduction of a phase that is in flight."""
        # A program waits for reductions in the order in which it began them, so the first one is of this phase.
        if phase in self._flat.phases and self.reducing:
            self.reducing[0][0].wait()
            self.reducing.popleft()  # frees the buffer, and not before: rule 2 of [Note: streams and memory]

    def _reduce(self, phase: Phase, unsharded: torch.Tensor) -> None:
        flat, level = self._flat, self._flat.layout.gradients
        total = unsharded.to(self._sent)  # the buffer itself if dtypes are equal
        # Counted in the job: those of a segment run in the order of its microbatches, whatever the timing of others is.
        what = f"{phase}.{self._reductions[phase]}"
        self._reductions[phase] += 1
        for move in flat.sharding.real(REDUCE_GRADIENT[level]):
            self._move(flat.part(total, Level.N, move.coarse), move, Purpose.REDUCE, phase=phase, what=what)
        GradientBuffer(self.shards[phase], is_empty=phase not in self._filled).add(flat.part(total, Level.N, level))
        self._filled.add(phase)
        # Lent memory is free once every rank of the group has read it; any other is freed when `reducing` drops it.
        flat.around.transport.memory.give_back(unsharded)

    # ---- to host memory and back

    @property
    def at_home(self) -> torch.Tensor | None:
        """The optimizer's part of what rests in host memory; None if it has no place there."""
        flat = self._flat
        if not self.away or not final_is_part(flat.shape, flat.sharding):
            return None
        return flat.part(self.away[flat.phases[0]], flat.layout.gradients, flat.layout.optimizer)

    def begin_part(self, phase: Phase, *, is_back: bool) -> None:
        """Begin to copy what is accumulated of a phase to host memory, or back."""
        if phase in self.away:
            shard, away = self._shard(phase), self.away[phase]
            pair = (shard, away) if is_back else (away, shard)
            self._moving[phase] = begin_copy(self._flat, "onload" if is_back else "offload", [pair])

    def end_part(self, phase: Phase, *, is_back: bool) -> None:
        """Wait for that; what has left is freed on the device."""
        if phase in self._moving:
            self._moving.pop(phase).wait()
            if not is_back:
                self.shards[phase].untyped_storage().resize_(0)

    @property
    def is_complete(self) -> bool:
        """True between a step's gradients and its update, if this rank has any: on the device, or in host memory."""
        return self.final is not None or self._squares is not None

    def note_squares(self) -> None:
        """Keep the sum of squares of `final`, which is about to leave."""
        if self._leaves:
            self._squares, self.factor = self.squared_norm(), 1.0

    def leave(self) -> None:
        """Free the step's gradients on the device, which have left it."""
        if self._leaves:
            self.final = None
            self._free_shards()

    # ---- the step's end

    def begin_sync(self) -> None:
        """Begin to turn the accumulated gradients into `final`, the optimizer's, at the level of os."""
        flat = self._flat
        if flat.trainable and self.syncing is None:
            # On the computing thread, before the job: a phase that no reduction has opened gets its memory here.
            for phase in flat.phases:
                shard = self._shard(phase)
                if self._accumulates:
                    self._zero_unwritten(phase, shard)
            g, os = flat.layout.gradients, flat.layout.optimizer
            # What the optimizer reads outlives the job, so it is allocated here; nothing of it is written before.
            shard = self.shards[flat.phases[0]]
            coarse = min(g, os)
            wide = shard if flat.sharding.nest.is_same(coarse, g) else shard.new_empty(len(flat.range(coarse)))
            final = torch.empty_like(flat.part(wide, coarse, os)) if flat.spread is Spread.SUMMED else None
            # Behind the last reduction, and so behind all: each runs behind the one before.
            job = self._collectives.start("sync", partial(self._sync, wide, final), after=self._last_reduction)
            self.syncing = job, wide

    def wait(self) -> None:
        """Wait until `final` is there."""
        # Begins what no SYNC has begun. A program calls it once a step: a second call would add the phases up again.
        self.begin_sync()
        if self.syncing is not None:
            self.syncing[0].wait()
        self.syncing = None
        self.reducing.clear()  # the sync has waited for them

    def _sync(self, wide: torch.Tensor, final: torch.Tensor | None) -> None:
        """Sum the phases, and move the sum to the optimizer's level.

        wide: of the coarser level of g and os: the shard, or uninitialized.  final: uninitialized, for the sum over the
        tensor-parallel ranks, if there is one.
        """
        flat = self._flat
        g, os = flat.layout.gradients, flat.layout.optimizer
        if not self._accumulates:
            for phase in flat.phases:
                if phase not in self._filled:
                    self.shards[phase].zero_()
        # Phases are added here and not by microbatch, so the sum does not depend on a schedule's order of I and W.
        shard, *others = (self.shards[phase] for phase in flat.phases)
        for other in others:
            shard.add_(other)
        coarse = min(g, os)
        if wide is not shard:  # only where os is coarser: then the moves are gathers, which fill every other block
            flat.part(wide, coarse, g).copy_(shard)
        for move in SYNC_GRADIENT[g, os]:
            part, what = flat.part(wide, coarse, move.coarse), "sync" if move.kind is MoveKind.REDUCE else "gather"
            self._move(part, move, Purpose.SYNC_GRADIENT, phase=flat.phases[0], what=what)
        self.final = flat.part(wide, coarse, os)
        if final is not None:
            self.final = final.copy_(self.final)  # the shard may be read by others
            flat.around.transport.total_along(self.final, "tp", Tag(Channel.SUM_TENSOR, *flat.tag))

    def _move(self, buffer: torch.Tensor, move: Move, purpose: Purpose, *, phase: Phase, what: str) -> None:
        """Move gradients, encoded where the move has a codec. what: as `coding.noise_seed` has it."""
        around, sharding = self._flat.around, self._flat.sharding
        codec = sharding.codec("gradient", move)
        if codec is None:
            self._collectives.move(buffer, move, purpose)
            return
        peers, nest, residual = around.peers(move.axis), sharding.nest, self.residuals.get(phase)
        # Read when the job runs. Scale and step change between programs, and the scale at TAKE_BACK, before a step's
        # first backward: by then the step before has waited for all its gradients.
        scale = around.moment.scale
        each = buffer.numel() // nest.size(move.axis)
        rank = around.transport.place.data

        def noise(to: int) -> torch.Tensor | None:
            seed = coding.noise_seed(around.seed, around.moment.step, *self._flat.tag, what=what, rank=rank, to=to)
            return coding.draw_uniform(codec, each, seed, device=buffer.device)

        # The buffer of a move along inter and the residual are both I-shards, so their blocks match. A reduction
        # encodes the blocks of other groups, a gather the own block: no element of a residual serves both.
        if move.kind is MoveKind.REDUCE:
            reduce = partial(coding.reduce, codec, buffer, scale=scale)
            self._collectives.move_encoded(reduce, move, purpose, noise=noise, residual=residual)
        else:
            own, lost = peers.own(buffer), None if residual is None else peers.own(residual)
            gather = partial(coding.gather, codec, own, buffer, scale=scale)
            self._collectives.move_encoded(gather, move, purpose, noise=noise(peers.index), residual=lost)

    def clear_residuals(self) -> None:
        """Zero the residuals of encoded gradients."""
        for residual in self.residuals.values():
            residual.zero_()

    def clear(self) -> None:
        """Discard the step's gradients: shards at N are overwritten later, others are freed."""
        for job in self._moving.values():  # of a program that was not finished
            job.wait()
        self._moving.clear()
        self._squares = None
        # The optimizer's slices have dropped their gradients, which may be views of this memory.
        self._filled.clear()
        self._reductions.clear()
        self._free_shards()
        memory = self._flat.around.transport.memory
        for phase, buffer in self.unsharded.items():
            del self._views[phase]
            memory.give_back(buffer, was_read=False)  # no reduction has told a peer its place
        self.unsharded.clear()
        for written in self._written.values():
            written.clear()
        self.final = None

    def squared_norm(self) -> torch.Tensor:
        """Sum of squares, in float64 and still on the device, of the gradients that this rank alone accounts for.

        Where several ranks hold the same gradients each accounts for its part at G: were it one of them for all, the
        others would wait for it at the step's end.
        """
        flat, around = self._flat, self._flat.around
        if self._squares is not None:
            return self._squares * self.factor**2
        if self.final is None or (flat.spread is not Spread.SPLIT and around.transport.place.tp != 0):
            return torch.zeros((), dtype=torch.float64, device=around.device)
        return sum_of_squares(flat.part(self.final, flat.layout.optimizer, Level.G))
