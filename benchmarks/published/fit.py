"""Fits constants to published steps, by source and hardware: `python benchmarks/published/fit.py FOLDER`.

    --devices    constants of each device over all sources instead, for the presets that come with Atoll; printed

FOLDER is that of `run.py published`. Writes `constants.json`, which predictions of rows of the same kind begin with.
What kernels reach depends on the program that launches them and on the machine, not on the device alone. A kind with
fewer than `LEAST` steps has none, and is predicted with what Atoll comes with.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from atoll.cost.calibration import LIMITS, Step, calibrate  # noqa: E402
from atoll.errors import AtollError  # noqa: E402
from benchmarks.published import plans, rows  # noqa: E402
from benchmarks.published.record import Published  # noqa: E402

LEAST, MOST, EACH = 8, 120, 16
"""Steps of a kind, at least and at most, and those of a kind that a device's fit takes."""


def main() -> None:
    """Fit every kind, or every device."""
    folder = Path(sys.argv[1])
    found = json.loads((folder / "plans.json").read_text(encoding="utf-8"))["rows"]
    read = (row for row in map(rows.read, found) if row is not None)
    timed = [row for row in (*read, *rows.read_csv(folder / "vtrain_single_node.csv")) if row.step_seconds and row.fits]
    if "--devices" in sys.argv:
        _devices(timed)
        return
    fits = {}
    for kind, own in _by(plans.kind_of, timed).items():
        steps = _steps(own, MOST)
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


def _devices(timed: Iterable[Published]) -> None:
    """Print each device's constants, fitted to as many steps of each source and without what links reach."""
    constants = [name for name in LIMITS if name.startswith("device.")]
    for device, own in _by(lambda row: row.cluster.device.source, timed).items():
        steps = [step for each in _by(plans.kind_of, own).values() for step in _steps(each, EACH)]
        sources = sorted({row.source for row in own})
        if len(steps) < LEAST:
            continue
        fitted = calibrate(steps, constants)
        print(f"{device}: {len(steps)} steps of {', '.join(sources)}, {fitted.error:.1%} left")
        print({name.rpartition(".")[2]: float(f"{value:.3g}") for name, value in fitted.constants.items()}, flush=True)


def _by(key: Callable[[Published], str], own: Iterable[Published]) -> dict[str, list[Published]]:
    found: defaultdict[str, list[Published]] = defaultdict(list)
    for row in own:
        found[key(row)].append(row)
    return dict(sorted(found.items()))


def _steps(own: Sequence[Published], most: int) -> list[Step]:
    """Each so many-th of the rows that plans can say, on their own clusters."""
    found = []
    for row in own[:: -(-len(own) // most)]:
        try:
            step = plans.step_of(row, row.cluster)
            step.played[0][1].rates  # noqa: B018  (refuses what has no programs)
        except AtollError as error:
            print(f"{row.id}: {error}", file=sys.stderr)
        else:
            found.append(step)
    return found


if __name__ == "__main__":
    main()
