"""Metrics that go elsewhere, through fakes of the packages and a function of this module."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.base.errors import ConfigError, RunError
from atoll.plans.plan import Plan
from atoll.prediction.cost import Cluster
from atoll.training.config.load import from_dict
from atoll.training.output.folder import RunFolder, Start, read_records
from atoll.training.output.loggers import Logger, check_loggers
from atoll.training.run.session import run_session
from atoll.training.run.signals import StopRequest
from atoll.training.run.utilisation import Peak, device_peak, utilised_seconds
from atoll.training.setup.prediction import predict
from tests.loggers import FakeMlflow, FakeWandb
from tests.training.run.test_train import TEXT, settings

ROOT = Path(__file__).parents[3]
SEEN: list[tuple[int, dict[str, float]]] = []


def remember(values: dict[str, float], step: int) -> None:
    """A logger of this module."""
    SEEN.append((step, dict(values)))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = {"wandb": FakeWandb(), "mlflow": FakeMlflow()}
    for name, fake in found.items():
        monkeypatch.setitem(sys.modules, name, fake)
    SEEN.clear()
    return found


def test_every_logger_gets_what_the_folder_has(tmp_path: Path, packages: dict[str, Any]) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_text(TEXT)
    names = ["wandb", "mlflow", f"{__name__}:remember"]
    for steps in (2, 4):
        values = settings(tmp_path / "run", corpus, train={"steps": steps}, run={"loggers": names})
        config = from_dict(values)
        RunFolder(tmp_path / "run").check(Start.AUTO)
        run_session(config, config.to_plan(), device=torch.device("cpu"), start=Start.AUTO, stop=StopRequest())
    metrics = read_records(tmp_path / "run" / "metrics.jsonl")
    validation = read_records(tmp_path / "run" / "validation.jsonl")
    for fake in packages.values():
        assert not fake.is_open
        (logged,) = fake.runs.values()  # of both starts
        assert logged == SEEN
    assert packages["wandb"].config["train"]["steps"] == 4
    assert packages["mlflow"].config["train.steps"] == 2  # as it began
    trained = {step: values for step, values in SEEN if "train/loss" in values}
    checked = {step: values for step, values in SEEN if "validation/loss" in values}
    assert [trained[each["step"]]["train/loss"] for each in metrics] == [each["loss"] for each in metrics]
    assert [checked[each["step"]]["validation/loss"] for each in validation] == [each["loss"] for each in validation]
    assert not any("mfu" in each for each in metrics)  # of a CPU


def test_a_package_that_is_missing_is_said_before_the_run() -> None:
    with pytest.raises(ConfigError, match="names wandb, which is not installed: pip install wandb"):
        check_loggers(("wandb",))
    with pytest.raises(ConfigError, match="no function or class remembr; did you mean remember"):
        check_loggers((f"{__name__}:remembr",))
    with pytest.raises(ConfigError, match="'wandb', 'mlflow' or \"module:function\""):
        from_dict({"run": {"loggers": ["wandbb"]}})


def test_a_function_that_fails_is_named() -> None:
    with pytest.raises(RunError, match=r"run\.loggers: mine raised ZeroDivisionError"):
        Logger("mine", lambda values, step: 1 / 0)({}, 1)


# ---- MFU


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("H200", "h200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("Tesla T4", None),
        (None, None),
    ],
)
def test_a_peak_is_known_by_the_devices_own_name(name: str | None, preset: str | None) -> None:
    found = device_peak(name, "bfloat16")
    assert (None if found is None else found.source) == (None if preset is None else f"the preset {preset}")


def test_mfu_is_that_of_the_prediction() -> None:
    cluster = Cluster.read(ROOT / "configs" / "clusters" / "h100.toml")
    config = from_dict({"train": {"precision": "bf16"}, "data": {"tokenizer": "bytes"}})
    prediction = predict(config, cluster)
    plan: Plan = prediction.plan
    peak = device_peak("some GPU", "bfloat16", cluster)
    assert peak == Peak(cluster.device.rates["bfloat16"], "the device of run.cluster")
    assert plan.precision.compute == "bfloat16"
    assert utilised_seconds(prediction, peak) / prediction.seconds == pytest.approx(prediction.mfu)
