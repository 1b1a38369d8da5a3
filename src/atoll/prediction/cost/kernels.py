"""Kernels of a device, and their durations.

A product of matrices is bound by compute or by memory. Its compute reaches a share of the peak that grows with its
inner size and falls with the empty part of the last wave of tiles. Fused attention reaches a share of its own, and all
other kernels move bytes. A block takes the longer of the total time of its kernels on the device and the time that the
host needs to launch them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from atoll.program.sim import Speed

if TYPE_CHECKING:
    from atoll.prediction.cost.hardware import Device

TILE = (128, 256)
"""Rows and columns of a product that one multiprocessor computes at a time."""


@dataclass(frozen=True, slots=True)
class Product:
    """`count` products of matrices, [rows, inner] x [inner, columns] each.

    share: factor of the usual rate, if tensor cores cannot be used. A size may be a mean.
    in_float8: share of its operations whose factors are cast to FP8.
    """

    rows: float
    inner: float
    columns: float
    count: int = 1
    share: float = 1.0
    in_float8: float = 0.0

    @property
    def flops(self) -> float:
        """Number of operations."""
        return 2.0 * self.rows * self.inner * self.columns * self.count

    def moved(self, item: int) -> float:
        """Return the bytes read and written with elements of `item` bytes; factors in FP8 have one."""
        factors = (1.0 - self.in_float8) * item + self.in_float8
        return float((factors * self._factors + item * self.rows * self.columns) * self.count)

    def cast(self, item: int) -> float:
        """Return the bytes that the casts of its factors read and write: each is read for its scales and to be cast."""
        return self.in_float8 * (2 * item + 1) * self._factors * self.count

    @property
    def cast_bytes(self) -> int:
        """Bytes of factors in FP8, and of a copy of the right one in the order that the hardware reads."""
        return math.ceil(self.in_float8 * (self.rows * self.inner + 2 * self.inner * self.columns) * self.count)

    @property
    def _factors(self) -> float:
        return self.rows * self.inner + self.inner * self.columns

    @property
    def swapped(self) -> Product:
        """Return the gradient of the left factor: [rows, columns] x [columns, inner]."""
        return replace(self, inner=self.columns, columns=self.inner)

    @property
    def learnt(self) -> Product:
        """Return the gradient of the right factor: [inner, rows] x [rows, columns]."""
        return replace(self, rows=self.inner, inner=self.rows)


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Fused attention: its operations, and the bytes that it reads and writes."""

    flops: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class Pass:
    """Kernels that read and write memory: `nbytes` in total."""

    nbytes: float
    kernels: int = 1


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective within a block, of a whole buffer of `nbytes`; in an all-to-all, of so many bytes of each rank.

    axis: of the mesh, along which its ranks are: a tensor-parallel group, or those that divide experts, which first
    tell each other numbers of rows, or sequences.
    """

    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
    nbytes: float
    axis: Literal["tp", "expert", "sequence"] = "tp"

    def sent(self, ranks: int) -> float:
        """Return the bytes that each of so many ranks sends: in an all-reduce, as in a reduce-scatter and an
        all-gather."""
        return self.nbytes * (2 if self.kind == "all-reduce" else 1) * (ranks - 1) / ranks


Kernel = Product | FusedAttention | Pass | Exchange


_CASTS = 4
"""Kernels that cast the factors of a product: two each, for scales and for elements."""


def launches(kernel: Kernel) -> int:
    """Return how many kernels the host launches for it."""
    if isinstance(kernel, Product) and kernel.in_float8:
        return 1 + _CASTS
    return kernel.kernels if isinstance(kernel, Pass) else 1


@dataclass(frozen=True, slots=True)
class KernelClock:
    """Computes the duration of kernels on a device, in a dtype, with other ranks.

    item: bytes of an element.  groups: by the axis of exchanges, the number of ranks along it, and their link.
    """

    device: Device
    dtype: str
    item: int
    groups: Mapping[str, tuple[int, Speed]] = field(default_factory=dict)

    def seconds(self, kernels: Iterable[Kernel]) -> float:
        """Return the seconds of kernels run one after the other on the device, or of their launches on the host if
        longer."""
        device = host = 0.0
        for kernel in kernels:
            device += self.of(kernel)
            host += self.device.efficiency.dispatch * launches(kernel)
        return max(device, host)

    def of(self, kernel: Kernel) -> float:
        """Return the seconds of one kernel on the device."""
        efficiency = self.device.efficiency
        match kernel:
            case Product():
                own = max(self._arithmetic(kernel), self._memory(kernel.moved(self.item)))
                if kernel.in_float8:
                    return max(own, efficiency.launch) + self._casts(kernel)
            case FusedAttention():
                own = max(
                    kernel.flops / (self.device.rate(self.dtype) * efficiency.attention), self._memory(kernel.nbytes)
                )
            case Pass():
                reached = efficiency.half if self.item == 2 else 1.0
                return max(self._memory(kernel.nbytes) / reached, efficiency.launch * kernel.kernels)
            case Exchange():
                ranks, link = self.groups.get(kernel.axis, (1, Speed()))
                if kernel.kind == "all-to-all":
                    return all_to_all(kernel.nbytes, ranks=ranks, link=link, is_told=kernel.axis == "expert")
                return collective(kernel.kind, kernel.nbytes, ranks=ranks, link=link)
        return max(own, efficiency.launch)

    def _casts(self, product: Product) -> float:
        """Return the seconds of the casts of a product's factors."""
        efficiency = self.device.efficiency
        reached = efficiency.half if self.item == 2 else 1.0
        return max(self._memory(product.cast(self.item)) / reached, _CASTS * efficiency.launch)

    def _memory(self, nbytes: float) -> float:
        return nbytes / (self.device.bandwidth * self.device.efficiency.memory)

    def _arithmetic(self, product: Product) -> float:
        efficiency = self.device.efficiency
        deep = product.inner / (product.inner + efficiency.depth)
        tiles = math.ceil(product.rows / TILE[0]) * math.ceil(product.columns / TILE[1]) * product.count
        waves = tiles / self.device.units
        lost = efficiency.waves * (math.ceil(waves) / waves - 1.0)
        rate = self._rate(product) * product.share
        return product.flops * (1.0 + lost) / (rate * efficiency.products * deep)

    def _rate(self, product: Product) -> float:
        rate = self.device.rate(self.dtype)
        if not product.in_float8:
            return rate
        return 1.0 / ((1.0 - product.in_float8) / rate + product.in_float8 / self.device.rate("float8"))


def collective(kind: str, nbytes: float, *, ranks: int, link: Speed) -> float:
    """Return the seconds of a ring over `ranks`: each sends (ranks - 1) / ranks of the buffer, twice in an
    all-reduce."""
    if ranks == 1:
        return 0.0
    rounds = (ranks - 1) * (2 if kind == "all-reduce" else 1)
    return rounds * (link.latency + link.seconds(nbytes / ranks))


def all_to_all(nbytes: float, *, ranks: int, link: Speed, is_told: bool) -> float:
    """Return the seconds in which each rank sends its part of `nbytes` to each of the others. is_told: after how many
    rows come."""
    if ranks == 1:
        return 0.0
    messages = ranks if is_told else ranks - 1
    return messages * link.latency + link.seconds(nbytes * (ranks - 1) / ranks)
