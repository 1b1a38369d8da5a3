"""Predictions beside our own runs on this machine's CPUs: `python benchmarks/run.py predictions`.

The machine is measured as `atoll doctor --measure` does it, the constants are calibrated as
`atoll doctor --calibrate` does it, on the steps of some configurations, and the seconds of all others are judged. Bytes
need neither.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from atoll.prediction.cost import Cluster, Device, Efficiency, Held, Prediction
from atoll.prediction.cost.calibration import Step, calibrate
from atoll.training.setup.prediction import predict_plan
from benchmarks.islands import tables
from benchmarks.islands.allocations import library
from benchmarks.islands.ranks import Ranks, Where
from benchmarks.predictions import runs
from benchmarks.predictions.rows import CHUNKED, EMULATED, HOSTED, LAYOUTS, MIXTURES, REAL, SLICED, Row
from benchmarks.predictions.runs import Bytes

LEAST_SECONDS, STEPS = 1.5, (5, 25)
"""Steps are timed for so long, but no fewer and no more than so many."""

GIVEN = Device(
    memory=10**9,
    bandwidth=2e9,
    rates={"float32": 2.56e9},
    efficiency=Efficiency(products=1.0, depth=0.0, waves=0.0, memory=1.0, launch=0.0, dispatch=0.0, pause=5e-4),
)
"""The emulated device: a layer's F takes 13 ms of it, several times as long as on a processor of ours."""

SMALL_PART = 0.01
"""A component that is at most this share of a rank's peak is not judged by itself."""

Found = dict[str, Any]


def run(arguments: argparse.Namespace) -> Found:
    """Measure the machine, run all configurations, calibrate, predict."""
    quick = arguments.quick
    every = REAL, EMULATED, LAYOUTS, MIXTURES, HOSTED, SLICED
    real, emulated, layouts, mixtures, hosted, sliced = (rows[::14] if quick else rows for rows in every)
    cluster = measured_cluster(2)
    ran = [row for count in (1, 2) for row in run_all([each for each in real if each.ranks == count], timed=True)]
    steps = [Step(((1.0, predicted(row, cluster, found)),), found["seconds"], row.name) for row, found in ran]
    fitted = calibrate(step for (row, _), step in zip(ran, steps, strict=True) if row.fitted)
    given = on_emulated(measured_cluster(4))
    return {
        "cluster": cluster.tables(),
        "constants": [
            {"name": name, "before": fitted.before[name], "after": after} for name, after in fitted.constants.items()
        ],
        "real": [
            {
                **described(row, found, step.played[0][1]),
                "measured_seconds": found["seconds"],
                "before_seconds": step.predicted,
                "predicted_seconds": step.on(fitted.cluster).predicted,
                "steps": found["steps"],
            }
            for (row, found), step in zip(ran, steps, strict=True)
        ],
        "links": given.tables()["node"],
        "emulated": [
            {"name": row.name, "measured_seconds": found["seconds"], "steps": found["steps"],
             "predicted_seconds": predicted(row, given, found).seconds}
            for row, found in run_all(emulated, timed=True, on=given)
        ],
        "layouts": [described(row, found, predicted(row, None, found)) for row, found in run_all(layouts)],
        "mixtures": [described(row, found, predicted(row, None, found)) for row, found in run_all(mixtures)],
        "hosted": [described(row, found, predicted(row, None, found)) for row, found in run_all(hosted)],
        "sliced": [described(row, found, predicted(row, None, found)) for row, found in run_all(sliced)],
        "chunked": [
            described(row, found, predicted(row, None, found))
            for rows in CHUNKED
            for row, found in run_all(rows[::14] if quick else rows)
        ],
    }  # fmt: skip


