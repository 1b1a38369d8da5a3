"""A layer of a transformer by formula: norm, attention, norm, feed-forward.

Norms, activations, biases with dropout and the softmax of eager attention are one kernel each, which reads its inputs
and writes its output once. Saved activations follow Korthikanti et al. (arXiv 2205.05198), 34 s b h + 5 a s² b bytes
per layer for GPT with dropout, unless an `Implementation` differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from atoll.base.errors import ConfigError
from atoll.prediction.cost.ends import without
from atoll.prediction.cost.kernels import Exchange, FusedAttention, Kernel, Pass, Product
from atoll.prediction.cost.work import Saved, Use, Work

if TYPE_CHECKING:
    from atoll.prediction.cost.transformer import Transformer

_ALIGNED, UNALIGNED = 16, 1 / 16
"""Alignment in bytes of a head for which tensor cores take Megatron's products of heads, and the factor of the rate for
other heads: that of BLOOM's steps with heads of 108 and of 150 elements, on A100 in 2022."""

FLASH_BACKWARD = 2.5
"""Ratio of operations of fused attention's backward to its forward: five products to two."""


def head_problem(ranks: int, heads: int, kv_heads: int) -> str | None:
    """Return why attention's heads cannot be split over tensor-parallel ranks, with the sizes that fit; None if they
    can. Each rank has whole heads: keys and values are not replicated."""
    counts = {"attention heads": heads, "key and value heads": kv_heads}
    uneven = [f"{count} {what}" for what, count in counts.items() if count % ranks]
    if not uneven:
        return None
    common = math.gcd(heads, kv_heads)
    fitting = [str(size) for size in range(1, common + 1) if common % size == 0]
    listed = " or ".join(filter(None, [", ".join(fitting[:-1]), fitting[-1]]))
    return f"tensor = {ranks} ranks cannot split {' and '.join(uneven)} evenly; use tensor = {listed}"


def _check(size: int, ranks: int, what: str) -> None:
    if size % ranks:
        raise ConfigError(f"{what} = {size} cannot be split evenly over tensor = {ranks} ranks")


