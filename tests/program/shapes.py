"""Ranks of a made-up model, for tests of what is lowered."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.plans.ir import Placement
from atoll.program import BlockShape, Do, Operation, Phase, RankShape, StageShape, UnitShape

WHOLE = 100
"""Bytes of a unit."""

LEVELS = (("inter", 50), ("intra", 100))
"""What a gather of a unit sends; a reduction takes the links the other way round."""

RETURNED = 20
"""Bytes of a unit that go back behind the optimizer."""


def shapes_of(
    placement: Placement,
    *,
    blocks: int = 3,
    limit: int = WHOLE,
    behind: int = 1,
    staged: bool = False,
    rests: bool = False,
    is_tied: bool = False,
    frozen: int = 0,
    is_recomputed: bool = False,
    together: int = 1,
    has_slices: bool = False,
    is_scaled: bool = False,
) -> list[RankShape]:
    """What each pipeline rank has of a model of `blocks` blocks a stage.

    staged: whether a gather holds a half of the unit on its way.  rests: whether parameters and gradients rest whole.
    is_tied: whether the first and the last block share a unit.  frozen: how many blocks are not trained, from the
    first.  together: blocks that are a unit.  has_slices: whether units 0 and 1 are slices of a vocabulary.  is_scaled:
    whether the loss is.
    """
    phases: tuple[Phase, ...] = ("I", "W") if placement.stages > 1 else ("I",)
    count = placement.stages * blocks
    first = 2 if has_slices else 0

    def unit(index: int, users: tuple[int, ...], *, is_shared: bool = False) -> UnitShape:
        flows: Mapping[Phase, int] = dict.fromkeys(phases, 0 if rests else WHOLE)
        if users and users[-1] < frozen:
            flows = {}
        whole = 0 if rests else WHOLE
        travel: dict[tuple[Operation, Phase | None], tuple[tuple[str, int], ...]] = {}
        if not rests:
            travel = {(Do.GATHER, None): LEVELS, **{(Do.REDUCE, phase): LEVELS[::-1] for phase in flows}}
        if flows:
            travel[Do.RETURN, None] = (("inter", RETURNED),)
        ahead = whole // 2 if staged else whole
        copies = len({placement.rank_of(block // blocks) for block in users})
        return UnitShape(index, users, is_shared, whole, ahead, flows, travel=travel, copies=copies)

    ranks = []
    for rank in range(placement.ranks):
        stages, units = {}, {}
        for stage in placement.stages_of(rank):
            own, used = [], []
            for block in range(stage * blocks, (stage + 1) * blocks):
                start = stage * blocks + (block - stage * blocks) // together * together
                users = tuple(range(start, min(start + together, (stage + 1) * blocks)))
                index = first + 1 + users[0]
                units[index] = unit(index, users)
                mine = [index]
                if is_tied and block in (0, count - 1):
                    units[first] = unit(first, (0, count - 1), is_shared=True)
                    mine.append(first)
                used += [each for each in mine if each not in used]
                own.append(BlockShape(block, tuple(mine), needs_backward=block >= frozen or (is_tied and frozen == 0)))
            stages[stage] = StageShape(stage, tuple(own), tuple(sorted(used, reverse=True)), is_recomputed)
        if has_slices:
            for index in (0, 1):
                flow: Mapping[Phase, int] = {"W": 0 if rests else WHOLE}
                whole = 0 if rests else WHOLE
                units[index] = UnitShape(index, (), False, whole, whole // 2 if staged else whole, flow)
        slices = {"embedding": 0, "head": 1} if has_slices else {}
        ranks.append(
            RankShape(stages, units, limit, behind, slices, rank=rank, ranks=placement.ranks, is_scaled=is_scaled)
        )
    return ranks
