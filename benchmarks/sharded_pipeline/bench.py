"""Sharded parameters in a pipeline: a race by memory, on an emulated device and an emulated link.

16 layers on 4 pipeline x 2 data-parallel ranks. Compute sleeps, layers keep what layers of a real model would keep, and
the data-parallel ranks sit on two islands. Two questions, by the link between them: what 1F1B sends with layout GGG,
everything gathered twice and reduced once a microbatch, takes a given share of the time that a rank computes.

    hidden    half of it
    limited   twice as much

Both sides run in every setting that an expert would try (settings.py). One visit each decides who is near the front of
seconds against peak memory (search.py); those take turns.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.confirmations import Check
from benchmarks.islands import tables
from benchmarks.islands.allocations import library
from benchmarks.islands.front import best_against_best, front, near_front, verdicts
from benchmarks.islands.quick import at_budgets
from benchmarks.islands.scatter import scatter
from benchmarks.sharded_pipeline.search import Row, Track, rows_of, search
from benchmarks.sharded_pipeline.settings import EXTRA, LINE, Ours, Setting, Theirs, seeds
from benchmarks.sharded_pipeline.work import DATA, PIPELINE, Work

SHARES: Mapping[str, float] = {"limited": 2.0, "hidden": 0.5}

MOST: Mapping[bool, int] = {True: 12, False: 10}
"""Visits beyond the seeds, ours and theirs."""

RACED = 1.0
"""What would be on its side's front if it were so much faster takes part in the race."""

ROUNDS = 5
LIKE = (Theirs(schedule="1F1B"), Ours(schedule="1f1b", residency="step", reduction="step"))
"""Like for like: one order, one gather and one reduction a step, in the same units."""

FEW: tuple[Setting, ...] = (LIKE[0], LIKE[1], Ours(schedule="1f1b"), Theirs(schedule="ZBVZeroBubble", is_kept=False))
"""A quick run's."""

NOTES = Path(__file__).with_name("results") / "visits.jsonl"


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Search, then race. A run that was interrupted goes on where it was, if the source is the same."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    work = Work(seconds=0.008) if arguments.quick else Work()
    result: dict[str, Any] = {
        "device": "emulated: compute sleeps",
        "network": "emulated: two namespaces of one machine, veth, tbf burst 1mb latency 100ms on both ends",
        "work": {
            "layers": work.layers,
            "layer_bytes": work.layer_bytes,
            "kept_bytes": work.kept_bytes,
            "microbatches": work.microbatches,
            "operation_seconds": work.seconds,
            "compute_seconds": work.compute_seconds,
        },
    }
    notes = None if arguments.quick else NOTES
    with library() as preload, Track(work, preload=preload, notes=notes) as track:
        result["cpu_first"] = track.cpu_first
        if arguments.quick:
            rows = search(track, SHARES, FEW, most={True: 0, False: 0})
        else:
            rows = search(track, SHARES, (*seeds(), *EXTRA), most=MOST)
        known = {setting.name: setting for setting in _settings(rows)}
        result["races"] = {}
        for question, share in SHARES.items():
            raced = _race(track, [known[name] for name in _entrants(rows, question)], question, share, arguments.quick)
            result["races"][question] = {
                "share": share,
                "bits_a_second": work.rate(share),
                "rows": _merged(rows_of(rows, question, right=False), raced),
            }
    result["failed"] = {row["name"]: row["problem"] for row in rows if row["problem"]}
    for found in result["races"].values():
        found |= _decided(found["rows"])
    if notes is not None:
        notes.unlink(missing_ok=True)
    return result


def _settings(rows: Sequence[Row]) -> list[Setting]:
    return [Ours(**row["setting"]) if row["is_ours"] else Theirs(**row["setting"]) for row in rows]


def _entrants(rows: Sequence[Row], question: str) -> list[str]:
    """Who races: both sides' near fronts, and the pair that is alike."""
    near = [
        row["name"]
        for is_ours in (True, False)
        for row in near_front(rows_of(rows, question, is_ours=is_ours), slack=RACED)
    ]
    return list(dict.fromkeys([*near, *(setting.name for setting in LIKE)]))


