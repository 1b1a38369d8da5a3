"""Visits settings one by one, and walks from those near the front to their neighbours.

A visit builds a contender, checks the gradients of its first step, and takes two steps on each link: peak memory, bytes
across and the seconds of the second. Where a contender fails, the ranks are started anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from atoll.plans import schedules
from atoll.program import Programs
from atoll.program.sim import Rates, Speed, simulate
from benchmarks.environment import ROOT
from benchmarks.islands.front import near_front
from benchmarks.islands.network import Islands
from benchmarks.islands.ranks import Ranks, Where
from benchmarks.sharded_pipeline import race
from benchmarks.sharded_pipeline.race import Seen, Timed
from benchmarks.sharded_pipeline.settings import Ours, Setting
from benchmarks.sharded_pipeline.work import BURST_BYTES, DATA, PIPELINE, Work

SAME_GRADIENT = 1e-10
SLACK = 1.08
"""One step of a visit decides nothing that is closer: neighbours of what is so near the front are visited too."""

Row = dict[str, Any]
Shares = Mapping[str, float]
"""By question: the share of the compute's time that the link takes."""


class Track:
    """The ranks on their link, and what has been found. A run that was interrupted goes on from its notes, a line each.

    preload: a library for the ranks.  notes: None where nothing is kept.
    """

    def __init__(self, work: Work, *, preload: Path | None, notes: Path | None) -> None:
        self.work = work
        self._preload = preload
        self._notes = notes
        self._stack = ExitStack()
        self.cpu_first = True

    def __enter__(self) -> Track:
        self.islands = self._stack.enter_context(Islands())
        self._start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _start(self) -> None:
        where = Where(DATA, 1, self.islands, PIPELINE)
        self._running = self._stack.enter_context(Ranks(where, self.work, preload=self._preload))
        self.cpu_first = all(self._running.ask(race.prepare))

    # ---- notes

    def known(self, kind: str) -> Iterator[Row]:
        """Notes of a kind, of the same source."""
        lines = self._notes.read_text(encoding="utf-8").splitlines() if self._notes and self._notes.is_file() else []
        for line in lines:
            found = json.loads(line)
            if found["kind"] == kind and found["source"] == _source():
                yield found["found"]

    def note(self, kind: str, found: Row) -> None:
        """Keep what was found."""
        if self._notes is not None:
            with self._notes.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "source": _source(), "found": found}) + "\n")

    # ---- steps

    def build(self, setting: Setting) -> float:
        """Build a contender on an unlimited link; the largest difference of its gradients."""
        self.islands.limit(None)
        return max(self._running.ask(race.build, setting, timeout=60.0))

    def steps(self, setting: Setting, *, share: float | None, first: int, count: int = 2) -> Row:
        """Seconds of each step but the first, peak memory, and bytes of an island and step."""
        if share is not None:
            self.islands.limit(self.work.rate(share))
        seen: Sequence[Seen] = self._running.ask(race.steps, setting, first, count, timeout=60.0)
        ends = [max(each.ends[at] for each in seen) for at in range(count)]
        return {
            "seconds": [after - before for before, after in pairwise(ends)],
            "peak_bytes": max(each.peak or 0 for each in seen),
            "inter_bytes": sum(each.inter_bytes for each in seen) / DATA / count,
        }

    def predict(self, setting: Ours, *, share: float, at: int) -> Row:
        """Seconds of a step by simulation, from the seconds of its instructions, and an island's bytes by its programs:
        the four pipeline ranks of an island take turns on its link."""
        self.islands.limit(self.work.rate(share))
        timed: Sequence[Timed] = self._running.ask(race.timed, setting, at, timeout=60.0)
        of_island = timed[::DATA]
        first = of_island[0]
        link = Speed(first.across, first.rate, pool="between islands", burst=BURST_BYTES)
        hop = Speed(latency=race.hop_of(of_island))
        rates = [Rates(each.seconds, links={"inter": link, "pp": hop}) for each in of_island]
        schedule = schedules.build(
            setting.schedule, ranks=PIPELINE, microbatches=setting.microbatches, **setting.schedule_options
        )
        programs = Programs(schedule.placement, tuple(each.program for each in of_island))
        ends = [simulate(programs, rates, steps=steps).finish for steps in (2, 3)]
        return {
            "predicted_seconds": ends[1] - ends[0],
            "predicted_rate": first.rate,
            "predicted_bytes": sum(each.program.sent["inter"] for each in of_island),
        }

    def close(self, setting: Setting) -> None:
        """Let a contender go."""
        self._running.ask(race.close, setting.name)

    def visit(self, setting: Setting, shares: Shares) -> Row:
        """One look at a setting: by question, its row."""
        row: Row = {"name": setting.name, "is_ours": setting.is_ours, "setting": asdict(setting), "problem": ""}
        try:
            difference = self.build(setting)
            row |= {"gradient_difference": difference, "is_right": difference <= SAME_GRADIENT}
            row["seen"] = {question: self.steps(setting, share=share, first=1) for question, share in shares.items()}
            self.close(setting)
        except RuntimeError as error:
            row |= {"is_right": False, "problem": str(error).strip().splitlines()[-1], "seen": {}}
            self._running.close()
            self._start()
        return row


