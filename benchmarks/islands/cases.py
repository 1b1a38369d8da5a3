"""A race of one work on one mesh, measured and written down.

Each bench of a race (`two_islands`, `one_machine` and their other works) is a `Case` that is given to `run` here, to
`quick.race_front` and to `quick.confirm`, and a `Page` that is given to the functions of `pages`. The raw file holds
what was seen alone: fronts and verdicts follow from it (`judging`), so that another judgement or sentence makes no
result older.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

from atoll.plans.layouts import EFFECTIVE
from benchmarks.islands import allocations
from benchmarks.islands.bounds import formula
from benchmarks.islands.contenders import Atoll, Fsdp2, Setting, has_deepspeed
from benchmarks.islands.network import Islands
from benchmarks.islands.race import Row
from benchmarks.islands.ranks import Where
from benchmarks.islands.search import SLACK, Race, is_slow, near
from benchmarks.islands.work import Chain, Work

ROOT = Path(__file__).resolve().parents[2]

NETWORK = "emulated: two namespaces of one machine, veth, tbf burst 1mb latency 100ms on both ends"

LIKE_FOR_LIKE: tuple[tuple[str, Setting, Setting], ...] = (
    ("gathered twice, reduced once, over all ranks", Atoll("GGG"), Fsdp2(prefetch=2)),
    ("the same, FSDP2 with a true reduce-scatter", Atoll("GGG"), Fsdp2(prefetch=2, scatter="direct")),
    ("gathered twice in the island, reduced once across", Atoll("IIG"), Fsdp2(groups=True, prefetch=2)),
    ("the same, HSDP with a true reduce-scatter", Atoll("IIG"), Fsdp2(groups=True, prefetch=2, scatter="direct")),
)
"""Settings that gather and reduce equally often."""

TRANSPORTS = tuple(Atoll(layout, transport=by) for layout in ("GGG", "IIG") for by in ("direct", "gloo"))  # type: ignore[arg-type]
"""Atoll without reading in place, and with gloo's own collectives."""

ACCUMULATED = 8
"""Microbatches of the table of layouts."""


@dataclass(frozen=True, slots=True)
class Course:
    """Where a race is run: islands, ranks in each, and bits a second of the link between two islands."""

    inter: int
    intra: int
    bits: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Races of one work.

    name: the bench's.
    rounds: turns of those that race in turns.  slack: as `search.SLACK`; less where compute sleeps.
    counts_layouts: whether bytes and memory of every layout are held against their predictions, on the first course.
    settings: those of a course, Atoll's first and a peer's last, where each is visited; None to search.
    small: the work of a quick run.
    """

    name: str
    work: Work
    courses: Mapping[str, Course]
    rounds: int = 3
    slack: float = SLACK
    counts_layouts: bool = False
    settings: Callable[[Course], Sequence[Setting]] | None = None
    small: Work = field(default_factory=lambda: Chain(count=2, samples=2))

    def always(self, course: Course) -> Sequence[Setting]:
        """Settings that race whether or not they are near a front."""
        return controls(course) if self.settings is None else ()

    def visits(self, course: Course, *, quick: bool) -> Sequence[Setting] | None:
        """The combinations to measure; a quick run measures two. None when a search chooses them."""
        if self.settings is None:
            return controls(course)[:2] if quick else None
        found = self.settings(course)
        return [found[0], found[-1]] if quick else found


def controls(course: Course) -> list[Setting]:
    """Settings beside which a search is seen: like for like, and by other transports."""
    found = [*(setting for _, *pair in LIKE_FOR_LIKE for setting in pair), *TRANSPORTS]
    if course.inter == 1:  # one island: IIG and HSDP are GGG and FSDP2
        found = [each for each in found if not getattr(each, "groups", False)]
        found = [each for each in found if "I" not in getattr(each, "layout", "")]
    return list(dict.fromkeys(found))


def run(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Search on every course, then race what is near the fronts, and the controls.

    arguments: of `benchmarks/run.py`; `depends` are the digests of the files that the result depends on.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    if not has_deepspeed():
        print("DeepSpeed is not installed (pip install -e '.[bench]'): its rows are left out", flush=True)
    work = case.small if arguments.quick else case.work
    result: dict[str, Any] = {"work": work.to_json(), "races": {}}
    kept = {} if arguments.quick else {name: _notes(case, name, arguments.depends) for name in case.courses}
    with allocations.library() as preload:
        for name, course in case.courses.items():
            with on(course, work, preload, slack=case.slack, notes=kept.get(name)) as race:
                print(f"== {name}", flush=True)
                result["races"][name] = {
                    "course": asdict(course),
                    "network": NETWORK if course.inter > 1 else "shared memory and the loopback of one machine",
                    "compute": race.field.compute_seconds(rounds=2),
                    **_race(race, case, course, quick=arguments.quick),
                }
                if case.counts_layouts and "layouts" not in result and not arguments.quick:
                    result["layouts"] = _layouts(race, work)
    for notes in kept.values():
        notes.unlink(missing_ok=True)
    return result


def _notes(case: Case, course: str, depends: Mapping[str, str]) -> Path:
    """Where visits are noted until the whole run is over; the file's name tells the code that made them."""
    results = ROOT / "benchmarks" / case.name / "results"
    results.mkdir(exist_ok=True)
    code = sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:12]
    return results / f"visits-{slug(course)}-{code}.jsonl"


