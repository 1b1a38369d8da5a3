"""The split of blocks into stages.

5 layers that cost 2 each, between an embedding of cost 0 and a head of cost 3

    line of 3 ranks    embed 2 2 | 2 2 | 2 3           ranks 4, 4, 5
    v of 2 ranks       embed 2 2 | 2 2 | 2 | 3         ranks 4 + 3, 4 + 2

[Note: what is even]
Splits are compared by these criteria in turn, each from its largest value to its smallest:

1. The work of ranks. Under any schedule a step takes at least the work of its busiest rank, for every microbatch; a
   long stage only costs time while the pipeline fills and drains. So ranks come before stages, and the blocks of one
   rank count together, such as embedding and head on a V.
2. The work of stages: schedules assume that the stages of a rank take equally long.
3. The work of turns; here more is better. The n-th stages of all ranks are a turn. They run at the same time, in the
   time of the longest, so long stages should be in one turn.
4. The memory of ranks.

Of equal splits, the one with more blocks in the first stages is chosen: it makes 1F1B wait least.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, permutations

from atoll.base.errors import PlanError
from atoll.base.units import format_bytes
from atoll.plans.ir import Placement

_TRIES = 6_000
"""Maximum number of splits that are evaluated before the search takes no more detours."""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """Cost and memory of a block.

    kind: equal for blocks of the same sort, such as their class.  cost: time per microbatch, in any unit.
    memory: bytes.  is_joined: whether it stays on the stage of the block before it.
    """

    name: str
    kind: str
    cost: float
    memory: float
    is_joined: bool = False


def split_blocks(
    blocks: Sequence[BlockWeight],
    placement: Placement,
    *,
    layers_per_stage: Sequence[int] | None = None,
    limit: float | None = None,
) -> tuple[range, ...]:
    """Cut blocks into a contiguous run per stage, as evenly as the note above says, or as given.

    layers_per_stage: the number of layers (`layers_of`) of each stage; blocks before the layers go to the first stage,
    and blocks after them to the last.  limit: bytes that the blocks of a rank may not exceed together.

    The result is the most even split on a line, and for equal layers on any placement; otherwise it is close to it.
    Raises PlanError if none is found.
    """
    parts = _parts(blocks)
    stages = placement.stages
    if layers_per_stage is not None:
        counts = _by_hand(blocks, parts, layers_per_stage, stages)
    elif stages > len(parts):
        joined = f" ({len(blocks)}, of which {len(blocks) - len(parts)} stay with the one before)"
        raise PlanError(
            f"{stages} stages for {len(parts)} blocks{joined if len(parts) < len(blocks) else ''}: each stage needs "
            f"at least one; use at most {len(parts)} stages (pipeline x chunks) or a deeper model"
        )
    else:
        counts = list(_Search(blocks, parts, placement, limit).find())
    bounds = list(accumulate(counts, initial=0))
    starts = [*(part.start for part in parts), len(blocks)]
    runs = tuple(range(starts[first], starts[last]) for first, last in pairwise(bounds))
    if limit is not None:
        _check_memory(blocks, placement, runs, limit)
    return runs


def layers_of(blocks: Sequence[BlockWeight]) -> range:
    """Return the blocks that are layers: from the first to the last one of the most common kind.

    Joined blocks count as one with the block before them. If no kind occurs twice: all but the first and the last
    block.
    """
    parts = _parts(blocks)
    kinds = [blocks[part.start].kind for part in parts]
    counts = Counter(kinds)
    most = max(counts.values())
    found = [at for at, kind in enumerate(kinds) if counts[kind] == most]
    if most == 1 and len(parts) > 2:
        found = found[1:-1]
    return range(parts[found[0]].start, parts[found[-1]].stop)


def _parts(blocks: Sequence[BlockWeight]) -> list[range]:
    """Return the runs of blocks that stay together."""
    starts = [at for at, block in enumerate(blocks) if at == 0 or not block.is_joined]
    return [range(first, last) for first, last in pairwise([*starts, len(blocks)])]


def _by_hand(
    blocks: Sequence[BlockWeight], parts: Sequence[range], layers_per_stage: Sequence[int], stages: int
) -> list[int]:
    """Return the number of parts of each stage."""
    layers = layers_of(blocks)
    before = sum(part.start < layers.start for part in parts)
    after = sum(part.start >= layers.stop for part in parts)
    number = len(parts) - before - after
    counts = list(layers_per_stage)
    problems = []
    if len(counts) != stages:
        problems.append(f"it has {len(counts)} numbers for {stages} stages; give one a stage")
    if any(count < 0 for count in counts):
        problems.append("a stage cannot have fewer than 0 layers")
    if sum(counts) != number:
        first, last = blocks[layers.start].name, blocks[layers.stop - 1].name
        problems.append(f"its sum is {sum(counts)}, and there are {number} layers, {first!r} to {last!r}")
    if not problems:
        counts[0] += before
        counts[-1] += after
        problems = [f"stage {stage} would have no block" for stage, count in enumerate(counts) if count == 0]
    if problems:
        raise PlanError(f"layers_per_stage = {list(layers_per_stage)}: {'; '.join(problems)}")
    return counts


Way = tuple[int, ...]
"""Number of parts of each stage."""

_Amounts = tuple[float, ...]
_Weight = tuple[float, _Amounts, _Amounts, _Amounts, _Amounts, Way]
_LineWeight = tuple[_Amounts, _Amounts, Way]


class _Search:
    """Search for the most even split."""

    def __init__(
        self, blocks: Sequence[BlockWeight], parts: Sequence[range], placement: Placement, limit: float | None
    ) -> None:
        self._placement = placement
        self._limit = math.inf if limit is None else limit
        self._costs = _running_sum(sum(blocks[at].cost for at in part) for part in parts)
        self._memory = _running_sum(sum(blocks[at].memory for at in part) for part in parts)
        self._tries = 0

    def find(self) -> Way:
        """Return the most even split that was found; if it exceeds the limit, so do all others that were tried."""
        stages = self._placement.stages
        found = _cut_line(self._costs, self._memory, stages, limit=self._limit)
        if found is not None:
            found = self._improve(found)
        if found is None or self._weigh(found)[0] > 0:
            lightest = _cut_line(self._memory, self._costs, stages)
            assert lightest is not None, "without a limit there is a way"
            found = self._improve(lightest)
        return found

    def _improve(self, way: Way) -> Way:
        """Move parts between stages as long as that helps, then try whether further moves help after one that does
        not."""
        if self._placement.kind == "line":
            return way
        self._tries = _TRIES
        best, way = self._descend(way)
        goes_on = True
        while goes_on:
            goes_on = False
            for detour in permutations(range(len(way)), 2):
                if self._tries <= 0:
                    return way
                if way[detour[0]] == 1:
                    continue
                weight, reached = self._descend(_moved(way, detour))
                if weight < best:
                    best, way, goes_on = weight, reached, True
                    break
        return way

    def _descend(self, way: Way) -> tuple[_Weight, Way]:
        """Apply the best move until no move improves the split."""
        best = self._weigh(way)
        goes_on = True
        while goes_on:
            goes_on = False
            for move in permutations(range(len(way)), 2):
                if way[move[0]] > 1:
                    moved = _moved(way, move)
                    weight = self._weigh(moved, best)
                    if weight < best:
                        best, way, goes_on = weight, moved, True
        return best, way

    def _weigh(self, way: Way, best: _Weight | None = None) -> _Weight:
        """Return the criteria of the note for a split, after the bytes above the limit; less is better.

        Returns `best` early if the ranks of this split have more work.
        """
        self._tries -= 1
        costs = self._turns(self._costs, way)
        ranks = _falling(map(sum, zip(*costs, strict=True)))
        if best is not None and best[0] == 0 and ranks > best[1]:
            return best
        held = list(map(sum, zip(*self._turns(self._memory, way), strict=True)))
        return (
            sum(each - self._limit for each in held if each > self._limit),
            ranks,
            _falling(chain.from_iterable(costs)),
            tuple(sorted(-sum(turn) for turn in costs)),
            _falling(held),
            tuple(-count for count in way),
        )

    def _turns(self, sums: Sequence[float], way: Way) -> list[list[float]]:
        """Return the work of each turn's stages, rank by rank."""
        ranks = self._placement.ranks
        at = [sums[part] for part in accumulate(way, initial=0)]
        stages = [last - first for first, last in pairwise(at)]
        turns = [stages[first : first + ranks] for first in range(0, len(stages), ranks)]
        if self._placement.kind == "v":
            turns[1].reverse()
        return turns


