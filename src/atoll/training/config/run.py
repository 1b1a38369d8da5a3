"""[run] and [checkpoint]: what a run writes, and how often."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from atoll.training.config.section import NAMED, Natural, Positive, Section, as_tuple

LOGGERS = ("tensorboard", "wandb", "mlflow")
"""Loggers that metrics can be sent to."""


def _as_logger(value: str) -> str:
    if value in LOGGERS or NAMED.fullmatch(value):
        return value
    raise ValueError(f'must be {", ".join(repr(name) for name in LOGGERS)} or "module:function"')


LoggerName = Annotated[str, AfterValidator(_as_logger)]


class Run(Section):
    """[run]: the output folder, loggers, restarts."""

    folder: str = "runs/default"
    """output folder of the run"""
    restarts: Natural = 3
    """maximum number of restarts of local ranks from the newest checkpoint or state in host memory; the count resets at
    each one"""
    loggers: Annotated[tuple[LoggerName, ...], BeforeValidator(as_tuple)] = ("tensorboard",)
    """loggers of metrics, beside metrics.jsonl: "tensorboard", if the package is installed, "wandb", "mlflow", or
    "module:function", called with values by name and the step: docs/training.md#loggers"""
    cluster: str | None = None
    """file of the cluster the run is on: docs/clusters.md. The prediction is recorded with the measurements. Without
    it, this machine is measured once for local ranks; ATOLL_MEASURE=0 in the environment turns that off"""
    nodes: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = ()
    """names of the kinds of nodes in the order in which ranks are started on them, if `run.cluster` has several; none:
    that of the file: docs/clusters.md#nodes-of-several-kinds"""


class Checkpoint(Section):
    """[checkpoint]: when to save, and what to keep."""

    every: Natural = 100
    """steps between checkpoints; 0: after the last step only"""
    keep: Positive = 2
    """number of newest checkpoints to keep"""
    keep_best: Natural = 0
    """also keep this many checkpoints with the lowest validation loss, and save after each validation that is the best
    so far: docs/training.md#best-checkpoint"""
    memory: Natural = 0
    """steps between copies of each rank's state to the memory of its host, from which a restart continues if they are
    newer than the newest checkpoint; 0: none: docs/checkpoints.md#in-host-memory"""
    background: bool = True
    """write in the background while training continues, from a copy in host memory"""
