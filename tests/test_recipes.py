"""The recipes: each loads, and what docs/recipes.md shows is what its settings are predicted to take."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.base.toml import value_to_toml
from atoll.base.units import format_bytes, format_seconds
from atoll.cli.main import app
from atoll.prediction.cost import Archipelago, Cluster
from atoll.testing.progress import run
from atoll.training.config import Config, load
from atoll.training.setup.islands import predict_island
from atoll.training.setup.prediction import is_on_cpu, predict_plan

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
PARTS = dict(re.findall(r"<!-- planned: ([\w-]+) -->\n(.*?)<!-- end -->", PAGE, flags=re.DOTALL))
ISLANDS = ("h100-a100-islands",)
"""Those with a plan for each island."""
RECIPES = sorted({path.stem for path in (ROOT / "configs" / "recipes").glob("*.toml")} - {*ISLANDS})


def settings_of(name: str) -> list[str]:
    """The plan on the page, as overrides."""
    (text,) = re.findall(r"```ini\n(.*?)```", PARTS[name], flags=re.DOTALL)
    sections = tomllib.loads(text).items()
    values = [f"{section}.{key}={value_to_toml(value)}" for section, keys in sections for key, value in keys.items()]
    return ["parallel.auto=false", *values]


def chosen(name: str) -> Config:
    return load(ROOT / "configs" / "recipes" / f"{name}.toml", settings_of(name))


def test_every_recipe_is_on_the_page() -> None:
    assert sorted(PARTS) == sorted((*RECIPES, *ISLANDS))


@pytest.mark.wide(9)
@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_as_its_page_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = chosen(name)
    assert config.run.cluster is not None
    assert load(ROOT / "configs" / "recipes" / f"{name}.toml").parallel.auto
    cluster = Cluster.read(ROOT / config.run.cluster)
    on_cpu = is_on_cpu(config, cluster)
    device = "cpu" if on_cpu else "cuda"
    found = predict_plan(config, config.to_plan(), cluster, reads_in_place=on_cpu, device=device)
    assert found.fits
    assert f"\na step  {format_seconds(found.seconds)}: " in PARTS[name]
    fullest = min(range(found.plan.mesh.pipeline), key=found.margin)
    peak, memory = found.peak(fullest).total, found.seats.memory(fullest)
    assert f"{format_bytes(peak)} of {format_bytes(memory)}" in PARTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ISLANDS)
def test_islands_are_as_their_page_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = ROOT / "configs" / "recipes" / f"{name}.toml"
    archipelago = Archipelago.read(str(load(path).run.cluster))
    found = re.findall(r"Island (\w+):\n\n```ini\n(.*?)```", PARTS[name], flags=re.DOTALL)
    assert [island for island, _ in found] == [*archipelago]
    for island, text in found:
        tables = tomllib.loads(text)
        outer = tables["parallel"].pop("outer")
        keys = {f"{section}.{key}": value for section, own in tables.items() for key, value in own.items()}
        keys |= {f"parallel.outer.{key}": value for key, value in outer.items()}
        config = load(path, ["parallel.auto=false", *(f"{key}={value_to_toml(each)}" for key, each in keys.items())])
        own = predict_island(config, archipelago, island)
        assert own.fits
        peak = format_bytes(max(own.peak(rank).total for rank in range(own.plan.mesh.pipeline)))
        assert re.search(rf"^{island} +8 +{format_seconds(own.played.seconds)} ", PARTS[name], flags=re.MULTILINE)
        assert re.search(rf"^{island} +{peak} ", PARTS[name], flags=re.MULTILINE)


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_would_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dry run builds the model of each pipeline rank without memory."""
    monkeypatch.chdir(ROOT)
    cluster = chosen(name).run.cluster
    words = [word for each in settings_of(name) for word in ("--set", each)]
    config = f"configs/recipes/{name}.toml"
    result = CliRunner().invoke(app, ["train", config, "--dry-run", "--cluster", str(cluster), *words])
    assert result.exit_code == 0, result.output
    assert "fits: " in result.output


@pytest.mark.slow
def test_the_laptop_trains(tmp_path: Path) -> None:
    """Planned when it starts, in a process of its own, on a small corpus."""
    import sys

    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n" * 4000, encoding="utf-8")
    values = [
        "data.source=text.txt",
        "data.tokenizer=bytes",
        "data.cache=cache",
        "train.steps=2",
    ]
    words = [word for each in values for word in ("--set", each)]
    command = [sys.executable, "-m", "atoll", "train", "configs/recipes/laptop.toml", *words]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = tomllib.loads((tmp_path / "runs" / "laptop" / "config.toml").read_text(encoding="utf-8"))
    assert not config["parallel"]["auto"]
    assert config["parallel"]["ranks"] == 2
