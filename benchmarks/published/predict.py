"""Predicts steps and bytes of published rows.

    python benchmarks/published/predict.py ROWS [--calibrate ROWS] --out FILE

ROWS has rows in the form of `plans.json`: that file, a list of rows, one row a line, or vTrain's table as .csv. The
output is a list with one entry a row, in their order: id, step_seconds, tokens_per_second_per_gpu, peak_bytes and
rest_bytes (as the row counts them, on the rank that it measured), peak_bytes_by_rank (of the world's ranks) and fits.
What a row does not say enough for is null; reasons are counted on stderr. Rows with context parallelism, which no plan
has, have bytes alone.

With --calibrate, the constants of devices and links are fitted to the steps of at most twenty of those rows first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from atoll.prediction.cost import Cluster  # noqa: E402
from atoll.prediction.cost.calibration import LIMITS, calibrate, changed  # noqa: E402
from benchmarks.published import memory, rows  # noqa: E402
from benchmarks.published.plans import step_of  # noqa: E402
from benchmarks.published.record import Published, Row  # noqa: E402

T = TypeVar("T")

STEPS = 20
"""Rows that constants are fitted to, at most."""

EVERY = 10.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What is predicted of a row; see `Published`. What is None is not known."""

    id: str
    step_seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    peak_bytes: int | None = None
    peak_bytes_by_rank: tuple[int, ...] | None = None
    rest_bytes: int | None = None
    fits: bool | None = None


def read(path: str | Path) -> list[Row]:
    """Rows of a file. Raises ValueError if it has none of the forms."""
    path = Path(path)
    if path.suffix == ".csv":
        return list(rows.rows_of_csv(path))
    text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    if isinstance(found, dict):
        found = found.get("rows", [found])
    if not isinstance(found, list):
        raise ValueError(f"{path} has no rows: neither a list, nor a table with the key 'rows', nor one row a line")
    return found


def predict(row: Row, constants: Mapping[str, float], failed: Counter[str]) -> Predicted:
    """One row. constants: other ones, by the keys of `LIMITS`.  failed: counts the reasons for what is None."""
    name = str(row.get("id")) if isinstance(row, Mapping) else ""
    published = _attempt(lambda: rows.parse(row), failed)
    if published is None:
        alike = _attempt(lambda: rows.parse(rows.folded(row)), Counter())
        held = None if alike is None else _attempt(lambda: _held(alike), failed)
        return Predicted(id=name, **(held or {}))
    cluster = changed(published.cluster, constants)
    seconds = _attempt(lambda: _seconds(_Timed((*published.configuration, repr(cluster)), published, cluster)), failed)
    timed = published.timed(seconds=seconds)
    held = _attempt(lambda: _held(published), failed) or {}
    return Predicted(
        id=name,
        step_seconds=seconds,
        tokens_per_second_per_gpu=None if seconds is None else timed.tokens_per_second_per_gpu,
        **held,
    )


def _attempt(ask: Callable[[], T], failed: Counter[str]) -> T | None:
    """The answer, or None where there is none: rows are of others, and no row may stop the next."""
    try:
        return ask()
    except Exception as error:
        failed[f"{type(error).__name__}: {error}"] += 1
        return None


@dataclass(frozen=True)
class _Timed:
    """A row on a cluster. said: all that its seconds depend on."""

    said: tuple[object, ...]
    row: Published = field(compare=False)
    cluster: Cluster = field(compare=False)


@lru_cache(maxsize=1024)
def _seconds(timed: _Timed) -> float:
    return step_of(timed.row, timed.cluster).predicted


def _held(row: Published) -> dict[str, Any]:
    """Of the rank that the row measured, the fullest or the last. The world's ranks follow the pipeline's."""
    ranks = range(row.mesh.pipeline)
    peaks = [memory.peak_bytes(row, rank) for rank in ranks]
    rests = [memory.rest_bytes(row, rank) for rank in ranks]
    is_last = row.bytes_on == "last"
    return {
        "peak_bytes": peaks[-1] if is_last else max(peaks),
        "peak_bytes_by_rank": tuple(peak for peak in peaks for _ in range(row.mesh.world // row.mesh.pipeline)),
        "rest_bytes": rests[-1] if is_last else max(rests),
        "fits": memory.fits(row),
    }


def constants_of(measured: Sequence[Row]) -> dict[str, float]:
    """The constants fitted to steps: those of up to `STEPS` rows with seconds, evenly spread over the file.

    Raises ConfigError where no row has seconds.
    """
    published = [row for row in map(_read, measured) if row is not None and row.step_seconds and not row.vocabulary]
    apart = max(1, -(-len(published) // STEPS))
    cluster = calibrate([step_of(row) for row in published[::apart]]).cluster
    found = {}
    for name in LIMITS:
        table, _, constant = name.rpartition(".")
        owner = attrgetter(table)(cluster)
        value = None if owner is None else getattr(owner, constant)
        if value is not None:
            found[name] = float(value)
    return found


def _read(row: Row) -> Published | None:
    return _attempt(lambda: rows.parse(row), Counter())


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, predict, write."""
    parser = argparse.ArgumentParser(prog="predict", description="Predict steps and bytes of published rows.")
    parser.add_argument("rows", metavar="ROWS", help="file of rows")
    parser.add_argument("--calibrate", metavar="ROWS", help="file of rows whose steps constants are fitted to")
    parser.add_argument("--out", metavar="FILE", required=True, help="file to write, in JSON")
    asked = parser.parse_args(arguments)
    constants = constants_of(read(asked.calibrate)) if asked.calibrate else {}
    failed: Counter[str] = Counter()
    found, all_rows = [], read(asked.rows)
    said = perf_counter()
    for row in all_rows:
        found.append(asdict(predict(row, constants, failed)))
        if perf_counter() - said > EVERY:
            said = perf_counter()
            print(f"{len(found)} of {len(all_rows)} rows", file=sys.stderr, flush=True)
    Path(asked.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for reason, count in failed.most_common():
        print(f"{count} x {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
