"""Encoding of documents and conversations into files of tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import DataError, RecordError
from atoll.training.data.bad_records import BadRecordPolicy, BadRecords, Skipped
from atoll.training.data.conversations import NOTHING_TO_LEARN, ChatTemplate, Rendered, conversations
from atoll.training.data.corpus import Source, documents
from atoll.training.data.split import TokenRange, ranges_of
from atoll.training.data.tokenizer import Tokenizer

_PIECE_CHARACTERS = 200_000
_GROUP_CHARACTERS = 4_000_000


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a source in a file, document after document.

    answers: file of one flag per token, for conversations.
    counts: number of documents of each record: several for a conversation whose answers have renderings of their own.
    skipped: broken records that were skipped.
    """

    tokens: Path
    answers: Path | None
    dtype: np.dtype[Any]
    lengths: list[int]
    counts: list[int]
    skipped: Skipped | None

    @property
    def sizes(self) -> list[int]:
        """Number of tokens of each record."""
        ends = np.cumsum([0, *self.counts])
        return [sum(self.lengths[begin:end]) for begin, end in pairwise(ends.tolist())]

    def ranges(self, chosen: NDArray[np.bool_]) -> Sequence[TokenRange]:
        """Return the ranges of tokens of some documents."""
        return ranges_of(np.asarray(self.lengths, dtype=np.int64), chosen)

    def chosen(self, chosen: NDArray[np.bool_]) -> NDArray[np.uint32]:
        """Return the lengths of some documents."""
        return np.asarray(self.lengths, dtype=np.uint32)[chosen]

    def write(
        self, folder: Path, part: str, ranges: Sequence[TokenRange], lengths: NDArray[np.uint32] | None = None
    ) -> None:
        """Write the arrays of a split. lengths: of its documents, if they are kept."""
        _write(folder / f"{part}.npy", _mapped(self.tokens, self.dtype), ranges)
        if lengths is not None:
            np.save(folder / f"{part}-lengths.npy", lengths)
        if self.answers is not None:
            _write(folder / f"{part}-answers.npy", _mapped(self.answers, np.dtype(np.uint8)), ranges)

    def remove(self) -> None:
        """Delete the files."""
        for path in (self.tokens, self.answers):
            if path is not None:
                path.unlink()


def encode_source(
    folder: Path,
    source: Source,
    tokenizer: Tokenizer,
    *,
    chat: ChatTemplate | None,
    ignored: Collection[str] = (),
    bad_records: BadRecordPolicy = "stop",
) -> Encoded:
    """Encode a source into files of `folder`. Raises DataError if it has no text.

    chat: the template, if the source has conversations.  ignored: their keys that are not used.
    """
    bad = BadRecords(bad_records)
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    tokens, answers = folder / "tokens.bin", None
    if chat is None:
        lengths = _encode_texts(documents(source, bad), tokenizer, tokens, dtype)
        counts = [1] * len(lengths)
    else:
        answers = folder / "answers.bin"
        with tokens.open("wb") as ids, answers.open("wb") as flags:
            lengths, counts = [], []
            for samples in _rendered(source, chat, tokenizer, ignored, bad):
                for each in samples:
                    each.ids.astype(dtype).tofile(ids)
                    each.is_answer.astype(np.uint8).tofile(flags)
                lengths += [len(each.ids) for each in samples]
                counts.append(len(samples))
    skipped = bad.check(len(counts), f"{source.key} = {source.name!r}")
    if sum(lengths) < 2 and not source.is_shard:
        raise DataError(f"{source.key} = {source.name!r}: no text in {source.root.absolute()}; take another")
    return Encoded(tokens, answers, dtype, lengths, counts, skipped)


def _rendered(
    source: Source, chat: ChatTemplate, tokenizer: Tokenizer, ignored: Collection[str], bad: BadRecords
) -> Iterator[list[Rendered]]:
    """Yield the samples of each conversation of a source."""
    found = conversations(source, reads=lambda has_tools: chat.reads(has_tools=has_tools), ignored=ignored, bad=bad)
    for where, conversation in found:
        with bad.skipping():
            try:
                samples = chat.render(conversation)
            except ValueError as error:
                raise RecordError(where, "refused by the chat template", str(error)) from error
            if not all(each.is_answer[1:].any() for each in samples):
                reason = "the chat template writes no token of an answer, so there is nothing to learn"
                raise RecordError(where, NOTHING_TO_LEARN, reason)
            if (largest := max(each.ids.max() for each in samples)) >= tokenizer.size:
                raise DataError(f"{where}: the chat template gives id {largest}; the tokenizer has {tokenizer.size}")
            yield samples


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype=dtype)


def _encode_texts(texts: Iterable[str], tokenizer: Tokenizer, path: Path, dtype: np.dtype[Any]) -> list[int]:
    """Write the tokens of all documents, concatenated. Return the number of tokens of each, with its special tokens."""
    opening, closing = (np.array(ids, dtype=dtype) for ids in (tokenizer.opening, tokenizer.closing))
    lengths: list[int] = []
    length = 0
    with path.open("wb") as stream:
        for group in _groups(_pieces(texts)):
            encoded = tokenizer.encode_batch([text for text, _ in group])
            for ids, (_, is_last) in zip(encoded, group, strict=True):
                if length == 0:
                    opening.tofile(stream)
                    length = len(opening)
                ids.astype(dtype).tofile(stream)
                length += len(ids)
                if is_last:
                    closing.tofile(stream)
                    lengths.append(length + len(closing))
                    length = 0
    return lengths


def _pieces(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield pieces of long documents, cut at a line break if there is one, to share them among cores: (piece, is
    last)."""
    for text in texts:
        start = 0
        while len(text) - start > _PIECE_CHARACTERS:
            newline = text.rfind("\n", start, start + _PIECE_CHARACTERS)
            stop = newline + 1 if newline >= start else start + _PIECE_CHARACTERS
            yield text[start:stop], False
            start = stop
        yield text[start:], True


def _groups(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Yield pieces in groups of bounded size, so that only one group is in memory."""
    group: list[tuple[str, bool]] = []
    characters = 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece[0])
        if characters >= _GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _write(path: Path, tokens: NDArray[Any], ranges: Sequence[TokenRange]) -> None:
    total = sum(stop - start for start, stop in ranges)
    if total == 0:
        np.save(path, np.empty(0, dtype=tokens.dtype))
        return
    target = np.lib.format.open_memmap(path, mode="w+", dtype=tokens.dtype, shape=(total,))
    position = 0
    for start, stop in ranges:
        target[position : position + stop - start] = tokens[start:stop]
        position += stop - start
    target.flush()
