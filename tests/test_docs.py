"""The pages are up to date, and what they say of schedules is so. What is fenced in them: tests/test_pages.py."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.plans.ir import Placement
from atoll.plans.schedules import CATALOGUE, Memory, Problem, build, lower_bound
from atoll.program.sim import Costs, simulate
from atoll.testing import run_ranks
from tests.pages import PAGES, ROOT, blocks, name_of

pytestmark = pytest.mark.usefixtures("warm")


def commands(page: Path) -> list[list[str]]:
    """The words of every line that calls `atoll`, after its name."""
    lines = [line for text in blocks(page, "sh") for line in text.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [each[1:] for each in words if each and Path(each[0]).name == "atoll"]


@pytest.mark.slow
def test_generated_parts_and_pictures_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "docs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stderr}run `make docs`"


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as they are made on GitHub."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [pytest.param(page, id=name_of(page)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name_of(page)} links to {target}"
        assert not anchor or anchor in anchors(found), f"{name_of(page)} links to {target}"


def run_the_example(text: str) -> float:
    """The README's example in this rank; its last loss."""
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(text, "README.md", "exec"), names)
    loss = names["out"].loss
    assert isinstance(loss, float)
    return loss


@pytest.mark.slow
def test_the_readmes_example_gives_the_same_loss_on_four_ranks() -> None:
    page = ROOT / "README.md"
    (text,) = blocks(page, "python")
    one, four = "atoll.MeshShape()", "atoll.MeshShape(pipeline=2, intra=2)"
    assert one in text
    assert four in page.read_text()
    alone = run_ranks(run_the_example, 1, text)
    assert run_ranks(run_the_example, 4, text.replace(one, four)) == pytest.approx(alone * 4, rel=1e-4)


SCHEDULE_PAGES = ROOT / "docs" / "schedules"


def test_every_schedule_has_a_page_and_is_linked() -> None:
    assert {page.stem for page in SCHEDULE_PAGES.glob("*.md")} == set(CATALOGUE)
    for name in CATALOGUE:
        for page in (ROOT / "docs" / "schedules.md", ROOT / "docs" / "which-schedule.md"):
            assert f"(schedules/{name}.md)" in page.read_text()


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_schedules_page_has_all_its_parts(name: str) -> None:
    page = SCHEDULE_PAGES / f"{name}.md"
    text = page.read_text()
    assert re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE) == [
        name, "Bubble and memory", "Costs and limits", "When", "Run it", "Source"
    ]  # fmt: skip
    assert CATALOGUE[name].paper.removeprefix("arXiv ") in text.partition("## Source")[2]
    assert {tuple(command[:3]) for command in commands(page)} >= {("show", "schedule", name)}
    configs = [tomllib.loads(block) for block in blocks(page, "toml")]
    assert [config["parallel"]["schedule"] for config in configs] == [name]


def figures(part: str, at: int = 0) -> dict[str, list[float]]:
    """Name -> numbers of a row, of one of the tables of a generated part of the page "which schedule when"."""
    page = (ROOT / "docs" / "which-schedule.md").read_text()
    text = page.partition(f"<!-- generated: {part} -->\n")[2].partition("<!-- end -->")[0]
    lines = text.strip().split("\n\n")[at].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {
        re.sub(r"\[`(.+)`\].*", r"\1", name): [
            float(cell.rstrip("%")) for cell in cells if re.match(r"[\d.]+%?$", cell)
        ]
        for name, *cells in rows
    }


