"""Whole weights for whoever needs them, from any layout and pipeline: `Engine.stream`.

Weights travel in buckets, flat buffers of bounded bytes that every rank fills, hands on and shows in one order:

    position 0              position 1, which has the blocks     position 2
                            gathers a unit, in the wanted dtype
                            converts, copies into a bucket
    receives the bucket  <-           sends it              ->   receives it
    shows its tensors                 shows them                 shows them

[Note: who knows what] What a bucket holds follows from the model alone: units in the model's order, the names and
shapes in which `transformers` saves them, found by its own conversion on `meta`, and the dtypes. So buckets have no
headers, and every rank knows where the bytes of each tensor lie, those of other stages too.

[Note: what is held] A rank holds one unit's gathered segment and one bucket: before it fills or receives the next one
it waits until its neighbours have received the last one. The last of all leaves while the rank goes on. All ranks pass
buckets in one order, so whoever waits, waits for a rank that is behind it. What a rank gathers and hands to no
neighbour needs no bucket: its tensors are views of the segment's buffer. Buckets and segment buffers are newly
allocated and never written again, so callers may keep the tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atoll.base.errors import PlanError, RunError
from atoll.runtime.assemble.rank import Rank
from atoll.runtime.handover import StreamedTensor
from atoll.runtime.models.buffers import buffers_of, buffers_outside, first_names, kept_in_fp32
from atoll.runtime.models.saving import Adapters, SavedForm, saving_form
from atoll.runtime.services.buffers import Buffers
from atoll.runtime.sharding.access import matching_names
from atoll.runtime.sharding.tensors import dtype_of
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.transport import Channel, Message, Tag

BUCKET = 256 * 2**20
"""Default size of a bucket, in bytes."""
_ALIGNED = 16
"""Bytes to which tensors are aligned in a bucket: the largest item of any dtype."""


class _Part(NamedTuple):
    """A tensor of a bucket: bytes `begin` to `end`."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    begin: int
    end: int

    def of(self, bucket: Tensor) -> Tensor:
        """Return the tensor, a view of a bucket."""
        return bucket[self.begin : self.end].view(self.dtype).view(self.shape)

    def shown(self, tensor: Tensor) -> StreamedTensor:
        """Return what the caller of a stream gets."""
        return StreamedTensor(self.name, self.dtype, self.shape, tensor=tensor)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Tensors of one pipeline position. position: of the ranks that fill it; None if each rank has them itself."""

    number: int
    position: int | None
    parts: tuple[_Part, ...]

    @property
    def nbytes(self) -> int:
        return self.parts[-1].end


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters and buffers that are saved together, and which of the saved tensors are requested.

    position: the first pipeline position that has them; None if every one has.  dtypes: of `names`, as they are read.
    """

    position: int | None
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    saved: tuple[tuple[str, torch.dtype, torch.Size], ...]


