"""The rows of docs/evidence.md, each with the raw file or the tests that support it.

A `Claim` is a row. Its figures are read from a raw file whenever the pages are written, so no page can state anything
else. `make evidence` writes them; a test compares. To add a row: a `Claim` in `ALL_CLAIMS`.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import due, first_screen, states
from benchmarks.chaos.bench import kills, of_last_commit
from benchmarks.experts.figures import beside_fsdp2, pairs
from benchmarks.gpu import lines as gpu_lines
from benchmarks.gpu import pages as gpu_pages
from benchmarks.host.bench import HIDDEN
from benchmarks.integrity.bench import ENDS, shares
from benchmarks.islands.judging import counted, judged
from benchmarks.muon.bench import WINDOW
from benchmarks.provenance import ROOT, Raw, load, raw_path
from benchmarks.quality.bench import finals
from benchmarks.saving.bench import added
from benchmarks.states import state_of
from tests.families import CAUSAL, MASKED

PART = re.compile(r"(<!-- evidence -->\n).*?(<!-- end -->)", re.DOTALL)
"""The part of the README that is generated."""

MOST_FILES = 5
"""Named of those that have changed since."""

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A row of the page: what is claimed, how it is checked, the result.

    `how` and `result` have places for what `figures` finds in the raw file of the benchmark `raw`. A claim without one
    is supported by tests, which are named instead; it states no measured figure.

    starts: the heading of the section that begins with this row.
    """

    what: str
    how: str
    result: str
    raw: str = ""
    figures: Callable[[Raw], Figures] = lambda raw: {}
    tests: Sequence[str] = ()
    starts: str = ""

    def row(self) -> list[str]:
        """The cells, with the figures in their places."""
        found = self.figures(load(self.raw) if self.raw else {})
        if self.raw:
            source = f"[measured](#{self.raw}) {state_of(self.raw).beside}"
        else:
            source = ", ".join(f"[test]({path})" for path in self.tests)
        cells = [self.what, self.how.format(**found), self.result.format(**found), source]
        percents = [re.sub(r"(\d)%", r"\1 %", cell) for cell in cells]
        return [re.sub(r"\]\((docs/)?(?!#)", lambda link: "](" if link[1] else "](../", cell) for cell in percents]


# ---- what is taken from the raw files


