"""Several ranks on one GPU, by way of the host, equal one process: streams, events and frees under real concurrency."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.plans.layouts import Codec, Codecs
from atoll.plans.outer import Outer
from atoll.testing.parity import Case
from atoll.testing.tiny import TinyConfig
from tests.gpu.ranks import assert_equals_one_process, assert_equals_the_cpu, assert_same_bits, run, train_late

EVERYTHING = TinyConfig.everything()
PLAIN = TinyConfig(tied=True, odd=True)
INT8 = Codecs(Codec("int8", 8), Codec("int8", 8))
ROUNDED_AT_RANDOM = Codecs(Codec("int8", 8, "stochastic"), Codec("int8", 8))
OUTER = Outer(2, fragments=2, delay=1)

# Inductor, which compiles the kernels of codecs on a GPU, warns of what this machine could do faster.
compiles = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("layout", ["NNN", "NNG", "NIG", "III", "IIG", "GGG"])
def test_layouts(layout: str, device: str) -> None:
    assert_equals_one_process(Case(layout, inter=2, intra=2, microbatches=8, model=EVERYTHING, device=device))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("layout", ["NNG", "IIG", "GGG"])
def test_layouts_in_a_pipeline(layout: str, schedule: str, device: str) -> None:
    assert_equals_one_process(Case(layout, pipeline=2, intra=2, schedule=schedule, model=EVERYTHING, device=device))


@pytest.mark.parametrize("layout", ["IIG", "GGG"])
def test_gathering_ahead_changes_no_bit(layout: str, device: str) -> None:
    steps = 5 if device == "cuda" else 3
    case = Case(layout, inter=2, intra=2, microbatches=8, model=EVERYTHING, steps=steps, device=device)
    without = run(replace(case, prefetch=0))
    for prefetch in (None, 1 << 30):
        assert_same_bits(without, run(replace(case, prefetch=prefetch)))


@pytest.mark.parametrize("layout", ["NNN", "IIG", "GGG"])
def test_post_validated_steps(layout: str, device: str) -> None:
    case = Case(layout, pipeline=2, intra=2, model=EVERYTHING, steps=5, device=device, schedule="zb-h2")
    assert_same_bits(run(case), run(replace(case, post_validation=True)))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_split_vocabulary(schedule: str, device: str) -> None:
    case = Case("IIG", pipeline=2, intra=2, schedule=schedule, model=EVERYTHING, device=device)
    assert_equals_one_process(replace(case, vocabulary_parallel=True))


# ---- what crosses between groups


@pytest.mark.parametrize("layout", ["NNN", "IIG"])
def test_outer_steps(layout: str, device: str) -> None:
    """Two islands of a rank each: outer gradients travel on a lane of their own, over several steps."""
    assert_equals_the_cpu(Case(layout, inter=2, microbatches=4, model=PLAIN, steps=5, outer=OUTER, device=device))


@compiles
@pytest.mark.parametrize("layout", ["IIG", "GGG"])
def test_a_codec(layout: str, device: str) -> None:
    assert_equals_the_cpu(Case(layout, inter=2, microbatches=4, model=PLAIN, codecs=INT8, device=device))


@compiles
@pytest.mark.parametrize("clip", [None, 0.05])
def test_post_validated_steps_with_a_codec(clip: float | None, device: str) -> None:
    """Ahead of the verdict a copy of the masters is encoded, and where the step was wrong (`clip`) it is taken back."""
    case = Case("NNG", pipeline=2, inter=2, model=PLAIN, steps=5, schedule="zb-h2", clip=clip, device=device)
    case = replace(case, codecs=ROUNDED_AT_RANDOM)
    assert_same_bits(run(case), run(replace(case, post_validation=True)))


# ---- late streams


LATE = {
    "GGG": Case("GGG", inter=2, intra=2, microbatches=8, model=EVERYTHING, steps=4),
    "IIG": Case("IIG", inter=2, intra=2, microbatches=8, model=EVERYTHING, steps=4),
    "post-validated": Case(
        "IIG", pipeline=2, intra=2, schedule="zb-h2", model=EVERYTHING, steps=4, post_validation=True
    ),
    "post-validated with a codec": Case(
        "NNG",
        pipeline=2,
        inter=2,
        schedule="zb-h2",
        model=PLAIN,
        codecs=ROUNDED_AT_RANDOM,
        steps=4,
        post_validation=True,
    ),
    "outer steps": Case("IIG", inter=2, microbatches=4, model=PLAIN, steps=5, outer=OUTER),
    "Muon": Case("IIG", intra=2, microbatches=4, model=TinyConfig(layers=5, odd=True), optimizer="Muon", steps=4),
}


@compiles
@pytest.mark.parametrize("late", ["lanes", "computation"])
@pytest.mark.parametrize("name", LATE)
def test_late_streams_change_no_bit(name: str, late: str, device: str) -> None:
    """[Note: streams and memory] in runtime/lanes.py: without its rules the allocator gives a block to one stream that
    another still uses. Repeated steps reuse all blocks."""
    case = replace(LATE[name], device=device)
    assert_same_bits(run(case), run(case, train_late, late))
