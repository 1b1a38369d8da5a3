"""Probe of a Hugging Face model before, in and after its layers: one forward without values or layers.

Tensors are fake (shapes only) and the layers are replaced by recorders that return their input, so the probe needs no
memory and runs no layer. Batch and lengths are primes that no parameter has, so they are recognized in the shapes of
outputs.

A model has one list of layers, or two if it has an encoder and a decoder.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base._torch import fake_tensors
from atoll.base.errors import PlanError
from atoll.runtime.models.inputs import example, is_encoder_decoder, main_input
from atoll.runtime.models.tasks import task_of

HOW_TO_ADAPT = "give the model a method atoll_adapter(); docs/adapters.md shows how"

Argument = int | str
"""An argument of a call: its position, or its keyword."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Form:
    """Output form of layers: the hidden state (0), or the length of a tuple that starts with it."""

    length: int

    def wrap(self, hidden: Tensor, rest: Any = None) -> Any:
        """Return a hidden state in this form."""
        return (hidden, *[rest] * (self.length - 1)) if self.length else hidden

    @staticmethod
    def unwrap(output: Any) -> Tensor:
        """Return the hidden state in a layer's output."""
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden


@dataclass(frozen=True, slots=True)
class OutputShape:
    """Shapes of a module's outputs, with primes for batch and lengths."""

    output: Any

    def zeros(self, sizes: Mapping[int, int], like: Tensor) -> Any:
        """Return zeros of these shapes for a batch whose `sizes` are known by their primes, of the dtype and on the
        device of `like`."""

        def of(fake: Any) -> Any:
            if isinstance(fake, tuple):
                return tuple(of(each) for each in fake)
            return like.new_zeros([sizes.get(size, size) for size in fake.shape]) if fake is not None else None

        return of(self.output)


@dataclass(frozen=True, slots=True)
class Stack:
    """A list of layers that run one after the other. memory: the argument for the encoder's output."""

    name: str
    layers: nn.ModuleList
    form: _Form
    memory: Argument | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """The result of the probe.

    around: names of the modules with parameters that run before, between and after the stacks, in order.
    shapes: of the outputs of those before and between.  primes: rows, length and length of the decoder in them.
    kept: module that runs -> name of a module with the same parameters that does not run.
    """

    stacks: tuple[Stack, ...]
    around: tuple[tuple[str, ...], ...]
    shapes: Mapping[str, OutputShape]
    primes: tuple[int, int, int]
    kept: Mapping[str, str]


def hidden_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden state among a layer's arguments: the first, or the one of that name."""
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def replace_hidden(args: Sequence[Any], kwargs: Mapping[str, Any], hidden: Any) -> Arguments:
    """Return a layer's arguments with another hidden state."""
    return replace_argument(args, kwargs, 0 if args else "hidden_states", hidden)


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], at: Argument) -> Any:
    """Return one of a layer's arguments."""
    return args[at] if isinstance(at, int) else kwargs[at]


def replace_argument(args: Sequence[Any], kwargs: Mapping[str, Any], at: Argument, value: Any) -> Arguments:
    """Return a layer's arguments with one replaced."""
    if isinstance(at, int):
        return (*args[:at], value, *args[at + 1 :]), dict(kwargs)
    return tuple(args), {**kwargs, at: value}


def look_at(model: nn.Module) -> Look:
    """Probe a model. Raises PlanError if it cannot be split at its layers."""
    _check_config(model)
    lists = _encoder_and_decoder(model) if is_encoder_decoder(model) else [_find_layers(model)]
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    many = [prime for prime in _MANY if prime not in sizes]
    primes = next(prime for prime in _FEW if prime not in sizes), many[0], many[1]
    tried = []
    for forms in sorted(product(_FORMS, repeat=len(lists)), key=lambda each: len({form.length for form in each})):
        stacks = [Stack(name, layers, form) for (name, layers), form in zip(lists, forms, strict=True)]
        record = _run(model, stacks, primes)
        if record.problem is None:
            break
        tried.append(record)
    else:
        furthest = max(tried, key=lambda each: len(each.given))
        names = " and ".join(repr(name) for name, _ in lists)
        raise PlanError(f"{_kind(model)} does not split at {names}: {furthest.problem}; {HOW_TO_ADAPT}")
    around = _parts(model, stacks, record)
    shapes = {part: OutputShape(record.outputs[part]) for parts in around[:-1] for part in parts}
    kept = _kept_apart(model, record, [part for parts in around for part in parts])
    stacks[1:] = [replace(stack, memory=record.memory) for stack in stacks[1:]]
    return Look(tuple(stacks), around, shapes, primes, kept=kept)


