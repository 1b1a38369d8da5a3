"""A mixture of experts: tokens exchanged, beside experts gathered, by Atoll and by FSDP2, HSDP, DDP and DeepSpeed.

On one machine, and on two islands of two ranks joined by a slow link, where experts are exchanged inside an island and
everything is synchronised across. The islands need root, `ip` and `tc`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.experts.figures import beside_fsdp2, pairs
from benchmarks.experts.settings import settings
from benchmarks.experts.work import Mixture
from benchmarks.islands import cases, pages, quick, tables
from benchmarks.islands.cases import Case, Course
from benchmarks.islands.pages import Page

CASE = Case(
    name="experts",
    work=Mixture(),
    courses={"one machine": Course(1, 4), "two islands, 1 Gbit/s each way": Course(2, 2, 1e9)},
    rounds=2,
    settings=settings,
    small=Mixture(layers=2, hidden=64, heads=2, ffn=32, vocabulary=256, tokens=16),
)

PAGE = Page(
    title="Experts: exchange beside gathering",
    words="Four ranks on two cores. On one machine they talk over shared memory or the loopback. **The network between "
    "islands is emulated**: two namespaces joined by a veth pair with a token bucket on both ends. Trust ratios, not "
    "seconds.",
    command="make bench-experts",
    chosen="No setting was searched: each of a fixed list (`settings.py`) is timed for one or a few steps",
)

run = partial(cases.run, CASE)
race_front = partial(quick.race_front, CASE)
confirm = partial(quick.confirm, CASE)


def report(result: Mapping[str, Any]) -> str:
    """The page of a race, and two tables for each course."""
    parts = [pages.report(PAGE, result).rstrip(), _setup(result["work"])]
    for name, race in result["races"].items():
        parts += [f"## {name}: exchange beside gathering", PAIRS, _pairs(race)]
        parts += [f"## {name}: beside FSDP2 and HSDP", BESIDE, _beside(race)]
    return "\n\n".join(parts) + "\n"


def publish(result: Mapping[str, Any], folder: Path) -> None:
    """Write the page and the pictures beside the raw result."""
    pages.publish(PAGE, result, folder)
    (folder / "README.md").write_text(report(result), encoding="utf-8")


PAIRS = "Atoll's settings that differ in nothing else. Above 1 the exchange is faster; a share below 1 holds less:"

BESIDE = (
    "At every peak memory at which one setting of FSDP2 or HSDP is the fastest of these that fits; the last one is "
    "their fastest of all:"
)


def _setup(work: Mapping[str, Any]) -> str:
    """Return lines that describe the model and the limits of the peers."""
    threshold = Mixture(**{key: work[key] for key in ("ffn", "experts", "experts_per_token")}).threshold
    most = work["samples"] * work["tokens"]
    return (
        "## The work\n\n"
        f"A decoder of {work['layers']} layers in fp32. Each layer has {work['experts']} experts, and a token takes "
        f"{work['experts_per_token']} of them. A rank has at most {most} tokens in a microbatch; below {threshold} it "
        "sends less by exchanging tokens than by gathering experts (9 I E / 4k). With `expert 2` two ranks divide the "
        "experts and exchange tokens; `experts GGG` is a layout of their own. Settings without `expert` gather experts "
        "like everything else, as all peers do here: FSDP2 has no exchange of tokens by itself, and torchtitan's and "
        "DeepSpeed's need models of their own. FSDP2 shards each block as one unit or, with `experts apart`, its "
        "experts as a unit of their own; on one machine HSDP shards in each half of it. The peers, and Atoll where it "
        "gathers, compute experts by the model's own loop; where Atoll exchanges, it has one product for each expert, "
        "too, and adds the gradient of a weight to its buffer in place."
    )


def _pairs(race: Mapping[str, Any]) -> str:
    lines = ["| exchange | s | gathering s | times as fast | share of the peak |", "|---|--:|--:|--:|--:|"]
    for pair in pairs(race):
        row = pair.exchanges
        cells = (row["median_seconds"], pair.gathers["median_seconds"])
        seconds = " | ".join(f"{each:.3f}" for each in cells)
        lines.append(f"| {row['name']} | {seconds} | {pair.ratio:.2f} | {pair.share:.2f} |")
    return "\n".join(lines)


def _beside(race: Mapping[str, Any]) -> str:
    return tables.verdicts([verdict.to_json() for verdict in beside_fsdp2(race)])
