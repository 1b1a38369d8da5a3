"""A race of one work on one mesh: measured, written down, told.

Each bench of a race (`two_islands`, `one_machine` and their other works) names a `Case` and hands it to `run`, `report`
and `pictures`.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

from atoll.layouts import EFFECTIVE
from benchmarks.islands import allocations, tables
from benchmarks.islands.bounds import formula
from benchmarks.islands.contenders import Atoll, Fsdp2, Setting, has_deepspeed
from benchmarks.islands.front import best_against_best, front, verdicts
from benchmarks.islands.network import Islands
from benchmarks.islands.race import Row
from benchmarks.islands.ranks import Where
from benchmarks.islands.scatter import scatter
from benchmarks.islands.search import SLOW, Race, is_slow, near
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

QUICK_ROUNDS = 2

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
    counts_layouts: whether bytes and memory of every layout are held against their predictions, on the first course.
    """

    name: str
    title: str
    words: str
    work: Work
    courses: Mapping[str, Course]
    rounds: int = 3
    counts_layouts: bool = False


def controls(course: Course) -> list[Setting]:
    """Settings that race whether or not they are near a front."""
    found = [*(setting for _, *pair in LIKE_FOR_LIKE for setting in pair), *TRANSPORTS]
    if course.inter == 1:  # one island: IIG and HSDP are GGG and FSDP2
        found = [each for each in found if not getattr(each, "groups", False)]
        found = [each for each in found if "I" not in getattr(each, "layout", "")]
    return list(dict.fromkeys(found))


