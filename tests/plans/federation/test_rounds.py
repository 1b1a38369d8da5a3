"""Rounds among islands that crash, hang, are cut off, leave and return, in orders that hypothesis draws."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.plans.federation.records import Ballot, Member, Notice, Wish, parse_notice
from atoll.plans.federation.rounds import begin, decides, hear
from atoll.plans.federation.rules import FederationRules
from tests.plans.federation.simulated import Federation, lot_numbers

RULES = FederationRules(founders=("a", "b", "c"), fragments=2, quorum=1, grace=5.0, silent=4.0, away=20.0)
EVENTS = (
    "run",
    "glance",
    "run",
    "glance",
    "contribute",
    "wait",
    "long",
    "save",
    "kill",
    "wipe",
    "cut",
    "mend",
    "leave",
    "isolate",
    "join",
)


def disturb(federation: Federation, events: list[tuple[str, int]]) -> None:
    for what, number in events:
        island = federation.islands[number % len(federation.islands)]
        other = federation.islands[(number // 7 + number + 1) % len(federation.islands)]
        link = frozenset((island.name, other.name))
        if what in ("kill", "wipe"):
            federation.stop(island, wipes=what == "wipe")
        elif not island.is_up:
            federation.start(island)
        elif what == "run":
            federation.run(island)
        elif what == "glance":
            federation.run(island, sees=number // 7)
        elif what == "contribute":
            federation.contribute(island, reads=number % 3)
        elif what in ("wait", "long"):
            federation.now += number % 5 if what == "wait" else 15.0
        elif what == "save":
            federation.save(island)
        elif what == "cut":
            federation.cut.add(link)
        elif what == "mend":
            federation.cut.discard(link)
        elif what == "isolate":
            federation.cut |= {frozenset((island.name, each.name)) for each in federation.islands if each is not island}
        elif what == "join":
            federation.cut.clear()
        elif what == "leave":
            federation.leave(island)
        federation.check()


def mend(federation: Federation) -> None:
    federation.cut.clear()
    for island in federation.islands:
        if not island.is_up or island.own.wish is Wish.OUT:
            federation.stop(island)
            federation.start(island)


def is_whole(federation: Federation, beyond: int) -> bool:
    """Return True if rounds go on, and every island is a member again that has the current anchors."""
    last = max(federation.decided, default=-1)
    return last >= beyond and all(
        island.own.own in federation.decided[last].members and island.own.anchors >= last
        for island in federation.islands
    )


def judge(federation: Federation, events: list[tuple[str, int]]) -> None:
    disturb(federation, events)
    mend(federation)
    beyond = max(federation.decided, default=-1) + 4
    federation.settle(400.0, until=lambda: is_whole(federation, beyond))
    assert is_whole(federation, beyond), "not all islands take part again once everything is mended"


@given(
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 200)), max_size=100),
    names=st.sampled_from(["ab", "abc", "abcd"]),
    quorum=st.integers(1, 2),
    joins=st.booleans(),
)
@settings(max_examples=30)
def test_no_order_of_failures_decides_twice_or_ends_a_federation(
    events: list[tuple[str, int]], names: str, quorum: int, joins: bool
) -> None:
    founders = tuple(names[:-1] if joins and len(names) > 2 else names)
    judge(Federation(names, replace(RULES, founders=founders, quorum=quorum)), events)


@pytest.mark.wide(1)
@pytest.mark.parametrize("block", range(20))
def test_long_histories(block: int) -> None:
    """Hundreds of events each; in half of them islands are cut off again and again, and see a part of the others."""
    for seed in range(15 * block, 15 * (block + 1)):
        draw = random.Random(seed)
        names = draw.choice(["ab", "abc", "abcd", "abcde"])
        rules = replace(RULES, founders=tuple(names), quorum=draw.randint(1, 2), grace=draw.choice([0.0, 5.0]))
        kinds = [each for each in EVENTS if each in ("run", "glance", "contribute", "wait") or draw.random() < 0.6]
        if seed % 2:
            kinds = ["glance"] * 6 + ["run"] * 2 + ["contribute"] * 3 + ["wait", "long", "isolate", "join"]
        count = draw.choice([60, 300, 800])
        judge(Federation(names, rules), [(draw.choice(kinds), draw.randrange(200)) for _ in range(count)])


def test_undisturbed_rounds_count_everyone_and_share_the_lots() -> None:
    federation = Federation("abc", RULES)
    federation.settle(60.0)
    assert len(federation.decided) >= 15
    read: list[int] = []
    before = federation.rules.lots(replace(federation.islands[0].own, records=()))
    for _, record in sorted(federation.decided.items()):
        assert [each.island for each in record.contributions] == ["a", "b", "c"]
        for name in "abc":
            gone = record.lots.of(name).counted - before.of(name).counted
            read += list(lot_numbers(before.of(name).ranges))[:gone]
        before = record.lots
    held = [number for each in before.held for number in lot_numbers(each.ranges)]
    assert len(read) > 30
    assert sorted([*read, *held]) == list(range(before.fresh)), "each lot is read by one island"


@pytest.mark.wide(1)
@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_any_two_of_three_islands_go_on(lost: str) -> None:
    federation = Federation("abc", RULES)
    federation.settle(20.0)
    (island,) = (each for each in federation.islands if each.name == lost)
    federation.stop(island)
    before = max(federation.decided)
    federation.settle(40.0)
    assert max(federation.decided) > before + 4
    # It is no member any more, and nobody waits for it.
    assert {each.island for each in federation.decided[max(federation.decided)].members} == set("abc") - {lost}
    before = max(federation.decided)
    federation.settle(20.0)
    assert max(federation.decided) >= before + 5
    federation.start(island)
    federation.settle(20.0)
    assert {each.island for each in federation.decided[max(federation.decided)].members} == set("abc")


def test_the_one_of_two_that_came_first_goes_on_alone() -> None:
    federation = Federation("ab", replace(RULES, founders=("a", "b")))
    federation.settle(10.0)
    first, second = federation.islands
    federation.stop(second)
    before = max(federation.decided)
    federation.settle(60.0)
    assert max(federation.decided) > before + 5
    federation.start(second)
    federation.settle(20.0)
    federation.stop(first)
    before = max(federation.decided)
    federation.settle(60.0)
    assert max(federation.decided) == before, "the other half could go on as well: two histories"


def test_a_round_waits_for_grace_and_for_its_quorum() -> None:
    federation = Federation("abc", replace(RULES, quorum=2), stock=0)
    a, b, c = federation.islands

    def turn() -> None:
        for island in (a, b, c):
            federation.run(island)
        federation.now += 1.0

    for _ in range(3):
        turn()
    federation.contribute(a)
    for _ in range(10):
        turn()
    assert not federation.decided, "one contribution of two"
    federation.contribute(b)
    for _ in range(4):
        turn()
    assert not federation.decided, "the third island is heard, and has some seconds left"
    for _ in range(4):
        turn()
    assert [each.island for each in federation.decided[0].contributions] == ["a", "b"]
    assert c.own.round == 1
    # What comes late is not counted by this round nor the next: it started from other anchors.
    federation.contribute(c)
    assert [each.base for each in c.own.contributions] == [-1]


@pytest.mark.parametrize("late", ["a", "b", "c"])
def test_a_round_waits_for_the_island_that_decides_it_as_for_others(late: str) -> None:
    federation = Federation("abc", RULES, stock=0)
    for _ in range(10):  # longer than until an island is silent
        for island in federation.islands:
            federation.run(island)
        federation.now += 1.0
    for island in federation.islands:
        if island.name != late:
            federation.contribute(island)
    for second in range(8):
        for island in federation.islands:
            if island.name == late and second == 3:  # of the 5 of grace
                federation.contribute(island)
            federation.run(island)
        federation.now += 1.0
    assert [each.island for each in federation.decided[0].contributions] == ["a", "b", "c"]


def test_what_an_island_hands_over_counts_after_it_has_gone() -> None:
    federation = Federation("abc", RULES)
    federation.settle(5.0)
    gone = federation.islands[2]
    while gone.own.anchors != gone.own.round:
        federation.settle(1.0)
    federation.leave(gone)
    last = {each.digest for each in gone.own.contributions}
    assert len(last) == RULES.fragments
    for island in federation.islands[:2]:
        federation.run(island)
    federation.stop(gone)
    federation.settle(20.0)
    counted = {each.digest for record in federation.decided.values() for each in record.contributions}
    assert last <= counted


def test_an_island_that_is_never_seen_in_the_current_round_becomes_a_member() -> None:
    """Rounds are faster than notices: what a sees of c is always of the round before."""
    federation = Federation("abc", replace(RULES, grace=0.0, silent=1.0, away=1.0))
    federation.settle(5.0)
    a, b, c = federation.islands
    federation.stop(c, wipes=True)
    federation.settle(5.0)
    assert c.name not in {each.island for each in federation.rules.members(a.own)}
    federation.start(c)
    for _ in range(4):
        federation.run(c)
        before = a.own.round
        assert c.own.round == c.own.anchors == before
        while a.own.round == before:
            for island in (a, b):
                federation.contribute(island)
                federation.run(island, sees=0b011)
        federation.run(b, sees=0b011)
        for island in (a, b) * 4:
            federation.run(island)
    assert c.own.own in federation.rules.members(a.own)
    federation.settle(10.0)
    counted = [each.island for each in federation.decided[max(federation.decided)].contributions]
    assert is_whole(federation, a.own.round - 1), counted


def test_anchors_that_are_lost_with_all_islands_are_those_of_the_last_checkpoint() -> None:
    federation = Federation("abc", replace(RULES, lost=10.0))
    federation.settle(10.0)
    federation.save(federation.islands[1])
    saved = federation.islands[1].own.anchors
    anchors = list(federation.islands[1].anchors)
    lots = federation.rules.lots(replace(federation.islands[1].own, records=(federation.islands[1].own.at,)))
    federation.settle(10.0)
    for island in federation.islands:
        federation.stop(island)
    before = max(federation.decided)
    for island in federation.islands:
        federation.start(island)
    federation.settle(40.0, reads=0)
    (restored,) = (each for each in federation.decided.values() if each.restored is not None)
    assert (restored.round, restored.restored) == (before + 1, saved)
    assert restored.lots == lots
    assert all(base == restored.round for base in restored.bases)
    assert federation.islands[0].anchors != anchors, "they have trained on"


def test_notices_are_refused_by_name() -> None:
    own = Notice("a", "1", "ab")
    view = begin(own, RULES, 0.0)
    with pytest.raises(ValueError, match="name of two islands"):
        hear(view, Notice("a", "2", "ab"), 1.0)
    with pytest.raises(ValueError, match="trains something else"):
        hear(view, Notice("b", "1", "cd"), 1.0)
    with pytest.raises(ValueError, match="another history"):
        hear(view, Notice("b", "1", "ab", chain="12"), 1.0)
    begun = begin(replace(own, initial="12"), RULES, 0.0)
    with pytest.raises(ValueError, match=r"'b' begins from other values of the parameters \(34, here 12\)"):
        hear(begun, Notice("b", "1", "ab", initial="34"), 1.0)
    for known in ("12", ""):
        assert "b" in hear(begun, Notice("b", "1", "ab", initial=known), 1.0).others
    view = hear(view, Notice("b", "1", "ab", beat=4), 1.0)
    assert view.heard["b"] == 1.0
    assert hear(view, Notice("b", "1", "ab", beat=4), 2.0).heard["b"] == 2.0, "it says that nothing has changed"
    with pytest.raises(ValueError, match="an old one"):
        hear(view, Notice("b", "1", "ab", beat=3), 2.0)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ({"beat": -1}, "beat"),
        ({"beat": True}, "beat"),
        ({"beat": 1.5}, "beat"),
        ({"island": "a b"}, "island"),
        ({"island": "../a"}, "island"),
        ({"life": "xyz"}, "life"),
        ({"wish": "maybe"}, "wish"),
        ({"holds": "12"}, "holds"),
        ({"promised": [1]}, "promised"),
        ({"round": 1}, "records of rounds"),
        ({"chain": "12"}, "chain 12 is not"),
        ({"more": 1}, "expected an object"),
        ({"records": [{}]}, "records"),
        ({"contributions": [{"island": "b"}]}, "contributions"),
    ],
)
def test_malformed_notices_are_refused_with_the_field(damage: dict[str, Any], what: str) -> None:
    federation = Federation("abc", RULES)
    federation.settle(12.0)
    whole = federation.islands[0].own.to_json()
    assert parse_notice(whole) == federation.islands[0].own
    with pytest.raises(ValueError, match=what):
        parse_notice({**Notice("a", "1", "ab").to_json(), **damage})


@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.floats(),
        lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    )
)
@example(dict.fromkeys(Notice.__slots__))
def test_any_document_is_read_or_refused(content: Any) -> None:
    with pytest.raises(ValueError):
        parse_notice(json.loads(json.dumps(content)))


@given(st.integers(1, 7), st.data())
def test_two_majorities_share_a_member(count: int, data: st.DataObject) -> None:
    members = [Member(str(each), "1") for each in range(count)]
    one, other = (set(data.draw(st.lists(st.sampled_from(members)))) for _ in range(2))
    if decides(one, members) and decides(other, members):
        assert one & other


def test_a_ballot_is_of_one_island() -> None:
    assert Ballot() < Ballot(1, "a") < Ballot(1, "b") < Ballot(2, "a")


def leads(federation: Federation, names: str) -> None:
    """Let islands run in turns."""
    for name in names:
        (island,) = (each for each in federation.islands if each.name == name)
        federation.run(island)


def cut_off(federation: Federation, name: str) -> None:
    federation.cut = {frozenset((name, each.name)) for each in federation.islands if each.name != name}


def test_what_one_island_may_have_decided_is_decided_by_the_others() -> None:
    """b sees three votes of five, decides, and is cut off with a before it says so; d has contributed meanwhile."""
    federation = Federation("abcde", replace(RULES, founders=tuple("abcde"), grace=0.0), stock=0)
    a, b, c, d, e = federation.islands
    leads(federation, "abcde" * 2)
    federation.contribute(a)
    leads(federation, "bcdea")  # all read; a tries
    leads(federation, "bcacb")  # b and c promise; a proposes; c and b vote
    assert (a.own.round, b.own.round, c.own.round) == (0, 1, 0)
    federation.cut = {frozenset((one, each)) for one in "ab" for each in "abcde" if one != each}
    federation.now += 10.0
    federation.contribute(d)
    leads(federation, "cdec")
    assert c.own.trying > a.own.trying
    leads(federation, "dec" * 4)
    assert (c.own.round, d.own.round, e.own.round) == (1, 1, 1)
    assert [each.island for each in federation.decided[0].contributions] == ["a"], "d would have been counted as well"


def test_a_promise_is_kept() -> None:
    """a proposes, is cut off before b hears it, and b and c decide otherwise: b must not vote for a's afterwards."""
    federation = Federation("abc", replace(RULES, grace=0.0), stock=0)
    a, b, c = federation.islands
    leads(federation, "abcabc")
    federation.contribute(a)
    leads(federation, "baba")
    assert a.own.proposal is not None
    assert b.own.accepted is None
    cut_off(federation, "a")
    federation.now += 10.0
    federation.contribute(c)
    leads(federation, "cbc")
    assert c.own.promised == b.own.trying > a.own.trying
    # a and c hear each other now, and nobody hears b.
    cut_off(federation, "b")
    leads(federation, "c")
    assert (c.own.promised, c.own.accepted) == (b.own.trying, None), "a vote for less than what was promised"
    federation.cut.clear()
    federation.settle(30.0, until=lambda: len(federation.decided) > 1)
    assert len(federation.decided) > 1


