"""Traffic of each link in a step, its duration, and the share hidden by compute."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from atoll.prediction.cost import Prediction
from atoll.prediction.cost.outer import outer_bytes_sent
from atoll.prediction.cost.ranks import sent_inside
from atoll.program import way_of

UPLINK = "uplink"

GATHERS, _REDUCTIONS, RETURNS, PIPELINE_MESSAGES = "gathers", "reductions", "updated parameters", "messages"
OUTER = "outer gradients, mean of a step"
MATRICES = "slices of matrices"
ROWS = "rows of experts"
EXCHANGED_HEADS = "heads of attention"

_KINDS = {
    "gathers": GATHERS,
    "reductions": _REDUCTIONS,
    "sync": _REDUCTIONS,
    "matrices": MATRICES,
    "return": RETURNS,
    "state": "optimizer state",
    "lowered": "gradients of the step",
    "partial": "gradients between microbatches",
    "steps": "steps on the host",
    "kept": "activations",
}
"""Kinds by what instructions carry; all else is messages."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Traffic of a rank on a link in a step.

    axis: of the mesh, or `UPLINK` between islands that are worlds of their own.  kind: gathers, reductions, updated
    parameters, slices of matrices, rows of experts, heads of attention, messages, outer gradients, or what goes to host
    memory and comes from it.
    times: their number.  nbytes: in total.  seconds: busy time of the link.
    """

    axis: str
    kind: str
    times: int
    nbytes: float
    seconds: float


def link_uses(prediction: Prediction, rank: int) -> tuple[LinkUse, ...]:
    """Return a pipeline rank's traffic: data-parallel links from instructions, pipeline links from messages."""
    program = prediction.ranks.programs.ranks[rank]
    times: defaultdict[tuple[str, str], int] = defaultdict(int)
    sent: defaultdict[tuple[str, str], float] = defaultdict(float)
    for instruction in program.instructions:
        do, action = instruction.do, instruction.action
        if do.sends:
            way: tuple[tuple[str, float], ...] = (
                ("pp", prediction.rates[rank].messages.get((do, action.stage), prediction.rates[rank].message)),
            )
        else:
            way = way_of(instruction, program.shape)
        for axis, nbytes in way:
            times[axis, _KINDS.get(do.carries, PIPELINE_MESSAGES)] += 1
            sent[axis, _KINDS.get(do.carries, PIPELINE_MESSAGES)] += nbytes
    clock = min(prediction.durations.on(rank), key=lambda own: own.cluster.inside().rate).clock
    links = {**prediction.rates[rank].links, **{axis: link for axis, (_, link) in clock.groups.items()}}
    for (axis, part), (count, nbytes) in sent_inside(prediction.ranks, rank).items():
        if part == "exchanges":
            kind = ROWS if axis == "expert" else EXCHANGED_HEADS
            times[axis, kind], sent[axis, kind] = count, nbytes
    plan = prediction.plan
    if plan.outer is not None:
        between = "inter" if plan.has_islands else UPLINK
        outgoing = outer_bytes_sent(prediction.ranks, rank)
        times[between, OUTER] = -(-len(outgoing) // plan.outer.every)
        sent[between, OUTER] = sum(outgoing.values()) / plan.outer.every
        if not plan.has_islands and prediction.given.uplink is not None:
            # All ranks of the island send at once.
            links[UPLINK] = replace(prediction.given.uplink.speed(1.0), shared=plan.mesh.world)
    return tuple(
        LinkUse(axis, kind, times[axis, kind], nbytes, links[axis].seconds(nbytes) if axis in links else 0.0)
        for (axis, kind), nbytes in sent.items()
        if nbytes
    )


@dataclass(frozen=True, slots=True)
class DataTraffic:
    """Data-parallel traffic of the rank that sends most, and its waits.

    inter, intra: bytes per step.  seconds: busy time of the slower of both links.  waited: time that nothing hides.
    """

    inter: float
    intra: float
    seconds: float
    waited: float

    @property
    def hidden(self) -> float:
        """Share of the busy seconds during which the rank computes, or waits for something else."""
        return 1.0 - min(1.0, self.waited / self.seconds) if self.seconds else 1.0


def travel(prediction: Prediction) -> DataTraffic:
    """Return the data-parallel traffic of the pipeline rank whose links are busy longest."""
    found = []
    for rank, parts in enumerate(prediction.breakdown):
        uses = [
            use
            for use in link_uses(prediction, rank)
            if use.kind != PIPELINE_MESSAGES and use.axis in ("inter", "intra")
        ]
        sent, busy = (dict.fromkeys(("inter", "intra"), 0.0) for _ in range(2))
        for use in uses:
            sent[use.axis] += use.nbytes
            busy[use.axis] += use.seconds
        found.append(DataTraffic(sent["inter"], sent["intra"], max(busy.values()), parts.gathers + parts.reductions))
    return max(found, key=lambda each: (each.seconds, each.inter + each.intra))
