"""Workloads from models: what the blocks of any model do and save, found by running them on `meta`.

    F    each block runs once, by its adapter, on tensors that have shapes and no values
    I    its backward runs, from the last block to the first; the weight of an `nn.Linear` waits for W, as in a run
    W    one product for each weight that waits

An operation of the dispatcher becomes a kernel: a product of matrices, fused attention, or bytes that are read and
written. Tensors that autograd saves are counted by storage, so one that several operations save counts once. Blocks
that are alike are run once for a `Use`, so a model of a hundred layers takes as long as one of three.

[Note: what belongs to a block]
The input of a block counts as saved, since the runtime keeps it for the block's backward; its output counts with the
block after it. What the model computes behind a block, up to the next one or to the loss, belongs to the block.
Parameters, buffers and the batch do not count, nor what the model computes before the first block and hands to all
layers, such as masks and rotary angles.

[Note: devices]
Which kernels run depends on the device. On `meta` torch takes every call apart; where a device has one kernel for it,
the call is replaced by a function that saves what the kernel saves. CUDA has such kernels for attention, root mean
square norms and dropout, the CPU for attention without a mask and without dropout.

[Note: conditions]
A model may ask for values that a tensor on `meta` does not have, as whether nothing is padded. The answer is yes: what
is counted is a batch of whole samples.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from atoll._torch import parameter_replaced, watched_operations
from atoll.cost import Attention, Kernel, Pass, Product, Saved, Use, Work, Workload
from atoll.cost.transformer import FLASH_BACKWARD
from atoll.errors import AtollError, ConfigError
from atoll.models.adapter import Block, adapter_for

Device = Literal["cuda", "cpu"]


def count(model: object, *, name: str | None = None, device: Device = "cuda") -> Workload:
    """Return the workload of a model, whose blocks are those of its adapter.

    model: an `nn.Module` that has an adapter, or an adapter; on `meta` it needs no memory. Whether a parameter is
    trained matters, its dtype does not: `Use.compute` says what the model is run in. The model stays as it is.
    name: of the workload; the class's if None.  device: whose kernels count, see the module.

    `work(use)` raises ConfigError where blocks do not run without values, and for what is not counted: tensor
    parallelism, a fused or chunked loss. PlanError where the model has no adapter.
    """
    return _Counts(model, device).workload(name or type(model).__name__)


@dataclass(frozen=True)
class CountedBlock:
    """A block whose work is counted when it is first asked for."""

    name: str
    _at: int = field(repr=False)
    _counts: _Counts = field(repr=False)

    def work(self, use: Use) -> Work:
        """See `Work`."""
        return self._counts.works(use)[self._at]


class _State(NamedTuple):
    """What passes from one run of blocks to the next: a tensor of this shape."""

    shape: tuple[int, ...]
    is_trained: bool


class _Counts:
    """The works of a model's blocks, by use.

    A run is a block with those that are joined to it. Runs that are alike and get the same input are counted once.
    """

    def __init__(self, model: object, device: Device) -> None:
        self._adapter = adapter_for(model)
        self._blocks = tuple(self._adapter.blocks())
        self._model = model if isinstance(model, nn.Module) else nn.ModuleList(block.module for block in self._blocks)
        self._device = device
        starts = [at for at, block in enumerate(self._blocks) if not block.is_joined]
        self._runs = [range(*pair) for pair in zip(starts, [*starts[1:], len(self._blocks)], strict=True)]
        self._kinds = [tuple(_kind(self._blocks[at], at - self.layers.start) for at in run) for run in self._runs]
        self._works: dict[Use, tuple[Work, ...]] = {}
        self._known: dict[Hashable, tuple[tuple[Work, ...], _State]] = {}

    @property
    def layers(self) -> range:
        """The longest run of consecutive blocks of one class."""
        found = [range(0, 0)]
        for at, block in enumerate(self._blocks):
            last = found[-1]
            is_same = bool(last) and type(block.module) is type(self._blocks[last.start].module)
            found[-1:] = [range(last.start, at + 1)] if is_same else [last, range(at, at + 1)]
        return max(found, key=len)

    def workload(self, name: str) -> Workload:
        """See `count`."""
        blocks = tuple(CountedBlock(block.name, at, self) for at, block in enumerate(self._blocks))
        joined = frozenset(at for at, block in enumerate(self._blocks) if block.is_joined)
        return Workload(name, blocks, self.layers, self._shared(), joined)

    def _shared(self) -> int:
        """Elements of parameters that the first block and the last have in common; others have to lie in one block."""
        found: dict[nn.Parameter, list[int]] = {}
        for at, block in enumerate(self._blocks):
            for parameter in block.module.parameters():
                found.setdefault(parameter, []).append(at)
        ends = [0, len(self._blocks) - 1]
        for parameter, users in found.items():
            if len(users) > 1 and users != ends:
                names = ", ".join(self._blocks[at].name for at in users)
                raise ConfigError(
                    f"blocks {names} share a parameter of {tuple(parameter.shape)}; costs are known where the first "
                    "block and the last share parameters, and no others"
                )
        return sum(parameter.numel() for parameter, users in found.items() if len(users) > 1)

    def works(self, use: Use) -> tuple[Work, ...]:
        """Of all blocks."""
        if use not in self._works:
            _check(use)
            works: list[Work] = []
            state = _State((use.samples, use.sequence), False)
            for run, kinds in zip(self._runs, self._kinds, strict=True):
                key = kinds, run.start == 0, run.stop == len(self._blocks), state, use
                if key not in self._known:
                    self._known[key] = self._count(run, state, use)
                found, state = self._known[key]
                works += found
            self._works[use] = tuple(works)
        return self._works[use]

    @property
    def counted(self) -> int:
        """Runs of blocks that were counted so far, for all uses together."""
        return len(self._known)

    def _count(self, run: range, state: _State, use: Use) -> tuple[tuple[Work, ...], _State]:
        blocks = [self._blocks[at] for at in run]
        try:
            with _attention(self._model, use), _as_before(self._model), torch.enable_grad():
                return self._count_run(run, state, use)
        except AtollError:
            raise
        except Exception as error:
            names = ", ".join(block.name for block in blocks)
            raise ConfigError(
                f"{names} of {type(self._model).__name__} cannot be counted in {use.compute}: a forward and backward "
                f"without values fails: {type(error).__name__}: {error}"
            ) from error

    def _count_run(self, run: range, state: _State, use: Use) -> tuple[tuple[Work, ...], _State]:
        blocks = [self._blocks[at] for at in run]
        dtype = getattr(torch, use.compute)
        is_last = run.stop == len(self._blocks)
        batch = {
            key: torch.zeros(use.samples, use.sequence, dtype=torch.long, device="meta")
            for key in ("input_ids", "labels")
        }
        given = None
        if run.start:
            given = torch.empty(state.shape, dtype=dtype, device="meta").requires_grad_(state.is_trained)
        with ExitStack() as stack:
            for block in blocks:
                stack.enter_context(_on_meta(block.module, dtype))
            known = [tensor for block in blocks for tensor in (*block.module.parameters(), *block.module.buffers())]
            meter = _Meter(blocks, [*known, *batch.values()], use, given)
            stack.enter_context(meter.measuring(self._device))
            output = self._adapter.forward(run.start, run.stop, given, batch)
            passed = _State(tuple(output.shape), output.requires_grad)
            if is_last:
                output = self._adapter.loss(output, batch)
            meter.finish(output, is_last=is_last)
            meter.backward(output)
            return tuple(tally.work(use) for tally in meter.tallies), passed


def _check(use: Use) -> None:
    if use.tensor > 1:
        raise ConfigError(
            f"tensor = {use.tensor}: a model is counted for one rank of a tensor-parallel group of 1; take the formulas "
            "of atoll.cost.Transformer, of which atoll.models.transformer_of(config) has the sizes"
        )
    if use.loss != "eager" or use.chunks > 1:
        raise ConfigError(
            f"loss = {use.loss!r} in {use.chunks} chunks: what is counted is the adapter's own loss, which is eager and "
            "whole; take the formulas of atoll.cost.Transformer"
        )


# ---- which blocks are alike


def _kind(block: Block, at: int) -> Hashable:
    """What two blocks have in common that do and save the same: classes, shapes, and plain attributes but for the index
    of the layer."""
    parts: list[Hashable] = []
    for name, module in block.module.named_modules():
        own = [(key, tuple(each.shape), each.requires_grad) for key, each in module.named_parameters(recurse=False)]
        plain = [
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, (bool, str, float, int)) and (isinstance(value, bool) or value != at)
        ]
        parts.append((name, type(module), tuple(own), tuple(plain)))
    return tuple(parts)


# ---- the model, as it is run


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """A section in training mode, after which modes and buffers are what they were: adapters move buffers to the
    device of a batch."""
    modes = {module: module.training for module in model.modules()}
    buffers = [
        (module, key, buffer) for module in modes for key, buffer in module.named_buffers(recurse=False)
    ]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, key, buffer in buffers:
            setattr(module, key, buffer)


@contextmanager
def _attention(model: nn.Module, use: Use) -> Iterator[None]:
    """A section in which a model of transformers has the attention of a use."""
    choose = getattr(model, "set_attn_implementation", None)
    if choose is None:
        yield
        return
    config: Any = model.config
    before, wanted = config._attn_implementation, "eager" if use.attention == "eager" else "sdpa"
    try:
        if before != wanted:
            choose(wanted)
        yield
    except ValueError as error:
        raise ConfigError(f"{type(model).__name__} has no attention = {use.attention!r}: {error}") from error
    finally:
        if config._attn_implementation != before:
            choose(before)


@contextmanager
def _on_meta(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A section in which a block has parameters of a dtype, and lies on `meta`. Shared parameters stay shared."""
    made: dict[Tensor, nn.Parameter] = {}
    with ExitStack() as stack:
        for each in module.modules():
            for key, parameter in each.named_parameters(recurse=False):
                if parameter not in made:
                    kind = dtype if parameter.is_floating_point() else parameter.dtype
                    new = torch.empty(parameter.shape, dtype=kind, device="meta")
                    made[parameter] = nn.Parameter(new, requires_grad=parameter.requires_grad)
                stack.enter_context(parameter_replaced(each, key, made[parameter]))
            for key, buffer in each.named_buffers(recurse=False):
                setattr(each, key, torch.empty_like(buffer, device="meta"))
        yield


