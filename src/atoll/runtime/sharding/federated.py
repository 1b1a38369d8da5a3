"""Outer steps of this rank among islands that come and go: each is a world of its own.

`atoll.plans.federation` says how islands agree on rounds, `atoll.runtime.federation` exchanges what they agree on. Here
is what the training thread does: it contributes outer gradients, waits for rounds, and lets the masters follow.

    sends        after the steps of `Outer.turns`: D = anchor - masters, of the fragment whose turn is next
    arrives      `delay` steps later it waits up to `grace` seconds for the round, and no longer
    follows      with all ranks of its island, which first agree on how many rounds all of them know

[Note: how masters follow] P are an island's masters, A and A' the anchors before and after.

    counted, and here in time       P <- mix * P + (1 - mix) * A'      as islands that wait for each other
    counted, but here later         P <- P + (A' - A) + D              what it has learned since it sent D stays
    not counted                     P <- P + (A' - A)                  D stays, and is a part of the next one
    it took anchors over,           P <- A'                            what it had learned since A is lost, and its
    was no member, or a                                                data is read again
    process before it was
    counted
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from atoll.base.errors import PlanError, RunError
from atoll.plans.federation.records import Member, RoundRecord, read_record
from atoll.plans.federation.rules import FederationRules
from atoll.plans.federation.standing import Standing
from atoll.plans.federation.tempo import Tempo
from atoll.plans.outer import Outer, OuterAction
from atoll.runtime.federation.elements import TensorPart
from atoll.runtime.federation.events import BITS, RoundEvent, merged_manifest, run_digest
from atoll.runtime.federation.link import IslandLink, agreed_rounds
from atoll.runtime.federation.rank import logger
from atoll.runtime.federation.seat import IslandSeat
from atoll.runtime.sharding.anchors import AnchorSteps
from atoll.runtime.sharding.host_anchors import AnchorHoldings, HostAnchor, restore_residuals
from atoll.runtime.sharding.segment import Segment
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.transport import Transport

PACE_STEPS = 16
"""Steps of which the median is an island's pace: those in which it was stopped, or waited, do not count."""


@dataclass(frozen=True, slots=True)
class SentFlow:
    """An outer gradient that has been sent. owed: the residuals before it."""

    step: int
    digest: str
    tokens: int
    used: int
    flows: Sequence[torch.Tensor]
    owed: Sequence[torch.Tensor | None]


