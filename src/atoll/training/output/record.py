"""Files that rank 0 writes during training: those of the run folder and TensorBoard's events."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from atoll.plans.layouts import Footprint
from atoll.plans.plan import Plan
from atoll.prediction.cost import Prediction
from atoll.prediction.cost.summary import summary
from atoll.program.trace import Trace, to_chrome
from atoll.runtime.pipeline.step_end import StepResult
from atoll.runtime.services.evaluation import Evaluation
from atoll.training.config import Config
from atoll.training.data import Name
from atoll.training.data.tokenizer import FileTokenizer, Tokenizer
from atoll.training.output import folder as files
from atoll.training.output.folder import RunFolder
from atoll.training.output.loggers import open_loggers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def perplexity(loss: float) -> float:
    """Return exp(loss), or the largest number instead of infinity, which JSON does not support."""
    return math.exp(min(loss, 709.0))


def _finite(value: float) -> float | None:
    """Return None for numbers that JSON does not support, such as the norm of a step that overflowed in fp16."""
    return value if math.isfinite(value) else None


class Recorder:
    """Writes a run folder. Opened once, fresh or after `step` steps of the same run.

    run: its id.
    """

    def __init__(
        self, folder: RunFolder, config: Config, tokenizer: Tokenizer, *, run: str, step: int, is_fresh: bool
    ) -> None:
        self.folder = folder
        if is_fresh:
            folder.clear()
        else:
            folder.rewind(step)
        files.write(folder.config, config.dump())
        if isinstance(tokenizer, FileTokenizer):
            files.write(folder.tokenizer, tokenizer.to_json())
            for name, content in tokenizer.beside().items():
                files.write(folder.root / name, content)
        self._events: SummaryWriter | None = None
        if "tensorboard" in config.run.loggers and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            with files.writing(folder.tensorboard):
                self._events = SummaryWriter(str(folder.tensorboard), purge_step=None if is_fresh else step + 1)

        self._loggers = open_loggers(config, run)

    def plan(self, plan: Plan, footprints: Sequence[Footprint], blocks: Sequence[Sequence[str]], **facts: Any) -> None:
        """Write the actions of each rank, and its predicted bytes. facts: of this start."""
        values = {**_describe(plan, footprints, blocks), **facts}
        files.write(self.folder.plan, json.dumps(values, indent=1) + "\n")

    def prediction(self, prediction: Prediction) -> None:
        """Write the predicted time and memory of the run, and its cluster."""
        values = summary(prediction)
        if prediction.cluster is not None:
            files.write(self.folder.cluster, prediction.cluster.dump())
        files.write(self.folder.prediction, json.dumps(values, indent=1) + "\n")

    def timing(self, result: StepResult, timed: Sequence[Any], peaks: Sequence[int], memory: str) -> None:
        """Write a timed step. timed, peaks: instructions and peak bytes of each pipeline rank.  memory: kind of the
        peaks."""
        ranks = [
            {"rank": rank, "peak_bytes": peak, "instructions": instructions}
            for rank, (peak, instructions) in enumerate(zip(peaks, timed, strict=True))
        ]
        values = {"step": result.step, "seconds": result.seconds, "memory": memory, "ranks": ranks}
        files.write(self.folder.timing, json.dumps(values) + "\n")

    def timeline(self, result: StepResult, ranks: Sequence[Any]) -> None:
        """Write the timeline of a step on each pipeline rank, from `share_timeline`."""
        files.write(self.folder.timeline, json.dumps({"step": result.step, "ranks": ranks}) + "\n")

    def step(
        self,
        result: StepResult,
        *,
        rate: float,
        epoch: float,
        memory_bytes: int,
        odd: Mapping[str, float],
        utilised: float | None = None,
    ) -> None:
        """Write a training step. loss and grad_norm (before clipping) are the step's, over all ranks.

        epoch: passes over the corpus, including this step's samples.
        odd: findings of `atoll.training.run.oddities`.  utilised: see `utilised_seconds`, if known.
        """
        record: dict[str, Any] = {
            "step": result.step,
            "loss": _finite(result.loss),
            "grad_norm": _finite(result.grad_norm),
            "tokens": result.tokens,
            "seconds": result.seconds,
            "tokens_per_second": result.tokens_per_second,
            "lr": rate,
            "epoch": epoch,
            "bubble": result.bubble,
            "memory_bytes": memory_bytes,
            **odd,
        }
        if utilised is not None:
            record["mfu"] = utilised / result.seconds
        if result.skipped:
            record["skipped"] = True
        files.append(self.folder.metrics, record)
        self._scalars("train", record)

    def incident(self, result: StepResult, *, position: int, sequences: Sequence[Name]) -> None:
        """Write a bad step that did not end the run. position: of the samples after its own, where the run continues.

        sequences: of the corpus, among which the first bad one is.
        """
        fault = result.fault
        assert fault is not None, "an incident has a fault"
        record = {
            "step": result.step,
            "loss": _finite(result.loss),
            "grad_norm": _finite(result.grad_norm),
            "rank": fault.rank,
            "block": fault.block,
            "microbatch": fault.microbatch,
            "sequences": list(sequences),
            "what": fault.what,
            "rolled_back_to": None if result.rollback is None else result.rollback.step,
            "position": position,
        }
        files.append(self.folder.incidents, record)
        if result.rollback is not None:
            self.folder.forget(result.rollback.step)

    def round(self, record: Mapping[str, Any]) -> None:
        """Write what an island of a federation did: see docs/islands.md."""
        files.append(self.folder.root / files.ROUNDS, record)

    def evaluation(self, step: int, result: Evaluation, parts: Mapping[str, Evaluation]) -> None:
        """Write an evaluation after `step` steps. parts: of each source."""
        record = {"step": step, "loss": result.loss, "perplexity": perplexity(result.loss)}
        if len(parts) > 1:
            record |= {f"loss/{source}": part.loss for source, part in parts.items()}
        files.append(self.folder.validation, record)
        self._scalars("validation", record)

    def trace(self, trace: Trace) -> None:
        """Write the timeline of one step."""
        files.write(self.folder.trace, to_chrome(trace))

    def sample(self, text: str) -> None:
        """Write the text generated at the end."""
        files.write(self.folder.sample, text)
        if self._events is not None:
            self._events.add_text("sample", f"```\n{text}\n```")

    def close(self) -> None:
        """Flush buffers and close the loggers."""
        for logger in self._loggers:
            logger.close()
        if self._events is not None:
            with files.writing(self.folder.tensorboard):
                self._events.close()

    def _scalars(self, group: str, record: dict[str, Any]) -> None:
        step = record["step"]
        values = {f"{group}/{name}": value for name, value in record.items() if name != "step" and value is not None}
        for log in self._loggers:
            log(values, step)
        if self._events is None:
            return
        with files.writing(self.folder.tensorboard):
            for name, value in values.items():
                self._events.add_scalar(name, value, step)


def _describe(plan: Plan, footprints: Sequence[Footprint], blocks: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a plan as plain values. blocks: names of each stage's; footprints: by rank, in bytes."""
    schedule = plan.schedule
    ranks = []
    for rank, footprint in enumerate(footprints):
        place = plan.mesh.place(rank)
        stages = schedule.placement.stages_of(place.pp)
        ranks.append(
            {
                "rank": rank,
                "coordinates": place.coordinates,
                "stages": list(stages),
                "blocks": [name for stage in stages for name in blocks[stage]],
                "predicted_bytes": {**asdict(footprint), "total": footprint.total},
            }
        )
    return {
        "mesh": plan.mesh.sizes,
        "layout": plan.layout.name,
        "residency": plan.stays,
        "reduction": plan.reduction,
        "recompute": plan.recompute,
        "precision": asdict(plan.precision),
        "codecs": asdict(plan.codecs),
        "outer": None if plan.outer is None else asdict(plan.outer),
        "host": None if plan.host is None else asdict(plan.host),
        "microbatch": plan.microbatch,
        "global_batch": plan.global_batch,
        "schedule": {
            "name": schedule.name,
            "placement": schedule.placement.kind,
            "ranks": schedule.ranks,
            "chunks": schedule.chunks,
            "microbatches": schedule.whole_microbatches,
            "slices": schedule.slices,
            "actions": [[str(action) for action in row] for row in schedule.compute_only().actions],
        },
        "stages": [list(names) for names in blocks],
        "ranks": ranks,
    }
