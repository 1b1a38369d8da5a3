"""The programs of a workload are those of the model that it describes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from atoll.base.errors import PlanError
from atoll.plans import schedules
from atoll.plans.layouts import EFFECTIVE, Layout, NewtonSchulz, Precision, Whole
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Ranks, Transformer, Use
from atoll.program import needed_in_a_step
from atoll.runtime.assemble.describe import describe_rank
from atoll.runtime.models import Decoder, DecoderConfig, count
from tests.prediction.cost import test_experts as mixtures

SIZES = {"layers": 6, "hidden": 16, "heads": 4, "ffn": 40, "vocabulary": 96}

MESH = MeshShape(2, 2, 2)


def plan_of(layout: str = "IIG", *, schedule: str = "1f1b", mesh: MeshShape = MESH, **options: object) -> Plan:
    built = schedules.build(schedule, ranks=mesh.pipeline, microbatches=max(4, 2 * mesh.pipeline))
    return Plan(mesh, Layout(layout), built, 1, **options)  # type: ignore[arg-type]


def model(sizes: dict[str, int], *, tied: bool) -> nn.Module:
    with torch.device("meta"):
        return Decoder(DecoderConfig(kv_heads=2, tie_embeddings=tied, **sizes))


def assert_alike(plan: Plan, *, tied: bool = False, reads_in_place: bool = False, **other: int) -> None:
    sizes = SIZES | other
    workload = Transformer.llama(kv_heads=2, tied=tied, **sizes).workload
    ranks = Ranks(workload, plan, Use(samples=1, sequence=8, tensor=plan.mesh.tensor), reads_in_place)
    for rank in range(plan.mesh.pipeline):
        real = describe_rank(lambda: model(sizes, tied=tied), plan, rank, reads_in_place=reads_in_place).program
        found = ranks.programs.ranks[rank]
        assert found.instructions == real.instructions
        assert found.shape.units == real.shape.units
        assert found.shape == real.shape


@pytest.mark.wide(5)
@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
@pytest.mark.parametrize("reads_in_place", [False, True])
def test_every_layout(layout: str, reads_in_place: bool) -> None:
    assert_alike(plan_of(layout), reads_in_place=reads_in_place)
    assert_alike(plan_of(layout, precision=Precision.preset("bf16")), tied=True, reads_in_place=reads_in_place)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_schedules_on_lines_turns_and_vs(schedule: str, tied: bool) -> None:
    assert_alike(plan_of("GGG", schedule=schedule), tied=tied)


@pytest.mark.wide(7)
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


@pytest.mark.wide(5)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("together", [2, 3, 8])
def test_units_of_several_blocks(together: int, schedule: str, tied: bool) -> None:
    assert_alike(plan_of("GGG", schedule=schedule, unit=together), tied=tied)
    assert_alike(plan_of("IGG", mesh=MeshShape(1, 2, 2), unit=together, recompute="block"), tied=tied)


# ---- frozen parameters

TRAINED: dict[str, Callable[[str], bool]] = {
    "head": lambda name: name.startswith("head"),
    "a layer and a half": lambda name: name.startswith(("layers.3", "layers.4.attention")),
    "norms": lambda name: "norm" in name,
    "no head": lambda name: not name.startswith(("head", "embed")),
}


@pytest.mark.wide(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["NNN", "NNG", "IIG", "IGG", "GGG"])
@pytest.mark.parametrize("trained", TRAINED)
def test_frozen_parameters(trained: str, layout: str, tied: bool) -> None:
    def frozen() -> nn.Module:
        made = model(SIZES, tied=tied)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(TRAINED[trained](name))
        return made

    for schedule, mesh in (("1f1b", MESH), ("zb-v", MESH), ("gpipe", MeshShape(1, 2, 2))):
        plan = plan_of(layout, schedule=schedule, mesh=mesh)
        ranks = Ranks(count(frozen()), plan, Use(samples=1, sequence=8, compute="float32"))
        for rank in range(mesh.pipeline):
            real = describe_rank(frozen, plan, rank, reads_in_place=False).program
            found = ranks.programs.ranks[rank]
            assert found.instructions == real.instructions
            assert found.shape == real.shape


# ---- a split vocabulary


@pytest.mark.wide(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_a_split_vocabulary_under_every_layout(layout: str, tied: bool) -> None:
    """No rank has as many rows as the last one."""
    for reads_in_place in (False, True):
        plan = plan_of(layout, vocabulary_parallel=True)
        assert_alike(plan, tied=tied, reads_in_place=reads_in_place, vocabulary=97)


@pytest.mark.wide(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", schedules.CATALOGUE)
def test_a_split_vocabulary_under_every_schedule(schedule: str, tied: bool) -> None:
    for residency in ("action", "run"):
        plan = plan_of("GGG", schedule=schedule, residency=residency, vocabulary_parallel=True)
        assert_alike(plan, tied=tied, vocabulary=97)
    line = plan_of("NNG", schedule=schedule, mesh=MeshShape(3, 1, 2), vocabulary_parallel=True)
    assert_alike(line, tied=tied, vocabulary=97)


@pytest.mark.wide(5)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"residency": "step", "reduction": "step"},
        {"residency": "run", "reduction": "run", "resident": 4096},
        {"recompute": "block", "prefetch": 0},
        {"post_validation": True, "precision": Precision.preset("bf16")},
        {"precision": Precision.preset("fp16"), "unit": 3},
        {"mesh": MeshShape(2, 1, 2, tensor=2)},
        {"mesh": MeshShape(2, 2, 1, tensor=2), "schedule": "zb-v", "residency": "run"},
    ],
    ids=["step", "run", "recomputed", "post-validated", "scaled", "tensor", "tensor on a v"],
)
def test_a_split_vocabulary_beside_what_else_a_plan_says(options: dict[str, object], tied: bool) -> None:
    assert_alike(plan_of("IGG", vocabulary_parallel=True, **options), tied=tied)  # type: ignore[arg-type]


def test_a_large_head_moves_no_layers_where_it_is_split() -> None:
    """Nor where a whole one would take all layers from the last stage."""
    for split in (False, True):
        assert_alike(plan_of(vocabulary_parallel=split), vocabulary=4001)
    plan = plan_of("NNN", vocabulary_parallel=True)
    ranks = Ranks(Transformer.llama(**SIZES | {"vocabulary": 4001}).workload, plan, Use(samples=1, sequence=8))
    assert [len(run) for run in ranks.runs] == [4, 4]


def test_slices_without_rows_are_refused_as_by_the_engine() -> None:
    plan = plan_of("NNN", mesh=MeshShape(4), vocabulary_parallel=True)
    sizes = SIZES | {"vocabulary": 9}
    words = "9 rows.* one of 4 ranks .*without any"
    with pytest.raises(PlanError, match=words):
        describe_rank(lambda: model(sizes, tied=False), plan, 0)
    ranks = Ranks(Transformer.llama(**sizes).workload, plan, Use(samples=1, sequence=8))
    with pytest.raises(PlanError, match=words):
        _ = ranks.programs


def test_costs_that_are_not_known_are_refused() -> None:
    """A counted workload does not say which part of its ends the vocabulary's rows are."""
    workload = count(model(SIZES, tied=False))
    with pytest.raises(PlanError, match="costs of a split vocabulary are not known"):
        Ranks(workload, plan_of(vocabulary_parallel=True), Use(samples=1, sequence=8))


