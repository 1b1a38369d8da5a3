"""Damage to checkpoints and token caches: a sample of `benchmarks/integrity`, whose page has the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks.integrity import bench
from benchmarks.integrity.mutations import MUTATIONS, Cache, Checkpoints, damage


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("subject", [Checkpoints, partial(Cache, lines=400)], ids=["checkpoints", "cache"])
def test_no_damage_is_read_without_an_error(tmp_path: Path, subject: Callable[[Path], Checkpoints | Cache]) -> None:
    found = damage(subject(tmp_path / "s"), 30, seed=7)
    bad = [each for each in found if each.end in ("wrong", "crashed")]
    assert bad == []
    assert {each.kind for each in found} == set(MUTATIONS)
    assert Counter(each.end for each in found)["refused"] > 20


@pytest.mark.slow
def test_damage_to_a_checkpoint_without_digests_does_no_more_than_change_values(tmp_path: Path) -> None:
    """The judge can see what is wrong: without digests some of the same damage goes unseen."""
    ends = Counter(each.end for each in damage(Checkpoints(tmp_path / "s", with_digests=False), 90, seed=7))
    assert ends["wrong"] > 5
    assert ends["crashed"] == 0


def test_the_page_adds_up() -> None:
    rows = [
        {"subject": "checkpoint", "kind": kind, "right": 1, "refused": 2, "wrong": 0, "crashed": 0}
        for kind in MUTATIONS
    ]
    row = {"place": "disk", "bytes": 10**9, "save": [2.0, 4.0], "save_plain": [1.0, 2.0], "digest": [0.2, 0.4]}
    row |= {"load": [1.0], "load_plain": [1.0], "check": [0.05]}
    page = bench.report({"damage": rows, "cost": [row], "digests": {"xxh3-128": 8e9}})
    assert f"| checkpoint | **all** | {len(MUTATIONS)} | {2 * len(MUTATIONS)} | 0 | 0 |" in page
    assert "| disk | 1.00 | 3.00 | 10.0% | 2.000 | 1.00 | 5.0% | 1.000 |" in page
