"""The programs of a workload are those of the model that it describes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll import schedules
from atoll.cost import Ranks, Transformer, Use
from atoll.errors import PlanError
from atoll.layouts import EFFECTIVE, Layout, Precision
from atoll.models import Decoder, DecoderConfig
from atoll.plan import MeshShape, Plan
from atoll.runtime.assemble.describe import describe

SIZES = {"layers": 6, "hidden": 16, "heads": 4, "ffn": 40, "vocabulary": 96}


MESH = MeshShape(2, 2, 2)


def plan_of(layout: str = "IIG", *, schedule: str = "1f1b", mesh: MeshShape = MESH, **options: object) -> Plan:
    built = schedules.build(schedule, ranks=mesh.pipeline, microbatches=4)
    return Plan(mesh, Layout(layout), built, 1, **options)  # type: ignore[arg-type]


def model(*, tied: bool) -> nn.Module:
    with torch.device("meta"):
        return Decoder(DecoderConfig(kv_heads=2, tie_embeddings=tied, **SIZES))


def assert_alike(plan: Plan, *, tied: bool = False, reads_in_place: bool = False) -> None:
    workload = Transformer.llama(kv_heads=2, tied=tied, **SIZES).workload
    ranks = Ranks(workload, plan, Use(samples=1, sequence=8, tensor=plan.mesh.tensor), reads_in_place)
    for rank in range(plan.mesh.pipeline):
        real = describe(lambda: model(tied=tied), plan, rank, reads_in_place=reads_in_place).program
        found = ranks.programs.ranks[rank]
        assert found.instructions == real.instructions
        assert found.shape.units == real.shape.units
        assert found.shape == real.shape


@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
@pytest.mark.parametrize("reads_in_place", [False, True])
def test_every_layout(layout: str, reads_in_place: bool) -> None:
    assert_alike(plan_of(layout), reads_in_place=reads_in_place)
    assert_alike(plan_of(layout, precision=Precision.preset("bf16")), tied=True, reads_in_place=reads_in_place)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_schedules_on_lines_turns_and_vs(schedule: str, tied: bool) -> None:
    assert_alike(plan_of("GGG", schedule=schedule), tied=tied)


@pytest.mark.parametrize(
    "options",
    [
        {"residency": "run", "reduction": "run"},
        {"residency": "step", "reduction": "step"},
        {"recompute": "block", "prefetch": 0},
        {"post_validation": True, "precision": Precision.preset("bf16")},
        {"precision": Precision.preset("fp16")},
        {"mesh": MeshShape(1, 2, 2)},
        {"mesh": MeshShape(2, 1, 2, tensor=2)},
    ],
    ids=["run", "step", "recomputed", "post-validated", "scaled", "no pipeline", "tensor"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_what_else_a_plan_says(options: dict[str, object], tied: bool) -> None:
    assert_alike(plan_of("IGG", **options), tied=tied)  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("together", [2, 3, 8])
def test_units_of_several_blocks(together: int, schedule: str, tied: bool) -> None:
    assert_alike(plan_of("GGG", schedule=schedule, unit=together), tied=tied)
    assert_alike(plan_of("IGG", mesh=MeshShape(1, 2, 2), unit=together, recompute="block"), tied=tied)


def test_what_is_not_known_is_refused() -> None:
    workload = Transformer.llama(**SIZES).workload
    with pytest.raises(PlanError, match="costs are not known for a vocabulary that is split over the pipeline"):
        Ranks(workload, plan_of(vocabulary_parallel=True), Use(samples=1, sequence=8))
