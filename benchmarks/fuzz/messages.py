"""Parsers of the messages of ranks, and of the environment that a launcher sets."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from atoll.base.documents import parse_json
from atoll.plans.federation.lots import NO_LOTS
from atoll.plans.federation.records import Ballot, Contribution, Member, Notice, RoundRecord, parse_notice
from atoll.runtime.federation.elements import TensorPart, manifest_of, names_of_elements, read_manifest
from atoll.runtime.monitor import Address, Monitor, read_words
from atoll.runtime.rendezvous import restarts, torchrun_environment
from benchmarks.fuzz.reading import Made, Parser, of_text


def _monitor(folder: Path) -> Parser:
    """Messages of authenticated ranks. Connections without the secret are dropped before this point."""
    monitors = [Monitor(2, host="127.0.0.1", limit=1e9)]
    count = itertools.count(1)
    beat = {
        "beat": {
            "doing": "F0",
            "waits_for": [1],
            "mark": 3,
            "host": "a",
            "pid": 1,
            "patience": 60.0,
            "page": 7,
            "program": 1,
            "at": 3,
        }
    }
    report = {"report": {"exit_code": 1, "message": "broken"}, "key": "run"}
    seeds = [json.dumps(words).encode() + b"\n" for words in (beat, report, {"stack": "line 1"}, {"bye": 1})]

    def read(line: bytes) -> object:
        if next(count) % 1000 == 0:  # it keeps reports, as many as there are
            monitors[0].close()
            monitors[0] = Monitor(2, host="127.0.0.1", limit=1e9)
        return json.dumps(monitors[0].answer(1, read_words(line)))

    return Parser(seeds, read, refuses=(ValueError,))


TORCHRUN = (
    "RANK=1\nWORLD_SIZE=4\nMASTER_ADDR=10.0.0.1\nMASTER_PORT=29500\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\n"
    "TORCHELASTIC_USE_AGENT_STORE=True\nTORCHELASTIC_RESTART_COUNT=1"
)
SLURM = (
    "SLURM_PROCID=2\nSLURM_STEP_NUM_TASKS=4\nSLURM_LOCALID=0\nSLURM_NODEID=1\nSLURM_STEP_TASKS_PER_NODE=2(x2)\n"
    "SLURM_JOB_ID=123\nSLURM_STEP_NODELIST=n[003-006,009],m1\nSLURM_RESTART_COUNT=0"
)


def _environment(text: str) -> object:
    """Parse a launcher's environment, one variable a line."""
    given = {name: value for name, _, value in (line.partition("=") for line in text.split("\n"))}
    return torchrun_environment(given), restarts(given)


def _addresses(folder: Path) -> Parser:
    """Where the monitor listens, as the store or the environment says it."""
    seeds = [Address("10.0.0.1", 29500, "ab" * 16).dump().encode(), Address("::1", 29500, "").dump().encode()]
    return Parser(seeds, lambda word: Address.parse(word.decode()), refuses=(ValueError,))


def _notices(folder: Path) -> Parser:
    """Notices of islands with the federation's secret."""
    made = Contribution("a", 1, -1, 4096, 3, digest="ab" * 32)
    lots = NO_LOTS.granted("a", stock=4).granted("b", stock=2).counted("a", 1)
    record = RoundRecord(0, "", (made,), (Member("a", "1"), Member("b", "2f")), 1, bases=(0, -1), lots=lots)
    own = Notice("a", "1", "ab", contributions=(made,), holds=frozenset({made.digest}), stock=4)
    vote = Ballot(2, "b"), record
    notices = (own, replace(own, promised=vote[0], trying=Ballot(1, "a"), accepted=vote, proposal=record))
    notices += (notices[1].after(record, kept=4),)
    seeds = [json.dumps(notice.to_json()).encode() for notice in notices]
    return Parser(seeds, lambda content: parse_notice(parse_json(content)), refuses=(ValueError,))


def _manifests(folder: Path) -> Parser:
    """Manifests: names and digests of the elements of contributions and anchors."""
    held = {TensorPart("layers.0.weight", at, at + 2): memoryview(bytes(8)) for at in range(3)}
    return Parser([manifest_of(names_of_elements(held))], read_manifest, refuses=(ValueError,))


PARSERS: Mapping[str, Made] = {
    "notice of an island": _notices,
    "manifest of elements": _manifests,
    "monitor": _monitor,
    "monitor's address": _addresses,
    "launcher's environment": of_text(_environment, TORCHRUN, SLURM),
}
