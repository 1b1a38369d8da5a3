"""Loggers of a run's metrics, in addition to its folder. Each is one function; `record` has that of TensorBoard."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.base.errors import ConfigError, RunError
from atoll.training.config import Config
from atoll.training.named import load_named

Log = Callable[[Mapping[str, float], int], object]
"""Called with values by name, such as "train/loss" and "validation/loss", and their step."""


@dataclass(frozen=True, slots=True)
class Logger:
    """A destination of metrics. name: as in run.loggers.  close: called at the end of the run."""

    name: str
    log: Log
    close: Callable[[], object] = lambda: None

    def __call__(self, values: Mapping[str, float], step: int) -> None:
        """Log values. Raises RunError if the function raises."""
        try:
            self.log(values, step)
        except Exception as error:
            raise RunError(f"run.loggers: {self.name} raised {type(error).__name__}: {error}") from error


def check_loggers(names: tuple[str, ...]) -> None:
    """Raise ConfigError for a logger whose package or module is missing, before a run starts."""
    for name in names:
        if ":" in name:
            load_named("run.loggers", name)
        elif name in OPENED and name not in sys.modules and importlib.util.find_spec(name) is None:
            raise ConfigError(f"run.loggers names {name}, which is not installed: pip install {name}, or leave it out")


def open_loggers(config: Config, run: str) -> tuple[Logger, ...]:
    """Return the loggers of run.loggers, opened for a run. run: its id, under which a resumed run continues.

    Raises ConfigError as `check_loggers` does.
    """
    check_loggers(config.run.loggers)
    return tuple(
        Logger(name, load_named("run.loggers", name)) if ":" in name else OPENED[name](config, run)
        for name in config.run.loggers
        if name != "tensorboard"
    )


def _wandb(config: Config, run: str) -> Logger:
    package: Any = importlib.import_module("wandb")
    own = package.init(
        project="atoll", name=config.run.folder, id=run, resume="allow", config=config.model_dump(mode="json")
    )
    return Logger("wandb", lambda values, step: own.log(dict(values), step=step), own.finish)


def _mlflow(config: Config, run: str) -> Logger:
    package: Any = importlib.import_module("mlflow")
    known = package.search_runs(filter_string=f"tags.atoll_run = '{run}'", output_format="list")
    if known:
        package.start_run(run_id=known[0].info.run_id)
    else:
        package.start_run(run_name=config.run.folder, tags={"atoll_run": run})
        values = config.model_dump(mode="json")
        package.log_params(
            {f"{section}.{key}": value for section, keys in values.items() for key, value in (keys or {}).items()}
        )
    return Logger("mlflow", lambda values, step: package.log_metrics(dict(values), step=step), package.end_run)


OPENED: Mapping[str, Callable[[Config, str], Logger]] = {"wandb": _wandb, "mlflow": _mlflow}
