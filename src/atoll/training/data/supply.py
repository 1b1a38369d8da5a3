"""Samples of a run, from one source or from several in given shares.

    Feed        the endless sequence of a source's samples under a seed, from token arrays or a stream of them
    Mix         the feed that provides the sample of each position (`atoll.training.data.mixing`)
    Supply      both, with the held-out samples

The sample at a position depends on the sources, the shares and the seed alone, never on ranks or batches.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import DataError
from atoll.base.units import format_bytes, format_count
from atoll.training.data import trained
from atoll.training.data.bad_records import BadRecords
from atoll.training.data.conversations import RULES
from atoll.training.data.corpus import TEXT_FIELD, Source, documents, find_source, find_sources, fingerprint
from atoll.training.data.mixing import Mix, shares, weighted
from atoll.training.data.order import SampleOrder, TokenBatch, scatter
from atoll.training.data.recipe import Report
from atoll.training.data.rows import Packing, Rows, rows_of
from atoll.training.data.shards import Shard, cut, identity_of
from atoll.training.data.store import PREVIEWED_BYTES, Corpus, prepare, preview
from atoll.training.data.stream import Stream
from atoll.training.data.tokenizer import (
    TOKENIZER,
    TRAINING_CHARACTERS,
    FileTokenizer,
    Tokenizer,
    bpe_size,
    head,
    sample,
)

Get = Callable[..., Corpus | None]

SAMPLED = 8
"""Number of shards of a streamed source, spread evenly, whose beginnings train a tokenizer."""

Name = int | str
"""Name of a sample: its number, with source and shard if the number is ambiguous."""


class Feed(Protocol):
    """The endless sequence of a source's samples for a seed."""

    @property
    def name(self) -> str:
        """Name of the source."""
        ...

    @property
    def size(self) -> int:
        """Weight of an epoch of this feed among the other feeds of the supply."""
        ...

    @property
    def samples(self) -> int | None:
        """Number of samples in an epoch, or None if unknown."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Notes on split, dropped and truncated documents."""
        ...

    def take(self, position: int, count: int) -> TokenBatch:
        """Return the samples at positions position .. position+count-1."""
        ...

    def work(self, position: int, count: int) -> NDArray[np.float64]:
        """Return the attention work of each of these samples, as `Rows.work`."""
        ...

    def names(self, position: int, count: int) -> list[Name]:
        """Return the names of these samples."""
        ...

    def epoch(self, position: int) -> float:
        """Return how often its samples have been passed before a position."""
        ...

    def close(self) -> None:
        """Release resources. No more samples can be taken."""
        ...


class _Whole:
    """Feed of token arrays."""

    def __init__(self, name: str, rows: Rows, *, seed: int, number: int, notes: Sequence[str] = ()) -> None:
        self.name = name
        self.notes = [*notes, *rows.notes]
        self.size = self.samples = len(rows)
        self._rows, self._order = rows, SampleOrder(max(1, len(rows)), seed, number)

    def take(self, position: int, count: int) -> TokenBatch:
        """Return the samples at positions position .. position+count-1."""
        return self._rows.take(self._order.take(position, count))

    def work(self, position: int, count: int) -> NDArray[np.float64]:
        """Return the attention work of each of these samples, as `Rows.work`."""
        return self._rows.work(self._order.take(position, count))

    def names(self, position: int, count: int) -> list[Name]:
        """Return the numbers of these samples."""
        return [int(index) for index in self._order.take(position, count)]

    def epoch(self, position: int) -> float:
        """Return how often its samples have been passed before a position."""
        return position / self.samples

    def close(self) -> None:
        """Do nothing: no work is in progress."""


