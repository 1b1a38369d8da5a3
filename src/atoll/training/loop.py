"""The loop of a training run, the same on every rank.

    start       fresh: evaluate as step 0.  resumed: load the newest complete checkpoint, from any layout
    each step   train; share signals and memory; write the result (with post-validated steps, that of the previous
                step); evaluate, save and stop when due
    end         evaluate and save unless just done, generate a sample

[Note: who decides] Information that only some ranks have (a signal, the newest checkpoint) is summed over the ranks
once per step before they act on it, so that no rank leaves the others waiting.

[Note: steps of islands] With outer steps, islands exchange losses and signals only after steps where they wait for each
other anyway: those after which a fragment is applied, and those with an evaluation, a save or a comparison. A sum over
the world in each step would stall islands behind the outer gradients, which use the same connections. Steps in between
are recorded when islands wait, as means over the islands, and a signal is heard then.
"""

from __future__ import annotations

import math
import reprlib
import signal
import time
import uuid
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from atoll.base.digests import digest
from atoll.base.errors import (
    BadStepError,
    CheckpointError,
    ConfigError,
    DamageError,
    UnverifiedWarning,
    UserError,
)
from atoll.base.faults import Fault, Rollback
from atoll.plans.layouts import Footprint
from atoll.prediction.cost import Cluster
from atoll.runtime import checkpoint
from atoll.runtime.checkpoint.manifest import Manifest
from atoll.runtime.checkpoint.meeting import listing
from atoll.runtime.engine import Engine, Evaluation
from atoll.runtime.pipeline.step_end import StepResult
from atoll.runtime.sharding.outer import distance
from atoll.runtime.sharding.state import stored_states
from atoll.runtime.transport import Later
from atoll.training import samples as sampling
from atoll.training.best import Best
from atoll.training.build import RateSchedule
from atoll.training.config import Config
from atoll.training.data import Name, Supply
from atoll.training.data.mixing import shares
from atoll.training.display import Display
from atoll.training.folder import RunFolder, Start, read_records, writing
from atoll.training.lock import RunLock
from atoll.training.measure import peak_memory, share_timeline, share_timing, share_trace
from atoll.training.oddities import SLOW, Spikes, straggler
from atoll.training.optimizers import named_optimizer
from atoll.training.prediction import in_short, predict
from atoll.training.record import Recorder, perplexity
from atoll.training.samples import Samples, vocabulary_of
from atoll.training.signals import StopRequest
from atoll.training.text import generate
from atoll.training.utilisation import Peak, peak_of, utilised_seconds

