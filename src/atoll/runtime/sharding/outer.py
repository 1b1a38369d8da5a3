"""Outer steps of this rank among the islands of one world: outer gradients in flight, averaged over the mesh.

`atoll.plans.outer` gives the algorithm and the steps after which fragments are sent and applied. Applying a fragment
does not overlap with the end of the step. Anchors are in `atoll.runtime.sharding.anchors`: one rank for each block adds
the outer gradients in the order of the islands and sends the sum to the others, and every island updates its anchor
from it in the same way. So anchors are bitwise equal on all islands.

[Note: encoded outer gradients] With a codec both moves send encoded blocks, and every island, the owner of a block too,
uses what it decodes, so anchors stay bitwise equal. The owner encodes the sum, and all divide by the number of islands
after decoding: what is lost in either move is then a part of the sum. An island's residual holds what it lost, as large
as its anchor: in the blocks of other owners from the reduce-scatter, in its own block from the all-gather. So a
residual stays right when blocks change owners, with another number of ranks in the island.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from atoll.plans.layouts import Codec
from atoll.plans.outer import Outer, OuterAction
from atoll.runtime.lanes import Job, JobLane
from atoll.runtime.sharding import coding
from atoll.runtime.sharding.anchors import Anchor, AnchorSteps
from atoll.runtime.sharding.segment import Segment
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.transport import Channel, Peers, Tag, Transport


class _MeshAnchor(Anchor):
    """An anchor whose outer gradients are averaged over the mesh.

    flow: the outer gradient in flight, with the job that averages it: both are kept until the job has been waited for,
    whose stream works on it ([Note: streams and memory] in runtime/lanes.py).
    """

    def __init__(
        self, segment: Segment, outer: Outer, transport: Transport, *, tag: tuple[int, int], seed: int
    ) -> None:
        self._outer, self._seed = outer, seed
        # From `leave` to `step`, which comes with the arrival or, before a save, earlier. The job in flight writes to
        # the residual, only the computing thread to the anchor and its momentum.
        self.flow: tuple[Job, torch.Tensor] | None = None
        super().__init__(segment, outer, transport, tag=tag, device=segment.flat.around.device)

    def adopt(self, names: Collection[str] | None = None) -> None:
        """Set the anchor to the island's parameters; see `Anchor.adopt`."""
        if self.residual is not None and self.flow is not None:
            self.flow[0].wait()  # it writes to the residual
        super().adopt(names)

    def leave(self, lane: JobLane, step: int) -> torch.Tensor:
        """Begin to average the outer gradient of `step` over the islands.

        Returns its squares and those of the anchor, summed over what this rank accounts for: [2], float64.
        """
        # Along the mesh's axis. `Surroundings.peers` would find none: a step's layout ends at the island.
        peers = Peers.along("inter", self._transport.place)
        numel, islands = self.value.numel(), len(peers.ranks)
        # Padded to a multiple of the islands: each adds up one block.
        flow = self.value.new_zeros(-(-numel // islands) * islands)
        torch.sub(self.value, self.own, out=flow[:numel])
        # Before the job begins, which works in the flow itself.
        moved = self.moved(flow)
        codec = self._outer.codec
        average: Callable[[torch.Tensor, Peers], None] = self._average
        if codec is not None:
            average = partial(self._code, codec, step=step)
        self.flow = lane.start(partial(average, flow, peers), unit=self.tag[0]), flow
        return moved

    def _average(self, flow: torch.Tensor, peers: Peers) -> None:
        # The next job with these tags begins after `step` has waited for this one, and channels of their own keep both
        # moves apart from those of the steps that run meanwhile.
        self._transport.reduce(flow, peers, Tag(Channel.OUTER_REDUCE, *self.tag))
        peers.own(flow).div_(len(peers.ranks))
        self._transport.gather(flow, peers, Tag(Channel.OUTER_GATHER, *self.tag))

    def _code(self, codec: Codec, flow: torch.Tensor, peers: Peers, *, step: int) -> None:
        """Average with a codec: [Note: encoded outer gradients]."""
        own, lost = peers.own(flow), self.residual
        # Its blocks must be those of the flow. The padding of the residual is zero, as that of the flow is.
        if lost is not None and lost.numel() < flow.numel():
            lost = torch.nn.functional.pad(lost, (0, flow.numel() - lost.numel()))

        def noise(what: str, to: int) -> torch.Tensor | None:
            rank = self._transport.place.data
            seed = coding.noise_seed(self._seed, step - 1, *self.tag, what=what, rank=rank, to=to)
            return coding.draw_uniform(codec, own.numel(), seed, device=flow.device)

        there, back = (Tag(channel, *self.tag) for channel in (Channel.OUTER_REDUCE, Channel.OUTER_GATHER))
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


class OuterSteps(AnchorSteps[_MeshAnchor]):
    """The outer steps of one rank, averaged over the mesh.

    units: of this rank.  count: number of units of the model.  seed: of stochastic rounding.
    """

    def __init__(
        self, units: Sequence[Unit], outer: Outer, transport: Transport, lane: JobLane, *, count: int, seed: int = 0
    ) -> None:
        def make(segment: Segment, tag: tuple[int, int]) -> _MeshAnchor:
            return _MeshAnchor(segment, outer, transport, tag=tag, seed=seed)

        super().__init__(units, outer, transport, count=count, make=make)
        self._lane = lane
        # Fragments between L and A. In checkpoints: an anchor has been stepped by then, but the masters have not been
        # mixed with it.
        self._waiting: set[int] = set()

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

    @torch.no_grad()
    def act(self, step: int) -> int:
        """Do the outer work after `step`; see `AnchorSteps.act`."""
        for way, fragment in self.outer.turns(step, self._count):
            if way is OuterAction.LEAVES:
                self._leave(fragment, step)
            elif fragment in self._waiting:  # not if it was sent before a load that restarted from the anchors
                self._arrive(fragment)
        return step

    def _leave(self, fragment: int, step: int) -> None:
        self._waiting.add(fragment)
        for unit, anchors in self._fragments.get(fragment, ()):
            for anchor in anchors:
                moved = anchor.leave(self._lane, step)
                if unit.is_first_owner:
                    self._moved += moved.cpu()

    def _arrive(self, fragment: int) -> None:
        self._waiting.discard(fragment)
        # First everything that waits for other islands, for all units.
        for anchor in self._anchors_of(fragment):
            anchor.step()
        self._write(lambda at, anchor: anchor.apply(share=self.outer.own_share), [fragment])

    @torch.no_grad()
    def settle(self) -> None:
        """Step the anchors with everything in flight; see `AnchorSteps.settle`."""
        for anchor in self._anchors():
            anchor.step()

    def forget(self) -> None:
        """Drop what is in flight and the residuals, before a load."""
        # Waits before it clears: a job in flight still writes to its residual.
        self.settle()
        self._waiting.clear()
        for anchor in self._anchors():
            if anchor.residual is not None:
                anchor.residual.zero_()

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


def distance(moved: Sequence[float]) -> float | None:
    """Return the root mean square over islands of |parameters - anchor| / |anchor|, from the sums of `take_moved` over
    all ranks; None if nothing was sent."""
    difference, anchor = moved
    return math.sqrt(difference / anchor) if anchor > 0 else None
