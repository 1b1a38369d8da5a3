"""A model or a config -> the question that a planner is asked, and its answer -> a config that says what to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.config import Config, load
from atoll.cost import Cluster, Transformer, Workload
from atoll.errors import ConfigError
from atoll.layouts import Layout
from atoll.planner import EFFORT, Answer, Candidate, Goal, Order, Search, Space, settings
from atoll.toml import value_to_toml
from atoll.training.prediction import expected_vocabulary, is_on_cpu, workload_of

CHOSEN = {
    "pipeline": "pipeline",
    "tensor": "tensor",
    "intra": "intra",
    "order": "order",
    "residency": "residency",
    "reduction": "reduction",
    "unit": "unit",
    "prefetch": "prefetch",
    "recompute": "recompute",
    "post_validation": "post_validation",
    "sequence_parallel": "sequence_parallel",
    "vocabulary": "vocabulary_parallel",
}
"""Keys of [parallel] that a planner chooses, and what `Space` calls them."""

UNKNOWN = ("resident", "layers_per_stage")
"""Keys of [parallel] of which it knows the default alone."""


def plan(
    model: Workload | Transformer | Config | str | Path,
    cluster: Cluster | str | Path | None = None,
    goal: Goal | None = None,
    space: Space | None = None,
    *,
    effort: int = EFFORT,
) -> Answer:
    """Choose the plan with the fewest predicted seconds a step that fits every rank.

    model: the sizes of a transformer; a workload, which `atoll.models.count` makes of a module; or a config or the path
    of its TOML file.
    cluster: what the plan runs on, or the path of its TOML file; run.cluster of a config if not given.
    goal: samples and tokens of a step, and ranks; those of a config if not given.
    space: the values to choose between. If not given, all that there are, and for a config with `parallel.auto` those
    that it leaves open.
    effort: instructions that are played at most. Where they are not enough to prove the plan the best, `Answer.gap`
    says how much faster another plan may be.

    The answer has the plan as `best`, its `prediction` in seconds and bytes, `runners_up`, and what other choices
    (`undone`) and other clusters (`changes`) would take. The same question has the same answer. No torch is imported,
    unless a config's model is one that is counted.

    Raises ConfigError where a model comes without cluster or goal, where goal and cluster do not fit, and where no plan
    does: then with the nearest plan, the bytes that it lacks, and what would help.
    """
    if isinstance(model, Workload | Transformer):
        if cluster is None or goal is None:
            raise ConfigError(
                "a model is planned for a cluster and a goal, as in Goal(global_batch=256, sequence=4096)"
            )
        workload = model.workload if isinstance(model, Transformer) else model
        return Answer.of(Search(workload, _read(cluster), goal, space or Space(), effort=effort))
    config = model if isinstance(model, Config) else load(model)
    found = question(config, _read(cluster or _named(config)))
    return Answer.of(replace(found, goal=goal or found.goal, space=space or found.space, effort=effort))


def _read(cluster: Cluster | str | Path) -> Cluster:
    return cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)


def _named(config: Config) -> str:
    """The cluster of a config."""
    if config.run.cluster is None:
        raise ConfigError(
            "a plan needs a cluster: name its file as run.cluster (`atoll doctor --measure` writes one of this machine)"
        )
    return config.run.cluster


def load_chosen(path: Path, overrides: Sequence[str] = (), *, world: int | None = None) -> tuple[Config, list[str]]:
    """Read a config as `load`, with a plan where it leaves that to a planner; and the overrides that make it so.

    world: ranks, if a launcher decides.

    Raises ConfigError for a config that leaves it to a planner and names no cluster, and where no plan fits.
    """
    config, given = load(path, overrides), list(overrides)
    if config.parallel.auto:
        asked = question(config, _read(_named(config)), world=world)
        given += overrides_of(Answer.of(asked).best)
        config = load(path, given)
    return config, given


def question(config: Config, cluster: Cluster, *, world: int | None = None) -> Search:
    """The search for a plan for a config's model, batch and sequence.

    Where the config leaves it to a planner, what is written beside `parallel.auto` is kept, and so are
    train.microbatch and train.precision.  world: ranks; parallel.ranks, or those of the cluster, if not given.

    Raises ConfigError where a key cannot be kept.
    """
    ranks = world if world is not None else config.parallel.ranks if _is_written(config, "ranks") else None
    if ranks is not None:
        nodes = -(-ranks // cluster.node.devices)
        cluster = cluster.model_copy(update={"nodes": max(cluster.nodes, nodes)})
    goal = Goal(
        global_batch=config.train.global_batch,
        sequence=config.data.sequence,
        ranks=ranks,
    )
    on_cpu = is_on_cpu(config, cluster)
    workload = workload_of(config, expected_vocabulary(config), on_cpu=on_cpu)
    space = space_of(config) if config.parallel.auto else Space(precision=(config.train.precision,))
    return Search(workload, cluster, goal, space, on_cpu)


def space_of(config: Config) -> Space:
    """What is left to choose beside what a config says."""
    parallel = config.parallel
    refused = [name for name in UNKNOWN if _is_written(config, name)]
    if refused:
        raise ConfigError(
            f"parallel.{', parallel.'.join(refused)}: a planner does not choose beside it; leave it out, or turn "
            "parallel.auto off"
        )
    given: dict[str, Any] = {}
    for key, name in CHOSEN.items():
        if _is_written(config, key):
            given[name] = (getattr(parallel, key),)
    if _is_written(config, "layout"):
        given["layouts"] = (Layout(parallel.layout),)
    if _is_written(config, "schedule"):
        given["schedules"] = (Order(parallel.schedule, parallel.chunks),)
    for name in ("microbatch", "precision"):
        if name in config.train.model_fields_set:
            given[name] = (getattr(config.train, name),)
    return Space(**given)


def _is_written(config: Config, key: str) -> bool:
    return key in config.parallel.model_fields_set


def overrides_of(candidate: Candidate) -> tuple[str, ...]:
    """What `--set` makes a config run the plan."""
    chosen = settings(candidate)
    found = [
        f"{section}.{key}={value_to_toml(value)}" for section, keys in chosen.items() for key, value in keys.items()
    ]
    return ("parallel.auto=false", *found)
