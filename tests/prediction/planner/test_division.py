"""The planner divides the experts of a mixture where that is faster."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.plans.layouts import Layout
from atoll.plans.plan import MeshShape
from atoll.prediction.cost import Cluster, Transformer
from atoll.prediction.cost.experts import Mixture
from atoll.prediction.explain import Explanation
from atoll.prediction.planner import Answer, Goal, PlanSearch, Space, settings

CLUSTER = Cluster.read(Path(__file__).parents[3] / "configs" / "clusters" / "h100.toml")
QWEN3_30B = Transformer(
    name="qwen3_moe",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    width=128,
    ffn=6144,
    vocabulary=151936,
    gated=True,
    norm=1,
    biases=False,
    rotary=True,
    head_norms="head",
    mixture=Mixture(experts=128, chosen=8, ffn=768),
)
SPACE = Space(
    pipeline=(1,),
    tensor=(1,),
    precision=("bf16",),
    recompute=("selective", "block"),
    microbatch=(1, 2),
    residency=("action",),
    reduction=("microbatch",),
    unit=(1,),
    prefetch=(None,),
    layouts=(Layout("GGG"), Layout("IIG"), Layout("NNG")),
)


def answer_of(sequence: int, space: Space = SPACE) -> Answer:
    cluster = CLUSTER.model_copy(update={"nodes": 1})
    return Answer.of(PlanSearch(QWEN3_30B.workload, cluster, Goal(global_batch=8, sequence=sequence), space))


@pytest.mark.slow
def test_experts_are_divided_where_gathering_them_takes_longer() -> None:
    """On eight H100, with 2,048 tokens a rank; four times as many hide what gathers take."""
    assert answer_of(8192).best.frame.mesh.expert == 1
    answer = answer_of(2048)
    assert answer.best.frame.mesh.expert > 1
    assert settings(answer.best)["parallel"]["expert"] == answer.best.frame.mesh.expert
    found = {each.choice: each for each in answer.alternatives}["experts"]
    assert found.seconds is None or found.seconds > answer.best.seconds
    text = str(answer)
    assert "30.5B parameters, 3.35B active" in text
    assert "below 27,648 tokens a microbatch; here it has" in text
    whole = [each for each in Explanation(answer.prediction).alternatives("experts") if each.value == "1"]
    assert not any(each.is_better for each in whole)


def test_meshes_divide_experts_by_divisors_of_group_and_experts() -> None:
    def experts_of(experts: int, **options: tuple[int, ...]) -> set[tuple[int, int, int]]:
        space = Space(pipeline=(1,), **options)  # type: ignore[arg-type]
        meshes = space.meshes(Goal(global_batch=8, sequence=2048, ranks=8), CLUSTER, blocks=50, experts=experts)
        return {(mesh.tensor, mesh.intra, mesh.expert) for mesh in meshes}

    assert {expert for _, _, expert in experts_of(0)} == {1}
    assert {expert for tensor, intra, expert in experts_of(12) if (tensor, intra) == (1, 8)} == {1, 2, 4}
    assert {expert for tensor, intra, expert in experts_of(12) if (tensor, intra) == (4, 2)} == {1}
    assert {tensor for tensor, _, _ in experts_of(12)} == {1, 2, 4}
    assert {expert for _, _, expert in experts_of(128, expert=(4,))} == {4}


def test_distinct_layouts_of_experts() -> None:
    """Ranks that all divide experts have none to share them with inside a group."""
    found = Space().expert_layouts(MeshShape(1, 2, 4, expert=4), besides=Layout("IIG"))
    assert {layout.name for layout in found} == {"GGG", "NGG", "GNG", "NNN"}
    assert not [*Space().expert_layouts(MeshShape(1, 1, 4, expert=4), besides=Layout("GGG"))]


@pytest.mark.slow
def test_a_layout_of_experts_alone_is_kept_where_it_saves() -> None:
    fixed = Space(**{name: getattr(SPACE, name) for name in SPACE.__slots__} | {"expert_layout": Layout("GGG")})
    answer = answer_of(2048, fixed)
    assert answer.prediction.plan.expert_layout == Layout("GGG")
