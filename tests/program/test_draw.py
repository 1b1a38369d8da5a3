"""A program in columns and as a picture."""

from __future__ import annotations

import re

from atoll.plans import schedules
from atoll.plans.ir import lower
from atoll.program import Do, Program, lower_row
from atoll.program.draw import draw_program, listing
from tests.program.shapes import shapes_of


def small(limit: int = 100) -> Program:
    schedule = schedules.build("1f1b", ranks=2, microbatches=2)
    return lower_row(lower(schedule).actions[1], shapes_of(schedule.placement, blocks=1, limit=limit)[1])


def test_bytes_are_written_where_they_change() -> None:
    lines = list(listing(small(), microbatch=1))
    assert [line.split()[1:] for line in lines[1:]] == [
        ["1POST_F1"],
        ["1RECV_F1"],
        ["1F1.1"],
        ["1FINISH_F1"],
        ["1START_I1"],
        ["1I1.1", "200", "B"],
        ["FREE", "2", "0", "B"],
        ["REDUCE", "2", "I"],
        ["SYNC", "2", "I"],
        ["1FINISH_I1"],
        ["1SEND_B1"],
        ["1W1.u2", "200", "B"],
        ["REDUCE", "2", "W"],
        ["SYNC", "2", "W"],
        ["REDUCED", "2", "I", "100", "B"],
        ["1FINISH_W1"],
        ["DRAIN"],
    ]


def test_a_picture_has_a_bar_for_all_that_takes_time() -> None:
    program = small()
    text = draw_program(program, title="small")
    titles = re.findall(r"<g><title>([^<]+)</title>", text)
    computed = [str(each) for each in program.instructions if each.do in (Do.F, Do.I, Do.W)]
    assert [title for title in titles if title in computed] == computed
    assert titles.count("gather 2") == sum(each.do in (Do.FETCH, Do.WHOLE) for each in program.instructions)
    assert titles.count("reduce 2 W") == 2
    assert titles.count("1RECV_F1") == 1
    assert "<svg" in text
    assert "small</text>" in text
