"""Kernels of codecs, and the moves that send encoded blocks.

A message of `Codec.nbytes(n)` bytes holds a float32 scale for each block of elements, then the elements:

    bf16   two bytes each, no scale
    fp8    e4m3 of value / scale, a byte each; scale = largest magnitude / 448
    int8   value / scale as a signed byte; scale = largest magnitude / 127
    int4   value / scale in -7..7, plus 8: element i of a block in the lower half of byte i, element i + size/2 in its
           upper half; scale = largest magnitude / 7
    int2   value / scale in -2..1, plus 2: element i of a block in the two lowest bits of byte i, element i + size/4 in
           the next two, and so on; scale = largest magnitude / 2, with the sign that makes its element -2. Rounded
           stochastically -1..1, and scale = largest magnitude

[Note: levels of int2] Of four codes one is zero, so that padding and what has no gradient stay as they are; the other
three cannot be symmetric. With -1, 0, 1 nearest rounds most elements of a block to zero, which feedback only delays.
Levels of -2..1 times half of the largest magnitude use all codes, and the sign of the scale sees to it that the largest
element arrives as it is: only elements of the other sign are cut off, at half of it. The squared error of normally
distributed blocks is 0.18 of their square; with -1, 0, 1 it is 0.59, with four levels without zero 0.31. A cut is a
bias, so stochastic rounding has -1, 0, 1. Where the largest and the smallest element have the same magnitude but for
rounding errors, the largest decides: another layout has other errors.

A block whose scale is not a normal float32 is zero. A value that is not finite makes its block so, except in bf16.

[Note: equal replicas] A rank never uses a value that it has encoded: it decodes its own message, as all others do, so
all ranks hold the same bits. Gradients that a tensor-parallel group sums are encoded before that sum, by each rank.

The moves allocate messages and sums, and free them: they run in jobs of lanes, and nothing that they allocate outlives
them ([Note: streams and memory] in runtime/lanes.py). What a caller gives is the caller's to keep.

Arithmetic is in fp32, in float64 for float64 tensors. On CPUs blocks are processed a few at a time, which stay in the
cache; on GPUs the kernels are compiled for fp32, and for messages of several blocks: Triton has no conversion from fp8
to float64, and one block would be compiled for each size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from atoll.plans.layouts import CODES, Codec
from atoll.runtime.transport import Peers, Tag, Transport

_AT_A_TIME = 1 << 16
"""Elements that a CPU encodes or decodes at a time."""

_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0, "int2": 2.0}
"""Codes of the largest magnitude of a block."""

_UNBIASED = _LARGEST | {"int2": 1.0}
"""The same if rounding is stochastic: no element is cut off."""

_EQUAL = 1 - 2.0**-20
"""Magnitudes with at least this ratio count as equal."""

_BITS = {name: code.bits for name, code in CODES.items() if name.startswith("int")}
"""Bits of integers. Several of less than 8 share a byte."""

_FLOATS = {"fp8": (-6, 3), "bf16": (-126, 7)}
"""The smallest exponent of normal numbers, and the bits of the mantissa."""

_HALF_A_BIT = 2.0**-25
"""The least random number: with 0, rounding noise around zero would be rounded down to the code below it."""

# [Note: the path of a residual] Error feedback in two steps, of one block that a rank sends to its owner. Gradients are
# multiples of the loss scale, S in the first step and T in the next; the residual r is stored without it.
#
#                       step t, loss scale S           step t + 1, loss scale T
#     gradients         S * g                          T * g'
#     + residual        c = S * g + S * r              c' = T * g' + T * r'
#     message           encode(c) -> m                 encode(c') -> m'
#     owner adds        decode(m)                      decode(m')
#     new residual      r' = (c - decode(m)) / S       r'' = (c' - decode(m')) / T
#
# Without the scales the owner has added g + r - r' and then g' + r' - r'': m' carries the error of m, so after any
# number of steps only the last residual is missing. A step with several reductions takes this path with each of them.
# A residual that was stored times S would count S / T times in the next step: after an overflow T is S / 2.
# An overflow in g makes c and r' infinite or NaN. Such a step is not applied, and `clear_residuals` sets r' to 0.
# The sum that an owner sends back takes the same path, with the residual's own block. So do outer gradients, with scale
# 1, from one outer step of their fragment to the next.


@dataclass(slots=True)
class Moment:
    """The step that is being run.

    step: counted from 0; random bits of stochastic rounding follow from it.
    scale: the loss scale, by which its gradients are multiplied until they have been summed.
    """

    step: int = 0
    scale: float = 1.0


def noise_seed(seed: int, step: int, unit: int, segment: int, *, what: str, rank: int, to: int) -> int:
    """The seed of the random numbers with which a rank rounds one message: a stable 63-bit hash.

    what: the reduction of a phase, as `I.0`; `sync`, or `gather`; of outer gradients `outer.reduce` or `outer.gather`.
    rank: data-parallel rank.  to: the receiver's position along the axis.
    """
    # Of the message's place and nothing else: a replayed step, or another schedule with the same order of microbatches,
    # rounds to the same bits. Python's own hash of a string differs between processes.
    text = f"codec:{seed}:{step}:{unit}:{segment}:{what}:{rank}:{to}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic on values of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def draw_uniform(codec: Codec, numel: int, seed: int, device: torch.device) -> torch.Tensor | None:
    """Random numbers in (0, 1) for the elements of a message; None if the codec rounds to nearest."""
    if codec.rounding == "nearest":
        return None
    # A generator for each message: several jobs draw at the same time, in an order that depends on timing.
    generator = torch.Generator(device).manual_seed(seed)
    return torch.rand(numel, generator=generator, device=device).clamp_(min=_HALF_A_BIT)


def encode(
    codec: Codec,
    values: torch.Tensor,
    message: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Write values, [n], to a message of `codec.nbytes(n)` bytes.

    residual: added to the values, and overwritten with what the message lacks of the sum; both divided by `scale`, of
    which the values are multiples. A power of two, as a loss scale is, changes no bit of a residual.
    """
    for rows, scales_at, payload in _parts(codec, values, message):
        chosen = values[rows].to(wide(values.dtype))
        # The residual is brought to the scale of the values and not the reverse: the owner adds what it decodes to its
        # own block, which has the loss scale.
        if residual is not None:
            chosen = torch.add(chosen, residual[rows], alpha=scale)
        blocks = chosen.view(-1, _row(codec, len(chosen)))
        scales, codes, left = _on(blocks, _encode)(
            blocks,
            None if noise is None else noise[rows].view(-1, _row(codec, len(chosen))),
            codec.name,
            is_lossy=residual is not None,
        )
        if scales is not None:
            message[scales_at].view(torch.float32).copy_(scales.view(-1))
        message[payload].copy_(codes.reshape(-1))
        if residual is not None:
            torch.mul(left.view(-1), 1.0 / scale, out=residual[rows])


