"""Activation offloading: its instructions, and the pass that inserts them into a program.

    OFFLOAD_ACT    begins to copy what a block keeps of a microbatch to host memory
    OFFLOADED_ACT  waits for that: the device's memory is freed
    ONLOAD_ACT     allocates it again, and begins to copy it back
    ONLOADED_ACT   waits for that

    OFFLOAD_OWED, OFFLOADED_OWED, ONLOAD_OWED, ONLOADED_OWED
                   the same of what I keeps for the W of a unit: inputs, and gradients of outputs

Both copies run while another block computes, the first one from the block's forward on, the second one until its
backward begins. A stage of three blocks, of which the first one's activations leave:

    0F0.0, OFFLOAD_ACT 0F0.0, 0F0.1, OFFLOADED_ACT 0F0.0, 0F0.2, .., 0I0.2, ONLOAD_ACT 0I0.0, 0I0.1, ONLOADED_ACT 0I0.0,
    0I0.0

Blocks whose activations have the longest time between forward and backward, on average, are offloaded first: a stage's
first blocks, and those of the stages that wait longest for their backward. A block is chosen for all microbatches
before the next one is, so that a share of all is a share of what is in flight at any time, in the warm-up too.
Activations needed again within `LEAST_LIFE` blocks stay on the device. So do those of the model's last block, whose
output the loss saves.

Of what W needs the same share leaves, in the same order, from the I that completes it to W: where W waits while other
microbatches are computed, as on the last ranks of ZB-H1, and not where it follows its I.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from atoll.program.host import IN, OUT
from atoll.program.instruction import Instruction
from atoll.program.operation import Amount, Fact, Lane, Need, Operation, Over, Partners, Phase, Scope, Workspace
from atoll.program.shape import BlockShape, RankShape, WeightShape
from atoll.program.table import Do, Facts, Workspaces

LEAST_LIFE = 4
"""Blocks that are computed from a block's forward to its backward, at least, if what it keeps leaves: one hides either
copy, and it has to be away in between."""


def _leaves(kept: BlockShape | WeightShape, _: object) -> int:
    return kept.leaves


def _rows(
    scope: Scope, memory: Workspace, leaving: Fact, away: Fact, coming: Fact, back: Fact
) -> tuple[Operation, Operation, Operation, Operation]:
    """Return the rows of what leaves for host memory: the copy there begins, and is waited for, and that back. scope:
    what each is of.  memory: what it frees of the device, and allocates again."""
    shared: dict[str, Any] = {
        "lane": Lane.HOST, "scope": scope, "over": Over.UNIT if scope is Scope.UNIT else Over.NONE,
        "peers": Partners.NONE, "is_aside": True,
    }  # fmt: skip
    begins, waits = shared | {"begins": True, "moves": True, "carries": "kept"}, shared | {"waits": True}
    bytes_of = (Amount(memory, _leaves),)
    offload = Operation(
        **begins, gives=(leaving,),
        needs=tuple(Need(fact, "{step} begins twice", holds=False) for fact in (leaving, away, coming)),
    )  # fmt: skip
    offloaded = Operation(
        **waits, needs=(Need(leaving, "{step} waits for what has not left"),),
        ends=(leaving,), gives=(away,), frees=bytes_of, cause="host",
    )  # fmt: skip
    onload = Operation(
        **begins, needs=(Need(away, "{step} brings back what has not left, or may still be on its way"),),
        ends=(away,), gives=(coming, back), takes=bytes_of,
    )  # fmt: skip
    onloaded = Operation(
        **waits, needs=(Need(coming, "{step} waits for what has not begun to come"),), ends=(coming,), cause="host",
    )  # fmt: skip
    return offload, offloaded, onload, onloaded


class Kept:
    """Instructions of what blocks keep for their backward; see the module."""

    OFFLOAD_ACT, OFFLOADED_ACT, ONLOAD_ACT, ONLOADED_ACT = _rows(
        Scope.BLOCK, Workspaces.KEPT, Facts.LEAVING, Facts.AWAY, Facts.COMING, Facts.BACK
    )
    OFFLOAD_OWED, OFFLOADED_OWED, ONLOAD_OWED, ONLOADED_OWED = _rows(
        Scope.UNIT, Workspaces.WEIGHED, Facts.OWED_LEAVING, Facts.OWED_AWAY, Facts.OWED_COMING, Facts.OWED_BACK
    )


_Travel = Mapping[tuple[Operation, Phase | None], tuple[tuple[str, int], ...]]


def travel_of(leaves: int, *, is_owed: bool = False) -> _Travel:
    """Return what the instructions of a block, or of the W of a unit, move, by direction of the link to host memory.
    leaves: as in `BlockShape` and `WeightShape`."""
    there, back = (Kept.OFFLOAD_OWED, Kept.ONLOAD_OWED) if is_owed else (Kept.OFFLOAD_ACT, Kept.ONLOAD_ACT)
    return {(there, None): ((OUT, leaves),), (back, None): ((IN, leaves),)} if leaves else {}


_Passage = tuple[int, int | None]
"""A block, or a unit, and a microbatch."""

_Lives = Mapping[_Passage, tuple[int, int]]
"""Places of the instructions from which a passage is kept, and which needs it."""


def insert_kept(instructions: Iterable[Instruction], shape: RankShape) -> Iterable[Instruction]:
    """Insert the instructions of what leaves into a program, or into an evaluation, where nothing does. Without any the
    program is unchanged."""
    return _inserted(list(instructions), shape) if shape.offloads else instructions


def _inserted(instructions: Sequence[Instruction], shape: RankShape) -> Iterator[Instruction]:
    ahead: defaultdict[int, list[Instruction]] = defaultdict(list)  # by the place that they precede
    after: defaultdict[int, list[Instruction]] = defaultdict(list)  # and that they follow
    ending: defaultdict[int, list[Instruction]] = defaultdict(list)  # the same of waits

    def move(lives: _Lives, computed: Sequence[int], rows: Sequence[Operation]) -> None:
        turns = {at: nth for nth, at in enumerate(computed)}
        for (of, _), (first, last) in lives.items():
            left, comes = instructions[first].action, instructions[last].action
            leaves, gone, begins, back = (
                Instruction(do, action, of) for do, action in zip(rows, (left, left, comes, comes), strict=True)
            )
            # Each way beside one that is computed in between: the next one, and the last one.
            after[first].append(leaves)
            ending[computed[turns[first] + 1]].append(gone)
            ahead[computed[turns[last] - 1]].insert(0, begins)
            ahead[last].append(back)

    rows = Kept.OFFLOAD_ACT, Kept.OFFLOADED_ACT, Kept.ONLOAD_ACT, Kept.ONLOADED_ACT
    move(leaves(instructions, shape), _places(instructions, (Do.F, Do.I)), rows)
    rows = Kept.OFFLOAD_OWED, Kept.OFFLOADED_OWED, Kept.ONLOAD_OWED, Kept.ONLOADED_OWED
    move(owed(instructions, shape), _places(instructions, (Do.F, Do.I, Do.W)), rows)
    waits: list[Instruction] = []
    for at, each in enumerate(instructions):
        # Behind what only begins: after a block's forward that is done before the model goes on, but for a wait.
        if waits and not each.do.begins:
            yield from waits
            waits.clear()
        yield from ahead[at]
        yield each
        waits += ending[at]
        yield from after[at]


def _places(instructions: Iterable[Instruction], which: Sequence[Operation]) -> list[int]:
    return [at for at, each in enumerate(instructions) if each.do in which]


def leaves(instructions: Iterable[Instruction], shape: RankShape) -> _Lives:
    """Return the blocks and microbatches whose activations are offloaded, each with the places of its forward and its
    backward. `shape.offloads` is their share of all pairs, or of those of each stage."""
    found: defaultdict[_Passage, list[int]] = defaultdict(list)
    nth: dict[int, int] = {}
    for at, each in enumerate(instructions):
        if each.do in (Do.F, Do.I):
            nth[at] = len(nth)
            found[each.of, each.action.microbatch].append(at)
    kept = {passage: (each[0], each[1]) for passage, each in found.items() if len(each) > 1}
    of_stage = {index: {block.index for block in stage.blocks} for index, stage in shape.stages.items()}
    chosen = _chosen(kept, nth, shape.offloads, of_stage)
    return {passage: place for passage, place in chosen.items() if passage[0] != shape.last}


def owed(instructions: Iterable[Instruction], shape: RankShape) -> _Lives:
    """Return the units and microbatches of which what W needs is offloaded, each with the places of the I that
    completes it and of W: where another forward or backward comes between, and of units that one stage has."""
    first: dict[_Passage, tuple[int, int]] = {}
    kept: dict[_Passage, tuple[int, int]] = {}
    nth: dict[int, int] = {}
    action, passes = None, 0
    for at, each in enumerate(instructions):
        passage = each.of, each.action.microbatch
        if each.do in (Do.F, Do.I) and each.action != action:
            action, passes = each.action, passes + 1
        if each.do in (Do.F, Do.I, Do.W):
            nth[at] = len(nth)
        if each.do is Do.I:
            first |= {(unit, each.action.microbatch): (at, passes) for unit in shape.units_of[each.of]}
        if each.do is Do.W and first.get(passage, (at, passes))[1] < passes and not shape.units[each.of].is_shared:
            kept[passage] = first[passage][0], at
    of_stage = {index: set(stage.units) for index, stage in shape.stages.items()}
    return _chosen(kept, nth, shape.offloads, of_stage)


def _chosen(
    kept: _Lives,
    nth: Mapping[int, int],
    share: float | tuple[float, ...],
    of_stage: Mapping[int, Collection[int]],
) -> _Lives:
    """Return a share of passages, or that of each stage, without those that are needed again soon. nth: numbers of what
    is computed, by its place."""

    def life(passage: _Passage) -> int:
        begin, end = kept[passage]
        return nth[end] - nth[begin]

    of: defaultdict[int, list[_Passage]] = defaultdict(list)
    for passage in kept:
        of[passage[0]].append(passage)
    by_life = sorted(of, key=lambda each: (-sum(map(life, of[each])) / len(of[each]), each))
    groups = [(share, by_life)] if not isinstance(share, tuple) else [
        (share[index], [each for each in by_life if each in own]) for index, own in of_stage.items()
    ]  # fmt: skip
    chosen = [passage for part, own in groups for passage in _first(part, [of[each] for each in own])]
    return {passage: kept[passage] for passage in chosen if life(passage) >= LEAST_LIFE}


def _first(share: float, blocks: Sequence[Sequence[_Passage]]) -> Iterator[_Passage]:
    """Yield a share of the passages of blocks, one block after the other. Those of a block of which only a part is
    offloaded are spread over the microbatches."""
    left = round(share * sum(map(len, blocks)))
    for own in blocks:
        taken = min(left, len(own))
        left -= taken
        yield from (each for nth, each in enumerate(own) if (nth + 1) * taken // len(own) > nth * taken // len(own))


def sizes_of(shape: RankShape) -> Mapping[tuple[Operation, int], int]:
    """Return the bytes that leave of each block and unit, as the shape knows them."""
    blocks = {(Kept.OFFLOAD_ACT, at): block.leaves for at, block in shape.blocks.items()}
    weights = (each for stage in shape.stages.values() for each in stage.weights.items())
    return blocks | {(Kept.OFFLOAD_OWED, unit): weight.leaves for unit, weight in weights}


def most_away(instructions: Iterable[Instruction], sizes: Mapping[tuple[Operation, int], int]) -> int:
    """Return the bytes of the buffers in host memory. Each is in use from the start of the copy there to the end of
    the copy back, and passages of one size take turns in it. sizes: bytes that leave of each block and unit, by the row
    that copies them, as far as they are known."""
    begins = {Kept.ONLOADED_ACT: Kept.OFFLOAD_ACT, Kept.ONLOADED_OWED: Kept.OFFLOAD_OWED}
    now, most = Counter[int](), Counter[int]()
    for each in instructions:
        row = begins.get(each.do, each.do)
        if row in begins.values():
            size = sizes.get((row, each.of), 0)
            now[size] += 1 if each.do is row else -1
            most[size] = max(most[size], now[size])
    return sum(size * count for size, count in most.items())
