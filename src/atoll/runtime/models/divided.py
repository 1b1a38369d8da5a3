"""The layers of a Hugging Face model where sequences are divided, and a probe of what they do with positions.

Before its layers a model sees whole sequences, so masks and rotary angles are its own; behind them, a rank's positions.
A layer is given a part of what has one position in each row, and what relates positions with each other, as masks do,
whole. Attention exchanges heads for positions (attention.py).

All else in a layer has to treat each position alone. The probe runs the model once, without values, as one rank of a
group would, and looks at every operation outside of attention: a layer in which one reduces, sorts or shifts positions,
or relates them with each other, cannot be divided. Nor can a layer without attention of the interface.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base._torch import fake_tensors, watched_operations
from atoll.base.errors import AtollError, PlanError
from atoll.runtime.models.attention import check_heads_of_sequence, divide_attention, register_attention
from atoll.runtime.models.inputs import example
from atoll.runtime.models.operations import has_experts, nested_tensors
from atoll.runtime.models.part import SequencePart
from atoll.runtime.models.probe import Arguments, fixed_options, hidden_argument, replace_hidden

Cut = Any
"""The dimension along which a tensor argument is cut, None if it stays whole; of nested arguments a tuple or dict."""

_ROWS = (3, 5, 7, 11, 13)
_POSITIONS = (23, 29, 31, 37, 41, 43, 47, 53, 59, 61)

_aten = torch.ops.aten
_ORDERED = frozenset(
    {
        *(_aten.cumsum.default, _aten.cumprod.default, _aten.logcumsumexp.default, _aten.flip.default),
        *(_aten.roll.default, _aten.sort.default, _aten.sort.stable, _aten.topk.default, _aten._softmax.default),
        *(_aten._log_softmax.default, _aten.gather.default, _aten.index_select.default, _aten.unfold.default),
        *(_aten.scatter.src, _aten.scatter_add.default, _aten.argsort.default, _aten.cummax.default),
    }
)
"""Operations along a dimension, or some, that they do not shorten."""

_MADE = frozenset({_aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.linspace.default})


def cut_of(value: Any, whole: int, name: str) -> Cut:
    """Return how an argument of a layer is cut. whole: the length of sequences, which no other size equals."""
    if isinstance(value, Tensor):
        along = [at for at, size in enumerate(value.shape) if size == whole]
        return along[0] if len(along) == 1 and "mask" not in name else None
    if isinstance(value, Mapping):
        return {key: cut_of(item, whole, name) for key, item in value.items()}
    if type(value) in (tuple, list):
        return tuple(cut_of(item, whole, name) for item in value)
    return None


def cut_argument(value: Any, how: Cut, part: SequencePart, whole: int) -> Any:
    """Return this rank's part of an argument; what has no whole sequence is a part already."""
    if isinstance(value, Tensor):
        return part.of(value, how) if how is not None and value.shape[how] == whole else value
    if isinstance(how, dict):
        return {key: cut_argument(item, how.get(key), part, whole) for key, item in value.items()}
    if isinstance(how, tuple):
        return type(value)(cut_argument(item, each, part, whole) for item, each in zip(value, how, strict=True))
    return value


