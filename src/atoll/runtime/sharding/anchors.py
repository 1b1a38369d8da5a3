"""Anchors of this rank: what outer steps store, and how masters follow.

[Note: anchors] A rank stores the part of each trained parameter's anchor, and of its outer momentum, that it has at
level G of its island. Nothing of them is sharded over islands, so a lost island takes nothing with it. Islands of one
world average over the mesh (`atoll.runtime.sharding.outer`), islands that come and go over the records of rounds
(`atoll.runtime.sharding.federated`).

[Note: what an arrival writes] Parameters that other ranks read in place are written when all ranks of the group have
settled theirs: see [Note: reading in place] in transport/base.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from atoll.plans.layouts import SYNC_PARAMETER, Level, Slice
from atoll.plans.outer import Outer
from atoll.runtime.checkpoint import Piece
from atoll.runtime.sharding.norm import sum_of_squares
from atoll.runtime.sharding.segment import Segment
from atoll.runtime.sharding.tensors import Spread
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.transport import Channel, Tag, Transport


class Anchor:
    """The anchor of a segment, with its outer momentum and its residual.

    tag: unit and segment.  device: of the anchor: that of the rank, or the host's.
    residual: what encoding outer gradients lost; None without error feedback.
    """

    def __init__(
        self, segment: Segment, outer: Outer, transport: Transport, *, tag: tuple[int, int], device: torch.device
    ) -> None:
        assert segment.shards.master is not None, "an anchor is of trained parameters"
        self.segment, self.tag = segment, tag
        self._transport, self._device = transport, device
        self.value = torch.empty_like(self.own, device=device)
        self.momentum = torch.zeros_like(self.value) if outer.inertia else None
        self.residual = torch.zeros_like(self.value) if outer.keeps_residual else None
        self.adopt()

    @property
    def own(self) -> torch.Tensor:
        """This rank's part of the masters at level G, on the device: a copy of those that rest in host memory."""
        segment, level = self.segment, self.segment.flat.layout.optimizer
        assert segment.shards.master is not None, "an anchor is of trained parameters"
        outer, inner = segment.flat.range(level), segment.flat.range(Level.G)
        own = segment.shards.master.detach().narrow(0, inner.start - outer.start, len(inner))
        return own.to(segment.flat.around.device)

    def adopt(self, names: Collection[str] | None = None) -> None:
        """Set the anchor to the island's parameters: of all names, or of some. Nothing of them is owed any more."""
        own = self.own
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

    @property
    def is_counted(self) -> bool:
        """True if this rank accounts for the anchor's elements among those of its tensor-parallel group."""
        return self.segment.flat.spread is Spread.SPLIT or self._transport.place.tp == 0

    def moved(self, flow: torch.Tensor) -> torch.Tensor:
        """Return the squares of an outer gradient and of the anchor, summed over what this rank accounts for: [2],
        float64."""
        if self.is_counted:
            return torch.stack([sum_of_squares(flow), sum_of_squares(self.value)])
        return torch.zeros(2, dtype=torch.float64, device=flow.device)

    def take(self, values: torch.Tensor) -> None:
        """Overwrite the masters."""
        assert self.segment.shards.master is not None, "an anchor is of trained parameters"
        self.segment.shards.master.detach().copy_(values)

    def apply(self, *, share: float) -> None:
        """Mix the island's masters with the anchor. share: weight of the masters."""
        target, source = self._whole(self.value)
        if share:
            target.lerp_(source.to(target.device), 1.0 - share)
        else:
            target.copy_(source)

    def shift(self, by: torch.Tensor) -> None:
        """Add to the island's masters. by: what this rank's part is moved by."""
        target, source = self._whole(by)
        target.add_(source.to(target.device))

    def _whole(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the masters, and the elements of `values` that belong to them."""
        segment, level = self.segment, self.segment.flat.layout.optimizer
        assert segment.shards.master is not None, "an anchor is of trained parameters"
        # The masters have the level of os, the anchor level G. With os at N or I the island gathers the anchor; every
        # rank of a group then mixes the same values, so replicas stay equal.
        target, source = segment.shards.master.detach(), values
        moves = segment.flat.sharding.real(SYNC_PARAMETER[Level.G, level])
        if moves:
            outer, inner = segment.flat.range(level), segment.flat.range(Level.G)
            source = torch.empty_like(target, device=segment.flat.around.device)
            source.narrow(0, inner.start - outer.start, len(inner)).copy_(values)
            tag = Tag(Channel.GATHER_INTRA, self.tag[0], Tag.LAST - self.tag[1])  # which no gather of a step has
            for move in moves:
                part = segment.flat.range(move.coarse)
                buffer = source.narrow(0, part.start - outer.start, len(part))
                self._transport.gather(buffer, segment.flat.around.peers(move.axis), tag)
        return target, source

    def tensors(self) -> list[torch.Tensor]:
        """Return anchor and momentum, which are equal on all islands."""
        return [self.value] if self.momentum is None else [self.value, self.momentum]


AnchorKind = TypeVar("AnchorKind", bound=Anchor)


class AnchorSteps(ABC, Generic[AnchorKind]):
    """The outer steps of one rank, in any way of averaging.

    units: of this rank.  count: number of units of the model.  make: returns the anchor of a segment, given its unit
    and its number there.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        outer: Outer,
        transport: Transport,
        *,
        count: int,
        make: Callable[[Segment, tuple[int, int]], AnchorKind],
    ) -> None:
        self.outer = outer
        self._count = count
        self._transport = transport
        # Fragment -> its units on this rank. Fragments are dealt over the whole model, so a pipeline rank may have no
        # unit of one; ranks that share parameters have the same.
        self._fragments: dict[int, list[tuple[Unit, list[AnchorKind]]]] = {}
        for unit in units:
            own = [
                make(segment, (unit.spec.index, part))
                for part, segment in enumerate(unit.segments)
                if segment.flat.trainable
            ]
            if own:
                fragment = outer.fragment_of(unit.spec.index, count)
                self._fragments.setdefault(fragment, []).append((unit, own))
        # Since the last `take_moved`, on the CPU.
        self._moved = torch.zeros(2, dtype=torch.float64)

    def meets(self, step: int) -> bool:
        """Return True if islands wait for each other after `step`."""
        return self.outer.meets(step, self._count)

    def count(self, tokens: int) -> None:
        """Note that the parameters have learned from so many tokens more."""

    @property
    def island(self) -> int:
        """The island among those of a checkpoint."""
        return self._transport.place.inter

    @abstractmethod
    def is_due(self, step: int) -> bool:
        """Return True if there is outer work after `step`."""

    @abstractmethod
    def act(self, step: int) -> int:
        """Do the outer work after `step`, and return the step that the island is at then. Every rank calls it, once its
        masters are those after the step."""

    def settle(self) -> None:
        """Wait for everything in flight that will be applied after a certain step, and step the anchors with it. The
        parameters are still mixed with them after that step, so results do not change."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what is in flight and the residuals, before a load."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has besides anchors, momenta and residuals."""

    @abstractmethod
    def goes_on(self, saved: Mapping[str, Any] | None) -> bool:
        """Return True if each island can continue where a checkpoint's was."""

    @abstractmethod
    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Continue with what `state` has returned."""

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
    def _write(self, write: Callable[[int, AnchorKind], None], fragments: Collection[int] | None = None) -> None:
        """Write the masters of all units, or of some fragments."""
        chosen = self._fragments if fragments is None else {each: self._fragments.get(each, []) for each in fragments}
        units = [unit for own in chosen.values() for unit, _ in own]
        for unit in units:
            unit.wait_for_parameters()
        if units:
            self._transport.memory.wait_for_readers()  # see [Note: what an arrival writes]
        for at, anchor in enumerate(anchor for own in chosen.values() for _, anchors in own for anchor in anchors):
            write(at, anchor)
        for unit in units:
            unit.sync_parameters()

    @torch.no_grad()
    def adopt(self, names: Collection[str] | None = None) -> None:
        """Set anchors to the island's parameters after these were written: of all names, or of some."""
        for anchor in self._anchors():
            anchor.adopt(names)

    def take_moved(self) -> torch.Tensor:
        """Return the squares of the outer gradients that were sent since the last call, and those of their anchors, of
        this rank's parts: [2], float64. Summed over all ranks, they are the argument of `distance`."""
        moved, self._moved = self._moved, torch.zeros(2, dtype=torch.float64)
        return moved

    # ---- what is stored

    def _anchors(self) -> Iterator[AnchorKind]:
        for own in self._fragments.values():
            for _, anchors in own:
                yield from anchors

    def _anchors_of(self, fragment: int) -> Iterator[AnchorKind]:
        for _, anchors in self._fragments.get(fragment, ()):
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
        return ("islands", str(self.island), "outer", "residual")

    def reset_momentum(self) -> None:
        """Set the outer momentum to zero."""
        for anchor in self._anchors():
            if anchor.momentum is not None:
                anchor.momentum.zero_()
