"""A corpus as two token arrays, made once and cached.

    <cache>/<key>/          key = hash of (content of the source, tokenizer, split, version of this format)
        tokenizer.json      as the `tokenizers` library writes it; not there for "bytes"
        train.npy           uint16, or uint32 for more than 65536 ids
        validation.npy
        about.json          where it came from; its fingerprint
        manifest.json       digests of the blocks of the others (`atoll.data.blocks`)
        damaged             what a run found to differ from them; the next one makes the folder anew
    <cache>/<key>.lock      held by the one process that makes it

The folder is made under another name and renamed when it is whole: who finds it can use it, and a killed preparation
leaves nothing that looks finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from atoll.data.blocks import MANIFEST, MARK, Blocks, CheckedTokens, DamagedCorpusError
from atoll.data.corpus import Source, documents, find_source, fingerprint
from atoll.data.order import Tokens, sample_count
from atoll.data.split import Range, split
from atoll.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, bpe_size, sample, train_bpe
from atoll.documents import parse_json, read_json
from atoll.errors import DataError

FORMAT = 1
"""Raised whenever the same source and settings would give other arrays."""

BYTES = "bytes"
TOKENIZER = "tokenizer.json"
CONTENT = (TOKENIZER, "train.npy", "validation.npy")
"""Files whose content the fingerprint is of."""

PREVIEWED_BYTES = 8 << 20
"""The largest source that `preview` makes token arrays of."""

_PIECE_CHARACTERS = 200_000
_GROUP_CHARACTERS = 4_000_000

Report = Callable[[str], None]
"""Told what a preparation is doing, one line at a time."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens to train on and tokens held back, as read-only memory maps that are checked where they are read.

    fingerprint: a hash of both arrays and the tokenizer; equal fingerprints mean equal samples.
    """

    train: CheckedTokens
    validation: CheckedTokens
    tokenizer: Tokenizer
    fingerprint: str

    def check(self, *, sequence: int, global_batch: int) -> None:
        """Raise DataError unless the corpus has samples for one global batch, and a validation token if any is held.

        sequence: tokens of a sample. global_batch: samples of a step.
        """
        samples = sample_count(self.train, sequence)
        if samples < global_batch:
            raise DataError(
                f"the corpus is too small: {len(self.train)} training tokens are {samples} samples of data.sequence = "
                f"{sequence}, less than one step of train.global_batch = {global_batch}; "
                "take more text, a shorter sequence or a smaller batch"
            )
        if len(self.validation) == 1:
            raise DataError("the validation split has 1 token and needs 2: take more text, or a larger data.validation")


def prepare(
    source: str,
    *,
    tokenizer: str,
    cache: Path,
    sequence: int,
    global_batch: int = 1,
    validation: float = 0.05,
    text_field: str = "text",
    report: Report | None = None,
) -> Corpus:
    """The token arrays of a source; made if the cache lacks them, by one process whatever the number that ask.

    Arrays that are known to be damaged are made anew: files that are missing, short or unreadable, and blocks that an
    earlier run found to differ from their digests.

    source, text_field: see `atoll.data.corpus`. tokenizer: "bytes", "bpe-N" or the path of a tokenizer.json.
    validation: fraction of the tokens to hold back. sequence, global_batch: only checked, see `Corpus.check`.
    Raises DataError for a source, a tokenizer or a cache that cannot be used.
    """
    say = report or (lambda line: None)
    recipe = _Recipe.find(source, tokenizer=tokenizer, validation=validation, text_field=text_field)
    folder = cache.expanduser() / recipe.key()
    if not folder.is_dir():
        _make_once(folder, recipe, say)
    try:
        corpus = load_cache(folder, folder.name, say, marks=True)
    except DamagedCorpusError as error:
        say(f"{folder}: this cached corpus was damaged ({error.reason}); making it anew")
        _make_once(folder, recipe, say)
        corpus = load_cache(folder, folder.name, say, marks=True)
    corpus.check(sequence=sequence, global_batch=global_batch)
    return corpus


def preview(
    source: str,
    *,
    tokenizer: str,
    cache: Path,
    sequence: int,
    global_batch: int = 1,
    validation: float = 0.05,
    text_field: str = "text",
) -> Corpus | None:
    """What `prepare` would give or raise, without writing to the cache.

    None where the cache lacks the arrays and the source has more than PREVIEWED_BYTES: it is there, and how many tokens
    it has is not known.
    """
    recipe = _Recipe.find(source, tokenizer=tokenizer, validation=validation, text_field=text_field)
    folder = cache.expanduser() / recipe.key()
    corpus = None
    if folder.is_dir():
        with suppress(DamagedCorpusError):
            corpus = load_cache(folder, folder.name, lambda line: None)
    if corpus is None:
        if recipe.nbytes > PREVIEWED_BYTES:
            return None
        with tempfile.TemporaryDirectory() as made:
            _make(Path(made), recipe, lambda line: None)
            corpus = load_cache(Path(made), recipe.key(), lambda line: None)
    corpus.check(sequence=sequence, global_batch=global_batch)
    return corpus


def expected_ids(tokenizer: str, *, masked: bool = False) -> int:
    """Ids of a tokenizer by its name, before there is a corpus: of "bpe-N" as many as it may have.

    masked: with one that hides others, where the tokenizer has none.

    Raises DataError for a tokenizer that cannot be used.
    """
    found: Tokenizer = ByteTokenizer()
    size = bpe_size(tokenizer)
    if tokenizer != BYTES and size is None:
        found = FileTokenizer.read(_tokenizer_file(tokenizer))
    return (found.size if size is None else size) + (masked and found.mask is None)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """All that decides the arrays; `content` and `tokenizer_content` are hashes of what was read."""

    source: Source
    content: str
    tokenizer: str
    tokenizer_file: Path | None
    tokenizer_content: str
    validation: float

    @staticmethod
    def find(source: str, *, tokenizer: str, validation: float, text_field: str) -> _Recipe:
        split([], validation)
        file, tokenizer_content = None, tokenizer
        if tokenizer != BYTES and bpe_size(tokenizer) is None:
            file = _tokenizer_file(tokenizer)
            tokenizer_content = hashlib.sha256(FileTokenizer.read(file).to_json().encode()).hexdigest()
        found = find_source(source, text_field=text_field)
        return _Recipe(found, fingerprint(found), tokenizer, file, tokenizer_content, validation)

    def about(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "source": self.content,
            "kind": self.source.kind.value,
            "text_field": self.source.text_field,
            "tokenizer": self.tokenizer_content,
            "validation": self.validation,
        }

    def key(self) -> str:
        return _key(self.about())

    def make_tokenizer(self, say: Report) -> Tokenizer:
        if self.tokenizer_file is not None:
            return FileTokenizer.read(self.tokenizer_file)
        size = bpe_size(self.tokenizer)
        if size is None:
            return ByteTokenizer()
        say(f"training the tokenizer {self.tokenizer} on {self.source.name}")
        return train_bpe(sample(documents(self.source), self.nbytes), size)

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.source.files)


def _key(about: Mapping[str, Any]) -> str:
    """The name of a cache's folder, from what its about.json says among other things."""
    chosen = {name: about[name] for name in ("format", "source", "kind", "text_field", "tokenizer", "validation")}
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