def run(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Search on every course, then race what is near the fronts, and the controls."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    if not has_deepspeed():
        print("DeepSpeed is not installed (pip install -e '.[bench]'): its rows are left out", flush=True)
    work = Chain(count=2, samples=2) if arguments.quick else case.work
    result: dict[str, Any] = {"work": work.to_json(), "races": {}}
    kept = {} if arguments.quick or arguments.uncommitted else {name: _notes(case, name) for name in case.courses}
    with allocations.library() as preload:
        for name, course in case.courses.items():
            with _on(course, work, preload, kept.get(name)) as race:
                print(f"== {name}", flush=True)
                visits = controls(course)[:2] if arguments.quick else None
                result["races"][name] = {
                    "course": asdict(course),
                    "network": NETWORK if course.inter > 1 else "shared memory and the loopback of one machine",
                    "compute": race.field.compute_seconds(rounds=2),
                    **_race(race, course, visits, 1 if arguments.quick else case.rounds),
                }
                if case.counts_layouts and "layouts" not in result and not arguments.quick:
                    result["layouts"] = _layouts(race, work)
    for notes in kept.values():
        notes.unlink(missing_ok=True)
    return result


def _notes(case: Case, course: str) -> Path:
    """Where visits of the committed source, which the file's name tells, are noted until the whole run is over."""
    folders = ("src", "benchmarks/islands", f"benchmarks/{case.name}/bench.py")
    command = ["git", "rev-parse", *(f"HEAD:{path}" for path in folders)]
    source = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    results = ROOT / "benchmarks" / case.name / "results"
    results.mkdir(exist_ok=True)
    return results / f"visits-{slug(course)}-{sha256(source.encode()).hexdigest()[:12]}.jsonl"


@contextmanager
def _on(course: Course, work: Work, preload: Path | None, notes: Path | None = None) -> Iterator[Race]:
    """The processes of a race."""
    with Islands() if course.inter > 1 else nullcontext() as islands:
        where = Where(course.inter, course.intra, islands)
        with Race(where, work, preload=preload, rate=course.bits, notes=notes) as race:
            yield race


def _race(race: Race, course: Course, visits: Sequence[Setting] | None, rounds: int) -> dict[str, Any]:
    rows = race.search(note=_print) if visits is None else race.visit(visits, note=_print)
    seen = {row.name for row in rows}
    rows += race.visit([each for each in controls(course) if each.name not in seen], note=_print)
    always = {setting.name for setting in controls(course)}
    raced: dict[str, Row] = {}
    while True:  # medians move the fronts, and so bring others near
        best = [raced.get(row.name, row) for row in rows if row.problem is None]
        wanted = {row.name: row for row in best if row.name in always} | {row.name: row for row in near(best)}
        again = [row for row in wanted.values() if row.name not in raced and not is_slow(row, rows)]
        if not again:
            break
        for row in race.again(again, rounds=rounds):
            raced[row.name] = row
            _print(row)
    visited = [row.to_json() for row in rows]
    return {"visited": visited, **judged([row.to_json() for row in raced.values()], visited)}


def judged(raced: Sequence[Mapping[str, Any]], visited: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fronts, verdicts at every budget at which a peer runs, best against best, like for like: of all that was visited,
    by its turns in the race where it has any."""
    by_name = {row["name"]: row for row in visited if not row["problem"]} | {row["name"]: row for row in raced}
    rows = list(by_name.values())
    pairs = {
        words: by_name[theirs.name]["median_seconds"] / by_name[ours.name]["median_seconds"]
        for words, ours, theirs in LIKE_FOR_LIKE
        if ours.name in by_name and theirs.name in by_name
    }
    return {
        "rows": list(raced),
        "fronts": {
            side: [row["name"] for row in front(row for row in rows if row["is_ours"] is (side == "ours"))]
            for side in ("ours", "peers")
        },
        "verdicts": [verdict.to_json() for verdict in verdicts(rows)],
        "best_against_best": best_against_best(rows).to_json(),
        "like_for_like": {words: round(ratio, 4) for words, ratio in pairs.items()},
    }


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


def race_front(case: Case, result: Mapping[str, Any], *, commit: str) -> dict[str, Any]:
    """The members of the fronts of a result's first race again, without those that are small and nothing else."""
    name, course = next(iter(case.courses.items()))
    found = result["races"][name]
    names = {each for side in found["fronts"].values() for each in side}
    known = {row["name"]: Row.from_json(row) for row in (*found["visited"], *found["rows"])}
    rows = [known[name] for name in sorted(names)]
    members = [row.setting for row in rows if not is_slow(row, rows)]
    with allocations.library() as preload, _on(course, case.work, preload) as race:
        raced = race.again(map(Row, members), rounds=QUICK_ROUNDS)
    return {"bits_a_second": course.bits, "commit": commit, **judged([row.to_json() for row in raced], [])}


# ---- the page

NETWORK_WORDS = (
    "**The network is emulated**: two namespaces of one machine joined by a veth pair with a token bucket on both "
    "ends; four ranks share the machine's cores. Trust ratios, not seconds."
)

DEVICE_WORDS = (
    "**The device is emulated**: compute sleeps for as long as a device would take in proportion to the bytes, and "
    "keeps as many activations in proportion to the parameters (`Sleeping` in `benchmarks/islands/work.py`)."
)

DENIED = (
    "What this machine denies a peer: gloo's reduce-scatter sends the bytes of an all-reduce, so FSDP2 races a second "
    "time with a reduce-scatter by direct messages (`set_custom_reduce_scatter`); on CPUs FSDP2 and DeepSpeed wait for "
    "their reductions, which NCCL would run beside the backward. DeepSpeed's buckets are sized in blocks, since its "
    "defaults are larger than these models. All processes run with one thread, the same allocator thresholds and the "
    "same fused AdamW."
)


def report(case: Case, command: str, result: Mapping[str, Any]) -> str:
    """Everything, in markdown."""
    parts = [
        f"# {case.title}",
        f"Written by `{command}`. {case.words}",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        _setup(result["work"]),
        DENIED,
    ]
    for name, found in result["races"].items():
        parts += _told(name, found)
    if "layouts" in result:
        parts += [
            "## What a rank sends and holds, by layout",
            f"{ACCUMULATED} microbatches one after the other. The formula lets everything travel; the block at which a "
            "pass turns round is not gathered again, so layouts with parameters at G send less. The predicted peak is "
            "footprint, working memory, the batch and what autograd keeps.",
            _layout_table(result["layouts"]),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _setup(work: Mapping[str, Any]) -> str:
    return (
        f"{work['parameters']:,} parameters in {work['units']} blocks, {work['samples']} samples a rank and step, "
        "which a setting divides into microbatches (`x4`: four of them). Settings are found by a search that "
        "begins where experts begin and goes on from each side's front; what lies near a front is then built "
        "again in turns, each alone on the machine, for two timed steps a turn. Losses of every step are compared. "
        "Peak memory is the C library's allocator's on all threads, and memory that ranks share; bytes across are of "
        "one island and step, by the interface's counters."
    )


def _told(name: str, found: Mapping[str, Any]) -> list[str]:
    best, compute = found["best_against_best"], found["compute"]
    lines = [
        f"- Compute alone takes {compute['one_rank']:.3f} s for one rank alone, {compute['all_ranks']:.3f} s for all "
        "at once.",
        f"- Best against best: `{best['ours']}` is **{best['ratio']:.2f} times as fast** as `{best['peer']}`, within "
        f"its peak of {best['budget_bytes'] / 1e6:.0f} MB."
        if best["ratio"] is not None
        else f"- Nothing of Atoll fits the peak of the fastest peer, {best['budget_bytes'] / 1e6:.0f} MB.",
        *(f"- Like for like, {words}: {ratio:.2f} times as fast." for words, ratio in found["like_for_like"].items()),
    ]
    return [
        f"## {name}",
        f"![seconds against peak memory](results/{slug(name)}.svg)",
        "\n".join(lines),
        "At every peak memory at which a peer is the fastest of the peers that fit:",
        tables.verdicts(found["verdicts"]),
        f"What raced, Atoll in bold. {len(found['visited'])} settings were visited before, by a single step, and count "
        f"above by it if they did not race; those that take {SLOW:g} times as long as their side's fastest never do:",
        tables.race(found["rows"]),
        _failed(found["visited"]),
    ]


def _failed(visited: Sequence[Mapping[str, Any]]) -> str:
    failed = [row for row in visited if row["problem"]]
    return (
        "\n".join(
            [f"{len(failed)} settings did not run:", "", *(f"- {row['name']}: {row['problem']}" for row in failed)]
        )
        if failed
        else ""
    )


def pictures(case: Case, result: Mapping[str, Any]) -> dict[str, str]:
    """By file name: a scatter of each race."""
    found = {}
    for name, race in result["races"].items():
        finalists = {row["name"] for row in race["rows"]}
        others = [row for row in race["visited"] if row["name"] not in finalists and not row["problem"]]
        slowest = 1.6 * max(row["median_seconds"] for row in race["rows"])
        ends = {name for side in race["fronts"].values() for name in side}
        rows = [*race["rows"], *(row for row in others if row["median_seconds"] <= slowest or row["name"] in ends)]
        note = "Medians of steps in turns where there are any; pale points are not on a front. Lower left is better."
        found[f"{slug(name)}.svg"] = scatter(f"{case.title}: {name}", rows, note=note)
    return found


def slug(name: str) -> str:
    """A race's name as a file's."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def _layout_table(layouts: Mapping[str, Any]) -> str:
    keys = ("inter_bytes", "inter_formula", "intra_bytes", "intra_formula")
    keys += ("peak_bytes", "predicted_peak_bytes", "rest_bytes", "predicted_rest_bytes", "shared_bytes")
    lines = [
        "| layout | MB across a step | formula | MB inside a step | formula | peak MB | predicted | at rest MB "
        "| predicted | of both shared |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in layouts.items():
        cells = ("" if row[key] is None else f"{row[key] / 1e6:.2f}" for key in keys)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