def decode(codec: Codec, message: torch.Tensor, out: torch.Tensor, *, adds: bool = False) -> None:
    """Write the values of a message to `out`, [n], or add them to it."""
    for rows, scale, payload in _parts(codec, out, message):
        place = out[rows]
        size = _row(codec, len(place))
        scales = message[scale].view(torch.float32).view(-1, 1) if codec.code.is_scaled else None
        codes = message[payload].view(len(place) // size, -1)
        act = _on(place.view(-1, size), _decode)
        values = act(scales, codes, codec.name, size=size, dtype=wide(out.dtype)).view(-1)
        place.copy_(place.to(values.dtype) + values if adds else values)


def _row(codec: Codec, numel: int) -> int:
    """Elements of a block in a part with `numel` elements."""
    return min(codec.block, numel)


def _parts(codec: Codec, values: torch.Tensor, message: torch.Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Yield parts of a message with whole blocks, and the last block if it is shorter: its elements, the bytes of its
    scales, and those of its payload."""
    numel, block = len(values), codec.block
    whole = numel - numel % block
    # A part has whole blocks, since a block has one scale. Their codes fill whole bytes: `Code.multiple`.
    each = whole if values.is_cuda else max(block, _AT_A_TIME // block * block)
    first = codec.scale_bytes(numel)
    for start in [*range(0, whole, max(each, 1)), *([whole] if whole < numel else [])]:
        stop = min(start + each, whole) if start < whole else numel
        payload = slice(first + codec.payload_bytes(start), first + codec.payload_bytes(stop))
        yield slice(start, stop), slice(codec.scale_bytes(start), codec.scale_bytes(stop)), payload


def _encode(rows: torch.Tensor, noise: torch.Tensor | None, name: str, *, is_lossy: bool) -> tuple[Any, Any, Any]:
    """Return the scales, the payload, and what these lack of rows [blocks, elements] where `is_lossy`."""
    scales, scaled = None, rows
    if name != "bf16":
        scales = (_largest(rows, name) / (_LARGEST if noise is None else _UNBIASED)[name]).float()
        # The inverse of a subnormal scale can be infinite. NaN is not below anything, and stays: see the next lines.
        scales = torch.where(scales.abs() < _SMALLEST, 0.0, scales)
        # A block with inf or NaN has such a scale. Its codes are arbitrary, but times that scale all of them are NaN or
        # infinite at the receiver. The norm of the gradients then is too, and the step is not taken.
        inverse = torch.where(scales.abs() > 0, 1.0 / scales.to(rows.dtype), 0.0)
        scaled = rows * inverse
    payload = _round(scaled, noise, name)
    # Decoded from the payload, as the receivers do it, so the residual has the error of the scale, too.
    left = rows - _decode(scales, payload, name, size=rows.shape[1], dtype=rows.dtype) if is_lossy else None
    return scales, payload, left


def _largest(rows: torch.Tensor, name: str) -> torch.Tensor:
    """Return the largest magnitude of each block, [blocks, 1]; of int2 it has the other sign than its element."""
    if name != "int2":
        return rows.abs().amax(1, keepdim=True)
    high, low = rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True)
    return torch.where(high >= low * _EQUAL, -high, low)


def _round(scaled: torch.Tensor, noise: torch.Tensor | None, name: str) -> torch.Tensor:
    """Return the payload, [blocks, bytes]."""
    if name in _FLOATS:
        if noise is not None:
            smallest, bits = _FLOATS[name]
            # The distance between two codes at each value. frexp's mantissa is in [0.5, 1) and the format's in [1, 2),
            # so its exponent is one more. Below the smallest exponent codes are subnormal, at a constant distance.
            exponent = torch.frexp(scaled).exponent.clamp(min=smallest + 1) - 1 - bits
            quantum = torch.ldexp(torch.ones_like(scaled), exponent)
            scaled = (scaled / quantum + noise).floor() * quantum
        if name == "bf16":
            return scaled.to(torch.bfloat16).view(torch.uint8)
        # e4m3 has no infinity: the code above the largest is NaN. Noise can lead to it, as below.
        largest = _LARGEST[name]
        return scaled.clamp(-largest, largest).float().to(torch.float8_e4m3fn).view(torch.uint8)
    bits, largest = _BITS[name], (_LARGEST if noise is None else _UNBIASED)[name]
    # |scaled| is at most `largest`, but for a rounding error that `round` removes. `floor` does not: the largest value
    # plus a noise just below 1 is rounded up to the next integer.
    codes = (scaled.round() if noise is None else (scaled + noise).floor()).clamp(-largest, 2 ** (bits - 1) - 1)
    if name == "int8":
        return codes.to(torch.int8).view(torch.uint8)
    stored = (codes + 2 ** (bits - 1)).to(torch.uint8)
    # Parts of a block and not neighbours share a byte: all are contiguous, and no element is read with a stride.
    each = -(-stored.shape[1] * bits // 8)
    parts = torch.nn.functional.pad(stored, (0, each * 8 // bits - stored.shape[1])).split(each, dim=1)
    packed = parts[0]
    for at, part in enumerate(parts[1:], start=1):
        packed = packed | (part << (at * bits))
    return packed


def _decode(
    scales: torch.Tensor | None, payload: torch.Tensor, name: str, *, size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the values, [blocks, size]."""
    if name == "bf16":
        return payload.view(torch.bfloat16).to(dtype)
    assert scales is not None, "all others have scales"
    if name == "fp8":
        codes = payload.view(torch.float8_e4m3fn).to(dtype)
    elif name == "int8":
        codes = payload.view(torch.int8).to(dtype)
    else:
        bits = _BITS[name]
        parts = [(payload >> at) & ((1 << bits) - 1) for at in range(0, 8, bits)]
        codes = torch.cat(parts, dim=1)[:, :size].to(dtype) - 2 ** (bits - 1)
    return codes * scales.to(dtype)


def _on(blocks: torch.Tensor, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel for blocks, [blocks, elements]: compiled where that is of use."""
    compiles = blocks.is_cuda and len(blocks) > 1 and blocks.dtype != torch.float64
    return _compiled(kernel) if compiles else kernel


@cache
def _compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel compiled for any number of blocks."""
    return torch.compile(kernel, dynamic=True)


# ---- moves


NoiseFor = Callable[[int], torch.Tensor | None]
"""Position of the receiver along the axis -> the random numbers of the message to it."""


def reduce(
    codec: Codec,
    whole: torch.Tensor,
    peers: Peers,
    tag: Tag,
    *,
    transport: Transport,
    noise: NoiseFor,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Sum the ranks' buffers into each rank's own block: those of the others arrive encoded and are added in fp32, in
    rank order. The other blocks are undefined afterwards.

    residual: as large as the buffer, of what was lost in earlier messages. Its own block is not used.  scale: as in
    `encode`.
    """
    ranks = len(peers.ranks)
    # A multiple of four bytes, so that each message begins where its float32 scales may.
    each = codec.nbytes(whole.numel() // ranks)
    sent, received = (torch.empty(ranks * each, dtype=torch.uint8, device=whole.device) for _ in range(2))
    for at, _ in peers.others:
        lost = None if residual is None else peers.block(residual, at)
        encode(codec, peers.block(whole, at), peers.block(sent, at), residual=lost, noise=noise(at), scale=scale)
    transport.all_to_all(sent, received, peers, tag=tag)
    # In rank order, as gloo's `reduce` adds. The first two have the same sum in either order: the own block, which is
    # exact, has to wait for its turn only behind them.
    own = peers.own(whole)
    total = own.to(wide(own.dtype))  # `own` itself if dtypes are equal, and then cleared below
    mine = total.clone() if peers.index > 1 else None
    if mine is not None:
        total.zero_()
    for at in range(ranks):
        if at != peers.index:
            decode(codec, peers.block(received, at), total, adds=True)
        elif mine is not None:
            total.add_(mine)
    if total is not own:
        own.copy_(total)


def gather(
    codec: Codec,
    own: torch.Tensor,
    whole: torch.Tensor,
    peers: Peers,
    tag: Tag,
    *,
    transport: Transport,
    adds: bool = False,
    noise: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Fill every block of `whole` with what its owner has encoded of `own`, or add it to the block.

    residual: of the own block.  scale: both as in `encode`.
    """
    each = codec.nbytes(own.numel())
    coded = torch.empty(len(peers.ranks) * each, dtype=torch.uint8, device=whole.device)
    encode(codec, own, peers.own(coded), residual=residual, noise=noise, scale=scale)
    transport.gather(coded, peers, tag)
    # The own block, too: [Note: equal replicas]. `own` may be a view of it, and has been encoded.
    for at in range(len(peers.ranks)):
        decode(codec, peers.block(coded, at), peers.block(whole, at), adds=adds)
