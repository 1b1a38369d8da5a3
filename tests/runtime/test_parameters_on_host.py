"""Trained parameters in host memory, beside the optimizer's state: the bits of a run without, and what cannot be.

`test_host_memory.py` has them in each of its tests, beside state alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.base.errors import PlanError
from atoll.plans.host import HostState
from atoll.plans.layouts import EFFECTIVE, Codec, Codecs
from atoll.testing.parity import Case, assert_parity
from atoll.testing.tiny import TinyConfig
from tests.hosts import PIPELINE, assert_same_bits

HERE, THERE = HostState("update-on-device", parameters="all"), HostState("update-on-host", parameters="all")
ODD = TinyConfig(layers=5, odd=True)
LAYOUTS = [layout.name for layout in EFFECTIVE]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_bits_are_the_same(precision: str) -> None:
    """On one rank nothing is gathered but from host memory; NGG and IIG send each other what they have stepped."""
    assert_same_bits(Case(layout="NNN", model=ODD, precision=precision), HERE)
    for layout in ("NGG", "IIG"):
        assert_same_bits(Case(layout=layout, inter=2, intra=2, model=ODD, precision=precision), HERE)


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bits_are_the_same_under_every_layout(layout: str) -> None:
    case = Case(layout=layout, inter=2, intra=2, microbatches=4, model=ODD, precision="bf16")
    assert_same_bits(case, HERE, THERE)
    assert_same_bits(replace(case, schedule="zb-v", inter=1, pipeline=2, microbatches=8), HERE)


@pytest.mark.wide(2)
@pytest.mark.parametrize("residency", ["action", "run", "step"])
@pytest.mark.parametrize("layout", ["NGG", "IIG"])
def test_gathered_parameters_stay(layout: str, residency: str) -> None:
    given = {**PIPELINE, "schedule": "zb-h1", "precision": "bf16", "residency": residency}
    assert_same_bits(Case(layout=layout, model=ODD, **given), HERE)


def test_parameters_go_with_their_state() -> None:
    for given in ({"parameters": "all"}, {"optimizer": "update-on-host", "fraction": 0.5, "parameters": "all"}):
        with pytest.raises(PlanError, match="'all' needs the whole state in host memory"):
            HostState(**given)


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NGG", "IIG", "GGG"])
@pytest.mark.parametrize("host", [HERE, THERE], ids=str)
def test_copies_that_follow_by_a_codec(host: HostState, layout: str) -> None:
    """Those of NGG and IIG; the gathers of GGG are encoded."""
    coded = Codecs(Codec("int8", 8), Codec("int4", 8))
    case = Case(layout=layout, inter=2, intra=2, host=host, model=ODD, codecs=coded)
    assert_parity(case)
    given = {"pipeline": 2, "intra": 1, "schedule": "zb-h1", "microbatches": 8}
    for clip in (0.05, 1e3):  # a step ahead that is made again, or kept
        assert_parity(replace(case, post_validation=True, clip=clip, **given))
