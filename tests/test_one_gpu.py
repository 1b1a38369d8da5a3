"""The kit for one GPU: all of it rehearsed on the CPU, what its lines mean, and what pages make of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.prediction import cost
from atoll.runtime.models import Decoder
from benchmarks import environment, provenance
from benchmarks.gpu import forecast, jobs, lines, one_gpu, pages
from benchmarks.gpu.figures import figures
from benchmarks.gpu.one_gpu import STAGES, Stage
from benchmarks.gpu.stages.checks import peak_of
from benchmarks.gpu.stages.gaps import summary

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu" / "one_gpu.py"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
H100 = "NVIDIA H100 80GB HBM3"


def script(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    # As on a machine without the package installed: the sources are on the path.
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), **variables}
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False, timeout=600)


def line(name: str, result: dict[str, Any], *, device: str = H100, problem: str = "", **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "digest": "0" * 16,
        "commit": COMMIT,
        "device": device,
        "driver": "580",
        "rehearsal": False,
        "date": "2026-11-26T12:00:00+00:00",
        "result": result,
        "problem": problem,
        **more,
    }


def truth(rate: float = 100.0, worst: float = 1e-15) -> dict[str, Any]:
    def row(name: str, tokens: float, peak: int) -> dict[str, Any]:
        found = {"name": name, "problem": "", "tokens_per_second": tokens, "peak_allocated": peak}
        return {**found, "flops_per_second": 4e14, "losses": [2.0, 1.0]}

    rows = [row("torch", 100.0, 1000), row("atoll NNG", rate, 1010), row("torch FSDP2", 99.0, 1100),
            row("torch again", 100.0, 1000)]  # fmt: skip
    return {"parity": [{"worst": worst}], "job": {"parameters": 1.35e9}, "contenders": rows}


# ---- without what a lent machine lacks


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("module", ["atoll.runtime.models", "atoll.runtime.engine", "atoll.testing.parity"])
def test_training_needs_no_pydantic(module: str) -> None:
    program = f"import sys; sys.modules['pydantic'] = None; import {module}; print('imported')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n", done.stderr


def test_every_name_of_cost_is_there() -> None:
    for name, home in cost._HOMES.items():
        assert getattr(cost, name) is getattr(import_module(home), name)
    assert set(dir(cost)) == set(cost._HOMES)
    with pytest.raises(AttributeError, match=r"'atoll\.prediction\.cost' has no attribute 'Clusters'"):
        _ = cost.Clusters


def test_a_commit_is_given_where_there_is_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the sources on a lent machine has no `.git`, and all its files would count as not committed."""
    monkeypatch.setattr(environment, "_git", lambda *_: "")
    found = environment.environment(command=["make", "gpu"], commit=COMMIT)
    assert (found["commit"], found["commit_was_given"], found["uncommitted"]) == (COMMIT, True, [])
    monkeypatch.setenv(environment.COMMIT, COMMIT[::-1])
    assert environment.environment(command=["make", "gpu"])["commit"] == COMMIT[::-1]
    monkeypatch.setattr(environment, "_git", lambda *_: "f" * 40)
    found = environment.environment(command=["make", "gpu"], commit=COMMIT)
    assert found["commit"] == "f" * 40
    assert "commit_was_given" not in found


# ---- the script


