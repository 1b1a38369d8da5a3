"""Codecs on two islands with a slow link: seconds a step, and bytes on the link beside the formula. Needs root, `ip`
and `tc`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.codecs.settings import SETTINGS, Coded, formula_bytes
from benchmarks.islands import race, tables
from benchmarks.islands.cases import NETWORK
from benchmarks.islands.network import Islands
from benchmarks.islands.ranks import Ranks, Where
from benchmarks.islands.work import Chain

RATES = {"100 Mbit/s": 100e6, "400 Mbit/s": 400e6}
"""Of the link, each way."""

ROUNDS = 5
"""Timed steps of each setting, which take turns."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all settings at all rates, in turns, in one session."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    work = Chain(count=2, samples=2) if arguments.quick else Chain()
    rounds = 1 if arguments.quick else ROUNDS
    where = {"inter": 2, "intra": 2}
    result: dict[str, Any] = {"work": work.to_json(), "course": where, "network": NETWORK, "races": {}}
    with Islands() as islands, Ranks(Where(islands=islands, **where), work) as ranks:
        formula = {each.name: sum(ranks.ask(formula_bytes, each, only=[0])) * where["intra"] for each in SETTINGS}
        for setting in SETTINGS:
            ranks.ask(race.open_contender, setting)
        at = 1
        for name, bits in RATES.items():
            islands.limit(bits)
            load = [round(value, 2) for value in os.getloadavg()]
            rows = {each.name: _row(each, formula[each.name]) for each in SETTINGS}
            for each in SETTINGS:
                ranks.ask(race.step, each.name, at)  # the bucket is full of what stood before it
            at += 2
            for _ in range(rounds):
                for each in SETTINGS:
                    _note(rows[each.name], ranks.ask(race.step, each.name, at))
                at += 2
            for row in rows.values():
                row["median_seconds"] = median(row["seconds"])
            result["races"][name] = {"bits_a_second": bits, "load": load, "rows": list(rows.values())}
            print(_table(name, result["races"][name]), flush=True)
    return result


def _row(setting: Coded, formula: int) -> dict[str, Any]:
    found = {"name": setting.name, "setting": asdict(setting), "formula_bytes": formula}
    return {**found, "seconds": [], "inter_bytes": [], "losses": []}


def _note(row: dict[str, Any], answers: list[Any]) -> None:
    """Add a step: from the first rank's start to the last rank's end; bytes of the island that sends more."""
    seen = [each for each, _ in answers]
    row["seconds"].append(max(each.end for each in seen) - min(each.start for each in seen))
    row["inter_bytes"].append(max(each.inter_bytes for each in seen))
    row["losses"].append(seen[0].losses[-1])


def report(result: Mapping[str, Any]) -> str:
    """Write the page."""
    parts = [
        "# Codecs between islands",
        "Written by `python benchmarks/run.py codecs`. **The network is emulated**: two namespaces of one machine with "
        "a token bucket between them. Two islands of two ranks train the chain of [two islands](../two_islands/"
        "README.md) in fp32, one microbatch a step; all settings take turns in one session. *MB across*: by the "
        "counter of the interface, with headers, of one island and step. *formula*: the bytes of `Codec.nbytes` over "
        "the instructions of the program, of both ranks. *loss*: of the last timed step; all settings have trained on "
        "the same batches.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        *(_table(name, race) for name, race in result["races"].items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(name: str, race: Mapping[str, Any]) -> str:
    lines = [
        f"## {name}",
        "",
        f"Load {race['load'][0]} when it began.",
        "",
        "| setting | median s | fastest s | times as fast | MB across | formula MB | over it | loss |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    plain = {row["setting"]["layout"]: row for row in race["rows"] if not row["setting"]["gradient"]}
    for row in race["rows"]:
        across = median(row["inter_bytes"])
        cells = [
            row["name"],
            f"{row['median_seconds']:.3f}",
            f"{min(row['seconds']):.3f}",
            f"{plain[row['setting']['layout']]['median_seconds'] / row['median_seconds']:.2f}",
            f"{across / 1e6:.2f}",
            f"{row['formula_bytes'] / 1e6:.2f}",
            f"{across / row['formula_bytes'] - 1:.1%}",
            f"{row['losses'][-1]:.4f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
