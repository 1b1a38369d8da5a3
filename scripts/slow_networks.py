"""Writes docs/slow-networks.md and its picture: `python scripts/slow_networks.py [--measured]`.

Two islands joined by a slow link: the planner's rules predict each way to use the link, for models from 125M to 70B.
That takes minutes, so `make docs` does not rebuild the page. `--measured` only writes the parts that quote raw files of
benchmarks again. A part lies between `<!-- planned: name -->` and `<!-- end -->`; what is around it is written by hand.
tests/test_slow_networks.py computes some cells, and the parts that quote, again.

[Note: what the predictions assume]
Islands are of H100s. An island of 8 is one node with NVLink; GPUs of a larger one are joined by InfiniBand NDR with a
card each, and are predicted as if all of their links were of this kind. One link joins the islands, and all GPUs of an
island share it; its bits a second are those that large messages reach. Precision bf16, no tensor parallelism.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

from charts import Axis, Series, line_charts, markdown_table

from atoll import Outer
from atoll.base.errors import ConfigError
from atoll.base.units import format_count, format_seconds
from atoll.plans.layouts import EFFECTIVE, NO_CODECS, Codec, Codecs, Level
from atoll.prediction.cost import Cluster, Prediction, Transformer, Workload
from atoll.prediction.explain.links import link_uses
from atoll.prediction.planner import BUDGET, Answer, Goal, Order, PlanSearch, Space
from atoll.program import Do

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.provenance import load  # noqa: E402
from benchmarks.quality.bench import finals  # noqa: E402

PAGE = ROOT / "docs" / "slow-networks.md"
PICTURE = ROOT / "docs" / "pictures" / "slow-networks.svg"
PART = re.compile(r"(<!-- planned: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

ISLANDS = 2
LATENCY = 1e-3
"""Seconds of a hop between the islands: about 100 km of fibre, with the switches at its ends."""
LINKS: Mapping[str, float] = {
    "10 Mbit/s": 10e6,
    "100 Mbit/s": 100e6,
    "1 Gb/s": 1e9,
    "10 Gb/s": 10e9,
    "100 Gb/s": 100e9,
}
UNLIMITED = 1e18
"""Bits a second of a link that takes no time."""
MIDDLE = 1e9
"""Bits a second of the link for which plans are searched."""
EASIER = 16
"""A search has so much less effort than that of `atoll plan`."""

ENOUGH = 1.25
"""A step time relative to compute at which a method that changes the results is not worth it."""


# ---- what is trained


@dataclass(frozen=True, slots=True)
class Job:
    """A model on two islands. batch: samples a step.  devices: GPUs of an island.

    stages: pipeline ranks to choose from inside an island.  across: those of a pipeline over both islands.
    """

    name: str
    model: Transformer
    sequence: int
    batch: int
    devices: int = 8
    stages: tuple[int, ...] = (1,)
    across: tuple[int, ...] = (2, 4)

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.batch * self.sequence


def _decoder(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int) -> Transformer:
    return Transformer.decoder(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn,
                               vocabulary=vocabulary, tied=vocabulary < 100_000)  # fmt: skip


JOBS = (
    Job("125M", _decoder(12, 768, 12, 12, 2048, 50304), sequence=2048, batch=256),
    Job("1.3B", _decoder(24, 2048, 16, 16, 5504, 50304), sequence=2048, batch=512),
    Job("8B", _decoder(32, 4096, 32, 8, 14336, 128256), sequence=4096, batch=1024),
    Job("70B", _decoder(80, 8192, 64, 8, 28672, 128256), sequence=4096, batch=1024, devices=64, stages=(4, 8),
        across=(8, 16)),
)  # fmt: skip


@cache
def workload_of(job: Job) -> Workload:
    return job.model.workload


@cache
def cluster_of(job: Job, bits: float) -> Cluster:
    """Two islands with a link of so many bits a second, see [Note: what the predictions assume]."""
    link = "nvlink4" if job.devices == 8 else "infiniband-ndr"
    return Cluster.of(
        {
            "nodes": ISLANDS,
            "device": {"preset": "h100-80gb", "context": 1_500_000_000},
            "node": {"devices": job.devices, "link": {"preset": link, "reach": 0.8}},
            "network": {"rate": bits / 8, "latency": 0.0 if bits == UNLIMITED else LATENCY},
        }
    )


# ---- ways to use the link

PIPELINED = (Order("1f1b"), Order("zb-h1"), Order("zb-h2"), Order("gpipe"))
"""Orders that send each activation across once."""
ONCE = tuple(layout for layout in EFFECTIVE if Level.G not in (layout.parameters, layout.gradients))
"""Layouts that cross once a step. Others do so with residency and reduction `step`, and take as long then."""
INSIDE, ACROSS = ("inter", "pp", "intra", "tp"), ("pp", "inter", "intra", "tp")


@cache
def _fastest(
    job: Job, bits: float, order: tuple[str, ...], codecs: Codecs = NO_CODECS, outer: Outer | None = None
) -> Prediction | None:
    """The fastest plan with this order of the mesh's axes; None if none fits. With `ACROSS`, both islands are one
    group, whose pipeline crosses the link."""
    found = []
    ranks = ISLANDS * job.devices
    for stages in job.stages if order is INSIDE else job.across:
        space = Space(
            pipeline=(stages,),
            tensor=(1,),
            intra=((job.devices if order is INSIDE else ranks) // stages,),
            order=(order,),
            schedules=PIPELINED[:1] if stages == 1 else PIPELINED,
            layouts=EFFECTIVE if order is ACROSS or bits == UNLIMITED else ONCE,
            microbatch=(1, 2, 4, 8, 16),
            unit=(1,),
            prefetch=(None,),
            precision=("bf16",),
            post_validation=(False,),
            vocabulary_parallel=(False,),
            codecs=codecs,
        )
        goal = Goal(global_batch=job.batch, sequence=job.sequence)
        search = PlanSearch(workload_of(job), cluster_of(job, bits), goal, space, effort=BUDGET // EASIER, outer=outer)
        try:
            found.append(Answer.of(search).prediction)
        except ConfigError:
            continue
    return min(found, key=lambda each: each.seconds, default=None)


def _exact(job: Job, order: tuple[str, ...]) -> list[Prediction]:
    """The plans that are fastest on a slow link and on one that takes no time: on any other, one of them is used."""
    return [each for bits in (MIDDLE, UNLIMITED) if (each := _fastest(job, bits, order)) is not None]


def _best(plans: Iterable[Prediction], job: Job, bits: float) -> Prediction | None:
    """The fastest of some plans on a link."""
    there = [each.on(cluster_of(job, bits)) for each in plans]
    return min(there, key=lambda each: each.seconds, default=None)


def data_parallel(job: Job, bits: float) -> Prediction | None:
    return _best(_exact(job, INSIDE), job, bits)


def pipeline(job: Job, bits: float) -> Prediction | None:
    return _best(_exact(job, ACROSS), job, bits)


@cache
def _changed(job: Job, codecs: Codecs, outer: Outer | None) -> list[Prediction]:
    """The plans of data parallelism with codecs or outer steps; if no such plan fits, the fastest that does."""
    found = [replace(each, plan=replace(each.plan, codecs=codecs, outer=outer)) for each in _exact(job, INSIDE)]
    fitting = [each for each in found if each.fits]
    searched = None if fitting else _fastest(job, MIDDLE, INSIDE, codecs=codecs, outer=outer)
    return fitting or ([] if searched is None else [searched])


def coded(name: str) -> Callable[[Job, float], Prediction | None]:
    codecs = Codecs(gradient=Codec(name), parameter=Codec(name))
    return lambda job, bits: _best(_changed(job, codecs, None), job, bits)


def outer(every: int) -> Callable[[Job, float], Prediction | None]:
    """Each block by itself; its transfer may take a quarter of the interval."""
    steps = Outer(every, fragments=0, delay=every // 4)
    return lambda job, bits: _best(_changed(job, NO_CODECS, steps), job, bits)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to use the link. is_exact: whether a step is that of one process."""

    name: str
    row: str
    colour: str
    predict: Callable[[Job, float], Prediction | None]
    is_exact: bool = False
    tells: Callable[[Prediction], str] = lambda prediction: ""


