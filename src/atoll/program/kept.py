"""Activation offloading: its instructions, and the pass that inserts them into a program.

    OFFLOAD_ACT    begins to copy what a block keeps of a microbatch to host memory
    OFFLOADED_ACT  waits for that: the device's memory is freed
    ONLOAD_ACT     allocates it again, and begins to copy it back
    ONLOADED_ACT   waits for that

Both copies run while another block computes, the first one from the block's forward on, the second one until its
backward begins. A stage of three blocks, of which the first one's activations leave:

    0F0.0, OFFLOAD_ACT 0F0.0, 0F0.1, OFFLOADED_ACT 0F0.0, 0F0.2, .., 0I0.2, ONLOAD_ACT 0I0.0, 0I0.1, ONLOADED_ACT 0I0.0,
    0I0.0

Blocks whose activations have the longest time between forward and backward, on average, are offloaded first: a stage's
first blocks, and those of the stages that wait longest for their backward. A block is chosen for all microbatches
before the next one is, so that a share of all is a share of what is in flight at any time, in the warm-up too.
Activations needed again within `LEAST_LIFE` blocks stay on the device. So do those of the model's last block, whose
output the loss saves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count

from atoll.program.host import IN, OUT
from atoll.program.instruction import Instruction
from atoll.program.operation import Amount, Lane, Need, Operation, Over, Partners, Phase, Scope
from atoll.program.shape import BlockShape, RankShape
from atoll.program.table import Do, Facts, Workspaces

LEAST_LIFE = 4
"""Blocks that are computed from a block's forward to its backward, at least, if what it keeps leaves: one hides either
copy, and it has to be away in between."""


def _leaves(block: BlockShape, _: object) -> int:
    return block.leaves


class Kept:
    """Instructions of what blocks keep for their backward; see the module."""

    OFFLOAD_ACT = Operation(
        lane=Lane.HOST, scope=Scope.BLOCK, over=Over.NONE, begins=True, is_aside=True, moves=True,
        carries="kept", peers=Partners.NONE,
        needs=tuple(
            Need(fact, "{step} begins twice", holds=False) for fact in (Facts.LEAVING, Facts.AWAY, Facts.COMING)
        ),
        gives=(Facts.LEAVING,),
    )  # fmt: skip
    OFFLOADED_ACT = Operation(
        lane=Lane.HOST, scope=Scope.BLOCK, over=Over.NONE, waits=True, is_aside=True, peers=Partners.NONE,
        needs=(Need(Facts.LEAVING, "{step} waits for what has not left"),),
        ends=(Facts.LEAVING,), gives=(Facts.AWAY,), frees=(Amount(Workspaces.KEPT, _leaves),), cause="host",
    )  # fmt: skip
    ONLOAD_ACT = Operation(
        lane=Lane.HOST, scope=Scope.BLOCK, over=Over.NONE, begins=True, is_aside=True, moves=True,
        carries="kept", peers=Partners.NONE,
        needs=(Need(Facts.AWAY, "{step} brings back what has not left, or may still be on its way"),),
        ends=(Facts.AWAY,), gives=(Facts.COMING, Facts.BACK), takes=(Amount(Workspaces.KEPT, _leaves),),
    )  # fmt: skip
    ONLOADED_ACT = Operation(
        lane=Lane.HOST, scope=Scope.BLOCK, over=Over.NONE, waits=True, is_aside=True, peers=Partners.NONE,
        needs=(Need(Facts.COMING, "{step} waits for what has not begun to come"),),
        ends=(Facts.COMING,), cause="host",
    )  # fmt: skip


def travel_of(leaves: int) -> Mapping[tuple[Operation, Phase | None], tuple[tuple[str, int], ...]]:
    """Return what the instructions of a block move, by direction of the link to host memory. leaves: as in
    `BlockShape`."""
    return {(Kept.OFFLOAD_ACT, None): ((OUT, leaves),), (Kept.ONLOAD_ACT, None): ((IN, leaves),)} if leaves else {}


_Passage = tuple[int, int | None]
"""A block and a microbatch."""


def insert_kept(instructions: Iterable[Instruction], shape: RankShape) -> Iterable[Instruction]:
    """Insert the instructions of what leaves into a program, or into an evaluation, where nothing does. Without any the
    program is unchanged."""
    return _inserted(list(instructions), shape) if shape.offloads else instructions


def _inserted(instructions: Sequence[Instruction], shape: RankShape) -> Iterator[Instruction]:
    leaving = leaves(instructions, shape)
    coming = {nth - 1: passage for passage, (_, nth) in leaving.items()}  # by the block during whose turn it comes
    backward = {(each.of, each.action.microbatch): each for each in instructions if each.do is Do.I}
    ending: list[Instruction] = []  # of what leaves: to be waited for, since another block has been computed
    begun: list[Instruction] = []
    turn = count()
    for each in instructions:
        # Behind what only begins: after a block's forward that is done before the model goes on, but for a wait.
        if ending and not each.do.begins:
            yield from ending
            ending.clear()
        if each.do not in _COMPUTED:
            yield each
            continue
        nth, passage = next(turn), (each.of, each.action.microbatch)
        if nth in coming:
            yield _of(Kept.ONLOAD_ACT, backward[coming[nth]])
        if each.do is Do.I and passage in leaving:
            yield _of(Kept.ONLOADED_ACT, each)
        yield each
        ending += begun
        begun.clear()
        if each.do is Do.F and passage in leaving:
            yield _of(Kept.OFFLOAD_ACT, each)
            begun.append(_of(Kept.OFFLOADED_ACT, each))


_COMPUTED = (Do.F, Do.I)


def _of(do: Operation, each: Instruction) -> Instruction:
    return Instruction(do, each.action, each.of)


def leaves(instructions: Iterable[Instruction], shape: RankShape) -> Mapping[_Passage, tuple[int, int]]:
    """Return the blocks and microbatches whose activations are offloaded, each with the positions of its forward and
    its backward among those of all blocks. `shape.offloads` is their share of all pairs, or of those of each stage."""
    places: defaultdict[_Passage, list[int]] = defaultdict(list)
    for nth, each in enumerate(each for each in instructions if each.do in _COMPUTED):
        places[each.of, each.action.microbatch].append(nth)
    kept = {passage: (each[0], each[1]) for passage, each in places.items() if len(each) > 1}
    of_block: defaultdict[int, list[_Passage]] = defaultdict(list)
    for passage in kept:
        of_block[passage[0]].append(passage)
    lives = {of: sum(kept[each][1] - kept[each][0] for each in own) / len(own) for of, own in of_block.items()}
    by_life = sorted(of_block, key=lambda of: (-lives[of], of))
    groups = [(shape.offloads, by_life)] if not isinstance(shape.offloads, tuple) else [
        (shape.offloads[index], [of for of in by_life if of in {block.index for block in stage.blocks}])
        for index, stage in shape.stages.items()
    ]  # fmt: skip
    chosen = [each for share, blocks in groups for each in _first(share, [of_block[of] for of in blocks])]
    return {
        each: kept[each] for each in chosen if kept[each][1] - kept[each][0] >= LEAST_LIFE and each[0] != shape.last
    }


def _first(share: float, blocks: Sequence[Sequence[_Passage]]) -> Iterator[_Passage]:
    """Yield a share of the passages of blocks, one block after the other. Those of a block of which only a part is
    offloaded are spread over the microbatches."""
    left = round(share * sum(map(len, blocks)))
    for own in blocks:
        taken = min(left, len(own))
        left -= taken
        yield from (each for nth, each in enumerate(own) if (nth + 1) * taken // len(own) > nth * taken // len(own))


def most_away(instructions: Iterable[Instruction], sizes: Mapping[int, int]) -> int:
    """Return the bytes of the buffers in host memory. Each is in use from the start of the copy there to the end of the
    copy back, and blocks of one size take turns in it. sizes: bytes that leave of each block, as far as they are
    known."""
    now, most = Counter[int](), Counter[int]()
    for each in instructions:
        if each.do in (Kept.OFFLOAD_ACT, Kept.ONLOADED_ACT):
            size = sizes.get(each.of, 0)
            now[size] += 1 if each.do is Kept.OFFLOAD_ACT else -1
            most[size] = max(most[size], now[size])
    return sum(size * count for size, count in most.items())
