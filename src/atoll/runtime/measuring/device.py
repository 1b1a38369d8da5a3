"""Measurement of a device: rates of products, memory bandwidth, and the shares of both that other kernels reach.

All ranks of a machine measure at the same time, as they compute in a step: they share cores, memory and power.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from atoll.base.machine import machine_memory, processor_name
from atoll.prediction.cost import Device, Efficiency, Product, Transformer, Use
from atoll.prediction.cost.kernels import launches
from atoll.prediction.cost.layer import FLASH_BACKWARD
from atoll.runtime.measuring.fits import fit_depth, rate_of
from atoll.runtime.measuring.stopwatch import Call, Stopwatch
from atoll.runtime.models.decoder import DecoderConfig, DecoderLayer

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
SQUARES = tuple(256 * 2**step for step in range(7))
BUFFERS = tuple(2**22 * 4**step for step in range(4))
"""Elements."""
LENGTHS = tuple(128 * 2**step for step in range(8))
HEADS, WIDTH = 16, 128
SHORT_CALLS = 200


@dataclass(frozen=True, slots=True)
class Reading:
    """Measurements of a rank's device.

    rates: FLOP/s of products by dtype.  bandwidth: bytes a second.  depth, memory, half, attention, update, launch,
    dispatch: as in `Efficiency`.  context: bytes.
    """

    rates: Mapping[str, float]
    bandwidth: float
    depth: float
    memory: float
    half: float
    attention: float
    update: float
    launch: float
    dispatch: float
    context: float


def read_device(
    stopwatch: Stopwatch, together: Callable[[], None], *, dtypes: Collection[str] = tuple(DTYPES)
) -> Reading:
    """Measure this rank's device; before each quantity the ranks wait for one another with `together`.

    dtypes: of products, besides the dtype of the other quantities.
    """
    bench = _Bench(stopwatch)
    together()
    bandwidth = bench.bandwidth()
    together()
    passes = bench.passes(bench.dtype)
    memory = min(1.0, passes / bandwidth)
    together()
    half = 1.0 if bench.dtype.itemsize == 2 else min(1.0, bench.passes(torch.bfloat16) / passes)
    together()
    depth = bench.depth(bandwidth)
    rates: dict[str, float] = {}
    for dtype in (each for each in DTYPES if each in dtypes or each == bench.main):
        together()
        rate = bench.rate(dtype, depth)
        if rate is not None:
            rates[dtype] = rate
    together()
    attention = bench.attention() / rates[bench.main]
    together()
    update = bench.update() * bandwidth * memory
    together()
    launch = bench.shortest()
    dispatch = bench.dispatch() if stopwatch.device.type == "cuda" else launch
    return Reading(
        rates=rates,
        bandwidth=bandwidth,
        depth=depth,
        memory=memory,
        half=half,
        attention=min(1.0, attention),
        update=update,
        launch=launch,
        dispatch=dispatch,
        context=float(_context(stopwatch.device)),
    )


def to_device(reading: Reading, device: torch.device, *, local_ranks: int, source: str) -> Device:
    """Return the device of a cluster. local_ranks: ranks of this machine, which share its memory if they run on the
    CPU."""
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1]
    else:
        memory = machine_memory() // local_ranks
    efficiency = Efficiency(
        products=1.0,
        depth=reading.depth,
        attention=reading.attention,
        memory=reading.memory,
        half=reading.half,
        update=reading.update,
        launch=reading.launch,
        dispatch=reading.dispatch,
        source=source,
    )
    return Device(
        memory=memory,
        context=int(reading.context),
        bandwidth=reading.bandwidth,
        units=_units(device),
        rates=dict(reading.rates),
        efficiency=efficiency,
        source=source,
    )


def describe_device(device: torch.device) -> str:
    """Return the device's name, and the threads of a rank on the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor_name()}, {threads} thread{'s'[: threads > 1]} a rank"


