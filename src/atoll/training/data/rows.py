"""Samples: blocks of tokens across document boundaries, or rows of whole documents.

    blocks      all tokens of a split joined and cut every S tokens (`atoll.training.data.order`)
    documents   rows of S tokens, each filled with whole documents; positions restart at 0 in each
    pad         rows of S tokens with one document each

A document of n tokens fills n - 1 places of a row: each token but the last is an input, and each but the first a
label. Rows are padded with tokens of id 0 whose labels are ignored; in a packed row the padding is a document of its
own. The documents of a row depend on their lengths alone, never on ranks or batches. Best-fit packing reads all lengths
at each start.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import DataError
from atoll.base.labels import IGNORED_LABEL
from atoll.training.data.blocks import CheckedTokens
from atoll.training.data.order import (
    TokenBatch,
    Tokens,
    batch,
    check_sequence,
    sample_count,
    validation_batches,
)

How = Literal["blocks", "documents", "pad"]
TooLong = Literal["split", "drop", "truncate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Rules that turn documents into samples of `sequence` tokens.

    too_long: rule for a document with more than sequence + 1 tokens. "split" continues it in another row as a document
    of its own, "drop" removes it and "truncate" removes its end.
    """

    sequence: int
    how: How = "blocks"
    too_long: TooLong = "split"

    @property
    def keeps_documents(self) -> bool:
        """True if a sample consists of whole documents."""
        return self.how != "blocks"


@dataclass(frozen=True, slots=True)
class SplitTokens:
    """Tokens of a split. lengths: number of tokens of each document, if known.

    answers: 1 if a token is part of an answer, and its label counts; None if all labels count.
    """

    tokens: CheckedTokens
    lengths: CheckedTokens | None = None
    answers: CheckedTokens | None = None


