"""Fitting of a cluster's constants to measured steps.

Whole steps are fitted and not instructions: the time of an instruction depends on what runs at the same time, and the
prediction is of the step.

A step's seconds are a sum over the instructions on its critical path. Simulating each kind of instruction a little
slower gives the share of each kind in the step; the sum as a function of the constants then needs no simulation.
Fitting and simulating alternate until the path no longer changes.

A few steps carry little information about ten constants. So each constant has a prior at its previous value, with the
uncertainty `_Range.spread`. Constants on which no step depends are unchanged.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal, NamedTuple

from atoll.base.errors import ConfigError
from atoll.prediction.cost.cluster import Cluster
from atoll.prediction.cost.durations import Parts
from atoll.prediction.cost.kernels import Kernel
from atoll.prediction.cost.prediction import Prediction
from atoll.prediction.cost.work import Work
from atoll.program.sim import Rates, play_programs

NUDGE = 1e-3
"""Factor by which a kind of instruction is slowed down to measure its share."""

NOISE = 0.03
"""Relative error that is expected of a step's prediction."""

_FEW = 12
"""Number of groups of steps up to which the spread is the leave-one-group-out error. With more groups it is the error
of the fit."""

_FAR = 3.0
"""Factor by which a constant is changed, up and down, to test if a step depends on it."""

_ROUNDS = 4
"""Maximum number of rounds of simulation."""


class _Range(NamedTuple):
    """Bounds of a constant, and its prior uncertainty as the logarithm of a factor."""

    low: float
    high: float
    spread: float


LIMITS: Mapping[str, _Range] = {
    "device.efficiency.products": _Range(0.2, 1.0, 0.25),
    "device.efficiency.depth": _Range(1.0, 2000.0, 0.5),
    "device.efficiency.waves": _Range(1e-3, 1.0, 0.5),
    "device.efficiency.attention": _Range(0.05, 1.0, 0.3),
    "device.efficiency.memory": _Range(0.1, 1.0, 0.3),
    "device.efficiency.half": _Range(0.1, 1.0, 0.3),
    "device.efficiency.update": _Range(4.0, 400.0, 0.5),
    "device.efficiency.launch": _Range(1e-7, 1e-4, 1.0),
    "device.efficiency.dispatch": _Range(1e-7, 1e-3, 1.5),
    "device.efficiency.pause": _Range(1e-6, 1e-1, 2.0),
    "node.link.reach": _Range(0.02, 1.0, 0.3),
    "node.link.shared": _Range(1e6, 1e14, 0.3),
    "node.link.latency": _Range(1e-7, 1e-2, 1.0),
    "network.reach": _Range(0.02, 1.0, 0.3),
    "network.latency": _Range(1e-7, 1e-2, 1.0),
}
"""Constants that can be fitted, by their keys in a cluster's TOML."""


@dataclass(frozen=True, slots=True)
class Step:
    """A measured step. seconds: between the ends of two steps.

    played: predictions of one or two shorter steps with the same blocks, which are quick to simulate, and the weight of
    each; (1, prediction) for the step itself.
    group: steps of one group, such as those of one system, are left out of a fit together; a step without a group is
    left out alone.
    """

    played: tuple[tuple[float, Prediction], ...]
    seconds: float
    name: str = ""
    group: str = ""

    @property
    def cluster(self) -> Cluster:
        """The cluster of the measurement."""
        return self.played[0][1].given

    @property
    def predicted(self) -> float:
        """Predicted seconds."""
        return sum(weight * prediction.seconds for weight, prediction in self.played)

    def on(self, cluster: Cluster) -> Step:
        """Return the same step on another cluster."""
        return replace(self, played=tuple((weight, each.on(cluster)) for weight, each in self.played))


@dataclass(frozen=True, slots=True)
class Fitted:
    """A cluster with fitted constants.

    constants: those that were fitted, by their keys in `LIMITS`.  before: their previous values.
    error: mean absolute relative error of the steps.
    spread: expected error for a group of steps that was not measured, such as another system's. With up to `_FEW`
    groups, each is predicted with constants fitted to the others, along the paths that are critical with all of them;
    with one group, with the previous constants. With more groups it is `error`.
    left_out: by group, the mean errors whose mean is `spread`; empty if that is `error`.
    """

    cluster: Cluster
    constants: Mapping[str, float]
    before: Mapping[str, float]
    error: float
    spread: float
    left_out: Mapping[str, float]


