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
    or was no member                                                   data is read again
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from atoll.base.digests import digest
from atoll.base.errors import PlanError, RunError
from atoll.plans.federation.lots import LotsHeld
from atoll.plans.federation.records import Member, RoundRecord, read_record
from atoll.plans.federation.rounds import FederationRules
from atoll.plans.outer import Outer, OuterAction
from atoll.runtime.federation.elements import PartElements, TensorPart
from atoll.runtime.federation.events import RoundEvent, merged_manifest, run_digest
from atoll.runtime.federation.exchange import IslandExchange
from atoll.runtime.federation.link import IslandLink, agreed_rounds, are_here, stopped_or_ready
from atoll.runtime.federation.rank import logger
from atoll.runtime.federation.seat import IslandSeat
from atoll.runtime.sharding import coding
from atoll.runtime.sharding.anchors import AnchorSteps
from atoll.runtime.sharding.host_anchors import AnchorHoldings, HostAnchor, encoded, raw
from atoll.runtime.sharding.segment import Segment
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.transport import Transport


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
        self._holdings = self._hold(None)
        self._traffic = 0, 0
        self.used = 0
        self.events: list[RoundEvent] = []
        self._tokens = [0] * self.rules.fragments
        self._sent: dict[int, SentFlow] = {}
        self._is_overdue = False
        # Of the last outer gradient that was sent: when, and after which step. Seconds of a step since the one before.
        self._sent_at: tuple[float, int] | None = None
        self._pace: float | None = None
        self._skipped = 0
        # The record that the masters follow, and those after it.
        self.at: RoundRecord | None = None
        self._known: dict[int, RoundRecord] = {}

    def _hold(self, at: RoundRecord | None) -> AnchorHoldings:
        own = {each: list(self._anchors_of(each)) for each in range(self.rules.fragments)}
        bases = (-1,) * self.rules.fragments if at is None else at.bases
        return AnchorHoldings(own, self.outer, item=self._item, bases=bases)

    # ---- of the island

    @property
    def rounds(self) -> int:
        """Rounds that the masters have followed."""
        return 0 if self.at is None else self.at.round + 1

    @property
    def lots(self) -> LotsHeld:
        """The samples of the island, by position in the common order."""
        if self.at is not None:
            return self.at.lots.of(self.seat.name)
        return LotsHeld(self.seat.name, 0, ())

    @property
    def members(self) -> tuple[Member, ...]:
        """The islands that take part in the round."""
        return tuple(Member(each, "") for each in self.seat.first) if self.at is None else self.at.members

    @property
    def is_member(self) -> bool:
        """True if the island takes part in the round."""
        return self._is_among(self.members)

    def _is_among(self, members: Collection[Member]) -> bool:
        own = Member(self.seat.name, "") if self._link is None else self._link.own
        return own in members or Member(self.seat.name, "") in members

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

    # ---- joining and leaving

    @property
    def _opened(self) -> IslandLink:
        if self._link is None:
            raise RunError("the island takes part in no federation yet; call engine.federation.join first")
        return self._link

    def join(self, enough: int = 0, *, stops: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the island may train: it takes part, and has `enough` samples. Every rank calls it.

        stops: whether this rank gives up; return False if any does. Before the first round an island waits for the
        other founders, `silent` seconds at most before it goes on alone.
        """
        if self._link is None:
            self._link = IslandLink(
                self.seat, self.rules, self._holdings, run=self._run, rank=self._transport.place.rank, at=self.at
            )
        elif self._has(enough):
            return True  # rounds are followed where they arrive
        link, begin = self._link, time.monotonic()
        while True:
            self._follow()
            if self.is_member and not self._has(enough):
                # All that it may read is read, and no round has counted it: more is granted once one has.
                self._send_next(-1)
            is_ready = self._has(enough) and link.is_caught_up(self.rounds, self.members, begin)
            stopped, ready = link.met([stops(), is_ready], stopped_or_ready)
            if stopped or ready:
                return not stopped
            link.glance(lambda: link.elements.answer.anchors > self.rounds)

    def _has(self, enough: int) -> bool:
        return self.is_member and self.lots.end - self.used >= enough

    def depart(self, seconds: float, *, hands_over: bool = False) -> None:
        """Leave, with every rank: the others go on. seconds: to be taken at most for what is still to be done.

        hands_over: contribute what the parameters have learned since they last did, to the next round of each fragment.
        """
        link, end = self._link, time.monotonic() + seconds
        if link is None:
            return
        if hands_over and self.is_member:
            for fragment in range(self.rules.fragments):
                if fragment not in self._sent and self._tokens[fragment]:
                    self._send(fragment, -1)
        if link.first is not None:
            link.first.leave()
        is_done = IslandExchange.is_handed_over if hands_over else are_here
        link.wait_for_first(lambda first: is_done(first) and first.is_free, end)
        self.close()

    def finish(self, seconds: float) -> None:
        """Wait for the rounds of what was sent, while any other island answers. Every rank calls it."""
        link, end = self._link, time.monotonic() + seconds
        while link is not None and self._sent:
            self._follow()
            gives_up = time.monotonic() >= end or (link.is_alone and len(self.members) > 1)
            if not self._sent or link.met(gives_up, any):
                break
            link.glance()

    def close(self) -> None:
        """End the exchange. The others take it for an island that is lost, unless `depart` came before."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
            self._traffic = link.traffic

    # ---- steps

    def is_due(self, step: int) -> bool:
        """Return True if there is outer work after `step`."""
        return self._is_overdue or bool(self.outer.turns(step, self._count))

    @torch.no_grad()
    def act(self, step: int) -> int:
        """Do the outer work after `step`; see `AnchorSteps.act`. An island that has missed rounds is at their step."""
        if self._is_overdue:
            self._follow(step=step)
        for way, _ in self.outer.turns(step, self._count):
            if way is OuterAction.ARRIVES:
                self._arrive(step)
                continue
            if not self._sent:
                self._follow(step=step)
            self._send_next(step)
        self._is_overdue = any(sent.step <= step - self.outer.delay for sent in self._sent.values())
        skipped, self._skipped = self._skipped, 0
        return max(step + skipped, self.rounds_step)

    @property
    def rounds_step(self) -> int:
        """The step that islands are at, at least, after the rounds that the masters follow."""
        last = self._averaged - 1
        return self.outer.step_of(last, self._count) if last >= 0 else 0

    @property
    def _averaged(self) -> int:
        """Rounds that have averaged, of those that the masters follow."""
        return 0 if self.at is None else self.at.turn

    def _send_next(self, step: int) -> None:
        """Contribute to the next round that the island has not contributed to."""
        turns = range(self._averaged, self._averaged + self.rules.fragments)
        fragment = next((turn % self.rules.fragments for turn in turns if not self._has_sent(turn)), None)
        if self.is_member and fragment is not None and self._tokens[fragment]:
            self._send(fragment, step)

    def _has_sent(self, turn: int) -> bool:
        return turn % self.rules.fragments in self._sent

    def _send(self, fragment: int, step: int) -> None:
        """Contribute the fragment's outer gradient."""
        link = self._opened
        anchors = list(self._anchors_of(fragment))
        owed = [None if each.residual is None else each.residual.clone() for each in anchors]
        flows, elements = [each.flow() for each in anchors], dict[TensorPart, memoryview]()
        moved = torch.zeros(2, dtype=torch.float64)
        for anchor, flow in zip(anchors, flows, strict=True):
            moved += anchor.moved(flow).cpu()
            elements |= self._elements(anchor, flow)
        is_finite = all(bool(flow.isfinite().all()) for flow in flows)
        manifest = link.met([is_finite, link.elements.offer(elements)], merged_manifest)
        if manifest is None:
            for anchor, before in zip(anchors, owed, strict=True):
                if anchor.residual is not None and before is not None:
                    anchor.residual.copy_(before)
            logger.warning("fragment %d is not sent after step %d: its outer gradient is not finite", fragment, step)
            return
        if self._transport.place.intra == 0 and self._transport.place.inter == 0:
            self._moved += moved
        named = link.elements.hold(manifest.encode())
        tokens = self._tokens[fragment]
        if link.first is not None:
            base = self._holdings.trail[fragment][0]
            link.first.contribute(fragment, manifest.encode(), base=base, tokens=tokens, used=self.used)
        now = time.monotonic()
        if self._sent_at is not None and step > self._sent_at[1] > 0:
            self._pace = (now - self._sent_at[0]) / (step - self._sent_at[1])
        self._sent_at = now, step
        self._sent[fragment] = SentFlow(step, named, tokens, used=self.used, flows=flows, owed=owed)
        self._note("sent", step, fragment=fragment, digest=named, tokens=tokens, used=self.used)

    def _elements(self, anchor: HostAnchor, flow: torch.Tensor) -> PartElements:
        """Return the parts of an outer gradient as they are sent. With a codec it becomes what these decode to."""
        codec, found = self.outer.codec, dict[TensorPart, memoryview]()
        for part, each in anchor.parts():
            values = flow.narrow(0, each.offset, each.stop - each.start)
            if codec is None:
                found[part] = raw(values)
                continue
            lost = None if anchor.residual is None else anchor.residual.narrow(0, each.offset, values.numel())
            place = int(digest(f"{self.seat.name} {part}".encode())[:8], 16)
            seed = coding.noise_seed(self._seed, self.rounds, *anchor.tag, what="outer.send", rank=place, to=0)
            found[part] = raw(encoded(codec, values, residual=lost, seed=seed))
        return found

    def _arrive(self, step: int) -> None:
        """Wait for the round of what was sent `delay` steps ago, and follow it."""
        for fragment in [at for at, sent in self._sent.items() if sent.step == step - self.outer.delay]:
            begin = time.monotonic()
            self._opened.wait(partial(self._holdings.is_ahead, fragment), self.rules.grace)
            self._follow(fragment, step=step, waited=time.monotonic() - begin)

    # ---- following rounds

    def _follow(self, arriving: int | None = None, *, step: int = 0, waited: float = 0.0) -> None:
        """Let the masters follow the rounds that all ranks know. arriving: no further than the round that sets this
        fragment, whose outer gradient arrives now; others that are in flight arrive later."""
        link = self._opened
        with link.elements.lock:
            self._known |= {record.round: record for record in link.elements.records()}
            rounds = link.elements.answer.anchors
            trail = self._holdings.trail[arriving] if arriving is not None else []
            if arriving is not None and len(trail) > 1:
                rounds = min(rounds, trail[1] + 1)
            taken = self._holdings.taken
        rounds, taken = link.met([rounds, taken], agreed_rounds)
        if rounds <= self.rounds or rounds < taken:
            return
        stays = self.is_member and all(
            self._is_among(self._known[each].members) for each in range(self.rounds, rounds) if each in self._known
        )
        if taken > self.rounds or not stays:
            self._restart(rounds, step)
        else:
            self._go_on(rounds, arriving, step=step, waited=waited)
        self._known = {at: record for at, record in self._known.items() if at >= rounds}

    def _go_on(self, rounds: int, arriving: int | None, *, step: int, waited: float) -> None:
        records = tuple(self._known[each] for each in range(self.rounds, rounds))
        counted = {each.digest for record in records for each in record.contributions}
        shifts: dict[int, list[torch.Tensor]] = {}
        mixed: list[int] = []
        late: str | None = None
        with self._opened.elements.lock:
            for fragment in range(self.rules.fragments):
                moves = self._holdings.follow(fragment, rounds)
                if moves is None:
                    continue
                sent = self._sent.pop(fragment, None)
                is_counted = sent is not None and sent.digest in counted
                if sent is not None and is_counted:
                    self._tokens[fragment] -= sent.tokens
                    moves = [move + flow for move, flow in zip(moves, sent.flows, strict=True)]
                elif sent is not None:
                    self._owe(fragment, sent)
                    late = sent.digest
                if is_counted and fragment == arriving:
                    mixed.append(fragment)
                else:
                    shifts[fragment] = moves
            self.at = records[-1]
        share = self.outer.own_share
        self._write(lambda at, anchor: anchor.apply(share=share), mixed)
        flat = [move for fragment in shifts for move in shifts[fragment]]
        self._write(lambda at, anchor: anchor.shift(flat[at]), list(shifts))
        self._note("followed", step, records=records, on_time=tuple(mixed), waited=waited)
        if late is not None and step > 0:
            self._skipped = self._steps_behind(late, records, step)

    def _steps_behind(self, late: str, records: Sequence[RoundRecord], step: int) -> int:
        """Return the steps that the island leaves out, so that it sends its next outer gradient with the others. One
        that was late once would otherwise be so forever: all take equally many steps."""
        behind = self._opened.behind(late, records) / self._pace if self._pace else 0.0
        steps = int(self._opened.met(behind, max))
        following = (at for at in range(step + 1, step + 1 + self.outer.every) if self._sends_after(at))
        return max(0, min(steps, next(following, step + 1) - step - 1))

    def _sends_after(self, step: int) -> bool:
        return any(way is OuterAction.LEAVES for way, _ in self.outer.turns(step, self._count))

    def _owe(self, fragment: int, sent: SentFlow) -> None:
        """Nothing of what was sent has arrived, so nothing of it was lost in encoding."""
        for anchor, before in zip(self._anchors_of(fragment), sent.owed, strict=True):
            if anchor.residual is not None and before is not None:
                anchor.residual.copy_(before)

    def _restart(self, rounds: int, step: int) -> None:
        """Replace the masters by anchors. The island reads from where its data was counted."""
        records = tuple(self._known[each] for each in range(self.rounds, rounds) if each in self._known)
        lost = max(self._tokens)
        with self._opened.elements.lock:
            for fragment in range(self.rules.fragments):
                self._holdings.follow(fragment, rounds)
            self.at = records[-1]
        self._write(lambda at, anchor: anchor.apply(share=0.0))
        self._tokens = [0] * self.rules.fragments
        self._sent.clear()
        for anchor in self._anchors():
            if anchor.residual is not None:
                anchor.residual.zero_()
        self.used = self.lots.counted
        self._note("restarted", step, records=records, lost=lost)

    def _note(self, what: str, step: int, **facts: Any) -> None:
        self.events.append(RoundEvent(what, step, self.rounds - 1, **facts))

    # ---- what is stored

    def adopt(self, names: Collection[str] | None = None) -> None:
        """Set anchors to the island's parameters; see `AnchorSteps.adopt`."""
        if self._link is not None:
            raise RunError(
                "an island of a federation cannot change its parameters by hand: its anchors would differ from those "
                "of the others; change them before it joins, on all islands"
            )
        super().adopt(names)

    def settle(self) -> None:
        """Nothing is stepped early: anchors are those that the masters follow."""

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

    @property
    def facts(self) -> dict[str, int]:
        """Settings of outer steps in a checkpoint."""
        outer = self.outer
        assert outer.apart is not None, "the islands of a federation are worlds of their own"
        fragments = self.rules.fragments
        return {"islands": outer.apart.islands, "every": outer.every, "fragments": fragments, "delay": outer.delay}

    def state(self) -> dict[str, Any]:
        """Return the facts, and where the island is in the rounds."""
        at = None if self.at is None else self.at.to_json()
        own: dict[str, Any] = {"island": self.seat.name, "at": at, "tokens": self._tokens, "used": self.used}
        return {**self.facts, "waiting": [], "federation": own}

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
        self.at = None if at is None else read_record(at)
        self._tokens = [0] * self.rules.fragments if own is None else list(own["tokens"])
        self.used = self.lots.counted if own is None else own["used"]
        self._holdings = self._hold(self.at)
