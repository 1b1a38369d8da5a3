"""The samples that a run trains on: those of one source, or of several in their shares.

    Feed        the endless sequence of a source's samples under a seed, from token arrays or a stream of them
    Mix         from which feed each position takes its sample (`atoll.data.mixing`)
    Supply      the two together, with what is held back for validation

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

from atoll.data import trained
from atoll.data.corpus import TEXT_FIELD, Source, documents, find_source, find_sources, fingerprint
from atoll.data.mixing import Mix, shares, weighted
from atoll.data.order import Batch, SampleOrder, scatter
from atoll.data.rows import Packing, Rows, rows_of
from atoll.data.shards import Shard, cut, identity_of
from atoll.data.store import PREVIEWED_BYTES, Corpus, Report, prepare, preview
from atoll.data.stream import Stream
from atoll.data.tokenizer import TRAINING_CHARACTERS, Tokenizer, bpe_size, head, sample
from atoll.errors import DataError
from atoll.units import format_bytes, format_count

Get = Callable[..., Corpus | None]

SAMPLED = 8
"""Shards of a streamed source, spread evenly, whose begin trains a tokenizer."""

Name = int | str
"""The name of a sequence: its number, with source and shard where the number is ambiguous."""


class Feed(Protocol):
    """The endless sequence of a source's samples under a seed."""

    @property
    def name(self) -> str:
        """The name of the source."""
        ...

    @property
    def size(self) -> int:
        """How much an epoch of it counts, among the other feeds of the supply."""
        ...

    @property
    def samples(self) -> int | None:
        """Samples of an epoch. None where they are not known."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Notes on split, dropped and truncated documents."""
        ...

    def take(self, position: int, count: int) -> Batch:
        """The samples at positions position .. position+count-1."""
        ...

    def names(self, position: int, count: int) -> list[Name]:
        """What these samples are called."""
        ...

    def epoch(self, position: int) -> float:
        """How often its samples have been passed before a position."""
        ...

    def close(self) -> None:
        """No more samples are taken."""
        ...


class Whole:
    """The feed of token arrays."""

    def __init__(self, name: str, rows: Rows, *, seed: int, number: int) -> None:
        self.name = name
        self.notes = rows.notes
        self.size = self.samples = len(rows)
        self._rows, self._order = rows, SampleOrder(max(1, len(rows)), seed, number)

    def take(self, position: int, count: int) -> Batch:
        """The samples at positions position .. position+count-1."""
        return self._rows.take(self._order.take(position, count))

    def names(self, position: int, count: int) -> list[Name]:
        """Their numbers."""
        return [int(index) for index in self._order.take(position, count)]

    def epoch(self, position: int) -> float:
        """How often its samples have been passed before a position."""
        return position / self.samples

    def close(self) -> None:
        """Nothing is under way."""


@dataclass(frozen=True, slots=True)
class Held:
    """What is held back of a source, or a source of its own."""

    name: str
    rows: Rows


