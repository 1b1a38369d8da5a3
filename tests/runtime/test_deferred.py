"""What a pending W keeps, and what else a deferred weight gradient must get right."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.pipelining._backward import stage_backward_input

from atoll.plans import schedules
from atoll.plans.ir import Op
from atoll.plans.layouts import Layout, Nest, Precision, Sharding
from atoll.plans.plan import MeshShape
from atoll.program import Part
from atoll.program.sim import Costs
from atoll.runtime.engine import Engine
from atoll.runtime.lanes import AT_ONCE, lanes_of
from atoll.runtime.models import Decoder, DecoderConfig
from atoll.runtime.pipeline.deferred import Collector, compute_weights, defer
from atoll.runtime.sharding.surroundings import Surroundings
from atoll.runtime.sharding.unit import Unit, UnitSpec
from atoll.runtime.transport import connect
from atoll.testing import run_ranks
from atoll.testing.parity import Case, History, assert_parity, reference, train_case, worst_difference
from atoll.testing.tiny import TinyConfig, tiny_model


class GptBlock(nn.Module):
    """Pre-norm attention and a GELU feed-forward."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.output = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.qkv(self.first(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).flatten(-2))
        out: Tensor = hidden + self.down(F.gelu(self.up(self.second(hidden))))
        return out


def swiglu_block() -> nn.Module:
    sizes = DecoderConfig(vocabulary=16, layers=1, hidden=64, heads=4, kv_heads=4, ffn=172)
    return Decoder(sizes).layers[0]


BLOCKS: dict[str, Callable[[], nn.Module]] = {"swiglu": swiglu_block, "gpt": lambda: GptBlock(64, 4)}


