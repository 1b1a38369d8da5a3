"""Text formats of schedules: our grid, and torch.distributed.pipelining's CSV. Both are read and written."""

from __future__ import annotations

import csv
import io
import re

from atoll.base.errors import ScheduleError
from atoll.plans.ir.action import Action
from atoll.plans.ir.draw import IDLE, layout_rows
from atoll.plans.ir.placement import PLACEMENT_KINDS, Placement, PlacementKind
from atoll.plans.ir.schedule import ActionRows, Schedule

_OVERLAP = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")
_HEADER = re.compile(
    r"# (.+): (line|loop|v), ranks (\d{1,7}), chunks (\d{1,7}), microbatches (\d{1,7})(?:, slices (\d{1,7}))?", re.ASCII
)


def to_text(schedule: Schedule) -> str:
    """Return a header and a row of actions per rank, in columns of equal cost if the schedule is compute-only.

        # gpipe: line, ranks 2, chunks 1, microbatches 2
        0F0 0F1 .   .   0B0 0B1
        .   1F0 1F1 1B0 1B1

    With slices of sequences the header ends with `microbatches 2, slices 4`, and slice 3 of microbatch 1 is `0F7`.
    """  # fmt: skip
    rows = layout_rows(schedule, str)
    width = max(len(cell) for row in rows for cell in row)
    lines = [f"# {schedule}"] + [" ".join(cell.ljust(width) for cell in row).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def from_text(text: str) -> Schedule:
    """Parse the output of `to_text`. Raises ScheduleError for a wrong header or cell, or an order that breaks a law."""
    lines = [line.strip() for line in text.strip().splitlines()]
    match = _HEADER.fullmatch(lines[0]) if lines else None
    if match is None:
        raise ScheduleError("the text of a schedule begins with a line such as "
                            "'# 1f1b: line, ranks 4, chunks 1, microbatches 8'")  # fmt: skip
    name, kind, ranks, chunks, microbatches, slices = match.groups(default="1")
    placement = Placement(_kind(kind), int(ranks), int(chunks))
    rows = tuple(_parse_row(rank, line.split()) for rank, line in enumerate(lines[1:]))
    return Schedule(name, placement, int(microbatches) * int(slices), rows, int(slices))


def to_csv(schedule: Schedule) -> str:
    """Return torch's format: a line per rank, actions separated by commas."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([str(action) for action in row] for row in schedule.actions)
    return text.getvalue()


def from_csv(text: str, *, name: str = "csv", placement: Placement | None = None, slices: int = 1) -> Schedule:
    """Parse torch's format, compute-only or lowered; empty cells are skipped. Actions that overlap, such as
    `(0F3;3B1)OVERLAP_F_B`, are executed one after the other, as torch does.

    The format has no header: without `placement`, the first one that matches the stages of each rank is used (line, v,
    loop), and the number of microbatches is the largest one in the file. It cannot say either that numbers are those of
    `slices` slices of each microbatch. Raises ScheduleError if no placement matches.
    """
    try:
        lines = [line for line in csv.reader(io.StringIO(text)) if line]
    except csv.Error as error:
        raise ScheduleError(f"the schedule is not CSV: {error}") from error
    rows = tuple(_parse_row(rank, [each for cell in line for each in _apart(cell)]) for rank, line in enumerate(lines))
    if not any(rows):
        raise ScheduleError("the CSV of a schedule has one line of actions per rank, and this one has no action")
    microbatches = 1 + max((action.microbatch or 0) for row in rows for action in row)
    return Schedule(name, placement or _placement_of(rows), microbatches, rows, slices)


def _apart(cell: str) -> list[str]:
    """Return the actions of a cell: one, or two that overlap."""
    match = _OVERLAP.fullmatch(cell.strip())
    return [cell] if match is None else list(match.groups())


def _placement_of(rows: ActionRows) -> Placement:
    seen = [{action.stage for action in row} for row in rows]
    ranks = len(rows)
    chunks = max(len(stages) for stages in seen)
    for kind in ("line", "v", "loop"):
        if chunks != {"line": 1, "v": 2}.get(kind, chunks):
            continue
        placement = Placement(_kind(kind), ranks, chunks)
        if all(stages <= set(placement.stages_of(rank)) for rank, stages in enumerate(seen)):
            return placement
    found = "; ".join(f"rank {rank}: {', '.join(map(str, sorted(stages)))}" for rank, stages in enumerate(seen))
    raise ScheduleError(f"no placement ({', '.join(PLACEMENT_KINDS)}) puts these stages on these ranks: {found}")


def _parse_row(rank: int, cells: list[str]) -> tuple[Action, ...]:
    try:
        return tuple(Action.parse(cell) for cell in cells if cell.strip() not in ("", IDLE))
    except ScheduleError as error:
        raise ScheduleError(f"rank {rank}: {error}") from None


def _kind(text: str) -> PlacementKind:
    return next(kind for kind in PLACEMENT_KINDS if kind == text)
