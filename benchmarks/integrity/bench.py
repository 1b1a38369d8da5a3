"""What damage to checkpoints and token caches does, and what their digests cost: `make bench` does not run it.

Damage: 1,000 mutations of a checkpoint and 1,000 of a token cache (`mutations.py`), and the same ones of a checkpoint
without digests. Cost: a checkpoint is saved and loaded in turns with its digests and without, on the disk and in
memory, on one core; of those with digests the seconds that the digests alone took are counted too. One without has
torch's CRC32 in its place, as checkpoints had before.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import xxhash

from atoll.base import digests
from atoll.base.errors import UnverifiedWarning
from atoll.runtime.checkpoint import Piece, load_pieces, save, saving
from atoll.runtime.checkpoint import manifest as manifests
from benchmarks.integrity.mutations import MUTATIONS, Cache, Checkpoints, Outcome, damage, without_digests
from benchmarks.islands import tables

ENDS = ("right", "refused", "wrong", "crashed")
DIGESTS: Mapping[str, Callable[[Any], object]] = {
    "xxh3-128": xxhash.xxh3_128_digest,
    "crc32 (zlib)": zlib.crc32,
    "sha256": lambda content: hashlib.sha256(content).digest(),
    "blake2b": lambda content: hashlib.blake2b(content).digest(),
}
PLACES = {"disk": None, "memory": "/dev/shm"}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Damage, then cost."""
    count, rounds, tensors = (40, 1, 2) if arguments.quick else (1000, 7, 16)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        root = Path(name)
        damaged = {
            "checkpoint": damage(Checkpoints(root / "a"), count, seed=0),
            "token cache": damage(Cache(root / "b"), count, seed=1),
            "checkpoint without digests": damage(Checkpoints(root / "c", with_digests=False), count, seed=0),
        }
    return {
        "damage": [_counted(subject, kind, found) for subject, found in damaged.items() for kind in MUTATIONS],
        "bad": [[subject, *each] for subject, found in damaged.items() for each in found if each.end == "crashed"],
        "digests": {name: _speed(function) for name, function in DIGESTS.items()},
        "cost": [_cost(place, folder, rounds, tensors) for place, folder in PLACES.items()],
    }


def _counted(subject: str, kind: str, found: Sequence[Outcome]) -> dict[str, Any]:
    ends = Counter(each.end for each in found if each.kind == kind)
    return {"subject": subject, "kind": kind, **{end: ends[end] for end in ENDS}}


def _speed(function: Callable[[Any], object]) -> float:
    """Bytes a second of one core, of content in memory; the best of five."""
    content = bytearray(64 << 20)
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        function(content)
        times.append(time.perf_counter() - begun)
    return len(content) / min(times)


