"""n ranks equal one, in float64.

What meets is drawn: any two settings of a pipeline of two meet in `test_matrix.py`, and each layout on each mesh, with
and without a pipeline, in the benchmark `parity`.
"""

from __future__ import annotations

import pytest

from atoll.plans.layouts import ALL_LAYOUTS, EFFECTIVE
from atoll.testing.parity import Case, assert_parity
from atoll.testing.tiny import TinyConfig
from tests.drawn import drawn

EVERYTHING = TinyConfig.everything()


MESHES = [(2, 2), (1, 2), (2, 2), (2, 1), (2, 2), (1, 1)]
"""Groups, and ranks of a group: half of the cases have several of both."""


@pytest.mark.wide(3)
@pytest.mark.parametrize(("layout", "mesh"), drawn(27, [layout.name for layout in ALL_LAYOUTS], MESHES), ids=str)
def test_every_layout_without_pipeline(layout: str, mesh: tuple[int, int]) -> None:
    inter, intra = mesh
    assert_parity(Case(layout=layout, inter=inter, intra=intra, model=EVERYTHING))


@pytest.mark.parametrize(("layout", "in_place"), drawn(6, ["NNN", "NIG", "III", "IIG", "GGG"], [True, False]))
def test_three_ranks_in_a_group(layout: str, in_place: bool) -> None:
    """Where a sum of two is right, one of three may not be: each rank's place in it is another case."""
    assert_parity(Case(layout=layout, intra=3, microbatches=6, reads_in_place=in_place, model=EVERYTHING))


@pytest.mark.parametrize("layout", ["NNN", "NIG", "III", "IIG", "GGG"])
def test_three_groups(layout: str) -> None:
    assert_parity(Case(layout=layout, inter=3, microbatches=6, model=EVERYTHING))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "mesh"), drawn(4, ["NNG", "IGG", "IIG", "GGG"], [(3, 2), (2, 3)]), ids=str)
def test_three_along_one_axis_and_two_along_the_other(layout: str, mesh: tuple[int, int]) -> None:
    inter, intra = mesh
    assert_parity(Case(layout=layout, inter=inter, intra=intra, microbatches=6, model=EVERYTHING))


@pytest.mark.wide(2)
@pytest.mark.parametrize(("layout", "schedule"), drawn(14, [layout.name for layout in EFFECTIVE], ["gpipe", "1f1b"]))
def test_effective_layouts_in_a_pipeline(layout: str, schedule: str) -> None:
    assert_parity(Case(layout=layout, pipeline=2, inter=2, intra=2, schedule=schedule, model=EVERYTHING))


DIFFICULTIES = {
    "tied": TinyConfig(tied=True),
    "frozen": TinyConfig(frozen=True),
    "odd": TinyConfig(odd=True),
    "small": TinyConfig(small=True),
    "unused": TinyConfig(unused=True),
    "dropout": TinyConfig(dropout=0.2),
}


@pytest.mark.slow
@pytest.mark.parametrize(("difficulty", "layout"), drawn(6, list(DIFFICULTIES), ["NNG", "IIG", "GGG"]))
def test_each_difficulty_alone(difficulty: str, layout: str) -> None:
    model = DIFFICULTIES[difficulty]
    assert_parity(Case(layout=layout, inter=2, intra=2, model=model))
    assert_parity(Case(layout=layout, pipeline=2, intra=2, model=model))


@pytest.mark.parametrize(("layout", "recompute"), drawn(4, ["NNN", "IIG", "GGG"], ["block", "selective"]))
def test_recompute(layout: str, recompute: str) -> None:
    assert_parity(Case(layout=layout, pipeline=2, intra=2, recompute=recompute, model=EVERYTHING))


def test_larger_microbatches_without_clipping() -> None:
    assert_parity(Case(layout="IGG", inter=2, intra=2, microbatch=3, clip=None, model=EVERYTHING))


def test_a_pipeline_of_four_stages_with_fewer_microbatches_than_ranks() -> None:
    for schedule in ("gpipe", "1f1b"):
        case = Case(layout="GGG", pipeline=4, schedule=schedule, microbatches=2, model=EVERYTHING)
        assert_parity(case)


@pytest.mark.slow
def test_the_schedules_agree_to_the_last_bit() -> None:
    """Both keep the order of microbatches, so they add the same numbers in the same order."""
    histories = [
        assert_parity(Case(layout="IIG", pipeline=2, inter=1, intra=2, schedule=schedule, model=EVERYTHING)).histories
        for schedule in ("gpipe", "1f1b")
    ]
    for one, other in zip(*histories, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        assert all((one.parameters[name] == other.parameters[name]).all() for name in one.parameters)
