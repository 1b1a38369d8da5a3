"""Anchors in host memory, which records of rounds step: see `atoll.runtime.federation.elements.Holdings`.

[Note: one arithmetic] Anchors are bitwise equal on islands of any devices and layouts. So they are stepped on the host,
by additions and multiplications of one element that round by themselves: torch's `alpha` is fused into one rounding
where elements fill a vector, and not at the end of a tensor, which is elsewhere in another layout.

[Note: the trail] A thread of the exchange steps anchors as soon as it can: the ranks of an island do so at different
times. Masters follow after a step that all ranks know. So a rank keeps each state from the one that its masters follow
to the newest: nearly always one or two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from atoll.base.digests import digest
from atoll.plans.federation.records import Contribution
from atoll.plans.layouts import Codec, Slice
from atoll.plans.layouts.flat import Box
from atoll.plans.outer import Outer
from atoll.runtime.federation.elements import PartElements, TensorPart
from atoll.runtime.federation.events import BITS
from atoll.runtime.sharding import coding
from atoll.runtime.sharding.anchors import Anchor
from atoll.runtime.sharding.segment import Segment
from atoll.runtime.transport import Transport

_MOMENTUM = "momentum of "
PIECE = 1 << 20
"""Elements that are read together, at most: a multiple of the blocks of codecs."""


@dataclass(frozen=True, slots=True)
class AnchorState:
    """An anchor and its momentum after a round. Nothing writes to them."""

    value: torch.Tensor
    momentum: torch.Tensor | None


class HostAnchor(Anchor):
    """An anchor in host memory. `value` and `momentum` are what the masters follow. later: what comes after."""

    def __init__(self, segment: Segment, outer: Outer, transport: Transport, *, tag: tuple[int, int]) -> None:
        super().__init__(segment, outer, transport, tag=tag, device=torch.device("cpu"))
        self._codec = outer.codec
        self.later: list[AnchorState] = []

    @property
    def newest(self) -> AnchorState:
        """The state after the last round that is known here."""
        return self.later[-1] if self.later else AnchorState(self.value, self.momentum)

    def follow(self, count: int) -> torch.Tensor:
        """Let the masters follow `count` states later, and return what the anchor has moved by."""
        before, state = self.value, self.later[count - 1]
        self.value, self.momentum = state.value, state.momentum
        del self.later[:count]
        return self.value - before

    def leave(self, *, seed: int, name: str) -> tuple[torch.Tensor, PartElements, torch.Tensor]:
        """Return the outer gradient in host memory, its parts as they are sent, and its squares with those of the
        anchor (`moved`). With a codec it is what the parts decode to.

        seed, name: of stochastic rounding, which differs between islands and rounds.
        """
        flow, found = self.value - self.own.to(self.value.device), dict[TensorPart, memoryview]()
        moved = self.moved(flow).cpu()
        for part, each in self.parts():
            values = flow.narrow(0, each.offset, each.stop - each.start)
            if self._codec is None:
                found[part] = raw(values)
                continue
            lost = None if self.residual is None else self.residual.narrow(0, each.offset, values.numel())
            noise = int(digest(f"{seed} {name} {part}".encode())[:15], 16)
            found[part] = raw(encoded(self._codec, values, residual=lost, seed=noise))
        return flow, found, moved

    def bits(self) -> int:
        """Return the sum of the bits of what this rank accounts for, as integers modulo `BITS`. Over all ranks it is
        the same for any division of the parameters: padding is zero."""
        if not self.is_counted:
            return 0
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[self.value.element_size()]
        return int(self.value.view(kind).sum(dtype=torch.int64)) % BITS

    def parts(self) -> Iterator[tuple[TensorPart, Slice]]:
        """Yield the parts of the parameters that the anchor has, in pieces: who has less reads no more than that."""
        for each in self.slices:
            name = _named(each.name, self.segment.flat.boxes[each.name])
            for begin in range(each.start, each.stop, PIECE):
                end = min(begin + PIECE, each.stop)
                piece = replace(each, start=begin, stop=end, offset=each.offset + begin - each.start)
                yield TensorPart(name, begin, end), piece


class AnchorHoldings:
    """The anchors of a rank, as the exchange knows them.

    fragments: anchors of each fragment.  item: bytes of an element.  bases: the rounds that have set the fragments.
    """

    def __init__(
        self, fragments: Mapping[int, Sequence[HostAnchor]], outer: Outer, *, item: int, bases: Sequence[int]
    ) -> None:
        self._outer, self._item = outer, item
        self._anchors = {at: list(fragments.get(at, ())) for at in range(len(bases))}
        # Rounds that have set each fragment: the one that the masters follow, and those after it.
        self.trail = {at: [base] for at, base in enumerate(bases)}
        # The rounds after which anchors of another island were taken over; no earlier ones can be followed.
        self.taken = 0

    def parts(self, fragment: int) -> Sequence[TensorPart]:
        """Return the parts of a fragment that this rank holds."""
        return [part for anchor in self._anchors[fragment] for part, _ in anchor.parts()]

    def state_parts(self, fragment: int) -> Sequence[TensorPart]:
        """Return the parts of what `show` returns."""
        own = self.parts(fragment)
        momenta = [part._replace(name=_MOMENTUM + part.name) for part in own] if self._outer.inertia else []
        return [*own, *momenta]

    def contribution_bytes(self, part: TensorPart) -> int:
        """Return the bytes of a part of a contribution."""
        codec = self._outer.codec
        return self.state_bytes(part) if codec is None else codec.nbytes(part.stop - part.start)

    def state_bytes(self, part: TensorPart) -> int:
        """Return the bytes of a part of what `show` returns."""
        return (part.stop - part.start) * self._item

    def version(self, fragment: int) -> int:
        """Return the round that last set a fragment, -1 for the initial values."""
        return self.trail[fragment][-1]

    def check(self, fragment: int, elements: PartElements) -> None:
        """Raise ValueError if a contribution lacks elements of this rank's parts."""
        found = _by_tensor(elements)
        for anchor in self._anchors[fragment]:
            for part, each in anchor.parts():
                missing = (
                    part.stop
                    - part.start
                    - sum(len(_place_in(anchor, each, part, part=other)[0]) for other, _ in found.get(part.tensor, ()))
                )
                if missing > 0:
                    raise ValueError(f"it does not have {missing} elements of {part.name}")

    def step(self, fragment: int, version: int, averaged: Sequence[tuple[Contribution, PartElements]]) -> None:
        """Take the outer step of a fragment."""
        codec = self._outer.codec
        shares = weights_of([each for each, _ in averaged], self._outer)
        found = [_by_tensor(elements) for _, elements in averaged]
        for anchor in self._anchors[fragment]:
            before = anchor.newest
            mean = torch.zeros_like(before.value)
            for share, elements in zip(shares, found, strict=True):
                mean = torch.add(mean, torch.mul(_assembled(anchor, elements, "", codec=codec), share))
            anchor.later.append(stepped(before, mean, self._outer))
        self.trail[fragment].append(version)

    def show(self, fragment: int) -> PartElements:
        """Return the elements of a fragment's anchors and momenta."""
        found: dict[TensorPart, memoryview] = {}
        for anchor in self._anchors[fragment]:
            state = anchor.newest
            for part, each in anchor.parts():
                found[part] = raw(state.value.narrow(0, each.offset, each.stop - each.start))
                if state.momentum is not None:
                    moving = part._replace(name=_MOMENTUM + part.name)
                    found[moving] = raw(state.momentum.narrow(0, each.offset, each.stop - each.start))
        return found

    def take(self, fragment: int, version: int, elements: PartElements) -> None:
        """Replace a fragment's anchors by those of another island; without elements they stay as they are."""
        found = _by_tensor(elements)
        for anchor in self._anchors[fragment]:
            before = anchor.newest
            value, momentum = before.value, before.momentum
            if elements:
                value = _assembled(anchor, found, "", codec=None)
                momentum = None if momentum is None else _assembled(anchor, found, _MOMENTUM, codec=None)
            anchor.later.append(AnchorState(value, momentum))
        self.trail[fragment].append(version)
        self.taken = max(self.taken, version + 1)

    def is_ahead(self, fragment: int) -> bool:
        """Return True if a round has set the fragment that the masters do not follow yet."""
        return len(self.trail[fragment]) > 1

    def follow(self, fragment: int, rounds: int) -> list[torch.Tensor] | None:
        """Let the masters follow the state after so many rounds. Return what each anchor has moved by; None if it is
        the one that they follow already."""
        count = sum(version < rounds for version in self.trail[fragment]) - 1
        if count < 1:
            return None
        del self.trail[fragment][:count]
        return [anchor.follow(count) for anchor in self._anchors[fragment]]


