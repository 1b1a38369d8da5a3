"""The loop of a training run, the same on every rank.

    start       fresh: evaluate as step 0.  resumed: load the newest complete checkpoint, from any layout
    each step   train; share signals and memory; write the result (with post-validated steps, that of the previous
                step); evaluate, save and stop when due
    end         evaluate and save unless just done, generate a sample

Its parts share a `RankRun`: `Progress` is how far it is, `RunCheckpoints` finds, loads and saves, `Results` shares and
writes down what steps gave.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from atoll.base.errors import BadStepError
from atoll.base.faults import Fault
from atoll.runtime.pipeline.step_end import StepResult
from atoll.runtime.services.evaluation import Evaluation
from atoll.training.data import Name
from atoll.training.output.folder import Start
from atoll.training.output.record import perplexity
from atoll.training.run.checkpoints import RunCheckpoints
from atoll.training.run.federated import FederatedRun
from atoll.training.run.results import Results
from atoll.training.run.run import RankRun
from atoll.training.run.text import generate

SAMPLE = 64
"""Tokens that continue the prompt at the end of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOutcome:
    """The result of a loop, the same on every rank.

    stopped: the signal that ended it early.  first_step, tokens: of this start, without those before a resume.
    sample: the generated text, if the run was completed and a sample is configured.
    peaks: for each pipeline rank, the peak bytes over its ranks: CUDA tensors, or resident memory.
    best: the step of the lowest validation loss, if its checkpoint is kept.
    """

    step: int
    stopped: signal.Signals | None
    first_step: int
    tokens: int
    sample: str | None
    peaks: tuple[int, ...]
    best: int | None = None


