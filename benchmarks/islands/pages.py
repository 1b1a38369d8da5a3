"""The page and the pictures of a race, from its raw file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.islands import tables
from benchmarks.islands.cases import ACCUMULATED, slug
from benchmarks.islands.judging import judged
from benchmarks.islands.scatter import scatter
from benchmarks.islands.search import SLOW

NETWORK_WORDS = (
    "**The network is emulated**: two namespaces of one machine joined by a veth pair with a token bucket on both "
    "ends; four ranks share the machine's cores. Trust ratios, not seconds."
)

DEVICE_WORDS = (
    "**The device is emulated**: compute sleeps, with the ratio of compute time to bytes and of activations to "
    "parameters of a real device (`Sleeping` in `benchmarks/islands/work.py`)."
)

DENIED = (
    "Disadvantages of the peers on this machine: gloo's reduce-scatter sends the bytes of an all-reduce, so FSDP2 runs "
    "a second time with a reduce-scatter by direct messages (`set_custom_reduce_scatter`); on CPUs FSDP2 and DeepSpeed "
    "wait for reductions, which NCCL would overlap with the backward. DeepSpeed's buckets are sized in blocks, since "
    "its defaults are larger than these models. All processes run with one thread, the same allocator thresholds and "
    "the same fused AdamW."
)


SEARCHED = "A search starts from common settings and continues from each side's Pareto front"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The text of a race's page that is not computed.

    words: how far it is emulated. command: that measures it. chosen: how settings were found.
    """

    title: str
    words: str
    command: str
    chosen: str = SEARCHED


def report(page: Page, result: Mapping[str, Any]) -> str:
    """Everything, in markdown."""
    parts = [
        f"# {page.title}",
        f"Written by `{page.command}`. {page.words}",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        _setup(page, result["work"]),
        DENIED,
    ]
    for name, found in result["races"].items():
        parts += _told(name, found)
    if "layouts" in result:
        parts += [
            "## Traffic and memory of a rank by layout",
            f"{ACCUMULATED} microbatches, accumulated. The formula counts every gather; the last block of a forward "
            "stays gathered for its backward, so layouts with parameters at G send less. The predicted peak is "
            "footprint, working memory, the batch and autograd's activations.",
            _layout_table(result["layouts"]),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _setup(page: Page, work: Mapping[str, Any]) -> str:
    samples = work["samples"]
    divided = (
        f"{samples} samples per rank and step, which a setting divides into microbatches (`x4`: four of them)"
        if samples > 1
        else "one sample per rank and step, so without gradient accumulation"
    )
    return (
        f"{work['parameters']:,} parameters in {work['units']} blocks, {divided}. {page.chosen}; settings near a "
        "front are then timed in turns, each alone on the machine, for two steps per turn. Losses of every step are "
        "compared. Peak memory is counted by the C library's allocator on all threads, plus memory that ranks share; "
        "bytes across are of one island and step, by the interface's counters."
    )


def publish(page: Page, result: Mapping[str, Any], folder: Path) -> None:
    """Write the page and the pictures beside the raw result."""
    (folder / "README.md").write_text(report(page, result), encoding="utf-8")
    for name, picture in pictures(page, result).items():
        (folder / "results" / name).write_text(picture, encoding="utf-8")


def _told(name: str, found: Mapping[str, Any]) -> list[str]:
    verdict, compute = judged(found), found["compute"]
    best = verdict["best_against_best"]
    lines = [
        f"- Compute alone takes {compute['one_rank']:.3f} s on one rank, {compute['all_ranks']:.3f} s on all at once.",
        f"- Best against best: `{best['ours']}` is **{best['ratio']:.2f} times as fast** as `{best['peer']}`, within "
        f"its peak of {best['budget_bytes'] / 1e6:.0f} MB."
        if best["ratio"] is not None
        else f"- No setting of Atoll fits the peak of the fastest peer, {best['budget_bytes'] / 1e6:.0f} MB.",
        *(f"- Like for like, {words}: {ratio:.2f} times as fast." for words, ratio in verdict["like_for_like"].items()),
    ]
    return [
        f"## {name}",
        f"![seconds against peak memory](results/{slug(name)}.svg)",
        "\n".join(lines),
        "At every peak memory at which one peer is the fastest that fits:",
        tables.verdicts(verdict["verdicts"]),
        f"Settings timed in turns, Atoll in bold. The search timed {len(found['visited'])} settings for one or a few "
        f"steps; those without turns count above with these times, unless they took {SLOW:g} times as long as their "
        "side's fastest:",
        tables.race(found["rows"]),
        _recounted(found),
        _visited_elsewhere(found),
        _failed(found["visited"]),
    ]


def _recounted(found: Mapping[str, Any]) -> str:
    """Whose memory was counted again after the race."""
    if "recounted" not in found:
        return ""
    return (
        f"The memory of {len(found['recounted'])} settings was counted again after the race, at the same commit: other "
        "processes on the machine had used shared memory during the first count. The raw file has both counts."
    )


def _visited_elsewhere(found: Mapping[str, Any]) -> str:
    """Where the search ran, if the race ran on another machine."""
    if "visited_on" not in found:
        return ""
    later = ", ".join(f"`{name}`" for name in found["raced_later"])
    return (
        f"The search ran on {found['visited_on']}, before it was interrupted; the race, and the figures above, are of "
        "one run on the machine named at the top, with the same code. To include peers that the other machine is slow "
        f"at, {later} raced on it too, right after the others."
    )


def _failed(visited: Sequence[Mapping[str, Any]]) -> str:
    problems = {row["name"]: row["problem"] or "its peak was not counted" for row in visited if _is_lost(row)}
    lines = [f"{len(problems)} settings did not run:", "", *(f"- {name}: {words}" for name, words in problems.items())]
    return "\n".join(lines) if problems else ""


def _is_lost(row: Mapping[str, Any]) -> bool:
    """Return True if a setting has no seconds or no peak."""
    return row["problem"] is not None or row["peak_bytes"] is None


def pictures(page: Page, result: Mapping[str, Any]) -> dict[str, str]:
    """By file name: a scatter of each race."""
    found = {}
    for name, race in result["races"].items():
        finalists = {row["name"] for row in race["rows"]}
        others = [row for row in race["visited"] if row["name"] not in finalists and not _is_lost(row)]
        slowest = 1.6 * max(row["median_seconds"] for row in race["rows"])
        ends = {name for side in judged(race)["fronts"].values() for name in side}
        rows = [
            *(row for row in race["rows"] if not _is_lost(row)),
            *(row for row in others if row["median_seconds"] <= slowest or row["name"] in ends),
        ]
        note = "Medians of steps in turns where there are any; pale points are not on a front. Lower left is better."
        found[f"{slug(name)}.svg"] = scatter(f"{page.title}: {name}", rows, note=note)
    return found


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
