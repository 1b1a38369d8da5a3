"""Codecs: what a move sends instead of its elements, and how many bytes that is.

A codec is a value. Its kernels are in `atoll.runtime.sharding.coding`; traffic, memory and predictions count the bytes
of `Codec.nbytes`, so they cannot disagree with what is sent.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from atoll.base.errors import PlanError

Rounding = Literal["nearest", "stochastic"]

ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic")


@dataclass(frozen=True, slots=True)
class Code:
    """A kind of codec: the bits of an element, and whether each block of elements has a scale."""

    bits: int
    is_scaled: bool

    @property
    def multiple(self) -> int:
        """A block has a multiple of so many elements: they fill whole bytes, and are at least two."""
        return max(2, 8 // self.bits)


CODES: Mapping[str, Code] = MappingProxyType(
    {
        "bf16": Code(16, is_scaled=False),
        "fp8": Code(8, is_scaled=True),
        "int8": Code(8, is_scaled=True),
        "int4": Code(4, is_scaled=True),
        "int2": Code(2, is_scaled=True),
    }
)
"""Codecs by name."""

BLOCK = 128
"""Elements that share a scale, if a codec does not say."""

SCALE_BYTES = 4
"""Bytes of a block's scale, a float32."""


@dataclass(frozen=True, slots=True)
class Codec:
    """A code with its options.

    name: one of `CODES`. `fp8` is e4m3.  block: elements that share a scale, a multiple of `Code.multiple`.
    rounding: `nearest`, or `stochastic`: up or down with probabilities that leave the mean unchanged.
    """

    name: str
    block: int = BLOCK
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if self.name not in CODES:
            near = difflib.get_close_matches(self.name, CODES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise PlanError(f"no codec {self.name!r}: {hint}known: {', '.join(CODES)}")
        multiple = self.code.multiple
        if type(self.block) is not int or self.block < multiple or self.block % multiple:
            raise PlanError(f"block = {self.block!r} elements of {self.name}; use a multiple of {multiple}, as {BLOCK}")
        if self.rounding not in ROUNDINGS:
            raise PlanError(f"rounding = {self.rounding!r} of a codec; known: {', '.join(ROUNDINGS)}")

    @property
    def code(self) -> Code:
        """The kind of codec."""
        return CODES[self.name]

    def scale_bytes(self, numel: int) -> int:
        """Bytes of the scales of `numel` elements, which precede the elements."""
        return -(-numel // self.block) * SCALE_BYTES if self.code.is_scaled else 0

    def payload_bytes(self, numel: int) -> int:
        """Bytes of `numel` elements without scales."""
        return (numel * self.code.bits + 7) // 8

    def nbytes(self, numel: int) -> int:
        """Bytes of a message with `numel` elements, a multiple of 4, so that messages one after the other stay
        aligned."""
        return -(-(self.scale_bytes(numel) + self.payload_bytes(numel)) // SCALE_BYTES) * SCALE_BYTES

    @property
    def item_bytes(self) -> float:
        """Bytes of an element of a long message, with its share of the scale."""
        return self.code.bits / 8 + (SCALE_BYTES / self.block if self.code.is_scaled else 0)

    def of_rows(self, width: int) -> Codec:
        """Return the codec for rows of `width` elements, such as tokens: no block goes past the end of a row. Where
        blocks do not fit, each row has one scale. Raises PlanError for rows that are no block."""
        if not self.code.is_scaled or width % self.block == 0:
            return self
        if width % self.code.multiple:
            raise PlanError(
                f"stages send rows of {width} elements, and a block of {self.name} has a multiple of "
                f"{self.code.multiple}; use parallel.codecs.hop = 'bf16', or 'none'"
            )
        return replace(self, block=width)

    def __str__(self) -> str:
        """`int8`; options that are not the defaults follow: `int4 of 64, stochastic`."""
        block = f" of {self.block}" if self.code.is_scaled and self.block != BLOCK else ""
        return self.name + block + (", stochastic" if self.rounding == "stochastic" else "")


@dataclass(frozen=True, slots=True)
class Codecs:
    """The codecs of moves between groups, along `inter`, and of hops between stages. None: elements are sent as they
    are.

    gradient: of reductions and of the all-gather that may follow.  parameter: of all-gathers of parameters. A rank that
    keeps a copy receives the difference to it.
    feedback: add the error of a rank's last encoding of gradients to its next one.
    hop: of activations and their gradients between stages on different nodes, in blocks of one token's elements.
    near: also between stages on one node.
    """

    gradient: Codec | None = None
    parameter: Codec | None = None
    feedback: bool = True
    hop: Codec | None = None
    near: bool = False

    def __post_init__(self) -> None:
        if self.hop is not None and self.hop.rounding != "nearest":
            raise PlanError(f"hop codec {self.hop}: activations are rounded to nearest; leave rounding out")

    def __bool__(self) -> bool:
        return self.is_between_groups or self.hop is not None

    @property
    def is_between_groups(self) -> bool:
        """True if moves between groups are encoded."""
        return self.gradient is not None or self.parameter is not None

    def hop_of(self, width: int, item: int) -> Codec | None:
        """Return the codec of a hop of rows of `width` elements with `item` bytes each; None if it has no codec, or one
        that makes it no smaller."""
        codec = None if self.hop is None else self.hop.of_rows(width)
        return None if codec is None or codec.item_bytes >= item else codec

    def __str__(self) -> str:
        """`none`, or `gradient int4, parameter int8, hop bf16`."""
        parts = [f"{what} {codec}" for what in ("gradient", "parameter") if (codec := getattr(self, what))]
        if self.gradient is not None and not self.feedback:
            parts.append("no feedback")
        if self.hop is not None:
            parts.append(f"hop {self.hop}" + (", also on a node" if self.near else ""))
        return ", ".join(parts) or "none"


NO_CODECS = Codecs()