class Loop:
    """The loop of one run."""

    def __init__(self, run: RankRun) -> None:
        self._run = run
        self._engine = run.engine
        self._progress = run.progress
        self._samples = run.progress.samples
        self._checkpoints = RunCheckpoints(run)
        self._results = Results(run, on_fault=self._go_on)
        self._federated = None if run.config.federation is None else FederatedRun(run, self._results)

    def run(self, start: Start) -> LoopOutcome:
        """Train to the last step, or until a signal."""
        is_fresh = not self._checkpoints.resume(start)
        if self._federated is not None:
            if start is Start.OVERWRITE:
                self._federated.forget()
            self._federated.join(1)
        first = self._engine.step_number
        self._results.open(first, run_id=self._checkpoints.run_id, is_fresh=is_fresh)
        if is_fresh:
            self._evaluate()
        stopped = self._steps(first)
        if self._federated is not None:
            self._federated.leave(stopped)
        if stopped is None:
            self._evaluate()
        self._checkpoints.save()
        self._checkpoints.finish()
        sample = None if stopped else self._sample()
        if self._results.recorder is not None:
            self._results.recorder.close()
        return LoopOutcome(
            step=self._engine.step_number,
            stopped=stopped,
            first_step=first + 1,
            tokens=self._results.tokens,
            sample=sample,
            peaks=self._results.peaks(),
            best=self._progress.best.step if self._checkpoints.keeps_best else None,
        )

    def _steps(self, first: int) -> signal.Signals | None:
        train, results = self._run.config.train, self._results
        every, memory = self._run.config.checkpoint.every, self._run.config.checkpoint.memory
        self._run.display.begin(first, train.steps)
        try:
            while self._engine.step_number < train.steps and not self._is_over():
                if self._federated is not None and not self._federated.join(2):
                    return self._federated.stopped
                begin = step = self._engine.step_number + 1
                rate = self._progress.schedule.rate
                self._progress.begin(step, oldest=results.oldest(step - 1))
                batch = self._samples.take()
                if self._federated is not None:
                    self._federated.read(self._samples.position)
                following = self._samples.peek() if step < train.steps else None
                with self._naming_samples(), nullcontext() if step < train.steps else self._engine.timing():
                    result = self._engine.submit(batch, following)
                self._progress.schedule.advance()
                results.expect(rate)
                stop = results.record(result)
                if self._federated is not None:
                    step = self._federated.follow()
                if self._engine.step_number != step and stop is None:
                    continue  # after a rollback
                # An island that has missed rounds goes on at the step of the others.
                is_due, is_kept, is_compared, is_held = (
                    each and step // each > (begin - 1) // each
                    for each in (train.eval_every, every, train.check_replicas, memory)
                )
                is_seen = is_due or is_kept or is_compared or is_held or step in (results.traced, train.steps)
                if stop is not None or is_seen:
                    with self._naming_samples():
                        result = self._engine.settle()
                    stop = results.record(result) or stop
                    if stop is not None and results.is_apart:  # all ranks have heard of it
                        results.record_apart()
                    if self._engine.step_number != step and stop is None:
                        continue
                if step == results.traced:
                    results.trace()
                if step == train.steps:
                    results.timing()
                if is_compared:
                    self._engine.check_replicas()
                if step >= train.steps:
                    break  # the end evaluates and saves, an island what the last rounds made of it
                is_best = bool(is_due) and self._evaluate()
                if stop is not None:
                    return stop
                if is_kept or (is_best and self._checkpoints.keeps_best):
                    self._checkpoints.save(is_extra=not is_kept)
                if is_held:
                    self._checkpoints.keep()
        finally:
            self._run.display.close()
        return None

    def _is_over(self) -> bool:
        """Return True if train.patience is exhausted."""
        best, patience = self._progress.best, self._run.config.train.patience
        if not best.is_over(patience):
            return False
        known = "" if best.loss is None else f" than {best.loss:.4f} after step {best.step}"
        self._run.display.say(
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
        begin = self._progress.positions[fault.step]
        found = self._samples.sequences(begin, fault.samples)
        several = "s" if len(found) > 1 else ""
        at = self._samples.position_of(begin, fault.samples.start)
        return found, f"\n  position {at} of the run's samples: sequence{several} {', '.join(map(str, found))}"

    def _go_on(self, result: StepResult) -> None:
        """Continue after a bad step, with the samples after its own, from the checkpoint of a rollback if there was
        one. [Note: skipped samples] A checkpoint records its run's position in the data; after a rollback to it, the
        incident records the new position."""
        fault = result.fault
        assert fault is not None, "asked about a bad step"
        sequences, words = self._sequences_of(fault)
        position = self._progress.position_after(result.step)
        if self._results.recorder is not None:
            self._results.recorder.incident(result, position=position, sequences=sequences)
        done = "skipped"
        if result.rollback is not None:
            back = result.rollback.step
            done = f"back to step {back}, continuing with the samples from position {position}"
            self._results.forget()
            self._progress.restore(result.rollback.state, position=position)
            self._progress.evaluated, self._progress.saved = min(self._progress.evaluated, back), back
            self._checkpoints.drop_after(back)
        self._run.display.say(f"note: {fault.describe()}{words}\n  {done}")

    # ---- evaluation

    def _evaluate(self) -> bool:
        """Evaluate on the validation split, unless this step's loss is known. Return True if it is the lowest so
        far."""
        step, progress = self._engine.step_number, self._progress
        if progress.evaluated == step or not self._samples.has_validation:
            return False
        parts: dict[str, Evaluation] = {}
        with self._engine.anchored():
            for source, batch in self._samples.validation():
                parts[source] = parts.get(source, Evaluation(0.0, 0, 0.0)) + self._engine.evaluate(batch)
        total = sum(parts.values(), Evaluation(0.0, 0, 0.0))
        progress.evaluated, progress.validation_loss = step, total.loss
        several = ", ".join(f"{source} {part.loss:.4f}" for source, part in parts.items()) if len(parts) > 1 else ""
        self._run.display.say(
            f"step {step}: validation loss {total.loss:.4f}, perplexity {perplexity(total.loss):.4g}"
            + (f" ({several})" if several else "")
        )
        if self._results.recorder is not None:
            self._results.recorder.evaluation(step, total, parts)
        return progress.best.judge(step, total.loss)

    def _sample(self) -> str | None:
        train = self._run.config.train
        if train.prompt is None or train.is_masked:  # which completes records, and continues nothing
            return None
        with self._engine.anchored():
            text = generate(
                self._engine,
                self._run.corpus.tokenizer,
                train.prompt,
                tokens=SAMPLE,
                context=self._run.config.data.sequence,
                seed=train.seed,
            )
        if self._results.recorder is not None:
            self._results.recorder.sample(text)
        return text
