"""A workload: the work of a model's blocks on a device.

A `Use` describes how the model is executed, and a block returns its `Work` under that use: parameters, kernels of F, I
and W, bytes kept between them, and bytes sent. Blocks are those of a model's adapter, including embedding and head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from atoll.plans.layouts import ITEM_BYTES, Float8
from atoll.prediction.cost.kernels import Kernel, Product

if TYPE_CHECKING:
    from atoll.prediction.cost.experts import Mixture

AttentionKind = Literal["eager", "flash"]
LossKind = Literal["eager", "fused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How a model is executed.

    samples, sequence: of one microbatch.  divide: ranks that divide each sequence.  slice: first position of the slice
    that is computed, and the position behind its last one; None: the whole sequence.
    tensor: ranks of a tensor-parallel group.  expert, imbalance: as in `MeshShape` and `Plan`.  compute: torch's name
    of the dtype of activations.  recompute: as `Plan` has it.
    attention: "eager" writes all scores to memory, "flash" none of them; None: that of a counted model, by formulas
    "flash".
    loss: "eager" keeps the logits in compute and in fp32, "fused" once.
    chunks: number of parts in which the loss is computed, each with its own part of the logits.
    products: FP8 products of the linear layers of blocks that are layers; None: they multiply in `compute`.
    """

    samples: int
    sequence: int
    divide: int = 1
    slice: tuple[int, int] | None = None
    tensor: int = 1
    expert: int = 1
    imbalance: float = 1.0
    sequence_parallel: bool = False
    compute: str = "bfloat16"
    recompute: str = "none"
    attention: AttentionKind | None = None
    loss: LossKind = "eager"
    chunks: int = 1
    products: Float8 | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of a microbatch, or of its slice, on a rank."""
        return self.samples * -(-self.queries // self.divide)

    @property
    def queries(self) -> int:
        """Positions that attend, of each sequence: those of the slice."""
        begin, end = self.slice or (0, self.sequence)
        return end - begin

    @property
    def keys(self) -> int:
        """Positions that they attend to at most: those up to the slice's end."""
        return self.sequence if self.slice is None else self.slice[1]

    @property
    def earlier(self) -> int:
        """Positions before the slice."""
        return self.keys - self.queries

    @property
    def causal_pairs(self) -> float:
        """Pairs of a position and one that it attends to, under a causal mask."""
        return self.queries * self.earlier + self.queries**2 / 2

    @property
    def item(self) -> int:
        """Bytes of an activation's element."""
        return ITEM_BYTES[self.compute]

    @property
    def parts(self) -> int:
        """Number of ranks over which tensors between the split modules are divided."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def expert_parts(self) -> int:
        """Number of ranks that divide the experts of a mixture: those of `expert`, each with its tensor-parallel
        group."""
        return self.expert * self.tensor

    @property
    def exchanging(self) -> int:
        """Number of ranks that exchange rows: those of `expert`, and with `sequence_parallel` also those of their
        tensor-parallel groups, which then have tokens of their own."""
        return self.expert * self.parts

    @property
    def groups(self) -> dict[str, int]:
        """Ranks that communicate within a block, by axis."""
        return {"tp": self.tensor, "expert": self.exchanging, "sequence": self.divide}


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that is saved for the backward. until: its last use, the loss's backward or the block's I or W.
    of_experts: whether that is the W of experts."""

    name: str
    nbytes: int
    until: Literal["loss", "I", "W"]
    of_experts: bool = False


class Elements(NamedTuple):
    """Elements of parameters: all, those whose gradients W computes in a split backward, and those that are not
    trained."""

    parameters: int = 0
    matrices: int = 0
    frozen: int = 0


NO_ELEMENTS = Elements()


