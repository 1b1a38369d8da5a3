"""Folders of checkpoints. They are created, replaced and deleted by a rename.

    <root>/step-000100/              a checkpoint: *.distcp, .metadata, manifest.json, state.json (written last)
    <root>/latest                    the name of the newest one
    <root>/.saving-step-000200/      being written; if its process died, the next save removes it
    <root>/.replaced-step-000100/    a complete one between two renames; valid until step-000100 exists again
    <root>/.removing-step-000050/    being deleted
    <root>/damaged-step-000150/      set aside by a run that went back to an older one; never deleted automatically

No torch here.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

from atoll.base.documents import read_text
from atoll.base.errors import CheckpointError, DamageError
from atoll.runtime.checkpoint.manifest import MANIFEST, Manifest

STATE = "state.json"
METADATA = ".metadata"
LATEST = "latest"
LONGEST_NAME = 4096
"""Maximum number of bytes that are read of the file `latest`."""
FIRST_VERSION, FORMAT_VERSION = 1, 3
"""Versions of state.json that are read, and the one that is written. The first has no manifest. Up to the second,
residuals of encoded gradients are times the loss scale."""

_STEP = re.compile(r"step-\d+")
_SAVING, _REPLACED, _REMOVING, _DAMAGED = ".saving-", ".replaced-", ".removing-", "damaged-"


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint taken after `step` steps."""
    return root / f"step-{step:06d}"


def is_complete(folder: Path) -> bool:
    """Return True if a save into `folder` has completed."""
    unfinished = folder.name.startswith((_SAVING, _REMOVING))
    return not unfinished and (folder / METADATA).is_file() and (folder / STATE).is_file()


def is_one(folder: Path) -> bool:
    """Return True if a folder contains any part of a checkpoint, complete or not."""
    return any((folder / name).is_file() for name in (METADATA, STATE, MANIFEST))


def latest(root: Path) -> Path | None:
    """Return the checkpoint that `latest` names; if that is not complete, the complete one of the highest step."""
    found, named = _complete_steps(root), _named(root)
    if named in found:
        return found[named]
    return found[max(found, key=_step)] if found else None


def find(path: Path) -> Path:
    """Return the checkpoint at a path: the newest complete one of a run's folder, its `checkpoints` or their `latest`,
    otherwise the path itself."""
    if path.name == LATEST and path.is_file():
        path = path.parent
    for root in (path, path / "checkpoints"):
        found = latest(root)
        if found is not None:
            return found
    return path


