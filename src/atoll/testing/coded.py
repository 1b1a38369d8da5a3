"""The reference of codecs: the messages of a run, encoded and decoded in one process with torch alone.

Nothing of Atoll is imported here. A rank tells where its buffers have the elements of which parameter (`Buffer`), and
which microbatches it reduces together; this file encodes the same messages a second time, by what the documentation
says:

    blocks          a buffer of `inter * intra` equal blocks; rank (i, j), group i, j-th rank in it, owns block
                    j * inter + i at level G
    gradients       rank (i, j) encodes the sum of its group, plus what it lost before, for each other group; the owner
                    adds what it decodes. Where the optimizer needs the sums of all groups, each owner encodes its sum
    outer gradients each rank encodes the blocks of its shard, one for each island, for their owners; the owner encodes
                    the sum, and all divide what they decode by the number of islands
    parameters      p at G: the owner encodes the parameter. p coarser than os at G: the owner encodes the difference of
                    its master to the copy that all have, and all add what they decode
    random numbers  one for each element of a message: torch.rand of a generator with the seed of its names, 2**-25 at
                    least
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

_LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0, "int2": 2.0}


@dataclass(frozen=True, slots=True)
class BufferPart:
    """A parameter in a buffer, from `offset` on: the box of it that a rank has."""

    name: str
    offset: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GradientStream:
    """Gradients of one phase of a buffer.

    uses: names under which the model uses what the buffer has, each with the parameter's own.  reductions: gradients
    that are reduced together, in order, each given by the rank's microbatch and the use.
    """

    phase: str
    uses: tuple[tuple[str, str], ...]
    reductions: tuple[tuple[tuple[int, str], ...], ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A flat buffer that the data-parallel ranks of one pipeline and tensor-parallel rank have in common.

    unit, segment: its names in seeds.  streams: of its phases; none where it is frozen.
    ranks: places in each group of the ranks that have it: all, or those with the same experts.
    levels: of parameters, gradients and optimizer state.
    """

    unit: int
    segment: int
    padded: int
    parts: tuple[BufferPart, ...]
    streams: tuple[GradientStream, ...]
    ranks: tuple[int, ...]
    levels: str


