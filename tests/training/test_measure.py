"""What ranks tell rank 0 of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atoll.plans import MeshShape
from atoll.program import Do
from atoll.training import measure
from atoll.training.measure import share_timing


class Store(dict[str, str]):
    """A store in which nobody may write what another has written."""

    def set(self, key: str, value: str) -> None:
        assert key not in self, f"{key} was written twice"
        self[key] = value


def engine_of(mesh: MeshShape, rank: int, store: Store, wanted: int) -> Any:
    """An engine whose rank took as many seconds as its number. At a barrier the store has what was `wanted` if it is
    the last rank's."""
    transport = SimpleNamespace(barrier=lambda: None if rank else waited(store, wanted))
    taken = {(Do.F, 0): [float(rank), rank + 2.0], (Do.STEP, -1): [1.0]}
    return SimpleNamespace(place=mesh.place(rank), transport=transport, taken=lambda: taken)


def waited(store: Store, wanted: int) -> None:
    assert len(store) == wanted, "rank 0 reads before all have written"


@pytest.mark.parametrize("mesh", [MeshShape(pipeline=3), MeshShape(pipeline=2, inter=2, intra=2, tensor=2)], ids=str)
def test_rank_0_hears_from_one_rank_of_each_pipeline_rank(mesh: MeshShape, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(measure, "world_store", lambda: store)
    engines = [engine_of(mesh, rank, store, mesh.pipeline) for rank in range(mesh.world)]
    assert [share_timing(engine) for engine in engines[:0:-1]] == [None] * (mesh.world - 1)
    first = [min(rank for rank in range(mesh.world) if mesh.place(rank).pp == pp) for pp in range(mesh.pipeline)]
    assert share_timing(engines[0]) == [
        [
            {"do": "F", "of": 0, "times": 2, "seconds": 2.0 * rank + 2.0, "shortest": float(rank)},
            {"do": "STEP", "of": -1, "times": 1, "seconds": 1.0, "shortest": 1.0},
        ]
        for rank in first
    ]


def test_a_rank_alone_tells_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "world_store", lambda: None)
    timing = share_timing(engine_of(MeshShape(), 0, Store(), 0))
    assert timing is not None
    assert [row["do"] for row in timing[0]] == ["F", "STEP"]
