"""Tokenizers: conversion between text and token ids.

    "bytes"          the 256 bytes of UTF-8 and nothing else: no end of text
    "bpe-4096"       byte-level byte-pair encoding (arXiv:1508.07909) of at most 4096 ids, trained on the corpus
    a .json file     any tokenizer of the `tokenizers` library

[Note: special tokens] A document begins and ends with what the file's post-processor adds to a text, and otherwise ends
with the end of text. Which tokens have a role is what the files beside a tokenizer.json say, as `transformers` reads
them. They are read here, since `transformers` is an extra; a test compares both. Where they say nothing, the special
tokens of the file are searched for a known name.

With the first two, decode(encode(text)) == text for every text that UTF-8 can hold.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from atoll.base.documents import LARGEST_JSON, read_json, read_text
from atoll.base.errors import DataError

TOKENIZER = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"

END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""Names of the end-of-text token, for a tokenizer.json whose settings say nothing; the first special one is used."""

MASK_NAMES = ("[MASK]", "<mask>", "<|mask|>")
"""Names of the mask token, likewise."""

CONFIG, LEGACY, GENERATION = "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"
BESIDE = (CONFIG, LEGACY, GENERATION)
"""Files beside a tokenizer.json that say which tokens have a role."""

_ROLES = ("eos_token", "mask_token")
"""Roles of tokens that are used."""

PROBES = ("a", "0", ".", "the", "\u4e00")
"""Texts that show what a post-processor adds; the first one that has a token of its own is used."""

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

    @property
    def opening(self) -> Sequence[int]:
        """Ids that a document begins with, before those of its text."""
        ...

    @property
    def closing(self) -> Sequence[int]:
        """Ids that a document ends with, after those of its text."""
        ...

    @property
    def stops(self) -> Collection[int]:
        """Ids that end a generated text."""
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
    opening: Sequence[int] = ()
    closing: Sequence[int] = ()
    stops: Collection[int] = ()

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
    """A tokenizer of the `tokenizers` library.

    roles: contents of tokens by role, such as "eos_token"; None for a role that no token has. A role that is missing is
    not known.  stops: further ids that end a generated text.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, roles: Mapping[str, str | None] | None = None, stops: Sequence[int] = ()
    ) -> None:
        self._inner = inner
        self._roles, self._stops = dict(roles or {}), stops
        self._inner.no_truncation()
        self._inner.no_padding()
        # "<|endoftext|>" in a text (as in this file) means its characters, not the token.
        self._inner.encode_special_tokens = True

    @staticmethod
    def read(path: Path, *, beside: Collection[str] = BESIDE) -> FileTokenizer:
        """Read a tokenizer.json, and its settings in the files beside it. beside: which of `BESIDE` may be read."""
        try:
            inner = tokenizers.Tokenizer.from_str(read_text(path, limit=LARGEST_JSON))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # Rust panics do not derive from Exception
            raise DataError(f"{path}: cannot be read as a tokenizer.json ({error})") from error
        if path.name != TOKENIZER:
            return FileTokenizer(inner)
        settings = {name: _settings(path.parent / name) for name in BESIDE if name in beside}
        roles = _roles(settings.get(CONFIG, {}), settings.get(LEGACY, {}))
        end = roles.get("eos_token")
        if end is not None and inner.token_to_id(end) is None:
            raise DataError(f"{path.parent}: its eos_token is {end!r}, and {TOKENIZER} has no such token")
        return FileTokenizer(inner, roles, _ids(settings.get(GENERATION, {}).get("eos_token_id")))

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        return str(self._inner.to_str())

    def beside(self) -> dict[str, str]:
        """Return the contents of the files beside `to_json` from which `read` gives this tokenizer, by name."""
        found: dict[str, Any] = {CONFIG: self._roles} if self._roles else {}
        if self._stops:
            found[GENERATION] = {"eos_token_id": list(self._stops)}
        return {name: json.dumps(values, indent=2, ensure_ascii=False) + "\n" for name, values in found.items()}

    @property
    def identity(self) -> str:
        """Hash of everything that determines the ids of documents."""
        total = hashlib.sha256(self.to_json().encode())
        guessed = FileTokenizer(self._inner)
        found = self.opening, self.closing, self.mask
        if found != ((), _one(guessed.end_of_text), guessed.mask):  # otherwise the hash is that of older versions
            total.update(repr(found).encode())
        return total.hexdigest()

    @property
    def size(self) -> int:
        """Number of ids, one more than the largest."""
        return 1 + max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def end_of_text(self) -> int | None:
        """Id of the end of text."""
        if "eos_token" in self._roles:
            return self._id(self._roles["eos_token"])
        return next(iter(self._special_stops), self._named(END_OF_TEXT_NAMES))

    @property
    def mask(self) -> int | None:
        """Id of the mask token."""
        return self._id(self._roles["mask_token"]) if "mask_token" in self._roles else self._named(MASK_NAMES)

    @property
    def stops(self) -> Collection[int]:
        """Ids that end a generated text: the end of text, and those of the generation's settings."""
        return {*_one(self.end_of_text), *self._special_stops}

    @property
    def opening(self) -> tuple[int, ...]:
        """Ids that the post-processor puts before a text."""
        return self._frame[0]

    @property
    def closing(self) -> tuple[int, ...]:
        """Ids that the post-processor puts after a text; if there are none, the end of text."""
        return self._frame[1] or _one(self.end_of_text)

    @cached_property
    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids that the post-processor puts before and after a text."""
        for text in PROBES:
            encoding = self._inner.encode(text, add_special_tokens=True)
            own = [at for at, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
            if own:
                return tuple(encoding.ids[: own[0]]), tuple(encoding.ids[own[-1] + 1 :])
        return (), ()

    @cached_property
    def _special(self) -> dict[str, int]:
        """Ids of the special tokens, by content."""
        known = self._inner.get_added_tokens_decoder().items()
        return {token.content: number for number, token in known if token.special}

    @property
    def _special_stops(self) -> list[int]:
        # A model that was never trained writes the default ids of its family, whatever its tokenizer is.
        return [token for token in self._stops if token in self._special.values()]

    def _named(self, names: Sequence[str]) -> int | None:
        return next((self._special[name] for name in names if name in self._special), None)

    def _id(self, content: str | None) -> int | None:
        return None if content is None else self._inner.token_to_id(content)

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


def _one(token: int | None) -> tuple[int, ...]:
    return () if token is None else (token,)


def _settings(path: Path) -> dict[str, Any]:
    """Return the settings in a file, which may be missing."""
    if not path.is_file():
        return {}
    try:
        values = read_json(path, rounds=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    return values if isinstance(values, dict) else {}


def _roles(config: Mapping[str, Any], legacy: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the contents of tokens by role. As in `transformers`, the older file counts only for a config that does
    not describe its tokens."""
    given = config if "added_tokens_decoder" in config else {**config, **legacy}
    found: dict[str, str | None] = {}
    for role in _ROLES:
        value = given.get(role, "")
        content = value.get("content") if isinstance(value, dict) else value
        if content is None or (isinstance(content, str) and content):
            found[role] = content
    return found


def _ids(value: Any) -> tuple[int, ...]:
    """Return the ids of a setting that has one or a list of them."""
    given = value if isinstance(value, list) else [value]
    return tuple(each for each in given if isinstance(each, int) and not isinstance(each, bool))


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