@dataclass(frozen=True, slots=True)
class Supply:
    """What a run is trained on, and judged by.

    fingerprint: equal ones mean the same samples.  size: of it all, in words.
    """

    feeds: tuple[Feed, ...]
    mix: Mix
    held: tuple[Held, ...]
    tokenizer: Tokenizer
    fingerprint: str
    size: str

    @property
    def samples(self) -> int | None:
        """Samples of an epoch, which is as many as all sources have. None where they are not known."""
        known = [feed.samples for feed in self.feeds if feed.samples is not None]
        return sum(known) if len(known) == len(self.feeds) else None

    @property
    def notes(self) -> Sequence[str]:
        """Notes on split, dropped and truncated documents."""
        several = len(self.feeds) > 1
        found = [f"{feed.name}: {note}" if several else note for feed in self.feeds for note in feed.notes]
        for each in self.held:
            what = f"validation, {each.name}" if len(self.held) > 1 else "validation"
            found += [f"{what}: {note}" for note in each.rows.notes]
        return found

    def take(self, position: int, count: int) -> Batch:
        """The samples at positions position .. position+count-1."""
        parts = [(places, self.feeds[at].take(begin, len(places))) for at, places, begin in self._of(position, count)]
        if len(parts) == 1:
            return parts[0][1]
        return scatter(parts, count)

    def names(self, position: int, count: int) -> list[Name]:
        """What the samples at these positions are called."""
        found: list[Name] = [0] * count
        for at, places, begin in self._of(position, count):
            names = self.feeds[at].names(begin, len(places))
            for place, name in zip(places.tolist(), names, strict=True):
                found[place] = name if len(self.feeds) == 1 else f"{name} of {self.feeds[at].name}"
        return found

    def epoch(self, position: int) -> float:
        """How often the sources have been passed before a position: of several the mean by their sizes."""
        epochs = self.epochs(position)
        sizes = [feed.size for feed in self.feeds]
        return sum(epoch * size for epoch, size in zip(epochs, sizes, strict=True)) / sum(sizes)

    def epochs(self, position: int) -> list[float]:
        """How often each source has been passed before a position, up to a period of the mix."""
        return [
            feed.epoch(position * count // self.mix.period)
            for feed, count in zip(self.feeds, self.mix.counts, strict=True)
        ]

    def _of(self, position: int, count: int) -> Iterator[tuple[int, NDArray[np.int64], int]]:
        """The sources of some positions: their numbers, their places among these, their own first position."""
        sources, positions = self.mix.take(position, count)
        for at in np.unique(sources).tolist() or [0]:
            places = np.flatnonzero(sources == at)
            yield at, places, int(positions[places[0]]) if len(places) else 0

    def close(self) -> None:
        """No more samples are taken."""
        for feed in self.feeds:
            feed.close()

    # ---- validation

    def validation(self, size: int, *, limit: int) -> Iterator[tuple[str, Batch]]:
        """Batches of `size` samples in order, each of one source, whose name comes with it.

        limit: at most so many, in proportion to what the sources have, though one of each.
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
    """The samples of sources, each from its cache or encoded into it.

    weights: shares of the samples that are taken from each; None: as many as each has, so that an epoch passes each
    once.  recipe: as of `prepare`, whose "bpe-N" is trained on all sources.
    shard: bytes of a source that are encoded at once while the run goes on; None: all of it is encoded here. A share
    that is held back is one of the first shard then, and without weights sources have shares by their bytes.
    """
    say = report or (lambda line: None)
    found = _Sources.find(sources, recipe, shard)
    tokenizer = found.tokenizer
    if found.trains_together:
        tokenizer = str(trained.train(found.trained_folder, tokenizer, found.texts, say))
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
    """What `prepare_supply` would return or raise, without writing to the cache; None as of `preview`, and for streamed
    sources."""
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
        path = trained.train(folder, found.tokenizer, found.texts, lambda line: None)
        return found.supply(preview, str(path), weights, seed)


@dataclass(frozen=True, slots=True)
class _Sources:
    """Sources that are there.

    own: a source of the validation.  recipe: as of `prepare`, for all of them.  shards: of each, if they are streamed.
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
        if len(found) > 1:  # so that what trains the tokenizer and what encodes need not both read them
            found = tuple(replace(each, identity=fingerprint(each)) for each in found)
        return _Sources(found, held, recipe, ())

    @property
    def tokenizer(self) -> str:
        return str(self.recipe["tokenizer"])

    @property
    def trains_together(self) -> bool:
        """Whether a tokenizer has to be trained before any source can be encoded."""
        return (len(self.trained_on) > 1 or bool(self.shards)) and bpe_size(self.tokenizer) is not None

    @property
    def trained_folder(self) -> Path:
        cache: Path = self.recipe["cache"]
        return trained.folder_of(self.tokenizer, self.trained_on, cache.expanduser())

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.trained_on)

    def texts(self) -> Iterator[str]:
        """What the tokenizer is trained on; of streamed sources the begin of SAMPLED shards each."""
        if self.shards:
            chosen = [each for shards in self.shards for each in shards[:: -(-len(shards) // SAMPLED)]]
            for each in chosen:
                yield from head(documents(each.source), TRAINING_CHARACTERS // len(chosen))
            return
        yield from sample((text for source in self.trained_on for text in documents(source)), self.nbytes)

    @property
    def packing(self) -> Packing:
        """What a sample is."""
        how, too_long = self.recipe.get("how", "blocks"), self.recipe.get("too_long", "split")
        return Packing(sequence=self.recipe["sequence"], how=how, too_long=too_long)

    def streamed(self, tokenizer: str, weights: Sequence[float] | None, seed: int, say: Report) -> Supply:
        """The supply of sources whose shards are encoded when they are near; the first of each is here."""
        share = 0.0 if self.own is not None else self.recipe.get("validation", 0.0)
        recipe = {**self.recipe, "tokenizer": tokenizer, "global_batch": 0}
        cache: Path = recipe["cache"].expanduser()
        names = [source.name for source in self.trained_on]
        feeds, held, fingerprints = [], [], []
        held_share = [f"data.validation = {share:g} is a share of its first shard"] if share else []
        for number, (source, shards) in enumerate(zip(self.trained_on, self.shards, strict=True)):
            # The numbers of samples that the folder's index has are those under all of this.
            facts = (source.identity, len(shards), shards[0].source.parts, content_of(tokenizer), share)
            about = (
                *facts,
                source.text_field,
                self.packing.keeps_documents,
                getattr(recipe.get("chat"), "fingerprint", ""),
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
                    notes=[f"streamed in {len(shards)} shards", *held_share],
                    report=say,
                )
            )
            held.append(Held(source.name, rows_of(first.held, self.packing)))
            fingerprints += [f"streamed {source.identity}", first.fingerprint]
        if self.own is not None:
            judged = prepare(self.own, **{**recipe, "validation": 0.0}, report=say)
            held = [Held(self.own.name, rows_of(judged.trained, self.packing))]
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
        """What `get`, which is `prepare` or `preview`, gives of each source; None where it has none."""
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
            Whole(name, rows_of(corpus.trained, packing), seed=seed, number=number)
            for number, (name, corpus) in enumerate(zip(names, known, strict=True))
        )
        if self.own is None:
            held = [(name, corpus.held) for name, corpus in zip(names, known, strict=True)]
        else:
            held = [(self.own.name, known[0].held if judged is None else judged.trained)]
        tokens = sum(len(corpus.train) for corpus in known)
        _check(feeds, tokens, packing, self.recipe.get("global_batch", 1))
        counts = [feed.samples for feed in feeds] if weights is None else weighted(names, weights)
        parts = [*known, *([] if judged is None else [judged])]
        return Supply(
            feeds,
            Mix(counts, seed),
            tuple(Held(name, rows_of(part, packing)) for name, part in held),
            known[0].tokenizer,
            together([corpus.fingerprint for corpus in parts]),
            f"{format_count(tokens)} training tokens, "
            f"{format_count(sum(len(part.tokens) for _, part in held))} validation tokens",
        )


@dataclass(frozen=True, slots=True)
class _Encode:
    """Makes the token arrays of a shard. share: of the first that is held back."""

    shards: Sequence[Shard]
    recipe: Mapping[str, Any]
    share: float

    def recipe_of(self, number: int) -> dict[str, Any]:
        """As of `prepare`."""
        return {**self.recipe, "validation": 0.0 if number else self.share}

    def __call__(self, number: int) -> Corpus:
        return prepare(self.shards[number].source, **self.recipe_of(number))


def content_of(tokenizer: str) -> str:
    """What stands for a tokenizer: its name, or a hash of its file."""
    path = Path(tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else tokenizer


def _check(feeds: Sequence[Whole], tokens: int, packing: Packing, batch: int) -> None:
    """Raise DataError for a source without a sample, and for less than a step in all of several."""
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
    """The fingerprint of several things; that of a single one is its own."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256("\0".join(fingerprints).encode()).hexdigest()
