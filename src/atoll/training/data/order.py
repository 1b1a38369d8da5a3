"""The samples of a batch, and their order.

Sample k of a token array is tokens k*S .. k*S+S (S+1 of them): inputs are the first S, labels the last S. The order is
one endless sequence of epochs, each a permutation of all samples. It depends on the seed and on the position (samples
taken since the start), never on ranks or batch size, so that a run resumes under any layout from its position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import DataError
from atoll.base.labels import IGNORED_LABEL
from atoll.training.data.blocks import CheckedTokens

Tokens: TypeAlias = NDArray[np.integer[Any]] | CheckedTokens
TokenBatch: TypeAlias = dict[str, NDArray[np.int64]]
"""input_ids and labels, [B, S]; labels[b, t] is the token after input_ids[b, t], or -100 if it is not in the loss.

Rows of several documents also have position_ids, which restart at each document.
"""


def sample_count(tokens: Tokens, sequence: int) -> int:
    """Return the number of full samples of `sequence` tokens; each needs one more token for its last label."""
    check_sequence(sequence)
    return max(0, (len(tokens) - 1) // sequence)


def shuffled(count: int, *words: int) -> NDArray[np.int64]:
    """Return a permutation of 0..count-1 that depends on the seed words only, for all versions of numpy."""
    # numpy guarantees the raw bits of its bit generators across versions, but not the result of permutation().
    keys = np.random.Philox(np.random.SeedSequence(words)).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64)


class SampleOrder:
    """The endless order of `samples` samples for a seed.

    number: index of the source; each source has its own order.
    """

    def __init__(self, samples: int, seed: int, number: int = 0) -> None:
        if samples < 1:
            raise DataError(f"an order needs at least 1 sample, got {samples}")
        if seed < 0:
            raise DataError(f"an order needs a seed of at least 0, got {seed}")
        self.samples = samples
        self.seed = seed
        self.number = number
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def take(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the indices of the samples at positions position .. position+count-1."""
        if position < 0 or count < 0:
            raise DataError(f"position {position} and count {count} must be at least 0")
        parts = []
        while count > 0:
            epoch, offset = divmod(position, self.samples)
            part = self._of_epoch(epoch)[offset : offset + count]
            parts.append(part)
            position += len(part)
            count -= len(part)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _of_epoch(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            # Trailing zeros do not change SeedSequence: the order of source 0 equals that of a single source.
            self._epoch, self._permutation = epoch, shuffled(self.samples, self.seed, epoch, self.number)
        return self._permutation


def batch(tokens: Tokens, indices: NDArray[np.int64], sequence: int) -> TokenBatch:
    """Return the samples with these indices, int64 [len(indices), sequence]."""
    samples = sample_count(tokens, sequence)
    if len(indices) and (indices.min() < 0 or indices.max() >= samples):
        raise DataError(
            f"samples {indices.min()}..{indices.max()} were asked for; {len(tokens)} tokens have samples "
            f"0..{samples - 1} of {sequence}"
        )
    rows = np.asarray(tokens[indices[:, None] * sequence + np.arange(sequence + 1)], dtype=np.int64)
    return {"input_ids": np.ascontiguousarray(rows[:, :-1]), "labels": np.ascontiguousarray(rows[:, 1:])}


def scatter(parts: Sequence[tuple[NDArray[np.int64], TokenBatch]], count: int) -> TokenBatch:
    """Return one batch of `count` samples from parts with the places of their samples."""
    found = {name: np.empty((count, *values.shape[1:]), values.dtype) for name, values in parts[0][1].items()}
    for places, batch in parts:
        for name, values in batch.items():
            found[name][places] = values
    return found


def validation_batches(tokens: Tokens, sequence: int, *, size: int, limit: int | None = None) -> Iterator[TokenBatch]:
    """Yield batches of `size` samples in order, in which every token but the first is a label exactly once.

    The last sample and the last batch are padded with label -100, so all batches have one shape.
    limit: maximum number of batches.
    """
    check_sequence(sequence)
    if size < 1:
        raise DataError(f"a batch has at least 1 sample, got {size}")
    labels_total = max(0, len(tokens) - 1)
    step = size * sequence
    batches = -(-labels_total // step)
    for index in range(batches if limit is None else min(batches, limit)):
        start = index * step
        chunk = np.asarray(tokens[start : start + step + 1], dtype=np.int64)
        counted = len(chunk) - 1
        inputs = np.zeros(step, dtype=np.int64)
        labels = np.full(step, IGNORED_LABEL, dtype=np.int64)
        inputs[:counted], labels[:counted] = chunk[:-1], chunk[1:]
        yield {"input_ids": inputs.reshape(size, sequence), "labels": labels.reshape(size, sequence)}


def check_sequence(sequence: int) -> None:
    """Raise DataError if the number of tokens is invalid for a sample."""
    if sequence < 1:
        raise DataError(f"data.sequence = {sequence}: must be at least 1")
