"""Plans of configs on other worlds than they were written for."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.base.errors import ConfigError
from atoll.training.config import Config
from atoll.training.config.load import from_dict
from atoll.training.config.worlds import check_world, fit_to_world


def config(least: int | None = 1, **parallel: Any) -> Config:
    sizes = {"ranks": 8, "pipeline": 2, "intra": 2, "layout": "IGI", **parallel}
    if least is not None:
        sizes["min_ranks"] = least
    return from_dict({"train": {"global_batch": 16, "microbatch": 1}, "parallel": sizes})


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (16, ()),
        (8, ()),
        (4, ()),  # the groups alone give way
        (2, ("parallel.intra=1",)),
        (1, ("parallel.pipeline=1", "parallel.intra=1")),
    ],
)
def test_groups_give_way_before_the_pipeline(world: int, expected: tuple[str, ...]) -> None:
    assert fit_to_world(config(), world) == expected


def test_as_little_gives_way_as_can() -> None:
    large = config(pipeline=4, intra=4, ranks=32)
    assert fit_to_world(large, 8) == ("parallel.intra=2",)
    assert fit_to_world(large, 2) == ("parallel.pipeline=2", "parallel.intra=1")


def test_what_is_fitted_has_the_same_batch_layout_and_schedule() -> None:
    whole = config(tensor=2, schedule="interleaved", chunks=2)
    given = fit_to_world(whole, 4)
    assert given == ("parallel.intra=1",)
    fitted = from_dict(whole.model_dump(exclude_none=True), overrides=given)
    before, after = whole.to_plan(8), fitted.to_plan(4)
    assert (after.mesh.world, after.mesh.tensor, after.mesh.pipeline) == (4, 2, 2)
    assert (after.layout, after.schedule.name, after.microbatch) == (before.layout, before.schedule.name, 1)
    batches = [plan.schedule.microbatches * plan.microbatch * plan.mesh.data for plan in (before, after)]
    assert batches == [16, 16]


@pytest.mark.parametrize(("world", "expected"), [
    (8, ()),
    (4, ("parallel.intra=2", "parallel.sequence=2")),
    (2, ("parallel.intra=1", "parallel.sequence=1")),
    (6, ("parallel.intra=3", "parallel.sequence=1")),  # 4 ranks of a group of 12 are no divisor of 3
])  # fmt: skip
def test_ranks_of_smaller_groups_divide_sequences(world: int, expected: tuple[str, ...]) -> None:
    divided = config(intra=12 if world == 6 else 4, sequence=4, ranks=24 if world == 6 else 8, layout="GGG")
    divided = from_dict({**divided.model_dump(exclude_none=True), "train": {"global_batch": 24, "microbatch": 1}})
    found = fit_to_world(divided, world)
    assert found == expected
    mesh = from_dict(divided.model_dump(exclude_none=True), overrides=found).to_plan(world).mesh
    assert mesh.intra % mesh.sequence == 0


def test_without_min_ranks_nothing_is_changed() -> None:
    assert fit_to_world(config(None), 2) == ()
    with pytest.raises(ConfigError, match=r"the launched world = 2 is not a multiple of pipeline \* tensor \* intra"):
        config(None).to_plan(2)


def test_a_world_that_nothing_fits_is_refused_with_those_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"min_ranks = 1, worlds of 1, 2, 4, 8 ranks have a plan$"):
        fit_to_world(config(), 3)


def test_a_split_of_layers_keeps_its_pipeline() -> None:
    split = config(layers_per_stage=(3, 5))
    assert fit_to_world(split, 2) == ("parallel.intra=1",)
    with pytest.raises(ConfigError, match=r"worlds of 2, 4, .* ranks have a plan"):
        fit_to_world(split, 1)


@pytest.mark.parametrize("world", [1, None])
def test_fewer_ranks_than_the_fewest_are_refused(world: int | None) -> None:
    with pytest.raises(ConfigError, match=r"1 is fewer than parallel\.min_ranks = 2"):
        check_world(config(2, ranks=1), world)


def islands(ranks: int, intra: int) -> Config:
    parallel = {"ranks": ranks, "min_ranks": 1, "intra": intra, "outer": {"every": 4}}
    return from_dict({"parallel": parallel, "train": {"global_batch": 24, "microbatch": 1}})


@pytest.mark.parametrize(("ranks", "intra", "world", "left"), [(4, 2, 2, 1), (4, 2, 3, 1), (8, 4, 6, 2), (8, 4, 4, 2)])
def test_outer_steps_keep_two_groups(ranks: int, intra: int, world: int, left: int) -> None:
    """Where half of the ranks are left, groups of two become groups of one; else groups stay as large as they can."""
    assert fit_to_world(islands(ranks, intra), world) == (f"parallel.intra={left}",)


def test_islands_that_are_left_keep_their_ranks() -> None:
    config = islands(6, 2)
    assert fit_to_world(config, 4) == ()
    assert config.to_plan(4).islands == 2


def test_one_island_does_not_continue_with_outer_steps() -> None:
    with pytest.raises(ConfigError, match=r"outer steps are between groups.* there is one") as refused:
        fit_to_world(islands(2, 1), 1)
    assert "with parallel.min_ranks = 1, worlds of 2 ranks have a plan" in str(refused.value)


def test_worlds_that_are_too_small_are_not_recommended() -> None:
    with pytest.raises(ConfigError, match=r"min_ranks = 3, worlds of 4, 8 ranks have a plan$"):
        fit_to_world(config(least=3), 7)
