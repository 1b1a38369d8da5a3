"""Coded hops between stages: their bytes, the seconds of coding, and the memory of messages on their way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from atoll.plans.layouts import CODES, Codec
from atoll.prediction.cost.cluster import Cluster
from atoll.prediction.cost.kernels import KernelClock, Pass
from atoll.prediction.cost.ranks import Ranks
from atoll.prediction.cost.slices import At
from atoll.program import Do, RankShape

_ON_CPU = {"bf16": (5, 5), "fp8": (28, 60), "int8": (26, 7), "int4": (44, 19), "int2": (60, 25)}
"""Bytes that a core with 10 GB/s moves while it encodes an element, and while it decodes one."""


@dataclass(frozen=True)
class CodedHops:
    """The coded hops of a plan: those between nodes of the cluster, or all with `Codecs.near` or if there is none."""

    ranks: Ranks
    cluster: Cluster | None

    @cached_property
    def codec(self) -> Codec | None:
        """The codec in blocks of a token's elements; None if nothing is encoded."""
        use, nbytes = self.ranks.use, self.ranks.message_bytes
        width = nbytes * use.parts // (use.tokens * use.item)
        return self.ranks.plan.codecs.hop_of(width, use.item) if width else None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a coded message."""
        whole = self.ranks.message_bytes
        return whole if self.codec is None else self.codec.nbytes(whole // self.ranks.use.item)

    def between(self, rank: int, other: int) -> bool:
        """Return True if hops between two pipeline ranks are coded."""
        plan, cluster = self.ranks.plan, self.cluster
        is_coded = self.codec is not None and rank != other
        return is_coded and (plan.codecs.near or cluster is None or not cluster.share_nodes(plan.mesh, rank, other))

    def _ends(self, rank: int) -> Iterator[tuple[int, bool]]:
        """Yield the stages of a rank at an end of a coded hop, and whether it leads to the next stage."""
        placement, runs = self.ranks.plan.schedule.placement, self.ranks.runs
        for stage in placement.stages_of(rank) if self.codec is not None else ():
            for is_next, other in ((False, stage - 1), (True, stage + 1)):
                # What is before the first trained block has no gradient and travels as it is.
                is_hop = 0 <= other < len(runs) and runs[min(stage, other)].stop > self.ranks.first_trained
                if is_hop and self.between(rank, placement.rank_of(other)):
                    yield stage, is_next

    def sent(self, rank: int) -> dict[At, float]:
        """Return the bytes of a rank's messages that differ from `Ranks.message_bytes`."""
        coded = {(Do.SEND_F if is_next else Do.SEND_B, at): float(self.nbytes) for at, is_next in self._ends(rank)}
        return {**self.ranks.slices.sent(rank), **coded}

    def received(self, rank: int) -> dict[At, int]:
        """Return the bytes of the coded messages that a rank receives."""
        return {(Do.RECV_B if is_next else Do.RECV_F, at): self.nbytes for at, is_next in self._ends(rank)}

    def seconds(self, rank: int, clock: KernelClock) -> dict[At, float]:
        """Return the seconds of coding, by the blocks at the ends of stages beside which it runs."""
        found: defaultdict[At, float] = defaultdict(float)
        for stage, is_next in self._ends(rank):
            run, (encoding, decoding) = self.ranks.runs[stage], self._coding(clock)
            block = run.stop - 1 if is_next else run.start
            found[Do.F, block] += encoding if is_next else decoding
            found[Do.I, block] += decoding if is_next else encoding
        return dict(found)

    def _coding(self, clock: KernelClock) -> tuple[float, float]:
        """Return the seconds of encoding a message, and of decoding it."""
        assert self.codec is not None, "there are coded hops"
        whole, count = self.ranks.message_bytes, self.ranks.message_bytes / clock.item
        if clock.device.is_cpu:
            encoding, decoding = (Pass(count * each, 10) for each in _ON_CPU[self.codec.name])
        else:  # compiled: what is encoded is read for the scales, too
            twice = 1 + CODES[self.codec.name].is_scaled
            encoding, decoding = Pass(float(twice * whole + self.nbytes), 4), Pass(float(whole + self.nbytes), 2)
        return clock.seconds([encoding]), clock.seconds([decoding])

    def with_messages(self, shape: RankShape) -> RankShape:
        """Return the shape of a rank with coded messages, from their POST until they are decoded."""
        if len(self.ranks.of_slices) > 1:
            own = zip(self.ranks.of_slices, shape.of_slices, strict=True)
            return replace(shape, of_slices=tuple(CodedHops(of, self.cluster).with_messages(each) for of, each in own))
        besides = dict(shape.besides)
        for stage, is_next in self._ends(shape.rank):
            way = (Do.POST_B, Do.RECV_B, Do.SEND_F) if is_next else (Do.POST_F, Do.RECV_F, Do.SEND_B)
            parts = {"buffers": self.nbytes}, {"buffers": -self.nbytes}, {"passing": self.nbytes}
            besides |= {(do, stage): part for do, part in zip(way, parts, strict=True)}
        return replace(shape, besides=besides)
