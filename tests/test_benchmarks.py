"""What the benchmarks compute without measuring: bounds, rows, tables, verdicts."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from atoll.plans.layouts import Layout
from atoll.plans.schedules import PipelineLink
from atoll.runtime.transport.shared_memory import SharedMemory, mapped
from atoll.testing import RankPool, run_ranks
from benchmarks import claims
from benchmarks.experts import bench as experts
from benchmarks.experts.work import Mixture
from benchmarks.islands import front, pages, search
from benchmarks.islands.allocations import Allocations, library, shared_bytes
from benchmarks.islands.bounds import formula
from benchmarks.islands.cases import Course
from benchmarks.islands.contenders import Atoll, Ddp, DeepSpeed, Fsdp2, has_deepspeed, read_setting, setting_json
from benchmarks.islands.judging import judged
from benchmarks.islands.race import Field, Row, Seen
from benchmarks.islands.ranks import Rank, Ranks, Where
from benchmarks.islands.scatter import PLOT, TOP, _Scale, scatter
from benchmarks.islands.work import Chain, Text, Work
from benchmarks.islands.work import Sleeping as Device
from benchmarks.low_rank import bench as low_rank
from benchmarks.matrix import bench as matrix
from benchmarks.matrix import cases
from benchmarks.mixtures import bench as mixtures
from benchmarks.outer import bench as outer
from benchmarks.planner import bench as planner
from benchmarks.quality import bench as quality
from benchmarks.sequence import bench as sequence
from benchmarks.sequence import race as sequence_race
from benchmarks.sequence.contenders import Alone, Ring
from benchmarks.sequence.contenders import Atoll as Dividing
from benchmarks.sharded_pipeline import bench as sharded_pipeline
from benchmarks.sharded_pipeline import race as ranks_of_the_race
from benchmarks.sharded_pipeline.settings import MICROBATCHES, Ours, Setting, Theirs, seeds
from benchmarks.sharded_pipeline.work import DATA, PIPELINE
from benchmarks.sharded_pipeline.work import Work as Sleeping
from benchmarks.slow_hop import bench as slow_hop
from benchmarks.stream import bench as stream
from benchmarks.unequal import bench as unequal
from benchmarks.uneven import bench as uneven
from benchmarks.vocabulary import bench as vocabulary
from benchmarks.who_gets_it_right import bench, contenders, verdict
from benchmarks.who_gets_it_right.sequences import ROWS
from benchmarks.who_gets_it_right.work import Work as Trained

WORK = Chain()


def test_what_a_contender_keeps_is_counted_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a node of the graph saves its own output, which must not hold the node and so the model."""
    work = Text(samples=1, layers=2, hidden=32, heads=2, ffn=64, vocabulary=128, tokens=16)
    built = []

    def build(own: Text) -> nn.Module:
        model = make(own)
        built.append(weakref.ref(next(model.parameters())))
        return model

    make = Text.build
    monkeypatch.setattr(Text, "build", build)
    assert work.kept_bytes(1) > 16 * 128 * 4, "the logits alone"
    gc.collect()
    assert [weight() for weight in built] == [None]


def raced(name: str, seconds: float, megabytes: float, *, is_ours: bool) -> dict[str, Any]:
    return {"name": name, "median_seconds": seconds, "peak_bytes": megabytes * 1e6, "is_ours": is_ours}


@pytest.mark.parametrize(
    "work", [Chain(count=2), Text(samples=1, layers=1, tokens=8), experts.CASE.small, Device(samples=2, count=2)]
)
def test_a_step_is_the_same_in_any_number_of_microbatches(work: Work) -> None:
    model, batch = work.model(), work.batch(0, 1)
    pieces = work.pieces(batch, work.samples)
    assert [len(piece["labels"]) for piece in pieces] == [1] * work.samples
    whole, parts = work.loss(model, batch), [work.loss(model, piece) for piece in pieces]
    assert float(whole.detach()) == pytest.approx(sum(float(part.detach()) for part in parts) / len(parts), rel=1e-4)


def test_the_sizes_of_the_works() -> None:
    assert WORK.parameters == pytest.approx(9.46e6, rel=1e-3)
    assert Text().parameters == pytest.approx(1e8, rel=0.01)
    device = Device()
    # 6.74 GB between two nodes at 100 Gb/s take 0.539 s beside 1.06 s of compute for a sample.
    seconds = 4 * device.parameters / 2 * 8 / device.rate(100)
    assert seconds / device.seconds == pytest.approx(0.539 / 1.06, rel=1e-2)
    kept = device.kept_bytes(1) / device.samples
    assert kept == pytest.approx(device.kept * 4 * device.parameters, rel=0.02)


def test_ggg_crosses_three_times_a_microbatch() -> None:
    found = formula(Layout("GGG"), parameters=WORK.parameters, inter=2, intra=2, microbatches=8)
    # Two gathers and a reduction a microbatch, each a quarter of the parameters a rank.
    assert found.inter_bytes == 3 * 8 * 4 * WORK.parameters / 4


