"""The split of a model into blocks, its loss, and its initialization.

A stage is a run of consecutive blocks. The runtime uses a model only through an `Adapter`:

    blocks()      the whole model in the order of execution; each parameter is in one block, or is one object
                  shared by several
    forward()     some consecutive blocks; one tensor is passed between two blocks
    loss()        a sum over what counts, and perhaps the count: the runtime divides once, by the step's total
    initialise()  the initial values of one module's own parameters

A model that can be split over a tensor-parallel group also has

    tensor_plan() pattern of a module's name -> its split, with the names of transformers' plans

and one whose vocabulary can be split over the pipeline

    vocabulary()  the modules of embedding and head

and one that supports rows of several documents, separated by position ids that restart

    check_documents()  raises PlanError unless it keeps them apart

and one that can compute a part of each sequence, where ranks divide them

    divide_sequences()  makes it do so from then on: `forward` still gets whole sequences in its batch

A model provides its own adapter by a method `atoll_adapter()`; the built-in decoder and `nn.Sequential` need none.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.base._torch import reset_of
from atoll.base.errors import PlanError
from atoll.base.labels import IGNORED_LABEL
from atoll.prediction.cost.layer import head_problem
from atoll.runtime.models.attention import check_heads_of_sequence
from atoll.runtime.models.batch import Batch
from atoll.runtime.models.decoder import Attention, Decoder, document_mask
from atoll.runtime.models.mixture import Experts, FeedForward, Router
from atoll.runtime.models.part import SequencePart, length_of

Loss = Callable[[Any, Batch], "Tensor | tuple[Tensor, Tensor | float]"]
"""(outputs, batch) -> the loss SUMMED over what counts, or a pair of this sum and its count.

A sum alone is divided by the labels of the step that count (integers except -100, or all other values), or by its
samples if the batch has no labels. The count of a pair may be any number, such as a sum of weights. Either way the
runtime divides once, by the total of all microbatches on all ranks.
"""

STYLES = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
)
"""Ways to split a module over a tensor-parallel group; the runtime's `tensor_parallel` describes them."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The embedding and the head of a model, by the qualified names of their modules.

    embedding: an `nn.Embedding`, or one of a class that transforms each row by itself, such as by scaling.
    head: an `nn.Linear`, whose output, times `scale` and then capped to `cap` * tanh(logit / `cap`), is the logits, and
    whose loss is `token_cross_entropy`.
    """

    embedding: str
    head: str
    scale: float = 1.0
    cap: float | None = None

    @property
    def ends(self) -> tuple[str, str]:
        """Names of embedding and head."""
        return self.embedding, self.head


@dataclass(frozen=True, slots=True)
class Block:
    """A module that is never split between stages, and its qualified name in the model.

    is_joined: whether it stays on the stage of the block before it.
    """

    name: str
    module: nn.Module
    is_joined: bool = False

    def named_modules(self) -> Iterable[tuple[str, nn.Module]]:
        """Return the block's modules with their qualified names in the model, parents first; one used twice is listed
        twice."""
        for name, module in self.module.named_modules(remove_duplicate=False):
            yield (f"{self.name}.{name}" if name else self.name), module

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return the block's parameters with their qualified names in the model; one used twice is listed twice."""
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            yield f"{self.name}.{name}", parameter

    def parameters_but(self, modules: Container[str]) -> Iterable[nn.Parameter]:
        """Return the block's parameters without those of some modules; one used twice is listed twice."""
        for name, module in self.named_modules():
            if name not in modules:
                yield from module.parameters(recurse=False)


