"""Islands that come and go, in one process: replicas of the unsplit model that take the records of rounds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atoll.testing.reference.model import Recipe
from atoll.testing.reference.training import ReferenceReplica


@dataclass(slots=True)
class FederatedHistory:
    """The result: of each island the losses of its steps and its parameters at the end; of each round the anchors."""

    losses: dict[str, list[float]] = field(default_factory=dict)
    parameters: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    anchors: dict[int, dict[str, Tensor]] = field(default_factory=dict)


class _Island:
    """What one island does, one event after the other."""

    def __init__(self, make: Callable[[], ReferenceReplica], events: Sequence[Mapping[str, Any]]) -> None:
        self.make, self.events = make, events
        self.at = 0
        self.replica = make()
        self.losses: list[float] = []
        self.base: dict[str, Tensor] = {}
        self.sent: dict[str, dict[str, Tensor]] = {}
        self.saved: tuple[ReferenceReplica, dict[str, Tensor]] | None = None


def train_federation(
    recipe: Recipe,
    *,
    islands: Mapping[str, Sequence[Mapping[str, Any]]],
    records: Mapping[int, Mapping[str, Any]],
    outer: Mapping[str, Any],
    fragment_of: Callable[[str], int],
    seed: int,
    dtype: torch.dtype,
    microbatches: Mapping[str, int],
    microbatch: int,
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    clip: float | None,
) -> FederatedHistory:
    """Train replicas as the islands did, with the same absences, late arrivals, weights and returns.

    islands: of each, in order

        {"what": "new"}                                      it begins without anything of its own
        {"what": "saved"}, {"what": "loaded"}                it goes on from where it was then
        {"what": "stepped", "step", "samples"}               on the samples at these positions
        {"what": "sent", "fragment", "digest"}               what a record may count
        {"what": "followed", "rounds", "on_time"}            up to the last of these rounds; fragments that are mixed
        {"what": "restarted", "rounds"}                      from the anchors after the last of these

    records: of each round {"contributions": [{"digest", "fragment", "tokens"}, ...]}.
    outer: lr, momentum, nesterov, mix, and whether `tokens` weigh.  fragment_of: of a parameter, by name.
    microbatches: of each island's steps.

    What an island sends is computed here from its own steps; of a record only who is counted, with which tokens. The
    outer optimizer is torch's SGD.
    """

    def make(name: str) -> ReferenceReplica:
        return ReferenceReplica(recipe, seed, dtype, "cpu", optimizer, first=0, microbatches=microbatches[name])

    played = {name: _Island(lambda name=name: make(name), events) for name, events in islands.items()}  # type: ignore[misc]
    first = next(iter(played.values())).replica.trained
    anchors = {name: torch.nn.Parameter(value.detach().clone()) for name, value in first.items()}
    stepping = {
        name: torch.optim.SGD([each], lr=outer["lr"], momentum=outer["momentum"], nesterov=outer["nesterov"])
        for name, each in anchors.items()
    }
    found = FederatedHistory()
    flows: dict[str, dict[str, Tensor]] = {}
    initial = {name: each.detach().clone() for name, each in anchors.items()}
    for island in played.values():
        island.base = dict(initial)
    rounds = 0

    def after(count: int) -> Mapping[str, Tensor]:
        return initial if count == 0 else found.anchors[count - 1]

    def play(island: _Island) -> bool:
        """Take the next event; False if it needs a round that is not known yet."""
        event = island.events[island.at]
        what, own = event["what"], island.replica.trained
        if what == "new":
            island.replica, island.base, island.sent = island.make(), dict(initial), {}
        elif what == "saved":
            island.saved = copy.deepcopy((island.replica, island.base))
        elif what == "loaded":
            assert island.saved is not None, "it was saved"
            (island.replica, island.base), island.sent = copy.deepcopy(island.saved), {}
        elif what == "stepped":
            batch = [recipe.batch(position, 1) for position in event["samples"]]
            joined = {key: torch.cat([torch.as_tensor(each[key]) for each in batch]) for key in batch[0]}
            island.replica.step(event["step"], joined, microbatch, clip)
            island.losses.append(island.replica.history.losses[-1])
        elif what == "sent":
            names = [name for name in own if fragment_of(name) == event["fragment"]]
            flow = {name: island.base[name] - own[name].detach() for name in names}
            flows[event["digest"]] = island.sent[event["digest"]] = flow
        else:
            if event["rounds"][-1] >= rounds:
                return False
            _follow(island, event, records, after(event["rounds"][-1] + 1), outer["mix"], fragment_of)
        island.at += 1
        return True

    while True:
        is_moving = False
        for island in played.values():
            while island.at < len(island.events) and play(island):
                is_moving = True
        counted = records.get(rounds, {}).get("contributions", ())
        if rounds in records and all(each["digest"] in flows for each in counted):
            weights = [each["tokens"] if outer["tokens"] else 1 for each in counted]
            for name, anchor in anchors.items():
                parts = [
                    flows[each["digest"]][name] * (weight / sum(weights))
                    for each, weight in zip(counted, weights, strict=True)
                    if each["fragment"] == fragment_of(name)
                ]
                if parts:
                    anchor.grad = torch.stack(parts).sum(0)
                    stepping[name].step()
            found.anchors[rounds] = {name: anchor.detach().clone() for name, anchor in anchors.items()}
            rounds, is_moving = rounds + 1, True
        if not is_moving:
            break
    left = {name: island.events[island.at] for name, island in played.items() if island.at < len(island.events)}
    assert not left, f"these need rounds whose contributions nobody has sent: {left}"
    for name, island in played.items():
        found.losses[name] = island.losses
        found.parameters[name] = {key: value.detach().clone() for key, value in island.replica.trained.items()}
    return found


def _follow(
    island: _Island,
    event: Mapping[str, Any],
    records: Mapping[int, Mapping[str, Any]],
    anchors: Mapping[str, Tensor],
    mix: float,
    fragment_of: Callable[[str], int],
) -> None:
    """Let a replica follow the anchors."""
    counted = [each["digest"] for at in event["rounds"] for each in records.get(at, {}).get("contributions", ())]
    own = island.replica.trained
    if event["what"] == "restarted":
        for name, value in own.items():
            value.data.copy_(anchors[name])
        island.sent.clear()
    else:
        for name, value in own.items():
            moved = anchors[name] - island.base[name]
            mine = [flow[name] for digest, flow in island.sent.items() if digest in counted and name in flow]
            if fragment_of(name) in event["on_time"]:
                value.data.copy_(mix * value.data + (1 - mix) * anchors[name])
            else:
                value.data.add_(moved + sum(mine))
        island.sent = {digest: flow for digest, flow in island.sent.items() if digest not in counted}
    island.base = dict(anchors)
