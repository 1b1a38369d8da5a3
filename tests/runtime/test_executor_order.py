"""What leaves a rank before what. One rank is held until another has come so far: in another order, neither goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from atoll import schedules
from atoll.ir import Op
from atoll.layouts import Layout
from atoll.models import Adapter
from atoll.models.adapter import SequentialAdapter
from atoll.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.transport import world_store
from atoll.testing import run_ranks
from atoll.trace import Span

MICROBATCHES = 4
WIDTH = 8
ROWS = 8
PATIENCE = timedelta(seconds=60)
"""How long a rank is held for what would never come."""


class Wide(nn.Sequential):
    """Linears that learn to put out zeros."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def atoll_adapter(self) -> Adapter:
        return SequentialAdapter(self, squared)


def squared(outputs: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return outputs.square().sum()


def wide_engine(name: str, *, post_validation: bool = False) -> Engine:
    with torch.device("meta"):
        model = Wide()
    schedule = schedules.build(name, ranks=2, microbatches=MICROBATCHES)
    plan = Plan(MeshShape(pipeline=2), Layout("NNN"), schedule, 1, post_validation=post_validation)
    return Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-6))


def wide_batch() -> dict[str, Tensor]:
    return {"inputs": torch.ones(MICROBATCHES, ROWS, WIDTH), "labels": torch.zeros(MICROBATCHES, ROWS).long()}


def timelines(name: str, steps: int, *, post_validation: bool = False) -> list[tuple[Span, ...]]:
    """One rank's timeline of each step, run back to back."""
    engine = wide_engine(name, post_validation=post_validation)
    batches = [wide_batch() for _ in range(steps)]
    found = []
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        engine.submit(batch, following)
        found.append(engine.trace().spans)
    engine.settle()
    engine.close()
    return found


def say(what: str) -> None:
    store = world_store()
    assert store is not None
    store.set(what, "")


def wait_for(what: str) -> None:
    store = world_store()
    assert store is not None
    store.wait([what], PATIENCE)


def hold_weights_until_the_gradient_has_arrived() -> int:
    """In a step of 1F1B the last rank computes no weight's gradient before the other one has what it owes; how often it
    was held."""
    engine = wide_engine("1f1b")
    executor = engine._executor
    count = 0
    if engine.place.pp == 0:
        receive = executor._acts[Op.RECV_B]

        def received(stage: int, microbatch: int) -> None:
            receive(stage, microbatch)
            say(f"received {microbatch}")

        executor._acts = {**executor._acts, Op.RECV_B: received}
    else:
        weights = executor._weights

        def held(units: Sequence[Unit], key: tuple[int, int]) -> None:
            nonlocal count
            wait_for(f"received {key[1]}")
            count += 1
            weights(units, key)

        executor._weights = held  # type: ignore[method-assign]
    engine.step(wide_batch())
    engine.close()
    return count


def test_the_input_gradient_leaves_before_the_weights_are_computed() -> None:
    """In each full backward of the last rank."""
    assert run_ranks(hold_weights_until_the_gradient_has_arrived, 2, timeout=180.0) == [0, MICROBATCHES]


def test_every_action_is_in_the_timeline_in_its_order() -> None:
    schedule = schedules.build("zb-h2", ranks=2, microbatches=MICROBATCHES)
    for rank, steps in enumerate(run_ranks(timelines, 2, "zb-h2", 2, timeout=60.0)):
        for spans in steps:
            assert tuple(span.action for span in spans if span.action.op.is_compute) == schedule.actions[rank]
            assert all(span.start <= span.end for span in spans)
            assert list(spans) == sorted(spans, key=lambda span: span.start)


def hold_the_last_action_until_the_next_step_has_begun(steps: int) -> int:
    """The last rank ends no step before the first rank is in the next one's first forward; how often it was held."""
    engine = wide_engine("zb-h2", post_validation=True)
    executor = engine._executor
    forward, weights = executor._acts[Op.F], executor._acts[Op.W]
    last = engine.plan.schedule.actions[engine.place.pp][-1]
    assert last.op is Op.W
    count = 0

    def begun(stage: int, microbatch: int) -> None:
        if engine.place.pp == 0:
            say(f"step {executor._step_number}")
        forward(stage, microbatch)

    def held(stage: int, microbatch: int) -> None:
        nonlocal count
        if engine.place.pp == 1 and microbatch == last.microbatch and executor._step_number + 1 < steps:
            wait_for(f"step {executor._step_number + 1}")
            count += 1
        weights(stage, microbatch)

    executor._acts = {**executor._acts, Op.F: begun, Op.W: held}
    batches = [wide_batch() for _ in range(steps)]
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        engine.submit(batch, following)
    engine.settle()
    engine.close()
    return count


def test_a_post_validated_step_begins_before_the_one_before_has_ended() -> None:
    """The first rank's next forwards run while the last rank still works: no barrier between steps."""
    assert run_ranks(hold_the_last_action_until_the_next_step_has_begun, 2, 5, timeout=180.0) == [0, 4]
