"""The systems that a plan can be written for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from atoll.base.errors import ConfigError
from atoll.prediction.cost import Prediction
from atoll.training.config import Config
from atoll.training.settings.deepspeed import deepspeed
from atoll.training.settings.fsdp2 import fsdp2
from atoll.training.settings.megatron import megatron
from atoll.training.settings.subject import Settings, Subject
from atoll.training.settings.torchtitan import torchtitan

SYSTEMS: Mapping[str, Callable[[Subject], Settings]] = {
    "torchtitan": torchtitan,
    "deepspeed": deepspeed,
    "megatron": megatron,
    "fsdp2": fsdp2,
}


def settings_for(system: str, config: Config, prediction: Prediction) -> Settings:
    """Return the plan of a prediction as a system's settings. Raises ConfigError for an unknown system."""
    if system not in SYSTEMS:
        near = difflib.get_close_matches(system.lower(), SYSTEMS, n=1)
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no settings for {system!r}: {guess}known are {', '.join(SYSTEMS)}")
    return SYSTEMS[system](Subject(config, prediction))
