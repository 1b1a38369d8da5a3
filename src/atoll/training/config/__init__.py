"""The schema of a config, its loading, and its plan."""

from atoll.training.config.data import Data
from atoll.training.config.load import from_dict, known_keys, load
from atoll.training.config.model import Lora, Model
from atoll.training.config.parallel import Parallel
from atoll.training.config.run import Checkpoint, Run
from atoll.training.config.schema import Config
from atoll.training.config.train import Train

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