class Rows(Protocol):
    """Samples of a split."""

    @property
    def notes(self) -> Sequence[str]:
        """Notes on split, dropped and truncated documents."""
        ...

    def __len__(self) -> int: ...

    def take(self, indices: NDArray[np.int64]) -> TokenBatch:
        """Return the samples with these indices."""
        ...

    def work(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the attention work of each of these samples: the squares of its documents' lengths, added up."""
        ...

    @property
    def in_order_count(self) -> int:
        """Number of samples of `in_order`."""
        ...

    def in_order(self, size: int, *, limit: int) -> Iterator[TokenBatch]:
        """Yield at most `limit` batches of `size` samples in order; the last is padded with ignored labels."""
        ...


def rows_of(part: SplitTokens, packing: Packing) -> Rows:
    """Return the samples of a split."""
    return _Documents(part, packing) if packing.keeps_documents else _Blocks(part.tokens, packing.sequence)


Ends = NDArray[np.int64]
"""[documents, 2]: the first token of each and one past the last."""


class _Blocks:
    notes: Sequence[str] = ()

    def __init__(self, tokens: Tokens, sequence: int) -> None:
        self._tokens, self._sequence = tokens, sequence

    def __len__(self) -> int:
        return sample_count(self._tokens, self._sequence)

    def take(self, indices: NDArray[np.int64]) -> TokenBatch:
        return batch(self._tokens, indices, self._sequence)

    def work(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.full(len(indices), float(self._sequence) ** 2)

    @property
    def in_order_count(self) -> int:
        return -(-max(0, len(self._tokens) - 1) // self._sequence)

    def in_order(self, size: int, *, limit: int) -> Iterator[TokenBatch]:
        return validation_batches(self._tokens, self._sequence, size=size, limit=limit)


class _Documents:
    def __init__(self, part: SplitTokens, packing: Packing) -> None:
        check_sequence(packing.sequence)
        if part.lengths is None:
            raise DataError("this token cache does not record where documents end")
        self._part, self._packing = part, packing
        lengths = np.asarray(part.lengths[:], dtype=np.int64)
        if (total := int(lengths.sum())) != len(part.tokens):
            raise DataError(f"this token cache has {len(part.tokens)} tokens, and documents of {total}")
        stops = np.cumsum(lengths)
        self.notes: Sequence[str] = ()
        self._documents = self._fit(np.stack([stops - lengths, stops], axis=1))
        sizes = self._documents[:, 1] - self._documents[:, 0] - 1
        self._order, self._ends = np.arange(len(sizes)), np.arange(len(sizes) + 1)
        if packing.how == "documents":
            rows = pack(sizes, packing.sequence)
            self._order = np.array([document for row in rows for document in row], dtype=np.int64)
            self._ends = np.cumsum([0, *map(len, rows)])
        placed, firsts = sizes[self._order].astype(np.float64), self._ends[:-1]
        # What is left of a row is a document of its own.
        left = packing.sequence - np.add.reduceat(placed, firsts) if len(firsts) else placed
        self._work = np.add.reduceat(placed**2, firsts) + left**2 if len(firsts) else placed

    def __len__(self) -> int:
        return len(self._ends) - 1

    def take(self, indices: NDArray[np.int64]) -> TokenBatch:
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise DataError(f"rows {indices.min()}..{indices.max()} were asked for; there are {len(self)}")
        return self._batch([self._row(index) for index in indices.tolist()])

    def work(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = self._work[indices]
        return found

    @property
    def in_order_count(self) -> int:
        return len(self)

    def in_order(self, size: int, *, limit: int) -> Iterator[TokenBatch]:
        for first in range(0, min(len(self), limit * size), size):
            rows = [self._row(at) for at in range(first, min(first + size, len(self)))]
            yield self._batch([*rows, *[[]] * (size - len(rows))])

    def _row(self, at: int) -> list[int]:
        """Return the documents of a row."""
        documents: list[int] = self._order[self._ends[at] : self._ends[at + 1]].tolist()
        return documents

    def _batch(self, rows: Sequence[Sequence[int]]) -> TokenBatch:
        shape = len(rows), self._packing.sequence
        found = {"input_ids": np.zeros(shape, np.int64), "labels": np.full(shape, IGNORED_LABEL, np.int64)}
        if self._packing.how == "documents":
            found["position_ids"] = np.zeros(shape, np.int64)
        for row, documents in enumerate(rows):
            at = 0
            for document in documents:
                at = self._place(found, row, at, document)
            if "position_ids" in found:
                found["position_ids"][row, at:] = np.arange(shape[1] - at)
        return found

    def _place(self, batch: TokenBatch, row: int, at: int, document: int) -> int:
        """Write a document into a row from place `at` on. Return the place after it."""
        start, stop = self._documents[document].tolist()
        tokens = np.asarray(self._part.tokens[start:stop], dtype=np.int64)
        end = at + len(tokens) - 1
        batch["input_ids"][row, at:end] = tokens[:-1]
        labels = tokens[1:]
        if self._part.answers is not None:
            labels = np.where(self._part.answers[start + 1 : stop], labels, IGNORED_LABEL)
        batch["labels"][row, at:end] = labels
        if "position_ids" in batch:
            batch["position_ids"][row, at:end] = np.arange(end - at)
        return end

    # ---- documents that are too long

    def _fit(self, documents: Ends) -> Ends:
        """Return the documents that rows can hold. Documents of a single token predict nothing and are left out."""
        most, rule = self._packing.sequence + 1, self._packing.too_long
        lengths = documents[:, 1] - documents[:, 0]
        is_long = lengths > most
        if not is_long.any():
            return documents[lengths > 1]
        match rule:
            case "drop":
                found, words = documents[(lengths > 1) & ~is_long], "are left out"
            case "split":
                found, words = self._split(documents), "continue in another row"
            case "truncate":
                cut = documents.copy()
                cut[is_long, 1] = cut[is_long, 0] + most
                counts = lengths > 1
                counts[is_long] = [self._counts(*ends) for ends in cut[is_long].tolist()]
                lost = int((is_long & ~counts).sum())
                found, words = cut[counts], f"lose their end; {lost} of them with all their answers, and are left out"
        self.notes = (
            f"{int(is_long.sum())} of {len(documents)} documents have more than data.sequence + 1 = {most} tokens and "
            f'{words} (data.too_long = "{rule}")',
        )
        return found

    def _split(self, documents: Ends) -> Ends:
        """Cut documents so that each token but the first is a label once. Pieces without a label that counts are left
        out."""
        step = self._packing.sequence
        pieces = []
        for start, stop in documents.tolist():
            cut = [(at, min(at + step + 1, stop)) for at in range(start, stop - 1, step)]
            pieces += cut if len(cut) < 2 else [piece for piece in cut if self._counts(*piece)]
        return np.array(pieces, dtype=np.int64).reshape(-1, 2)

    def _counts(self, start: int, stop: int) -> bool:
        """Return True if a label of these tokens counts."""
        answers = self._part.answers
        return answers is None or bool(np.any(answers[start + 1 : stop]))


def pack(sizes: NDArray[np.integer[Any]], room: int) -> list[list[int]]:
    """Pack items of sizes from 1 to `room` into rows of `room`. Return the indices in each row.

    Best fit decreasing: the largest item first, each into the fullest row with room for it. Rows and their items are in
    the order of their first items.
    """
    rows: list[list[int]] = []
    spaces: list[int] = []  # free spaces of the rows, each once
    with_space: dict[int, list[int]] = {}
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        at = bisect_left(spaces, size)
        if at == len(spaces):
            row, space = len(rows), room
            rows.append([])
        else:
            space = spaces[at]
            row = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[at]
        rows[row].append(index)
        if left := space - size:
            if left not in with_space:
                insort(spaces, left)
            with_space.setdefault(left, []).append(row)
    return sorted(sorted(row) for row in rows)
