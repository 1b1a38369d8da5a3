"""Memory over a step: what a rank holds after each instruction of its program, beside what it keeps between steps
(`atoll.plans.layouts.state`).

It is one fold over what the rows allocate and free, with the sizes of the rank's shape (`held_after`, `held_in`). What
a program may hold at once, and what it receives meanwhile, follows from the shapes of blocks before there is a program
(`working_memory`): programs are lowered within it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple

from atoll.plans.layouts import (
    AT_ONCE,
    GATHER_PARAMETER,
    ITEM_BYTES,
    REDUCE_GRADIENT,
    SYNC_GRADIENT,
    SYNC_PARAMETER,
    Axis,
    Level,
    MoveKind,
    Moves,
    SegmentShape,
    Sharding,
)
from atoll.program.fold import OF_STEP, Key, Resolved, phase_of
from atoll.program.instruction import Instruction
from atoll.program.operation import Amount, Operation, Per, Phase, Sharing, Workspace
from atoll.program.shape import RankShape, UnitShape, WeightShape, by_messages


class Bytes(NamedTuple):
    """Bytes of one rank that its program alone says.

    parameters: whole copies, and gathers in flight that use their memory.  staged: gathered for others of the group to
    read.  gradients: whole gradients until they are reduced.  matrices: what the optimizer transforms whole, from its
    collection to its update.  state: what rests in host memory and is here for the optimizer's step.
    """

    parameters: int = 0
    staged: int = 0
    gradients: int = 0
    matrices: int = 0
    state: int = 0


class Peaks(NamedTuple):
    """The most bytes of each component of `Bytes` that a program has at once. lent: of gradients that others of the
    group read, a part of `gradients`."""

    parameters: int = 0
    staged: int = 0
    gradients: int = 0
    matrices: int = 0
    state: int = 0
    lent: int = 0


class Working(NamedTuple):
    """All bytes of one rank that come and go within a step: those of `Bytes`, and

    sharded: sharded gradients that are not kept between steps.  arriving: received while gradients are reduced.
    activations: kept by F, L and S.  pending: kept by I for W and G.  passing: within an instruction.
    messages: buffers of messages between stages.  buffers: messages of slices of a split vocabulary.
    """

    parameters: int = 0
    staged: int = 0
    gradients: int = 0
    matrices: int = 0
    state: int = 0
    sharded: int = 0
    arriving: int = 0
    activations: int = 0
    pending: int = 0
    passing: int = 0
    messages: int = 0
    buffers: int = 0


class Held(NamedTuple):
    """Bytes of a rank at one time, by component.

    parameters, gradients, optimizer: stored state, sharded gradients while they exist, and state from host memory while
    it is here.
    gathered: whole copies, and prefetched parameters.  buffers: whole gradients during backward and reduction, their
    receive buffers, messages that slices of a split vocabulary receive and send, and matrices that the optimizer
    transforms whole.
    activations: kept by F, L and S.  pending: kept by I for W and G.  passing: within an operation.
    context: taken by the driver.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    buffers: int = 0
    activations: int = 0
    pending: int = 0
    passing: int = 0
    context: int = 0

    @property
    def total(self) -> int:
        """Sum of all components."""
        return sum(self)

    @property
    def allocated(self) -> int:
        """Bytes allocated on the device: all except the driver's."""
        return self.total - self.context


# ---- the fold


class _Change(NamedTuple):
    """An allocation, or what is freed. part: number of its component.  size: bytes; None for all."""

    part: int
    buffer: tuple[Workspace, Key]
    size: int | None


def held_after(instructions: Iterable[Instruction], shape: RankShape) -> Iterator[Bytes]:
    """Yield the working memory after each instruction, and within those that take more than they leave."""
    return (Bytes(*parts) for parts in _sums(instructions, shape, Bytes._fields))


