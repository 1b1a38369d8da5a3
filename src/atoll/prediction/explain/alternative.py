"""A plan compared with the same plan with one choice changed: the difference by cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from atoll.base.errors import UserError
from atoll.plans.plan import Plan
from atoll.prediction.cost import Cluster, Held, Prediction, Use
from atoll.prediction.cost.breakdown import PARTS, mean

COMPUTED = ("forward", "backward", "weights")
"""Fields of `Breakdown` in which a rank computes for its microbatches."""


EQUAL = 1e-3
"""Relative difference of two steps below which they are called equally long."""


def fullest_rank(prediction: Prediction) -> int:
    """Return the pipeline rank with the highest peak, or of devices of several sizes the one with the least room."""
    ranks = range(prediction.plan.mesh.pipeline)
    if prediction.cluster is not None and prediction.cluster.groups:
        return min(ranks, key=prediction.margin)
    return max(ranks, key=lambda rank: prediction.peak(rank).total)


def fullest(prediction: Prediction) -> Held:
    """Return the memory at the highest peak of any pipeline rank."""
    return prediction.peak(fullest_rank(prediction))


def use_of(plan: Plan, use: Use) -> Use:
    """Return the use of the model under another plan, with the same sequences, attention and loss."""
    return replace(
        use,
        samples=plan.microbatch,
        divide=plan.mesh.sequence,
        tensor=plan.mesh.tensor,
        expert=plan.mesh.expert,
        imbalance=plan.imbalance,
        sequence_parallel=plan.sequence_parallel,
        compute=plan.precision.compute,
        recompute=plan.recompute,
        chunks=plan.loss_chunks if use.loss == "eager" else use.chunks,
        products=plan.precision.products,
    )


def predicted(base: Prediction, plan: Plan, cluster: Cluster | None = None) -> Prediction:
    """Return the prediction of another plan of the same model, on the same cluster by default."""
    return Prediction(base.workload, plan, cluster or base.given, use_of(plan, base.use), base.reads_in_place)


@dataclass(frozen=True)
class Alternative:
    """The effect of a change on a plan.

    choice, value: the changed choice and its new value.  was: its value in the plan.
    prediction: of the changed plan; None if there is none, for the reason in `refusal`.
    """

    base: Prediction
    choice: str
    value: str
    was: str
    prediction: Prediction | None
    refusal: str = ""

    @property
    def name(self) -> str:
        """Choice and value, as in "layout GGG"."""
        return f"{self.choice} {self.value}"

    @property
    def found(self) -> Prediction:
        """The prediction. Raises ValueError if there is none."""
        if self.prediction is None:
            raise ValueError(f"{self.name} has no prediction: {self.refusal}")
        return self.prediction

    @property
    def seconds(self) -> float:
        """Difference of the step's seconds; negative if the alternative is faster."""
        return self.found.seconds - self.base.seconds

    @property
    def speed(self) -> float:
        """Tokens per second, as a multiple of the plan's."""
        return self.found.tokens_a_second / self.base.tokens_a_second

    @cached_property
    def parts(self) -> Mapping[str, float]:
        """Seconds of a step more than the plan's by the fields of `Breakdown`, means over the pipeline ranks. They add
        up to `seconds` in the steady state."""
        before, after = mean(self.base.breakdown), mean(self.found.breakdown)
        return {name: getattr(after, name) - getattr(before, name) for name in before._fields}

    @property
    def causes(self) -> Mapping[str, float]:
        """The same, with compute as one cause: without a pipeline, I also computes the weights' gradients."""
        computed = {part: self.parts[part] for part in COMPUTED}
        return {"computation": sum(computed.values())} | {
            PARTS[part]: seconds for part, seconds in self.parts.items() if part not in computed
        }

    @property
    def cause(self) -> str:
        """The cause with the largest change in the direction of the total."""
        sign = 1.0 if self.seconds >= 0 else -1.0
        return max(self.causes, key=lambda name: sign * self.causes[name])

    @cached_property
    def components(self) -> Mapping[str, int]:
        """Bytes of the fullest rank more than the plan's, by the fields of `Held`. They add up to `nbytes`."""
        before, after = fullest(self.base), fullest(self.found)
        return {name: getattr(after, name) - getattr(before, name) for name in before._fields}

    @property
    def nbytes(self) -> int:
        """Bytes of the fullest rank at its peak more than the plan's."""
        return sum(self.components.values())

    @property
    def byte_cause(self) -> str:
        """The field of `Held` with the largest change in the direction of the total."""
        sign = 1 if self.nbytes >= 0 else -1
        return max(self.components, key=lambda name: sign * self.components[name])

    @property
    def margin(self) -> int:
        """Free bytes of the fullest rank; negative if it does not fit."""
        return min(map(self.found.margin, range(self.found.plan.mesh.pipeline)))

    @property
    def fits(self) -> bool:
        """True if it is possible and every rank's peak fits into the device's memory."""
        return self.prediction is not None and self.found.fits

    @property
    def is_as_long(self) -> bool:
        """True if its step is as long as the plan's."""
        return abs(self.seconds) < EQUAL * self.base.seconds

    @property
    def is_better(self) -> bool:
        """True if it fits and has a higher token rate, by `EQUAL` at least."""
        return self.fits and self.speed >= 1.0 + EQUAL


def attempt(base: Prediction, choice: str, value: str, was: str, prediction: Prediction | None) -> Alternative:
    """Return an alternative with its simulated prediction or, if it is refused, its refusal."""
    try:
        if prediction is not None:
            prediction.seconds  # noqa: B018  (what cannot be predicted raises when it is played)
            prediction.fits  # noqa: B018
    except UserError as error:
        return Alternative(base, choice, value, was, None, str(error))
    return Alternative(base, choice, value, was, prediction)
