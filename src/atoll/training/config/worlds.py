"""Adaptation of a config to another world size, after ranks have failed or joined.

kept        tensor, layout, schedule and chunks, global_batch and microbatch, so the steps are equal
changed     the number of groups, in any config; if parallel.min_ranks is set, also the ranks of a group, and then
            those of the pipeline, as little as possible
refused     a world size without a plan; the error names others that have one. Outer steps need two groups: a config
            with them does not continue on one
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

from atoll.base.errors import ConfigError
from atoll.training.config.planning import divisors

if TYPE_CHECKING:
    from atoll.training.config.schema import Config

_NAMED = 4
"""Number of world sizes that an error names."""


def fit_to_world(config: Config, world: int | None) -> tuple[str, ...]:
    """Return overrides that give the config a plan on `world` ranks; none if it has one already, or world is None.

    Raises ConfigError if there is no plan and the config sets parallel.min_ranks; without it `to_plan` raises.
    """
    check_world(config, world)
    if config.parallel.min_ranks is None or world is None:
        return ()
    try:
        config.to_plan(world)
        return ()
    except ConfigError as error:
        problem = error
    found = _fitting(config, world)
    if found is None:
        raise ConfigError(f"{problem}\n  {_others(config, world)}") from problem
    return found


def check_world(config: Config, world: int | None) -> None:
    """Raise ConfigError for fewer ranks than the run may continue with."""
    ranks, least = config.parallel.ranks if world is None else world, config.parallel.min_ranks
    if least is not None and ranks < least:
        name = "parallel.ranks" if world is None else "the launched world"
        raise ConfigError(f"{name} = {ranks} is fewer than parallel.min_ranks = {least}; start more, or allow fewer")


def _fitting(config: Config, world: int) -> tuple[str, ...] | None:
    """Return the overrides of the largest pipeline that has a plan, with the largest groups."""
    parallel = config.parallel
    for pipeline in reversed(divisors(parallel.pipeline)):
        data, rest = divmod(world, pipeline * parallel.tensor)
        if rest:
            continue
        # Outer steps are between two groups or more, unless islands are worlds of their own.
        is_whole = parallel.outer is None or config.federation is not None
        sizes = [size for size in divisors(math.gcd(parallel.intra, data)) if is_whole or size < data]
        intra = max(sizes, default=1)
        changed = {"pipeline": pipeline, "intra": intra, "expert": math.gcd(parallel.expert, intra)}
        changed["sequence"] = math.gcd(parallel.sequence, intra)
        tried = config.model_copy(update={"parallel": parallel.model_copy(update=changed)})
        with suppress(ConfigError):
            tried.to_plan(world)
            return tuple(f"parallel.{key}={to}" for key, to in changed.items() if to != getattr(parallel, key))
    return None


def _others(config: Config, world: int) -> str:
    """Return the nearest world sizes that have a plan."""
    parallel = config.parallel
    most = max(world, parallel.ranks, parallel.pipeline * parallel.tensor * parallel.intra)
    sizes = sorted(range(parallel.min_ranks or 1, most + 1), key=lambda size: abs(size - world))
    found = [size for size in sizes[: 16 * _NAMED] if size != world and _fitting(config, size) is not None][:_NAMED]
    given = f"with parallel.min_ranks = {parallel.min_ranks}"
    if not found:
        return f"{given}, no world of at most {most} ranks has a plan"
    return f"{given}, worlds of {', '.join(map(str, sorted(found)))} ranks have a plan"
