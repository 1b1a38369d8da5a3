"""Display of a run's progress: on stderr, from rank 0.

On a terminal, one live line; elsewhere a plain line every few seconds.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Column

from atoll.base.units import format_bytes, format_rate, format_seconds
from atoll.runtime.pipeline.step_end import StepResult
from atoll.training.output.folder import WARM_UP

PLAIN_SECONDS = 5.0


class Display:
    """Progress of one rank's run. With `is_speaking` False it prints nothing.

    compiles: the first steps compile the blocks, and are left out of the estimate of the time left.
    """

    def __init__(self, *, is_speaking: bool, device: str, compiles: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=not is_speaking)
        self._is_live = is_speaking and self._console.is_terminal
        self._memory = "max RSS" if device == "cpu" else "max CUDA"
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._warm_up = WARM_UP if compiles else 0
        self._steps = 0
        self._first = self._shown = 0
        self._begin = 0.0
        self._said = 0.0
        self._rate: float | None = None

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._console.print(text, markup=False)

    def begin(self, done: int, steps: int) -> None:
        """Start training after `done` of `steps` steps."""
        self._first, self._shown, self._steps = done, done + 1, steps
        self._begin = self._said = time.monotonic()
        if self._warm_up:
            self.say("compiling: the first steps take longer, and the time left does not count them")
        if self._is_live:
            line = TextColumn("{task.fields[line]}", table_column=Column(no_wrap=True), markup=False)
            self._progress = Progress(SpinnerColumn(), line, console=self._console, transient=True)
            self._task = self._progress.add_task("", total=steps, completed=done, line="first step")
            self._progress.start()

    def step(self, result: StepResult, *, memory_bytes: int, epoch: float) -> None:
        """Show a finished step.

        memory_bytes: the peak so far of the rank that needed most, shown as max RSS or max CUDA.  epoch: passes over
        the corpus so far.
        """
        now = time.monotonic()
        rate = result.tokens_per_second
        self._rate = rate if self._rate is None or self._warm_up else 0.9 * self._rate + 0.1 * rate
        line = (
            f"step {result.step}/{self._steps}  epoch {epoch:.3g}  loss {result.loss:.4f}  "
            f"{format_rate(self._rate, 'tokens')}  "
            f"bubble {result.bubble:.0%}  {self._memory} {format_bytes(memory_bytes)}"
        )
        if self._warm_up:
            self._warm_up -= 1
            self._first, self._begin = result.step, now
        if self._first < result.step < self._steps:
            left = (now - self._begin) / (result.step - self._first) * (self._steps - result.step)
            line += f"  {format_seconds(left)} left"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=result.step, line=line)
        elif now - self._said >= PLAIN_SECONDS or result.step in (self._shown, self._steps):
            self._said = now
            self.say(line)

    def close(self) -> None:
        """End the display and release the terminal."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