def peaks(instructions: Iterable[Instruction], shape: RankShape) -> Peaks:
    """Return the peak bytes of each component. Where some units lend their gradients and others do not, the peaks of
    both are added."""
    most = _most(instructions, shape)
    making = {index: unit for index, unit in shape.units.items() if any(unit.flows.values())}
    lent = {index for index, unit in making.items() if _lends(unit, shape)}
    private = making.keys() - lent
    if not lent or not private:
        return Peaks(*most, lent=most.gradients if lent else 0)
    reserved = _most(instructions, _without_flows(shape, private)).gradients
    own = _most(instructions, _without_flows(shape, lent)).gradients
    return Peaks(*most._replace(gradients=reserved + own), lent=reserved)


def _most(instructions: Iterable[Instruction], shape: RankShape) -> Bytes:
    most = Bytes()
    for held in held_after(instructions, shape):
        most = Bytes(*map(max, most, held))
    return most


def _lends(unit: UnitShape, shape: RankShape) -> bool:
    """Return True if the other ranks of the group read the gradients of a unit in place."""
    return shape.reads_in_place and unit.sharding is not None and unit.sharding.nest.intra > 1


def _without_flows(shape: RankShape, units: Collection[int]) -> RankShape:
    none = {index: replace(shape.units[index], flows=dict.fromkeys(shape.units[index].flows, 0)) for index in units}
    return replace(shape, units={**shape.units, **none})


def held_in(instructions: Sequence[Instruction], shape: RankShape, before: Held) -> Iterator[Held]:
    """Yield all memory of a rank after each instruction, and within those that take more than they leave.

    before: what it holds before the first one, without sharded gradients that come in the step.

    A message's buffer is allocated when its receive is posted, and reused after the microbatch's W, so that as many
    stay allocated as were in use at once. In between, a received activation is the input that the stage's first block
    saves, and a received gradient is kept by its last block for W: `BlockShape.kept` is without the former.
    """
    room = sum(_room_of_messages(instructions, each) for each in by_messages(shape))
    return (_beside(before, parts, room) for parts in _sums(instructions, shape, Working._fields))


def peak_in(instructions: Sequence[Instruction], shape: RankShape, before: Held, *, rest: Held) -> Held:
    """Return the first with the largest total of `rest` and of `held_in`; only sums of the others are computed."""
    room = sum(_room_of_messages(instructions, each) for each in by_messages(shape))
    messages = Working._fields.index("messages")
    own = before.total - before.passing + room  # what passes is of an instruction
    most, found = rest.total - own, None
    for parts in _sums(instructions, shape, Working._fields):
        total = sum(parts) - parts[messages]
        if total > most:
            most, found = total, parts
    return rest if found is None else _beside(before, found, room)


def _beside(before: Held, parts: Sequence[int], room: int) -> Held:
    now = Working(*parts)
    return Held(
        before.parameters,
        before.gradients + now.sharded,
        before.optimizer + now.state,
        gathered=before.gathered + now.parameters + now.staged,
        buffers=before.buffers + now.gradients + now.matrices + now.arriving + now.buffers,
        activations=before.activations + now.activations + room,
        pending=before.pending + now.pending,
        passing=now.passing,
        context=before.context,
    )


def _room_of_messages(instructions: Sequence[Instruction], shape: RankShape) -> int:
    return max((messages for (messages,) in _sums(instructions, shape, ("messages",))), default=0)


