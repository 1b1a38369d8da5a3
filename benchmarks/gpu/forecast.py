"""Predictions of settings that stage *predictions* measures, made before, without a GPU: `one_gpu.py --predict`.

The file is committed, so that nobody can fit a prediction to what was measured: a line of the stage has its digest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.prediction.cost import Cluster, Prediction, Transformer, Use
from benchmarks.gpu import jobs
from benchmarks.gpu.jobs import Job
from benchmarks.provenance import ROOT

PATH = ROOT / "benchmarks" / "gpu" / "predictions.json"

PRESETS = {"H100": "h100-80gb", "H200": "h200"}
"""Part of a device's name -> the preset that predicts it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A job under a layout on one rank."""

    name: str
    job: Job
    layout: str = "NNG"
    recompute: str = "none"

    def prediction(self, cluster: Cluster, *, on_cpu: bool = False) -> Prediction:
        """Its step on a cluster."""
        job = self.job
        sizes = Transformer.decoder(
            layers=job.layers,
            hidden=job.hidden,
            heads=job.heads,
            kv_heads=job.heads,
            ffn=job.ffn,
            vocabulary=job.vocabulary,
            on_cpu=on_cpu,
        )
        use = Use(samples=job.microbatch, sequence=job.sequence, compute="bfloat16", recompute=self.recompute)
        return Prediction(sizes.workload, job.plan(self.layout, recompute=self.recompute), cluster, use, on_cpu)


_BASE = replace(jobs.MODEL_A, layers=8, sequence=2048)

SETTINGS = (
    Setting("model A", jobs.MODEL_A),
    Setting("8 layers", _BASE),
    Setting("8 layers, NNN", _BASE, "NNN"),
    Setting("8 layers, GGG", _BASE, "GGG"),
    Setting("8 layers, IIG", _BASE, "IIG"),
    Setting("8 layers, recompute block", _BASE, recompute="block"),
    Setting("8 layers, recompute selective", _BASE, recompute="selective"),
    Setting("8 layers, microbatch 4", jobs.larger_microbatch(_BASE)),
    Setting("8 layers, sequence 8192", replace(_BASE, sequence=8192, microbatch=1)),
    Setting("3 layers, hidden 4096", replace(_BASE, layers=3, hidden=4096, heads=32, ffn=11_008)),
    Setting("8 layers, GGG, recompute block", _BASE, "GGG", "block"),
    Setting("125 million parameters", jobs.SMALL),
)
"""Those at even places calibrate, the others judge what was calibrated."""

TINY = tuple(
    Setting(f"tiny, {layout}, {layers} layers", replace(jobs.TINY, layers=layers), layout)
    for layout, layers in (("NNG", 2), ("NNG", 3), ("GGG", 2), ("NNN", 4))
)


def preset_of(device: str) -> str | None:
    """The preset of a device by its name, None if there is none."""
    return next((preset for part, preset in PRESETS.items() if part in device), None)


def alone(preset: str) -> Cluster:
    """One device of a preset."""
    return Cluster.of({"device": {"preset": preset}, "node": {"devices": 1}})


def predicted(settings: Sequence[Setting], cluster: Cluster, *, on_cpu: bool = False) -> dict[str, dict[str, float]]:
    """Seconds of a step and bytes that are allocated at its peak, by setting."""
    found = {}
    for setting in settings:
        prediction = setting.prediction(cluster, on_cpu=on_cpu)
        found[setting.name] = {"seconds": prediction.seconds, "peak_bytes": prediction.peak(0).allocated}
    return found


def forecast() -> dict[str, Any]:
    """The predictions of every preset."""
    return {preset: predicted(SETTINGS, alone(preset)) for preset in PRESETS.values()}


def write(path: Path = PATH) -> None:
    """Write them."""
    path.write_text(json.dumps(forecast(), indent=1) + "\n", encoding="utf-8")
