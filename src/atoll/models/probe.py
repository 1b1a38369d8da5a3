"""What a Hugging Face model does before, in and after its layers: found by one forward without values or layers.

Tensors are fake (shapes only) and the layers are replaced by recorders that pass on what they are given, so the look
costs no memory and no layer is run. Batch and length are primes that no parameter has, so that they are known again in
the shapes of what comes out.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from atoll._torch import fake_tensors
from atoll.errors import PlanError

HOW_TO_ADAPT = "give the model a method atoll_adapter(); docs/adapters.md shows how"


@dataclass(frozen=True, slots=True)
class Form:
    """What layers return: the hidden state itself (0), or a tuple of so many that begins with it."""

    length: int

    def wrap(self, hidden: Tensor) -> Any:
        """A hidden state in this form."""
        return (hidden, *[None] * (self.length - 1)) if self.length else hidden

    @staticmethod
    def unwrap(output: Any) -> Tensor:
        """The hidden state of what a layer returned."""
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden


@dataclass(frozen=True, slots=True)
class Shape:
    """The shapes of what a module gave, as functions of a batch's rows and length."""

    output: Any
    rows: int
    length: int

    def zeros(self, rows: int, length: int, like: Tensor) -> Any:
        """Zeros of these shapes for another batch, of the dtype and on the device of `like`."""
        sizes = {self.rows: rows, self.length: length}

        def of(fake: Any) -> Any:
            if isinstance(fake, tuple):
                return tuple(of(each) for each in fake)
            return like.new_zeros([sizes.get(size, size) for size in fake.shape]) if fake is not None else None

        return of(self.output)


@dataclass(frozen=True, slots=True)
class Look:
    """What was found. before, after: names of the modules with parameters that run there, in order."""

    layers_name: str
    layers: nn.ModuleList
    form: Form
    before: tuple[str, ...]
    after: tuple[str, ...]
    shapes: Mapping[str, Shape]