TRACED_STEP = 3
"""Step whose actions are traced; the first ones are slower."""


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
    """The loop of one run. `recorder` is opened by `run`, on rank 0 only."""

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
        self.folder = folder
        self.display = display
        self.samples = Samples(config, corpus, engine.place)
        self.schedule = RateSchedule(engine.optimizer, config.train)
        self._stop = stop
        self._lock = lock
        self._here = here
        self._run: str | None = None
        self._recorder: Recorder | None = None
        self._utilised: float | None = None
        self._is_writer = engine.place.rank == 0
        self._evaluated = self._saved = -1
        self._validation_loss: float | None = None
        self._best = Best()
        self._keeps_best = max(config.checkpoint.keep_best, 1 if config.train.patience else 0)
        self._tokens = 0
        self._unrecorded: deque[tuple[float, Later | None]] = deque()
        self._apart: list[tuple[float, StepResult]] = []
        self._memory = torch.zeros(engine.plan.mesh.world)
        self._last: StepResult | None = None
        self._positions: dict[int, int] = {}
        self._traced = 0
        self._spikes = {"loss": Spikes(1.2), "grad_norm": Spikes(3.0)}

    def run(self, start: Start) -> LoopOutcome:
        """Train to the last step, or until a signal."""
        is_fresh = not self._resume(start)
        first = self.engine.step_number
        self._open(first, is_fresh=is_fresh)
        if is_fresh:
            self._evaluate()
        stopped = self._steps(first)
        if stopped is None:
            self._evaluate()
        self._save()
        self.engine.finish_saving()
        sample = None if stopped else self._sample()
        if self._recorder is not None:
            self._recorder.close()
        return LoopOutcome(
            self.engine.step_number,
            stopped,
            first_step=first + 1,
            tokens=self._tokens,
            sample=sample,
            peaks=self._peaks(),
            best=self._best.step if self._keeps_best else None,
        )

    def _steps(self, first: int) -> signal.Signals | None:
        train, every = self.config.train, self.config.checkpoint.every
        traced = self._traced = min(first + TRACED_STEP, train.steps)
        self.display.begin(first, train.steps)
        try:
            while self.engine.step_number < train.steps and not self._is_over():
                step = self.engine.step_number + 1
                rate = self.schedule.rate
                self._positions[step] = self.samples.position
                oldest = self._apart[0][1].step if self._apart else step - 1
                self._positions = {at: begin for at, begin in self._positions.items() if at >= min(oldest, step - 1)}
                batch = self.samples.take()
                following = self.samples.peek() if step < train.steps else None
                with self._naming_samples(), nullcontext() if step < train.steps else self.engine.timing():
                    result = self.engine.submit(batch, following)
                self.schedule.advance()
                self._unrecorded.append((rate, self._share() if self.engine.outer is None else None))
                stop = self._record(result)
                if self.engine.step_number != step and stop is None:
                    continue  # after a rollback
                is_due = train.eval_every and step % train.eval_every == 0
                is_kept = every and step % every == 0
                is_compared = train.check_replicas and step % train.check_replicas == 0
                if stop is not None or is_due or is_kept or is_compared or step in (traced, train.steps):
                    with self._naming_samples():
                        result = self.engine.settle()
                    stop = self._record(result) or stop
                    if stop is not None and self._apart:  # all ranks have heard of it
                        self._record_apart()
                    if self.engine.step_number != step and stop is None:
                        continue
                if step == traced:
                    trace = share_trace(self.engine)
                    if self._recorder is not None and trace is not None:
                        self._recorder.trace(trace)
                if step == train.steps:
                    self._record_timing()
                if is_compared:
                    self.engine.check_replicas()
                is_best = bool(is_due) and self._evaluate()
                if stop is not None and self.engine.step_number < train.steps:
                    return stop
                if is_kept or (is_best and self._keeps_best):
                    self._save(is_extra=not is_kept and step < train.steps)
        finally:
            self.display.close()
        return None

    def _is_over(self) -> bool:
        """Return True if train.patience is exhausted."""
        best, patience = self._best, self.config.train.patience
        if not best.is_over(patience):
            return False
        known = "" if best.loss is None else f" than {best.loss:.4f} after step {best.step}"
        self.display.say(
            f"note: ended early: {best.waited} evaluations in a row have no lower validation loss{known} "
            f"(train.patience = {patience})"
        )
        return True

    # ---- start

    def _resume(self, start: Start) -> bool:
        """Load the newest complete checkpoint. Return False if there is none and the run begins.

        Rank 0's view of the folder is used, since only it writes there. A checkpoint that is damaged on any rank is
        skipped by all.

        Raises CheckpointError if all checkpoints are damaged.
        """
        steps, evaluated = self._found(start)
        if not steps:
            if start is Start.CONTINUE:
                raise CheckpointError(f"{self.folder.checkpoints} has no finished checkpoint to resume from")
            return False
        damaged: list[tuple[Path, DamageError]] = []
        known = {step: checkpoint.step_folder(self.folder.checkpoints, step) for step in steps}
        for step in steps:
            path = checkpoint.step_folder(self.folder.checkpoints, step)
            try:
                self._load(path)
            except DamageError as error:
                damaged.append((path, error))
                continue
            self._saved, self._evaluated = step, min(step, evaluated)
            self.engine.checkpoints |= {at: folder for at, folder in known.items() if at < step}
            self._pass_over(damaged)
            self.display.say(f"resumed {path}: {step} steps, {self.samples.position} samples")
            if step >= self.config.train.steps:
                self.display.say(
                    "note: that was the last step; to continue, increase train.steps (or epochs); to begin again, "
                    "use --overwrite"
                )
            return True
        words = listing([str(error) for _, error in damaged])
        raise CheckpointError(
            f"no checkpoint in {self.folder.checkpoints} is whole: {words}\n"
            "restore one from a copy, or begin again with --overwrite"
        )

    def _found(self, start: Start) -> tuple[list[int], int]:
        """Return the steps of the checkpoints to try, in that order, and the last evaluated step, or -1."""
        steps, evaluated = [], -1
        if self._is_writer and start in (Start.AUTO, Start.CONTINUE):
            with writing(self.folder.checkpoints):
                checkpoint.recover(self.folder.checkpoints)
            steps = [int(path.name.rpartition("-")[2]) for path in self.folder.candidates()]
            evaluated = max((record["step"] for record in read_records(self.folder.validation)), default=-1)
        count, evaluated = self._told([len(steps), evaluated], 2)
        return self._told(steps, count), evaluated

    def _told(self, values: Sequence[int], count: int) -> list[int]:
        """Return rank 0's value on every rank."""
        told = torch.tensor(values if self._is_writer else [0] * count, dtype=torch.float64)
        return [int(value) for value in self.engine.transport.total(told)]

    def _load(self, path: Path) -> None:
        """Continue from the checkpoint in `path`. Raises DamageError if it is damaged."""
        run = self.folder.run_id() if self._is_writer else None
        manifests: list[Manifest | None] = []

        def check(opened: checkpoint.Archive) -> None:
            resumed_state(self.config, opened, self.corpus, run=run)
            manifests.append(opened.manifest)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnverifiedWarning)
            state = self.engine.load(path, check=check)
        (manifest,) = manifests
        if manifest is None:
            self.display.say(f"note: {path} was not verified: it was saved without digests")
        self._run = run or (None if manifest is None else manifest.identity.get("run"))
        if state["order"] != order_of(self.config):
            self.display.say(
                "note: data.sequence, data.packing, data.weights or the seed changed since the checkpoint, and the "
                "order of samples with it: some may be seen twice"
            )
        self.schedule.restore(state["schedule"])
        self._best = Best.restored(state.get("best"))
        self.samples.go_to(self._position_of(self.engine.step_number, int(state["position"])))

    def _position_of(self, step: int, position: int) -> int:
        """Return the position in the data after `step`. See [Note: skipped samples]."""
        if self._is_writer:
            for record in read_records(self.folder.incidents):
                if record.get("rolled_back_to") == step and isinstance(record.get("position"), int):
                    position = max(position, record["position"])
        return self._told([position], 1)[0]

    def _pass_over(self, damaged: Sequence[tuple[Path, DamageError]]) -> None:
        """Report what was wrong with newer checkpoints, and set them aside so that their steps can be saved again."""
        for path, error in damaged:
            where = ""
            if self._is_writer:
                with writing(path):
                    where = f"; set aside as {checkpoint.set_aside(path).name}"
            self.display.say(f"note: {error}{where}")

    def _open(self, step: int, *, is_fresh: bool) -> None:
        plan = self.engine.plan
        own = self.engine.footprint()
        values = torch.zeros(plan.mesh.world, 3, dtype=torch.float64)
        values[self.engine.place.rank] = torch.tensor([own.parameters, own.gradients, own.optimizer])
        held = [Footprint(*(int(part) for part in row)) for row in self.engine.transport.total(values).tolist()]
        if self._is_writer:
            self._check_lock()
            self._run = self._run or uuid.uuid4().hex
            self._recorder = Recorder(
                self.folder, self.config, self.corpus.tokenizer, run=self._run, step=step, is_fresh=is_fresh
            )
            self.folder.write_run_id(self._run)
            blocks = self.engine.adapter.blocks()
            stages = [[blocks[at].name for at in run] for run in self.engine.runs]
            vocabulary = vocabulary_of(self.config, self.corpus)
            facts = {
                "vocabulary": vocabulary,
                "reads_in_place": self.engine.reads_in_place,
                "device": self.engine.device.type,
            }
            peak = self._peak()
            known = {"peak": None if peak is None else asdict(peak)}
            notes = [*self.samples.notes]
            self._recorder.plan(plan, held, stages, **facts, **known, first_step=step + 1, corpus=notes)
            self._predict(self._recorder, **facts)

    def _predict(self, recorder: Recorder, **facts: Any) -> None:
        """Record and print the run's prediction; without a cluster only bytes."""
        path = self.config.run.cluster
        try:
            found = predict(self.config, self.engine.plan, self._cluster() or self._here, **facts)
            recorder.prediction(found)
            self.display.say(f"predicted: {in_short(found)}")
            peak = self._peak()
            self._utilised = None if peak is None else utilised_seconds(found, peak)
        except UserError as error:
            if path is not None:
                self.display.say(f"note: the run is not predicted: {error}")

    def _cluster(self) -> Cluster | None:
        """Return the cluster that the config names."""
        path = self.config.run.cluster
        return None if path is None else Cluster.read(path)

    def _peak(self) -> Peak | None:
        """Return the peak rate of this rank's device."""
        device = self.engine.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        return peak_of(name, self.engine.plan.precision.compute, self._cluster())

    # ---- between steps

    def _share(self) -> Later:
        """Start one small sum: which ranks got a signal, and each rank's peak memory."""
        return self.engine.transport.total_later(self._known())

    def _known(self) -> torch.Tensor:
        """Return what only this rank knows."""
        signals = torch.tensor([self._stop.received is number for number in StopRequest.numbers], dtype=torch.float64)
        memory = torch.zeros(self.engine.plan.mesh.world, dtype=torch.float64)
        memory[self.engine.place.rank] = peak_memory(self.engine.device)
        busy = torch.zeros_like(memory)
        busy[self.engine.place.rank] = self.engine.busy_seconds
        return torch.cat([signals, memory, busy])

    def _record(self, result: StepResult | None) -> signal.Signals | None:
        """Record a step whose result is known. Return the signal that a rank had received by then, or None."""
        if result is None:
            return None
        rate, later = self._unrecorded.popleft()
        if later is None:
            self._apart.append((rate, result))
            return self._record_apart() if self._meets(result.step) else None
        asked, busy = self._heard(later.wait())
        self._write(result, rate, busy)
        return asked

    def _heard(self, totals: torch.Tensor) -> tuple[signal.Signals | None, list[float]]:
        """The signal, and the seconds that each rank computed, from the sums of `_share`."""
        count = len(StopRequest.numbers)
        asked = [number for number, ranks in zip(StopRequest.numbers, totals[:count], strict=True) if ranks]
        self._memory, busy = totals[count:].chunk(2)
        return (asked[0] if asked else None), busy.tolist()

    def _write(self, result: StepResult, rate: float, busy: Sequence[float], distance: float | None = None) -> None:
        """Write down a step. distance: of islands from the anchors, where it is known."""
        self._last = result
        memory = int(self._memory.max())
        self._tokens += result.tokens
        self._check_lock()
        epoch = self.samples.epoch(self._positions[result.step] + self.config.train.global_batch)
        self.display.step(result, memory_bytes=memory, epoch=epoch)
        if self._recorder is not None:
            odd = self._odd(result, busy) | ({} if distance is None else {"island_distance": distance})
            self._recorder.step(result, rate=rate, epoch=epoch, memory_bytes=memory, odd=odd, utilised=self._utilised)
        if result.fault is not None:
            self._go_on(result)

    # ---- islands

    def _meets(self, step: int) -> bool:
        """Return True if islands wait for each other after `step`: see [Note: steps of islands]."""
        train, outer = self.config.train, self.engine.outer
        dues = (train.eval_every, self.config.checkpoint.every, train.check_replicas)
        is_due = any(every and step % every == 0 for every in dues)
        return is_due or step in (self._traced, train.steps) or (outer is not None and outer.meets(step))

    def _record_apart(self) -> signal.Signals | None:
        """Write down the steps since islands met last, as means over the islands; the signal that a rank has got."""
        outer, transport = self.engine.outer, self.engine.transport
        assert outer is not None, "only islands meet"
        pending, self._apart = self._apart, []
        own = torch.zeros(len(pending), 5, dtype=torch.float64)
        if transport.speaks and self.engine.place.pp == 0:
            for row, (_, each) in zip(own, pending, strict=True):
                parts = [each.loss * each.tokens, each.grad_norm, each.bubble, float(each.skipped), float(each.tokens)]
                row.copy_(torch.tensor(parts, dtype=torch.float64))
        known = self._known()
        totals = transport.total(torch.cat([own.reshape(-1), outer.take_moved(), known]))
        rows = totals[: own.numel()].reshape(own.shape).tolist()
        asked, busy = self._heard(totals[own.numel() + 2 :])
        apart = distance(totals[own.numel() :][:2].tolist())
        islands = self.engine.plan.islands
        for (rate, result), (loss, norm, bubble, skipped, tokens) in zip(pending, rows, strict=True):
            if skipped and not result.skipped:
                self.display.say(f"note: step {result.step}: {skipped:.0f} of {islands} islands skipped it")
            is_last = result is pending[-1][1]
            mean = replace(
                result,
                loss=loss / tokens,
                grad_norm=norm / islands,
                bubble=bubble / islands,
                skipped=bool(skipped),
                tokens=round(tokens),
            )
            none = [0.0] * len(busy)
            self._write(mean, rate, busy if is_last else none, distance=apart if is_last else None)
        return asked

    def _odd(self, result: StepResult, busy: Sequence[float]) -> dict[str, float]:
        """Return spikes, and the rank that its peers wait for."""
        found: dict[str, float] = {}
        if not result.skipped:
            for name, spikes in self._spikes.items():
                ratio = spikes.ratio(getattr(result, name))
                if ratio is not None:
                    found[f"{name}_spike"] = ratio
                    self.display.say(
                        f"note: step {result.step}: {name} {getattr(result, name):.4g} is {ratio:.1f} times the usual"
                    )
        rank, ratio = straggler(busy, self.engine.plan.mesh)
        return found | ({"straggler": rank, "straggler_ratio": ratio} if ratio > SLOW else {})

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
        begin = self._positions[fault.step]
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
        position = self._positions[result.step] + self.config.train.global_batch
        if self._recorder is not None:
            self._recorder.incident(result, position=position, sequences=sequences)
        done = "skipped"
        if result.rollback is not None:
            done = f"back to step {result.rollback.step}, continuing with the samples from position {position}"
            self._return_to(result.rollback, position)
        self.display.say(f"note: {fault.describe()}{words}\n  {done}")

    def _return_to(self, rollback: Rollback, position: int) -> None:
        while self._unrecorded:
            later = self._unrecorded.popleft()[1]
            if later is not None:
                later.wait()
        self.schedule.restore(rollback.state["schedule"])
        self._best = Best.restored(rollback.state.get("best"))
        self.samples.go_to(position)
        self._evaluated, self._saved = min(self._evaluated, rollback.step), rollback.step
        for step in [step for step in self.engine.checkpoints if step > rollback.step]:
            path = self.engine.checkpoints.pop(step)
            if self._is_writer and path.exists():
                with writing(path):
                    checkpoint.set_aside(path)

    def _record_timing(self) -> None:
        """Record the seconds of the instructions of the last step."""
        timed, timeline = share_timing(self.engine), share_timeline(self.engine)
        if self._recorder is not None and timed is not None and self._last is not None:
            memory = "resident" if self.engine.device.type == "cpu" else "allocated"
            self._recorder.timing(self._last, timed, peaks=self._peaks(), memory=memory)
            self._recorder.timeline(self._last, timeline or ())

    def _peaks(self) -> tuple[int, ...]:
        """Return the peak memory of each pipeline rank: the maximum over its ranks."""
        mesh = self.engine.plan.mesh
        stages = [mesh.place(rank).pp for rank in range(mesh.world)]
        own = list(zip(stages, map(int, self._memory.tolist()), strict=True))
        return tuple(max(each for at, each in own if at == stage) for stage in range(mesh.pipeline))

    def _evaluate(self) -> bool:
        """Evaluate on the validation split, unless this step's loss is known. Return True if it is the lowest so
        far."""
        step = self.engine.step_number
        if self._evaluated == step or not self.samples.has_validation:
            return False
        parts: dict[str, Evaluation] = {}
        with self.engine.anchored():
            for source, batch in self.samples.validation():
                parts[source] = parts.get(source, Evaluation(0.0, 0, 0.0)) + self.engine.evaluate(batch)
        total = sum(parts.values(), Evaluation(0.0, 0, 0.0))
        self._evaluated, self._validation_loss = step, total.loss
        several = ", ".join(f"{source} {part.loss:.4f}" for source, part in parts.items()) if len(parts) > 1 else ""
        self.display.say(
            f"step {step}: validation loss {total.loss:.4f}, perplexity {perplexity(total.loss):.4g}"
            + (f" ({several})" if several else "")
        )
        if self._recorder is not None:
            self._recorder.evaluation(step, total, parts)
        return self._best.judge(step, total.loss)

    def _check_lock(self) -> None:
        """Raise RunError if another run has taken over the folder."""
        if self._lock is not None:
            self._lock.check()

    def _save(self, *, is_extra: bool = False) -> None:
        """Save a checkpoint of this step, unless there is one. is_extra: only for its validation loss."""
        step = self.engine.step_number
        if self._saved == step:
            return
        config = self.config.dump()
        state = {
            "position": self.samples.position,
            "corpus": self.corpus.fingerprint,
            "order": order_of(self.config),
            "schedule": self.schedule.state(),
            "best": self._best.state(),
            "config": config,
        }
        whose = {
            "run": self._run,
            "config": digest(config.encode()),
            "corpus": self.corpus.fingerprint,
            "time": time.time(),
            "validation_loss": self._loss_of(step),
            **({"extra": True} if is_extra else {}),
        }
        self._check_lock()
        self.engine.save(
            checkpoint.step_folder(self.folder.checkpoints, step),
            state,
            identity=whose,
            background=True,
            told=self._told_of_save,
        )
        self._saved = step
        if not self.config.checkpoint.background:
            self.engine.finish_saving()

    def _loss_of(self, step: int) -> float | None:
        """Return the validation loss after `step` steps, if it is known and finite."""
        loss = self._validation_loss if self._evaluated == step else None
        return loss if loss is not None and math.isfinite(loss) else None

    def _told_of_save(self, failure: str | None) -> None:
        """Report the end of a save, which may be in the background. Called in the writing thread."""
        if failure is not None:
            self.display.say(f"note: {failure}")
        elif self._is_writer:
            keep = self.config.checkpoint
            try:
                checkpoint.prune(self.folder.checkpoints, keep.keep, best=self._keeps_best)
            except OSError as error:
                self.display.say(f"note: old checkpoints were not deleted: {error}")

    # ---- end

    def _sample(self) -> str | None:
        train = self.config.train
        if train.prompt is None or train.objective == "masked":  # which completes records, and continues nothing
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
        if self._recorder is not None:
            self._recorder.sample(text)
        return text


