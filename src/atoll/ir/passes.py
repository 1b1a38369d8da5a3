"""Lowering: from what is computed in which order to everything a rank does.

    compute-only      0F0
    + sharding        0UNSHARD 0F0 0RESHARD
    + messages        0UNSHARD 0F0 0SEND_F0 0RESHARD

The result is validated like any schedule: that it cannot deadlock is checked, not assumed.
"""

from __future__ import annotations

from typing import Any

from atoll.ir.action import Action, Op
from atoll.ir.residency import insert_sharding, refuse_if
from atoll.ir.schedule import Schedule
from atoll.ir.table import F, Table

_Receives = dict[int, list[Action]]
_Sends = dict[int, Action]


def lower(schedule: Schedule, **options: Any) -> Schedule:
    """Sharding actions, then messages: a message leaves before its stage is closed or its gradients are reduced.

    options: as `insert_sharding` has them.
    """
    return insert_messages(insert_sharding(schedule, **options))


def insert_messages(schedule: Schedule) -> Schedule:
    """SEND right after the producing action, RECV right before the consuming one; none inside one rank.

    Where a rank consumes in another order than its peer sends, the earlier messages of that pair are received first:
    the receives of a directed pair of ranks are in the sender's order. This adds no wait, since the peer sent them
    before the one that is waited for; so what could not deadlock still cannot.

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
            if cell in after:
                lowered.append(after[cell])
        rows.append(tuple(lowered))
    return Schedule(schedule.name, schedule.placement, schedule.microbatches, tuple(rows))


def _messages(table: Table) -> tuple[_Receives, _Sends]:
    """Cell -> the receives before it, and cell -> the send after it."""
    consumer = {needed: cell for cell, needed in enumerate(table.need) if needed >= 0 and table.crosses[cell]}
    queues: dict[tuple[int, int], list[int]] = {}
    after: _Sends = {}
    for cell in sorted(consumer):
        action, pair = table.cells[cell], (table.rank[cell], table.rank[consumer[cell]])
        queues.setdefault(pair, []).append(consumer[cell])
        after[cell] = Action(action.stage, Op.SEND_F if table.code[cell] == F else Op.SEND_B, action.microbatch)

    before: _Receives = {}
    for consumers in queues.values():
        _place_receives(table, consumers, before)
    return before, after


def _place_receives(table: Table, consumers: list[int], before: _Receives) -> None:
    """Puts the receives of one directed pair, given by their consumers in the sender's order, before cells.

    Walking back from the last message, each is received before its consumer and before any later message.
    """
    latest = len(table.cells)
    placed: list[tuple[int, Action]] = []
    for cell in reversed(consumers):
        latest = min(latest, cell)
        action = table.cells[cell]
        op = Op.RECV_F if table.code[cell] == F else Op.RECV_B
        placed.append((latest, Action(action.stage, op, action.microbatch)))
    for cell, receive in reversed(placed):
        before.setdefault(cell, []).append(receive)
