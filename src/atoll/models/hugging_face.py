"""Any Hugging Face model whose layers are one list, split by putting other modules into its slots.

The model's own `forward` runs on every stage, so masks, rotary angles and whatever else a family computes from the
batch need no code here. What a stage does not own is replaced while it runs:

    what comes before the layers   a stub that gives zeros of the right shape; they are dropped below
    a layer before the stage's     passes on what it is given, in the form that layers of this model give
    the stage's first layer        is given the hidden state that the stage received instead
    the stage's last layer         ends the forward; its hidden state is what the stage gives

The last stage goes on through the model's own norm, head and whatever it does to logits. A look at the model, without
values, layers or memory (see probe.py), says what runs before, in and after the layers.

[Note: names] Parameters keep the names that the model's `state_dict` has. Of a model of the `peft` package these are
its base model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from atoll._torch import bare_copy
from atoll.errors import PlanError
from atoll.models.adapter import (
    STYLES,
    Batch,
    Block,
    Vocabulary,
    check_blocks,
    check_heads,
    reset_module,
    token_cross_entropy,
)
from atoll.models.probe import Shape, fixed_options, hidden_argument, look_at, replace_hidden

LABELS = "labels"


class HuggingFaceAdapter:
    """A `transformers` model with a language-modelling head, causal or masked; see the module.

    Raises PlanError for a model that does not split this way, with the part that does not.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        found = look_at(model)
        self._layers, self._form = found.layers, found.form
        self._stubs = {name: _Stub(found.shapes[name]) for name in found.before}
        owned = [*found.before, *(f"{found.layers_name}.{at}" for at in range(len(found.layers))), *found.after]
        modules = dict(model.named_modules())
        inner = {*found.before[1:], *found.after[1:]}
        self._blocks = tuple(Block(name, modules[name], is_joined=name in inner) for name in owned)
        self._first_layer, self._end = len(found.before), len(found.before) + len(found.layers)
        self._slots = [_Slot(layer) for layer in found.layers.children()]
        self._between = [module for name, module in modules.items() if not _lies_in(name, owned)]
        self._options = fixed_options(model)
        self._accepted = set(inspect.signature(model.forward).parameters)
        check_blocks(self._blocks, model)
        for module in self._between:
            self._place(module, torch.device("cpu"))

    def blocks(self) -> Sequence[Block]:
        """What runs before the layers, the layers, what runs after."""
        return self._blocks

    def forward(self, first: int, last: int, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Run blocks first..last-1 by the model's own forward."""
        self._check(first, last, hidden)
        inputs = {name: torch.as_tensor(value) for name, value in batch.items() if name != LABELS}
        strange = sorted(set(inputs) - self._accepted)
        if strange:
            raise PlanError(f"the batch has {', '.join(strange)}, which {type(self.model).__name__} does not take")
        training = self._blocks[first].module.training
        ids = inputs["input_ids"]
        for module in self._between:
            module.training = training
            self._place(module, ids.device)
        try:
            with self._only(first, last, hidden, tuple(ids.shape)):
                output = self.model(**inputs, **self._options)
        except _Handed as handed:
            return handed.hidden
        logits: Tensor = output.logits
        return logits

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy summed over the tokens that count; labels stand where they are predicted."""
        return token_cross_entropy(logits, batch)

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        """The values that the model's family starts with, and those of adapters of the `peft` package."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            self.model._init_weights(module)
            restart = getattr(module, "reset_lora_parameters", None)
            if restart is not None:
                adapters: Any = module.active_adapters
                for name in adapters:
                    restart(name, True)
        own = [parameter for parameter in module.parameters(recurse=False) if parameter.isnan().any()]
        if own:
            reset_module(module, generator)

    def tensor_plan(self, ranks: int) -> Mapping[str, str]:
        """The model's own plan, where it has one that splits its layers; else, and with low-rank adapters, every linear
        layer by its outputs, which are whole again afterwards: right for any model, with more to send."""
        own = {name: style for name, style in (self.model.tp_plan or {}).items() if style in STYLES}
        layers = self._blocks[self._first_layer : self._end]
        inside = [name for block in layers for name, _ in block.named_modules()]
        has_adapters = any(name.endswith(".base_layer") for name in inside)
        if not has_adapters and any(fnmatchcase(name, row) for row in _rows(own) for name in inside):
            config = self.model.config.get_text_config()
            heads = config.num_attention_heads
            check_heads(ranks, heads, getattr(config, "num_key_value_heads", None) or heads)
            return own
        plan = {
            name: "colwise_gather_output"
            for block in layers
            for name, module in block.named_modules()
            if (type(module) is nn.Linear or type(module).__name__ == "Conv1D") and ".lora_" not in name
        }
        ends: list[tuple[Any, str, type]] = [(self.model.get_input_embeddings(), "embedding_rowwise", nn.Embedding)]
        ends += [(self.model.get_output_embeddings(), "colwise_gather_output", nn.Linear)]
        names = {id(module): name for name, module in self.model.named_modules()}
        return {**plan, **{names[id(module)]: style for module, style, kind in ends if isinstance(module, kind)}}

    def vocabulary(self) -> Vocabulary:
        """The model's own input and output embeddings, and what its forward does to logits."""
        names = {id(module): name for name, module in self.model.named_modules()}
        ends = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
        embedding, head = (names.get(id(end), "") for end in ends)
        if head not in {block.name for block in self._blocks[self._end :]}:
            raise PlanError(
                f"vocabulary_parallel: the head of {type(self.model).__name__} ({head or 'none'}) is part of a larger "
                "block; turn it off, or give the model an adapter with a vocabulary()"
            )
        self._check_rows(ends[0])
        rows = getattr(ends[1], "out_features", 0)
        given = torch.linspace(-3.0, 3.0, 2 * rows, dtype=torch.float64).view(1, 2, rows)
        logits = self._logits_of(given, head)
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        scale = float(logits.flatten()[0] / given.flatten()[0]) if cap is None and logits.numel() else 1.0
        wanted = given * scale if cap is None else torch.tanh(given / cap) * cap
        if logits.shape != given.shape or not torch.allclose(logits.double(), wanted, rtol=1e-6, atol=1e-6):
            raise PlanError(
                f"vocabulary_parallel: {type(self.model).__name__} does more to its head's output than scaling it or "
                "capping it by config.final_logit_softcapping; turn it off"
            )
        return Vocabulary(embedding, head, scale=1.0 if abs(scale - 1.0) < 1e-6 else scale, cap=cap)

    def _check_rows(self, embedding: Any) -> None:
        """Raise PlanError for an embedding that does not work on each of its rows alone, as scaling does."""
        if type(embedding) is nn.Embedding or not isinstance(embedding, nn.Embedding):
            return
        weight = torch.arange(12.0, dtype=torch.float64).view(4, 3)
        small: Any = bare_copy(embedding, {"weight": nn.Parameter(weight)})
        small.padding_idx = None
        ids = torch.tensor([[2, 0, 2, 3]])
        with torch.no_grad():
            self.model._init_weights(small)
            small.weight.copy_(weight)
            found = small(ids)
            small.weight = nn.Parameter(weight[ids[0]])
            is_same = torch.equal(small(torch.arange(4)[None]), found)
        if not is_same:
            raise PlanError(
                f"vocabulary_parallel: a {type(embedding).__name__} does more than look up rows; turn it off"
            )

    def _logits_of(self, given: Tensor, head: str) -> Tensor:
        """What the model's forward gives where its head gives `given`, and what is before that what it gets."""
        hidden = given.new_zeros(1, 2, self.model.get_input_embeddings().embedding_dim)
        stood = []
        for block in self._blocks[self._end :]:
            parent, leaf = self._parent(block.name)
            stood.append((parent, leaf, block.module))
            slot = _Slot(block.module).doing(
                (lambda *args, **kwargs: given) if block.name == head else (lambda hidden, *args, **kwargs: hidden)
            )
            setattr(parent, leaf, slot)
        try:
            with torch.no_grad(), self._only(self._end, len(self._blocks), hidden, (1, 2)):
                logits: Tensor = self.model(input_ids=torch.zeros(1, 2, dtype=torch.long), **self._options).logits
        finally:
            for parent, leaf, module in stood:
                setattr(parent, leaf, module)
        return logits

    # ---- slots

    def _check(self, first: int, last: int, hidden: Tensor | None) -> None:
        if not 0 <= first < last <= len(self._blocks):
            raise PlanError(f"blocks {first}..{last - 1} do not exist: the model has {len(self._blocks)}")
        for at in (first, last):
            if at < len(self._blocks) and self._blocks[at].is_joined:
                raise PlanError(f"a stage cannot begin at {self._blocks[at].name!r}: it belongs to the block before it")
        if (first == 0) != (hidden is None):
            raise PlanError("block 0 reads the batch and the others a hidden state; one of them was missing or extra")

    @contextmanager
    def _only(self, first: int, last: int, hidden: Tensor | None, size: tuple[int, ...]) -> Iterator[None]:
        """Blocks first..last-1 in their places, and something in the places of the others."""
        begin, end = self._first_layer, self._end
        layers = self._layers
        owned = [(str(at), layer) for at, layer in enumerate(layers)]
        stubbed: list[tuple[nn.Module, str, nn.Module]] = []
        try:
            if hidden is not None:
                for name, stub in self._stubs.items():
                    parent, leaf = self._parent(name)
                    stubbed.append((parent, leaf, parent.get_submodule(leaf)))
                    setattr(parent, leaf, stub.doing(size, hidden))
            for at in range(begin, end):
                act = self._act(at, first, last, hidden)
                if act is not None:
                    setattr(layers, str(at - begin), self._slots[at - begin].doing(act))
            yield
        finally:
            for name, layer in owned:
                setattr(layers, name, layer)
            for parent, leaf, module in stubbed:
                setattr(parent, leaf, module)

    def _act(self, at: int, first: int, last: int, hidden: Tensor | None) -> Callable[..., Any] | None:
        """What stands in for layer block `at`; None: the layer itself."""
        layer = self._blocks[at].module if first <= at < last else None
        enters = hidden is not None and at == max(first, self._first_layer) and first < self._end
        if hidden is not None and first >= self._end and at == self._end - 1:
            return lambda *args, **kwargs: self._form.wrap(hidden)
        ends = last <= self._end and at == max(last - 1, self._first_layer)
        if layer is not None and not enters and not ends:
            return None

        def run(*args: Any, **kwargs: Any) -> Any:
            if enters:
                args, kwargs = replace_hidden(args, kwargs, hidden)
            output = self._form.wrap(hidden_argument(args, kwargs)) if layer is None else layer(*args, **kwargs)
            if ends:
                raise _Handed(self._form.unwrap(output))
            return output

        return run

    def _parent(self, name: str) -> tuple[nn.Module, str]:
        above, _, leaf = name.rpartition(".")
        return self.model.get_submodule(above), leaf

    def _place(self, module: nn.Module, device: torch.device) -> None:
        """Buffers of what is no block, such as rotary frequencies: every stage computes with them."""
        own = dict(module.named_buffers(recurse=False))
        if any(buffer.is_meta for buffer in own.values()):
            for name, buffer in own.items():
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
            with torch.device("cpu"):
                self.model._init_weights(module)
            own = dict(module.named_buffers(recurse=False))
        for name, buffer in own.items():
            if buffer.device != device:
                setattr(module, name, buffer.to(device))


class _Handed(Exception):  # noqa: N818  (the end of a stage, not an error)
    """Ends a forward with the hidden state that its stage gives."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Slot(nn.Module):
    """Stands where a layer stood and looks like it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer
        self._act: Callable[..., Any] | None = None

    def doing(self, act: Callable[..., Any]) -> _Slot:
        """This slot, with `act` as its forward until it is given another."""
        self._act = act
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever the slot is for in the present stage."""
        assert self._act is not None, "a slot stands in the model only with something to do"
        return self._act(*args, **kwargs)


class _Stub(nn.Module):
    """Gives zeros of the shapes that an embedding gave; has a `weight` without elements."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self._size: tuple[int, ...] = ()
        self.weight = torch.empty(0)

    def doing(self, size: tuple[int, ...], like: Tensor) -> _Stub:
        """This stub, for a batch of [rows, length] and on the device and in the dtype of a hidden state."""
        self._size = size
        if self.weight.device != like.device or self.weight.dtype != like.dtype:
            self.weight = torch.empty(0, device=like.device, dtype=like.dtype)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros."""
        rows, length = self._size
        return self._shape.zeros(rows, length, like=self.weight)


def _rows(plan: Mapping[str, str]) -> list[str]:
    """Patterns of modules that are split by their inputs."""
    return [pattern for pattern, style in plan.items() if style in ("rowwise", "rowwise_split_input")]


def _lies_in(name: str, owned: Sequence[str]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in owned)
