"""Runs of `atoll train` that are islands of a federation, in processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.base.digests import read_sealed
from atoll.base.errors import ConfigError
from atoll.base.toml import nested_to_toml
from atoll.testing.progress import finish, run, run_together, wait_until
from atoll.training.config import from_dict
from atoll.training.output.folder import read_records
from atoll.training.setup.build import seat_of
from tests.runtime.federation.ports import held_ports
from tests.training.run.test_train import TEXT, settings

pytestmark = pytest.mark.usefixtures("warm")

OUTER = {"every": 4, "fragments": 2, "delay": 1, "grace": 60.0}


@pytest.fixture
def ports() -> Iterator[dict[str, int]]:
    with held_ports("abc") as found:
        yield found


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def island(
    folder: Path,
    corpus: Path,
    ports: Mapping[str, int],
    name: str,
    *,
    more: Mapping[str, Any] | None = None,
    **parallel: Any,
) -> Path:
    """Write the config of an island, and return its path."""
    found = settings(folder / name, corpus, parallel={"outer": OUTER, **parallel})
    found["train"] |= {"steps": 8, "eval_every": 4}
    (folder / "secret").write_text("0123456789abcdef")
    found["federation"] = {
        "island": name,
        "islands": {each: f"127.0.0.1:{port}" for each, port in ports.items()},
        "secret": str(folder / "secret"),
        "silent": 60.0,
        "away": 600.0,
        **(more or {}),
    }
    path = folder / f"{name}.toml"
    path.write_text(nested_to_toml(dict(found.items())))
    return path


def command(path: Path, *sets: str) -> list[str]:
    return [sys.executable, "-m", "atoll", "train", str(path), *(word for each in sets for word in ("--set", each))]


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_islands_of_different_plans_end_with_the_same_anchors(
    tmp_path: Path, corpus: Path, ports: dict[str, int]
) -> None:
    plans: dict[str, dict[str, Any]] = {
        "a": {"ranks": 2, "pipeline": 2, "schedule": "zb-h1"},
        "b": {"ranks": 2, "intra": 2, "layout": "IGG"},
        "c": {"ranks": 2},  # two groups, between which its anchors are sharded
    }
    commands = {name: command(island(tmp_path, corpus, ports, name, **plan)) for name, plan in plans.items()}
    run_together({name: partial(run, words) for name, words in commands.items()})
    found = {name: [record for event in events(tmp_path / name) for record in event["records"]] for name in "abc"}
    averaged = {name: [record for record in records if record["contributions"]] for name, records in found.items()}
    assert averaged["a"] == averaged["b"] == averaged["c"]
    counted = [[each["island"] for each in record["contributions"]] for record in averaged["a"]]
    assert counted == [["a", "b", "c"]] * 4
    # However they divide the parameters, they know that they have begun from the same ones.
    initial = {read_sealed(path)["initial"] for path in tmp_path.glob("*/**/notice.json")}
    assert len(initial) == 1
    assert "" not in initial
    # The validation loss is that of the anchors, computed in another order on each.
    evaluated = {name: read_records(tmp_path / name / "validation.jsonl") for name in "abc"}
    losses = [evaluated[name][-1]["loss"] for name in "abc"]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)
    # An island that is late leaves out the steps for which others were ahead, and none of them goes on after the last.
    for name in "abc":
        steps = [record["step"] for record in read_records(tmp_path / name / "metrics.jsonl")]
        assert steps == sorted({*steps, 1, 8})
        assert evaluated[name][-1]["step"] == 8
        assert len(evaluated[name]) == 3, "at the start, after step 4, and once at the end"
    assert events(tmp_path / "a")[-1]["received_bytes"] > 0


@pytest.mark.slow
def test_an_island_that_loses_a_rank_or_leaves_takes_part_again(
    tmp_path: Path, corpus: Path, ports: dict[str, int]
) -> None:
    """A lost rank continues from the state in the memory of its host, and there is no checkpoint; a signal hands over
    what was learned, and the next process continues from the checkpoint that it saved."""
    ports.pop("c")
    started: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str, steps: int) -> None:
        path = island(tmp_path, corpus, ports, name)
        with (tmp_path / f"{name}.log").open("ab") as log:
            sets = [f"train.steps={steps}", "train.eval_every=0", "checkpoint.every=0", "checkpoint.memory=2"]
            started[name] = subprocess.Popen(command(path, *sets), stdout=log, stderr=log)

    # Rounds may be as fast as the machine: the other one does not end before this one is back.
    for name in "ab":
        start(name, 100_000)
    try:
        wait_until(lambda: len(events(tmp_path / "b")) > 8, started["b"])
        begun = len(events(tmp_path / "b"))
        _rank_of(started["b"]).kill()
        wait_until(lambda: _counted(events(tmp_path / "b")[begun + 8 :]) == ["a", "b"], started["b"])
        assert "resumed from the memory of this host: step" in (tmp_path / "b.log").read_text()
        assert not list((tmp_path / "b" / "checkpoints").glob("step-*"))
        started["b"].send_signal(signal.SIGTERM)
        finish(started["b"])
        assert started["b"].returncode == 143
        wait_until(lambda: _counted(events(tmp_path / "a")) == ["a"], started["a"])
        start("b", 100_000)
        wait_until(lambda: _restarted(events(tmp_path / "b")), started["b"])
        at = _restarted(events(tmp_path / "b"))[0]
        wait_until(lambda: _counted(events(tmp_path / "b")[at:]) == ["a", "b"], started["b"])
        # It is at the step of the other one, two for each round that averaged.
        last = [event for event in events(tmp_path / "b") if event["records"]][-1]
        assert last["step"] >= 2 * (last["records"][-1]["turn"] - 2)
    finally:
        for process in started.values():
            process.send_signal(signal.SIGTERM)
        for process in started.values():
            finish(process)


def _rank_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    """The rank that a launcher has started."""
    found = psutil.Process(process.pid).children(recursive=True)
    (rank,) = (each for each in found if each.name().startswith("atoll rank"))
    return rank


def _restarted(found: list[dict[str, Any]]) -> list[int]:
    return [at for at, event in enumerate(found) if event["what"] == "restarted"]


def _counted(found: list[dict[str, Any]]) -> list[str]:
    counted = [record["contributions"] for event in found for record in event["records"] if record["contributions"]]
    return [each["island"] for each in counted[-1]] if counted else []


def test_a_federation_needs_outer_steps_and_outer_keys_a_federation(
    tmp_path: Path, corpus: Path, ports: dict[str, int]
) -> None:
    values = settings(tmp_path, corpus, parallel={"outer": {"every": 4, "quorum": 2}, "ranks": 2})
    with pytest.raises(ConfigError, match=r"parallel.outer.quorum = 2: of islands that come and go"):
        from_dict(values).to_plan()
    own = {"island": "a", "islands": {"a": "127.0.0.1:1", "b": "127.0.0.1:2"}, "secret": "s"}
    values = settings(tmp_path, corpus) | {"federation": own}
    with pytest.raises(ConfigError, match=r"parallel.outer is missing"):
        from_dict(values).to_plan()
    values = settings(tmp_path, corpus, parallel={"outer": {"every": 4, "quorum": 3}}) | {"federation": own}
    with pytest.raises(ConfigError, match=r"quorum = 3, and federation.islands has 2"):
        from_dict(values).to_plan()
    plan = from_dict(settings(tmp_path, corpus, parallel={"outer": {"every": 4}}) | {"federation": own}).to_plan()
    assert plan.outer is not None
    assert plan.outer.apart is not None
    assert (plan.outer.apart.islands, plan.islands, plan.has_islands) == (2, 1, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"island": "z"}, "'z' is none of federation.islands: a, b"),
        ({"islands": {"a": "here", "b": "127.0.0.1:2"}}, "host:port"),
        ({"islands": {"a": "127.0.0.1:2", "b": "127.0.0.1:2"}}, "two islands have one address"),
        ({"founders": ["a", "q"]}, "'q' is none of federation.islands"),
        ({"silent": 100.0, "away": 10.0}, "silent before it is away"),
    ],
)
def test_bad_federations_are_refused(change: dict[str, Any], words: str, tmp_path: Path, corpus: Path) -> None:
    own = {"island": "a", "islands": {"a": "127.0.0.1:1", "b": "127.0.0.1:2"}, "secret": "s", **change}
    with pytest.raises(ConfigError, match=words):
        from_dict(settings(tmp_path, corpus, parallel={"outer": {"every": 4}}) | {"federation": own})


def test_a_secret_is_read_from_its_file(tmp_path: Path, corpus: Path) -> None:
    own = {"island": "a", "islands": {"a": "127.0.0.1:1", "b": "[::1]:2"}, "secret": str(tmp_path / "secret")}
    config = from_dict(settings(tmp_path, corpus, parallel={"outer": {"every": 4}}) | {"federation": own})
    with pytest.raises(ConfigError, match=r"federation.secret"):
        seat_of(config, run="x")
    (tmp_path / "secret").write_text("short")
    with pytest.raises(ConfigError, match=r"16 characters"):
        seat_of(config, run="x")
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    seat = seat_of(config, run="x")
    assert seat is not None
    assert (seat.secret, str(seat.islands["b"]), seat.first) == (b"0123456789abcdef", "::1:2", ("a", "b"))
    assert "0123" not in repr(seat)
