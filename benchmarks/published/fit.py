"""Fits constants to published steps: `python benchmarks/published/fit.py FOLDER [SOURCE ...]`.

    SOURCE       fits steps of these sources alone; constants of others stay as they are
    --devices    fits those of the presets that come with Atoll instead, by device over all sources

FOLDER is that of `run.py published`. Writes `constants.json`, by source and hardware, which predictions of rows of the
same kind begin with. What kernels reach depends on the program that launches them and on the machine, not on the device
alone. A kind with fewer than `LEAST` steps has none, and is predicted with what Atoll comes with.

With --devices it writes `presets.json`, and the tables `[devices.NAME.efficiency]` of Atoll's `presets.toml`. Systems
count alike, with up to `EACH` steps on a device each. A device without steps has the medians of those with steps. The
spread is the error of systems that are left out of the fit; where there are not two, that of the steps on each device
with the medians of the other devices.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from atoll.base.errors import AtollError  # noqa: E402
from atoll.base.toml import to_toml  # noqa: E402
from atoll.prediction.cost import presets  # noqa: E402
from atoll.prediction.cost.calibration import Fitted, Step, calibrate, changed  # noqa: E402
from benchmarks.published import plans, rows  # noqa: E402
from benchmarks.published.record import Published  # noqa: E402

LEAST, MOST, EACH = 8, 120, 16
"""Steps of a kind, at least and at most, and those of a system that a device's fit takes."""

SYSTEMS = {
    "bigscience": "bigscience",
    "llm-foundry": "llm-foundry",
    "simumax-b200": "simumax-b200",
    "vocabulary-parallelism": "zero-bubble",
    "vtrain": "vtrain",
    "zero-bubble": "zero-bubble",
    "zero-bubble-v1": "zero-bubble",
}
"""The program and the cluster behind each source that presets are fitted to. Others have too few steps on any device,
or are not of training at speed: megatron-ci's tests run small models with deterministic kernels."""

PRESETS = HERE.parents[1] / "src" / "atoll" / "prediction" / "cost" / "presets.toml"
"""The presets that come with Atoll."""

EFFICIENCY = "device.efficiency."


def main() -> None:
    """Fit every kind, or every device."""
    folder = Path(sys.argv[1])
    found = json.loads((folder / "plans.json").read_text(encoding="utf-8"))["rows"]
    read = (row for row in map(rows.read, found) if row is not None)
    timed = [row for row in (*read, *rows.read_csv(folder / "vtrain_single_node.csv")) if row.step_seconds and row.fits]
    if "--devices" in sys.argv:
        fits = devices(timed)
        (HERE / "presets.json").write_text(json.dumps(fits, indent=1) + "\n", encoding="utf-8")
        PRESETS.write_text(shipped(PRESETS.read_text(encoding="utf-8"), fits), encoding="utf-8")
        return
    path, sources = HERE / "constants.json", sys.argv[2:]
    kinds = json.loads(path.read_text(encoding="utf-8")) if sources else {}
    for kind, own in _by(plans.kind_of, [row for row in timed if not sources or row.source in sources]).items():
        steps = _steps(own, MOST)
        if len(steps) < LEAST:
            continue
        fitted = calibrate(steps)
        kinds[kind] = {"steps": len(steps), "error": round(fitted.error, 4), "constants": _rounded(fitted)}
        print(f"{kind}: {len(steps)} steps, {fitted.error:.1%} left", flush=True)
        path.write_text(json.dumps(dict(sorted(kinds.items())), indent=1) + "\n", encoding="utf-8")


# ---- presets


def devices(timed: Iterable[Published]) -> dict[str, Any]:
    """Fit the constants of each device preset, by name. Presets with one data sheet are one device."""
    steps = {chip: _by_system(own) for chip, own in _by(lambda row: row.cluster.device.source, timed).items()}
    fits = {chip: calibrate(own) for chip, own in steps.items() if own}
    unseen = {chip: _error(steps[chip], _medians(fits, but=chip)) for chip in fits}
    spread = fmean(unseen.values())
    words = f"medians of the constants of {len(fits)} devices; no published steps on this one were fitted"
    rest = {"steps": 0, "efficiency": _efficiency(_medians(fits), spread, words)}
    found = {chip: _fitted(fitted, len(steps[chip]), unseen[chip]) for chip, fitted in fits.items()}
    for chip, fitted in fits.items():
        print(chip, _rounded(fitted), found[chip], flush=True)
    return {name: found.get(table["source"], rest) for name, table in presets()["devices"].items()}


