"""A layer of a transformer by formula: norm, attention, norm, feed-forward.

Norms, activations, biases with dropout and the softmax of eager attention are one kernel each, which reads its inputs
and writes its output once. Saved activations follow Korthikanti et al. (arXiv 2205.05198), 34 s b h + 5 a s² b bytes
per layer for GPT with dropout, unless an `Implementation` differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from atoll.base.errors import ConfigError
from atoll.prediction.cost.divided import (
    HEAD_EXCHANGES,
    exchanged,
    kept_width,
    own_heads,
    repeats,
    saved_of_slice,
)
from atoll.prediction.cost.ends import without
from atoll.prediction.cost.experts import MixtureWork
from atoll.prediction.cost.float8 import cast_bytes, learnt, multiplied, outputs_of
from atoll.prediction.cost.kernels import Exchange, FusedAttention, Kernel, Pass, Product
from atoll.prediction.cost.work import NO_ELEMENTS, Saved, Use, Weight, Work

if TYPE_CHECKING:
    from atoll.prediction.cost.implementation import Implementation
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
        if sizes.latent and use.parts > 1:
            raise ConfigError(
                f"sequence_parallel needs layers all of whose parts are split; the attention of {sizes.name} is whole "
                "on each rank. Turn it off"
            )
        problem = head_problem(self._heads_over(use), sizes.heads, sizes.kv_heads or sizes.heads)
        if problem is not None and how.runtime == "atoll":
            raise ConfigError(problem)
        for size, what in ((sizes.heads, "heads"), (sizes.keys, "kv_heads x width")):
            _check(size, self._heads_over(use), what)
        if sizes.heads % (self._heads_over(use) * use.divide):
            raise ConfigError(
                f"sequence = {use.divide} does not divide the {sizes.heads // self._heads_over(use)} heads of a rank"
            )
        mixture = self._mixture(use)
        _check(0 if mixture else sizes.ffn, self._inside(use), "ffn")
        forward = tuple(self._forward(use))
        backward = tuple(self._backward(use))
        products = [*self._products(use).values(), *(() if mixture is None else mixture.products)]
        apart = () if mixture is None else mixture.weights
        weights = (*apart, *(learnt(product, use.products) for product in products))
        held, *rest = self._saved(use)
        saved, again = [held, *rest], list[Saved]()
        match use.recompute:
            case "block":
                backward = (*forward, *backward)
                saved, again = [held], rest
            case "selective" if how.runtime == "atoll":
                backward = (*without(forward, products), *backward)
                outputs = self._outputs(use)
                names = {each.name for each in outputs}
                saved, again = [held, *outputs], [each for each in rest if each.name not in names]
            case "selective":
                backward = (*self._scores(use), *backward)
                again = [each for each in saved if each.name in _OF_SCORES]
                saved = [each for each in saved if each.name not in _OF_SCORES]
        if not how.waits:
            backward, weights = (*backward, *weights), ()
            saved, again = ([replace(each, until="I") for each in kept] for kept in (saved, again))
        experts, beside = (NO_ELEMENTS, NO_ELEMENTS) if mixture is None else (mixture.elements, mixture.beside)
        return Work(
            parameters=self.parameters(use.tensor) + experts.parameters + beside.parameters,
            matrices=(self._on_rank(use.tensor) if how.waits else 0) + experts.matrices + beside.matrices,
            experts=experts,
            forward=forward,
            backward=backward,
            weights=weights,
            expert_weights=apart,
            exchanges=(0 if mixture is None else mixture.exchanges) + (HEAD_EXCHANGES if use.divide > 1 else 0),
            saved=tuple(saved),
            pending=self._gradients(use) if how.waits else (),
            again=tuple(again),
            peak=cast_bytes(forward),
            wire=use.tokens * sizes.hidden * use.item // use.parts,
            keys=0
            if use.slice is None
            else use.item * use.samples * use.sequence * kept_width(sizes, use, self._heads_over(use)),
            linear=(*self._weights, *(() if mixture is None else mixture.linear)),
        )

    def parameters(self, tensor: int) -> int:
        """Return the number of elements on one rank of a tensor-parallel group, without those of a mixture."""
        s = self.sizes
        up, down = (0, 0) if s.mixture else (s.up, s.hidden)
        split = {True: s.queries + 2 * s.keys + up, "qkv": s.queries + 2 * s.keys, False: 0}[s.biases]
        split += s.heads if s.sinks else 0
        whole = s.hidden + down if s.biases is True else 0
        if self._is_gathered:  # the biases of all linear layers are split with their outputs
            split, whole = split + whole, 0
        heads = {"head": 2 * s.head_width, "all": s.queries + s.keys, None: 0}[s.head_norms]
        norms = s.norm * (2 * s.hidden + heads + (s.latent.norms if s.latent else 0))
        return self._on_rank(tensor, split) + whole + norms

    @property
    def matrices(self) -> int:
        """Number of elements of the linear layers' weights, without those of a mixture."""
        return sum(inputs * outputs for inputs, outputs in self._linear.values())

    def _on_rank(self, tensor: int, rest: int = 0) -> int:
        """Return the part of these weights that a rank of a tensor-parallel group has, with its part of `rest`: all of
        latent attention, which is not split."""
        whole = sum(inputs * outputs for inputs, outputs in self.sizes.attention.values()) if self.sizes.latent else 0
        return whole - (whole - self.matrices - rest) // tensor

    @property
    def cost(self) -> float:
        """Multiplications of a token with parameters, as `atoll.runtime.models.weigh_blocks` counts them."""
        mixture = self._mixture(Use(samples=1, sequence=1))
        if mixture is None:
            return float(self.matrices)
        experts, m = mixture.elements, mixture.mixture
        biases = experts.parameters - experts.matrices
        router = m.experts * self.sizes.hidden
        return self.matrices + mixture.beside.matrices + router + experts.matrices * m.chosen / m.experts + biases

    @property
    def _weights(self) -> Iterator[Weight]:
        """The linear layers' weights: fused ones of GPT-2, whose rows are inputs."""
        s = self.sizes
        if not s.implementation.waits:
            yield from (Weight(shape, waits=False) for shape in self._linear.values())
            return
        if s.latent is None:
            shapes = (s.queries, s.hidden), (s.keys, s.hidden), (s.keys, s.hidden), (s.hidden, s.queries)
            yield from map(Weight, shapes)
        else:
            yield from (Weight((outputs, inputs), is_split=False) for inputs, outputs in s.attention.values())
        if s.mixture is None:
            yield from [Weight((s.ffn, s.hidden))] * (s.up // s.ffn)
            yield Weight((s.hidden, s.ffn))

    @property
    def _linear(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers before they are split."""
        s = self.sizes
        return s.attention | ({} if s.mixture else {"up": (s.hidden, s.up), "down": (s.ffn, s.hidden)})

    def _products(self, use: Use) -> dict[str, Product]:
        """The linear layers."""
        by_inputs = () if self._is_gathered else ("out", "down")
        found = {}
        for name, (inputs, outputs) in self._linear.items():
            ranks = self._heads_over(use) if name in self.sizes.attention and self.sizes.latent else use.tensor
            own = (inputs // ranks, outputs) if name in by_inputs else (inputs, -(-outputs // ranks))
            layers = [(own[1] * each // outputs, own[0]) for each in outputs_of(self.sizes, name, outputs)]
            found[name] = multiplied(Product(use.tokens, *own), layers, use.products)
        return found

    @property
    def _is_gathered(self) -> bool:
        return self.sizes.implementation.splits == "gathered"

    def _inside(self, use: Use) -> int:
        """Return the number of ranks over which the feed-forward's width is split, between the linear layers."""
        return 1 if self._is_gathered else use.tensor

    def _heads_over(self, use: Use) -> int:
        """Return the number of ranks over which heads are split, between the linear layers."""
        return 1 if self.sizes.latent else self._inside(use)

    def _mixture(self, use: Use) -> MixtureWork | None:
        mixture = self.sizes.mixture
        return None if mixture is None else MixtureWork(mixture, self.sizes, use)

    def _multiply(self, use: Use, name: str) -> Iterator[Kernel]:
        """Return the kernels of a linear layer's forward."""
        yield self._products(use)[name]
        yield from _gathered(self.sizes, use, "all-gather", self._linear[name][1])

    def _multiply_back(self, use: Use, name: str) -> Iterator[Kernel]:
        """Return the kernels of the gradient of a linear layer's input."""
        yield self._products(use)[name].swapped
        yield from _gathered(self.sizes, use, "all-reduce", self._linear[name][0])

    def _scores(self, use: Use) -> Iterator[Kernel]:
        """Return the kernels of attention between its two linear layers, forward."""
        s, i = self.sizes, use.item
        heads, length, keys = own_heads(self.sizes, use, self._heads_over(use)), use.queries, use.keys
        value_width = s.head_width if s.latent is None else s.latent.values
        if not s.is_eager(use):
            read = (s.keys + s.values) * repeats(self.sizes, use, self._heads_over(use)) * keys // length
            width = (s.queries + read + s.attended) // self._heads_over(use)
            pairs = use.causal_pairs if s.causal else length * keys
            yield FusedAttention(2.0 * heads * pairs * (s.head_width + value_width), i * use.tokens * width)
            return
        scores = heads * length * keys
        is_taken = s.implementation.runtime != "megatron" or s.head_width * i % _ALIGNED == 0
        share = 1.0 if is_taken else UNALIGNED
        yield Product(length, s.head_width, keys, heads, share)
        yield _softmax(s.implementation, scores, heads, i)
        if s.dropout:
            yield Pass((2.0 * i + 1) * scores)
        yield Product(length, keys, value_width, heads, share)

    def _forward(self, use: Use) -> Iterator[Kernel]:
        s, i, tokens = self.sizes, use.item, use.tokens
        hidden = tokens * s.hidden // use.parts
        masks = hidden if s.dropout else 0
        yield Pass(2.0 * i * hidden)
        *entering, out = s.attention
        if self._heads_over(use) > 1 or use.parts > 1:
            yield from self._enter(use)
        for name in entering:
            yield from self._multiply(use, name)
        if s.latent is not None:
            yield Pass(2.0 * i * tokens * (s.latent.norms + s.keys), 3)
        if s.rotary:
            yield Pass(2.0 * i * tokens * (s.queries + s.keys) / self._heads_over(use))
        yield from exchanged(self.sizes, use, self._heads_over(use))
        yield from self._scores(use)
        yield from exchanged(self.sizes, use, self._heads_over(use), is_back=True)
        yield from self._multiply(use, out)
        if self._heads_over(use) > 1:
            yield from self._leave(use)
        yield Pass(3.0 * i * hidden + masks)
        yield Pass(2.0 * i * hidden)
        if (mixture := self._mixture(use)) is not None:
            yield from mixture.forward()
        else:
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
        if (mixture := self._mixture(use)) is not None:
            yield from mixture.backward()
        else:
            yield from self._enter(use)
            yield from self._multiply_back(use, "down")
            yield Pass(i * tokens * (2 * s.up + s.ffn) / self._inside(use))
            yield from self._multiply_back(use, "up")
            yield from self._leave(use)
        yield Pass(4.0 * i * hidden)
        if s.dropout:
            yield Pass(2.0 * i * hidden + masks)
        *entering, out = s.attention
        if self._heads_over(use) > 1:
            yield from self._enter(use)
        yield from self._multiply_back(use, out)
        yield from exchanged(self.sizes, use, self._heads_over(use), is_back=True)
        yield from self._scores_backward(use)
        yield from exchanged(self.sizes, use, self._heads_over(use))
        if s.rotary:
            yield Pass(2.0 * i * tokens * (s.queries + s.keys) / self._heads_over(use))
        if s.latent is not None:
            yield Pass(4.0 * i * tokens * (s.latent.norms + s.keys), 3)
        for name in reversed(entering):
            yield from self._multiply_back(use, name)
        if self._heads_over(use) > 1:
            yield from self._leave(use)
        yield Pass(4.0 * i * hidden)

    def _scores_backward(self, use: Use) -> Iterator[Kernel]:
        i = use.item
        for kernel in self._scores(use):
            match kernel:
                case FusedAttention():
                    yield FusedAttention(FLASH_BACKWARD * kernel.flops, 2.0 * kernel.nbytes)
                case Product():
                    yield kernel.swapped
                    yield kernel.learnt
                case Pass():
                    scores = own_heads(self.sizes, use, self._heads_over(use)) * use.queries * use.keys
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
        s, i, tokens = self.sizes, use.item, use.tokens
        hidden = tokens * s.hidden // use.parts
        norm = partial(s.implementation.saved_by_norm, use)
        is_post = s.order == "post"
        yield Saved("input", i * hidden, "W" if is_post else "I")
        if not is_post:
            yield from norm("norm", hidden, s.hidden, is_kept=True)
            yield Saved("qkv's input", i * hidden, "W")
        yield from self._saved_by_attention(use)
        yield Saved("out's input", i * tokens * s.attended // self._heads_over(use), "W")
        if s.dropout:
            yield Saved("dropout", hidden, "I")
        yield from norm("feed-forward's norm", hidden, s.hidden, is_kept=s.order == "parallel")
        yield from self._saved_by_feed_forward(use)
        if s.dropout:
            yield Saved("feed-forward's dropout", hidden, "I")
        if is_post:
            yield from norm("last norm", hidden, s.hidden, is_kept=False)

    def _saved_by_feed_forward(self, use: Use) -> Iterator[Saved]:
        """Return its input, and the tensors saved between its two linear layers or by a mixture."""
        s, i, tokens, t = self.sizes, use.item, use.tokens, self._inside(use)
        hidden = tokens * s.hidden // use.parts
        if (mixture := self._mixture(use)) is not None:
            yield Saved("up's input", i * hidden, "W" if s.mixture and s.mixture.shared else "I")
            yield from mixture.saved()
            return
        yield Saved("up's input", i * hidden, "W")
        yield Saved("activation's input", i * tokens * s.up // t, "I")
        if s.implementation.results:
            yield Saved("activation's results", s.implementation.results * i * tokens * s.ffn // t, "I")
        yield Saved("down's input", i * tokens * s.ffn // t, "W")

    def _saved_by_attention(self, use: Use) -> Iterator[Saved]:
        """Return the tensors saved between the linear layers of attention."""
        s, i, tokens, t = self.sizes, use.item, use.tokens, self._heads_over(use)
        how, is_eager = s.implementation, s.is_eager(use)
        for name, width in s.latent.normalized if s.latent else ():
            yield from how.saved_by_norm(use, f"norm of {name}", tokens * width, width, is_kept=False)
            yield Saved(f"{name}, normalized", i * tokens * width, "W")
        if s.head_norms:
            for name, width in (("queries", s.queries), ("keys", s.keys)):
                rows = s.head_width if s.head_norms == "head" else width // t
                yield from how.saved_by_norm(use, f"{name}' norm", tokens * width // t, rows, is_kept=False)
        if how.keeps_angles:
            yield Saved("rotary angles", 2 * i * -(-use.queries // use.divide) * s.head_width, "I")
        keys = s.queries if is_eager and how.repeats_keys else s.keys * repeats(self.sizes, use, self._heads_over(use))
        if use.slice is not None:
            yield from saved_of_slice(s, use, t)
        else:
            yield Saved("queries and keys", i * tokens * (s.queries + keys) // t, "I")
        values = s.queries + 2 * s.keys if _is_slice(self.sizes, use) and use.divide == 1 else keys
        if s.latent is not None:
            values = s.attention["keys and values"][1]
        if use.slice is None:
            yield Saved("values", i * tokens * values // t, "I")
        # Kernels write in the queries' memory order: head by head, the output is copied.
        # An exchange copies it as well.
        if not is_eager and (use.divide > 1 or (how.heads == "outer" and (i < 4 or how.copies == "all"))):
            yield Saved("attention's output", i * tokens * s.attended // t, "I")
        scores = own_heads(self.sizes, use, self._heads_over(use)) * use.queries * use.keys
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
        s, i, tokens, t = self.sizes, use.item, use.tokens, self._heads_over(use)
        if self._is_gathered and use.tensor > 1:  # parts are kept, and gathered again
            products = self._products(use).items()
            return tuple(Saved(f"{name}'s product", int(i * tokens * each.columns), "I") for name, each in products)
        hidden = i * tokens * s.hidden // use.parts
        queries, keys = i * tokens * s.queries // t, i * tokens * s.keys // t
        is_copied = _is_copied(self.sizes, use) or use.divide > 1
        if _is_slice(self.sizes, use):
            heads = [Saved("product of values" if is_copied else "values", queries + 2 * keys, "I")]
        else:
            changed = s.rotary or is_copied
            heads = [Saved("product of queries and keys" if changed else "queries and keys", queries + keys, "I")]
            if s.head_norms:
                heads = [Saved("queries' norm's input", queries, "I"), Saved("keys' norm's input", keys, "I")]
            heads.append(Saved("product of values" if is_copied else "values", keys, "I"))
        if s.latent is not None:
            linear = list(s.attention.items())[:-1]
            heads = [Saved("values" if "and" in name else f"{name}' product", i * tokens * outputs, "I")
                     for name, (_, outputs) in linear]  # fmt: skip
        if (mixture := self._mixture(use)) is not None:
            return (*heads, Saved("out's product", hidden, "I"), *mixture.outputs())
        return (
            *heads,
            Saved("out's product", hidden, "I"),
            Saved("activation's input", i * tokens * s.up // self._inside(use), "I"),
            Saved("down's product", hidden, "I"),
        )

    def _gradients(self, use: Use) -> tuple[Saved, ...]:
        """Return the gradients of the linear layers' outputs, which I computes and W needs."""
        s, i, tokens, t = self.sizes, use.item, use.tokens, self._heads_over(use)
        out = (Saved("out's gradient", i * tokens * s.hidden // use.parts, "W"),)
        mixture = self._mixture(use)
        feed_forward = (
            Saved("down's gradient", i * tokens * s.hidden // use.parts, "W"),
            Saved("up's gradient", i * tokens * s.up // self._inside(use), "W"),
        )
        entering = list(s.attention.items())[:-1]
        return (
            *(feed_forward if mixture is None else mixture.gradients()),
            # The gradients of two branches from one residual are one tensor.
            *(() if s.order == "parallel" else out),
            *(Saved(f"{name}'s gradient", i * tokens * outputs // t, "W") for name, (_, outputs) in entering),
        )


_OF_SCORES = ("softmax", "softmax in fp32", "attention's dropout", "dropped softmax", "log-sums")
"""Tensors that selective recompute does not keep under Megatron."""


def _gathered(sizes: Transformer, use: Use, kind: Literal["all-gather", "all-reduce"], width: int) -> Iterator[Kernel]:
    """Yield the collective of a linear layer that is split by its outputs alone."""
    if use.tensor > 1 and sizes.implementation.splits == "gathered":
        yield Exchange(kind, use.tokens * width * use.item)


def _is_copied(sizes: Transformer, use: Use) -> bool:
    """True if attention saves copies: eager attention, whose product needs samples and heads to be adjacent in
    memory."""
    is_repeated = sizes.implementation.repeats_keys and sizes.queries != sizes.keys
    return sizes.is_eager(use) and (use.samples > 1 or is_repeated)


def _is_slice(sizes: Transformer, use: Use) -> bool:
    """Return True if values are a part of a larger product, which is saved as a whole."""
    return sizes.implementation.is_fused and sizes.rotary and not _is_copied(sizes, use)


def _softmax(how: Implementation, scores: int, heads: int, item: int) -> Pass:
    """Return the kernels of scaled, masked scores and their softmax. Megatron fuses all of it if samples times heads
    are a multiple of four (`FusedScaleMaskSoftmax.is_kernel_available`); otherwise it casts, scales, masks, divides and
    casts back, in fp32."""
    is_fused = how.runtime != "megatron" or heads % 4 == 0
    return Pass(2.0 * item * scores) if is_fused else Pass((2.0 * item + 32.0) * scores, 5)