def measured_cluster(ranks: int) -> Cluster:
    """This machine, measured by as many ranks at once."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        command = [sys.executable, "-m", "atoll", "doctor", "--measure", str(path), "--ranks", str(ranks)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        return Cluster.read(path)


def on_emulated(cluster: Cluster) -> Cluster:
    """The emulated device with the links of a cluster. A processor that sleeps has time for what links copy."""
    link = cluster.node.link and cluster.node.link.model_copy(update={"busy": 0.0})
    return cluster.model_copy(update={"device": GIVEN, "node": cluster.node.model_copy(update={"link": link})})


def predicted(row: Row, cluster: Cluster | None, found: Mapping[str, Any]) -> Prediction:
    """A configuration's step on a cluster; None for its bytes alone."""
    return predict_plan(row.config, row.plan, cluster, reads_in_place=found["reads_in_place"])


# ---- runs


def run_all(rows: Sequence[Row], *, timed: bool = False, on: Cluster | None = None) -> list[tuple[Row, Found]]:
    """Run configurations, all of the same number of ranks, and return each with its measurements.

    timed: measure seconds too.  on: the emulated device, on which no bytes are counted.
    """
    if not rows:
        return []
    with started(rows[0].ranks) as ranks:
        if on is not None:
            ranks.ask(runs.go_before_others)
        return [(row, _run(ranks, row, timed=timed, on=on)) for row in rows]


@contextmanager
def started(count: int) -> Iterator[Ranks]:
    """Ranks whose allocations are counted. Raises RuntimeError where there is no C compiler."""
    with library() as preload:
        if preload is None:
            raise RuntimeError("bytes are counted by a library that is compiled here: install a C compiler (cc)")
        with Ranks(Where(1, count), None, preload=preload) as ranks:
            yield ranks


def _run(ranks: Ranks, row: Row, *, timed: bool, on: Cluster | None) -> Found:
    print(f"  {row.name}", flush=True)
    if on is None:  # what torch makes at its first use stays with the process, and is not the engine's
        ranks.ask(runs.build, row)
        ranks.ask(runs.close)
    found: Found = {"reads_in_place": ranks.ask(runs.build, row)[0]}
    sleeps = []
    if on is None:
        found["bytes"] = ranks.ask(runs.count)
    else:
        every = predicted(row, on, found).rates
        sleeps = [[dict(own.compute) for own in rates.of_slices or (rates,)] for rates in every]
    if timed:
        first = ranks.ask(runs.take, 1, sleeps)[0][0]
        steps = min(max(round(LEAST_SECONDS / first), STEPS[0]), STEPS[1])
        found["steps"] = [max(each) for each in zip(*ranks.ask(runs.take, steps, sleeps), strict=True)]
        found["seconds"] = median(found["steps"])
    ranks.ask(runs.close)
    return found


def described(row: Row, found: Mapping[str, Any], prediction: Prediction) -> Found:
    """A configuration with the bytes of its pipeline ranks, counted on the fullest of their data-parallel ranks."""
    mesh, counted = row.plan.mesh, found["bytes"]
    each = mesh.world // mesh.pipeline
    return {
        "name": row.name,
        "model": row.model,
        "ranks": row.ranks,
        "changes": list(row.changes),
        "is_fitted": row.fitted,
        "reads_in_place": found["reads_in_place"],
        "bytes": [_bytes(prediction, rank, counted[rank * each :][:each]) for rank in range(mesh.pipeline)],
    }


def _bytes(prediction: Prediction, rank: int, counted: Sequence[Bytes]) -> Found:
    most = Held(*map(max, *prediction.held(rank)))
    return {
        "predicted_peak": prediction.peak(rank).allocated,
        "counted_peak": max(each.peak.allocated for each in counted),
        "predicted": most._asdict(),
        "counted": Held(*map(max, *(each.most for each in counted), Held()))._asdict(),
    }


# ---- the page


def errors(rows: Iterable[Mapping[str, Any]], key: str = "predicted_seconds") -> list[float]:
    """Relative errors of predicted seconds."""
    return [row[key] / row["measured_seconds"] - 1.0 for row in rows]


