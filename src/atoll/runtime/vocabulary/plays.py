"""The calls that execute the instructions of a split vocabulary, and those of the core at the two ends of the pipeline.

stage 0      RECV_F  takes the looked-up rows of all slices     SEND_B  gives all of them their gradient
last stage   FINISH_F, SEND_F  give the scores' input to all    RECV_B  takes the loss and its gradient, or logits
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from atoll.base.faults import NonFinite
from atoll.program import Do, Instruction, Sliced
from atoll.runtime.plays import INSTEAD, PLAYS, Instead, Play
from atoll.runtime.vocabulary.split import SplitVocabulary

if TYPE_CHECKING:
    from atoll.runtime.pipeline.executor import Executor
    from atoll.runtime.pipeline.microbatches import Microbatches


def _split_of(on: Executor) -> SplitVocabulary | None:
    return next((each for each in on.extensions if isinstance(each, SplitVocabulary)), None)


def _of(act: Callable[[SplitVocabulary, int, int], None]) -> Play:
    def play(on: Executor, step: Instruction) -> Callable[[], None]:
        split = _split_of(on)
        assert split is not None, "these instructions are of a split vocabulary"
        return partial(act, split, step.action.stage, step.action.microbatch or 0)

    return play


def _learn_score(on: Executor, step: Instruction) -> Callable[[], None]:
    split, microbatch, microbatches = _split_of(on), step.action.microbatch or 0, on.microbatches
    assert split is not None, "these instructions are of a split vocabulary"
    return lambda: split.learn_score(microbatch, microbatches.state.scale)


PLAYS.update(
    {
        Sliced.L: _of(SplitVocabulary.look_up),
        Sliced.S: _of(SplitVocabulary.score),
        Sliced.T: _learn_score,
        Sliced.G: _of(SplitVocabulary.learn_look_up),
        Sliced.SEND_L: _of(SplitVocabulary.send_looked_up),
        Sliced.SEND_S: _of(SplitVocabulary.send_scores),
        Sliced.RECV_S: _of(SplitVocabulary.receive_scored),
        Sliced.SEND_T: _of(SplitVocabulary.send_totals),
        Sliced.RECV_T: _of(SplitVocabulary.receive_totals),
        Sliced.RECV_G: _of(SplitVocabulary.receive_gradient),
    }
)

# ---- instructions of the core at the ends of the pipeline

AtEnd = Callable[[SplitVocabulary, "Microbatches", int], None]
"""What an end does instead: (vocabulary, microbatches of the rank, microbatch)."""


def _at_end(act: AtEnd, *, first: bool) -> Instead:
    """Return what to do instead of the core, on the first stage or on the last one."""

    def instead(on: Executor, step: Instruction) -> Callable[[], None] | None:
        split = _split_of(on)
        if split is None or step.action.stage != (0 if first else split.last_stage):
            return None
        return partial(act, split, on.microbatches, step.action.microbatch or 0)

    return instead


def _receive_looked_up(split: SplitVocabulary, on: Microbatches, microbatch: int) -> None:
    on.state.inputs[0, microbatch] = split.receive_looked_up(microbatch)


def _send_look_ups_gradient(split: SplitVocabulary, on: Microbatches, microbatch: int) -> None:
    gradient = on.state.gradients.pop((-1, microbatch), None)
    if gradient is not None:  # the embedding is trained
        split.send_gradient(microbatch, gradient)


def _keep_scored(split: SplitVocabulary, on: Microbatches, microbatch: int) -> None:
    # No loss yet: all ranks score the output by their slices, and RECV_B brings the loss and the gradient.
    output = on.take_output(split.last_stage, microbatch)
    split.take_scored(microbatch, output)
    on.state.outputs[split.last_stage, microbatch] = output


def _send_scored(split: SplitVocabulary, on: Microbatches, microbatch: int) -> None:
    key = split.last_stage, microbatch
    split.send_scored(microbatch, on.state.outputs[key])
    if not on.state.is_training:  # the outbox holds what it sends
        del on.state.outputs[key]


def _receive_scores(split: SplitVocabulary, on: Microbatches, microbatch: int) -> None:
    """Receive the loss and the gradient from which the last stage's backward begins; or the logits."""
    state, key = on.state, (split.last_stage, microbatch)
    found, gradient = split.receive_scores(microbatch)
    if state.keeps_logits:
        state.logits.append(found)
    else:
        state.losses[microbatch] = found
        on.look(NonFinite.LOSS, [found], on.stages[split.last_stage].run.stop - 1, microbatch=microbatch)
    if state.is_training and gradient is not None:
        state.gradients[key] = gradient.mul_(state.scale).to(state.outputs[key].dtype)


for _do, _instead in {
    Do.RECV_F: _at_end(_receive_looked_up, first=True),
    Do.SEND_B: _at_end(_send_look_ups_gradient, first=True),
    Do.FINISH_F: _at_end(_keep_scored, first=False),
    Do.SEND_F: _at_end(_send_scored, first=False),
    Do.RECV_B: _at_end(_receive_scores, first=False),
}.items():
    INSTEAD.setdefault(_do, []).append(_instead)