def to(values: Iterable[float], form: str) -> str:
    """The smallest and the largest of some values."""
    ends = [format(end(kept), form) for kept in [list(values)] for end in (min, max)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def seconds(rows: Iterable[Raw]) -> dict[str, float]:
    """Contender -> median seconds of a step."""
    return {row["name"]: row["median_seconds"] for row in rows}


def costs(row: Raw) -> str:
    """Seconds, and the peak that a rank has allocated."""
    return f"{row['median_seconds']:.2f} s ({row['peak_bytes'] / 1e6:.0f} MB)"


def parity(at: int) -> Callable[[Raw], Figures]:
    return lambda raw: {"worst": raw["rows"][at]["largest_difference"], "cases": raw["rows"][at]["cases"]}


def precision(raw: Raw) -> Figures:
    found = raw["differences"]
    return {
        "ten": found["bf16"]["largest_of_ten_steps"],
        "all": found["bf16"]["all_steps"],
        "their_ten": found["torch autocast"]["largest_of_ten_steps"],
        "their_all": found["torch autocast"]["all_steps"],
        "steps": raw["job"]["steps"],
    }


def hangs(raw: Raw) -> Figures:
    return {
        "blows": len(raw["rows"]),
        "right": sum(not row["problems"] for row in raw["rows"]),
        "timeout": raw["timeout"],
        "longest": max(row["seconds"] for row in raw["rows"] if row["manner"] != "stop store"),
    }


def automatic(raw: Raw) -> Figures:
    rows, small = raw["rows"], raw["small"]
    return {
        "instances": len(rows),
        "ranks": to((row["ranks"] for row in rows), "d"),
        "median": median(row["over_bound"] for row in rows),
        "worst": max(row["over_bound"] for row in rows),
        "small": len(small),
        "optimum": max(row["over_optimum"] for row in small),
        "tight": len(raw["first_rank_at_three_quarters"]),
        "tight_worst": max(row["over_bound"] for row in raw["first_rank_at_three_quarters"]),
    }


def emulated(raw: Raw) -> Figures:
    mine = [row for race in raw["races"] for row in race["rows"] if "over_replay" in row]
    four, eight = (chain for chain in raw["chains"])
    return {
        "replay": to((100 * row["over_replay"] for row in mine), ".1f"),
        "simulation": to((100 * row["over_simulation"] for row in mine), ".1f"),
        **{name.replace("-", ""): to((race["of_torch"][name] for race in raw["races"]), ".2f")
           for name in ("1f1b", "interleaved", "zb-v")},
        "four": four["ratio"], "four_said": four["predicted_ratio"],
        "eight": eight["ratio"], "eight_said": eight["predicted_ratio"],
    }  # fmt: skip


def slow_hop(raw: Raw) -> Figures:
    """Return speedups of the best automatic order over the better of 1F1B and ZB-V, in 1F1B's memory and twice that."""
    best: dict[bool, list[float]] = {False: [], True: []}
    for race in raw["races"]:
        for is_more, found in best.items():
            within = f"{(1 + is_more) * race['ranks']} kept"
            found.append(max(times for name, times in race["times_as_fast"].items() if name.endswith(f" {within}")))
    return {
        "ranks": to((race["ranks"] for race in raw["races"]), "d"),
        "latencies": to((1e3 * race["latency_seconds"] for race in raw["races"]), "g"),
        "same": to(best[False], ".2f"),
        "more": to(best[True], ".2f"),
        "over": max(row["over_simulation"] for race in raw["races"] for row in race["rows"]),
    }


def uneven(raw: Raw) -> Figures:
    rows = raw["rows"]
    ratios = {name: [row[name] / row["joint"] for row in rows] for name in ("equal", "best")}
    within = [row["equal"] / row["within"] for row in rows]
    return {
        "models": len({row["model"] for row in rows}),
        "equal": sum(ratios["equal"]) / len(rows),
        "within": sum(within) / len(rows),
        "least": min(within),
        "most": max(within),
        "best": to(ratios["best"], ".2f"),
        "seconds": max(row["search_seconds"] for row in rows),
    }


def unequal(raw: Raw) -> Figures:
    return {
        "fast": raw["fast_seconds"] * 1e3,
        "slow": raw["slow_seconds"] * 1e3,
        "times": to(raw["times_as_fast"].values(), ".2f"),
        "over": max(abs(row["over_simulation"]) for row in raw["rows"]),
    }


def planner(raw: Raw) -> Figures:
    return {
        "took": ", ".join(f"{row['name']} {max(row['search_seconds']):.0f} s" for row in raw["rows"]),
        "same": "the same answer twice" if all(row["same"] for row in raw["rows"]) else "not the same answer twice",
        "gaps": to([100 * row["gap"] for row in raw["rows"]], ".0f"),
    }


def integrity(raw: Raw) -> Figures:
    total = {end: sum(row[end] for row in raw["damage"] if "without" not in row["subject"]) for end in ENDS}
    before = [row for row in raw["damage"] if "without" in row["subject"]]
    loading = [shares(row, "load", "load_plain", "check")[0] for row in raw["cost"]]
    saving = [shares(row, "save", "save_plain", "digest")[1] for row in raw["cost"]]
    return {
        "count": sum(total.values()),
        **total,
        "before": sum(row["wrong"] for row in before),
        "of": sum(row[end] for row in before for end in ENDS),
        "loading": to(loading, ".1%"),
        "saving": to(saving, ".2f"),
    }


def slices(raw: Raw) -> Figures:
    rows = raw["rows"]
    whole = next(row for row in rows if (row["schedule"], row["slices"]) == ("1f1b", 1))
    cut = [row for row in rows if row["slices"] > 1]
    best = min((row for row in cut if row["activations"] <= whole["activations"] / 2), key=lambda row: row["seconds"])
    return {
        "ranks": raw["ranks"],
        "microbatches": raw["microbatches"],
        "best": best["schedule"],
        "slices": best["slices"],
        "times": whole["seconds"] / best["seconds"],
        "kept": best["activations"] / whole["activations"],
        "over": max(row["seconds"] / row["predicted_seconds"] - 1 for row in rows),
        "bytes": max(abs(row["activations"] / row["predicted_activations"] - 1) for row in rows),
    }


def sequence(raw: Raw) -> Figures:
    """Beside the fastest peer of as many ranks, in no more memory than it takes."""
    found: dict[int, tuple[float, float]] = {}
    for ranks in (2, 4):
        own = [row for row in raw["rows"] if row["ranks"] == ranks]
        peer = min((row for row in own if not row["is_ours"]), key=lambda row: row["median_seconds"])
        fitting = [row for row in own if row["is_ours"] and row["peak_bytes"] <= peer["peak_bytes"]]
        ours = min(fitting, key=lambda row: row["median_seconds"])
        times = median(b / a for a, b in zip(ours["seconds"], peer["seconds"], strict=True))
        found[ranks] = times, ours["peak_bytes"] / peer["peak_bytes"]
    return {
        "tokens": raw["work"]["tokens"],
        "two": found[2][0],
        "four": found[4][0],
        "peak": max(share for _, share in found.values()),
    }


def chunked_loss(raw: Raw) -> Figures:
    ours, torchs = (
        {row["chunks"]: row for row in raw["rows"] if row["is_ours"] is is_ours} for is_ours in (True, False)
    )
    best = min((count for count in ours if count > 1), key=lambda count: median(ours[count]["seconds"]))

    def over(row: Any, other: Any) -> float:
        return median(a / b for a, b in zip(row["seconds"], other["seconds"], strict=True))

    return {
        "vocabulary": raw["work"]["vocabulary"],
        "tokens": raw["work"]["tokens"],
        "chunks": best,
        "time": over(ours[best], ours[1]),
        "peak": ours[best]["peak_bytes"] / ours[1]["peak_bytes"],
        "torchs_time": over(ours[best], torchs[best]),
        "torchs_peak": ours[best]["peak_bytes"] / torchs[best]["peak_bytes"],
    }


def stream(raw: Raw) -> Figures:
    rows = {row["name"]: row for row in raw["rows"]}

    def over(name: str, other: str) -> float:
        return median(a / b for a, b in zip(rows[name]["seconds"], rows[other]["seconds"], strict=True))

    bytes_of = {key: sum(each[key]["bytes"] for each in raw["changes"]) for key in ("everything", "changed")}
    return {
        "parameters": raw["work"]["parameters"],
        "lr": raw["work"]["lr"],
        "every": over("atoll-all", "fsdp2-all"),
        "one": over("atoll-one", "fsdp2-one"),
        "walk": rows["atoll-walk"]["peak_bytes"] / rows["fsdp2-one"]["peak_bytes"],
        "changed": bytes_of["changed"] / bytes_of["everything"],
    }


def host(raw: Raw) -> Figures:
    return {
        "cases": len(raw["rows"]),
        "over": max(row["over_simulation"] for row in raw["rows"]),
        "hidden": max(row["over_without"] for row in raw["rows"] if row["name"] in HIDDEN),
    }


def saving(raw: Raw) -> Figures:
    real, emulated = raw["rows"]
    return {
        "emulated": f"{added(emulated):.1%}",
        "real": f"{added(real):.1%}",
        "begun": to([1e3 * median(row["begun"]) for row in raw["rows"]], ".0f"),
        "waited": to([1e3 * median(row["waited"]) for row in raw["rows"]], ".0f"),
    }


NEXT_STEP = 15
"""Seconds within which a run should go on after a rank was killed."""


def _stopped(rounds: list[Any]) -> str:
    """Runs that ended at `run.restarts`: killed again and again before their next checkpoint."""
    found = [row for row in rounds if any("(run.restarts)" in problem for problem in row["problems"])]
    limits = sorted({row["restarts"] for row in found})
    return (
        f"; {len(found)} stopped at its `run.restarts` of {limits[0]} starts without a new checkpoint" if found else ""
    )


def chaos(raw: Raw) -> Figures:
    done = [each for row in raw["rounds"] for each in row["disturbances"]]
    local = [row for row in raw["rounds"] if row["ranks"] == 4 and row["launcher"] != "two nodes"]
    back = [
        each["recovered"]
        for row in of_last_commit(local)
        for each in row["disturbances"]
        if each["kind"] == "rank killed" and each["recovered"] is not None
    ]
    return {
        "runs": len(raw["rounds"]),
        "configurations": len({row["configuration"] for row in raw["rounds"]}),
        "kinds": len({each["kind"] for each in done}),
        "count": len(done),
        "kills": kills(raw["rounds"]),
        "right": sum(not row["problems"] for row in raw["rounds"]),
        "stopped": _stopped(raw["rounds"]),
        "soon": sum(seconds < NEXT_STEP for seconds in back),
        "aim": NEXT_STEP,
        "of": len(back),
        "median": f"{median(back):.1f}",
        "longest": f"{max(back):.1f}",
    }


def fuzzed(raw: Raw) -> Figures:
    rows = raw["rows"]
    return {
        "parsers": len(rows),
        "all": raw["parsers"],
        "inputs": min(row["inputs"] for row in rows),
        "uncaught": sum(row["uncaught"] for row in rows),
        "seconds": max(row["seconds"] for row in rows),
        "megabytes": max(row["bytes"] for row in rows) / 1e6,
    }


def codecs(raw: Raw) -> Figures:
    """Return times as fast as the layout without codecs, and bytes over the formula."""
    found: dict[str, Any] = {}
    for where, (name, race) in zip(("slow", "fast"), raw["races"].items(), strict=True):
        rows = {
            (each["layout"], each["gradient"], each["parameter"]): row["median_seconds"]
            for row in race["rows"]
            if (each := row["setting"])["rounding"] == "nearest"
        }
        found[where] = name
        for codec in ("int8", "int4"):
            found[f"{codec}_{where}"] = rows["IIG", None, None] / rows["IIG", codec, codec]
    every = [row for race in raw["races"].values() for row in race["rows"]]
    over = [100 * (median(row["inter_bytes"]) / row["formula_bytes"] - 1) for row in every]
    return {**found, "over": to(over, ".1f")}


def outer(raw: Raw) -> Figures:
    speed = raw["speed"]
    return {
        "rate": speed["bits"] / 1e6,
        "every": speed["outer"]["every"],
        "over": median(speed["over_alone"]),
        "times": speed["times_as_fast"],
        "best": speed["best_synchronous"],
    }


def quality(raw: Raw) -> Figures:
    named = {*raw["aims"], "outer steps from scratch"}
    found = [f"{each.name} {each.over:+.2%}" for each in finals(raw) if each.name in named]
    seeds = len({row["seed"] for row in raw["rows"]})
    begin = max(row.get("begin", 0) for row in raw["rows"])
    return {"steps": raw["steps"], "seeds": seeds, "every": raw["every"], "begin": begin, "told": "; ".join(found)}


def muon(raw: Raw) -> Figures:
    ratios = {row["layout"]: row["ratio"] for row in raw["rows"]}
    last = {name: fmean(losses[-WINDOW:]) for name, losses in raw["losses"].items()}
    return {"steps": raw["job"]["steps"], **ratios, **last}


def low_rank(raw: Raw) -> Figures:
    races = [seconds(race["rows"]) for race in raw["races"]]
    return {
        "rates": " and ".join(f"{race['bits_a_second'] / 1e6:g}" for race in raw["races"]),
        **{name: " and ".join(f"{race[f'atoll-{name}']:.2f}" for race in races) for name in ("ING", "NNG", "GGG")},
    }


def raced(raw: Raw) -> Figures:
    """Figures of races by memory: best against best, the ratio at each memory budget, and like for like."""
    told, alike = [], []
    for course, race in raw["races"].items():
        rows = {row["name"]: row for row in (*race["visited"], *race["rows"])}
        verdict = judged(race)
        best = verdict["best_against_best"]
        ratios = [each["ratio"] for each in verdict["verdicts"] if each["ratio"] is not None]
        unmet = len(verdict["verdicts"]) - len(ratios)
        ours, is_faster = "nothing of Atoll fits", ""
        if best["ratio"] is not None:
            ours = f"{best['ours']} {costs(rows[best['ours']])}"
            is_faster = f": **{best['ratio']:.2f} times as fast**"
        told.append(
            f"{course}: {ours}, the fastest peer {best['peer']} {costs(rows[best['peer']])}{is_faster}"
            + (f"; {to(ratios, '.2f')} times at every memory budget that a peer meets" if ratios else "")
            + (f", but {unmet} of its settings use less memory than any of ours" if unmet else "")
        )
        alike.append(f"{course}: {_alike(verdict['like_for_like'], rows)}")
    visited = sum(len(race["visited"]) for race in raw["races"].values())
    return {"told": ". ".join(told), "alike": ". ".join(alike), "visited": visited}


def _alike(ratios: Mapping[str, float], rows: Mapping[str, Raw]) -> str:
    """GGG beside FSDP2 and IIG beside HSDP, each with gloo's reduce-scatter and with a true one."""
    full, full_true, *groups = ratios.values()
    across = [rows[name]["inter_bytes"] for name in ("Atoll GGG x1", "FSDP2 x1, prefetch 2")]
    share = f" with {across[0] / across[1]:.2f} of its bytes across" if groups else ""
    words = (
        f"GGG {full:.2f} times as fast as FSDP2's full shard{share}, {full_true:.2f} times with a true reduce-scatter"
    )
    return words + (f"; IIG {to(groups, '.2f')} times as fast as HSDP" if groups else "")


def experts(raw: Raw) -> Figures:
    """By course: the best beside FSDP2 and HSDP in no more memory, and exchanging beside gathering in one layout."""
    beside, exchanged = [], []
    for course, race in raw["races"].items():
        rows, found = counted(race), beside_fsdp2(race)
        best = found[-1].to_json()
        words = f"{course}: {best['peer']} {costs(rows[best['peer']])}, their fastest; "
        if best["ratio"] is None:
            words += "nothing of Atoll fits its memory"
        else:
            words += f"{best['ours']} {costs(rows[best['ours']])}: **{best['ratio']:.2f} times as fast**"
        ratios = [each.ratio for each in found if each.ratio is not None]
        beside.append(words + (f"; {to(ratios, '.2f')} times at every memory budget of theirs" if ratios else ""))
        same = pairs(race)
        exchanged.append(
            f"{course}: {to((pair.ratio for pair in same), '.2f')} times as fast in "
            f"{to((pair.share for pair in same), '.2f')} of the peak memory; Atoll's fastest is "
            f"{min((row for row in rows.values() if row['is_ours']), key=lambda row: row['median_seconds'])['name']}"
        )
    visited = sum(len(race["visited"]) for race in raw["races"].values())
    return {"beside": ". ".join(beside), "exchanged": ". ".join(exchanged), "visited": visited}


def predictions(raw: Raw) -> Figures:
    from benchmarks.predictions import bench

    judged = bench.judged(raw["real"])
    found = {
        "seconds": bench.errors(judged),
        "emulated": bench.errors(raw["emulated"]),
        "bytes": bench.byte_errors(raw["real"]),
        "layouts": bench.byte_errors(raw["layouts"]),
        "mixtures": bench.byte_errors(raw["mixtures"]),
        "hosted": bench.byte_errors(raw["hosted"]),
    }
    figures: dict[str, Any] = {"judged": len(judged), "fitted": len(raw["real"]) - len(judged)}
    figures |= {"runs": len(raw["real"]), "sleeping": len(raw["emulated"])}
    for name, errors in found.items():
        sizes = [abs(error) for error in errors]
        figures |= {f"{name}_median": median(sizes), f"{name}_worst": max(sizes)}
    return figures


def choices(raw: Raw) -> Figures:
    from benchmarks.choices import bench, judge

    races = list(bench.races(raw))
    best = [judge.unlimited(race.judged) for race in races]
    limited = [each for race in races for each in judge.choices(race.judged)]
    within = [each.ratio for each in limited if each.ratio is not None]
    return {
        "races": len(races),
        "judged": sum(len(race.judged) for race in races),
        "best_median": median(best) - 1.0,
        "best_worst": max(best) - 1.0,
        "best_near": sum(each <= bench.NEAR for each in best),
        "limits": len(within),
        "within_median": median(within) - 1.0,
        "within_worst": max(within) - 1.0,
        "within_near": sum(each <= bench.NEAR for each in within),
        "large": sum(each.overruns for each in limited),
    }


def vocabulary(raw: Raw) -> Figures:
    rows = {(row["schedule"], row["name"]): row for row in raw["rows"]}
    split = [row for (_, name), row in rows.items() if name == "vocabulary split"]

    def against(other: str, key: str, *, inverse: bool = False) -> Iterable[float]:
        ratios = [rows[row["schedule"], other][key] / row[key] for row in split]
        return [1 / each for each in ratios] if inverse else ratios

    return {
        "even": to(against("layers even", "median_seconds"), ".2f"),
        "cost": to(against("layers by cost", "median_seconds"), ".2f"),
        "even_bytes": to(against("layers even", "largest_bytes", inverse=True), ".2f"),
        "cost_bytes": to(against("layers by cost", "largest_bytes", inverse=True), ".2f"),
        "over": max(row["over_simulation"] for row in raw["rows"]),
    }


def sharded_pipeline(raw: Raw) -> Figures:
    found: dict[str, Any] = {"layers": raw["work"]["layers"], "compute": raw["work"]["compute_seconds"]}
    for question in ("hidden", "limited"):
        race = raw["races"][question]
        rows = {row["name"]: row for row in race["rows"]}
        best = race["best"]
        found |= {
            f"{question}_peer": f"{best['peer']} {costs(rows[best['peer']])}",
            f"{question}_ours": f"{best['ours']} {costs(rows[best['ours']])}",
            f"{question}_ratio": best["ratio"],
            f"{question}_every": to((each["ratio"] for each in race["verdicts"]), ".2f"),
            f"{question}_like": race["like"]["ratio"],
        }
    played = [row for race in raw["races"].values() for row in race["rows"] if row.get("predicted_seconds")]
    errors = [row["predicted_seconds"] / row["median_seconds"] - 1.0 for row in played]
    return {**found, "simulated": f"{min(errors):+.1%} to {max(errors):+.1%}", "played": len(played)}


def who(raw: Raw) -> Figures:
    atoll = [row for row in (*raw["matrix"], *raw["layouts"]) if row["system"].startswith("atoll")]
    resharded = [row for row in raw["matrix"] if row["system"] == "torch FSDP2, resharded"]
    wrong = [row for row in resharded if row["verdict"] == "wrong"]
    kept = [row for row in raw["matrix"] if row["system"] == "torch FSDP2, kept"]
    return {
        "right": sum(row["verdict"] == "right" for row in atoll),
        "cases": len(atoll),
        "wrong": len(wrong),
        "resharded": len(resharded),
        "off": to((100 * row["off"] for row in wrong), ".0f"),
        "kept": sum(row["verdict"] == "right" for row in kept),
        "of_kept": len(kept),
    }


def matrix(raw: Raw) -> Figures:
    return {key: raw[key] for key in ("cases", "right", "worst")} | {"hours": raw["seconds"] / 3600}


FLOAT64 = "largest difference {worst:.0e}"
RUNTIME = "tests/runtime"


def federation(raw: Raw) -> Figures:
    """Islands that come and go: what was done to them, and what it cost them and one world beside."""
    disturbed, equal = raw["disturbed"], raw["loss_at_equal_tokens"]
    islands = len(disturbed["final_losses"])
    return {
        "islands": islands,
        "rounds": raw["rounds"],
        "times": len(disturbed["disturbances"]),
        "away": sum(each["away"] for each in disturbed["disturbances"]) / (islands * disturbed["seconds"]),
        "goodput": raw["goodput"],
        "beside": raw["restart_all_goodput"],
        "slower": max(raw["survivors_slower"].values()),
        "loss": equal["disturbed"] / equal["undisturbed"] - 1.0,
    }


def report(raw: Raw) -> Figures:
    rows = raw["rows"]
    return {
        "ranks": raw["ranks"],
        "bars": raw["bars"],
        "least": raw["least_bars_of_a_rank"],
        "size": raw["page_bytes"] / 1e6,
        "opened": max(max(row["opened_seconds"]) for row in rows),
        "scroll": min(row["scroll_frames_per_second"] for row in rows),
        "zoom": min(row["zoom_frames_per_second"] for row in rows),
    }


ALL_CLAIMS = (
    Claim(
        starts="Numerical correctness",
        what="loss, gradient norm and parameters match one process in float64",
        how="{cases} cases: 27 layouts on 1×1, 1×2, 2×1 and 2×2 ranks",
        result=FLOAT64,
        raw="parity",
        figures=parity(0),
    ),
    Claim(
        what="— in a pipeline",
        how="{cases} cases: 14 effective layouts, GPipe and 1F1B, a pipeline of 2 on 2×2 ranks",
        result=FLOAT64,
        raw="parity",
        figures=parity(1),
    ),
    Claim(
        what="— every schedule of [the catalogue](docs/schedules.md)",
        how="{cases} cases: pipelines of 2 and 4; NNN, NNG and GGG",
        result=FLOAT64,
        raw="parity",
        figures=parity(2),
    ),
    Claim(
        what="— resumed on another layout, pipeline or world size",
        how="{cases} pairs, the ten steps after the resume",
        result=FLOAT64,
        raw="parity",
        figures=parity(3),
    ),
    Claim(
        what="— every schedule × layout × tensor parallelism × recompute × kind of model",
        how="`make matrix`: {cases} runs in {hours:.1f} hours: [table](benchmarks/matrix/README.md)",
        result="{right} of {cases} within 1e-10, largest difference {worst:.1e}",
        raw="matrix",
        figures=matrix,
    ),
    Claim(
        what="— mixtures: experts over 2 and 4 ranks × layout × schedule × tensor parallelism × recompute × kind of "
        "mixture",
        how="{cases} runs in {hours:.1f} hours: [table](benchmarks/mixtures/README.md)",
        result="{right} of {cases} within 1e-10, largest difference {worst:.1e}",
        raw="mixtures",
        figures=matrix,
    ),
    Claim(
        what="— any two settings together, also experts and their layout, residency, codecs, outer steps, Muon",
        how="a sample with each pair of values, and a part of those of large meshes, in every `make test`",
        result="within 1e-10",
        tests=[f"{RUNTIME}/test_matrix.py"],
    ),
    Claim(
        what="Hugging Face models match the unsplit model that transformers and torch run alone",
        how="{families} families of tiny random models, pipeline 2 × IIG and, but for one, pipeline 2 × tensor 2 (one "
        "of the two in `make test-all`, both in `make matrix`), in "
        "float64: logits, gradients, loss, norm, parameters",
        result="within 1e-10; 5e-5 where a model computes in fp32",
        figures=lambda _: {"families": len(CAUSAL) + len(MASKED)},
        tests=[f"{RUNTIME}/test_families.py"],
    ),
    Claim(
        what="— import, export",
        how="folders in and out",
        result="equal to the last bit",
        tests=["tests/training/models/test_interchange.py"],
    ),
    Claim(
        what="right gradients where a pipeline meets sharding",
        how="torch's schedules with FSDP2 and DDP, DeepSpeed's pipeline with ZeRO, by one judge: "
        "[page](benchmarks/who_gets_it_right/README.md)",
        result="Atoll right in {right} of {cases}; FSDP2 right in {kept} of {of_kept} if parameters stay gathered; if "
        "resharded, wrong in {wrong} of {resharded}, by {off} % and without an error, under split backwards",
        raw="who_gets_it_right",
        figures=who,
    ),
    Claim(
        what="prefetch, overlap and shared memory do not change results",
        how="sharded layouts under 1F1B and ZB-V; paths that change from step to step",
        result="equal to the last bit",
        tests=[f"{RUNTIME}/test_overlap.py", f"{RUNTIME}/test_shared_memory.py"],
    ),
    Claim(
        what="a post-validated optimizer step equals one that waits",
        how="14 layouts, every schedule, fp16, bf16, fp32; steps rolled back; inf and NaN at chosen stages",
        result="equal to the last bit",
        tests=[f"{RUNTIME}/test_post_validation.py"],
    ),
    Claim(
        what="bf16 with an fp32 master follows fp32",
        how="{steps} steps of a small decoder on real text, loss against fp32",
        result="ten-step means differ by up to {ten:.2%}, the mean over all steps by {all:.2%}; with torch's autocast "
        "{their_ten:.2%} and {their_all:.2%}",
        raw="precision",
        figures=precision,
    ),
    Claim(
        starts="Pipeline schedules",
        what="the simulator agrees with published bubble rates",
        how="profiled costs of the Zero Bubble paper: 1F1B, ZB-H1, ZB-H2, interleaved",
        result="equal to 4 digits",
        tests=["tests/program/test_sim.py", "tests/plans/schedules/test_published.py"],
    ),
    Claim(
        what="automatic schedules are close to a lower bound",
        how="{instances} random instances, {ranks} ranks, memory limits that differ by rank, simulated. The search "
        "starts from the fixed schedules, so it is never worse than one that fits",
        result="median {median:.3f} of the bound, worst {worst:.2f}; on {small} small instances at most {optimum:.2f} "
        "of an exact solver's result",
        raw="schedules",
        figures=automatic,
    ),
    Claim(
        what="— with memory for 0.75 p microbatches on the first rank",
        how="{tight} random instances with unequal stages",
        result="at most {tight_worst:.3f} of the bound",
        raw="schedules",
        figures=automatic,
    ),
    Claim(
        what="ranks lose little time between actions",
        how="1F1B, interleaved, ZB-H1 and ZB-V on an **emulated device** (compute sleeps, messages are real), 4 and 8 "
        "ranks on two cores",
        result="{replay} % more than a replay of the measured actions; {simulation} % more than a simulation with "
        "measured costs",
        raw="emulated",
        figures=emulated,
    ),
    Claim(
        what="— beside torch's own runtime",
        how="the same emulated device, `torch.distributed.pipelining` with the same schedules, gradients compared",
        result="1F1B takes {1f1b}x the time of torch's runtime, interleaved {interleaved}x, ZB-V {zbv}x",
        raw="emulated",
        figures=emulated,
    ),
    Claim(
        what="— ZB-H2 with post-validation beside ZB-H1",
        how="ten steps back to back on the same emulated device",
        result="{four:.3f}x the time of ZB-H1 on 4 ranks (simulated {four_said:.3f}x), {eight:.3f}x on 8 "
        "({eight_said:.3f}x)",
        raw="emulated",
        figures=emulated,
    ),
    Claim(
        starts="Prediction accuracy",
        what="memory between steps and traffic match the prediction",
        how="bytes held: 27 layouts, fp32 and bf16; bytes sent: 14 effective layouts on 2×2 ranks",
        result="equal to the byte",
        tests=[f"{RUNTIME}/test_memory_and_traffic.py"],
    ),
    Claim(
        what="the program of a step is known before it runs (`atoll show program`)",
        how="programs computed without allocating the model, compared with those that ranks execute: two levels, "
        "pipelines, a split vocabulary, a tensor-parallel group; bytes sent, 14 effective layouts",
        result="the same instructions, equal to the byte",
        tests=[f"{RUNTIME}/test_describe.py", f"{RUNTIME}/test_memory_and_traffic.py"],
    ),
    Claim(
        what="peak memory matches the prediction",
        how="the C library's allocator on all threads, NNG, IIG and GGG on 2×2 ranks",
        result="within the bound that the test states",
        tests=["tests/test_benchmarks.py"],
    ),
    Claim(
        what="step time is predicted",
        how="{runs} configurations on this machine's CPUs: models, layouts, schedules, precisions, recomputing. "
        "{fitted} of them calibrate the model, {judged} test it: [page](benchmarks/predictions/README.md)",
        result="median error {seconds_median:.1%}, worst {seconds_worst:.1%}",
        raw="predictions",
        figures=predictions,
    ),
    Claim(
        what="— on an **emulated device** whose costs are given",
        how="{sleeping} configurations on four ranks; messages, gathers and reductions are real",
        result="median error {emulated_median:.1%}, worst {emulated_worst:.1%}",
        raw="predictions",
        figures=predictions,
    ),
    Claim(
        what="— peak memory",
        how="bytes counted by the allocator in the same runs, by component for 14 effective layouts on 2×2 ranks, for "
        "mixtures on four ranks, and for plans with host memory on two",
        result="median error {bytes_median:.1%}, worst {bytes_worst:.1%}; for the layouts {layouts_median:.1%} and "
        "{layouts_worst:.1%}, for mixtures {mixtures_median:.1%} and {mixtures_worst:.1%}, with host memory "
        "{hosted_median:.1%} and {hosted_worst:.1%}",
        raw="predictions",
        figures=predictions,
    ),
    Claim(
        what="— the plan with the lowest predicted time is among the fastest",
        how="{races} measured sweeps on two islands and on one machine. Some settings calibrate the model, {judged} "
        "test it: [page](benchmarks/choices/README.md)",
        result="median {best_median:.1%} slower than the fastest measured plan, worst {best_worst:.1%}, within a "
        "twentieth in {best_near} of {races}. At {limits} memory limits: median {within_median:.1%}, worst "
        "{within_worst:.0%}, within a twentieth in {within_near}; {large} choices exceed the limit",
        raw="choices",
        figures=choices,
    ),
    Claim(
        starts="Speed and memory beside other systems",
        what="two islands of two ranks beside FSDP2, HSDP, DDP and DeepSpeed (**emulated network**)",
        how="a chain of 9.5 million parameters, {visited} settings of all systems found by a search, step time "
        "against peak memory. Settings near a front race in turns; the others count by one visit: "
        "[page](benchmarks/two_islands/README.md). FSDP2 also runs with a true "
        "reduce-scatter, which gloo lacks; on CPUs FSDP2 waits for its reductions",
        result="{told}",
        raw="two_islands",
        figures=raced,
    ),
    Claim(
        what="— like for like: same batch, prefetch and number of gathers and reductions",
        how="the same race",
        result="{alike}",
        raw="two_islands",
        figures=raced,
    ),
    Claim(
        what="— 7 billion parameters on two nodes of eight A100, scaled down (**emulated device and network**)",
        how="the same race with {visited} settings; network time relative to compute time is that of the nodes: "
        "[page](benchmarks/two_islands_a100/README.md)",
        result="{told}",
        raw="two_islands_a100",
        figures=raced,
    ),
    Claim(
        what="— a decoder of 100 million parameters on sequences of 512 tokens (**emulated network**)",
        how="the same race with {visited} settings: [page](benchmarks/two_islands_text/README.md)",
        result="{told}",
        raw="two_islands_text",
        figures=raced,
    ),
    Claim(
        what="one machine, four and two ranks on two cores",
        how="the same race without a link, {visited} settings: [page](benchmarks/one_machine/README.md). Atoll's ranks "
        "read each other's memory; gloo uses the loopback",
        result="{told}",
        raw="one_machine",
        figures=raced,
    ),
    Claim(
        what="— like for like",
        how="the same race",
        result="{alike}",
        raw="one_machine",
        figures=raced,
    ),
    Claim(
        what="— a model of 7 billion parameters on one node of A100, scaled down (**emulated device**)",
        how="the same race with {visited} settings: [page](benchmarks/one_machine_a100/README.md)",
        result="{told}",
        raw="one_machine_a100",
        figures=raced,
    ),
    Claim(
        what="a mixture of 117 million parameters on one machine, and on two islands (**emulated network**): experts "
        "that ranks exchange tokens for, beside FSDP2 and HSDP, which gather them",
        how="16 experts a layer, 2 a token, at most 512 tokens of a rank in a microbatch; {visited} settings of all "
        "systems: [page](benchmarks/experts/README.md)",
        result="{beside}",
        raw="experts",
        figures=experts,
    ),
    Claim(
        what="— beside gathering experts in the same layout",
        how="the same race: settings that differ in nothing else",
        result="{exchanged}",
        raw="experts",
        figures=experts,
    ),
    Claim(
        what="— the decoder of 100 million parameters",
        how="the same race with {visited} settings: [page](benchmarks/one_machine_text/README.md)",
        result="{told}",
        raw="one_machine_text",
        figures=raced,
    ),
    Claim(
        what="low-rank adapters on two islands (**emulated network**)",
        how="a frozen model whole on each rank (NNG), sharded inside each island (ING) or over all ranks (GGG), at "
        "{rates} Mbit/s: [page](benchmarks/low_rank/README.md)",
        result="NNG {NNG} s a step, ING {ING} s, GGG {GGG} s: NNG is the fastest where the model fits, ING where it "
        "does not",
        raw="low_rank",
        figures=low_rank,
    ),
    Claim(
        what="sharded parameters in a pipeline on a limited link (**emulated device and link**)",
        how="{layers} layers on 4 × 2 ranks, {compute:.2f} s of compute, a link that takes twice as long for 1F1B with "
        "GGG, beside torch's pipelining with FSDP2: settings of both found by a search, step time against peak memory: "
        "[page](benchmarks/sharded_pipeline/README.md). torch gets a true reduce-scatter, which gloo lacks; on CPUs "
        "FSDP2 waits for its reductions",
        result="{limited_ours}; torch's best {limited_peer}: {limited_ratio:.2f} times as fast; {limited_every} "
        "times at every memory budget that torch meets; {limited_like:.2f} times like for like, 1F1B with one gather "
        "and one reduction a step",
        raw="sharded_pipeline",
        figures=sharded_pipeline,
    ),
    Claim(
        what="— on a link that compute can hide",
        how="the same search; the link takes half as long as compute",
        result="{hidden_ours}; torch's best {hidden_peer}: {hidden_ratio:.2f} times as fast; {hidden_every} times at "
        "every memory budget that torch meets; {hidden_like:.2f} times like for like",
        raw="sharded_pipeline",
        figures=sharded_pipeline,
    ),
    Claim(
        what="— the simulated step time",
        how="the programs of the settings that raced, on both links, simulated with the durations of their "
        "instructions and messages in one step",
        result="{played} settings: {simulated} of the measured seconds",
        raw="sharded_pipeline",
        figures=sharded_pipeline,
    ),
    Claim(
        what="a pipeline over two islands with a slow hop (**emulated device and network**)",
        how="{ranks} ranks, half on each island, {latencies} ms between them; orders searched for the measured links "
        "beside the better of 1F1B and ZB-V: [page](benchmarks/slow_hop/README.md)",
        result="{same} times as fast in the memory of 1F1B, {more} times in at most twice that; at most {over:.1%} "
        "more than simulated",
        raw="slow_hop",
        figures=slow_hop,
    ),
    Claim(
        what="a pipeline over devices of two speeds (**emulated device**)",
        how="two ranks on devices on which a layer's F, I and W take {fast:g} ms, two on such with {slow:g} ms; the "
        "planner's split of 16 layers beside the even one: [page](benchmarks/unequal/README.md)",
        result="{times} times as fast; within {over:.1%} of the simulation",
        raw="unequal",
        figures=unequal,
    ),
    Claim(
        what="host memory for states and activations (**emulated device and link**)",
        how="{cases} plans, with copies that take as long as over a link of a given speed: "
        "[page](benchmarks/host/README.md)",
        result="steps at most {over:.1%} longer than simulated; at most {hidden:.1%} longer than without where copies "
        "hide",
        raw="host",
        figures=host,
    ),
    Claim(
        what="slices of sequences in a pipeline (**emulated device**)",
        how="{ranks} ranks, {microbatches} microbatches a step, beside 1F1B with whole sequences: "
        "[page](benchmarks/slices/README.md)",
        result="{best} with {slices} slices: {times:.2f} times the throughput in {kept:.2f} of the activations; steps "
        "at most {over:.1%} longer than simulated, activations within {bytes:.1%} of the prediction",
        raw="slices",
        figures=slices,
    ),
    Claim(
        what="a row of 16,384 tokens divided among ranks, beside torch's ring and DeepSpeed's exchange of heads",
        how="a decoder on CPUs, {tokens:,} tokens, as many ranks, same attention kernel: "
        "[page](benchmarks/sequence/README.md)",
        result="{two:.2f} times as fast as the fastest peer on 2 ranks, {four:.2f} times on 4, in {peak:.2f} of its "
        "peak memory",
        raw="sequence",
        figures=sequence,
    ),
    Claim(
        what="the loss in chunks",
        how="a decoder on a CPU, {tokens:,} tokens of {vocabulary:,} ids: [page](benchmarks/chunked_loss/README.md)",
        result="{chunks} chunks take {time:.2f} of the step time and {peak:.2f} of the peak memory of all logits; "
        "beside torch's `linear_cross_entropy` with as many, {torchs_time:.2f} of the time and {torchs_peak:.2f} of "
        "the peak",
        raw="chunked_loss",
        figures=chunked_loss,
    ),
    Claim(
        what="all weights from a sharded model, beside FSDP2's `full_state_dict`",
        how="{parameters:,} parameters on two ranks, CPUs: [page](benchmarks/stream/README.md)",
        result="{every:.2f} of the seconds on all ranks, {one:.2f} to one, in {walk:.2f} of its memory if tensors are "
        "dropped; what a step with a learning rate of {lr:g} has changed in bf16 takes {changed:.2f} of the bytes",
        raw="stream",
        figures=stream,
    ),
    Claim(
        what="codecs between two islands (**emulated network**)",
        how="IIG with gradients and parameters in int8 or int4, beside IIG without codecs in the same run: "
        "[page](benchmarks/codecs/README.md)",
        result="{slow}: int8 {int8_slow:.2f}, int4 {int4_slow:.2f} times as fast; {fast}: {int8_fast:.2f} and "
        "{int4_fast:.2f}; bytes on the link {over} % over the formula",
        raw="codecs",
        figures=codecs,
    ),
    Claim(
        what="outer steps over a slow link (**emulated network**)",
        how="two islands of two ranks that average every {every} steps, block by block, at {rate:g} Mbit/s: "
        "[page](benchmarks/outer/README.md)",
        result="{over:.2f} times the step of islands that never communicate; {times:.0f} times as fast as {best}, the "
        "fastest synchronous layout",
        raw="outer",
        figures=outer,
    ),
    Claim(
        what="islands that come and go (**emulated network and device**)",
        how="{islands} islands, {rounds} rounds, disturbed {times} times: killed, stopped, cut off, told to leave, on "
        "a slow link; each away for {away:.0%} of the time: [page](benchmarks/federation/README.md)",
        result="every run ends, no other island is restarted; goodput {goodput:.1%}, one world that is restarted after "
        "every loss {beside:.1%}; steps of the others {slower:+.1%} at most; loss at equal tokens {loss:+.2%}",
        raw="federation",
        figures=federation,
    ),
    Claim(
        what="— the loss of codecs and outer steps",
        how="a small decoder on the quickstart's corpus, {steps:,} steps, {seeds} seeds, the same tokens; outer steps "
        "every {every} steps, after {begin} synchronous steps, final validation loss over fp32: "
        "[page](benchmarks/quality/README.md)",
        result="{told}",
        raw="quality",
        figures=quality,
    ),
    Claim(
        what="Muon beside AdamW",
        how="a decoder on text, two ranks that share a machine, {steps} steps, steps of both in turns: "
        "[page](benchmarks/muon/README.md)",
        result="a step takes {NNG:.2f} times AdamW's under NNG, {IIG:.2f} times under IIG; loss {Muon:.3f} against "
        "{AdamW:.3f}",
        raw="muon",
        figures=muon,
    ),
    Claim(
        what="islands with outer steps match k replicas in one process",
        how="layouts, schedules, codecs, post-validation, tensor and vocabulary parallelism, in float64",
        result="within 1e-10; anchors bitwise equal on all islands",
        tests=[f"{RUNTIME}/test_outer.py"],
    ),
    Claim(
        what="a head of twice a rank's layers, split over 4 pipeline ranks (**emulated device**)",
        how="1F1B, ZB-H1 and ZB-H2: [page](benchmarks/vocabulary/README.md)",
        result="{even} times as fast as layers spread evenly, {cost} times as layers spread by cost; peak memory "
        "of the fullest rank is {even_bytes}x and {cost_bytes}x; at most {over:.1%} more than simulated",
        raw="vocabulary",
        figures=vocabulary,
    ),
    Claim(
        what="— matches one process",
        how="every schedule, layouts, pipelines of 2, 3 and 4, and families of transformers, in float64",
        result="within 1e-10; 1e-5 where a model computes in fp32",
        tests=[f"{RUNTIME}/test_vocabulary.py", f"{RUNTIME}/test_families.py"],
    ),
    Claim(
        starts="Failures",
        what="damage to checkpoints and token caches is detected",
        how="{count:,} mutations: bits flipped, ends cut off, files exchanged, JSON edited: "
        "[page](benchmarks/integrity/README.md)",
        result="{wrong} read wrong values without an error, {refused:,} refused, {right} read as written; without "
        "digests {before} of {of:,} wrong. A save takes {saving}x its time before, when torch wrote a CRC32 that "
        "nothing compared; digests take {loading} of a load (disk and memory)",
        raw="integrity",
        figures=integrity,
    ),
    Claim(
        what="a disturbed run ends like an undisturbed one",
        how="{runs} runs of two and four ranks over {configurations} configurations, under `atoll train`, torchrun and "
        "torchrun on two nodes (**emulated**), {count} disturbances of {kinds} kinds at random moments, {kills} of "
        "them kills of ranks, launchers and nodes: [page](benchmarks/chaos/README.md)",
        result="{right} of {runs} recover without help and end with the losses and the final checkpoint of the "
        "undisturbed run, bit for bit{stopped}. From a killed rank to the next step of four local ranks: median "
        "{median} s, {soon} of {of} under {aim} s, worst {longest} s, on two cores",
        raw="chaos",
        figures=chaos,
    ),
    Claim(
        what="hangs and broken links are diagnosed, and end the run",
        how="{blows} runs of four ranks, each with a fault at a chosen instruction: a rank stopped, killed, asleep or "
        "stuck in C, a link cut, messages lost, a machine gone (**emulated network**): "
        "[page](benchmarks/hangs/README.md)",
        result="the report names the right rank, instruction and waiting ranks in {right} of {blows}; with a timeout "
        "of {timeout:g} s the last rank exits within {longest:.1f} s",
        raw="hangs",
        figures=hangs,
    ),
    Claim(
        what="untrusted files are read or refused, within bounds",
        how="{parsers} of {all} parsers, {inputs:,} inputs each from atheris (libFuzzer): "
        "[page](benchmarks/fuzz/README.md)",
        result="{uncaught} uncaught errors; an input took at most {seconds:.1f} s of CPU time and {megabytes:.0f} MB",
        raw="fuzz",
        figures=fuzzed,
    ),
    Claim(
        what="checkpoints are saved in the background",
        how="two ranks of NNG; the steps that begin while a checkpoint is written against as many without: "
        "[page](benchmarks/saving/README.md)",
        result="steps take {emulated} longer on an emulated device, {real} where training and writing share the CPUs. "
        "Training is blocked for {begun} ms, for {waited} ms without background saves",
        raw="saving",
        figures=saving,
    ),
    Claim(
        starts="Planning",
        what="the planner chooses a plan in seconds",
        how="all settings open, one core; brute force over every plan agrees on 200 small cases: "
        "[test](tests/prediction/planner/test_search.py), [page](benchmarks/planner/README.md)",
        result="{took}; {same}; where the search stops early, no plan is more than {gaps} % faster",
        raw="planner",
        figures=planner,
    ),
    Claim(
        what="— for known models on known clusters, with the reasons",
        how="[recipes](docs/recipes.md): Llama 7B, 70B and adapters for 65B, a GPT of 39B, a BERT of 5B, two islands, "
        "a laptop; the plan on the page is predicted again and dry-run",
        result="it fits, with the predicted step time and memory on the page",
        tests=["tests/test_recipes.py"],
    ),
    Claim(
        what="— with a schedule searched for the plan where those of the catalogue lose time",
        how="a link between nodes that takes as long as compute; the config contains the schedule and reproduces the "
        "plan",
        result="predicted faster than every plan with a schedule of the catalogue",
        tests=["tests/prediction/planner/test_made.py"],
    ),
    Claim(
        what="models with uneven layers (**simulated**)",
        how="stages, placement and order chosen together for {models} models on 4 and 8 ranks, beside interleaved 1F1B "
        "with as many layers in each stage: [page](benchmarks/uneven/README.md)",
        result="{within:.2f} times as fast on average in no more memory ({least:.2f} to {most:.2f}); {equal:.2f} times "
        "with memory for any order; {best} times as fast as the best of the catalogue on an even split; a search takes "
        "at most {seconds:.0f} s",
        raw="uneven",
        figures=uneven,
    ),
    Claim(
        starts="Reports",
        what="a large report opens, scrolls and zooms without stutter",
        how="[`atoll report`](docs/report.md) of {ranks} pipeline ranks with {bars:,} bars, at least {least:,} in the "
        "program of each rank, in headless Chromium without a GPU: [page](benchmarks/report/README.md)",
        result="{size:.1f} MB, opened in {opened:.2f} s at most, scrolled at {scroll:.0f} and zoomed at {zoom:.0f} "
        "frames a second or more",
        raw="report",
        figures=report,
    ),
    Claim(
        what="— works with pointer, keyboard, touch, on a phone, in dark mode and in print",
        how="driven in headless Chromium; text contrast, names of controls, hostile names",
        result="holds",
        tests=("tests/training/report/test_page.py",),
    ),
)


CLAIMS = tuple(claim for claim in ALL_CLAIMS if not claim.raw or (ROOT / raw_path(claim.raw)).is_file())
"""The rows of tests, and of benchmarks that have a raw file."""


# ---- the pages


def wanted_pages() -> dict[Path, str | None]:
    """Every page and picture that is written from raw files, as it should be; None where there should be none."""
    pages: dict[Path, str | None] = {}
    for name in raw_names():
        bench, folder = importlib.import_module(f"benchmarks.{name}.bench"), ROOT / "benchmarks" / name
        if hasattr(bench, "publish"):
            pages |= {folder / path: text for path, text in _published(bench.publish, load(name)).items()}
        pages[folder / "README.md"] = states.with_state(bench.report(load(name)), state_of(name))
    readme, kit = ROOT / "README.md", ROOT / "benchmarks" / "gpu" / "README.md"
    on_gpus = gpu_lines.read_lines(gpu_lines.COMMITTED)
    figures = first_screen.figures(state_of)
    text = PART.sub(lambda part: f"{part[1]}{figures}{part[2]}", readme.read_text(encoding="utf-8"))
    pages[readme] = gpu_pages.PART.sub(lambda part: f"{part[1]}{gpu_pages.paragraph(on_gpus)}{part[2]}", text)
    pages[kit] = gpu_pages.PART.sub(
        lambda part: f"{part[1]}{gpu_pages.tables(on_gpus)}{part[2]}", kit.read_text(encoding="utf-8")
    )
    pages[ROOT / first_screen.NAME] = first_screen.chart(state_of)
    pages[ROOT / "docs" / "evidence.md"] = evidence()
    return pages


def _published(publish: Callable[[Raw, Path], None], raw: Raw) -> dict[str, str]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "results").mkdir()
        publish(raw, folder)
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in files}


