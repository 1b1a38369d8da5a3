"""Orders searched for given costs and limits: `auto`, its presets `zb-1p` and `zb-2p`, and `zb-v` if costs are given.

[Note: how an order is found]
1. Orders of the catalogue for the placement, if they fit.
2. The published heuristic with each rank's own costs and limit (atoll.plans.schedules.published).
3. List scheduling by rules with parameters per rank, over a grid and then by hill climbing on a shortened step.
4. The best order so far as urgencies of the list scheduler: W are placed again, and actions may overtake.
5. Single critical actions moved a few places.
6. Those urgencies changed one by one, if the step is small enough for many tries.
7. One microbatch after the other, which always fits.
The best is kept, so the result is never worse than any of them; the search ends where a lower bound is reached.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atoll.base.errors import ConfigError
from atoll.plans.ir.placement import Placement, PlacementKind
from atoll.plans.ir.schedule import Schedule
from atoll.plans.schedules.memory import Memory, PerRank, peak_of
from atoll.plans.schedules.problem import Objective, Problem
from atoll.plans.schedules.timing import StageCosts
from atoll.plans.schedules.zero_bubble_v import fixed_zero_bubble_v

if TYPE_CHECKING:
    from atoll.plans.schedules.search import OrderSearch


def automatic(
    *,
    ranks: int,
    microbatches: int,
    placement: PlacementKind | None = None,
    chunks: int | None = None,
    costs: StageCosts | None = None,
    objective: Objective = "makespan",
    memory_limit: PerRank | None = None,
    static_bytes: PerRank = 0.0,
    activation_bytes: PerRank = 1.0,
    weight_grad_bytes: PerRank = 1.0,
    name: str = "auto",
) -> Schedule:
    """Return the best order found for `costs` within `memory_limit` bytes per rank, on any placement.

    name: of the schedule; without a limit, its own holds (`own_limit`), which `auto` does not have.

    Raises ConfigError if a rank cannot hold one microbatch's activations, with the rank and the bytes that it needs.

        rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    memory = Memory(activation_bytes, weight_grad_bytes, static_bytes, memory_limit)
    limited = own_limit(name, memory, ranks, microbatches)
    problem = Problem.of(
        placement_of(placement, ranks, chunks), microbatches, costs=costs, memory=limited, objective=objective
    )
    return find_order(problem).schedule(name)


def zb_1p(**options: Any) -> Schedule:
    """`auto` in the activation memory of 1F1B: by default a rank may keep p times its `activation_bytes`.

    Raises ConfigError if a rank cannot hold one microbatch's activations.

        rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
    """
    return automatic(name="zb-1p", **options)


def zb_2p(**options: Any) -> Schedule:
    """`auto` in twice the activation memory of 1F1B: by default a rank may keep 2p times its `activation_bytes`.

    Raises ConfigError if a rank cannot hold one microbatch's activations.

        rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    return automatic(name="zb-2p", **options)


def zero_bubble_v(
    *,
    ranks: int,
    microbatches: int,
    costs: StageCosts | None = None,
    objective: Objective = "makespan",
    memory_limit: PerRank | None = None,
    static_bytes: PerRank = 0.0,
    activation_bytes: PerRank = 1.0,
    weight_grad_bytes: PerRank = 1.0,
    slices: int = 1,
) -> Schedule:
    """No rank keeps more than p microbatches between F and W, and no bubble is in a span where F = I = W, m >= 2p-1.

    With fewer microbatches, it is the order for 2p-1 without the missing ones. This order is the result without `costs`
    and one candidate with them: then it is `auto` on a V, by default in p times `activation_bytes`.

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    With n slices of each sequence it is this order for any costs, with n-1 pairs of forwards more in the warm-up. No
    rank keeps more than p-1+n slices. Orders of slices are not searched: ConfigError with a memory limit.

        rank 0  0F0.0 0F0.1 .     3F0.0 .     3F0.1 3I0.1 3W0.1 3I0.0 3W0.0 0I0.1 0W0.1 .     .     0I0.0 0W0.0
        rank 1  .     1F0.0 2F0.0 1F0.1 2F0.1 .     .     2I0.1 2W0.1 1I0.1 1W0.1 2I0.0 2W0.0 1I0.0 1W0.0
    """
    if slices > 1 and memory_limit is not None:
        raise ConfigError(
            f"zb-v with {slices} slices of a sequence has one order, and none is searched within memory_limit = "
            f"{memory_limit}: leave out the limit, or slices"
        )
    if slices > 1 or (costs is None and memory_limit is None):
        return fixed_zero_bubble_v(ranks=ranks, microbatches=microbatches, slices=slices)
    return automatic(
        name="zb-v",
        ranks=ranks,
        microbatches=microbatches,
        placement="v",
        costs=costs,
        objective=objective,
        memory_limit=memory_limit,
        static_bytes=static_bytes,
        activation_bytes=activation_bytes,
        weight_grad_bytes=weight_grad_bytes,
    )


def own_limit(name: str, memory: Memory, ranks: int, microbatches: int) -> Memory:
    """Return `memory` with the limit of the schedule `name` if it has none.

    That of ZB-V is p microbatches, or those of its fixed order if more.
    """
    kept = {"zb-1p": ranks, "zb-2p": 2 * ranks, "zb-v": ranks}.get(name)
    if memory.limit is not None or kept is None:
        return memory
    each = memory.per_rank(ranks)
    limits = [row.static + kept * row.activation for row in each]
    if name == "zb-v":
        fixed = fixed_zero_bubble_v(ranks=ranks, microbatches=microbatches)
        peaks = [peak_of(row, fixed.chunks, own) for row, own in zip(fixed.actions, each, strict=True)]
        limits = list(map(max, peaks, limits))
    return replace(memory, limit=tuple(limits))


def placement_of(kind: PlacementKind | None, ranks: int, chunks: int | None) -> Placement:
    """Return the requested placement: a line, or a loop if only chunks are given."""
    chosen: PlacementKind = kind or ("loop" if (chunks or 1) > 1 else "line")
    return Placement(chosen, ranks, chunks or {"line": 1, "v": 2, "loop": 2}[chosen])


def find_order(problem: Problem) -> OrderSearch:
    """Search for an order: see the note above."""
    from atoll.plans.schedules import portfolio
    from atoll.plans.schedules.search import OrderSearch

    search = OrderSearch(problem)
    portfolio.run_portfolio(search)
    return search