def test_the_front_and_what_is_near_it() -> None:
    rows = [
        raced("slow and small", 4.0, 50, is_ours=True),
        raced("dominated", 4.1, 60, is_ours=True),
        raced("far behind", 9.0, 60, is_ours=True),
        raced("fast and large", 1.0, 100, is_ours=True),
    ]
    assert [row["name"] for row in front.front(rows)] == ["slow and small", "fast and large"]
    near = {row["name"] for row in front.near_front(rows, slack=1.1)}
    assert near == {"slow and small", "dominated", "fast and large"}


def test_a_race_is_decided_at_every_budget_of_a_peer() -> None:
    rows = [
        raced("ours, small", 3.0, 50, is_ours=True),
        raced("ours, large", 1.0, 100, is_ours=True),
        raced("peer, tiny", 9.0, 40, is_ours=False),
        raced("peer, middle", 4.0, 70, is_ours=False),
        raced("peer, no better", 4.0, 80, is_ours=False),
        raced("peer, large", 2.0, 99, is_ours=False),
    ]
    found = [(each.budget / 1e6, each.peer["name"], each.ratio) for each in front.verdicts(rows)]
    # 100 MB fit a budget of 99: peaks of one setting differ by as much.
    assert found == [(40, "peer, tiny", None), (70, "peer, middle", 4 / 3), (99, "peer, large", 2.0)]
    best = front.best_against_best(rows).to_json()
    assert (best["ours"], best["peer"], best["ratio"]) == ("ours, large", "peer, large", 2.0)


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(("inter", "intra"), [(2, 2), (1, 4)])
def test_the_settings_that_are_searched(inter: int, intra: int) -> None:
    space = search.settings(WORK, inter=inter, intra=intra)
    names = [setting.name for setting in space]
    assert len(set(names)) == len(names), "a name says everything in which settings differ"
    assert all(read_setting(setting_json(setting)) == setting for setting in space)
    starts = search.starts(space)
    families = {Atoll, Fsdp2, Ddp} | ({DeepSpeed} if has_deepspeed() else set())
    assert {type(setting) for setting in starts} == families
    reached, waiting = set(starts), list(starts)
    while waiting:
        new = set(search.neighbours(waiting.pop(), space)) - reached
        reached |= new
        waiting += new
    assert reached == set(space), "every setting can be reached by changing one choice at a time"


def test_slow_settings_are_not_gone_on_from() -> None:
    rows = [Row(Atoll("GGG"), seconds=[1.0]), Row(Atoll("GGG", 8), seconds=[4.1]), Row(Fsdp2(), seconds=[4.1])]
    assert [search.is_slow(row, rows) for row in rows] == [False, True, False]


def test_rows_are_read_back() -> None:
    row = Row(
        Atoll("IGG", 2, prefetch=0), seconds=[1.5], cpu_seconds=[2.0], losses=[0.5], peak_bytes=100, rest_bytes=60
    )
    assert Row.from_json(row.to_json()).to_json() == row.to_json()


def test_the_page_of_a_race() -> None:
    ours, theirs = Row(Atoll("GGG")), Row(Fsdp2(prefetch=2))
    for found, seconds, peak in ((ours, 1.0, 90), (theirs, 2.0, 95)):
        found.add([Seen(0.0, seconds, 0.5, (3.0,), 10, 20)], islands=1)
        found.peak_bytes = found.rest_bytes = peak * 1_000_000
    rows = [each.to_json() for each in (ours, theirs)]
    race = {"compute": {"one_rank": 0.5, "all_ranks": 0.6}, "visited": rows, "rows": rows}
    assert judged(race)["best_against_best"]["ratio"] == 2.0
    assert judged(race)["like_for_like"] == {"gathered twice, reduced once, over all ranks": 2.0}
    result = {"work": WORK.to_json(), "races": {"400 Mbit/s each way": race}}
    told = pages.Page(title="A race", words="Emulated.", command="make it")
    page = pages.report(told, result)
    assert "`Atoll GGG x1` is **2.00 times as fast** as `FSDP2 x1, prefetch 2`" in page
    assert "| 95.0 | FSDP2 x1, prefetch 2 | Atoll GGG x1 | 2.00 |" in page
    (name, picture), *_ = pages.pictures(told, result).items()
    assert f"(results/{name})" in page
    ElementTree.fromstring(picture)


def test_a_mixture_is_wrapped_in_the_order_in_which_forwards_end() -> None:
    work = replace(experts.CASE.small, layers=1)
    model = work.model()
    names = {module: name for name, module in model.named_modules()}
    wrapped = ["embed", "layers.0.feed_forward.experts", "layers.0", "head"]
    assert [names[module] for module in work.wraps(model)] == wrapped
    sizes = experts.CASE.work
    assert isinstance(sizes, Mixture)
    assert sizes.parameters == pytest.approx(1.175e8, rel=1e-3)
    assert sizes.samples * sizes.tokens < sizes.threshold / 10


