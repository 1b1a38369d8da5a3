"""The samples of a data-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from atoll.base.errors import ConfigError
from atoll.plans.federation.lots import LotsHeld
from atoll.plans.plan import Place
from atoll.runtime.places import cache_folder
from atoll.training.config import Config
from atoll.training.data import Name, Supply, TokenBatch, hide, prepare_supply, preview_supply
from atoll.training.data.balance import Imbalance, balanced_order, imbalance
from atoll.training.setup.chat import chat_template


def prepare_corpus(config: Config, *, say: Callable[[str], None] | None = None) -> Supply:
    """Return the configured corpus, from the cache if it is there. `say` is called before long work."""
    return prepare_supply(config.data.sources, **_recipe(config), report=say)


SHARD = 64 << 20
"""Bytes of a streamed source that are encoded at a time."""


def preview_corpus(config: Config) -> Supply | None:
    """Return the configured corpus without writing to the cache; None if it would take long. See
    `atoll.training.data.preview`."""
    return preview_supply(config.data.sources, **_recipe(config))


def _recipe(config: Config) -> dict[str, Any]:
    data = config.data
    held_back = data.validation
    if isinstance(held_back, str) and _path(held_back) in map(_path, data.sources):
        one = "one of data.source" if len(data.sources) > 1 else "data.source itself"
        raise ConfigError(
            f"data.validation = {held_back!r} is {one}, so the validation loss would be that of what is "
            "learned; give another file or folder, or a share of the corpus such as 0.01"
        )
    return {
        "weights": data.shares,
        "seed": config.train.seed,
        "shard": SHARD if data.streaming else None,
        "tokenizer": config.tokenizer,
        "cache": Path(data.cache) if data.cache is not None else cache_folder(),
        "sequence": data.sequence,
        "global_batch": config.train.global_batch,
        "validation": data.validation,
        "text_field": data.text_field,
        "how": data.how,
        "too_long": data.rule,
        "chat": chat_template(config),
        "ignored": data.ignored_keys,
        "bad_records": data.bad_records,
    }


def _path(name: str) -> Path:
    return Path(name).expanduser().resolve()


def vocabulary_of(config: Config, corpus: Supply) -> int:
    """Return the model's number of ids: model.vocabulary, or that of the tokenizer, plus a mask token if one is
    needed."""
    ids = corpus.tokenizer.size
    if config.train.is_masked:
        ids = max(ids, mask_of(corpus) + 1)
    wanted = config.model.vocabulary
    if wanted is not None and wanted < ids:
        raise ConfigError(
            f"model.vocabulary = {wanted} is smaller than the {ids} ids of data.tokenizer = "
            f"{config.tokenizer!r}; use at least {ids}, or leave it out"
        )
    return ids if wanted is None else wanted


def mask_of(corpus: Supply) -> int:
    """Return the id of the mask token of the masked objective: the tokenizer's, or one after all of its ids."""
    own = corpus.tokenizer.mask
    return corpus.tokenizer.size if own is None else own


MOST_READ = 64
"""Steps whose samples an island can still name."""


