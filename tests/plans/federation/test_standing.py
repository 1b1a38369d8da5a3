"""Where an island stands among the others."""

from __future__ import annotations

import itertools

import pytest

from atoll.plans.federation.records import Contribution, Member, RoundRecord
from atoll.plans.federation.standing import Standing

NAMES = ("a", "b", "c", "d")


def record(counted: tuple[str, ...], members: tuple[str, ...] = NAMES) -> RoundRecord:
    made = tuple(Contribution(island=each, fragment=0, base=-1, tokens=1, used=1, digest=each) for each in counted)
    return RoundRecord(0, "", made, tuple(Member(each, "") for each in members), turn=1, bases=(0,))


def leads(counted: tuple[str, ...], own: str, company: tuple[str, ...], members: tuple[str, ...] = NAMES) -> bool:
    return Standing(Member(own, ""), NAMES, 1).leads(record(counted, members), company)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_of_two_groups_that_miss_each_other_one_adapts(count: int) -> None:
    """Past bug: both left out steps, and so stayed in opposite phase."""
    members = ("a", "b", "c", "d", "e")[:count]
    for size in range(1, count):
        for group in itertools.combinations(members, size):
            rest = tuple(each for each in members if each not in group)
            assert leads(group, rest[0], rest, members) != leads(rest, group[0], group, members)


def test_the_larger_half_leads_and_else_the_earliest_member() -> None:
    assert leads(("b", "c", "d"), "a", ("a",))
    assert not leads(("a",), "b", ("b", "c", "d"))
    assert leads(("a", "d"), "b", ("b", "c"))
    assert not leads(("b", "c"), "a", ("a", "d"))
    assert leads(("b",), "d", ("d",), ("b", "c", "d"))


def test_who_falls_out_of_a_group_is_led_by_the_rest() -> None:
    assert leads(("a", "b"), "c", ("a", "b", "c"), ("a", "b", "c"))
    assert not leads(("c",), "a", ("a", "b", "c"), ("a", "b", "c"))


def test_islands_that_are_no_members_any_more_lead_nobody() -> None:
    assert not leads(("d",), "b", ("b",), ("a", "b", "c"))
