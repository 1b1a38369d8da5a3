"""Runs the benchmarks: `make bench`, or `python benchmarks/run.py [NAME ...] [--quick]`.

Each benchmark is a folder with a `bench.py`: `run(arguments) -> dict` measures, `report(result) -> str` is its page.
The result is written to `benchmarks/<name>/results/latest.json` with where it was measured and a digest of every file
that it depends on (`benchmarks/provenance.py`); a bench that has `publish(result, folder)` adds its pictures. To add
one: the folder, and its name in `BENCHMARKS` or `SLOW`; to quote it in the README, a row of `benchmarks/claims.py`.

    --confirm  measure only what decides the figures of results that are older than their code, and say whether they
               still hold (of a bench that has `confirm`, see `benchmarks/confirmations.py`)
    --front    race the members of the fronts alone (of a bench that has `race_front`); writes `results/quick.json`
    --pages    write every generated page from the raw files, without measuring (`make evidence`)
    --stale    say which results are older than what they depend on (`make stale`)
    --due N    measure those again for N minutes, or confirm them, the most urgent first (`benchmarks/due.py`)
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks import due

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ("overhead", "precision", "schedules", "parity", "emulated")
RACES = ("two_islands", "two_islands_text", "two_islands_a100", "one_machine", "one_machine_text", "one_machine_a100")
SLOW = (
    "matrix",
    "mixtures",
    "mutants",
    "who_gets_it_right",
    "low_rank",
    "muon",
    "sharded_pipeline",
    "vocabulary",
    "slow_hop",
    "codecs",
    "quality",
    "uneven",
    "unequal",
    "published",
    "paired",
    "predictions",
    "planner",
    "report",
    "choices",
    "integrity",
    "fuzz",
    "chaos",
    "hangs",
    "saving",
    "host",
    "outer",
    "experts",
    "sequence",
    "slices",
    "federation",
    "chunked_loss",
    "stream",
    *RACES,
)
"""Those that run when they are named; the ones with a slow link need root."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure Atoll; raw results go to benchmarks/<name>/results.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"by default {', '.join(BENCHMARKS)}; also {', '.join(SLOW)}"
    )
    parser.add_argument("--quick", action="store_true", help="a few small steps, to see that it runs; writes no file")
    parser.add_argument(
        "--confirm", action="store_true", help="measure only what decides the figures; writes results/confirmation.json"
    )
    parser.add_argument("--front", action="store_true", help="only the fronts of a race; writes results/quick.json")
    parser.add_argument("--pages", action="store_true", help="write the pages from the raw files; measures nothing")
    parser.add_argument("--stale", action="store_true", help="say which results are older than their files; no more")
    parser.add_argument(
        "--due",
        type=float,
        metavar="MINUTES",
        help="measure results again, or confirm them, that are older than their code, for so long",
    )
    parser.add_argument(
        "--uncommitted", action="store_true", help="measure files that are not committed; the result says so"
    )
    parser.add_argument("--against", metavar="COMMIT", help="of paired: the older commit")
    parser.add_argument("--steps", type=int, metavar="N", help="of quality, steps of each run")
    parser.add_argument("--rows", metavar="FOLDER", help="of published: where its rows lie")
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="of chaos, fuzz, hangs, mutants and quality, after how many none begins",
    )
    parser.add_argument("--add", action="store_true", help="of chaos, fuzz and quality, to what their raw files have")
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="of mutants, fuzz, hangs and quality, how many at once (default: one a core; of quality one)",
    )
    arguments = parser.parse_args()
    known = (*BENCHMARKS, *SLOW)
    unknown = sorted(set(arguments.names) - set(known))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")

    sys.path.insert(0, str(ROOT))
    if arguments.stale:
        from benchmarks import claims

        print(claims.all_states())
    elif arguments.pages:
        _write_pages()
    elif arguments.due is not None:
        _measure_due(arguments.due)
    elif arguments.confirm:
        if not arguments.names:
            parser.error("--confirm needs the names of results")
        held = [_confirm(name, arguments) for name in arguments.names]
        if not arguments.quick:
            _write_pages()
        sys.exit(not all(held))
    elif arguments.front:
        for name in arguments.names:
            _race_front(name)
    else:
        for name in arguments.names or BENCHMARKS:
            _measure(name, arguments)
        if not arguments.quick:
            _write_pages()


def _measure(name: str, arguments: argparse.Namespace) -> None:
    """One benchmark and its raw file. Exits where a file that it depends on is not committed, unless that is asked
    for."""
    from benchmarks import confirmations, provenance

    measured_in = _environment(name, arguments)
    bench = importlib.import_module(f"benchmarks.{name}.bench")
    arguments.depends = measured_in["depends"]
    begin = time.monotonic()
    found = bench.run(arguments)
    result = {**found, "environment": {**measured_in, "seconds": round(time.monotonic() - begin, 1)}}
    if not arguments.quick:  # before the page, whose errors must not cost an hour
        _write(ROOT / provenance.raw_path(name), result)
        (ROOT / confirmations.path_of(name)).unlink(missing_ok=True)  # it was of the result before
    print(bench.report(result), flush=True)


