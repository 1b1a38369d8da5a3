"""What an island did in a round, for its record, and what all islands have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.base.digests import digest
from atoll.plans.federation.records import RoundRecord
from atoll.plans.federation.rules import FederationRules
from atoll.plans.outer import Outer
from atoll.runtime.federation.elements import manifest_of

BITS = 1 << 62
"""Modulus of sums of bits: a divisor of that of torch's integers, below what JSON documents may have."""


@dataclass(frozen=True, slots=True)
class RoundEvent:
    """What an island did, for its record.

    what: "joining", "sent", "waited" in vain, "followed" or "restarted".  step: after which.  round: the last one that
    it knows then.  time: when, in seconds since 1970.
    fragment, digest, tokens, used: of what was sent.  records: of the rounds that it followed.  on_time: fragments
    whose masters were mixed with the anchors.  lost: tokens that it had learned from and no round has counted.
    waited: seconds.
    """

    what: str
    step: int
    round: int
    time: float
    fragment: int | None = None
    digest: str | None = None
    tokens: int = 0
    used: int = 0
    records: tuple[RoundRecord, ...] = ()
    on_time: tuple[int, ...] = ()
    lost: int = 0
    waited: float = 0.0


def run_digest(outer: Outer, rules: FederationRules, facts: Mapping[str, Any]) -> str:
    """Return what all islands of a federation must have in common, as a digest."""
    apart = outer.apart
    common = {
        "outer": [outer.optimizer, outer.rate, outer.inertia, str(outer.codec), apart and apart.weights],
        "rules": [rules.founders, rules.fragments, rules.quorum, rules.grace, rules.silent, rules.away],
        **facts,
    }
    return digest(repr(sorted(common.items())).encode())


def initial_digest(said: Sequence[Sequence[int]]) -> str:
    """Return the digest of initial anchors by the sums of bits that ranks say, of each fragment; empty if they say
    none."""
    return digest(repr([sum(each) % BITS for each in zip(*said, strict=True)]).encode()) if said[0] else ""


def merged_manifest(said: list[Any]) -> str | None:
    """Return the manifest of all ranks' rows; None if any outer gradient is not finite."""
    if not all(is_finite for is_finite, _ in said):
        return None
    return manifest_of([row for _, rows in said for row in rows]).decode()
