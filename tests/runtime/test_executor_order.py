"""What leaves a rank before what: read from the timelines of ranks of one host, which share a clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atoll import schedules
from atoll.ir import Action, Op
from atoll.layouts import Layout
from atoll.models import Adapter
from atoll.models.adapter import SequentialAdapter
from atoll.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.testing import run_ranks
from atoll.trace import Span

MICROBATCHES = 4
WIDTH = 512
ROWS = 512
"""Wide enough that a weight's gradient takes some milliseconds."""


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


def span_of(spans: tuple[Span, ...], action: Action) -> Span:
    return next(span for span in spans if span.action == action)


def test_the_input_gradient_leaves_before_the_weights_are_computed() -> None:
    """A full backward of the last rank is still at its weights when the rank before has received."""
    first, last = (steps[-1] for steps in run_ranks(timelines, 2, "1f1b", 2, timeout=60.0))
    ahead = [
        span_of(first, Action(0, Op.RECV_B, at)).end < span_of(last, Action(1, Op.B, at)).end
        for at in range(MICROBATCHES)
    ]
    assert any(ahead)


def test_every_action_is_in_the_timeline_in_its_order() -> None:
    schedule = schedules.build("zb-h2", ranks=2, microbatches=MICROBATCHES)
    for rank, steps in enumerate(run_ranks(timelines, 2, "zb-h2", 2, timeout=60.0)):
        for spans in steps:
            assert tuple(span.action for span in spans if span.action.op.is_compute) == schedule.actions[rank]
            assert all(span.start <= span.end for span in spans)
            assert list(spans) == sorted(spans, key=lambda span: span.start)


def test_a_post_validated_step_begins_before_the_one_before_has_ended() -> None:
    """The first rank's next forwards run while the last rank still works: no barrier between steps."""
    first, last = run_ranks(timelines, 2, "zb-h2", 8, post_validation=True, timeout=60.0)
    overlaps = []
    for before, after in zip(last, first[1:], strict=False):
        ends = max(span.end for span in before if span.action.op.is_compute)
        overlaps.append(min(span.start for span in after if span.action.op is Op.F) < ends)
    assert any(overlaps)
