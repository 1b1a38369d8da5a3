"""The loop and its parts: the same run on any ranks, and the same run again after a resume."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.base.errors import CheckpointError, ConfigError, RankError, RunError
from atoll.testing import run_ranks
from atoll.training.config import Config, Train
from atoll.training.config.load import from_dict
from atoll.training.output.folder import RunFolder, Start, append, read_records
from atoll.training.output.lock import Holder, RunLock
from atoll.training.run.session import run_session
from atoll.training.run.signals import StopRequest
from atoll.training.setup.build import RateSchedule, build_model, choose_trained, learning_rates
from atoll.training.setup.samples import prepare_corpus, vocabulary_of

STEPS = 6
TEXT = "".join(f"the {number} brown foxes jump over {number * number} lazy dogs\n" for number in range(400))


def settings(folder: Path, corpus: Path, **changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A tiny run in float64; `changes` by section."""
    base: dict[str, dict[str, Any]] = {
        "model": {"layers": 2, "hidden": 16, "heads": 2, "config": {"dropout": 0.1}},
        "data": {"source": str(corpus), "tokenizer": "bytes", "sequence": 16, "cache": str(corpus.parent / "cache")},
        "train": {
            "steps": STEPS,
            "global_batch": 8,
            "microbatch": 1,
            "precision": "fp64",
            "warmup": 2,
            "eval_every": 2,
            "eval_batches": 2,
            "prompt": "a",
        },
        "parallel": {"ranks": 1, "device": "cpu"},
        "run": {"folder": str(folder), "loggers": []},
        "checkpoint": {"every": 3, "keep": 5},
    }
    return {name: {**section, **changes.get(name, {})} for name, section in base.items()}


def in_rank(values: dict[str, dict[str, Any]], start: Start) -> tuple[int, str | None]:
    """What one rank does; the step it reached and the text it generated."""
    config = from_dict(values)
    plan = config.to_plan()
    ending = run_session(config, plan, device=torch.device("cpu"), start=start, stop=StopRequest())
    return ending.step, ending.sample


def train_on_ranks(values: dict[str, dict[str, Any]], *, start: Start = Start.AUTO) -> list[tuple[int, str | None]]:
    config = from_dict(values)
    RunFolder(Path(config.run.folder)).check(start)
    return run_ranks(in_rank, config.parallel.ranks, values, start)


def assert_same(got: Path, wanted: Path, keys: tuple[str, ...]) -> None:
    """The same steps, once each, with equal values."""
    a, b = read_records(got), read_records(wanted)
    assert [record["step"] for record in a] == [record["step"] for record in b]
    for mine, other in zip(a, b, strict=True):
        for key in keys:
            assert mine[key] == pytest.approx(other[key], rel=1e-10, abs=0), f"step {mine['step']}: {key}"


