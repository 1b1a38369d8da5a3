"""Several islands as TOML: a cluster for each, and its link to the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.base.errors import ConfigError
from atoll.prediction.cost import Archipelago, Cluster, read_cluster_of, read_hardware

TWO = """
[between]
rate = 125e6
latency = 0.02

[[island]]
name = "north"
nodes = 2
device = { preset = "h100-80gb" }
node = { devices = 8, cards = 8, link = { preset = "nvlink4" }, host = { preset = "dgx-h100" } }
network = { preset = "infiniband-ndr" }

[[island]]
name = "south"
device = { preset = "rtx4090" }
node = { devices = 4, link = { preset = "pcie4" } }
uplink = { preset = "ethernet-25", reach = 0.5 }
"""
ONE = """
device = { preset = "rtx4090" }
node = {}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "islands.toml").write_text(TWO, encoding="utf-8")
    return tmp_path / "islands.toml"


def problems(text: str, tmp_path: Path) -> str:
    path = tmp_path / "islands.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        Archipelago.read(path)
    return str(error.value)


def test_islands_are_clusters_with_an_uplink(path: Path) -> None:
    found = Archipelago.read(path)
    assert [*found] == ["north", "south"]
    assert len(found) == 2
    north, south = found.islands.values()
    assert (north.nodes, north.node.devices, south.node.devices) == (2, 8, 4)
    assert north.uplink is not None
    assert (north.uplink.rate, north.uplink.latency) == (125e6, 0.02)
    assert south.uplink is not None
    assert south.uplink.goodput == 3.125e9 / 2
    assert Cluster.of(north.tables()) == north


def test_a_file_is_of_one_cluster_or_of_islands_of_which_one_can_be_named(path: Path, tmp_path: Path) -> None:
    assert isinstance(read_hardware(path), Archipelago)
    assert read_hardware(path, "south") == read_cluster_of(path, "south") == Archipelago.read(path).island("south")
    other = tmp_path / "one.toml"
    other.write_text(ONE, encoding="utf-8")
    assert read_hardware(other) == read_cluster_of(other) == Cluster.read(other)
    assert read_cluster_of(other, "south") == Cluster.read(other)
    for read in (read_hardware, read_cluster_of):
        with pytest.raises(ConfigError, match="no island 'west' among north, south"):
            read(path, "west")
    with pytest.raises(ConfigError, match="islands north, south, and one cluster is needed"):
        read_cluster_of(path)
    with pytest.raises(ConfigError, match="describes islands"):
        Cluster.read(path)


def test_every_problem_is_named_with_its_island(tmp_path: Path) -> None:
    said = problems(
        TWO.replace('name = "north"\n', "").replace("pcie4", "pcie9") + "[network]\nrate = 1\n"
        '[[island]]\nname = "west"\nnodes = 0\nnode = {}\ncolour = 1',
        tmp_path,
    )
    for each in (
        "network: a key of an island",
        "island 1: name",
        "island south: no preset 'pcie9'",
        "island west: device: Field required",
        "island west: nodes: Input should be greater",
        "island west: colour: Extra inputs",
    ):
        assert each in said


def test_an_island_has_a_name_and_an_uplink_of_its_own_or_of_all(tmp_path: Path) -> None:
    assert "island north: 2 islands have this name" in problems(TWO.replace("south", "north"), tmp_path)
    assert "island north: uplink: its link" in problems(TWO.replace("[between]", "[beside]"), tmp_path)
    assert "two tables [[island]] or more" in problems("[between]\nrate = 1\n", tmp_path)
    assert "two tables [[island]] or more" in problems("island = 3", tmp_path)
    assert "cannot read" in problems("[", tmp_path)