def raw_names() -> list[str]:
    """The benchmarks that have a result."""
    return sorted(path.parts[-3] for path in ROOT.glob("benchmarks/*/results/latest.json") if path.parts[-3] != "gpu")


def evidence() -> str:
    """The page: what is claimed, and where each figure comes from."""
    on_gpus = gpu_lines.read_lines(gpu_lines.COMMITTED)
    parts = [_HEAD.format(where=_ELSEWHERE if gpu_pages.cards(on_gpus) else _ON_CPUS) + _counted()]
    for heading, claims in _sections():
        rows = [claim.row() for claim in claims]
        parts += [f"## {heading}", _table(["claim", "how it is checked", "result", "source"], rows)]
    parts += ["## GPUs", gpu_pages.evidence(on_gpus)]
    rows = []
    for name in raw_names():
        link, commit = f"[{name}](#{name})", f"`{load(name)['environment']['commit'][:8]}`"
        rows.append([link, state_of(name).date, commit, state_of(name).words])
    parts += ["## Raw files", _STATES, _table(["result", "measured", "commit", "state"], rows)]
    for name in raw_names():
        parts += [f"### {name}", _provenance(name)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _counted() -> str:
    """How many results are in each state, and the older ones with the hours that they take."""
    names = raw_names()
    count = Counter(state_of(name).name for name in names)
    told = (
        f"Of {len(names)} results **{count['current']} are current, {count['confirmed']} confirmed, {count['older']} "
        "older** than some of the code that they measured ([what that means](#raw-files))."
    )
    older = [name for name in names if not state_of(name).stands]
    minutes = {name: due.minutes_of(name, load(name)["environment"]) for name in older}
    if not older:
        return told
    slowest = sorted(older, key=lambda name: (-minutes[name], name))
    each = []
    for hours, group in groupby(slowest, key=lambda name: f"{minutes[name] / 60:.1f}"):
        links = [f"[{name}](#{name})" for name in group]
        each.append(f"{', '.join(links)} {hours}" + (" each" if len(links) > 1 else ""))
    return (
        f"{told} To measure the older ones again takes about {sum(minutes.values()) / 60:.0f} hours: {'; '.join(each)}."
    )


def _sections() -> list[tuple[str, list[Claim]]]:
    """Headings with their claims."""
    found: list[tuple[str, list[Claim]]] = []
    for claim in CLAIMS:
        if claim.starts:
            found.append((claim.starts, []))
        found[-1][1].append(claim)
    return found


def all_states() -> str:
    """A line a result: current, confirmed, or older than which files."""
    return "\n".join(f"{name:20}{state_of(name).words}" for name in raw_names())


def _provenance(name: str) -> str:
    """Everything about where a result was measured, and which files have changed since."""
    state, measured_in = state_of(name), load(name)["environment"]
    date, time = measured_in["date"][:16].split("T")
    lines = [
        f"- [raw file](../{raw_path(name)}), [page](../benchmarks/{name}/README.md), `{measured_in['command']}`",
        f"- {date} {time} UTC, commit `{measured_in['commit'][:12]}`, torch {measured_in['torch']}, "
        f"{measured_in['cores']} cores of {measured_in['cpu']}",
        f"- {state.words}" + (f": {_some(state.files)}" if state.files else ""),
    ]
    if measured_in["uncommitted"]:
        lines.append(f"- not committed at the time: {_some(measured_in['uncommitted'])}")
    if measured_in.get("migrated"):
        lines.append("- list of files: reconstructed from the commit")
    if all(claim.raw != name for claim in CLAIMS):
        lines.append("- in no row above")
    return "\n".join(lines)


def _some(paths: Sequence[str]) -> str:
    more = len(paths) - MOST_FILES
    return ", ".join(f"`{path}`" for path in paths[:MOST_FILES]) + (f" and {more} more" if more > 0 else "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *others = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([first, "|---" * len(head) + "|", *others, ""])


_ON_CPUS = "All figures were measured on CPUs over gloo, on machines with two cores; none on a GPU"
_ELSEWHERE = "All figures but [those of GPUs](#gpus) were measured on CPUs over gloo, with two cores"

_HEAD = """\
# Evidence

Each row is checked by a test or taken from a raw measurement. `make evidence` writes this page from the raw files, and
`make test` fails if this page, the README or a benchmark's page states anything else.

{where}. On an **emulated device**
compute sleeps: such a figure shows how long ranks wait, not how fast they compute. An **emulated network** is a link
between network namespaces of one machine, with a limited bandwidth.

"""

_STATES = """\
- **current**: no file the result depends on has changed since the measurement.
- **confirmed**: files have changed, but a short measurement at a later commit repeated the figures, and no file has
  changed since. It takes only what decides them: of a race the settings of both sides that are in a ratio, in turns as
  in the race, of the matrix a twentieth of the cases, drawn by the commit. The faster side has to be the same, each
  ratio within 5 % of the published one, each case right. The figure and its date stay those of the full measurement.
- **older than n files**: n of these files have changed. The figure may still hold, but it has not been measured again.
  Changes to comments, docstrings and formatting do not count. **Not confirmed**: a short measurement did not repeat the
  figures; the page of the benchmark says which.
- **from an uncommitted tree**: the commit alone does not reproduce the measured code.
"""