def restore_residuals(anchors: Iterable[HostAnchor], before: Iterable[torch.Tensor | None]) -> None:
    """Let residuals be as they were before outer gradients left: nothing of these has arrived, so nothing was lost."""
    for anchor, residual in zip(anchors, before, strict=True):
        if anchor.residual is not None and residual is not None:
            anchor.residual.copy_(residual)


def weights_of(contributions: Sequence[Contribution], outer: Outer) -> list[float]:
    """Return the share of each contribution in the mean."""
    total = sum(each.tokens for each in contributions)
    is_equal = outer.apart is None or outer.apart.weights == "equal" or not total
    return [1.0 / len(contributions) if is_equal else each.tokens / total for each in contributions]


def stepped(before: AnchorState, mean: torch.Tensor, outer: Outer) -> AnchorState:
    """Return the state after the outer step with a mean: see [Note: one arithmetic]."""
    momentum = before.momentum
    if momentum is not None:
        momentum = torch.add(torch.mul(momentum, outer.inertia), mean)
        mean = torch.add(mean, torch.mul(momentum, outer.inertia)) if outer.optimizer == "nesterov" else momentum
    return AnchorState(torch.sub(before.value, torch.mul(mean, outer.rate)), momentum)


def raw(values: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, which keep it alive."""
    content: Any = values.contiguous().view(torch.uint8).numpy()
    return memoryview(content)


def encoded(codec: Codec, values: torch.Tensor, *, residual: torch.Tensor | None, seed: int) -> torch.Tensor:
    """Return the message of some values, and let these be what it decodes to. residual: see `coding.encode`."""
    message = torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8)
    noise = coding.draw_uniform(codec, values.numel(), seed, device=values.device)
    coding.encode(codec, values, message, residual=residual, noise=noise)
    coding.decode(codec, message, values)
    return message


def _named(name: str, box: Box) -> str:
    """The name of a parameter, or of the box of it that a tensor-parallel rank has."""
    if box.sizes == box.shape:
        return name
    dims = ", ".join(f"{begin}:{begin + size}" for begin, size in zip(box.offsets, box.sizes, strict=True))
    return f"{name}[{dims}]"


def _by_tensor(elements: PartElements) -> dict[str, list[tuple[TensorPart, memoryview]]]:
    found: dict[str, list[tuple[TensorPart, memoryview]]] = {}
    for part, held in elements.items():
        found.setdefault(part.tensor, []).append((part, held))
    return found


def _assembled(
    anchor: HostAnchor,
    elements: Mapping[str, Sequence[tuple[TensorPart, memoryview]]],
    prefix: str,
    *,
    codec: Codec | None,
) -> torch.Tensor:
    """Return the anchor's elements from parts that islands cut in any way. What is padding is zero."""
    whole = torch.zeros_like(anchor.value)
    for own, each in anchor.parts():
        for part, held in elements.get(prefix + own.tensor, ()):
            to, of = _place_in(anchor, each, own._replace(name=prefix + own.name), part=part)
            if len(to):
                values = _decoded(held, part.stop - part.start, codec=codec, dtype=whole.dtype)
                whole[_index(to)] = values[_index(of)]
    return whole


Places: TypeAlias = range | torch.Tensor


def _index(places: Places) -> slice | torch.Tensor:
    return slice(places.start, places.stop) if isinstance(places, range) else places


def _place_in(anchor: HostAnchor, each: Slice, own: TensorPart, *, part: TensorPart) -> tuple[Places, Places]:
    """Return where elements of an anchor's slice are in the anchor, and in another part of the same tensor.

    own: the slice as a part.
    """
    if part.name == own.name:
        begin, end = max(own.start, part.start), min(own.stop, part.stop)
        at = each.offset + begin - own.start
        return range(at, max(at, at + end - begin)), range(begin - part.start, max(begin, end) - part.start)
    # Boxes of other shapes: by the position of each element in the whole tensor.
    box = anchor.segment.flat.boxes[each.name]
    theirs = _box_of(part.name, box.shape)
    of = torch.arange(part.start, part.stop)
    places = torch.zeros_like(of)
    is_inside = torch.ones_like(of, dtype=torch.bool)
    rest, sizes = of, list(zip(theirs.offsets, theirs.sizes, box.offsets, box.sizes, strict=True))
    step = 1
    for offset, size, own_offset, own_size in reversed(sizes):
        coordinate = rest % size + offset - own_offset
        rest = rest // size
        is_inside &= (coordinate >= 0) & (coordinate < own_size)
        places += coordinate * step
        step *= own_size
    is_inside &= (places >= own.start) & (places < own.stop)
    return places[is_inside] + (each.offset - own.start), of[is_inside] - part.start


def _box_of(name: str, shape: Sequence[int]) -> Box:
    """Return the box that a part's name says, of a tensor of this shape. Raises ValueError for any other."""
    _, has_box, dims = name.rstrip("]").partition("[")
    if not has_box:
        return Box.whole(shape)
    try:
        ranges = [(int(begin), int(end)) for begin, end in (each.split(":") for each in dims.split(","))]
    except ValueError:
        raise ValueError(f"{name} is no part of a tensor") from None
    if len(ranges) != len(shape) or any(not 0 <= a < b <= size for (a, b), size in zip(ranges, shape, strict=True)):
        raise ValueError(f"{name} is no part of a tensor of shape {tuple(shape)}")
    return Box(tuple(shape), tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))


def _decoded(held: memoryview, count: int, *, codec: Codec | None, dtype: torch.dtype) -> torch.Tensor:
    # A copy where memory is not writable, as torch asks for.
    message = torch.frombuffer(held if not held.readonly else bytearray(held), dtype=torch.uint8)
    if codec is None:
        return message.view(dtype)
    values = torch.empty(count, dtype=dtype)
    coding.decode(codec, message, values)
    return values
