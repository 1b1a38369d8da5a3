import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import ScheduleError
from atoll.plans.ir import Placement

PLACEMENTS = st.one_of(
    st.builds(Placement, st.just("line"), st.integers(1, 20)),
    st.builds(Placement, st.just("loop"), st.integers(1, 20), st.integers(1, 6)),
    st.builds(Placement, st.just("v"), st.integers(1, 20), st.just(2)),
)


def test_picture() -> None:
    def stages(placement: Placement) -> list[tuple[int, ...]]:
        return [placement.stages_of(rank) for rank in range(placement.ranks)]

    assert stages(Placement("line", 4)) == [(0,), (1,), (2,), (3,)]
    assert stages(Placement("loop", 4, 2)) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert stages(Placement("v", 4, 2)) == [(0, 7), (1, 6), (2, 5), (3, 4)]


@given(PLACEMENTS)
def test_every_stage_has_one_rank_and_every_rank_its_chunks(placement: Placement) -> None:
    seen = [(stage, rank) for rank in range(placement.ranks) for stage in placement.stages_of(rank)]
    assert sorted(seen) == [(stage, placement.rank_of(stage)) for stage in range(placement.stages)]
    assert all(len(placement.stages_of(rank)) == placement.chunks for rank in range(placement.ranks))


@pytest.mark.parametrize(
    ("kind", "ranks", "chunks"),
    [("ring", 2, 1), ("line", 2, 2), ("v", 2, 1), ("v", 2, 3), ("line", 0, 1), ("loop", 2, 0)],
)
def test_impossible_placements_are_refused(kind: str, ranks: int, chunks: int) -> None:
    with pytest.raises(ScheduleError):
        Placement(kind, ranks, chunks)  # type: ignore[arg-type]


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ScheduleError, match="stage 8 does not exist"):
        Placement("v", 4, 2).rank_of(8)
    with pytest.raises(ScheduleError, match="rank 4 does not exist"):
        Placement("v", 4, 2).stages_of(4)
