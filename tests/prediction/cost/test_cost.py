"""The names of `atoll.prediction.cost`, which are imported when they are used."""

from __future__ import annotations

import pytest

from atoll.prediction import cost


def test_every_name_is_there_and_a_wrong_one_is_refused() -> None:
    assert dir(cost) == sorted(cost.__all__)
    assert all(getattr(cost, name) is not None for name in cost.__all__)
    assert not hasattr(cost, "Clusters")
    with pytest.raises(AttributeError, match=r"module 'atoll\.prediction\.cost' has no attribute 'Clusters'"):
        _ = cost.Clusters
