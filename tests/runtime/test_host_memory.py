"""State that rests in host memory: the same result as without, and the bytes that are predicted."""

from __future__ import annotations

import pytest

from atoll.plans.host import HostMemory
from atoll.testing.parity import Case, assert_parity
from atoll.testing.tiny import TinyConfig

ON_DEVICE = HostMemory("update-on-device")


@pytest.mark.parametrize("layout", ["NNN", "IIG", "GGG"])
def test_states_on_the_host_change_no_result(layout: str) -> None:
    assert_parity(Case(layout=layout, inter=1, intra=2, host=ON_DEVICE, model=TinyConfig(layers=5, odd=True)))


MODELS = (TinyConfig(layers=5, odd=True, dropout=0.2), TinyConfig(layers=5, tied=True, vocabulary=17, small=True))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved", "breadth-first"])
def test_under_each_schedule(schedule: str) -> None:
    given = {"pipeline": 2, "intra": 2, "microbatches": 8, "schedule": schedule}
    assert_parity(Case(layout="GGG", host=ON_DEVICE, model=MODELS[0], **given))
    assert_parity(Case(layout="NGG", host=HostMemory("update-on-device", budget=0), model=MODELS[1], **given))


@pytest.mark.parametrize("clip", [0.05, 1e3])
def test_a_post_validated_step(clip: float) -> None:
    given = {"pipeline": 2, "intra": 2, "microbatches": 8, "schedule": "zb-h1", "clip": clip}
    assert_parity(Case(layout="GGG", post_validation=True, host=ON_DEVICE, model=MODELS[0], **given))
    assert_parity(Case(layout="NNG", post_validation=True, host=ON_DEVICE, model=TinyConfig(unused=True), **given))


ON_HOST = HostMemory("update-on-host")


@pytest.mark.parametrize("layout", ["NNN", "IIG", "GGG"])
def test_steps_on_the_host(layout: str) -> None:
    assert_parity(Case(layout=layout, intra=2, host=ON_HOST, model=TinyConfig(layers=5, odd=True)))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved", "breadth-first"])
def test_steps_on_the_host_under_each_schedule(schedule: str) -> None:
    given = {"pipeline": 2, "intra": 2, "microbatches": 8, "schedule": schedule}
    assert_parity(Case(layout="GGG", host=ON_HOST, model=MODELS[0], **given))
    assert_parity(Case(layout="NGG", host=HostMemory("update-on-host", fraction=0.5), model=MODELS[1], **given))


@pytest.mark.parametrize("clip", [0.05, 1e3])
def test_a_post_validated_step_on_the_host(clip: float) -> None:
    given = {"pipeline": 2, "intra": 2, "microbatches": 8, "schedule": "zb-h1", "clip": clip}
    assert_parity(Case(layout="GGG", post_validation=True, host=ON_HOST, model=MODELS[0], **given))
    half = HostMemory("update-on-host", fraction=0.5)
    assert_parity(Case(layout="NNG", post_validation=True, host=half, model=TinyConfig(unused=True), **given))
