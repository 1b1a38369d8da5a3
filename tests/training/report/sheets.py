"""Small sheets for tests: a prediction, and a run with made-up measurements beside it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.plans.schedules import build
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use
from atoll.training.report import Curves, Sheet, predicted_sheet, recorded_timeline, with_measurements

CLUSTER = Cluster.of(
    {
        "device": {"memory": 10_000_000_000, "bandwidth": 1e11, "rates": {"bfloat16": 1e13}},
        "node": {
            "devices": 4,
            "link": {"rate": 2e9, "latency": 5e-6},
            "host": {"memory": 64_000_000_000, "bandwidth": 2e10, "rate": 5e9},
        },
        "network": {"rate": 2e8, "latency": 3e-5},
    }
)


def predict(
    *,
    pipeline: int = 2,
    inter: int = 2,
    intra: int = 2,
    tensor: int = 1,
    layout: str = "IIG",
    schedule: str = "1f1b",
    microbatches: int = 4,
    layers: int = 4,
    cluster: Cluster | None = CLUSTER,
    **plan: Any,
) -> Prediction:
    model = Transformer.llama(layers=layers, hidden=256, heads=4, ffn=512, vocabulary=1000)
    mesh = MeshShape(pipeline=pipeline, inter=inter, intra=intra, tensor=tensor)
    order = build(schedule, ranks=pipeline, microbatches=microbatches)
    found = Plan(mesh, Layout(layout), order, microbatch=1, precision=Precision.preset("bf16"), **plan)
    return Prediction(model.workload, found, cluster, Use(samples=1, sequence=128, tensor=tensor))


RANKS: list[dict[str, Any]] = [
    {
        "instructions": [
            ["F", "0F0", 0, None, 100.0, 104.0],
            ["F", "0F0", 1, None, 101.0, 103.0],
            ["SEND_F", "0SEND_F0", -1, None, 104.0, 104.5],
            ["RECV_B", "0RECV_B0", -1, None, 104.5, 110.0],
            ["I", "0B0", 1, None, 110.0, 112.0],
        ],
        "travels": [["0UNSHARD", 99.5, 100.5], ["0UNSHARD", 100.0, 101.0], ["0REDUCE_GRAD", 111.0, 112.5]],
    },
    {
        "instructions": [
            ["RECV_F", "1RECV_F0", -1, None, 100.0, 105.0],
            ["F", "1F0", 2, None, 105.0, 107.0],
            ["I", "1B0", 2, None, 107.0, 108.5],
            ["SEND_B", "1SEND_B0", -1, None, 108.5, 109.0],
        ],
        "travels": [],
    },
]
"""Two pipeline ranks as timeline.json has them, with seconds for milliseconds."""


def run_sheet(name: str = "run", *, steps: int = 30, **plan: Any) -> Sheet:
    sheet = predicted_sheet(predict(**plan), name, "run")
    values = [float(step) for step in range(1, steps + 1)]
    training = {
        "step": values,
        "loss": [5.0 * math.exp(-step / 20) for step in values],
        "grad_norm": [math.nan if step == 3 else 1.0 / step for step in values],
        "tokens_per_second": [1000.0 + step for step in values],
    }
    curves = Curves(training, {"step": [0.0, 30.0], "loss": [5.5, 2.0]})
    assert sheet.memory is not None
    memory = replace(sheet.memory, peaks=(300_000_000, 200_000_000), measured="allocated")
    timelines = (*sheet.timelines, recorded_timeline(RANKS, "measured, step 30"))
    return with_measurements(sheet, {"step": "12.5 s, median"}, timelines=timelines, memory=memory, curves=curves)