def calibrate(steps: Iterable[Step], constants: Sequence[str] = ()) -> Fitted:
    """Fit constants to steps on clusters of one kind, starting from the constants of the first one's cluster.

    constants: keys of `LIMITS`, by default all. Those that any step depends on are fitted.

    Raises ConfigError for an unknown constant, for no steps, for nodes of several kinds, and if scipy is missing.
    """
    steps = list(steps)
    several = next((step.cluster.names for step in steps if step.cluster.groups), None)
    if several is not None:
        raise ConfigError(
            f"cannot fit constants to steps on nodes of {', '.join(several)} at once: fit each kind to steps on its "
            "own nodes, and write the results into its [[nodes]]"
        )
    unknown = sorted(set(constants) - set(LIMITS))
    if unknown or not steps:
        raise ConfigError(
            f"cannot fit {', '.join(unknown) or 'constants to no steps'}; known constants: {', '.join(LIMITS)}"
        )
    own = constants_of(steps[0].cluster)
    prior = {
        name: min(max(value, LIMITS[name].low), LIMITS[name].high)
        for name, value in own.items()
        if name in (constants or LIMITS)
    }
    seconds = [step.seconds for step in steps]
    linear = [_Linear(step.on(changed(step.cluster, prior))) for step in steps]
    prior = {name: value for name, value in prior.items() if _matters(linear, name, value)}
    found = dict(prior)
    for _ in range(_ROUNDS):
        linear = [_Linear(step.on(changed(step.cluster, found))) for step in steps]
        before, found = found, _fit(linear, seconds, begin=found, prior=prior)
        if all(abs(math.log(found[name] / before[name])) < NUDGE for name in found):
            break
    fitted = [step.on(changed(step.cluster, found)) for step in steps]
    error = fmean(abs(step.predicted / step.seconds - 1.0) for step in fitted)
    groups = [step.group or f"step {at}" for at, step in enumerate(steps)]
    few = len(set(groups)) <= _FEW
    left_out = _left_out(linear, seconds, groups, begin=found, prior=prior) if few else {}
    spread = fmean(left_out.values()) if left_out else error
    return Fitted(fitted[0].cluster, found, {name: own[name] for name in found}, error, spread, left_out)


def _matters(linear: Sequence[_Linear], name: str, value: float) -> bool:
    """Return True if any step depends on a constant."""
    limits = LIMITS[name]
    others = max(limits.low, value / _FAR), min(limits.high, value * _FAR)
    return any(
        abs(each.seconds({name: other}) / each.seconds({name: value}) - 1.0) > 1e-9
        for each in linear
        for other in others
    )


def _left_out(
    linear: Sequence[_Linear],
    seconds: Sequence[float],
    groups: Sequence[str],
    *,
    begin: Mapping[str, float],
    prior: Mapping[str, float],
) -> dict[str, float]:
    """Return the mean relative error of each group with constants fitted to the others."""
    found = {}
    for group in dict.fromkeys(groups):
        steps = list(zip(linear, seconds, groups, strict=True))
        others = [(each, measured) for each, measured, other in steps if other != group]
        without = _fit(*zip(*others, strict=True), begin=begin, prior=prior) if others else prior
        own = [(each, measured) for each, measured, other in steps if other == group]
        found[group] = fmean(abs(each.seconds(without) / measured - 1.0) for each, measured in own)
    return found


def _fit(
    linear: Sequence[_Linear], seconds: Sequence[float], *, begin: Mapping[str, float], prior: Mapping[str, float]
) -> dict[str, float]:
    if not prior:
        return {}
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise ConfigError("calibration needs scipy, which is not installed: pip install 'atoll[calibrate]'") from error
    names = list(begin)

    def residuals(logs: Any) -> list[float]:
        values = {name: math.exp(each) for name, each in zip(names, logs, strict=True)}
        errors = (math.log(each.seconds(values) / wanted) / NOISE for each, wanted in zip(linear, seconds, strict=True))
        # Steps that no constants explain, such as those measured beside other work, have less weight than in least
        # squares (Huber's loss, smoothed).
        soft = [math.copysign(math.sqrt(2.0 * (math.hypot(1.0, error) - 1.0)), error) for error in errors]
        return soft + [math.log(values[name] / prior[name]) / LIMITS[name].spread for name in names]

    limits = [[math.log(LIMITS[name][side]) for name in names] for side in (0, 1)]
    inside = [
        min(max(math.log(begin[name]), low + 1e-9), high - 1e-9) for name, low, high in zip(names, *limits, strict=True)
    ]
    done = least_squares(residuals, inside, bounds=limits, x_scale=0.1)
    return {name: math.exp(each) for name, each in zip(names, done.x, strict=True)}


@dataclass(frozen=True, slots=True)
class _Hop:
    """Latency of an axis' link."""

    axis: str


