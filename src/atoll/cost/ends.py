"""The two ends of a transformer by formula: the embedding, and the head with the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.cost.kernels import Exchange, Kernel, Pass, Product
from atoll.cost.work import Saved, Use, Work

if TYPE_CHECKING:
    from atoll.cost.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of tokens, and of positions and types."""

    name: str
    sizes: Transformer

    def work(self, use: Use) -> Work:
        """See `Work`."""
        s, i = self.sizes, use.item
        whole = use.tokens * s.hidden
        hidden = whole // use.parts
        is_megatron = s.implementation.runtime == "megatron"
        forward: list[Kernel] = [Pass(2.0 * i * whole)]
        backward: list[Kernel] = []
        if use.tensor > 1:
            forward.append(Exchange("reduce-scatter" if use.sequence_parallel else "all-reduce", i * whole))
            backward += [Exchange("all-gather", i * whole)] if use.sequence_parallel else []
        if s.positions or s.dropout:
            forward.append(Pass(3.0 * i * hidden))
        if s.dropout and s.positions:
            backward.append(Pass(2.0 * i * hidden))
        kept, again = list(self._kept(use)), list[Saved]()
        if use.recompute != "none" and s.types:
            kept, again = [], kept
            backward = [*forward, *backward]
        saved = [Saved("ids", 8 * use.tokens, "W"), *kept] if is_megatron else kept
        rows = -(-s.vocabulary // use.tensor)
        return Work(
            parameters=(rows + s.positions + s.types + (s.norm if s.types else 0)) * s.hidden,
            matrices=0,
            forward=tuple(forward),
            backward=tuple(backward),
            weights=(Pass(3.0 * i * whole),),
            saved=tuple(saved),
            again=tuple(again),
            pending=(Saved("gradient", i * whole, "W"),) if is_megatron else (),
            wire=i * hidden,
        )

    def _kept(self, use: Use) -> Iterator[Saved]:
        s, hidden = self.sizes, use.tokens * self.sizes.hidden // use.parts
        if s.implementation.ends == "parts" and s.positions:
            yield Saved("tokens' rows", use.item * hidden, "I")
            yield Saved("positions' rows", use.item * use.sequence * s.hidden // use.parts, "I")
        if s.types:
            yield Saved("types", 8 * use.sequence, "I")
            yield from s.implementation.saved_by_norm(use, "norm", hidden, s.hidden, is_kept=False)
        if s.dropout and s.positions:
            yield Saved("dropout", hidden, "I")


@dataclass(frozen=True, slots=True)
class Head:
    """The last norm or a transform, the logits and the loss."""

    name: str
    sizes: Transformer

    def work(self, use: Use) -> Work:
        """See `Work`."""
        s, i, tokens = self.sizes, use.item, use.tokens
        hidden = tokens * s.hidden // use.parts
        rows = -(-s.vocabulary // use.tensor)
        product = Product(-(-tokens // use.chunks), s.hidden, rows)
        dense = [Product(tokens, s.hidden, s.hidden)] if s.transform else []
        inside: list[Kernel] = [*dense, *[Pass(2.0 * i * hidden)] * (1 + 2 * len(dense))]
        backward: list[Kernel] = [Pass((i + 4.0) * tokens * rows, use.chunks), *[product.swapped] * use.chunks]
        if use.tensor > 1 and use.sequence_parallel:
            inside.append(Exchange("all-gather", i * tokens * s.hidden))
            backward.append(Exchange("reduce-scatter", i * tokens * s.hidden))
        elif use.tensor > 1:
            backward.append(Exchange("all-reduce", i * tokens * s.hidden))
        logits = tokens * rows
        if use.loss == "eager":
            # The logits are cast, their largest taken off, exponentials made and divided: five times through memory.
            moved = (i + 4.0) * logits + 5 * 8.0 * logits
        else:
            moved = 2.0 * i * logits
        own: list[Kernel] = [Pass(4.0 * i * hidden), *(each.swapped for each in dense)]
        weights: list[Kernel] = [*[product.learnt] * use.chunks]
        held, *rest = self._saved(use)
        ended = self._kept_by_loss(use, logits)
        again: list[Saved] = []
        pending = [Saved("logits' gradient", i * logits, "W")]
        peak, loss = i * logits, 0
        if s.implementation.runtime == "atoll" and use.loss == "eager":
            # Logits in half precision are cast first. Backward, the gradient of the log-softmax and that of its input.
            precise = max(4, i) * logits
            peak, loss = precise if precise > i * logits else 0, 2 * precise
        forward = [*inside, *[product] * use.chunks, Pass(moved, 2 * use.chunks)]
        if use.chunks > 1:
            # Each part of the logits is made, and its gradient taken to the hidden state and the weight, in F already.
            peak = (sum(each.nbytes for each in ended) + i * logits) // use.chunks
            forward += [*backward, *weights]
            backward, weights, pending, ended = [], [], [], [Saved("gradient", i * hidden, "I")]
        elif use.recompute != "none" and s.implementation.runtime == "atoll":
            again, rest = self._repeated(use, rest)
            is_all = use.recompute == "block"
            backward = [*(inside if is_all else without(inside, dense)), *[product] * is_all, *backward]
        return Work(
            parameters=self._parameters(rows),
            matrices=rows * s.hidden + len(dense) * s.hidden**2,
            forward=tuple(forward),
            backward=(*backward, *own),
            weights=(*weights, *(each.learnt for each in dense)),
            saved=(held, *rest, *ended),
            again=tuple(again),
            pending=(*pending, *(Saved("transform's gradient", i * hidden, "W") for _ in dense)),
            peak=peak,
            loss=loss,
        )

    def _parameters(self, rows: int) -> int:
        s = self.sizes
        own = s.hidden**2 + s.hidden + rows if s.transform else 0
        pooled = s.hidden**2 + s.hidden + 2 * (s.hidden + 1) if s.pooled else 0
        return rows * s.hidden + s.norm * s.hidden + own + pooled

    def _saved(self, use: Use) -> Iterator[Saved]:
        """The input, which the runtime keeps, and what the kernels before the logits save."""
        s, i = self.sizes, use.item
        hidden = use.tokens * s.hidden // use.parts
        yield Saved("input", i * hidden, "W" if s.transform else "I")
        if s.transform:
            yield Saved("activation's input", i * hidden, "I")
        yield from s.implementation.saved_by_norm(use, "norm", hidden, s.hidden, is_kept=not s.transform)
        yield Saved("head's input", i * hidden, "W")

    def _kept_by_loss(self, use: Use, logits: int) -> list[Saved]:
        is_megatron, precise = self.sizes.implementation.runtime == "megatron", max(4, use.item)
        if use.loss == "fused" or is_megatron:
            return [Saved("logits", (use.item if use.loss == "fused" else 4) * logits, "I")]
        return [
            Saved("logits", use.item * logits, "I"),
            Saved("log-softmax", precise * logits, "I"),
            Saved("number of tokens", precise, "I"),
        ]

    def _repeated(self, use: Use, saved: list[Saved]) -> tuple[list[Saved], list[Saved]]:
        """What is saved when a block runs again, and what is kept for it."""
        kept = {"activation's input"} if use.recompute == "selective" else set()
        if self.sizes.implementation.ends == "parts":
            kept.add("head's input")
        again = [each for each in saved if each.name not in kept]
        return again, [each for each in saved if each.name in kept]


def without(kernels: Iterable[Kernel], products: Iterable[Product]) -> tuple[Kernel, ...]:
    """Kernels but for some products."""
    left = set(products)
    return tuple(kernel for kernel in kernels if kernel not in left)
