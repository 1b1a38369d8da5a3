"""Defaults of other systems, as `atoll.training.settings.convert` has them, against these systems themselves.

Skipped where a system is not installed in the version that is converted; `make peers` runs them.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from atoll.training.settings.convert import SYSTEM_RULES
from atoll.training.settings.from_deepspeed import AUTOEP_FINDS, AUTOEP_ROUTES, NO_SCHEDULER


def package(name: str) -> Path:
    """The folder of a system's package. Skips a test where it is not installed, or in another version."""
    wanted = SYSTEM_RULES[name].version.rpartition(" ")[2]
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} {wanted} is not installed")
    if found != wanted:
        pytest.skip(f"{name} {found} is installed; the defaults are those of {wanted}")
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def absent(system: str, given: dict[str, Any]) -> dict[str, Any]:
    """What is filled in beside settings of a file."""
    return {path: value for path, value in SYSTEM_RULES[system].defaults(given).items() if path not in given}


def at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = getattr(value, key)
    return value


TITAN: list[dict[str, Any]] = [
    {},
    {"parallelism.pipeline_parallel_degree": 2},
    {"compile.enable": True, "checkpoint.enable": True, "validation.enable": True},
]
"""Settings of a file, so that each default is filled in at least once."""


@pytest.mark.parametrize("given", TITAN, ids=str)
def test_torchtitans(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dataclasses, whose file is imported alone: the package needs more than torch."""
    folder = package("torchtitan")
    bare = ModuleType("torchtitan")
    bare.__path__ = [str(folder)]
    monkeypatch.setitem(sys.modules, "torchtitan", bare)
    file = folder / "config" / "job_config.py"
    spec = importlib.util.spec_from_file_location("job_config", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "job_config", module)  # which its dataclasses look up
    spec.loader.exec_module(module)
    own = module.JobConfig()
    ours = absent("torchtitan", given)
    theirs = {path: at(own, path) for path in ours}
    assert ours == theirs


def signature(function: Any) -> dict[str, Any]:
    found = inspect.signature(function).parameters.items()
    return {name: list(each.default) if isinstance(each.default, tuple) else each.default for name, each in found}


DEEPSPEED: list[dict[str, Any]] = [
    {},
    {"fp16.enabled": True},
    {"optimizer.type": "AdamW"},
    {"optimizer.type": "Adam"},
    {"optimizer.type": "AdamW", "optimizer.params.torch_adam": True},
    {"scheduler.type": "WarmupLR"},
    {"scheduler.type": "WarmupDecayLR"},
    {"scheduler.type": "WarmupCosineLR"},
]


@pytest.mark.slow
@pytest.mark.parametrize("given", DEEPSPEED, ids=str)
def test_deepspeeds(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parser, and the signatures of its optimizer and of its schedules of the learning rate."""
    package("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = pytest.importorskip("deepspeed.runtime.config", reason="what DeepSpeed needs is not installed")
    rates = pytest.importorskip("deepspeed.runtime.lr_schedules")
    adam = pytest.importorskip("deepspeed.ops.adam")
    document: dict[str, Any] = {"train_batch_size": 8}
    for path, value in given.items():
        section, _, key = path.partition(".")
        if section == "fp16":
            document.setdefault(section, {})[key] = value
    own = config.DeepSpeedConfig(document)
    theirs: dict[str, Any] = {
        "gradient_clipping": own.gradient_clipping,
        "zero_optimization": {"stage": own.zero_config.stage},
        "bf16.enabled": own.bfloat16_config.enabled,
        "fp16.enabled": own.float16_config.enabled,
        "fp16.loss_scale_window": own.float16_config.loss_scale_window,
        "fp16.hysteresis": own.float16_config.hysteresis,
        "scheduler.type": NO_SCHEDULER if own.scheduler_name is None else own.scheduler_name,
    }
    is_torchs = given.get("optimizer.params.torch_adam") is True
    of_adam = signature(torch.optim.AdamW if is_torchs else adam.FusedAdam)
    theirs |= {f"optimizer.params.{key}": value for key, value in of_adam.items()}
    if given.get("scheduler.type"):
        of_rates = signature(getattr(rates, given["scheduler.type"]))
        theirs |= {f"scheduler.params.{key}": value for key, value in of_rates.items()}
    ours = absent("deepspeed", given)
    assert ours == {path: theirs[path] for path in ours}


@pytest.mark.slow
def test_each_key_of_autoep_is_converted_or_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `load_balance_coeff` is refused by itself."""
    package("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    autoep = pytest.importorskip("deepspeed.module_inject.auto_ep_config", reason="what DeepSpeed needs is missing")
    own = {each.name for each in fields(autoep.AutoEPConfig) if not each.name.startswith("_")}
    assert own == {"enabled", "autoep_size", "load_balance_coeff", *f"{AUTOEP_ROUTES} {AUTOEP_FINDS}".split()}