def _make_once(folder: Path, recipe: _Recipe, say: Report) -> None:
    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{folder.name}.lock"):
            if folder.is_dir() and not _set_aside(folder):
                return
            for abandoned in cache.glob(f"{folder.name}.part-*"):
                shutil.rmtree(abandoned, ignore_errors=True)
            part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=cache))
            try:
                _make(part, recipe, say)
                os.replace(part, folder)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"data.cache = {cache}: cannot be written ({reason}); set data.cache to a folder that can, with room for "
            "two to four bytes a token"
        ) from error


def _set_aside(folder: Path) -> bool:
    """Take a damaged folder out of the way; False for a whole one, which another process may have just made.

    Who has its files open reads on in them.
    """
    try:
        load_cache(folder, folder.name, lambda line: None)
    except DamagedCorpusError:
        os.replace(folder, tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
        return True
    return False


def _make(folder: Path, recipe: _Recipe, say: Report) -> None:
    tokenizer = recipe.make_tokenizer(say)
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    say(f"encoding {recipe.source.name}")
    stream = folder / "tokens.bin"
    lengths = _encode(documents(recipe.source), tokenizer, stream, dtype)
    total = sum(lengths)
    if total < 2:
        raise DataError(
            f"data.source = {recipe.source.name!r}: no text in {recipe.source.root.absolute()}; take another"
        )

    parts = split(lengths, recipe.validation)
    tokens = np.memmap(stream, dtype=dtype, mode="r", shape=(total,))
    _write(folder / "train.npy", tokens, parts.train)
    _write(folder / "validation.npy", tokens, parts.validation)
    del tokens
    stream.unlink()

    if isinstance(tokenizer, FileTokenizer):
        (folder / TOKENIZER).write_text(tokenizer.to_json(), encoding="utf-8")
    about = {
        **recipe.about(),
        "source_name": recipe.source.name,
        "tokenizer_name": recipe.tokenizer,
        "documents": len(lengths),
        "tokens": total,
        "split_by": parts.by,
        "fingerprint": _content_hash(folder),
    }
    (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    _publish(folder, _digests_of(folder))


def _encode(texts: Iterable[str], tokenizer: Tokenizer, path: Path, dtype: np.dtype[Any]) -> list[int]:
    """Write the tokens of all documents one after the other; the number of tokens of each, end of text included."""
    closing = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    lengths: list[int] = []
    length = 0
    with path.open("wb") as stream:
        for group in _groups(_pieces(texts)):
            encoded = tokenizer.encode_batch([text for text, _ in group])
            for ids, (_, is_last) in zip(encoded, group, strict=True):
                ids.astype(dtype).tofile(stream)
                length += len(ids)
                if is_last:
                    np.array(closing, dtype=dtype).tofile(stream)
                    lengths.append(length + len(closing))
                    length = 0
    return lengths


def _pieces(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Cut long documents where a line ends, if one does, so that cores can share them: (piece, is the last one)."""
    for text in texts:
        start = 0
        while len(text) - start > _PIECE_CHARACTERS:
            newline = text.rfind("\n", start, start + _PIECE_CHARACTERS)
            stop = newline + 1 if newline >= start else start + _PIECE_CHARACTERS
            yield text[start:stop], False
            start = stop
        yield text[start:], True


def _groups(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces in groups of bounded size: what is encoded at once is all that lies in memory."""
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


def _write(path: Path, tokens: Tokens, ranges: Sequence[Range]) -> None:
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


def _content_hash(folder: Path) -> str:
    total = hashlib.sha256()
    for name in CONTENT:
        path = folder / name
        content = b""
        if path.is_file():
            with path.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").digest()
        total.update(name.encode() + b"\0" + content)
    return total.hexdigest()


def verify(folder: Path) -> int:
    """Compare all of the token cache in `folder` with its digests; the bytes that were read.

    A cache from before there were digests is compared with its fingerprint. Raises DamagedCorpusError if it is damaged.
    """
    load_cache(folder, folder.name, lambda line: None)
    blocks = _blocks(folder, lambda line: None)
    for name in blocks.files:
        blocks.open(folder / name).check()
    return sum(size for size, _ in blocks.files.values())


def is_cache(folder: Path) -> bool:
    """Whether a folder looks like one that `prepare` made."""
    return (folder / "about.json").is_file() and (folder / "train.npy").is_file()


def load_cache(folder: Path, key: str, say: Report, *, marks: bool = False) -> Corpus:
    """The corpus in a folder that is to be the one of `key`. Raises DamagedCorpusError unless it is, undamaged."""
    try:
        if (mark := folder / MARK).exists():
            raise ValueError(mark.read_text(encoding="utf-8")[:200])
        blocks = _blocks(folder, say)
        about = parse_json(blocks.open(folder / "about.json").read())
        train, validation = (
            CheckedTokens(blocks.open(folder / name, marks=marks)) for name in ("train.npy", "validation.npy")
        )
        recorded = str(about["fingerprint"])
        if (found := _key(about)) != key:
            raise ValueError(f"it is the one of {found}")
        tokenizer: Tokenizer = ByteTokenizer()
        if TOKENIZER in blocks.files:
            blocks.open(folder / TOKENIZER).check()
            tokenizer = FileTokenizer.read(folder / TOKENIZER)
    except DamagedCorpusError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise DamagedCorpusError(folder, error) from error
    return Corpus(train, validation, tokenizer, recorded)


def _blocks(folder: Path, say: Report) -> Blocks:
    """The digests of a cache. One from before there were any gets them, once its content is that of its fingerprint."""
    if (folder / MANIFEST).exists():
        return Blocks.read(folder)
    say(f"comparing {folder} with its fingerprint, once: it was made before caches had digests")
    recorded = read_json(folder / "about.json")["fingerprint"]
    if (found := _content_hash(folder)) != recorded:
        raise ValueError(f"its content has the fingerprint {found}, and it was made with {recorded}")
    blocks = _digests_of(folder)
    with suppress(OSError):  # a cache that may only be read is compared each time
        _publish(folder, blocks)
    return blocks


def _digests_of(folder: Path) -> Blocks:
    return Blocks.of(folder, [name for name in (*CONTENT, "about.json") if (folder / name).is_file()])


def _publish(folder: Path, blocks: Blocks) -> None:
    """Write the manifest so that nobody sees a part of it."""
    descriptor, draft = tempfile.mkstemp(prefix=".manifest-", dir=folder)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(blocks.encode())
    os.replace(draft, folder / MANIFEST)