def hidden_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden state among a layer's arguments: the first, or the one of that name."""
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def replace_hidden(
    args: Sequence[Any], kwargs: Mapping[str, Any], hidden: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A layer's arguments with another hidden state."""
    return ((hidden, *args[1:]), dict(kwargs)) if args else ((), {**kwargs, "hidden_states": hidden})


def look_at(model: nn.Module) -> Look:
    """Look at a model. Raises PlanError where it does not split at its layers."""
    name, layers = _find_layers(model)
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    rows, length = (next(p for p in primes if p not in sizes) for primes in (_FEW, _MANY))
    tried = []
    for form in _FORMS:
        record = _run(model, layers, form, rows, length)
        if record.problem is None:
            break
        tried.append(record)
    else:
        furthest = max(tried, key=lambda each: len(each.given))
        raise PlanError(f"{_kind(model)} does not split at {name!r}: {furthest.problem}; {HOW_TO_ADAPT}")
    before, after = _parts(model, layers, record)
    shapes = {part: Shape(record.outputs[part], rows, length) for part in before}
    return Look(name, layers, form, before, after, shapes)


_FEW = (3, 5, 7, 11, 13, 17, 19)
_MANY = (23, 29, 31, 37, 41, 43, 47, 53, 59, 61)
_FORMS = tuple(Form(length) for length in range(4))


@dataclass(slots=True)
class _Record:
    """What happened in a forward. Of events, layers are numbers and other modules names."""

    events: list[str | int] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    given: list[tuple[Tensor, list[Any]]] = field(default_factory=list)
    problem: str | None = None


class _Recorder(nn.Module):
    """Stands for a layer: notes what it is given, and passes the hidden state on."""

    def __init__(self, layer: nn.Module, at: int, record: _Record, form: Form) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer
        self._at, self._record, self._form = at, record, form

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Note, and pass on."""
        hidden = hidden_argument(args, kwargs)
        others = [*args[1:], *(value for key, value in kwargs.items() if value is not hidden)]
        self._record.events.append(self._at)
        passed = hidden * 1
        self._record.given.append((hidden, others))
        self._record.outputs[f"layer {self._at}"] = passed
        return self._form.wrap(passed)


def _find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise PlanError(
            f"{_kind(model)} has an encoder and a decoder: two lists of layers that exchange states; Atoll splits "
            f"models with one list; {HOW_TO_ADAPT}"
        )
    if getattr(config, "output_router_logits", False):
        raise PlanError(
            f"{_kind(model)} adds a loss over all layers' routers (config.output_router_logits), which no stage can "
            "compute; set it to False"
        )
    count = config.get_text_config().num_hidden_layers
    lists = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.ModuleList)]
    fitting = sorted(((name.count("."), name, each) for name, each in lists if len(each) == count), key=lambda x: x[:2])
    if not fitting:
        raise PlanError(
            f"{_kind(model)} has no list of {count} layers (config.num_hidden_layers), but "
            f"{', '.join(f'{name} of {len(each)}' for name, each in lists) or 'no list at all'}; {HOW_TO_ADAPT}"
        )
    return fitting[0][1], fitting[0][2]


def _run(model: nn.Module, layers: nn.ModuleList, form: Form, rows: int, length: int) -> _Record:
    """One forward with recorders for layers that return `form`."""
    record = _Record()
    names = {id(module): name for name, module in model.named_modules()}
    inside = {id(module) for layer in layers for module in layer.modules()} | {id(layers)}

    def note(module: nn.Module, args: Any, output: Any) -> Any:
        record.events.append(names[id(module)])
        if any(True for _ in module.parameters()):
            output = _trained_through(output)
        record.outputs[names[id(module)]] = output
        return output

    owned = {str(at): layer for at, layer in enumerate(layers)}
    handles = [m.register_forward_hook(note) for m in model.modules() if id(m) not in inside]
    try:
        for at, (key, layer) in enumerate(owned.items()):
            setattr(layers, key, _Recorder(layer, at, record, form))
        with fake_tensors(), torch.enable_grad():
            device = next(model.parameters()).device
            ids = torch.zeros(rows, length, dtype=torch.long, device=device)
            output = model(input_ids=ids, **fixed_options(model))
        record.problem = _problem(record, len(owned), output, (rows, length))
    except PlanError:
        raise
    except Exception as error:
        record.problem = f"a forward with layers that pass on what they get fails: {type(error).__name__}: {error}"
    finally:
        for key, layer in owned.items():
            setattr(layers, key, layer)
        for handle in handles:
            handle.remove()
    return record


def _trained_through(output: Any) -> Any:
    """The same with a mark on its tensors that autograd carries on, also where nothing is trained."""
    if isinstance(output, Tensor) and output.is_floating_point() and not output.requires_grad:
        return output.detach().requires_grad_()
    return tuple(_trained_through(each) for each in output) if type(output) is tuple else output


def fixed_options(model: nn.Module) -> dict[str, Any]:
    """What every forward of the model is given besides the batch."""
    accepted = inspect.signature(model.forward).parameters
    return {key: value for key, value in {"use_cache": False, "return_dict": True}.items() if key in accepted}


def _problem(record: _Record, count: int, output: Any, size: tuple[int, int]) -> str | None:
    """Why what happened cannot be split, if it cannot."""
    order = [event for event in record.events if isinstance(event, int)]
    if order != list(range(count)):
        return f"its layers run in the order {order[:8]}, not each once from the first to the last"
    logits = getattr(output, "logits", None)
    if logits is None or tuple(logits.shape[:2]) != size:
        return "its output has no logits of [batch, length, ...]"
    shape = record.given[0][0].shape
    for at in range(count):
        got = record.given[at][0]
        if at and got is not record.outputs[f"layer {at - 1}"]:
            return f"layer {at} is not given just what layer {at - 1} returns"
        if got.shape != shape:
            return f"layer {at} is given {tuple(got.shape)} and layer 0 {tuple(shape)}"
    taken = Counter(id(other) for _, others in record.given for other in others)
    for at, (_, others) in enumerate(record.given):
        for other in others:
            if isinstance(other, Tensor) and other.requires_grad:
                return f"layer {at} takes another input that depends on an embedding, of shape {tuple(other.shape)}"
            if isinstance(other, (dict, list, set)) and taken[id(other)] > 1:
                return f"its layers share a {type(other).__name__}, through which one may change what another sees"
    between = record.events[record.events.index(0) : record.events.index(count - 1)]
    strangers = sorted({event for event in between if isinstance(event, str)})
    return f"{', '.join(strangers)} runs between its layers" if strangers else None


def _parts(model: nn.Module, layers: nn.ModuleList, record: _Record) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The largest modules with parameters before and after the layers, in the order in which they run."""
    first, last = record.events.index(0), len(record.events) - 1 - record.events[::-1].index(len(layers) - 1)
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    problems = []

    def visit(name: str, module: nn.Module) -> None:
        if module is layers or not any(True for _ in module.parameters()):
            return
        times = [at for at, event in enumerate(record.events) if event == name]
        holds_layers = any(each is layers for each in module.modules())
        if holds_layers or not times:
            direct = [key for key, _ in module.named_parameters(recurse=False)]
            if direct:
                problems.append(
                    f"{name or 'the model itself'} holds {', '.join(direct)} outside of any module that runs"
                )
            for key, child in module.named_children():
                visit(f"{name}.{key}" if name else key, child)
        elif all(at < first for at in times):
            before[name] = times[0]
        elif all(at > last for at in times):
            after[name] = times[0]
        else:
            problems.append(f"{name} runs both before and after the layers")

    visit("", model)
    if problems:
        raise PlanError(f"{_kind(model)} does not split at its layers: {'; '.join(problems)}; {HOW_TO_ADAPT}")
    return tuple(sorted(before, key=before.__getitem__)), tuple(sorted(after, key=after.__getitem__))


def _kind(model: nn.Module) -> str:
    return type(model).__name__
