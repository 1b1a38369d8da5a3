"""Transformers by formula: what a layer, the embedding and the head compute and keep, as Megatron's kernels do.

Norms, activations, biases with dropout and the softmax of eager attention are a kernel each, which reads its inputs and
writes its output once. Activations that are kept follow Korthikanti et al. (arXiv 2205.05198), for GPT with dropout
34 s b h + 5 a s² b bytes a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from atoll.cost.kernels import Attention, Exchange, Kernel, Pass, Product
from atoll.cost.work import BlockOf, Saved, Use, Work, Workload
from atoll.errors import ConfigError

FLASH_BACKWARD = 2.5
"""Operations of fused attention's backward over its forward's: five products, where the forward has two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Sizes of a decoder or an encoder.

    width: of a head; hidden / heads if None.  kv_heads: of keys and values; heads if None.  gated: an activation of two
    products, as SwiGLU.  norm: parameters of a norm, an element of the hidden size.  biases: of linear layers.
    positions: rows of a learned embedding of positions.  rotary: positions rotate queries and keys.
    """

    name: str = "transformer"
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    kv_heads: int | None = None
    width: int | None = None
    gated: bool = False
    norm: int = 2
    biases: bool = True
    positions: int = 0
    rotary: bool = False
    tied: bool = False
    dropout: bool = False
    causal: bool = True

    @staticmethod
    def gpt(*, layers: int, hidden: int, heads: int, vocabulary: int, positions: int, ffn: int | None = None,
            dropout: bool = True) -> Transformer:  # fmt: skip
        """GPT-2 and GPT-3: layer norms, biases, GELU, learned positions, tied ends."""
        return Transformer(
            name="gpt",
            layers=layers,
            hidden=hidden,
            heads=heads,
            ffn=4 * hidden if ffn is None else ffn,
            vocabulary=vocabulary,
            positions=positions,
            tied=True,
            dropout=dropout,
        )

    @staticmethod
    def llama(*, layers: int, hidden: int, heads: int, ffn: int, vocabulary: int, kv_heads: int | None = None,
              width: int | None = None, tied: bool = False) -> Transformer:  # fmt: skip
        """Llama and its kin: root mean square norms, SwiGLU, rotary positions, no biases."""
        return Transformer(
            name="llama",
            layers=layers,
            hidden=hidden,
            heads=heads,
            ffn=ffn,
            vocabulary=vocabulary,
            kv_heads=kv_heads,
            width=width,
            gated=True,
            norm=1,
            biases=False,
            rotary=True,
            tied=tied,
        )

    @staticmethod
    def bert(*, layers: int, hidden: int, heads: int, vocabulary: int, positions: int,
             ffn: int | None = None) -> Transformer:  # fmt: skip
        """BERT as in Megatron-LM: a GPT whose attention is not causal."""
        decoder = Transformer.gpt(
            layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, positions=positions, ffn=ffn
        )
        return replace(decoder, name="bert", causal=False)

    @property
    def queries(self) -> int:
        """Elements of a token's queries."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Elements of a token's keys, and of its values."""
        return (self.heads if self.kv_heads is None else self.kv_heads) * self.head_width

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads if self.width is None else self.width

    @property
    def up(self) -> int:
        """Outputs of the first part of the feed-forward."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def workload(self) -> Workload:
        """Embedding, layers, head."""
        layers = (TransformerLayer(f"layers.{at}", self) for at in range(self.layers))
        shared = self.vocabulary * self.hidden if self.tied else 0
        blocks: tuple[BlockOf, ...] = (Embedding("embedding", self), *layers, Head("head", self))
        return Workload(self.name, blocks, range(1, len(blocks) - 1), shared)

    @property
    def parameters(self) -> int:
        """Of the whole model; tied ends once."""
        return self.workload.parameters


def _check(size: int, ranks: int, what: str) -> None:
    if size % ranks:
        raise ConfigError(f"{what} = {size} cannot be split evenly over tensor = {ranks} ranks")