def assert_same_run(got: Path, wanted: Path) -> None:
    assert_same(got / "metrics.jsonl", wanted / "metrics.jsonl", ("loss", "grad_norm", "tokens", "lr"))
    assert_same(got / "validation.jsonl", wanted / "validation.jsonl", ("loss", "perplexity"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The uninterrupted run in one rank."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert train_on_ranks(settings(folder, corpus))[0][0] == STEPS
    return folder


def died_after_step_3(alone: Path, folder: Path) -> Path:
    """The run as it would be if it had died at its end, before the last checkpoint: all lines, no step-000006."""
    shutil.copytree(alone, folder)
    shutil.rmtree(folder / "checkpoints" / "step-000006")
    return folder


SPREAD = (
    {"ranks": 2, "pipeline": 2},
    {"ranks": 2, "layout": "GGG"},
    {"ranks": 4, "pipeline": 2, "intra": 2, "layout": "IIG", "schedule": "gpipe"},
)
"""Where else the run goes."""


def test_a_run_evaluates_first_and_writes_a_line_a_step(alone: Path) -> None:
    metrics, validation = read_records(alone / "metrics.jsonl"), read_records(alone / "validation.jsonl")
    assert [record["step"] for record in metrics] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in validation] == [0, 2, 4, 6]
    for record in metrics:
        assert {"step", "loss", "grad_norm", "tokens", "seconds", "tokens_per_second"} <= set(record)
        assert record["tokens"] == 8 * 16
        assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["seconds"])
    for record in validation:
        assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
    assert validation[-1]["loss"] < validation[0]["loss"]
    assert sorted(path.name for path in (alone / "checkpoints").iterdir()) == ["latest", "step-000003", "step-000006"]


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("parallel", SPREAD)
def test_ranks_change_nothing_of_a_run(tmp_path: Path, corpus: Path, alone: Path, parallel: dict[str, Any]) -> None:
    results = train_on_ranks(settings(tmp_path / "run", corpus, parallel=parallel))
    assert_same_run(tmp_path / "run", alone)
    assert {text for _, text in results} == {(alone / "sample.txt").read_bytes().decode()}

    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == set(range(parallel.get("pipeline", 1)))
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert [rank["rank"] for rank in plan["ranks"]] == list(range(parallel["ranks"]))
    assert all(rank["predicted_bytes"]["total"] > 0 for rank in plan["ranks"])
    assert len(plan["schedule"]["actions"]) == parallel.get("pipeline", 1)


@pytest.mark.wide(1)
@pytest.mark.parametrize("parallel", [{"ranks": 1}, *SPREAD])
def test_a_resumed_run_continues_as_if_nothing_had_happened(
    tmp_path: Path, corpus: Path, alone: Path, parallel: dict[str, Any]
) -> None:
    folder = died_after_step_3(alone, tmp_path / "run")
    results = train_on_ranks(settings(folder, corpus, parallel=parallel), start=Start.CONTINUE)
    assert {step for step, _ in results} == {STEPS}
    assert_same_run(folder, alone)


@pytest.mark.slow
def test_a_checkpoint_of_a_pipeline_resumes_in_one_rank(tmp_path: Path, corpus: Path, alone: Path) -> None:
    train_on_ranks(settings(tmp_path / "first", corpus, parallel=SPREAD[2]))
    folder = died_after_step_3(tmp_path / "first", tmp_path / "run")
    train_on_ranks(settings(folder, corpus), start=Start.CONTINUE)
    assert_same_run(folder, alone)


def test_another_global_batch_continues_at_the_same_sample(tmp_path: Path, corpus: Path, alone: Path) -> None:
    folder = died_after_step_3(alone, tmp_path / "run")
    train_on_ranks(settings(folder, corpus, train={"global_batch": 16, "eval_every": 0}), start=Start.CONTINUE)
    state = json.loads((folder / "checkpoints" / "step-000006" / "state.json").read_text())
    assert state["state"]["caller"]["position"] == 3 * 8 + 3 * 16
    assert [record["tokens"] for record in read_records(folder / "metrics.jsonl")] == [8 * 16] * 3 + [16 * 16] * 3


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.wide(1)
@pytest.mark.parametrize("parallel", [{"ranks": 1}, *SPREAD[:2]])
@pytest.mark.parametrize("harm", ["a box", "state.json", "no .metadata"])
def test_a_damaged_checkpoint_is_passed_over_and_named(
    tmp_path: Path, corpus: Path, alone: Path, parallel: dict[str, Any], harm: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(alone, folder)
    newest = folder / "checkpoints" / "step-000006"
    if harm == "no .metadata":
        (newest / ".metadata").unlink()
    else:
        flip(newest / "state.json" if harm == "state.json" else next(newest.glob("*.distcp")))
    values = settings(folder, corpus, parallel=parallel)
    if parallel["ranks"] == 1:
        in_rank(values, Start.AUTO)  # here, where its words can be read
    else:
        train_on_ranks(values)
    assert_same_run(folder, alone)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        *("latest", "step-000003", "step-000006", "damaged-step-000006"),
    }
    words = capfd.readouterr().err
    if parallel["ranks"] == 1:
        assert "set aside as damaged-step-000006" in words
        assert f"resumed {folder}/checkpoints/step-000003" in words