def _sums(instructions: Iterable[Instruction], shape: RankShape, names: tuple[str, ...]) -> Iterator[list[int]]:
    """Yield the bytes of components after each instruction, with those that it allocates and frees itself."""
    parts = [0] * len(names)
    held: dict[tuple[Workspace, Key], int] = {}
    turns: dict[Workspace, list[int]] = {}
    known: dict[tuple[Operation, int, Phase | None, int, int], tuple[list[_Change], ...]] = {}
    slices = max(1, len(shape.of_slices))
    instructions = tuple(instructions)
    for amount in chain.from_iterable(do.frees for do in {each.do for each in instructions}):
        workspace = amount.workspace
        if workspace.before is not None and workspace.part in names:
            held[workspace, OF_STEP] = workspace.before(shape)
            parts[names.index(workspace.part)] += held[workspace, OF_STEP]
    for step in instructions:
        do, action, of, phase = step
        number = (action.microbatch or 0) % slices
        found = known.get((do, of, phase, action.stage, number))
        if found is None:
            found = known[do, of, phase, action.stage, number] = _changes(step, shape.of_slice(number), names)
        frees, takes, within = found
        for part, buffer, size in frees:
            if buffer[0].shared is Sharing.TOGETHER:
                parts[part] -= _left(turns[buffer[0]], size or 0)
            else:
                parts[part] -= _freed(held, buffer, size)
        for part, buffer, size in takes:
            if buffer[0].shared is Sharing.TOGETHER:
                parts[part] += _joined(turns.setdefault(buffer[0], []), size or 0)
            else:
                parts[part] += _taken(held, buffer, size or 0)
        if within:
            most = list(parts)
            for part, _, size in within:
                most[part] += size or 0
            yield most
        else:
            yield list(parts)


def _freed(held: dict[tuple[Workspace, Key], int], buffer: tuple[Workspace, Key], size: int | None) -> int:
    """Free a buffer, or a part of it, and return the bytes."""
    own = held.pop(buffer, 0)
    if size is None:
        return own
    if own > size:
        held[buffer] = own - size
    return size


def _taken(held: dict[tuple[Workspace, Key], int], buffer: tuple[Workspace, Key], size: int) -> int:
    """Allocate a buffer and return the bytes that this adds."""
    own = held.get(buffer, 0)
    more = size if buffer[0].shared is Sharing.EACH else max(0, size - own)
    held[buffer] = own + more
    return more


def _joined(turns: list[int], size: int) -> int:
    """Add one that uses a buffer in turns with others, and return the bytes by which it grows."""
    before = max(turns, default=0)
    turns.append(size)
    return max(0, size - before)


def _left(turns: list[int], size: int) -> int:
    """Remove one, and return the bytes by which the buffer shrinks."""
    before = max(turns)
    turns.remove(size)
    return before - max(turns, default=0)


def _changes(step: Instruction, shape: RankShape, names: tuple[str, ...]) -> tuple[list[_Change], ...]:
    """Return what an instruction frees, takes, and takes within itself; nothing of no bytes."""
    resolved = Resolved.of(step, shape)
    found = tuple(
        list(_allocations(each, resolved, shape, names)) for each in (step.do.frees, step.do.takes, step.do.within)
    )
    for name, nbytes in shape.besides.get((step.do, step.action.stage), {}).items():
        if name in names and nbytes:
            own = Workspace(name, Per.STAGE, Sharing.EACH), (step.action.stage, None)
            found[2 if name == "passing" else 1].append(_Change(names.index(name), own, nbytes))
    return found


def _allocations(
    amounts: Iterable[Amount], resolved: Resolved, shape: RankShape, names: tuple[str, ...]
) -> Iterator[_Change]:
    for amount in amounts:
        workspace = amount.workspace
        if workspace.part not in names:
            continue
        for key in resolved.keys(workspace.per, of_all=amount.of_all):
            size = amount.size and amount.size(_object(shape, workspace.per, key, resolved.stage), phase_of(key))
            if size != 0:
                yield _Change(names.index(workspace.part), (workspace, key), size)


def _object(shape: RankShape, per: Per, key: Key, stage: int) -> object:
    """Return what a size is asked of."""
    if per is Per.WEIGHT:
        return shape.stages[stage].weights.get(key[0], WeightShape())
    of: Mapping[Per, Mapping[int, object]] = {Per.BLOCK: shape.blocks, Per.STAGE: shape.stages}
    return shape if per is Per.STEP else of.get(per, shape.units)[key[0]]


# ---- what a program may hold


