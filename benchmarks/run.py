"""Runs the benchmarks: `make bench`, or `python benchmarks/run.py [NAME ...] [--quick]`.

Each benchmark is a folder with a `bench.py`: `run(arguments) -> dict` measures, `report(result) -> str` is its table.
The result, with where it was measured, is written to `benchmarks/<name>/results/latest.json`; a bench that has
`publish(result, folder)` then writes its page. To add one: the folder, and its name in `BENCHMARKS` or `SLOW`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ("overhead", "precision", "schedules", "parity", "emulated")
SLOW = (
    *("matrix", "mutants", "who_gets_it_right", "low_rank", "sharded_pipeline", "vocabulary", "one_machine"),
    "two_islands",
)
"""Those that run when they are named; two_islands, low_rank and sharded_pipeline need root."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure Atoll; raw results go to benchmarks/<name>/results.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"by default {', '.join(BENCHMARKS)}; also {', '.join(SLOW)}"
    )
    parser.add_argument("--quick", action="store_true", help="a few small steps, to see that it runs; writes no file")
    parser.add_argument("--jobs", type=int, metavar="N", help="of mutants, how many at once (default: one a core)")
    arguments = parser.parse_args()
    known = (*BENCHMARKS, *SLOW)
    unknown = sorted(set(arguments.names) - set(known))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")

    sys.path.insert(0, str(ROOT))
    from benchmarks.environment import environment

    for name in arguments.names or BENCHMARKS:
        bench = importlib.import_module(f"benchmarks.{name}.bench")
        print(f"== {name}", flush=True)
        measured_in = environment(command=["python", "benchmarks/run.py", *sys.argv[1:]])
        result = {**bench.run(arguments), "environment": measured_in}
        print(bench.report(result), flush=True)
        if arguments.quick:
            continue
        path = ROOT / "benchmarks" / name / "results" / "latest.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if hasattr(bench, "publish"):
            bench.publish(result, path.parent.parent)
        print(f"written to {path.relative_to(ROOT)}\n", flush=True)


if __name__ == "__main__":
    main()
