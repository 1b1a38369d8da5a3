"""Lowering: from what is computed in which order to everything a rank does.

    compute-only      0F0
    + sharding        0UNSHARD 0F0 0RESHARD
    + messages        0UNSHARD 0F0 0SEND_F0 0RESHARD

The result is validated like any schedule: that it cannot deadlock is checked, not assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atoll.ir.action import Action, Op
from atoll.ir.residency import insert_sharding, refuse_if
from atoll.ir.schedule import Schedule
from atoll.ir.table import B, F, G, I, L, S, T, Table

_Actions = dict[int, list[Action]]


def lower(schedule: Schedule, **options: Any) -> Schedule:
    """Sharding actions, then messages: a message leaves before its stage is closed or its gradients are reduced.

    options: as `insert_sharding` has them.
    """
    return insert_messages(insert_sharding(schedule, **options))


def insert_messages(schedule: Schedule) -> Schedule:
    """SEND right after the producing action, RECV right before the consuming one; none inside one rank.

    Where a rank consumes in another order than its peer sends, the earlier messages of that pair are received first:
    the receives of a directed pair of ranks are in the sender's order. This adds no wait, since the peer sent them
    before the one that is waited for; so what could not deadlock still cannot. What travels to and from slices of the
    vocabulary has an order of its own for each of its kinds, which all slices have in common.

    Raises ScheduleError if messages are there already.
    """
    refuse_if(schedule.has_messages, schedule, "insert_messages", "a schedule without messages")
    table = schedule.table
    before, after = _messages(table)
    rows = []
    for rank in range(schedule.ranks):
        lowered: list[Action] = []
        for cell in range(table.offset[rank], table.offset[rank + 1]):
            lowered.extend(before.get(cell, ()))
            lowered.append(table.cells[cell])
            lowered.extend(after.get(cell, ()))
        rows.append(tuple(lowered))
    return Schedule(schedule.name, schedule.placement, schedule.microbatches, tuple(rows))


def _messages(table: Table) -> tuple[_Actions, _Actions]:
    """Cell -> the receives before it, and cell -> the sends after it."""
    queues: dict[tuple[int, int, int], dict[int, Action]] = {}
    after: dict[int, dict[Action, None]] = {}
    consumers = [(needed, cell) for cell, needed in enumerate(table.need) if table.crosses[cell]]
    consumers += [(needed, cell) for cell, others in table.others.items() for needed in others]
    for needed, cell in sorted(consumers):
        action, made, used = table.cells[cell], table.code[needed], table.code[cell]
        if used == T:  # what it works on is known before the gradient is, with the scores
            continue
        sent = Op.SEND_F if made == F else Op.SEND_B if made in (I, B) else _SENDS[made]
        maker = table.cells[needed]
        after.setdefault(needed, {})[Action(maker.stage, sent, maker.microbatch)] = None
        pair = (table.rank[needed], table.rank[cell], -1)
        if made in _SENDS or used in _RECEIVES:
            pair = (-1, table.rank[cell], made if made in _SENDS else used)
        received = _RECEIVES.get(used, Op.RECV_F if used == F else Op.RECV_B)
        queues.setdefault(pair, {}).setdefault(cell, Action(action.stage, received, action.microbatch))

    before: _Actions = {}
    for queue in queues.values():
        _place_receives(queue, len(table.cells), before)
    if table.has_vocabulary:
        _place_totals(table, before)
    return before, {cell: list(sends) for cell, sends in after.items()}


_SENDS = {L: Op.SEND_L, S: Op.SEND_S}
_RECEIVES = {S: Op.RECV_S, T: Op.RECV_T, G: Op.RECV_G}


def _place_receives(queue: Mapping[int, Action], end: int, before: _Actions) -> None:
    """Puts the receives of one order, given by their consumers in the sender's order, before cells.

    Walking back from the last message, each is received before its consumer and before any later message.
    """
    latest = end
    placed: list[tuple[int, Action]] = []
    for cell, receive in reversed(list(queue.items())):
        latest = min(latest, cell)
        placed.append((latest, receive))
    for cell, receive in reversed(placed):
        before.setdefault(cell, []).append(receive)


def _place_totals(table: Table, before: _Actions) -> None:
    """SEND_T right after the last stage's RECV_B; RECV_T before each T of another rank, in the sender's order."""
    last = table.placement.stages - 1
    order: list[int] = []
    for cell in sorted(before):
        received = before[cell]
        for at in range(len(received) - 1, -1, -1):
            action = received[at]
            if action.op is Op.RECV_B and action.stage == last and table.at[T][action.microbatch or 0] >= 0:
                received.insert(at + 1, replace(action, op=Op.SEND_T))
        order += [action.microbatch or 0 for action in received if action.op is Op.SEND_T]
    for rank in range(table.placement.ranks):
        if rank != table.rank_of_stage[last]:
            cells = [table.at[T][rank * table.microbatches + microbatch] for microbatch in order]
            queue = {cell: replace(table.cells[cell], op=Op.RECV_T) for cell in cells}
            _place_receives(queue, len(table.cells), before)
