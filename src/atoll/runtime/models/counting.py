"""Workloads from models: operations and saved tensors of any model's blocks, counted by running them on `meta`.

    F    each block runs once, with its adapter, on tensors that have shapes but no values
    I    its backward runs, from the last block to the first; the weight of an `nn.Linear` waits for W, as in a run
    W    one product for each weight that waits

An operation of the dispatcher becomes a kernel: a product of matrices, fused attention, or bytes read and written.
Tensors that autograd saves are counted by storage, so one that several operations save counts once. Equal blocks are
run once for a `Use`, so a model of a hundred layers takes as long as one of three.

[Note: what belongs to a block]
The input of a block counts as saved, since the runtime keeps it for the block's backward; its output counts with the
block after it. Operations of the model after a block, up to the next one or to the loss, belong to the block.
Parameters, buffers and the batch do not count, nor tensors computed before the first block and passed to all
layers, such as masks and rotary angles.

[Note: conditions]
A model may read values that a tensor on `meta` does not have, such as whether nothing is padded. The answer is yes:
the counted batch has samples without padding.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atoll.base._torch import parameter_replaced
from atoll.base.errors import AtollError, ConfigError
from atoll.prediction.cost import Use, Work, Workload
from atoll.prediction.cost.ends import in_chunks
from atoll.prediction.cost.float8 import with_float8
from atoll.runtime.models.adapter import Block, adapter_for, sum_and_count
from atoll.runtime.models.attention import divide_attention
from atoll.runtime.models.fused import DeviceType
from atoll.runtime.models.heads import PretendedExchange
from atoll.runtime.models.meter import Meter
from atoll.runtime.models.part import SequencePart
from atoll.runtime.models.weigh import weigh_blocks


def count(model: nn.Module, *, name: str | None = None, device: DeviceType = "cuda") -> Workload:
    """Return the workload of a model with its adapter's blocks.

    model: a model with an adapter; on `meta` it needs no memory. Whether a parameter is trained matters, but not its
    dtype: `Use.compute` sets the dtype of execution. The model is not changed.
    name: of the workload; the class's if None.  device: the device whose kernels are counted, see
    `atoll.runtime.models.fused`.

    `work(use)` raises ConfigError if blocks do not run without values, and for features that are not counted: tensor
    parallelism, a fused or chunked loss. `count` itself raises ConfigError for transformers models with other heads
    than those of language models, and for encoders with decoders; PlanError if the model has no adapter.
    """
    return _Counts(model, device).workload(name or type(model).__name__)


@dataclass(frozen=True)
class CountedBlock:
    """A block whose work is counted on first use."""

    name: str
    _at: int = field(repr=False)
    _counts: _Counts = field(repr=False)

    def work(self, use: Use) -> Work:
        """See `Work`."""
        work = self._counts.works(replace(use, products=None))[self._at]
        return work if use.products is None else with_float8(work, self._counts.linear_in(self._at), use.products)


class _State(NamedTuple):
    """Shape of the tensor between one run of blocks and the next."""

    shape: tuple[int, ...]
    is_trained: bool


class _Counts:
    """The works of a model's blocks, by use.

    A run is a block with those joined to it. Equal runs with the same input are counted once.
    """

    def __init__(self, model: nn.Module, device: DeviceType) -> None:
        self._model, self._device = model, device
        self._adapter = adapter_for(model)
        if not getattr(self._adapter, "is_language_model", True):
            raise ConfigError(
                f"the costs of a {type(model).__name__} are not known: counted are language models, whose batch is "
                "token ids and labels of one shape, and models with an adapter of their own"
            )
        self._blocks = tuple(self._adapter.blocks())
        self._layers = _layers(self._blocks)
        starts = [at for at, block in enumerate(self._blocks) if not block.is_joined]
        self._runs = [range(*pair) for pair in zip(starts, [*starts[1:], len(self._blocks)], strict=True)]
        each = _kinds(self._blocks, self._layers)
        kinds = [tuple(each[at] for at in run) for run in self._runs]
        self._kinds = [kinds.index(kind) for kind in kinds]
        self._works: dict[Use, tuple[Work, ...]] = {}
        self._known: dict[Hashable, tuple[tuple[Work, ...], _State]] = {}

    def workload(self, name: str) -> Workload:
        """See `count`."""
        blocks = tuple(CountedBlock(block.name, at, self) for at, block in enumerate(self._blocks))
        joined = frozenset(at for at, block in enumerate(self._blocks) if block.is_joined)
        costs = tuple(weight.cost for weight in weigh_blocks(self._blocks))
        shared = self._shared()
        return Workload(
            name,
            blocks,
            self._layers,
            shared=sum(parameter.numel() for parameter in shared),
            trains_shared=any(parameter.requires_grad for parameter in shared),
            joined=joined,
            costs=costs,
        )

    def linear_in(self, at: int) -> set[tuple[int, int]]:
        """Return outputs and inputs of the linear layers of a block, if it is a layer."""
        if at not in self._layers:
            return set()
        every = (module for module in self._blocks[at].module.modules() if type(module) is nn.Linear)
        return {(module.out_features, module.in_features) for module in every}

    def _shared(self) -> list[nn.Parameter]:
        """Return the parameters that the first block and the last share; all others must be in one block."""
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
        return [parameter for parameter, users in found.items() if len(users) > 1]

    def works(self, use: Use) -> tuple[Work, ...]:
        """Return the work of all blocks."""
        if use.chunks > 1 and use not in self._works:
            *before, head = self.works(replace(use, chunks=1))
            self._works[use] = *before, self._in_chunks(head, use)
        if use not in self._works:
            _check(use)
            works: list[Work] = []
            state = _State((use.samples, use.sequence), False)
            for run, kind in zip(self._runs, self._kinds, strict=True):
                key = kind, run.start == 0, run.stop == len(self._blocks), state, use
                if key not in self._known:
                    self._known[key] = self._count(run, state, use)
                found, state = self._known[key]
                works += found
            self._works[use] = tuple(works)
        return self._works[use]

    def _in_chunks(self, work: Work, use: Use) -> Work:
        """Return the work of the head with a loss in chunks, from that of the whole. Raises ConfigError if the head is
        not the model's last block alone."""
        head = self._blocks[-1]
        named = getattr(self._adapter, "vocabulary", None)
        if not isinstance(head.module, nn.Linear) or named is None or named().head != head.name:
            raise ConfigError(
                f"loss_chunks = {use.chunks}: a model is counted with a loss in chunks if its head is its last block; "
                "use the formulas, atoll.runtime.models.transformer_of(config).workload"
            )
        rows, hidden = head.module.weight.shape
        is_frozen = not head.module.weight.requires_grad
        kernels = (*work.forward, *work.backward, *work.weights)
        # What is left of the head is its bias.
        bias, frozen = work.parameters - rows * hidden, work.frozen - (rows * hidden if is_frozen else 0)
        bare = Work(parameters=bias, frozen=frozen, matrices=0, forward=(), backward=(), weights=(), saved=())
        return in_chunks(bare, use, kernels, rows=rows, hidden=hidden, frozen=is_frozen)

    @property
    def counted(self) -> int:
        """Number of runs of blocks that were counted so far, for all uses together."""
        return len(self._known)

    def _count(self, run: range, state: _State, use: Use) -> tuple[tuple[Work, ...], _State]:
        blocks = [self._blocks[at] for at in run]
        try:
            with _attention(self._model, use), _as_before(self._model), torch.enable_grad(), self._dividing(use):
                return self._count_run(run, state, use)
        except AtollError:
            raise
        except Exception as error:
            names = ", ".join(block.name for block in blocks)
            raise ConfigError(
                f"{names} of {type(self._model).__name__} cannot be counted in {use.compute}: a forward and backward "
                f"without values fails: {type(error).__name__}: {error}"
            ) from error

    @contextmanager
    def _dividing(self, use: Use) -> Iterator[None]:
        """Context in which the adapter computes a part of each sequence, if ranks divide them."""
        if use.divide == 1:
            yield
            return
        if not hasattr(self._adapter, "divide_sequences"):
            raise ConfigError(
                f"sequence = {use.divide}: it is not known how a {type(self._adapter).__name__} computes a part of "
                "each sequence"
            )
        if use.sequence % use.divide:
            raise ConfigError(f"sequence = {use.divide} ranks are counted for lengths that they divide evenly")
        whole = self._adapter
        self._adapter = adapter_for(self._model)
        self._adapter.divide_sequences(SequencePart(0, use.divide), 1)  # type: ignore[attr-defined]
        exchange = PretendedExchange(0, use.divide)
        divide_attention(self._model.modules(), exchange)
        try:
            yield
        finally:
            divide_attention(self._model.modules(), None)
            self._adapter = whole

    def _count_run(self, run: range, state: _State, use: Use) -> tuple[tuple[Work, ...], _State]:
        blocks = [self._blocks[at] for at in run]
        dtype = getattr(torch, use.compute)
        is_last = run.stop == len(self._blocks)
        batch = {
            key: torch.zeros(use.samples, use.sequence, dtype=torch.long, device="meta")
            for key in ("input_ids", "labels")
        }
        own = batch if use.divide == 1 else SequencePart(0, use.divide).of_batch(batch)
        given = None
        if run.start:
            given = torch.empty(state.shape, dtype=dtype, device="meta").requires_grad_(state.is_trained)
        with ExitStack() as stack:
            for block in blocks:
                stack.enter_context(_on_meta(block.module, dtype))
            known = [tensor for block in blocks for tensor in (*block.module.parameters(), *block.module.buffers())]
            meter = Meter(blocks, [*known, *batch.values(), *own.values()], use, given)
            stack.enter_context(meter.measuring(self._device))
            output = self._adapter.forward(run.start, run.stop, given, batch)
            passed = _State(tuple(output.shape), output.requires_grad)
            if is_last:
                output, _ = sum_and_count(self._adapter.loss(output, own))
            meter.finish(output, is_last=is_last)
            meter.backward(output, is_last=is_last)
            return tuple(tally.work(use) for tally in meter.tallies), passed


