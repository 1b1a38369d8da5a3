"""Explanation of a plan: its memory and time, its bottleneck, and its alternatives.

Predictions are made on first use, and only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

from atoll.base.errors import UserError
from atoll.plans.plan import Plan
from atoll.prediction.cost import Cluster, Device, Link, Prediction
from atoll.prediction.cost.breakdown import busiest_rank
from atoll.prediction.explain.alternative import Alternative, attempt, fullest_rank, predicted
from atoll.prediction.explain.choices import CHOICES, rebuilt
from atoll.prediction.explain.holdings import Holding, holding
from atoll.prediction.explain.host import HostCost, host_cost
from atoll.prediction.explain.links import DataTraffic, LinkUse, link_uses, travel

FASTER = 1.1
"""Factor by which a resource is made faster to find the bottleneck."""

NEARLY_FULL = 0.05
"""Share of a device's memory below which the fullest rank's free memory counts as little."""


_Make = Callable[[], Prediction]


class Measured(NamedTuple):
    """Measurements of a run.

    seconds: of a typical step.  parts: for each pipeline rank in the timed step, predicted and measured seconds by the
    fields of `Breakdown`.  peaks: bytes of each pipeline rank.  memory: kind of the peaks, "allocated" tensors or
    "resident" memory.
    """

    seconds: float
    parts: tuple[Mapping[str, tuple[float, float]], ...] = ()
    peaks: tuple[int, ...] = ()
    memory: str = ""


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource of the cluster. saved: seconds that a step would save if it were `FASTER` times as fast."""

    name: str
    saved: float


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """One of the effective layouts in place of the plan's. travel: None if the layout is refused."""

    alternative: Alternative
    travel: DataTraffic | None


