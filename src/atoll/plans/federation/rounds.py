"""Rounds: which contributions an outer step averages, agreed among islands that may crash, hang or be cut off.

A round sets the anchors of one fragment; the fragments take turns. Every island publishes a notice, and reads those
of the others; no island writes anything of another's, and none is needed by the others. An island steps its anchors by
the records that were decided, so anchors are equal on all islands that know the same records.

                    it has the round's                  a majority holds them,
                    contribution ready                  and votes for the record
        training ------------------> offering ---------------------------------> next round
            |                            |                                            ^
            |                            | the record does not count it: it is late   |
            |                            +--------------------------------------------+
            | it leaves: contributions of all fragments           anchors of all fragments, from the others
            +-------------------> gone - - - - returns - - - -> joining ---------> a member of the next round

[Note: deciding a round] Paxos (Lamport, "The part-time parliament", 1998), once a round, with the notices as registers
of which each has one writer, as in Disk Paxos (Gafni and Lamport, 2003):

    trying     the first member that is heard tries to decide: it publishes a ballot above all that it has seen
    promised   members that see it promise to accept no lower one, and publish what they accepted before
    proposal   after promises of a majority, it proposes the accepted record of the highest ballot, or else its own
    accepted   members vote for the proposal of the highest ballot, once they hold all that its record averages
    decided    a record that a majority has accepted with one ballot, or that any notice has among its records

What is proposed is held by a majority already, not by the island that tries alone: one with a slow link decides for the
others without making them wait for its elements.

A majority is more than half of the members, or half of them with the first one: any two share a member. So one of two
islands goes on if the other one, which came later, is lost. Since who votes holds all contributions, what is decided is
lost only with a majority of the members. An island keeps its notice on disk before it publishes it: after a restart it
votes as if it had only been slow. With an empty disk it is another member (`life`), which does not vote in a round
that it may have voted in. So the first round needs a notice of every founder: an island with an empty disk might be
one that has lost it. If so many members are known to have lost their disks that the others are no majority, all
members have to agree, and these vote as heirs of who they were.

[Note: members] A record names the members of the next round, so all votes of a round are of the same members. An island
that leaves, or that nobody has heard for `away` seconds, is no member from the next round on; one that has the anchors
of this round, or of the one before, becomes one. A record that averages nothing makes members of others if a round
needs more contributions than there are members present, or of heirs; it grants the first lots and lets go who has left.

[Note: late contributions] A contribution is valid for one round: the first of its fragment after the anchors that it
started from were set. If that round does not count it, nothing ever does, so nothing is counted twice. What the island
has learned is still in its parameters, and so in its next contribution if it keeps them.

Nothing here reads a clock, a socket or a disk: `now` are seconds of one clock of the island.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from atoll.plans.federation.records import NO_BALLOT, Ballot, Contribution, Member, Notice, RoundRecord, Wish
from atoll.plans.federation.rules import FederationRules

KEPT_RECORDS = 4
"""Records in a notice. An island that is further behind takes over anchors, and what the last record says."""


@dataclass(frozen=True, slots=True)
class IslandView:
    """Knowledge of one island.

    own: its notice.  others: the last notice of each other island.  heard: when that notice changed.

    ready: since when it has held the contributions that the round needs; lost: since when it knows no island that has
    the current anchors; gone: since when it knows none that has what a proposal averages; tried: when it last tried
    to decide.
    """

    own: Notice
    others: Mapping[str, Notice] = field(default_factory=dict)
    heard: Mapping[str, float] = field(default_factory=dict)
    ready: float | None = None
    lost: float | None = None
    gone: float | None = None
    tried: float | None = None

    @property
    def notices(self) -> Iterator[Notice]:
        """Every notice, that of the island itself first."""
        return chain((self.own,), self.others.values())


def begin(notice: Notice, rules: FederationRules, now: float) -> IslandView:
    """Return what an island knows when it starts: its notice, new or from its disk."""
    return _listen(IslandView(notice), rules, now)


def hear(view: IslandView, notice: Notice, now: float) -> IslandView:
    """Return the view after reading a notice, or after hearing that the last one still holds.

    Raises ValueError for a notice of another run, of another history, or of another process with this island's name.
    """
    own, island = view.own, notice.island
    if island == own.island:
        raise ValueError(f"island {island!r} is the name of two islands; give each a name of its own")
    if notice.run != own.run:
        raise ValueError(
            f"island {island!r} trains something else (run {notice.run}, here {own.run}): model, data, outer steps and "
            "the rules of the federation must be the same on all islands"
        )
    if notice.initial and own.initial and notice.initial != own.initial:
        raise ValueError(
            f"island {island!r} begins from other values of the parameters ({notice.initial}, here {own.initial}): the "
            "weights that a run starts from must be the same on all islands"
        )
    if notice.round == own.round and notice.chain != own.chain:
        raise ValueError(
            f"island {island!r} has another history: its records before round {notice.round} end with {notice.chain}, "
            f"here with {own.chain}. Start it in an empty run folder"
        )
    for record in own.records:
        if any(each.round == record.round and each.name != record.name for each in notice.records):
            raise ValueError(f"island {island!r} has another history: its record of round {record.round} differs")
    before = view.others.get(island)
    if before is not None and before.life == notice.life and before.beat > notice.beat:
        raise ValueError(f"island {island!r} shows notice {notice.beat} after notice {before.beat}: an old one")
    return replace(view, others={**view.others, island: notice}, heard={**view.heard, island: now})


def wanted(view: IslandView, rules: FederationRules) -> list[Contribution]:
    """Return the contributions whose elements the island should read from any island that holds them."""
    own = view.own
    decided = [each for record in own.records if record.round >= own.anchors for each in record.contributions]
    current = [each for notice in view.notices for each in notice.contributions if rules.is_open(each, own)]
    proposed = [
        each
        for notice in view.notices
        for record in _records_of(notice)
        if record.round == own.round
        for each in record.contributions
    ]
    found = {each.digest: each for each in (*decided, *current, *proposed) if each.digest not in own.holds}
    return list(found.values())


def advance(view: IslandView, rules: FederationRules, now: float) -> IslandView:
    """Return the view after everything that the island can decide from the notices that it knows."""
    view = _listen(_learn(view, rules), rules, now)
    if any(notice is view.own for _, notice in _voters(view, rules)):
        view = _promise(_notice_times(view, rules, now), rules)
        view = _accept(view, rules, now)
        view = _propose(view, rules, now)
        view = _learn(view, rules)
    needed = {each.digest for notice in view.notices for each in _named_in(notice)}
    return replace(view, own=replace(view.own, holds=view.own.holds & needed))


def lost_members(view: IslandView, members: Collection[Member]) -> set[Member]:
    """Return the members that are known to have lost their disks: other lives have their names."""
    lives = {notice.island: notice.life for notice in view.notices}
    return {each for each in members if each.life and lives.get(each.island, each.life) != each.life}


def decides(voters: Collection[Member], members: Sequence[Member]) -> bool:
    """Return True if these members are a majority."""
    count = sum(member in voters for member in members)
    return 2 * count > len(members) or (2 * count == len(members) and members[0] in voters)


# ---- what is decided


def _listen(view: IslandView, rules: FederationRules, now: float) -> IslandView:
    """Members that were never heard are silent from now on."""
    new = {each.island: now for each in rules.members(view.own) if each.island not in view.heard}
    return replace(view, heard={**new, **view.heard}) if new else view


def _learn(view: IslandView, rules: FederationRules) -> IslandView:
    while True:
        record = _decided(view, rules)
        if record is None:
            return _jump(view)
        view = replace(
            view, own=view.own.after(record, kept=KEPT_RECORDS), ready=None, lost=None, gone=None, tried=None
        )


def _decided(view: IslandView, rules: FederationRules) -> RoundRecord | None:
    own = view.own
    for notice in view.others.values():
        for record in notice.records:
            if record.round == own.round and record.before == own.chain:
                return record
    votes: dict[tuple[Ballot, str], set[Member]] = {}
    for member, notice in _voters(view, rules):
        if notice.accepted is not None:
            ballot, record = notice.accepted
            voters = votes.setdefault((ballot, record.name), set())
            voters.add(member)
            if _carries(view, rules, voters):
                return record
    return None


def _jump(view: IslandView) -> IslandView:
    """Take over the last records of another island, if it does not have the next one of this island any more."""
    own = view.own
    ahead = [notice for notice in view.others.values() if notice.round > own.round]
    if not ahead:
        return view
    to = max(ahead, key=lambda notice: notice.round)
    last = to.records[-1]
    own = replace(own, records=to.records[:-1], round=last.round, chain=last.before).after(last, kept=KEPT_RECORDS)
    return replace(view, own=own, ready=None, lost=None, gone=None, tried=None)


def _voters(view: IslandView, rules: FederationRules) -> Iterator[tuple[Member, Notice]]:
    """Yield the members whose notices are of the round, with these: see [Note: deciding a round]."""
    members, own = rules.members(view.own), view.own
    notices = {notice.island: notice for notice in view.notices}
    if not own.records and any(each.island not in notices for each in members):
        return
    for member in members:
        notice = notices.get(member.island)
        is_of_round = notice is not None and (notice.round, notice.chain) == (own.round, own.chain)
        if notice is not None and is_of_round and (notice.is_one_of([member]) or _heirs_vote(view, members)):
            yield member, notice


def _heirs_vote(view: IslandView, members: Sequence[Member]) -> bool:
    """Return True if the members that have not lost their disks are no majority."""
    lost = lost_members(view, members)
    return bool(lost) and not decides(set(members) - lost, members)


def _carries(view: IslandView, rules: FederationRules, voters: Collection[Member]) -> bool:
    members = rules.members(view.own)
    return set(members) <= set(voters) if _heirs_vote(view, members) else decides(voters, members)


# ---- votes


def _promise(view: IslandView, rules: FederationRules) -> IslandView:
    top = max(notice.trying for _, notice in _voters(view, rules))
    return view if top <= view.own.promised else replace(view, own=replace(view.own, promised=top))


def _accept(view: IslandView, rules: FederationRules, now: float) -> IslandView:
    own = view.own
    # A record may have been decided by members that were then restarted. Without what it averages it has to be decided
    # all the same, and older anchors are restored in the next round.
    is_gone = view.gone is not None and now - view.gone >= rules.lost
    proposals = {
        notice.trying: notice.proposal
        for _, notice in _voters(view, rules)
        if notice.proposal is not None and notice.trying >= own.promised and (own.has(notice.proposal) or is_gone)
    }
    if not proposals:
        return view
    ballot = max(proposals)
    return replace(view, own=replace(own, promised=ballot, accepted=(ballot, proposals[ballot])))


def _propose(view: IslandView, rules: FederationRules, now: float) -> IslandView:
    own, members = view.own, rules.members(view.own)
    voters = dict(_voters(view, rules))
    first = next(each for each in members if each.island == own.island or _can_lead(view, each, rules, now))
    if first.island != own.island:
        return view
    # What was proposed since one voter had accepted it may be held by nobody else, and its voter be gone.
    is_stuck = own.proposal is not None and not any(
        notice.has(own.proposal) for member, notice in voters.items() if _is_own_or_heard(view, member, rules, now)
    )
    if own.trying == NO_BALLOT or is_stuck or own.trying < max(notice.promised for notice in voters.values()):
        is_begun = any(notice.accepted is not None for notice in voters.values())
        if not is_begun and _outcome(view, rules, now) is None:
            return view
        # Two that try in turns, since each hears only one of two directions, give way for different times.
        patience = (1 + members.index(first)) * rules.silent / len(members)
        if view.tried is not None and now - view.tried < patience:
            return view
        attempt = 1 + max(max(notice.promised, notice.trying).attempt for notice in voters.values())
        ballot = Ballot(attempt, own.island)
        own = replace(own, trying=ballot, promised=ballot, proposal=None)
        view = replace(view, own=own, tried=now)
        voters = dict(_voters(view, rules))
    if own.proposal is None:
        promised = {member: notice for member, notice in voters.items() if notice.promised == own.trying}
        if not _carries(view, rules, promised.keys()):
            return view
        before = max((each.accepted for each in promised.values() if each.accepted), key=_ballot_of, default=None)
        record = _outcome(view, rules, now) if before is None else before[1]
        if record is None:
            return view
        view = _accept(replace(view, own=replace(own, proposal=record)), rules, now)
    return view


def _can_lead(view: IslandView, member: Member, rules: FederationRules, now: float) -> bool:
    members = rules.members(view.own)
    return _is_own_or_heard(view, member, rules, now) and (
        member not in lost_members(view, members) or _heirs_vote(view, members)
    )


def _ballot_of(vote: tuple[Ballot, RoundRecord]) -> Ballot:
    return vote[0]


# ---- the outcome that an island proposes


def _outcome(view: IslandView, rules: FederationRules, now: float) -> RoundRecord | None:
    """Return the record that the island proposes; None if the round needs more, or waits for others."""
    own = view.own
    if view.lost is not None and now - view.lost >= rules.lost:
        heard = [own, *(each for each in view.others.values() if _is_heard(view, each.own, rules, now))]
        latest = max(heard, key=lambda notice: notice.anchors)
        return _record(view, rules, now, counted=(), restored=latest)
    members = rules.members(own)
    changed = _record(view, rules, now, counted=())
    known = {*members, *(notice.own for notice in view.notices if notice.is_one_of(members))}
    leaving = any(notice.wish is Wish.OUT and notice.is_one_of(members) for notice in view.notices)
    if (leaving and set(changed.members) != set(members)) or set(changed.members) - known:
        # At once: who has left must not be needed for a majority any more, though its contributions still count; who
        # has come can contribute to this round.
        return changed
    if view.ready is None:
        record = changed
        present = sum(_can_lead(view, each, rules, now) for each in members if each.island != own.island)
        grows = 1 + present < rules.quorum and not set(record.members) <= set(members)
        # Nobody has anything to read before the first record.
        begins = not own.records and any(each.ranges for each in record.lots.held)
        return record if grows or begins or _heirs_vote(view, members) else None
    counted = _counted(view, rules, now)
    missing = {each.island for each in members} - {each.island for each in counted}
    waits = any(_can_lead(view, each, rules, now) for each in members if each.island in missing)
    if waits and now - view.ready < rules.grace:
        return None
    return _record(view, rules, now, counted=counted)


def _record(
    view: IslandView,
    rules: FederationRules,
    now: float,
    *,
    counted: Sequence[Contribution],
    restored: Notice | None = None,
) -> RoundRecord:
    own, before = view.own, rules.members(view.own)
    lives = {notice.island: notice.own for notice in view.notices}
    heirs = _heirs_vote(view, before)
    # The lives of founders are known by now.
    stay = [
        lives.get(each.island, each) if heirs or not each.life else each
        for each in before
        if _stays(view, each, rules, now)
    ]
    joining = [
        notice.own
        for _, notice in sorted(view.others.items())
        if notice.wish is Wish.IN
        and not notice.is_one_of((*before, *stay))
        and _has_come(notice, own)
        and _is_heard(view, notice.own, rules, now)
    ]
    members = (*stay, *joining) or (own.own,)
    lots = rules.lots(own)
    if restored is not None:  # all is read again that was granted since
        lots = rules.lots(replace(own, records=() if restored.at is None else (restored.at,)))
    for each in counted:
        lots = lots.counted(each.island, each.used)
    stocks = {notice.island: notice.stock for notice in view.notices}
    kept = {each.island for each in members if each in before or Member(each.island, "") in before}
    for held in lots.held:
        if held.island not in kept:
            lots = lots.released(held.island)
    for member in members:
        lots = lots.granted(member.island, stock=stocks.get(member.island, 0))
    sets = {each.fragment for each in counted} if restored is None else set(range(rules.fragments))
    bases = tuple(own.round if at in sets else base for at, base in enumerate(rules.bases(own)))
    return RoundRecord(
        own.round,
        own.chain,
        tuple(counted),
        members=members,
        turn=rules.turn(own) + bool(counted),
        bases=bases,
        lots=lots,
        restored=None if restored is None else restored.anchors,
    )


def _has_come(notice: Notice, own: Notice) -> bool:
    """Return True if an island has the anchors of the round, or of the one before: where rounds follow each other
    quickly, it would never be seen with those of this one. It steps to them as slow members do."""
    known = [(own.round, own.chain), *((record.round, record.before) for record in own.records[-1:])]
    return notice.anchors == notice.round and (notice.round, notice.chain) in known


def _stays(view: IslandView, member: Member, rules: FederationRules, now: float) -> bool:
    if member.island == view.own.island:
        return view.own.wish is Wish.IN
    notice = view.others.get(member.island)
    if notice is not None and notice.wish is Wish.OUT:
        return False
    members = rules.members(view.own)
    if member in lost_members(view, members) and not _heirs_vote(view, members):
        return False
    return now - view.heard[member.island] < rules.away


def _counted(view: IslandView, rules: FederationRules, now: float) -> list[Contribution]:
    """Return the contributions that the round may count and a majority holds, as many as possible: those of members
    first, in their order, then those of islands that have left."""
    own, members = view.own, rules.members(view.own)
    order = {each.island: at for at, each in enumerate(members)}
    valid = {
        each.digest: each
        for notice in view.notices
        for each in notice.contributions
        if rules.is_valid(each, own) and (notice.is_one_of(members) or notice.wish is Wish.OUT)
    }
    heard = [(member, notice) for member, notice in _voters(view, rules) if _is_own_or_heard(view, member, rules, now)]
    by_most = sorted(heard, key=lambda voter: -len(valid.keys() & voter[1].holds))
    # Half of the members decide with the first one among them, who may hold less than others.
    by_first = sorted(by_most, key=lambda voter: voter[0] != members[0])
    found = max((_held_by_majority(view, rules, each, valid.keys()) for each in (by_most, by_first)), key=len)
    counted = [valid[digest] for digest in found]
    return sorted(counted, key=lambda each: (order.get(each.island, len(order)), each.island))


def _held_by_majority(
    view: IslandView, rules: FederationRules, voters: Sequence[tuple[Member, Notice]], digests: Collection[str]
) -> set[str]:
    """Return the digests that the first voters hold who are a majority."""
    held, enough = set(digests), list[Member]()
    for member, notice in voters:
        held &= notice.holds
        enough.append(member)
        if _carries(view, rules, enough):
            return held
    return set()


def _notice_times(view: IslandView, rules: FederationRules, now: float) -> IslandView:
    """Note since when the round could be decided, nobody has the current anchors, or what a proposal averages."""
    is_ready = len(_counted(view, rules, now)) >= rules.quorum
    heard = [view.own, *(each for each in view.others.values() if _is_heard(view, each.own, rules, now))]
    is_lost = not any(_can_step(each, view.own) for each in heard)
    held = frozenset[str]().union(*(each.holds for each in heard))
    proposed = [record for _, notice in _voters(view, rules) for record in _records_of(notice)]
    is_gone = any(each.digest not in held for record in proposed for each in record.contributions)
    ready = (now if view.ready is None else view.ready) if is_ready else None
    lost = (now if view.lost is None else view.lost) if is_lost else None
    gone = (now if view.gone is None else view.gone) if is_gone else None
    return replace(view, ready=ready, lost=lost, gone=gone)


def _can_step(notice: Notice, own: Notice) -> bool:
    """Return True if an island has the anchors of the round, or all that it needs to step to them."""
    missing = [record for record in own.records if record.round >= notice.anchors]
    return len(missing) == own.round - notice.anchors and all(notice.has(record) for record in missing)


def _is_heard(view: IslandView, member: Member, rules: FederationRules, now: float) -> bool:
    return now - view.heard.get(member.island, float("-inf")) <= rules.silent


def _is_own_or_heard(view: IslandView, member: Member, rules: FederationRules, now: float) -> bool:
    return member.island == view.own.island or _is_heard(view, member, rules, now)


def _records_of(notice: Notice) -> Iterator[RoundRecord]:
    if notice.proposal is not None:
        yield notice.proposal
    if notice.accepted is not None:
        yield notice.accepted[1]


def _named_in(notice: Notice) -> Iterator[Contribution]:
    records: Iterable[RoundRecord] = (*notice.records, *_records_of(notice))
    return chain(notice.contributions, *(record.contributions for record in records))