def test_who_does_not_hold_what_a_record_averages_does_not_vote_for_it() -> None:
    federation = Federation("abc", replace(RULES, grace=0.0), stock=0)
    a, b, _ = federation.islands
    leads(federation, "abcabc")
    federation.contribute(a)
    federation.thin = {"a"}
    leads(federation, "abcab")
    assert a.own.trying == Ballot(), "it would ask for votes that nobody gives"
    federation.thin.clear()
    leads(federation, "caca")
    assert a.own.proposal is not None
    federation.thin = {"a"}
    cut_off(federation, "c")
    leads(federation, "abab")
    assert b.own.promised == a.own.trying
    assert b.own.accepted is None
    federation.thin.clear()
    leads(federation, "ba")
    assert federation.decided


def test_an_island_that_lacks_elements_decides_for_those_that_have_them() -> None:
    """a, the first member, is on a slow link: nobody gets its elements, and it gets those of nobody."""
    federation = Federation("abcd", replace(RULES, founders=tuple("abcd")), stock=0)
    a, *others = federation.islands
    leads(federation, "abcd" * 2)
    for island in federation.islands:
        federation.contribute(island)
    federation.thin = {"a"}
    while not federation.decided:
        leads(federation, "abcd")
        federation.now += 1.0
        assert federation.now < 2 * RULES.grace, "they wait for an island that has nothing to give"
    leads(federation, "abcd")
    assert [each.island for each in federation.decided[0].contributions] == ["b", "c", "d"]
    assert [each.own.round for each in federation.islands] == [1] * 4
    assert [each.own.anchors for each in federation.islands] == [0, 1, 1, 1]
    # What it gets later it steps by.
    federation.thin.clear()
    leads(federation, "a")
    assert (a.own.anchors, a.anchors) == (1, others[0].anchors)


def test_a_vote_whose_elements_are_gone_everywhere_ends_no_federation() -> None:
    """a votes, and is restarted together with b, the only other one that had its elements. It is bound to its vote."""
    federation = Federation("abc", replace(RULES, grace=0.0, lost=10.0), stock=0)
    a, b, _ = federation.islands
    leads(federation, "abcabc")
    federation.contribute(a)
    federation.cut = {frozenset("ac"), frozenset("bc")}
    leads(federation, "baba")
    accepted = a.own.accepted
    assert accepted is not None
    for island in (a, b):
        federation.stop(island)
        federation.start(island)
    federation.cut.clear()
    federation.settle(60.0, until=lambda: len(federation.decided) > 3)
    assert federation.decided[0] == accepted[1]
    assert federation.decided[1].restored == 0, "nobody can step by the first record"
    assert len(federation.decided) > 3