class _Clock:
    """Counts the seconds in a function."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.seconds, self._inner = 0.0, inner

    def __call__(self, *given: Any) -> Any:
        begun = time.perf_counter()
        try:
            return self._inner(*given)
        finally:
            self.seconds += time.perf_counter() - begun


class _NoDigest:
    """In the place of `Digest`, for a save without."""

    value = "0" * 32

    def update(self, part: Any) -> None:
        """Nothing."""


def _cost(place: str, folder: str | None, rounds: int, tensors: int) -> dict[str, Any]:
    """Seconds of saves and loads in turns, of tensors of 32 MiB in fp32."""
    numel = 8 << 20
    values = [torch.full((numel,), float(at)) for at in range(tensors)]
    pieces = [
        Piece(("model", str(at)), (1024, numel // 1024), 0, stop=numel, tensor=each) for at, each in enumerate(values)
    ]
    seconds: dict[str, list[float]] = {
        key: [] for key in ("save", "save_plain", "load", "load_plain", "digest", "check")
    }
    with tempfile.TemporaryDirectory(dir=folder or Path.cwd()) as name:
        target, plain = Path(name) / "digests", Path(name) / "plain"
        for at in range(rounds):
            for is_plain in (True, False) if at % 2 else (False, True):
                seconds["save_plain" if is_plain else "save"].append(_save(target, pieces, seconds, is_plain=is_plain))
        _save(target, pieces, {"digest": []}, is_plain=False)
        shutil.copytree(target, plain)
        without_digests(plain)
        for copy in (target, plain):  # so that neither is read for the first time
            _load(copy, pieces, None)
        for at in range(rounds):
            for is_plain in (True, False) if at % 2 else (False, True):
                took = _load(plain if is_plain else target, pieces, None if is_plain else seconds)
                seconds["load_plain" if is_plain else "load"].append(took)
    return {"place": place, "bytes": 4 * numel * tensors, **seconds}


def _save(target: Path, pieces: Sequence[Piece], seconds: dict[str, list[float]], *, is_plain: bool) -> float:
    shutil.rmtree(target, ignore_errors=True)
    spent = 0.0

    class Timed(digests.Digest):
        def update(self, part: Any) -> None:
            nonlocal spent
            begun = time.perf_counter()
            super().update(part)
            spent += time.perf_counter() - begun

    saving.Digest = _NoDigest if is_plain else Timed  # type: ignore[misc,assignment]
    no_crc32 = saving.without_crc32
    if is_plain:
        saving.without_crc32 = nullcontext  # type: ignore[assignment]
    try:
        begun = time.perf_counter()
        save(target, pieces, {"step": 1})
        took = time.perf_counter() - begun
    finally:
        saving.Digest = digests.Digest  # type: ignore[misc]
        saving.without_crc32 = no_crc32
    if not is_plain:
        seconds["digest"].append(spent)
    return took


def _load(target: Path, pieces: Sequence[Piece], seconds: dict[str, list[float]] | None) -> float:
    clock = _Clock(digests.digest)
    manifests.digest = clock  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnverifiedWarning)
            begun = time.perf_counter()
            load_pieces(target, pieces)
            took = time.perf_counter() - begun
    finally:
        manifests.digest = digests.digest
    if seconds is not None:
        seconds["check"].append(clock.seconds)
    return took


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    subjects = list(dict.fromkeys(row["subject"] for row in result["damage"]))
    totals = [
        {"subject": subject, "kind": "**all**"}
        | {end: sum(row[end] for row in result["damage"] if row["subject"] == subject) for end in ENDS}
        for subject in subjects
    ]
    rows = [
        f"| {row['subject']} | {row['kind']} | {' | '.join(str(row[end]) for end in ENDS)} |"
        for subject in subjects
        for row in (*result["damage"], *totals)
        if row["subject"] == subject
    ]
    parts = [
        "# Damage, and the cost of detecting it",
        "Written by `python benchmarks/run.py integrity`. One item in a folder is changed at random, and the folder "
        "is read as a run reads it: the state with its cross-checks and all tensors of a checkpoint, or all tokens "
        "of a cache. *right*: the original content was returned, because the damage is not in data that is read, or "
        "because a cache matched its fingerprint; *refused*: one error that names the folder; *wrong*: other content "
        "was returned without an error; *crashed*: any other exception. The last rows show the same damage to a "
        "checkpoint without digests, of an older version, for which only the structure can be checked.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        "\n".join(["| item | damage | right | refused | wrong | crashed |", "|---|---|--:|--:|--:|--:|", *rows]),
        "A checkpoint of tensors of 32 MiB is saved (fsync included) and loaded (from the page cache) with and "
        "without digests in turns, on one core. *digests*: the time of the digests as a share of the total; *ratio*: "
        "the median over rounds of the ratio to a checkpoint without digests. Without digests, torch computes a "
        "CRC32 of each box, which it does not verify on load; with digests the CRC32 is omitted. *memory*: "
        "`/dev/shm`, which does not wait for a disk, so the share is the largest.",
        "\n".join(
            [
                "| place | GB | save s | digests | ratio | load s | digests | ratio |",
                "|---|--:|--:|--:|--:|--:|--:|--:|",
                *map(_cost_line, result["cost"]),
            ]
        ),
        "Digests of 64 MiB in memory, on one core:",
        "\n".join(
            [
                "| digest | GB/s |",
                "|---|--:|",
                *(f"| {name} | {speed / 1e9:.2f} |" for name, speed in result["digests"].items()),
            ]
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _cost_line(row: Mapping[str, Any]) -> str:
    cells = [row["place"], f"{row['bytes'] / 1e9:.2f}"]
    for whole, plain, part in (("save", "save_plain", "digest"), ("load", "load_plain", "check")):
        share, ratio = shares(row, whole, plain, part)
        cells += [f"{median(row[whole]):.2f}", f"{share:.1%}", f"{ratio:.3f}"]
    return f"| {' | '.join(cells)} |"


def shares(row: Mapping[str, Any], whole: str, plain: str, part: str) -> tuple[float, float]:
    """Of the seconds of a save or load, the share of the digests; and the ratio to one without, in the median."""
    share = median(mine / all_ for mine, all_ in zip(row[part], row[whole], strict=True))
    return share, median(with_ / without for with_, without in zip(row[whole], row[plain], strict=True))
