import inspect
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.ir import Op
from atoll.ir.draw import draw
from atoll.schedules import CATALOGUE, Entry, Sizes, build
from atoll.sim import Costs, simulate

COST = st.floats(0.01, 10.0)


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=str)
def test_the_docstrings_drawing_is_true(entry: Entry) -> None:
    documentation = inspect.getdoc(entry.function) or ""
    drawing = [line.strip() for line in documentation.splitlines() if line.strip().startswith("rank ")]
    microbatches = 1 + max(int(number) for number in re.findall(r"F(\d+)", "\n".join(drawing)))
    assert draw(build(entry.name, ranks=len(drawing), microbatches=microbatches)).splitlines() == drawing


@pytest.mark.parametrize("name", CATALOGUE)
@given(ranks=st.integers(1, 16), microbatches=st.integers(1, 40), costs=st.tuples(COST, COST, COST))
def test_closed_forms(name: str, ranks: int, microbatches: int, costs: tuple[float, float, float]) -> None:
    entry, sizes = CATALOGUE[name], Sizes(ranks, microbatches, *costs)
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    for form, is_fused in ((entry.fused_bubble, True), (entry.early_bubble, False)):
        trace = simulate(schedule, Costs(*costs, fused_backward=is_fused))
        if form.holds(sizes):
            assert trace.makespan == pytest.approx(sizes.work + form.value(sizes), rel=1e-12)
        assert trace.peak_microbatches == tuple(entry.peak(sizes, rank) for rank in range(ranks))


@pytest.mark.parametrize("name", CATALOGUE)
def test_backwards_keep_the_microbatch_order(name: str) -> None:
    """Gradients are then summed in the same order under every schedule, bit for bit."""
    for row in build(name, ranks=4, microbatches=9).actions:
        for op in (Op.F, Op.B):
            assert [action.microbatch for action in row if action.op is op] == list(range(9))


def test_known_makespans() -> None:
    """The facts' example: p=4, m=16, F=I=W=20."""
    schedule = build("1f1b", ranks=4, microbatches=16)
    assert simulate(schedule, Costs(20, 20, 20, fused_backward=True)).makespan == 1140
    assert simulate(schedule, Costs(20, 20, 20)).makespan == 1080
    assert simulate(build("1f1b", ranks=8, microbatches=16), Costs(20, 20, 20)).makespan == 1240


def test_the_last_rank_of_1f1b_alternates_from_the_start() -> None:
    """Past bug of others: one of two published descriptions lets the last rank run one forward too many."""
    row = build("1f1b", ranks=4, microbatches=3).actions[-1]
    assert " ".join(map(str, row)) == "3F0 3B0 3F1 3B1 3F2 3B2"


def test_unknown_names_and_sizes() -> None:
    with pytest.raises(ConfigError, match=r"schedule '1f1' does not exist; did you mean '1f1b'\?: choose one of gpipe"):
        build("1f1", ranks=2, microbatches=2)
    with pytest.raises(ConfigError, match="did you mean 'gpipe'"):
        build("GPipe", ranks=2, microbatches=2)
    with pytest.raises(ConfigError, match="at least 1 of ranks, not 0"):
        build("gpipe", ranks=0, microbatches=2)
    with pytest.raises(ConfigError, match="at least 1 of microbatches, not -3"):
        build("gpipe", ranks=1, microbatches=-3)
    with pytest.raises(ConfigError, match="no option 'memory_limit'"):
        build("gpipe", ranks=1, microbatches=1, memory_limit=3)
