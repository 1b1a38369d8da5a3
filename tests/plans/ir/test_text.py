import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import ScheduleError
from atoll.plans.ir import Placement, lower
from atoll.plans.ir.text import from_csv, from_text, to_csv, to_text
from atoll.plans.schedules import build
from tests.plans.ir.shapes import SLICED, V, random_schedule, typed


def test_picture() -> None:
    assert to_text(build("gpipe", ranks=2, microbatches=2)) == (
        "# gpipe: line, ranks 2, chunks 1, microbatches 2\n"
        "0F0 0F1 .   .   0B0 0B1\n"
        ".   1F0 1F1 1B0 1B1\n"
    )  # fmt: skip


def test_picture_of_csv() -> None:
    assert to_csv(build("gpipe", ranks=2, microbatches=2)) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"


def test_picture_of_slices() -> None:
    """Numbers stay those that torch reads: slice 1 of microbatch 1 is 3."""
    text = to_text(typed(*SLICED, slices=2))
    assert text == (
        "# typed: line, ranks 2, chunks 1, microbatches 2, slices 2\n"
        "0F0 0F1 0F2 0F3 0B1 .   0B0 .   .   .   0B3 0B2\n"
        ".   1F0 1F1 1I1 1F2 1I0 1W0 1F3 1W1 1I3 1I2 1W2 1W3\n"
    )
    assert from_text(text).slices == 2


@given(st.integers(0, 100_000), st.sampled_from([1, 4]), st.booleans())
def test_round_trips(seed: int, most_slices: int, lowered: bool) -> None:
    schedule = random_schedule(seed, most_slices=most_slices)
    schedule = lower(schedule) if lowered else schedule
    slices = schedule.slices
    assert from_text(to_text(schedule)) == schedule
    assert from_csv(to_csv(schedule), name="random", placement=schedule.placement, slices=slices) == schedule


def test_a_csv_does_not_say_that_it_has_slices() -> None:
    csv = to_csv(typed(*SLICED, slices=2))
    assert (from_csv(csv).microbatches, from_csv(csv, slices=2).whole_microbatches) == (4, 2)
    with pytest.raises(ScheduleError, match="numbers 4 slices, and each microbatch has 3"):
        from_csv(csv, slices=3)


def test_actions_that_torch_overlaps_are_read() -> None:
    """The CSV that torch 2.13 dumps of its ScheduleDualPipeV, of two ranks and four microbatches."""
    text = (
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,"
        "0I2,0W2,0I3,0W3\n"
        "1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,"
        "2I3,1I3,2W3,1W3\n"
    )
    schedule = from_csv(text)
    assert schedule.placement == Placement("v", 2, 2)
    assert [str(action) for action in schedule.actions[0][6:10]] == ["3F1", "0F3", "3B1", "3F2"]
    assert to_csv(schedule).count("F") == 16
    for wrong in ("(0F0;0B0)OVERLAP_B_W", "(0F0;)OVERLAP_F_B", "(0F0;x)OVERLAP_F_B"):
        with pytest.raises(ScheduleError, match="rank 0: "):
            from_csv(f"{wrong},0B0\n1F0,1B0\n")


def test_csv_without_placement_finds_one() -> None:
    assert from_csv(to_csv(typed(*V, kind="v", chunks=2))).placement == Placement("v", 2, 2)
    assert from_csv("0F0,2F0\n1F0,3F0\n").placement == Placement("loop", 2, 2)
    assert from_csv("0F0\n1F0\n").placement == Placement("line", 2)
    with pytest.raises(ScheduleError, match="no placement"):
        from_csv("0F0,1F0\n2F0,3F0\n")


def test_empty_cells_are_skipped() -> None:
    assert from_csv("0F0,,,0B0\r\n,1F0,1B0,\r\n") == from_csv("0F0,0B0\n1F0,1B0\n")


def test_torch_accepts_the_csv() -> None:
    """torch's own parser and validator read ours, and find a compute-only 1F1B of theirs in it."""
    from torch.distributed.pipelining.schedules import _Action, _validate_schedule

    text = to_csv(build("1f1b", ranks=4, microbatches=6))
    order = {
        rank: [_Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(io.StringIO(text.strip()))
    }
    _validate_schedule(order, pp_group_size=4, num_stages=4, num_microbatches=6)


def test_errors_name_the_row() -> None:
    with pytest.raises(ScheduleError, match="rank 1: '1X0' is not an action"):
        from_csv("0F0\n1X0\n")
    with pytest.raises(ScheduleError, match="begins with a line such as"):
        from_text("0F0\n1F0\n")
    with pytest.raises(ScheduleError, match="begins with a line such as"):
        from_text("")
    with pytest.raises(ScheduleError, match="no action"):
        from_csv("\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0\r1F0", "the schedule is not CSV"),
        ("0F" + "9" * 5000, "is not an action"),
        ("0F9999999", "too few for 1 stages and 10000000 microbatches"),
        ("9999999F0", "no placement"),
    ],
)
def test_a_csv_that_names_more_than_it_has_is_refused_at_once(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        from_csv(text)


def test_a_grid_that_names_more_than_it_has_is_refused_at_once() -> None:
    with pytest.raises(ScheduleError, match="has 1 actions, too few for 9999999 stages and 9999999 microbatches"):
        from_text("# a: loop, ranks 1, chunks 9999999, microbatches 9999999\n0F0")
    with pytest.raises(
        ScheduleError, match="has 1 actions, too few for 1 stages and 9999999 microbatches of 99 slices"
    ):
        from_text("# a: line, ranks 1, chunks 1, microbatches 9999999, slices 99\n0F0")
    with pytest.raises(ScheduleError, match="at least 1 microbatch, not 0"):
        from_text("# a: line, ranks 1, chunks 1, microbatches 9, slices 0\n0F0")
