"""Formulas for a vocabulary whose rows are split over the ranks of a pipeline: the slices, and the work left at the
ends.

`atoll.runtime.vocabulary` executes it. Sums and losses are in fp32, or in fp64 for fp64. Labels are assumed to be
spread evenly over the slices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atoll.prediction.cost.ends import Embedding, HeadBlock
from atoll.prediction.cost.kernels import Exchange, Kernel, Pass, Product
from atoll.prediction.cost.work import Saved, Use, Work

if TYPE_CHECKING:
    from atoll.prediction.cost.transformer import Transformer


@dataclass(frozen=True, slots=True)
class _Part:
    """A block or a slice of a transformer whose vocabulary is split over `ranks` pipeline ranks."""

    name: str
    sizes: Transformer
    ranks: int


class LookedUp(_Part):
    """Block of the embedding: adds the rows looked up by the slices."""

    def work(self, use: Use) -> Work:
        """See `Work`."""
        rest = Embedding(self.name, self.sizes).without_tokens(use)
        whole = use.tokens * self.sizes.hidden * use.item
        added: list[Kernel] = [Pass(3.0 * whole * (self.ranks - 1), self.ranks - 1)]
        if use.tensor > 1:
            added.append(Exchange("all-reduce", whole))
        # The sum is kept by the next block as its input, and the rows for another forward.
        rows = (Saved("tokens' rows", whole, "I"),) if rest.forward else ()
        return replace(rest, forward=(*added, *rest.forward), saved=(*rows, *rest.saved))


class Scored(_Part):
    """Block of the head: combines the slices' scores, in its I. The slice keeps the head's input."""

    def work(self, use: Use) -> Work:
        """See `Work`."""
        before = HeadBlock(self.name, self.sizes).without_logits(use)
        i, precise, hidden = use.item, _precise(use), use.tokens * self.sizes.hidden
        # Each answer is cast, then scaled and added to the gradient; rows of labels are subtracted once.
        each = (i + precise) * (precise > i) + 3 * precise
        combined: list[Kernel] = [Pass(float(hidden * (self.ranks * each + 8 * precise + i)), 10 * (self.ranks + 1))]
        if use.tensor > 1:
            combined.append(Exchange("all-reduce", precise * hidden))
        return replace(
            before,
            backward=(*combined, *before.backward),
            saved=tuple(each for each in before.saved if each.name != "head's input"),
            again=tuple(each for each in before.again if each.name != "head's input"),
            pending=(Saved("head's input's gradient", i * hidden, "I"), *before.pending),
        )


class EmbeddingSlice(_Part):
    """The largest slice of the embedding. F and W are L and G."""

    def work(self, use: Use) -> Work:
        """See `Work`."""
        s, i = self.sizes, use.item
        whole = use.tokens * s.hidden
        share = -(-whole // (self.ranks * use.tensor))
        return Work(
            parameters=_rows(s, use, self.ranks) * s.hidden,
            matrices=0,
            forward=(Pass(4.0 * i * whole, 7),),
            backward=(),
            weights=(Pass(2.0 * i * share + 3.0 * _precise(use) * share, 6),),
            saved=(Saved("rows", i * whole, "I"),),
            pending=(Saved("rows' gradient", i * whole, "W"),),
            wire=i * whole,
        )


class HeadSlice(_Part):
    """The largest slice of the head. F and W are S and T.

    S multiplies twice, for the logits and for their part of the hidden state's gradient; T multiplies once.
    """

    def work(self, use: Use) -> Work:
        """See `Work`."""
        s, i, tokens = self.sizes, use.item, use.tokens
        rows, precise = _rows(s, use, self.ranks), _precise(use)
        product = Product(tokens, s.hidden, rows)
        logits = tokens * rows
        cast = (i + precise) * (precise > i)
        answer = i * s.hidden * (tokens + -(-tokens // (self.ranks * use.tensor)))
        # Maximum, difference, exponentials, sum, quotient: eight passes over the logits, and a cast before and after.
        scored = Pass(float((8 * precise + 2 * cast) * logits), 12)
        learnt = Pass(float((2 * precise + 2 * cast) * logits), 8)
        # In half precisions S holds the logits and two copies of them in fp32; T holds two copies of their gradient, or
        # one beside the rows' gradient in fp32.
        scoring, learning = i * logits, i * logits
        if precise > i:
            scoring = (i + 2 * precise) * logits
            learning = max(2 * precise * logits, (precise + i) * logits + precise * rows * s.hidden)
        return Work(
            parameters=rows * (s.hidden + s.transform),
            matrices=rows * s.hidden,
            forward=(product, scored, product.swapped, Pass(2.0 * answer, 4)),
            backward=(),
            weights=(learnt, product.learnt),
            saved=(
                Saved("head's input", i * tokens * s.hidden, "W"),
                Saved("softmax", i * logits, "W"),
                Saved("sums", 3 * precise * tokens, "W"),
            ),
            pending=(Saved("logits' gradient", learning, "W"),),
            peak=scoring + answer,
            wire=answer + 3 * precise * tokens,
        )


def _rows(sizes: Transformer, use: Use, ranks: int) -> int:
    return -(-sizes.vocabulary // (ranks * use.tensor))


def _precise(use: Use) -> int:
    """Bytes of sums and losses."""
    return max(4, use.item)
