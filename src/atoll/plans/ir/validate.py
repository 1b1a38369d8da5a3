"""The laws of schedules. Each is a function Table -> violations. All of them are checked whenever a schedule is built.

A schedule may be forward-only, compute-only, or lowered: a law about absent actions holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from atoll.base.errors import ScheduleError
from atoll.plans.ir.action import COMPUTE_CODES, MICROBATCH_CODES, Action, Op
from atoll.plans.ir.table import (
    RECV_B,
    RECV_F,
    RECV_G,
    RECV_S,
    RECV_T,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    SEND_L,
    SEND_S,
    SEND_T,
    UNSHARD,
    B,
    F,
    G,
    I,
    L,
    S,
    T,
    Table,
    W,
)

DRAWN = 5
"""Maximum number of violations that are drawn; all are listed."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated law: the problem, a detail, and the cells (None if the cell is missing)."""

    law: str
    message: str
    cell: int | None = None
    detail: str = ""
    needed: tuple[int, ...] = ()


def at_home(table: Table) -> list[Violation]:
    """Every action has a stage of its rank, a microbatch of the step if its op needs one, and none otherwise."""
    found = []
    for cell in table.strays:
        action, rank = table.cells[cell], table.rank[cell]
        stages = table.placement.stages_of(rank)
        if action.stage not in stages:
            problem = f"{action} is not an action of this rank"
        elif action.op.is_of_slice and action.stage != rank:
            problem = f"{action} belongs to a slice of the vocabulary, named by the rank's first stage"
        elif action.op is Op.STEP:
            problem = f"{action} belongs at the end of a program, not in a schedule"
        elif action.op.is_sharding:
            problem = f"{action} has a microbatch, {action.op} applies to a whole stage"
        else:
            problem = f"{action} has a microbatch outside 0 to {table.microbatches - 1}"
        detail = f"rank {rank} runs stage(s) {', '.join(map(str, stages))}"
        found.append(Violation("at home", problem, cell, detail))
    return found


def no_repeats(table: Table) -> list[Violation]:
    """An action with a microbatch occurs at most once."""
    return [
        Violation(
            "no repeats",
            f"{table.cells[cell]} comes twice",
            cell,
            f"it already runs at step {table.step(first)}",
            (first,),
        )
        for cell, first in table.repeats
    ]


def one_forward(table: Table) -> list[Violation]:
    """Each stage runs each microbatch forward."""
    return [
        Violation("one forward", f"rank {_rank(table, key)} never runs {_name(table, key, Op.F)}")
        for key, cell in enumerate(table.at[F])
        if cell < 0
    ]


