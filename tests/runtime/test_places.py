"""Where files are kept between runs."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from atoll.runtime.places import cache_folder, private_folder


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


def test_a_private_folder_is_this_users_alone(tmp_path: Path) -> None:
    found = private_folder(tmp_path)
    assert found is not None
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    assert private_folder(tmp_path) == found
    found.chmod(0o722)  # others could put files there
    assert private_folder(tmp_path) is None
    found.rmdir()
    found.write_text("no folder")
    assert private_folder(tmp_path) is None