def byte_errors(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    """Relative errors of the predicted peaks of all pipeline ranks."""
    return [each["predicted_peak"] / each["counted_peak"] - 1.0 for row in rows for each in row["bytes"]]


def component_errors(rows: Iterable[Mapping[str, Any]], component: str) -> list[float]:
    """Relative errors of a component, where it is more than a small part of the peak."""
    found = [(each["predicted"][component], each["counted"][component], each["counted_peak"])
             for row in rows for each in row["bytes"]]  # fmt: skip
    return [said / seen - 1.0 for said, seen, peak in found if max(said, seen) > SMALL_PART * peak and seen]


def judged(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that calibrated nothing."""
    return [row for row in rows if not row["is_fitted"]]


def _spread(found: Sequence[float]) -> str:
    if not found:
        return "-"
    absolute = [abs(each) for each in found]
    return f"{median(absolute):.1%} | {max(absolute):.1%} | {sum(found) / len(found):+.1%}"


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    real, emulated, layouts = result["real"], result["emulated"], result["layouts"]
    mixtures, hosted, sliced, chunked = (result.get(name, []) for name in ("mixtures", "hosted", "sliced", "chunked"))
    lines = [
        ("seconds, constants as measured", errors(judged(real), "before_seconds")),
        ("seconds, calibrated on other steps", errors(judged(real))),
        ("seconds of the steps that calibrated", errors(row for row in real if row["is_fitted"])),
        ("seconds on the emulated device", errors(emulated)),
        ("peak bytes", byte_errors(real)),
        ("peak bytes of the 14 layouts", byte_errors(layouts)),
        ("peak bytes of mixtures", byte_errors(mixtures)),
        ("peak bytes with host memory", byte_errors(hosted)),
        ("peak bytes of slices of sequences", byte_errors(sliced)),
        ("peak bytes with a loss in chunks", byte_errors(chunked)),
    ]
    parts = [
        "# Predictions beside our own runs",
        "Written by `python benchmarks/run.py predictions`. Configurations of several models, layouts, schedules, "
        "precisions and recompute modes run on this machine's CPUs, one thread per rank and no more ranks than cores. "
        "Their step times and peaks are compared with the output of `atoll predict`.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        "\n".join(
            [
                "| what | configurations or ranks | median error | worst | mean, with its sign |",
                "|---|--:|--:|--:|--:|",
                *(f"| {name} | {len(found)} | {_spread(found)} |" for name, found in lines if found),
            ]
        ),
        "## Real steps",
        "*measured*: median of the steps. *as measured*: predicted with the cluster that `atoll doctor --measure` "
        "wrote. *calibrated*: with its constants fitted to the steps of the rows with *fit*, as "
        "`atoll doctor --calibrate` fits "
        "them; these rows are not judged. *peak*: bytes of the pipeline rank with the highest peak, counted by the C "
        "library's allocator on all threads and in memory that ranks share; the error is of that rank.",
        "\n".join(
            [
                "| configuration | | measured s | as measured | calibrated | peak MB | peak |",
                "|---|---|--:|--:|--:|--:|--:|",
                *map(_real_line, real),
            ]
        ),
        "Constants: "
        + ", ".join(f"{each['name']} {each['before']:.4g} → {each['after']:.4g}" for each in result["constants"])
        + ".",
        "## On an emulated device",
        "Four ranks on two cores. Each instruction sleeps up to its predicted seconds on a given device, including its "
        "real computation; messages, gathers, reductions and waits are real. This tests the order and overlap of "
        "instructions. The links are as measured by four ranks.",
        "\n".join(
            ["| configuration | measured s | predicted s | error |", "|---|--:|--:|--:|", *map(_seconds_line, emulated)]
        ),
        "## Bytes by component",
        "The 14 effective layouts on two groups of two ranks: MB of a rank, predicted / counted, the most of each "
        "component within a step. State, gathered copies, full gradients and tensors kept for W are counted from the "
        "engine's tensors; activations are everything else that is allocated between instructions, including receive "
        "buffers of reductions. *passing*: within an instruction.",
        _components(layouts),
        *(_peaks("Mixtures", _MIXTURES, mixtures) if mixtures else ()),
        *(_peaks("Host memory", _HOSTED, hosted) if hosted else ()),
        *(_peaks("Slices of sequences", _SLICED, sliced) if sliced else ()),
        *(_peaks("The loss in chunks", _CHUNKED, chunked) if chunked else ()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _real_line(row: Mapping[str, Any]) -> str:
    before, after = (errors([row], key)[0] for key in ("before_seconds", "predicted_seconds"))
    fullest = max(row["bytes"], key=lambda each: float(each["counted_peak"]))
    off = fullest["predicted_peak"] / fullest["counted_peak"] - 1.0
    fit = "fit" if row["is_fitted"] else ""
    cells = [row["name"], fit, f"{row['measured_seconds']:.3f}", f"{before:+.1%}", f"{after:+.1%}"]
    cells += [f"{fullest['counted_peak'] / 1e6:.1f}", f"{off:+.1%}"]
    return f"| {' | '.join(cells)} |"


def _seconds_line(row: Mapping[str, Any]) -> str:
    return (
        f"| {row['name']} | {row['measured_seconds']:.3f} | {row['predicted_seconds']:.3f} | {errors([row])[0]:+.1%} |"
    )


COMPONENTS = [name for name in Held._fields if name != "context"]


_MIXTURES = (
    "Mixtures of eight experts on four ranks, with as many tokens for each expert: what a rank exchanges and keeps "
    "depends on where its tokens go, and predictions are of an even spread."
)
_SLICED = (
    "Bytes at the peak of pipelines that compute sequences slice by slice, with the keys and values of all slices, and "
    "the gradients that later slices add."
)
_CHUNKED = (
    "Bytes at the peak where the loss is computed in chunks of tokens, of one rank and of two. Logits of a chunk are "
    "transient."
)

_HOSTED = (
    "A decoder of twelve layers on two ranks, with state, parameters, gradients or activations in host memory, which "
    "is counted apart."
)


def _peaks(title: str, text: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A section of configurations whose bytes alone are counted."""
    yield f"## {title}"
    yield f"{text} *peak*: MB of the device, predicted / counted, of each pipeline rank."
    lines = [
        f"| {row['name']} | {each['predicted_peak'] / 1e6:.2f} / {each['counted_peak'] / 1e6:.2f} | "
        f"{each['predicted_peak'] / each['counted_peak'] - 1.0:+.1%} |"
        for row in rows
        for each in row["bytes"]
    ]
    yield "\n".join(["| configuration | peak | error |", "|---|--:|--:|", *lines])


def _components(rows: Sequence[Mapping[str, Any]]) -> str:
    names = [name for name in COMPONENTS if any(each["counted"][name] for row in rows for each in row["bytes"])]
    lines = [f"| layout | {' | '.join(names)} | peak | error |", "|---|" + "--:|" * (len(names) + 2)]
    for row in rows:
        layout = row["changes"][0].partition("=")[2]
        for each in row["bytes"]:
            cells = [f"{each['predicted'][name] / 1e6:.2f} / {each['counted'][name] / 1e6:.2f}" for name in names]
            cells.append(f"{each['predicted_peak'] / 1e6:.2f} / {each['counted_peak'] / 1e6:.2f}")
            lines.append(f"| {layout} | {' | '.join(cells)} | {byte_errors([row])[0]:+.1%} |")
    worst = {name: max(map(abs, component_errors(rows, name)), default=0.0) for name in names}
    lines.append(f"| worst error | {' | '.join(f'{worst[name]:.1%}' for name in names)} | | |")
    return "\n".join(lines)
