"""Islands of different plans: when they arrive, and what they wait for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.base.errors import ConfigError
from atoll.plans import schedules
from atoll.plans.layouts import ITEM_BYTES, Codec, Layout, Precision
from atoll.plans.outer import Apart, Outer
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use
from atoll.prediction.cost.federation import FederatedPrediction, paced
from atoll.prediction.explain.islands import (
    bound_sentences,
    describe_islands,
    describe_outer_alternatives,
    islands_summary,
)

MODEL = Transformer.decoder(layers=6, hidden=256, heads=4, kv_heads=4, ffn=688, vocabulary=2048).workload
HOST = {"memory": 10**11, "bandwidth": 1e11, "rate": 1e10}
OUTER = Outer(16, fragments=2, delay=2, apart=Apart(2))


def island(
    flops: float = 1e12,
    outer: Outer = OUTER,
    *,
    rate: float | None = 1e9,
    mesh: MeshShape | None = None,
    **changes: object,
) -> Prediction:
    own = mesh or MeshShape(intra=2)
    schedule = schedules.build("1f1b", ranks=own.pipeline, microbatches=4)
    plan = Plan(own, Layout("NNG"), schedule, 1, outer=outer, **changes)  # type: ignore[arg-type]
    cluster = Cluster.of({
        "device": {"memory": 10**10, "bandwidth": 1e11, "units": 64, "rates": dict.fromkeys(ITEM_BYTES, flops)},
        "node": {"devices": own.world, "link": {"rate": 1e10}, "host": HOST},
        **({} if rate is None else {"uplink": {"rate": rate, "latency": 1e-2}}),
    })  # fmt: skip
    return Prediction(MODEL, plan, cluster, Use(samples=1, sequence=512, compute=plan.precision.compute))


def both(fast: Prediction, slow: Prediction) -> FederatedPrediction:
    return FederatedPrediction({"fast": fast, "slow": slow})


def test_shares_are_those_of_tokens_and_the_slower_island_bounds() -> None:
    found = both(island(2e12), island(1e12))
    fast, slow = found.rows
    assert fast.share == pytest.approx(0.5, rel=1e-3)
    assert fast.share + slow.share == pytest.approx(1.0)
    assert found.tokens_a_second == pytest.approx(sum(row.tokens / row.interval for row in found.rows))
    assert found.bound == ("slow", False)
    assert slow.waited < 0.01 * slow.interval < fast.waited
    assert fast.interval == pytest.approx(slow.interval, rel=1e-3)
    assert "16 steps of island slow bound" in " ".join(bound_sentences(found))


def test_steps_in_proportion_to_speed_let_islands_arrive_together() -> None:
    pace = island(2e12).played.seconds / island(1e12).played.seconds
    equal, fair = both(island(2e12), island(1e12)), both(island(2e12), island(1e12, paced(OUTER, 16 * pace)))
    assert fair.rows[1].every == int(16 * pace)
    assert fair.tokens_a_second > 1.25 * equal.tokens_a_second
    assert fair.rows[0].share > fair.rows[1].share
    assert fair.rows[0].waited < 0.2 * equal.rows[0].waited


def test_a_slow_uplink_bounds_all_and_is_named() -> None:
    found = both(island(), island(rate=1e6))
    assert found.bound == ("slow", True)
    assert found.rows[1].busy is not None
    assert found.rows[1].busy > found.rows[0].busy  # type: ignore[operator]
    assert "uplink of island slow bounds" in " ".join(bound_sentences(found))
    coded = {each.setting: each for each in found.alternatives()}
    assert coded["codec = int2"].rate > coded["codec = int4"].rate > coded["codec = int8"].rate > coded["as it is"].rate
    assert coded["every = 128"].rate > coded["as it is"].rate
    assert coded["delay = 8"].waited < coded["as it is"].waited
    assert coded["as it is"].rate == pytest.approx(found.tokens_a_second)


def test_an_island_that_comes_after_grace_is_not_counted() -> None:
    apart = Apart(2, grace=0.1)
    found = both(*(island(flops, replace(OUTER, apart=apart)) for flops in (2e12, 1e11)))
    assert found.late == ("slow",)
    text = " ".join(bound_sentences(found))
    assert "Island slow: rounds leave behind" in text
    assert not both(island(), island()).late
    waits_for_both = replace(OUTER, apart=replace(apart, quorum=2))
    assert both(*(island(flops, waits_for_both) for flops in (2e12, 1e11))).late == ()


def test_who_returns_reads_again_what_rounds_set_meanwhile() -> None:
    quick, slow = both(island(), island()).rows[0].returns, both(island(), island(rate=1e6)).rows[0].returns
    assert quick.catches_up
    assert quick.nbytes == slow.nbytes == pytest.approx(8 * MODEL.parameters, rel=1e-3)
    assert quick.seconds is not None
    assert not slow.catches_up
    assert slow.seconds is None
    assert "cannot return" in " ".join(bound_sentences(both(island(), island(rate=1e6))))
    paced_down = FederatedPrediction({"a": island(), "b": island()}, pace=quick.nbytes / 2).rows[0].returns
    assert paced_down.seconds is not None
    assert paced_down.seconds > 2.0


def test_islands_train_one_model_with_the_same_units_and_outer_optimizer() -> None:
    other = replace(OUTER, codec=Codec("int8"))
    with pytest.raises(ConfigError, match=r"'fast' and 'slow' differ in parallel\.outer"):
        both(island(), island(outer=other))
    with pytest.raises(ConfigError, match="differ in the units of the model"):
        both(island(), island(unit=2))
    with pytest.raises(ConfigError, match="differ in the dtype of masters"):
        both(island(), island(precision=Precision.preset("fp64")))
    with pytest.raises(ConfigError, match="plans are of 3 islands, and there are 2"):
        both(*[island(outer=replace(OUTER, apart=Apart(3)))] * 2)
    with pytest.raises(ConfigError, match=r"set parallel\.outer\.every"):
        both(island(), replace(island(), plan=replace(island().plan, outer=None)))
    both(island(), island(mesh=MeshShape(pipeline=2)))  # any mesh


def test_paced_keeps_fragments_apart_and_the_delay_in_proportion() -> None:
    outer = Outer(64, fragments=4, delay=16, apart=Apart(2))
    assert (paced(outer, 32.9).every, paced(outer, 32.9).delay) == (32, 8)
    assert (paced(outer, 1.0).every, paced(outer, 1.0).delay) == (4, 1)
    assert paced(outer, 64) == outer
    assert paced(Outer(8, apart=Apart(2)), 0.3).every == 1
    assert paced(Outer(8, delay=1, apart=Apart(2)), 0.3) == Outer(2, delay=1, apart=Apart(2))


def test_text_and_values_have_every_island() -> None:
    found = both(island(), island(rate=None))
    text = "\n".join([*describe_islands(found), *describe_outer_alternatives(found)])
    assert "an interval of" in text
    assert "2 rounds" in text
    assert "note: island slow: the link between islands is unknown" in text
    assert "unknown" in text
    summary = islands_summary(found, explains=True)
    assert [*summary["islands"]] == ["fast", "slow"]
    assert summary["islands"]["slow"]["busy"] is None
    assert summary["islands"]["fast"]["held"]["total"] == found.rows[0].held.total
    assert summary["alternatives"][0]["setting"] == "as it is"
    assert "alternatives" not in islands_summary(found)
