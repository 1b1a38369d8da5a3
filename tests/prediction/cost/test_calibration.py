"""Constants that are fitted to steps: of a known truth they are found, and they never leave their limits."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from atoll.base.errors import ConfigError
from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Cluster, Efficiency, Prediction, Transformer, Use
from atoll.prediction.cost.calibration import LIMITS, Step, calibrate, changed, constant_of

pytest.importorskip("scipy")

BEGIN = Cluster.of(
    {
        "device": {"preset": "a100-80gb", "efficiency": Efficiency().model_dump()},
        "node": {"devices": 8, "cards": 8, "link": {"preset": "nvlink3", "reach": 0.8}},
        "network": {"preset": "infiniband-hdr", "reach": 0.8},
    }
)

TRUTH = {
    "device.efficiency.products": 0.66,
    "device.efficiency.memory": 0.55,
    "device.efficiency.attention": 0.36,
    "node.link.reach": 0.6,
}


def prediction(
    hidden: int, *, pipeline: int = 1, intra: int = 1, samples: int = 1, sequence: int = 2048, on: Cluster = BEGIN
) -> Prediction:
    model = Transformer.llama(layers=4, hidden=hidden, heads=hidden // 128, ffn=3 * hidden, vocabulary=32000)
    schedule = schedules.build("1f1b", ranks=pipeline, microbatches=4)
    layout = Layout("GGG" if intra > 1 else "NNN")
    mesh = MeshShape(pipeline=pipeline, intra=intra)
    plan = Plan(mesh, layout, schedule, samples, precision=Precision.preset("bf16"))
    return Prediction(model.workload, plan, on, Use(samples=samples, sequence=sequence, compute="bfloat16"))


def predictions(on: Cluster = BEGIN) -> list[Prediction]:
    """Twelve plans that differ in what they depend on."""
    return [
        prediction(hidden, pipeline=pipeline, intra=intra, sequence=sequence, on=on)
        for hidden in (1024, 4096)
        for pipeline, intra in ((1, 1), (2, 1), (1, 8))
        for sequence in (512, 16384)
    ]


def measured(truth: dict[str, float]) -> list[Step]:
    """What the plans take on a cluster with other constants than they begin with."""
    real = changed(BEGIN, truth)
    return [Step(((1.0, each),), each.on(real).seconds, name=str(number)) for number, each in enumerate(predictions())]


@pytest.mark.slow
def test_a_known_truth_is_found() -> None:
    steps = measured(TRUTH)
    before = [abs(step.predicted / step.seconds - 1.0) for step in steps]
    assert min(before) > 0.1
    fitted = calibrate(steps, tuple(TRUTH))
    assert fitted.error < 0.01
    assert fitted.error <= fitted.spread < 0.03
    for name, value in TRUTH.items():
        assert fitted.constants[name] == pytest.approx(value, rel=0.06), name
        assert fitted.before[name] == constant_of(BEGIN, name)
        assert constant_of(fitted.cluster, name) == fitted.constants[name]


@pytest.mark.slow
def test_predictions_come_true_though_more_constants_are_free_than_are_known() -> None:
    fitted = calibrate(measured(TRUTH))
    assert fitted.error < 0.02
    unseen = prediction(2048, pipeline=2, intra=2, sequence=4096)
    real = unseen.on(changed(BEGIN, TRUTH)).seconds
    assert unseen.on(fitted.cluster).seconds == pytest.approx(real, rel=0.04)


@pytest.mark.wide(1)
@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_constants_stay_within_their_limits_whatever_was_measured(factor: float) -> None:
    steps = [replace(step, seconds=step.seconds * factor) for step in measured({})[:3]]
    fitted = calibrate(steps)
    for name, value in fitted.constants.items():
        low, high, _ = LIMITS[name]
        assert low <= value <= high, name
    assert fitted.error > 0.5


def test_constants_that_no_step_depends_on_stay_as_they_are() -> None:
    alone = prediction(1024)
    fitted = calibrate([Step(((1.0, alone),), 2.0 * alone.seconds)])
    assert not [name for name in fitted.constants if name.startswith(("node.", "network."))]
    assert "device.efficiency.products" in fitted.constants
    assert fitted.cluster.node == BEGIN.node
    assert fitted.cluster.network == BEGIN.network


def test_of_one_step_the_spread_is_that_of_the_constants_before() -> None:
    alone = prediction(1024)
    fitted = calibrate([Step(((1.0, alone),), 2.0 * alone.seconds)])
    assert fitted.error < 0.1
    assert fitted.spread == pytest.approx(0.5)


@pytest.mark.slow
def test_steps_of_one_group_are_left_out_together() -> None:
    """Two systems, one of which takes twice as long as the other: neither says what the other's steps take."""
    known = measured({})[::4]
    steps = [replace(step, group="one") for step in known]
    steps += [replace(step, group="other", seconds=2.0 * step.seconds) for step in known]
    fitted = calibrate(steps, ("device.efficiency.products", "device.efficiency.memory"))
    assert set(fitted.left_out) == {"one", "other"}
    assert fitted.spread == pytest.approx(sum(fitted.left_out.values()) / 2)
    assert fitted.left_out["one"] > 0.5, "predicted with the constants of steps that take twice as long"
    assert fitted.spread > fitted.error


def test_a_link_without_latency_and_an_optimizer_without_time_do_not_disturb() -> None:
    free = {"device": {"preset": "a100-80gb", "efficiency": {"update": 0.0}}, "node": {"devices": 2}}
    free["node"] |= {"link": {"rate": 1e11}}
    step = prediction(1024, intra=2, on=Cluster.of(free))
    fitted = calibrate([Step(((1.0, step),), 1.5 * step.seconds)], ["device.efficiency.products"])
    assert set(fitted.constants) == {"device.efficiency.products"}
    assert fitted.cluster.device.efficiency.update == 0.0


@pytest.mark.parametrize(
    ("count", "constants", "words"), [(0, (), "constants to no steps"), (1, ("speed",), "cannot fit speed; known")]
)
def test_what_cannot_be_fitted(count: int, constants: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        calibrate(measured({})[:count], constants)


def test_a_cluster_that_is_written_is_read_back() -> None:
    for each in (BEGIN, changed(BEGIN, TRUTH)):
        assert Cluster.of(tomllib.loads(each.dump())) == each


def test_no_constant_is_fitted_above_what_a_device_or_a_link_can_do() -> None:
    """Shares of a rate end at it: measurements that are faster are those of another device."""
    shares = (
        "device.efficiency.products",
        "device.efficiency.attention",
        "device.efficiency.memory",
        "node.link.reach",
    )
    assert [LIMITS[key].high for key in shares] == [1.0] * 4
    assert all(0 < limits.low < limits.high for limits in LIMITS.values())
