"""What determines the token arrays of a corpus, and the name under which they are cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Required, TypedDict

from atoll.base.errors import DataError
from atoll.training.data.bad_records import BadRecordPolicy, BadRecords
from atoll.training.data.conversations import RULES, ChatTemplate
from atoll.training.data.corpus import Source, documents, find_source, fingerprint
from atoll.training.data.rows import How, Packing, TooLong
from atoll.training.data.split import check_fraction
from atoll.training.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, bpe_size, sample, train_bpe

_FORMAT = 2
"""Version of the arrays, increased whenever the same source and settings would give other arrays."""

BYTES = "bytes"
OPTIONAL_SETTINGS = ("held", "keeps_documents", "chat", "records", "bad_records")
"""Keys of about.json that are a part of the cache's key, where they apply."""

Report = Callable[[str], None]
"""Callback for the progress of a preparation, one line at a time."""


class RecipeSettings(TypedDict, total=False):
    """Settings of `prepare`.

    tokenizer: "bytes", "bpe-N" or the path of a tokenizer.json.
    validation: fraction of the tokens to hold out, or a separate source.
    text_field: see `atoll.training.data.corpus`.
    chat: the chat template, if the source has conversations (`atoll.training.data.conversations`).  ignored: their keys
    that are not used.
    bad_records: "stop" at the first broken record, or "skip" and count them, up to a tenth of a source.
    sequence, how, too_long: see `Packing`; if samples are whole documents, the arrays include their lengths.
    """

    tokenizer: Required[str]
    sequence: Required[int]
    validation: float | str
    text_field: str
    how: How
    too_long: TooLong
    chat: ChatTemplate | None
    ignored: Collection[str]
    bad_records: BadRecordPolicy


@dataclass(frozen=True, slots=True)
class CorpusRecipe:
    """Everything that determines the arrays; contents are given as hashes.

    held: source of the held-out tokens; None: a share of the source, `validation`.
    ignored: keys of conversations that are not used.
    """

    source: Source
    content: str
    tokenizer: str
    tokenizer_file: Path | None
    tokenizer_content: str
    validation: float
    held: Source | None
    held_content: str
    packing: Packing
    chat: ChatTemplate | None
    ignored: frozenset[str]
    bad_records: BadRecordPolicy

    @staticmethod
    def find(
        source: str | Source,
        *,
        tokenizer: str,
        sequence: int,
        validation: float | str = 0.05,
        text_field: str = "text",
        how: How = "blocks",
        too_long: TooLong = "split",
        chat: ChatTemplate | None = None,
        ignored: Collection[str] = (),
        bad_records: BadRecordPolicy = "stop",
    ) -> CorpusRecipe:
        packing = Packing(sequence=sequence, how=how, too_long=too_long)
        file, tokenizer_content = None, tokenizer
        if tokenizer != BYTES and bpe_size(tokenizer) is None:
            file = _tokenizer_file(tokenizer)
            tokenizer_content = FileTokenizer.read(file).identity
        options: dict[str, Any] = {"text_field": text_field, "has_records": chat is not None}
        found = find_source(source, **options) if isinstance(source, str) else source
        held = None
        if isinstance(validation, str):
            held, validation = find_source(validation, **options, key="data.validation"), 0.0
        check_fraction(validation)
        return CorpusRecipe(
            found,
            fingerprint(found),
            tokenizer,
            file,
            tokenizer_content,
            validation,
            held,
            "" if held is None else fingerprint(held),
            packing,
            chat,
            frozenset(ignored),
            bad_records,
        )

    def about(self) -> dict[str, Any]:
        about: dict[str, Any] = {
            "format": _FORMAT,
            "source": self.content,
            "kind": self.source.kind.value,
            "text_field": self.source.text_field,
            "tokenizer": self.tokenizer_content,
            "validation": self.validation,
        }
        if self.held is not None:
            about["held"] = [self.held.kind.value, self.held_content]
        if self.packing.keeps_documents:
            about["keeps_documents"] = True
        if self.chat is not None:
            about["chat"] = self.chat.fingerprint
            about["records"] = [RULES, sorted(self.ignored)]
        if self.bad_records != "stop":
            about["bad_records"] = self.bad_records
        return about

    def key(self) -> str:
        return key_of(self.about())

    def make_tokenizer(self, say: Report) -> Tokenizer:
        if self.tokenizer_file is not None:
            return FileTokenizer.read(self.tokenizer_file)
        size = bpe_size(self.tokenizer)
        if size is None:
            return ByteTokenizer()
        say(f"training the tokenizer {self.tokenizer} on {self.source.name}")
        return train_bpe(sample(documents(self.source, BadRecords(self.bad_records)), self.source.nbytes), size)

    @property
    def nbytes(self) -> int:
        return self.source.nbytes + (0 if self.held is None else self.held.nbytes)


def key_of(about: Mapping[str, Any]) -> str:
    """Return the name of a cache's folder, computed from a part of its about.json."""
    chosen = {name: about[name] for name in ("format", "source", "kind", "text_field", "tokenizer", "validation")}
    chosen |= {name: about[name] for name in OPTIONAL_SETTINGS if name in about}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:32]


def _tokenizer_file(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise DataError(
            f'data.tokenizer = {name!r}: neither "bytes" nor "bpe-N" (as in "bpe-4096"), and there is no file '
            f"{path.absolute()}"
        )
    return path


def expected_ids(tokenizer: str, *, masked: bool = False) -> int:
    """Return the number of ids of a tokenizer by its name, without a corpus; for "bpe-N" the maximum.

    masked: count a mask token if the tokenizer has none.

    Raises DataError for an unusable tokenizer.
    """
    found: Tokenizer = ByteTokenizer()
    size = bpe_size(tokenizer)
    if tokenizer != BYTES and size is None:
        found = FileTokenizer.read(_tokenizer_file(tokenizer))
    return (found.size if size is None else size) + (masked and found.mask is None)
