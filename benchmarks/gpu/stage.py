"""What a stage of `one_gpu.py` gets: a device, a time limit, and a place for what it finds."""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

Choice = TypeVar("Choice")


@dataclass(slots=True)
class Run:
    """One stage in its process.

    path: file of what it has found, written at each `keep`, so that a stage that is killed leaves what it had.
    out: folder of the files that come back.  seconds: the time limit.  rehearse: sizes are tiny and the device a CPU.
    """

    path: Path
    out: Path
    seconds: float
    rehearse: bool
    found: dict[str, Any] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> torch.device:
        """Where tensors are."""
        return torch.device("cpu") if self.rehearse else torch.device("cuda", 0)

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self.begin + self.seconds - time.monotonic()

    def choose(self, real: Choice, tiny: Choice) -> Choice:
        """Return the value for a GPU, or that for a rehearsal."""
        return tiny if self.rehearse else real

    def keep(self, name: str, value: Any) -> None:
        """Record what was found, and write it at once."""
        self.found[name] = value
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self.found, default=str), encoding="utf-8")
        os.replace(draft, self.path)
        print(f"{time.monotonic() - self.begin:6.1f} s  {name}: {str(value)[:300]}", flush=True)

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.rehearse:
            torch.cuda.synchronize()

    def clock(self) -> Clock:
        """Start to time work on the device."""
        return Clock(on_device=not self.rehearse)

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Context whose tensors are gone when it ends: nothing is held for the next contender."""
        self.release()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Give unused memory back to the driver."""
        gc.collect()
        if not self.rehearse:
            torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Count peaks from now on."""
        if not self.rehearse:
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, int]:
        """Bytes of tensors and of the allocator, now and at their peaks; none on a CPU, where torch does not count."""
        if self.rehearse:
            return {}
        return {
            "allocated": torch.cuda.memory_allocated(),
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
        }


def attempt(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a call returns with an empty `problem`, or its error as `problem`: one row of a stage may fail.

    The traceback goes to the log. It is not kept, because its frames hold tensors.
    """
    try:
        return {**call(), "problem": ""}
    except torch.OutOfMemoryError as error:
        problem = f"out of memory: {str(error).partition('.')[0]}"
    except Exception as error:
        traceback.print_exc()
        problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return {"problem": problem}


class Clock:
    """Seconds by the device's events and by the host's clock."""

    def __init__(self, *, on_device: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_device else []
        self._start = time.perf_counter()
        if self._events:
            self._events[0].record()

    def stop(self) -> tuple[float, float]:
        """Wait for the device, and return its seconds and those of the host."""
        if self._events:
            self._events[1].record()
            self._events[1].synchronize()
        host = time.perf_counter() - self._start
        return (self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events else host), host
