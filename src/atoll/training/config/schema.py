"""The schema of a config: one frozen pydantic model per table, with defaults.

Each table validates its own keys; `atoll.training.config.planning` validates tables against each other.
"""

from __future__ import annotations

import fractions
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import Field, PrivateAttr

from atoll.base.errors import ConfigError
from atoll.base.toml import to_toml
from atoll.plans.layouts import Layout
from atoll.plans.plan import Plan
from atoll.training.config.data import Data
from atoll.training.config.federation import FederationSection
from atoll.training.config.model import Lora, Model
from atoll.training.config.parallel import Parallel
from atoll.training.config.run import Checkpoint, Run
from atoll.training.config.section import Section
from atoll.training.config.train import Train


class Config(Section):
    """A complete config. `load` reads one; `to_plan` returns the plan that the engine executes."""

    model: Model = Field(default_factory=Model)
    data: Data = Field(default_factory=Data)
    train: Train = Field(default_factory=Train)
    lora: Lora = Field(default_factory=Lora)
    parallel: Parallel = Field(default_factory=Parallel)
    run: Run = Field(default_factory=Run)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    federation: FederationSection | None = None
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user: settings without effect, translated settings, better layouts."""
        layout = Layout(self.parallel.layout)
        better = layout.dominated_by
        if better is None:
            return self._notes
        return (
            *self._notes,
            f"parallel.layout = {layout.name!r} is dominated by {better.name!r}, which uses less memory and no more "
            "traffic",
        )

    @property
    def tokenizer(self) -> str:
        """The tokenizer: data.tokenizer; if that is "auto", the one in the model's folder, else bpe-4096."""
        if self.data.tokenizer != "auto":
            return self.data.tokenizer
        own = Path(self.model.source) / "tokenizer.json"
        return str(own) if not self.model.is_builtin and own.is_file() else "bpe-4096"

    def with_notes(self, notes: Sequence[str]) -> Config:
        """Return a copy of the config with additional `notes`."""
        noted = self.model_copy()
        noted._notes = (*self._notes, *notes)
        return noted

    def to_plan(self, world: int | None = None) -> Plan:
        """Return the plan for `world` ranks, by default `parallel.ranks`. Raises ConfigError if sizes do not fit."""
        from atoll.training.config.planning import plan_of

        return plan_of(self, world)

    def with_steps_of(self, samples: int | None) -> Config:
        """Return the config with the steps of train.epochs over `samples` samples; the same config without
        train.epochs.

        samples: number of samples in an epoch, or None if unknown. Raises ConfigError if it is needed and unknown, and
        if a run cannot have so many steps.
        """
        epochs, batch = self.train.epochs, self.train.global_batch
        if epochs is None:
            return self
        if samples is None:
            raise ConfigError(
                f"train.epochs = {epochs:g}: with data.streaming the samples of an epoch are not known before it is "
                "over; set train.steps instead"
            )
        steps = math.ceil(fractions.Fraction(repr(epochs)) * samples / batch)
        if steps >= 1 << 31:
            raise ConfigError(
                f"train.epochs = {epochs:g} of {samples} samples are {steps} steps; a run has less than {1 << 31}"
            )
        resolved = self.model_copy(update={"train": self.train.model_copy(update={"steps": steps, "epochs": None})})
        resolved._notes = (*self._notes, f"train.epochs = {epochs:g} of {samples} samples: train.steps = {steps}")
        return resolved

    def dump(self) -> str:
        """Return the effective config as TOML text with every key; `load` reads it back to an equal config.

        With train.epochs, train.steps is left out.
        """
        left_out: dict[str, Any] = {"train": {"steps"}} if self.train.epochs is not None else {}
        if self.federation is None:
            left_out["federation"] = True
        return to_toml(self.model_dump(exclude=left_out))


def tables(of: type[Section] = Config, above: str = "") -> dict[str, type[Section]]:
    """Return the tables of a config by name, each followed by those within it, such as "parallel.codecs"."""
    found: dict[str, type[Section]] = {}
    for key, field in of.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                found |= {f"{above}{key}": kind, **tables(kind, f"{above}{key}.")}
    return found