def _confirm(name: str, arguments: argparse.Namespace) -> bool:
    """Measure what decides a result's figures, and return whether they hold. Exits as `_measure` does, and where a
    bench has no short way."""
    from benchmarks import confirmations, provenance, states

    result = provenance.load(name)
    if states.state(result["environment"]).name == "current":
        print(f"{name} is current, there is nothing to confirm", flush=True)
        return True
    bench = importlib.import_module(f"benchmarks.{name}.bench")
    if not hasattr(bench, "confirm"):
        sys.exit(f"{name} has no short measurement: measure it again, `python benchmarks/run.py {name}`")
    measured_in = _environment(name, arguments)
    arguments.seed = confirmations.seed_of(measured_in["commit"])
    begin = time.monotonic()
    found = bench.confirm(arguments, result)
    measured_in["seconds"] = round(time.monotonic() - begin, 1)
    earlier = confirmations.load(name)
    made = confirmations.record(found, of=result["environment"], measured_in=measured_in, earlier=earlier)
    for check in confirmations.checks_of(made):
        print(f"{'holds' if check.holds else 'DIFFERS':8}{check.words}", flush=True)
    if not arguments.quick:
        _write(ROOT / confirmations.path_of(name), made)
    return not confirmations.differing(made)


def _environment(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Where and at which commit a benchmark begins. Exits where a file that it depends on is not committed, unless
    that is asked for."""
    from benchmarks import provenance
    from benchmarks.environment import environment

    print(f"== {name}", flush=True)
    depends = provenance.depends(name)
    measured_in = environment(command=["python", "benchmarks/run.py", *sys.argv[1:]], depends=depends)
    if measured_in["uncommitted"] and not (arguments.quick or arguments.uncommitted):
        sys.exit(
            f"{name} depends on files that are not committed: {', '.join(measured_in['uncommitted'])}\n"
            "A result names the commit that it was measured at. Commit them, or say --uncommitted, which marks the "
            "result."
        )
    return measured_in


def _write(path: Path, found: Mapping[str, Any]) -> None:
    from benchmarks.rows import to_text

    path.parent.mkdir(parents=True, exist_ok=True)
    # As it is read again: tuples are lists then, and lie differently.
    path.write_text(to_text(json.loads(json.dumps(found))), encoding="utf-8")
    print(f"written to {path.relative_to(ROOT)}\n", flush=True)


def _measure_due(minutes: float) -> None:
    """Measure results again, each in a process of its own: one that fails, or needs root, does not end the others."""
    from benchmarks import due

    end = time.monotonic() + 60.0 * minutes
    results = _due()
    while (chosen := due.following(results, (end - time.monotonic()) / 60.0)) is not None:
        results = [each for each in results if each.full.name != chosen.name]
        way = "confirmed in" if chosen.confirms else "measured in"
        print(f"{chosen.name}: {chosen.days:.1f} days old, {way} about {chosen.minutes:.0f} minutes", flush=True)
        command = [sys.executable, str(Path(__file__).resolve()), chosen.name, *["--confirm"] * chosen.confirms]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            print(f"{chosen.name} failed or was not confirmed, its result stays as it was", flush=True)
    hours = sum(each.full.minutes for each in results) / 60.0
    print(f"{len(results)} results are still older than their code; they take about {hours:.1f} hours", flush=True)


def _due() -> list[due.Result]:
    """The results that are older than their code, with the ways to measure them again."""
    from benchmarks import claims, confirmations, due, provenance, states

    readme, now = (ROOT / "README.md").read_text(encoding="utf-8"), datetime.now(UTC)
    results = []
    for name in claims.raw_names():
        state, last = states.state_of(name), confirmations.load(name)
        if state.stands:
            continue
        bench = importlib.import_module(f"benchmarks.{name}.bench")
        has_short = hasattr(bench, "confirm") and not state.is_refuted
        confirmed_in = (last["environment"] if last else {}) if has_short else None
        results.append(due.result(name, provenance.load(name)["environment"], readme, now, confirmed_in=confirmed_in))
    return results


def _race_front(name: str) -> None:
    """The members of a race's fronts alone: a few minutes, whatever the tree's state."""
    from benchmarks import provenance
    from benchmarks.environment import environment

    bench = importlib.import_module(f"benchmarks.{name}.bench")
    measured_in = environment(command=["python", "benchmarks/run.py", *sys.argv[1:]], depends=provenance.depends(name))
    found = bench.race_front(provenance.load(name), commit=measured_in["commit"])
    _write(ROOT / "benchmarks" / name / "results" / "quick.json", {**found, "environment": measured_in})


def _write_pages() -> None:
    from benchmarks import claims

    for path, text in claims.wanted_pages().items():
        if text is None:
            path.unlink(missing_ok=True)
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}", flush=True)
    subprocess.run([sys.executable, "scripts/slow_networks.py", "--measured"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