@pytest.mark.parametrize("course", experts.CASE.courses.values(), ids=list(experts.CASE.courses))
def test_the_settings_of_experts(course: Course) -> None:
    found = experts.settings(course)
    assert len({setting.name for setting in found}) == len(found) <= 50
    assert [read_setting(setting_json(setting)) for setting in found] == found
    ours = [setting for setting in found if isinstance(setting, Atoll)]
    gathered = [replace(setting, expert=1) for setting in ours if setting.expert > 1 and not setting.experts]
    assert sum(setting in ours for setting in gathered) > 0.8 * len(gathered), "gathering is measured beside"


def test_the_page_of_experts() -> None:
    settings = [Atoll("GGG", expert=4), Atoll("GGG"), Fsdp2(prefetch=2), Ddp()]
    rows = []
    for setting, seconds, peak in zip(settings, (1.0, 1.5, 3.0, 0.5), (80, 100, 90, 400), strict=True):
        row = Row(setting, peak_bytes=peak * 1_000_000, rest_bytes=1)
        row.add([Seen(0.0, seconds, 0.5, (3.0,), 10, 20)], islands=1)
        rows.append(row.to_json())
    race = {"compute": {"one_rank": 0.5, "all_ranks": 0.6}, "visited": rows, "rows": rows}
    result = {"work": experts.CASE.work.to_json(), "races": {"one machine": race}}
    page = experts.report(result)
    assert "| Atoll GGG x1, expert 4 | 1.000 | 1.500 | 1.50 | 0.80 |" in page
    assert "| 90.0 | FSDP2 x1, prefetch 2 | Atoll GGG x1, expert 4 | 3.00 |" in page
    assert "below 9216 it sends less" in page
    told = claims.experts(result)
    assert "Atoll GGG x1, expert 4 1.00 s (80 MB): **3.00 times as fast**" in told["beside"]
    assert told["exchanged"].startswith("one machine: 1.50 times as fast in 0.80 of the peak memory")


@pytest.mark.wide(0)
def test_exchanging_and_gathering_experts_trains_alike() -> None:
    """Ranks that differ in a loss raise."""
    shard = {"microbatches": 2, "apart": True, "scatter": "direct"}
    settings = [
        Atoll("GGG", 2),
        Atoll("IGG", 2, expert=2, experts="NNG", recompute=True),
        Fsdp2(**shard),
        Fsdp2(**shard, groups=True, after="keep", recompute=True),
    ]
    with Ranks(Where(2, 2), experts.CASE.small) as ranks:
        field = Field(ranks, None)
        for setting in settings:
            field.open(setting)
            for _ in range(2):
                field.step(Row(setting))
            field.close(setting)


def test_allocations_are_unknown_where_nothing_counts_them() -> None:
    allocations = Allocations()
    allocations.forget()
    assert (allocations.out(), allocations.most()) == (None, None)


@pytest.mark.slow
def test_a_split_vocabulary_is_measured() -> None:
    result = vocabulary.run(argparse.Namespace(quick=True))
    assert [row["name"] for row in result["rows"]] == ["layers even", "layers by cost", "vocabulary split"]
    assert "| 1f1b | vocabulary split |" in vocabulary.report(result)


def test_a_step_lasts_from_the_last_start_to_the_last_end() -> None:
    found = Row(Atoll("NNN"))
    found.add([Seen(1.0, 2.0, 0.5, (3.0,), 10, 20), Seen(1.5, 2.5, 0.5, (3.0,), 30, 40)], islands=2)
    assert (found.seconds, found.cpu_seconds, found.inter_bytes, found.intra_bytes) == ([1.0], [1.0], 20, 30)


def test_contenders_that_train_otherwise_are_an_error() -> None:
    field = Field(Ranks(Where(1, 2), WORK), None)
    field._steps.update({"Atoll NNN x1": 0, "DDP x1, buckets of 25 MB": 0})
    field._check(Atoll("NNN"), [2.0, 1.0])
    field._check(Ddp(), [2.0001])
    with pytest.raises(RuntimeError, match="DDP x1, buckets of 25 MB and Atoll NNN x1 do not train alike: step 2"):
        field._check(Ddp(), [1.1])


@pytest.mark.slow
def test_counted_allocations_are_those_of_all_threads() -> None:
    program = """
import threading
from benchmarks.islands.allocations import Allocations, library, shared_bytes
from benchmarks.islands.contenders import has_deepspeed
import torch
allocations = Allocations()
before = allocations.out()
allocations.forget()
kept = [torch.empty(1_000_000)]
threading.Thread(target=lambda: kept.append(torch.empty(2_000_000))).start()
while len(kept) < 2: pass
del kept[0]
print(round((allocations.out() - before) / 1e6), round((allocations.most() - before) / 1e6))
"""
    with library() as preload:
        if preload is None:
            pytest.skip("no C compiler")
        environment = os.environ | {"LD_PRELOAD": str(preload), "PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
        )
    assert done.stdout.split() == ["8", "12"], done.stderr


