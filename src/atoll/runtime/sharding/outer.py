"""Outer steps of this rank: anchors, outer gradients in flight, and parameters that are mixed with the anchor.

`atoll.plans.outer` gives the algorithm and the steps after which fragments are sent and applied. Applying a fragment
does not overlap with the end of the step.

[Note: anchors] A rank stores the part of each trained parameter's anchor, and of its outer momentum, that it has at
level G of its island. Nothing of them is sharded over islands, so a lost island takes nothing with it. One rank for
each block adds the outer gradients in the order of the islands and sends the sum to the others, and every island
updates its anchor from it in the same way. So anchors are bitwise equal on all islands.

[Note: encoded outer gradients] With a codec both moves send encoded blocks, and every island, the owner of a block too,
uses what it decodes, so anchors stay bitwise equal. The owner encodes the sum, and all divide by the number of islands
after decoding: what is lost in either move is then a part of the sum. An island's residual holds what it lost, as large
as its anchor: in the blocks of other owners from the reduce-scatter, in its own block from the all-gather. So a
residual stays right when blocks change owners, with another number of ranks in the island.

[Note: what an arrival writes] Parameters that other ranks read in place are written when all ranks of the group have
settled theirs: see [Note: reading in place] in transport/base.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from atoll.plans.layouts import SYNC_PARAMETER, Codec, Level, Slice
from atoll.plans.outer import Outer, OuterAction
from atoll.runtime.checkpoint import Piece
from atoll.runtime.lanes import Job, JobLane
from atoll.runtime.sharding import coding
from atoll.runtime.sharding.norm import sum_of_squares
from atoll.runtime.sharding.segment import Segment
from atoll.runtime.sharding.tensors import Spread
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.transport import Channel, Peers, Tag, Transport


class _Anchor:
    """The anchor of a segment, with its outer momentum and its residual.

    residual: what encoding outer gradients lost; None without error feedback.
    flow: the outer gradient in flight, with the job that averages it: both are kept until the job has been waited for,
    whose stream works on it ([Note: streams and memory] in runtime/lanes.py).
    """

    def __init__(
        self, segment: Segment, outer: Outer, transport: Transport, *, tag: tuple[int, int], seed: int
    ) -> None:
        assert segment.shards.master is not None, "an anchor is of trained parameters"
        self.segment = segment
        self._outer, self._transport, self._tag, self._seed = outer, transport, tag, seed
        # These three live as long as the engine. The job in flight writes to the residual, only the computing thread to
        # the others.
        self.value = torch.empty_like(self._own)
        self.momentum = torch.zeros_like(self.value) if outer.inertia else None
        self.residual = torch.zeros_like(self.value) if outer.keeps_residual else None
        # From `leave` to `step`, which comes with the arrival or, before a save, earlier.
        self.flow: tuple[Job, torch.Tensor] | None = None
        self.adopt()

    @property
    def _own(self) -> torch.Tensor:
        """This rank's part of the masters at level G, on the device: a copy of those that rest in host memory."""
        segment, level = self.segment, self.segment.flat.layout.optimizer
        assert segment.shards.master is not None, "an anchor is of trained parameters"
        outer, inner = segment.flat.range(level), segment.flat.range(Level.G)
        own = segment.shards.master.detach().narrow(0, inner.start - outer.start, len(inner))
        return own.to(segment.flat.around.device)

    def adopt(self, names: Collection[str] | None = None) -> None:
        """Set the anchor to the island's parameters: of all names, or of some. Nothing of them is owed any more."""
        own = self._own
        if self.residual is not None and self.flow is not None:
            self.flow[0].wait()  # it writes to the residual
        for part in self.slices:
            if names is None or part.name in names:
                count = part.stop - part.start
                self.value.narrow(0, part.offset, count).copy_(own.narrow(0, part.offset, count))
                if self.residual is not None:
                    self.residual.narrow(0, part.offset, count).zero_()
        if names is None:
            self.value.copy_(own)  # the padding, too

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The parameters' parts of the anchor."""
        return self.segment.flat.map.slices(self.segment.flat.range(Level.G))

    def leave(self, lane: JobLane, step: int) -> torch.Tensor:
        """Begin to average the outer gradient of `step` over the islands.

        Returns its squares and those of the anchor, summed over what this rank accounts for: [2], float64.
        """
        # Along the mesh's axis. `Surroundings.peers` would find none: a step's layout ends at the island.
        peers = Peers.along("inter", self._transport.place)
        numel, islands = self.value.numel(), len(peers.ranks)
        # Padded to a multiple of the islands: each adds up one block.
        flow = self.value.new_zeros(-(-numel // islands) * islands)
        torch.sub(self.value, self._own, out=flow[:numel])
        # Before the job begins, which works in the flow itself.
        moved = torch.zeros(2, dtype=torch.float64, device=flow.device)
        if self.segment.flat.spread is Spread.SPLIT or self._transport.place.tp == 0:
            moved = torch.stack([sum_of_squares(flow), sum_of_squares(self.value)])
        codec = self._outer.codec
        average: Callable[[torch.Tensor, Peers], None] = self._average
        if codec is not None:
            average = partial(self._code, codec, step=step)
        self.flow = lane.start(partial(average, flow, peers), unit=self._tag[0]), flow
        return moved

    def _average(self, flow: torch.Tensor, peers: Peers) -> None:
        # The next job with these tags begins after `step` has waited for this one, and channels of their own keep both
        # moves apart from those of the steps that run meanwhile.
        self._transport.reduce(flow, peers, Tag(Channel.OUTER_REDUCE, *self._tag))
        peers.own(flow).div_(len(peers.ranks))
        self._transport.gather(flow, peers, Tag(Channel.OUTER_GATHER, *self._tag))

    def _code(self, codec: Codec, flow: torch.Tensor, peers: Peers, *, step: int) -> None:
        """Average with a codec: [Note: encoded outer gradients]."""
        own, lost = peers.own(flow), self.residual
        # Its blocks must be those of the flow. The padding of the residual is zero, as that of the flow is.
        if lost is not None and lost.numel() < flow.numel():
            lost = torch.nn.functional.pad(lost, (0, flow.numel() - lost.numel()))

        def noise(what: str, to: int) -> torch.Tensor | None:
            rank = self._transport.place.data
            seed = coding.noise_seed(self._seed, step - 1, *self._tag, what=what, rank=rank, to=to)
            return coding.draw_uniform(codec, own.numel(), seed, device=flow.device)

        there, back = (Tag(channel, *self._tag) for channel in (Channel.OUTER_REDUCE, Channel.OUTER_GATHER))
        transport, drawn = self._transport, partial(noise, "outer.reduce")
        coding.reduce(codec, flow, peers, tag=there, transport=transport, noise=drawn, residual=lost)
        # The sum is encoded and not the mean: `owed` then is in the unit of what the reduction has lost.
        bits, owed = noise("outer.gather", peers.index), None if lost is None else peers.own(lost)
        coding.gather(codec, own, flow, peers=peers, tag=back, transport=transport, noise=bits, residual=owed)
        flow.div_(len(peers.ranks))
        if self.residual is not None and lost is not None and lost is not self.residual:
            self.residual.copy_(lost[: self.residual.numel()])

    def step(self) -> None:
        """Wait for the mean of the outer gradients, if it is in flight, and take the outer step."""
        if self.flow is None:
            return
        job, flow = self.flow
        job.wait()
        self.flow = None
        # The mean is a view of the flow, which is freed when this returns: nesterov may add to it in place.
        mean, momentum, outer = flow[: self.value.numel()], self.momentum, self._outer
        if momentum is not None:
            momentum.mul_(outer.inertia).add_(mean)
            mean = mean.add_(momentum, alpha=outer.inertia) if outer.optimizer == "nesterov" else momentum
        self.value.sub_(mean, alpha=outer.rate)

    def take(self, values: torch.Tensor) -> None:
        """Overwrite the masters."""
        assert self.segment.shards.master is not None, "an anchor is of trained parameters"
        self.segment.shards.master.detach().copy_(values)

    def apply(self, *, share: float) -> None:
        """Mix the island's masters with the anchor. share: weight of the masters."""
        segment, level = self.segment, self.segment.flat.layout.optimizer
        assert segment.shards.master is not None, "an anchor is of trained parameters"
        # The masters have the level of os, the anchor level G. With os at N or I the island gathers the anchor; every
        # rank of a group then mixes the same values, so replicas stay equal.
        target, source = segment.shards.master.detach(), self.value
        moves = segment.flat.sharding.real(SYNC_PARAMETER[Level.G, level])
        if moves:
            outer, inner = segment.flat.range(level), segment.flat.range(Level.G)
            source = torch.empty_like(target, device=self.value.device)
            source.narrow(0, inner.start - outer.start, len(inner)).copy_(self.value)
            tag = Tag(Channel.GATHER_INTRA, self._tag[0], Tag.LAST - self._tag[1])  # which no gather of a step has
            for move in moves:
                part = segment.flat.range(move.coarse)
                buffer = source.narrow(0, part.start - outer.start, len(part))
                self._transport.gather(buffer, segment.flat.around.peers(move.axis), tag)
        if share:
            target.lerp_(source.to(target.device), 1.0 - share)
        else:
            target.copy_(source)

    def tensors(self) -> list[torch.Tensor]:
        """Return anchor and momentum, which are equal on all islands."""
        return [self.value] if self.momentum is None else [self.value, self.momentum]


class OuterSteps:
    """The outer steps of one rank.

    units: of this rank.  count: number of units of the model.  seed: of stochastic rounding.
    """

    def __init__(
        self, units: Sequence[Unit], outer: Outer, transport: Transport, lane: JobLane, *, count: int, seed: int = 0
    ) -> None:
        self.outer = outer
        self._count = count
        self._transport = transport
        self._lane = lane
        # Fragment -> its units on this rank. Fragments are dealt over the whole model, so a pipeline rank may have no
        # unit of one; ranks that share parameters have the same.
        self._fragments: dict[int, list[tuple[Unit, list[_Anchor]]]] = {}
        for unit in units:
            own = [
                _Anchor(segment, outer, transport, tag=(unit.spec.index, part), seed=seed)
                for part, segment in enumerate(unit.segments)
                if segment.flat.trainable
            ]
            if own:
                fragment = outer.fragment_of(unit.spec.index, count)
                self._fragments.setdefault(fragment, []).append((unit, own))
        # Fragments between L and A. In checkpoints: an anchor has been stepped by then, but the masters have not been
        # mixed with it.
        self._waiting: set[int] = set()
        # Since the last `take_moved`, on the CPU.
        self._moved = torch.zeros(2, dtype=torch.float64)

    # ---- steps
    #
    # [Note: fragments in flight] Two fragments with every = 4 and delay = 3, as one rank sees them. After a step, a
    # fragment leaves (L) or arrives (A):
    #
    #     step           1    2    3    4    5    6    7    8    9   10   11
    #     fragment 0          L==============A    L==============A    L====
    #     fragment 1                    L==============A    L==============A
    #     lane                [-- 0 --] [-- 1 --] [-- 0 --] [-- 1 --] [-- 0
    #
    #     L    flow = anchor - masters. A job of the outer lane begins: reduce-scatter along inter, division by the
    #          number of islands, all-gather along inter.
    #     =    Steps of the island write the masters, and neither the anchor nor the flow. None waits for the job.
    #     A    Waits for the job. Then anchor <- outer optimizer of anchor and flow, and masters <- share * masters +
    #          (1 - share) * anchor. What is left of the steps since L is a part of the fragment's next flow.
    #
    # Two fragments can be in flight, but none twice, since the delay is less than `every`. `settle`, before a save and
    # in `anchored`, waits for the job and steps the anchor before A. At A the masters are mixed with it all the same,
    # so results do not depend on when a run is saved.

    def is_due(self, step: int) -> bool:
        """Return True if there is outer work after `step`."""
        return bool(self.outer.turns(step, self._count))

    def meets(self, step: int) -> bool:
        """Return True if islands wait for each other after `step`."""
        return self.outer.meets(step, self._count)

    @torch.no_grad()
    def act(self, step: int) -> None:
        """Do the outer work after `step`. Every rank calls it, once its masters are those after the step."""
        for way, fragment in self.outer.turns(step, self._count):
            if way is OuterAction.LEAVES:
                self._leave(fragment, step)
            elif fragment in self._waiting:  # not if it was sent before a load that restarted from the anchors
                self._arrive(fragment)

    def _leave(self, fragment: int, step: int) -> None:
        self._waiting.add(fragment)
        for unit, anchors in self._fragments.get(fragment, ()):
            for anchor in anchors:
                moved = anchor.leave(self._lane, step)
                if unit.is_first_owner:
                    self._moved += moved.cpu()

    def _arrive(self, fragment: int) -> None:
        self._waiting.discard(fragment)
        own = self._fragments.get(fragment, [])
        # First everything that waits for other islands, for all units. The wait for readers comes once for all of them.
        for unit, anchors in own:
            for anchor in anchors:
                anchor.step()
            unit.wait_for_parameters()
        if own:
            self._transport.memory.wait_for_readers()  # see [Note: what an arrival writes]
        for unit, anchors in own:
            for anchor in anchors:
                anchor.apply(share=self.outer.own_share)
            unit.sync_parameters()

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Context in which the anchors, after everything in flight, replace the island's parameters."""
        self.settle()
        kept = [
            anchor.segment.shards.master.detach().clone()
            for anchor in self._anchors()
            if anchor.segment.shards.master is not None
        ]
        self._write(lambda at, anchor: anchor.apply(share=0.0))
        try:
            yield
        finally:
            self._write(lambda at, anchor: anchor.take(kept[at]))

    @torch.no_grad()
    def _write(self, write: Callable[[int, _Anchor], None]) -> None:
        """Write the masters of all units."""
        units = [unit for own in self._fragments.values() for unit, _ in own]
        for unit in units:
            unit.wait_for_parameters()
        self._transport.memory.wait_for_readers()  # see [Note: what an arrival writes]
        for at, anchor in enumerate(self._anchors()):
            write(at, anchor)
        for unit in units:
            unit.sync_parameters()

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for everything in flight and step the anchors with it. The parameters are still mixed with them after
        the scheduled step, so results do not change."""
        for anchor in self._anchors():
            anchor.step()

    @torch.no_grad()
    def adopt(self, names: Collection[str] | None = None) -> None:
        """Set anchors to the island's parameters after these were written: of all names, or of some."""
        for anchor in self._anchors():
            anchor.adopt(names)

    def forget(self) -> None:
        """Drop what is in flight and the residuals, before a load."""
        # Waits before it clears: a job in flight still writes to its residual.
        self.settle()
        self._waiting.clear()
        for anchor in self._anchors():
            if anchor.residual is not None:
                anchor.residual.zero_()

    def take_moved(self) -> torch.Tensor:
        """Return the squares of the outer gradients that were sent since the last call, and those of their anchors, of
        this rank's parts: [2], float64. Summed over all ranks, they are the argument of `distance`."""
        moved, self._moved = self._moved, torch.zeros(2, dtype=torch.float64)
        return moved

    # ---- what is stored

    def _anchors(self) -> Iterator[_Anchor]:
        for own in self._fragments.values():
            for _, anchors in own:
                yield from anchors

    def tensors(self) -> list[torch.Tensor]:
        """Return everything that is stored between steps: anchors, momenta and residuals."""
        residuals = [anchor.residual for anchor in self._anchors() if anchor.residual is not None]
        return [*(tensor for anchor in self._anchors() for tensor in anchor.tensors()), *residuals]

    def holdings(self) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        """Yield unit, segment, and the anchor with its momentum, which are equal on all islands."""
        for own in self._fragments.values():
            for unit, anchors in own:
                for anchor in anchors:
                    yield unit.spec.index, unit.segments.index(anchor.segment), anchor.tensors()

    @property
    def facts(self) -> dict[str, int]:
        """Settings that a checkpoint must have in common with this run to continue each island where it was."""
        outer = self.outer
        return {
            "islands": self._transport.place.mesh.inter,
            "every": outer.every,
            "fragments": outer.count(self._count),
            "delay": outer.delay,
        }

    def state(self) -> dict[str, Any]:
        """Return the facts, and the fragments that were sent and not applied."""
        return {**self.facts, "waiting": sorted(self._waiting)}

    def goes_on(self, saved: Mapping[str, Any] | None) -> bool:
        """Return True if a checkpoint has as many islands, with the same fragments and steps."""
        return saved is not None and {key: saved.get(key) for key in self.facts} == self.facts

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Continue with the fragments that were sent and not applied; with none after a restart from the anchors."""
        self._waiting = set(saved["waiting"]) if saved is not None and self.goes_on(saved) else set()

    def pieces(self, *, momentum: bool, residual: bool) -> Iterator[Piece]:
        """Yield the anchors, which are a checkpoint's model, with their momenta and this island's residuals."""
        for anchor in self._anchors():
            kept: dict[tuple[str, ...], torch.Tensor] = {("model",): anchor.value}
            if momentum and anchor.momentum is not None:
                kept["outer", "momentum"] = anchor.momentum
            if residual and anchor.residual is not None:
                kept[self.residual_path] = anchor.residual
            for part in anchor.slices:
                for path, tensor in kept.items():
                    view = tensor.narrow(0, part.offset, part.stop - part.start)
                    box = anchor.segment.flat.boxes[part.name]
                    yield Piece((*path, part.name), box.shape, part.start, stop=part.stop, tensor=view, within=box)

    @property
    def residual_path(self) -> tuple[str, ...]:
        """Beginning of the names of this island's residuals in a checkpoint."""
        return ("islands", str(self._transport.place.inter), "outer", "residual")

    def reset_momentum(self) -> None:
        """Set the outer momentum to zero."""
        for anchor in self._anchors():
            if anchor.momentum is not None:
                anchor.momentum.zero_()


def distance(moved: Sequence[float]) -> float | None:
    """Return the root mean square over islands of |parameters - anchor| / |anchor|, from the sums of `take_moved` over
    all ranks; None if nothing was sent."""
    difference, anchor = moved
    return math.sqrt(difference / anchor) if anchor > 0 else None