def _medians(fits: Mapping[str, Fitted], but: str = "") -> dict[str, float]:
    """The median of each constant over all devices but one."""
    names = dict.fromkeys(name for fitted in fits.values() for name in fitted.constants)
    values = {
        name: [fitted.constants[name] for chip, fitted in fits.items() if chip != but and name in fitted.constants]
        for name in names
    }
    return {name: median(each) for name, each in values.items() if each}


def _error(steps: Sequence[Step], constants: Mapping[str, float]) -> float:
    """Mean relative error of steps with given constants."""
    played = (step.on(changed(step.cluster, constants)) for step in steps)
    return fmean(abs(step.predicted / step.seconds - 1.0) for step in played)


def _fitted(fitted: Fitted, steps: int, unseen: float) -> dict[str, Any]:
    """The record of a device that has steps. unseen: their error with the medians of the other devices."""
    systems = sorted(fitted.left_out)
    words = f"fitted to {steps} published steps of {', '.join(systems)}; mean error {fitted.error:.0%}"
    return {
        "steps": steps,
        "error": round(fitted.error, 4),
        "left_out": {system: round(error, 4) for system, error in fitted.left_out.items()},
        "unseen": round(unseen, 4),
        "constants": _rounded(fitted),
        "efficiency": _efficiency(fitted.constants, fitted.spread if len(systems) > 1 else unseen, words),
    }


def _efficiency(constants: Mapping[str, float], spread: float, source: str) -> dict[str, Any]:
    own = {name.removeprefix(EFFICIENCY): value for name, value in constants.items() if name.startswith(EFFICIENCY)}
    table = {name: float(f"{value:.3g}") for name, value in own.items()}
    return {**table, "spread": round(spread, 2), "source": source}


def shipped(text: str, fits: Mapping[str, Any]) -> str:
    """The text of `presets.toml` with the efficiency of each device behind its table."""
    text = re.sub(r"\[devices\.[\w-]+\.efficiency\]\n(.+\n)+\n", "", text)
    for name, found in fits.items():
        table = to_toml({f"devices.{name}.efficiency": found["efficiency"]})
        text = re.sub(rf"(\[devices\.{name}\]\n(?:.+\n)+\n)", lambda own, table=table: own[1] + table + "\n", text)  # type: ignore[misc]
    return text


def _by_system(own: Iterable[Published]) -> list[Step]:
    """Up to `EACH` steps of each system, evenly of its kinds, on clusters without fitted constants."""
    found = []
    known = (row for row in own if row.source in SYSTEMS and not row.vocabulary)
    for system, rows_of in _by(lambda row: SYSTEMS[row.source], known).items():
        kinds = _by(plans.kind_of, rows_of).values()
        steps = (step for kind in kinds for step in _steps(kind, EACH // len(kinds)))
        found += [replace(step, group=system) for step in steps]
    return found


# ---- steps


def _rounded(fitted: Fitted) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in fitted.constants.items()}


def _by(key: Callable[[Published], str], own: Iterable[Published]) -> dict[str, list[Published]]:
    found: defaultdict[str, list[Published]] = defaultdict(list)
    for row in own:
        found[key(row)].append(row)
    return dict(sorted(found.items()))


def _steps(own: Sequence[Published], most: int) -> list[Step]:
    """Each so many-th of the rows that plans can say, on their own clusters with unfitted constants."""
    found = []
    for row in own[:: -(-len(own) // most)]:
        try:
            step = plans.step_of(row, plans.unfitted(row.cluster))
            step.played[0][1].rates  # noqa: B018  (refuses what has no programs)
        except AtollError as error:
            print(f"{row.id}: {error}", file=sys.stderr)
        else:
            found.append(step)
    return found


if __name__ == "__main__":
    main()