def _race(
    track: Track, entrants: Sequence[Setting], question: str, share: float, is_quick: bool
) -> dict[str, list[Row]]:
    """Steps in turns, by name; each round begins with another one."""
    seen: dict[str, list[Row]] = {setting.name: [] for setting in entrants}
    rounds = 1 if is_quick else ROUNDS
    done = [found for found in track.known("round") if found["question"] == question][:rounds]
    for found in done:
        for name in seen:
            seen[name] += [found["rows"][name]] if name in found["rows"] else []
    for setting in entrants if len(done) < rounds else ():
        track.build(setting)
    for at in range(len(done), rounds):
        turn = at % len(entrants)
        rows = {}
        for setting in (*entrants[turn:], *entrants[:turn]):
            rows[setting.name] = track.steps(setting, share=share, first=2 * at)
            seen[setting.name].append(rows[setting.name])
        track.note("round", {"question": question, "rows": rows})
    predicted = {each["name"]: each["found"] for each in track.known("prediction") if each["question"] == question}
    for setting in entrants if len(done) < rounds else ():
        if isinstance(setting, Ours):
            found = predicted[setting.name] = track.predict(setting, share=share, at=2 * rounds)
            track.note("prediction", {"question": question, "name": setting.name, "found": found})
        track.close(setting)
    for name in seen.keys() & predicted.keys():
        seen[name][-1] |= predicted[name]
    best = {name: median(second for row in rows for second in row["seconds"]) for name, rows in seen.items()}
    print(f"{question}: " + ", ".join(f"{name} {value:.3f}" for name, value in sorted(best.items())), flush=True)
    return seen


def _merged(visited: Sequence[Row], raced: Mapping[str, Sequence[Row]]) -> list[Row]:
    """A visit's row, with what the race has seen in place of its seconds."""
    merged = []
    for row in visited:
        rounds = raced.get(row["name"], ())
        row = {key: value for key, value in row.items() if key not in ("seen", "problem")} | {"is_raced": bool(rounds)}
        if rounds:
            row["seconds"] = [second for each in rounds for second in each["seconds"]]
            row["median_seconds"] = median(row["seconds"])
            row["peak_bytes"] = median(each["peak_bytes"] for each in rounds)
            row["inter_bytes"] = median(each["inter_bytes"] for each in rounds)
            row |= {key: value for key, value in rounds[-1].items() if key.startswith("predicted_")}
        merged.append(row)
    return merged


def _decided(rows: Sequence[Row]) -> dict[str, Any]:
    """The verdicts of a race: at every budget at which a peer runs, of the best, and like for like."""
    right = [row for row in rows if row["is_right"]]
    by_name = {row["name"]: row for row in right}
    theirs, ours = (by_name[setting.name] for setting in LIKE)
    return {
        "verdicts": [verdict.to_json() for verdict in verdicts(right)],
        "best": best_against_best(right).to_json(),
        "like": {
            "peer": theirs["name"],
            "ours": ours["name"],
            "ratio": round(theirs["median_seconds"] / ours["median_seconds"], 4),
        },
    }


def confirm(arguments: argparse.Namespace, result: Mapping[str, Any]) -> dict[str, Any]:
    """Race again what decides the figures, on both links, as often as the race did; gradients are checked first.

    A quick one races the pair that is alike. Raises RuntimeError where gradients are wrong.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    races, is_quick = _renamed(result)["races"], arguments.quick
    again: dict[str, dict[str, Row]] = {}
    with library() as preload, Track(Work(seconds=0.008) if is_quick else Work(), preload=preload, notes=None) as track:
        for question, found in races.items():
            names = deciding(found)[-2:] if is_quick else deciding(found)
            rows = [dict(row) for row in found["rows"] if row["name"] in names]
            raced = _race(track, _right(track, rows), question, found["share"], is_quick)
            again[question] = {row["name"]: row for row in _merged(rows, raced)}
    checks = [check for question, found in again.items() for check in compared(question, races[question], found)]
    rounds = 1 if is_quick else ROUNDS
    how = f"{sum(map(len, again.values()))} settings that decide the figures, Atoll's and torch's, {rounds} times in "
    return {"how": f"{how}turns", "checks": [check.to_json() for check in checks], "races": again}


def _right(track: Track, rows: Sequence[Row]) -> list[Setting]:
    """The settings of rows, built and let go: their gradients are noted. Raises RuntimeError where one is wrong."""
    settings = _settings(rows)
    for row, setting in zip(rows, settings, strict=True):
        seen = track.visit(setting, {})
        if not seen["is_right"]:
            raise RuntimeError(f"{setting.name}: {seen['problem'] or seen['gradient_difference']}")
        row["gradient_difference"] = seen["gradient_difference"]
    return settings


def deciding(found: Mapping[str, Any]) -> list[str]:
    """The settings whose seconds are in a ratio of the page: both sides' best at every budget, and like for like."""
    pairs = [*found["verdicts"], found["best"], found["like"]]
    return list(dict.fromkeys(name for pair in pairs for name in (pair["peer"], pair["ours"]) if name))