@dataclass(frozen=True, slots=True)
class TransformerLayer:
    """Norm, attention, norm, feed-forward."""

    name: str
    sizes: Transformer

    def work(self, use: Use) -> Work:
        """See `Work`."""
        sizes = self.sizes
        for size, what in ((sizes.heads, "heads"), (sizes.keys, "kv_heads x width"), (sizes.ffn, "ffn")):
            _check(size, use.tensor, what)
        forward = tuple(self._forward(use))
        backward = tuple(self._backward(use))
        attention = tuple(self._scores(use))
        saved = self._saved(use)
        again: tuple[Saved, ...] = ()
        match use.recompute:
            case "block":
                backward = (*forward, *backward)
                saved, again = (self._input(use),), saved
            case "selective":
                backward = (*attention, *backward)
                again = tuple(each for each in saved if each.name in _OF_SCORES)
                saved = tuple(each for each in saved if each.name not in _OF_SCORES)
        return Work(
            parameters=self.parameters(use.tensor),
            matrices=self._matrices // use.tensor,
            forward=forward,
            backward=backward,
            weights=tuple(product.learnt for product in self._products(use).values()),
            saved=saved,
            pending=self._gradients(use),
            again=again,
            wire=use.tokens * sizes.hidden * use.item // use.parts,
        )

    def parameters(self, tensor: int) -> int:
        """Elements of one rank of a tensor-parallel group."""
        s = self.sizes
        split_biases, whole_biases = (s.queries + 2 * s.keys + s.up, 2 * s.hidden) if s.biases else (0, 0)
        return (self._matrices + split_biases) // tensor + whole_biases + 2 * s.norm * s.hidden

    @property
    def _matrices(self) -> int:
        s = self.sizes
        return s.hidden * (s.queries + 2 * s.keys) + s.queries * s.hidden + s.hidden * s.up + s.ffn * s.hidden

    def _products(self, use: Use) -> dict[str, Product]:
        """The linear layers."""
        s, rows, t = self.sizes, use.tokens, use.tensor
        return {
            "qkv": Product(rows, s.hidden, (s.queries + 2 * s.keys) // t),
            "out": Product(rows, s.queries // t, s.hidden),
            "up": Product(rows, s.hidden, s.up // t),
            "down": Product(rows, s.ffn // t, s.hidden),
        }

    def _scores(self, use: Use) -> Iterator[Kernel]:
        """Attention between its two linear layers, forward."""
        s, i = self.sizes, use.item
        heads, length = use.samples * s.heads // use.tensor, use.sequence
        if use.attention == "flash":
            width = (2 * s.queries + 2 * s.keys) // use.tensor
            share = 0.5 if s.causal else 1.0
            flops = 4.0 * share * heads * length * length * s.head_width
            yield Attention(flops, i * use.tokens * width)
            return
        scores = heads * length * length
        yield Product(length, s.head_width, length, heads)
        yield Pass(2.0 * i * scores)
        if s.dropout:
            yield Pass((2.0 * i + 1) * scores)
        yield Product(length, length, s.head_width, heads)

    def _forward(self, use: Use) -> Iterator[Kernel]:
        s, i, tokens = self.sizes, use.item, use.tokens
        hidden = tokens * s.hidden // use.parts
        product = self._products(use)
        masks = hidden if s.dropout else 0
        yield Pass(2.0 * i * hidden)
        yield from self._enter(use)
        yield product["qkv"]
        if s.rotary:
            yield Pass(2.0 * i * tokens * (s.queries + s.keys) / use.tensor)
        yield from self._scores(use)
        yield product["out"]
        yield from self._leave(use)
        yield Pass(3.0 * i * hidden + masks)
        yield Pass(2.0 * i * hidden)
        yield from self._enter(use)
        yield product["up"]
        yield Pass(i * tokens * (s.up + s.ffn) / use.tensor)
        yield product["down"]
        yield from self._leave(use)
        yield Pass(3.0 * i * hidden + masks)

    def _backward(self, use: Use) -> Iterator[Kernel]:
        """I: the gradients of what comes in."""
        s, i, tokens = self.sizes, use.item, use.tokens
        hidden = tokens * s.hidden // use.parts
        product = self._products(use)
        masks = hidden if s.dropout else 0
        if s.dropout:
            yield Pass(2.0 * i * hidden + masks)
        yield from self._enter(use)
        yield product["down"].swapped
        yield Pass(i * tokens * (2 * s.up + s.ffn) / use.tensor)
        yield product["up"].swapped
        yield from self._leave(use)
        yield Pass(4.0 * i * hidden)
        if s.dropout:
            yield Pass(2.0 * i * hidden + masks)
        yield from self._enter(use)
        yield product["out"].swapped
        yield from self._scores_backward(use)
        if s.rotary:
            yield Pass(2.0 * i * tokens * (s.queries + s.keys) / use.tensor)
        yield product["qkv"].swapped
        yield from self._leave(use)
        yield Pass(4.0 * i * hidden)

    def _scores_backward(self, use: Use) -> Iterator[Kernel]:
        s, i = self.sizes, use.item
        for kernel in self._scores(use):
            match kernel:
                case Attention():
                    yield Attention(FLASH_BACKWARD * kernel.flops, 2.0 * kernel.nbytes)
                case Product():
                    yield kernel.swapped
                    yield kernel.learnt
                case Pass():
                    scores = use.samples * s.heads // use.tensor * use.sequence**2
                    yield Pass(kernel.nbytes + i * scores)

    def _enter(self, use: Use) -> Iterator[Kernel]:
        """The hidden state comes to modules split by outputs; in the backward, to those split by inputs."""
        if use.tensor > 1 and use.sequence_parallel:
            yield Exchange("all-gather", use.tokens * self.sizes.hidden * use.item)

    def _leave(self, use: Use) -> Iterator[Kernel]:
        """What modules split by inputs give is added up."""
        if use.tensor > 1:
            kind = "reduce-scatter" if use.sequence_parallel else "all-reduce"
            yield Exchange(kind, use.tokens * self.sizes.hidden * use.item)  # type: ignore[arg-type]

    # ---- what is kept

    def _input(self, use: Use) -> Saved:
        return Saved("input", use.item * use.tokens * self.sizes.hidden // use.parts, "I")

    def _saved(self, use: Use) -> tuple[Saved, ...]:
        s, i, tokens, t = self.sizes, use.item, use.tokens, use.tensor
        hidden = tokens * s.hidden // use.parts
        found = [
            self._input(use),
            Saved("qkv's input", i * hidden, "W"),
            Saved("queries, keys, values", i * tokens * (s.queries + 2 * s.keys) // t, "I"),
        ]
        scores = use.samples * s.heads // t * use.sequence**2
        if use.attention == "flash":
            found.append(Saved("log-sums", 4 * tokens * s.heads // t, "I"))
        else:
            found.append(Saved("softmax", i * scores, "I"))
            if s.dropout:
                found += [Saved("attention's dropout", scores, "I"), Saved("dropped softmax", i * scores, "I")]
        found += [
            Saved("out's input", i * tokens * s.queries // t, "W"),
            Saved("feed-forward's input", i * hidden, "I"),
            Saved("up's input", i * hidden, "W"),
            Saved("activation's input", i * tokens * s.up // t, "I"),
            Saved("down's input", i * tokens * s.ffn // t, "W"),
        ]
        if s.dropout:
            found += [Saved("dropout", hidden, "I"), Saved("feed-forward's dropout", hidden, "I")]
        return tuple(found)

    def _gradients(self, use: Use) -> tuple[Saved, ...]:
        """Of the linear layers' outputs, which I makes and W needs."""
        s, i, tokens, t = self.sizes, use.item, use.tokens, use.tensor
        return (
            Saved("down's gradient", i * tokens * s.hidden // use.parts, "W"),
            Saved("up's gradient", i * tokens * s.up // t, "W"),
            Saved("out's gradient", i * tokens * s.hidden // use.parts, "W"),
            Saved("qkv's gradient", i * tokens * (s.queries + 2 * s.keys) // t, "W"),
        )


_OF_SCORES = ("softmax", "attention's dropout", "dropped softmax", "log-sums")
"""What selective recomputing does not keep."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of tokens, and of positions."""

    name: str
    sizes: Transformer

    def work(self, use: Use) -> Work:
        """See `Work`."""
        s, i = self.sizes, use.item
        whole = use.tokens * s.hidden
        hidden = whole // use.parts
        forward: list[Kernel] = [Pass(2.0 * i * whole)]
        backward: list[Kernel] = []
        if use.tensor > 1:
            forward.append(Exchange("reduce-scatter" if use.sequence_parallel else "all-reduce", i * whole))
            backward += [Exchange("all-gather", i * whole)] if use.sequence_parallel else []
        if s.positions or s.dropout:
            forward.append(Pass(3.0 * i * hidden))
        saved = [Saved("ids", 8 * use.tokens, "W")]
        if s.dropout:
            saved.append(Saved("dropout", hidden, "I"))
            backward.append(Pass(2.0 * i * hidden))
        rows = -(-s.vocabulary // use.tensor)
        return Work(
            parameters=(rows + s.positions) * s.hidden,
            matrices=0,
            forward=tuple(forward),
            backward=tuple(backward),
            weights=(Pass(3.0 * i * whole),),
            saved=tuple(saved),
            pending=(Saved("gradient", i * whole, "W"),),
            wire=i * hidden,
        )


@dataclass(frozen=True, slots=True)
class Head:
    """The last norm, the logits and the loss."""

    name: str
    sizes: Transformer

    def work(self, use: Use) -> Work:
        """See `Work`."""
        s, i, tokens = self.sizes, use.item, use.tokens
        hidden = tokens * s.hidden // use.parts
        rows = -(-s.vocabulary // use.tensor)
        product = Product(-(-tokens // use.chunks), s.hidden, rows)
        logits = tokens * rows
        forward: list[Kernel] = [Pass(2.0 * i * hidden)]
        backward: list[Kernel] = []
        if use.tensor > 1 and use.sequence_parallel:
            forward.append(Exchange("all-gather", i * tokens * s.hidden))
            backward.append(Exchange("reduce-scatter", i * tokens * s.hidden))
        elif use.tensor > 1:
            backward.append(Exchange("all-reduce", i * tokens * s.hidden))
        if use.loss == "eager":
            # The logits are cast, their largest taken off, exponentials made and divided: five times through memory.
            moved, kept = (i + 4.0) * logits + 5 * 8.0 * logits, 4 * logits
        else:
            moved, kept = 2.0 * i * logits, i * logits
        forward += [*[product] * use.chunks, Pass(moved, 2 * use.chunks)]
        backward += [Pass((i + 4.0) * logits, use.chunks), *[product.swapped] * use.chunks, Pass(4.0 * i * hidden)]
        weights: tuple[Kernel, ...] = (product.learnt,) * use.chunks
        saved = [Saved("norm's input", i * hidden, "I"), Saved("head's input", i * hidden, "W")]
        pending: tuple[Saved, ...] = (Saved("logits' gradient", i * logits, "W"),)
        peak = i * logits
        if use.chunks > 1:
            # Each part of the logits is made, and its gradient taken to the hidden state and the weight, in F already.
            forward += [*backward[:-1], *weights]
            backward, weights, pending = backward[-1:], (), ()
            saved.append(Saved("gradient", i * hidden, "I"))
            peak = (kept + i * logits) // use.chunks
        else:
            saved.append(Saved("logits", kept, "I"))
        return Work(
            parameters=rows * s.hidden + s.norm * s.hidden,
            matrices=rows * s.hidden,
            forward=tuple(forward),
            backward=tuple(backward),
            weights=weights,
            saved=tuple(saved),
            pending=pending,
            peak=peak,
        )