def unit_of(block: nn.Module, precision: str = "fp32") -> Unit:
    place = MeshShape().place(0)
    device = torch.device("cpu")
    around = Surroundings(
        Sharding(Layout("NNN"), Precision.preset(precision), Nest()),
        connect(place, device),
        device,
        lanes_of(device, alone=True, waits_on_host=True),
    )
    parameters = dict(block.named_parameters())
    linears = {f"{name}.weight" for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    phases: Any = {name: frozenset("W" if name in linears else "I") for name in parameters}
    return Unit(
        UnitSpec(0, "block", tuple(parameters), (0,), is_shared=False), parameters, around, owners=(0,), phases=phases
    )


def net_bytes(act: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that the CPU allocator gave out and did not take back while `act` ran, and its result."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    # torch 2.11 warns where events are not accumulated, even if there is one cycle only.
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        result = act()
    return sum(event.self_cpu_memory_usage for event in profiler.events()), result


def measure(kind: str) -> dict[str, int]:
    block = BLOCKS[kind]()
    unit = unit_of(block)
    collector = Collector([])
    layers = defer(block, [unit], collector)
    hidden = torch.randn(2, 128, 64, requires_grad=True)
    gradient = torch.randn(2, 128, 64)
    hidden.grad = torch.zeros_like(hidden)
    held: dict[str, int] = {}

    held["after F"], output = net_bytes(lambda: block(hidden))
    held["after F"] -= output.nbytes  # it travels on
    freed, _ = net_bytes(lambda: output.backward(gradient))
    pending = [kept for _, _, kept in collector.found or ()]
    held["after I"] = held["after F"] + freed
    held["wanted"] = sum(each.hidden.nbytes + each.gradient.nbytes for each in pending)
    shared = {tensor.untyped_storage().data_ptr() for kept in pending for tensor in kept[:2]}
    outside = {hidden.untyped_storage().data_ptr(), gradient.untyped_storage().data_ptr()}
    held["storages"] = len(shared - outside)
    held["layers"] = len(layers)
    return held


def of_torchs_split(kind: str) -> float:
    """A pending W beside a pending backward, where torch.distributed.pipelining splits it."""
    block = BLOCKS[kind]()
    hidden = torch.randn(2, 128, 64, requires_grad=True)
    gradient = torch.randn(2, 128, 64)
    after_forward, output = net_bytes(lambda: block(hidden))
    after_forward -= output.nbytes
    freed, kept = net_bytes(lambda: stage_backward_input([output], [gradient], [hidden], block.parameters()))
    (passed,), groups = kept
    assert groups, "something is left for W"
    assert passed is not None
    return (after_forward + freed - passed.nbytes) / after_forward


@pytest.mark.parametrize(("kind", "limit"), [("swiglu", 0.8), ("gpt", 1.0)])
def test_a_pending_weight_gradient_keeps_inputs_and_output_gradients_alone(kind: str, limit: float) -> None:
    held = measure(kind)
    assert held["layers"] == (7 if kind == "swiglu" else 4)
    assert held["after I"] <= 1.05 * held["wanted"]
    assert held["after I"] <= limit * held["after F"]
    assert held["after I"] / held["after F"] < of_torchs_split(kind) / 1.5


def test_weights_come_out_as_autograd_gives_them() -> None:
    for make in BLOCKS.values():
        torch.manual_seed(1)
        block = make().double()
        hidden, gradient = torch.randn(2, 8, 64, dtype=torch.float64), torch.randn(2, 8, 64, dtype=torch.float64)
        plain = torch.autograd.grad(block(hidden), list(block.parameters()), gradient)
        wanted = dict(zip([name for name, _ in block.named_parameters()], plain, strict=True))

        place, device = MeshShape().place(0), torch.device("cpu")
        around = Surroundings(
            Sharding(Layout("NNN"), Precision.preset("fp64"), Nest()),
            connect(place, device),
            device,
            lanes_of(device, alone=True, waits_on_host=True),
        )
        parameters = dict(block.named_parameters())
        linears = {f"{name}.weight" for name, module in block.named_modules() if isinstance(module, nn.Linear)}
        phases: Any = {name: frozenset("W" if name in linears else "I") for name in parameters}
        unit = Unit(
            UnitSpec(0, "block", tuple(parameters), (0,), is_shared=False),
            parameters,
            around,
            owners=(0,),
            phases=phases,
        )
        collector = Collector([])
        layers = defer(block, [unit], collector)
        block(hidden).backward(gradient)  # the input needs no gradient: the anchors keep every linear in the graph
        pending = [(name, kept) for _, name, kept in collector.found or ()]
        compute_weights(unit, pending)
        assert pending == []
        for name in parameters:
            got = unit.gradient_buffer(name, "W").view if name in linears else parameters[name].grad
            assert got is not None
            assert torch.allclose(got, wanted[name], rtol=0, atol=1e-12), name
        for layer in layers:
            layer.remove()
        assert all("forward" not in vars(module) for module in block.modules())


def whole_gradients_in_flight(case: Case) -> tuple[int, int]:
    """Most bytes of gradients not yet reduced, or being reduced, at any reduction, and the largest unit's."""
    engine = case.engine()
    segments = [segment for unit in engine.units for segment in unit.segments]
    most = 0

    def count() -> None:
        nonlocal most
        held = [flow for segment in segments for flow in segment.gradients.unsharded.values()]
        held += [flow for segment in segments for _, flow in segment.gradients.reducing]
        most = max(most, sum(flow.nbytes for flow in held))

    for segment in segments:
        reduce = segment.gradients.begin_reduction

        def watched(phase: Any, reduce: Any = reduce) -> None:
            count()
            reduce(phase)

        segment.gradients.begin_reduction = watched  # type: ignore[method-assign]
    engine.step(case.share(engine, 0))
    engine.close()
    largest = max(
        sum(
            segment.flat.map.padded * segment.gradients.shards[phase].itemsize
            for segment in unit.segments
            for phase in segment.flat.phases
        )
        for unit in engine.units
    )
    return most, largest


@pytest.mark.wide(2)
@pytest.mark.parametrize("layout", ["III", "NIG", "GGG"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_a_pending_w_holds_no_gradient_buffer(schedule: str, layout: str) -> None:
    case = Case(
        layout=layout, pipeline=2, intra=2, schedule=schedule, precision="fp32", model=TinyConfig(layers=8), steps=1
    )
    for most, largest in run_ranks(whole_gradients_in_flight, 4, case):
        assert 0 < most <= (2 + AT_ONCE) * largest


def profile_compiled(case: Case) -> tuple[History, bool]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        history = train_case(case)
    return history, any(event.key == "atoll::input_gradient" for event in profiler.key_averages())


KEPT_BY_W = 15.0
"""Under recompute a pending W keeps many times what the microbatch kept before."""


def pending_in_the_run(room: float | None) -> tuple[int, int, int]:
    """Most pending W at once of a recomputed model under `auto`, as the schedule has it and as it ran; splits."""
    options = {"activation_bytes": 1.0, "weight_grad_bytes": KEPT_BY_W, "memory_limit": room}
    schedule = schedules.build("auto", ranks=2, microbatches=8, costs=Costs(1.0, 2.0, 1.0), **options)
    case = Case(pipeline=2, recompute="block", microbatches=8, model=TinyConfig(dropout=0.2), steps=1)
    with torch.device("meta"):
        model = tiny_model(case.model)
    plan = replace(case.plan, schedule=schedule)
    engine = Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), seed=case.seed)
    most = now = planned = 0
    for action in schedule.actions[engine.place.rank]:
        now += (action.op is Op.I) - (action.op is Op.W)
        planned = max(planned, now)
    advance = engine._executor.counter.advance

    def counted(part: Part) -> None:
        nonlocal most
        advance(part)
        most = max(most, sum(any(items.values()) for items in engine._executor.microbatches.state.pending.values()))

    engine._executor.counter.advance = counted  # type: ignore[method-assign]
    engine.step(case.share(engine, 0))
    engine.close()
    return planned, most, sum(action.op is Op.W for action in schedule.actions[engine.place.rank])


@pytest.mark.slow
@pytest.mark.parametrize("at_most", [0, 1, 2])
def test_pending_weights_under_recompute_are_bounded_by_the_memory(at_most: int) -> None:
    """With room for three microbatches and so many pending W."""
    for planned, ran, splits in run_ranks(pending_in_the_run, 2, 3.0 + at_most * KEPT_BY_W):
        assert ran == planned <= at_most
        assert (splits > 0) == (planned > 0)
    free = run_ranks(pending_in_the_run, 2, None)
    assert max(planned for planned, _, _ in free) > 2


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # inductor's imports and compilers warn of themselves
@pytest.mark.parametrize(("pipeline", "intra", "schedule"), [(1, 2, "1f1b"), (2, 1, "zb-h1")])
def test_compiled_blocks(pipeline: int, intra: int, schedule: str) -> None:
    """By inductor where there is a C++ compiler, else the same graphs run one by one."""
    compiler = "block" if shutil.which("g++") or shutil.which("clang++") else "block-eager"
    alone = Case(microbatches=4, steps=2, model=TinyConfig(layers=2, odd=True))
    case = replace(alone, layout="IIG", pipeline=pipeline, intra=intra, schedule=schedule, compile=compiler)
    wanted = reference(alone)
    for history, went_through_the_operator in run_ranks(profile_compiled, case.ranks, case, timeout=180):
        worst, where = worst_difference(history, wanted)
        assert worst <= 1e-10, where
        assert went_through_the_operator == (pipeline > 1)


def operators_called(case: Case) -> tuple[int, int]:
    """How often the operator of compiled linear layers is called in a step, and how many linear layers wait for W."""
    engine = case.engine()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        engine.step(case.share(engine, 0))
    called = sum(event.count for event in profiler.key_averages() if event.key == "atoll::input_gradient")
    blocks = [block for stage in engine._sharded.stages for block in stage.blocks]
    linear = [each for block in blocks for each in block.module.modules() if type(each) is nn.Linear]
    waiting = sum("forward" in vars(each) for each in linear)
    engine.close()
    return called, waiting


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo reads of what is no leaf
def test_graphs_of_blocks_run_one_by_one() -> None:
    assert_parity(Case(layout="IIG", compile="block-eager", microbatches=2, steps=2, model=TinyConfig(layers=2)))


class Pair(nn.Module):
    """Two linear layers, of which the first is on the block's own input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(hidden)))
        return out


@dataclass(frozen=True)
class BehindFrozen:
    """Pairs behind an embedding that is not trained: the input of the first one needs no gradient."""

    def build(self) -> nn.Module:
        model = nn.Sequential(nn.Embedding(16, 8), Pair(), Pair(), Pair(), nn.Linear(8, 16))
        model[0].requires_grad_(False)
        return model

    def batch(self, step: int, samples: int) -> dict[str, Tensor]:
        ids = torch.randint(16, (samples, 6), generator=torch.Generator().manual_seed(step))
        return {"input_ids": ids, "labels": (ids * 3 + 1) % 16}


@pytest.mark.wide(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiler", ["none", "block-eager", "block"])
def test_a_weight_whose_input_needs_no_gradient(compiler: str) -> None:
    """Nobody uses the result of its operator in the backward, and compilers drop what nobody uses."""
    if compiler == "block" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler")
    case = Case(pipeline=2, schedule="zb-h1", microbatches=4, steps=2, compile=compiler, model=BehindFrozen())
    assert_parity(case)


def graphs_compiled(case: Case) -> tuple[int, int]:
    """How many graphs dynamo makes in two steps, and how many blocks of this rank it compiles."""
    torch._dynamo.reset()
    counters.clear()
    engine = case.engine()
    for step in range(2):
        engine.step(case.share(engine, step))
    blocks = [block for stage in engine._sharded.stages for block in stage.blocks]
    engine.close()
    return counters["stats"]["unique_graphs"], sum(not isinstance(block.module, nn.Embedding) for block in blocks)


@pytest.mark.slow
def test_equal_layers_share_a_graph_where_nothing_waits() -> None:
    """Twelve layers made 14 graphs, since each was compiled by itself though no weight gradient waited."""
    case = Case(microbatches=2, compile="block-eager", model=TinyConfig(layers=12))
    few, _ = run_ranks(graphs_compiled, 1, replace(case, model=TinyConfig(layers=2)), timeout=180)[0]
    many, blocks = run_ranks(graphs_compiled, 1, case, timeout=180)[0]
    assert many == few <= 3
    assert blocks >= 12


@pytest.mark.slow
@pytest.mark.skipif("isolate_recompiles" not in signature(torch.compile).parameters, reason="this torch cannot isolate")
def test_layers_that_wait_are_compiled_one_by_one() -> None:
    case = Case(pipeline=2, microbatches=2, compile="block-eager", model=TinyConfig(layers=12))
    for graphs, blocks in run_ranks(graphs_compiled, 2, case, timeout=180):
        assert graphs == blocks


@pytest.mark.slow
def test_every_layer_of_a_long_stage_is_compiled() -> None:
    """Each of their linear layers calls the operator as often as one of a short stage, where dynamo has no limit."""
    case = Case(pipeline=2, microbatches=2, compile="block-eager")
    short = run_ranks(operators_called, 2, replace(case, model=TinyConfig(layers=4)), timeout=180)
    long = run_ranks(operators_called, 2, replace(case, model=TinyConfig(layers=22)), timeout=180)
    for (few, waiting_few), (many, waiting_many) in zip(short, long, strict=True):
        assert waiting_many > 2 * 8 > waiting_few
        assert many * waiting_few == few * waiting_many > 0


@pytest.mark.wide(0)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo reads of what is no leaf
def test_compiled_blocks_beside_tensor_parallelism() -> None:
    """Linear layers that wait for W go through the operator on their part of the weight."""
    model = TinyConfig(layers=3, tied=True, frozen=True)
    case = Case(layout="IIG", pipeline=2, tensor=2, schedule="zb-h1", compile="block-eager", model=model)
    wanted = reference(Case(model=model))
    for history, went_through_the_operator in run_ranks(profile_compiled, case.ranks, case, timeout=180):
        worst, where = worst_difference(history, wanted)
        assert worst <= 1e-10, where
        assert went_through_the_operator
