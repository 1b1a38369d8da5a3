"""Fits constants to published steps, by source and hardware: `python benchmarks/published/fit.py FOLDER`.

FOLDER is that of `run.py published`. Writes `constants.json`, which predictions of rows of the same kind begin with.
What kernels reach depends on the program that launches them and on the machine, not on the device alone. A kind with
fewer than `LEAST` steps has none, and is predicted with what Atoll comes with.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from atoll.cost.calibration import calibrate  # noqa: E402
from atoll.errors import AtollError  # noqa: E402
from benchmarks.published import plans, rows  # noqa: E402
from benchmarks.published.record import Published  # noqa: E402

LEAST, MOST = 8, 120
"""Steps of a kind. Of more than the most, each so many-th is taken."""


def main() -> None:
    """Fit every kind."""
    folder = Path(sys.argv[1])
    found = json.loads((folder / "plans.json").read_text(encoding="utf-8"))["rows"]
    read = [row for row in map(rows.read, found) if row is not None]
    kinds: defaultdict[str, list[Published]] = defaultdict(list)
    for row in (*read, *rows.read_csv(folder / "vtrain_single_node.csv")):
        if row.step_seconds and row.fits:
            kinds[plans.kind_of(row)].append(row)
    fits = {}
    for kind, own in sorted(kinds.items()):
        steps = []
        for row in own[:: -(-len(own) // MOST)]:
            try:
                step = plans.step_of(row, row.cluster)
                step.played[0][1].rates  # noqa: B018  (refuses what has no programs)
            except AtollError as error:
                print(f"{row.id}: {error}", file=sys.stderr)
            else:
                steps.append(step)
        if len(steps) < LEAST:
            continue
        fitted = calibrate(steps)
        fits[kind] = {
            "steps": len(steps),
            "error": round(fitted.error, 4),
            "constants": {name: float(f"{value:.4g}") for name, value in fitted.constants.items()},
        }
        print(f"{kind}: {len(steps)} steps, {fitted.error:.1%} left", flush=True)
        (HERE / "constants.json").write_text(json.dumps(fits, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