def test_nothing_begins_where_all_checkpoints_are_damaged(tmp_path: Path, corpus: Path, alone: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(alone, folder)
    for state in folder.glob("checkpoints/*/state.json"):
        flip(state)
    with pytest.raises(RankError, match=r"is whole: 2 problems(?s:.*)--overwrite"):
        train_on_ranks(settings(folder, corpus))
    assert_same_run(folder, alone)
    train_on_ranks(settings(folder, corpus), start=Start.OVERWRITE)
    assert_same_run(folder, alone)


@pytest.mark.wide(2)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position": 10**18}, "position 1000000000000000000 after 3 steps"),
        ({"position": True}, "position True after 3 steps"),
        ({"schedule": {"last_epoch": -1}}, "its learning rates are those after -1 steps"),
        ({"order": {"seed": -1}}, "order is {'seed': -1}"),
    ],
)
def test_a_state_that_contradicts_itself_is_passed_over(
    tmp_path: Path, corpus: Path, alone: Path, changes: dict[str, Any], words: str
) -> None:
    """As in a checkpoint from before there were digests, which nothing else protects."""
    folder = died_after_step_3(alone, tmp_path / "run")
    only = folder / "checkpoints" / "step-000003"
    edit(only, changes)
    with pytest.raises(RankError, match=words):
        train_on_ranks(settings(folder, corpus))


def edit(checkpoint: Path, changes: Mapping[str, Any]) -> None:
    """Change what `atoll train` keeps in a state, and make the checkpoint one without digests."""
    document = json.loads((checkpoint / "state.json").read_text())
    document["state"]["caller"].update(changes)
    (checkpoint / "state.json").write_text(json.dumps({**document, "version": 1}))
    (checkpoint / "manifest.json").unlink(missing_ok=True)