@dataclass(frozen=True, slots=True)
class TransformerLayer:
    """Norm, attention, norm, feed-forward. Layers of equal sizes are equal, whatever their names."""

    name: str = field(compare=False)
    sizes: Transformer

    def work(self, use: Use) -> Work:
        """See `Work`."""
        sizes = self.sizes
        how = sizes.implementation
        if self._is_gathered and use.parts > 1:
            raise ConfigError(
                f"sequence_parallel needs layers that are split by outputs and then by inputs; those of {sizes.name} "
                "are gathered one by one. Turn it off"
            )
        problem = head_problem(self._inside(use), sizes.heads, sizes.kv_heads or sizes.heads)
        if problem is not None and how.runtime == "atoll":
            raise ConfigError(problem)
        for size, what in ((sizes.heads, "heads"), (sizes.keys, "kv_heads x width"), (sizes.ffn, "ffn")):
            _check(size, self._inside(use), what)
        forward = tuple(self._forward(use))
        backward = tuple(self._backward(use))
        products = self._products(use)
        weights = tuple(product.learnt for product in products.values())
        held, *rest = self._saved(use)
        saved, again = [held, *rest], list[Saved]()
        match use.recompute:
            case "block":
                backward = (*forward, *backward)
                saved, again = [held], rest
            case "selective" if how.runtime == "atoll":
                backward = (*without(forward, products.values()), *backward)
                outputs = self._outputs(use)
                saved, again = [held, *outputs], [each for each in rest if each.name not in _names(outputs)]
            case "selective":
                backward = (*self._scores(use), *backward)
                again = [each for each in saved if each.name in _OF_SCORES]
                saved = [each for each in saved if each.name not in _OF_SCORES]
        if not how.waits:
            backward, weights = (*backward, *weights), ()
            saved, again = ([replace(each, until="I") for each in kept] for kept in (saved, again))
        return Work(
            parameters=self.parameters(use.tensor),
            matrices=-(-self.matrices // use.tensor) if how.waits else 0,
            forward=forward,
            backward=backward,
            weights=weights,
            saved=tuple(saved),
            pending=self._gradients(use) if how.waits else (),
            again=tuple(again),
            wire=use.tokens * sizes.hidden * use.item // use.parts,
            linear=tuple(self._weights),
        )

    def parameters(self, tensor: int) -> int:
        """Return the number of elements on one rank of a tensor-parallel group."""
        s = self.sizes
        split = {True: s.queries + 2 * s.keys + s.up, "qkv": s.queries + 2 * s.keys, False: 0}[s.biases]
        whole = 2 * s.hidden if s.biases is True else 0
        if self._is_gathered:  # the biases of all linear layers are split with their outputs
            split, whole = split + whole, 0
        norms = 2 * s.norm * (s.hidden + (s.head_width if s.head_norms else 0))
        return -(-(self.matrices + split) // tensor) + whole + norms

    @property
    def matrices(self) -> int:
        """Number of elements of the linear layers' weights."""
        s = self.sizes
        return s.hidden * (s.queries + 2 * s.keys) + s.queries * s.hidden + s.hidden * s.up + s.ffn * s.hidden

    @property
    def _weights(self) -> Iterator[tuple[int, int]]:
        """Rows and columns of the linear layers' weights: fused ones of GPT-2, whose rows are inputs."""
        s = self.sizes
        if not s.implementation.waits:
            yield from self._linear.values()
            return
        yield s.queries, s.hidden
        yield from [(s.keys, s.hidden)] * 2
        yield s.hidden, s.queries
        yield from [(s.ffn, s.hidden)] * (s.up // s.ffn)
        yield s.hidden, s.ffn

    @property
    def _linear(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers before they are split."""
        s = self.sizes
        return {
            "qkv": (s.hidden, s.queries + 2 * s.keys),
            "out": (s.queries, s.hidden),
            "up": (s.hidden, s.up),
            "down": (s.ffn, s.hidden),
        }

    def _products(self, use: Use) -> dict[str, Product]:
        """The linear layers."""
        by_inputs = () if self._is_gathered else ("out", "down")
        return {
            name: Product(use.tokens, inputs // use.tensor, outputs)
            if name in by_inputs
            else Product(use.tokens, inputs, -(-outputs // use.tensor))
            for name, (inputs, outputs) in self._linear.items()
        }

    @property
    def _is_gathered(self) -> bool:
        return self.sizes.implementation.splits == "gathered"

    def _inside(self, use: Use) -> int:
        """Return the number of ranks over which heads and the feed-forward's width are split, between the linear
        layers."""
        return 1 if self._is_gathered else use.tensor

    def _multiply(self, use: Use, name: str) -> Iterator[Kernel]:
        """Return the kernels of a linear layer's forward."""
        yield self._products(use)[name]
        yield from self._exchange(use, "all-gather", self._linear[name][1])

    def _multiply_back(self, use: Use, name: str) -> Iterator[Kernel]:
        """Return the kernels of the gradient of a linear layer's input."""
        yield self._products(use)[name].swapped
        yield from self._exchange(use, "all-reduce", self._linear[name][0])

    def _exchange(self, use: Use, kind: Literal["all-gather", "all-reduce"], width: int) -> Iterator[Kernel]:
        if use.tensor > 1 and self._is_gathered:
            yield Exchange(kind, use.tokens * width * use.item)

    def _scores(self, use: Use) -> Iterator[Kernel]:
        """Return the kernels of attention between its two linear layers, forward."""
        s, i = self.sizes, use.item
        heads, length = use.samples * s.heads // self._inside(use), use.sequence
        if use.attention != "eager":
            width = (2 * s.queries + 2 * s.keys) // self._inside(use)
            share = 0.5 if s.causal else 1.0
            flops = 4.0 * share * heads * length * length * s.head_width
            yield FusedAttention(flops, i * use.tokens * width)
            return
        scores = heads * length * length
        is_taken = s.implementation.runtime != "megatron" or s.head_width * i % _ALIGNED == 0
        share = 1.0 if is_taken else UNALIGNED
        yield Product(length, s.head_width, length, heads, share)
        yield self._softmax(scores, heads, i)
        if s.dropout:
            yield Pass((2.0 * i + 1) * scores)
        yield Product(length, length, s.head_width, heads, share)

    def _softmax(self, scores: int, heads: int, item: int) -> Pass:
        """Return the kernels of scaled, masked scores and their softmax. Megatron fuses all of it if samples times
        heads are a multiple of four (`FusedScaleMaskSoftmax.is_kernel_available`); otherwise it casts, scales, masks,
        divides and casts back, in fp32."""
        is_fused = self.sizes.implementation.runtime != "megatron" or heads % 4 == 0
        return Pass(2.0 * item * scores) if is_fused else Pass((2.0 * item + 32.0) * scores, 5)

    def _forward(self, use: Use) -> Iterator[Kernel]:
        s, i, tokens = self.sizes, use.item, use.tokens
        hidden = tokens * s.hidden // use.parts
        masks = hidden if s.dropout else 0
        yield Pass(2.0 * i * hidden)
        yield from self._enter(use)
        yield from self._multiply(use, "qkv")
        if s.rotary:
            yield Pass(2.0 * i * tokens * (s.queries + s.keys) / self._inside(use))
        yield from self._scores(use)
        yield from self._multiply(use, "out")
        yield from self._leave(use)
        yield Pass(3.0 * i * hidden + masks)
        yield Pass(2.0 * i * hidden)
        yield from self._enter(use)
        yield from self._multiply(use, "up")
        yield Pass(i * tokens * (s.up + s.ffn) / self._inside(use))
        yield from self._multiply(use, "down")
        yield from self._leave(use)
        yield Pass(3.0 * i * hidden + masks)

    def _backward(self, use: Use) -> Iterator[Kernel]:
        """Return the kernels of I, the gradients of the inputs."""
        s, i, tokens = self.sizes, use.item, use.tokens
        hidden = tokens * s.hidden // use.parts
        masks = hidden if s.dropout else 0
        if s.dropout:
            yield Pass(2.0 * i * hidden + masks)
        yield from self._enter(use)
        yield from self._multiply_back(use, "down")
        yield Pass(i * tokens * (2 * s.up + s.ffn) / self._inside(use))
        yield from self._multiply_back(use, "up")
        yield from self._leave(use)
        yield Pass(4.0 * i * hidden)
        if s.dropout:
            yield Pass(2.0 * i * hidden + masks)
        yield from self._enter(use)
        yield from self._multiply_back(use, "out")
        yield from self._scores_backward(use)
        if s.rotary:
            yield Pass(2.0 * i * tokens * (s.queries + s.keys) / self._inside(use))
        yield from self._multiply_back(use, "qkv")
        yield from self._leave(use)
        yield Pass(4.0 * i * hidden)

    def _scores_backward(self, use: Use) -> Iterator[Kernel]:
        s, i = self.sizes, use.item
        for kernel in self._scores(use):
            match kernel:
                case FusedAttention():
                    yield FusedAttention(FLASH_BACKWARD * kernel.flops, 2.0 * kernel.nbytes)
                case Product():
                    yield kernel.swapped
                    yield kernel.learnt
                case Pass():
                    scores = use.samples * s.heads // self._inside(use) * use.sequence**2
                    yield Pass(kernel.nbytes + i * scores, kernel.kernels)

    def _enter(self, use: Use) -> Iterator[Kernel]:
        """Return the traffic of the hidden state at modules split by outputs; in the backward, at those split by
        inputs."""
        if self._inside(use) > 1 and use.sequence_parallel:
            yield Exchange("all-gather", use.tokens * self.sizes.hidden * use.item)

    def _leave(self, use: Use) -> Iterator[Kernel]:
        """Return the traffic of summing the outputs of modules split by inputs."""
        if self._inside(use) > 1:
            kind = "reduce-scatter" if use.sequence_parallel else "all-reduce"
            yield Exchange(kind, use.tokens * self.sizes.hidden * use.item)  # type: ignore[arg-type]

    # ---- saved tensors

    def _saved(self, use: Use) -> Iterator[Saved]:
        """Return the input, which the runtime keeps, and the tensors saved by the kernels."""
        s, i, tokens, t = self.sizes, use.item, use.tokens, self._inside(use)
        hidden = tokens * s.hidden // use.parts
        norm = partial(s.implementation.saved_by_norm, use)
        is_post = s.order == "post"
        yield Saved("input", i * hidden, "W" if is_post else "I")
        if not is_post:
            yield from norm("norm", hidden, s.hidden, is_kept=True)
            yield Saved("qkv's input", i * hidden, "W")
        yield from self._saved_by_attention(use)
        yield Saved("out's input", i * tokens * s.queries // t, "W")
        if s.dropout:
            yield Saved("dropout", hidden, "I")
        yield from norm("feed-forward's norm", hidden, s.hidden, is_kept=s.order == "parallel")
        yield Saved("up's input", i * hidden, "W")
        yield Saved("activation's input", i * tokens * s.up // t, "I")
        if s.implementation.results:
            yield Saved("activation's results", s.implementation.results * i * tokens * s.ffn // t, "I")
        yield Saved("down's input", i * tokens * s.ffn // t, "W")
        if s.dropout:
            yield Saved("feed-forward's dropout", hidden, "I")
        if is_post:
            yield from norm("last norm", hidden, s.hidden, is_kept=False)

    def _saved_by_attention(self, use: Use) -> Iterator[Saved]:
        """Return the tensors saved between the two linear layers of attention."""
        s, i, tokens, t = self.sizes, use.item, use.tokens, self._inside(use)
        how, is_eager = s.implementation, use.attention == "eager"
        if s.head_norms:
            for name, width in (("queries", s.queries), ("keys", s.keys)):
                yield from how.saved_by_norm(use, f"{name}' norm", tokens * width // t, s.head_width, is_kept=False)
        if how.keeps_angles:
            yield Saved("rotary angles", 2 * i * use.sequence * s.head_width, "I")
        keys = s.queries if is_eager and how.repeats_keys else s.keys
        yield Saved("queries and keys", i * tokens * (s.queries + keys) // t, "I")
        values = s.queries + 2 * s.keys if self._is_slice(use) else keys
        yield Saved("values", i * tokens * values // t, "I")
        # Kernels write in the queries' memory order: head by head, the output is copied.
        if how.heads == "outer" and not is_eager and (i < 4 or how.copies == "all"):
            yield Saved("attention's output", i * tokens * s.queries // t, "I")
        scores = use.samples * s.heads // t * use.sequence**2
        if not is_eager:
            yield Saved("log-sums", max(4, i) * tokens * s.heads // t, "I")
            return
        if how.softmax == "fp32" and i != 4:
            yield Saved("softmax in fp32", 4 * scores, "I")
        yield Saved("softmax", i * scores, "I")
        if s.dropout:
            yield Saved("attention's dropout", scores, "I")
            yield Saved("dropped softmax", i * scores, "I")

    def _outputs(self, use: Use) -> tuple[Saved, ...]:
        """Return the outputs of the products of linear layers; another saved tensor of the same name is the same
        tensor."""
        s, i, tokens, t = self.sizes, use.item, use.tokens, self._inside(use)
        if use.tensor > t:  # parts are kept, and gathered again
            products = self._products(use).items()
            return tuple(Saved(f"{name}'s product", i * tokens * each.columns, "I") for name, each in products)
        hidden = i * tokens * s.hidden // use.parts
        queries, keys = i * tokens * s.queries // t, i * tokens * s.keys // t
        is_copied = self._is_copied(use)
        if self._is_slice(use):
            heads = [Saved("values", queries + 2 * keys, "I")]
        else:
            changed = s.rotary or is_copied
            heads = [Saved("product of queries and keys" if changed else "queries and keys", queries + keys, "I")]
            if s.head_norms:
                heads = [Saved("queries' norm's input", queries, "I"), Saved("keys' norm's input", keys, "I")]
            heads.append(Saved("product of values" if is_copied else "values", keys, "I"))
        return (
            *heads,
            Saved("out's product", hidden, "I"),
            Saved("activation's input", i * tokens * s.up // t, "I"),
            Saved("down's product", hidden, "I"),
        )

    def _is_copied(self, use: Use) -> bool:
        """True if attention saves copies: eager attention, whose product needs samples and heads to be adjacent in
        memory."""
        s = self.sizes
        is_repeated = s.implementation.repeats_keys and s.queries != s.keys
        return use.attention == "eager" and (use.samples > 1 or is_repeated)

    def _is_slice(self, use: Use) -> bool:
        """Return True if values are a part of a larger product, which is saved as a whole."""
        return self.sizes.implementation.is_fused and self.sizes.rotary and not self._is_copied(use)

    def _gradients(self, use: Use) -> tuple[Saved, ...]:
        """Return the gradients of the linear layers' outputs, which I computes and W needs."""
        s, i, tokens, t = self.sizes, use.item, use.tokens, self._inside(use)
        out = (Saved("out's gradient", i * tokens * s.hidden // use.parts, "W"),)
        return (
            Saved("down's gradient", i * tokens * s.hidden // use.parts, "W"),
            Saved("up's gradient", i * tokens * s.up // t, "W"),
            # The gradients of two branches from one residual are one tensor.
            *(() if s.order == "parallel" else out),
            Saved("qkv's gradient", i * tokens * (s.queries + 2 * s.keys) // t, "W"),
        )


_OF_SCORES = ("softmax", "softmax in fp32", "attention's dropout", "dropped softmax", "log-sums")
"""Tensors that selective recompute does not keep under Megatron."""


def _names(saved: Iterable[Saved]) -> set[str]:
    return {each.name for each in saved}
