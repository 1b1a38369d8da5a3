"""Islands that come and go, in one process: replicas of the unsplit model that take the records of rounds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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

    federation = _Federation(records, outer, fragment_of, batch_of=partial(_batch, recipe), each=microbatch, clip=clip)
    return federation.run({name: _Island(partial(make, name), events) for name, events in islands.items()})


def _batch(recipe: Recipe, positions: Sequence[int]) -> dict[str, Tensor]:
    each = [recipe.batch(position, 1) for position in positions]
    return {key: torch.cat([torch.as_tensor(one[key]) for one in each]) for key in each[0]}


class _Federation:
    """The anchors of all islands, and what these send."""

    def __init__(
        self,
        records: Mapping[int, Mapping[str, Any]],
        outer: Mapping[str, Any],
        fragment_of: Callable[[str], int],
        *,
        batch_of: Callable[[Sequence[int]], dict[str, Tensor]],
        each: int,
        clip: float | None,
    ) -> None:
        self._records, self._outer, self._fragment_of = records, outer, fragment_of
        self._batch_of, self._each, self._clip = batch_of, each, clip
        self._found = FederatedHistory()
        self._flows: dict[str, dict[str, Tensor]] = {}
        self._initial: dict[str, Tensor] = {}
        self._anchors: dict[str, torch.nn.Parameter] = {}
        self._stepping: dict[str, torch.optim.SGD] = {}
        self._rounds = 0

    def run(self, islands: Mapping[str, _Island]) -> FederatedHistory:
        """Play all events, and decide rounds once their contributions are there."""
        outer, first = self._outer, next(iter(islands.values())).replica.trained
        self._initial = {name: value.detach().clone() for name, value in first.items()}
        self._anchors = {name: torch.nn.Parameter(value.clone()) for name, value in self._initial.items()}
        self._stepping = {
            name: torch.optim.SGD([each], lr=outer["lr"], momentum=outer["momentum"], nesterov=outer["nesterov"])
            for name, each in self._anchors.items()
        }
        for island in islands.values():
            island.base = dict(self._initial)
        is_moving = True
        while is_moving:
            is_moving = any(self._play_all(island) for island in islands.values())
            is_moving |= self._decide()
        left = {name: each.events[each.at] for name, each in islands.items() if each.at < len(each.events)}
        assert not left, f"these need rounds whose contributions nobody has sent: {left}"
        for name, island in islands.items():
            self._found.losses[name] = island.losses
            self._found.parameters[name] = {
                key: value.detach().clone() for key, value in island.replica.trained.items()
            }
        return self._found

    def _play_all(self, island: _Island) -> bool:
        """Take events as far as rounds are known; return whether any was taken."""
        begin = island.at
        while island.at < len(island.events) and self._play(island, island.events[island.at]):
            island.at += 1
        return island.at > begin

    def _play(self, island: _Island, event: Mapping[str, Any]) -> bool:
        """Take an event; False if it needs a round that is not known yet."""
        what, own = event["what"], island.replica.trained
        if what == "new":
            island.replica, island.base, island.sent = island.make(), dict(self._initial), {}
        elif what == "saved":
            island.saved = copy.deepcopy((island.replica, island.base))
        elif what == "loaded":
            assert island.saved is not None, "it was saved"
            (island.replica, island.base), island.sent = copy.deepcopy(island.saved), {}
        elif what == "stepped":
            island.replica.step(event["step"], self._batch_of(event["samples"]), self._each, self._clip)
            island.losses.append(island.replica.history.losses[-1])
        elif what == "sent":
            names = [name for name in own if self._fragment_of(name) == event["fragment"]]
            flow = {name: island.base[name] - own[name].detach() for name in names}
            self._flows[event["digest"]] = island.sent[event["digest"]] = flow
        else:
            last = event["rounds"][-1]
            if last >= self._rounds:
                return False
            mix, anchors = self._outer["mix"], self._found.anchors[last]
            _follow(island, event, self._records, anchors, mix, self._fragment_of)
        return True

    def _decide(self) -> bool:
        """Take the outer step of the next round, if all that it counts was sent."""
        record = self._records.get(self._rounds)
        if record is None or any(each["digest"] not in self._flows for each in record["contributions"]):
            return False
        counted = record["contributions"]
        weights = [each["tokens"] if self._outer["tokens"] else 1 for each in counted]
        for name, anchor in self._anchors.items():
            parts = [
                self._flows[each["digest"]][name] * (weight / sum(weights))
                for each, weight in zip(counted, weights, strict=True)
                if each["fragment"] == self._fragment_of(name)
            ]
            if parts:
                anchor.grad = torch.stack(parts).sum(0)
                self._stepping[name].step()
        self._found.anchors[self._rounds] = {name: each.detach().clone() for name, each in self._anchors.items()}
        self._rounds += 1
        return True


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
