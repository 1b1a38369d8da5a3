"""Bitwise comparison of replicated values across ranks: finds corruption by memory, devices or links.

Stored values are compared: masters, parameters and optimizer state. Ranks hold the same where a level repeats along an
axis (N everywhere, I across groups), where pipeline stages share a parameter, and where a tensor-parallel group does
not split it. Values at level G have no replica, and are not compared. Each rank sends digests of its values, not the
values. See the runs of silent corruption in Llama 3 (arXiv 2407.21783, section 3.3.4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atoll.base.digests import Digest, digest
from atoll.plans.layouts import Level
from atoll.plans.plan import Place
from atoll.runtime.sharding.anchors import AnchorSteps
from atoll.runtime.sharding.segment import Segment
from atoll.runtime.sharding.tensors import Spread, split_place
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.transport import Transport
from atoll.runtime.verdict import named

_KINDS = ("master weights", "parameters", "optimizer state", "anchors")
AT_A_TIME = 1 << 26
"""Bytes that are copied from a device at once."""
_DIGITS = 12
"""Hexadecimal digits of a digest that travel: as many bits as a float64 holds exactly."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One replicated value on one rank. key: equal on all ranks that replicate it.  value: digest of its bytes.

    unit: its place in the model.  kind: its place in `_KINDS`.
    """

    key: int
    value: int
    unit: int
    kind: int


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks that hold something else than most. others: those that agree; where no value has a majority, all do not."""

    unit: int
    kind: int
    ranks: tuple[int, ...]
    others: tuple[int, ...]

    def describe(self, names: Sequence[str]) -> str:
        """One line; names: of the units."""
        what = f"{_KINDS[self.kind]} of {names[self.unit]}"
        if not self.others:
            return f"{named(self.ranks)} hold different {what}, and none is in the majority"
        verb = "hold" if len(self.ranks) > 1 else "holds"
        return f"{named(self.ranks)} {verb} other {what} than {named(self.others)}"


def holdings(
    units: Iterable[Unit], states: Mapping[str, Mapping[str, Any]], place: Place, outer: AnchorSteps[Any] | None = None
) -> Iterator[Replica]:
    """Yield this rank's holdings. states: optimizer states by parameter name and key.  outer: outer steps, whose
    anchors are the same on all islands; all else is an island's own."""
    island = -1 if outer is None else outer.island
    units = tuple(units)
    segments = {(unit.spec.index, part): each for unit in units for part, each in enumerate(unit.segments)}
    for at, part, tensors in () if outer is None else outer.holdings():
        segment, kind = segments[at, part], _KINDS.index("anchors")
        held = segment.flat.range(Level.G)
        common = at, part, kind, held.start, held.stop, _position(segment)
        yield Replica(short(digest(repr(common).encode())), short(digest_of(tensors)), at, kind=kind)
    for unit in units:
        for part, segment in enumerate(unit.segments):
            layout, shards = segment.flat.layout, segment.shards
            own = [state for name in segment.flat.parameters for state in _tensors(states.get(name, {}))]
            parameter = [] if shards.parameter is None or shards.are_one else [shards.parameter]
            master = [] if shards.master is None else [shards.master]
            levels = (layout.optimizer, layout.parameters, layout.optimizer)
            for kind, (level, tensors) in enumerate(zip(levels, (master, parameter, own), strict=True)):
                if tensors:
                    held = segment.flat.range(level)
                    key = unit.spec.index, part, kind, held.start, held.stop, _position(segment), island
                    yield Replica(
                        short(digest(repr(key).encode())), short(digest_of(tensors)), unit.spec.index, kind=kind
                    )


def _position(segment: Segment) -> int:
    parameters = iter(segment.flat.parameters.values())
    return split_place(next(parameters)) if segment.flat.spread is Spread.SPLIT else -1


def _tensors(state: Mapping[str, Any]) -> list[torch.Tensor]:
    return [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return the digest of the bits of some tensors, in order."""
    found = Digest()
    for tensor in tensors:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for piece in raw.split(AT_A_TIME):
            found.update(memoryview(piece.cpu().numpy()))
    return found.value


def short(hexadecimal: str) -> int:
    """The part of a digest that travels."""
    return int(hexadecimal[:_DIGITS], 16)


def share(own: Sequence[Replica], transport: Transport) -> list[list[Replica]]:
    """Return the holdings of every rank. All ranks must call it."""
    world, rank = transport.place.mesh.world, transport.place.rank
    counts = torch.zeros(world, dtype=torch.float64)
    counts[rank] = len(own)
    counts = transport.total(counts)
    table = torch.zeros(world, int(counts.max()), 4, dtype=torch.float64)
    for at, each in enumerate(own):
        table[rank, at] = torch.tensor([each.key, each.value, each.unit, each.kind], dtype=torch.float64)
    rows = transport.total(table.reshape(-1)).reshape(table.shape).tolist()
    return [
        [Replica(*map(int, row)) for row in held[: int(count)]]
        for held, count in zip(rows, counts.tolist(), strict=True)
    ]


def differences(held: Sequence[Sequence[Replica]]) -> list[Disagreement]:
    """Return the differences between ranks, in the model's order. held: by rank."""
    values: dict[tuple[int, int, int], dict[int, int]] = {}
    for rank, found in enumerate(held):
        for each in found:
            values.setdefault((each.unit, each.kind, each.key), {})[rank] = each.value
    differing = []
    for (unit, kind, _), by_rank in sorted(values.items()):
        (common, count), *rest = Counter(by_rank.values()).most_common()
        if not rest:
            continue
        most = common if 2 * count > len(by_rank) else None
        others = tuple(rank for rank, value in by_rank.items() if value == most)
        differing.append(Disagreement(unit, kind, tuple(rank for rank in by_rank if rank not in others), others=others))
    return differing