def test_shared_bytes_are_those_of_the_files_that_are_mapped() -> None:
    """Each file once, however often it is mapped; none of anybody else's."""
    before = shared_bytes()
    memory, other = SharedMemory(), SharedMemory()
    parts = [memory.allocate(numel, torch.float32) for numel in (20_000, 10_000)]
    seen = mapped(os.getpid(), memory.descriptor, memory.nbytes)
    memory.close()
    assert shared_bytes() - before == memory.nbytes
    assert other.nbytes == 0
    del parts, seen
    gc.collect()
    assert shared_bytes() == before


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("layouts", [("IIG",), ("NNG", "GGG")], ids=" ".join)
def test_ranks_hold_what_is_predicted(layouts: tuple[str, ...]) -> None:
    """Peak and rest of real runs, by the allocator, against footprint and working memory.

    Where a core is short, a rank waits for its readers with one more buffer of a block's size.
    """
    work = Chain(count=4)
    buffer = 4 * work.parameters // work.count
    with library() as preload:
        if preload is None:
            pytest.skip("no C compiler")
        with Ranks(Where(2, 2), work, preload=preload) as ranks:
            field = Field(ranks, None)
            for layout in layouts:
                found = Row(Atoll(layout, 8))
                field.open(found.setting)
                field.step(found)
                field.close(found.setting)
                assert found.peak_bytes is not None
                assert found.rest_bytes is not None
                said = found.predicted_peak_bytes
                assert 0.94 * said < found.peak_bytes < 1.06 * said + buffer, (layout, found.peak_bytes, said)
                assert found.rest_bytes == pytest.approx(found.predicted_rest_bytes, rel=0.03), layout


def test_every_schedule_of_torch_is_judged() -> None:
    with pytest.raises(ValueError, match="Unknown schedule name") as raised:
        get_schedule_class("none")
    known = set(re.findall(r"'(\w+)'", str(raised.value).split("options are")[1]))
    assert set(contenders.ATOLL) == known - {"PipelineScheduleSingle", "PipelineScheduleMulti"} | {contenders.ALONE}


def test_a_verdict_is_that_of_the_worst_rank() -> None:
    good, bad = verdict.Seen(0.0, 0.0, 0.0, moved=True), verdict.Seen(0.5, 0.5, 0.9, moved=True)
    gone, later = verdict.Seen(1.0, 1.0, 1.0, moved=False), verdict.Seen(0.0, 0.5, 0.0, moved=True)
    assert verdict.weigh([{"a": good}, {"b": good}], 1e-10).verdict == "right"
    assert verdict.weigh([{"a": good}, {"a": later}], 1e-10).verdict == "wrong"
    found = verdict.weigh([{"a": good, "b": good, "c": gone}, {"a": bad, "b": good, "c": gone}], 1e-10)
    assert (found.verdict, found.parameters, found.missing, found.wrong, found.off) == ("wrong", 3, 1, 1, 0.9)


def test_the_table_of_verdicts() -> None:
    row = {"missing": 0, "wrong": 0, "off": 0.0}
    rows = [
        {**row, "schedule": "1F1B", "system": "a", "verdict": "right"},
        {**row, "schedule": "1F1B", "system": "b", "verdict": "wrong", "missing": 2, "wrong": 3, "off": 0.875},
        {**row, "schedule": "ZB", "system": "b", "verdict": "refused"},
    ]
    assert bench._table(rows, down="schedule", across="system").splitlines() == [
        "| schedule | a | b |",
        "|---|---|---|",
        "| 1F1B | right | **wrong**: 2 missing, 3 off by up to 88% |",
        "| ZB |  | **refused** |",
    ]


@pytest.mark.slow
def test_systems_are_compared_with_one_process() -> None:
    work = Trained(layers=2, microbatches=4)
    with RankPool() as pool:
        for system in ("torch by hand", "torch FSDP2, kept", "atoll GGG"):
            found = verdict.judge(pool, work, system=system, row="InterleavedZeroBubble")
            assert found["verdict"] == "right", found
            assert found["parameters"] == 16


@pytest.mark.slow
def test_rings_without_masks_are_right_for_causal_rows_alone() -> None:
    pytest.importorskip("transformers")
    with RankPool() as pool:
        for name, (kind, documents) in ROWS.items():
            work = Trained(pipeline=1, intra=1, divided=2, sequence=16, dtype="float32", documents=documents)
            work = replace(work, model_kind=kind, microbatches=2)
            systems = ("ring by hand", "atoll GGG")
            found = [verdict.judge(pool, work, system=system, row=contenders.ALONE) for system in systems]
            assert found[0]["verdict"] == ("right" if name == "causal" else "wrong"), found
            assert found[1]["verdict"] == "right", found


def worst_gradients(work: sequence.Rows) -> list[float]:
    rank = Rank(dist.get_rank(), 2, 1, 2, work)
    wanted = sequence_race.gradients(rank, Alone(1))
    ways = (Dividing(), Dividing("direct"), Ring("allgather"), Ring("alltoall"))
    return [sequence_race.difference(rank, way, wanted) for way in ways]


