"""A vocabulary that is split over the pipeline: what its slices compute, and what that changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Cluster, Efficiency, Kernel, Prediction, Product, Transformer, Use, Work
from atoll.prediction.cost.calibration import Step, calibrate
from atoll.program import Do, Sliced

MODEL = Transformer.llama(layers=8, hidden=1024, heads=16, ffn=2816, vocabulary=256_000)
USE = Use(samples=1, sequence=2048)


def cluster(rate: float = 1e15) -> Cluster:
    device = {"preset": "a100-80gb", "efficiency": Efficiency(dispatch=0.0, launch=0.0).model_dump()}
    return Cluster.of({"device": device, "node": {"devices": 8, "link": {"rate": rate}}})


def predicted(*, split: bool, on: Cluster, schedule: str = "1f1b", ranks: int = 4, **options: Any) -> Prediction:
    mesh = MeshShape(ranks)
    built = schedules.build(schedule, ranks=ranks, microbatches=4 * ranks)
    plan = Plan(mesh, Layout("NNN"), built, 1, precision=Precision.preset("bf16"), vocabulary_parallel=split, **options)
    return Prediction(MODEL.workload, plan, on, USE)


def flops(works: Iterable[Work]) -> float:
    def each(kernels: Iterable[Kernel]) -> float:
        return sum(kernel.flops for kernel in kernels if isinstance(kernel, Product))

    return sum(each((*work.forward, *work.backward, *work.weights)) for work in works)


@pytest.mark.parametrize("use", [USE, Use(samples=2, sequence=64, tensor=2)], ids=str)
@pytest.mark.parametrize("model", [MODEL, Transformer.gpt(layers=2, hidden=64, heads=4, vocabulary=512, positions=64)])
def test_slices_and_ends_have_the_parameters_and_products_of_whole_ends(model: Transformer, use: Use) -> None:
    whole, split = model.workload, model.split(4)
    assert split.vocabulary is not None
    slices = [end.work(use) for end in (split.vocabulary.embedding, split.vocabulary.head)]
    ends, rests = ([workload.blocks[at].work(use) for at in (0, -1)] for workload in (whole, split))
    for end, rest, own in zip(ends, rests, slices, strict=True):
        assert end.parameters == rest.parameters + 4 * own.parameters
        assert end.matrices == rest.matrices + 4 * own.matrices
    # Between stages goes the same hidden state.
    assert ends[0].wire == rests[0].wire == use.item * use.tokens * model.hidden
    assert flops(ends) == flops(rests) + 4 * flops(slices)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_a_large_head_is_faster_and_smaller_where_it_is_split(schedule: str) -> None:
    whole, split = (predicted(split=each, on=cluster(), schedule=schedule) for each in (False, True))
    assert split.seconds < 0.8 * whole.seconds
    assert split.mfu == pytest.approx(whole.mfu * whole.seconds / split.seconds)
    fullest = [max(found.peak(rank).total for rank in range(4)) for found in (split, whole)]
    assert fullest[0] < 0.8 * fullest[1]
    for one, other in zip(split.breakdown, split.breakdown[1:], strict=False):
        assert one.weights == pytest.approx(other.weights, rel=0.05)


def test_the_ends_send_the_hidden_state_to_every_rank() -> None:
    """Over a slow link the last rank sends p - 1 copies forward, and the first one as many backward."""
    hidden = 2 * USE.tokens * MODEL.hidden
    for ranks in (2, 4):
        found = predicted(split=True, on=cluster(), ranks=ranks)
        sent = found.rates[ranks - 1].messages[Do.SEND_F, ranks - 1], found.rates[0].messages[Do.SEND_B, 0]
        assert sent == ((ranks - 1) * hidden, (ranks - 1) * hidden)
    slow = predicted(split=True, on=cluster(rate=2e8))
    copies = 3 * hidden / 2e8 * slow.plan.schedule.microbatches
    assert slow.seconds > copies > predicted(split=True, on=cluster()).seconds


def test_a_slice_holds_its_softmax_and_nobody_more() -> None:
    """From S to T: 64,000 of 256,000 columns in bf16; within S the logits besides, twice in fp32 and once in bf16."""
    found = predicted(split=True, on=cluster())
    logits = USE.tokens * 64_000
    _, head = found.ranks.slices.works
    assert head.kept == 2 * logits + 2 * USE.tokens * MODEL.hidden + 3 * 4 * USE.tokens
    answer = 2 * MODEL.hidden * (USE.tokens + USE.tokens // 4)
    assert head.peak == 10 * logits + answer
    program = found.ranks.programs.ranks[2]
    held = list(found.held(2))[1:]
    scored = [at for at, each in enumerate(program.instructions) if each.do is Sliced.S]
    assert all(held[at].passing == head.peak for at in scored)
    assert held[scored[0]].activations - held[scored[0] - 1].activations == head.kept + head.wire


@pytest.mark.slow
def test_constants_are_fitted_through_slices() -> None:
    """Steps of a device whose memory reaches less, on which scores are slower."""
    pytest.importorskip("scipy")
    efficiency = Efficiency(dispatch=0.0, launch=0.0)
    slower = efficiency.model_copy(update={"memory": 0.6 * efficiency.memory})
    own = cluster()
    other = own.model_copy(update={"device": own.device.model_copy(update={"efficiency": slower})})
    steps = []
    for schedule in ("1f1b", "zb-h1"):
        measured = predicted(split=True, on=other, schedule=schedule).seconds
        steps.append(Step(((1.0, predicted(split=True, on=own, schedule=schedule)),), measured))
    fitted = calibrate(steps, ["device.efficiency.memory"])
    assert fitted.error < 0.02
    assert fitted.constants["device.efficiency.memory"] < 0.8 * efficiency.memory
