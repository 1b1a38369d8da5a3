"""Bytes that ranks send in a step, by link and by cause: sums over their programs."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from atoll.prediction.cost import Prediction
from atoll.prediction.cost.hops import CodedHops
from atoll.prediction.cost.outer import outer_bytes_sent
from atoll.prediction.cost.ranks import sent_inside
from atoll.program.host import IN, OUT, STEPS
from atoll.program.traffic import way_of

LINKS = {
    "pp": "between pipeline stages (pp)",
    "inter": "across groups (inter)",
    "intra": "inside a group (intra)",
    "uplink": "between islands (uplink)",
    "tp": "tensor-parallel group (tp)",
    "expert": "between ranks that divide experts (expert)",
    "sequence": "between ranks that divide sequences (sequence)",
    IN: "from host memory",
    OUT: "to host memory",
    STEPS: "memory of the host",
}

FLOW_CAUSES = {
    "activations": "activations",
    "backward": "gradients of activations",
    "vocabulary": "split vocabulary",
    "gathers": "gathers of parameters",
    "reductions": "reductions of gradients",
    "sync": "gradients to the optimizer's level",
    "matrices": "slices of matrices that the optimizer transforms whole",
    "return": "parameters from the optimizer",
    "tensor": "collectives within layers",
    "exchanges": "rows of experts, heads of attention",
    "outer": "outer gradients, mean of a step",
    "state": "master and optimizer states",
    "lowered": "gradients of the step to host memory",
    "partial": "gradients between microbatches",
    "steps": "what the host's step reads and writes",
    "kept": "activations until their backward",
}


class Flow(NamedTuple):
    """Bytes that one data-parallel rank of a pipeline rank sends in a step over a link for one cause."""

    rank: int
    link: str
    cause: str
    bytes: float


def predicted_flows(prediction: Prediction) -> tuple[Flow, ...]:
    """Return the traffic of each pipeline rank, without small sums."""
    found: list[Flow] = []
    for rank in range(prediction.plan.mesh.pipeline):
        total = _sent(prediction, rank)
        order = sorted(total, key=lambda each: ([*LINKS].index(each[0]), [*FLOW_CAUSES].index(each[1])))
        found += (Flow(rank, *key, total[key]) for key in order if total[key])
    return tuple(found)


def _sent(prediction: Prediction, rank: int) -> dict[tuple[str, str], float]:
    ranks = prediction.ranks
    program, messages = ranks.programs.ranks[rank], CodedHops(ranks, prediction.cluster).sent(rank)
    total: defaultdict[tuple[str, str], float] = defaultdict(float)
    plan = prediction.plan
    if plan.outer is not None:
        between = "inter" if plan.has_islands else "uplink"
        total[between, "outer"] = sum(outer_bytes_sent(ranks, rank).values()) / plan.outer.every
    for instruction in program.instructions:
        do, action, _, _ = instruction
        for axis, count in way_of(instruction, program.shape):
            total[axis, do.carries] += count
        if do.sends:
            total["pp", do.carries] += messages.get((do, action.stage), prediction.ranks.message_bytes)
    for (axis, part), (_, nbytes) in sent_inside(ranks, rank).items():
        total[axis, part] += nbytes
    return total
