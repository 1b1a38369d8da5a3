"""What an explanation says of host memory: its cost, what it saves, and the link on which it would cost nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from atoll.base.errors import ConfigError
from atoll.cli.predict import describe_prediction
from atoll.plans import schedules
from atoll.plans.host import HostState
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use, Workload
from atoll.prediction.cost.work import BlockOf, Work
from atoll.prediction.explain.choices import CHOICES
from atoll.prediction.explain.explanation import Explanation
from atoll.prediction.explain.host import NEGLIGIBLE, with_host_link
from atoll.prediction.explain.text import describe_explanation
from atoll.prediction.planner import Goal, PlanSearch, Space
from atoll.prediction.planner.answer import Answer
from atoll.prediction.planner.candidate import settings
from atoll.training.config import from_dict
from atoll.training.setup.choosing import space_of

SEVEN = Transformer.llama(layers=32, hidden=4096, heads=32, ffn=11008, vocabulary=32000)


def cluster(devices: int = 4, **host: Any) -> Cluster:
    node = {"devices": devices, "cards": devices, "host": {"preset": "dgx-h100", **host}}
    link = {"link": {"preset": "nvlink4"}} if devices > 1 else {}
    return Cluster.of({"device": {"preset": "h100-80gb"}, "node": node | link})


@cache
def prediction(host: HostState | None, **given: Any) -> Prediction:
    plan = Plan(
        MeshShape(intra=4),
        Layout("GGG"),
        schedules.build("1f1b", ranks=1, microbatches=4),
        microbatch=1,
        precision=Precision.preset("bf16"),
        recompute="block",
        host=host,
    )
    use = Use(samples=1, sequence=4096, compute="bfloat16", recompute="block")
    return Prediction(SEVEN.workload, plan, cluster(**given), use)


ON_DEVICE, ON_HOST = HostState("update-on-device"), HostState("update-on-host")


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("host", [ON_DEVICE, ON_HOST], ids=str)
def test_cost_and_saving_are_those_of_two_predictions(host: HostState) -> None:
    own, plain = prediction(host), prediction(None)
    cost = Explanation(own).host
    assert cost is not None
    assert cost.seconds == pytest.approx(own.seconds - plain.seconds)
    assert cost.saved == plain.peak(0).total - own.peak(0).total > 0
    assert cost.resting == own.ranks.of(0).footprint().host
    assert Explanation(plain).host is None


def test_the_link_from_which_it_is_free_is_the_slowest_such_link() -> None:
    own, plain = prediction(ON_DEVICE, bandwidth=1e15), prediction(None)
    cost = Explanation(own).host
    assert cost is not None
    assert cost.rate is not None
    limit = plain.seconds * (1 + NEGLIGIBLE)
    assert own.on(with_host_link(own.given, cost.rate / cost.now)).seconds <= limit
    assert own.on(with_host_link(own.given, 0.98 * cost.rate / cost.now)).seconds > limit


@pytest.mark.wide(0)
@pytest.mark.slow
def test_where_the_memory_of_the_host_is_the_limit_no_link_is_fast_enough() -> None:
    own = prediction(ON_HOST, bandwidth=1e9)
    cost = Explanation(own).host
    assert cost is not None
    assert cost.rate is None
    assert "No link is fast enough" in " ".join(" ".join(describe_explanation(Explanation(own))).split())


@pytest.mark.slow
def test_an_explanation_lists_the_lane_and_the_alternatives() -> None:
    text = " ".join("\n".join(describe_explanation(Explanation(prediction(ON_DEVICE)))).split())
    assert "from host memory optimizer state" in text
    assert "to host memory optimizer state" in text
    assert "host memory off" in text
    assert "host memory update-on-host" in text
    other = " ".join("\n".join(describe_explanation(Explanation(prediction(ON_HOST)))).split())
    assert "in host memory steps on the host" in other
    assert "to host memory gradients of the step" in other


@pytest.mark.slow
def test_shares_of_stages_are_compared_with_one_share_and_not_chosen() -> None:
    plan = replace(
        prediction(None).plan,
        mesh=MeshShape(pipeline=2, intra=2),
        schedule=schedules.build("1f1b", ranks=2, microbatches=4),
        recompute="none",
        host=HostState(activations=(1.0, 0.0)),
    )
    own = Prediction(SEVEN.workload, plan, cluster(), replace(prediction(None).use, recompute="none"))
    assert own.away(0) > own.away(1) == 0
    text = " ".join("\n".join(describe_explanation(Explanation(own))).split())
    assert "activations in host memory 0.5" in text
    assert CHOICES["activations in host memory"].now(plan) == "1, 0"
    assert "100%, 0% of activations of the stages in host memory" in "\n".join(describe_prediction(own))
    auto = from_dict({"parallel": {"auto": True, "host": {"activations": [1.0, 0.0]}}})
    with pytest.raises(ConfigError, match=r"parallel.host.activations of each stage: the planner does not support it"):
        space_of(auto)


def test_it_is_no_choice_on_a_cluster_whose_host_is_not_known() -> None:
    own = prediction(None)
    unknown = own.given.model_copy(update={"node": own.given.node.model_copy(update={"host": None})})
    assert CHOICES["host memory"].applies(own)
    assert not Explanation(own.on(unknown)).alternatives("host memory")
    with pytest.raises(ConfigError, match=r"has no \[node.host\]"):
        _ = prediction(ON_DEVICE).on(unknown).seconds


def test_devices_that_share_a_link_or_the_memory_take_turns() -> None:
    mesh = MeshShape(intra=8)
    alone = cluster(8, bandwidth=1e15).to_host(mesh)["host in"].rate
    assert cluster(8, bandwidth=1e15, uplinks=2).to_host(mesh)["host in"].rate == alone / 4
    assert cluster(8, bandwidth=8e9, reach=1.0).to_host(mesh)["host in"].rate == 1e9
    assert cluster(8, bandwidth=8e9, reach=1.0).to_host(MeshShape(intra=2))["host in"].rate == 4e9


# ---- the planner


SMALL = Transformer.llama(layers=8, hidden=1024, heads=8, ffn=2816, vocabulary=8000)


def search(memory: int, **space: Any) -> PlanSearch:
    found = cluster(2)
    device = found.device.model_copy(update={"memory": memory})
    goal = Goal(global_batch=8, sequence=512)
    given = {"precision": ("bf16",), "recompute": ("block",), "pipeline": (1,), "tensor": (1,), **space}
    return PlanSearch(SMALL.workload, found.model_copy(update={"device": device}), goal, Space(**given), effort=60_000)


@pytest.mark.slow
def test_where_nothing_fits_state_rests_in_host_memory() -> None:
    memory = 900_000_000
    assert not search(memory).run().fitting
    best = Answer.of(search(memory)).best
    assert best.travel.host is not None
    config = from_dict(settings(best) | {"model": {"layers": 8, "hidden": 1024, "heads": 8, "ffn": 2816}})
    assert config.parallel.host is not None
    assert config.parallel.host.value == best.travel.host


def test_where_it_fits_it_rests_on_the_device() -> None:
    best = Answer.of(search(80_000_000_000)).best
    assert best.travel.host is None


def test_a_given_kind_is_kept_and_a_node_with_too_little_memory_is_no_plan() -> None:
    own = search(80_000_000_000, host=ON_HOST)
    assert Answer.of(own).best.travel.host == ON_HOST
    host = own.cluster.host.model_copy(update={"memory": 1_000_000})
    node = own.cluster.node.model_copy(update={"host": host})
    poor = replace(own, cluster=own.cluster.model_copy(update={"node": node}))
    with pytest.raises(ConfigError, match="no plan"):
        Answer.of(poor)


@pytest.mark.slow
def test_on_one_device_what_does_not_fit_goes_to_host_memory_bit_by_bit() -> None:
    """119 million parameters take 238 MB in bf16, and their gradients 477 MB in fp32."""
    found, goal = cluster(1), Goal(global_batch=8, sequence=512, ranks=1)
    space = Space(precision=("bf16",), recompute=("block",), pipeline=(1,), tensor=(1,))
    kinds = []
    for memory in (900_000_000, 650_000_000, 450_000_000):
        device = found.device.model_copy(update={"memory": memory, "context": 0})
        given = found.model_copy(update={"device": device})
        answer = Answer.of(PlanSearch(SMALL.workload, given, goal, space, effort=60_000))
        host = answer.best.travel.host
        assert host is not None
        assert answer.prediction.peak(0).total < memory
        assert min(min(each) for each in answer.prediction.held(0)) >= 0
        kinds.append((host.parameters, host.gradients))
        changes = {each.what: each for each in answer.changes}
        assert changes["half the global batch"].best is not None  # with host memory, as nothing fits without
        slower = changes["the slow link half as fast"]  # of one device, that to host memory
        assert slower.same is not None
        assert slower.same > 1.05 * answer.best.seconds
    assert kinds == [(None, False), ("all", False), ("all", True)]


# ---- frozen parameters


@dataclass(frozen=True)
class WithAdapters:
    """A block of which all but a few matrices are frozen."""

    block: BlockOf

    @property
    def name(self) -> str:
        return self.block.name

    def work(self, use: Use) -> Work:
        work = self.block.work(use)
        trained = work.matrices // 100
        return replace(work, frozen=work.parameters - trained, matrices=trained, linear=())


def with_adapters() -> Workload:
    workload = SMALL.workload
    return replace(workload, blocks=tuple(map(WithAdapters, workload.blocks)), trains_shared=False)


def test_a_frozen_base_rests_in_host_memory_where_it_does_not_fit_otherwise() -> None:
    """On one device, whose layout has nothing to shard."""
    found = cluster(1)
    workload, goal = with_adapters(), Goal(global_batch=8, sequence=512, ranks=1)
    space = Space(precision=("bf16",), recompute=("block",), pipeline=(1,), tensor=(1,))

    def answer(memory: int) -> Answer:
        device = found.device.model_copy(update={"memory": memory})
        return Answer.of(PlanSearch(workload, found.model_copy(update={"device": device}), goal, space, effort=60_000))

    roomy = answer(80_000_000_000)
    assert roomy.best.travel.host is None
    base = 2 * workload.frozen
    tight = answer(base)  # and a part of it stays free
    assert tight.best.travel.host == HostState(parameters="frozen")
    assert tight.prediction.on_host(0) == pytest.approx(base, rel=1e-5)  # and padding
    assert tight.prediction.seconds > roomy.prediction.seconds
    host = next(each for each in tight.alternatives if each.choice == "host memory")
    assert host.other is None or "frozen parameters" in host.other  # no plan without it fits


def test_an_explanation_of_a_frozen_base_says_what_it_costs() -> None:
    given = {"mesh": MeshShape(), "layout": Layout("NNN"), "residency": "action"}
    plan = replace(prediction(None).plan, **given, host=HostState(parameters="frozen"))
    use = Use(samples=1, sequence=512, compute="bfloat16", recompute="block")
    own = Prediction(with_adapters(), plan, cluster(1), use)
    plain = replace(own, plan=replace(plan, host=None))
    text = " ".join("\n".join(describe_explanation(Explanation(own))).split())
    assert "parameters in host memory" in text
    assert own.peak(0).total < plain.peak(0).total
    each = own.ranks.programs.ranks[0].sent["host in"]
    # Each block comes once for a forward and once for a backward of each microbatch, but where a forward ends in it.
    assert 1.5 * own.on_host(0) * plan.schedule.microbatches < each <= 2 * own.on_host(0) * plan.schedule.microbatches
