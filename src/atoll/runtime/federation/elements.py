"""Elements of anchors and contributions: their parts and names, and those that a rank shows."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from atoll.base.documents import parse_json
from atoll.plans.federation.records import (
    Contribution,
    Fields,
    RoundRecord,
    read_optional,
    read_record,
    read_tuple,
)
from atoll.runtime.federation.http import Showcase


class TensorPart(NamedTuple):
    """Elements `start` to `stop` - 1 of a flattened tensor.

    name: of a parameter, or of a state of it; of a box of it, as `weight[0:4, 2:4]`, where a tensor-parallel rank has
    no more.
    """

    name: str
    start: int
    stop: int

    @property
    def tensor(self) -> str:
        """The name without the box."""
        return self.name.partition("[")[0]


PartElements = Mapping[TensorPart, memoryview]


class Holdings(Protocol):
    """The anchors of one rank. Threads of the exchange hold its lock when they call `version`, `step`, `show` and
    `take`."""

    def parts(self, fragment: int) -> Sequence[TensorPart]:
        """Return the parts of a fragment that this rank holds."""

    def state_parts(self, fragment: int) -> Sequence[TensorPart]:
        """Return the parts of what `show` returns."""

    def contribution_bytes(self, part: TensorPart) -> int:
        """Return the bytes of a part of a contribution."""

    def state_bytes(self, part: TensorPart) -> int:
        """Return the bytes of a part of what `show` returns."""

    def version(self, fragment: int) -> int:
        """Return the round that last set a fragment, -1 for the initial values."""

    def check(self, fragment: int, elements: PartElements) -> None:
        """Raise ValueError if a contribution lacks elements of this rank's parts."""

    def step(self, fragment: int, version: int, averaged: Sequence[tuple[Contribution, PartElements]]) -> None:
        """Take the outer step of a fragment, with elements that overlap its parts."""

    def show(self, fragment: int) -> PartElements:
        """Return the elements of a fragment's anchors, and of all that is equal on all islands beside them."""

    def take(self, fragment: int, version: int, elements: PartElements) -> None:
        """Replace a fragment's anchors by those of another island, with all that `show` returns there. Without
        elements they stay as they are, under another version."""


class ElementName(NamedTuple):
    """SHA-256 of elements, by which they are read, their bytes, and the rank of the island that made them."""

    digest: str
    nbytes: int
    rank: int = 0


def names_of_elements(elements: PartElements, rank: int = 0) -> list[list[object]]:
    """Return the rows of a manifest that one rank gives."""
    return [[*part, hashlib.sha256(held).hexdigest(), held.nbytes, rank] for part, held in sorted(elements.items())]


def manifest_of(rows: Sequence[Sequence[object]]) -> bytes:
    """Return the manifest of rows of all ranks: the content by whose digest a contribution is named."""
    return json.dumps(rows).encode()


def read_manifest(content: bytes) -> dict[TensorPart, ElementName]:
    """Return the names of elements. Raises ValueError if it is none."""
    found = {}
    rows = parse_json(content)
    if not isinstance(rows, list):
        raise ValueError("a manifest that is no list")
    for row in rows:
        match row:
            case [str(name), int(start), int(stop), str(digest), int(nbytes), int(rank)] if 0 <= start < stop:
                if nbytes < 0 or rank < 0:
                    raise ValueError(f"a manifest with {row!r:.80}")
                found[TensorPart(name, start, stop)] = ElementName(digest, nbytes, rank)
            case _:
                raise ValueError(f"a manifest with {row!r:.80}")
    return found


class ShownAnchors(NamedTuple):
    """The anchors of a rank, as it shows them. at: the record that they are of, None for the initial values, and while
    they are of none.  fragments: of each the round that set it, and the names of its elements."""

    at: RoundRecord | None
    fragments: Sequence[tuple[int, Mapping[TensorPart, ElementName]]]


def read_anchors(content: object, fragments: int) -> ShownAnchors:
    """Return what `Shelf.anchors` shows. Raises ValueError for anything else."""
    fields = Fields(content, "anchors", ShownAnchors._fields)
    found = fields.read("fragments", read_tuple(_read_fragment))
    if len(found) != fragments:
        raise ValueError(f"anchors of another number of fragments than {fragments}")
    return ShownAnchors(fields.read("at", read_optional(read_record)), found)


def _read_fragment(row: object) -> tuple[int, Mapping[TensorPart, ElementName]]:
    match row:
        case [int(version), str(manifest)]:
            return version, read_manifest(manifest.encode())
        case _:
            raise ValueError(f"anchors with {row!r:.80}")