def _layout(prediction: Prediction) -> str:
    return prediction.plan.layout.name


def _stages(prediction: Prediction) -> str:
    return f"{prediction.plan.mesh.pipeline} x {prediction.plan.schedule.name}"


WAYS = (
    Way("data parallel", "data parallel, best layout", "#d9534f", data_parallel, True, _layout),
    Way("pipeline", "pipeline across the islands", "#2f7fd1", pipeline, True, _stages),
    Way("int8", "data parallel, int8", "#c77f1a", coded("int8"), False, _layout),
    Way("int4", "data parallel, int4", "#8a9a1f", coded("int4"), False, _layout),
    *(
        Way(f"outer, {every}", f"outer steps, every {every}", colour, outer(every))
        for every, colour in ((32, "#c2409a"), (64, "#7a5bd0"), (500, "#1f9e89"))
    ),
)
"""In the order of what they change: the first that is fast enough is to be used."""


@cache
def predicted(way: Way, job: Job, bits: float) -> Prediction | None:
    """The plan of a way on a link; None if none fits."""
    return way.predict(job, bits)


@cache
def compute(job: Job) -> Prediction:
    """The fastest plan if the link takes no time."""
    found = [predicted(way, job, UNLIMITED) for way in WAYS if way.is_exact]
    return min(filter(None, found), key=lambda each: each.seconds)


