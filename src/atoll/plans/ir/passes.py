"""Lowering: from an order of compute actions to all actions of a rank.

    compute-only      0F0
    + sharding        0UNSHARD 0F0 0RESHARD
    + messages        0UNSHARD 0F0 0SEND_F0 0RESHARD

The result is validated like any schedule, so it is checked to be free of deadlocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.residency import insert_sharding, refuse_if
from atoll.plans.ir.schedule import Schedule
from atoll.plans.ir.table import B, F, G, I, L, S, T, Table

_Actions = dict[int, list[Action]]


def lower(schedule: Schedule, **options: Any) -> Schedule:
    """Insert sharding actions, then messages: a send precedes the close of its stage and the reduction of its
    gradients.

    options: see `insert_sharding`.
    """
    return insert_messages(insert_sharding(schedule, **options))


def insert_messages(schedule: Schedule) -> Schedule:
    """Insert SEND directly after the producing action and RECV directly before the consuming one; none inside one rank.

    If a rank consumes in another order than its peer sends, the earlier messages of that pair are received first: the
    receives of a directed pair of ranks are in the sender's order. This adds no wait, since the peer sent them before
    the awaited one; so it cannot introduce a deadlock. Messages to and from slices of the vocabulary have a separate
    order for each of their kinds, common to all slices.

    Raises ScheduleError if the schedule has messages already.
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
    return replace(schedule, actions=tuple(rows))


def _messages(table: Table) -> tuple[_Actions, _Actions]:
    """Return the receives before each cell, and the sends after each cell."""
    queues: dict[tuple[int, int, int], dict[int, Action]] = {}
    after: dict[int, dict[Action, None]] = {}
    consumers = [(needed, cell) for cell, needed in enumerate(table.need) if table.crosses[cell]]
    consumers += [(needed, cell) for cell, others in table.others.items() for needed in others]
    for needed, cell in sorted(consumers):
        action, made, used = table.cells[cell], table.code[needed], table.code[cell]
        if used == T:  # its input is known before the gradient is, with the scores
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
    """Place the receives of one order, given by their consumers in the sender's order, before cells.

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
    """Place SEND_T directly after the last stage's RECV_B, and RECV_T before each T of another rank, in the sender's
    order."""
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
