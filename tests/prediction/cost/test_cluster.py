"""Clusters as TOML, and what link each axis of a mesh has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.base.errors import ConfigError
from atoll.plans.plan import MeshShape
from atoll.prediction.cost import Cluster, Efficiency, presets

TWO_NODES = """
[device]
preset = "a100-80gb"
context = 1_000_000_000

[node]
devices = 8
cards = 4
link = { preset = "nvlink3", reach = 0.8 }

[network]
preset = "infiniband-hdr"
"""


def cluster(folder: Path, text: str = TWO_NODES) -> Cluster:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return Cluster.read(path)


def test_presets_stand_for_their_tables_and_keys_beside_them_replace_theirs(tmp_path: Path) -> None:
    found = cluster(tmp_path)
    assert found.device.rate("bfloat16") == 312e12
    assert found.device.context == 1_000_000_000
    assert found.node.link.goodput == 240e9
    assert found.network is not None
    assert found.network.rate == 25e9


def test_a_key_of_the_efficiency_replaces_that_of_the_preset_alone(tmp_path: Path) -> None:
    preset = cluster(tmp_path).device.efficiency
    found = cluster(tmp_path, TWO_NODES.replace("[node]", "efficiency = { memory = 0.123 }\n[node]")).device.efficiency
    assert found == preset.model_copy(update={"memory": 0.123})
    assert preset.products != Efficiency().products


def test_presets_of_devices_come_with_the_constants_of_the_published_fit() -> None:
    """`benchmarks/published/fit.py --devices` writes both files."""
    path = Path(__file__).parents[3] / "benchmarks" / "published" / "presets.json"
    fits = json.loads(path.read_text(encoding="utf-8"))
    assert set(fits) == set(presets()["devices"])
    for name, found in fits.items():
        assert presets()["devices"][name]["efficiency"] == found["efficiency"], name
        assert 0.0 < found["efficiency"]["spread"] < 1.0, name


@pytest.mark.parametrize("kind", ["devices", "links"])
def test_every_preset_is_a_device_or_a_link_and_names_its_source(kind: str) -> None:
    for name in presets()[kind]:
        link = {"preset": name} if kind == "links" else {"rate": 1e9}
        device = {"preset": name} if kind == "devices" else {"preset": "h200"}
        found = Cluster.of({"device": device, "node": {"devices": 1, "link": link}})
        assert (found.device if kind == "devices" else found.node.link).source, name


@pytest.mark.parametrize(
    ("mesh", "axis", "rate"),
    [
        (MeshShape(intra=8), "intra", 240e9),  # a node's own
        (MeshShape(inter=2, intra=8), "inter", 25e9 * 4 / 8),  # eight groups with a rank a node: half a card each
        (MeshShape(inter=2, intra=4), "inter", 240e9),  # one node
        (MeshShape(inter=4, intra=4), "inter", 25e9 * 4 / 4),  # four groups with two ranks in each node
        (MeshShape(inter=1, intra=16), "intra", 25e9 * 4),  # one group with eight in each: all cards
        (MeshShape(pipeline=2, inter=1, intra=1, tensor=8), "pp", 25e9 * 4 / 8),
        (MeshShape(pipeline=2, inter=1, intra=1, tensor=8), "tp", 240e9),
        (MeshShape(pipeline=16), "pp", 25e9 * 4),
    ],
)
def test_ranks_of_a_node_share_its_cards(tmp_path: Path, mesh: MeshShape, axis: str, rate: float) -> None:
    assert cluster(tmp_path).along(mesh, axis).rate == rate


@pytest.mark.parametrize("rate", [1e-3, 1.0, 1e9])
def test_rates_are_any_numbers_above_zero(rate: float) -> None:
    """In bytes and operations of whatever a second is."""

    def of(rate: float) -> Cluster:
        device = {"memory": 1, "bandwidth": rate, "rates": {"float32": rate}}
        return Cluster.of({"device": device, "node": {"devices": 2, "link": {"rate": rate}}})

    found = of(rate)
    assert found.node.link is not None
    assert found.device.bandwidth == found.device.rate("float32") == found.node.link.rate == rate
    for wrong in (0.0, -rate):
        with pytest.raises(ConfigError, match=r"device\.bandwidth: Input should be greater than 0"):
            of(wrong)


def test_ranks_that_share_a_card_share_its_burst() -> None:
    link = {"rate": 1e9, "burst": 1e6}
    found = Cluster.of({"device": {"preset": "a100-80gb"}, "node": {"devices": 2, "link": link}, "network": link})
    across = found.along(MeshShape(inter=2, intra=2), "inter")
    assert (across.rate, across.burst) == (5e8, 5e5)
    assert found.along(MeshShape(inter=2, intra=2), "intra").burst == 1e6


def test_an_axis_that_leaves_the_only_node_is_refused(tmp_path: Path) -> None:
    alone = cluster(tmp_path, TWO_NODES.split("[network]")[0])
    with pytest.raises(ConfigError, match=r"'intra' are 16 apart, a node has 8 devices and the cluster no \[network\]"):
        alone.along(MeshShape(intra=16), "intra")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("a100-80gb", "a100-60gb", "no preset 'a100-60gb' among the devices; known: a100-40gb, "),
        ("infiniband-hdr", "hdr", "no preset 'hdr' among the links; known: nvlink3, "),
        ("cards = 4", "cards = 0", "node.cards: Input should be greater than or equal to 1"),
        ("cards = 4", "nics = 4", "node.nics: Extra inputs are not permitted"),
        ("reach = 0.8", "reach = 1.8", "node.link.reach: Input should be less than or equal to 1"),
        ("context = 1", "rates = { int4 = 1e15 }\ncontext = 1", "rates of int4; known dtypes: bfloat16, "),
        ("[network]", "[network", "cannot read the cluster"),
    ],
)
def test_what_is_no_cluster_is_refused(tmp_path: Path, before: str, after: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster(tmp_path, TWO_NODES.replace(before, after))
    assert words in str(caught.value)


def test_a_node_of_one_device_needs_no_link() -> None:
    tables = {"device": {"preset": "h200"}, "node": {"cards": 2}, "network": {"rate": 1e9, "latency": 1e-6}}
    alone = Cluster.of(tables)
    assert alone.along(MeshShape(inter=4), "inter").rate == 2e9
    assert alone.along(MeshShape(pipeline=2), "inter").seconds(1e9) == 0.0
    with pytest.raises(ConfigError, match=r"node: .*2 devices and no link between them; add \[node.link\]"):
        Cluster.of({**tables, "node": {"devices": 2}})


def test_a_dtype_without_a_rate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rate for float8, only for bfloat16, float16, float32, float64"):
        cluster(tmp_path).device.rate("float8")


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the cluster .*nowhere\.toml"):
        Cluster.read(tmp_path / "nowhere.toml")
