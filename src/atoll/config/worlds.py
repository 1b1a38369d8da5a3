"""A config on another world than it was written for: fewer ranks are left, or more have come.

stays         tensor, layout, schedule and chunks, global_batch and microbatch: the steps are the same
gives way     the number of groups, in any config; where it names parallel.min_ranks, the ranks of a group and then
              those of the pipeline too, as little as possible
is refused    a world that nothing fits, with those that would do
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

from atoll.config.planning import divisors
from atoll.errors import ConfigError

if TYPE_CHECKING:
    from atoll.config.schema import Config

NAMED = 4
"""Worlds that an error names."""


def fit(config: Config, world: int | None) -> tuple[str, ...]:
    """Overrides that give the config a plan on `world` ranks; none where it has one, or world is None.

    Raises ConfigError where there is no plan, unless the config does not name parallel.min_ranks: then `to_plan` does.
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
    """ConfigError for fewer ranks than the run may go on with."""
    ranks, least = config.parallel.ranks if world is None else world, config.parallel.min_ranks
    if least is not None and ranks < least:
        name = "parallel.ranks" if world is None else "the launched world"
        raise ConfigError(f"{name} = {ranks} is fewer than parallel.min_ranks = {least}; start more, or allow fewer")


def _fitting(config: Config, world: int) -> tuple[str, ...] | None:
    """The overrides of the largest pipeline that has a plan, with the largest groups."""
    parallel = config.parallel
    for pipeline in reversed(divisors(parallel.pipeline)):
        data, rest = divmod(world, pipeline * parallel.tensor)
        if rest:
            continue
        most = data if parallel.outer is None else max(1, data // 2)  # outer steps are between two groups or more
        changed = {"pipeline": pipeline, "intra": math.gcd(parallel.intra, most)}
        tried = config.model_copy(update={"parallel": parallel.model_copy(update=changed)})
        with suppress(ConfigError):
            tried.to_plan(world)
            return tuple(f"parallel.{key}={to}" for key, to in changed.items() if to != getattr(parallel, key))
    return None


def _others(config: Config, world: int) -> str:
    """The worlds next to `world` that have a plan."""
    parallel = config.parallel
    most = max(world, parallel.ranks, parallel.pipeline * parallel.tensor * parallel.intra)
    sizes = sorted(range(parallel.min_ranks or 1, most + 1), key=lambda size: abs(size - world))
    found = [size for size in sizes[: 16 * NAMED] if size != world and _fitting(config, size) is not None][:NAMED]
    given = f"with parallel.min_ranks = {parallel.min_ranks}"
    if not found:
        return f"{given}, no world of up to {most} ranks has a plan"
    return f"{given}, worlds of {', '.join(map(str, sorted(found)))} ranks have a plan"