def reduced_at_once(prefetch: int | None) -> int:
    """Reductions in flight while the next one's gradients are computed: none if nothing is prefetched."""
    return 0 if prefetch == 0 else 1


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """Bytes of one rank.

    live: whole copies of parameters.  ahead: prefetched parameters; part of `live` or `lent`.
    lent: reserved permanently for blocks that the ranks of a group read in place.  buffers: whole gradients until they
    are reduced, and their receive buffers.  flows: whole gradients until they are reduced; part of `lent` or `buffers`.
    arriving: the receive buffers, part of `buffers`.
    matrices: those that the optimizer transforms whole, at the end of a step, when nothing else is whole.
    state: what rests in host memory and comes for the optimizer's step, then.
    """

    live: int
    ahead: int
    lent: int
    buffers: int
    flows: int
    arriving: int = 0
    matrices: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        """Largest sum of all of them at the same time."""
        return max(self.live + self.buffers, self.matrices, self.state) + self.lent


def working_memory(
    blocks: Sequence[Sequence[tuple[SegmentShape, Sharding]]],
    *,
    reads_in_place: bool,
    prefetch: int | None = None,
    whole: int | None = None,
    made: tuple[int, int] | None = None,
    matrices: int = 0,
    state: int = 0,
) -> WorkingMemory:
    """The working memory of a rank for `blocks`, each given by the segments that it uses, with their layouts.

    reads_in_place: whether the ranks of a group read each other's memory, as they do on one host's CPUs.
    prefetch: bytes that may be gathered ahead; None: what one block needs for each link that a gather crosses; 0 lets
    no reduction run beside the computation either.
    whole, made: the most bytes of whole parameters, and of whole gradients that are made and reduced, in memory of this
    rank alone and in memory that the group reads, which a program has at once; None: one block after the other, each
    freed after its use and reduced in its microbatch.
    matrices: the most bytes that a program has of matrices which the optimizer transforms whole.
    state: the same of state that rests in host memory.
    """
    each = [_block(block, reads_in_place=reads_in_place) for block in blocks]

    def largest(part: str) -> int:
        return max((getattr(sizes, part) for sizes in each), default=0)

    staged, behind = largest("staged"), reduced_at_once(prefetch)
    ahead = largest("ahead") if prefetch is None or not largest("ahead") else prefetch
    private, lent = made or ((behind + 1) * largest("flow"), (behind + 1) * largest("lent"))
    at_worst = max((behind + 1) * largest("lent"), lent)
    # Without prefetch, one staged part is enough: it is released before the next is allocated.
    reserved = (max(ahead, (behind + 1) * staged) if staged else 0) + at_worst
    limit = ahead if not staged else 0
    return WorkingMemory(
        live=largest("whole") + limit if whole is None else whole,
        ahead=ahead,
        lent=reserved,
        buffers=largest("arriving") + private,
        flows=private + lent,
        arriving=largest("arriving"),
        matrices=matrices,
        state=state,
    )


def needed_in_a_step(shape: RankShape, peaks: Peaks | None = None) -> WorkingMemory:
    """Return the memory of a step beyond stored state and activations. peaks: of the rank's program, once there is one.

    A gather between ranks that read each other's memory is a copy, so less is prefetched, and a reduction between them
    needs no buffer for its inputs.
    """
    used = [block.units for block in shape.blocks.values()] + [(unit,) for unit in shape.slices.values()]
    return working_memory(
        [[each for unit in units for each in shape.units[unit].sharded_segments] for units in used],
        reads_in_place=shape.reads_in_place,
        prefetch=shape.prefetch,
        whole=None if peaks is None else peaks.parameters,
        made=None if peaks is None else (peaks.gradients - peaks.lent, peaks.lent),
        matrices=0 if peaks is None else peaks.matrices,
        state=0 if peaks is None else peaks.state,
    )


def arriving_bytes(segments: Sequence[SegmentShape], sharding: Sharding, *, reads_in_place: bool) -> int:
    """Return what a unit's reduction and sync receive from other ranks, beside the gradients themselves."""
    return _block([(segment, sharding) for segment in segments], reads_in_place=reads_in_place).arriving


