"""A schedule's cells in flat arrays, for the validator, the drawing and the simulator.

Cells are numbered rank by rank, in the order of each rank's list. The table is built before the laws are checked, so
this code does not assume a valid schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.plans.ir.action import COMPUTE_CODES, MICROBATCH_CODES, SCHEDULE_CODES, Action, Op
from atoll.plans.ir.placement import Placement

F, I, W, B = Op.F.code, Op.I.code, Op.W.code, Op.B.code  # noqa: E741
L, S, T, G = Op.L.code, Op.S.code, Op.T.code, Op.G.code
SEND_F, RECV_F, SEND_B, RECV_B = Op.SEND_F.code, Op.RECV_F.code, Op.SEND_B.code, Op.RECV_B.code
SEND_L, SEND_S, RECV_S = Op.SEND_L.code, Op.SEND_S.code, Op.RECV_S.code
SEND_T, RECV_T, RECV_G = Op.SEND_T.code, Op.RECV_T.code, Op.RECV_G.code
UNSHARD, RESHARD, REDUCE_GRAD = Op.UNSHARD.code, Op.RESHARD.code, Op.REDUCE_GRAD.code


class Table:
    """The cells of a schedule.

    placement, microbatches   the sizes; slices: how many consecutive microbatches are slices of the same sequences
    cells                     every action, rank by rank
    offset                    rank -> its first cell; one more entry closes the last rank
    code, rank, key           cell -> code of its op; its rank; stage * microbatches + microbatch (-1: no such place)
    at                        code, key -> the first such cell, or -1
    strays, repeats           cells outside the pipeline or on another rank; (cell, first cell) of duplicates
    has_messages              whether any send or receive is present; has_sharding, has_vocabulary likewise
    need                      cell -> the cell that must have finished on another (or its own) rank before it, or -1
    crosses                   cell -> whether its input comes from another rank
    others                    cell -> further inputs, all from other ranks, if it collects from many
    """

    def __init__(
        self, placement: Placement, microbatches: int, actions: Sequence[Sequence[Action]], slices: int = 1
    ) -> None:
        self.placement = placement
        self.microbatches = microbatches
        self.slices = slices
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

        codes = set(self.code)
        self.has_messages = any(COMPUTE_CODES <= code < MICROBATCH_CODES for code in codes)
        self.has_sharding = max(codes, default=0) >= MICROBATCH_CODES
        self.has_vocabulary = L in codes or S in codes
        self.need = [-1] * len(self.cells)
        self.crosses = [False] * len(self.cells)
        self.others: dict[int, tuple[int, ...]] = {}
        self._find_needs()
        if self.has_vocabulary:
            for cell in range(len(self.cells)):
                self._find_vocabulary_needs(cell)

    def step(self, cell: int) -> int:
        """Return the cell's index in its rank's list."""
        return cell - self.offset[self.rank[cell]]

    def gradient(self, key: int) -> int:
        """Return the cell that computes the input's gradient at `key`: its I, or its B, or -1."""
        cell = self.at[I][key]
        return cell if cell >= 0 else self.at[B][key]

    def needs(self, cell: int) -> Iterator[int]:
        """Return the cells on other ranks that a cell waits for."""
        if self.crosses[cell]:
            yield self.need[cell]
        yield from self.others.get(cell, ())

    def source(self, cell: int) -> int:
        """Return the compute cell whose result the SEND_F or SEND_B in `cell` sends, or -1."""
        key = self.key[cell]
        return self.at[F][key] if self.code[cell] == SEND_F else self.gradient(key)

    def blocked(self) -> list[int]:
        """Return the first cell of each rank that can never run; empty if every rank finishes.

        Sends never block, receives do. Dependencies inside one rank count as met: another law checks their order.
        """
        need, crosses, others, offset = self.need, self.crosses, self.others, self.offset
        position = offset[:-1]
        finished = bytearray(len(self.cells))
        waiters: dict[int, list[int]] = {}
        ready = list(range(len(position)))
        while ready:
            rank = ready.pop()
            cell, end = position[rank], offset[rank + 1]
            while cell < end:
                needed = need[cell]
                is_met = needed < 0 or not crosses[cell] or finished[needed]
                if is_met and cell in others:
                    needed = next((at for at in others[cell] if not finished[at]), -1)
                    is_met = needed < 0
                if not is_met:
                    waiters.setdefault(needed, []).append(rank)
                    break
                finished[cell] = 1
                if cell in waiters:
                    ready.extend(waiters.pop(cell))
                cell += 1
            position[rank] = cell
        return [cell for rank, cell in enumerate(position) if cell < offset[rank + 1]]

    def levels(self) -> list[int]:
        """Return the column of each cell if every compute action takes one column and all others take none.

        For the drawing of a valid schedule: the column of a cell is the latest of its dependencies, plus one.
        """
        position = self.offset[:-1]
        clock = [0] * len(position)
        done = [-1] * len(self.cells)
        waiters: dict[int, list[int]] = {}
        column = [0] * len(self.cells)
        ready = list(range(len(position)))
        while ready:
            rank = ready.pop()
            cell, end, now = position[rank], self.offset[rank + 1], clock[rank]
            while cell < end:
                needed = self.need[cell]
                if needed < 0 or done[needed] >= 0:
                    missing = (at for at in self.others.get(cell, ()) if done[at] < 0)
                    awaited = next(missing, -1)
                else:
                    awaited = needed
                if awaited >= 0:
                    waiters.setdefault(awaited, []).append(rank)
                    break
                now = max(now, *(done[at] for at in (needed, *self.others.get(cell, ())) if at >= 0), 0)
                column[cell] = now
                now += self.code[cell] < COMPUTE_CODES
                done[cell] = now
                if cell in waiters:
                    ready.extend(waiters.pop(cell))
                cell += 1
            position[rank], clock[rank] = cell, now
        return column

    def _index_row(self, rank: int, row: Sequence[Action]) -> None:
        microbatches, stages, rank_of_stage = self.microbatches, len(self.rank_of_stage), self.rank_of_stage
        for action in row:
            cell, code = len(self.cells), action.op.code
            stage, microbatch = action.stage, action.microbatch
            key = -1
            is_mine = 0 <= stage < stages and (stage if code in _OF_SLICES else rank_of_stage[stage]) == rank
            if not is_mine or (microbatch is None) != (code >= MICROBATCH_CODES) or code >= SCHEDULE_CODES:
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
        """Find dependencies: F and RECV_F need the stage below, I, B and RECV_B the stage above; with messages the
        receive waits."""
        microbatches, places, rank = self.microbatches, len(self.at[F]), self.rank
        for cell, (code, key) in enumerate(zip(self.code, self.key, strict=True)):
            if key < 0 or code not in _OF_STAGES:
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

    def _find_vocabulary_needs(self, cell: int) -> None:
        """Find dependencies of a split vocabulary: stage 0 needs the look-ups of all slices, the last stage their
        scores, and the slices need the results of these stages.

        With messages the receives wait for the sends, and all others for results on their own rank.
        """
        code, here = self.code[cell], self.rank[cell]
        key = self.key[cell]
        is_between = code in _OF_STAGES and self.microbatches <= key < len(self.at[F]) - self.microbatches
        if key < 0 or is_between or code not in _OF_VOCABULARY:
            return
        made, sent = self._vocabulary_sources(code, *divmod(key, self.microbatches))
        for needed in made:
            if needed >= 0 and self.rank[needed] == here:
                self.need[cell] = needed
        far = sent if code >= COMPUTE_CODES else [] if self.has_messages else made
        there = [needed for needed in far if needed >= 0 and self.rank[needed] != here]
        if there and self.need[cell] < 0:
            self.need[cell], *there = there
            self.crosses[cell] = True
        if there:
            self.others[cell] = tuple(there)

    def _vocabulary_sources(self, code: int, stage: int, microbatch: int) -> tuple[list[int], list[int]]:
        """Return the cells that compute the input of an op, and those that send it, or -1."""
        at, size = self.at, self.microbatches
        slices = range(microbatch, self.placement.ranks * size, size)
        key, last = stage * size + microbatch, len(at[F]) - size + microbatch
        if code in (F, RECV_F) and stage == 0:
            return [at[L][each] for each in slices], [at[SEND_L][each] for each in slices]
        if code in (I, B, RECV_B) and key == last:
            return [at[S][each] for each in slices], [at[SEND_S][each] for each in slices]
        if code in (S, RECV_S):
            return [at[F][last]], [at[SEND_F][last]]
        if code in (T, RECV_T):
            return [self.gradient(last)], [at[SEND_T][last]]
        if code in (G, RECV_G):
            return [self.gradient(microbatch)], [at[SEND_B][microbatch]]
        kept = {SEND_L: L, SEND_S: S, SEND_T: RECV_B}
        return [at[kept[code]][key]] if code in kept else [], []


_OF_SLICES = frozenset(op.code for op in Op if op.is_of_slice)
_OF_STAGES = frozenset({F, I, B, RECV_F, RECV_B})
_OF_VOCABULARY = frozenset({F, I, B, S, T, G, RECV_F, RECV_B, SEND_L, SEND_S, RECV_S, SEND_T, RECV_T, RECV_G})
