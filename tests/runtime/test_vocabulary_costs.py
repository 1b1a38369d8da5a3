"""What slices of a vocabulary send and keep is what `atoll.prediction.cost` says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Prediction, Use
from atoll.runtime.engine import Engine
from atoll.runtime.models import Decoder, DecoderConfig, transformer_of
from atoll.runtime.vocabulary.slice import Scores, VocabularySlice
from atoll.testing import run_ranks

SIZES = DecoderConfig(vocabulary=64, layers=4, hidden=32, heads=4, kv_heads=4, ffn=48)
SEQUENCE = 32


@dataclass(frozen=True)
class Case:
    schedule: str
    precision: str
    mesh: MeshShape

    @property
    def plan(self) -> Plan:
        schedule = schedules.build(self.schedule, ranks=self.mesh.pipeline, microbatches=8)
        precision = Precision.preset(self.precision)
        return Plan(self.mesh, Layout("NNN"), schedule, 2, precision=precision, vocabulary_parallel=True)


def sent_and_kept(case: Case) -> tuple[int, int, int]:
    """Bytes of a step's messages between pipeline ranks, of what a slice keeps of a microbatch, and of its answer."""
    plan = case.plan
    with torch.device("meta"):
        model = Decoder(SIZES)
    engine = Engine(model, plan, optimizer=torch.optim.SGD)
    ids = torch.arange(plan.global_batch * SEQUENCE).reshape(-1, SEQUENCE) % SIZES.vocabulary
    kept: list[tuple[int, int]] = []
    score = VocabularySlice.score

    def watched(self: VocabularySlice, microbatch: int, *args: Any, **kwargs: Any) -> Scores:
        found = score(self, microbatch, *args, **kwargs)
        own = self._kept[microbatch]
        assert found.answer is not None
        tensors = (own.hidden, own.softmax, own.sums)
        kept.append((sum(each.nbytes for each in tensors), found.answer.nbytes + found.sums.nbytes))
        return found

    engine.step({"input_ids": ids, "labels": ids.roll(-1, dims=-1)})
    before = Counter(engine.transport.sent)
    VocabularySlice.score = watched  # type: ignore[method-assign]
    try:
        engine.step({"input_ids": ids, "labels": ids.roll(-1, dims=-1)})
    finally:
        VocabularySlice.score = score  # type: ignore[method-assign]
    sent = Counter(engine.transport.sent)["pp"] - before["pp"]
    engine.close()
    assert len(set(kept)) == 1, "labels are spread evenly"
    return (sent, *kept[0])


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", "fp32", MeshShape(4)),
        Case("zb-v", "bf16", MeshShape(2)),
        Case("interleaved", "fp64", MeshShape(2)),
        Case("1f1b", "fp32", MeshShape(2, tensor=2)),
    ],
    ids=str,
)
def test_slices_send_and_keep_what_is_predicted(case: Case) -> None:
    plan = case.plan
    use = Use(samples=2, sequence=SEQUENCE, compute=plan.precision.compute, tensor=plan.mesh.tensor)
    predicted = Prediction(transformer_of(SIZES).workload, plan, None, use)
    _, head = predicted.ranks.slices.works
    message = predicted.ranks.works[0].wire
    seen = run_ranks(sent_and_kept, plan.mesh.world, case)
    for rank, program in enumerate(predicted.ranks.programs.ranks):
        messages = predicted.ranks.slices.sent(rank)
        sends = [each for each in program.instructions if each.do.sends]
        wanted = sum(messages.get((each.do, each.action.stage), message) for each in sends)
        sent, kept, answer = seen[rank * plan.mesh.tensor]
        assert kept == head.kept
        assert answer == head.wire
        assert sent == wanted


def spare_buffers() -> list[int]:
    """Bytes of received buffers that are kept for later messages, after each of some steps with other labels."""
    plan = Case("1f1b", "fp32", MeshShape(2)).plan
    with torch.device("meta"):
        model = Decoder(SIZES)
    engine = Engine(model, plan, optimizer=torch.optim.SGD)
    found = []
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(SIZES.vocabulary, (plan.global_batch, SEQUENCE), generator=generator)
        engine.step({"input_ids": ids, "labels": ids.roll(-1, dims=-1)})
        found.append(sum(each.nbytes for own in engine._executor._mail._free.values() for each in own))
    engine.close()
    return found


def test_what_is_received_does_not_pile_up() -> None:
    """Answers are as long as a microbatch has labels in the slice. Buffers of every length used to be kept."""
    for after in run_ranks(spare_buffers, 2):
        assert after[-1] == after[1] > 0