def _check(use: Use) -> None:
    if use.slice is not None:
        raise ConfigError(
            "slices of sequences: a model is counted with whole ones; use the formulas, "
            "atoll.runtime.models.transformer_of(config).workload"
        )
    if use.expert > 1:
        raise ConfigError(
            f"expert = {use.expert}: a model is counted with all of its experts on each rank; use the formulas, "
            "atoll.runtime.models.transformer_of(config).workload"
        )
    if use.tensor > 1:
        raise ConfigError(
            f"tensor = {use.tensor}: a model is counted as it is, without tensor parallelism; use the formulas, "
            "atoll.runtime.models.transformer_of(config).workload"
        )
    if use.loss != "eager":
        raise ConfigError(
            f"loss = {use.loss!r}: a model is counted with its adapter's own loss, which is 'eager'; use the formulas, "
            "atoll.runtime.models.transformer_of(config).workload"
        )


# ---- equal blocks


def _layers(blocks: Sequence[Block]) -> range:
    """Return the longest run of consecutive blocks of one class that consist of modules."""
    found = [range(0)]
    for at, block in enumerate(blocks):
        last = found[-1]
        if not any(True for _ in block.module.children()):
            continue
        is_same = last.stop == at and type(block.module) is type(blocks[last.start].module)
        found[-1:] = [range(last.start, at + 1)] if is_same else [last, range(at, at + 1)]
    return max(found, key=len)


