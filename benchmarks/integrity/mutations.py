"""Damage to checkpoints and token caches, and what becomes of whoever reads them.

A mutation changes one thing of a folder: bytes are flipped, zeroed, cut off or added, a file is deleted, exchanged with
another or taken from another checkpoint, a value of a JSON file is edited. Reading then is one of

    right      what was written came back
    refused    an error of Atoll's, which names the folder
    wrong      something else came back, and no error
    crashed    any other exception
"""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from atoll.base.errors import AtollError, DataError, UnverifiedWarning
from atoll.runtime.checkpoint import Archive, Piece, load_pieces, save, step_folder
from atoll.training.config import Config, from_dict
from atoll.training.data import prepare
from atoll.training.run.resumed import resumed_state

STEPS = (100, 200)
SHAPES = {"embed.weight": (96, 32), "layers.0.weight": (64, 48), "layers.0.bias": (48,), "head.weight": (32, 96)}
EDITS = (-1, 0, 1, 10**18, 1e-9, True, None, "", [], {}, "200")


class Outcome(NamedTuple):
    """What became of one mutation: `kind` of damage, `where`, `end` of the reading and its words."""

    kind: str
    where: str
    end: str
    words: str


class Checkpoints:
    """Two checkpoints of one run, of which the newer is damaged and read."""

    def __init__(self, root: Path, *, with_digests: bool = True) -> None:
        self.config = from_dict({"run": {"folder": str(root)}, "train": {"steps": 1000, "global_batch": 16}})
        self.whole = root / "whole"
        for step in STEPS:
            folder = step_folder(self.whole, step)
            save(folder, _pieces(_values(step)), _state(self.config, step), identity={"step": step, "run": "a" * 32})
            if not with_digests:
                without_digests(folder)
        self.folder, self.other = (step_folder(root / "damaged", step) for step in reversed(STEPS))
        self.expected = Archive(step_folder(self.whole, STEPS[1])).state

    def restore(self) -> None:
        """Both as they were written."""
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        shutil.copytree(self.whole, self.folder.parent)

    def is_right(self) -> bool:
        """Read the newer one as a run does. Raises what that raises."""
        found = {name: torch.full_like(value, -7.0) for name, value in _values(0).items()}
        resumed_state(self.config, Archive(self.folder), None, run="a" * 32)
        state = load_pieces(self.folder, _pieces(found))
        values = _values(STEPS[1])
        return state == self.expected and all(torch.equal(found[name], values[name]) for name in values)


class Cache:
    """A token cache that is damaged and read whole. lines: of its text."""

    def __init__(self, root: Path, *, with_digests: bool = True, lines: int = 4000) -> None:
        self.root, self.with_digests = root, with_digests
        root.mkdir(parents=True)
        for name, words in (("text", "some words and more words, "), ("another", "quite other words all along, ")):
            (root / f"{name}.txt").write_text("".join(f"line {at} of {words * (at % 7)}\n" for at in range(lines)))
        self.train, self.validation, self.fingerprint = self._read("text")
        (self.folder,) = (path for path in (root / "cache").iterdir() if path.is_dir())
        self._read("another")
        (self.other,) = (path for path in (root / "cache").iterdir() if path.is_dir() and path != self.folder)
        self.whole = root / "whole"
        shutil.copytree(root / "cache", self.whole)

    def restore(self) -> None:
        """As it was made."""
        shutil.rmtree(self.folder.parent)
        shutil.copytree(self.whole, self.folder.parent)

    def is_right(self) -> bool:
        """Read all of its samples. Raises what that raises, or what was said of a cache that was made anew."""
        lines: list[str] = []
        train, validation, fingerprint = self._read("text", lines.append)
        is_right = (
            np.array_equal(train, self.train)
            and np.array_equal(validation, self.validation)
            and fingerprint == self.fingerprint
        )
        found = [line for line in lines if "was damaged" in line]
        if is_right and found:
            raise DataError(found[0])
        return is_right

    def _read(self, name: str, report: Callable[[str], None] | None = None) -> tuple[Any, Any, str]:
        source, cache = str(self.root / f"{name}.txt"), self.root / "cache"
        corpus = prepare(source, tokenizer="bpe-300", cache=cache, sequence=16, validation=0.1, report=report)
        return np.asarray(corpus.train), np.asarray(corpus.validation), corpus.fingerprint


Subject = Checkpoints | Cache


def damage(subject: Subject, count: int, seed: int) -> list[Outcome]:
    """What became of `count` mutations, each of the whole folder."""
    chance = random.Random(seed)
    return [outcome(subject, chance) for _ in range(count)]


def outcome(subject: Subject, chance: random.Random) -> Outcome:
    """One mutation and its reading."""
    subject.restore()
    kind = chance.choice(list(MUTATIONS))
    where = MUTATIONS[kind](subject.folder, subject.other, chance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnverifiedWarning)
        try:
            end, words = ("right", "") if subject.is_right() else ("wrong", "")
        except AtollError as error:
            end, words = "refused", str(error)
        except Exception as error:
            end, words = "crashed", f"{type(error).__name__}: {error}"
    return Outcome(kind, where, end, words)