def ratio(way: Way, job: Job, bits: float) -> float | None:
    """Seconds of a step, that of `compute` being 1; None if no plan fits."""
    found = predicted(way, job, bits)
    return None if found is None else found.seconds / compute(job).seconds


def chosen(job: Job, bits: float) -> Way:
    """The first way that is fast enough, otherwise the fastest."""
    ratios = {way: value for way in WAYS if (value := ratio(way, job, bits)) is not None}
    enough = (way for way, value in ratios.items() if value <= ENOUGH)
    return next(enough, min(ratios, key=lambda way: ratios[way]))


# ---- bytes


def sent(prediction: Prediction) -> float:
    """Bits that an island sends to the other one in a step, on average; of a pipeline, in one direction."""
    plan, ranks = prediction.plan, range(prediction.plan.mesh.pipeline)
    if plan.mesh.inter > 1:
        uses = [use for rank in ranks for use in link_uses(prediction, rank) if use.axis == "inter"]
        return 8.0 * plan.mesh.intra * sum(use.nbytes for use in uses)
    placement, half = plan.schedule.placement, plan.mesh.pipeline // ISLANDS
    crossing = sum(
        step.do is Do.SEND_F and placement.rank_of(step.action.stage + 1) >= half
        for rank in range(half)
        for step in prediction.ranks.programs.ranks[rank].instructions
    )
    return 8.0 * plan.mesh.data * crossing * prediction.ranks.message_bytes


def flops(prediction: Prediction) -> float:
    """Operations of a step of the model, without recompute."""
    plan = prediction.plan
    return prediction.workload.flops(prediction.use) * plan.schedule.microbatches * plan.mesh.data


def even(way: Way, job: Job) -> float | None:
    """Bits a second at which the link is busy as long as the islands compute."""
    found = predicted(way, job, MIDDLE)
    return None if found is None else sent(found) / compute(job).seconds


# ---- tables


def ratio_text(value: float | None) -> str:
    if value is None:
        return "does not fit"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def link_text(bits: float) -> str:
    """`6.4 Gb/s`, `64 Mbit/s`."""
    value, unit = next((bits / scale, name) for scale, name in _UNITS if bits >= scale or scale == 1.0)
    return f"{value:.3g} {unit}"


