"""Batches of a dataset for a data-parallel rank, from torch's DataLoader, resumable from a checkpoint.

[Note: one order] The order of samples depends only on the seed and the epoch. A step takes the next
`plan.global_batch` samples, and data-parallel rank d the d-th run of consecutive ones, the same as `Engine`'s
microbatches; so a loop continues under any layout, with the same samples in the same steps. Samples after the last
whole step of an epoch are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from atoll.base.errors import DataError
from atoll.plans.plan import Plan
from atoll.runtime.transport import world_rank
from atoll.training.data import SampleOrder

Collate = Callable[[list[Any]], Any]


class Loader:
    """Iterates over one epoch's steps and yields the batches of `Engine.step`. Iterating again is the next epoch.

    epoch: the current or next one.  position: number of its samples that all ranks together have taken. A loop that was
    left, or loaded, continues from there.
    """

    def __init__(
        self, dataset: Any, plan: Plan, *, shuffle: bool, seed: int, collate: Collate | None, options: Mapping[str, Any]
    ) -> None:
        self.dataset = dataset
        self.epoch = self.position = 0
        self._batch = plan.global_batch
        self._share = self._batch // plan.mesh.shares
        self._begin = plan.mesh.place(world_rank()).share * self._share
        self._is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        self._seed = seed if shuffle and not self._is_stream else None
        self._options = {**options, "collate_fn": collate}
        self._loaded: Any = None
        if self._is_stream and options.get("num_workers"):
            raise DataError("num_workers: each worker would read all of an iterable dataset; leave it out")
        if not self._is_stream and len(dataset) < self._batch:
            raise DataError(f"the dataset has {len(dataset)} samples, and a step takes {self._batch}")

    def __len__(self) -> int:
        """Return the number of steps in an epoch. Raises TypeError for an iterable dataset."""
        return len(self.dataset) // self._batch

    def __iter__(self) -> Iterator[Any]:
        batches = self._streamed() if self._is_stream else self._mapped()
        for batch in batches:
            # The batch in training counts as taken; batches that a worker has prefetched do not.
            self.position += self._batch
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def _mapped(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch of an indexed dataset."""
        samples = len(self.dataset)
        first = self.epoch * samples
        order = None if self._seed is None else SampleOrder(samples, self._seed)
        steps = range(self.position, samples - self._batch + 1, self._batch)

        def indices(at: int) -> list[int]:
            begin = at + self._begin
            taken = range(begin, begin + self._share) if order is None else order.take(first + begin, self._share)
            return [int(index) for index in taken]

        yield from DataLoader(self.dataset, batch_sampler=[indices(at) for at in steps], **self._options)

    def _streamed(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch of an iterable dataset: every rank reads all samples, and keeps its
        own."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self.dataset.load_state_dict(loaded)
        source = iter(self.dataset)
        if loaded is None:
            next(islice(source, self.position, self.position), None)  # read and discard the samples already taken
        while len(taken := list(islice(source, self._batch))) == self._batch:
            share = taken[self._begin : self._begin + self._share]
            yield from DataLoader(share, batch_size=self._share, **self._options)  # type: ignore[arg-type]

    # ---- position

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's position as JSON, the same on every rank: part of the `state` for `Engine.save`.

        It includes the state of an iterable dataset with a `state_dict`; others are read again from their beginning.
        """
        state = {"epoch": self.epoch, "position": self.position, **self._order()}
        if self._is_stream and hasattr(self.dataset, "state_dict"):
            state["dataset"] = self.dataset.state_dict() if self.position else None
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises DataError if it belongs to another order of samples."""
        if {"epoch", "position"} - set(state):
            raise DataError(f"this is not a state of a loader: it has {', '.join(sorted(state)) or 'nothing'}")
        differ = [
            f"{name} is {value}, and was {state.get(name)}"
            for name, value in self._order().items()
            if state.get(name) != value
        ]
        if differ:
            raise DataError(f"the state is of another order of samples: {'; '.join(differ)}")
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._loaded = state.get("dataset")

    def _order(self) -> dict[str, Any]:
        """Return the values that determine the order of samples."""
        return {"samples": None if self._is_stream else len(self.dataset), "seed": self._seed}


def loader(
    dataset: Any,
    plan: Plan,
    *,
    shuffle: bool = True,
    seed: int = 0,
    collate: Collate | None = None,
    **options: Any,
) -> Loader:
    """Return an iterable of this data-parallel rank's batches of a dataset, one per step, for `Engine.step`.

    dataset: indexed, with `__getitem__` and `__len__`, or iterable with an order of its own.  shuffle, seed: shuffle an
    indexed dataset anew each epoch, in the same order on every rank.  collate: converts a list of samples to a batch;
    torch's `default_collate` by default.  options: of `torch.utils.data.DataLoader`, such as num_workers and
    pin_memory.

    A batch has the model's inputs by name, such as `input_ids` and `labels`.

    Raises DataError if a dataset has fewer samples than a step, and for options that the loader sets itself.
    """
    own = {"batch_size", "batch_sampler", "sampler", "drop_last", "collate_fn", "generator"} & set(options)
    if own:
        raise DataError(f"{', '.join(sorted(own))}: the plan and the arguments of loader decide them; leave them out")
    return Loader(dataset, plan, shuffle=shuffle, seed=seed, collate=collate, options=options)