class Samples:
    """A rank's share of each step of the common order, and of the validation split.

    position: number of samples that all ranks together have taken since the run's start; of an island that comes and
    goes, since it became a member.
    """

    def __init__(self, config: Config, corpus: Supply, place: Place) -> None:
        self.position = 0
        self._corpus = corpus
        self._weights = config.data.shares
        self._batch = config.train.global_batch
        self._eval_batches = config.train.eval_batches
        share = self._batch // place.mesh.shares
        self._share = slice(place.share * share, (place.share + 1) * share)
        self._next: TokenBatch | None = None
        # Of an island: what it may read, and what its last steps have read, by the position before them.
        self._lots: LotsHeld | None = None
        self._read: dict[int, Sequence[int]] = {}
        self._train = config.train
        self._mask = mask_of(corpus)
        self._is_balanced, self._shares = config.data.balance, place.mesh.shares
        self._has_documents = config.data.how == "documents"

    def take(self) -> TokenBatch:
        """Return the share of the next step: consecutive microbatches."""
        taken = self.peek()
        self._next = None
        if self._lots is not None:
            # The last steps, whose results may come after their samples were counted.
            self._read = {**dict([*self._read.items()][-MOST_READ:]), self.position: self._places(self.position)}
        self.position += self._batch
        return taken

    def go_to(self, position: int) -> None:
        """Continue with the samples from `position` on."""
        self.position, self._next = position, None

    def follow(self, lots: LotsHeld, position: int) -> None:
        """Read an island's samples from now on, `position` of them read already since it became a member."""
        self._lots = lots
        if position != self.position:
            self.go_to(position)

    def sequences(self, position: int, samples: range) -> list[Name]:
        """Return the names of `samples` in the corpus, in a step that starts at `position`."""
        if not self._is_balanced and self._lots is None:
            return self._corpus.names(position + samples.start, len(samples))
        return [name for at in samples for name in self._corpus.names(self.position_of(position, at), 1)]

    def position_of(self, position: int, at: int) -> int:
        """Return the position of sample `at` of a step that starts at `position`."""
        return self._of_step(position)[at]

    def epoch(self, position: int) -> float:
        """Return the number of passes over the corpus before `position`; for an island, before what it reads there."""
        if self._lots is None:
            return self._corpus.epoch(position)
        before = self._read.get(position - self._batch)
        return self._corpus.epoch(0 if before is None else before[-1] + 1)

    def peek(self) -> TokenBatch:
        """Return the next result of `take`."""
        if self._next is None:
            places = self._of_step(self.position)[self._share]
            begin = self.position + self._share.start
            if isinstance(places, range):
                taken = self._corpus.take(places.start, len(places))
            else:
                taken = self._corpus.at(places)
            count = self._share.stop - self._share.start
            self._next = self._objective(taken, range(begin, begin + count) if self._lots is None else places)
        return self._next

    def _places(self, position: int) -> Sequence[int]:
        """Return the positions in the common order of the samples of a step that starts at `position`."""
        if self._lots is None:
            return range(position, position + self._batch)
        known = self._read.get(position)
        return self._lots.read(position, self._batch) if known is None else known

    def _of_step(self, position: int) -> Sequence[int]:
        """Return these in the order in which ranks take them."""
        places = self._places(position)
        if not self._is_balanced:
            return places
        return [places[at] for at in balanced_order(self._work(position), self._train.microbatch)]

    def _work(self, position: int) -> list[float]:
        if self._lots is None:
            return self._corpus.work(position, self._batch).tolist()
        return [float(self._corpus.work(place, 1)[0]) for place in self._places(position)]

    def imbalance(self, position: int) -> Imbalance | None:
        """Return the imbalance of the step that starts at `position`; None if all samples have the same work."""
        if not self._has_documents:
            return None
        work = self._work(position)
        if self._is_balanced:
            work = [work[at] for at in balanced_order(work, self._train.microbatch)]
        return imbalance(work, self._train.microbatch, self._shares)

    def _objective(self, taken: TokenBatch, positions: Sequence[int]) -> TokenBatch:
        """Return the batch with the labels of the objective, for samples at these positions."""
        if not self._train.is_masked:
            return taken
        kept = [*self._corpus.tokenizer.opening, *self._corpus.tokenizer.closing]
        return hide(taken, positions, seed=self._train.seed, ratio=self._train.mask_ratio, token=self._mask, kept=kept)

    @property
    def has_validation(self) -> bool:
        """True if the validation split has samples."""
        return any(held.rows.in_order_count for held in self._corpus.held)

    @property
    def notes(self) -> Sequence[str]:
        """Notes on split, dropped and truncated documents, and on the epochs of weighted sources."""
        notes = [*self._corpus.notes]
        if self._weights is not None:
            epochs = self._corpus.epochs(self._train.steps * self._batch)
            passes = zip(epochs, self._corpus.feeds, strict=True)
            words = ", ".join(f"{epoch:.3g} of {feed.name}" for epoch, feed in passes)
            notes.append(f"epochs that the run's {self._train.steps} steps take: {words} (data.source)")
        return notes

    def validation(self) -> Iterator[tuple[str, TokenBatch]]:
        """Yield the shares of the first eval_batches batches of the validation split, each with a step's size and from
        one source, with its name."""
        for at, (source, each) in enumerate(self._corpus.validation(self._batch, limit=self._eval_batches)):
            share = {name: values[self._share] for name, values in each.items()}
            begin = at * self._batch + self._share.start
            yield source, self._objective(share, range(begin, begin + len(share["input_ids"])))