class _Block(NamedTuple):
    """Bytes of one block.

    whole: its gathered copy.  staged: the part of it that other ranks of the group read.  ahead: what a prefetch holds,
    for each link that it crosses.  flow: its gradients, in memory of this rank alone.  lent: those that the others
    read.  arriving: received from other ranks while gradients are reduced and synced.
    """

    whole: int = 0
    staged: int = 0
    ahead: int = 0
    flow: int = 0
    lent: int = 0
    arriving: int = 0


def _block(segments: Sequence[tuple[SegmentShape, Sharding]], *, reads_in_place: bool) -> _Block:
    """Return the bytes of a block, added up over its segments.

    reads_in_place: whether the ranks of a group read each other's memory.
    """
    sums = _Block()
    for sharding in dict.fromkeys(sharding for _, sharding in segments):
        own = [segment for segment, its in segments if its == sharding]
        found = _of_view(own, sharding, is_shared=reads_in_place and sharding.nest.intra > 1)
        links = [move.axis for move in sharding.real(GATHER_PARAMETER[sharding.layout.parameters])]
        crossed = [axis for axis in links if axis is not Axis.INTRA or not reads_in_place]
        # From host memory it crosses one link more.
        crossed_first = any(map(sharding.rests_on_host, own))
        has_to_travel = found.whole > 0 and (sharding.nest.intra < 2 or not reads_in_place or found.staged > 0)
        ahead = max(1, len(crossed) + crossed_first) * (found.staged or found.whole) if has_to_travel else 0
        sums = _Block(*(one + other for one, other in zip(sums, found._replace(ahead=ahead), strict=True)))
    return sums


def _of_view(segments: Sequence[SegmentShape], sharding: Sharding, *, is_shared: bool) -> _Block:
    """Return the same of segments with one layout. is_shared: whether there are others in the group, and they read each
    other's memory."""
    nest, layout = sharding.nest, sharding.layout
    p, g, os = layout.parameters, layout.gradients, layout.optimizer
    whole = sum(map(sharding.whole_bytes, segments))
    flow = arriving = 0
    for segment in segments:
        padded = segment.map.padded
        arriving += AT_ONCE * _arriving(GATHER_PARAMETER[p], "parameter", sharding, segment, is_shared=is_shared)
        if segment.trainable:
            gradient = ITEM_BYTES[sharding.precision.gradient]
            syncs = AT_ONCE * gradient
            flow += sharding.flow_bytes(segment) * len(segment.phases)
            if g is not Level.N:
                arriving += _arriving(REDUCE_GRADIENT[g], "gradient", sharding, segment, is_shared=is_shared)
            coarse = min(g, os)
            # What rests in host memory is not read in place.
            in_place = is_shared and not sharding.gradients_on_host
            arriving += AT_ONCE * _arriving(SYNC_GRADIENT[g, os], "gradient", sharding, segment, is_shared=in_place)
            arriving += AT_ONCE * _arriving(SYNC_PARAMETER[os, p], "parameter", sharding, segment, is_shared=is_shared)
            if not nest.is_same(coarse, g):
                arriving += syncs * len(nest.range(coarse, padded))
    staged = whole // nest.intra if is_shared and p is Level.G and nest.inter > 1 else 0
    return _Block(whole, staged, flow=0 if is_shared else flow, lent=flow if is_shared else 0, arriving=arriving)


def _arriving(
    moves: Moves,
    of: Literal["gradient", "parameter"],
    sharding: Sharding,
    segment: SegmentShape,
    *,
    is_shared: bool,
) -> int:
    """Bytes that the most demanding of some moves needs beside the buffer itself: received blocks of a reduction,
    encoded blocks that are sent and received."""
    nest, dtype = sharding.nest, sharding.precision.gradient
    sizes = [0]
    for move in moves:
        ranks, block = nest.size(move.axis), sharding.block_bytes(segment, of, move, dtype)
        if sharding.codec(of, move) is not None:
            sizes.append((2 if move.kind is MoveKind.REDUCE else 1) * ranks * block)
        elif move.kind is MoveKind.REDUCE and not (is_shared and move.axis is Axis.INTRA):
            sizes.append((ranks - 1) * block)
    return max(sizes)
