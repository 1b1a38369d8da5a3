"""Any Hugging Face model whose layers are one list, or two, split by putting other modules into its slots.

The model's own `forward` runs on every stage, so masks, rotary angles and other values that a family computes from the
batch need no code here. Modules that a stage does not own are replaced while it runs:

    modules before the layers      a stub that returns zeros of the right shape, which are not used
    layers before the stage's      return their input, in the form of this model's layers
    the stage's first layer        gets the hidden state that the stage received
    the stage's last layer         ends the forward; its hidden state is the stage's output

The last stage continues with the model's own norm, head and operations on logits. A probe of the model, without
values, layers or memory (see probe.py), finds the modules that run before, in and after the layers; slots.py has what
replaces them.

In a model with an encoder and a decoder, a stage that begins in the decoder receives the encoder's output and the
decoder's hidden state, concatenated along the sequence, and returns both. Its forward gets the former as
`encoder_outputs`, and so skips the encoder. The encoder's output is sent over every link of the decoder, including the
one to the head.

[Note: names] Parameters have the names of the model's `state_dict`; for a model of the `peft` package, those of its
base model. A shared weight has its name in the model's files, even if that is of a module which does not run, such as
T5's `shared`.

[Note: rules from outside]
The rule of a module that contains the layers may initialize a parameter of a block, as T5's class does its embedding.
It is run for each block after the block's own rules, with the block's seed and all other parameters marked as
initialized.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base._torch import bare_copy, reset_of
from atoll.base.errors import PlanError
from atoll.runtime.models.adapter import STYLES, Block, Vocabulary, check_blocks, check_heads, reset_module
from atoll.runtime.models.batch import Batch
from atoll.runtime.models.buffers import construct_buffers, constructed_constants, on_meta, written
from atoll.runtime.models.divided import DividedLayers, divide_layers
from atoll.runtime.models.documents import check_causal, check_flash, dense_mask, sees, separates
from atoll.runtime.models.inputs import DECODER_IDS, decoder_ids, main_input
from atoll.runtime.models.part import SequencePart
from atoll.runtime.models.probe import (
    fixed_options,
    hidden_argument,
    look_at,
)
from atoll.runtime.models.slots import EncoderOutput, LayerSlot, PlacedStack, StageEnd, StageRun, Stub
from atoll.runtime.models.tasks import LABELS, task_of
from atoll.runtime.models.tied import share_position_bias


class HuggingFaceAdapter:
    """A `transformers` model with a head of a kind that `atoll.runtime.models.tasks` knows; see the module.

    Raises PlanError for a model that cannot be split this way, and names the part.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._task = task_of(model)
        share_position_bias(model)
        found = look_at(model)
        modules = dict(model.named_modules())
        for name, kept in found.kept.items():
            parent, leaf = self._parent(name)
            setattr(parent, leaf, modules[kept])
        blocks: list[Block] = []
        self._stacks: list[PlacedStack] = []
        for parts, stack in zip_longest(found.around, found.stacks):
            for at, name in enumerate(found.kept.get(part, part) for part in parts):
                blocks.append(Block(name, modules[name], is_joined=at > 0))
            if stack is not None:
                stubs = {name: Stub(found.shapes[name], modules[name]) for name in parts}
                self._stacks.append(PlacedStack(stack, len(blocks), stubs))
                blocks += [Block(f"{stack.name}.{at}", layer) for at, layer in enumerate(stack.layers)]
        self._blocks = tuple(blocks)
        self._end = self._stacks[-1].end
        self._primes = found.primes
        owned = [block.name for block in blocks]
        lists = [placed.stack.layers for placed in self._stacks]
        self._outside = [m for m in modules.values() if any(each is layers for each in m.modules() for layers in lists)]
        self._between = [module for name, module in modules.items() if not _lies_in(name, owned)]
        self._options = fixed_options(model)
        self._accepted = set(inspect.signature(model.forward).parameters)
        self._input = main_input(model)
        self._divided: DividedLayers | None = None
        self._tables: list[tuple[str, nn.Module]] = []
        check_blocks(self._blocks, model)
        self._fill_buffers()

    def blocks(self) -> Sequence[Block]:
        """Return the blocks: modules before the layers, layers, modules after; also those of a decoder."""
        return self._blocks

    def forward(self, first: int, last: int, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Run blocks first..last-1 with the model's own forward."""
        self._check(first, last, hidden)
        inputs = self._inputs(batch)
        training = self._blocks[first].module.training
        given = inputs[self._input]
        if self._divided is not None:
            self._divided.length = given.shape[1]
            if _is_flash(self.model) and "position_ids" in inputs:
                check_flash(self._divided.part)
        for module in self._between:
            module.training = training
            _place(module, given.device)
        if first == 0 and given.is_floating_point():
            inputs[self._input] = given.to(next(self._blocks[0].module.parameters()).dtype)
        try:
            with self._only(first, last, hidden, inputs=inputs) as options:
                output = self.model(**inputs, **options)
        except StageEnd as handed:
            return handed.hidden
        outputs = self._task.outputs(output)
        assert outputs is not None, "the look at the model has seen its outputs"
        return outputs

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the part of a batch that the model's forward takes."""
        inputs = {name: torch.as_tensor(value) for name, value in batch.items() if name not in LABELS}
        strange = sorted(set(inputs) - self._accepted)
        if strange:
            raise PlanError(f"the batch has {', '.join(strange)}, which {type(self.model).__name__} does not take")
        if self._input not in inputs:
            raise PlanError(
                f"the batch has no {self._input}, which {type(self.model).__name__} reads, only "
                f"{', '.join(sorted(batch)) or 'nothing'}"
            )
        if self._is_encoder_decoder:
            inputs[DECODER_IDS] = decoder_ids(self.model, {name: torch.as_tensor(batch[name]) for name in batch})
        return inputs

    @property
    def task_heads(self) -> tuple[str, ...]:
        """Blocks that are missing in the files of a language model, or of a headless model, and are then
        initialized."""
        after = [block.name for block in self._blocks[self._end :]]
        return () if self._task.is_language else tuple(n for n in after if "." not in n or n.endswith(".pooler"))

    @property
    def is_language_model(self) -> bool:
        """True if the model has one list of layers, and scores each word for each token."""
        return self._task.is_language and not self._is_encoder_decoder

    @property
    def predicts_next(self) -> bool:
        """True if an output predicts the next token, so that labels may be shifted along the sequence."""
        return self.is_language_model and self.model.loss_type != "ForMaskedLM"

    @property
    def _is_encoder_decoder(self) -> bool:
        return len(self._stacks) > 1

    def loss(self, logits: Tensor, batch: Batch) -> Any:
        """Return the loss of the model's task, summed over what counts; labels are at the positions that predict
        them."""
        return self._task.loss(logits, batch, self.model.config)

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        """Set the initial values of the model's family, and those of adapters of the `peft` package."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(generator.initial_seed())
            self.model._init_weights(module)
            restart = getattr(module, "reset_lora_parameters", None)
            if restart is not None:
                adapters: Any = module.active_adapters
                for name in adapters:
                    restart(name, True)
            if any(module is block.module for block in self._blocks):
                self._start_from_outside(module, generator.initial_seed())
        if _unset(module) and reset_of(module) is not None:  # otherwise the rule of an enclosing module may set them
            reset_module(module, generator)
        for key, parameter in _unset(module).items():
            value = self._constants.get(f"{self._names.get(module, '')}.{key}")
            if value is not None:
                parameter.copy_(value)

    @cached_property
    def _names(self) -> dict[nn.Module, str]:
        return {module: name for name, module in self.model.named_modules()}

    @cached_property
    def _constants(self) -> dict[str, Tensor]:
        """Parameters that only the model's constructor sets."""
        return constructed_constants(self.model)

    def _start_from_outside(self, block: nn.Module, seed: int) -> None:
        """See [Note: rules from outside]."""
        own = {id(tensor) for tensor in (*block.parameters(), *block.buffers())}
        others = [t for t in (*self.model.parameters(), *self.model.buffers()) if id(t) not in own]
        marked = [tensor for tensor in others if not getattr(tensor, "_is_hf_initialized", False)]
        for tensor in marked:
            tensor._is_hf_initialized = True
        try:
            for module in reversed(self._outside):
                torch.default_generator.manual_seed(seed)
                self.model._init_weights(module)
        finally:
            for tensor in marked:
                del tensor._is_hf_initialized

    def tensor_plan(self, ranks: int) -> Mapping[str, str]:
        """Return the model's own plan if it has one that splits its layers. Otherwise, and with low-rank adapters,
        split every linear layer by its outputs, which are gathered afterwards: valid for any model, with more
        communication."""
        own = {name: style for name, style in (self.model.tp_plan or {}).items() if style in STYLES}
        layers = [self._blocks[at] for placed in self._stacks for at in placed.run]
        inside = [name for block in layers for name, _ in block.named_modules()]
        has_adapters = any(name.endswith(".base_layer") for name in inside)
        is_own = not has_adapters and not self._is_encoder_decoder
        if is_own and any(fnmatchcase(name, row) for row in _rows(own) for name in inside):
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
        if not self.is_language_model:  # there may be more operations on their tables and outputs
            return plan
        # All modules that hold a weight of an end: `peft` wraps an end of which it trains a copy beside the original.
        ends = [
            end for end in (self.model.get_input_embeddings(), self.model.get_output_embeddings()) if end is not None
        ]
        weights = {id(weight) for end in ends for weight in end.parameters()}
        styles: dict[type[nn.Module], str] = {nn.Embedding: "embedding_rowwise", nn.Linear: "colwise_gather_output"}
        split = {
            name: style
            for name, module in self.model.named_modules()
            for kind, style in styles.items()
            if isinstance(module, kind) and id(module.get_parameter("weight")) in weights
        }
        return {**plan, **split}

    def vocabulary(self) -> Vocabulary:
        """Return the model's own input and output embeddings, and its forward's operations on logits."""
        if not self.is_language_model:
            raise PlanError(
                f"{type(self.model).__name__} is not a language model with one list of layers, whose embedding and "
                "head are known; turn it off"
            )
        names = {id(module): name for name, module in self.model.named_modules()}
        ends = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
        embedding, head = (names.get(id(end), "") for end in ends)
        if head not in {block.name for block in self._blocks[self._end :]}:
            raise PlanError(
                f"the head of {type(self.model).__name__} ({head or 'none'}) is part of a larger "
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
                f"{type(self.model).__name__} does more to its head's output than scaling it or "
                "capping it by config.final_logit_softcapping; turn it off"
            )
        return Vocabulary(embedding, head, scale=1.0 if abs(scale - 1.0) < 1e-6 else scale, cap=cap)

    def check_documents(self, rows: int) -> None:
        """Check the inputs of each layer for rows of several documents.

        A mask has to forbid attention from one document to another. Flash attention takes none: it separates documents
        by their positions, and only in a single row.
        """
        kind = type(self.model).__name__
        if not self.is_language_model:
            raise PlanError(
                f"{kind} is not a language model with one list of layers, which rows of several documents are for"
            )
        if "position_ids" not in self._accepted:
            raise PlanError(f"{kind} takes no position_ids, which separate the documents of a row")
        is_flash = _is_flash(self.model)
        if is_flash and rows > 1:
            raise PlanError(f"flash attention separates the documents of a single row, and a microbatch has {rows}")
        positions = torch.tensor([[*range(5), *range(6)]] if is_flash else [[*range(5), *range(6)], [*range(11)]])
        for at, given in enumerate(self._given_to_layers(positions)):
            kept = sees(given, positions) if is_flash else separates(given, positions)
            if not kept:
                raise PlanError(f"layer {at} of {kind} is given nothing that keeps the documents of a row apart")

    def _given_to_layers(self, positions: Tensor) -> list[list[Tensor]]:
        """Return the tensors, apart from the hidden state, that each layer gets for rows with these positions."""
        (placed,) = self._stacks
        form, found = placed.stack.form, list[list[Tensor]]()

        def note(*args: Any, **kwargs: Any) -> Any:
            passed = map(dense_mask, (*args[1:], *kwargs.values()))
            found.append([each for each in passed if isinstance(each, Tensor)])
            output = form.wrap(hidden_argument(args, kwargs))
            if len(found) == len(placed.slots):
                raise StageEnd(form.unwrap(output))
            return output

        hidden = torch.zeros(*positions.shape, self.model.get_input_embeddings().embedding_dim)
        inputs = {"input_ids": torch.zeros_like(positions)}
        for module in self._between:
            _place(module, hidden.device)
        with torch.no_grad(), self._only(self._end, len(self._blocks), hidden, inputs=inputs) as options:
            for slot in placed.slots:  # all slots replace their layers, which belong to another stage
                slot.doing(note)
            try:
                self.model(**inputs, position_ids=positions, **options)
            except StageEnd:
                return found
        raise PlanError(f"{type(self.model).__name__} ends before its last layer")

    def _check_rows(self, embedding: Any) -> None:
        """Raise PlanError for an embedding that does not transform each of its rows alone, as scaling does."""
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
            raise PlanError(f"a {type(embedding).__name__} does more than look up rows; turn it off")

    def _logits_of(self, given: Tensor, head: str) -> Tensor:
        """Return the model's logits if its head returns `given`, and the head's input."""
        hidden = given.new_zeros(1, 2, self.model.get_input_embeddings().embedding_dim)
        stood = []
        for block in self._blocks[self._end :]:
            parent, leaf = self._parent(block.name)
            stood.append((parent, leaf, block.module))
            slot = LayerSlot(block.module).doing(
                (lambda *args, **kwargs: given) if block.name == head else (lambda hidden, *args, **kwargs: hidden)
            )
            setattr(parent, leaf, slot)
        try:
            inputs = {"input_ids": torch.zeros(1, 2, dtype=torch.long)}
            with torch.no_grad(), self._only(self._end, len(self._blocks), hidden, inputs=inputs) as options:
                logits: Tensor = self.model(**inputs, **options).logits
        finally:
            for parent, leaf, module in stood:
                setattr(parent, leaf, module)
        return logits

    def divide_sequences(self, part: SequencePart, tensor: int) -> Mapping[int, int]:
        """Compute a part of each sequence from now on; see divided.py. Return the number of attentions in each block.

        Raises PlanError for a model in which more than attention relates positions.
        """
        kind = type(self.model).__name__
        if self._is_encoder_decoder or self._input != "input_ids":
            raise PlanError(
                f"{part.said}: {kind} has more than one sequence of tokens, or none; use {part.whole_again}"
            )
        (placed,) = self._stacks
        self._tables = [(each.name, each.module) for each in self._blocks[: placed.begin]]
        self._tables = [each for each in self._tables if isinstance(each[1], nn.Embedding)]
        layers = [self._blocks[at].module for at in placed.run]
        self._divided = divide_layers(self.model, layers, part, tensor=tensor, outputs=self._task.outputs)
        if part.slices > 1:
            positions = torch.arange(11)[None]
            check_causal(layers, self._given_to_layers(positions), positions, kind=kind, part=part)
        return dict(zip(placed.run, self._divided.attentions, strict=True))

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
    def _only(
        self, first: int, last: int, hidden: Tensor | None, *, inputs: Mapping[str, Tensor]
    ) -> Iterator[dict[str, Any]]:
        """Context with blocks first..last-1 in their places and replacements for the others. Yields additional
        arguments of the model's forward."""
        options = dict(self._options)
        stage = StageRun(first, last, hidden, EncoderOutput(), self._divided)
        if hidden is not None and self._is_encoder_decoder and first >= self._stacks[1].begin:
            target = inputs[DECODER_IDS].shape[1]
            encoded, stage.hidden = hidden.split([hidden.shape[1] - target, target], dim=1)
            options["encoder_outputs"] = _encoder_outputs(encoded)
        stood: list[tuple[nn.Module, str, nn.Module]] = []

        def put(parent: nn.Module, leaf: str, module: nn.Module) -> None:
            stood.append((parent, leaf, getattr(parent, leaf)))
            setattr(parent, leaf, module)

        try:
            for placed in self._stacks[1:] if "encoder_outputs" in options else self._stacks:
                if hidden is not None and first >= placed.begin:
                    for name, stub in placed.stubs.items():
                        put(*self._parent(name), stub.doing(self._sizes(inputs), hidden))
                elif self._divided is not None:
                    for name, module in self._tables:
                        put(*self._parent(name), LayerSlot(module).doing(self._divided.looking_up(module)))
                for at in placed.run:
                    act = stage.act(placed, at, self._blocks[at].module)
                    if act is not None:
                        place = at - placed.begin
                        put(placed.stack.layers, str(place), placed.slots[place].doing(act))
            yield options
        finally:
            for parent, leaf, module in reversed(stood):
                setattr(parent, leaf, module)

    def _sizes(self, inputs: Mapping[str, Tensor]) -> dict[int, int]:
        """Return the sizes in a batch for the primes of the probe."""
        given = inputs[self._input]
        sizes = {self._primes[0]: given.shape[0]}
        if self._input == "input_ids":
            sizes[self._primes[1]] = given.shape[1]
        if DECODER_IDS in inputs:
            sizes[self._primes[2]] = inputs[DECODER_IDS].shape[1]
        return sizes

    def _parent(self, name: str) -> tuple[nn.Module, str]:
        above, _, leaf = name.rpartition(".")
        return self.model.get_submodule(above), leaf

    def _fill_buffers(self) -> None:
        """Give values to what a model on `meta` has lost, but for buffers of blocks that only `initialise` sets.

        Buffers outside of blocks, such as rotary frequencies, are used by every stage.
        """
        self.unset_because = construct_buffers(self.model)
        names = {id(module): name for name, module in self.model.named_modules()}
        unset = [(names[id(module)], module) for module in self._between if on_meta(module)]
        with torch.device("cpu"), written(unset, why=self.unset_because, made={}):
            for _, module in unset:
                self.model._init_weights(module)


def _is_flash(model: Any) -> bool:
    """Return True if attention is told where documents begin by positions, and not by masks."""
    return str(model.config.get_text_config()._attn_implementation).startswith("flash")


def _place(module: nn.Module, device: torch.device) -> None:
    """Move buffers outside of blocks to the device of the batch."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.device != device:
            setattr(module, name, buffer.to(device))


def _encoder_outputs(encoded: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=encoded)


def _unset(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in module.named_parameters(recurse=False) if each.isnan().any()}


def _rows(plan: Mapping[str, str]) -> list[str]:
    """Return patterns of modules that are split by their inputs."""
    return [pattern for pattern, style in plan.items() if style in ("rowwise", "rowwise_split_input")]


def _lies_in(name: str, owned: Sequence[str]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in owned)