# ---- kernels


_MM, _ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
_BMM, _BADDBMM = torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default
_GROUPED = torch.ops.aten._grouped_mm.default
_CONVOLUTION = torch.ops.aten.convolution.default


def kernel_of(operation: Any, arguments: Sequence[Any], output: Any) -> Kernel | None:
    """The kernel of an operation of the dispatcher; None where it reads and writes nothing, as views do.

    A grouped product, of tokens with their experts, counts as if each expert had as many tokens.
    """
    given = list(_tensors(arguments))
    match operation:
        case _ if operation in (_MM, _ADDMM, _BMM, _BADDBMM):
            left, right = given[-2:]
            return Product(left.shape[-2], left.shape[-1], right.shape[-1], math.prod(left.shape[:-2]))
        case _ if operation is _GROUPED:
            return _grouped(*given[:2])
        case _ if operation is _CONVOLUTION:
            return _convolution(given[1], output)
    made = [tensor for tensor in _tensors(output) if not _is_view(tensor, given)]
    if not made or "empty" in operation.name():
        return None
    return Pass(float(sum(_moved(tensor) for tensor in (*given, *made))))


def attention_of(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Attention:
    """Fused attention of [batch, heads, length, width] queries, keys and values."""
    *pairs, length, width = query.shape
    flops = 2.0 * math.prod(pairs) * length * key.shape[-2] * (width + value.shape[-1])
    out = math.prod(pairs) * length * value.shape[-1] * query.element_size()
    return Attention(flops * (0.5 if is_causal else 1.0), float(out + sum(map(_moved, (query, key, value)))))


def _backward_of(forward: Attention) -> Attention:
    return Attention(FLASH_BACKWARD * forward.flops, 2.0 * forward.nbytes)


def _grouped(left: Tensor, right: Tensor) -> Product:
    """Rows that are sorted by group, times the matrix of each group; or, for the gradient of these, columns."""
    if left.dim() == 2 and right.dim() == 3:
        groups, inner, columns = right.shape
        return Product(-(-left.shape[0] // groups), inner, columns, groups)
    if left.dim() == 2:
        return Product(left.shape[0], left.shape[1], right.shape[1])
    return Product(left.shape[-2], left.shape[-1], right.shape[-1], left.shape[0])


def _convolution(weight: Tensor, output: Tensor) -> Product:
    """As a product of patches with filters, for each group of channels."""
    groups = max(1, output.shape[1] // weight.shape[0])
    rows = output.numel() // output.shape[1]
    return Product(rows, weight[0].numel(), weight.shape[0] // groups, groups)


def _is_view(tensor: Tensor, given: Sequence[Tensor]) -> bool:
    """Whether an output is another look at an argument. What is written in place is the argument itself."""
    storage = tensor.untyped_storage()
    return any(each is not tensor and each.untyped_storage() is storage for each in given) and not any(
        each is tensor for each in given
    )


def _moved(tensor: Tensor) -> int:
    """Bytes to read a tensor once; what is expanded is read where it lies."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))


# ---- what a device has one kernel for


class _FusedAttention(torch.autograd.Function):
    """Attention that saves its inputs, its output and the logarithms of the softmax's sums."""

    @staticmethod
    def forward(ctx: Any, meter: _Meter, is_causal: bool, *given: Tensor) -> Tensor:
        query, key, value = given
        *pairs, length, _ = query.shape
        precise = torch.float64 if query.dtype == torch.float64 else torch.float32
        # The kernels write [batch, length, heads, width], so that the next linear layer needs no copy.
        out = query.new_empty(*pairs[:-1], length, pairs[-1], value.shape[-1]).transpose(-3, -2)
        ctx.save_for_backward(query, key, value, out, query.new_empty(*pairs, length, dtype=precise))
        ctx.meter, ctx.kernel = meter, attention_of(query, key, value, is_causal=is_causal)
        meter.add(ctx.kernel)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.meter.add(_backward_of(ctx.kernel))
        given = ctx.saved_tensors[:3]
        return None, None, *(torch.empty_like(each) for each in given)


class _FusedNorm(torch.autograd.Function):
    """Root mean square norm that saves its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, meter: _Meter, hidden: Tensor, weight: Tensor | None) -> Tensor:
        precise = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        ctx.save_for_backward(hidden, weight, hidden.new_empty(*hidden.shape[:-1], 1, dtype=precise))
        ctx.meter = meter
        meter.add(Pass(2.0 * _moved(hidden)))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, _ = ctx.saved_tensors
        ctx.meter.add(Pass(3.0 * _moved(hidden)))
        return None, torch.empty_like(hidden), None if weight is None else torch.empty_like(weight)


class _Kernels(TorchFunctionMode):
    """Replaces the calls for which a device has one kernel; see the module."""

    def __init__(self, meter: _Meter, device: Device, *, is_flash: bool) -> None:
        super().__init__()
        self._meter, self._is_cuda, self._is_flash = meter, device == "cuda", is_flash

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replaced: Callable[..., Tensor | None] | None = None
        if func is F.scaled_dot_product_attention:
            replaced = self._attend
        elif self._is_cuda:
            replaced = {F.rms_norm: self._normalise, F.dropout: self._drop}.get(func)
        out = None if replaced is None else replaced(*args, **kwargs)
        return func(*args, **kwargs) if out is None else out

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor | None:
        has_kernel = self._is_cuda or (attn_mask is None and dropout_p == 0.0)
        if not self._is_flash or not has_kernel:
            return None
        out: Tensor = _FusedAttention.apply(self._meter, is_causal, query, key, value)
        return out

    def _normalise(self, hidden: Tensor, shape: Any, weight: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        out: Tensor = _FusedNorm.apply(self._meter, hidden, weight)
        return out

    def _drop(self, given: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
        return torch.native_dropout(given, p, True)[0] if training and 0.0 < p < 1.0 else None


# ---- the meter


class _Linear(torch.autograd.Function):
    """A linear layer whose weight's gradient waits for W, as `atoll.runtime.pipeline.deferred` has it."""

    @staticmethod
    def forward(
        ctx: Any, meter: _Meter, module: nn.Linear, hidden: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.meter, ctx.module = meter, module
        meter.until_weights.add(meter.number(hidden))
        return F.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        ctx.meter.collect(ctx.module, hidden, gradient)
        _, _, needs_input, _, needs_bias, _ = ctx.needs_input_grad
        bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if needs_bias else None
        return None, None, gradient @ weight if needs_input else None, None, bias, None


@dataclass
class _Tally:
    """What one block did.

    Kernels inside the block's forward come apart from those behind it, which are never recomputed. saved, products,
    pending: bytes by the number of a storage. products: outputs of products of matrices, which selective recomputing
    saves.  entered: storages of the input.  behind: storages that are saved behind the block or because it ends.
    peaks: bytes that were alive at most, beyond those before it: in a forward that saves, and in one that does not.
    """

    block: Block
    forward: list[tuple[Kernel, bool]] = field(default_factory=list)
    forward_behind: list[Kernel] = field(default_factory=list)
    backward: list[Kernel] = field(default_factory=list)
    weights: list[Kernel] = field(default_factory=list)
    saved: dict[int, Saved] = field(default_factory=dict)
    products: dict[int, Saved] = field(default_factory=dict)
    pending: dict[int, Saved] = field(default_factory=dict)
    entered: set[int] = field(default_factory=set)
    behind: set[int] = field(default_factory=set)
    made: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    wire: int = 0
    peak: int = 0
    bare_peak: int = 0

    def work(self, use: Use) -> Work:
        """See `Work`."""
        parameters = set(self.block.module.parameters())
        waiting = {each.weight for each in self.block.module.modules() if _is_deferrable(each)}
        forward = [kernel for kernel, _ in self.forward]
        kept, again, repeated, peak = self._kept(use.recompute)
        return Work(
            parameters=sum(each.numel() for each in parameters),
            matrices=sum(each.numel() for each in waiting),
            forward=(*forward, *self.forward_behind),
            backward=(*repeated, *self.backward),
            weights=tuple(self.weights),
            saved=tuple(kept),
            again=tuple(again),
            pending=tuple(self.pending.values()),
            peak=peak,
            wire=self.wire,
        )

    def _kept(self, recompute: str) -> tuple[list[Saved], list[Saved], list[Kernel], int]:
        """What is saved in F, what in I, the kernels that I repeats, and the bytes that come and go in F."""
        new = {number: each for number, each in self.saved.items() if number not in self.entered}
        held = [self.saved[number] for number in self.entered]
        # The runtime does not recompute an embedding.
        if recompute == "none" or isinstance(self.block.module, nn.Embedding):
            peak = self.peak - sum(each.nbytes for each in new.values())
            return [*held, *new.values()], [], [], max(0, peak)
        stays = {number: each for number, each in new.items() if number in self.behind}
        repeated = [kernel for kernel, is_product in self.forward if recompute == "block" or not is_product]
        if recompute == "selective":
            stays = {**self.products, **stays}
        again = [each for number, each in new.items() if number not in stays]
        peak = self.bare_peak - sum(each.nbytes for each in stays.values())
        return [*held, *stays.values()], again, repeated, max(0, peak)


def _is_deferrable(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.weight.requires_grad


class _Meter:
    """Counts what a run of blocks does and saves.

    strangers: tensors whose storages do not count.  until_weights: storages that W needs.
    """

    def __init__(self, blocks: Sequence[Block], strangers: Iterable[Tensor], use: Use, entering: Tensor | None) -> None:
        self.tallies = [_Tally(block) for block in blocks]
        self.until_weights: set[int] = set()
        self._use = use
        self._next = itertools.count()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._strangers = {self.number(each) for each in strangers}
        self._handed = {} if entering is None else {self.number(entering): entering}
        self._now: _Tally | None = None
        self._phase: Literal["inside", "behind", "backward", "rehearsal"] = "behind"
        self._module: list[str] = []
        self._names = {
            module: name or type(module).__name__ for block in blocks for name, module in block.module.named_modules()
        }
        self._live = self._most = self._before = 0
        self._held: list[Tensor] = []
        self._following: set[int] = set()

    def number(self, tensor: Tensor) -> int:
        """Of a tensor's storage, as long as that lives."""
        storage = tensor.untyped_storage()
        if storage not in self._numbers:
            self._numbers[storage] = next(self._next)
        return self._numbers[storage]

    # ---- what happens

    @contextmanager
    def measuring(self, device: Device) -> Iterator[None]:
        """A section in which the blocks count."""
        with ExitStack() as stack:
            for tally in self.tallies:
                for module in tally.block.module.modules():
                    if _is_deferrable(module):
                        stack.enter_context(_forward_replaced(module, self._linear(module)))
                stack.enter_context(_forward_replaced(tally.block.module, self._called(tally)))
            hooks = nn.modules.module
            for handle in (
                hooks.register_module_forward_pre_hook(self._enter),
                hooks.register_module_forward_hook(self._leave, always_call=True),
            ):
                stack.callback(handle.remove)
            stack.enter_context(saved_tensors_hooks(self._save, lambda tensor: tensor))
            stack.enter_context(_Kernels(self, device, is_flash=self._use.attention == "flash"))
            stack.enter_context(watched_operations(self._see))
            yield

    def add(self, kernel: Kernel, *, is_product: bool = False) -> None:
        """Count a kernel where the run is."""
        if self._now is None or self._phase == "rehearsal":
            return
        match self._phase:
            case "inside":
                self._now.forward.append((kernel, is_product))
            case "behind":
                self._now.forward_behind.append(kernel)
            case "backward":
                self._now.backward.append(kernel)

    def collect(self, module: nn.Linear, hidden: Tensor, gradient: Tensor) -> None:
        """Count what W does for a linear layer, and what it needs."""
        assert self._now is not None, "a backward belongs to a block"
        rows = hidden.numel() // hidden.shape[-1]
        self._now.weights.append(Product(hidden.shape[-1], rows, gradient.shape[-1]))
        entry = Saved(f"gradient of {self._names[module]}", gradient.untyped_storage().nbytes(), "W")
        self._now.pending.setdefault(self.number(gradient), entry)

    def _see(self, operation: Any, arguments: Sequence[Any], output: Any) -> None:
        if self._phase == "behind" and not self._follows(arguments, output):
            return
        is_product = operation in (_MM, _ADDMM)
        for tensor in _tensors(output):
            storage = tensor.untyped_storage()
            if storage not in self._numbers:
                self.number(tensor)
                self._live += storage.nbytes()
                self._most = max(self._most, self._live)
                weakref.finalize(storage, self._free, storage.nbytes())
            if is_product and self._phase == "rehearsal" and self._use.recompute == "selective":
                self._held.append(tensor)
            if is_product and self._phase == "inside" and self._now is not None:
                self._now.products[self.number(tensor)] = self._entry(tensor)
        kernel = kernel_of(operation, arguments, output)
        if kernel is not None:
            self.add(kernel, is_product=is_product)

    def _follows(self, arguments: Sequence[Any], output: Any) -> bool:
        """Whether an operation works on what a block of this run gave, and not on the model's preparations."""
        found = any(self.number(each) in self._following for each in _tensors(arguments))
        if found:
            self._following |= {self.number(each) for each in _tensors(output)}
        return found

    def _free(self, nbytes: int) -> None:
        self._live -= nbytes

    def _save(self, tensor: Tensor) -> Tensor:
        number = self.number(tensor)
        if self._now is not None and self._phase != "rehearsal" and number not in self._strangers:
            self._now.saved.setdefault(number, self._entry(tensor))
            if self._phase == "behind":
                self._now.behind.add(number)
        return tensor.detach()

    def _entry(self, tensor: Tensor, name: str | None = None) -> Saved:
        return Saved(name or (self._module or ["-"])[-1], tensor.untyped_storage().nbytes(), "I")

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._module.append(self._names.get(module, type(module).__name__))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        self._module.pop()

    # ---- blocks

    def _linear(self, module: Any) -> Callable[[Tensor], Tensor]:
        def forward(hidden: Tensor) -> Tensor:
            anchor = torch.empty(0, device=hidden.device, requires_grad=True)
            out: Tensor = _Linear.apply(self, module, hidden, module.weight.detach(), module.bias, anchor)
            return out

        return forward

    def _called(self, tally: _Tally) -> Callable[..., Any]:
        forward = tally.block.module.forward

        def called(*args: Any, **kwargs: Any) -> Any:
            given = list(_tensors((args, kwargs)))
            self._note_peak()
            if self._use.recompute != "none":
                self._rehearse(tally, lambda: forward(*args, **kwargs))
            numbers = {self.number(each) for each in given}
            tally.entered = {
                number for number in numbers & self._handed.keys() if self._handed[number].requires_grad
            }
            self._strangers |= numbers - self._handed.keys()
            for number in tally.entered:
                tally.saved[number] = self._entry(self._handed[number], "input")
            self._now, self._phase = tally, "inside"
            self._before = self._most = self._live
            output = forward(*args, **kwargs)
            self._phase = "behind"
            tally.made = [each for each in _tensors(output) if each.requires_grad]
            tally.leaves = [each.detach().requires_grad_() for each in tally.made]
            tally.wire = sum(each.untyped_storage().nbytes() for each in _tensors(output))
            self._following = {self.number(each) for each in tally.leaves}
            self._handed |= {self.number(leaf): leaf for leaf in tally.leaves}
            return _replace(output, {id(one): leaf for one, leaf in zip(tally.made, tally.leaves, strict=True)})

        return called

    def _note_peak(self) -> None:
        """The block that ran last, and what is behind it, are over."""
        if self._now is not None:
            self._now.peak = self._most - self._before

    def _rehearse(self, tally: _Tally, forward: Callable[[], Any]) -> None:
        """The block's forward as it is where it will be run again: nothing is saved but the outputs of products."""
        phase, self._phase, before = self._phase, "rehearsal", self._live
        self._most = before
        with torch.no_grad():
            forward()
        tally.bare_peak = self._most - before
        self._held.clear()
        self._phase = phase

    def finish(self, output: Tensor, *, is_last: bool) -> None:
        """The forward is over. A block's output counts with the block that takes it; else it stays because the block
        ends there."""
        self._note_peak()
        taken = set().union(*(tally.entered for tally in self.tallies))
        if not is_last:
            taken.add(self.number(output))
        for tally in self.tallies:
            for leaf in tally.leaves:
                number = self.number(leaf)
                if number in taken:
                    tally.products.pop(number, None)
                    if number not in tally.entered:
                        tally.saved.pop(number, None)
                else:
                    tally.saved[number] = self._entry(leaf, "output")
                    tally.behind.add(number)
            for kept in (tally.saved, tally.products):
                for number in kept.keys() & self.until_weights:
                    kept[number] = replace(kept[number], until="W")
        if not is_last:
            self.tallies[-1].wire = output.untyped_storage().nbytes()
        else:
            self.tallies[-1].wire = 0

    def backward(self, output: Tensor) -> None:
        """From the output, block by block, to the input."""
        self._phase = "backward"
        ends = [([output], [torch.empty_like(output)])] if output.requires_grad else []
        for made, gradients in ends:
            torch.autograd.backward(made, gradients)
        for tally in reversed(self.tallies):
            self._now = tally
            pairs = [(one, leaf.grad) for one, leaf in zip(tally.made, tally.leaves, strict=True)]
            pairs = [(one, gradient) for one, gradient in pairs if gradient is not None]
            if pairs:
                torch.autograd.backward(*zip(*pairs, strict=True))


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """A section in which a module has another forward."""
    before = vars(module).get("forward")
    module.forward = forward  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _replace(value: Any, by: Mapping[int, Tensor]) -> Any:
    """The same nest with some tensors replaced."""
    if isinstance(value, Tensor):
        return by.get(id(value), value)
    if type(value) is dict:
        return {key: _replace(item, by) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_replace(item, by) for item in value)
    return value
