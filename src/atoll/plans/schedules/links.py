"""Links between pipeline ranks: the time of a message from a stage to the next one.

[Note: what a link does]
A message requests its link when it is released. The link carries one message at a time, in the order of requests: each
occupies it for `seconds`, the bytes over the rate, and arrives `latency` after that. The sender continues immediately.
Without a name a link connects one rank to one other, in one direction; links of one name are one link for all their
senders. A message to a stage on the same rank takes no time. `seconds` are those of a whole microbatch; a slice of its
sequences takes its share of them.

    latency = 0.0001                # of pairs without a link below

    [[link]]                        # rank 1 to rank 2
    ranks = [1, 2]
    latency = 0.03
    seconds = 0.02

    [[link]]
    ranks = [2, 1]
    latency = 0.03
    seconds = 0.02
    name = "wan"                    # shared with all links of that name
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.base.documents import read_toml
from atoll.base.errors import ConfigError
from atoll.plans.ir.placement import Placement

_Pair = tuple[int, int]
"""The sending rank, and the receiving rank."""


@dataclass(frozen=True, slots=True)
class PipelineLink:
    """The time of a message: see the note above. Times in seconds, or any one unit.

    Raises ConfigError for a time that is negative, infinite or not a number.
    """

    latency: float = 0.0
    seconds: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        for word, value in (("latency", self.latency), ("seconds", self.seconds)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"a link's {word} is {value}: it must be a finite number, 0 or more")

    @property
    def hop(self) -> float:
        """Time of a message if the link is free."""
        return self.seconds + self.latency


@dataclass(frozen=True)
class Links:
    """The link of each pair of pipeline ranks; `other` is that of pairs that are not in `each`, one per pair."""

    each: Mapping[_Pair, PipelineLink] = field(default_factory=dict)
    other: PipelineLink = PipelineLink()

    @staticmethod
    def of(hop: float | Links) -> Links:
        """Return the links unchanged, or those of a number: the latency of every pair."""
        return hop if isinstance(hop, Links) else Links(other=PipelineLink(float(hop)))

    @staticmethod
    def read(path: str | Path) -> Links:
        """Read the TOML of the note above. Raises ConfigError with every problem if it is invalid."""
        try:
            tables = read_toml(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the links {path}: {error}") from error
        problems: list[str] = []
        rows = tables.pop("link", [])
        other = _link(tables, "the file", problems)
        each: dict[_Pair, PipelineLink] = {}
        for number, row in enumerate(rows if isinstance(rows, list) else []):
            where = f"link {number + 1}"
            pair = row.pop("ranks", None)
            if not (isinstance(pair, list) and len(pair) == 2 and all(_is_rank(rank) for rank in pair)):
                problems.append(f"{where}: ranks is {pair!r}; give the rank that sends and the one that receives")
                continue
            if (pair[0], pair[1]) in each:
                problems.append(f"{where}: the link from rank {pair[0]} to rank {pair[1]} is there already")
            each[pair[0], pair[1]] = _link(row, where, problems)
        if problems:
            raise ConfigError(f"{path}: " + "; ".join(problems))
        return Links(each, other)

    def between(self, sender: int, receiver: int) -> PipelineLink:
        """Return the link from one rank to another."""
        return self.each.get((sender, receiver), self.other)

    def of_slice(self, slices: int) -> Links:
        """Return the links for messages of one of `slices` equal slices of a microbatch: each has its share of the
        bytes, and the whole latency."""

        def share(link: PipelineLink) -> PipelineLink:
            return replace(link, seconds=link.seconds / slices)

        return Links({pair: share(link) for pair, link in self.each.items()}, share(self.other))

    @property
    def longest(self) -> float:
        """The longest hop of all, used for messages between ranks that are not neighbours."""
        return max((link.hop for link in (self.other, *self.each.values())), default=0.0)


_KEYS = ("latency", "seconds", "name")


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _link(table: Mapping[str, Any], where: str, problems: list[str]) -> PipelineLink:
    """Return a table's link. Its problems are added to the list."""
    unknown = [key for key in table if key not in _KEYS]
    if unknown:
        problems.append(f"{where}: no key {', '.join(unknown)}; there are {', '.join(_KEYS)}")
    times = {key: table.get(key, 0.0) for key in ("latency", "seconds")}
    name = table.get("name", "")
    wrong = [key for key, value in times.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    wrong += [] if isinstance(name, str) else ["name"]
    if wrong:
        problems.append(f"{where}: {', '.join(wrong)} is not what it should be: two numbers and a text")
        return PipelineLink()
    try:
        return PipelineLink(float(times["latency"]), float(times["seconds"]), name)
    except ConfigError as error:
        problems.append(f"{where}: {error}")
        return PipelineLink()


@dataclass(frozen=True, slots=True)
class Hop:
    """Times of a stage's messages to its neighbour. link: number of the link that they use, or -1 for none."""

    latency: float = 0.0
    seconds: float = 0.0
    link: int = -1

    @property
    def least(self) -> float:
        """Time of a message if the link is free."""
        return self.seconds + self.latency


@dataclass(frozen=True)
class Hops:
    """The hops between the stages of a placement.

    forward, backward: for each stage, to the next stage and to the previous one; no time if there is none.
    far: between ranks that are not neighbours.  links: number of links in use.
    is_even: whether messages take `far` between any two ranks, and no link.
    is_shared: whether several ranks use one link.
    """

    forward: tuple[Hop, ...]
    backward: tuple[Hop, ...]
    far: float = 0.0
    links: int = 0
    is_even: bool = True
    is_shared: bool = False

    @staticmethod
    def of(placement: Placement, hop: float | Links) -> Hops:
        """Return the hops of a placement, with one latency for all links, or one for each."""
        links = Links.of(hop)
        numbers: dict[str | _Pair, int] = {}
        senders: dict[int, set[int]] = {}
        latencies: set[float] = set()

        def between(stage: int, neighbour: int) -> Hop:
            if not 0 <= neighbour < placement.stages:
                return Hop()
            sender, receiver = placement.rank_of(stage), placement.rank_of(neighbour)
            if sender == receiver:
                return Hop()
            link = links.between(sender, receiver)
            latencies.add(link.latency)
            if link.seconds == 0 and not link.name:
                return Hop(link.latency)
            number = numbers.setdefault(link.name or (sender, receiver), len(numbers))
            senders.setdefault(number, set()).add(sender)
            return Hop(link.latency, link.seconds, number)

        stages = range(placement.stages)
        forward = tuple(between(stage, stage + 1) for stage in stages)
        backward = tuple(between(stage, stage - 1) for stage in stages)
        is_shared = any(len(ranks) > 1 for ranks in senders.values())
        is_even = not numbers and latencies <= {links.longest}
        return Hops(forward, backward, links.longest, len(numbers), is_even, is_shared)