@pytest.mark.slow
def test_rows_that_ranks_divide_have_the_gradients_of_one_process() -> None:
    for found in run_ranks(worst_gradients, 2, replace(sequence.SMALL, tokens=64)):
        assert max(found) < 1e-5


def test_atoll_is_beside_each_peer_of_as_many_ranks() -> None:
    def row(ranks: int, name: str, *seconds: float) -> dict[str, Any]:
        return {
            "ranks": ranks,
            "name": name,
            "is_ours": name[0] == "A",
            "seconds": seconds,
            "median_seconds": seconds[1],
        }

    rows = [row(1, "one", 1, 1, 1), row(2, "A", 1, 2, 4), row(2, "A2", 1, 3, 4), row(2, "ring", 2, 2, 2)]
    (pair,) = sequence.pairs(rows)
    assert [each["name"] for each in pair] == ["A", "ring"]
    assert sequence.times_as_fast(*pair) == 1


@pytest.mark.wide(0)
@pytest.mark.slow
@pytest.mark.skipif(not has_deepspeed(), reason="DeepSpeed is not installed")
def test_deepspeed_refuses_zero_2_in_a_pipeline() -> None:
    with RankPool() as pool:
        found = verdict.judge(pool, Trained(layers=2, intra=1, dtype="float32"), system="deepspeed 2", row="1F1B")
    assert (found["verdict"], found["words"]) == (
        "refused",
        "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
    )


def test_the_rate_of_a_link_is_a_share_of_the_compute() -> None:
    """Four ranks of an island gather twice and reduce once; of each the other island has a half."""
    work = Sleeping()
    layers = 4 * work.layers_a_rank * work.layer_bytes
    assert work.bytes_a_microbatch == 3 * layers / 2
    assert work.rate(0.5) * 0.5 * work.compute_seconds == pytest.approx(8 * 16 * work.bytes_a_microbatch)
    assert work.kept_bytes == work.layer_bytes
    assert len(work.share(0, 1)["labels"]) == 32


def test_a_step_computes_as_long_in_any_number_of_microbatches() -> None:
    work = Sleeping()
    spent = {3 * m * work.layers_a_rank * work.layer_seconds(m) for m in MICROBATCHES}
    assert all(seconds == pytest.approx(work.compute_seconds) for seconds in spent)


def test_the_search_walks_by_one_choice_at_a_time() -> None:
    start = seeds()
    names = [setting.name for setting in start]
    assert len(set(names)) == len(names)
    for setting in start:
        around = list(setting.neighbours())
        assert setting.name not in {each.name for each in around}
        assert all(each.unit * each.stages_a_rank <= 4 for each in around)
    one = Ours(schedule="1f1b", residency="step", reduction="step")
    assert {each.name for each in one.neighbours()} == {
        "atoll 1f1b, GGG, step/step, m 8",
        "atoll 1f1b, GGG, step/step, m 32",
        "atoll 1f1b, GGG, step/step, m 16, posted",
        "atoll 1f1b, GGG, step/step, m 16, unit 2",
        "atoll 1f1b, GGG, unit/step, m 16",
        "atoll 1f1b, GGG, step/microbatch, m 16",
        "atoll 1f1b, NGG, step, m 16",
    }


def test_torch_has_every_schedule_of_the_race() -> None:
    for setting in seeds():
        if isinstance(setting, Theirs):
            assert get_schedule_class(setting.schedule).__name__ == f"Schedule{setting.schedule}"


@pytest.mark.wide(0)
@pytest.mark.slow
def test_both_sides_of_the_race_compute_what_one_process_does() -> None:
    """torch with a reduce-scatter of its own, which gives what gloo's does; ours with a step validated afterwards."""
    wrong = Theirs(schedule="ZBVZeroBubble", is_kept=False, microbatches=8)
    right: tuple[Setting, ...] = (
        Theirs(schedule="1F1B", microbatches=8),
        Theirs(schedule="1F1B", microbatches=8, is_direct=False),
        Ours(schedule="zb-v", layout="NNG", microbatches=8, posts=True),
    )
    with Ranks(Where(DATA, 1, None, PIPELINE), Sleeping(seconds=1e-3)) as ranks:
        ranks.ask(ranks_of_the_race.prepare)
        for setting in right:
            assert max(ranks.ask(ranks_of_the_race.build, setting)) < 1e-10
            assert all(len(seen.ends) == 2 for seen in ranks.ask(ranks_of_the_race.steps, setting, 1, 2))
        assert max(ranks.ask(ranks_of_the_race.build, wrong)) > 0.1


