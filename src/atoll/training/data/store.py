"""A corpus as two token arrays, created once and cached.

    <cache>/<key>/          key = hash of (content of the source, tokenizer, split, version of this format)
        tokenizer.json      as the `tokenizers` library writes it; absent for "bytes"
        tokenizer_config.json, generation_config.json
                            roles of its tokens, if they are known
        train.npy           uint16, or uint32 for more than 65536 ids
        train-lengths.npy   uint32, tokens per document, if samples are whole documents
        train-answers.npy   uint8, 1 for tokens of an answer, for conversations
        validation...       the same for the held-out tokens
        about.json          origin and fingerprint
        manifest.json       digests of the blocks of the other files (`atoll.training.data.blocks`)
        damaged             damage found by a run; the next run creates the folder again
    <cache>/<key>.lock      held by the process that creates it

The folder is created under another name and renamed when it is complete, so a killed preparation leaves no folder
that looks finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from filelock import FileLock

from atoll.base.documents import parse_json, read_json
from atoll.base.errors import DataError
from atoll.training.data.blocks import CORPUS_MANIFEST, MARK, Blocks, CheckedTokens, DamagedCorpusError
from atoll.training.data.corpus import Source
from atoll.training.data.encoding import encode_source
from atoll.training.data.recipe import CorpusRecipe, RecipeSettings, Report, key_of
from atoll.training.data.rows import Packing, SplitTokens, rows_of
from atoll.training.data.split import hold_back, split
from atoll.training.data.tokenizer import BESIDE, TOKENIZER, ByteTokenizer, FileTokenizer, Tokenizer

TRAIN, VALIDATION = "train", "validation"
CONTENT = (TOKENIZER, "train.npy", "validation.npy")
"""Files whose content the fingerprint covers."""
_OPTIONAL = tuple(f"{part}-{what}.npy" for part in (TRAIN, VALIDATION) for what in ("lengths", "answers"))
"""Further files covered by the fingerprint, if they exist."""

LONGEST_NOTE = 4000
"""Most characters of a note on skipped records."""

PREVIEWED_BYTES = 8 << 20
"""Largest source whose token arrays `preview` creates, in bytes."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and validation tokens, as read-only memory maps whose blocks are verified when they are read.

    fingerprint: a hash of all arrays and the tokenizer, and of the policy if broken records are skipped; equal
    fingerprints mean equal samples.
    folder: the folder of its files.
    notes: on records that were skipped.
    """

    trained: SplitTokens
    held: SplitTokens
    tokenizer: Tokenizer
    fingerprint: str
    folder: Path
    notes: Sequence[str] = ()

    @property
    def train(self) -> CheckedTokens:
        """Tokens for training."""
        return self.trained.tokens

    @property
    def validation(self) -> CheckedTokens:
        """Tokens held out for validation."""
        return self.held.tokens

    def check(self, packing: Packing, *, global_batch: int) -> None:
        """Raise DataError unless the corpus has samples for one global batch, and a validation token if any are held
        out.

        global_batch: samples per step.
        """
        rows = rows_of(self.trained, packing)
        samples = len(rows)
        if samples < global_batch:
            why = "".join(f"; {note}" for note in rows.notes)
            raise DataError(
                f"the corpus is too small: {len(self.train)} training tokens are {samples} samples of data.sequence = "
                f"{packing.sequence}, less than one step of train.global_batch = {global_batch}{why}; "
                f"take more text, {'another' if why else 'a shorter'} sequence or a smaller batch"
            )
        if len(self.validation) == 1:
            raise DataError("the validation split has 1 token and needs 2: take more text, or a larger data.validation")
        if len(self.validation) and not len(rows_of(self.held, packing)):
            raise DataError("no validation sample is left; take more, a longer data.sequence or another data.too_long")


def prepare(
    source: str | Source,
    *,
    cache: Path,
    global_batch: int = 1,
    report: Report | None = None,
    **settings: Unpack[RecipeSettings],
) -> Corpus:
    """Return the token arrays of a source, from the cache or built by one process while others wait.

    Damaged arrays are created again: files that are missing, short or unreadable, and blocks for which an earlier run
    found a wrong digest.

    source, settings: see `RecipeSettings`, and `atoll.training.data.corpus`.
    global_batch: only checked, see `Corpus.check`. Raises DataError for an unusable source, tokenizer or cache.
    """
    say = report or (lambda line: None)
    recipe = CorpusRecipe.find(source, **settings)
    folder = cache.expanduser() / recipe.key()
    if not folder.is_dir():
        _make_once(folder, recipe, say)
    try:
        corpus = load_cache(folder, folder.name, say, marks=True)
    except DamagedCorpusError as error:
        say(f"{folder}: this cached corpus was damaged ({error.reason}); creating it again")
        _make_once(folder, recipe, say)
        corpus = load_cache(folder, folder.name, say, marks=True)
    corpus.check(recipe.packing, global_batch=global_batch)
    return corpus


def preview(
    source: str | Source, *, cache: Path, global_batch: int = 1, **settings: Unpack[RecipeSettings]
) -> Corpus | None:
    """Return the result of `prepare`, or raise its errors, without writing to the cache.

    Returns None if the arrays are not cached and the source has more than PREVIEWED_BYTES: it exists, but its number of
    tokens is unknown.
    """
    recipe = CorpusRecipe.find(source, **settings)
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
    corpus.check(recipe.packing, global_batch=global_batch)
    return corpus


def _make_once(folder: Path, recipe: CorpusRecipe, say: Report) -> None:
    cache = folder.parent
    lock = "shards.lock" if recipe.source.is_shard else f"{folder.name}.lock"
    with writing_cache(cache), FileLock(cache / lock):
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


@contextmanager
def writing_cache(cache: Path) -> Iterator[None]:
    """Create the folder of a cache. Write errors are raised as DataError."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"data.cache = {cache}: cannot be written ({reason}); set data.cache to a writable folder with space "
            "for two to four bytes per token"
        ) from error


