"""Outer steps of this rank: anchors, outer gradients under way, and the parameters that restart from an anchor.

`atoll.outer` gives the algorithm and says when fragments leave and arrive.

[Note: anchors] A rank stores the part of each trained parameter's anchor, and of its outer momentum, that it has at
level G of its island. Nothing of them is divided between islands: an island that is lost takes nothing with it. The
mean of the outer gradients is added in the order of the islands by one rank for each block and sent to the others, and
every island updates its anchors from it in the same way. So anchors are bitwise equal on all islands.

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

from atoll.layouts import SYNC_PARAMETER, Level, Slice
from atoll.outer import Outer, Way
from atoll.runtime.checkpoint import Piece
from atoll.runtime.lanes import Job, Lane
from atoll.runtime.sharding.segment import Segment, sum_of_squares
from atoll.runtime.sharding.tensors import Spread
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.transport import Channel, Peers, Tag, Transport


class _Anchor:
    """The anchor and the outer momentum of a segment.

    flow: the outer gradient under way, with the job that averages it.
    """

    def __init__(self, segment: Segment, outer: Outer, transport: Transport, *, tag: tuple[int, int]) -> None:
        assert segment.master is not None, "an anchor is of trained parameters"
        self.segment = segment
        self._outer, self._transport, self._tag = outer, transport, tag
        self.value = torch.empty_like(self._own)
        self.momentum = torch.zeros_like(self.value) if outer.inertia else None
        self.flow: tuple[Job, torch.Tensor] | None = None
        self.adopt()

    @property
    def _own(self) -> torch.Tensor:
        """This rank's part of the masters at level G."""
        segment, level = self.segment, self.segment.layout.optimizer
        assert segment.master is not None, "an anchor is of trained parameters"
        outer, inner = segment.range(level), segment.range(Level.G)
        return segment.master.detach().narrow(0, inner.start - outer.start, len(inner))

    def adopt(self, names: Collection[str] | None = None) -> None:
        """Take the anchor from the island's parameters: of all names, or of some."""
        own = self._own
        for part in self.slices:
            if names is None or part.name in names:
                count = part.stop - part.start
                self.value.narrow(0, part.offset, count).copy_(own.narrow(0, part.offset, count))
        if names is None:
            self.value.copy_(own)  # the padding, too

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The parameters' parts of the anchor."""
        return self.segment.map.slices(self.segment.range(Level.G))

    def leave(self, lane: Lane) -> torch.Tensor:
        """Begin to average the outer gradient over the islands. Returns its squares and those of the anchor, summed
        over what this rank accounts for."""
        peers = Peers.along("inter", self._transport.place)
        numel, islands = self.value.numel(), len(peers.ranks)
        # As many elements as can be divided among the islands: each adds up one block.
        flow = self.value.new_zeros(-(-numel // islands) * islands)
        torch.sub(self.value, self._own, out=flow[:numel])
        moved = torch.zeros(2, dtype=torch.float64, device=flow.device)
        if self.segment.spread is Spread.SPLIT or self._transport.place.tp == 0:
            moved = torch.stack([sum_of_squares(flow), sum_of_squares(self.value)])
        self.flow = lane.start(partial(self._average, flow, peers), unit=self._tag[0]), flow
        return moved

    def _average(self, flow: torch.Tensor, peers: Peers) -> None:
        self._transport.reduce(flow, peers, Tag(Channel.OUTER_REDUCE, *self._tag))
        peers.own(flow).div_(len(peers.ranks))
        self._transport.gather(flow, peers, Tag(Channel.OUTER_GATHER, *self._tag))

    def step(self) -> None:
        """Wait for the mean of the outer gradients, if it is under way, and take the outer step."""
        if self.flow is None:
            return
        job, flow = self.flow
        job.wait()
        self.flow = None
        mean, momentum, outer = flow[: self.value.numel()], self.momentum, self._outer
        if momentum is not None:
            momentum.mul_(outer.inertia).add_(mean)
            mean = mean.add_(momentum, alpha=outer.inertia) if outer.optimizer == "nesterov" else momentum
        self.value.sub_(mean, alpha=outer.rate)

    def take(self, values: torch.Tensor) -> None:
        """Write the masters."""
        assert self.segment.master is not None, "an anchor is of trained parameters"
        self.segment.master.detach().copy_(values)

    def apply(self, *, share: float) -> None:
        """Mix the anchor into the island's masters. share: of the masters."""
        segment, level = self.segment, self.segment.layout.optimizer
        assert segment.master is not None, "an anchor is of trained parameters"
        target, source = segment.master.detach(), self.value
        moves = segment.sharding.real(SYNC_PARAMETER[Level.G, level])
        if moves:
            outer, inner = segment.range(level), segment.range(Level.G)
            source = torch.empty_like(target)
            source.narrow(0, inner.start - outer.start, len(inner)).copy_(self.value)
            tag = Tag(Channel.GATHER_INTRA, self._tag[0], Tag.LAST - self._tag[1])  # which no gather of a step has
            for move in moves:
                part = segment.range(move.coarse)
                buffer = source.narrow(0, part.start - outer.start, len(part))
                self._transport.gather(buffer, segment.around.peers(move.axis), tag)
        if share:
            target.lerp_(source, 1.0 - share)
        else:
            target.copy_(source)

    def tensors(self) -> list[torch.Tensor]:
        """What is stored between steps."""
        return [self.value] if self.momentum is None else [self.value, self.momentum]


class OuterSteps:
    """The outer steps of one rank.

    units: of this rank.  count: units of the model.
    """

    def __init__(self, units: Sequence[Unit], outer: Outer, transport: Transport, lane: Lane, *, count: int) -> None:
        self.outer = outer
        self._count = count
        self._transport = transport
        self._lane = lane
        self._fragments: dict[int, list[tuple[Unit, list[_Anchor]]]] = {}
        for unit in units:
            own = [
                _Anchor(segment, outer, transport, tag=(unit.spec.index, part))
                for part, segment in enumerate(unit.segments)
                if segment.trainable
            ]
            if own:
                fragment = outer.fragment_of(unit.spec.index, count)
                self._fragments.setdefault(fragment, []).append((unit, own))
        self._waiting: set[int] = set()
        self._moved = torch.zeros(2, dtype=torch.float64)

    # ---- steps

    def is_due(self, step: int) -> bool:
        """Return True if there is outer work behind `step`."""
        return bool(self.outer.turns(step, self._count))

    def meets(self, step: int) -> bool:
        """Return True if islands wait for each other behind `step`."""
        return self.outer.meets(step, self._count)

    @torch.no_grad()
    def act(self, step: int) -> None:
        """Do the outer work behind `step`. Every rank of an island does, once its masters are those of the step."""
        for way, fragment in self.outer.turns(step, self._count):
            if way is Way.LEAVES:
                self._leave(fragment)
            elif fragment in self._waiting:  # what left before a load that restarted the islands does not arrive
                self._arrive(fragment)

    def _leave(self, fragment: int) -> None:
        self._waiting.add(fragment)
        for unit, anchors in self._fragments.get(fragment, ()):
            for anchor in anchors:
                moved = anchor.leave(self._lane)
                if unit.is_first_owner:
                    self._moved += moved.cpu()

    def _arrive(self, fragment: int) -> None:
        self._waiting.discard(fragment)
        own = self._fragments.get(fragment, [])
        for unit, anchors in own:
            for anchor in anchors:
                anchor.step()
            unit.settle_parameters()
        if own:
            self._transport.wait_for_readers()  # see [Note: what an arrival writes]
        for unit, anchors in own:
            for anchor in anchors:
                anchor.apply(share=self.outer.own_share)
            unit.sync_parameters()

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """The anchors, with everything that has left, in the place of the island's parameters."""
        self.settle()
        kept = [
            anchor.segment.master.detach().clone() for anchor in self._anchors() if anchor.segment.master is not None
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
            unit.settle_parameters()
        self._transport.wait_for_readers()  # see [Note: what an arrival writes]
        for at, anchor in enumerate(self._anchors()):
            write(at, anchor)
        for unit in units:
            unit.sync_parameters()

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for everything under way and bring it to the anchors. What has not arrived yet still mixes them into
        the parameters at its time, so nothing of the result changes."""
        for anchor in self._anchors():
            anchor.step()

    @torch.no_grad()
    def adopt(self, names: Collection[str] | None = None) -> None:
        """Take anchors from the island's parameters, where these were written: of all names, or of some."""
        for anchor in self._anchors():
            anchor.adopt(names)

    def forget(self) -> None:
        """Nothing is under way: the engine is about to load."""
        self.settle()
        self._waiting.clear()

    def take_moved(self) -> torch.Tensor:
        """Squares of the outer gradients that have left since the last call, and of their anchors, of this rank's
        parts. Summed over all ranks, the root of their ratio says how far islands are from the anchors."""
        moved, self._moved = self._moved, torch.zeros(2, dtype=torch.float64)
        return moved

    # ---- what is stored

    def _anchors(self) -> Iterator[_Anchor]:
        for own in self._fragments.values():
            for _, anchors in own:
                yield from anchors

    def tensors(self) -> list[torch.Tensor]:
        """Anchors and momenta."""
        return [tensor for anchor in self._anchors() for tensor in anchor.tensors()]

    def holdings(self) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        """Yield unit, segment, and the anchor with its momentum."""
        for own in self._fragments.values():
            for unit, anchors in own:
                for anchor in anchors:
                    yield unit.spec.index, unit.segments.index(anchor.segment), anchor.tensors()

    @property
    def facts(self) -> dict[str, int]:
        """What a checkpoint's islands must have in common with these to go on where they were."""
        outer = self.outer
        return {
            "islands": self._transport.place.mesh.inter,
            "every": outer.every,
            "fragments": outer.count(self._count),
            "delay": outer.delay,
        }

    def state(self) -> dict[str, Any]:
        """The facts, and the fragments that have left and not arrived."""
        return {**self.facts, "waiting": sorted(self._waiting)}

    def goes_on(self, saved: Mapping[str, Any] | None) -> bool:
        """Return True if a checkpoint's islands are these: as many, with the same fragments and steps."""
        return saved is not None and {key: saved.get(key) for key in self.facts} == self.facts

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Go on with the fragments that wait, or restart from the anchors: nothing waits."""
        self._waiting = set(saved["waiting"]) if saved is not None and self.goes_on(saved) else set()

    def pieces(self, *, momentum: bool) -> Iterator[Piece]:
        """Yield the anchors, which are a checkpoint's model, and their momenta."""
        for anchor in self._anchors():
            kept: dict[tuple[str, ...], torch.Tensor] = {("model",): anchor.value}
            if momentum and anchor.momentum is not None:
                kept["outer", "momentum"] = anchor.momentum
            for part in anchor.slices:
                for path, tensor in kept.items():
                    view = tensor.narrow(0, part.offset, part.stop - part.start)
                    box = anchor.segment.boxes[part.name]
                    yield Piece((*path, part.name), box.shape, part.start, stop=part.stop, tensor=view, within=box)

    def reset_momentum(self) -> None:
        """Forget the outer momentum."""
        for anchor in self._anchors():
            if anchor.momentum is not None:
                anchor.momentum.zero_()


def distance(moved: Sequence[float]) -> float | None:
    """The root mean square over islands of |parameters - anchor| / |anchor|, from the sums of `take_moved` over all
    ranks; None where nothing has left."""
    difference, anchor = moved
    return math.sqrt(difference / anchor) if anchor > 0 else None
