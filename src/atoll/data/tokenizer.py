"""Tokenizers: conversion between text and token ids.

    "bytes"          the 256 bytes of UTF-8 and nothing else: no end of text
    "bpe-4096"       byte-level byte-pair encoding (arXiv:1508.07909) of at most 4096 ids, trained on the corpus
    a .json file     any tokenizer of the `tokenizers` library

With the first two, decode(encode(text)) == text for every text that UTF-8 can hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from atoll.documents import LARGEST_JSON, read_text
from atoll.errors import DataError

END_OF_TEXT = "<|endoftext|>"

END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""Names of the end-of-text token in a tokenizer.json; the first known one is used."""

MASK_NAMES = ("[MASK]", "<mask>", "<|mask|>")
"""Names of the mask token in a tokenizer.json; the first known one is used."""

SMALLEST_BPE = 257
"""Number of ids of all bytes and the end of text."""

TRAINING_CHARACTERS = 40_000_000
"""Maximum number of characters to train a tokenizer on. More would cost minutes and gigabytes for the same merges."""

LONGEST_WORD = 1000
"""Number of characters after which a word is cut for training, whose time is quadratic in a word's length."""

_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD}}}|\s{{{LONGEST_WORD}}}")

Ids = NDArray[np.integer[Any]] | Sequence[int]


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    @property
    def size(self) -> int:
        """Number of ids; every id is below it. May be less than requested on a small corpus."""
        ...

    @property
    def end_of_text(self) -> int | None:
        """Id that ends a document, or None."""
        ...

    @property
    def mask(self) -> int | None:
        """Id of the mask token, or None."""
        ...

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Return the token ids of a text, without special tokens."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the token ids of several texts, computed on all cores."""
        ...

    def decode(self, ids: Ids) -> str:
        """Return the text of token ids. Invalid UTF-8 becomes replacement characters."""
        ...


def _utf8(text: str) -> bytes:
    # A lone surrogate has no encoding; both tokenizers write "?" for it.
    return text.encode("utf-8", errors="replace")


class ByteTokenizer:
    """Tokenizer whose ids 0..255 are the bytes of UTF-8."""

    size = 256
    end_of_text = None
    mask = None

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Return the bytes of a text."""
        return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the bytes of several texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Ids) -> str:
        """Return the text of bytes."""
        return bytes(int(each) for each in ids).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self._inner.no_truncation()
        self._inner.no_padding()
        # "<|endoftext|>" in a text (as in this file) means its characters, not the token.
        self._inner.encode_special_tokens = True

    @staticmethod
    def read(path: Path) -> FileTokenizer:
        """Read a tokenizer.json."""
        try:
            return FileTokenizer(tokenizers.Tokenizer.from_str(read_text(path, limit=LARGEST_JSON)))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # Rust panics do not derive from Exception
            raise DataError(f"{path}: cannot be read as a tokenizer.json ({error})") from error

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        return str(self._inner.to_str())

    @property
    def size(self) -> int:
        """Number of ids, one more than the largest."""
        return 1 + max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def end_of_text(self) -> int | None:
        """Id of the first of END_OF_TEXT_NAMES that the tokenizer has."""
        known = (self._inner.token_to_id(name) for name in END_OF_TEXT_NAMES)
        return next((token for token in known if token is not None), None)

    @property
    def mask(self) -> int | None:
        """Id of the first of MASK_NAMES that the tokenizer has."""
        known = (self._inner.token_to_id(name) for name in MASK_NAMES)
        return next((token for token in known if token is not None), None)

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Return the token ids of a text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the token ids of several texts."""
        plain = [_utf8(text).decode("utf-8") for text in texts]
        encodings = self._inner.encode_batch_fast(plain, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Ids) -> str:
        """Return the text of token ids, including special tokens."""
        return str(self._inner.decode([int(each) for each in ids], skip_special_tokens=False))


def train_bpe(texts: Iterable[str], size: int) -> FileTokenizer:
    """Train a byte-level BPE of at most `size` ids (SMALLEST_BPE or more). Equal texts give equal tokenizers."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (piece for text in texts for piece in _without_long_words(_utf8(text).decode("utf-8")))
    inner.train_from_iterator(pieces, trainer=trainer)
    return FileTokenizer(inner)


def _without_long_words(text: str) -> Iterator[str]:
    """Yield the text in pieces, cut inside runs without a space (base64, minified code) and nowhere else."""
    start = 0
    for match in _LONG_WORD.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


def sample(texts: Iterable[str], total: int, *, limit: int = TRAINING_CHARACTERS) -> Iterator[str]:
    """Yield at most about `limit` of `total` characters, spread evenly over the texts; all if there are fewer.

    From each text the same share is taken, from its start.
    """
    share = min(1.0, limit / max(1, total))
    for text in texts:
        yield text if share == 1.0 else text[: round(len(text) * share)]


def head(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Yield the first `limit` characters."""
    for text in texts:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return


def bpe_size(name: str) -> int | None:
    """Return 4096 for "bpe-4096", None for any other name. Raises DataError for an invalid size."""
    match = re.fullmatch(r"bpe-(\d+)", name)
    if match is None:
        return None
    size = int(match.group(1))
    if size < SMALLEST_BPE:
        raise DataError(
            f"data.tokenizer = {name!r}: needs at least {SMALLEST_BPE} ids, for 256 bytes and the end of text"
        )
    return size