def _kinds(blocks: Sequence[Block], layers: range) -> list[Hashable]:
    """Return a key for each block, equal for blocks that compute and save the same: classes, shapes, and plain
    attributes except those that are the layer's index in every layer."""
    plain = [_attributes(block) for block in blocks]
    places = [{key for key, value in plain[at].items() if value == at - layers.start} for at in layers]
    indices = set.intersection(*places) if places else set()
    return [
        (
            tuple((name, type(module)) for name, module in block.module.named_modules()),
            tuple((name, tuple(each.shape), each.requires_grad) for name, each in block.module.named_parameters()),
            frozenset((key, type(value), value) for key, value in own.items() if key not in indices),
        )
        for block, own in zip(blocks, plain, strict=True)
    ]


def _attributes(block: Block) -> dict[tuple[str, str], bool | int | float | str]:
    return {
        (name, key): value
        for name, module in block.module.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str))
    }


# ---- the model during counting


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Context in training mode. Restores modes and buffers afterwards: adapters move buffers to the device of a
    batch."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(module, key, buffer) for module in modes for key, buffer in module.named_buffers(recurse=False)]
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
    """Context in which a transformers model uses the attention of a use; without one, eager attention if the model was
    built with it, as some families always are, and fused attention otherwise."""
    choose = getattr(model, "set_attn_implementation", None)
    if choose is None:
        yield
        return
    config: Any = model.config
    before = config._attn_implementation
    wanted = "eager" if (use.attention or before) == "eager" else "sdpa"
    if before == wanted:
        yield
        return
    try:
        choose(wanted)
    except ValueError as error:
        raise ConfigError(f"{type(model).__name__} has no attention = {use.attention!r}: {error}") from error
    try:
        if config._attn_implementation != wanted:
            raise ConfigError(
                f"attention = {use.attention!r}: {type(model).__name__} has {before!r} attention and cannot change it"
            )
        yield
    finally:
        choose(before)


@contextmanager
def _on_meta(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context in which a block has parameters of a dtype on `meta`. Shared parameters stay shared."""
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