def without_digests(folder: Path) -> None:
    """Make a checkpoint one from before there were digests."""
    (folder / "manifest.json").unlink()
    document = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**document, "version": 1}))


# ---- the mutations: each returns where it was


def _flip(folder: Path, other: Path, chance: random.Random) -> str:
    path, content = _any_file(folder, chance)
    for _ in range(chance.choice((1, 1, 1, 8))):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return _write(path, content)


def _zero(folder: Path, other: Path, chance: random.Random) -> str:
    """A sector that was lost."""
    path, content = _any_file(folder, chance)
    at = chance.randrange(len(content))
    content[at : at + 512] = bytes(len(content[at : at + 512]))
    return _write(path, content)


def _cut(folder: Path, other: Path, chance: random.Random) -> str:
    path, content = _any_file(folder, chance)
    return _write(path, content[: chance.randrange(len(content))])


def _add(folder: Path, other: Path, chance: random.Random) -> str:
    path, content = _any_file(folder, chance)
    at = chance.choice((len(content), chance.randrange(len(content))))
    return _write(path, content[:at] + chance.randbytes(chance.randint(1, 64)) + content[at:])


def _delete(folder: Path, other: Path, chance: random.Random) -> str:
    path, _ = _any_file(folder, chance)
    path.unlink()
    return path.name


def _exchange(folder: Path, other: Path, chance: random.Random) -> str:
    (one, first), (two, second) = _any_file(folder, chance), _any_file(folder, chance)
    _write(two, first)
    return f"{_write(one, second)} and {two.name}"


def _take(folder: Path, other: Path, chance: random.Random) -> str:
    """A file of another checkpoint or cache."""
    path, _ = _any_file(folder, chance)
    if not (other / path.name).is_file():
        return _delete(folder, other, chance)
    return _write(path, (other / path.name).read_bytes())


def _take_all(folder: Path, other: Path, chance: random.Random) -> str:
    """All files of another, or all but one."""
    spared = chance.choice(["", *sorted(path.name for path in folder.iterdir())])
    for path in list(other.iterdir()):
        if path.name != spared:
            shutil.copy(path, folder / path.name)
    return f"all but {spared}" if spared else "all"


def _edit(folder: Path, other: Path, chance: random.Random) -> str:
    """A value of a JSON file, which stays JSON."""
    path = chance.choice(sorted(path for path in folder.iterdir() if path.suffix == ".json"))
    document = json.loads(path.read_text(encoding="utf-8"))
    holder, key, way = document, "", [path.name]
    while isinstance(holder, (dict, list)) and holder:
        parent, key = holder, chance.choice(sorted(holder) if isinstance(holder, dict) else list(range(len(holder))))
        way.append(str(key))
        holder = parent[key]
        if chance.random() < 0.2:
            break
    parent[key] = chance.choice([value for value in EDITS if value is not holder])
    _write(path, json.dumps(document).encode())
    return ".".join(way)


Mutation = Callable[[Path, Path, random.Random], str]
MUTATIONS: Mapping[str, Mutation] = {
    "bits flipped": _flip,
    "512 bytes zeroed": _zero,
    "end cut off": _cut,
    "bytes added": _add,
    "file deleted": _delete,
    "files exchanged": _exchange,
    "file of another": _take,
    "files of another": _take_all,
    "JSON edited": _edit,
}


def _any_file(folder: Path, chance: random.Random) -> tuple[Path, bytearray]:
    """A file that has something; half of the time the largest."""
    found = sorted((path for path in folder.iterdir() if path.stat().st_size), key=lambda path: path.stat().st_size)
    path = found[-1] if chance.random() < 0.5 else chance.choice(found)
    return path, bytearray(path.read_bytes())


def _write(path: Path, content: bytes | bytearray) -> str:
    path.write_bytes(content)
    return path.name


# ---- what is written


def _values(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _pieces(values: Mapping[str, torch.Tensor]) -> list[Piece]:
    """Each tensor in two ranges, as two ranks would have it."""
    found = []
    for name, value in values.items():
        flat, middle = value.view(-1), value.numel() // 2
        for start, stop in ((0, middle), (middle, value.numel())):
            found.append(Piece(("model", name), tuple(value.shape), start, stop=stop, tensor=flat[start:stop]))
    return found


def _state(config: Config, step: int) -> dict[str, Any]:
    caller = {
        "position": 16 * step,
        "corpus": "c" * 64,
        "order": {"seed": 0, "sequence": 256},
        "schedule": {"last_epoch": step, "_step_count": step + 1, "_last_lr": [1e-3]},
        "config": config.dump(),
    }
    return {"step": step, "scaler": None, "groups": [{"lr": 1e-3}], "caller": caller}
