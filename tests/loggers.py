"""Fakes of the packages that metrics are logged to, with only the functions that a run calls."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any


class FakeWandb(ModuleType):
    """Fake of `wandb`. runs: logged values, as (step, values), by the run's id.

    is_open: whether a run has begun and not finished.
    """

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.config: dict[str, Any] = {}
        self.is_open = False
        self._current = ""

    def init(self, *, config: dict[str, Any], **options: str) -> FakeWandb:
        """Begin a run, or continue one."""
        self._current = options["id"]
        self.runs.setdefault(self._current, [])
        self.config, self.is_open = config, True
        return self

    def log(self, values: dict[str, float], *, step: int) -> None:
        """Log to the current run."""
        self.runs[self._current].append((step, values))

    def finish(self) -> None:
        """End the run."""
        self.is_open = False


class FakeMlflow(ModuleType):
    """Fake of `mlflow`, with the attributes of `FakeWandb`."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.runs: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.config: dict[str, Any] = {}
        self.is_open = False
        self._current = ""
        self._tags: dict[str, Mapping[str, str]] = {}

    def search_runs(self, *, filter_string: str, output_format: str) -> list[Any]:
        """Return runs with the tag of `tags.NAME = 'VALUE'`."""
        name, _, value = filter_string.removeprefix("tags.").partition(" = ")
        found = [run for run, tags in self._tags.items() if tags.get(name) == value.strip("'")]
        return [SimpleNamespace(info=SimpleNamespace(run_id=run)) for run in found]

    def start_run(self, run_id: str = "", *, run_name: str = "", tags: Mapping[str, str] | None = None) -> None:
        """Begin a run, or continue one."""
        self._current = run_id or f"{run_name} {len(self.runs)}"
        self.runs.setdefault(self._current, [])
        self._tags.setdefault(self._current, tags or {})
        self.is_open = True

    def log_params(self, params: dict[str, Any]) -> None:
        """Log to the current run."""
        self.config = params

    def log_metrics(self, metrics: dict[str, float], *, step: int) -> None:
        """Log to the current run."""
        self.runs[self._current].append((step, metrics))

    def end_run(self) -> None:
        """End the run."""
        self.is_open = False