def compared(question: str, published: Mapping[str, Any], again: Mapping[str, Row]) -> list[Check]:
    """The ratios of a race, as published and as found again, and which side is the faster one of the best."""
    checks = at_budgets(f"{question} link", published["verdicts"], again)
    like = published["like"]
    if {like["peer"], like["ours"]} <= set(again):
        ratio = again[like["peer"]]["median_seconds"] / again[like["ours"]]["median_seconds"]
        checks.append(Check(f"{question} link: like for like", like["ratio"], round(ratio, 4)))
    played = [row for row in published["rows"] if row.get("predicted_seconds") and row["name"] in again]
    for row in played:
        words = f"{question} link, {row['name']}: simulated over measured"
        checks.append(Check(words, _simulated(row), _simulated(again[row["name"]])))
    return checks


def _simulated(row: Row) -> float | None:
    return round(row["predicted_seconds"] / row["median_seconds"], 4) if row.get("predicted_seconds") else None


def _renamed(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result in today's words: residency `action` was called `unit` when the raw file was written."""
    text = json.dumps(result).replace(" unit/", " action/").replace('"residency": "unit"', '"residency": "action"')
    return json.loads(text)  # type: ignore[no-any-return]


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    result = _renamed(result)
    work = result["work"]
    parts = [
        "# Sharded parameters in a pipeline",
        "Which schedule, layout and residency is fastest within a given memory, if the network between the "
        "data-parallel ranks of a pipeline is slow? Atoll and torch's pipelining with FSDP2, each in every setting "
        "that a search found worth a race.",
        "Written by `make bench-sharded-pipeline`. **The device and the network are emulated**: compute sleeps, and "
        "the data-parallel ranks sit in two namespaces of one machine, joined by a veth pair with a token bucket on "
        "both ends. Messages, autograd, the optimizer and memory are real. Trust ratios, not seconds.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        result.get("carried_over", ""),
        f"{work['layers']} layers of {work['layer_bytes'] / 1e3:.0f} kB on {PIPELINE} pipeline × {DATA} data-parallel "
        f"ranks, float64, SGD. A step has the same samples for any number of microbatches: with m = "
        f"{work['microbatches']} microbatches, F, I and W of a rank sleep {1000 * work['operation_seconds']:.0f} ms "
        f"each and a layer keeps "
        f"{work['kept_bytes'] / 1e3:.0f} kB of a microbatch until its W is done, as much as its parameters; with half "
        f"as many, each is twice as long and as large. A rank computes {work['compute_seconds']:.2f} s a step. Layers "
        "keep by autograd's saved tensors, the same on both sides.",
        "*s*: seconds from the end of one step to the end of the next, over all ranks, median of a race in turns. "
        "*peak*: bytes that the C library's allocator gave out on all threads, above what there was before the "
        "contender was built, on the rank with the highest peak. *across*: bytes that an island sends per step. "
        "Gradients of the first step are compared with one process; a difference above 1e-10 disqualifies a setting.",
        _SETTINGS,
    ]
    for question, found in result["races"].items():
        parts += _section(question, found, work["compute_seconds"])
    parts.append(_line(result["races"], work["compute_seconds"]))
    parts.append(_wrong(result))
    parts.append(_DENIED)
    return "\n\n".join(part for part in parts if part) + "\n"


_SETTINGS = """\
**Settings.** Atoll: schedule and stages per rank, layout, for `GGG` residency/reduction, for `NGG` reduction, \
microbatches (m), layers per unit; *posted* is the post-validated optimizer step. torch: schedule and stages per rank, \
`reshard_after_forward` False (*kept*) or True (*resharded*), microbatches, layers per unit. torch's pipelining \
reduces gradients once per step, after a stage's last backward, and has no other option."""

_DENIED = """\
## Disadvantages of torch on CPUs with gloo, and how they are compensated

On CPUs FSDP2 blocks during a reduction, and gloo's reduce-scatter sends an all-reduce's bytes. So torch gets a custom \
reduce-scatter (`FSDPModule.set_custom_reduce_scatter`): a direct exchange of each rank's shards, in the background, \
waited for before the optimizer's step, like a stream of NCCL. Rows with *gloo's reduction* do not use it. On a line \
torch gathers a unit at its first forward; here everything is gathered at the start of the step, except in rows with \
*gathered late*. Neither side clips gradients; Atoll computes and checks their norm each step, torch does not."""

_TITLES = {
    "limited": "A limited link: twice the time of compute",
    "hidden": "A link that can be hidden: half the time of compute",
}


def _section(question: str, found: Mapping[str, Any], compute_seconds: float) -> list[str]:
    rows = found["rows"]
    bits = found["bits_a_second"]
    right = [row for row in rows if row["is_right"]]
    members = {id(row) for side in (True, False) for row in front(row for row in right if row["is_ours"] is side)}
    best, like = found["best"], found["like"]
    bound = next(row["median_seconds"] for row in rows if row["name"] == best["peer"]) / compute_seconds
    return [
        f"## {_TITLES[question]}",
        f"{bits / 1e6:.0f} Mbit/s each way: the traffic of 1F1B with `GGG`, with two gathers and one reduction of "
        f"every unit per microbatch, takes {found['share']:g} times as long as a rank computes.",
        f"![seconds against peak memory](results/{question}.svg)",
        "At every memory in which a peer runs, both sides' best:",
        _verdicts(found["verdicts"], {row["name"]: row for row in rows}),
        f"**Best against best**: torch's time over Atoll's is {_ratio(best['ratio'])} (`{best['peer']}` against "
        f"`{best['ours']}`); torch's time over compute alone, without bubble and messages, is {_ratio(bound)}.",
        f"**Like for like**, one order, one gather and one reduction per step in the same units: "
        f"{_ratio(like['ratio'])} (`{like['peer']}` against `{like['ours']}`).",
        "Settings timed in turns, and some for comparison; bold ones are on their side's front. *link*: transfer time "
        "of the bytes at the link's rate. *steps*: number of timed steps; one for a setting of the search only. "
        "*simulated*: the step's programs, simulated by `atoll.simulate` with their instructions' measured seconds of "
        "one step, on a link with that burst and the measured rate of a large message; and the difference. *said*: MB "
        "across according to the programs, without packet headers.",
        _table(_shown(rows, members), members, bits),
    ]


def _verdicts(found: Sequence[Mapping[str, Any]], rows: Mapping[str, Row]) -> str:
    lines = ["| MB | torch | s | Atoll | s | MB | torch / Atoll |", "|--:|---|--:|---|--:|--:|--:|"]
    for verdict in found:
        peer, ours = rows[verdict["peer"]], rows.get(verdict["ours"] or "")
        cells = [f"{verdict['budget_bytes'] / 1e6:.1f}", peer["name"], f"{peer['median_seconds']:.2f}"]
        cells += ["nothing fits", "", ""] if ours is None else [ours["name"], *_seconds_and_peak(ours)]
        lines.append("| " + " | ".join([*cells, _ratio(verdict["ratio"])]) + " |")
    return "\n".join(lines)


def _seconds_and_peak(row: Row) -> list[str]:
    return [f"{row['median_seconds']:.2f}", f"{row['peak_bytes'] / 1e6:.1f}"]


def _shown(rows: Sequence[Row], members: Collection[int]) -> list[Row]:
    """The table's rows, the fastest first."""
    asked = {setting.name for setting in EXTRA}
    shown = [row for row in rows if row["is_raced"] or id(row) in members or row["name"] in asked]
    return sorted(shown, key=lambda row: float(row["median_seconds"]))


def _table(rows: Sequence[Row], members: Collection[int], bits: float) -> str:
    lines = [
        "| contender | s | steps | peak MB | MB across | link s | simulated s | | said MB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        name = f"**{row['name']}**" if id(row) in members else row["name"]
        sent = [f"{row['inter_bytes'] / 1e6:.1f}", f"{8 * row['inter_bytes'] / bits:.2f}"]
        seconds, peak = _seconds_and_peak(row)
        said = ["", "", ""]
        if "predicted_seconds" in row:
            off = row["predicted_seconds"] / row["median_seconds"] - 1
            said = [f"{row['predicted_seconds']:.2f}", f"{100 * off:+.1f} %", f"{row['predicted_bytes'] / 1e6:.1f}"]
        lines.append("| " + " | ".join([name, seconds, str(len(row["seconds"])), peak, *sent, *said]) + " |")
    return "\n".join(lines)


def _line(races: Mapping[str, Any], compute_seconds: float) -> str:
    """Why 1F1B with everything sharded is slow on a limited link, and what to set instead."""
    found = races.get("limited", {"rows": [], "bits_a_second": 1.0})
    rows = {row["name"]: row for row in found["rows"]}
    if not all(setting.name in rows for setting in LINE):
        return ""
    lines = ["| residency/reduction | s | peak MB | MB across | link s |", "|---|--:|--:|--:|--:|"]
    for setting in LINE:
        row = rows[setting.name]
        sent = [f"{row['inter_bytes'] / 1e6:.1f}", f"{8 * row['inter_bytes'] / found['bits_a_second']:.2f}"]
        lines.append("| " + " | ".join([f"{setting.residency}/{setting.reduction}", *_seconds_and_peak(row), *sent]))
        lines[-1] += " |"
    return "\n\n".join(
        [
            "## 1F1B with everything sharded, on the limited link",
            "With one stage per rank, each microbatch uses all parameters of the rank twice, so `action` residency "
            "with a reduction per microbatch sends more than the link can transfer in the "
            f"{compute_seconds:.2f} s of compute. The link is always busy, so neither the order nor prefetch makes "
            "this faster, only less traffic. torch sends less because its pipelining reduces once per step and, "
            "resharded or not, keeps parameters gathered through the backward. In Atoll this is a setting:",
            "\n".join(lines),
            "Use `step/step` if full parameters and gradients of a rank fit in memory; otherwise use a V schedule that "
            "keeps fewer microbatches (`zb-v`, `v-half`, `v-min`).",
        ]
    )


def _wrong(result: Mapping[str, Any]) -> str:
    """Who computed something else, and who did not get through."""
    rows = next(iter(result["races"].values()))["rows"]
    wrong = [f"`{row['name']}` ({row['gradient_difference']:.1g})" for row in rows if not row["is_right"]]
    failed = [f"`{name}`: {problem}" for name, problem in result.get("failed", {}).items()]
    said = []
    if wrong:
        said.append(
            "## Wrong\n\nGradients that differ from one process, and the largest difference relative to a gradient; "
            "no error was raised ([why](../who_gets_it_right/README.md)): " + ", ".join(wrong) + "."
        )
    if failed:
        said.append("Failed: " + "; ".join(failed) + ".")
    return "\n\n".join(said)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def publish(result: Mapping[str, Any], folder: Path) -> None:
    """Write the page and its pictures beside the raw result."""
    (folder / "README.md").write_text(report(result), encoding="utf-8")
    for question, found in result["races"].items():
        note = f"{found['bits_a_second'] / 1e6:.0f} Mbit/s; lower and further left is better; crosses are wrong"
        picture = scatter(_TITLES[question], found["rows"], note=note)
        (folder / "results" / f"{question}.svg").write_text(picture, encoding="utf-8")
