"""The names of the package, which are imported when they are used."""

from __future__ import annotations

import pytest

import atoll


def test_a_name_that_is_not_there_is_no_attribute() -> None:
    assert atoll.Plan.__name__ == "Plan"
    assert not hasattr(atoll, "nothing")
    with pytest.raises(AttributeError, match="module 'atoll' has no attribute 'nothing'"):
        _ = atoll.nothing  # type: ignore[attr-defined]
