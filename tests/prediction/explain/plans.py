"""Plans of a small model that the tests explain, and their explanations."""

from __future__ import annotations

from functools import cache

from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use
from atoll.prediction.explain import Explanation
from atoll.prediction.explain.alternative import use_of

SMALL = Transformer.llama(layers=8, hidden=512, heads=8, ffn=1408, vocabulary=32000)


def cluster(network: float = 2e9, memory: int = 30_000_000_000) -> Cluster:
    return Cluster.of({
        "device": {"preset": "a100-80gb", "context": 10**9, "memory": memory},
        "node": {"devices": 4, "cards": 1, "link": {"preset": "nvlink3"}},
        "network": {"rate": network, "latency": 1e-5},
    })  # fmt: skip


def predicted(
    layout: str = "GGG", schedule: str = "1f1b", mesh: MeshShape | None = None, **options: object
) -> Prediction:
    mesh = mesh or MeshShape(2, 2, 4)
    built = schedules.build(schedule, ranks=mesh.pipeline, microbatches=64 // mesh.data)
    bf16 = Precision.preset("bf16")
    plan = Plan(mesh, Layout(layout), built, 1, precision=bf16, **options)  # type: ignore[arg-type]
    return Prediction(SMALL.workload, plan, cluster(), use_of(plan, Use(samples=1, sequence=1024)))


@cache
def explained(layout: str = "GGG") -> Explanation:
    return PLANS["GGG 1f1b"] if layout == "GGG" else Explanation(predicted(layout))


PLANS = {  # explained once for all tests
    "GGG 1f1b": Explanation(predicted()),
    "NNG zb-v": Explanation(predicted("NNG", "zb-v")),
    "IIG interleaved": Explanation(predicted("IIG", "interleaved", recompute="block")),
    "tensor": Explanation(predicted("NGG", "zb-h1", MeshShape(2, 2, 2, 2), sequence_parallel=True)),
    "vocabulary": Explanation(predicted("NNG", "1f1b", vocabulary_parallel=True)),
    "no pipeline": Explanation(predicted("IGG", "1f1b", MeshShape(1, 2, 4))),
    "one rank": Explanation(predicted("NNN", "1f1b", MeshShape())),
}