_FEW = (3, 5, 7, 11, 13, 17, 19)
_MANY = (23, 29, 31, 37, 41, 43, 47, 53, 59, 61)
_LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
_FORMS = tuple(_Form(length) for length in range(4))


class _Rest:
    """Placeholder for a layer's outputs other than the hidden state."""


@dataclass(slots=True)
class _Record:
    """The events of a forward: numbers of layers, counted across stacks, and names of other modules. memory: the
    encoder's output, and the argument in which the decoder's layers took it."""

    events: list[str | int] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    given: list[tuple[Tensor, dict[Argument, Any]]] = field(default_factory=list)
    memory: Argument | None = None
    problem: str | None = None


class _Recorder(nn.Module):
    """Replaces a layer: records its inputs, and returns the hidden state."""

    def __init__(self, layer: nn.Module, at: int, record: _Record, form: _Form) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer
        self._at, self._record, self._form = at, record, form

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Record the inputs and return the hidden state."""
        hidden = hidden_argument(args, kwargs)
        others: dict[Argument, Any] = dict(enumerate(args))
        others.update(kwargs)
        del others[0 if args else "hidden_states"]
        self._record.events.append(self._at)
        passed = hidden * 1
        self._record.given.append((hidden, others))
        self._record.outputs[f"layer {self._at}"] = passed
        return self._form.wrap(passed, _Rest())


def _check_config(model: nn.Module) -> None:
    config: Any = model.config
    if any(getattr(each, "output_router_logits", False) for each in (config, config.get_text_config())):
        raise PlanError(
            f"{_kind(model)} would add a balance loss over the tokens of a whole batch and all layers "
            "(config.output_router_logits), which depends on how a step is cut into microbatches, and which no stage "
            "can compute. Set it to False; for a balance loss use that of sequences, train.router.sequence_loss or "
            "Engine(balance = Balance(sequence_loss = ...))"
        )
    dropped = [key for key in _LAYERDROP if getattr(config, key, 0.0)]
    if dropped:
        raise PlanError(
            f"{_kind(model)} skips layers at random (config.{dropped[0]} = {getattr(config, dropped[0])}), also "
            "those at which a stage ends; set it to 0"
        )


def _find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    config: Any = model.config
    sees = main_input(model) == "pixel_values" and hasattr(config, "vision_config")
    count = (config.vision_config if sees else config.get_text_config()).num_hidden_layers
    lists = _lists(model)
    fitting = [(name, each) for name, each in lists if len(each) == count]
    if not fitting:
        raise PlanError(
            f"{_kind(model)} has no list of {count} layers (config.num_hidden_layers), but "
            f"{', '.join(f'{name} of {len(each)}' for name, each in lists) or 'no list at all'}; {HOW_TO_ADAPT}"
        )
    return fitting[0]


def _encoder_and_decoder(model: Any) -> list[tuple[str, nn.ModuleList]]:
    names = {id(module): name for name, module in model.named_modules()}
    found = []
    for what, stack in (("encoder", model.get_encoder()), ("decoder", model.get_decoder())):
        lists = [] if stack is model or stack is model.base_model else _lists(stack)
        if not lists:
            raise PlanError(f"{_kind(model)} has no {what} with a list of layers; {HOW_TO_ADAPT}")
        found.append((names[id(lists[0][1])], lists[0][1]))
    if "encoder_outputs" not in inspect.signature(model.forward).parameters or found[0] == found[1]:
        raise PlanError(f"{_kind(model)} has an encoder whose outputs cannot be passed in; {HOW_TO_ADAPT}")
    return found


def _lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return lists of modules, the outermost first."""
    lists = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.ModuleList)]
    return sorted(lists, key=lambda each: (each[0].count("."), each[0]))