@dataclass(frozen=True, slots=True)
class CodecKind:
    """A codec: its name, elements of a block, and whether it rounds at random."""

    name: str
    block: int
    is_random: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the codecs of a run are: the mesh, the codecs, the buffers.

    gradient: with outer steps, that of outer gradients.
    """

    inter: int
    intra: int
    gradient: CodecKind | None
    parameter: CodecKind | None
    feedback: bool
    seed: int
    buffers: tuple[Buffer, ...]


def coded(values: Tensor, kind: CodecKind, seed: int | None = None) -> Tensor:
    """Values as they are after a message."""
    noise = None
    if kind.is_random and seed is not None:
        drawn = torch.rand(len(values), generator=torch.Generator().manual_seed(seed))
        noise = drawn.clamp(min=2.0**-25).double()
    if kind.name == "bf16":
        return _as_floats(values, noise, smallest=-126, bits=7, dtype=torch.bfloat16)
    found = values.clone()
    for start in range(0, len(values), kind.block):
        block = values[start : start + kind.block]
        scale = (_largest(block, kind.name) / _top(kind.name, is_random=noise is not None)).float().double()
        if scale.abs() < torch.finfo(torch.float32).tiny:
            found[start : start + kind.block] = 0.0
            continue
        own = None if noise is None else noise[start : start + kind.block]
        if kind.name == "fp8":
            codes = _as_floats(block / scale, own, smallest=-6, bits=3, dtype=torch.float8_e4m3fn)
        else:
            codes = (block / scale).round() if own is None else (block / scale + own).floor()
            codes = codes.clamp(
                -_top(kind.name, is_random=own is not None), 1.0 if kind.name == "int2" else _LARGEST[kind.name]
            )
        found[start : start + kind.block] = codes * scale
    return found


def _top(name: str, *, is_random: bool) -> float:
    """The code of the largest magnitude."""
    return 1.0 if name == "int2" and is_random else _LARGEST[name]


def _largest(block: Tensor, name: str) -> Tensor:
    """The largest magnitude, of int2 with the other sign than its element. Equal but for rounding errors: the positive
    element."""
    if name != "int2":
        return block.abs().max()
    return -block.max() if block.max() >= -block.min() * (1 - 2.0**-20) else -block.min()


def _as_floats(values: Tensor, noise: Tensor | None, *, smallest: int, bits: int, dtype: torch.dtype) -> Tensor:
    if noise is not None:
        rounded = []
        for value, own in zip(values.tolist(), noise.tolist(), strict=True):
            exponent = max(math.frexp(value)[1] - 1, smallest) if value else smallest
            quantum = 2.0 ** (exponent - bits)
            rounded.append(math.floor(value / quantum + own) * quantum)
        values = torch.tensor(rounded, dtype=torch.float64)
    if dtype is torch.float8_e4m3fn:
        values = values.clamp(-448.0, 448.0)
    return values.float().to(dtype).double()


def seed_of(seed: int, step: int, buffer: Buffer, *, what: str, rank: int, to: int) -> int:
    """The upper 63 bits of the 8-byte BLAKE2b of the names of a message, little-endian."""
    text = ":".join(map(str, ("codec", seed, step, buffer.unit, buffer.segment, what, rank, to)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") // 2


@dataclass(slots=True)
class Coding:
    """What codecs make of gradients and parameters, step after step.

    lost: by buffer, phase, group and start of a block, what its ranks have lost of the sums that they encoded. Outer
    gradients have the phase "outer".
    """

    setting: Setting
    lost: dict[tuple[Buffer, str, int, int], Tensor] = field(default_factory=dict)

    def gradients(self, pieces: Sequence[Mapping[str, Tensor]], step: int) -> dict[str, Tensor]:
        """The summed gradients of a step by parameter. pieces: of each microbatch, by the name of the use."""
        found: dict[str, Tensor] = {}
        for buffer in self.setting.buffers:
            if buffer.streams:
                self._add(found, buffer, self._total(buffer, pieces, step), pieces)
        return found

    def _total(self, buffer: Buffer, pieces: Sequence[Mapping[str, Tensor]], step: int) -> Tensor:
        setting = self.setting
        g, os = buffer.levels[1:2], buffer.levels[2:]
        total = torch.zeros(buffer.padded, dtype=torch.float64)
        each = len(pieces) // (setting.inter * setting.intra)
        if g == "G":
            for stream in buffer.streams:
                for at, reduced in enumerate(stream.reductions):
                    sums = [self._sum(buffer, stream, pieces, i, reduced, each) for i in range(setting.inter)]
                    total += self._reduce(buffer, stream.phase, sums, step, what=f"{stream.phase}.{at}")
        else:
            sums = [torch.zeros(buffer.padded, dtype=torch.float64) for _ in range(setting.inter)]
            for stream in buffer.streams:
                every = [(at, use) for at in range(each) for use, _ in stream.uses]
                for i, own in enumerate(sums):
                    own += self._sum(buffer, stream, pieces, i, every, each)
            total += self._reduce(buffer, buffer.streams[0].phase, sums, step, what="sync")
        if os != "G" and setting.gradient is not None:
            for i, j, block in self._blocks(buffer):
                name = {"what": "gather", "rank": self._rank(buffer, i, j), "to": i}
                total[block] = self._send(buffer, buffer.streams[0].phase, i, block, total[block], step, **name)
        return total

    def _sum(
        self,
        buffer: Buffer,
        stream: GradientStream,
        pieces: Sequence[Mapping[str, Tensor]],
        group: int,
        reduced: Sequence[tuple[int, str]],
        each: int,
    ) -> Tensor:
        """The gradients of the ranks of a group, in the order of a buffer: those of an expert, which some of them have,
        are of the tokens of all."""
        flat = torch.zeros(buffer.padded, dtype=torch.float64)
        firsts = dict(stream.uses)
        for rank in range(group * self.setting.intra, (group + 1) * self.setting.intra):
            for at, use in reduced:
                gradient = pieces[rank * each + at].get(use)
                for part in buffer.parts:
                    if gradient is not None and part.name == firsts.get(use):
                        inner = _box(gradient, part).reshape(-1)
                        flat[part.offset : part.offset + len(inner)] += inner
        return flat

    def _reduce(self, buffer: Buffer, phase: str, sums: Sequence[Tensor], step: int, *, what: str) -> Tensor:
        if self.setting.gradient is None:
            return sum(sums, torch.zeros(buffer.padded, dtype=torch.float64))
        total = torch.zeros(buffer.padded, dtype=torch.float64)
        for owner, j, block in self._blocks(buffer):
            for i, own in enumerate(sums):
                name = {"what": what, "rank": self._rank(buffer, i, j), "to": owner}
                arrived = own[block]
                if i != owner:
                    arrived = self._send(buffer, phase, i, block, arrived, step, **name)
                total[block] += arrived
        return total

    def _send(
        self, buffer: Buffer, phase: str, group: int, block: slice, values: Tensor, step: int, **name: object
    ) -> Tensor:
        """Encode and decode a block, with what its sender lost before."""
        kind, setting = self.setting.gradient, self.setting
        assert kind is not None
        seed = seed_of(setting.seed, step, buffer, **name)  # type: ignore[arg-type]
        if not setting.feedback:
            return coded(values, kind, seed)
        key = buffer, phase, group, block.start
        values = values + self.lost.get(key, 0.0)
        arrived = coded(values, kind, seed)
        self.lost[key] = values - arrived
        return arrived

    def _blocks(self, buffer: Buffer) -> Iterator[tuple[int, int, slice]]:
        """Group, and place among those that have the buffer in it, of the owner of each block."""
        inter, intra = self.setting.inter, len(buffer.ranks)
        size = buffer.padded // (inter * intra)
        for j in range(intra):
            for i in range(inter):
                at = j * inter + i
                yield i, j, slice(at * size, (at + 1) * size)

    def _rank(self, buffer: Buffer, i: int, j: int) -> int:
        """The data-parallel rank of a group that is the j-th to have a buffer."""
        return i * self.setting.intra + buffer.ranks[j]

    def _add(
        self, found: dict[str, Tensor], buffer: Buffer, total: Tensor, pieces: Sequence[Mapping[str, Tensor]]
    ) -> None:
        shapes = {use: value.shape for piece in pieces for use, value in piece.items()}
        firsts = {name: shapes.get(use) for stream in buffer.streams for use, name in stream.uses}
        for part in buffer.parts:
            shape = firsts.get(part.name)
            if shape is not None:
                whole = found.setdefault(part.name, torch.zeros(shape, dtype=torch.float64))
                inner = total[part.offset : part.offset + math.prod(part.sizes)]
                _box(whole, part).add_(inner.view(part.sizes))

    def mean(self, gradients: Sequence[Mapping[str, Tensor]], step: int) -> dict[str, Tensor]:
        """The mean over islands of the outer gradients of a fragment, by parameter. gradients: of each island."""
        found = {name: torch.zeros_like(value) for name, value in gradients[0].items()}
        for buffer in self.setting.buffers:
            if buffer.streams and all(part.name in found for part in buffer.parts):
                flat = self._mean(buffer, gradients, step)
                for part in buffer.parts:
                    inner = flat[part.offset : part.offset + math.prod(part.sizes)]
                    _box(found[part.name], part).copy_(inner.view(part.sizes))
        return found

    def _mean(self, buffer: Buffer, gradients: Sequence[Mapping[str, Tensor]], step: int) -> Tensor:
        islands, intra = len(gradients), len(buffer.ranks)
        shard = buffer.padded // intra
        each = math.ceil(shard / islands)
        flats = []
        for own in gradients:
            flat = torch.zeros(buffer.padded, dtype=torch.float64)
            for part in buffer.parts:
                flat[part.offset : part.offset + math.prod(part.sizes)] = _box(own[part.name], part).reshape(-1)
            padding = torch.zeros(intra, islands * each - shard, dtype=torch.float64)
            flats.append(torch.cat([flat.view(intra, shard), padding], dim=1).reshape(-1))
        total = torch.zeros_like(flats[0])
        for j in range(intra):
            for owner in range(islands):
                start = (j * islands + owner) * each
                block = slice(start, start + each)
                for i, flat in enumerate(flats):
                    arrived = flat[block]
                    if i != owner:
                        name = {"what": "outer.reduce", "rank": self._rank(buffer, i, j), "to": owner}
                        arrived = self._send(buffer, "outer", i, block, arrived, step, **name)
                    total[block] += arrived
                name = {"what": "outer.gather", "rank": self._rank(buffer, owner, j), "to": owner}
                total[block] = self._send(buffer, "outer", owner, block, total[block], step, **name)
        return total.view(intra, islands * each)[:, :shard].reshape(-1) / islands

    def skip(self) -> None:
        """A step was not taken."""
        self.lost.clear()

    def parameters(self, masters: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        """Write what the forward uses to `copies`, which have what it used before."""
        setting, kind = self.setting, self.setting.parameter
        if kind is None:
            for name, copy in copies.items():
                copy.copy_(masters[name])
            return
        kind = CodecKind(kind.name, kind.block)  # rounded to nearest
        before = {name: copy.clone() for name, copy in copies.items()}  # copies of a tied parameter all start from it
        for buffer in setting.buffers:
            p, os = buffer.levels[:1], buffer.levels[2:]
            flat, old = (torch.zeros(buffer.padded, dtype=torch.float64) for _ in range(2))
            for part in buffer.parts:
                size = math.prod(part.sizes)
                flat[part.offset : part.offset + size] = _box(masters[part.name], part).reshape(-1)
                old[part.offset : part.offset + size] = _box(before[part.name], part).reshape(-1)
            if p == "G":
                for _, _, block in self._blocks(buffer):
                    flat[block] = coded(flat[block], kind)
            elif os == "G" and buffer.streams:
                for _, _, block in self._blocks(buffer):
                    flat[block] = old[block] + coded(flat[block] - old[block], kind)
            for part in buffer.parts:
                inner = flat[part.offset : part.offset + math.prod(part.sizes)]
                _box(copies[part.name], part).copy_(inner.view(part.sizes))


def _box(tensor: Tensor, part: BufferPart) -> Tensor:
    for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


@contextmanager
def uses_apart(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Meanwhile each named use of a parameter is a tensor of its own with a gradient of its own."""
    kept: dict[str, nn.Parameter] = {name: model.get_parameter(name) for name in names}
    found: dict[str, Tensor] = {}
    for name, parameter in kept.items():
        module, key = _place(model, name)
        del module._parameters[key]
        found[name] = alias = parameter.view_as(parameter)
        alias.retain_grad()
        setattr(module, key, alias)
    try:
        yield found
    finally:
        for name, parameter in kept.items():
            module, key = _place(model, name)
            delattr(module, key)
            module.register_parameter(key, parameter)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, key = name.rpartition(".")
    return model.get_submodule(parent), key
