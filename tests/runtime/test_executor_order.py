"""What leaves a rank before what. One rank is held until another has come so far: in another order, neither goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atoll.plans import schedules
from atoll.plans.ir import Action, Op
from atoll.plans.layouts import Layout
from atoll.plans.plan import MeshShape, Plan
from atoll.program import OPERATIONS, Do, Ending
from atoll.program.trace import Span
from atoll.runtime.engine import Engine
from atoll.runtime.failure import Doing
from atoll.runtime.models import Adapter
from atoll.runtime.models.adapter import SequentialAdapter
from atoll.runtime.pipeline.executor import Executor
from atoll.runtime.transport import world_store
from atoll.testing import run_ranks

MICROBATCHES = 4
WIDTH = 8
ROWS = 8
PATIENCE = timedelta(days=1)
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
        found.append(engine.timing.trace().spans)
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


def before(executor: Executor, do: Do, act: Callable[[Action], None]) -> None:
    """Call `act` before each instruction of a training step that does this."""
    around(executor, do, lambda action, call: (act(action), call()))


def after(executor: Executor, do: Do, act: Callable[[Action], None]) -> None:
    """Call it after each."""
    around(executor, do, lambda action, call: (call(), act(action)))


def around(executor: Executor, do: Do, act: Callable[[Action, Callable[[], None]], object]) -> None:
    for end in Ending:
        score = executor._score_of(MICROBATCHES, end)
        calls = tuple(
            partial(act, each.action, call) if each.do is do else call
            for each, call in zip(score.program.instructions, score.calls, strict=True)
        )
        executor._scores[MICROBATCHES, end] = replace(score, calls=calls)  # type: ignore[arg-type]


def hold_weights_until_the_gradient_has_arrived() -> int:
    """In a step of 1F1B the last rank computes no weight's gradient before the other one has what it owes; how often it
    was held."""
    engine = wide_engine("1f1b")
    executor = engine._executor
    count = 0
    if engine.place.pp == 0:
        after(executor, Do.RECV_B, lambda action: say(f"received {action.microbatch}"))
    else:
        held: set[int] = set()

        def hold(action: Action) -> None:
            nonlocal count
            if action.microbatch not in held:
                held.add(action.microbatch or 0)
                wait_for(f"received {action.microbatch}")
                count += 1

        before(executor, Do.W, hold)
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
    last = engine.plan.schedule.actions[engine.place.pp][-1]
    assert last.op is Op.W
    count = 0

    def begun(action: Action) -> None:
        if engine.place.pp == 0:
            say(f"step {executor.counter.step}")

    def hold(action: Action) -> None:
        nonlocal count
        if engine.place.pp == 1 and action.microbatch == last.microbatch and executor.counter.step + 1 < steps:
            wait_for(f"step {executor.counter.step + 1}")
            count += 1

    before(executor, Do.F, begun)
    before(executor, Do.FINISH_W, hold)
    batches = [wide_batch() for _ in range(steps)]
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        engine.submit(batch, following)
    engine.settle()
    engine.close()
    return count


def test_a_post_validated_step_begins_before_the_one_before_has_ended() -> None:
    """The first rank's next forwards run while the last rank still works: no barrier between steps."""
    assert run_ranks(hold_the_last_action_until_the_next_step_has_begun, 2, 5, timeout=180.0) == [0, 4]


def positions() -> list[list[Doing | None]]:
    """What a rank says that it is doing, before each instruction of two steps and an evaluation, and after them."""
    engine = wide_engine("zb-h1")
    executor = engine._executor
    found: list[list[Doing | None]] = []
    executor.before = dict.fromkeys(OPERATIONS.values(), lambda: found[-1].append(executor.doing()))
    for run in (engine.step, engine.step, engine.evaluate):
        found.append([])
        run(wide_batch())
    found.append([executor.doing()])
    engine.close()
    return found


def test_a_rank_that_gets_on_says_so() -> None:
    """Marks rise through a program and from step to step, so the rank that is behind is the one with the lowest."""
    for first, second, evaluation, after in run_ranks(positions, 2, timeout=60.0):
        assert after == [None]
        steps = [each for each in (*first, *second) if each is not None]
        assert len(steps) == len(first) + len(second)
        marks = [each.mark for each in steps]
        assert marks == sorted(set(marks))
        assert {each.program for each in steps} == {steps[0].program} != {0}
        assert all(each.what.startswith("step 1, ") for each in steps[: len(first)])
        assert all(each.what.startswith("step 2, ") for each in steps[len(first) :])
        others = [each for each in evaluation if each is not None]
        marks = [each.mark for each in others]
        assert marks == sorted(set(marks))
        assert not any(each.what.startswith("step") or each.program == steps[0].program for each in others)