class Weight(NamedTuple):
    """A trained weight that consists of matrices.

    shape: rows and columns, before a tensor-parallel group splits it; of experts, those of a rank come first.
    waits: whether W computes its gradient in a split backward.  is_split: whether a tensor-parallel group splits it.
    """

    shape: tuple[int, ...]
    waits: bool = True
    is_split: bool = True

    @property
    def is_of_experts(self) -> bool:
        """True if it has a matrix for each expert of a rank."""
        return len(self.shape) == 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of one block for one microbatch on one rank.

    parameters: elements on a rank.  matrices: those whose gradients W computes in a split backward.  added: those of
    which I adds them where they are stored.
    frozen: those that are not trained.  experts: the share of all three that is in the experts of a mixture.
    forward, backward, weights: kernels of F, of I and of W. Recomputing is part of `backward`.
    expert_weights: the kernels of W that are of experts.
    exchanges: how often a forward exchanges rows with the ranks that divide the experts, or heads for positions with
    those that divide sequences.
    saved: from F on.  pending: computed by I for W, the gradients of outputs of linear layers.
    again: saved by a recomputed forward within the block's I.  peak: temporary bytes within an operation.
    loss: temporary bytes in the loss's backward, before the block's I; in it, if the loss is computed in chunks.
    wire: bytes of the output, sent if the next block is on another stage.
    keys: of a slice, bytes of keys and values of the whole sequences, from the F of their first slice to its I.
    linear: the trained weights that consist of matrices, in order; known of blocks between the first and the last.
    """

    parameters: int
    matrices: int
    added: int = 0
    frozen: int = 0
    experts: Elements = NO_ELEMENTS
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    weights: tuple[Kernel, ...]
    expert_weights: tuple[Kernel, ...] = ()
    exchanges: int = 0
    saved: tuple[Saved, ...]
    pending: tuple[Saved, ...] = ()
    again: tuple[Saved, ...] = ()
    peak: int = 0
    loss: int = 0
    wire: int = 0
    keys: int = 0
    linear: tuple[Weight, ...] = ()

    @property
    def kept(self) -> int:
        """Bytes kept from F to I."""
        return sum(each.nbytes for each in self.saved)

    @property
    def kept_for_loss(self) -> int:
        """Part of them that is freed after the loss's backward."""
        return sum(each.nbytes for each in self.saved if each.until == "loss")

    @property
    def kept_for_weights(self) -> int:
        """Bytes kept from I to W."""
        return sum(each.nbytes for each in self._until_weights)

    @property
    def kept_for_experts(self) -> int:
        """Part of them that the W of experts frees."""
        return sum(each.nbytes for each in self._until_weights if each.of_experts)

    @property
    def _until_weights(self) -> Iterator[Saved]:
        return (each for each in (*self.saved, *self.again, *self.pending) if each.until == "W")


class BlockOf(Protocol):
    """A block of a workload."""

    @property
    def name(self) -> str:
        """Name in the model."""

    def work(self, use: Use) -> Work:
        """Return the work under a use."""


@dataclass(frozen=True, slots=True)
class VocabularyRows:
    """Rows of embedding and head, if they are split over the ranks of a pipeline and belong to no block.

    rows: of each table, one for each id.  embedding, head: the largest slice of each. Their F and W are L and G, and S
    and T; they have no I.  is_tied: whether one table is both.
    """

    rows: int
    embedding: BlockOf
    head: BlockOf
    is_tied: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """A model: its blocks in order.

    layers: the blocks that are layers.  shared: elements that the first block and the last share.
    trains_shared: whether these are trained.
    joined: blocks that stay on the stage of the block before them.  costs: for each block, the multiplications of a
    token with its parameters, by which stages are balanced; by default three for each element of `matrices`.
    vocabulary: the rows of which each pipeline rank has a slice, if they are split.  split: returns the same model with
    its vocabulary split over a number of pipeline ranks; None if those costs are unknown.
    mixture: the experts of its layers, if they are known.
    """

    name: str
    blocks: Sequence[BlockOf]
    layers: range
    shared: int = 0
    trains_shared: bool = True
    joined: frozenset[int] = frozenset()
    costs: tuple[float, ...] = ()
    vocabulary: VocabularyRows | None = None
    split: Callable[[int], Workload] | None = field(default=None, compare=False)
    mixture: Mixture | None = None

    @property
    def parameters(self) -> int:
        """Number of elements of all blocks; shared ones count once. Those of a split vocabulary are not counted."""
        return sum(work.parameters for work in self._works) - self.shared

    @property
    def frozen(self) -> int:
        """Number of elements that are not trained."""
        return sum(work.frozen for work in self._works)

    @property
    def experts(self) -> int:
        """Number of experts of a layer; 0 if there are none, or if they are not known."""
        return 0 if self.mixture is None else self.mixture.experts

    @property
    def active(self) -> int:
        """The same with those experts alone that a token takes."""
        if self.mixture is None:
            return self.parameters
        idle = self.mixture.experts - self.mixture.chosen
        return self.parameters - sum(work.experts.parameters for work in self._works) * idle // self.mixture.experts

    @property
    def _works(self) -> Iterator[Work]:
        return (block.work(Use(samples=1, sequence=1)) for block in self.blocks)

    def flops(self, use: Use) -> float:
        """Operations of one microbatch, forward and backward, without recompute: the count of MFU.

        All products of matrices and all scores of attention, masked or not: for a decoder of N parameters in matrices,
        l layers and hidden size h that is 6 N + 12 l h s per token at sequence length s (PaLM, arXiv 2204.02311,
        appendix B). The head's matrix is part of N, the embedding's rows are not. A frozen matrix needs no gradient.
        """
        plain = replace(
            use,
            divide=1,
            slice=None,
            tensor=1,
            expert=1,
            sequence_parallel=False,
            recompute="none",
            attention="eager",
            loss="eager",
            chunks=1,
        )
        works = (block.work(plain) for block in self.blocks)
        kernels = (kernel for work in works for kernel in (*work.forward, *work.backward, *work.weights))
        return sum(kernel.flops for kernel in kernels if isinstance(kernel, Product))
