"""The loop of a training run, the same on every rank.

    start       fresh: evaluate as step 0.  resumed: load the newest complete checkpoint, from any layout
    each step   train; share signals and memory; write the result (with post-validated steps, that of the previous
                step); evaluate, save and stop when due
    end         evaluate and save unless just done, generate a sample

Its parts: `Progress` is how far it is, `RunCheckpoints` finds, loads and saves, `Results` shares and writes down what
steps gave.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from atoll.base.errors import BadStepError
from atoll.base.faults import Fault
from atoll.prediction.cost import Cluster
from atoll.runtime.engine import Engine, Evaluation
from atoll.runtime.pipeline.step_end import StepResult
from atoll.training.checkpoints import RunCheckpoints
from atoll.training.config import Config
from atoll.training.data import Name, Supply
from atoll.training.display import Display
from atoll.training.folder import RunFolder, Start
from atoll.training.lock import RunLock
from atoll.training.progress import Progress
from atoll.training.record import perplexity
from atoll.training.results import Results
from atoll.training.signals import StopRequest
from atoll.training.text import generate

SAMPLE = 64
"""Tokens that continue the prompt at the end of a run."""


@dataclass(frozen=True, slots=True)
class LoopOutcome:
    """The result of a loop, the same on every rank.

    stopped: the signal that ended it early.  first_step, tokens: of this start, without those before a resume.
    sample: the generated text, if the run was completed and a sample is configured.
    peaks: for each pipeline rank, the peak bytes over its ranks.
    best: the step of the lowest validation loss, if its checkpoint is kept.
    """

    step: int
    stopped: signal.Signals | None
    first_step: int
    tokens: int
    sample: str | None
    peaks: tuple[int, ...]
    best: int | None


class Loop:
    """The loop of one run."""

    def __init__(
        self,
        config: Config,
        corpus: Supply,
        engine: Engine,
        *,
        folder: RunFolder,
        display: Display,
        stop: StopRequest,
        lock: RunLock | None = None,
        here: Cluster | None = None,
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.engine = engine
        self.display = display
        self.progress = Progress(config, corpus, engine)
        self.samples = self.progress.samples
        check_lock = _nothing_to_check if lock is None else lock.check
        self.checkpoints = RunCheckpoints(
            config,
            corpus,
            engine,
            progress=self.progress,
            folder=folder,
            display=display,
            check_lock=check_lock,
        )
        self.results = Results(
            config,
            corpus,
            engine,
            progress=self.progress,
            folder=folder,
            display=display,
            stop=stop,
            check_lock=check_lock,
            on_fault=self._go_on,
        )
        self._here = here

    def run(self, start: Start) -> LoopOutcome:
        """Train to the last step, or until a signal."""
        is_fresh = not self.checkpoints.resume(start)
        first = self.engine.step_number
        self.results.open(first, run=self.checkpoints.run, is_fresh=is_fresh, here=self._here)
        if is_fresh:
            self._evaluate()
        stopped = self._steps(first)
        if stopped is None:
            self._evaluate()
        self.checkpoints.save()
        self.engine.finish_saving()
        sample = None if stopped else self._sample()
        if self.results.recorder is not None:
            self.results.recorder.close()
        return LoopOutcome(
            self.engine.step_number,
            stopped,
            first_step=first + 1,
            tokens=self.results.tokens,
            sample=sample,
            peaks=self.results.peaks(),
            best=self.progress.best.step if self.checkpoints.keeps_best else None,
        )

    def _steps(self, first: int) -> signal.Signals | None:
        train, every, results = self.config.train, self.config.checkpoint.every, self.results
        self.display.begin(first, train.steps)
        try:
            while self.engine.step_number < train.steps and not self._is_over():
                step = self.engine.step_number + 1
                rate = self.progress.schedule.rate
                self.progress.begin(step, oldest=results.oldest(step - 1))
                batch = self.samples.take()
                following = self.samples.peek() if step < train.steps else None
                with self._naming_samples(), nullcontext() if step < train.steps else self.engine.timing():
                    result = self.engine.submit(batch, following)
                self.progress.schedule.advance()
                results.expect(rate)
                stop = results.record(result)
                if self.engine.step_number != step and stop is None:
                    continue  # after a rollback
                is_due = train.eval_every and step % train.eval_every == 0
                is_kept = every and step % every == 0
                is_compared = train.check_replicas and step % train.check_replicas == 0
                if stop is not None or is_due or is_kept or is_compared or step in (results.traced, train.steps):
                    with self._naming_samples():
                        result = self.engine.settle()
                    stop = results.record(result) or stop
                    if stop is not None and results.is_apart:  # all ranks have heard of it
                        results.record_apart()
                    if self.engine.step_number != step and stop is None:
                        continue
                if step == results.traced:
                    results.trace()
                if step == train.steps:
                    results.timing()
                if is_compared:
                    self.engine.check_replicas()
                is_best = bool(is_due) and self._evaluate()
                if stop is not None and self.engine.step_number < train.steps:
                    return stop
                if is_kept or (is_best and self.checkpoints.keeps_best):
                    self.checkpoints.save(is_extra=not is_kept and step < train.steps)
        finally:
            self.display.close()
        return None

    def _is_over(self) -> bool:
        """Return True if train.patience is exhausted."""
        best, patience = self.progress.best, self.config.train.patience
        if not best.is_over(patience):
            return False
        known = "" if best.loss is None else f" than {best.loss:.4f} after step {best.step}"
        self.display.say(
            f"note: ended early: {best.waited} evaluations in a row have no lower validation loss{known} "
            f"(train.patience = {patience})"
        )
        return True

    # ---- bad steps

    @contextmanager
    def _naming_samples(self) -> Iterator[None]:
        """Context in which the error of a bad step also names its sequences of the corpus."""
        try:
            yield
        except BadStepError as error:
            raise BadStepError(f"{error}{self._sequences_of(error.fault)[1]}", fault=error.fault) from error

    def _sequences_of(self, fault: Fault) -> tuple[list[Name], str]:
        """Return the sequences of the corpus among which the first bad one is, and a description of them."""
        if fault.samples is None:
            return [], ""
        begin = self.progress.positions[fault.step]
        found = self.samples.sequences(begin, fault.samples)
        several = "s" if len(found) > 1 else ""
        at = begin + fault.samples.start
        return found, f"\n  position {at} of the run's samples: sequence{several} {', '.join(map(str, found))}"

    def _go_on(self, result: StepResult) -> None:
        """Continue after a bad step, with the samples after its own, from the checkpoint of a rollback if there was
        one. [Note: skipped samples] A checkpoint records its run's position in the data; after a rollback to it, the
        incident records the new position."""
        fault = result.fault
        assert fault is not None, "asked about a bad step"
        sequences, words = self._sequences_of(fault)
        position = self.progress.position_after(result.step)
        if self.results.recorder is not None:
            self.results.recorder.incident(result, position=position, sequences=sequences)
        done = "skipped"
        if result.rollback is not None:
            back = result.rollback.step
            done = f"back to step {back}, continuing with the samples from position {position}"
            self.results.forget()
            self.progress.restore(result.rollback.state, position=position)
            self.progress.evaluated, self.progress.saved = min(self.progress.evaluated, back), back
            self.checkpoints.drop_after(back)
        self.display.say(f"note: {fault.describe()}{words}\n  {done}")

    # ---- evaluation

    def _evaluate(self) -> bool:
        """Evaluate on the validation split, unless this step's loss is known. Return True if it is the lowest so
        far."""
        step, progress = self.engine.step_number, self.progress
        if progress.evaluated == step or not self.samples.has_validation:
            return False
        parts: dict[str, Evaluation] = {}
        with self.engine.anchored():
            for source, batch in self.samples.validation():
                parts[source] = parts.get(source, Evaluation(0.0, 0, 0.0)) + self.engine.evaluate(batch)
        total = sum(parts.values(), Evaluation(0.0, 0, 0.0))
        progress.evaluated, progress.validation_loss = step, total.loss
        several = ", ".join(f"{source} {part.loss:.4f}" for source, part in parts.items()) if len(parts) > 1 else ""
        self.display.say(
            f"step {step}: validation loss {total.loss:.4f}, perplexity {perplexity(total.loss):.4g}"
            + (f" ({several})" if several else "")
        )
        if self.results.recorder is not None:
            self.results.recorder.evaluation(step, total, parts)
        return progress.best.judge(step, total.loss)

    def _sample(self) -> str | None:
        train = self.config.train
        if train.prompt is None or train.is_masked:  # which completes records, and continues nothing
            return None
        with self.engine.anchored():
            text = generate(
                self.engine,
                self.corpus.tokenizer,
                train.prompt,
                tokens=SAMPLE,
                context=self.config.data.sequence,
                seed=train.seed,
            )
        if self.results.recorder is not None:
            self.results.recorder.sample(text)
        return text


def _nothing_to_check() -> None:
    """Stands for the check of a lock where there is none."""