def _set_aside(folder: Path) -> bool:
    """Move a damaged folder away. Returns False for an intact one, which another process may have just created.

    Processes with open files continue to read from them.
    """
    try:
        load_cache(folder, folder.name, lambda line: None)
    except DamagedCorpusError:
        os.replace(folder, tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
        return True
    return False


def _make(folder: Path, recipe: CorpusRecipe, say: Report) -> None:
    tokenizer = recipe.make_tokenizer(say)
    say(f"encoding {recipe.source.name}")
    how: dict[str, Any] = {"chat": recipe.chat, "ignored": recipe.ignored, "bad_records": recipe.bad_records}
    encoded = encode_source(folder, recipe.source, tokenizer, **how)
    skipped = [] if encoded.skipped is None else [str(encoded.skipped)]
    if recipe.packing.keeps_documents:
        # The samples of a record are held out together: each has what the others are judged by.
        held, by = np.repeat(hold_back(encoded.sizes, recipe.validation), encoded.counts), "documents"
        encoded.write(folder, TRAIN, encoded.ranges(~held), encoded.chosen(~held))
        encoded.write(folder, VALIDATION, encoded.ranges(held), encoded.chosen(held))
    else:
        parts = split(encoded.lengths, recipe.validation)
        by = parts.by
        encoded.write(folder, TRAIN, parts.train)
        encoded.write(folder, VALIDATION, parts.validation)
    encoded.remove()
    if recipe.held is not None:
        say(f"encoding {recipe.held.name}")
        own = encode_source(folder, recipe.held, tokenizer, **how)
        skipped += [] if own.skipped is None else [f"data.validation: {own.skipped}"]
        everything = np.ones(len(own.lengths), dtype=np.bool_)
        lengths = own.chosen(everything) if recipe.packing.keeps_documents else None
        own.write(folder, VALIDATION, own.ranges(everything), lengths)
        own.remove()
        by = "source"

    if isinstance(tokenizer, FileTokenizer):
        for name, content in {TOKENIZER: tokenizer.to_json(), **tokenizer.beside()}.items():
            (folder / name).write_text(content, encoding="utf-8")
    about = {
        **recipe.about(),
        "source_name": recipe.source.name,
        "tokenizer_name": recipe.tokenizer,
        "documents": len(encoded.lengths),
        **({"skipped": skipped} if skipped else {}),
        "tokens": sum(encoded.lengths),
        "split_by": by,
        "fingerprint": _content_hash(folder),
    }
    (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    _publish(folder, _digests_of(folder))


def _content_hash(folder: Path) -> str:
    total = hashlib.sha256()
    for name in (*CONTENT, *_OPTIONAL):
        content = b""
        if (path := folder / name).is_file():
            with path.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").digest()
        if content or name in CONTENT:
            total.update(name.encode() + b"\0" + content)
    return total.hexdigest()


def verify_cache(folder: Path) -> int:
    """Verify all of the token cache in `folder` against its digests. Return the number of bytes read.

    A cache without digests, of an older version, is compared with its fingerprint. Raises DamagedCorpusError if it is
    damaged.
    """
    load_cache(folder, folder.name, lambda line: None)
    blocks = _blocks(folder, lambda line: None)
    for name in blocks.files:
        blocks.open(folder / name).check()
    return sum(size for size, _ in blocks.files.values())


def is_cache(folder: Path) -> bool:
    """Return True if a folder looks like one created by `prepare`."""
    return (folder / "about.json").is_file() and (folder / "train.npy").is_file()


def load_cache(folder: Path, key: str, say: Report, *, marks: bool = False) -> Corpus:
    """Return the corpus in the folder of `key`. Raises DamagedCorpusError if it is damaged or has another key."""
    try:
        if (mark := folder / MARK).exists():
            with mark.open("rb") as file:
                raise ValueError(file.read(200).decode(errors="replace"))
        blocks = _blocks(folder, say)
        about = parse_json(blocks.open(folder / "about.json").read())
        trained, held = (_part(folder, part, blocks, marks=marks) for part in (TRAIN, VALIDATION))
        recorded = str(about["fingerprint"])
        if (found := key_of(about)) != key:
            raise ValueError(f"it is the one of {found}")
        if about.get("keeps_documents") and (trained.lengths is None or held.lengths is None):
            raise ValueError("it does not record where documents end")
        if about.get("chat") and (trained.answers is None or held.answers is None):
            raise ValueError("it does not record which tokens are answers")
        skipped = [str(each)[:LONGEST_NOTE] for each in list(about.get("skipped", ()))[:2]]
        tokenizer: Tokenizer = ByteTokenizer()
        if TOKENIZER in blocks.files:
            beside = [name for name in BESIDE if name in blocks.files]
            for name in (TOKENIZER, *beside):
                blocks.open(folder / name).check()
            tokenizer = FileTokenizer.read(folder / TOKENIZER, beside=beside)
    except DamagedCorpusError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise DamagedCorpusError(folder, error) from error
    if policy := about.get("bad_records"):
        recorded = hashlib.sha256(f"{recorded} bad_records={policy}".encode()).hexdigest()
    notes = [f'{each} (data.bad_records = "skip")' for each in skipped]
    return Corpus(trained, held, tokenizer, recorded, folder, notes)


def _part(folder: Path, part: str, blocks: Blocks, *, marks: bool) -> SplitTokens:
    """Return the arrays of a split. Raises DamagedCorpusError, OSError and ValueError if they cannot be read."""

    def array(name: str, *kinds: type[np.unsignedinteger[Any]]) -> CheckedTokens | None:
        file = blocks.open(folder / name, marks=marks) if name in blocks.files else None
        return None if file is None else CheckedTokens(file, kinds)

    found = SplitTokens(
        CheckedTokens(blocks.open(folder / f"{part}.npy", marks=marks)),
        array(f"{part}-lengths.npy", np.uint32),
        array(f"{part}-answers.npy", np.uint8),
    )
    if found.answers is not None and len(found.answers) != len(found.tokens):
        raise ValueError(f"{len(found.answers)} flags of answers for {len(found.tokens)} tokens")
    return found


def _blocks(folder: Path, say: Report) -> Blocks:
    """Return the digests of a cache. One of an older version gets them once its content matches its fingerprint."""
    if (folder / CORPUS_MANIFEST).exists():
        return Blocks.read(folder)
    say(f"comparing {folder} with its fingerprint, once: it was created by a version without digests")
    recorded = read_json(folder / "about.json")["fingerprint"]
    if (found := _content_hash(folder)) != recorded:
        raise ValueError(f"its content has the fingerprint {found}, and it was made with {recorded}")
    blocks = _digests_of(folder)
    with suppress(OSError):  # a read-only cache is verified each time
        _publish(folder, blocks)
    return blocks


def _digests_of(folder: Path) -> Blocks:
    return Blocks.of(
        folder, [name for name in (*CONTENT, *_OPTIONAL, *BESIDE, "about.json") if (folder / name).is_file()]
    )


def _publish(folder: Path, blocks: Blocks) -> None:
    """Write the manifest atomically."""
    descriptor, draft = tempfile.mkstemp(prefix=".manifest-", dir=folder)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(blocks.encode())
    os.replace(draft, folder / CORPUS_MANIFEST)