@contextmanager
def on(course: Course, work: Work, preload: Path | None, **options: Any) -> Iterator[Race]:
    """The processes of a race; `options` are those of `Race`."""
    with Islands() if course.inter > 1 else nullcontext() as islands:
        where = Where(course.inter, course.intra, islands)
        with Race(where, work, preload=preload, rate=course.bits, **options) as race:
            yield race


def _race(race: Race, case: Case, course: Course, *, quick: bool) -> dict[str, Any]:
    visits = case.visits(course, quick=quick)
    rows = race.search(note=_print) if visits is None else race.visit(visits, note=_print)
    seen = {row.name for row in rows}
    rows += race.visit([each for each in case.always(course) if each.name not in seen], note=_print)
    always = {setting.name for setting in case.always(course)}
    raced: dict[str, Row] = {}
    while True:  # medians move the fronts, and so bring others near
        best = [raced.get(row.name, row) for row in rows if row.problem is None]
        wanted = {row.name: row for row in best if row.name in always}
        wanted |= {row.name: row for row in near(best, slack=race.slack)}
        again = [row for row in wanted.values() if row.name not in raced and not is_slow(row, rows)]
        if not again:
            break
        for row in race.again(again, rounds=1 if quick else case.rounds):
            raced[row.name] = row
            _print(row)
    return {"visited": [row.to_json() for row in rows], "rows": [row.to_json() for row in raced.values()]}


def _print(row: Row) -> None:
    seconds = f"{median(row.seconds):.3f} s" if row.seconds else row.problem
    print(
        f"{row.name}: {seconds}, {(row.peak_bytes or 0) / 1e6:.1f} MB, {row.inter_bytes / 1e6:.1f} MB across",
        flush=True,
    )


def _layouts(race: Race, work: Work) -> dict[str, Any]:
    """By layout: what a rank sends and holds with accumulation, predicted and counted."""
    found = {}
    sizes = {"parameters": work.parameters, "inter": race.where.inter, "intra": race.where.intra}
    visited = race.visit([Atoll(layout.name, ACCUMULATED) for layout in EFFECTIVE], note=_print)
    for layout, row in zip(EFFECTIVE, visited, strict=True):
        expected = formula(layout, microbatches=ACCUMULATED, **sizes)
        found[layout.name] = {
            "inter_bytes": row.sent.get("inter", 0),
            "inter_formula": expected.inter_bytes,
            "intra_bytes": row.sent.get("intra", 0),
            "intra_formula": expected.intra_bytes,
            "peak_bytes": row.peak_bytes,
            "predicted_peak_bytes": row.predicted_peak_bytes,
            "rest_bytes": row.rest_bytes,
            "predicted_rest_bytes": row.predicted_rest_bytes,
            "shared_bytes": row.shared_bytes,
        }
    return found


def slug(name: str) -> str:
    """A race's name as a file's."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