def test_a_checkpoint_without_digests_resumes_with_one_line(
    tmp_path: Path, corpus: Path, alone: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = died_after_step_3(alone, tmp_path / "run")
    edit(folder / "checkpoints" / "step-000003", {})
    in_rank(settings(folder, corpus), Start.AUTO)
    assert_same_run(folder, alone)
    assert capfd.readouterr().err.count("was not verified: it was saved without digests") == 1


@pytest.mark.slow
def test_a_checkpoint_of_another_step_or_run_is_passed_over(tmp_path: Path, corpus: Path, alone: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(alone, folder)
    checkpoints = folder / "checkpoints"
    shutil.rmtree(checkpoints / "step-000006")
    shutil.copytree(checkpoints / "step-000003", checkpoints / "step-000006")
    train_on_ranks(settings(folder, corpus))
    assert_same_run(folder, alone)
    assert (checkpoints / "damaged-step-000006").is_dir()

    train_on_ranks(settings(tmp_path / "other", corpus, train={"seed": 1}))
    shutil.rmtree(checkpoints / "step-000006")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-000006", checkpoints / "step-000006")
    train_on_ranks(settings(folder, corpus))
    assert_same_run(folder, alone)
    assert (checkpoints / "damaged-step-000006-2").is_dir()


def test_a_run_whose_folder_was_taken_over_ends_before_it_writes(tmp_path: Path, corpus: Path) -> None:
    """A zombie, stopped while its job was requeued on another host."""
    folder = tmp_path / "run"
    config = from_dict(settings(folder, corpus))
    folder.mkdir()
    with RunLock(folder).held() as lock:
        other = replace(Holder.own(), host="node9", boot="another boot")
        (folder / ".lock").write_text(json.dumps(asdict(other)))
        with pytest.raises(RunError, match=r"taken over by process .* on node9"):
            run_session(
                config, config.to_plan(), device=torch.device("cpu"), start=Start.AUTO, stop=StopRequest(), lock=lock
            )
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_resuming_a_finished_run_trains_nothing(tmp_path: Path, corpus: Path, alone: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(alone, folder)
    train_on_ranks(settings(folder, corpus, parallel=SPREAD[0]), start=Start.CONTINUE)
    assert (folder / "metrics.jsonl").read_text() == (alone / "metrics.jsonl").read_text()
    assert (folder / "validation.jsonl").read_text() == (alone / "validation.jsonl").read_text()


def test_the_config_rules_the_learning_rate_of_a_resumed_run(tmp_path: Path, corpus: Path, alone: Path) -> None:
    folder = died_after_step_3(alone, tmp_path / "run")
    train_on_ranks(settings(folder, corpus, train={"lr": 6e-3}), start=Start.CONTINUE)
    before, after = (read_records(path / "metrics.jsonl") for path in (alone, folder))
    assert [record["lr"] for record in after[:3]] == [record["lr"] for record in before[:3]]
    assert [record["lr"] for record in after[3:]] == pytest.approx([2 * record["lr"] for record in before[3:]])


def test_another_corpus_is_refused(tmp_path: Path, alone: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(TEXT.replace("fox", "cat"))
    folder = died_after_step_3(alone, tmp_path / "run")
    with pytest.raises(RankError, match="another corpus") as caught:
        train_on_ranks(settings(folder, other), start=Start.CONTINUE)
    assert isinstance(caught.value.__cause__, CheckpointError)


def test_a_checkpoint_beyond_the_last_step_is_refused(tmp_path: Path, corpus: Path, alone: Path) -> None:
    folder = died_after_step_3(alone, tmp_path / "run")
    with pytest.raises(RankError, match=r"step 3, beyond train\.steps = 2"):
        train_on_ranks(settings(folder, corpus, train={"steps": 2}), start=Start.CONTINUE)


@pytest.mark.slow
def test_what_cannot_be_written_names_the_path(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "run" / "plan.json").mkdir(parents=True)
    with pytest.raises(RankError, match=r"plan\.json: cannot be written") as caught:
        train_on_ranks(settings(tmp_path / "run", corpus, parallel={"ranks": 2}))
    assert isinstance(caught.value.__cause__, RunError)


def test_without_a_validation_split_nothing_is_evaluated(tmp_path: Path, corpus: Path) -> None:
    changes = {"data": {"validation": 0.0}, "train": {"steps": 1, "prompt": None}}
    assert train_on_ranks(settings(tmp_path / "run", corpus, **changes)) == [(1, None)]
    assert not (tmp_path / "run" / "validation.jsonl").exists()
    assert (tmp_path / "run" / "trace.json").exists()


# ---- the folder


def test_what_a_start_leaves_alone(tmp_path: Path, alone: Path) -> None:
    with pytest.raises(ConfigError, match=r"step-000006.*--resume never.*--overwrite"):
        RunFolder(alone).check(Start.NEW)
    for start in (Start.AUTO, Start.CONTINUE, Start.OVERWRITE):
        RunFolder(alone).check(start)

    steps_only = RunFolder(tmp_path)
    steps_only.check(Start.NEW)
    append(steps_only.validation, {"step": 0, "loss": 1.0})
    steps_only.check(Start.NEW)  # it died before its first step: nothing to lose
    append(steps_only.metrics, {"step": 1, "loss": 1.0})
    with pytest.raises(ConfigError, match="holds a run already"):
        steps_only.check(Start.NEW)
    with pytest.raises(CheckpointError, match="no finished checkpoint"):
        steps_only.check(Start.CONTINUE)
    steps_only.check(Start.AUTO)


def test_clearing_leaves_what_is_not_of_a_run(tmp_path: Path, alone: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(alone, folder)
    (folder / "notes.txt").write_text("mine")
    RunFolder(folder).clear()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_rewinding_drops_later_steps_and_broken_lines(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(1, 5):
        append(folder.metrics, {"step": step, "loss": 0.1 + step / 3})
    with folder.metrics.open("a") as file:
        file.write('{"step": 5, "lo')
    folder.rewind(3)
    assert folder.metrics.read_text().endswith("\n")
    assert read_records(folder.metrics) == [{"step": step, "loss": 0.1 + step / 3} for step in (1, 2, 3)]


# ---- what is built


def test_learning_rates_rise_and_fall() -> None:
    train = Train(steps=9, warmup=4, min_lr_ratio=0.2, lr_schedule="linear")
    factors = [learning_rates(train)(done) for done in range(9)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])

    cosine = learning_rates(train.model_copy(update={"lr_schedule": "cosine"}))
    assert [cosine(done) for done in (4, 6, 8, 20)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    constant = learning_rates(train.model_copy(update={"lr_schedule": "constant", "warmup": 0}))
    assert [constant(done) for done in (0, 8)] == [1.0, 1.0]


def test_a_schedule_restores_through_json() -> None:
    def made() -> tuple[RateSchedule, torch.optim.Optimizer]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        return RateSchedule(optimizer, Train(steps=9, warmup=4, lr=0.1)), optimizer

    (first, optimizer), (second, _) = made(), made()
    for _ in range(3):
        optimizer.step()
        first.advance()
    second.restore(json.loads(json.dumps(first.state())))
    assert second.rate == first.rate == pytest.approx(0.1)


def test_frozen_patterns_must_match() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    choose_trained(model, [], ["0.*"])
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True]
    with pytest.raises(ConfigError, match=r"'2\.weight' matches no parameter; there are .*1\.weight"):
        choose_trained(model, [], ["2.weight"])
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        choose_trained(model, [], ["*"])


def test_trainable_patterns_leave_out_everything_else() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    choose_trained(model, ["*.weight"], ["1.*"])
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False, False, False]
    with pytest.raises(ConfigError, match=r"train\.trainable: '3\.\*' matches no parameter"):
        choose_trained(model, ["3.*"], [])
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        choose_trained(model, ["0.*"], ["0.*"])


def test_frozen_parameters_are_found_by_their_shared_name() -> None:
    config = Config().model_copy(update={"train": Train(frozen=("head.output.weight",))})
    assert not build_model(config, 32).get_parameter("embed.weight").requires_grad


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(tmp_path: Path, corpus: Path) -> None:
    config = from_dict(settings(tmp_path, corpus, model={"vocabulary": 255}))
    with pytest.raises(ConfigError, match=r"model\.vocabulary = 255.*256 ids"):
        vocabulary_of(config, prepare_corpus(config))


def test_records_behind_a_broken_line_are_read(tmp_path: Path) -> None:
    """A killed run may leave half a line, behind which a resumed one has written."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo\n[3]\n{"loss": 1.0}\n{"step": 3}\n', encoding="utf-8")
    assert read_records(path) == [{"step": 1}, {"step": 3}]
    assert read_records(tmp_path / "none.jsonl") == []


def test_the_last_step_is_saved(tmp_path: Path, corpus: Path) -> None:
    """Though it is no multiple of checkpoint.every."""
    train_on_ranks(settings(tmp_path / "run", corpus, checkpoint={"every": 4}))
    names = {each.name for each in (tmp_path / "run" / "checkpoints").iterdir()}
    assert {"step-000004", "step-000006"} <= names


def test_a_resumed_schedule_goes_on_with_this_configs_rates() -> None:
    def schedule(rate: float) -> RateSchedule:
        train = Train(steps=10, lr=rate, warmup=2)
        return RateSchedule(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate), train)

    before, after = schedule(0.1), schedule(0.4)
    for _ in range(3):
        before._optimizer.step()
        before.advance()
    after.restore(before.state())
    assert after.rate == pytest.approx(4 * before.rate)
