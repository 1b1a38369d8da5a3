"""Exceptions raised by Atoll.

    AtollError                       exit code 1: something failed
    |-- UserError                    exit code 2: the request cannot be fulfilled
    |   |-- ConfigError              a key, a value or a size of a config
    |   |-- ScheduleError            an order of actions that violates a law
    |   |-- LayoutError              a level, a layout, a precision
    |   |-- PlanError                a mesh, a split and a model that do not match
    |   |-- DataError                a corpus or a tokenizer
    |   |   `-- RecordError          one record of a corpus
    |   `-- CheckpointError          a checkpoint that is missing, or of another model
    |       `-- DamageError          a checkpoint whose content differs from what was written
    `-- RunError                     a run that failed
        |-- BadStepError             a step whose loss or gradients are not finite
        |-- ReplicaError             ranks whose replicas differ
        `-- RankError                the first error of one rank, as all ranks report it

A message states the problem, the values, where it occurred, and what to do. A CostWarning reports a correct setting
that costs more than necessary; an UnverifiedWarning reports a checkpoint without digests; a WeightsWarning reports
what of a folder of weights is not used, or not as its config says.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from atoll.base.units import bounded as _bounded

if TYPE_CHECKING:
    from atoll.base.faults import Fault

_RECORD = re.compile(r"(.*), (?:line|object|row) \d+", re.DOTALL)
"""A record's file, in the location of the record or of a part of it."""


class AtollError(Exception):
    """Base class of all errors that Atoll raises."""

    exit_code = 1
    longest = 2_000
    """Most characters of a message."""

    def __str__(self) -> str:
        """Return the message, at most `longest` characters: of a longer one its beginning and its end. Half of a
        surrogate pair, which cannot be printed, becomes "?"."""
        return _bounded(super().__str__().encode(errors="replace").decode(), self.longest)


class UserError(AtollError):
    """The request cannot be fulfilled; nothing was started or changed."""

    exit_code = 2


class ConfigError(UserError):
    """A config has an invalid key, value or size."""


class ScheduleError(UserError):
    """An order of actions violates a law of schedules."""


class LayoutError(UserError):
    """A level, a layout or a precision does not exist."""


class PlanError(UserError):
    """A mesh, a split and a model do not match."""


class DataError(UserError):
    """A corpus or a tokenizer cannot be read."""


class RecordError(DataError):
    """One record of a corpus is broken; the others may be fine.

    where: location of the record or of a part of it.  kind: the fault, in the same words for all records that have it.
    file: the file of the record.
    """

    def __init__(self, where: str, kind: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        found = _RECORD.match(where)
        self.file, self.kind = where if found is None else found[1], kind


class CheckpointError(UserError):
    """A checkpoint is missing, or of another model."""


class DamageError(CheckpointError):
    """The content of a checkpoint differs from what was written; an older checkpoint may be intact."""


class RunError(AtollError):
    """A run failed after it started."""


class BadStepError(RunError):
    """The loss or gradients of a step are not finite. Nothing was updated; the engine can continue on every rank."""

    def __init__(self, message: str, *, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault


class ReplicaError(RunError):
    """Replicas on different ranks differ.

    ranks: those that differ from the majority.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class RankError(RunError):
    """The first error of one rank, raised on every rank.

    speaker: the rank that reports it if the failing rank cannot.
    """

    longest = 16_000  # it may have the stack of a late rank

    def __init__(self, message: str, *, rank: int, exit_code: int = 1, speaker: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.speaker = speaker


class CostWarning(UserWarning):
    """A setting is correct, but sends or stores much more than another one."""


class UnverifiedWarning(UserWarning):
    """A checkpoint has no digests, so damage may go undetected."""


class WeightsWarning(UserWarning):
    """A folder of weights and the model's config differ in what `transformers` accepts too: tensors that are not read,
    a head that is not tied or is initialized, buffers that keep the values of a new model."""