@dataclass(frozen=True, slots=True)
class _Way:
    """Seconds of a byte on an axis' link."""

    axis: str


_Kind = tuple[Kernel, ...] | _Hop | _Way | Literal["update", "pause"]
"""Kernels of a part of a block, traffic of a link, the optimizer's step, or pauses."""


class _Linear:
    """The seconds of a step as a sum that depends on the constants, along the currently critical path."""

    def __init__(self, step: Step) -> None:
        self._any = step.played[0][1]
        self._shares: defaultdict[_Kind, float] = defaultdict(float)
        for weight, prediction in step.played:
            for kind, seconds in _shares(prediction):
                if seconds:
                    self._shares[kind] += weight * seconds
        self._base = self._times(self._any)

    def seconds(self, constants: Mapping[str, float]) -> float:
        """Return the seconds of the step with other constants."""
        now = self._times(self._any.on(changed(self._any.given, constants)))
        return sum(share * now[kind] / self._base[kind] for kind, share in self._shares.items())

    def _times(self, prediction: Prediction) -> dict[_Kind, float]:
        """Return the seconds of one instruction of each kind."""
        links = prediction.durations.links
        found: dict[_Kind, float] = {}
        for kind in self._shares:
            match kind:
                case _Hop():
                    found[kind] = links[kind.axis].latency
                case _Way():
                    found[kind] = 1.0 / links[kind.axis].rate
                case "update":
                    found[kind] = prediction.durations.update_seconds
                case "pause":
                    found[kind] = prediction.device.efficiency.pause
                case _:
                    found[kind] = prediction.durations.clock.seconds(kind)
        return found


def _shares(prediction: Prediction) -> Iterator[tuple[_Kind, float]]:
    """Yield the seconds of each kind of instruction in a step. They add up to the step, which is as long as its
    critical path."""
    programs, works = prediction.ranks.programs, (*prediction.ranks.works, *prediction.ranks.slices.works)

    def grown(rates: Sequence[Rates]) -> float:
        return max(0.0, (play_programs(programs, rates).seconds - base) / NUDGE)

    base, durations = play_programs(programs, prediction.rates).seconds, prediction.durations
    kinds = {kernels for work in works for kernels in (work.forward, work.backward, work.weights) if kernels}
    for kernels in kinds:

        def slowed(work: Work, kernels: tuple[Kernel, ...] = kernels) -> Parts:
            own = work.forward, work.backward, work.weights
            factors = (1.0 + NUDGE if each == kernels else 1.0 for each in own)
            return tuple(one * factor for one, factor in zip(durations.parts(work), factors, strict=True))  # type: ignore[return-value]

        yield kernels, grown(durations.rates_of(slowed))
    yield "update", grown(durations.rates_of(durations.parts, update=1.0 + NUDGE))
    yield "pause", grown(durations.rates_of(durations.parts, pause=1.0 + NUDGE))
    for axis, link in durations.links.items():
        for kind, worse in (
            (_Hop(axis), replace(link, latency=link.latency * (1.0 + NUDGE))),
            (_Way(axis), replace(link, rate=link.rate / (1.0 + NUDGE))),
        ):
            yield kind, grown(durations.rates_of(durations.parts, links={**durations.links, axis: worse}))


def constants_of(cluster: Cluster) -> dict[str, float]:
    """Return the constants of a cluster, by their keys in `LIMITS`."""
    found = ((name, constant_of(cluster, name)) for name in LIMITS)
    return {name: value for name, value in found if value is not None}


def constant_of(cluster: Cluster, name: str) -> float | None:
    """Return a constant by its key in `LIMITS`; None if the cluster has no such link."""
    value: Any = cluster
    for key in name.split("."):
        value = None if value is None else getattr(value, key)
    return None if value is None else float(value)


def changed(cluster: Cluster, constants: Mapping[str, float]) -> Cluster:
    """Return a cluster with other constants, by their keys in `LIMITS`; those of a network only if it has one."""
    device, node, network = cluster.device, cluster.node, cluster.network
    efficiency = {name.rpartition(".")[2]: each for name, each in constants.items() if name.startswith("device.")}
    inside = {name.rpartition(".")[2]: each for name, each in constants.items() if name.startswith("node.")}
    between = {name.rpartition(".")[2]: each for name, each in constants.items() if name.startswith("network.")}
    tables = {
        "device": device.model_copy(update={"efficiency": device.efficiency.model_copy(update=efficiency)}),
        "node": node.model_copy(update={"link": None if node.link is None else node.link.model_copy(update=inside)}),
        "network": None if network is None else network.model_copy(update=between),
    }
    return cluster.model_copy(update=tables)
