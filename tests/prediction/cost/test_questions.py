"""Questions that users have asked of a pipeline's memory, answered from numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Cluster, Held, Prediction, Transformer, Use

LLAMA = Transformer.llama(layers=32, hidden=4096, heads=32, ffn=11008, vocabulary=32000)
NODE = Cluster.of({"device": {"preset": "a100-80gb"}, "node": {"devices": 8, "link": {"preset": "nvlink3"}}})
HEAD = 32000 * 4096 + 4096
"""Parameters of the head and of the norm before it."""


def predicted(schedule: str, *, samples: int = 1, chunks: int = 1) -> Prediction:
    """Eight ranks of four layers each."""
    built = schedules.build(schedule, ranks=8, microbatches=16)
    each = (LLAMA.layers // built.stages,) * built.stages
    plan = Plan(
        MeshShape(pipeline=8), Layout("NNN"), built, samples, precision=Precision.preset("bf16"), layers_per_stage=each
    )
    return Prediction(LLAMA.workload, plan, NODE, Use(samples=samples, sequence=2048, loss="fused", chunks=chunks))


def state(held: Held) -> int:
    return held.parameters + held.gradients + held.optimizer


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_the_first_rank_of_a_v_has_the_heads_state_and_no_more(samples: int) -> None:
    """Why does rank 0 use more memory under ZB-V than with one stage a rank? It has the head too: eighteen bytes a
    parameter of state, whatever the microbatch."""
    line, v = (predicted(name, samples=samples).rest(0) for name in ("zb-h1", "zb-v"))
    assert state(v) - state(line) == 18 * HEAD


def test_what_grows_with_the_microbatch_goes_away_with_a_chunked_loss() -> None:
    """The logits and their gradient are of that rank as well. They are in proportion to the microbatch, and a loss in
    eight parts keeps an eighth of them at a time."""
    heads = [predicted("zb-v", samples=samples).ranks.works[-1] for samples in (1, 2, 4)]
    logits = [next(each.nbytes for each in work.saved if each.name == "logits") for work in heads]
    assert [after / before for before, after in pairwise(logits)] == [2.0, 2.0]
    assert logits[0] == 2 * 2048 * 32000
    parts = predicted("zb-v", samples=4, chunks=8).ranks.works[-1]
    assert "logits" not in {each.name for each in parts.saved}
    assert parts.peak * 8 == logits[-1] + 2 * 4 * 2048 * 32000, "the logits and their gradient"
    whole, chunked = (predicted("zb-v", samples=4, chunks=each).peak(0).total for each in (1, 8))
    assert chunked < whole