def whole_backward(table: Table) -> list[Violation]:
    """A microbatch runs backward on every stage, with all its slices, or on none: B, or I and W, never both."""
    full, inputs, weights = table.at[B], table.at[I], table.at[W]
    size, slices, found = table.microbatches, table.slices, []
    runs_backward = [False] * size
    for key in range(len(full)):
        if full[key] >= 0 or inputs[key] >= 0 or weights[key] >= 0:
            runs_backward[key % size // slices] = True
    for key in range(len(full)):
        i, w, b = inputs[key], weights[key], full[key]
        if b >= 0 and (i >= 0 or w >= 0):
            other = i if i >= 0 else w
            problem = f"{table.cells[b]} is a full backward, and {table.cells[other]} repeats a part of it"
            found.append(Violation("whole backward", problem, b, "needs either B, or I and W", (other,)))
        elif b < 0 and (i >= 0) != (w >= 0):
            cell = max(i, w)
            absent = _name(table, key, Op.W if i >= 0 else Op.I)
            found.append(Violation("whole backward", f"{table.cells[cell]} has no {absent}", cell, f"needs {absent}"))
        elif b < 0 and i < 0 and runs_backward[key % size // slices]:
            problem = f"rank {_rank(table, key)} never runs {_name(table, key, Op.B)}"
            others = "other stages" if slices == 1 else "other stages or slices"
            found.append(Violation("whole backward", problem, None, f"{others} run this microbatch backward"))
    return found


def order_on_rank(table: Table) -> list[Violation]:
    """On a rank F precedes I or B, and I precedes W; between stages of one rank results precede their use."""
    found = []
    for key, forward in enumerate(table.at[F]):
        for before, after in ((forward, table.gradient(key)), (table.at[I][key], table.at[W][key])):
            if before > after >= 0:
                problem = f"{table.cells[after]} runs before {table.cells[before]}"
                found.append(Violation("order on rank", problem, after, _where(table, before), (before,)))
    for cell, needed in enumerate(table.need):
        if needed > cell and not table.crosses[cell]:
            problem = f"{table.cells[cell]} runs before its input arrives"
            found.append(Violation("order on rank", problem, cell, _where(table, needed), (needed,)))
    return found


def slices_in_order(table: Table) -> list[Violation]:
    """A stage runs the slices of a microbatch forward from the first to the last, and backward from the last.

    A forward attends to the keys and values of earlier slices. Their gradients are whole after the backwards of all
    later slices. W has no such order.
    """
    found = []
    for key, forward in enumerate(table.at[F] if table.slices > 1 else ()):
        microbatch, late = divmod(key % table.microbatches, table.slices)
        if late == 0:
            continue
        which = f"slices {late - 1} and {late} of microbatch {microbatch}"
        for before, after in ((table.at[F][key - 1], forward), (table.gradient(key), table.gradient(key - 1))):
            if before > after >= 0:
                problem = f"{table.cells[after]} runs before {table.cells[before]}"
                detail = f"{_where(table, before)}: {which}"
                found.append(Violation("slices in order", problem, after, detail, (before,)))
    return found


def whole_vocabulary(table: Table) -> list[Violation]:
    """With a split vocabulary, every rank looks up and scores each microbatch, also in the backward if there is one."""
    if not table.has_vocabulary:
        return []
    found = []
    size = table.microbatches
    for key in range(table.placement.ranks * size):
        runs_backward = table.gradient(key % size) >= 0
        for op, is_wanted in ((Op.L, True), (Op.S, True), (Op.T, runs_backward), (Op.G, runs_backward)):
            cell = table.at[op.code][key]
            if is_wanted and cell < 0:
                problem = f"rank {key // size} never runs {_name(table, key, op)}"
                found.append(Violation("whole vocabulary", problem, None, "every rank has a slice of the vocabulary"))
            elif cell >= 0 and not is_wanted:
                problem = f"{table.cells[cell]} has a microbatch without a backward"
                found.append(Violation("whole vocabulary", problem, cell))
    return found


def messages_complete(table: Table) -> list[Violation]:
    """With messages: one send and one receive for every result that another rank uses, and no others.

    The send follows the action that produces its content, and the receive precedes the one that uses it.
    """
    if not table.has_messages:
        return []
    found: list[Violation] = []
    wanted: set[int] = set()
    size, places = table.microbatches, len(table.at[F])
    for key in range(places - size):
        if _rank(table, key) == _rank(table, key + size):
            continue
        below, above = key, key + size
        forward = (table.at[F][below], table.at[SEND_F][below], table.at[RECV_F][above], table.at[F][above])
        backward = (table.gradient(above), table.at[SEND_B][above], table.at[RECV_B][below], table.gradient(below))
        for producer, sent, received, consumer in (forward, backward):
            if producer >= 0 and consumer >= 0:
                wanted |= {sent, received}
                found += _message(table, producer, sent, received, consumer)
    for producer, sent, received, consumer in _vocabulary_messages(table):
        wanted |= {sent, received}
        found += _message(table, producer, sent, received, consumer)
    for cell, (code, key) in enumerate(zip(table.code, table.key, strict=True)):
        is_message = COMPUTE_CODES <= code < MICROBATCH_CODES
        if is_message and key >= 0 and table.at[code][key] == cell and cell not in wanted:
            reason = "no result is passed between ranks there"
            found.append(Violation(_COMPLETE, f"{table.cells[cell]} is not needed", cell, reason))
    return found


def _vocabulary_messages(table: Table) -> Iterator[tuple[int, int, int, int]]:
    """Yield (producer, send, receive, consumer) of messages between the slices of the vocabulary and the two ends."""
    if not table.has_vocabulary:
        return
    at, size = table.at, table.microbatches
    for key in range(table.placement.ranks * size):
        rank, first = divmod(key, size)
        last = len(at[F]) - size + first
        if rank != _rank(table, first):
            yield at[L][key], at[SEND_L][key], at[RECV_F][first], at[F][first]
            if at[G][key] >= 0:
                yield table.gradient(first), at[SEND_B][first], at[RECV_G][key], at[G][key]
        if rank != _rank(table, last):
            yield at[F][last], at[SEND_F][last], at[RECV_S][key], at[S][key]
            used = table.gradient(last)
            yield at[S][key], at[SEND_S][key], at[RECV_B][last], used if used >= 0 else len(table.cells) - 1
            if at[T][key] >= 0:
                yield at[RECV_B][last], at[SEND_T][last], at[RECV_T][key], at[T][key]


_COMPLETE = "messages complete"


def _message(table: Table, producer: int, sent: int, received: int, consumer: int) -> list[Violation]:
    cells, found = table.cells, []
    if sent < 0:
        problem = f"the result of {cells[producer]} is never sent"
        found.append(Violation(_COMPLETE, problem, producer, _who_needs(table, consumer), (consumer,)))
    elif sent < producer:
        problem = f"{cells[sent]} comes before the action whose result it sends"
        found.append(Violation(_COMPLETE, problem, sent, _where(table, producer), (producer,)))
    if received < 0:
        problem = f"the input of {cells[consumer]} is never received"
        found.append(Violation(_COMPLETE, problem, consumer, _where(table, producer), (producer,)))
    elif received > consumer:
        problem = f"{cells[consumer]} runs before its input arrives"
        found.append(Violation(_COMPLETE, problem, consumer, _where(table, received), (received,)))
    return found


def messages_in_order(table: Table) -> list[Violation]:
    """Receives of a directed pair of ranks, forward and backward together, are in the order of its sends.

    Messages to and from slices of the vocabulary have a separate order for each of their kinds.
    """
    found = []
    latest: dict[tuple[int, int, int], tuple[int, int]] = {}
    for cell, code in enumerate(table.code):
        if code not in _RECEIVES:
            continue
        for sent in table.needs(cell):
            is_pipeline = table.code[sent] == (SEND_F if code == RECV_F else SEND_B) and code <= RECV_B
            pair = (table.rank[sent], table.rank[cell], -1 if is_pipeline else code)
            last_sent, last_received = latest.get(pair, (-1, -1))
            if sent < last_sent:
                problem = f"{table.cells[cell]} comes after {table.cells[last_received]}, which is sent later"
                needed = (last_received, sent, last_sent)
                found.append(Violation("messages in order", problem, cell, _where(table, sent), needed))
            else:
                latest[pair] = (sent, cell)
    return found


_RECEIVES = frozenset({RECV_F, RECV_B, RECV_S, RECV_T, RECV_G})


def sharding_alternates(table: Table) -> list[Violation]:
    """For a stage with UNSHARD or RESHARD: the two alternate, and every F, I and B is between them."""
    found = []
    managed = {table.cells[cell].stage for cell, code in enumerate(table.code) if code in (UNSHARD, RESHARD)}
    last: dict[int, int] = {}  # stage -> the cell that opened or closed it last
    for cell, code in enumerate(table.code):
        stage = table.cells[cell].stage
        if stage not in managed:
            continue
        previous = last.get(stage)
        is_open = previous is not None and table.code[previous] == UNSHARD
        needed = () if previous is None else (previous,)
        if code in (F, I, B) and not is_open:
            problem = f"{table.cells[cell]} runs while its stage is closed"
            detail = f"needs {stage}UNSHARD before it"
            found.append(Violation("sharding alternates", problem, cell, detail, needed))
        if code in (UNSHARD, RESHARD):
            if is_open == (code == UNSHARD):
                state = "open" if is_open else "closed"
                problem = f"{table.cells[cell]} finds its stage {state} already"
                found.append(Violation("sharding alternates", problem, cell, "", needed))
            last[stage] = cell
    return found


def reductions_have_gradients(table: Table) -> list[Violation]:
    """For a stage with REDUCE_GRAD: each follows a W or B that it reduces, and every W or B is reduced."""
    found = []
    managed = {table.cells[cell].stage for cell, code in enumerate(table.code) if code == REDUCE_GRAD}
    pending: dict[int, int] = {}  # stage -> its last W or B that has not been reduced
    for cell, code in enumerate(table.code):
        stage = table.cells[cell].stage
        if code in (W, B):
            pending[stage] = cell
        elif code == REDUCE_GRAD and pending.pop(stage, None) is None:
            problem = f"{table.cells[cell]} has no gradient to reduce"
            found.append(Violation("reductions have gradients", problem, cell, "needs a W or B since the last one"))
    for stage, cell in pending.items():
        if stage in managed:
            problem = f"the gradients of {table.cells[cell]} are never reduced"
            found.append(Violation("reductions have gradients", problem, cell, f"needs {stage}REDUCE_GRAD after it"))
    return found


def executable(table: Table) -> list[Violation]:
    """If sends never block and receives do, every rank finishes."""
    blocked = table.blocked()
    if not blocked:
        return []
    first = {table.rank[cell]: cell for cell in blocked}
    waits = [_waits_for(table, cell, first) for _, cell in sorted(first.items())]
    cycle = _cycle(table, first)
    names = " -> ".join(f"rank {table.rank[cell]}" for cell in (*cycle, cycle[0]))
    problem = f"deadlock: {names}, each waiting for the next"
    return [Violation("executable", problem, cycle[0], "; ".join(waits), tuple(blocked))]


def _waits_for(table: Table, cell: int, first: Mapping[int, int]) -> str:
    needed = _awaited(table, cell, first)
    awaited = f"{table.cells[needed]} of rank {table.rank[needed]}"
    return f"rank {table.rank[cell]}: {table.cells[cell]} waits for {awaited}"


def _cycle(table: Table, first: dict[int, int]) -> list[int]:
    """Return the blocked cells that wait for each other. A rank on which a blocked one depends is itself blocked before
    it."""
    path: list[int] = []
    cell = min(first.values())
    while cell not in path:
        path.append(cell)
        cell = first[table.rank[_awaited(table, cell, first)]]
    return path[path.index(cell) :]


def _awaited(table: Table, cell: int, first: Mapping[int, int]) -> int:
    """Return the cell that a blocked cell waits for; of several, one after the first blocked cell of its rank."""
    return next(needed for needed in table.needs(cell) if first.get(table.rank[needed], needed + 1) <= needed)


Law = Callable[[Table], list[Violation]]

LAWS: tuple[Law, ...] = (
    at_home,
    no_repeats,
    one_forward,
    whole_backward,
    order_on_rank,
    slices_in_order,
    whole_vocabulary,
    messages_complete,
    messages_in_order,
    sharding_alternates,
    reductions_have_gradients,
    executable,
)


def violations(table: Table) -> list[Violation]:
    """Return all violations of all laws."""
    return [violation for law in LAWS for violation in law(table)]


def check_table(name: str, table: Table) -> None:
    """Raise one ScheduleError that lists all violations and draws the first few."""
    found = violations(table)
    if not found:
        return
    parts = [] if len(found) == 1 else [f"schedule {name!r} breaks {len(found)} laws"]
    for number, violation in enumerate(found):
        parts.append(_describe(table, violation) + ("\n\n" + excerpt(table, violation) if number < DRAWN else ""))
    raise ScheduleError("\n\n".join(parts))


def _describe(table: Table, violation: Violation) -> str:
    cell = violation.cell
    place = "" if cell is None else f"rank {table.rank[cell]}, step {table.step(cell)}: "
    detail = f"\n  {violation.detail}" if violation.detail else ""
    return f"{place}{violation.message}  [{violation.law}]{detail}"


def excerpt(table: Table, violation: Violation) -> str:
    """Return the grid around the violation's cells, by steps: marked cells in brackets, some steps to either side."""
    reach = 6
    marked = [cell for cell in (violation.cell, *violation.needed) if cell is not None]
    steps = [table.step(cell) for cell in marked] or [0]
    ranks = sorted({table.rank[cell] for cell in marked}) or list(range(min(table.placement.ranks, 8)))
    first, last = max(0, min(steps) - reach), max(steps) + reach
    if last - first > 8 * reach:  # far apart: only the surroundings of the cell itself
        first, last = max(0, steps[0] - reach), steps[0] + reach

    def text(rank: int, step: int) -> str:
        cell = table.offset[rank] + step
        if cell >= table.offset[rank + 1]:
            return ""
        return f"[{table.cells[cell]}]" if cell in marked else str(table.cells[cell])

    columns = range(first, 1 + min(last, max(table.offset[rank + 1] - table.offset[rank] for rank in ranks) - 1))
    grid = [[text(rank, step) for step in columns] for rank in ranks]
    widths = [max(len(str(step)), *(len(row[at]) for row in grid)) + 2 for at, step in enumerate(columns)]
    lines = ["  step    " + "".join(str(step).ljust(width) for step, width in zip(columns, widths, strict=True))]
    for rank, row in zip(ranks, grid, strict=True):
        line = f"  rank {rank:<3}" + "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(line + _mark(table, violation, rank))
    return "\n".join(line.rstrip() for line in lines)


def _mark(table: Table, violation: Violation, rank: int) -> str:
    if violation.cell is not None and table.rank[violation.cell] == rank:
        return "  <-- here"
    return "  <-- needed" if any(table.rank[cell] == rank for cell in violation.needed) else ""


def _rank(table: Table, key: int) -> int:
    return table.rank_of_stage[key // table.microbatches]


def _name(table: Table, key: int, op: Op) -> str:
    return str(Action(key // table.microbatches, op, key % table.microbatches))


def _where(table: Table, cell: int) -> str:
    return f"needs {table.cells[cell]}, which rank {table.rank[cell]} runs at step {table.step(cell)}"


def _who_needs(table: Table, cell: int) -> str:
    return f"needed by {table.cells[cell]}, which rank {table.rank[cell]} runs at step {table.step(cell)}"
