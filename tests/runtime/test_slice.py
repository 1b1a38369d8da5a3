"""Slices of a vocabulary against the whole one, in one process: losses, logits and every gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.plans.layouts.flat import Box
from atoll.runtime.models import Vocabulary
from atoll.runtime.sharding.gradient_buffer import GradientBuffer
from atoll.runtime.vocabulary.slice import VocabularySlice, VocabularyTable

SIZE, WIDTH, PADDING = 13, 5, 2
IGNORED = -100
SCALE = 8.0
"""Of the loss, before its backward."""


@dataclass
class Rows:
    """The unit of an end's rows on one rank: parameters and their gradients."""

    parameters: dict[str, nn.Parameter]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)

    @property
    def trainable(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters.values())

    def gradient_buffer(self, name: str, phase: str) -> GradientBuffer:
        assert phase == "W"
        is_empty = name not in self.gradients
        if is_empty:
            self.gradients[name] = torch.full_like(self.parameters[name], torch.nan)
        return GradientBuffer(self.gradients[name], is_empty)


def rows_of(box: Box, **named: Tensor | None) -> Any:
    own = slice(box.offsets[0], box.offsets[0] + box.sizes[0])
    return Rows({name: nn.Parameter(each.detach()[own]) for name, each in named.items() if each is not None})


@dataclass(frozen=True)
class Ends:
    """A model that is an embedding and a head."""

    tied: bool = False
    bias: bool = False
    scale: float = 1.0
    cap: float | None = None

    def modules(self) -> tuple[nn.Embedding, nn.Linear]:
        torch.manual_seed(3)
        embedding = nn.Embedding(SIZE, WIDTH, padding_idx=PADDING, dtype=torch.float64)
        head = nn.Linear(WIDTH, SIZE, bias=self.bias, dtype=torch.float64)
        if self.tied:
            head.weight = embedding.weight
        return embedding, head

    def logits(self, head: nn.Linear, hidden: Tensor) -> Tensor:
        logits: Tensor = head(hidden) * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def slices(self, ranks: int) -> list[VocabularySlice]:
        embedding, head = self.modules()
        vocabulary = Vocabulary("embedding", "head", scale=self.scale, cap=self.cap)
        found = []
        for rank in range(ranks):
            box = Box.part((SIZE,), 0, rank, count=ranks)
            rows = rows_of(box, head=head.weight, bias=head.bias)
            scored = VocabularyTable(rows, "head", "bias" if self.bias else None)
            looked_up = VocabularyTable(rows_of(box, embedding=embedding.weight), "embedding", None)
            if self.tied:
                looked_up = VocabularyTable(rows, "head", None)
            sizes: dict[str, Any] = {"index": rank, "ranks": ranks, "tensor": None, "size": SIZE, "padding": PADDING}
            found.append(VocabularySlice(vocabulary, looked_up, scored, **sizes))
        return found


ENDS = [
    Ends(),
    Ends(tied=True),
    Ends(bias=True),
    Ends(bias=True, scale=0.5),
    Ends(cap=2.0),
    Ends(tied=True, scale=1.5, cap=0.7),
]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(SIZE, (2, 4), generator=generator)
    ids[0, 1] = PADDING
    labels = torch.randint(SIZE, (2, 4), generator=generator)
    labels[1, 2:] = IGNORED
    return ids, labels


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_slices_compute_what_the_whole_vocabulary_does(ends: Ends, ranks: int) -> None:
    """Two microbatches, scored before either is learnt."""
    embedding, head = ends.modules()
    slices = ends.slices(ranks)
    assert [row for each in slices for row in each.rows] == list(range(SIZE))
    for each in slices:
        each.begin()
    states = []
    for microbatch in range(2):
        ids, labels = batch(microbatch)
        hidden = embedding(ids)
        looked = sum(each.look_up(ids) for each in slices)
        assert torch.equal(slices[0].embedded(looked), hidden)  # type: ignore[arg-type]

        leaf = hidden.detach().clone().requires_grad_()
        logits = ends.logits(head, leaf)
        answers = [each.score(microbatch, leaf, labels, training=False, logits=True) for each in slices]
        assert torch.allclose(slices[0].logits(answers), logits.detach().flatten(0, 1), rtol=0, atol=1e-12)

        summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        (summed * SCALE).backward()
        wanted = float(summed.detach())
        hidden.backward(leaf.grad)
        scores = [each.score(microbatch, leaf, labels, training=True, logits=False) for each in slices]
        loss, totals, gradient = slices[0].combine(scores, labels)
        assert float(loss) == pytest.approx(wanted, abs=1e-12)
        assert gradient is not None
        assert leaf.grad is not None
        assert torch.allclose(gradient * SCALE, leaf.grad, rtol=0, atol=1e-12)
        states.append((ids, labels, totals, gradient * SCALE))

        alone = [each.score(microbatch + 2, leaf, labels, training=False, logits=False) for each in slices]
        assert float(slices[0].combine(alone, labels)[0]) == pytest.approx(wanted, abs=1e-12)
    for microbatch, (ids, labels, totals, gradient) in enumerate(states):
        for each in slices:
            each.learn_score(microbatch, labels, totals, SCALE)
            each.learn_look_up(ids, gradient)
    for each in slices:
        own = slice(each.rows.start, each.rows.stop)
        found: dict[str, Tensor] = {**each.embedding.unit.gradients, **each.head.unit.gradients}  # type: ignore[attr-defined]
        whole = {"head": head.weight, "bias": head.bias, "embedding": embedding.weight}
        assert found.keys() == {name for table in each.tables for name in table.unit.parameters}
        for name, value in found.items():
            assert torch.allclose(value, whole[name].grad[own], rtol=0, atol=1e-12), name  # type: ignore[index]
        assert all(table.unit.touched == table.unit.parameters.keys() for table in each.tables)
