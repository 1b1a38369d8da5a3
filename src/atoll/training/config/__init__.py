"""The schema of a config, its loading, and its plan."""

from atoll.training.config.load import from_dict, known_keys, load
from atoll.training.config.schema import Checkpoint, Config, Data, Lora, Model, Parallel, Run, Train

__all__ = [
    "Checkpoint",
    "Config",
    "Data",
    "Lora",
    "Model",
    "Parallel",
    "Run",
    "Train",
    "from_dict",
    "known_keys",
    "load",
]