def test_the_page_of_the_sharded_pipeline() -> None:
    def raced(name: str, seconds: float, megabytes: float, **more: Any) -> dict[str, Any]:
        found = {"name": name, "median_seconds": seconds, "peak_bytes": 1e6 * megabytes}
        found |= {"inter_bytes": 4e6, "seconds": [seconds]}
        ours = {"is_ours": name.startswith("atoll"), "gradient_difference": 0.0, "is_right": True, "is_raced": True}
        return {**found, **ours, **more}

    theirs, ours = (setting.name for setting in sharded_pipeline.LIKE)
    rows = [
        raced(theirs, 2.0, 6.0),
        raced(ours, 1.6, 6.0, predicted_seconds=1.64, predicted_bytes=3.9e6),
        raced("atoll small", 1.9, 5.0),
        raced("torch wrong", 1.0, 4.0, is_right=False, is_raced=False, gradient_difference=0.9),
    ]
    found = {"share": 2.0, "bits_a_second": 1e8, "rows": rows, **sharded_pipeline._decided(rows)}
    work = {"layers": 16, "layer_bytes": 2e5, "kept_bytes": 2e5, "microbatches": 16, "operation_seconds": 0.03}
    result = {"work": {**work, "compute_seconds": 1.44}, "races": {"limited": found}}
    page = sharded_pipeline.report(result)
    assert f"| 6.0 | {theirs} | 2.00 | {ours} | 1.60 | 6.0 | 1.25 |" in page.splitlines()
    assert "| **atoll small** | 1.90 | 1 | 5.0 | 4.0 | 0.32 |  |  |  |" in page.splitlines()
    assert f"| **{ours}** | 1.60 | 1 | 6.0 | 4.0 | 0.32 | 1.64 | +2.5 % | 3.9 |" in page.splitlines()
    assert f"{theirs}` against `{ours}`" in page
    assert "`torch wrong` (0.9)" in page


def test_the_page_of_low_rank_adapters() -> None:
    rows = [{"name": f"atoll-{name}", "median_seconds": at + 1.0, "inter_bytes": 3e6} for at, name in enumerate("ab")]
    races = [{"bits_a_second": 4e8, "rows": rows, "ratios": {"atoll-b / atoll-ING": 2.5}}]
    result = {"work": {"parameters": 90, "microbatches": 8}, "trained": 10, "races": races}
    assert "| b | 2.000 | 2.50 | 3.00 |" in low_rank.report(result).splitlines()


def test_the_page_of_streams() -> None:
    def row(name: str, seconds: float, peak: float | None) -> dict[str, object]:
        return {"name": name, "seconds": [seconds, 2 * seconds], "peak_bytes": peak, "nbytes": 8}

    names = zip(stream.WAYS, (1.0, 4.0, 1.0, 5.0, 2.0), strict=True)
    changes = [{"everything": {"bytes": 8e6, "seconds": 1.0}, "changed": {"bytes": 2e6, "seconds": 0.5}}]
    result = {
        "work": stream.SMALL.to_json(),
        "rows": [row(name, seconds, 3e6) for name, seconds in names],
        "changes": changes,
        "pipeline": {**row("atoll-walk", 1.0, None), "bucket_bytes": 8e6, "unit_bytes": 9e6},
    }
    lines = stream.report(result).splitlines()
    assert "| `engine.stream()`: every rank keeps all tensors | 1.500 | 0.25 | 3 |" in lines
    assert "| what has changed | 2.0 | 0.500 |" in lines
    assert claims.stream(result)["changed"] == 0.25


def test_the_page_of_a_slow_hop() -> None:
    def row(name: str, median: float, kept: float) -> dict[str, object]:
        return {"name": name, "median_seconds": median, "seconds": [median], "kept": kept, "simulated_seconds": 1.0,
                "over_simulation": median - 1}  # fmt: skip

    rows = [row("1f1b", 1.5, 4.0), row("zb-v", 1.2, 4.0), row("auto, line, 4 kept", 1.0, 4.0)]
    case = {"ranks": 4, "microbatches": 8, "latency_seconds": 0.04, "load": [0.5], "rows": rows, "bound_seconds": 0.9,
            "messages": {"0 to 1": [0.0005, 0.0], "1 to 2": [0.007, 0.006]}}  # fmt: skip
    page = slow_hop.report({"operation_seconds": 0.02, "races": [case]})
    assert "| auto, line, 4 kept | 4 | 1000 | 1000 | 1000 | 0.0% | 1.20 |" in page.splitlines()
    assert "across it takes 7.0 ms besides the latency, in a train 6.0 ms each" in page


def test_the_page_of_devices_of_two_speeds() -> None:
    def row(split: str, layers: list[int], median: float) -> dict[str, object]:
        return {"schedule": "1f1b", "split": split, "layers": layers, "median_seconds": median,
                "simulated_seconds": 1.0, "over_simulation": median - 1,
                "said_seconds": 1.0, "over_said": 0.0}  # fmt: skip

    rows = [row("by speed", [6, 6, 2, 2], 1.0), row("even", [4, 4, 4, 4], 1.5)]
    result = {"rows": rows, "fast_seconds": 0.008, "slow_seconds": 0.02, "microbatches": 16, "load": [0.5],
              "load_after": [0.6], "times_as_fast": {"1f1b": 1.5}}  # fmt: skip
    page = unequal.report(result).splitlines()
    assert "| 1f1b | by speed | 6, 6, 2, 2 | 1000 | 1000 | 0.0% | 1000 | 0.0% | 1.50 |" in page
    assert claims.unequal(result)["times"] == "1.50"


