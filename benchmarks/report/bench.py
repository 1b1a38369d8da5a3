"""How large a report is, and how fast a browser opens, scrolls and zooms it, in headless Chromium.

A pipeline of 64 ranks, each with more than 2,000 bars in its program, predicted. The measured timeline beside it is the
predicted one with lengths that differ by up to 10 %, so twice as many bars are on the page. Chromium renders without a
GPU. Frames are counted by `requestAnimationFrame` while the page is scrolled or zoomed at each of them.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.plans.schedules import build
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use
from atoll.training.report import BarRow, Sheet, StepTimeline, page, predicted_sheet
from benchmarks.browser import Page, browser
from benchmarks.islands import tables

RANKS, MICROBATCHES = 64, 288
OPENED = 5
"""How often each page is opened."""
CLUSTER = {
    "device": {"preset": "h100-80gb"},
    "node": {"devices": 8, "cards": 8, "link": {"preset": "nvlink4"}},
    "network": {"preset": "infiniband-ndr"},
}
SIZES = {"desktop": (1300, 900), "phone": (390, 844)}

SCROLL = """(async () => {
  const view = document.querySelector('.view'), most = view.scrollHeight - view.clientHeight;
  const times = [];
  let begun = 0;
  for (let at = 0; at <= %d; at++) {
    const now = await new Promise(requestAnimationFrame);
    times.push(now);
    view.scrollTop = most * at / %d;
  }
  return times;
})()"""

ZOOM = """(async () => {
  const chart = atollReport.charts[0], times = [], frames = %d;
  for (let at = 0; at <= frames; at++) {
    times.push(await new Promise(requestAnimationFrame));
    chart.scale(at < frames / 2 ? 1.12 : 1 / 1.12);
  }
  return times;
})()"""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the page, open it in the browser, scroll it and zoom it."""
    ranks, microbatches, frames = (8, 24, 20) if arguments.quick else (RANKS, MICROBATCHES, 120)
    begun = time.monotonic()
    sheet = with_measured(predicted_sheet(prediction(ranks, microbatches), "64 ranks", "run"))
    made = time.monotonic() - begun
    begun = time.monotonic()
    text = page([sheet])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        path.write_text(text, encoding="utf-8")
        written = time.monotonic() - begun
        for name, (width, height) in SIZES.items():
            with browser() as shown:
                shown.size(width, height, is_phone=name == "phone")
                rows.append({"window": name, "width": width, "height": height, **moved(shown, path.as_uri(), frames)})
    programs = [row for row in sheet.timelines[0].rows if row.lane == "program"]
    return {
        "rows": rows,
        "ranks": ranks,
        "microbatches": microbatches,
        "bars": sum(each.count for each in sheet.timelines),
        "least_bars_of_a_rank": min(len(row.bars) for row in programs),
        "page_bytes": len(text.encode()),
        "seconds_of_sheet": made,
        "seconds_of_page": written,
    }


def prediction(ranks: int, microbatches: int) -> Prediction:
    """Predict a decoder with two layers a pipeline rank under 1F1B, sharded over the eight devices of a node."""
    model = Transformer.llama(layers=2 * ranks, hidden=4096, heads=32, ffn=11008, vocabulary=32000)
    schedule = build("1f1b", ranks=ranks, microbatches=microbatches)
    mesh = MeshShape(pipeline=ranks, intra=8)
    plan = Plan(mesh, Layout("NGG"), schedule, microbatch=1, precision=Precision.preset("bf16"), reduction="step")
    return Prediction(model.workload, plan, Cluster.of(CLUSTER), Use(samples=1, sequence=4096))


def with_measured(sheet: Sheet) -> Sheet:
    """Return the sheet with a second timeline whose bars are up to 10 % longer or shorter than the predicted ones."""
    chance = random.Random(0)
    predicted, rows = sheet.timelines[0], []
    for row in predicted.rows:
        bars, late = [], 0.0
        for bar in row.bars:
            length = (bar.end - bar.start) * chance.uniform(0.9, 1.1)
            start = bar.start + late
            late += length - (bar.end - bar.start)
            bars.append(bar._replace(start=start, end=start + length))
        rows.append(BarRow(row.rank, row.lane, tuple(bars)))
    seconds = max(row.bars[-1].end for row in rows if row.bars)
    return replace(sheet, timelines=(predicted, StepTimeline("measured", seconds, tuple(rows))))


def moved(shown: Page, url: str, frames: int) -> dict[str, Any]:
    """Return the seconds to open a page, and the seconds of each frame while it is scrolled and zoomed."""
    opened = [shown.open(url) for _ in range(OPENED)]
    found: dict[str, Any] = {"opened_seconds": opened, "problems": shown.problems}
    for name, script in (("scroll", SCROLL % (frames, frames)), ("zoom", ZOOM % frames)):
        shown.open(url)
        times = shown.run(script)
        steps = [(after - before) / 1e3 for before, after in pairwise(times)]
        found[f"{name}_frames_per_second"] = len(steps) / sum(steps)
        found[f"{name}_longest_frame_seconds"] = max(steps)
    return found


def report(result: dict[str, Any]) -> str:
    """Write the page."""
    rows = [
        f"| {row['window']}, {row['width']} × {row['height']} | {median(row['opened_seconds']):.2f} "
        f"| {max(row['opened_seconds']):.2f} | {row['scroll_frames_per_second']:.0f} "
        f"| {1e3 * row['scroll_longest_frame_seconds']:.0f} | {row['zoom_frames_per_second']:.0f} "
        f"| {1e3 * row['zoom_longest_frame_seconds']:.0f} |"
        for row in result["rows"]
    ]
    parts = [
        "# Report",
        "Written by `python benchmarks/run.py report`. The size of a report, and the speed at which "
        "headless Chromium opens, scrolls and zooms it.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        f"One sheet of {result['ranks']} pipeline ranks with {result['microbatches']} microbatches under 1F1B: "
        f"{result['bars']:,} bars in two timelines, at least {result['least_bars_of_a_rank']:,} in the program of each "
        "rank. The first timeline is predicted; the second one is the first with lengths that differ by up to 10 %, in "
        "the place of a measured one. Chromium renders on the processor, without a GPU. *opened* is from the request "
        "to the last chart; a frame is drawn at each `requestAnimationFrame` of which the browser makes at most 60 a "
        "second.",
        f"The page has {result['page_bytes'] / 1e6:.2f} MB. Prediction and sheet take "
        f"{result['seconds_of_sheet']:.1f} s, the page {result['seconds_of_page']:.1f} s.",
        "\n".join(
            [
                "| window | opened, median s | slowest s | scrolled, frames/s | longest ms | zoomed, frames/s "
                "| longest ms |",
                "|---|--:|--:|--:|--:|--:|--:|",
                *rows,
            ]
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
