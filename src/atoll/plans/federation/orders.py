"""Messages inside an island: orders of the rank that decides to all ranks, and their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from atoll.plans.federation.records import (
    Contribution,
    Fields,
    RoundRecord,
    read_contribution,
    read_count,
    read_digest,
    read_name,
    read_optional,
    read_record,
    read_tuple,
    rounds_before,
)


@dataclass(frozen=True, slots=True)
class ElementSource:
    """An island from which elements can be read. ranks: where each of its ranks shows them, as `host:port`.

    holds: digests of contributions that it has the elements of.  anchors: rounds that its anchors are after.
    """

    island: str
    ranks: tuple[str, ...]
    holds: tuple[str, ...]
    anchors: int


@dataclass(frozen=True, slots=True)
class Orders:
    """Orders to the ranks of an island: which contributions to fetch and to keep, and the records to step by.

    round: the one that is to be decided.  needed: digests of contributions that are kept.  last: the last record.
    """

    round: int
    wanted: tuple[Contribution, ...]
    needed: tuple[str, ...]
    records: tuple[RoundRecord, ...]
    sources: tuple[ElementSource, ...]

    @property
    def last(self) -> RoundRecord | None:
        """The record before the round."""
        return self.records[-1] if self.records else None

    def to_json(self) -> dict[str, Any]:
        """Return the values of a JSON document, which `parse_orders` reads."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """State of one rank.

    held: digests of the contributions whose elements it has, as far as it needs them.  at: the record that its anchors
    are of, None for the initial values.
    """

    held: tuple[str, ...]
    at: RoundRecord | None

    @property
    def anchors(self) -> int:
        """Rounds that its anchors are after."""
        return rounds_before(self.at)

    def to_json(self) -> dict[str, Any]:
        """Return the values of a JSON document, which `parse_answer` reads."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found


def parse_orders(content: object) -> Orders:
    """Return the orders of a JSON document. Raises ValueError with the field that is not as `Orders` says."""
    fields = Fields(content, "orders", Orders.__slots__)
    return Orders(
        round=fields.read("round", read_count),
        wanted=fields.read("wanted", read_tuple(read_contribution)),
        needed=fields.read("needed", read_tuple(read_digest)),
        records=fields.read("records", read_tuple(read_record)),
        sources=fields.read("sources", read_tuple(_source)),
    )


def parse_answer(content: object) -> RankAnswer:
    """Return the answer of a JSON document. Raises ValueError with the field that is not as `RankAnswer` says."""
    fields = Fields(content, "answer", RankAnswer.__slots__)
    return RankAnswer(fields.read("held", read_tuple(read_digest)), at=fields.read("at", read_optional(read_record)))


def parse_ranks(content: object) -> tuple[str, ...]:
    """Return where the ranks of an island show what they have. Raises ValueError unless these are addresses."""
    return read_tuple(_address)(content)


def _source(value: object) -> ElementSource:
    fields = Fields(value, "source", ElementSource.__slots__)
    return ElementSource(
        island=fields.read("island", read_name),
        ranks=fields.read("ranks", parse_ranks),
        holds=fields.read("holds", read_tuple(read_digest)),
        anchors=fields.read("anchors", read_count),
    )


def _address(value: object) -> str:
    host, _, port = str(value).rpartition(":")
    if not isinstance(value, str) or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"expected an address, host:port, found {value!r:.80}")
    return value


def island_answer(answers: Mapping[int, RankAnswer], ranks: int) -> RankAnswer:
    """Return the state that all ranks of an island have reached. answers: by rank, of those that have answered."""
    if len(answers) < ranks:
        return RankAnswer((), at=None)
    held = set.intersection(*(set(each.held) for each in answers.values()))
    return RankAnswer(tuple(sorted(held)), at=min(answers.values(), key=lambda each: each.anchors).at)