def test_the_planner_splits_the_emulated_layers_by_speed() -> None:
    assert unequal.chosen("1f1b", 8) == [6, 6, 2, 2]


def test_the_page_of_outer_steps() -> None:
    def row(name: str, *seconds: float) -> dict[str, object]:
        return {"name": name, "seconds": list(seconds), "crossed": [2100.0], "counted": [2000.0], "losses": [1.0]}

    speed = {
        "network": "emulated",
        "bits": 20e6,
        "work": {"parameters": 1_000_000, "units": 8},
        "layout": "IIG",
        "outer": {"every": 64, "delay": 16},
        "load": [0.5],
        "load_after": [0.6],
        "rows": [row("alone", 0.5), row("outer", 0.52), row("IIG", 16.0)],
        "best_synchronous": "IIG",
        "formula_bytes": outer.formula(32_000, outer.OUTER),
        "over_alone": [1.04],
        "times_as_fast": 30.8,
    }
    page = outer.report({"speed": speed})
    assert "| outer | 0.520 | 0.520 | 0.520 | 2.1 | 2.0 |" in page.splitlines()
    assert "Traffic by the formula: 2.0 kB a step." in page


def test_the_page_of_quality() -> None:
    """Losses are compared with those of the base for the same seeds."""
    rows = [
        {
            "name": name,
            "kind": kind,
            "parallel": {},
            "seed": seed,
            "commit": "0",
            "validation": [(0, 5.0), (10, 4.0), (20, last)],
        }
        for name, kind, seed, last in (
            ("fp32", "synchronous", 0, 2.0),
            ("fp32", "synchronous", 1, 4.0),
            ("DiLoCo", "outer", 0, 2.1),
            ("int8", "codec", 0, 2.002),
            ("int8", "codec", 1, 4.004),
            ("hop int8", "hop", 0, 2.02),
        )
    ]
    result = {"job": quality.JOB, "steps": 20, "every": 32, "aims": quality.AIMS, "rows": rows}
    page = quality.report(result)
    assert "| hop int8 | 2.0200 |  | 1 | +1.00% |  |" in page.splitlines()
    assert "results/hop.svg" in page
    assert "results/hop.svg" not in quality.report({**result, "rows": rows[:-1]})
    assert "| DiLoCo | 2.1000 |  | 1 | +5.00% |  |" in page.splitlines()
    assert "| int8 | 3.0030 | ± 1.4156 | 2 | +0.10% | 0.3% |" in page.splitlines()
    assert "Only 20 of 2000 steps" in page
    assert "MuLoCo" not in page


def test_the_page_of_quality_compares_islands_of_muon(tmp_path: Path) -> None:
    """They have losses over AdamW's and over Muon's, a table of the runs that chose rates, and a picture."""
    rows = [
        {"name": name, "kind": kind, "seed": 0, "commit": "0", "validation": [(0, 5.0), (10, last + 1), (20, last)]}
        for name, kind, last in (("AdamW", "synchronous", 2.0), ("Muon", "synchronous", 1.6), ("MuLoCo", "outer", 1.8))
    ]
    other = [{**rows[0], "name": "fp32"}, {**rows[2], "name": "DiLoCo"}, {**rows[1], "name": "int8", "kind": "codec"}]
    shared = {"job": quality.JOB, "steps": 20, "every": 32, "aims": quality.AIMS, "rows": other}
    result = {**shared, "muon": {"trials": [{**rows[1], "name": "Muon, lr 1"}], "rows": rows}}
    page = quality.report(result).splitlines()
    assert "| AdamW | 2.0000 |  | 1 |  | +25.00% |" in page
    assert "| MuLoCo | 1.8000 |  | 1 | -10.00% | +12.50% |" in page
    assert "| Muon, lr 1 | 20 | 1.6000 |" in page
    assert any(line.startswith("**Not measured yet: AdamW (2 seeds), ") for line in page)
    quality.publish(result, tmp_path)
    assert ">MuLoCo</text>" in (tmp_path / "results" / "muon.svg").read_text()
    assert ">MuLoCo</text>" not in (tmp_path / "results" / "outer.svg").read_text()
    assert not (tmp_path / "results" / "hop.svg").exists()
    quality.publish({**shared, "rows": [*other, {**rows[0], "name": "hop int8", "kind": "hop"}]}, tmp_path)
    assert ">hop int8</text>" in (tmp_path / "results" / "hop.svg").read_text()


def test_settings_of_quality_are_those_of_the_best_trials() -> None:
    trials = json.loads(quality.RAW.read_text())["muon"]["trials"]
    best: dict[str, tuple[float, str]] = {}
    for row in trials:
        name, _, setting = row["name"].partition(", ")
        best[name] = min(best.get(name, (9.0, "")), (row["validation"][-1][1], setting))
    outer = quality.MULOCO
    chosen = {name: f"lr {rate:g}" for name, rate in quality.RATES.items()}
    chosen["MuLoCo"] += f", outer lr {outer['lr']:g}, momentum {outer['momentum']:g}"
    assert {name: setting for name, (_, setting) in best.items()} == chosen


