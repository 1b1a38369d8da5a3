"""Which samples a data-parallel rank sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from atoll.config import Config
from atoll.data import Batch, Corpus, SampleOrder, batch, hide, prepare, preview, sample_count, validation_batches
from atoll.errors import ConfigError
from atoll.plans import Place
from atoll.runtime.places import cache_folder


def prepare_corpus(config: Config, *, say: Callable[[str], None] | None = None) -> Corpus:
    """The configured corpus, from the cache if it is there; `say` is told what takes long."""
    return prepare(config.data.source, **_recipe(config), report=say)


def preview_corpus(config: Config) -> Corpus | None:
    """The configured corpus without writing to the cache; None where it would take long. See `atoll.data.preview`."""
    return preview(config.data.source, **_recipe(config))


def _recipe(config: Config) -> dict[str, Any]:
    data = config.data
    return {
        "tokenizer": config.tokenizer,
        "cache": Path(data.cache) if data.cache is not None else cache_folder(),
        "sequence": data.sequence,
        "global_batch": config.train.global_batch,
        "validation": data.validation,
        "text_field": data.text_field,
    }


def vocabulary_of(config: Config, corpus: Corpus) -> int:
    """Ids the model knows: model.vocabulary, or as many as the tokenizer has, and one that hides others where it is
    needed."""
    ids = corpus.tokenizer.size
    if config.train.objective == "masked":
        ids = max(ids, mask_of(corpus) + 1)
    wanted = config.model.vocabulary
    if wanted is not None and wanted < ids:
        raise ConfigError(
            f"model.vocabulary = {wanted} is smaller than the {ids} ids of data.tokenizer = "
            f"{config.tokenizer!r}; use at least {ids}, or leave it out"
        )
    return ids if wanted is None else wanted


def mask_of(corpus: Corpus) -> int:
    """The id that hides others under the masked objective: the tokenizer's, or one behind all of its."""
    own = corpus.tokenizer.mask
    return corpus.tokenizer.size if own is None else own


class Samples:
    """A rank's share of each step of the common order, and of the validation split.

    position: samples that all ranks together have taken since the run's start.
    """

    def __init__(self, config: Config, corpus: Corpus, place: Place) -> None:
        self.position = 0
        self._corpus = corpus
        self._sequence = config.data.sequence
        self._batch = config.train.global_batch
        self._eval_batches = config.train.eval_batches
        share = self._batch // place.mesh.data
        self._share = slice(place.data * share, (place.data + 1) * share)
        self._next: Batch | None = None
        self._train = config.train
        self._mask = mask_of(corpus)
        self._order = SampleOrder(sample_count(corpus.train, self._sequence), config.data_seed)

    def take(self) -> Batch:
        """The share of the next step: consecutive microbatches."""
        taken = self.peek()
        self._next = None
        self.position += self._batch
        return taken

    def go_to(self, position: int) -> None:
        """Take the samples from `position` on next."""
        self.position, self._next = position, None

    def sequences(self, position: int, samples: range) -> list[int]:
        """Which sequences of the corpus a step that begins at `position` takes as its `samples`."""
        return [int(index) for index in self._order.take(position + samples.start, len(samples))]

    def peek(self) -> Batch:
        """What `take` will give."""
        if self._next is None:
            indices = self._order.take(self.position, self._batch)[self._share]
            taken = batch(self._corpus.train, indices, self._sequence)
            self._next = self._objective(taken, self.position + self._share.start)
        return self._next

    def _objective(self, taken: Batch, position: int) -> Batch:
        """What is to be predicted of samples that stand at `position` and after it."""
        if self._train.objective == "causal":
            return taken
        positions = range(position, position + len(taken["input_ids"]))
        return hide(taken, positions, seed=self._train.seed, ratio=self._train.mask_ratio, token=self._mask)

    @property
    def has_validation(self) -> bool:
        """Something was held back."""
        return len(self._corpus.validation) > 1

    def validation(self) -> Iterator[Batch]:
        """The shares of the first eval_batches batches of the validation split, each a step's size."""
        whole = validation_batches(self._corpus.validation, self._sequence, size=self._batch, limit=self._eval_batches)
        for at, each in enumerate(whole):
            share = {name: values[self._share] for name, values in each.items()}
            yield self._objective(share, at * self._batch + self._share.start)
