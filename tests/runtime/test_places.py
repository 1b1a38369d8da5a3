"""Where files are kept between runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.runtime.places import cache_folder


@pytest.mark.parametrize("base", [None, "", "caches", "./caches"])
def test_a_base_that_is_no_absolute_path_is_no_base(
    base: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if base is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert cache_folder() == tmp_path / ".cache" / "atoll"


def test_the_users_base_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_folder() == tmp_path / "caches" / "atoll"
