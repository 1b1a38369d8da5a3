"""The planner's search against every plan there is, one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from atoll.base.errors import ConfigError, UserError
from atoll.plans import schedules
from atoll.plans.layouts import EFFECTIVE, Layout, Precision
from atoll.plans.plan import ORDERS, MeshShape, Plan
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use
from atoll.prediction.planner import Goal, Order, PlanSearch, Space
from atoll.prediction.planner.answer import Answer
from atoll.prediction.planner.candidate import Candidate
from atoll.prediction.planner.search import PLAIN
from atoll.prediction.planner.space import Made
from tests.prediction.planner.test_made import FOUR_STAGES, IDS, SIZES

CASES = 60
MOST = 60
"""Plans of a case."""


def cluster_of(draw: random.Random) -> Cluster:
    """A small cluster, whose links may bind or not."""
    return Cluster.of(
        {
            "nodes": draw.choice([1, 2]),
            "device": {
                "memory": 2**40,
                "bandwidth": 1e11,
                "units": 4,
                "rates": {"float32": 1e12, "bfloat16": 4e12},
                "efficiency": {"pause": draw.choice([0.0, 1e-4]), "dispatch": draw.choice([0.0, 1e-5])},
            },
            "node": {"devices": draw.choice([2, 4]), "link": {"rate": 10 ** draw.uniform(8, 11), "latency": 1e-6}},
            "network": {"rate": 10 ** draw.uniform(7, 10), "latency": 1e-5},
        }
    )


def model_of(draw: random.Random) -> Transformer:
    return Transformer.decoder(
        layers=draw.randint(2, 7),
        hidden=64 * draw.randint(1, 4),
        heads=4,
        kv_heads=4,
        ffn=64 * draw.randint(2, 8),
        vocabulary=draw.choice([64, 1000, 5003]),
        tied=draw.random() < 0.5,
    )


def space_of(draw: random.Random) -> dict[str, tuple[Any, ...]]:
    """Values of each choice, which are few."""
    every: dict[str, tuple[Any, ...]] = {
        "pipeline": (1, 2, 4),
        "tensor": (1, 2),
        "intra": (1, 2, 4),
        "order": ORDERS,
        "schedules": (Order("1f1b"), Order("interleaved", 2), Order("zb-h1"), Order("zb-v"), Order("gpipe")),
        "microbatch": (1, 2, 4),
        "layouts": EFFECTIVE,
        "residency": ("action", "run", "step"),
        "reduction": ("microbatch", "run", "step"),
        "unit": (1, 2),
        "prefetch": (None, 0),
        "recompute": ("none", "block", "selective"),
        "precision": ("fp32", "bf16"),
        "post_validation": (False, True),
        "sequence_parallel": (False, True),
        "vocabulary_parallel": (False, True),
    }
    chosen = {name: tuple(sorted(draw.sample(range(len(values)), 1))) for name, values in every.items()}
    names = list(every)
    while True:
        name = draw.choice(names)
        grown = {**chosen, name: tuple(range(min(len(every[name]), len(chosen[name]) + draw.choice([1, 3]))))}
        if math.prod(map(len, grown.values())) > MOST:
            return {name: tuple(every[name][at] for at in chosen[name]) for name in every}
        chosen = grown


def plans_of(goal: Goal, space: dict[str, tuple[Any, ...]], world: int, devices: int) -> Iterator[Plan]:
    """Every plan, however often it comes, but for sizes that divide nothing."""
    for pipeline, tensor, intra, order in product(*(space[name] for name in ("pipeline", "tensor", "intra", "order"))):
        data, rest = divmod(world, pipeline * tensor)
        inside = tensor * (pipeline if order.index("pp") > order.index("intra") else 1)
        if rest or data % intra or tensor > devices or intra > max(1, devices // inside) or goal.global_batch % data:
            continue
        names = ("microbatch", "layouts", "residency", "reduction", "unit", "prefetch", "recompute")
        names += ("precision", "post_validation", "sequence_parallel", "vocabulary_parallel", "schedules")
        for values in product(*(space[name] for name in names)):
            given = dict(zip(names, values, strict=True))
            schedule = given.pop("schedules")
            layout = given.pop("layouts")
            microbatches, rest = divmod(goal.global_batch // data, given["microbatch"])
            if rest:
                continue
            given["sequence_parallel"] &= tensor > 1
            given["vocabulary_parallel"] &= pipeline > 1
            given["post_validation"] &= pipeline > 1
            mesh = MeshShape(pipeline, data // intra, intra, tensor, order)
            if data == 1:
                layout = Layout("NNN")
            elif intra == 1 or intra == data:  # there are two levels: whole, and over all
                layout = Layout(layout.name.replace("I", "N" if intra == 1 else "G"))
            try:
                built = schedules.build(
                    schedule.name, ranks=pipeline, microbatches=microbatches, chunks=schedule.chunks
                )
                yield Plan(mesh, layout, built, **given | {"precision": Precision.preset(given["precision"])})
            except UserError:
                continue


def predictions_of(search: PlanSearch, space: dict[str, tuple[Any, ...]]) -> list[tuple[float, int]]:
    """Seconds and bytes of every plan that is not refused."""
    found = []
    cluster, goal = search.cluster, search.goal
    for plan in plans_of(goal, space, cluster.nodes * cluster.node.devices, cluster.node.devices):
        use = Use(samples=plan.microbatch, sequence=goal.sequence, tensor=plan.mesh.tensor,
                  sequence_parallel=plan.sequence_parallel, compute=plan.precision.compute,
                  recompute=plan.recompute)  # fmt: skip
        prediction = Prediction(search.workload, plan, cluster, use)
        try:
            peak = max(prediction.peak(rank).total for rank in range(plan.mesh.pipeline))
            found.append((prediction.seconds, peak))
        except UserError:
            continue
    return found


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_no_plan_is_better_than_the_one_that_is_found(part: int) -> None:
    met = 0
    for number in range(part * CASES // 5, (part + 1) * CASES // 5):
        draw = random.Random(number)
        goal = Goal(global_batch=draw.choice([4, 8, 12]), sequence=32, headroom=0.0)
        space = space_of(draw)
        roomy = PlanSearch(model_of(draw).workload, cluster_of(draw), goal, Space(**space), effort=10**9)
        every = predictions_of(roomy, space)
        if not every:
            assert not roomy.run().fitting
            continue
        peaks = sorted(peak for _, peak in every)
        limit = peaks[int(draw.uniform(0, len(peaks)))] - draw.choice([0, 1])
        device = roomy.cluster.device.model_copy(update={"memory": limit})
        found = replace(roomy, cluster=roomy.cluster.model_copy(update={"device": device})).run()
        best = min((seconds for seconds, peak in every if peak <= limit), default=None)
        if best is None:
            assert not found.fitting
            assert found.nearest is not None
            assert found.nearest.peak == peaks[0]
            continue
        met += 1
        assert found.fitting, f"case {number}"
        assert found.fitting[0].seconds == pytest.approx(best, rel=1e-12), f"case {number}"
        assert found.bound == pytest.approx(best, rel=1e-12)
    assert met >= 3


@pytest.mark.slow
def test_plans_that_share_a_bound_do_not_hide_the_fast_ones() -> None:
    """A past bug: units of four layers may stay whole for a stage's next use, and their bound stood for units of one
    layer too. So plans that gather every parameter for every microbatch, 392 s, were tried before those that gather
    once, and the search ended at 32.7 s."""
    model = Transformer.llama(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocabulary=32000)
    cluster = Cluster.of(
        {
            "nodes": 64,
            "device": {"preset": "a100-80gb"},
            "node": {"devices": 8, "link": {"preset": "nvlink3", "reach": 0.8}},
            "network": {"preset": "roce-100", "reach": 0.8},
        }
    )
    space = Space(tensor=(4,), pipeline=(8, 16), recompute=("none",), vocabulary_parallel=(False,))
    found = PlanSearch(model.workload, cluster, Goal(global_batch=1024, sequence=4096), space, effort=200_000).run()
    assert found.fitting[0].seconds < 25
    assert found.predicted <= 5


def test_no_plan_splits_heads_of_keys_and_values() -> None:
    """Key and value heads are not replicated: a past bug proposed plans that the engine refuses."""
    model = Transformer.decoder(layers=2, hidden=64, heads=8, kv_heads=2, ffn=128, vocabulary=64)
    cluster = Cluster.of(
        {
            "device": {"preset": "a100-80gb"},
            "node": {"devices": 8, "link": {"preset": "nvlink3"}},
            "network": {"preset": "roce-100"},
        }
    )
    few = {"pipeline": (1,), "layouts": (Layout("NNN"),), "recompute": ("none",), "microbatch": (1,)}
    goal = Goal(global_batch=8, sequence=64)
    found = PlanSearch(model.workload, cluster, goal, Space(tensor=(1, 2, 4, 8), **few)).run()
    assert {each.frame.mesh.tensor for each in found.fitting} <= {1, 2}
    words = "no plan for 8 ranks: tensor = 4 ranks cannot split 2 key and value heads evenly; use tensor = 1 or 2"
    with pytest.raises(ConfigError, match=words):
        Answer.of(PlanSearch(model.workload, cluster, goal, Space(tensor=(4,), **few)))


def narrow(*, memory: int = 2**34, rate: float = 6e7) -> PlanSearch:
    """A pipeline of four ranks on two nodes, with a link between them that takes as long as the devices compute."""
    cluster = Cluster.of(
        {
            "nodes": 2,
            "device": {"memory": memory, "bandwidth": 1e11, "units": 4, "rates": {"float32": 1e12}},
            "node": {"devices": 2, "link": {"rate": 1e10, "latency": 1e-6}},
            "network": {"rate": rate, "latency": 2e-2},
        }
    )
    model = Transformer.decoder(**SIZES, vocabulary=IDS, tied=False)
    space = Space(**FOUR_STAGES, schedules=(Order("1f1b"),))
    return PlanSearch(model.workload, cluster, Goal(global_batch=6, sequence=256, headroom=0.0), space)


def test_an_order_is_searched_again_with_less_memory_until_its_prediction_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction gives the memory of an order: GPipe's exceeds the devices', 1F1B's is all of it."""
    large, small = (Made(schedules.build(name, ranks=4, microbatches=6), (2, 2, 2, 2)) for name in ("gpipe", "1f1b"))
    base = narrow().run().fitting[0]
    search = narrow(memory=base.peak or 0)
    wanted = search._prediction(base.frame, Order("1f1b", made=small), base.travel)
    held = search._prediction(base.frame, Order("gpipe", made=large), base.travel)
    peaks = [max(each.peak(rank).total for rank in range(4)) for each in (wanted, held)]
    assert peaks[0] <= search.limit < peaks[1]
    over = peaks[1] - search.limit

    def made(*answers: Made | None) -> tuple[Candidate | None, list[float]]:
        rest, limits = iter(answers), []

        def searched(prediction: Prediction, limit: float) -> Made | None:
            assert prediction.plan.schedule.name == base.order.name
            limits.append(limit)
            return next(rest)

        monkeypatch.setattr("atoll.prediction.planner.made.made_for", searched)
        return search._made(base), limits

    found = base._replace(order=Order("1f1b", made=small), seconds=wanted.seconds, peak=peaks[0])
    limit = search.limit
    assert made(small) == (found, [limit])
    assert made(large, small) == (found, [limit, limit - over])
    assert made(large, large, small) == (found, [limit, limit - over, limit - 2 * over])
    assert made(large, large, large, small) == (None, [limit, limit - over, limit - 2 * over])
    assert made(large, None) == (None, [limit, limit - over])


