"""The loss of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Sums over the evaluated samples of all ranks.

    tokens: labels that count, or samples of a batch without labels.  counted: the count of the loss, `tokens` unless
    the loss returns another one.
    """

    loss_sum: float
    tokens: int
    counted: float

    @property
    def loss(self) -> float:
        """Mean loss; 0 if the count is 0."""
        return self.loss_sum / self.counted if self.counted else 0.0

    def __add__(self, other: Evaluation) -> Evaluation:
        """Return the sum of both evaluations."""
        return Evaluation(self.loss_sum + other.loss_sum, self.tokens + other.tokens, self.counted + other.counted)
