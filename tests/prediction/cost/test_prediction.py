"""Seconds and bytes of plans that can be worked out by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from atoll.base.errors import ConfigError
from atoll.plans import schedules
from atoll.plans.host import HostState
from atoll.plans.layouts import Codec, Codecs, Layout, NewtonSchulz, Precision, Whole
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Cluster, Efficiency, KernelClock, Prediction, Product, Transformer, Use
from atoll.program import Do

MODEL = Transformer.llama(layers=16, hidden=1024, heads=16, ffn=2816, vocabulary=32000)
TIED = replace(MODEL, tied=True)
EFFICIENCY = Efficiency(dispatch=0.0, launch=0.0)
MESH = MeshShape()


def cluster(*, rate: float = 1e15, memory: int = 80_000_000_000) -> Cluster:
    device = {"preset": "a100-80gb", "efficiency": EFFICIENCY.model_dump(), "memory": memory, "context": 10**9}
    link = {"rate": rate}
    return Cluster.of({"device": device, "node": {"devices": 8, "cards": 8, "link": link}, "network": link})


def predicted(
    layout: str = "NNN", *, mesh: MeshShape, on: Cluster, schedule: str = "1f1b", **options: object
) -> Prediction:
    built = schedules.build(schedule, ranks=mesh.pipeline, microbatches=8)
    plan = Plan(mesh, Layout(layout), built, 2, precision=Precision.preset("bf16"), **options)  # type: ignore[arg-type]
    recompute = str(options.get("recompute", "none"))
    return Prediction(MODEL.workload, plan, on, Use(samples=2, sequence=1024, recompute=recompute))


def test_one_rank_takes_its_kernels_and_the_optimizers_bytes() -> None:
    found = predicted(mesh=MeshShape(), on=cluster())
    clock = KernelClock(found.cluster.device, "bfloat16", 2)
    works = found.ranks.works
    kernels = sum(clock.seconds((*work.forward, *work.backward, *work.weights)) for work in works)
    update = MODEL.parameters * EFFICIENCY.update / (2.039e12 * EFFICIENCY.memory)
    pauses = 8 * 2 * EFFICIENCY.pause
    assert found.seconds == pytest.approx(8 * kernels + update + pauses, rel=1e-6)
    assert found.tokens_a_second == pytest.approx(8 * 2 * 1024 / found.seconds)


LAYER = {"attention": 4 * [(1024, 1024)], "feed-forward": [(2816, 1024), (2816, 1024), (1024, 2816)]}
MATRICES = [shape for shapes in LAYER.values() for shape in shapes]
"""Shapes of the hidden matrices of one of the 16 layers."""


def step_of(states: int, *, whole: Whole | None = None, layout: str = "NNN", mesh: MeshShape = MESH) -> Prediction:
    return predicted(layout, mesh=mesh, on=cluster(), states=states, whole=whole)


@pytest.mark.parametrize(("states", "tensors"), [(0, 3), (1, 5), (2, 7)], ids=["SGD", "momentum", "AdamW"])
@pytest.mark.parametrize("intra", [1, 4])
def test_an_update_takes_the_tensors_that_its_optimizer_keeps(states: int, tensors: int, intra: int) -> None:
    """Gradient, and master read and written; each state is read and written, too. Of a shard where they are sharded."""
    found = step_of(states, layout="NNG", mesh=MeshShape(1, 1, intra))
    one = tensors / 7 * EFFICIENCY.update / (2.039e12 * EFFICIENCY.memory)
    assert found.durations.update_seconds == pytest.approx(one)
    assert found.rates[0].compute[Do.STEP, -1] == pytest.approx(MODEL.parameters * one / intra, rel=1e-4)
    twice = found.durations.rates_of(found.durations.parts, update=2.0)[0].compute
    assert twice[Do.STEP, -1] == pytest.approx(2 * found.rates[0].compute[Do.STEP, -1])


@pytest.mark.parametrize("states", [0, 2])
def test_a_cast_that_a_gather_makes_is_not_in_the_update(states: int) -> None:
    """Under GGG no copy in bf16 is stored: on one rank each gather reads 4 bytes of each element and writes 2."""
    kept, cast = (step_of(states, layout=layout) for layout in ("NNG", "GGG"))
    difference = kept.rates[0].compute[Do.STEP, -1] - cast.rates[0].compute[Do.STEP, -1]
    seconds = MODEL.parameters * 6 / (2.039e12 * EFFICIENCY.memory)
    assert difference == pytest.approx(seconds, rel=1e-4)
    copies = sum(taken for (do, _), taken in cast.rates[0].compute.items() if do is Do.GATHER)
    assert copies == pytest.approx(seconds, rel=1e-4)


@pytest.mark.parametrize("iterations", [5, 3])
def test_muon_keeps_one_state_of_matrices_and_multiplies_them(iterations: int) -> None:
    """AdamW steps the rest. Five iterations are three products each, of a matrix whose short side comes first. Matrices
    of one shape are a batch."""
    muon = step_of(2, whole=Whole("Muon", NewtonSchulz(iterations)))
    hidden = 16 * sum(rows * columns for rows, columns in MATRICES)
    one = EFFICIENCY.update / 7 / (2.039e12 * EFFICIENCY.memory)
    seconds = muon.rates[0].compute
    assert seconds[Do.STEP, -1] == pytest.approx((5 * hidden + 7 * (MODEL.parameters - hidden)) * one, rel=1e-4)
    products = [
        Product(*sizes, count)
        for shape, count in Counter(MATRICES).items()
        for short, long in (sorted(shape),)
        for sizes in iterations * [(short, long, short), (short, short, short), (short, short, long)]
    ]
    clock = KernelClock(muon.device, "bfloat16", 2)
    transforms = {unit: taken for (do, unit), taken in seconds.items() if do is Do.TRANSFORM}
    assert len(transforms) == 16
    assert all(taken == pytest.approx(clock.seconds(products)) for taken in transforms.values())
    assert muon.durations.rates_of(muon.durations.parts, update=2.0)[0].compute[Do.TRANSFORM, 1] == pytest.approx(
        2 * transforms[1]
    )
    plain = step_of(2)
    added = muon.seconds - plain.seconds
    wanted = sum(transforms.values()) - 2 * hidden * one
    assert added == pytest.approx(wanted, rel=1e-3)


def test_owners_share_the_transforms() -> None:
    """Of four ranks the busiest transforms a quarter, or a matrix more."""
    whole = Whole("Muon", NewtonSchulz())
    alone, shared = (step_of(2, whole=whole, layout="NNG", mesh=MeshShape(1, 1, ranks)) for ranks in (1, 4))
    one, four = (
        sum(taken for (do, _), taken in found.rates[0].compute.items() if do is Do.TRANSFORM)
        for found in (alone, shared)
    )
    assert one / 4 <= four * (1 + 1e-9)
    assert four < one / 2


def test_a_pipeline_fills_and_drains() -> None:
    """1F1B of m microbatches on p ranks takes m + p - 1 times the longest stage where links are fast."""
    found = predicted(mesh=MeshShape(4), on=cluster(), layers_per_stage=(4, 4, 4, 4))
    stages = [sum(sum(found.durations.parts(found.ranks.works[at])) for at in run) for run in found.ranks.runs]
    longest, others = max(stages), sum(stages) - max(stages)
    assert 8 * longest < found.seconds < 8 * longest + others * 1.2


def test_a_slow_link_shows_what_sharding_sends() -> None:
    mesh = MeshShape(1, 2, 8)
    fast, slow = (predicted("GGG", mesh=mesh, on=cluster(rate=rate)) for rate in (1e15, 1e9))
    sent = fast.ranks.programs.ranks[0].sent
    assert slow.seconds >= sent["inter"] / 1e9 > fast.seconds
    once = predicted("IIG", mesh=mesh, on=cluster(rate=1e9))
    assert once.ranks.programs.ranks[0].sent["inter"] < sent["inter"] / 4


@pytest.mark.wide(5)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("unit", [1, 3])
@pytest.mark.parametrize("vocabulary_parallel", [False, True])
def test_all_that_is_kept_is_given_back(schedule: str, recompute: str, unit: int, vocabulary_parallel: bool) -> None:
    options = {"schedule": schedule, "recompute": recompute, "unit": unit, "vocabulary_parallel": vocabulary_parallel}
    found = predicted("IIG", mesh=MeshShape(4, 1, 2), on=cluster(), **options)  # type: ignore[arg-type]
    for rank in range(4):
        held = list(found.held(rank))
        assert held[-1].pending == held[-1].passing == 0
        # The room of messages stays for the next step's, which are posted before anything else is kept.
        assert (
            held[-1].activations
            == held[1].activations
            == found.ranks.message_bytes * round(held[1].activations / found.ranks.message_bytes)
        )
        assert min(min(each) for each in held) >= 0
        assert found.peak(rank).total > held[0].total == found.rest(rank).total


@pytest.mark.parametrize(("schedule", "ranks"), [("zb-v", 2), ("dualpipe-v", 2), ("breadth-first", 1)])
def test_what_the_head_keeps_for_w_is_given_back_once(schedule: str, ranks: int) -> None:
    """Past bug: where one rank has both ends of a tied model, the W of the embedding's stage freed it again."""
    tied = replace(predicted(mesh=MeshShape(ranks), on=cluster(), schedule=schedule), workload=TIED.workload)
    for rank in range(ranks):
        held = list(tied.held(rank))
        assert min(each.pending for each in held) == held[-1].pending == 0
    apart = replace(tied, workload=MODEL.workload)
    assert max(each.pending for each in tied.held(0)) == max(each.pending for each in apart.held(0))