@runtime_checkable
class Adapter(Protocol):
    """How a model splits into blocks, and how they run: the interface between a model and the runtime."""

    def blocks(self) -> Sequence[Block]:
        """Return the whole model in the order of execution."""
        ...

    def forward(self, first: int, last: int, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Run blocks first..last-1. `hidden` is None for block 0; with the model's last block, return the logits.

        Blocks are called as `module(...)`: the output of each is a leaf of the next one's graph, and must not be
        written in place.
        """
        ...

    def loss(self, logits: Any, batch: Batch) -> Tensor | tuple[Tensor, Tensor | float]:
        """Return the SUM of the losses that count, in fp32 (fp64 for fp64 logits), optionally with the count; see
        `Loss`."""
        ...

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        """Set the module's own parameters and buffers, not its children's, drawing from `generator`."""
        ...


def token_cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Return the cross-entropy summed over the labels that are not -100, in fp32 (fp64 for fp64 logits).

    logits [B, S, vocabulary], labels [B, S].
    """
    precise = torch.float64 if logits.dtype == torch.float64 else torch.float32
    labels = torch.as_tensor(batch["labels"], device=logits.device)
    return F.cross_entropy(
        logits.flatten(0, -2).to(precise), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


def sum_and_count(found: object) -> tuple[Tensor, Tensor | float | None]:
    """Return the sum of a loss, and its count if it returned one. Raises PlanError for anything else."""
    if isinstance(found, Tensor):
        total, count = found, None
    elif isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor):
        total, count = found
    else:
        raise PlanError(
            f"the loss returned a {type(found).__name__}; a loss returns the sum over what counts as a tensor with "
            "one element, or a pair (sum, count)"
        )
    for what, value in (("sum", total), ("count", count)):
        if isinstance(value, Tensor) and value.numel() != 1:
            raise PlanError(
                f"the loss returned a {what} of shape {tuple(value.shape)}; it is one number: add up over the "
                "microbatch"
            )
    if count is not None and not isinstance(count, (Tensor, int, float)):
        raise PlanError(f"the loss returned a count of type {type(count).__name__}; it is a number or a tensor of one")
    return total.reshape(()), count


def run_blocks(
    blocks: Sequence[Block], first: int, last: int, hidden: Tensor, *, layers: Sequence[Tensor | None] = ()
) -> Tensor:
    """Pass `hidden` (for block 0: the model's input) through blocks first..last-1.

    layers: additional arguments of the blocks between the first and the last of the model.
    """
    if not 0 <= first < last <= len(blocks):
        raise PlanError(f"blocks {first}..{last - 1} do not exist: the model has {len(blocks)}, counted from 0")
    for at in range(first, last):
        hidden = blocks[at].module(hidden, *(layers if 0 < at < len(blocks) - 1 else ()))
    return hidden


def _entry(blocks: Sequence[Block], first: int, hidden: Tensor | None, batch: Batch) -> Tensor:
    """Return the input of block `first`: the batch's token ids for block 0, the hidden state for the others."""
    if first == 0:
        if hidden is not None:
            raise PlanError(f"block 0 ({blocks[0].name!r}) reads the batch, but was also given a hidden state")
        key = "input_ids" if "input_ids" in batch else "inputs"
        if key not in batch:
            raise PlanError(f"the batch has neither 'input_ids' nor 'inputs', only {', '.join(sorted(batch)) or '-'}")
        return torch.as_tensor(batch[key])
    if hidden is None:
        raise PlanError(f"block {first} ({blocks[first].name!r}) needs the hidden state of block {first - 1}, got none")
    return hidden


class DecoderAdapter:
    """The built-in decoder: blocks `embed`, `layers.0` ..., `head`."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._part: SequencePart | None = None
        layers = [Block(f"layers.{index}", layer) for index, layer in enumerate(model.layers)]
        self._blocks = (Block("embed", model.embed), *layers, Block("head", model.head))
        parts = list(model.modules())
        self._to_residual = {part.output for part in parts if isinstance(part, Attention)}
        self._to_residual |= {part.down for part in parts if isinstance(part, FeedForward)}
        check_blocks(self._blocks, model)

    def blocks(self) -> Sequence[Block]:
        """Return embed, the layers, head."""
        return self._blocks

    def forward(self, first: int, last: int, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Run blocks first..last-1. `position_ids` [B, S] that restart within a row separate its documents."""
        given, part = _entry(self._blocks, first, hidden, batch), self._part
        if "position_ids" in batch:
            positions = torch.as_tensor(batch["position_ids"], device=given.device)
            mask = document_mask(positions)
        elif part is not None:
            positions, mask = torch.arange(length_of(batch), device=given.device)[None], None
        else:
            return run_blocks(self._blocks, first, last, given)
        if part is not None:
            positions = part.of(positions, 1)
            given = part.of(given, 1) if first == 0 else given
        return run_blocks(self._blocks, first, last, given, layers=(positions, mask))

    def divide_sequences(self, part: SequencePart, tensor: int) -> Mapping[int, int]:
        """Compute a part of each sequence from now on. Return the number of attentions in each block."""
        check_heads_of_sequence(part.ranks, self.model.config.heads // tensor, "the decoder")
        self._part = part
        return dict.fromkeys(range(1, len(self._blocks) - 1), 1)

    def check_documents(self, rows: int) -> None:
        """Accept any number of documents per row."""

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy summed over the tokens that count."""
        return token_cross_entropy(logits, batch)

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        """Set norms to one, selection biases to zero, and other weights to normal values; see
        `DecoderConfig.initial_std`."""
        std = self.model.config.initial_std
        shrunk = std / math.sqrt(2 * self.model.config.layers)
        match module:
            case nn.RMSNorm():
                nn.init.ones_(module.weight)
            case nn.Linear() | nn.Embedding():
                nn.init.normal_(module.weight, std=shrunk if module in self._to_residual else std, generator=generator)
            case Router():
                nn.init.normal_(module.weight, std=std, generator=generator)
                if module.selection_bias is not None:
                    nn.init.zeros_(module.selection_bias)
            case Experts():
                nn.init.normal_(module.gate_up_proj, std=std, generator=generator)
                nn.init.normal_(module.down_proj, std=shrunk, generator=generator)
            case _ if any(True for _ in module.parameters(recurse=False)):
                raise PlanError(f"the decoder has no initial values for a {type(module).__name__}")

    def tensor_plan(self, ranks: int) -> Mapping[str, str]:
        """Split heads and features of layers, and the vocabulary of embedding and head. The runtime divides
        experts; routers are whole."""
        config = self.model.config
        check_heads(ranks, config.heads, config.kv_heads)
        return {
            "embed": "embedding_rowwise",
            **{f"layers.*.attention.{name}": "colwise" for name in ("query", "key", "value")},
            "layers.*.attention.output": "rowwise",
            **{f"layers.*.{part}.{name}": "colwise" for part in _DENSE for name in ("gate", "up")},
            **{f"layers.*.{part}.down": "rowwise" for part in _DENSE},
            "head.output": "colwise_gather_output",
        }

    def vocabulary(self) -> Vocabulary:
        """Return the embedding, and the projection after the final norm."""
        return Vocabulary("embed", "head.output")


_DENSE = ("feed_forward", "feed_forward.shared")
"""Names in a layer of the decoder under which there may be a `FeedForward`."""


def _separate(model: nn.Sequential) -> None:
    """Replace each repeated module by a copy with the same parameters and buffers."""
    seen: set[int] = set()
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if name and "." not in name and id(module) in seen:
            kept = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
            model.register_module(name, copy.deepcopy(module, kept))
        seen.add(id(module))


def check_heads(ranks: int, heads: int, kv_heads: int) -> None:
    """Raise PlanError if the heads of attention cannot be split over so many ranks."""
    problem = head_problem(ranks, heads, kv_heads)
    if problem is not None:
        raise PlanError(problem)


class SequentialAdapter:
    """Any `nn.Sequential`: each of its modules is a block.

    The first takes `batch["input_ids"]` (or `batch["inputs"]`), the last returns the logits or outputs. loss: see
    `Loss`; without one, outputs are logits [B, S, vocabulary] of `batch["labels"]`. Modules are initialized by their
    own `reset_parameters`. A module that is listed twice is replaced by a copy with the same parameters, since each
    block has its own forward.  tensor_plan: how modules are split, see the module. vocabulary: names of the embedding
    and the head.
    """

    def __init__(
        self,
        model: nn.Sequential,
        loss: Loss = token_cross_entropy,
        *,
        tensor_plan: Mapping[str, str] | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.model = model
        self._loss = loss
        self._tensor_plan = tensor_plan
        self._vocabulary = vocabulary
        _separate(model)
        top = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
        self._blocks = tuple(Block(name, module) for name, module in top if "." not in name)
        if not self._blocks:
            raise PlanError("an empty nn.Sequential has no blocks: give it at least one module")
        check_blocks(self._blocks, model)
        _check_meta_buffers(model)

    def blocks(self) -> Sequence[Block]:
        """Return the modules of the nn.Sequential."""
        return self._blocks

    def forward(self, first: int, last: int, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Run blocks first..last-1."""
        return run_blocks(self._blocks, first, last, _entry(self._blocks, first, hidden, batch))

    def loss(self, logits: Any, batch: Batch) -> Tensor | tuple[Tensor, Tensor | float]:
        """Return the summed loss: the one given at construction, or token cross-entropy."""
        return self._loss(logits, batch)

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        """Call the module's own `reset_parameters`; see `reset_module`."""
        reset_module(module, generator)

    def tensor_plan(self, ranks: int) -> Mapping[str, str]:
        """Return the tensor-parallel plan given at construction."""
        if self._tensor_plan is None:
            raise PlanError(
                f"tensor = {ranks}: it is not defined how this nn.Sequential is split; give it a method "
                "atoll_adapter() that returns a SequentialAdapter(self, tensor_plan={...})"
            )
        return self._tensor_plan

    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary given at construction."""
        if self._loss is not token_cross_entropy:
            raise PlanError("it computes token cross-entropy, and this nn.Sequential has another loss; turn it off")
        if self._vocabulary is None:
            raise PlanError(
                "it is not defined which modules of this nn.Sequential are embedding and head; "
                "give it a method atoll_adapter() that returns a SequentialAdapter(self, vocabulary=Vocabulary(...))"
            )
        return self._vocabulary


def reset_module(module: nn.Module, generator: torch.Generator) -> None:
    """Call the module's `reset_parameters`, or torch's equivalent, with the global CPU generator seeded from
    `generator`.

    The global generator is restored afterwards. A module with parameters of its own and no `reset_parameters` raises
    PlanError; one without parameters is unchanged.
    """
    reset = reset_of(module)
    if reset is not None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(generator.initial_seed())
            reset()
        return
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise PlanError(
            f"{type(module).__name__} has parameters ({', '.join(own)}) and no reset_parameters(): "
            "add that method, or give the model an adapter whose initialise() sets them"
        )


def _check_meta_buffers(model: nn.Module) -> None:
    """Refuse buffers whose values are lost because they were built on meta and nothing sets them again."""
    lost = [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
        if buffer.is_meta and reset_of(module) is None
    ]
    if lost:
        raise PlanError(
            f"buffers built on the meta device that nothing sets: {', '.join(lost)}; build the model on the CPU, or "
            "give their modules a reset_parameters() that sets them"
        )


def check_blocks(blocks: Sequence[Block], model: nn.Module) -> None:
    """Raise PlanError unless the blocks belong to the model, have distinct names and modules, and contain every
    parameter."""
    modules = dict(model.named_modules(remove_duplicate=False))
    problems = []
    names = [block.name for block in blocks]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        problems.append(f"block names used twice: {', '.join(repeated)}")
    by_module: dict[int, list[str]] = {}
    for block in blocks:
        by_module.setdefault(id(block.module), []).append(block.name)
    problems.extend(
        f"one module is the blocks {', '.join(same)}; give each block its own module, which may share parameters: "
        "b.weight = a.weight"
        for same in by_module.values()
        if len(set(same)) > 1
    )
    strangers = [block.name for block in blocks if modules.get(block.name) is not block.module]
    if strangers:
        problems.append(f"blocks that are not the model's module of that name: {', '.join(strangers)}")

    held = {id(parameter) for block in blocks for _, parameter in block.named_parameters()}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if missing:
        problems.append(f"parameters that are in no block: {', '.join(missing)}; move them into a module of a block")
    if problems:
        raise PlanError(f"{type(model).__name__} does not split into its blocks:\n  " + "\n  ".join(problems))


def adapter_for(model: object) -> Adapter:
    """Return the adapter of a model: its own, or the one for its class; an adapter is returned unchanged."""
    if isinstance(model, nn.Module) and _is_of(model, "peft", "PeftModel"):
        wrapped: Any = model
        return adapter_for(wrapped.get_base_model())
    own = getattr(model, "atoll_adapter", None)
    if callable(own):
        adapter = own()
        if not isinstance(adapter, Adapter):
            raise PlanError(
                f"{type(model).__name__}.atoll_adapter() gave a {type(adapter).__name__}, which is not an Adapter: "
                "it needs the methods blocks, forward, loss and initialise"
            )
        if isinstance(model, nn.Module):
            check_blocks(adapter.blocks(), model)
        return adapter
    match model:
        case Adapter():
            return model
        case Decoder():
            return DecoderAdapter(model)
        case nn.Sequential():
            return SequentialAdapter(model)
    if isinstance(model, nn.Module) and _is_of(model, "transformers", "PreTrainedModel"):
        from atoll.runtime.models.hugging_face import HuggingFaceAdapter

        return HuggingFaceAdapter(model)
    raise PlanError(
        f"no adapter for a {type(model).__name__}: it is neither atoll.runtime.models.Decoder, nn.Sequential nor a "
        "model of transformers. Give the model a method atoll_adapter() that returns an atoll.runtime.models.Adapter "
        "(blocks, forward, loss, initialise); docs/adapters.md shows how"
    )


def check_documents(model: object, rows: int) -> None:
    """Raise PlanError if a model does not keep the documents of a row apart, in microbatches of `rows` rows."""
    check: Callable[[int], None] | None = getattr(adapter_for(model), "check_documents", None)
    if check is None:
        raise PlanError(
            f"{type(model).__name__} is not known to separate the documents of a row: its adapter has no "
            "check_documents()"
        )
    check(rows)


def _is_of(model: nn.Module, package: str, name: str) -> bool:
    """Return True if a model is of a class in a package that may not be installed."""
    return any(base.__name__ == name and base.__module__.split(".")[0] == package for base in type(model).__mro__)