def _moved(way: Way, move: tuple[int, int]) -> Way:
    """Return a split in which a stage gives one part to another; those between them pass one on."""
    giver, taker = move
    changed = list(way)
    changed[giver] -= 1
    changed[taker] += 1
    return tuple(changed)


def _cut_line(costs: Sequence[float], memory: Sequence[float], stages: int, limit: float = math.inf) -> Way | None:
    """Return the most even split on a line, or None if each has a stage above the limit.

    Dynamic programming over running sums: which of two splits of the first parts is more even does not depend on the
    rest.
    """
    parts = len(costs) - 1
    best: dict[int, _LineWeight] = {0: ((), (), ())}
    for stage in range(1, stages + 1):
        longer: dict[int, _LineWeight] = {}
        for last in range(stage, parts - stages + stage + 1):
            found: _LineWeight | None = None
            for first in range(last - 1, stage - 2, -1):
                cost, held = costs[last] - costs[first], memory[last] - memory[first]
                most = math.inf if found is None else found[0][0]
                if held > limit or cost > most:
                    break
                before = best.get(first)
                if before is None or max(before[0], default=0.0) > most:
                    continue
                way = (_falling((*before[0], cost)), _falling((*before[1], held)), (*before[2], first - last))
                found = way if found is None else min(found, way)
            if found is not None:
                longer[last] = found
        best = longer
    return tuple(-less for less in best[parts][2]) if parts in best else None


def _falling(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(sorted(values, reverse=True))


def _running_sum(values: Iterable[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


def _check_memory(blocks: Sequence[BlockWeight], placement: Placement, runs: Sequence[range], limit: float) -> None:
    """Raise PlanError for the rank with the most memory, if it exceeds the limit."""
    held = [
        sum(blocks[at].memory for stage in placement.stages_of(rank) for at in runs[stage])
        for rank in range(placement.ranks)
    ]
    rank = max(range(placement.ranks), key=lambda rank: held[rank])
    if held[rank] <= limit:
        return
    has = " and ".join(
        f"stage {stage}, {blocks[runs[stage][0]].name!r} to {blocks[runs[stage][-1]].name!r}"
        for stage in placement.stages_of(rank)
    )
    raise PlanError(
        f"{len(runs)} stages need {format_bytes(held[rank])} on pipeline rank {rank} ({has}), the limit is "
        f"{format_bytes(limit)}; use more stages or a layout that shards more"
    )