def _source() -> str:
    """What is measured: the package's source and this benchmark's."""
    digest = hashlib.sha256()
    for folder in ("src/atoll", "benchmarks/emulated", "benchmarks/islands", "benchmarks/sharded_pipeline"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name not in ("bench.py", "scatter.py", "front.py", "tables.py"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def search(track: Track, shares: Shares, seeds: Sequence[Setting], *, most: Mapping[bool, int]) -> list[Row]:
    """Rows of the seeds and of what is reached from near either side's front. most: visits of a side, ours and theirs,
    seeds not counted."""
    done: dict[str, Row] = {row["name"]: row for row in track.known("visit")}
    settings: dict[str, Setting] = {}
    left = dict(most)
    queue = list(seeds)
    while queue:
        for setting in queue:
            settings[setting.name] = setting
            if setting.name not in done:
                done[setting.name] = row = track.visit(setting, shares)
                track.note("visit", row)
                print(_line(row), flush=True)
        queue = []
        found = [done[name] for name in settings]
        for is_ours in (True, False):
            for setting in _following(found, settings, shares, is_ours=is_ours):
                if left[is_ours] > 0:
                    left[is_ours] -= 1
                    queue.append(setting)
    return [done[name] for name in settings]


def _following(rows: Sequence[Row], settings: Mapping[str, Setting], shares: Shares, *, is_ours: bool) -> list[Setting]:
    """Neighbours of a side's best that nobody has seen, those of the nearest to the front first."""
    found: dict[str, Setting] = {}
    for slack in (1.0, SLACK):
        for question in shares:
            own = rows_of(rows, question, is_ours=is_ours)
            for row in near_front(own, slack=slack):
                for setting in settings[row["name"]].neighbours():
                    if setting.name not in settings:
                        found.setdefault(setting.name, setting)
    return list(found.values())


def rows_of(rows: Sequence[Row], question: str, *, is_ours: bool | None = None, right: bool = True) -> list[Row]:
    """The rows of a question as the front has them; of one side, or of both."""
    return [
        {**row, **row["seen"][question], "median_seconds": median(row["seen"][question]["seconds"])}
        for row in rows
        if question in row["seen"] and is_ours in (None, row["is_ours"]) and (row["is_right"] or not right)
    ]


def _line(row: Row) -> str:
    seen = ", ".join(
        f"{question} {median(each['seconds']):.3f} s {each['peak_bytes'] / 1e6:.1f} MB "
        f"{each['inter_bytes'] / 1e6:.1f} MB across"
        for question, each in row["seen"].items()
    )
    verdict = "" if row["is_right"] else f" WRONG {row.get('gradient_difference', row['problem'])}"
    return f"{row['name']}: {seen}{verdict}"
