"""The planner's search for a model or a config, and its answer as a runnable config.

Ranks that plan for themselves need numba on all or on none, since it allows more tries; the digest of their programs
reveals a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.base.errors import ConfigError
from atoll.base.toml import value_to_toml
from atoll.plans.layouts import Layout
from atoll.prediction.cost import Cluster, Transformer, Workload
from atoll.prediction.planner import BUDGET, Answer, Candidate, Goal, Order, PlanSearch, Space, settings
from atoll.runtime.rendezvous import torchrun_environment
from atoll.training.config import Config, load
from atoll.training.config.planning import outer_of
from atoll.training.config.worlds import check_world, fit_to_world
from atoll.training.setup.here import measured_cluster
from atoll.training.setup.optimizers import states_of, whole_matrices_of
from atoll.training.setup.prediction import expected_vocabulary, is_on_cpu, named_cluster, workload_of

CHOSEN = {
    "pipeline": "pipeline",
    "tensor": "tensor",
    "intra": "intra",
    "expert": "expert",
    "sequence": "divide",
    "slices": "slices",
    "loss_chunks": "loss_chunks",
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
"""Keys of [parallel] that the planner chooses, with their names in `Space`."""

_UNKNOWN = ("layers_per_stage", "slice_work")
"""Keys of [parallel] that the planner leaves at their defaults."""


def plan(
    model: Workload | Transformer | Config | str | Path,
    cluster: Cluster | str | Path | None = None,
    goal: Goal | None = None,
    space: Space | None = None,
    *,
    effort: int = BUDGET,
) -> Answer:
    """Choose the plan with the lowest predicted step time that fits in the memory of every rank.

    model: the sizes of a transformer; a workload, from `atoll.runtime.models.count` for a module; or a config or the
    path of its TOML file.
    cluster: the hardware, or the path of its TOML file; run.cluster of a config if not given.
    goal: samples and tokens of a step, and ranks; those of a config if not given.
    space: the values to choose from. If not given, all values, or for a config with `parallel.auto` those that it
    leaves open.
    effort: the maximum number of simulated instructions. If it does not suffice to prove that the plan is the best,
    `Answer.gap` is a bound on how much faster another plan may be.

    The answer contains the plan as `best`, its `prediction` of step time and memory, `runners_up`, and the effect of
    other choices (`alternatives`) and other clusters (`changes`). The search is deterministic. It does not import torch
    unless the model of a config is counted.

    Raises ConfigError if a model is given without cluster or goal, if goal and cluster do not match, or if no plan
    fits: then with the closest plan, the bytes that it lacks, and what would help.
    """
    if isinstance(model, Workload | Transformer):
        if cluster is None or goal is None:
            raise ConfigError(
                "a model is planned for a cluster and a goal, as in Goal(global_batch=256, sequence=4096)"
            )
        workload = model.workload if isinstance(model, Transformer) else model
        return Answer.of(PlanSearch(workload, _read(cluster), goal, space or Space(), effort=effort))
    config = model if isinstance(model, Config) else load(model)
    found = question(config, _cluster_of(config) if cluster is None else _read(cluster))
    return Answer.of(replace(found, goal=goal or found.goal, space=space or found.space, effort=effort))


def _read(cluster: Cluster | str | Path) -> Cluster:
    return cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)


def _cluster_of(config: Config) -> Cluster:
    """Return run.cluster, or this machine as it was measured for parallel.ranks; see `here.py`."""
    named = named_cluster(config)
    if named is not None:
        return named
    started = torchrun_environment()
    is_here = started is None or started.local_world == started.world
    here = measured_cluster(config, config.parallel.ranks) if is_here else None
    if here is None:
        raise ConfigError(
            "a plan needs a cluster: name its file as run.cluster (`atoll doctor --measure` writes one of this machine "
            "or of several), or let `atoll train` start the ranks of this machine, which it measures once"
        )
    return here


def load_chosen(
    path: Path, overrides: Sequence[str] = (), *, world: int | None = None, config: Config | None = None
) -> tuple[Config, list[str]]:
    """Read a config like `load`, with a plan if it leaves that to the planner, adapted to `world`. Return also the
    overrides that were applied.

    world: number of ranks, if a launcher decides it or there are fewer than before.
    config: what `load` returns, if it was called before.

    Raises ConfigError if a config leaves the plan to the planner, sets no cluster, and this machine was not measured;
    and if no plan fits.
    """
    config, given = config or load(path, overrides), list(overrides)
    if config.parallel.auto:
        check_world(config, world)
        asked = question(config, _cluster_of(config), world=world)
        # Ranks are started on nodes as they are: the planner does not choose their order.
        asked = replace(asked, space=replace(asked.space, nodes=(asked.cluster.names,)))
        given += overrides_of(Answer.of(asked).best)
        return load(path, given), given
    fitted = fit_to_world(config, world)
    if not fitted:
        return config, given
    given += fitted
    words = ", ".join(fitted)
    return load(path, given).with_notes([f"world size {world}: {words} (parallel.min_ranks)"]), given


def fewer_ranks(path: Path, overrides: Sequence[str], ranks: int) -> int | None:
    """Return the largest number of ranks below `ranks` that has a plan and is at least parallel.min_ranks, or None."""
    config = load(path, overrides)
    least = config.parallel.min_ranks
    for world in range(ranks - 1, (ranks if least is None else least) - 1, -1):
        with suppress(ConfigError):
            load_chosen(path, overrides, world=world, config=config)[0].to_plan(world)
            return world
    return None


def question(config: Config, cluster: Cluster, *, world: int | None = None) -> PlanSearch:
    """Return the search for a plan for a config's model, batch and sequence.

    If the config sets `parallel.auto`, the keys set beside it are kept, and so are train.microbatch and
    train.precision. world: number of ranks; by default parallel.ranks, or that of the cluster.

    Raises ConfigError if a key cannot be kept.
    """
    ranks = world if world is not None else config.parallel.ranks if _is_written(config, "ranks") else None
    if ranks is not None:
        nodes = -(-ranks // cluster.node.devices)
        if not cluster.groups:
            cluster = cluster.model_copy(update={"nodes": max(cluster.nodes, nodes)})
    goal = Goal(
        global_batch=config.train.global_batch,
        sequence=config.data.sequence,
        ranks=ranks,
        imbalance=config.parallel.imbalance,
    )
    on_cpu = is_on_cpu(config, cluster)
    workload = workload_of(config, expected_vocabulary(config), on_cpu=on_cpu)
    codecs = config.parallel.codecs.value
    space = space_of(config) if config.parallel.auto else Space(precision=(config.train.precision,), codecs=codecs)
    if config.run.nodes:
        space = replace(space, nodes=(config.run.nodes,))
    outer = outer_of(config)
    states, whole = states_of(config.train), whole_matrices_of(config.train)
    return PlanSearch(workload, cluster, goal, space, on_cpu, states=states, outer=outer, whole=whole)


def space_of(config: Config) -> Space:
    """Return the choices that a config leaves open."""
    parallel = config.parallel
    refused = [name for name in _UNKNOWN if _is_written(config, name)]
    if parallel.host is not None and isinstance(parallel.host.activations, tuple):
        refused.append("host.activations of each stage")
    if refused:
        raise ConfigError(
            f"parallel.{', parallel.'.join(refused)}: the planner does not support it; leave it out, or turn "
            "parallel.auto off"
        )
    given: dict[str, Any] = {"codecs": parallel.codecs.value}
    for key, name in CHOSEN.items():
        if _is_written(config, key):
            given[name] = (getattr(parallel, key),)
    if _is_written(config, "layout"):
        given["layouts"] = (Layout(parallel.layout),)
    if parallel.host is not None:
        given["host"] = parallel.host.value
    if parallel.expert_layout is not None:
        given["expert_layout"] = Layout(parallel.expert_layout)
    if _is_written(config, "schedule"):
        given["schedules"] = (Order(parallel.schedule, parallel.chunks),)
    for name in ("microbatch", "precision"):
        if name in config.train.model_fields_set:
            given[name] = (getattr(config.train, name),)
    return Space(**given)


def _is_written(config: Config, key: str) -> bool:
    return key in config.parallel.model_fields_set


def overrides_of(candidate: Candidate) -> tuple[str, ...]:
    """Return the `--set` overrides that make a config use the plan."""
    chosen = settings(candidate)
    found = [
        f"{section}.{key}={value_to_toml(value)}" for section, keys in chosen.items() for key, value in keys.items()
    ]
    return ("parallel.auto=false", *found)
