"""Attention over whole sequences, for layers that compute a part of each.

Everything in a layer but attention treats each position alone. Where ranks divide sequences (`MeshShape.sequence`), a
layer computes this rank's positions of all heads up to attention, all positions of this rank's heads in it, and its own
positions again behind it: arXiv 2309.14509. So attention is the model's own, with its masks of the whole sequence.

    attend            what a layer calls in place of its attention function
    divide_attention  has attention modules exchange heads for positions

Models of transformers need no call: `register_attention` puts `attend` around each implementation of their attention
interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import unwrap
from math import lcm
from typing import Any, Protocol

from torch import Tensor, nn

from atoll.base.errors import PlanError, RunError

AttentionFunction = Callable[..., Any]
"""(module, query, key, value, mask, ...) -> the output, [B, S, heads, width], alone or first of a tuple. query, key and
value: [B, heads, S, width]."""


class ExchangesHeads(Protocol):
    """The ranks that divide sequences."""

    index: int
    ranks: int

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send positions [B, heads, S / ranks, width] of all heads; return all positions of this rank's part of the
        heads, [B, heads / ranks, S, width]."""
        ...

    def to_positions(self, output: Tensor) -> Tensor:
        """Send [B, S, heads / ranks, width] back; return this rank's positions of all heads."""
        ...

    def whole(self, positions: Tensor) -> Tensor:
        """Return [B, S] of integers of which each rank has a part, [B, S / ranks]."""
        ...


_EXCHANGING = "_exchanges_heads"
"""Attribute of attention modules, and modules around them, whose ranks divide sequences: a compiler guards it."""

PER_HEAD = ("sinks",)
"""Parameters of attention modules with a value for each head."""

_PER_HEAD_ARGUMENTS = ("s_aux",)
_OF_POSITIONS = ("position_ids",)
_OF_PACKED_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "block_table", "cache")


def divide_attention(modules: Iterable[nn.Module], exchanging: ExchangesHeads | None) -> None:
    """Have the attention in some modules exchange heads for positions; None: no more."""
    for module in modules:
        if exchanging is not None:
            module.__dict__[_EXCHANGING] = exchanging
        else:
            module.__dict__.pop(_EXCHANGING, None)


def check_heads_of_sequence(ranks: int, heads: int, where: str) -> None:
    """Raise PlanError if the query heads of attention cannot be divided among the ranks that divide sequences."""
    if heads % ranks:
        raise PlanError(
            f"sequence = {ranks} does not divide the {heads} query heads of {where}: each rank computes some of the "
            "heads over the whole sequence. Use a divisor of the heads of a rank (heads / tensor), or fewer "
            "tensor-parallel ranks"
        )


def attend(
    function: AttentionFunction, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kw: Any
) -> Any:
    """Call an attention function: with this rank's heads of whole sequences, if the module's ranks divide them."""
    exchanging: ExchangesHeads | None = getattr(module, _EXCHANGING, None)
    if exchanging is None:
        return function(module, query, key, value, *rest, **kw)
    ranks, heads, groups = exchanging.ranks, query.shape[1], key.shape[1]
    check_heads_of_sequence(ranks, heads, type(module).__name__)
    # Each rank needs the keys and values of its queries: where the ranks outnumber these heads, they are repeated.
    repeats = lcm(groups, ranks) // groups
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    query, key, value = exchanging.to_heads((query, key, value))
    own = slice(exchanging.index * (heads // ranks), (exchanging.index + 1) * (heads // ranks))
    seen: Any = module
    if repeats > 1 or any(isinstance(getattr(module, name, None), Tensor) for name in PER_HEAD):
        seen = _Heads(module, own, heads, query.shape[1] // key.shape[1])
    output = function(seen, query, key, value, *_masks(rest, own, heads), **_arguments(kw, own, heads, exchanging))
    if isinstance(output, tuple):
        return (exchanging.to_positions(output[0]), *(None for _ in output[1:]))
    return exchanging.to_positions(output)


def _masks(given: tuple[Any, ...], own: slice, heads: int) -> tuple[Any, ...]:
    """Return masks and biases, of which those with a value for each head are cut to some of the heads."""
    return tuple(
        each[:, own] if isinstance(each, Tensor) and each.dim() == 4 and each.shape[1] == heads > 1 else each
        for each in given
    )


def _arguments(given: Mapping[str, Any], own: slice, heads: int, exchanging: ExchangesHeads) -> dict[str, Any]:
    found = dict(given)
    for name in _OF_PACKED_ROWS:
        if found.get(name) is not None:
            raise RunError(
                f"attention is given {name}, which describes rows of a length of their own; where ranks divide "
                "sequences, documents are separated by position_ids"
            )
    for name, value in given.items():
        if not isinstance(value, Tensor):
            continue
        if name in _PER_HEAD_ARGUMENTS:
            found[name] = value[own]
        elif name in _OF_POSITIONS:
            found[name] = exchanging.whole(value)
        elif value.dim() == 4:
            (found[name],) = _masks((value,), own, heads)
    return found


class _Heads:
    """An attention module as its attention function sees it: with some of its heads."""

    def __init__(self, module: nn.Module, own: slice, heads: int, groups: int) -> None:
        self._module, self._own, self._heads = module, own, heads
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, Tensor):
            if name in PER_HEAD:
                return value[self._own]
            if self._heads in value.shape:
                raise RunError(
                    f"attention reads {type(self._module).__name__}.{name} of shape {tuple(value.shape)}, perhaps a "
                    f"value for each of {self._heads} heads; where ranks divide sequences it is not known which ones "
                    "to take. Use sequence = 1"
                )
        return value


# ---- transformers

_EAGER = "eager_attention_forward"
"""How the name of a family's own attention function ends."""


def register_attention() -> None:
    """Register `attend` around each implementation of the attention interface of transformers."""
    from transformers import AttentionInterface

    known: Any = AttentionInterface()
    for name in (*known, "eager"):
        function = known.get(name, _eager)
        if getattr(function, "func", None) is not attend:
            AttentionInterface.register(name, partial(attend, function))


def _eager(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the attention function of a module's own family.

    The interface gives a registered function in place of the one that a layer names as its default, so that one is
    looked up again: in the first class of the module whose forward names it. This also holds for modules that are not
    divided.
    """
    own = module._module if isinstance(module, _Heads) else module
    for each in type(own).__mro__:
        forward = unwrap(each.__dict__.get("forward", nn.Module.forward))
        for name in forward.__code__.co_names:
            if name.endswith(_EAGER):
                return forward.__globals__[name](module, *args, **kwargs)
    raise RunError(f"{type(own).__name__} has no eager attention: none of its forwards names an {_EAGER}")
