"""The measurement of a rank that was started for something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.prediction.cost import Cluster
from atoll.runtime import transport
from atoll.runtime.measuring import errand, measure
from atoll.runtime.measuring.errand import Errand
from atoll.runtime.rendezvous import Rendezvous

CLUSTER = Cluster.of(
    {"node": {"devices": 1}, "device": {"memory": 1 << 30, "bandwidth": 1e10, "rates": {"float32": 2e10}}}
)


@pytest.mark.parametrize("rank", range(3))
def test_every_rank_measures_and_the_first_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    path = tmp_path / "cluster.toml"
    done: list[Any] = []

    def measured(world: int, **given: Any) -> Cluster:
        done.append((world, given))
        return CLUSTER

    def run_here(rendezvous: Rendezvous, own: Any) -> int:
        own("store")
        return 0

    place = Rendezvous(rank, 3, rank, 3, "localhost", 1, agent_store=False)
    monkeypatch.setattr(errand, "torchrun_environment", lambda: place)
    monkeypatch.setattr(errand, "take_part", run_here)
    monkeypatch.setattr(measure, "measure_cluster", measured)
    monkeypatch.setattr(transport, "join", lambda *given, **_: done.append(given))
    monkeypatch.setattr(transport, "leave", lambda: done.append("left"))
    text = Errand(str(path), "cpu", "bfloat16", 0.01).dump()
    assert json.loads(text)["dtype"] == "bfloat16"
    assert errand.run_errand(text) == 0
    given = {"local": 3, "device": torch.device("cpu"), "seconds": 0.01, "dtypes": ("bfloat16",)}
    assert done == [(rank, 3, "store"), (3, given), "left"]
    assert path.exists() == (rank == 0)
    if rank == 0:
        assert Cluster.read(path).device.rates == CLUSTER.device.rates