def test_the_first_rank_of_1f1b_keeps_as_many_microbatches_as_there_are_ranks() -> None:
    found = predicted(mesh=MeshShape(4), on=cluster())
    for rank in range(4):
        a_microbatch = sum(found.ranks.works[at].kept for at in found.ranks.shape.blocks_of(rank))
        most = max(held.activations for held in found.held(rank))
        # Besides, room for messages and outputs that are sent: a few hidden states, where a layer keeps dozens.
        messages = most - (4 - rank) * a_microbatch
        assert 0 <= messages <= (4 - rank + 4) * found.ranks.message_bytes


def test_state_is_two_four_and_twelve_bytes_a_parameter_and_the_driver_counts() -> None:
    found = predicted("GGG", mesh=MeshShape(1, 1, 8), on=cluster())
    rest, parameters = found.rest(0), MODEL.parameters
    assert rest.parameters == 0, "cast from the master when it is gathered"
    assert rest.optimizer == pytest.approx(12 * parameters / 8, rel=1e-4)
    assert rest.gradients == 0
    assert max(held.gradients for held in found.held(0)) == pytest.approx(4 * parameters / 8, rel=1e-4)
    assert rest.total == rest.allocated + 10**9


def test_sharded_gradients_take_memory_from_their_first_reduction() -> None:
    found = predicted("GGG", mesh=MeshShape(1, 1, 8), on=cluster())
    _, *held = (each.gradients for each in found.held(0))
    done = [each.do for each in found.ranks.programs.ranks[0].instructions]
    first, backwards = done.index(Do.REDUCE), done.count(Do.REDUCE) // 8
    ends = [at for at, do in enumerate(done) if do is Do.REDUCE][:backwards]
    assert held[first - 1] == 0 < held[first]
    assert held == sorted(held)
    assert held[ends[-2]] < held[ends[-1]] == held[-1] == found.ranks.of(0).footprint().gradients


