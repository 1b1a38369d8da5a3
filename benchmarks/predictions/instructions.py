"""Steps whose instructions are watched: their bytes are counted, or they sleep for as long as a device is said to
compute."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from atoll.program import Do, Operation
from atoll.program.memory import Held
from atoll.runtime.engine import Engine
from atoll.runtime.sharding.hosted import visiting
from benchmarks.islands.allocations import Allocations

Key = tuple[int, bool]
"""Where a storage is, and whether ranks share it."""


class Watch(Protocol):
    """Calls an instruction, and gives what it gives."""

    def __call__(self, do: Operation, of: int, call: Callable[[], Any]) -> Any:
        """of: the index of a block or a unit; -1 for neither."""


@contextmanager
def watched(engine: Engine, watch: Watch) -> Iterator[None]:
    """Have `watch` call the instructions of an engine's steps.

    The forward of a block is called where the model calls it, within the call of its stage, which is not watched.
    """
    executor = engine._executor
    use = executor._use

    def chosen(*given: Any) -> Any:
        score = use(*given)
        both = zip(score.program.instructions, score.calls, strict=True)
        executor.counter.calls = tuple(
            call if each.do is Do.F else partial(watch, each.do, each.of, call) for each, call in both
        )
        return score

    executor._use = chosen  # type: ignore[method-assign]
    blocks = [block for stage in executor.microbatches.stages.values() for block in stage.blocks]
    for block in blocks:
        block.forward = partial(_forward, watch, block.index, block.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del executor._use
        for block in blocks:
            del block.forward


def _forward(watch: Watch, index: int, forward: Callable[..., Any], *given: Any) -> Any:
    return watch(Do.F, index, partial(forward, *given))


Slept = Mapping[tuple[Operation, int], float]
"""Seconds of instructions, by operation, and block or unit."""


class Sleep:
    """The emulated device: an instruction takes the seconds that it is given, what it really computes among them.

    seconds: of each slice of a microbatch's sequences; one if they are whole.
    """

    def __init__(self, seconds: Sequence[Slept], engine: Engine) -> None:
        self.seconds, self._counter = seconds, engine._executor.counter

    def __call__(self, do: Operation, of: int, call: Callable[[], Any]) -> Any:
        """See `Watch`."""
        own = self.seconds[(self._counter.action.microbatch or 0) % len(self.seconds)]
        until = time.monotonic() + own.get((do, of), 0.0)
        given = call()
        time.sleep(max(0.0, until - time.monotonic()))
        return given


class Count:
    """Counts what a rank holds after each instruction, and the most that it held within it.

    Everything but activations is counted from the tensors that the engine keeps, each storage once. Activations are
    what the allocator has given out besides, above `base`, so that nothing is left out. The gradients of other ranks
    that a reduction receives are made and freed by its lane, whenever the other ranks send theirs: REDUCE is waited for
    at once, so that they are seen, and they count until its REDUCED, in the slowest case.

    held: the bytes at the instruction within which the total was largest.  most: the largest of each component.
    """

    def __init__(self, engine: Engine, base: int) -> None:
        self.engine, self.base = engine, base
        self.allocations = Allocations()
        self.held, self.most = Held(), Held()
        self.at: tuple[Operation, int] | None = None
        self._arriving: deque[int] = deque()

    def __call__(self, do: Operation, of: int, call: Callable[[], Any]) -> Any:
        """See `Watch`."""
        self.allocations.forget()
        given = call()
        if do is Do.REDUCE:
            self._finish(of)
        inside, after = self.allocations.most(), self.allocations.out()
        assert inside is not None, "the ranks were started with the allocator's library"
        assert after is not None, "the ranks were started with the allocator's library"
        if do is Do.REDUCE:
            self._arriving.append(inside - after)
            inside = after
        elif do is Do.REDUCED:
            self._arriving.popleft()
        parts = self._parts()
        own = Held(**{component: sum(sizes.values()) for component, sizes in parts.items()})
        # A lane reduces one after the other, so one has room for all.
        own = own._replace(buffers=own.buffers + max(self._arriving, default=0))
        known = sum(size for sizes in parts.values() for (_, is_shared), size in sizes.items() if not is_shared)
        # Host memory is apart from the device's, which here is the same.
        kept = self.engine._executor.microbatches.kept
        away = sum(self._new(self._at_home(), set()).values()) + (0 if kept is None else kept.nbytes)
        held = own._replace(activations=after - self.base - known - away, passing=inside - after)
        if held.total > self.held.total:
            self.held, self.at = held, (do, of)
        self.most = Held(*map(max, self.most, held))
        return given

    def _finish(self, of: int) -> None:
        """Wait until the reductions of a unit have ended."""
        for unit in self.engine.units:
            if unit.spec.index == of:
                for segment in unit.segments:
                    for job, _ in segment.gradients.reducing:
                        job.finish()

    def _parts(self) -> Mapping[str, Mapping[Key, int]]:
        """Bytes of the components that are tensors of the engine, by where they are."""
        own: defaultdict[str, list[torch.Tensor | None]] = defaultdict(list)
        for unit in self.engine.units:
            for segment in unit.segments:
                shards, gradients = segment.shards, segment.gradients
                own["parameters"].append(shards.parameter)
                own["optimizer"] += [shards.master] if shards.hosted is None else visiting(shards.hosted)
                own["gathered"] += [segment.unsharded.buffer, segment.unsharded._staged]
                own["gradients"] += gradients.shards.values()
                own["buffers"] += [
                    *gradients.unsharded.values(),
                    *(buffer for _, buffer in gradients.reducing),
                    gradients.final,
                ]
        own["optimizer"] += self.engine._optimizer.state_tensors()
        own["pending"] += self._pending()
        seen: set[Key] = set()
        self._new(self._at_home(), seen)
        return {component: self._new(tensors, seen) for component, tensors in own.items()}

    def _at_home(self) -> Iterator[torch.Tensor | None]:
        """Yield the tensors that are stored in host memory."""
        for unit in self.engine.units:
            for segment in unit.segments:
                yield from segment.held()["host"]

    def _new(self, tensors: Iterable[torch.Tensor | None], seen: set[Key]) -> dict[Key, int]:
        """Bytes of storages that have not been seen. What is lent is a part of one storage, and counts by itself."""
        found: dict[Key, int] = {}
        memory, arena = (getattr(self.engine.transport.memory, name, None) for name in ("_file", "_arena"))
        for tensor in tensors:
            storage = None if tensor is None else tensor.untyped_storage()
            if tensor is None or storage is None or storage.nbytes() == 0:
                continue
            key, size = (storage.data_ptr(), memory is not None and memory.place(tensor) >= 0), storage.nbytes()
            if arena is not None and storage.data_ptr() == arena._piece.data_ptr():
                key, size = (tensor.data_ptr(), True), tensor.nbytes
            if key not in seen:
                seen.add(key)
                found[key] = size
        return found

    def _pending(self) -> Iterator[torch.Tensor]:
        """The factors of weights' gradients that wait for W."""
        for units in self.engine._executor.microbatches.state.pending.values():
            for kept in units.values():
                for _, factors in kept:  # those of experts come with the rows of each
                    each = [factors] if isinstance(factors, torch.Tensor) else factors
                    yield from (factor for factor in each if isinstance(factor, torch.Tensor))