class FederatedSteps(AnchorSteps[HostAnchor]):
    """The outer steps of one rank of an island in a federation.

    units: of this rank.  count: number of units of the model.  item: bytes of a master's element.  facts: what all
    islands have in common.

    used: samples that the island has read since it became a member; callers that read `lots` set it before each step.
    last_step: of the run; an island that is behind does not skip past it. Callers set it.
    events: what was done since the caller cleared them.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        outer: Outer,
        transport: Transport,
        seat: IslandSeat,
        *,
        count: int,
        item: int,
        facts: Mapping[str, Any],
        seed: int = 0,
    ) -> None:
        assert outer.apart is not None, "the islands of a federation are worlds of their own"
        if len(seat.islands) != outer.apart.islands:
            raise PlanError(f"{len(seat.islands)} islands have an address, and the plan is of {outer.apart.islands}")

        def make(segment: Segment, tag: tuple[int, int]) -> HostAnchor:
            return HostAnchor(segment, outer, transport, tag=tag)

        super().__init__(units, outer, transport, count=count, make=make)
        self.seat = seat
        self.rules = FederationRules(
            seat.first,
            outer.count(count),
            quorum=outer.apart.quorum,
            grace=outer.apart.grace,
            silent=seat.silent,
            away=seat.away,
            lost=max(seat.away, outer.apart.grace),
        )
        self._run = run_digest(outer, self.rules, {**facts, "run": seat.run, "seed": seed})
        self._item, self._seed = item, seed
        self._link: IslandLink | None = None
        self.standing = Standing(Member(seat.name, ""), seat.first, self.rules.fragments)
        self._by_fragment = {each: list(self._anchors_of(each)) for each in range(self.rules.fragments)}
        self._holdings = AnchorHoldings(self._by_fragment, outer, item=item, bases=self.standing.bases)
        self._traffic = 0, 0
        self.used = 0
        self.last_step = sys.maxsize
        self.events: list[RoundEvent] = []
        self._tokens = [0] * self.rules.fragments
        self._sent: dict[int, SentFlow] = {}
        self._is_overdue = False
        # When the last steps ended.
        self._ends: deque[float] = deque(maxlen=PACE_STEPS + 1)
        self._tempo = Tempo()
        # The step at which others are at least, after a round that has just been followed.
        self._others_at = 0
        # When the island came back, by the clock; None once it has heard the first contribution to a round come.
        self._came_back: float | None = None
        # Records after the one that the masters follow.
        self._known: dict[int, RoundRecord] = {}

    # ---- of the island

    @property
    def island(self) -> int:
        """The island among those of a checkpoint: it has its own, with itself alone."""
        return 0

    @property
    def is_open(self) -> bool:
        """True between `join` and `depart`."""
        return self._link is not None

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of this rank that other ranks have read, of its own island for documents alone, and those that it has
        read."""
        return self._traffic if self._link is None else self._link.traffic

    def count(self, tokens: int) -> None:
        """Note that the parameters have learned from so many tokens more."""
        self._tokens = [each + tokens for each in self._tokens]
        self._ends.append(time.monotonic())

    # ---- the exchange

    @property
    def link(self) -> IslandLink:
        """The exchange with other islands. Raises RunError before it is opened."""
        if self._link is None:
            raise RunError("the island takes part in no federation yet; call engine.federation.join first")
        return self._link

    def open(self) -> None:
        """Begin the exchange. Every rank calls it."""
        rank, at = self._transport.place.rank, self.standing.at
        sums = [] if at is not None else _initial_sums(self._fragments, self.rules.fragments)
        self._link = IslandLink(self.seat, self.rules, self._holdings, run=self._run, sums=sums, rank=rank, at=at)
        self.standing = replace(self.standing, own=self._link.own)
        if at is not None:
            self._came_back = time.monotonic()
        self._note("joining", self.rounds_step)

    def close(self) -> None:
        """End the exchange. The others take it for an island that is lost, unless `depart` came before."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
            self._traffic = link.traffic

    # ---- steps

    def is_due(self, step: int) -> bool:
        """Return True if there is outer work after `step`."""
        return self._is_overdue or self._came_back is not None or bool(self.outer.turns(step, self._count))

    @torch.no_grad()
    def act(self, step: int) -> int:
        """Do the outer work after `step`; see `AnchorSteps.act`. An island that has missed rounds is at their step."""
        if self._is_overdue:
            self.follow(step=step)
        for way, _ in self.outer.turns(step, self._count):
            if way is OuterAction.ARRIVES:
                self._arrive(step)
                continue
            if not self._sent:
                self.follow(step=step)
            # A round that the others have had without this island: to send now would begin the next one too early.
            if self.rounds_step < step:
                self.send_next(step)
                first = self.link.first
                behind = 0 if first is None else self._tempo.steps_since(first.behind())
                self._others_at = max(self._others_at, step + self.link.met(behind, max))
        turn = step if self._came_back is None else _hurry(self, step)
        self._is_overdue = any(sent.step <= step - self.outer.delay for sent in self._sent.values())
        others_at, self._others_at = self._others_at, 0
        least = max(turn, self.rounds_step)
        return max(least, min(others_at, self.outer.next_leave(least, self._count) - 1, self.last_step))

    @property
    def rounds_step(self) -> int:
        """The step that islands are at, at least, after the rounds that the masters follow."""
        last = self.standing.averaged - 1
        return self.outer.step_of(last, self._count) if last >= 0 else 0

    @property
    def waits(self) -> bool:
        """True if a round is still to say what came of something that was sent."""
        return bool(self._sent)

    def send_next(self, step: int) -> None:
        """Contribute to the next round that the island has not contributed to."""
        count = self.rules.fragments
        turns = (turn % count for turn in range(self.standing.averaged, self.standing.averaged + count))
        fragment = next((each for each in turns if each not in self._sent), None)
        if fragment is not None:
            self._send(fragment, step)

    def _send(self, fragment: int, step: int) -> None:
        """Contribute the fragment's outer gradient."""
        if not self.standing.is_member or not self._tokens[fragment]:
            return
        link, flows, elements = self.link, list[torch.Tensor](), dict[TensorPart, memoryview]()
        owed = [None if each.residual is None else each.residual.clone() for each in self._anchors_of(fragment)]
        for unit, anchors in self._fragments.get(fragment, ()):
            for anchor in anchors:
                flow, parts, moved = anchor.leave(seed=self._seed, name=f"{self.seat.name} {self.standing.rounds}")
                flows.append(flow)
                elements |= parts
                if unit.is_first_owner:
                    self._moved += moved
        is_finite = all(bool(flow.isfinite().all()) for flow in flows)
        manifest = link.met([is_finite, link.elements.offer(elements)], merged_manifest)
        if manifest is None:
            restore_residuals(self._anchors_of(fragment), owed)
            logger.warning("fragment %d is not sent after step %d: its outer gradient is not finite", fragment, step)
            return
        named = link.elements.hold(manifest.encode())
        tokens = self._tokens[fragment]
        if link.first is not None:
            base = self._holdings.trail[fragment][0]
            link.first.contribute(fragment, manifest.encode(), base=base, tokens=tokens, used=self.used)
        self._sent[fragment] = SentFlow(step, named, tokens, used=self.used, flows=flows, owed=owed)
        self._note("sent", step, fragment=fragment, digest=named, tokens=tokens, used=self.used)

    def _arrive(self, step: int) -> None:
        """Wait for the round of what was sent `delay` steps ago, and follow it."""
        for fragment in [at for at, sent in self._sent.items() if sent.step == step - self.outer.delay]:
            begin = time.monotonic()
            self.link.wait(partial(self._holdings.is_ahead, fragment), self.rules.grace)
            waited, before = time.monotonic() - begin, self.standing.rounds
            self.follow(fragment, step=step, waited=waited)
            if self.standing.rounds == before:
                self._note("waited", step, fragment=fragment, waited=waited)

    # ---- following rounds

    def follow(self, arriving: int | None = None, *, step: int = 0, waited: float = 0.0) -> None:
        """Let the masters follow the rounds that all ranks know. arriving: no further than the round that sets this
        fragment, whose outer gradient arrives now; others that are in flight arrive later."""
        link = self.link
        with link.elements.lock:
            self._known |= {record.round: record for record in link.elements.records()}
            rounds = link.elements.answer.anchors
            trail = self._holdings.trail[arriving] if arriving is not None else []
            if arriving is not None and len(trail) > 1:
                rounds = min(rounds, trail[1] + 1)
            taken = self._holdings.taken
        rounds, taken = link.met([rounds, taken], agreed_rounds)
        if rounds <= self.standing.rounds or rounds < taken:
            return
        new = [self._known[each] for each in range(self.standing.rounds, rounds) if each in self._known]
        # Of a process that has ended: what it had learned is in the anchors, and only a part of it in these parameters.
        own = {sent.digest for sent in self._sent.values()}
        forgotten = any(
            each.island == self.seat.name and each.digest not in own for r in new for each in r.contributions
        )
        if taken > self.standing.rounds or forgotten or not self.standing.stays(new):
            self._restart(rounds, step)
        else:
            self._go_on(rounds, arriving, step=step, waited=waited)
        self._known = {at: record for at, record in self._known.items() if at >= rounds}

    def _go_on(self, rounds: int, arriving: int | None, *, step: int, waited: float) -> None:
        records = tuple(self._known[each] for each in range(self.standing.rounds, rounds))
        counted = {each.digest for record in records for each in record.contributions}
        shifts: dict[int, list[torch.Tensor]] = {}
        mixed: list[int] = []
        own: dict[int, str] = {}
        with self.link.elements.lock:
            for fragment in range(self.rules.fragments):
                moves = self._holdings.follow(fragment, rounds)
                if moves is None:
                    continue
                sent = self._sent.pop(fragment, None)
                if sent is not None:
                    own[fragment] = sent.digest
                is_counted = sent is not None and sent.digest in counted
                if sent is not None and is_counted:
                    self._tokens[fragment] -= sent.tokens
                    moves = [move + flow for move, flow in zip(moves, sent.flows, strict=True)]
                elif sent is not None:
                    restore_residuals(self._anchors_of(fragment), sent.owed)
                if is_counted and fragment == arriving:
                    mixed.append(fragment)
                else:
                    shifts[fragment] = moves
            self.standing = self.standing.after(records[-1])
        share = self.outer.own_share
        self._write(lambda at, anchor: anchor.apply(share=share), mixed)
        flat = [move for fragment in shifts for move in shifts[fragment]]
        self._write(lambda at, anchor: anchor.shift(flat[at]), list(shifts))
        self._note("followed", step, records=records, on_time=tuple(mixed), waited=waited)
        self._keep_time(records, own, step)

    def _keep_time(self, records: Sequence[RoundRecord], own: Mapping[int, str], step: int) -> None:
        """Note where the others are after the last of these rounds that averaged; see `Tempo`. own: the digest of what
        this island has sent of each fragment."""
        averaged = [each for each in records if each.contributions]
        if not averaged or step == 0:
            return
        first, tempo = self.link.first, self._tempo
        if len(self._ends) > 1:
            tempo = replace(tempo, pace=median(after - before for before, after in pairwise(self._ends)))
        went_on = partial(Tempo.after, steps=max(1, self.outer.every // self.rules.fragments), grace=self.rules.grace)
        for each in averaged:
            digest = own.get(each.contributions[0].fragment)
            if digest is not None:
                lag = 0.0 if first is None else first.since(each, digest)
                is_counted = any(digest == one.digest for one in each.contributions)
                tempo = went_on(tempo, lag=lag, is_counted=is_counted)
        if not own and self.outer.next_leave(step - 1, self._count) == step:
            tempo = went_on(tempo, lag=0.0, is_counted=False)  # what the island would send now
        since = 0.0 if first is None else first.since(averaged[-1])
        came_back = self._came_back
        # What was sent before the island's return was heard late. What came since says how far the others are.
        is_new = first is not None and came_back is not None and not 0 < since < time.monotonic() - came_back
        behind, left_out, is_new = self.link.met((tempo.steps_since(since), tempo.left_out, is_new), _most)
        self._came_back = came_back if is_new else None
        self._tempo, self._others_at = replace(tempo, left_out=left_out), self.rounds_step + behind

    def _restart(self, rounds: int, step: int) -> None:
        """Replace the masters by anchors. The island reads from where its data was counted."""
        records = tuple(self._known[each] for each in range(self.standing.rounds, rounds) if each in self._known)
        lost = max(self._tokens)
        with self.link.elements.lock:
            for fragment in range(self.rules.fragments):
                self._holdings.follow(fragment, rounds)
            self.standing = self.standing.after(records[-1])
        self._write(lambda at, anchor: anchor.apply(share=0.0))
        self._tokens = [0] * self.rules.fragments
        self._sent.clear()
        for anchor in self._anchors():
            if anchor.residual is not None:
                anchor.residual.zero_()
        self.used = self.standing.lots.counted
        self._came_back = time.monotonic()
        self._note("restarted", step, records=records, lost=lost)
        self._keep_time(records, {}, step)

    def _note(self, what: str, step: int, **facts: Any) -> None:
        self.events.append(RoundEvent(what, step, self.standing.rounds - 1, time=time.time(), **facts))

    # ---- what is stored

    def adopt(self, names: Collection[str] | None = None) -> None:
        """Set anchors to the island's parameters; see `AnchorSteps.adopt`."""
        if self._link is not None:
            raise RunError(
                "an island of a federation cannot change its parameters by hand: its anchors would differ from those "
                "of the others; change them before it joins, on all islands"
            )
        super().adopt(names)

    def forget(self) -> None:
        """Drop what is in flight, before a load."""
        if self._link is not None:
            raise RunError("an island of a federation cannot load while it takes part; load before it joins")
        for anchor in self._anchors():
            # Loaded values are written in place, and states may be shown to others.
            anchor.value, anchor.later = anchor.value.clone(), []
            if anchor.residual is not None:
                anchor.residual.zero_()
        self._sent.clear()

    def state(self) -> dict[str, Any]:
        """Return where the island is in the rounds, with the settings of outer steps."""
        at, outer = self.standing.at, self.outer
        assert outer.apart is not None, "the islands of a federation are worlds of their own"
        own: dict[str, Any] = {"island": self.seat.name, "at": None if at is None else at.to_json()}
        return {
            "islands": outer.apart.islands,
            "every": outer.every,
            "fragments": self.rules.fragments,
            "delay": outer.delay,
            "waiting": [],
            "federation": {**own, "tokens": self._tokens, "used": self.used},
        }

    def goes_on(self, saved: Mapping[str, Any] | None) -> bool:
        """Return True if a checkpoint is of this island, with the same fragments."""
        own = None if saved is None else saved.get("federation")
        if saved is None or own is None:
            return False
        return (own["island"], saved["fragments"]) == (self.seat.name, self.rules.fragments)

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Continue in the rounds where a checkpoint was; from its anchors alone if it is of another island."""
        own = saved["federation"] if saved is not None and self.goes_on(saved) else None
        at = None if saved is None or "federation" not in saved else saved["federation"]["at"]
        self.standing = replace(self.standing, at=None if at is None else read_record(at))
        self._tokens = [0] * self.rules.fragments if own is None else list(own["tokens"])
        self.used = self.standing.lots.counted if own is None else own["used"]
        self._holdings = AnchorHoldings(self._by_fragment, self.outer, item=self._item, bases=self.standing.bases)


def _hurry(steps: FederatedSteps, step: int) -> int:
    """Contribute to a round that others have begun, before its turn: an island that came back cannot know how far
    they are until it hears a round begin. Return the step that it is then at."""
    if not steps._sent:
        steps.follow(step=step)
    first, turn = steps.link.first, steps.outer.step_of(steps.standing.averaged, steps._count)
    seconds = steps.link.met(0.0 if first is None else first.behind(), max)
    if steps._sent or not seconds or not step < turn <= steps.last_step:
        return step
    steps.send_next(turn)
    if not steps._sent:
        return step
    steps._others_at = max(steps._others_at, turn + steps._tempo.steps_since(seconds))
    return turn


def _most(said: Sequence[Sequence[int]]) -> list[int]:
    """Return the largest first number, the largest second one, and so on."""
    return [max(each) for each in zip(*said, strict=True)]


def _initial_sums(parts: Mapping[int, Sequence[tuple[Unit, Sequence[HostAnchor]]]], count: int) -> list[int]:
    """Return the bits of the anchors of each fragment that this rank accounts for."""
    sums = [0] * count
    for fragment, pairs in parts.items():
        for unit, anchors in pairs:
            if unit.is_first_owner:
                sums[fragment] = (sums[fragment] + sum(anchor.bits() for anchor in anchors)) % BITS
    return sums
