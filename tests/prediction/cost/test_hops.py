"""Coded hops between stages: bytes as a run counts them, and what they cost and save."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from atoll.plans import schedules
from atoll.plans.layouts import NO_CODECS, Codec, Codecs, Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use
from atoll.prediction.explain.explanation import Explanation
from atoll.prediction.explain.links import link_uses
from atoll.prediction.explain.questions import ask
from atoll.program import Do
from atoll.runtime.engine import Engine
from atoll.runtime.models import Decoder, DecoderConfig, transformer_of
from atoll.testing import run_ranks
from atoll.training.report.timeline import predicted_timeline
from atoll.training.report.traffic import predicted_flows

SIZES = DecoderConfig(vocabulary=64, layers=4, hidden=48, heads=4, kv_heads=4, ffn=48)
SEQUENCE = 32
INT8 = Codecs(hop=Codec("int8"))
MODEL = Transformer.llama(layers=8, hidden=1024, heads=16, ffn=2816, vocabulary=32000)


def small(schedule: str, codecs: Codecs, **options: Any) -> Plan:
    built = schedules.build(schedule, ranks=2, microbatches=4)
    precision = Precision.preset(options.pop("precision", "fp32"))
    return Plan(MeshShape(2, **options), Layout("NNN"), built, 2, precision=precision, codecs=codecs)


def sent(plan: Plan) -> int:
    """Bytes of a step's messages from this rank."""
    with torch.device("meta"):
        model = Decoder(SIZES)
    engine = Engine(model, plan, optimizer=torch.optim.SGD)
    ids = torch.arange(plan.global_batch * SEQUENCE).reshape(-1, SEQUENCE) % SIZES.vocabulary
    batch = {"input_ids": ids, "labels": ids.roll(-1, dims=-1)}
    engine.step(batch)
    before = Counter(engine.transport.sent)
    engine.step(batch)
    found = Counter(engine.transport.sent)["pp"] - before["pp"]
    engine.close()
    return found


@pytest.mark.parametrize(
    "plan",
    [
        small("1f1b", replace(INT8, near=True)),
        small("zb-v", Codecs(hop=Codec("int4"), near=True), precision="bf16"),
        small("interleaved", Codecs(hop=Codec("bf16"), near=True)),
        small("1f1b", Codecs(hop=Codec("fp8"), near=True), tensor=2),
    ],
    ids=lambda plan: f"{plan.schedule.name} {plan.codecs}",
)
def test_a_run_sends_what_is_predicted(plan: Plan) -> None:
    use = Use(samples=2, sequence=SEQUENCE, compute=plan.precision.compute, tensor=plan.mesh.tensor)
    predicted = Prediction(transformer_of(SIZES).workload, plan, None, use)
    wanted = [0.0, 0.0]
    for flow in predicted_flows(predicted):
        if flow.link == "pp":
            wanted[flow.rank] += flow.bytes
    counted = run_ranks(sent, plan.mesh.world, plan)
    assert counted[:: plan.mesh.tensor] == wanted
    plain = predicted_flows(replace(predicted, plan=replace(plan, codecs=NO_CODECS)))
    assert sum(wanted) < sum(flow.bytes for flow in plain if flow.link == "pp")


def cluster(rate: float = 1e9, devices: int = 2) -> Cluster:
    link, network = {"rate": 3e11}, {"rate": rate, "latency": 1e-5}
    return Cluster.of({"device": {"preset": "a100-80gb"}, "node": {"devices": devices, "link": link},
                       "network": network})  # fmt: skip


def predicted(codecs: Codecs = NO_CODECS, schedule: str = "1f1b", on: Cluster | None = None) -> Prediction:
    built = schedules.build(schedule, ranks=4, microbatches=8)
    plan = Plan(MeshShape(4), Layout("NNN"), built, 2, precision=Precision.preset("bf16"), codecs=codecs)
    return Prediction(MODEL.workload, plan, on or cluster(), Use(samples=2, sequence=1024))


CODED = 2 * 1024 * (1024 + 8 * 4)
PLAIN = 2 * 1024 * 1024 * 2