@pytest.mark.wide(3)
@pytest.mark.parametrize("layout", ["NNN", "NII", "III", "IIG", "GGG"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mesh": MeshShape(1, 2, 2), "unit": 2},
        {"mesh": MeshShape(2, 1, 2, tensor=2)},
        {"post_validation": True, "schedule": "zb-v"},
    ],
    ids=["pipeline", "units of two", "tensor", "post-validated"],
)
def test_matrices_that_the_optimizer_transforms_whole(layout: str, options: dict[str, object]) -> None:
    whole = Whole("Muon", NewtonSchulz())
    assert_alike(plan_of(layout, whole=whole, **options), tied=True)  # type: ignore[arg-type]


def test_matrices_are_working_memory_once_the_program_is_known() -> None:
    """Those that are whole at the end of the step."""
    for whole in (None, Whole("Muon", NewtonSchulz())):
        plan = plan_of("NNG", whole=whole)
        workload = Transformer.llama(kv_heads=2, tied=False, **SIZES).workload
        ranks = Ranks(workload, plan, Use(samples=1, sequence=8))
        program = ranks.programs.ranks[0]
        assert needed_in_a_step(ranks.of(0)).matrices == 0
        assert needed_in_a_step(ranks.of(0), program.peaks).matrices == program.peaks.matrices
        assert (program.peaks.matrices > 0) == (whole is not None)


@pytest.mark.parametrize("expert", [1, 2])
def test_units_of_a_block_share_its_weights_gradients(expert: int) -> None:
    """All of a block's W is somebody's: of its unit, or of that and of the unit of its experts."""
    plan = mixtures.plan_of(MeshShape(2, 1, 2, expert=expert), schedule="zb-h1")
    ranks = Ranks(mixtures.workload(), plan, mixtures.use_of(plan))
    shares = {at: tuple(own.values()) for at, own in ranks.weighed_with.items()}
    assert shares
    assert all(sum(own) == pytest.approx(1.0) and min(own) > 0 for own in shares.values())
    assert max(map(len, shares.values())) == expert
