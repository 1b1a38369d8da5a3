"""Attention over whole sequences, for layers that compute a part of each.

Everything in a layer but attention treats each position alone. Where ranks divide sequences (`MeshShape.sequence`), a
layer computes this rank's positions of all heads up to attention, all positions of this rank's heads in it, and its own
positions again behind it: arXiv 2309.14509. So attention is the model's own, with its masks of the whole sequence.

Where a sequence is computed in slices (`Schedule.slices`), attention is of a slice's queries with its own and all
earlier keys and values, which are kept (slices.py).

    attend            what a layer calls in place of its attention function
    divide_attention  has attention modules exchange heads for positions, or keep keys and values

Models of transformers need no call: `register_attention` puts `attend` around each implementation of their attention
interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import unwrap
from math import lcm
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, causal_lower_right

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


class KeepsKeys(Protocol):
    """The earlier slices of the sequences in progress, for one attention module.

    begin, end: the positions of the slice, of 0..length-1.
    """

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def length(self) -> int: ...

    def extended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of positions 0..end-1, of which begin..end-1 are given, [B, heads, S, width]."""
        ...


_EXCHANGING = "_exchanges_heads"
"""Attribute of attention modules, and modules around them, whose ranks divide sequences: a compiler guards it."""

_KEEPING = "_keeps_keys"
"""Attribute of attention modules that are given slices of sequences."""

PER_HEAD = ("sinks",)
"""Parameters of attention modules with a value for each head."""

_PER_HEAD_ARGUMENTS = ("s_aux",)
_OF_POSITIONS = ("position_ids",)
_OF_PACKED_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "block_table", "cache")

_ALIGNED_RIGHT: set[AttentionFunction] = set()
"""Functions whose causal mask of fewer queries than keys ends at the last of both, as that of flash attention does."""


_WITH_GROUPS: dict[AttentionFunction, AttentionFunction] = {}
"""Functions that repeat keys and values for groups of queries wherever they are given a mask, and others, which do not
for the mask of a slice."""


def divide_attention(
    modules: Iterable[nn.Module], exchanging: ExchangesHeads | None, keeping: Callable[[], KeepsKeys] | None = None
) -> None:
    """Have the attention in some modules exchange heads for positions, and keep keys and values; None: no more.

    keeping: makes what a module keeps its keys and values in.
    """
    for module in modules:
        for name, each in ((_EXCHANGING, exchanging), (_KEEPING, None if keeping is None else keeping())):
            if each is not None:
                module.__dict__[name] = each
            else:
                module.__dict__.pop(name, None)


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
    """Call an attention function: with this rank's heads, if the module's ranks divide sequences, and with the keys and
    values of earlier slices, if it is given slices."""
    exchanging: ExchangesHeads | None = getattr(module, _EXCHANGING, None)
    keeping: KeepsKeys | None = getattr(module, _KEEPING, None)
    if keeping is not None:
        function = partial(_attend_to_earlier, function, keeping)
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
    _check_rows(given)
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


def _check_rows(given: Mapping[str, Any]) -> None:
    for name in _OF_PACKED_ROWS:
        if given.get(name) is not None:
            raise RunError(
                f"attention is given {name}, which describes rows of a length of their own; where sequences are "
                "divided, documents are separated by position_ids"
            )


# A slice has shapes of its own, and its keys and values outlive a graph.
@torch.compiler.disable
def _attend_to_earlier(
    function: AttentionFunction,
    keeping: KeepsKeys,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
    **kw: Any,
) -> Any:
    """Call an attention function with the queries of a slice, and the keys and values up to its end."""
    _check_rows(kw)
    key, value = keeping.extended(key, value)
    if not rest and "attention_mask" not in kw:
        raise RunError(
            f"attention of {type(module).__name__} is given no mask, which slices of a sequence need: pass one to "
            "attend behind the values, or None"
        )
    mask, *others = rest if rest else (kw.pop("attention_mask"),)
    if function in _ALIGNED_RIGHT:
        kw.pop("position_ids", None)  # which say where documents begin, of which there is one
    elif mask is None and keeping.begin:
        is_plain = not any(isinstance(each, Tensor) and each.dim() == 4 for each in kw.values())
        function = _WITH_GROUPS.get(function, function) if is_plain else function
        mask = _causal(query, key, is_plain=is_plain)
    rows = [_rows_of(each, keeping) for each in (mask, *others)]
    return function(module, query, key, value, *rows, **{name: _rows_of(each, keeping) for name, each in kw.items()})


def _causal(query: Tensor, key: Tensor, *, is_plain: bool) -> Tensor:
    """Return the mask of the last positions: their number is that of the queries. is_plain: no bias is added to it."""
    length, end = query.shape[2], key.shape[2]
    if is_plain and length > 1:
        return causal_lower_right(length, end)  # for which CUDA has flash kernels
    return torch.ones(1, 1, length, end, dtype=torch.bool, device=query.device).tril(end - length)


def _rows_of(mask: Any, keeping: KeepsKeys) -> Any:
    """Return the rows of a slice of a mask or bias, [B, heads, S, S], and its columns up to the slice's end; of what is
    [B, S], these positions."""
    begin, end, length = keeping.begin, keeping.end, keeping.length
    if isinstance(mask, CausalBias) or not isinstance(mask, Tensor):
        return _block_mask_of(mask, keeping) if type(mask).__name__ == "BlockMask" else mask
    if mask.dim() == 4 and mask.shape[-2] == length:
        mask = mask[:, :, begin:end]
    return mask[..., :end] if mask.dim() in (2, 4) and mask.shape[-1] == length else mask


def _block_mask_of(mask: Any, keeping: KeepsKeys) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    begin, end = keeping.begin, keeping.end

    def shifted(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen: Tensor = mask.mask_mod(row, head, query + begin, key)
        return seen

    rows, heads, *_ = mask.shape
    return create_block_mask(shifted, rows, heads, end - begin, end, device=str(mask.kv_num_blocks.device))


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
        if name.startswith("flash"):
            _ALIGNED_RIGHT.add(function)
        if name == "sdpa":
            _WITH_GROUPS[function] = _grouped
        if getattr(function, "func", None) is not attend:
            AttentionInterface.register(name, partial(attend, function))


def _grouped(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Call torch's attention as `sdpa_attention_forward` of transformers does where there is no mask."""
    options: dict[str, Any] = {"enable_gqa": query.shape[1] > key.shape[1], "scale": scaling, "dropout_p": dropout}
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
    return mixed.transpose(1, 2).contiguous(), None


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