def _run(model: nn.Module, stacks: Sequence[Stack], primes: tuple[int, int, int]) -> _Record:
    """Run one forward with recorders for layers that return their stack's form."""
    record = _Record()
    names = {id(module): name for name, module in model.named_modules()}
    inside = {id(module) for stack in stacks for module in stack.layers.modules()}

    def note(module: nn.Module, args: Any, output: Any) -> Any:
        record.events.append(names[id(module)])
        if any(True for _ in module.parameters()):
            output = _trained_through(output)
        record.outputs[names[id(module)]] = output
        return output

    owned = [(stack, key, layer) for stack in stacks for key, layer in stack.layers.named_children()]
    handles = [m.register_forward_hook(note) for m in model.modules() if id(m) not in inside]
    # Before transformers 5.23 a stack in training compares a random number with its layerdrop even if that is 0, and
    # the value of a fake tensor cannot be compared.
    drawing = [m for m in model.modules() if m.training and getattr(m, "layerdrop", None) is not None]
    try:
        for module in drawing:
            module.training = False
        for at, (stack, key, layer) in enumerate(owned):
            setattr(stack.layers, key, _Recorder(layer, at, record, stack.form))
        with fake_tensors(), torch.enable_grad():
            output = model(**example(model, primes[0], primes[1:]), **fixed_options(model))
    except Exception as error:
        record.problem = f"a forward with layers that return their input fails: {type(error).__name__}: {error}"
    finally:
        for stack, key, layer in owned:
            setattr(stack.layers, key, layer)
        for module in drawing:
            module.training = True
        for handle in handles:
            handle.remove()
    if record.problem is None:
        record.problem = _problem(model, record, stacks, output=output, primes=primes)
    return record


def _trained_through(output: Any) -> Any:
    """Run the same with a mark on its tensors that autograd propagates, even if nothing is trained. So a second path
    from an embedding into the layers is detected, and refused."""
    if isinstance(output, Tensor) and output.is_floating_point() and not output.requires_grad:
        return output.detach().requires_grad_()
    return tuple(_trained_through(each) for each in output) if type(output) is tuple else output


def fixed_options(model: nn.Module) -> dict[str, Any]:
    """Return the arguments of every forward besides the batch."""
    accepted = inspect.signature(model.forward).parameters
    return {key: value for key, value in {"use_cache": False, "return_dict": True}.items() if key in accepted}


def _problem(
    model: nn.Module, record: _Record, stacks: Sequence[Stack], *, output: Any, primes: tuple[int, int, int]
) -> str | None:
    """Return why the model cannot be split after this forward, or None."""
    count = sum(len(stack.layers) for stack in stacks)
    order = [event for event in record.events if isinstance(event, int)]
    if order != list(range(count)):
        return f"its layers run in the order {order[:8]}, not each once from the first to the last"
    task = task_of(model)
    outputs = task.outputs(output)
    wanted = (primes[0], primes[len(stacks)]) if task.is_language else (primes[0],)
    if outputs is None or tuple(outputs.shape[: len(wanted)]) != wanted:
        return f"its output has no logits of [batch, {'length, ' if task.is_language else ''}...]"
    if len(stacks) > 1:
        record.memory = _memory(model, record, first=len(stacks[0].layers))
    for run, stack in zip(_runs(stacks), stacks, strict=True):
        problem = _problem_of_stack(record, run, stack)
        if problem is not None:
            return problem
    return None


def _runs(stacks: Sequence[Stack]) -> list[range]:
    """Return the numbers of each stack's layers."""
    ends = [sum(len(stack.layers) for stack in stacks[:at]) for at in range(len(stacks) + 1)]
    return [range(first, last) for first, last in pairwise(ends)]


def _memory(model: Any, record: _Record, first: int) -> Argument | None:
    """Return the argument in which the decoder's first layer takes the encoder's output."""
    names = {id(module): name for name, module in model.named_modules()}
    encoded = record.outputs.get(names[id(model.get_encoder())])
    memory = getattr(encoded, "last_hidden_state", None)
    hidden, others = record.given[first]
    if memory is None or memory.shape[-1] != hidden.shape[-1]:
        return None
    return next((at for at, other in others.items() if other is memory), None)