def test_a_post_validated_step_holds_the_gradients_of_the_step_before() -> None:
    found = predicted("GGG", mesh=MeshShape(1, 1, 8), on=cluster(), post_validation=True)
    _, first, *_ = (each.gradients for each in found.held(0))
    assert first == found.ranks.of(0).footprint().gradients


def test_a_rank_alone_in_its_group_has_nobody_to_read_in_place() -> None:
    """Its gradients are made in buffers of its own, and count once."""
    alone = predicted("GGG", mesh=MeshShape(1, 2, 1), on=cluster())
    assert replace(alone, reads_in_place=True).peak(0) == alone.peak(0)


def test_units_of_several_layers_take_the_same_time_to_compute() -> None:
    one, three = (predicted(mesh=MeshShape(4), on=cluster(), unit=unit) for unit in (1, 3))
    assert three.seconds == pytest.approx(one.seconds)
    sharded = (predicted("GGG", mesh=MeshShape(4, 1, 8), on=cluster(), unit=unit) for unit in (1, 3))
    few, many = (found.peak(1).gathered for found in sharded)
    assert many > few


def test_bytes_are_known_without_a_cluster() -> None:
    found = predicted(mesh=MeshShape(2), on=cluster())
    alone = replace(found, cluster=None)
    assert [alone.peak(rank).allocated for rank in (0, 1)] == [found.peak(rank).allocated for rank in (0, 1)]
    with pytest.raises(ConfigError, match="a prediction without a cluster has only bytes"):
        _ = alone.seconds


def test_what_fits() -> None:
    found = predicted(mesh=MeshShape(), on=cluster())
    assert found.fits
    assert found.margin(0) == 80_000_000_000 - found.peak(0).total
    assert not predicted(mesh=MeshShape(), on=cluster(memory=5_000_000_000)).fits