class WeightStream:
    """Whole weights of the model, one after the other, on every rank or on one: `engine.stream`.

        for name, dtype, shape, tensor in engine.stream(dtype=torch.bfloat16):
            ...

    settle: waits for the verdict on the last step.
    """

    def __init__(self, model: nn.Module, rank: Rank, buffers: Buffers, *, settle: Callable[[], None]) -> None:
        self._model, self._rank, self._buffers, self._settle = model, rank, buffers, settle
        self._transport, self._agreement = rank.transport, rank.agreement
        self._place = rank.transport.place
        self._is_open = False
        self._leaving: list[tuple[Message, Tensor]] = []

    def check(self) -> None:
        """Raise RunError while a stream has not been read to its end."""
        if self._is_open:
            raise RunError("weights are being streamed: read engine.stream to its end, on every rank, first")

    def __call__(
        self,
        names: str | Sequence[str] = "*",
        *,
        dtype: torch.dtype | None = None,
        bucket: int = BUCKET,
        to: int | None = None,
        adapters: Adapters = "merged",
    ) -> Iterator[StreamedTensor]:
        """Stream the parameters and persistent buffers of the model, under any layout and pipeline.

        Names and shapes are those in which the installed `transformers` saves the model: fused experts are split where
        it splits them, and shared parameters come once. The order is that of the model, and equal on all ranks.
        Every rank must call it with the same arguments, and read to the end. A rank that stops early still hands on
        what others wait for. Until then no step may be taken; afterwards one may, though neighbours are still to
        receive the last buckets.

        names: patterns of `fnmatch`.  dtype: of parameters; by default that of the forward. What a model keeps in fp32
        stays in it, and buffers keep theirs.
        bucket: most bytes that go to a neighbour at a time, unless a tensor is larger.
        to: the world rank that gets the tensors, while the others get none; by default every rank gets them.
        adapters: those of `peft`. "merged": the base model, with adapters added to its weights; "apart": they alone,
        with the modules that are trained whole beside them, in the names in which `peft` saves them.

        Tensors are on the engine's device, views of new memory, which nothing writes again. With outer steps they are
        of this rank's island; inside `engine.anchored()`, of the anchors.
        Raises PlanError on every rank for arguments that do not fit; RunError while another stream is read.
        """
        self.check()
        self._settle()
        patterns = (names,) if isinstance(names, str) else tuple(names)
        problem: PlanError | None = None
        found: list[_Group] = []
        try:
            form = saving_form(self._model, adapters)
            found = self._chosen(form, patterns, dtype, bucket=bucket, to=to)
        except PlanError as error:
            problem = error
        with self._agreement.guard("choosing what to stream"):
            for unit in self._rank.sharded.units:
                unit.wait_for_parameters()
            self._agreement.agree(problem)
            said = zlib.crc32(repr((patterns, str(dtype), bucket, to, adapters)).encode())
            differing = PlanError("the ranks ask for different streams; give every rank the same arguments")
            self._agreement.agree_on([said], differing)
        self._is_open = True
        return self._stream(self._own(form, found), _buckets(found, bucket), to)

    # ---- what there is

    def _chosen(
        self, form: SavedForm, patterns: Sequence[str], dtype: torch.dtype | None, *, bucket: int, to: int | None
    ) -> list[_Group]:
        if bucket < 1:
            raise PlanError(f"bucket = {bucket}: a stream needs at least one byte at a time")
        if to is not None and to not in range(self._place.mesh.world):
            raise PlanError(f"to = {to}: the mesh has ranks 0 to {self._place.mesh.world - 1}")
        if dtype is not None and not dtype.is_floating_point:
            raise PlanError(f"dtype = {dtype}: weights are streamed in a floating-point dtype")
        every = self._groups(form, dtype_of(self._rank.plan.precision.compute) if dtype is None else dtype)
        asked = set(matching_names([name for group in every for name, _, _ in group.saved], patterns))
        chosen = [replace(group, saved=tuple(each for each in group.saved if each[0] in asked)) for group in every]
        return [group for group in chosen if group.saved]

    def _groups(self, form: SavedForm, dtype: torch.dtype) -> list[_Group]:
        """Return everything that is saved of the model, in the order in which it is streamed."""
        shape, shapes = self._rank.sharded.shape, self._rank.shapes
        is_precise = kept_in_fp32(self._model, dtype)
        entries = list(self._known_buffers())
        for spec in self._rank.sharded.specs:
            position = shape.owners(spec.index)[0] if spec.blocks else None
            for name in spec.names:
                own = torch.float32 if is_precise(name) and dtype.itemsize < 4 else dtype
                meta = torch.empty(shapes[name], dtype=own, device="meta")
                entries.append((spec.blocks[0] if spec.blocks else -1, name, position, meta))
        entries.sort(key=itemgetter(0))
        metas = {name: meta for _, name, _, meta in entries}
        positions = {name: position for _, name, position, _ in entries}
        found = []
        for names in form.together(metas):
            made = form.saved({name: metas[name] for name in names})
            where = {positions[name] for name in names}
            assert len(where) == 1, f"{names} are of one block"
            found.append(
                _Group(
                    where.pop(),
                    tuple(names),
                    dtypes=tuple(form.needed(name, metas[name].dtype) for name in names),
                    saved=tuple((name, tensor.dtype, tensor.shape) for name, tensor in made.items()),
                )
            )
        return found

    def _known_buffers(self) -> Iterator[tuple[int, str, int | None, Tensor]]:
        """Yield the persistent buffers of the whole model: block, name, pipeline position and the buffer on `meta`.
        Those outside of all blocks come last, and every position has them."""
        adapter, shape = self._rank.adapter, self._rank.sharded.shape
        blocks, later = adapter.blocks(), first_names(adapter)
        for stage, run in enumerate(shape.runs):
            for at in run:
                for name, buffer in buffers_of(blocks[at]).items():
                    if name not in later:
                        yield at, name, shape.plan.schedule.placement.rank_of(stage), buffer.to("meta")
        for name, buffer in buffers_outside(adapter).items():
            yield len(blocks), name, None, buffer.to("meta")

    # ---- streaming

    def _stream(
        self, own: Iterator[tuple[str, Tensor]], buckets: Sequence[_Bucket], to: int | None
    ) -> Iterator[StreamedTensor]:
        walk = self._walk(own, buckets, to)
        try:
            for each in walk:
                if each is not None:
                    yield each
                del each
        except GeneratorExit:
            for _ in walk:  # whoever stops early still hands on what others wait for
                pass
            raise
        finally:
            self._is_open = False

    def _walk(
        self, own: Iterator[tuple[str, Tensor]], buckets: Sequence[_Bucket], to: int | None
    ) -> Iterator[StreamedTensor | None]:
        """Yield each tensor, or None in the place of one that is not shown here. Nothing is held of those before it."""
        routes = [self._route(bucket, to) for bucket in buckets]
        last = max((at for at, (_, following) in enumerate(routes) if following), default=-1)
        for at, (bucket, (neighbour, following)) in enumerate(zip(buckets, routes, strict=True)):
            flat: Tensor | None = None
            if neighbour is not None or following:
                with self._agreement.guard("streaming weights"):
                    flat = self._pass(bucket, own, neighbour, following=following, is_last=at == last)
            for part in bucket.parts:
                tensor: Tensor | None = None
                if flat is not None:
                    tensor = part.of(flat)
                elif bucket.position in (None, self._place.pp):  # what nobody else receives needs no bucket
                    with self._agreement.guard("streaming weights"):
                        tensor = _next(own, part)
                is_hidden = to not in (None, self._place.rank)
                yield None if tensor is None or is_hidden else part.shown(tensor)
                del tensor
            del flat

    def _pass(
        self,
        bucket: _Bucket,
        own: Iterator[tuple[str, Tensor]],
        neighbour: int | None,
        *,
        following: Sequence[int],
        is_last: bool,
    ) -> Tensor:
        """Fill a bucket, or receive it, and hand it on.

        is_last: the rank hands on no other after it.
        """
        line, tag = self._place.peers("pp"), Tag(Channel.HAND_ON, bucket.number % Tag.LIMIT)
        for message, _ in self._leaving:
            message.wait()
        self._leaving.clear()
        flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._transport.device)
        if neighbour is None:
            for part in bucket.parts:
                part.of(flat).copy_(_next(own, part))
        else:
            self._transport.receive(flat, line[neighbour], tag).wait()
        for position in following:
            if is_last:
                self._transport.post(flat, line[position], tag)
            else:
                self._leaving.append((self._transport.send(flat, line[position], tag), flat))
                self._transport.count("pp", flat.nbytes)
        return flat

    def _route(self, bucket: _Bucket, to: int | None) -> tuple[int | None, tuple[int, ...]]:
        """Return the neighbour from which this position receives a bucket, or None, and those that get it from here."""
        place, source = self._place, bucket.position
        target = None if to is None else place.mesh.place(to)
        if source is None or (target is not None and target.peers("pp") != place.peers("pp")):
            return None, ()
        low, high = (0, place.mesh.pipeline - 1) if target is None else sorted((source, target.pp))
        if not low <= place.pp <= high:
            return None, ()
        neighbour = None if place.pp == source else place.pp + (1 if source > place.pp else -1)
        others = (at for at in (place.pp - 1, place.pp + 1) if low <= at <= high)
        return neighbour, tuple(at for at in others if at != neighbour)

    def _own(self, form: SavedForm, groups: Sequence[_Group]) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank's position has of the groups, as it is saved. Every rank of the position takes part."""
        mine = [group for group in groups if group.position in (None, self._place.pp)]
        dtypes = {name: dtype for group in mine for name, dtype in zip(group.names, group.dtypes, strict=True)}
        units = {name: unit for unit in self._rank.sharded.units for name in unit.spec.names}
        buffers = self._buffers.own()
        read: dict[str, Tensor] = {}
        for group in mine:
            for name in group.names:
                if name not in read:
                    read |= self._read(units[name], dtypes) if name in units else {name: buffers[name].clone()}
            made = form.saved({name: read.pop(name) for name in group.names})
            for name, dtype, _ in group.saved:
                yield name, made.pop(name).to(dtype)
            made.clear()

    def _read(self, unit: Unit, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Return the parameters of a unit that are requested, whole. dtypes: of everything that is requested."""
        found: dict[str, Tensor] = {}
        for segment in unit.segments:
            asked = {name: dtypes[name] for name in segment.flat.parameters if name in dtypes}
            if asked:
                # In the widest dtype that is asked for: casting before the gather gives the same bits as after it.
                widest = max(asked.values(), key=lambda dtype: dtype.itemsize)
                found |= {name: whole.to(asked[name]) for name, whole in segment.read_views(widest) if name in asked}
        return found


@torch.no_grad()
def _next(own: Iterator[tuple[str, Tensor]], part: _Part) -> Tensor:
    """Return the next tensor of this position. All of its ranks take part in the gather, whoever gets the result."""
    name, tensor = next(own)
    assert name == part.name, f"{name} is streamed in the place of {part.name}"
    return tensor


def _buckets(groups: Sequence[_Group], most: int) -> list[_Bucket]:
    """Pack tensors into buckets in their order. One that is larger has a bucket of its own."""
    found: list[_Bucket] = []
    parts: list[_Part] = []
    position: int | None = None

    def close() -> None:
        if parts:
            found.append(_Bucket(len(found), position, tuple(parts)))
            parts.clear()

    for group in groups:
        if group.position != position:
            close()
            position = group.position
        for name, dtype, shape in group.saved:
            begin = -(-parts[-1].end // _ALIGNED) * _ALIGNED if parts else 0
            nbytes = shape.numel() * dtype.itemsize
            if parts and begin + nbytes > most:
                close()
                begin = 0
            parts.append(_Part(name, dtype, shape, begin=begin, end=begin + nbytes))
    close()
    return found
