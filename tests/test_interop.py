"""Orders travel to torch.distributed.pipelining and back: its runtime executes ours, our engine trains with its own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from atoll.base.errors import ScheduleError
from atoll.plans import schedules
from atoll.plans.ir import Op, Schedule, lower
from atoll.plans.ir.text import from_csv, to_csv
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.program.sim import Costs, simulate
from atoll.runtime.engine import Engine
from atoll.runtime.sharding.optimizer import decay_matrices
from atoll.testing import run_ranks
from atoll.testing.parity import Case, History, difference, reference, whole_parameters, worst_difference
from atoll.testing.tiny import tiny_batch, tiny_model

WIDTH = 8
MICROBATCHES = 6
TOLERANCE = 1e-12

# ---- our orders in torch's runtime


def layers(stages: int) -> list[nn.Module]:
    """A stage each, the same on every rank."""
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)).double() for _ in range(stages)]


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    given, wanted = torch.randn(2, MICROBATCHES, 3, WIDTH, generator=generator, dtype=torch.float64)
    return given, wanted


def gradients_of_torch(text: str, folder: str, format_name: str, kind: str, chunks: int) -> dict[str, Tensor]:
    """One rank's gradients after torch's runtime has played a CSV."""
    from atoll.plans.ir import Placement

    placement = Placement(kind, dist.get_world_size(), chunks)  # type: ignore[arg-type]
    mine = placement.stages_of(dist.get_rank())
    parts = layers(placement.stages)
    stages = [pipelining.PipelineStage(parts[at], at, placement.stages, torch.device("cpu")) for at in mine]
    runner = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=F.mse_loss, scale_grads=False)
    path = Path(folder) / f"rank-{dist.get_rank()}.csv"
    path.write_text(text, encoding="utf-8")
    runner._load_csv(str(path), format=format_name)  # type: ignore[arg-type]
    given, wanted = samples()
    runner.step(*((given,) if 0 in mine else ()), target=wanted if placement.stages - 1 in mine else None)
    return {
        f"{at}.{name}": parameter.grad
        for at in mine
        for name, parameter in parts[at].named_parameters()
        if parameter.grad is not None
    }


def gradients_of_one_process(stages: int) -> dict[str, Tensor]:
    parts = layers(stages)
    for given, wanted in zip(*samples(), strict=True):
        F.mse_loss(nn.Sequential(*parts)(given[None]), wanted[None]).backward()
    return {f"{at}.{name}": p.grad for at, part in enumerate(parts) for name, p in part.named_parameters()}


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v",
             "unit"]
)  # fmt: skip
def test_torch_executes_our_orders(name: str, tmp_path: Path) -> None:
    schedule = schedules.build(name, ranks=2, microbatches=MICROBATCHES)
    placement = schedule.placement
    arguments = (to_csv(schedule), str(tmp_path), "compute_only", placement.kind, placement.chunks)
    per_rank = run_ranks(gradients_of_torch, 2, *arguments, timeout=60.0)
    found = per_rank[0] | per_rank[1]
    wanted = gradients_of_one_process(placement.stages)
    assert set(found) == set(wanted)
    assert max(difference(found[key], wanted[key]) for key in wanted) < TOLERANCE


# ---- torch's orders in our engine

PEERS = {
    "ScheduleInterleaved1F1B": ("loop", 2),
    "ScheduleLoopedBFS": ("loop", 2),
    "ScheduleInterleavedZeroBubble": ("loop", 2),
    "ScheduleZBVZeroBubble": ("v", 2),
}


def peer_csv(name: str, folder: Path, *, ranks: int, microbatches: int, format_name: str = "compute_only") -> str:
    """What one of torch's schedules writes. It asks its stages for their number and place alone."""
    _, chunks = PEERS[name]
    stages = [
        SimpleNamespace(
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            stage_index=at,
            submod=None,
            is_first=at == 0,
            is_last=False,
        )
        for at in range(chunks)
    ]
    path = folder / "peer.csv"
    getattr(pipelining, name)(stages, microbatches)._dump_csv(str(path), format=format_name)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("format_name", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16)])
@pytest.mark.parametrize("name", PEERS)
def test_torch_orders_are_valid_and_take_their_time(
    name: str, ranks: int, microbatches: int, format_name: str, tmp_path: Path
) -> None:
    text = peer_csv(name, tmp_path, ranks=ranks, microbatches=microbatches, format_name=format_name)
    schedule = from_csv(text, name=name)
    assert (schedule.placement.kind, schedule.chunks) == PEERS[name]
    assert schedule.microbatches == microbatches
    assert schedule.has_messages == (format_name == "compute_comms")
    # torch's RECV begins to receive and ours waits, so its lowered orders are placed anew.
    trace = simulate(lower(schedule.compute_only()), Costs())
    assert 3 * microbatches <= trace.makespan <= 3 * (microbatches + ranks)  # no idler than GPipe's fill and drain


def test_round_trip_through_torch(tmp_path: Path) -> None:
    """What torch wrote is what we write, up to its idle cells and its line ends."""
    text = peer_csv("ScheduleZBVZeroBubble", tmp_path, ranks=4, microbatches=8)
    bare = "".join(",".join(filter(None, line.split(","))) + "\n" for line in text.splitlines())
    assert to_csv(from_csv(text)) == bare


def train_with(case: Case, schedule: Schedule) -> History:
    """`case` with an order that has no name in the catalogue."""
    plan = Plan(
        MeshShape(pipeline=case.pipeline),
        Layout(case.layout),
        schedule,
        case.microbatch,
        precision=Precision.preset(case.precision),
    )
    with torch.device("meta"):
        model = tiny_model(case.model)
    engine = Engine(
        model,
        plan,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=case.lr),
        groups=decay_matrices(0.1),
        clip=case.clip,
        seed=case.seed,
    )
    history = History()
    for step in range(case.steps):
        result = engine.step(tiny_batch(case.model, step, case.samples))
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.parameters = whole_parameters(engine)
    engine.close()
    return history


@pytest.mark.wide(4)
@pytest.mark.parametrize("format_name", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", PEERS)
def test_our_engine_trains_with_torch_orders(name: str, format_name: str, tmp_path: Path) -> None:
    case = Case(pipeline=2, microbatches=4)
    text = peer_csv(name, tmp_path, ranks=2, microbatches=4, format_name=format_name)
    histories = run_ranks(train_with, 2, case, from_csv(text, name=name).compute_only(), timeout=60.0)
    wanted = reference(replace(case, pipeline=1))
    for history in histories:
        worst, where = worst_difference(history, wanted)
        assert worst < 1e-10, where
    assert set(histories[0].parameters) | set(histories[1].parameters) == set(wanted.parameters)


def test_broken_orders_of_others_are_refused(tmp_path: Path) -> None:
    text = peer_csv("ScheduleInterleavedZeroBubble", tmp_path, ranks=2, microbatches=4)
    weight = re.search(r"\d+W\d+", text)
    assert weight is not None
    with pytest.raises(ScheduleError, match=weight[0].replace(Op.W, "[IW]")):
        from_csv(text.replace(weight[0], ""))