@dataclass(frozen=True, slots=True)
class _Held:
    """Held-out samples of a source, or a separate source."""

    name: str
    rows: Rows
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Supply:
    """Training and validation samples of a run.

    fingerprint: equal fingerprints mean equal samples.  size: total size as text.
    """

    feeds: tuple[Feed, ...]
    mix: Mix
    held: tuple[_Held, ...]
    tokenizer: Tokenizer
    fingerprint: str
    size: str

    @property
    def samples(self) -> int | None:
        """Number of samples in an epoch, the sum over all sources; None if unknown."""
        known = [feed.samples for feed in self.feeds if feed.samples is not None]
        return sum(known) if len(known) == len(self.feeds) else None

    @property
    def notes(self) -> Sequence[str]:
        """Notes on split, dropped and truncated documents."""
        several = len(self.feeds) > 1
        found = [f"{feed.name}: {note}" if several else note for feed in self.feeds for note in feed.notes]
        for each in self.held:
            what = f"validation, {each.name}" if len(self.held) > 1 else "validation"
            found += [f"{what}: {note}" for note in (*each.notes, *each.rows.notes)]
        return found

    def take(self, position: int, count: int) -> TokenBatch:
        """Return the samples at positions position .. position+count-1."""
        parts = [(places, self.feeds[at].take(begin, len(places))) for at, places, begin in self._of(position, count)]
        if len(parts) == 1:
            return parts[0][1]
        return scatter(parts, count)

    def at(self, positions: Sequence[int]) -> TokenBatch:
        """Return the samples at positions in any order."""
        each = [self.take(position, 1) for position in positions]
        return {name: np.concatenate([own[name] for own in each]) for name in each[0]}

    def work(self, position: int, count: int) -> NDArray[np.float64]:
        """Return the attention work of each of the samples at positions position .. position+count-1: the squares of
        its documents' lengths, added up."""
        found = np.zeros(count)
        for at, places, begin in self._of(position, count):
            found[places] = self.feeds[at].work(begin, len(places))
        return found

    def names(self, position: int, count: int) -> list[Name]:
        """Return the names of the samples at these positions."""
        found: list[Name] = [0] * count
        for at, places, begin in self._of(position, count):
            names = self.feeds[at].names(begin, len(places))
            for place, name in zip(places.tolist(), names, strict=True):
                found[place] = name if len(self.feeds) == 1 else f"{name} of {self.feeds[at].name}"
        return found

    def epoch(self, position: int) -> float:
        """Return how often the sources have been passed before a position: for several, the mean weighted by size."""
        epochs = self.epochs(position)
        sizes = [feed.size for feed in self.feeds]
        return sum(epoch * size for epoch, size in zip(epochs, sizes, strict=True)) / sum(sizes)

    def epochs(self, position: int) -> list[float]:
        """Return how often each source has been passed before a position, up to a period of the mix."""
        return [
            feed.epoch(position * count // self.mix.period)
            for feed, count in zip(self.feeds, self.mix.counts, strict=True)
        ]

    def _of(self, position: int, count: int) -> Iterator[tuple[int, NDArray[np.int64], int]]:
        """Yield the sources of some positions: their number, their places among these, and their own first position."""
        sources, positions = self.mix.take(position, count)
        for at in np.unique(sources).tolist() or [0]:
            places = np.flatnonzero(sources == at)
            yield at, places, int(positions[places[0]]) if len(places) else 0

    def close(self) -> None:
        """Release resources. No more samples can be taken."""
        for feed in self.feeds:
            feed.close()

    # ---- validation

    def validation(self, size: int, *, limit: int) -> Iterator[tuple[str, TokenBatch]]:
        """Yield batches of `size` samples in order, each from one source and with its name.

        limit: maximum number of batches, shared in proportion to the sources' samples, with at least one each.
        """
        held = [each for each in self.held if each.rows.in_order_count]
        counts = [each.rows.in_order_count for each in held]
        batches = [-(-count // size) for count in counts]
        if sum(batches) > limit:
            rest = shares(counts, total=max(0, limit - len(held)))
            batches = [min(most, 1 + more) for most, more in zip(batches, rest, strict=True)]
        for each, most in zip(held, batches, strict=True):
            for batch in each.rows.in_order(size, limit=most):
                yield each.name, batch


def prepare_supply(
    sources: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    seed: int = 0,
    shard: int | None = None,
    report: Report | None = None,
    **recipe: Any,
) -> Supply:
    """Return the samples of sources, each from its cache or encoded into it.

    weights: share of the samples from each source; None: in proportion to their samples, so an epoch passes each once.
    recipe: see `prepare`; its "bpe-N" is trained on all sources.
    shard: number of bytes of a source that are encoded at once during the run; None: all are encoded here. With a
    shard, a held-out share is taken from the first shard, and without weights sources have shares by their bytes.
    """
    say = report or (lambda line: None)
    found = _Sources.find(sources, recipe, shard)
    tokenizer = found.tokenizer
    if found.trains_together:
        tokenizer = str(trained.train_tokenizer(found.trained_folder, tokenizer, found.texts, say))
    if shard is not None:
        return found.streamed(tokenizer, weights, seed, say)
    supply = found.supply(lambda source, **how: prepare(source, **how, report=report), tokenizer, weights, seed)
    assert supply is not None, "what is prepared is there"
    return supply


def preview_supply(
    sources: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    seed: int = 0,
    shard: int | None = None,
    **recipe: Any,
) -> Supply | None:
    """Return the result of `prepare_supply`, or raise its errors, without writing to the cache. Returns None as
    `preview` does, and for streamed sources."""
    found = _Sources.find(sources, recipe, shard)
    if shard is not None:
        return None
    if not found.trains_together:
        return found.supply(preview, found.tokenizer, weights, seed)
    if trained.is_kept(found.trained_folder):
        return found.supply(preview, str(found.trained_folder), weights, seed)
    if found.nbytes > PREVIEWED_BYTES:
        return None
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / found.trained_folder.name
        path = trained.train_tokenizer(folder, found.tokenizer, found.texts, lambda line: None)
        return found.supply(preview, str(path), weights, seed)


@dataclass(frozen=True, slots=True)
class _Sources:
    """Existing sources of a supply.

    own: a separate validation source.  recipe: see `prepare`, for all sources.  shards: of each source, if streamed.
    """

    trained_on: tuple[Source, ...]
    own: Source | None
    recipe: Mapping[str, Any]
    shards: tuple[tuple[Shard, ...], ...]

    @staticmethod
    def find(names: Sequence[str], recipe: Mapping[str, Any], shard: int | None) -> _Sources:
        options = {"text_field": recipe.get("text_field", TEXT_FIELD), "has_records": recipe.get("chat") is not None}
        found = find_sources(names, **options)
        own = recipe.get("validation")
        held = find_source(own, **options, key="data.validation") if isinstance(own, str) else None
        if shard is not None:
            found = tuple(replace(each, identity=identity_of(each)) for each in found)
            return _Sources(found, held, recipe, tuple(cut(each, shard) for each in found))
        if len(found) > 1:  # training of the tokenizer and encoding then need not both compute them
            found = tuple(replace(each, identity=fingerprint(each)) for each in found)
        return _Sources(found, held, recipe, ())

    @property
    def tokenizer(self) -> str:
        return str(self.recipe["tokenizer"])

    @property
    def trains_together(self) -> bool:
        """True if a tokenizer has to be trained before any source can be encoded."""
        return (len(self.trained_on) > 1 or bool(self.shards)) and bpe_size(self.tokenizer) is not None

    @property
    def trained_folder(self) -> Path:
        cache: Path = self.recipe["cache"]
        return trained.folder_of(self.tokenizer, self.trained_on, cache.expanduser())

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.trained_on)

    def texts(self) -> Iterator[str]:
        """Yield the texts to train the tokenizer on; for streamed sources, the beginnings of SAMPLED shards each."""
        if self.shards:
            chosen = [each for shards in self.shards for each in shards[:: -(-len(shards) // SAMPLED)]]
            for each in chosen:
                yield from head(documents(each.source, self._bad()), TRAINING_CHARACTERS // len(chosen))
            return
        texts = (text for source in self.trained_on for text in documents(source, self._bad()))
        yield from sample(texts, self.nbytes)

    def _bad(self) -> BadRecords:
        return BadRecords(self.recipe.get("bad_records", "stop"))

    @property
    def packing(self) -> Packing:
        """Rules of the samples."""
        how, too_long = self.recipe.get("how", "blocks"), self.recipe.get("too_long", "split")
        return Packing(sequence=self.recipe["sequence"], how=how, too_long=too_long)

    def streamed(self, tokenizer: str, weights: Sequence[float] | None, seed: int, say: Report) -> Supply:
        """Return the supply of streamed sources. The first shard of each is encoded here."""
        share = 0.0 if self.own is not None else self.recipe.get("validation", 0.0)
        recipe = {**self.recipe, "tokenizer": tokenizer, "global_batch": 0}
        cache: Path = recipe["cache"].expanduser()
        names = [source.name for source in self.trained_on]
        feeds, held, fingerprints = [], [], []
        held_share = [f"data.validation = {share:g} is a share of its first shard"] if share else []
        for number, (source, shards) in enumerate(zip(self.trained_on, self.shards, strict=True)):
            # The sample counts in the folder's index are valid for these settings.
            facts = (source.identity, len(shards), shards[0].source.parts, content_of(tokenizer), share)
            about = (
                *facts,
                source.text_field,
                self.packing.keeps_documents,
                getattr(recipe.get("chat"), "fingerprint", ""),
                (RULES, sorted(recipe.get("ignored", ())), recipe.get("bad_records", "stop")),
            )
            folder = cache / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:32]}.stream"
            encode = _Encode(shards, {**recipe, "cache": folder}, share)
            first = prepare(shards[0].source, **encode.recipe_of(0), report=say)
            feeds.append(
                Stream(
                    source.name,
                    shards,
                    encode,
                    packing=self.packing,
                    folder=folder,
                    first=first.folder.name,
                    seed=seed,
                    number=number,
                    notes=[f"streamed in {len(shards)} shards", *held_share, *first.notes],
                    report=say,
                )
            )
            held.append(_Held(source.name, rows_of(first.held, self.packing)))
            fingerprints += [f"streamed {source.identity}", first.fingerprint]
        if self.own is not None:
            judged = prepare(self.own, **{**recipe, "validation": 0.0}, report=say)
            held = [_Held(self.own.name, rows_of(judged.trained, self.packing), judged.notes)]
            fingerprints.append(judged.fingerprint)
        counts = weighted(names, weights or [feed.size for feed in feeds])
        size = format_bytes(sum(feed.size for feed in feeds))
        return Supply(
            tuple(feeds),
            Mix(counts, seed),
            tuple(held),
            first.tokenizer,
            together(fingerprints),
            f"{size} of training text in {sum(map(len, self.shards))} shards",
        )

    def supply(self, get: Get, tokenizer: str, weights: Sequence[float] | None, seed: int) -> Supply | None:
        """Return the supply of the sources' results of `get` (`prepare` or `preview`), or None if one of them is
        None."""
        recipe, packing = {**self.recipe, "tokenizer": tokenizer}, self.packing
        if len(self.trained_on) == 1:
            corpora = [get(self.trained_on[0], **recipe)]
            judged = None
        else:
            share = recipe.get("validation", 0.0)
            recipe |= {"global_batch": 0, "validation": share if self.own is None else 0.0}
            corpora = [get(source, **recipe) for source in self.trained_on]
            judged = None if self.own is None else get(self.own, **recipe)
        known = [corpus for corpus in corpora if corpus is not None]
        if len(known) < len(corpora) or (judged is None and self.own is not None and len(corpora) > 1):
            return None
        names = [source.name for source in self.trained_on]
        feeds = tuple(
            _Whole(name, rows_of(corpus.trained, packing), seed=seed, number=number, notes=corpus.notes)
            for number, (name, corpus) in enumerate(zip(names, known, strict=True))
        )
        if self.own is None:
            held = [_Held(name, rows_of(corpus.held, packing)) for name, corpus in zip(names, known, strict=True)]
        elif judged is None:
            held = [_Held(self.own.name, rows_of(known[0].held, packing))]
        else:
            held = [_Held(self.own.name, rows_of(judged.trained, packing), judged.notes)]
        tokens = sum(len(corpus.train) for corpus in known)
        held_tokens = sum(len(corpus.validation) for corpus in known) if judged is None else len(judged.train)
        _check(feeds, tokens, packing, self.recipe.get("global_batch", 1))
        counts = [feed.samples for feed in feeds] if weights is None else weighted(names, weights)
        parts = [*known, *([] if judged is None else [judged])]
        return Supply(
            feeds,
            Mix(counts, seed),
            tuple(held),
            known[0].tokenizer,
            together([corpus.fingerprint for corpus in parts]),
            f"{format_count(tokens)} training tokens, {format_count(held_tokens)} validation tokens",
        )


@dataclass(frozen=True, slots=True)
class _Encode:
    """Creates the token arrays of a shard. share: held-out share of the first shard."""

    shards: Sequence[Shard]
    recipe: Mapping[str, Any]
    share: float

    def recipe_of(self, number: int) -> dict[str, Any]:
        """Arguments of `prepare`."""
        return {**self.recipe, "validation": 0.0 if number else self.share}

    def __call__(self, number: int) -> Corpus:
        return prepare(self.shards[number].source, **self.recipe_of(number))


def content_of(tokenizer: str) -> str:
    """Return the name of a tokenizer, or a hash of its file."""
    path = Path(tokenizer).expanduser()
    file = path / TOKENIZER if path.is_dir() else path
    return FileTokenizer.read(file).identity if file.is_file() else tokenizer


def _check(feeds: Sequence[_Whole], tokens: int, packing: Packing, batch: int) -> None:
    """Raise DataError if a source has no sample, or all together have less than a step."""
    if len(feeds) == 1:
        return
    for feed in feeds:
        if not feed.samples:
            raise DataError(
                f"data.source: {feed.name!r} has no sample of data.sequence = {packing.sequence}; take more text, a "
                "shorter sequence, or leave it out"
            )
    if (samples := sum(feed.samples for feed in feeds)) < batch:
        raise DataError(
            f"the corpus is too small: {tokens} training tokens are {samples} samples of data.sequence = "
            f"{packing.sequence}, less than one step of train.global_batch = {batch}; "
            "take more text, a shorter sequence or a smaller batch"
        )


def together(fingerprints: Sequence[str]) -> str:
    """Return the fingerprint of several fingerprints; a single one is returned unchanged."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256("\0".join(fingerprints).encode()).hexdigest()
