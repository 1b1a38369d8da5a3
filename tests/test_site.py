"""The reference has every public name, and the site builds without a dead link."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


MODULES = (
    "atoll",
    *(f"atoll.plans.{name}" for name in ("ir", "layouts", "plan", "schedules")),
    *(f"atoll.program{name}" for name in ("", ".sim", ".trace")),
    *(f"atoll.{name}" for name in ("base.errors", "prediction.planner", "runtime", "runtime.models", "testing")),
    *(f"atoll.training.{name}" for name in ("config", "data")),
)
"""Those whose names are for users."""


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "scripts" / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def public_names(module: ModuleType) -> list[str]:
    """What a module offers: its `__all__`, or the names that are made in it."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return list(getattr(module, "__all__", (name for name in own if not name.startswith("_"))))


def found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def test_every_public_name_has_a_place_in_the_reference() -> None:
    paths = [path for page in script("reference").PAGES for path in page.paths()]
    assert len(paths) == len(set(paths))
    documented = {id(found(path)) for path in paths}
    missing = [
        f"{module.__name__}.{name}"
        for module in map(import_module, MODULES)
        for name in public_names(module)
        if name != "__version__" and not isinstance(getattr(module, name), ModuleType)
        if id(getattr(module, name)) not in documented
    ]
    assert missing == []


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = {line.rpartition(": ")[2] for line in text.partition("\nnav:")[2].splitlines() if line.endswith(".md")}
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*/README.md")]
    pages.append(ROOT / "examples" / "README.md")
    written = {page.relative_to(ROOT).as_posix() for page in pages}
    written |= {f"docs/reference/{page.file}.md" for page in script("reference").PAGES}
    assert named == written | {"docs/reference/index.md"}


def test_explained_names_become_a_list() -> None:
    pytest.importorskip("griffe")
    text = "Does it.\n\nclip: largest norm,\nabove 0.\nseed: of dropout.  a: b\n\nRaises: all."
    listed = "Does it.\n\n\n- `clip`: largest norm,\n    above 0.\n- `seed`: of dropout.\n- `a`: b\n\nRaises: all."
    assert script("terms").listed(text) == listed


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_builds_without_a_dead_link(tmp_path: Path) -> None:
    for command in (
        [str(ROOT / "scripts" / "site" / "gather.py")],
        ["-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
    ):
        result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    assert 'id="atoll.Engine"' in (tmp_path / "docs" / "reference" / "engine" / "index.html").read_text("utf-8")