@pytest.mark.slow
def test_all_stages_run_on_a_cpu_which_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test: workers that share its parts would each rehearse for a minute of a core."""
    out = tmp_path / "out"
    done = script("--out", out, "--rehearse")
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    made = lines.read_lines(out / "stages.jsonl")
    assert {each["name"]: each["problem"] for each in made} == {stage.name: "" for stage in STAGES}, printed
    assert all(each["result"] and each["digest"] and each["device"] == lines.CPU for each in made)
    assert {path.name for path in out.iterdir()} == {"stages.jsonl", "log.txt", "profile.json.gz", "cluster.toml"}
    table = printed[printed.index("stage  ") :].splitlines()
    assert len(table) <= 40
    assert {row.split()[0] for row in table[2:]} == {stage.name for stage in STAGES}

    assert not any(map(lines.is_good, made))
    assert pages.cards(made) == {}
    monkeypatch.setattr(lines, "COMMITTED", out / "committed.jsonl")
    assert one_gpu.main(["--add", str(out / "stages.jsonl")]) == 0
    assert not (out / "committed.jsonl").exists()


@pytest.mark.slow
def test_a_stage_runs_as_a_program_of_its_own_too(tmp_path: Path) -> None:
    """What is done where a fork cannot open the device."""
    findings = tmp_path / "findings.json"
    words = ("--stage", "card", "--findings", findings, "--out", tmp_path, "--limit", "20", "--rehearse")
    done = script(*words)
    assert done.returncode == 0, done.stdout
    assert set(json.loads(findings.read_text())) >= {"copy_bytes_per_second", "product_flops_per_second"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--commit", COMMIT), "--out DIR says where"),
        (("--out", "x", "--commit", "main"), "--commit 'main': the 40 digits"),
        (("--out", "x", "--rehearse", "--only", "cards"), "no stage cards; there are card, truth"),
    ],
)
def test_what_cannot_be_run_is_refused(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        one_gpu.main(words)
    assert said in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_refused(tmp_path: Path) -> None:
    done = script("--out", tmp_path, "--commit", COMMIT, PATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("no NVIDIA GPU: nvidia-smi")
    assert list(tmp_path.iterdir()) == []


NVIDIA_SMI = """\
#!/bin/sh
case "$2" in
  *driver_version*) echo "NVIDIA H100 80GB HBM3, 580.159" ;;
  *) echo "1980, 2619, 41, [N/A], 520" ;;