@dataclass(slots=True)
class DividedLayers:
    """Layers that are given a part of each sequence. cuts: for each, by argument.  attentions: the number in each.
    length: of the running microbatch's whole sequences."""

    part: SequencePart
    length: int
    cuts: list[dict[int | str, Cut]] = field(default_factory=list)
    attentions: list[int] = field(default_factory=list)

    def given(self, at: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Return the arguments of a layer for this rank."""
        own = self.cuts[at]
        cut_args = tuple(cut_argument(each, own.get(place), self.part, self.length) for place, each in enumerate(args))
        cut_kwargs = {key: cut_argument(each, own.get(key), self.part, self.length) for key, each in kwargs.items()}
        return replace_hidden(cut_args, cut_kwargs, self.own(hidden_argument(args, kwargs)))

    def own(self, hidden: Tensor) -> Tensor:
        """Return this rank's positions of a hidden state, which may be whole: a copy, as a view would keep the whole
        until the backward."""
        return self.part.of(hidden, 1).clone() if hidden.shape[1] == self.length else hidden

    def looking_up(self, table: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return an embedding that looks up this rank's positions, and has zeros at the others."""

        def look_up(ids: Tensor) -> Tensor:
            if ids.dim() < 2 or ids.shape[1] != self.length:
                found: Tensor = table(ids)
                return found
            return self.part.among_zeros(table(self.part.of(ids, 1)), 1, self.length)

        return look_up


def divide_layers(
    model: nn.Module,
    stack: Sequence[nn.Module],
    part: SequencePart,
    *,
    tensor: int,
    outputs: Callable[[Any], Tensor | None],
) -> DividedLayers:
    """Probe a model, and return what its layers are given.

    tensor: tensor-parallel ranks, which divide the heads too.  outputs: the result of the model's forward -> its
    logits.
    Raises PlanError for a model that cannot be divided, and names the part.
    """
    register_attention()
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    rows = next(prime for prime in _ROWS if prime not in sizes)
    own = next(prime for prime in _POSITIONS if all(size % prime for size in sizes))
    # Slices alone are probed as two ranks would be, which have all heads.
    probed = SequencePart(part.index, part.ranks) if part.ranks > 1 else SequencePart(0, 2)
    probe = _Probe(type(model).__name__, probed, own, tensor, heads=part.ranks, options=part)
    whole = own * probed.ranks
    divided = DividedLayers(probed, whole)

    def recorded(at: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(forward).parameters)

        def run(*args: Any, **kwargs: Any) -> Any:
            found: dict[int | str, Cut] = {
                place: cut_of(each, whole, names[place]) for place, each in enumerate(args) if place < len(names)
            }
            found.update({key: cut_of(each, whole, key) for key, each in kwargs.items()})
            divided.cuts.append(found)
            args, kwargs = divided.given(at, args, kwargs)
            with probe.looking_at(f"layer {at}"):
                output = forward(*args, **kwargs)
            divided.attentions.append(probe.attentions)
            return output

        return run

    # Experts treat each token alone, and the number of an expert's tokens is a value, which the probe does not have.
    alone = [module for module in model.modules() if has_experts(module)]
    kept = [(module, module.__dict__.get("forward")) for module in (*stack, *alone)]
    every = [module for layer in stack for module in layer.modules()]
    given = example(model, rows, (whole, whole))
    try:
        for module in alone:
            module.forward = _as_given
        for at, layer in enumerate(stack):
            layer.forward = recorded(at, layer.forward)
        divide_attention(every, probe)
        with _on_one_device(every), fake_tensors(), torch.no_grad(), watched_operations(probe.see):
            made = outputs(model(**given, **fixed_options(model)))
    except AtollError:
        raise
    except Exception as error:
        raise PlanError(
            f"{part.said}: a forward of {probe.kind} whose layers have a part of each sequence fails in "
            f"{probe.where or 'the model'}: {type(error).__name__}: {error}. Use {part.whole_again}"
        ) from error
    finally:
        divide_attention(every, None)
        for module, before in kept:
            if before is None:
                del module.forward
            else:
                module.forward = before
    if made is None or tuple(made.shape[:2]) != (rows, own):
        raise PlanError(
            f"{part.said}: an output of {probe.kind} is not of one position, as the logits of a token are, "
            f"but of a whole sequence. Use {part.whole_again}"
        )
    divided.part = part
    return divided


@contextmanager
def _on_one_device(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which buffers that have values beside parameters on `meta` are there, too."""
    stood = []
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != next(iter(modules[0].parameters())).device:
                stood.append((module, name, buffer))
    try:
        for module, name, buffer in stood:
            setattr(module, name, torch.empty_like(buffer, device=next(iter(modules[0].parameters())).device))
        yield
    finally:
        for module, name, buffer in stood:
            setattr(module, name, buffer)


def _as_given(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden * 1


@dataclass(slots=True)
class _Probe:
    """Checks the operations of a probe. It returns tensors of the right shapes and exchanges nothing.

    own: number of positions of a rank.  tensor, heads: ranks that divide the heads, before attention and in it.
    options: what divides sequences, in words.
    """

    kind: str
    part: SequencePart
    own: int
    tensor: int
    heads: int
    options: SequencePart
    where: str = ""
    attentions: int = 0
    _is_inside: bool = False
    index: int = field(init=False)
    ranks: int = field(init=False)

    def __post_init__(self) -> None:
        self.index, self.ranks = self.part.index, self.heads

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of the shapes of some heads."""
        self.attentions += 1
        self._is_inside = True
        sizes = [each.shape for each in tensors]
        check_heads_of_sequence(self.heads * self.tensor, sizes[0][1], f"{self.where} of {self.kind}")
        if any(len(size) != 4 or size[2] != self.own for size in sizes):
            raise self._refusal(f"gives attention {[tuple(size) for size in sizes]}, not [batch, heads, S, width]")
        return [
            each.new_empty(size[0], size[1] // self.ranks, size[2] * self.part.ranks, size[3])
            for each, size in zip(tensors, sizes, strict=True)
        ]

    def to_positions(self, output: Tensor) -> Tensor:
        """Return a tensor of the shape of some positions."""
        rows, whole, heads, width = output.shape
        made = output.new_empty(rows, whole // self.part.ranks, heads * self.ranks, width)
        self._is_inside = False
        return made

    def whole(self, positions: Tensor) -> Tensor:
        """Return positions of whole sequences."""
        return positions.repeat(1, self.part.ranks)

    @contextmanager
    def looking_at(self, where: str) -> Iterator[None]:
        """Context of a layer's forward."""
        self.where, self.attentions = where, 0
        yield
        if not self.attentions:
            raise self._refusal("has no attention of transformers' interface, so that its positions would not meet")
        self.where = ""

    def see(self, operation: Any, arguments: Sequence[Any], output: Any) -> None:
        """Look at an operation. Raises PlanError for one that relates positions."""
        if not self.where or self._is_inside:
            return
        given = [each for each in nested_tensors(arguments) if self._has(each)]
        made = list(nested_tensors(output))
        if operation in _MADE and any(self._has(each) for each in made):
            raise self._refusal(f"counts positions by itself ({operation.name()})")
        if not given or not made:
            return
        if any(sum(size == self.own for size in each.shape) > 1 for each in made):
            raise self._refusal(f"relates positions with each other ({operation.name()})")
        if not all(any(size % self.own == 0 for size in each.shape) for each in made):
            raise self._refusal(f"shortens or joins positions ({operation.name()})")
        if operation is _aten.convolution.default and self._has(arguments[0]) and max(arguments[1].shape[2:]) > 1:
            raise self._refusal("convolves positions")
        if operation in _ORDERED and isinstance(arguments[0], Tensor):
            names = [each.name for each in operation._schema.arguments]
            at = next(place for place, name in enumerate(names) if name in ("dim", "dims"))
            along = arguments[at] if at < len(arguments) else -1
            for dim in along if isinstance(along, list) else [along]:
                if arguments[0].dim() and arguments[0].shape[dim] % self.own == 0:
                    raise self._refusal(f"goes along the positions ({operation.name()})")

    def _has(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and any(size and size % self.own == 0 for size in tensor.shape)

    def _refusal(self, what: str) -> PlanError:
        return PlanError(
            f"{self.options.said}: {self.where} of {self.kind} {what}; only attention may relate positions that "
            f"are not computed together. Use {self.options.whole_again}"
        )