def candidates(root: Path) -> tuple[Path, ...]:
    """Return the folder of every step under `root`, whole or damaged, in the order in which to try them: the one that
    `latest` names, then the others from the highest step down. Call `recover` first."""
    if not root.is_dir():
        return ()
    named = _named(root)
    found = [path for path in root.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
    return tuple(sorted(found, key=lambda path: (path.name == named, _step(path.name)), reverse=True))


def recover(root: Path) -> None:
    """Restore the name of a checkpoint that an interrupted save left between two renames. Call it on one rank."""
    if root.is_dir():
        for path in sorted(root.glob(f"{_REPLACED}*")):
            final = root / path.name.removeprefix(_REPLACED)
            if _STEP.fullmatch(final.name) and not final.exists():
                path.rename(final)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it no longer counts as one and its step can be saved again."""
    names = chain([f"{_DAMAGED}{folder.name}"], (f"{_DAMAGED}{folder.name}-{number}" for number in count(2)))
    target = next(path for path in map(folder.with_name, names) if not path.exists())
    folder.rename(target)
    return target


def prune(root: Path, keep: int, *, hours: float | None = None, best: int = 0) -> None:
    """Delete checkpoints, except the `keep` newest and the one that `latest` names. Call it on one rank.

    hours: also keep one checkpoint for every so many hours, by the time in its manifest, from the oldest on.
    best: also keep this many with the lowest validation loss in the manifest. Those that were saved only for it
    (`extra` in the manifest) do not count among the newest.
    """
    if keep < 1:
        raise CheckpointError(f"checkpoints to keep: {keep}; at least 1")
    newest = latest(root)
    others = [path for path in _complete_steps(root).values() if path != newest]
    found = sorted(others, key=lambda path: _step(path.name))
    known = {path: _identity(path) for path in [*found, *([newest] if newest else [])]} if hours or best else {}
    regular = [path for path in found if not known.get(path, {}).get("extra")]
    is_counted = newest is None or not known.get(newest, {}).get("extra")
    kept = set(regular[max(0, len(regular) - (keep - is_counted)) :])
    kept |= _spaced(known, hours) | _lowest(known, best)
    for folder in found:
        if folder not in kept:
            _remove(folder)


def _identity(folder: Path) -> Mapping[str, Any]:
    """Return the checkpoint's entry in its manifest, or nothing if there is no readable manifest."""
    try:
        return Manifest.read(folder).identity
    except DamageError:
        return {}


def _spaced(known: Mapping[Path, Mapping[str, Any]], hours: float | None) -> set[Path]:
    """Return one checkpoint for every so many hours."""
    kept: set[Path] = set()
    if hours is None:
        return kept
    times = ((found.get("time"), path) for path, found in known.items())
    last = -math.inf
    for time, path in sorted((time, path) for time, path in times if isinstance(time, int | float)):
        if time - last >= hours * 3600:
            kept.add(path)
            last = time
    return kept


def _lowest(known: Mapping[Path, Mapping[str, Any]], count: int) -> set[Path]:
    """Return the checkpoints with the lowest validation loss; of equal ones, the earlier."""
    losses = ((found.get("validation_loss"), path) for path, found in known.items())
    judged = [(loss, _step(path.name), path) for loss, path in losses if isinstance(loss, int | float)]
    return {path for _, _, path in sorted(judged)[:count]}


def encode_state(state: Mapping[str, Any]) -> bytes:
    """Return `state` as the content of state.json. Raises CheckpointError if JSON cannot express it (also NaN)."""
    try:
        text = json.dumps({"version": FORMAT_VERSION, "state": dict(state)}, allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state of a checkpoint must be JSON without NaN or infinity: {error}") from error
    return text.encode()


def saving_folder(folder: Path) -> Path:
    """Return the temporary folder in which the checkpoint `folder` is written."""
    return folder.with_name(_SAVING + folder.name)


def prepare_folder(folder: Path) -> None:
    """Remove the files of interrupted saves beside `folder` and create its saving folder.

    Raises CheckpointError if something other than a checkpoint has that name, because a save would replace it.
    """
    if folder.exists() and not is_complete(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not a checkpoint; remove it or save elsewhere")
    parent = folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    for path in sorted(parent.iterdir()):
        for prefix in (_SAVING, _REPLACED, _REMOVING):
            name = path.name.removeprefix(prefix)
            if name != path.name and (name == folder.name or _STEP.fullmatch(name)):
                _clear(path, parent / name, prefix)
    saving_folder(folder).mkdir()


def publish(folder: Path, manifest: bytes, state: bytes) -> None:
    """Complete the saving folder with `manifest` and `state`, rename it, and point `latest` at it if it is that of a
    step.

    At every moment either the old or the new checkpoint of that name exists, complete.
    """
    saving = saving_folder(folder)
    _write(saving / MANIFEST, manifest)
    _write(saving / STATE, state)
    _sync(saving)
    replaced = folder.with_name(_REPLACED + folder.name)
    if folder.exists():
        folder.rename(replaced)
    saving.rename(folder)
    _sync(folder.parent)
    if _STEP.fullmatch(folder.name):
        _write(folder.parent / f".{LATEST}.new", f"{folder.name}\n".encode())
        (folder.parent / f".{LATEST}.new").replace(folder.parent / LATEST)
        _sync(folder.parent)
    if replaced.exists():
        with suppress(OSError):  # the new one is published; the next save tries again
            _remove(replaced)


def discard(folder: Path) -> None:
    """Remove the saving folder of a failed save, as far as possible."""
    shutil.rmtree(saving_folder(folder), ignore_errors=True)


def _clear(leftover: Path, final: Path, prefix: str) -> None:
    if prefix == _REPLACED and not final.exists():
        leftover.rename(final)
    else:
        _remove(leftover)


def _named(root: Path) -> str:
    """Return the content of `latest`, or nothing if it cannot be read."""
    try:
        return read_text(root / LATEST, limit=LONGEST_NAME).strip()
    except (OSError, ValueError):
        return ""


def _complete_steps(root: Path) -> dict[str, Path]:
    """Return complete checkpoints by name, including those between two renames."""
    if not root.is_dir():
        return {}
    found = {}
    for path in root.iterdir():
        name = path.name.removeprefix(_REPLACED)
        if _STEP.fullmatch(name) and is_complete(path) and (name == path.name or name not in found):
            found[name] = path
    return found


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])


def _remove(folder: Path) -> None:
    """Delete a folder. From the first moment on, it no longer counts as a checkpoint."""
    doomed = folder
    if not folder.name.startswith((_SAVING, _REMOVING)):
        doomed = folder.with_name(_REMOVING + folder.name.removeprefix(_REPLACED))
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
    shutil.rmtree(doomed)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the folder's entries durable: a rename is stored in the folder, not in the file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