esac
"""


@pytest.mark.slow
def test_a_card_that_cannot_be_opened_costs_one_line_a_stage(tmp_path: Path) -> None:
    """The path of a GPU machine as far as it goes without one: clocks, the fork, the program of its own."""
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    words = ("--out", tmp_path / "out", "--commit", COMMIT, "--only", "card", "--again", "--seconds", "86400")
    done = script(*words, PATH=path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    (made,) = lines.read_lines(tmp_path / "out" / "stages.jsonl")
    assert made["before"] == {"sm_mhz": 1980, "memory_mhz": 2619, "celsius": 41, "watts": None, "memory_mib": 520}
    assert (made["device"], made["driver"], made["commit"]) == (H100, "580.159", COMMIT)
    assert "cuda" in made["problem"].lower()
    assert not lines.is_good(made)
    assert "card         FAILED" in done.stdout


# ---- one stage


@pytest.fixture
def stage() -> Iterator[Callable[[Callable[[Any], None]], Stage]]:
    """A stage that runs a function of the test."""
    name = "benchmarks.gpu.stages.of_a_test"

    def make(run: Callable[[Any], None]) -> Stage:
        module = types.ModuleType(name)
        module.__dict__["run"] = run
        sys.modules[name] = module
        return Stage("card", "of_a_test", 60)

    yield make
    sys.modules.pop(name, None)


def run_stage(stage: Stage, out: Path, limit: float) -> dict[str, Any]:
    arguments = one_gpu._parse(["--out", str(out), "--rehearse"])
    return one_gpu._line(stage, {"device": lines.CPU, "driver": ""}, arguments, out, limit)


@pytest.mark.slow
def test_a_stage_that_takes_too_long_leaves_what_it_found(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"

    def run(run: Any) -> None:
        run.keep("first", 1)
        subprocess.Popen(["sleep", "600"])
        started.touch()
        time.sleep(600)

    def monotonic() -> float:  # the limit passes once the stage has found something, however slow the machine is
        return time.monotonic() + (10_000 if started.exists() else 0)

    monkeypatch.setattr(one_gpu, "time", types.SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    found = run_stage(stage(run), tmp_path, limit=2_000.0)
    assert found["result"] == {"first": 1}
    assert found["problem"].startswith("stopped at its limit")
    assert not lines.is_good(found)


def test_a_stage_that_fails_leaves_its_traceback(stage: Any, tmp_path: Path) -> None:
    def run(run: Any) -> None:
        run.keep("first", float("nan"))
        raise ValueError("the reason")

    found = run_stage(stage(run), tmp_path, limit=30.0)
    assert found["problem"].endswith("ValueError: the reason\n")
    assert found["result"] == {"first": "nan"}
    lines.append(tmp_path / "stages.jsonl", found)
    assert lines.read_lines(tmp_path / "stages.jsonl") == [found]


def test_a_stage_that_dies_leaves_its_signal(stage: Any, tmp_path: Path) -> None:
    def run(run: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert run_stage(stage(run), tmp_path, limit=30.0)["problem"].splitlines()[0] == "ended by SIGKILL"


# ---- lines


def test_a_line_counts_for_its_sources_and_its_kind_of_card_only() -> None:
    given = [line("card", {}, digest="a"), line("truth", {}, digest="a", problem="stopped")]
    done = {"name": "card", "digest": "a", "device": H100}
    assert lines.is_done(given, **done)
    assert not lines.is_done(given, **{**done, "digest": "b"})
    assert not lines.is_done(given, **{**done, "device": "NVIDIA H200"})
    assert not lines.is_done(given, **{**done, "name": "truth"})


def test_lines_are_added_only_with_the_sources_of_their_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (card,) = [stage for stage in STAGES if stage.name == "card"]
    monkeypatch.setattr(lines, "COMMITTED", tmp_path / "results" / "stages.jsonl")
    monkeypatch.setattr(one_gpu, "_file_at", lambda commit, path: provenance.read(path))
    right, wrong = line("card", {}, digest=card.digest), line("card", {}, digest="f" * 16)
    for each in (right, wrong, line("card", {}, problem="stopped")):
        lines.append(tmp_path / "new.jsonl", each)
    assert one_gpu.main(["--add", str(tmp_path / "new.jsonl")]) == 1
    assert lines.read_lines(lines.COMMITTED) == [right]
    assert "card: refused: commit 0123456789ab has other sources" in capsys.readouterr().err
    assert one_gpu.main(["--add", str(tmp_path / "new.jsonl")]) == 1
    assert lines.read_lines(lines.COMMITTED) == [right], "once"


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "stages.jsonl").write_text('{"name": "card"}\n{"na')
    with pytest.raises(ValueError, match=r"stages\.jsonl: line 2 is no JSON"):
        lines.read_lines(tmp_path / "stages.jsonl")


def test_a_digest_follows_what_a_stage_depends_on() -> None:
    (one,) = [stage for stage in STAGES if stage.name == "card"]
    changed = {"benchmarks/gpu/stage.py": "raise ValueError"}
    assert one.digest == lines.digest_of(one.modules)
    assert one.digest != lines.digest_of(one.modules, lambda path: changed.get(path) or provenance.read(path))
    # The script and the pages can be mended without a new measurement.
    same = {"benchmarks/gpu/one_gpu.py": "", "benchmarks/gpu/figures.py": ""}
    assert one.digest == lines.digest_of(one.modules, lambda path: same.get(path, provenance.read(path)))


def test_committed_lines_are_good_and_name_stages() -> None:
    for each in lines.read_lines(lines.COMMITTED):
        assert lines.is_good(each)
        assert each["name"] in {stage.name for stage in STAGES}
        assert re.fullmatch("[0-9a-f]{40}", each["commit"])
        assert "NVIDIA" in each["device"]


# ---- figures


def test_figures_have_targets() -> None:
    passed = {each.what: each.passed for each in figures("truth", truth(), device=H100)}
    assert passed["NNG / plain, tokens/s"]
    assert passed["NNG / plain, peak memory"]
    assert passed["NNG / FSDP2, tokens/s"]
    assert passed["parity in float64"]
    slow = {each.what: each.passed for each in figures("truth", truth(97.0, float("nan")), device=H100)}
    assert slow["NNG / plain, tokens/s"] is False
    assert slow["NNG / FSDP2, tokens/s"] is False
    assert slow["parity in float64"] is False, "NaN is no parity"


def test_an_unfinished_result_has_the_figures_that_it_can_have() -> None:
    for stage in STAGES:
        figures(stage.name, {}, device=H100)
    stopped = {"counts": {"passed": 7}, "unfinished": ["stopped after 50 s"]}
    assert [each.passed for each in figures("tests", stopped)] == [False]


def test_predictions_are_judged_by_the_worst() -> None:
    rows = [{"name": name, "problem": "", "peak_allocated": 100, "median_seconds": 1.0} for name in "ab"]
    given = {"a": {"peak_bytes": 100, "seconds": 1.0}, "b": {"peak_bytes": 104, "seconds": 0.95}}
    peak, seconds = figures("predictions", {"rows": rows, "committed": given})
    assert (peak.passed, seconds.passed) == (False, True)
    assert peak.value == "median 2.0%, worst +4.0%"


def test_predictions_are_committed_for_every_setting() -> None:
    found = json.loads(forecast.PATH.read_text())
    assert set(found) == set(forecast.PRESETS.values())
    for each in found.values():
        assert set(each) == {setting.name for setting in forecast.SETTINGS}
        assert all(0 < figure["seconds"] < 10 and 1e9 < figure["peak_bytes"] < 80e9 for figure in each.values())


def test_jobs_have_the_parameters_that_pages_name() -> None:
    for job, billions in ((jobs.MODEL_A, 1.35), (jobs.SMALL, 0.125)):
        with torch.device("meta"):
            model = Decoder(job.config)
        assert job.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert job.parameters / 1e9 == pytest.approx(billions, rel=4e-3)


def test_gaps_are_where_no_kernel_runs() -> None:
    def event(ts: float, dur: float, name: str, cat: str = "kernel", **args: int) -> dict[str, Any]:
        return {"ph": "X", "ts": ts, "dur": dur, "name": name, "cat": cat, "args": args}

    found = summary(
        [
            event(0, 10, "nvjet_tst"),
            event(5, 10, "flash_fwd"),  # beside the first, on another stream
            event(35, 5, "Memcpy DtoD", "gpu_memcpy", bytes=400),
            event(2, 100, "aten::mm", "cpu_op"),
        ]
    )
    assert (found["span_microseconds"], found["busy"], found["gaps"]) == (40, 0.5, 1)
    assert found["longest_gaps"] == [{"microseconds": 20, "after": "flash_fwd", "before": "Memcpy DtoD"}]
    assert found["kinds"] == {"products": 10, "attention": 10, "copies and casts": 5}
    assert found["bytes"] == {"Memcpy DtoD": 400}


def test_a_history_of_allocations_says_what_is_held_at_the_peak() -> None:
    def entry(action: str, addr: int, size: int, line: int) -> dict[str, Any]:
        frames = [{"filename": "/site/torch/nn.py", "line": 1}, {"filename": "/src/atoll/unit.py", "line": line}]
        return {"action": action, "addr": addr, "size": size, "frames": frames}

    history = [entry("alloc", 1, 10, 5), entry("alloc", 2, 30, 6), entry("free_completed", 1, 10, 5)]
    history += [entry("alloc", 3, 5, 7), entry("segment_alloc", 9, 99, 7)]
    found = peak_of(history)
    assert (found["allocations"], found["peak_bytes"]) == (3, 40)
    assert found["held_by"] == [{"line": "unit.py:6", "bytes": 30}, {"line": "unit.py:5", "bytes": 10}]


# ---- pages


def test_without_lines_pages_say_that_nothing_is_proved() -> None:
    assert pages.paragraph([]).startswith("**Nothing has been proved on a GPU yet.** The NCCL transport,")
    assert pages.tables([]).strip() == pages.NOTHING
    assert "nothing has been proved on a GPU" in pages.evidence([])


def test_with_lines_pages_say_what_is_proved_on_which_card() -> None:
    given = [line("truth", truth(90.0)), line("truth", truth()), line("tests", {}, problem="stopped"),
             line("truth", truth(97.0), device="NVIDIA H200") | {"date": "2026-11-25T10:00:00+00:00"}]  # fmt: skip
    text = " ".join(pages.paragraph(given).split())
    assert text.startswith(f"**Proved on one {H100}:** 1 pairs of layout and recompute match plain PyTorch in float64")
    assert "a step of 1.35 billion parameters takes 1.000 times as long as in plain PyTorch; in 1.010 of its" in text
    assert "times as fast as FSDP2 (`01234567`, 2026-11-26, older than the code)." in text
    older = "**On one NVIDIA H200:** 2 of these claims hold (`01234567`, 2026-11-25, older than the code)."
    assert f"{older} Not reached there: NNG / plain, tokens/s; NNG / FSDP2, tokens/s." in text
    assert "One GPU cannot show NCCL" in text
    table = pages.tables(given)
    assert table.index("### NVIDIA H100") < table.index("### NVIDIA H200")
    assert (
        "| truth | parity in float64 | 1.0e-15 | ≤ 1.0e-10 | reached | `01234567` | older | 2026-11-26 | 580 |" in table
    )
    assert "**missed**" in table
    assert f"| {H100} | truth |" in pages.evidence(given)


def test_pages_have_their_part_once() -> None:
    for path in ("README.md", "benchmarks/gpu/README.md"):
        assert len(pages.PART.findall((ROOT / path).read_text(encoding="utf-8"))) == 1, path