def test_what_is_said_of_memory() -> None:
    rows = figures("when-memory")  # activations, with what W keeps, bubble of the makespan, of the span
    assert set(rows) == set(CATALOGUE)
    assert min(rows, key=lambda name: (rows[name][1] > 1, rows[name][2])) == "zb-v"
    assert rows["zb-h2"][2] == rows["zb-h1"][2] == rows["zb-2p"][2] == rows["zb-1p"][2]
    assert {name for name, row in rows.items() if row[3] == 0} == {"zb-v", "zb-h2", "zb-2p", "auto"}
    assert rows["dualpipe-v"][3] > 0
    for more, of_one_chunk in (("interleaved", "1f1b"), ("breadth-first", "gpipe")):
        assert rows[more][2] < rows[of_one_chunk][2]
    limited = figures("when-memory", 1)
    assert all(v <= line for v, line in zip(limited["auto on a V"][-2:], limited["auto on a line"], strict=True))


def test_what_is_said_of_microbatches() -> None:
    rows = figures("when-microbatches")  # 4, 8 (= p), 16 (>= 2p-1), 32, 64
    assert all(before > after for row in rows.values() for before, after in pairwise(row))
    assert len(rows.pop("dualpipe-v")) == 3
    for few in (0, 1):
        assert min(rows, key=lambda name: rows[name][few]) == "interleaved of 4 chunks"
    assert rows["zb-h2"][1] > rows["zb-h1"][1]
    assert rows["zb-h2"][2] == rows["zb-h1"][2]
    assert rows["gpipe"] == rows["1f1b"]


def test_what_is_said_of_unequal_times() -> None:
    rows = figures("when-weights")  # W / F = 0.4, 0.7, 1
    for name in ("v-half", "v-min"):
        assert all(
            found < fixed for found, fixed in zip(rows[f"auto in {name}'s memory"], rows[name][:-1], strict=False)
        )
        assert all(lost > 10 for lost in (rows[name][0] - rows[name][2], rows[name][1] - rows[name][2]))
    assert rows["v-min"][1] > rows["1f1b"][1]
    assert rows["v-half"][1] > rows["1f1b"][1]
    assert min(rows, key=lambda name: rows[name][0]) == min(rows, key=lambda name: rows[name][1]) == "zb-v for costs"
    grown = {name: row[0] - row[2] for name, row in rows.items()}
    assert min(grown, key=lambda name: grown[name]) == "interleaved"
    assert grown["1f1b"] < grown["zb-h1"]
    assert all(longer < shorter for longer, shorter in zip(rows["zb-h2"][:2], rows["zb-h1"], strict=False))


def test_what_is_said_of_hops() -> None:
    rows = figures("when-hops")  # hop / F = 0, 0.2, 0.4
    grown = sorted(rows, key=lambda name: rows[name][-1] - rows[name][0])
    assert set(grown[:4]) == {"zb-h2", "gpipe", "1f1b", "breadth-first"}
    assert set(grown[-5:]) == {"v-min", "v-half", "unit", "gis", "interleaved of 4 chunks"}
    assert min(rows, key=lambda name: rows[name][-1]) == "zb-h2"
    assert rows["v-min"][1] > rows["1f1b"][1]


def test_what_is_said_of_room_and_of_unequal_stages() -> None:
    room = figures("when-room")  # 0.5, 0.75, 1
    assert room["auto on a V"][0] - room["auto on a V"][-1] < 2
    assert room["auto on a V"][0] < figures("when-memory")["v-half"][2]
    stages = figures("when-stages")
    alone = stages["the busiest rank's work"]
    for row in stages.values():
        above = [time - least for time, least in zip(row, alone, strict=True)]
        assert above == sorted(above, reverse=True)
        assert max(above) < 0.15


def test_what_is_said_of_sharded_parameters() -> None:
    rows = figures("when-gathers")
    chunked = {name: row for name, row in rows.items() if name != "gpipe, 1f1b, zb-h1, zb-h2"}
    assert rows["gpipe, 1f1b, zb-h1, zb-h2"] == [1, 1]
    assert sorted(chunked, key=lambda name: chunked[name][0])[:2] == ["breadth-first", "unit"]
    assert rows["breadth-first"][0] < 2
    assert rows["breadth-first"][1] == 1
    assert rows["any, for one action at a time"] == [64, 32]