def test_a_frame_of_one_rank_is_bounded_by_all_that_it_computes() -> None:
    """Layers, embedding and head; of a pipeline the mean over its ranks. The head of a split vocabulary has other
    kernels, and is left out."""
    search = replace(narrow(), space=Space(precision=("fp32",)))
    every = search.space.frames(search.goal, search.cluster, blocks=len(search.workload.blocks))
    seconds, met = {}, 0
    for frame in every:
        if frame.mesh.tensor > 1:
            continue
        least = search._least_of(frame)
        assert least is not None
        alone = frame._replace(mesh=MeshShape(), microbatches=1, vocabulary_parallel=False)
        if alone not in seconds:
            base = search._prediction(alone, Order("1f1b"), PLAIN)
            works = base.ranks.works
            parts = [sum(base.durations.parts(work)) for work in works]
            seconds[alone] = sum(parts), sum(parts[at] for at in search.workload.layers)
        whole, layers = (each * frame.microbatches / frame.mesh.pipeline for each in seconds[alone])
        assert least.seconds >= (layers if frame.vocabulary_parallel else whole) * (1 - 1e-9)
        if frame.vocabulary_parallel and len(search.workload.layers) % frame.mesh.pipeline == 0:
            met += 1
            assert least.seconds == pytest.approx(layers)
        elif frame.mesh.pipeline == 1:
            assert least.seconds == pytest.approx(whole)
    assert met
