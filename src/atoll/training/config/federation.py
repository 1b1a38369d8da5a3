"""[federation]: this island's part in a run of islands that come and go."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from atoll.training.config.section import Names, Section, raise_all


def _address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError("must be an address, host:port, such as 10.0.0.1:29600")
    return value


_Address = Annotated[str, AfterValidator(_address)]
_Seconds = Annotated[float, Field(gt=0)]


class FederationSection(Section):
    """[federation]: islands that are worlds of their own, and this one among them."""

    island: str
    """name of this island, one of `islands`"""
    islands: dict[str, _Address]
    """where the first rank of each island is reached by the others, as `{ a = "10.0.0.1:29600", b = "..." }`"""
    secret: str
    """file with a secret that all islands have, 16 characters or more, as of `openssl rand -hex 32`"""
    founders: Names = ()
    """islands that begin the run together, those that have to be there before the first step; all if not given"""
    listen: _Address | None = None
    """where this island listens, if it is not at its address in `islands`, as behind a gateway: "0.0.0.0:29600\""""
    silent: _Seconds = 15.0
    """seconds without a sign of an island after which no round waits for it"""
    away: _Seconds = 120.0
    """seconds without a sign of an island after which it is no member any more, and others read its data"""
    pace: Annotated[float, Field(gt=0)] | None = None
    """bytes a second, at most, at which this island takes over anchors from others; not limited if not given"""

    @model_validator(mode="after")
    def _check(self) -> FederationSection:
        problems = []
        known = ", ".join(self.islands)
        if self.island not in self.islands:
            problems.append(f"federation.island = {self.island!r} is none of federation.islands: {known}")
        problems += [
            f"federation.founders: {each!r} is none of federation.islands: {known}"
            for each in self.founders
            if each not in self.islands
        ]
        if len(set(self.islands.values())) < len(self.islands):
            problems.append("federation.islands: two islands have one address")
        if self.silent > self.away:
            problems.append(
                f"federation.silent = {self.silent} is more than federation.away = {self.away}: an island is silent "
                "before it is away"
            )
        raise_all(problems)
        return self
