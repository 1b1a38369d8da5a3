"""Plans and predictions of all islands of a config: its model and outer steps on the clusters of an archipelago.

The config is that of any island. What belongs to one of them, such as ranks, layout and number of inner steps, is
chosen for each by `plan_islands`, or taken from the config for all by `predict_islands`.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.base.errors import ConfigError
from atoll.base.toml import value_to_toml
from atoll.prediction.cost import Archipelago, Cluster, Prediction
from atoll.prediction.cost.federation import FederatedPrediction
from atoll.prediction.planner import Answer
from atoll.prediction.planner.islands import IslandChoice, IslandsAnswer
from atoll.prediction.planner.search import BUDGET
from atoll.training.config import Config
from atoll.training.config.federation import FederationSection
from atoll.training.setup.choosing import overrides_of, question
from atoll.training.setup.prediction import predict


def plan_islands(config: Config, archipelago: Archipelago, *, effort: int = BUDGET) -> IslandsAnswer:
    """Choose a plan, a batch and a number of inner steps for each island, so that all arrive together.

    If the config sets `parallel.auto`, the keys beside it are kept on every island, but for `parallel.ranks`: an island
    uses all its devices.

    Raises ConfigError if the config has no outer steps or names other islands, and if no plan fits on one.
    """
    searches = {
        name: replace(question(_of_island(config, archipelago, name), cluster, world=_devices(cluster)), effort=effort)
        for name, cluster in archipelago.islands.items()
    }
    return IslandsAnswer.of(searches, pace=_pace(config))


def predict_islands(config: Config, archipelago: Archipelago) -> FederatedPrediction:
    """Predict the plan of a config on every island, on all its devices.

    Raises ConfigError if the config has no outer steps or names other islands, and if its plan is not possible on one.
    """
    if config.parallel.auto:
        return plan_islands(config, archipelago).federated
    found: dict[str, Prediction] = {}
    for name, cluster in archipelago.islands.items():
        try:
            found[name] = predict_island(config, archipelago, name)
        except ConfigError as error:
            raise ConfigError(
                f"island {name}, {_devices(cluster)} devices: {error}\n  `atoll plan` chooses a plan for each island"
            ) from error
    return FederatedPrediction(found, _pace(config))


def predict_island(config: Config, archipelago: Archipelago, name: str) -> Prediction:
    """Predict the plan of a config on one island, or the one that the planner chooses with `parallel.auto`.

    Raises ConfigError if there is no such island, and as `predict_islands`.
    """
    cluster = archipelago.island(name)
    own, world = _of_island(config, archipelago, name), _devices(cluster)
    return (
        Answer.of(question(own, cluster, world=world)).prediction
        if config.parallel.auto
        else predict(own, cluster, world=world)
    )


def island_overrides(config: Config, name: str, choice: IslandChoice) -> tuple[str, ...]:
    """Return the `--set` overrides that make a config use the plan of an island."""
    outer, own = choice.outer, config.parallel.outer
    assert own is not None, "islands have outer steps"
    changed: dict[str, tuple[int | str, int | str]] = {
        "train.global_batch": (choice.batch, config.train.global_batch),
        "parallel.outer.every": (outer.every, own.every),
        "parallel.outer.delay": (outer.delay, own.delay),
    }
    if config.federation is not None:
        changed["federation.island"] = (name, config.federation.island)
    given = (f"{key}={value_to_toml(value)}" for key, (value, before) in changed.items() if value != before)
    return (*overrides_of(choice.answer.best), *given)


def _of_island(config: Config, archipelago: Archipelago, name: str) -> Config:
    """Return the config as one of an island of these. Addresses and secret do not matter to a prediction."""
    if config.parallel.outer is None:
        raise ConfigError("the cluster describes islands, which exchange outer gradients; set parallel.outer.every")
    federation = config.federation
    if federation is None:
        addresses = {island: f"island:{at}" for at, island in enumerate(archipelago, start=1)}
        federation = FederationSection(island=name, islands=addresses, secret="")
    elif set(federation.islands) != set(archipelago):
        raise ConfigError(
            f"federation.islands are {', '.join(federation.islands)}, and the cluster describes "
            f"{', '.join(archipelago)}; give both the same names"
        )
    return config.model_copy(update={"federation": federation.model_copy(update={"island": name})})


def _devices(cluster: Cluster) -> int:
    return cluster.nodes * cluster.node.devices


def _pace(config: Config) -> float | None:
    return None if config.federation is None else config.federation.pace
