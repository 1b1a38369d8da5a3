"""What the rank that decides tells the others of its island."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.plans.federation.orders import (
    ElementSource,
    Orders,
    RankAnswer,
    island_answer,
    parse_answer,
    parse_orders,
    parse_ranks,
)
from atoll.plans.federation.records import Contribution, Member, RoundRecord

MADE = Contribution("b", 1, -1, 4096, 3, digest="ab")
RECORD = RoundRecord(0, "", (MADE,), (Member("a", "1"),), 1, bases=(0, -1))
LATER = RoundRecord(1, RECORD.name, (), (Member("a", "1"),), 1, bases=(0, -1))
ORDERS = Orders(
    2, (MADE,), ("ab", "cd"), (RECORD, LATER), (ElementSource("b", ("10.0.0.1:29600",), ("ab",), anchors=2),)
)


def test_orders_and_answers_are_read_as_they_were_written() -> None:
    assert parse_orders(json.loads(json.dumps(ORDERS.to_json()))) == ORDERS
    for answer in (RankAnswer((), at=None), RankAnswer(("ab",), at=RECORD)):
        assert parse_answer(json.loads(json.dumps(answer.to_json()))) == answer
    assert (ORDERS.last, RankAnswer(("ab",), at=RECORD).anchors, RankAnswer((), at=None).anchors) == (LATER, 1, 0)
    assert Orders(0, (), (), records=(), sources=()).last is None


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ({"round": -1}, "orders.round"),
        ({"wanted": [{}]}, "orders.wanted"),
        ({"records": {}}, "orders.records"),
        ({"sources": [{"island": "b", "ranks": ["nowhere"], "holds": [], "anchors": 0}]}, "source.ranks"),
        ({"sources": [{"island": "b", "ranks": [], "holds": ["xyz"], "anchors": 0}]}, "source.holds"),
        ({"more": 1}, "orders: expected an object"),
    ],
)
def test_malformed_orders_are_refused_with_the_field(damage: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse_orders({**ORDERS.to_json(), **damage})


@pytest.mark.parametrize("place", ["a", ":1", "a:", "a:0", "a:65536", 1, "a:1x"])
def test_what_is_no_address_is_refused(place: object) -> None:
    with pytest.raises(ValueError, match="expected an address"):
        parse_ranks(["10.0.0.1:29600", "[::1]:29600", place])


def test_an_island_has_what_all_of_its_ranks_have() -> None:
    ahead, behind = RankAnswer(("ab", "cd"), at=LATER), RankAnswer(("cd", "ef"), at=RECORD)
    assert island_answer({0: ahead, 1: behind}, 2) == RankAnswer(("cd",), at=RECORD)
    assert island_answer({0: ahead, 1: RankAnswer(("ab",), at=None)}, 2) == RankAnswer(("ab",), at=None)
    assert island_answer({0: ahead}, 2) == RankAnswer((), at=None), "a rank that has not answered has nothing"
