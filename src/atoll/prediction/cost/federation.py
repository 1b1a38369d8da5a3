"""Prediction of islands that train one model together: when they arrive, what each waits for, and whose tokens count.

Each island has a plan on a cluster of its own. They have fragments and outer optimizer in common; steps, batch and
`every` may differ. An interval is the time between two outer gradients of a unit: `every` steps of each island, which
should take equally long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from atoll.base.errors import ConfigError
from atoll.plans.layouts import Codec
from atoll.plans.outer import Outer
from atoll.prediction.cost.apart import AnchorBytes, IslandParts
from atoll.prediction.cost.prediction import Prediction
from atoll.prediction.cost.rounds import IslandSpeeds, PacedIsland, PlayedRounds, ReturnCost, play_rounds

ALL_WAIT = 0.05
"""Share of an interval for which every island waits from which on uplinks bound it, not an island's steps."""

_FACTORS = (0.5, 2.0, 4.0, 8.0)
_CODECS = (None, "int8", "int4", "int2")


class IslandRow(NamedTuple):
    """An island in a federation.

    devices: their number.  step: seconds of a step without outer ones.  every: steps of an interval.
    batch: samples of a step.  interval: seconds of these steps with what outer steps add; waited: of these for rounds.
    tokens: of an interval.  share: of the tokens of all islands in the same time.
    sent: bytes on its uplink in an interval, in each direction.  busy: share of the time; None if it is unknown.
    peak, margin: bytes of the fullest rank, and those that it leaves free.
    held: in the host memory of the rank that has most there.  returns: what it takes over after it was away.
    """

    name: str
    devices: int
    step: float
    every: int
    batch: int
    interval: float
    waited: float
    tokens: int
    share: float
    sent: float
    busy: float | None
    peak: int
    margin: int
    held: AnchorBytes
    returns: ReturnCost


class Bound(NamedTuple):
    """What an interval waits for: the steps of an island, or its uplink."""

    island: str
    is_uplink: bool


class OuterAlternative(NamedTuple):
    """The same islands with another setting of `parallel.outer`, which changes the results of a run.

    interval: seconds.  rate: tokens a second of all islands.  waited: share of the time for which islands wait, by
    tokens.  sent: bytes of all uplinks a second, in each direction.  late: as in `FederatedPrediction`.
    """

    setting: str
    interval: float
    rate: float
    waited: float
    sent: float
    late: tuple[str, ...] = ()