@pytest.mark.parametrize("weight", [1.0, 0.7, 0.4])
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_what_is_said_of_zb_h1(ranks: int, weight: float) -> None:
    """On equal ranks nothing on a line beats it in 1F1B's memory, and at F = I = W its bubble is half of 1F1B's."""
    costs = Costs(1.0, 2.0 - weight, weight)
    for microbatches in (ranks, 3 * ranks):
        sizes = {"ranks": ranks, "microbatches": microbatches}
        makespan = simulate(build("zb-h1", **sizes), costs).makespan
        memory = Memory(limit=float(ranks))
        problem = Problem.of(Placement("line", ranks), microbatches, costs=costs, memory=memory)
        assert makespan == pytest.approx(lower_bound(problem))
        if weight == 1.0:
            assert (
                2 * (makespan - 3 * microbatches) == simulate(build("1f1b", **sizes), costs).makespan - 3 * microbatches
            )


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_what_is_said_of_automatic_orders(ranks: int, microbatches: int) -> None:
    sizes = {"ranks": ranks, "microbatches": microbatches}
    assert build("auto", **sizes).actions == build("zb-h2", **sizes).actions
    assert build("zb-2p", **sizes).actions == build("zb-h2", **sizes).actions
    found, fixed = (simulate(build(name, **sizes), Costs()).makespan for name in ("zb-1p", "zb-h1"))
    assert found == fixed


def test_what_is_said_of_interleaved() -> None:
    for ranks, rounds, chunks in ((2, 2, 2), (4, 2, 3), (4, 5, 2), (8, 4, 4)):
        schedule = build("interleaved", ranks=ranks, microbatches=rounds * ranks, chunks=chunks)
        assert simulate(schedule, Costs()).peak_microbatches[0] == pytest.approx(ranks + (ranks - 1) / chunks)


JSON_COMMANDS = {
    "show schedule": ["show", "schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--json"],
    "show layouts": ["show", "layouts", "--parameters", "1e9", "--json"],
    "predict": [
        "predict",
        str(ROOT / "configs" / "quickstart.toml"),
        *("--cluster", str(ROOT / "configs" / "clusters" / "h100.toml")),
        "--json",
    ],
}


@pytest.mark.parametrize("command", JSON_COMMANDS)
def test_json_keys_are_documented(command: str) -> None:
    printed = json.loads(CliRunner().invoke(app, JSON_COMMANDS[command]).stdout)
    keys = set(printed[0] if isinstance(printed, list) else printed)
    assert documented_keys(f"`atoll {command}`") == keys


def test_metrics_keys_are_documented() -> None:
    # What rank 0 writes, read from the source: a run is another test's.
    source = (ROOT / "src" / "atoll" / "training" / "output" / "record.py").read_text()
    (record,) = re.findall(r"def step\(.*?record: [^=]* = \{(.*?)\}", source, flags=re.DOTALL)
    page = (ROOT / "docs" / "training.md").read_text()
    table = page.partition("Keys of `metrics.jsonl`")[2].partition("Keys of `validation.jsonl`")[0]
    # Which few steps have.
    oddities = {"loss_spike", "grad_norm_spike", "straggler", "straggler_ratio", "mfu", "island_distance"}
    oddities |= {"expert_rows", "expert_imbalance", "expert_dropped", "exchange_seconds"}
    oddities |= {"attention_imbalance", "microbatch_imbalance"}
    assert first_column(table) == set(re.findall(r'"(\w+)":', record)) | oddities


def documented_keys(heading: str) -> set[str]:
    """First column of the table that follows a line which begins with `heading` in the page on `--json`."""
    page = (ROOT / "docs" / "cli.md").read_text().partition("## What `--json` prints")[2]
    _, found, after = page.partition(f"\n{heading},")
    assert found, f"docs/cli.md does not say what {heading} --json prints"
    return first_column(after.strip().split("\n\n")[1])


def first_column(table: str) -> set[str]:
    rows = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}