def test_hops_between_nodes_are_coded() -> None:
    """With four ranks on two nodes, rank 1 sends to rank 2 over the network."""
    found = predicted(INT8)
    assert found.durations.coded.nbytes == CODED
    assert [found.durations.coded.sent(rank) for rank in range(4)] == [
        {},
        {(Do.SEND_F, 1): CODED},
        {(Do.SEND_B, 2): CODED},
        {},
    ]
    near = predicted(replace(INT8, near=True))
    assert near.durations.coded.sent(0) == {(Do.SEND_F, 0): CODED}
    alone = predicted(INT8, on=cluster(devices=4))
    assert not any(alone.durations.coded.sent(rank) for rank in range(4))
    assert alone.seconds == predicted(on=cluster(devices=4)).seconds


def test_every_page_knows_them() -> None:
    found = predicted(INT8)
    (use,) = (each for each in link_uses(found, 1) if each.kind == "messages")
    assert use.nbytes == 8 * (CODED + PLAIN)
    assert sum(flow.bytes for flow in predicted_flows(found) if flow.rank == 1) == 8 * (CODED + PLAIN)
    bars = [bar for row in predicted_timeline(found).rows if row.rank == 2 for bar in row.bars]
    assert {bar.bytes for bar in bars if bar.do == "RECV_F"} == {CODED}
    assert {bar.bytes for bar in bars if bar.do == "RECV_B"} == {PLAIN}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved"])
def test_a_slow_link_is_worth_it_and_a_fast_one_is_not(schedule: str) -> None:
    slow, fast = ([predicted(codecs, schedule, cluster(rate)).seconds for codecs in (NO_CODECS, INT8)]
                  for rate in (2e8, 1e12))  # fmt: skip
    assert slow[1] < 0.7 * slow[0]
    assert fast[1] > fast[0]


def test_coding_takes_time_beside_the_blocks_at_the_cut() -> None:
    found, clock = predicted(INT8), predicted().durations.clock
    run = found.ranks.runs[1]
    assert set(found.durations.coded.seconds(1, clock)) == {(Do.F, run.stop - 1), (Do.I, run.stop - 1)}
    (plain, coded) = (each.rates[1].compute for each in (predicted(), found))
    for at, seconds in found.durations.coded.seconds(1, clock).items():
        assert coded[at] == pytest.approx(plain[at] + seconds)
        assert seconds > 0
    for each in found.breakdown:
        assert each.total == pytest.approx(found.seconds)
    # With links that take no time, waits for messages are the coding alone.
    swift = predicted(replace(INT8, near=True), on=cluster(1e30))
    assert all(each.messages > 0 for each in swift.breakdown)


def test_coded_messages_take_memory_until_they_are_decoded() -> None:
    plain, coded = (predicted(codecs) for codecs in (NO_CODECS, INT8))
    more = [coded.peak(rank).total - plain.peak(rank).total for rank in range(4)]
    assert more[0] == more[3] == 0
    assert all(0 <= each <= 8 * CODED for each in more[1:3])
    for rank in range(4):
        assert [*coded.held(rank)][-1].buffers == [*plain.held(rank)][-1].buffers


def test_explain_proposes_a_codec_where_hops_are_slow() -> None:
    slow, fast = (Explanation(predicted(on=cluster(rate))) for rate in (2e8, 1e12))
    (said,) = (each for each in ask(slow, "bottleneck").sentences if "Messages between stages" in each)
    assert "parallel.codecs.hop = " in said
    assert not any("Messages between stages" in each for each in ask(fast, "bottleneck").sentences)
    assert not any(each.choice == "hop codec" for each in slow.better)
    assert not Explanation(predicted(on=cluster(devices=4))).alternatives("hop codec")


def test_slices_have_messages_of_their_own_size() -> None:
    built = schedules.build("1f1b", ranks=4, microbatches=8, slices=2)
    found = replace(predicted(INT8), plan=replace(predicted(INT8).plan, schedule=built, slice_work=1e-3))
    each = [rates.messages[Do.SEND_F, 1] for rates in found.rates[1].of_slices]
    assert each[0] > each[1] > 0
    assert sum(each) == CODED
    held = [*found.held(2)]
    assert min(own.buffers for own in held) >= 0
    assert held[-1].buffers == [*replace(found, plan=replace(found.plan, codecs=NO_CODECS)).held(2)][-1].buffers