def _problem_of_stack(record: _Record, run: range, stack: Stack) -> str | None:
    is_decoder = run.start > 0
    if is_decoder and record.memory is None:
        return "its decoder's layers do not get exactly what its encoder returns, in states of the same width"
    shape = record.given[run.start][0].shape
    for at in run:
        got = record.given[at][0]
        if at > run.start and got is not record.outputs[f"layer {at - 1}"]:
            return f"layer {at} does not get exactly what layer {at - 1} returns"
        if got.shape != shape:
            return f"layer {at} is given {tuple(got.shape)} and layer {run.start} {tuple(shape)}"
    first = record.given[run.start][1]
    taken = Counter(id(other) for at in run for other in record.given[at][1].values())
    for at in run:
        for name, other in record.given[at][1].items():
            is_memory = is_decoder and name == record.memory and other is first[record.memory]
            if isinstance(other, Tensor) and other.requires_grad and not is_memory:
                return f"layer {at} takes another input that depends on an embedding, of shape {tuple(other.shape)}"
            if isinstance(other, (dict, list, set)) and taken[id(other)] > 1:
                return f"its layers share a {type(other).__name__}, through which one may change what another sees"
            if isinstance(other, _Rest) and not computes_position_bias(stack.layers[at - run.start]):
                return f"layer {at} takes more of what layer {at - 1} returns than the hidden state"
    between = record.events[record.events.index(run.start) : record.events.index(run.stop - 1)]
    strangers = sorted({event for event in between if isinstance(event, str)})
    return f"{', '.join(strangers)} runs between its layers" if strangers else None


def computes_position_bias(layer: nn.Module) -> bool:
    """Return True if a layer of T5 or a similar model has the bias table, which other layers get as an argument."""
    return any(getattr(module, "has_relative_attention_bias", False) for module in layer.modules())


def _parts(model: nn.Module, stacks: Sequence[Stack], record: _Record) -> tuple[tuple[str, ...], ...]:
    """Return the largest modules with parameters before, between and after the stacks, in execution order."""
    events = record.events
    runs = [(events.index(run.start), events.index(run.stop - 1)) for run in _runs(stacks)]
    gaps = list(zip([-1, *[last for _, last in runs]], [*[first for first, _ in runs], len(events)], strict=True))
    found: list[dict[str, int]] = [{} for _ in gaps]
    lists = {id(stack.layers) for stack in stacks}
    run_parameters = {
        id(parameter)
        for name, module in model.named_modules()
        if name in record.outputs and not any(id(each) in lists for each in module.modules())
        for parameter in module.parameters()
    }
    problems = []

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in lists or not any(True for _ in module.parameters()):
            return
        times = [at for at, event in enumerate(events) if event == name]
        holds_layers = any(id(each) in lists for each in module.modules())
        if holds_layers or not times:
            own = module.named_parameters(recurse=False)
            direct = [key for key, parameter in own if id(parameter) not in run_parameters]
            if direct:
                problems.append(
                    f"{name or 'the model itself'} holds {', '.join(direct)} outside of any module that runs"
                )
            for key, child in module.named_children():
                visit(f"{name}.{key}" if name else key, child)
            return
        for gap, (first, last) in zip(found, gaps, strict=True):
            if all(first < at < last for at in times):
                gap[name] = times[0]
                return
        problems.append(f"{name} runs both before and after the layers")

    visit("", model)
    if problems:
        raise PlanError(f"{_kind(model)} does not split at its layers: {'; '.join(problems)}; {HOW_TO_ADAPT}")
    return tuple(tuple(sorted(gap, key=gap.__getitem__)) for gap in found)


def _kept_apart(model: nn.Module, record: _Record, parts: Sequence[str]) -> dict[str, str]:
    """Return the name of each part that runs with that of a module of the same class and parameters that does not run,
    whose names the model's files use for these parameters."""
    modules = dict(model.named_modules())
    kept: dict[str, str] = {}
    for name, module in modules.items():
        parameters = list(module.parameters())
        if not parameters or name in record.outputs:
            continue
        twins = [
            part
            for part in parts
            if type(modules[part]) is type(module)
            and list(map(id, modules[part].parameters())) == list(map(id, parameters))
        ]
        if twins and twins[0] not in kept:
            kept[twins[0]] = name
    return kept


def _are(some: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _kind(model: nn.Module) -> str:
    return type(model).__name__