@dataclass(frozen=True)
class FederatedPrediction:
    """Islands by name, each with its plan on its own cluster.

    pace: bytes a second at which an island that returns takes over anchors, at most.

    Raises ConfigError if they cannot train together.
    """

    predictions: Mapping[str, Prediction]
    pace: float | None = None

    def __post_init__(self) -> None:
        common = {name: _common(each) for name, each in self.predictions.items()}
        first, *others = common
        for name in others:
            for what, value in common[first].items():
                if common[name][what] != value:
                    raise ConfigError(
                        f"islands {first!r} and {name!r} differ in {what}, and exchange outer gradients of one model: "
                        f"{value} and {common[name][what]}"
                    )
        islands = {each.plan.outer.apart.islands for each in self.predictions.values()}  # type: ignore[union-attr]
        if islands != {len(self.predictions)}:
            raise ConfigError(f"the plans are of {max(islands)} islands, and there are {len(self.predictions)}")

    # ---- seconds

    @cached_property
    def islands(self) -> Mapping[str, PacedIsland]:
        """The islands and their paces."""
        return {
            name: PacedIsland(
                IslandParts.of(each.ranks, _outer_of(each)),
                IslandSpeeds.of(each.given, each.plan.mesh),
                each.played.seconds,
            )
            for name, each in self.predictions.items()
        }

    @cached_property
    def played(self) -> Mapping[str, PlayedRounds]:
        """Simulation of some intervals of all islands."""
        return dict(zip(self.islands, play_rounds([*self.islands.values()]), strict=True))

    @property
    def seconds(self) -> float:
        """An interval of the islands that rounds wait for."""
        return max(each.seconds for each in self.played.values() if not each.is_late)

    @property
    def tokens_a_second(self) -> float:
        """Tokens per second of all islands together."""
        return sum(self._tokens(name) / each.seconds for name, each in self.played.items())

    @cached_property
    def rows(self) -> tuple[IslandRow, ...]:
        """The islands."""
        slowest = min((each.speeds.uplink.rate for each in self.islands.values() if each.speeds.uplink), default=0.0)
        return tuple(self._row(name, slowest) for name in self.predictions)

    def _row(self, name: str, slowest: float) -> IslandRow:
        prediction, island, played = self.predictions[name], self.islands[name], self.played[name]
        ranks, link = range(prediction.plan.mesh.pipeline), island.speeds.uplink
        held = (island.parts.held(rank) for rank in ranks)
        return IslandRow(
            name=name,
            devices=prediction.plan.mesh.world,
            step=island.step,
            every=island.outer.every,
            batch=prediction.plan.global_batch,
            interval=played.seconds,
            waited=played.waited,
            tokens=self._tokens(name),
            share=self._tokens(name) / played.seconds / self.tokens_a_second,
            sent=island.carried,
            busy=None if link is None else link.seconds(island.carried) / played.seconds,
            peak=max(prediction.peak(rank).total for rank in ranks),
            margin=min(map(prediction.margin, ranks)),
            held=max(held, key=lambda each: each.total),
            returns=island.returns(interval=self.seconds, pace=self.pace, slowest=slowest),
        )

    def _tokens(self, name: str) -> int:
        own = self.predictions[name]
        return self.islands[name].outer.every * own.plan.global_batch * own.use.sequence

    @property
    def bound(self) -> Bound:
        """What an interval waits for."""
        in_time = [name for name, each in self.played.items() if not each.is_late]
        least = min(in_time, key=lambda name: (self.played[name].waited, -self.islands[name].own))
        busy = [(row.busy, row.name) for row in self.rows if row.busy is not None]
        if busy and self.played[least].waited > ALL_WAIT * self.seconds:
            return Bound(max(busy)[1], is_uplink=True)
        return Bound(least, is_uplink=False)

    @property
    def late(self) -> tuple[str, ...]:
        """Islands that rounds leave behind, see [Note: who is late] in `atoll.prediction.cost.rounds`."""
        return tuple(name for name, each in self.played.items() if each.is_late)

    @property
    def is_overdue(self) -> bool:
        """True if an island waits for a round for `grace` seconds, and follows it later."""
        return any(each.is_overdue for each in self.played.values())

    @property
    def fits(self) -> bool:
        """True if every island's plan fits."""
        return all(each.fits for each in self.predictions.values())

    # ---- other settings

    def alternatives(self) -> Iterator[OuterAlternative]:
        """Yield the present setting, other numbers of steps, each a multiple of an island's own, a delay of half of
        them, and other codecs."""
        now = {name: each.outer for name, each in self.islands.items()}
        yield self._with("as it is", now)
        for factor in _FACTORS:
            scaled = {name: paced(outer, factor * outer.every) for name, outer in now.items()}
            if scaled != now:
                every = ", ".join(dict.fromkeys(str(outer.every) for outer in scaled.values()))
                yield self._with(f"every = {every}", scaled)
        overlapped = {name: replace(outer, delay=outer.every // 2) for name, outer in now.items()}
        if all(overlapped[name].delay > outer.delay for name, outer in now.items()):
            delays = ", ".join(dict.fromkeys(str(outer.delay) for outer in overlapped.values()))
            yield self._with(f"delay = {delays}", overlapped)
        own = next(iter(now.values())).codec
        for name_of in _CODECS:
            if name_of != (None if own is None else own.name):
                codec = None if name_of is None else replace(own or Codec(name_of), name=name_of)
                coded = {name: replace(outer, codec=codec) for name, outer in now.items()}
                yield self._with(f"codec = {name_of or 'none'}", coded)

    def _with(self, setting: str, outer: Mapping[str, Outer]) -> OuterAlternative:
        islands = {
            name: replace(each, parts=replace(each.parts, outer=outer[name])) for name, each in self.islands.items()
        }
        played = dict(zip(islands, play_rounds([*islands.values()]), strict=True))
        of_step = {name: self._tokens(name) / self.islands[name].outer.every for name in islands}
        rates = {name: islands[name].outer.every * of_step[name] / each.seconds for name, each in played.items()}
        waited = sum(rates[name] * each.waited / each.seconds for name, each in played.items()) / sum(rates.values())
        sent = sum(islands[name].carried / each.seconds for name, each in played.items())
        seconds = max(each.seconds for each in played.values() if not each.is_late)
        late = tuple(name for name, each in played.items() if each.is_late)
        return OuterAlternative(setting, seconds, sum(rates.values()), waited, sent, late)


def paced(outer: Outer, every: float) -> Outer:
    """Return outer steps with another number of steps, as far as the fragments allow it, and a delay in proportion."""
    least = max(1, outer.fragments, 2 if outer.delay else 1)
    steps = max(least, math.floor(every + 1e-9))
    delay = min(steps - 1, max(1, round(outer.delay * steps / outer.every))) if outer.delay else 0
    # A mix that follows from the delay stays, since that has not become zero.
    return replace(outer, every=steps, delay=delay)


def _outer_of(prediction: Prediction) -> Outer:
    outer = prediction.plan.outer
    if outer is None or outer.apart is None:
        raise ConfigError(
            "islands that are worlds of their own exchange outer gradients, and the plan has none; set "
            "parallel.outer.every"
        )
    return outer


def _common(prediction: Prediction) -> dict[str, object]:
    """Return what all islands must have in common."""
    outer, shape = _outer_of(prediction), prediction.ranks.shape
    return {
        "the model": (prediction.workload.name, prediction.workload.parameters),
        "the units of the model (parallel.unit, vocabulary, expert and expert_layout)": [
            (unit.blocks, unit.is_shared, unit.view.value) for unit in shape.units
        ],
        "parallel.outer": replace(outer, every=max(1, outer.fragments), delay=0, mix=outer.own_share),
        "the dtype of masters": prediction.plan.precision.master,
    }
