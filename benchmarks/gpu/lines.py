"""The lines of `stages.jsonl`: one stage, on one card, at one commit.

    name, digest      the stage, and what the sources that it depends on say
    commit            as given to the script, which runs where there is no git
    device, driver    as nvidia-smi says; "cpu" in a rehearsal
    torch, python     versions
    before, after     clocks, temperature, power and memory of the card
    seconds, date     how long the stage took, and when it ended
    result            what it found; if it failed or ran out of time, what it had found by then
    problem           traceback, or the limit that it ran into; none if it is good

A line is good if it has no problem and no rehearsal made it. Lines of different cards are never compared.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import provenance

COMMITTED = provenance.ROOT / "benchmarks" / "gpu" / "results" / "stages.jsonl"

CPU = "cpu"
"""The device of a rehearsal."""

STATE = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "celsius": "temperature.gpu",
    "watts": "power.draw",
    "memory_mib": "memory.used",
}
"""Names in a line -> fields of nvidia-smi that are read before and after each stage."""

Line = Mapping[str, Any]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, none if there is no file. Raises ValueError for one that is not JSON, with its number."""
    if not path.is_file():
        return []
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found.append(json.loads(text))
        except ValueError as error:
            raise ValueError(f"{path}: line {number} is no JSON: {error}") from error
    return found


def append(path: Path, line: Line) -> None:
    """Write a line, through to the disk: what follows may be killed."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False, default=str) + "\n")
        file.flush()


def is_good(line: Line) -> bool:
    """Return True if the stage ran on a GPU without a problem."""
    return not line["problem"] and not line["rehearsal"]


def newest(lines: Iterable[Line]) -> dict[tuple[str, str], Line]:
    """(device, stage) -> its last good line, whatever it was the digest of."""
    return {(line["device"], line["name"]): line for line in lines if is_good(line)}


def is_done(lines: Iterable[Line], *, name: str, digest: str, device: str) -> bool:
    """Return True if a stage has a good line with this digest on this kind of device."""
    return any(
        is_good(line) and (line["name"], line["digest"], line["device"]) == (name, digest, device) for line in lines
    )


def digest_of(modules: Sequence[str], read: provenance.Read = provenance.read) -> str:
    """Return a digest of the files of modules and of all that they import, 16 hexadecimal digits."""
    paths = sorted(set().union(*(provenance.closure(module, read) for module in modules)))
    said = [f"{path} {provenance.digest(path, read(path) or '')}" for path in paths]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]


# ---- the card


def query(*fields: str) -> list[str]:
    """Return fields of the first card, as nvidia-smi reports them. Raises RuntimeError if there is no card."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stdout", "") or error
        raise RuntimeError(f"no NVIDIA GPU: {' '.join(command)}: {said}") from error
    return [each.strip() for each in done.stdout.strip().splitlines()[0].split(",")]


def card() -> dict[str, str]:
    """Its name and driver."""
    name, driver = query("name", "driver_version")
    return {"device": name, "driver": driver}


def state() -> dict[str, float | None]:
    """Its clocks and so on now; None for what it does not tell."""
    return dict(zip(STATE, map(_number, query(*STATE.values())), strict=True))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]", where a virtual machine hides a sensor
        return None
