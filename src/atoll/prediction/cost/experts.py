"""A mixture of experts by formula: router, exchange of rows, products of the experts, experts that all tokens share.

A token's hidden state is a row for each expert that it takes. Experts are divided over e t ranks: each sends
T k / t rows to the e ranks that have their experts, or with `sequence_parallel` to all, and receives as many on
average. What is computed and saved is that of `atoll.runtime.experts.division`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from atoll.base.errors import ConfigError
from atoll.prediction.cost.float8 import multiplied
from atoll.prediction.cost.kernels import Exchange, Kernel, Pass, Product
from atoll.prediction.cost.work import Elements, Saved, Use, Weight

if TYPE_CHECKING:
    from atoll.prediction.cost.transformer import Transformer

_EXCHANGES = 2
"""Exchanges of a forward: rows to their experts, and the results back."""

_INDEX = 8
"""Bytes of an index."""

_SORTING = 6
"""Kernels that sort a table of indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Experts in place of the feed-forward of layers.

    chosen: experts that a token takes, of `experts`.  ffn: inner width of an expert.  shared: inner width of what every
    token takes besides, 0 if nothing.  weighs_shared: whether a gate weighs that.  dense: layers with a feed-forward
    instead.  biases: whether router and experts have biases.  has_precise_router: whether it multiplies in fp32.
    repeats: whether each token has a row for every expert, most of them zero, as in Llama 4.
    is_transposed: whether the weights of an expert have a row for each input.
    """

    experts: int
    chosen: int
    ffn: int
    shared: int = 0
    weighs_shared: bool = False
    dense: tuple[int, ...] = ()
    biases: bool = False
    has_precise_router: bool = False
    repeats: bool = False
    is_transposed: bool = False

    @property
    def break_even(self) -> float:
        """Tokens of a rank's microbatch below which an exchange of rows sends less than a gather of experts.

        Of T tokens each layer exchanges k rows of h values four times. Gathers for forward and backward and a reduction
        send the 3 h I E values of all experts three times: 4 T k h < 9 h I E.
        """
        return 9 * self.ffn * self.experts / (4 * self.chosen)


@dataclass(frozen=True, slots=True)
class MixtureWork:
    """The work of a layer's mixture under a use. Raises ConfigError if the ranks cannot divide the experts."""

    mixture: Mixture
    sizes: Transformer
    use: Use

    def __post_init__(self) -> None:
        use, mixture = self.use, self.mixture
        if mixture.experts % use.expert_parts:
            raise ConfigError(
                f"{mixture.experts} experts cannot be divided evenly over expert x tensor = {use.expert} x "
                f"{use.tensor} ranks"
            )
        if mixture.shared % use.tensor:
            raise ConfigError(f"shared experts of width {mixture.shared} cannot be split over {use.tensor} ranks")

    # ---- sizes

    @property
    def here(self) -> int:
        """Number of experts of a rank."""
        return self.mixture.experts // self.use.expert_parts

    @property
    def tokens(self) -> int:
        """Tokens that this rank routes."""
        return self.use.tokens // self.use.parts

    @property
    def sent(self) -> float:
        """Rows of a rank's tokens, among those that are of its tensor-parallel rank."""
        return _whole(self.use.tokens * self.mixture.chosen / self.use.tensor)

    @property
    def rows(self) -> float:
        """Rows that the fullest rank computes."""
        return self.sent if self.use.exchanging == 1 else _whole(self.sent * self.use.imbalance)

    @property
    def _up(self) -> int:
        """Outputs of the first product of an expert."""
        return self.mixture.ffn * (2 if self.sizes.gated else 1)

    @property
    def _shared(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers that all tokens take, on a rank."""
        m, s = self.mixture, self.sizes
        width = m.shared // self.use.tensor
        if not width:
            return {}
        found = {"shared up": (s.hidden, width * (2 if s.gated else 1)), "shared down": (width, s.hidden)}
        return found | ({"shared gate": (s.hidden, 1)} if m.weighs_shared else {})

    @property
    def elements(self) -> Elements:
        """Elements of a rank's experts."""
        matrices = self.here * self.sizes.hidden * (self._up + self.mixture.ffn)
        biases = self.here * (self._up + self.sizes.hidden) if self.mixture.biases else 0
        return Elements(matrices + biases, matrices)

    @property
    def beside(self) -> Elements:
        """Elements of the router and of shared experts."""
        matrices = sum(inputs * outputs for inputs, outputs in self._shared.values())
        router = self.mixture.experts * (self.sizes.hidden + (1 if self.mixture.biases else 0))
        return Elements(matrices + router, matrices)

    @property
    def linear(self) -> Iterator[Weight]:
        """The weights of the router, of a rank's experts and of shared ones."""
        m, h = self.mixture, self.sizes.hidden
        yield Weight((m.experts, h), waits=False, is_split=False)
        for rows, columns in ((self._up, h), (h, m.ffn)):
            yield Weight((self.here, *((columns, rows) if m.is_transposed else (rows, columns))))
        if m.shared:
            yield from [Weight((m.shared, h))] * (2 if self.sizes.gated else 1)
            yield Weight((h, m.shared))
        if m.weighs_shared:
            yield Weight((1, h), is_split=False)

    # ---- kernels

    @property
    def products(self) -> tuple[Product, ...]:
        """Products of linear layers."""
        found = []
        for name, (inputs, outputs) in self._shared.items():
            each = 2 if name == "shared up" and self.sizes.gated else 1
            layers = [(outputs // each, inputs)] * each
            found.append(multiplied(Product(self.use.tokens, inputs, outputs), layers, self.use.products))
        return tuple(found)

    @property
    def _experts(self) -> tuple[Product, Product]:
        each, h = _whole(self.rows / self.here), self.sizes.hidden
        return Product(each, h, self._up, self.here), Product(each, self.mixture.ffn, h, self.here)

    @property
    def weights(self) -> tuple[Kernel, ...]:
        """Kernels of W of the experts."""
        return tuple(product.learnt for product in reversed(self._experts))

    @property
    def exchanges(self) -> int:
        """How often a forward exchanges rows."""
        return _EXCHANGES if self.use.exchanging > 1 else 0

    @property
    def _router(self) -> Product:
        return Product(self.tokens, self.sizes.hidden, self.mixture.experts)

    def forward(self) -> Iterator[Kernel]:
        """Yield the kernels of F, from the normalized hidden state to the sum of both branches."""
        m, i, h, tokens = self.mixture, self.use.item, self.sizes.hidden, self.tokens
        up, down = self._experts
        yield self._router
        yield Pass(16.0 * tokens * m.experts, 3)
        yield Pass(4.0 * _INDEX * tokens * m.chosen, _SORTING)
        yield Pass(2.0 * i * self.sent * h)
        yield from self._repeated()
        yield from self._exchange()
        yield up
        yield from self._biased(self._up)
        yield Pass(i * self.rows * (self._up + m.ffn))
        yield down
        yield from self._biased(h)
        yield from reversed(list(self._exchange()))
        yield Pass(i * (5.0 * self.sent + tokens) * h, 3)
        yield from _summed(self.use, tokens * h)
        yield from self._shared_forward()

    def backward(self) -> Iterator[Kernel]:
        """Yield the kernels of I, in which the gradient of the router's weight is computed as well."""
        m, i, h, tokens = self.mixture, self.use.item, self.sizes.hidden, self.tokens
        up, down = self._experts
        yield from self._shared_backward()
        yield Pass(i * (7.0 * self.sent + tokens) * h, 4)
        yield from self._exchange()
        yield from self._biased(h)
        yield down.swapped
        yield Pass(i * self.rows * (2 * self._up + m.ffn))
        yield from self._biased(self._up)
        yield up.swapped
        yield from reversed(list(self._exchange()))
        yield Pass(i * (2.0 * self.sent + tokens) * h)
        yield from self._repeated()
        yield from _summed(self.use, tokens * h)
        yield from _summed(self.use, tokens * m.chosen)
        yield Pass(12.0 * tokens * m.experts, 2)
        yield self._router.learnt
        yield self._router.swapped

    def _exchange(self) -> Iterator[Kernel]:
        """Yield rows to the ranks of their experts, and a pass that sorts them there; nothing if each has them all."""
        if self.use.exchanging > 1:
            nbytes = self.use.item * self.rows * self.sizes.hidden
            yield Exchange("all-to-all", nbytes, "expert")
            yield Pass(2.0 * nbytes)

    def _repeated(self) -> Iterator[Kernel]:
        if self.mixture.repeats:
            yield Pass(6.0 * self.use.item * self.mixture.experts * self.tokens * self.sizes.hidden, 4)

    def _biased(self, width: int) -> Iterator[Kernel]:
        if self.mixture.biases:
            yield Pass(2.0 * self.use.item * self.rows * width)

    def _shared_forward(self) -> Iterator[Kernel]:
        i, h, tokens = self.use.item, self.sizes.hidden, self.use.tokens
        if not self.products:
            return
        up, down, *gate = self.products
        yield from _spread(self.use, "all-gather", h)
        yield up
        yield Pass(i * tokens * (up.columns + down.inner))
        yield from (down, *gate)
        yield from _summed(self.use, tokens * h)
        yield from _spread(self.use, "reduce-scatter", h)
        yield Pass(3.0 * i * self.tokens * h, 1 + len(gate))

    def _shared_backward(self) -> Iterator[Kernel]:
        i, h, tokens = self.use.item, self.sizes.hidden, self.use.tokens
        if not self.products:
            return
        up, down, *gate = self.products
        yield from (each.swapped for each in gate)
        yield from _spread(self.use, "all-gather", h)
        yield down.swapped
        yield Pass(i * tokens * (2 * up.columns + down.inner))
        yield up.swapped
        yield from _summed(self.use, tokens * h)
        yield from _spread(self.use, "reduce-scatter", h)
        yield Pass(3.0 * i * self.tokens * h)

    # ---- saved tensors

    def saved(self) -> Iterator[Saved]:
        """Yield the tensors that F saves, without its input."""
        m, i, tokens = self.mixture, self.use.item, self.tokens
        results, sent, rows = self.sizes.implementation.results, self.sent, self.rows
        if m.has_precise_router and i < 4:
            yield Saved("router's input in fp32", 4 * (tokens + m.experts) * self.sizes.hidden, "I")
        yield Saved("router's scores", 4 * tokens * m.experts, "I")
        yield Saved("router's weights", (_INDEX + 8) * tokens * m.chosen, "I")
        yield Saved("order of rows", int(3 * _INDEX * sent + i * sent), "I")
        if m.repeats:
            yield Saved("rows of all experts", i * m.experts * tokens * self.sizes.hidden, "I")
        if self.use.exchanging > 1:
            yield Saved("order by expert", int(2 * _INDEX * rows), "I")
        yield Saved("experts' input", int(i * rows * self.sizes.hidden), "W", of_experts=True)
        yield Saved("experts' activation's input", int(i * rows * self._up), "I")
        if results:
            yield Saved("experts' activation's results", int(results * i * rows * m.ffn), "I")
        yield Saved("experts' down's input", int(i * rows * m.ffn), "W", of_experts=True)
        yield Saved("experts' output", int(i * sent * self.sizes.hidden), "I")
        if not self._shared:
            return
        width, tokens = self._shared["shared down"][0], self.use.tokens
        yield Saved("shared activation's input", i * tokens * self._shared["shared up"][1], "I")
        if results:
            yield Saved("shared activation's results", results * i * tokens * width, "I")
        yield Saved("shared down's input", i * tokens * width, "W")
        if m.weighs_shared:
            yield Saved("shared output", i * tokens * (self.sizes.hidden + 1), "I")

    def outputs(self) -> Iterator[Saved]:
        """Yield the outputs of the products of linear layers, which selective recompute keeps."""
        i, tokens = self.use.item, self.use.tokens
        for name, (_, outputs) in self._shared.items():
            known = "shared activation's input" if name == "shared up" else f"{name}'s product"
            yield Saved(known, i * tokens * outputs, "I")

    def gradients(self) -> Iterator[Saved]:
        """Yield what I computes for W."""
        i, h, tokens = self.use.item, self.sizes.hidden, self.use.tokens
        yield Saved("experts' down's gradient", int(i * self.rows * h), "W", of_experts=True)
        yield Saved("experts' up's gradient", int(i * self.rows * self._up), "W", of_experts=True)
        for name, (_, outputs) in self._shared.items():
            yield Saved(f"{name}'s gradient", i * tokens * outputs, "W")


def _summed(use: Use, elements: int) -> Iterator[Kernel]:
    """Yield the sum over a tensor-parallel group whose ranks have the same tokens."""
    if use.tensor > use.parts:
        yield Exchange("all-reduce", use.item * elements)


def _spread(use: Use, kind: Literal["all-gather", "reduce-scatter"], hidden: int) -> Iterator[Kernel]:
    """Yield the traffic around shared experts, which need the tokens of the whole group."""
    if use.parts > 1:
        yield Exchange(kind, use.item * use.tokens * hidden)


def _whole(number: float) -> float:
    """Return an integer if it is one, so that bytes and operations are exact."""
    return int(number) if number == int(number) else number
