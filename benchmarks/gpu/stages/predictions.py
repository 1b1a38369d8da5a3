"""Predicted and measured time and memory of a dozen settings: from the preset, from measurements, after calibration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from atoll.base.errors import ConfigError
from atoll.prediction.cost.calibration import Step, calibrate
from atoll.runtime.measuring.measure import cluster_to_toml, measure_cluster
from benchmarks.gpu import forecast, jobs
from benchmarks.gpu.stage import Run, attempt


def run(run: Run) -> None:
    """Measure the card as `atoll doctor --measure` does, run the settings, calibrate on half of them."""
    settings = run.choose(forecast.SETTINGS, forecast.TINY)
    device = "H100" if run.rehearse else torch.cuda.get_device_name()
    preset = forecast.preset_of(device)
    run.keep("preset", preset)
    if preset is not None:
        committed = json.loads(forecast.PATH.read_text(encoding="utf-8"))[preset]
        run.keep("committed", {} if run.rehearse else {each.name: committed[each.name] for each in settings})
        run.keep("from_preset", forecast.predicted(settings, forecast.alone(preset)))

    found = attempt(partial(_measured, run, settings))
    run.release()
    cluster = found.pop("cluster", None)
    for key, value in found.items():
        run.keep(key, value)

    rows = []
    for setting in settings:
        if run.left < run.choose(12.0, 1.0):
            break
        make = jobs.atoll_engine(setting.layout, recompute=setting.recompute)
        row = jobs.measured(run, setting.job, make, steps=run.choose(3, 1), warmup=2, name=setting.name)
        rows.append({key: value for key, value in row.items() if key != "losses"})
        run.keep("rows", rows)

    if cluster is None:
        return
    # Clocks are those of a working card in all rows, so half of them says what the other half takes.
    steps = [
        Step(((1.0, setting.prediction(cluster, on_cpu=run.rehearse)),), row["median_seconds"], setting.name)
        for setting, row in zip(settings, rows, strict=False)
        if not row["problem"]
    ]
    try:
        fitted = calibrate(steps[::2])
    except ConfigError as error:  # no scipy
        run.keep("not_calibrated", str(error))
        return
    run.keep("constants", dict(fitted.constants))
    run.keep("calibrated", {step.name: {"seconds": step.on(fitted.cluster).predicted} for step in steps[1::2]})


def _measured(run: Run, settings: Sequence[forecast.Setting]) -> dict[str, Any]:
    cluster = measure_cluster(1, local=1, device=run.device, seconds=run.choose(0.15, 0.002))
    (run.out / "cluster.toml").write_text(cluster_to_toml(cluster), encoding="utf-8")
    return {
        "cluster": cluster,
        "measured_cluster": cluster.tables(),
        "from_measurements": forecast.predicted(settings, cluster, on_cpu=run.rehearse),
    }
