"""A schedule: placement + the ordered actions of every rank. Immutable, and validated when built."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from atoll.base.errors import ScheduleError
from atoll.plans.ir.action import COMPUTE, Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.table import Table
from atoll.plans.ir.validate import check_table

ActionRows = tuple[tuple[Action, ...], ...]
CHECKED_PLACES = 100_000
"""Maximum number of stages times microbatches for which an error lists missing actions."""


@dataclass(frozen=True)
class Schedule:
    """The order of actions of every rank.

    `actions[rank]` is the order of that rank. A schedule without sends and receives is
    *compute-only*: its executor or simulator transfers results.

    slices: number of slices of each sequence (atoll.plans.slices). Actions number slices instead of microbatches: slice
    s of microbatch i is i * slices + s, and `microbatches` is the number of all slices.

    Raises ScheduleError with every violated law (atoll.plans.ir.validate).
    """

    name: str
    placement: Placement
    microbatches: int
    actions: ActionRows
    slices: int = 1

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ScheduleError(f"schedule {self.name!r} needs at least 1 microbatch, not {self.microbatches}")
        if self.slices < 1:
            raise ScheduleError(f"schedule {self.name!r} needs at least 1 slice of a sequence, not {self.slices}")
        if self.microbatches % self.slices:
            raise ScheduleError(
                f"schedule {self.name!r} numbers {self.microbatches} slices, and each microbatch has {self.slices}: "
                "number all slices of every microbatch"
            )
        if len(self.actions) != self.placement.ranks:
            raise ScheduleError(
                f"schedule {self.name!r} has {len(self.actions)} rows of actions for {self.placement.ranks} ranks"
            )
        self._check_size()
        check_table(self.name, self.table)

    def _check_size(self) -> None:
        """Check the size before the table is built: a few actions may name a huge pipeline."""
        places = self.placement.stages * self.microbatches
        actions = sum(map(len, self.actions))
        if places > max(actions, CHECKED_PLACES):
            each = "microbatches" if self.slices == 1 else f"microbatches of {self.slices} slices"
            raise ScheduleError(
                f"schedule {self.name!r} has {actions} actions, too few for {self.placement.stages} stages and "
                f"{self.whole_microbatches} {each}: each stage has an F for each of them"
            )

    @cached_property
    def table(self) -> Table:
        """The cells in flat arrays."""
        return Table(self.placement, self.microbatches, self.actions, self.slices)

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return self.placement.ranks

    @property
    def chunks(self) -> int:
        """Number of stages of each rank."""
        return self.placement.chunks

    @property
    def stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.placement.stages

    @property
    def whole_microbatches(self) -> int:
        """Number of microbatches, whose slices the actions number."""
        return self.microbatches // self.slices

    @property
    def counted(self) -> str:
        """Number of microbatches and slices in words, as in "8 microbatches" and "32 slices of 8 microbatches"."""
        whole = f"{self.whole_microbatches} microbatches"
        return whole if self.slices == 1 else f"{self.microbatches} slices of {whole}"

    @property
    def has_backward(self) -> bool:
        """True if any microbatch has a backward."""
        return Op.B.code in self.table.code or Op.I.code in self.table.code

    @property
    def has_messages(self) -> bool:
        """True if it has sends and receives."""
        return self.table.has_messages

    @property
    def has_sharding(self) -> bool:
        """True if it has UNSHARD, RESHARD or REDUCE_GRAD."""
        return self.table.has_sharding

    @property
    def has_vocabulary(self) -> bool:
        """True if embedding and head are split over the ranks, with L, S, T and G."""
        return self.table.has_vocabulary

    def only(self, ops: Collection[Op]) -> Schedule:
        """Return the same orders with only `ops`; they are validated."""
        kept = frozenset(ops)
        rows = tuple(tuple(action for action in row if action.op in kept) for row in self.actions)
        return replace(self, actions=rows)

    def compute_only(self) -> Schedule:
        """Return the schedule without messages and sharding actions."""
        return self.only(COMPUTE)

    def forward_only(self) -> Schedule:
        """Return the forward part, for evaluation: F with its messages, and UNSHARD and RESHARD around at least one F.

        With a split vocabulary, also L and S with their messages.
        """
        rows = tuple(_forward_row(row, self.stages - 1 if self.has_vocabulary else None) for row in self.actions)
        return replace(self, actions=rows)

    def __str__(self) -> str:
        sizes = f"{self.placement.kind}, ranks {self.ranks}, chunks {self.chunks}"
        counts = f"microbatches {self.whole_microbatches}" + (f", slices {self.slices}" if self.slices > 1 else "")
        return f"{self.name}: {sizes}, {counts}"


_FORWARD = frozenset({Op.F, Op.SEND_F, Op.RECV_F, Op.UNSHARD, Op.RESHARD, Op.L, Op.SEND_L, Op.S, Op.SEND_S, Op.RECV_S})


def _forward_row(row: tuple[Action, ...], scored: int | None) -> tuple[Action, ...]:
    """Return the forward part of one rank. An UNSHARD ... RESHARD pair without an F is removed.

    scored: the stage that receives scores, if there is one.
    """
    empty: set[int] = set()
    opened: dict[int, int] = {}
    for step, action in enumerate(row):
        if action.op is Op.UNSHARD:
            opened[action.stage] = step
        elif action.op is Op.F:
            opened.pop(action.stage, None)
        elif action.op is Op.RESHARD and action.stage in opened:
            empty |= {opened.pop(action.stage), step}
    empty |= set(opened.values())
    return tuple(
        action
        for step, action in enumerate(row)
        if (action.op in _FORWARD and step not in empty) or (action.op is Op.RECV_B and action.stage == scored)
    )
