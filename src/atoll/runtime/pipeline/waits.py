"""Whom an instruction waits for: world ranks and axes, from the instruction's row.

The watch of a run names them if the instruction does not end, and an error in a message names the peer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile

from atoll.plans.ir import Action, Op, Schedule
from atoll.program import BACKWARD, Instruction, Partners
from atoll.program.operation import OPERATIONS, Side
from atoll.runtime.failure import Doing
from atoll.runtime.transport import Transport

_BY: Mapping[Side, int] = {Side.PREVIOUS: -1, Side.NEXT: 1}
_END: Mapping[Side, Side] = {Side.PREVIOUS: Side.FIRST, Side.NEXT: Side.LAST}
"""The end of the pipeline at which a stage has no neighbour on a side."""

_FED_FROM: Mapping[str, Side] = {"F": Side.PREVIOUS, "B": Side.NEXT}
"""The neighbour whose message a computation has received."""


class Waits:
    """The peers of one rank's instructions."""

    def __init__(self, transport: Transport, schedule: Schedule) -> None:
        self._transport = transport
        self._placement = schedule.placement
        self._rows: Sequence[Sequence[Action]] = schedule.actions
        self.ranks = transport.place.peers("pp")  # world rank of each pipeline rank
        self._peers = cache(transport.place.peers)  # of a thousand ranks they take milliseconds, for each instruction

    def rank_of(self, stage: int) -> int:
        """Return the world rank of a stage in this rank's pipeline."""
        return self.ranks[self._placement.rank_of(stage)]

    def describe(self, instruction: Instruction) -> Doing:
        """Return the text of an instruction, and the ranks that it may wait for."""
        peers, along = self._awaited(instruction)
        what = str(instruction)
        if str(instruction.action) not in what:
            what += f" of {instruction.action}"
        if peers:
            what += f" along {along} on the {instruction.do.lane} lane"
        return Doing(what, peers)

    def _awaited(self, instruction: Instruction) -> tuple[tuple[int, ...], str]:
        """Return the world ranks that must act before an instruction can end, and the axes between them."""
        peers, place = instruction.do.peers, self._transport.place
        if peers is Partners.NEIGHBOUR:
            peer = self.peer_of(instruction.action)
            return (tuple(self.ranks) if peer is None else (peer,)), "pp"
        if peers is Partners.NONE:
            return (), ""
        if peers is Partners.PIPELINE:
            return tuple(self.ranks), "pp"
        if peers is Partners.ALL:
            return self._transport.together, "every axis"
        data = ("intra",) if self._transport.has_islands else ("inter", "intra")
        if peers is Partners.STAGE:
            return self._peers(*data, "tp"), ", ".join((*data, "tp"))
        if peers is Partners.TENSOR:
            # Two axes that divide a group: the larger of them has all ranks of the other, or those at least that act.
            sizes = {"expert": place.mesh.expert, "sequence": place.mesh.sequence}
            within = [axis for axis, size in sizes.items() if size > 1]
            axes = [*within, *(("tp",) if place.mesh.tensor > 1 else ())]
            groups = [[axis, *axes[len(within) :]] for axis in within] or [axes]
            ranks = (rank for group in groups if group for rank in self._peers(*group))
            return tuple(sorted(set(ranks))), ", ".join(axes)
        axes = [axis for axis in data if place.mesh.sizes[axis] > 1]
        return self._peers(*axes) if axes else (), ", ".join(axes)

    def peer_of(self, action: Action) -> int | None:
        """Return the world rank that an action communicates with, or whose message it works on."""
        side = _side_of(action.op)
        if side is Side.FIRST:
            return self.rank_of(0)
        if side is Side.LAST:
            return self.rank_of(self._placement.stages - 1)
        if side is None or not 0 <= action.stage + _BY[side] < self._placement.stages:
            return None
        return self.rank_of(action.stage + _BY[side])

    def stale(self, later: Iterable[Action]) -> list[tuple[Action, int]]:
        """Return receives after the first backward of messages that were sent before the sender's first backward, and
        these senders."""
        # A sender's false start ended at its own TAKE_BACK, before its first backward. What it had sent by then, and
        # this rank has not received, comes before the same message of the right start.
        early = [set(takewhile(lambda action: action.op not in BACKWARD, row)) for row in self._rows]
        return [
            (receive, self.ranks[rank])
            for receive in later
            for rank, send in self._sends_of(receive)
            if send in early[rank]
        ]

    def _sends_of(self, receive: Action) -> Iterator[tuple[int, Action]]:
        """Yield the pipeline ranks, with their sends, that a receive of a forward waits for."""
        row = OPERATIONS.get(receive.op.name)
        if row is None or row.source is None or row.source[0] != "F":
            return
        stage = self._placement.stages if row.source[1] is Side.LAST else receive.stage
        if stage > 0:
            sender = stage - 1
            yield self._placement.rank_of(sender), Action(sender, Op.SEND_F, receive.microbatch)
            return
        # At the first stage a receive takes the messages of all ranks.
        sends = [each for each in OPERATIONS.values() if each.stands_for == row.name]
        for rank in range(len(self.ranks)):
            if rank != self._transport.place.pp:
                yield from ((rank, Action(rank, Op[send.name], receive.microbatch)) for send in sends)


def _side_of(op: Op) -> Side | None:
    """Return the stage that an action communicates with, as seen from its own; None if it is none, or all."""
    row = OPERATIONS.get(op.name)
    if row is None or op.name in _FED_FROM:
        return _FED_FROM.get(op.name)
    if row.source is not None:
        return row.source[1]
    if row.stands_for:
        source = OPERATIONS[row.stands_for].source
        return None if source is None else _END[source[1]]
    return row.to