class _Bench:
    """The timed kernels. main: the dtype of depth, passes and attention."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self.device = stopwatch.device
        self.main = "float32"
        if self.device.type == "cuda":
            self.main = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
        self.dtype = DTYPES[self.main]

    def bandwidth(self) -> float:
        """Return bytes a second: the faster of copy and triad, on buffers as large as the budget allows."""
        numel, copy = self.copy
        a, b, c = self._buffers(numel, torch.float32)
        triad = self.stopwatch.seconds(lambda: torch.add(a, b, alpha=0.5, out=c))
        return max(2 * a.nbytes / self.stopwatch.seconds(copy), 3 * a.nbytes / triad)

    def passes(self, dtype: torch.dtype) -> float:
        """Return the bytes a second that a sum, a norm and an activation reach together, each of inputs and outputs
        once."""
        a, b, c = (each.view(-1, 1024) for each in self._buffers(self.copy[0], dtype))
        calls: tuple[tuple[int, Call], ...] = (
            (3, lambda: torch.add(a, b, out=c)),
            (2, lambda: F.layer_norm(a, (1024,))),
            (2, lambda: F.gelu(a)),
        )
        seconds = sum(self.stopwatch.seconds(call) for _, call in calls)
        return sum(tensors for tensors, _ in calls) * a.nbytes / seconds

    def depth(self, bandwidth: float) -> float:
        """Return `Efficiency.depth`, from products of one outer size that are not bound by memory."""
        outer, _ = self.square
        timings, bound = {}, {}
        for inner in (outer >> step for step in range(6)):
            product = Product(outer, inner, outer)
            timings[inner] = self.stopwatch.seconds(self._product(product, self.dtype))
            bound[inner] = product.moved(self.dtype.itemsize) / bandwidth
        free = {inner: seconds for inner, seconds in timings.items() if seconds > 2 * bound[inner]}
        return fit_depth(free if len(free) > 2 else timings)

    def rate(self, dtype: str, depth: float) -> float | None:
        """Return the FLOP/s with which `KernelClock` gives the largest square product its seconds; None without
        products of a dtype."""
        try:
            size, call = self._largest_square(DTYPES[dtype])
        except RuntimeError:  # not implemented, or not supported by the device
            return None
        reached = Efficiency(products=1.0, depth=depth)
        device = Device(memory=1, bandwidth=1.0, units=_units(self.device), rates={"float32": 1.0}, efficiency=reached)
        return rate_of(Product(size, size, size), self.stopwatch.seconds(call), device)

    def attention(self) -> float:
        """Return the FLOP/s of fused causal attention, forward and backward: the mean over the three longest
        sequences."""
        longest, _ = self.stopwatch.largest(self._attention, LENGTHS, growth=4.0)
        found = []
        for length in (longest // 4, longest // 2, longest):
            flops = 2.0 * HEADS * length * length * WIDTH * (1.0 + FLASH_BACKWARD)
            found.append(flops / self.stopwatch.seconds(self._attention(length)))
        return statistics.fmean(found)

    def update(self) -> float:
        """Return the seconds per parameter of AdamW's step, as created by `torch.optim` without options, all states in
        fp32."""
        numel, call = self.stopwatch.largest(self._adam, BUFFERS, growth=4.0)
        return self.stopwatch.seconds(call) / numel

    def shortest(self) -> float:
        """Return the seconds of the shortest kernel."""
        one = torch.zeros(1, device=self.device)
        behind = [self.stopwatch.behind(self.square[1], lambda: one.add_(1.0), SHORT_CALLS) for _ in range(5)]
        return self.stopwatch.typical(behind)

    def dispatch(self) -> float:
        """Return the seconds of the host for a kernel of a layer, forward and backward.

        The layer is so small that the device waits. Kernels are counted as formulas do: what the host does around
        them, in Python, in autograd and for views, is shared among them.
        """
        config = DecoderConfig(vocabulary=64, layers=1, hidden=64, heads=1, kv_heads=1, ffn=128)
        layer = DecoderLayer(config).to(self.device, self.dtype)
        hidden = self._random(1, 16, config.hidden, dtype=self.dtype).requires_grad_()

        def step() -> None:
            layer(hidden).backward(hidden)
            layer.zero_grad()

        return self.stopwatch.host_seconds(step) / _launches(config, sequence=16, compute=self.main)

    # ---- calls

    @cached_property
    def copy(self) -> tuple[int, Call]:
        """Return the number of elements of the largest measured buffer, and a copy of it."""
        return self.stopwatch.largest(self._copy, BUFFERS, growth=4.0)

    @cached_property
    def square(self) -> tuple[int, Call]:
        """Return the size of the largest measured square product, and the product."""
        return self._largest_square(self.dtype)

    def _largest_square(self, dtype: torch.dtype) -> tuple[int, Call]:
        return self.stopwatch.largest(lambda size: self._product(Product(size, size, size), dtype), SQUARES, growth=8.0)

    def _random(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        # With constant values a GPU draws less power, and runs faster than in a step.
        return torch.randn(shape, device=self.device, dtype=dtype)

    def _buffers(self, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [self._random(numel, dtype=dtype) for _ in range(3)]

    def _copy(self, numel: int) -> Call:
        source, target, _ = self._buffers(numel, torch.float32)
        return lambda: target.copy_(source)

    def _product(self, product: Product, dtype: torch.dtype) -> Call:
        rows, inner, columns = int(product.rows), int(product.inner), int(product.columns)
        left, right = self._random(rows, inner, dtype=dtype), self._random(inner, columns, dtype=dtype)
        out = torch.empty(rows, columns, device=self.device, dtype=dtype)
        return lambda: torch.mm(left, right, out=out)

    def _attention(self, length: int) -> Call:
        q, k, v, gradient = (self._random(1, HEADS, length, WIDTH, dtype=self.dtype) for _ in range(4))
        inputs = [each.requires_grad_() for each in (q, k, v)]

        def call() -> object:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, inputs, gradient)

        return call

    def _adam(self, numel: int) -> Call:
        parameter = torch.nn.Parameter(torch.zeros(numel, device=self.device))
        parameter.grad = torch.randn_like(parameter)
        return torch.optim.AdamW([parameter], fused=self.device.type == "cuda" or None).step  # a run's default


def _launches(config: DecoderConfig, *, sequence: int, compute: str) -> int:
    """Return the kernels of a layer's forward and backward, by formulas."""
    sizes = Transformer.decoder(
        layers=1,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        ffn=config.ffn,
        vocabulary=config.vocabulary,
    )
    work = sizes.workload.blocks[1].work(Use(samples=1, sequence=sequence, compute=compute))
    return sum(map(launches, (*work.forward, *work.backward, *work.weights)))


def _units(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _context(device: torch.device) -> int:
    """Return the bytes of a GPU that are in use and not by tensors; those of other processes count too."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))