def test_links_of_two_islands_are_those_that_were_measured() -> None:
    """Messages within take a latency; across they take their sender's link as long as in a train."""
    pairs = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    measured = {pair: (0.008, 0.006) if set(pair) == {1, 2} else (0.0005, 0.0001) for pair in pairs}
    links = slow_hop._links(measured, 2, 0.04)
    assert links.between(0, 1) == PipelineLink(0.0005)
    assert links.between(1, 2) == links.between(2, 1) == links.between(3, 0)
    assert (links.between(1, 2).latency, links.between(1, 2).seconds) == pytest.approx((0.042, 0.006))


@pytest.mark.slow
def test_a_question_is_planned_twice() -> None:
    row = planner.asked(planner.QUESTIONS[0], effort=20_000)
    assert row["same"]
    assert row["seconds"] > 0
    assert 0 <= row["gap"] < 1
    assert f"| {row['name']} | {max(row['search_seconds']):.1f} | 30 | yes |" in planner.report({"rows": [row]})


@pytest.mark.wide(0)
def test_an_uneven_model_is_compared_with_its_rivals() -> None:
    row = uneven.compared(uneven.MODELS[4], 4, 8)
    assert row["work"] <= row["joint"] <= min(row["best"], row["even"], row["equal"]) * (1 + 1e-9)
    assert row["joint"] <= row["within"] <= row["equal"] * (1 + 1e-9)
    page = uneven.report({"rows": [row]})
    assert f"| {row['joint'] / row['work'] - 1:.1%} | {row['equal'] / row['joint']:.2f} |" in page


def test_the_matrix_goes_on_where_it_was(tmp_path: Path) -> None:
    done = tmp_path / "results" / "cases.jsonl"
    assert list(cases.known(done, "one")) == []
    cases.note(done, "a", {"worst": 0.0, "problem": "", "seconds": 1.0})
    assert list(cases.known(done, "one")) == [("a", {"worst": 0.0, "problem": "", "seconds": 1.0})]
    assert list(cases.known(done, "another")) == []
    assert list(cases.known(done, "one")) == []


def test_the_page_of_the_matrix_shows_what_is_wrong() -> None:
    tables = [{"gpipe": {"NNN": [24, 24], "NNI": [23, 24]}, "unit": {"NNN": [24, 24]}}]
    result = {"cases": 72, "right": 71, "seconds": 60.0, "worst": 0.1, "tables": tables, "problems": ["a: loss"]}
    page = matrix.report(result)
    assert "|  | NNN | NNI |\n|---|---|---|\n| gpipe | 24 | **23 of 24** |\n| unit | 24 |  |\n" in page
    assert "- a: loss" in page
    assert "\n- a: loss" in mixtures.report(result | {"drawn": {"host": ["None"]}})


def test_the_picture_of_a_race_numbers_both_fronts() -> None:
    rows = [
        {"name": "ours, slow & small", "median_seconds": 3.0, "peak_bytes": 2e6, "is_ours": True},
        {"name": "ours, fast", "median_seconds": 2.0, "peak_bytes": 4e6, "is_ours": True},
        {"name": "ours, dominated", "median_seconds": 3.5, "peak_bytes": 5e6, "is_ours": True},
        {"name": "a peer", "median_seconds": 2.5, "peak_bytes": 3e6, "is_ours": False, "is_right": True},
        {"name": "a wrong peer", "median_seconds": 1.0, "peak_bytes": 1e6, "is_ours": False, "is_right": False},
    ]
    picture = scatter("A race", rows, note="a link")
    found = ElementTree.fromstring(picture)
    texts = ["".join(each.itertext()) for each in found.iter("{http://www.w3.org/2000/svg}text")]
    assert {"ours, slow & small", "3.00 s, 2.0 MB", "ours, fast", "a peer", "peak memory of a rank, MB"} <= set(texts)
    assert not {"ours, dominated", "a wrong peer"} & set(texts)


@pytest.mark.parametrize(
    ("seconds", "is_wide"), [((1.3, 1.9, 2.4), False), ((0.9, 1.4, 9.5), True), ((0.02, 3.0, 48.0), True)]
)
def test_what_differs_by_far_lies_on_a_logarithmic_axis(seconds: tuple[float, ...], is_wide: bool) -> None:
    """All points lie in the plot, equal ratios equally far apart."""
    rows = [
        {"name": f"ours {at}", "median_seconds": value, "peak_bytes": (5 - at) * 1e6, "is_ours": True}
        for at, value in enumerate(seconds)
    ]
    scale = _Scale(rows)
    places = [scale.at(row)[1] for row in rows]
    assert all(TOP <= y <= TOP + PLOT for y in places)
    ratios = [math.log(later / first) for first, later in pairwise(seconds)]
    drops = [first - later for first, later in pairwise(places)]
    assert (drops[0] / ratios[0] == pytest.approx(drops[1] / ratios[1])) is is_wide
    assert ("seconds a step, logarithmic" in scatter("A race", rows, note="")) is is_wide