def check_covered(own: Sequence[TensorPart], others: Iterable[TensorPart]) -> None:
    """Raise ValueError unless parts of others have every element of a rank's own parts."""
    by_name: dict[str, list[TensorPart]] = {}
    for part in sorted(others):
        by_name.setdefault(part.name, []).append(part)
    boxes = {parts[0].tensor for parts in by_name.values()}
    for part in own:
        if part.name not in by_name and part.tensor in boxes:
            continue  # divided along other dims: what is missing is found when it is put together
        at = part.start
        for each in by_name.get(part.name, ()):
            if each.start <= at:
                at = max(at, each.stop)
        if at < part.stop:
            raise ValueError(f"it does not have elements {at} to {part.stop - 1} of {part.name}")


def check_sizes(names: Mapping[TensorPart, ElementName], size_of: Callable[[TensorPart], int]) -> None:
    """Raise ValueError for elements of another size than they should have."""
    for part, name in names.items():
        if name.nbytes != size_of(part):
            raise ValueError(f"{name.nbytes} bytes of {part.name}, expected {size_of(part)}")


def is_part_of(part: TensorPart, own: Sequence[TensorPart]) -> bool:
    """Return True if some of a part's elements are in `own`, or may be: boxes of a tensor are not compared."""
    return any(
        part.tensor == each.tensor and (part.name != each.name or (part.start < each.stop and each.start < part.stop))
        for each in own
    )


SNAPSHOTS = 2
"""Anchors of so many records can be read: a reader may be slower than rounds are, and another have come after it."""


class Shelf:
    """The contributions and anchors that a rank shows. Callers hold `lock`. at: returns the record of the anchors, or
    None while they belong to no record."""

    def __init__(
        self,
        showcase: Showcase,
        holdings: Holdings,
        *,
        fragments: int,
        lock: threading.Condition,
        at: Callable[[], RoundRecord | None],
    ) -> None:
        self._showcase, self._holdings, self._fragments, self._lock = showcase, holdings, fragments, lock
        self._at = at
        # Digest of a contribution -> its elements that this rank needs. Own ones are there from the beginning.
        self.held: dict[str, PartElements] = {}
        self._manifests: dict[str, bytes] = {}
        # Elements are shown once, however many contributions and fragments have the same.
        self._counts: Counter[str] = Counter()
        # The rounds that set the fragments of the last anchors that were read, and manifests of fragment and round.
        self._snapshots: list[tuple[int, ...]] = []
        self._named: dict[tuple[int, int], bytes] = {}

    def anchors(self) -> Any:
        """Show the anchors. Their elements can be read until later ones have been shown for `SNAPSHOTS` times."""
        with self._lock:
            versions = tuple(map(self._holdings.version, range(self._fragments)))
            if versions not in self._snapshots:
                self._snapshots = [*self._snapshots, versions][-SNAPSHOTS:]
                kept = {pair for each in self._snapshots for pair in enumerate(each)}
                for pair in kept - self._named.keys():
                    elements = self._holdings.show(pair[0])
                    self._named[pair] = manifest_of(names_of_elements(elements))
                    self._show(read_manifest(self._named[pair]), elements)
                for pair in self._named.keys() - kept:
                    self._hide(read_manifest(self._named.pop(pair)).values())
            at, rows = self._at(), [[each[1], self._named[each].decode()] for each in enumerate(versions)]
            return {"at": None if at is None else at.to_json(), "fragments": rows}

    def hold(self, digest: str, manifest: bytes, elements: PartElements) -> None:
        """Show a contribution, and what is here of its elements."""
        if digest not in self.held:
            self.held[digest], self._manifests[digest] = elements, manifest
            self._showcase.elements[digest] = memoryview(manifest)
            self._show(read_manifest(manifest), elements)

    def drop(self, digest: str) -> None:
        """Show a contribution no more."""
        names, elements = read_manifest(self._manifests.pop(digest)), self.held.pop(digest)
        self._hide(names[part] for part in elements)
        self._showcase.elements.pop(digest, None)

    def _show(self, names: Mapping[TensorPart, ElementName], elements: PartElements) -> None:
        for part, held in elements.items():
            self._counts[names[part].digest] += 1
            self._showcase.elements[names[part].digest] = held

    def _hide(self, names: Iterable[ElementName]) -> None:
        for name in names:
            self._counts[name.digest] -= 1
            if not self._counts[name.digest]:
                del self._counts[name.digest]
                del self._showcase.elements[name.digest]
