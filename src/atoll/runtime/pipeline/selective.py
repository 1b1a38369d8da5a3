"""Selective recompute: outputs of matrix products are kept, everything else is computed again.

    first forward     without a graph; a linear layer keeps its output
    second forward    with one; the layer returns what it has kept, and does not multiply

torch's contexts for `torch.utils.checkpoint` see every operation of the dispatcher in both forwards, about 60 µs each
on the host: on a GPU longer than most of them take. They serve where layers cannot: in blocks with products outside of
linear layers, which a block's first forward shows, and in compiled blocks, whose compiler knows them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from atoll.base._torch import version
from atoll.base.errors import RunError
from atoll.runtime.models.operations import PRODUCTS  # kept; attention, norms and activations are computed again

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""The contexts of the first and of the second forward."""


class Contexts(NamedTuple):
    """The contexts of both forwards, and the outputs of products that the first one keeps, once it has run, each with
    its version."""

    first: AbstractContextManager[Any]
    second: AbstractContextManager[Any]
    products: Collection[tuple[Tensor, int]] = ()


class Multiplier(Protocol):
    """How the layers of a block compute their products."""

    def product(self, multiply: Callable[[], Tensor]) -> Tensor:
        """Return the product that a layer computes, without a history."""
        ...


class Multipliers(Protocol):
    """Holder of the current `Multiplier`. Layers multiply themselves while it has none."""

    multiplier: Multiplier | None


class _Counting:
    """Multiplies, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def product(self, multiply: Callable[[], Tensor]) -> Tensor:
        self.calls += 1
        return multiply()


class _Keeping:
    """Multiplies, and keeps: an alias, as autograd gives its history to the tensor that the layer returns."""

    def __init__(self) -> None:
        self.kept = deque[tuple[Tensor, int]]()

    def product(self, multiply: Callable[[], Tensor]) -> Tensor:
        out = multiply()
        alias = out.detach()
        self.kept.append((alias, version(alias)))
        return out


class _Returning:
    """Returns what was kept, in the same order."""

    def __init__(self, kept: deque[tuple[Tensor, int]]) -> None:
        self._kept = kept

    def product(self, multiply: Callable[[], Tensor]) -> Tensor:
        alias, written = self._kept.popleft()
        if version(alias) != written:
            raise RunError(
                f"the output {tuple(alias.shape)} of a layer was modified in place, and recompute = "
                '"selective" would use the modified values as the output; use recompute = "block" or "none", or an '
                "operation that is not in place"
            )
        return alias


class Selective:
    """What keeps the outputs of a block's products.

    by_layers: whether its layers keep all of them; False until a first forward has shown it. Of a block whose experts
    are divided they do: what the router multiplies beside them is little, and torch's contexts, which count every
    operation, do not allow for exchanges between ranks.
    """

    def __init__(self, layers: Multipliers, *, by_layers: bool = False) -> None:
        self._layers = layers
        self._is_known = self.by_layers = by_layers

    def contexts(self) -> Contexts:
        """Return the contexts in which layers keep outputs, and return them."""
        keeping = _Keeping()
        return Contexts(self._with(keeping), self._with(_Returning(keeping.kept)), keeping.kept)

    def contexts_of_torch(self) -> ContextPair:
        """Return torch's contexts. The first time, products are counted: all, and those of layers."""
        if self._is_known:
            return of_torch()
        counted = 0

        def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal counted
            counted += operation in PRODUCTS
            return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

        first, second = create_selective_checkpoint_contexts(choose)
        return self._comparing(first, lambda: counted), second

    @contextmanager
    def _comparing(self, first: AbstractContextManager[Any], counted: Callable[[], int]) -> Iterator[None]:
        counting = _Counting()
        with first, self._with(counting):
            yield
        self._is_known, self.by_layers = True, counting.calls == counted()

    @contextmanager
    def _with(self, multiplier: Multiplier) -> Iterator[None]:
        self._layers.multiplier = multiplier
        try:
            yield
        finally:
            self._layers.multiplier = None


def of_torch() -> ContextPair:
    """Return torch's contexts."""
    return create_selective_checkpoint_contexts(list(PRODUCTS))
