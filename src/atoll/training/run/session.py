"""One rank's run after rendezvous: corpus, model, engine, loop, and result."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.base.digests import digest
from atoll.base.documents import LARGEST_BYTES, finite, read_json, whole_number
from atoll.base.errors import CostWarning, WeightsWarning
from atoll.base.units import format_bytes, format_count, format_rate, format_seconds
from atoll.plans.plan import Plan
from atoll.prediction.cost import Cluster
from atoll.runtime import checkpoint
from atoll.runtime.same import DIGEST, check_same
from atoll.runtime.transport import world_rank, world_size, world_store
from atoll.training.config import Config
from atoll.training.data import Supply
from atoll.training.models.pretrained import notes_of_source
from atoll.training.output.display import Display
from atoll.training.output.folder import RunFolder, Start, is_of, read_records, typical_seconds
from atoll.training.output.lock import RunLock
from atoll.training.run.loop import Loop, LoopOutcome
from atoll.training.run.measure import peak_memory
from atoll.training.run.progress import Progress
from atoll.training.run.resumed import order_of
from atoll.training.run.run import RankRun
from atoll.training.run.signals import StopRequest
from atoll.training.setup.build import build_as_stored, build_engine, seat_of
from atoll.training.setup.samples import prepare_corpus, vocabulary_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(LoopOutcome):
    """The outcome of a run.

    seconds: of this start, from the first evaluation to the sample.
    before: resident bytes of rank 0 before it built its model: interpreter, libraries, corpus; 0 if peaks are of CUDA.
    """

    folder: RunFolder
    seconds: float
    device: str
    before: int = 0

    @property
    def best_checkpoint(self) -> Path | None:
        """The kept checkpoint with the lowest validation loss, or None. The initial model has no checkpoint."""
        return checkpoint.step_folder(self.folder.checkpoints, self.best) if self.best else None

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a typical step of this start, or None."""
        return typical_seconds(self.folder.metrics, self.first_step)

    @property
    def prediction(self) -> dict[str, Any] | None:
        """The output of `atoll predict --json` for the run, or None if it is unavailable."""
        try:
            found: dict[str, Any] = read_json(self.folder.prediction)
            seconds = found["seconds"]  # null if no cluster gives the rates of its devices
            is_whole = seconds is None or finite(seconds) > 0
            is_whole = is_whole and len(_predicted_peaks(found)) == len(self.peaks)
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return found if is_whole else None

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the last step."""
        return checkpoint.step_folder(self.folder.checkpoints, self.step)

    @property
    def losses(self) -> tuple[float, float] | None:
        """Validation losses of the first and the last evaluation, of all starts."""
        found = [record["loss"] for record in read_records(self.folder.validation) if is_of(record, "loss")]
        return (found[0], found[-1]) if found else None

    def summary(self) -> dict[str, Any]:
        """Return the result as plain values."""
        predicted = self.prediction
        return {
            "folder": str(self.folder.root),
            "step": self.step,
            "stopped": None if self.stopped is None else self.stopped.name,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "validation_loss": self.losses,
            "checkpoint": str(self.checkpoint),
            "best_checkpoint": None if self.best_checkpoint is None else str(self.best_checkpoint),
            "sample": self.sample,
            "step_seconds": {"predicted": predicted and predicted["seconds"], "measured": self.step_seconds},
            "peak_bytes": {"predicted": predicted and _predicted_peaks(predicted), "measured": list(self.peaks)},
        }

    def describe(self) -> str:
        """Return a description in a few lines, the last of which compare prediction and measurement."""
        rate = format_rate(self.tokens / max(self.seconds, 1e-9), "tokens")
        folder = self.folder
        lines = [] if self.sample is None else ["sample:", "", self.sample, ""]
        lines.append(
            f"step {self.step}: {format_count(self.tokens)} tokens in {format_seconds(self.seconds)}, "
            f"{rate} with evaluations and checkpoints"
        )
        if self.losses is not None:
            before, after = self.losses
            change = f" ({after / before - 1.0:+.1%})" if before > 0 else ""
            lines.append(f"validation loss {before:.4f} -> {after:.4f}{change}")
        if self.best is not None:
            path = self.best_checkpoint
            where = "before the first step" if path is None else str(path.relative_to(self.folder.root))
            lines.append(f"lowest validation loss: {where}")
        names = [path.name for path in (folder.metrics, folder.validation, folder.plan, folder.trace) if path.exists()]
        lines.append(f"{folder.root}: {', '.join(names)}, {self.checkpoint.relative_to(folder.root)}")
        return "\n".join([*lines, *self._held_against_prediction()])

    def _held_against_prediction(self) -> Iterator[str]:
        """Return measured and predicted seconds of a step, and peak bytes of each pipeline rank."""
        predicted, measured = self.prediction, self.step_seconds
        expected, held = (None, []) if predicted is None else (predicted["seconds"], _predicted_peaks(predicted))
        if measured is not None:
            words = "" if expected is None else f"{format_seconds(expected)} predicted, "
            error = "" if expected is None else f" ({measured / expected - 1.0:+.1%})"
            yield f"a step: {words}{format_seconds(measured)} measured{error}"
        name = "max RSS" if self.device == "cpu" else "max CUDA"
        for rank, (expected_bytes, peak) in enumerate(zip(held, self.peaks, strict=bool(held))):
            tensors = format_bytes(expected_bytes)
            own = f", {format_bytes(self.before)} of it before the model was built" if self.before else ""
            yield f"pipeline rank {rank}: {tensors} of tensors predicted, {name} {format_bytes(peak)} measured{own}"


def _predicted_peaks(prediction: Mapping[str, Any]) -> list[int]:
    """Return the predicted tensor bytes of each pipeline rank."""
    peaks = [each["peak"] for each in prediction["ranks"]]
    return [
        whole_number(peak["total"], limit=LARGEST_BYTES) - whole_number(peak["context"], limit=LARGEST_BYTES)
        for peak in peaks
    ]


def run_session(
    config: Config,
    plan: Plan,
    *,
    device: torch.device,
    start: Start,
    stop: StopRequest,
    lock: RunLock | None = None,
    here: Cluster | None = None,
) -> RunResult:
    """Train. Every rank calls it after joining, once `config`'s run folder has been checked.

    lock: of the run folder, on rank 0; nothing is written after another run has taken it over.
    here: this machine as measured, on rank 0; the cluster of the prediction if run.cluster names none.
    """
    is_speaking = world_rank() == 0
    display = Display(is_speaking=is_speaking, device=device.type, compiles=plan.compile != "none")
    corpus = prepare_corpus(config, say=display.say)
    config = config.with_steps_of(corpus.samples)
    _check_same_corpus(config, corpus)
    before = peak_memory(device) if device.type == "cpu" else 0
    vocabulary = vocabulary_of(config, corpus)
    model, untied = build_as_stored(config, vocabulary)
    for note in (*config.notes, *notes_of_source(config)):
        display.say(f"note: {note}")
    display.say(_introduce(plan, model, corpus, device=device))

    with warnings.catch_warnings():
        for said in (CostWarning, WeightsWarning):  # as notes, below
            warnings.simplefilter("ignore", said)
        common = digest(repr([corpus.fingerprint, order_of(config)]).encode())
        seat = seat_of(config, run=common)
        engine = build_engine(model, plan, config, device=device, vocabulary=vocabulary, seat=seat)
    for note in (*engine.advice, *untied, *engine.notes):
        display.say(f"note: {note}")
    try:
        folder = RunFolder(Path(config.run.folder))
        begin = time.monotonic()
        progress = Progress(config, corpus, engine)
        for note in progress.samples.notes:
            display.say(f"note: {note}")
        shared = RankRun(
            config, corpus, engine, progress=progress, folder=folder, display=display, stop=stop, lock=lock, here=here
        )
        outcome = Loop(shared).run(start)
        seconds = time.monotonic() - begin
        engine.transport.barrier()
    finally:
        engine.close()
        corpus.close()
    return RunResult(**asdict(outcome), folder=folder, seconds=seconds, device=device.type, before=before)


def _check_same_corpus(config: Config, corpus: Supply) -> None:
    """Check that ranks on other machines, which prepare their own token arrays and tokenizer, have the same ones."""
    store = world_store()
    if store is not None:
        check_same(
            store,
            world_rank(),
            world_size(),
            {"the corpus with its tokenizer": DIGEST + corpus.fingerprint},
            advice=f"put data.source = {config.data.source!r} and data.tokenizer = {config.tokenizer!r} on a file "
            "system that all share, or copy them",
        )


def _introduce(plan: Plan, model: nn.Module, corpus: Supply, device: torch.device) -> str:
    mesh = plan.mesh
    parameters = sum(parameter.numel() for parameter in model.parameters())
    more = {"tensor": mesh.tensor, "expert": mesh.expert, "sequence": mesh.sequence}
    others = "".join(f", {name} {size}" for name, size in more.items() if size > 1)
    world = "1 rank" if mesh.world == 1 else f"{mesh.world} ranks"
    return (
        f"{world} on {device.type}: pipeline {mesh.pipeline}, inter {mesh.inter}, intra {mesh.intra}{others}; "
        f"layout {plan.layout.name}, {plan.schedule.name} with {plan.schedule.counted} of "
        f"{plan.microbatch} a rank, {plan.precision}\n{f'{plan.matrices}{chr(10)}' if plan.matrices else ''}"
        f"{format_count(parameters)} parameters, {corpus.size}"
    )
