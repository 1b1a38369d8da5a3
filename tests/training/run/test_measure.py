"""What ranks tell rank 0 of a step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.plans.plan import MeshShape
from atoll.program import Do
from atoll.training.run import measure
from atoll.training.run.measure import share_timing


class Store(dict[str, str]):
    """A store in which nobody may write what another has written."""

    def set(self, key: str, value: str) -> None:
        assert key not in self, f"{key} was written twice"
        self[key] = value


def engine_of(mesh: MeshShape, rank: int, barrier: Callable[[], object]) -> Any:
    """An engine whose rank took as many seconds as its number for one forward, and 2 more for another."""
    taken = {(Do.F, 0): [float(rank), rank + 2.0], (Do.STEP, -1): [1.0]}
    return SimpleNamespace(
        place=mesh.place(rank), transport=SimpleNamespace(barrier=barrier), timing=SimpleNamespace(taken=lambda: taken)
    )


@pytest.mark.parametrize("mesh", [MeshShape(pipeline=3), MeshShape(pipeline=2, inter=2, intra=2, tensor=2)], ids=str)
def test_rank_0_hears_from_one_rank_of_each_pipeline_rank(mesh: MeshShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others come while rank 0 waits for them."""
    store = Store()
    monkeypatch.setattr(measure, "world_store", lambda: store)

    def others() -> None:
        for rank in range(1, mesh.world):
            assert share_timing(engine_of(mesh, rank, lambda: None)) is None

    first = [min(rank for rank in range(mesh.world) if mesh.place(rank).pp == pp) for pp in range(mesh.pipeline)]
    assert share_timing(engine_of(mesh, 0, others)) == [
        [
            {"do": "F", "of": 0, "times": 2, "seconds": 2.0 * rank + 2.0, "shortest": float(rank)},
            {"do": "STEP", "of": -1, "times": 1, "seconds": 1.0, "shortest": 1.0},
        ]
        for rank in first
    ]


def test_a_rank_alone_tells_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "world_store", lambda: None)
    timing = share_timing(engine_of(MeshShape(), 0, lambda: None))
    assert timing is not None
    assert [row["do"] for row in timing[0]] == ["F", "STEP"]