SAMPLE = 64
"""Tokens that continue the prompt at the end of a run."""


def order_of(config: Config) -> dict[str, int]:
    """Return the values that determine the order of samples, apart from the corpus."""
    data = config.data
    how: dict[str, int] = {} if data.how == "blocks" else {data.how: 1, data.rule: 1}
    if data.streaming:
        how |= {"shard": sampling.SHARD}
    if data.weights is not None:
        how |= {f"share {number}": count for number, count in enumerate(shares(data.weights))}
    return {"seed": config.train.seed, "sequence": data.sequence, **how}


LARGEST_BATCH = 1 << 24
"""Larger than any global batch: a position beyond that many samples per step is invalid."""


def resumed_state(
    config: Config, opened: checkpoint.Archive, corpus: Supply | None, *, run: str | None = None
) -> dict[str, Any]:
    """Return the state of a checkpoint's run. corpus, run: None if unknown.

    Raises ConfigError for a checkpoint beyond the last step, CheckpointError for one of another corpus or program, and
    DamageError if its state contradicts its folder's name, its manifest or itself.
    """
    path = opened.folder
    step = int(path.name.rpartition("-")[2])
    if step > config.train.steps:
        raise ConfigError(
            f"the newest checkpoint of {config.run.folder} is of step {step}, beyond train.steps = "
            f"{config.train.steps}; set train.steps (or epochs) to more"
        )
    given = opened.state.get("caller")
    state: dict[str, Any] = given if isinstance(given, dict) else {}
    missing = [key for key in ("position", "corpus", "schedule", "order") if key not in state]
    if missing:
        raise CheckpointError(f"{path} was not written by atoll train: its state has no {', '.join(missing)}")
    whose = {} if opened.manifest is None else opened.manifest.identity
    problems = list(_contradictions(state, step=opened.state.get("step", -1), of_folder=step))
    if run is not None and whose.get("run", run) != run:
        problems.append(f"it is of the run {whose['run']}, and the folder of {run}")
    if whose.get("corpus", state["corpus"]) != state["corpus"]:
        problems.append("the manifest names another corpus")
    if problems:
        raise DamageError(f"{path} is not a checkpoint of this run: {'; '.join(problems)}")
    _check_states(config, opened)
    if corpus is not None and state["corpus"] != corpus.fingerprint:
        raise CheckpointError(
            f"{path} was trained on another corpus or tokenizer than data.source = {config.data.source!r} "
            f"with data.tokenizer = {config.data.tokenizer!r} and data.bad_records = {config.data.bad_records!r}; give "
            "the ones it was trained with, or start a new run in another run.folder"
        )
    return state


