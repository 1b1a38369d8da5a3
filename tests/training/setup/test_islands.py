"""Plans and predictions of all islands of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import ConfigError
from atoll.prediction.cost import Archipelago
from atoll.training.config import Config, load
from atoll.training.setup.choosing import load_chosen
from atoll.training.setup.islands import island_overrides, plan_islands, predict_island, predict_islands
from atoll.training.setup.prediction import named_cluster
from tests.islands import FIXED, ISLANDS, OPEN, write_config

FEDERATION = """
[federation]
island = "south"
secret = "secret.txt"
pace = 1e6
islands = { north = "10.0.0.1:29600", south = "10.0.0.2:29600" }
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(parallel: str = FIXED, more: str = "") -> Config:
        return load(write_config(tmp_path, parallel, more))

    return written


def islands(config: Config) -> Archipelago:
    assert config.run.cluster is not None
    return Archipelago.read(config.run.cluster)


def test_a_plan_of_the_config_is_predicted_on_all_devices_of_each_island(write: Any) -> None:
    config = write()
    found = predict_islands(config, islands(config))
    assert [(row.name, row.devices, row.every) for row in found.rows] == [("north", 4, 8), ("south", 2, 8)]
    north = found.predictions["north"].plan
    assert (north.mesh.inter, north.mesh.intra) == (2, 2)
    assert north.outer is not None
    assert str(north.outer.apart).startswith("2 islands that come and go")
    alone = predict_island(config, islands(config), "north")
    assert alone.plan == north
    assert alone.outer is not None
    assert alone.outer.apart is not None


def test_a_plan_that_an_island_cannot_have_is_refused_with_its_name(write: Any) -> None:
    config = write(FIXED.replace("intra = 2", "intra = 4"))
    with pytest.raises(ConfigError, match=r"(?s)island south, 2 devices: .* `atoll plan` chooses a plan"):
        predict_islands(config, islands(config))
    with pytest.raises(ConfigError, match="no island 'west' among north, south"):
        predict_island(config, islands(config), "west")


def test_islands_need_outer_steps_and_the_names_of_the_federation(write: Any) -> None:
    config = write("[parallel]\nranks = 2")
    with pytest.raises(ConfigError, match=r"set parallel\.outer\.every"):
        predict_islands(config, islands(config))
    config = write(more=FEDERATION.replace("north", "west"))
    with pytest.raises(ConfigError, match="islands are west, south, and the cluster describes north, south"):
        plan_islands(config, islands(config))


def test_chosen_plans_become_configs_that_are_predicted_alike(write: Any) -> None:
    config = write(OPEN, FEDERATION)
    found = plan_islands(config, islands(config))
    assert found.federated.pace == 1e6
    assert predict_islands(config, islands(config)).rows == found.federated.rows
    for row in found.federated.rows:
        own = load_again(config, island_overrides(config, row.name, found.choices[row.name]))
        assert (own.federation is not None, own.parallel.auto) == (True, False)
        assert own.federation.island == row.name  # type: ignore[union-attr]
        again = predict_island(own, islands(own), row.name)
        assert again.played.seconds == pytest.approx(row.step)
        assert again.plan.global_batch == row.batch
        assert again.plan.outer is not None
        assert again.plan.outer.every == row.every
    slow = found.choices["south"]
    assert slow.outer.every < found.choices["north"].outer.every == 8
    assert f"parallel.outer.every={slow.outer.every}" in island_overrides(config, "south", slow)
    assert 'federation.island="north"' in island_overrides(config, "north", found.choices["north"])


def load_again(config: Config, overrides: tuple[str, ...]) -> Config:
    assert config.run.cluster is not None
    return load(Path(config.run.cluster).parent / "config.toml", overrides)


def test_a_run_is_on_the_cluster_of_its_own_island(write: Any, tmp_path: Path) -> None:
    config = write(more=FEDERATION)
    assert named_cluster(config) == islands(config).island("south")
    path = write_config(tmp_path, OPEN, FEDERATION)
    chosen, _ = load_chosen(path)
    assert chosen.parallel.ranks == 2  # of a launcher none, and none written: those of the island
    with pytest.raises(ConfigError, match="describes the islands north, south, and one cluster is needed"):
        named_cluster(write())
    assert ISLANDS in Path(config.run.cluster or "").read_text(encoding="utf-8")