_UNITS = ((1e9, "Gb/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1.0, "bit/s"))


def jobs_table() -> str:
    heads = ["size", "parameters", "tokens a step", "sequence", "GPUs of an island", "compute", "TFLOP/s of a GPU"]
    rows = []
    for job in JOBS:
        found = compute(job)
        rate = flops(found) / found.seconds / found.plan.mesh.world
        rows.append(
            [
                job.name,
                format_count(job.model.parameters),
                f"{job.tokens:,}",
                f"{job.sequence}",
                f"{job.devices}",
                format_seconds(found.seconds),
                f"{rate / 1e12:.0f}",
            ]
        )
    return markdown_table(heads, rows)


def cells(job: Job, way: Way) -> list[str]:
    """The cells of a row: the ratio, in bold if no way is faster, and the plan in a word."""
    found = []
    for bits in LINKS.values():
        prediction, own = predicted(way, job, bits), ratio(way, job, bits)
        words = "" if prediction is None else way.tells(prediction)
        best = min(value for other in WAYS if (value := ratio(other, job, bits)) is not None)
        text = f"**{ratio_text(own)}**" if ratio_text(own) == ratio_text(best) else ratio_text(own)
        found.append(f"{text} {words}".strip())
    return found


def job_table(job: Job) -> str:
    rows = [[way.row, *cells(job, way)] for way in WAYS]
    return markdown_table([job.name, *LINKS], [*rows, ["use", *(chosen(job, bits).name for bits in LINKS.values())]])


def tables() -> str:
    return "\n".join(map(job_table, JOBS))


def summary() -> str:
    rows = []
    for job in JOBS:
        cells = []
        for bits in LINKS.values():
            way = chosen(job, bits)
            cells.append(f"{way.name}: {ratio_text(ratio(way, job, bits))}")
        rows.append([job.name, *cells])
    return markdown_table(["model", *LINKS], rows)


def evens() -> str:
    heads = ["", *(job.name for job in JOBS)]
    links, shares = [], []
    for way in WAYS:
        own = [(job, even(way, job)) for job in JOBS]
        links.append([way.row, *("" if bits is None else link_text(bits) for _, bits in own)])
        cells = []
        for job, bits in own:
            found = compute(job)
            cells.append("" if bits is None else f"{bits * found.seconds / flops(found) * 1e6:.3g}")
        shares.append([way.row, *cells])
    heads_of_shares = ["Mbit/s for each TFLOP/s", *heads[1:]]
    return markdown_table(["link", *heads[1:]], links) + "\n" + markdown_table(heads_of_shares, shares)


ENCODED = 40
"""Bytes of memory that encoding and decoding read or write for an element of a rank's slice, generously: a gradient and
its residual are read twice and written, its code is written, read and added to a sum; a parameter's difference is made
of two values, and added to one."""


def encoding() -> str:
    shares = {}
    for job in JOBS:
        found = predicted(next(way for way in WAYS if way.name == "int8"), job, MIDDLE)
        if found is None:
            continue
        mesh, device = found.plan.mesh, found.device
        memory = device.bandwidth * device.efficiency.memory
        taken = ENCODED * job.model.parameters / (mesh.pipeline * mesh.intra) / memory
        shares[job.name] = taken / compute(job).seconds
    most = max(shares, key=lambda name: shares[name])
    return (
        f"Predictions count the bytes of codecs, not the time of encoding. At {ENCODED} bytes of memory traffic for "
        f"each element of a rank's slice, encoding would add {shares[most]:.1%} to the compute time of {most}, and "
        "less to that of the others.\n"
    )


def picture() -> str:
    fastest = max(LINKS.values())
    ticks = {fastest / bits: re.sub(r" ([GM]).*", r"\1", name) for name, bits in LINKS.items()}
    x = Axis("link between the islands, bit/s", ticks, 0.6, fastest / min(LINKS.values()) * 1.3, is_log=True)
    panels = []
    for name in SHOWN:
        job = next(each for each in JOBS if each.name == name)
        series = []
        for way in WAYS:
            points = [
                (fastest / bits, value) for bits in LINKS.values() if (value := ratio(way, job, bits)) is not None
            ]
            series.append(Series(way.name, tuple(sorted(points)), way.colour, is_dashed=not way.is_exact))
        most = max(value for each in series for _, value in each.points)
        y = Axis("", {10.0**at: f"{10**at:,}" for at in range(6)}, 0.8, most * 1.5, is_log=True)
        panels.append((f"{name}, {job.devices} GPUs an island", x, y, series))
    title = "Predicted step time relative to compute; dashed: methods that change the results"
    return line_charts(title, panels, height=420, names=140)


SHOWN = ("1.3B", "70B")


# ---- what was measured


def measured() -> str:
    """A paragraph for each benchmark."""
    kinds = {"two_islands": measured_layouts, "codecs": measured_codecs, "outer": measured_outer}
    return "".join(f"- {kind(load(name))}\n" for name, kind in kinds.items())


def measured_layouts(result: Mapping[str, Any]) -> str:
    parts = []
    for name, race in result["races"].items():
        seconds: dict[str, float] = {}
        for row in race["rows"]:
            if row["is_ours"] and row["median_seconds"]:
                layout = row["setting"]["layout"]
                seconds[layout] = min(row["median_seconds"], seconds.get(layout, row["median_seconds"]))
        best, worst = min(seconds, key=lambda at: seconds[at]), max(seconds, key=lambda at: seconds[at])
        alone = race["compute"]["all_ranks"]
        parts.append(
            f"{name}: {best} takes {format_seconds(seconds[best])} a step, {worst} {format_seconds(seconds[worst])}; "
            f"computing alone takes {format_seconds(alone)}"
        )
    return f"[Layouts](../benchmarks/two_islands/README.md), {'. '.join(parts)}."


def measured_codecs(result: Mapping[str, Any]) -> str:
    parts = []
    for name, race in result["races"].items():
        seconds = {row["name"]: row["median_seconds"] for row in race["rows"]}
        base = seconds["IIG"]
        times = {code: base / seconds[f"IIG, gradient {code}, parameter {code}"] for code in ("int8", "int4")}
        parts.append(
            f"at {name} IIG takes {format_seconds(base)} a step, and is {times['int8']:.2f} times as fast with int8, "
            f"{times['int4']:.2f} times with int4"
        )
    return f"[Codecs](../benchmarks/codecs/README.md): {'; '.join(parts)}."


def measured_outer(result: Mapping[str, Any]) -> str:
    speed = result["speed"]
    every, over = speed["outer"]["every"], median(speed["over_alone"])
    return (
        f"[Outer steps](../benchmarks/outer/README.md): at {speed['bits'] / 1e6:g} Mbit/s islands that send each block "
        f"every {every} steps take {over:.2f} times as long as islands that never communicate, and are "
        f"{speed['times_as_fast']:.1f} times as fast as {speed['best_synchronous']}, the fastest synchronous layout."
    )


def losses() -> str:
    """A row for each way to train of the benchmark of quality."""
    result = load("quality")
    text = (
        f"Measured: a small decoder, {result['steps']:,} steps, the same tokens "
        "([all runs and curves](../benchmarks/quality/README.md)). Outer steps continue a synchronous run, but for "
        "those from scratch.\n\n"
    )
    text += _losses(result)
    if any(row["name"] == "MuLoCo" for row in result.get("muon", {}).get("rows", ())):
        steps = result["muon"]["rows"][0]["validation"][-1][0]
        text += (
            "\n\nMeasured: [MuLoCo](outer.md#muon-inside-the-islands) beside DiLoCo and synchronous runs, the same "
            f"job for {steps:,} steps, learning rates and outer optimizers tuned, islands from scratch.\n\n"
        ) + _losses(result["muon"])
    return text


def _losses(result: Mapping[str, Any]) -> str:
    base, *others = finals(result)
    rows = [[base.name, f"{fmean(base.losses):.4f}", "", f"{len(base.losses)}"]]
    rows += [[each.name, f"{fmean(each.losses):.4f}", f"{each.over:+.2%}", f"{len(each.losses)}"] for each in others]
    return markdown_table(["", "final validation loss", f"over {base.name}", "seeds"], rows)


# ---- the page

MEASURED: Mapping[str, Callable[[], str]] = {"slow-measured": measured, "slow-losses": losses}

PREDICTED: Mapping[str, Callable[[], str]] = {
    "slow-summary": summary,
    "slow-jobs": jobs_table,
    "slow-tables": tables,
    "slow-evens": evens,
    "slow-encoding": encoding,
}


def written(text: str, parts: Mapping[str, str]) -> str:
    """The page with some parts written again."""

    def part(match: re.Match[str]) -> str:
        text = parts.get(match[2])
        return match[0] if text is None else f"{match[1]}\n{text}\n{match[3]}" if text else f"{match[1]}{match[3]}"

    return PART.sub(part, text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predict the tables of docs/slow-networks.md and write the page.")
    parser.add_argument("--measured", action="store_true", help="write only what quotes raw files of benchmarks")
    only_measured = parser.parse_args().measured
    wanted = MEASURED if only_measured else {**PREDICTED, **MEASURED}
    parts = {name: part() for name, part in wanted.items()}
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), parts), encoding="utf-8")
    if not only_measured:
        PICTURE.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
