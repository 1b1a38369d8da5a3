"""The calls that execute the instructions of a split vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from atoll.program import Instruction, Sliced
from atoll.runtime.plays import PLAYS, Play
from atoll.runtime.vocabulary.split import SplitVocabulary

if TYPE_CHECKING:
    from atoll.runtime.pipeline.executor import Executor


def _of(act: Callable[[SplitVocabulary, int, int], None]) -> Play:
    def play(on: Executor, step: Instruction) -> Callable[[], None]:
        assert on.vocabulary is not None, "these instructions are of a split vocabulary"
        return partial(act, on.vocabulary, step.action.stage, step.action.microbatch or 0)

    return play


def _learn_score(on: Executor, step: Instruction) -> Callable[[], None]:
    split, microbatch = on.vocabulary, step.action.microbatch or 0
    assert split is not None, "these instructions are of a split vocabulary"
    return lambda: split.learn_score(microbatch, on.scale)


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