def test_each_pair_of_neighbours_has_its_own_link() -> None:
    """Four stages on two nodes of two: stages 0 and 1 are on one node, 1 and 2 on two. Links take 10 ms and 1 s."""
    bare = cluster().model_dump()
    tables = {**bare, "node": {"devices": 2, "link": {"rate": 1e15, "latency": 0.01}}}
    tables["network"] = {"rate": 1e15, "latency": 1.0}
    mesh, split = MeshShape(4), {"layers_per_stage": (4, 4, 4, 4)}
    found = predicted(mesh=mesh, on=Cluster.of(tables), **split)
    latency = [[rates.to.get(other, rates.link("pp")).latency for other in (0, 1, 2, 3)] for rates in found.rates]
    assert [latency[0][1], latency[1][0], latency[1][2], latency[2][1], latency[2][3]] == [0.01, 0.01, 1.0, 1.0, 0.01]
    slow = {**tables, "node": {"devices": 1}}
    everywhere = predicted(mesh=mesh, on=Cluster.of(slow), **split)
    nowhere = predicted(mesh=mesh, on=cluster(), **split)
    assert nowhere.seconds + 2 * 1.02 < found.seconds < everywhere.seconds - 2 * 1.98, (
        "one slow hop each way, not three"
    )
    assert all(not rates.to for rates in (*everywhere.rates, *nowhere.rates))


@pytest.mark.parametrize(("burst", "waits"), [(0.0, 1.0), (0.25, 0.75), (1.0, 0.0), (3.0, 0.0)])
def test_what_a_burst_has_room_for_does_not_delay_a_message(burst: float, waits: float) -> None:
    """Half a second of latency and a second of transfer, without the part that a burst carries at once. With a burst
    messages do not wait for each other: all of it is latency."""
    nbytes = predicted(mesh=MeshShape(2), on=cluster()).ranks.message_bytes
    link = {"rate": nbytes, "latency": 0.5, "burst": burst * nbytes}
    tables = {**cluster().model_dump(), "node": {"devices": 2, "link": link}}
    hop = predicted(mesh=MeshShape(2), on=Cluster.of(tables)).durations.hops.between(0, 1)
    assert (hop.latency, hop.seconds) == pytest.approx((0.5 + waits, 0.0) if burst else (0.5, 1.0))


def test_casts_of_gathers_that_send_nothing_take_time() -> None:
    """Once a step by default, as the cast of the optimizer's result where it is stored; or twice in a microbatch."""
    whole, stored = predicted("GGG", mesh=MeshShape(), on=cluster()), predicted("NNN", mesh=MeshShape(), on=cluster())
    assert whole.seconds == pytest.approx(stored.seconds, rel=1e-6)
    assert whole.peak(0).total == pytest.approx(stored.peak(0).total, rel=1e-3)

    each = predicted("GGG", mesh=MeshShape(), on=cluster(), residency="action")
    done = [instruction.do for instruction in each.ranks.programs.ranks[0].instructions]
    # A block that ends the forward begins the backward: it is gathered once for both.
    blocks = 18
    assert done.count(Do.WHOLE) + done.count(Do.FETCH) >= 8 * (2 * blocks - 2)
    cast = (4 + 2) * MODEL.parameters / (2.039e12 * EFFICIENCY.memory)
    assert 13 * cast < each.seconds - whole.seconds < 15 * cast
    assert each.peak(0).total < whole.peak(0).total


def test_gradients_that_nothing_reduces_are_there_from_the_first() -> None:
    found = predicted("GGG", mesh=MeshShape(), on=cluster())
    instructions = found.ranks.programs.ranks[0].instructions
    _, *held = (each.gradients for each in found.held(0))
    done = [each.do for each in instructions]
    assert Do.REDUCE not in done
    first = done.index(Do.I)
    assert held[first - 1] == 0 < held[first]
    last = [at for at, do in enumerate(done) if do is Do.I][17]
    assert held[last] == held[-1] == found.ranks.of(0).footprint().gradients
    assert max(each.buffers for each in found.held(0)) == 0


@pytest.mark.parametrize(("layout", "schedule", "options"), [
    ("NNN", "1f1b", {}),
    ("GGG", "zb-h1", {"residency": "run", "prefetch": 0}),
    ("IGG", "zb-v", {"vocabulary_parallel": True}),
    ("NNG", "interleaved", {"host": HostState("update-on-host", gradients=True, activations=0.5)}),
    ("NIG", "zb-h1", {"post_validation": True, "codecs": Codecs(hop=Codec("int8"), near=True)}),
], ids=str)  # fmt: skip
def test_a_peak_is_the_first_and_largest_of_what_is_held(layout: str, schedule: str, options: dict[str, Any]) -> None:
    mesh = MeshShape(2, 2, 2)
    found = predicted(layout, mesh=mesh, on=cluster(), schedule=schedule, **options)
    for rank in range(2):
        held = list(found.held(rank))
        assert found.peak(rank) == max(held, key=lambda each: each.total)
        assert found.peak(rank).total > held[0].total