@dataclass(frozen=True)
class Explanation:
    """Explanation of a predicted plan; the prediction needs a cluster. measured: by a run of that plan."""

    prediction: Prediction
    measured: Measured | None = None

    def __post_init__(self) -> None:
        self.prediction.given  # noqa: B018  (raises where there is no cluster)

    @property
    def plan(self) -> Plan:
        """The explained plan."""
        return self.prediction.plan

    # ---- bytes

    @cached_property
    def holdings(self) -> tuple[Holding, ...]:
        """Memory of each pipeline rank at its peak."""
        return tuple(holding(self.prediction, rank) for rank in range(self.plan.mesh.pipeline))

    @cached_property
    def fullest(self) -> Holding:
        """The holding of the rank with the highest peak."""
        return self.holdings[fullest_rank(self.prediction)]

    @property
    def emptiest(self) -> Holding:
        """The holding of the rank with the lowest peak."""
        return min(self.holdings, key=lambda each: each.held.total)

    # ---- seconds

    @property
    def busiest(self) -> int:
        """The pipeline rank that waits least."""
        return busiest_rank(self.prediction.breakdown)

    @property
    def most_computing(self) -> tuple[int, float]:
        """The pipeline rank that computes longest, and its seconds: a bound on the step of any order of the same
        stages. Tensor-parallel collectives count, since they are part of the computation."""
        parts = self.prediction.breakdown
        seconds = [own.forward + own.backward + own.weights + own.tensor + own.optimizer for own in parts]
        most = max(range(len(seconds)), key=seconds.__getitem__)
        return most, seconds[most]

    def links(self, rank: int) -> tuple[LinkUse, ...]:
        """Return the traffic of a pipeline rank in a step."""
        return link_uses(self.prediction, rank)

    @cached_property
    def host(self) -> HostCost | None:
        """What host memory costs and saves, where the plan uses it."""
        return None if self.plan.host is None else host_cost(self.prediction)

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """Device and links, the largest saving first."""
        now = self.prediction.seconds
        found = [Resource(name, max(0.0, now - self.prediction.on(faster).seconds)) for name, faster in self._faster()]
        return tuple(sorted(found, key=lambda each: -each.saved))

    def _faster(self) -> Iterator[tuple[str, Cluster]]:
        cluster = self.prediction.given
        yield "device", cluster.each(lambda kind: kind.model_copy(update={"device": _faster(kind.device)}))
        if cluster.node.link is not None and self.plan.mesh.world > 1:
            yield "node.link", cluster.with_links(partial(_scaled, times=FASTER))
        if cluster.network is not None and self.plan.mesh.world > cluster.node.devices:
            yield "network", cluster.with_network(partial(_scaled, times=FASTER))

    # ---- other plans

    @cached_property
    def _known(self) -> dict[tuple[str, str], Alternative]:
        return {}

    def alternative(self, choice: str, value: str) -> Alternative:
        """Return the plan with one choice changed. An impossible alternative has a refusal."""
        key = choice, value
        if key not in self._known:
            make = CHOICES[choice].make
            self._known[key] = self.attempt(choice, value, lambda: make(self.plan, value))
        return self._known[key]

    def attempt(self, choice: str, value: str, make: Callable[[], Plan]) -> Alternative:
        """Return the plan of `make`, under a name; if it raises UserError, its refusal."""
        return self._attempt(choice, value, lambda: predicted(self.prediction, make()))

    def _attempt(self, choice: str, value: str, make: _Make) -> Alternative:
        was = CHOICES[choice].now(self.plan) if choice in CHOICES else ""
        try:
            found = make()
        except UserError as error:
            return Alternative(self.prediction, choice, value, was, None, str(error))
        return attempt(self.prediction, choice, value, was, found)

    def alternatives(self, choice: str) -> tuple[Alternative, ...]:
        """Return all values of a choice that differ from the plan's."""
        if not CHOICES[choice].applies(self.prediction):
            return ()
        return tuple(self.alternative(choice, value) for value in CHOICES[choice].values(self.plan))

    @cached_property
    def others(self) -> tuple[Alternative, ...]:
        """The alternatives of every choice except the layout, which has a table of its own."""
        return tuple(each for name in CHOICES if name != "layout" for each in self.alternatives(name))

    @cached_property
    def undone(self) -> tuple[Alternative, ...]:
        """Alternatives that each undo one choice of the plan."""
        return tuple(
            self.alternative(choice.name, choice.plain)
            for choice in CHOICES.values()
            if choice.plain is not None and choice.plain in choice.values(self.plan) and choice.applies(self.prediction)
        )

    @cached_property
    def layouts(self) -> tuple[LayoutRow, ...]:
        """The effective layouts, the plan's first; () without data parallelism."""
        if self.plan.mesh.data == 1:
            return ()
        own = Alternative(self.prediction, "layout", self.plan.layout.name, self.plan.layout.name, self.prediction)
        return tuple(
            LayoutRow(each, travel(each.prediction) if each.prediction is not None else None)
            for each in (own, *self.alternatives("layout"))
        )

    @property
    def better(self) -> tuple[Alternative, ...]:
        """Alternatives with the same result that fit and are faster, the fastest first."""
        every = (*(row.alternative for row in self.layouts), *self.others)
        found = (each for each in every if CHOICES[each.choice].is_exact and each.is_better)
        return tuple(sorted(found, key=lambda each: -each.speed))

    @cached_property
    def situations(self) -> tuple[Alternative, ...]:
        """The plan under other conditions: slowest link, memory, nodes, batch."""
        base, plan, cluster = self.prediction, self.plan, self.prediction.given
        wide = replace(plan.mesh, inter=2 * plan.mesh.inter)
        twice = "twice the nodes" if plan.mesh.world >= cluster.node.devices else "twice the ranks"
        tries: list[tuple[str, _Make]] = []
        if (slower := self._slower) is not None:
            tries.append((f"{slower[0]} half as fast", lambda: base.on(slower[1])))
        tries += [
            ("memory 10 % smaller", lambda: base.on(cluster.with_memory(0.9))),
            (f"{twice}, same batch", lambda: predicted(base, rebuilt(plan, mesh=wide))),
            (
                f"{twice}, twice the batch",
                lambda: predicted(base, rebuilt(plan, mesh=wide, batch=2 * plan.global_batch)),
            ),
            ("global batch halved", lambda: predicted(base, rebuilt(plan, batch=plan.global_batch // 2))),
        ]
        return tuple(self._attempt("situation", name, make) for name, make in tries)

    @property
    def _slower(self) -> tuple[str, Cluster] | None:
        """The slowest link that the plan uses, half as fast."""
        cluster = self.prediction.given
        if cluster.network is not None and self.plan.mesh.world > cluster.node.devices:
            return "network", cluster.with_network(partial(_scaled, times=0.5))
        if cluster.node.link is not None and self.plan.mesh.world > 1:
            return "node.link", cluster.with_links(partial(_scaled, times=0.5))
        return None


def _scaled(link: Link, times: float) -> Link:
    return link.times(times).model_copy(update={"latency": link.latency / times})


def _faster(device: Device, times: float = FASTER) -> Device:
    own = device.efficiency
    waits = {name: getattr(own, name) / times for name in ("launch", "dispatch", "pause")}
    return device.model_copy(
        update={
            "bandwidth": device.bandwidth * times,
            "rates": {name: rate * times for name, rate in device.rates.items()},
            "efficiency": own.model_copy(update=waits),
        }
    )
