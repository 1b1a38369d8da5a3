"""Everything Atoll raises.

    AtollError                       exit code 1: something failed
    |-- UserError                    exit code 2: what was asked for cannot be done
    |   |-- ConfigError              a key, a value or a size of a config
    |   |-- ScheduleError            an order of actions that breaks a law
    |   |-- LayoutError              a level, a layout, a precision
    |   |-- PlanError                a mesh, a split or a model that do not fit together
    |   |-- DataError                a corpus or a tokenizer
    |   `-- CheckpointError          a checkpoint that is missing, or of another model
    |       `-- DamageError          a checkpoint that does not hold what was written
    `-- RunError                     a run that broke
        |-- BadStepError             a step whose loss or gradients are not finite
        |-- ReplicaError             ranks that should hold the same values, and do not
        `-- RankError                the first error of one rank, as all ranks report it

A message says what, the values, where, and what to do. A CostWarning says what is right and costs more than it has to;
an UnverifiedWarning, that nothing says whether a checkpoint is as it was written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.faults import Fault


class AtollError(Exception):
    """Root of every error that Atoll raises on purpose."""

    exit_code = 1


class UserError(AtollError):
    """What was asked for cannot be done; nothing was started or changed."""

    exit_code = 2


class ConfigError(UserError):
    """A key, a value or a size of a config."""


class ScheduleError(UserError):
    """An order of actions that breaks a law of schedules."""


class LayoutError(UserError):
    """A level, a layout or a precision that does not exist."""


class PlanError(UserError):
    """A mesh, a split or a model that do not fit together."""


class DataError(UserError):
    """A corpus or a tokenizer that cannot be read."""


class CheckpointError(UserError):
    """A checkpoint that is missing, or of another model."""


class DamageError(CheckpointError):
    """A checkpoint that does not hold what was written; an older one may."""


class RunError(AtollError):
    """A run that broke after it started."""


class BadStepError(RunError):
    """A step whose loss or gradients are not finite, on every rank. Nothing was updated, and the engine can go on."""

    def __init__(self, message: str, *, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault


class ReplicaError(RunError):
    """Ranks hold different values of what should be the same.  ranks: those that differ from most."""

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class RankError(RunError):
    """The first error of one rank, as every rank reports it.

    speaker: the rank that prints it, where the one to blame cannot.
    """

    def __init__(self, message: str, *, rank: int, exit_code: int = 1, speaker: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.speaker = speaker


class CostWarning(UserWarning):
    """A setting that is right, and sends or holds much more than another one."""


class UnverifiedWarning(UserWarning):
    """A checkpoint without digests, written before there were any: damage to it may go unseen."""
