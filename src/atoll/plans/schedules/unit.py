"""Units of U microbatches, for sharded parameters. After ZeroPP, Tang et al., arXiv 2402.03791."""

from __future__ import annotations

from atoll.base.errors import ConfigError, ScheduleError
from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.schedule import Schedule
from atoll.plans.schedules.groups import even_groups
from atoll.plans.schedules.listing import Keyed, ListRules, list_schedule
from atoll.plans.schedules.timing import StageCosts, Timing


def unit_schedule(
    *,
    ranks: int,
    microbatches: int,
    chunks: int = 2,
    unit: int | None = None,
    keep: int | None = None,
    costs: StageCosts | None = None,
) -> Schedule:
    """Unit after unit: F of all its microbatches chunk by chunk, then I from the last chunk, W when the rank waits.

    A chunk's parameters are gathered twice per unit and its gradients reduced once, for any number of microbatches in
    it. No unit has more than `unit` microbatches, and they are as even as possible (default: m // p units, so that none
    is smaller than p, below which a unit waits for its own chunks). With U the largest, `keep` is the maximum number of
    microbatches between F and W on a rank (default 2U): with U, every unit has a ramp of its own; with 2U and U >= p,
    the W of one fill the ramp to the next. `costs` determine where W fits; without them F = I = W and a hop is free.

    Raises ConfigError if `keep` is less than U.

        rank 0  0F0 0F1 2F0 2F1 .   .   2I0 2I1 0I0 0I1 0F2 0F3 2F2 2F3 2W0 2W1 2I2 2I3 0I2 0I3 0W0 0W1 2W2 2W3 0W2 0W3
        rank 1  .   1F0 1F1 3F0 3F1 3I0 3I1 1I0 1I1 3W0 3W1 1F2 1F3 3F2 3F3 3I2 3I3 1I2 1I3 1W0 1W1 3W2 3W3 1W2 1W3
    """
    units = _units(ranks, microbatches, unit)
    size = len(units[0])
    kept = 2 * size if keep is None else keep
    if kept < size:
        raise ConfigError(
            f"schedule 'unit' cannot keep only {keep} microbatches between F and W: its largest unit has {size} of "
            f"{microbatches}; keep {size} to {2 * size}, or take smaller units"
        )
    placement = Placement("loop", ranks, chunks)
    queues = [[_blocks(placement.stages_of(rank), units)] for rank in range(ranks)]
    timing = Timing.of(placement, costs)
    waits = (False,) if costs is None else (False, True)
    tried = [list_schedule(placement, queues, timing, ListRules(kept * chunks, is_patient=wait)) for wait in waits]
    listed = [found for found in tried if found is not None]
    if not listed:
        raise ScheduleError(f"units of {size} deadlock with {ranks} ranks and {microbatches} microbatches")
    return Schedule("unit", placement, microbatches, min(listed, key=lambda found: found.makespan).rows)


def _units(ranks: int, microbatches: int, unit: int | None) -> tuple[range, ...]:
    if unit is None:
        return even_groups(microbatches, max(1, microbatches // ranks))
    return even_groups(microbatches, -(-microbatches // unit))


def _blocks(stages: tuple[int, ...], units: tuple[range, ...]) -> list[Keyed]:
    """Return F and I of a rank in execution order; the key is the index."""
    order = [
        Action(stage, op, number)
        for unit in units
        for op, run in ((Op.F, stages), (Op.I, stages[::-1]))
        for stage in run
        for number in unit
    ]
    return [Keyed(place, action) for place, action in enumerate(order)]