def _check_states(config: Config, opened: checkpoint.Archive) -> None:
    """Raise CheckpointError if the checkpoint has the state of another optimizer than the config's."""
    named = named_optimizer(config.train)
    wanted = named.keys
    for name, kept in stored_states(opened).items():
        if kept.keys() != wanted and (named.whole is None or kept.keys() != named.whole_keys):
            raise CheckpointError(
                f"{opened.folder} has {', '.join(sorted(kept))} of {name}, and {config.train.optimizer} with this "
                f"config's options keeps {', '.join(sorted(wanted)) or 'nothing'}; use the optimizer that it was "
                "trained with, or begin a new run with model.weights = this checkpoint"
            )


def _contradictions(state: Mapping[str, Any], *, step: Any, of_folder: int) -> Iterator[str]:
    """Return contradictions in the state of a run after `step` steps. of_folder: the step in its folder's name."""
    if type(step) is not int or step != of_folder:
        yield f"its state is of step {reprlib.repr(step)}, its folder of {of_folder}"
        return
    position = state["position"]
    if type(position) is not int or not step <= position <= step * LARGEST_BATCH:
        yield f"position {reprlib.repr(position)} after {step} steps, each of 1 to {LARGEST_BATCH} samples"
    schedule = state["schedule"]
    done = schedule.get("last_epoch") if isinstance(schedule, dict) else None
    if type(done) is not int or done != step:
        yield f"its learning rates are those after {reprlib.repr(done)} steps"
    try:
        Best.restored(state.get("best"))
    except ValueError as error:
        yield str(error)
    order = state["order"]
    if not (isinstance(order, dict) and all(type(value) is int and value >= 0 for value in order.values())):
        yield f"order is {reprlib.repr(order)}"
