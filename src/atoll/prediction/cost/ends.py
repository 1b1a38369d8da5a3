"""The two ends of a transformer by formula: the embedding, and the head with the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from atoll.prediction.cost.kernels import Exchange, Kernel, Pass, Product
from atoll.prediction.cost.work import Saved, Use, Work

if TYPE_CHECKING:
    from atoll.prediction.cost.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of tokens, and of positions and types."""

    name: str
    sizes: Transformer

    def work(self, use: Use) -> Work:
        """See `Work`. Where ranks divide sequences, one with types computes all positions."""
        if (use.divide == 1 and use.slice is None) or not self.sizes.types:
            return self._of_part(use)
        whole = self._of_part(replace(use, divide=1, slice=None))
        return replace(
            whole,
            saved=(*whole.saved, Saved("output", whole.wire, "I")),
            wire=use.item * use.tokens * self.sizes.hidden,
        )

    def _of_part(self, use: Use) -> Work:
        s, i, rest = self.sizes, use.item, self.without_tokens(use)
        whole = use.tokens * s.hidden
        is_megatron = s.implementation.runtime == "megatron"
        forward: list[Kernel] = [Pass(2.0 * i * whole)]
        backward: list[Kernel] = []
        if use.tensor > 1:
            forward.append(Exchange("reduce-scatter" if use.sequence_parallel else "all-reduce", i * whole))
            backward += [Exchange("all-gather", i * whole)] if use.sequence_parallel else []
        again = forward if rest.again else []
        rows = -(-s.vocabulary // use.tensor)
        return replace(
            rest,
            parameters=rows * s.hidden + rest.parameters,
            forward=(*forward, *rest.forward),
            backward=(*again, *backward, *rest.backward),
            weights=(Pass(3.0 * i * whole),),
            saved=(Saved("ids", 8 * use.tokens, "W"), *rest.saved) if is_megatron else rest.saved,
            pending=(Saved("gradient", i * whole, "W"),) if is_megatron else (),
        )

    def without_tokens(self, use: Use) -> Work:
        """Return the embedding's work without the rows of tokens: rows of positions and types, and the operations after
        them."""
        s, i = self.sizes, use.item
        hidden = use.tokens * s.hidden // use.parts
        forward: list[Kernel] = [Pass(3.0 * i * hidden)] if s.positions or s.dropout else []
        backward: list[Kernel] = [Pass(2.0 * i * hidden)] if s.dropout and s.positions else []
        saved, again = list(self._kept(use)), list[Saved]()
        if use.recompute != "none" and s.types:
            saved, again = [], saved
            backward = [*forward, *backward]
        return Work(
            parameters=(s.positions + s.types + (s.norm if s.types else 0)) * s.hidden,
            matrices=0,
            forward=tuple(forward),
            backward=tuple(backward),
            weights=(),
            saved=tuple(saved),
            again=tuple(again),
            wire=i * hidden,
        )

    def _kept(self, use: Use) -> Iterator[Saved]:
        s, hidden = self.sizes, use.tokens * self.sizes.hidden // use.parts
        if (
            use.divide > 1 or use.slice
        ) and not s.implementation.keeps_angles:  # beside the next layer's part of all rows
            yield Saved("output", use.item * hidden, "I")
        if s.implementation.ends == "parts" and s.positions:
            yield Saved("tokens' rows", use.item * hidden, "I")
            yield Saved("positions' rows", use.item * use.sequence * s.hidden // use.parts, "I")
        if s.types:
            yield Saved("types", 8 * use.sequence, "I")
            yield from s.implementation.saved_by_norm(use, "norm", hidden, s.hidden, is_kept=False)
        if s.dropout and s.positions:
            yield Saved("dropout", hidden, "I")


@dataclass(frozen=True, slots=True)
class HeadBlock:
    """The last norm or a transform, the logits and the loss."""

    name: str
    sizes: Transformer

    def work(self, use: Use) -> Work:
        """See `Work`."""
        s, i, tokens = self.sizes, use.item, use.tokens
        is_chunked = use.chunks > 1
        before = self.without_logits(replace(use, recompute="none") if is_chunked else use)
        rows = -(-s.vocabulary // use.tensor)
        product = Product(-(-tokens // use.chunks), s.hidden, rows)
        products = [product] * use.chunks
        backward: list[Kernel] = [Pass((i + 4.0) * tokens * rows, use.chunks), *[product.swapped] * use.chunks]
        if use.tensor > 1:
            kind: Literal["reduce-scatter", "all-reduce"] = "reduce-scatter" if use.sequence_parallel else "all-reduce"
            backward.append(Exchange(kind, i * tokens * s.hidden))
        logits = tokens * rows
        if use.loss == "eager":
            # The logits are cast, their maximum subtracted, exponentials computed and divided: five passes over memory.
            moved = (i + 4.0) * logits + 5 * 8.0 * logits
        else:
            moved = 2.0 * i * logits
        weights: list[Kernel] = [*[product.learnt] * use.chunks]
        ended = self._kept_by_loss(use, logits)
        pending = [Saved("logits' gradient", i * logits, "W")]
        peak, loss = i * logits, 0
        if s.implementation.runtime == "atoll" and use.loss == "eager":
            # Logits in half precision are cast first. Backward: the gradient of the log-softmax and that of its input.
            precise = max(4, i) * logits
            peak, loss = precise if precise > i * logits else 0, 2 * precise
        forward: list[Kernel] = [*products, Pass(moved, 2 * use.chunks)]
        if is_chunked and s.implementation.runtime == "atoll":
            return self._in_chunks(use, (*forward, *backward, *weights))
        if is_chunked:
            # Each part of the logits is computed, and its gradient applied to the hidden state and the weight, in F
            # already.
            peak = (sum(each.nbytes for each in ended) + i * logits) // use.chunks
            forward += [*backward, *weights]
            hidden = tokens * s.hidden // use.parts
            backward, weights, pending, ended = [], [], [], [Saved("gradient", i * hidden, "I")]
        elif use.recompute == "block" and s.implementation.runtime == "atoll":
            backward = [*products, *backward]
        return Work(
            parameters=rows * s.hidden + (rows if s.transform else 0) + before.parameters,
            matrices=rows * s.hidden + before.matrices,
            forward=(*before.forward, *forward),
            backward=(*backward, *before.backward),
            weights=(*weights, *before.weights),
            saved=(*before.saved, *ended),
            again=before.again,
            pending=(*pending, *before.pending),
            peak=peak,
            loss=loss,
        )

    def _in_chunks(self, use: Use, kernels: tuple[Kernel, ...]) -> Work:
        s, before = self.sizes, self.without_logits(use)
        rows = -(-s.vocabulary // use.tensor)
        (given,) = (each for each in self._saved(use) if each.name == "head's input")
        before = replace(
            before,
            parameters=before.parameters + (rows if s.transform else 0),
            saved=tuple(each for each in before.saved if each != given),
            again=tuple(each for each in before.again if each != given),
        )
        return in_chunks(before, use, kernels, rows=rows, hidden=s.hidden)

    def without_logits(self, use: Use) -> Work:
        """Return the head's work before the logits."""
        s, i, tokens = self.sizes, use.item, use.tokens
        hidden = tokens * s.hidden // use.parts
        dense = [Product(tokens, s.hidden, s.hidden)] if s.transform else []
        forward: list[Kernel] = [*dense, *[Pass(2.0 * i * hidden)] * (1 + 2 * len(dense))]
        backward: list[Kernel] = [Pass(4.0 * i * hidden), *(each.swapped for each in dense)]
        if use.tensor > 1 and use.sequence_parallel:
            forward.append(Exchange("all-gather", i * tokens * s.hidden))
        held, *saved = self._saved(use)
        again: list[Saved] = []
        if use.recompute != "none" and s.implementation.runtime == "atoll":
            again, saved = self._repeated(use, saved)
            backward = [*(forward if use.recompute == "block" else without(forward, dense)), *backward]
        pooled = s.hidden**2 + s.hidden + 2 * (s.hidden + 1) if s.pooled else 0
        return Work(
            parameters=(len(dense) * (s.hidden + 1) + s.norm) * s.hidden + pooled,
            matrices=len(dense) * s.hidden**2,
            forward=tuple(forward),
            backward=tuple(backward),
            weights=tuple(each.learnt for each in dense),
            saved=(held, *saved),
            again=tuple(again),
            pending=tuple(Saved("transform's gradient", i * hidden, "W") for _ in dense),
        )

    def _saved(self, use: Use) -> Iterator[Saved]:
        """Return the input, which the runtime keeps, and the tensors saved by the kernels before the logits."""
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
            Saved("log-softmax", precise * logits, "loss"),
            Saved("number of tokens", precise, "loss"),
        ]

    def _repeated(self, use: Use, saved: list[Saved]) -> tuple[list[Saved], list[Saved]]:
        """Return the tensors saved when a block is recomputed, and those kept for it."""
        kept = {"activation's input"} if use.recompute == "selective" else set()
        if self.sizes.implementation.ends == "parts":
            kept.add("head's input")
        again = [each for each in saved if each.name not in kept]
        return again, [each for each in saved if each.name in kept]


def in_chunks(
    before: Work, use: Use, kernels: Iterable[Kernel], *, rows: int, hidden: int, frozen: bool = False
) -> Work:
    """Return the work of a head with `Plan.loss_chunks`: I executes the kernels of logits, loss and all gradients,
    chunk by chunk. F keeps the input of the logits.

    before: the work of what the block computes before its head.  rows, hidden: of the head's weight on a rank.
    """
    i, elements = use.item, rows * hidden
    gradient = Saved("gradient of the head's input", i * use.tokens * hidden, "I")
    # Beside it the logits of a chunk, which become their gradient in place, in fp32 at least and in the compute dtype.
    chunk = (max(4, i) + (i if i < 4 else 0)) * -(-use.tokens // use.chunks) * rows
    return replace(
        before,
        parameters=before.parameters + elements,
        added=0 if frozen else elements,
        frozen=before.frozen + (elements if frozen else 0),
        backward=(*kernels, *before.backward),
        saved=(*before.saved, Saved("head's input", i * use.tokens * hidden // use.parts, "I")),
        again=(*before.again, gradient),
        loss=gradient.nbytes + chunk,
    )


def without(kernels: Iterable[Kernel], products: Iterable[Product]) -> tuple[Kernel, ...]:
    """Return the kernels without some products."""
    left = set(products)
    return tuple(kernel for kernel in kernels if kernel not in left)
