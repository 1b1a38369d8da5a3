"""A schedule's cells in flat arrays: what the validator, the drawing and the simulator walk over.

Cells are numbered rank by rank, in the order of each rank's list. The table is made before the laws are checked, so
nothing here assumes that the schedule is a valid one.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.ir.action import COMPUTE_CODES, MICROBATCH_CODES, Action, Op
from atoll.ir.placement import Placement

F, I, W, B = Op.F.code, Op.I.code, Op.W.code, Op.B.code  # noqa: E741
SEND_F, RECV_F, SEND_B, RECV_B = Op.SEND_F.code, Op.RECV_F.code, Op.SEND_B.code, Op.RECV_B.code
UNSHARD, RESHARD, REDUCE_GRAD = Op.UNSHARD.code, Op.RESHARD.code, Op.REDUCE_GRAD.code


class Table:
    """The cells of a schedule.

    placement, microbatches   the sizes
    cells                     every action, rank by rank
    offset                    rank -> its first cell; one more entry closes the last rank
    code, rank, key           cell -> code of its op; its rank; stage * microbatches + microbatch (-1: no such place)
    at                        code, key -> the first such cell, or -1
    strays, repeats           cells outside the pipeline or on another's rank; (cell, first cell) of what comes twice
    has_messages              whether any send or receive is present; has_sharding likewise
    need                      cell -> the cell that must have finished on another (or its own) rank before it, or -1
    crosses                   cell -> whether what it needs comes from another rank
    """

    def __init__(self, placement: Placement, microbatches: int, actions: Sequence[Sequence[Action]]) -> None:
        self.placement = placement
        self.microbatches = microbatches
        self.rank_of_stage = [placement.rank_of(stage) for stage in range(placement.stages)]
        self.cells: list[Action] = []
        self.offset = [0]
        self.code: list[int] = []
        self.rank: list[int] = []
        self.key: list[int] = []
        self.strays: list[int] = []
        self.repeats: list[tuple[int, int]] = []

        places = placement.stages * microbatches
        self.at = [[-1] * places for _ in range(MICROBATCH_CODES)]
        for rank, row in enumerate(actions):
            self._index_row(rank, row)
            self.offset.append(len(self.cells))

        self.has_messages = any(COMPUTE_CODES <= code < MICROBATCH_CODES for code in self.code)
        self.has_sharding = max(self.code, default=0) >= MICROBATCH_CODES
        self.need = [-1] * len(self.cells)
        self.crosses = [False] * len(self.cells)
        self._find_needs()

    def step(self, cell: int) -> int:
        """The cell's place in its rank's list."""
        return cell - self.offset[self.rank[cell]]

    def gradient(self, key: int) -> int:
        """The cell that makes the input's gradient at `key`: its I, or its B, or -1."""
        cell = self.at[I][key]
        return cell if cell >= 0 else self.at[B][key]

    def source(self, cell: int) -> int:
        """The compute cell whose result the send in `cell` carries, or -1."""
        key = self.key[cell]
        return self.at[F][key] if self.code[cell] == SEND_F else self.gradient(key)

    def blocked(self) -> list[int]:
        """First cell of each rank that can never run, for ranks that have one: empty if every rank finishes.

        Sends never block, receives do. Needs inside one rank are taken as met: their order is another law.
        """
        need, crosses, offset = self.need, self.crosses, self.offset
        position = offset[:-1]
        finished = bytearray(len(self.cells))
        waiter: dict[int, int] = {}
        ready = list(range(len(position)))
        while ready:
            rank = ready.pop()
            cell, end = position[rank], offset[rank + 1]
            while cell < end:
                needed = need[cell]
                if needed >= 0 and crosses[cell] and not finished[needed]:
                    waiter[needed] = rank
                    break
                finished[cell] = 1
                if cell in waiter:
                    ready.append(waiter.pop(cell))
                cell += 1
            position[rank] = cell
        return [cell for rank, cell in enumerate(position) if cell < offset[rank + 1]]

    def levels(self) -> list[int]:
        """cell -> its column when every compute action takes one column and everything else comes for free.

        For the drawing of a valid schedule: column of a cell = the latest of what it waits for, plus one.
        """
        position = self.offset[:-1]
        clock = [0] * len(position)
        done = [-1] * len(self.cells)
        waiter: dict[int, int] = {}
        column = [0] * len(self.cells)
        ready = list(range(len(position)))
        while ready:
            rank = ready.pop()
            cell, end, now = position[rank], self.offset[rank + 1], clock[rank]
            while cell < end:
                needed = self.need[cell]
                if needed >= 0:
                    if done[needed] < 0:
                        waiter[needed] = rank
                        break
                    now = max(now, done[needed])
                column[cell] = now
                now += self.code[cell] < COMPUTE_CODES
                done[cell] = now
                if cell in waiter:
                    ready.append(waiter.pop(cell))
                cell += 1
            position[rank], clock[rank] = cell, now
        return column

    def _index_row(self, rank: int, row: Sequence[Action]) -> None:
        microbatches, stages, rank_of_stage = self.microbatches, len(self.rank_of_stage), self.rank_of_stage
        for action in row:
            cell, code = len(self.cells), action.op.code
            stage, microbatch = action.stage, action.microbatch
            key = -1
            is_mine = 0 <= stage < stages and rank_of_stage[stage] == rank
            if not is_mine or (microbatch is None) != (code >= MICROBATCH_CODES):
                self.strays.append(cell)
            elif microbatch is not None:
                if 0 <= microbatch < microbatches:
                    key = stage * microbatches + microbatch
                    first = self.at[code][key]
                    if first < 0:
                        self.at[code][key] = cell
                    else:
                        self.repeats.append((cell, first))
                else:
                    self.strays.append(cell)
            self.cells.append(action)
            self.code.append(code)
            self.rank.append(rank)
            self.key.append(key)

    def _find_needs(self) -> None:
        """F and RECV_F need the stage below, I, B and RECV_B the stage above; with messages the receive waits."""
        microbatches, places, rank = self.microbatches, len(self.at[F]), self.rank
        for cell, (code, key) in enumerate(zip(self.code, self.key, strict=True)):
            if key < 0 or code in (W, SEND_F, SEND_B):
                continue
            if code in (F, RECV_F):
                if key < microbatches:
                    continue
                needed = self.at[F if code == F else SEND_F][key - microbatches]
            else:
                key += microbatches
                if key >= places:
                    continue
                needed = self.at[SEND_B][key] if code == RECV_B else self.gradient(key)
            if needed < 0:
                continue
            crosses = rank[needed] != rank[cell]
            if crosses and self.has_messages and code < COMPUTE_CODES:
                continue
            self.need[cell] = needed
            self.crosses[cell] = crosses
