"""Units, work, messages and bytes that a split vocabulary adds to each pipeline rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from atoll.base.errors import PlanError
from atoll.plans.ir import Action, Schedule, insert_vocabulary
from atoll.plans.ir.residency import Slices as SliceBytes
from atoll.plans.ir.residency import slices_freed
from atoll.plans.layouts import ITEM_BYTES, Box
from atoll.plans.plan import Plan
from atoll.prediction.cost.work import Use, VocabularyRows, Work
from atoll.program import EMBEDDING, HEAD, Do, Operation, Sliced

At = tuple[Operation, int]
"""An instruction of one stage; those of a slice have its pipeline rank as their stage."""


@dataclass(frozen=True)
class Slices:
    """Slices of the vocabulary on the pipeline ranks of a plan, under one use. Empty for a vocabulary that is not
    split."""

    plan: Plan
    use: Use

    @property
    def works(self) -> tuple[Work, ...]:
        """Work of the largest slices of embedding and head."""
        return ()

    @property
    def units(self) -> tuple[int, int] | tuple[None, None]:
        """Units of embedding and head; a single unit if they are tied. They precede all other units."""
        return None, None

    @property
    def named(self) -> dict[str, int]:
        """The same by the names that rows have of them, as in `RankShape.slices`."""
        return {name: unit for name, unit in zip((EMBEDDING, HEAD), self.units, strict=True) if unit is not None}

    def elements(self, rank: int) -> tuple[int, ...]:
        """Return the elements of each of these units on a pipeline rank."""
        return ()

    def insert(self, costs: Sequence[float]) -> Schedule:
        """Return the plan's schedule with L, S, T and G. costs: of the blocks, as in `Workload`."""
        return self.plan.schedule

    @property
    def resident(self) -> SliceBytes | None:
        """Bytes of the largest slices."""
        return None

    def freed(self, row: Sequence[Action], sizes: Mapping[int, float]) -> frozenset[Action] | None:
        """Return the look-ups and scores of a list of compute actions after which a slice is freed. sizes: bytes of the
        rank's stages."""
        return None

    def sent(self, rank: int) -> Mapping[At, float]:
        """Return the bytes that a pipeline rank sends to slices and from its own."""
        return {}

    def held(self, rank: int) -> Mapping[At, Counter[str]]:
        """Return the changes of memory by instruction of a pipeline rank, by component of `Working`. `passing`
        ends with the instruction."""
        return {}


@dataclass(frozen=True)
class VocabularySlices(Slices):
    """Slices of a split vocabulary. The largest one represents all of them, except in `elements`."""

    vocabulary: VocabularyRows

    def __post_init__(self) -> None:
        mesh, rows = self.plan.mesh, self.vocabulary.rows
        if self._rows * (mesh.pipeline * mesh.tensor - 1) >= rows:
            raise PlanError(
                f"vocabulary_parallel cannot split {rows} rows: one of {mesh.pipeline * mesh.tensor} ranks is left "
                "without any. Turn it off"
            )

    @cached_property
    def embedding(self) -> Work:
        """F and W are L and G."""
        return self.vocabulary.embedding.work(self.use)

    @cached_property
    def head(self) -> Work:
        """F and W are S and T."""
        return self.vocabulary.head.work(self.use)

    @property
    def works(self) -> tuple[Work, Work]:
        return self.embedding, self.head

    @property
    def units(self) -> tuple[int, int]:
        return (0, 0) if self.vocabulary.is_tied else (0, 1)

    def elements(self, rank: int) -> tuple[int, ...]:
        mesh = self.plan.mesh
        rows = Box.part((self.vocabulary.rows,), 0, rank * mesh.tensor, count=mesh.pipeline * mesh.tensor).numel
        each = [work.parameters // self._rows for work in self.works]
        return (rows * max(each),) if self.vocabulary.is_tied else tuple(rows * width for width in each)

    @property
    def _rows(self) -> int:
        """Number of rows of the largest slice."""
        mesh = self.plan.mesh
        return -(-self.vocabulary.rows // (mesh.pipeline * mesh.tensor))

    def insert(self, costs: Sequence[float]) -> Schedule:
        products = 2 * self.vocabulary.rows * (self.head.matrices // self._rows)
        return insert_vocabulary(self.plan.schedule, score=products / max(sum(costs) / 3, 1.0))

    @property
    def resident(self) -> SliceBytes:
        item = ITEM_BYTES[self.plan.precision.compute]
        embedding, head = (float(item * work.parameters) for work in self.works)
        return SliceBytes(embedding, head, self.vocabulary.is_tied)

    def freed(self, row: Sequence[Action], sizes: Mapping[int, float]) -> frozenset[Action]:
        plan = self.plan
        return slices_freed(row, self.resident, sizes=sizes, residency=plan.stays, room=plan.resident)

    @property
    def _ends(self) -> tuple[int, int, int]:
        """Pipeline ranks of the first stage and of the last, and the last stage."""
        placement = self.plan.schedule.placement
        last = placement.stages - 1
        return placement.rank_of(0), placement.rank_of(last), last

    @property
    def _others(self) -> int:
        return self.plan.mesh.pipeline - 1

    @property
    def copies(self) -> int:
        """Number of messages by which an end gives all slices the same: one for each other rank."""
        return self._others

    def sent(self, rank: int) -> dict[At, float]:
        last, copies = self._ends[-1], float(self.copies)
        hidden = self.embedding.wire
        return {
            (Sliced.SEND_L, rank): float(hidden),
            (Do.SEND_F, last): copies * hidden,
            (Sliced.SEND_S, rank): float(self.head.wire),
            (Sliced.SEND_T, last): copies * self._precise * self.use.tokens,
            (Do.SEND_B, 0): copies * hidden,
        }

    @property
    def _precise(self) -> int:
        """Bytes of sums and losses."""
        return max(4, self.use.item)

    def held(self, rank: int) -> Mapping[At, Counter[str]]:
        """Count received messages from their POST on."""
        first, end, last = self._ends
        hidden, answer = self.embedding.wire, self.head.wire
        found: defaultdict[At, Counter[str]] = defaultdict(Counter)

        def holds(component: str, nbytes: int, *, since: At, until: At) -> None:
            found[since][component] += nbytes
            found[until][component] -= nbytes

        looked_up, scored = (Sliced.L, rank), (Sliced.S, rank)
        added = (Do.RECV_F, 0) if rank == first else (Sliced.SEND_L, rank)
        combined = (Do.RECV_B, last) if rank == end else (Sliced.SEND_S, rank)
        owed = (Do.SEND_B, 0) if rank == first else (Sliced.POST_G, rank)
        holds("activations", self.embedding.kept, since=looked_up, until=added)
        holds("activations", self.head.kept, since=scored, until=(Sliced.T, rank))
        holds("activations", answer, since=scored, until=combined)
        holds("pending", hidden, since=owed, until=(Sliced.G, rank))
        if rank == first:
            holds("buffers", self._others * hidden, since=(Do.POST_F, 0), until=(Do.RECV_F, 0))
        if rank == end:
            holds("buffers", self._others * answer, since=(Do.POST_B, last), until=(Do.RECV_B, last))
            holds("activations", hidden, since=(Do.RECV_B, last), until=(Do.START_I, last))
            found[Do.RECV_B, last]["passing"] = 2 * self._precise * hidden // self.use.item
        else:
            holds("buffers", hidden, since=(Sliced.POST_S, rank), until=scored)
        found[scored]["passing"] = self.head.peak
        found[Sliced.T, rank]["passing"] = self.head.kept + sum(each.nbytes for each in self.head.pending)
        return found
