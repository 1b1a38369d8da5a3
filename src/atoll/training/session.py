"""One rank's run once it has met the others: corpus, model, engine, loop, and what came out."""

from __future__ import annotations

import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.config import Config
from atoll.data import Corpus
from atoll.errors import CostWarning
from atoll.plan import Plan
from atoll.runtime import checkpoint
from atoll.runtime.transport import world_rank
from atoll.training.build import build_engine, build_model
from atoll.training.display import Display
from atoll.training.folder import RunFolder, read_records
from atoll.training.loop import Loop
from atoll.training.samples import prepare_corpus, vocabulary_of
from atoll.training.signals import StopRequest
from atoll.units import format_count, format_rate, format_seconds


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended.

    stopped: the signal that ended it early.  tokens, seconds: of this start, without those before a resume; the seconds
    are those from the first evaluation to the sample.
    """

    folder: RunFolder
    step: int
    stopped: signal.Signals | None
    tokens: int
    seconds: float
    sample: str | None

    @property
    def checkpoint(self) -> Path:
        """Of the last step."""
        return checkpoint.step_folder(self.folder.checkpoints, self.step)

    @property
    def losses(self) -> tuple[float, float] | None:
        """Validation losses of the first and the last evaluation, of all starts."""
        found = [record["loss"] for record in read_records(self.folder.validation)]
        return (found[0], found[-1]) if found else None

    def summary(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "folder": str(self.folder.root),
            "step": self.step,
            "stopped": None if self.stopped is None else self.stopped.name,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "validation_loss": self.losses,
            "checkpoint": str(self.checkpoint),
            "sample": self.sample,
        }

    def describe(self) -> str:
        """Some lines for a person."""
        rate = format_rate(self.tokens / max(self.seconds, 1e-9), "tokens")
        folder = self.folder
        lines = [
            f"step {self.step}: {format_count(self.tokens)} tokens in {format_seconds(self.seconds)}, "
            f"{rate} with evaluations and checkpoints"
        ]
        if self.losses is not None:
            before, after = self.losses
            change = f" ({after / before - 1.0:+.1%})" if before > 0 else ""
            lines.append(f"validation loss {before:.4f} -> {after:.4f}{change}")
        names = [path.name for path in (folder.metrics, folder.validation, folder.plan, folder.trace) if path.exists()]
        lines.append(f"{folder.root}: {', '.join(names)}, {self.checkpoint.relative_to(folder.root)}")
        if self.sample is not None:
            lines += ["sample:", "", self.sample]
        return "\n".join(lines)


def run(config: Config, plan: Plan, *, device: torch.device, resume: bool, stop: StopRequest) -> RunResult:
    """Train; every rank calls it after joining, and `config`'s run folder has been checked."""
    is_speaking = world_rank() == 0
    display = Display(is_speaking=is_speaking, device=device.type)
    corpus = prepare_corpus(config, say=display.say)
    model = build_model(config, vocabulary_of(config, corpus))
    for note in config.notes:
        display.say(f"note: {note}")
    display.say(_introduce(plan, model, corpus, device=device))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CostWarning)
        engine = build_engine(model, plan, config, device=device)
    for note in engine.advice:
        display.say(f"note: {note}")
    try:
        folder = RunFolder(Path(config.run.folder))
        begin = time.monotonic()
        outcome = Loop(config, corpus, engine, folder=folder, display=display, stop=stop).run(resume=resume)
        seconds = time.monotonic() - begin
        engine.transport.barrier()
    finally:
        engine.close()
    return RunResult(
        folder, outcome.step, outcome.stopped, tokens=outcome.tokens, seconds=seconds, sample=outcome.sample
    )


def _introduce(plan: Plan, model: nn.Module, corpus: Corpus, device: torch.device) -> str:
    mesh = plan.mesh
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tensor = f", tensor {mesh.tensor}" if mesh.tensor > 1 else ""
    world = "1 rank" if mesh.world == 1 else f"{mesh.world} ranks"
    return (
        f"{world} on {device.type}: pipeline {mesh.pipeline}, inter {mesh.inter}, intra {mesh.intra}{tensor}; "
        f"layout {plan.layout.name}, {plan.schedule.name} with {plan.schedule.microbatches} microbatches of "
        f"{plan.microbatch} a rank, {plan.precision.compute}\n"
        f"{format_count(parameters)} parameters, {format_count(len(corpus.train))} training tokens, "
        f"{format_count(len(corpus.validation))} validation tokens"
    )
