"""Mixtures of experts: sizes, units, exchanges and programs, by formula and of the model itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from atoll.base.errors import ConfigError, PlanError
from atoll.plans import schedules
from atoll.plans.layouts import EFFECTIVE, Layout, NewtonSchulz, Precision, Whole, footprint
from atoll.plans.plan import MeshShape, Plan, View
from atoll.prediction.cost import Cluster, KernelClock, Prediction, Ranks, Transformer, Use
from atoll.prediction.cost.experts import Mixture, MixtureWork
from atoll.prediction.cost.kernels import Exchange, Product, all_to_all
from atoll.prediction.cost.mixture import MixtureConfig
from atoll.prediction.explain import Explanation
from atoll.program import Do
from atoll.program.sim import Speed
from atoll.runtime.assemble.describe import describe_rank
from atoll.runtime.models import Decoder, DecoderConfig
from atoll.runtime.models.sizes import FAMILIES, known_config, transformer_of
from atoll.training.report.traffic import predicted_flows

MIXTURE = MixtureConfig(experts=8, experts_per_token=2, expert_ffn=24, shared_experts=1, dense_layers=1)
SIZES: dict[str, Any] = {"layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 40, "vocabulary": 96}
CLUSTER = Cluster.of(
    {
        "nodes": 2,
        "device": {"memory": 2**34, "bandwidth": 1e12, "rates": {"float32": 1e13, "bfloat16": 1e14}},
        "node": {"devices": 4, "cards": 4, "link": {"rate": 1e11, "latency": 1e-6}},
        "network": {"rate": 1e10, "latency": 1e-5},
    }
)

PUBLISHED: dict[str, tuple[str, dict[str, Any], float, float]] = {
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "vocab_size": 151936,
        },
        30.5,
        3.35,
    ),
    "Mixtral 8x7B": (
        "mixtral",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
        },
        46.7,
        12.9,
    ),
    "gpt-oss-120b": (  # 5.1 billion active ones are without the embedding
        "gpt_oss",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "vocab_size": 201088,
        },
        116.8,
        5.13 + 0.58,
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "vocab_size": 129280,
        },
        671.0,
        37.5,
    ),
    "GLM-4.5-Air": (
        "glm4_moe",
        {
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "vocab_size": 151552,
        },
        106.8,
        12.8 + 0.62,
    ),
}
"""Family, sizes, and billions of parameters, in total and active."""


def sizes_of(name: str) -> Transformer:
    family, values, *_ = PUBLISHED[name]
    return transformer_of(known_config(family, values))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    *_, total, active = PUBLISHED[name]
    workload = sizes_of(name).workload
    assert workload.parameters / 1e9 == pytest.approx(total, rel=2e-3)
    assert workload.active / 1e9 == pytest.approx(active, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "tokens"), [("Qwen3-30B-A3B", 27_648), ("Mixtral 8x7B", 129_024), ("DeepSeek-V3", 147_456)]
)
def test_tokens_below_which_an_exchange_sends_less(name: str, tokens: int) -> None:
    mixture, hidden = sizes_of(name).mixture, 1000
    assert mixture is not None
    assert mixture.break_even == tokens
    exchanged = 4 * tokens * mixture.chosen * hidden
    assert exchanged == 3 * mixture.experts * 3 * hidden * mixture.ffn


def test_ranks_divide_experts_with_their_tensor_parallel_group() -> None:
    layer = sizes_of("Qwen3-30B-A3B").workload.blocks[1]
    whole = layer.work(Use(samples=1, sequence=4096))
    for tensor, expert in ((1, 8), (2, 4), (4, 1)):
        work = layer.work(Use(samples=1, sequence=4096, tensor=tensor, expert=expert))
        assert work.experts.parameters * tensor * expert == whole.experts.parameters
        rows = [kernel for kernel in work.forward if isinstance(kernel, Product) and kernel.count > 1]
        assert [kernel.rows * kernel.count for kernel in rows] == [4096 * 8 / tensor] * 2
        assert work.exchanges == (2 if expert > 1 else 0)
    with pytest.raises(ConfigError, match="128 experts cannot be divided evenly over expert x tensor = 3 x 1"):
        layer.work(Use(samples=1, sequence=8, expert=3))


def test_tensor_ranks_with_tokens_of_their_own_exchange_rows_as_well() -> None:
    """No sum over the group is left, and as many rows are sent, to more ranks."""
    layer = sizes_of("Qwen3-30B-A3B").workload.blocks[1]
    same, own = (
        layer.work(Use(samples=1, sequence=4096, tensor=2, expert=2, sequence_parallel=parts))
        for parts in (False, True)
    )
    kinds = [[k.kind for k in work.forward if isinstance(k, Exchange)] for work in (same, own)]
    assert kinds[0] == ["all-reduce", "all-to-all", "all-to-all", "all-reduce"]
    assert kinds[1] == ["all-gather", "reduce-scatter", "all-to-all", "all-to-all"]
    sent = [[k.nbytes for k in work.forward if isinstance(k, Exchange) and k.axis == "expert"] for work in (same, own)]
    assert sent[0] == sent[1] == [4096 * 8 // 2 * 2048 * 2] * 2
    assert layer.work(Use(samples=1, sequence=4096, tensor=2, sequence_parallel=True)).exchanges == 2


def test_an_uneven_choice_of_experts_fills_one_rank() -> None:
    layer = sizes_of("Qwen3-30B-A3B").workload.blocks[1]
    even, uneven = (layer.work(Use(samples=1, sequence=4096, expert=8, imbalance=own)) for own in (1.0, 1.5))
    sent = [sum(k.nbytes for k in work.forward if isinstance(k, Exchange)) for work in (even, uneven)]
    assert sent[1] == 1.5 * sent[0] == 1.5 * 2 * 4096 * 8 * 2048 * 2
    assert uneven.kept > even.kept
    alone = (layer.work(Use(samples=1, sequence=4096, imbalance=own)) for own in (1.0, 1.5))
    assert len({work.kept for work in alone}) == 1


def test_a_router_keeps_scores_of_all_experts_and_three_numbers_of_each_chosen_one() -> None:
    """Of each expert that a token has chosen its number in int64, its probability and its weight in fp32."""
    layer = sizes_of("Qwen3-30B-A3B").workload.blocks[1]
    saved = {each.name: each.nbytes for each in layer.work(Use(samples=1, sequence=4096)).saved}
    assert saved["router's scores"] == 4096 * 128 * 4
    assert saved["router's weights"] == 4096 * 8 * (8 + 4 + 4)


def test_a_gate_is_a_third_matrix_of_every_expert() -> None:
    layer, use = sizes_of("Qwen3-30B-A3B"), Use(samples=1, sequence=8)
    assert layer.mixture is not None
    gated, plain = (MixtureWork(layer.mixture, replace(layer, gated=gate), use).elements for gate in (True, False))
    assert gated.matrices == 3 * 128 * 2048 * 768
    assert plain.matrices == 2 * 128 * 2048 * 768


# ---- links


def test_an_exchange_takes_a_latency_for_each_rank_and_what_leaves_it() -> None:
    link = Speed(latency=1e-3, rate=1e6)
    assert all_to_all(8e6, ranks=4, link=link, is_told=True) == pytest.approx(4e-3 + 6.0)
    assert all_to_all(8e6, ranks=1, link=link, is_told=True) == 0.0
    assert all_to_all(8e6, ranks=4, link=link, is_told=False) == pytest.approx(3e-3 + 6.0)


def test_the_link_of_expert_ranks() -> None:
    """Ranks of a group are consecutive: an exchange stays in a node although the group does not, and across nodes each
    rank has its own card for what leaves."""
    inside = CLUSTER.inside()
    assert CLUSTER.along(MeshShape(intra=8, expert=4), "expert") == inside
    across = CLUSTER.along(MeshShape(intra=8, expert=8), "expert")
    assert across.rate == pytest.approx(1e10 * 7 / 4)
    assert CLUSTER.along(MeshShape(intra=8, expert=2), "shard").rate == pytest.approx(1e10 * 2)
    assert CLUSTER.along(MeshShape(intra=4, tensor=2, expert=4), "expert").rate == pytest.approx(1e10 * 3 / 2)
    assert CLUSTER.along(MeshShape(intra=4, tensor=2, expert=2), "expert x tp") == inside
    assert CLUSTER.along(MeshShape(intra=4, tensor=2, expert=4), "expert x tp").rate == pytest.approx(1e10 * 7 / 4)


# ---- plans


def plan_of(mesh: MeshShape, layout: str = "IIG", **options: Any) -> Plan:
    schedule = schedules.build(options.pop("schedule", "1f1b"), ranks=mesh.pipeline, microbatches=4)
    return Plan(mesh, Layout(layout), schedule, 1, **options)


def use_of(plan: Plan, **options: Any) -> Use:
    mesh = plan.mesh
    return Use(samples=1, sequence=8, tensor=mesh.tensor, expert=mesh.expert, compute=plan.precision.compute,
               sequence_parallel=plan.sequence_parallel, **options)  # fmt: skip


def decoder(**options: Any) -> nn.Module:
    with torch.device("meta"):
        return Decoder(DecoderConfig(mixture=MIXTURE, **{**SIZES, **options}))


def workload() -> Any:
    return Transformer.decoder(**SIZES, mixture=MIXTURE).workload


@pytest.mark.wide(5)
@pytest.mark.parametrize(
    "mesh",
    [MeshShape(2, 2, 2, expert=2), MeshShape(2, 2, 4, expert=2), MeshShape(1, 2, 4, expert=4), MeshShape(2, 1, 2, 2)],
    ids=["e2 of 2", "e2 of 4", "e4 without pipeline", "tensor alone"],
)
@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_programs_are_those_of_the_built_model(layout: str, mesh: MeshShape) -> None:
    for options in ({}, {"expert_layout": Layout("GGG"), "precision": Precision.preset("bf16")}):
        plan = plan_of(mesh, layout, **options)
        assert_alike(plan)


@pytest.mark.wide(1)
@pytest.mark.parametrize("schedule", ["zb-v", "breadth-first", "dualpipe-v"])
def test_programs_of_other_schedules_and_units(schedule: str) -> None:
    mesh = MeshShape(2, 1, 4, expert=2)
    assert_alike(plan_of(mesh, "IIG", schedule=schedule))
    assert_alike(plan_of(mesh, "GGG", schedule=schedule, unit=2, recompute="block"))
    assert_alike(plan_of(MeshShape(2, 1, 2, 2, expert=2), "GGG", schedule=schedule))
    assert_alike(plan_of(MeshShape(2, 1, 2, 2, expert=2), "IGG", schedule=schedule, sequence_parallel=True))


MUON = Whole("Muon", NewtonSchulz())


@pytest.mark.wide(8)
@pytest.mark.parametrize("layout", ["NNN", "NNG", "NII", "III", "IIG", "IGG", "GGG"])
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": MeshShape(2, 2, 2, expert=2), "precision": Precision.preset("bf16")},
        {"mesh": MeshShape(1, 2, 4, expert=2), "unit": 2},
        {"mesh": MeshShape(2, 1, 2, expert=2), "expert_layout": Layout("GGG"), "post_validation": True},
        {"mesh": MeshShape(1, 2, 2), "expert_layout": Layout("NNG")},
        {"mesh": MeshShape(2, 2, 2), "schedule": "zb-v"},
        {"mesh": MeshShape(2, 1, 2, 2, expert=2)},
        {"mesh": MeshShape(1, 1, 2, 2), "sequence_parallel": True},
    ],
    ids=["e2", "e2 of 4", "a layout of their own", "undivided, but apart", "undivided", "tensor", "tensor alone"],
)
def test_experts_that_the_optimizer_transforms_whole(layout: str, options: dict[str, Any]) -> None:
    """Each expert is a matrix, as are the router and shared experts."""
    assert_alike(plan_of(layout=layout, whole=MUON, **options))


def test_seconds_and_bytes_of_a_step_that_transforms_experts() -> None:
    """Each of two ranks has one momentum instead of two states of its 4 experts, and transforms them: 4 of one shape
    are a batch of products."""
    found = {}
    for whole in (None, MUON):
        plan = plan_of(MeshShape(1, 1, 2, expert=2), "IGG", whole=whole)
        found[whole] = Prediction(workload(), plan, CLUSTER, use_of(plan))
    adamw, muon = found[None], found[MUON]
    experts = [at for at, unit in enumerate(muon.ranks.shape.units) if unit.view is View.EXPERTS]
    seconds = muon.rates[0].compute
    inner, hidden = MIXTURE.expert_ffn or 0, SIZES["hidden"]
    products = [
        Product(*sizes, 4)
        for short, long in ((hidden, 2 * inner), (hidden, inner))
        for sizes in 5 * [(short, long, short), (short, short, short), (short, short, long)]
    ]
    clock = KernelClock(muon.device, "bfloat16", 2)
    assert len(experts) == SIZES["layers"] - MIXTURE.dense_layers
    assert [seconds[Do.TRANSFORM, at] for at in experts] == pytest.approx([clock.seconds(products)] * len(experts))
    assert seconds[Do.STEP, -1] < adamw.rates[0].compute[Do.STEP, -1]
    # Of 4 bytes each: the elements of a rank's experts, and half of the other matrices.
    of_experts = len(experts) * 4 * 3 * hidden * inner
    dense, shared = (3 * hidden * each for each in (SIZES["ffn"], inner))
    router, attention = 8 * hidden, 3 * hidden * hidden
    others = 4 * attention + dense + len(experts) * (shared + router)
    assert adamw.rest(0).total - muon.rest(0).total == 4 * (of_experts + others // 2)


def assert_alike(plan: Plan) -> None:
    ranks = Ranks(workload(), plan, use_of(plan))
    for rank in range(plan.mesh.pipeline):
        real = describe_rank(decoder, plan, rank, reads_in_place=False).program
        found = ranks.programs.ranks[rank]
        assert found.instructions == real.instructions
        assert found.shape.units == real.shape.units
        assert found.shape == real.shape
        assert found.shape.at_rest == real.shape.at_rest


def test_where_all_ranks_of_a_group_divide_experts_level_i_is_n() -> None:
    """Experts at I and at N take equal bytes; an element is stored once in a group."""
    held = {}
    for layout in ("NNN", "III", "GGG"):
        plan = plan_of(MeshShape(1, 2, 4, expert=4), "GGG", expert_layout=Layout(layout))
        ranks = Ranks(workload(), plan, use_of(plan))
        units = [unit for at, unit in ranks.of(0).units.items() if ranks.shape.units[at].view is View.EXPERTS]
        held[layout] = sum(footprint(unit.segments, plan.sharding(plan.mesh.place(0), View.EXPERTS)).total
                           for unit in units)  # fmt: skip
    assert held["NNN"] == held["III"]
    assert held["GGG"] < held["NNN"]


@pytest.mark.parametrize(("recompute", "times"), [("none", 4), ("block", 6), ("selective", 6)])
@pytest.mark.parametrize("mesh", [MeshShape(2, 1, 4, expert=4), MeshShape(2, 1, 2, 2, expert=2)])
def test_bytes_exchanged_in_a_step(mesh: MeshShape, recompute: str, times: int) -> None:
    """T k h values of each layer and microbatch, and (e - 1) / e of them leave the rank."""
    plan = plan_of(mesh, "IGG", recompute=recompute)
    prediction = Prediction(workload(), plan, CLUSTER, use_of(plan, recompute=recompute))
    sent = sum(flow.bytes for flow in predicted_flows(prediction) if flow.link == "expert")
    layers, tokens, hidden = SIZES["layers"] - MIXTURE.dense_layers, 8, SIZES["hidden"]
    each = tokens * MIXTURE.experts_per_token // mesh.tensor * hidden * 4
    assert sent == times * layers * plan.schedule.microbatches * each * (mesh.expert - 1) / mesh.expert
    uses = [use for rank in range(2) for use in Explanation(prediction).links(rank) if use.axis == "expert"]
    assert sum(use.nbytes for use in uses) == sent
    assert sum(use.times for use in uses) == times * layers * plan.schedule.microbatches
    assert all(parts.exchanges > 0 for parts in prediction.breakdown)


def test_exchanges_are_a_part_of_a_step() -> None:
    plan = plan_of(MeshShape(2, 1, 4, expert=4), "IGG")
    tables = CLUSTER.tables()
    tables["device"]["efficiency"] = {"dispatch": 0.0}
    rates = (1e9, 1e6)
    fast, late = (
        Prediction(
            workload(), plan, Cluster.of({**tables, "node": {"devices": 4, "link": {"rate": rate}}}), use_of(plan)
        )
        for rate in rates
    )
    for one, other in zip(fast.breakdown, late.breakdown, strict=True):
        assert other.exchanges == pytest.approx(1000 * one.exchanges)
        assert other.forward == pytest.approx(one.forward)
    without = Prediction(workload(), replace(plan, mesh=MeshShape(2, 1, 4)), CLUSTER, replace(use_of(plan), expert=1))
    assert not any(parts.exchanges for parts in without.breakdown)


def test_a_dense_model_has_no_experts_to_divide() -> None:
    dense = Transformer.decoder(**SIZES).workload
    assert dense.experts == 0
    assert dense.active == dense.parameters
    plan = plan_of(MeshShape(1, 1, 2, expert=2), "IIG")
    with pytest.raises(PlanError, match="has none that can be divided"):
        describe_rank(lambda: nn.Sequential(nn.Linear(4, 4)), plan, 0, reads_in_place=False)


def test_every_family_without_its_own_sizes_is_refused() -> None:
    for family, values, *_ in PUBLISHED.values():
        assert family in FAMILIES
        for key in ("num_experts_per_tok", "hidden_size"):
            assert known_config(family, {name: each for name, each in values.items() if name != key}) is None
    assert Mixture(experts=4, chosen=1, ffn=8).break_even == 72
