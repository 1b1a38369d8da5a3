"""Which tests should notice damage to which function? Those that run it, as one run of every test file has shown.

    all       every test file, but those of `LEFT_OUT`; one case of each test that is not slow (`--quick`)
    runs      a test runs a function if any of its processes has called it (`probes`)
    order     tests of the module's own file first, then what takes least
    more      if none fails: every case of the module's own files

A module's own files have its name, in the folder that mirrors its own or above it: `runtime/sharding/muon.py` has
`tests/runtime/test_muon.py`. Code that no function contains, and functions that are compiled, are noticed by the tests
that run another function of the module, or of those that import it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LEFT_OUT = {
    r"tests/gpu/.*": "needs CUDA devices",
    r"tests/test_(docs|evidence|pages|site|promises|private_torch)\.py": "pages and promises: all of the package",
    r"tests/test_(benchmarks|choices|fuzz|hangs|integrity|mutants|predictions)\.py": "benchmarks",
    r"tests/test_(deploy|examples|recipes|gpu_rehearsal|one_gpu|published_\w+)\.py": "programs outside of the package",
}
"""Test files that say little of one module, as a pattern, and what they are of."""

BESIDE: Mapping[str, tuple[str, ...]] = {
    "__main__.py": ("tests/cli/test_main.py",),
    "cli/arguments.py": ("tests/cli/test_plan.py", "tests/cli/test_train.py"),
    "runtime/pipeline/executor.py": ("tests/runtime/test_executor_order.py",),
    "runtime/pipeline/counter.py": ("tests/runtime/test_blocks.py", "tests/runtime/test_engine.py"),
    "runtime/pipeline/microbatches.py": ("tests/runtime/test_blocks.py", "tests/runtime/test_deferred.py"),
    "runtime/pipeline/sums.py": ("tests/runtime/test_post_validation.py",),
    "runtime/pipeline/unit_end.py": ("tests/runtime/test_post_validation.py",),
    "runtime/checkpoint/": ("tests/runtime/test_checkpoint_files.py", "tests/runtime/test_resume.py"),
    "runtime/sharding/state.py": ("tests/runtime/test_resume.py",),
    "runtime/sharding/hosted.py": ("tests/runtime/test_host_memory.py", "tests/runtime/test_parameters_on_host.py"),
    "runtime/sharding/slices.py": ("tests/runtime/test_muon.py", "tests/runtime/test_host_memory.py"),
    "runtime/models/slices.py": ("tests/runtime/test_slices_of_sequences.py",),
    "runtime/models/attention.py": ("tests/runtime/test_sequence.py", "tests/runtime/test_slices_of_sequences.py"),
    "prediction/cost/ends.py": ("tests/prediction/cost/test_ranks.py", "tests/prediction/cost/test_vocabulary.py"),
    "prediction/cost/sliced.py": ("tests/prediction/test_slices_of_sequences.py",),
    "runtime/pipeline/step_end.py": ("tests/runtime/test_post_validation.py",),
    "training/settings/from_": ("tests/training/settings/test_convert.py",),
    "training/settings/rules.py": ("tests/training/settings/test_convert.py",),
    "training/settings/": ("tests/training/settings/test_settings.py",),
    "prediction/explain/": ("tests/prediction/explain/test_explanation.py",),
    "training/report/pictures.py": ("tests/training/report/test_page.py",),
    "program/sim/": ("tests/program/test_sim.py", "tests/program/test_sim_programs.py"),
    "testing/template.py": ("tests/testing/test_pool.py",),
    "plans/schedules/forms.py": ("tests/plans/schedules/test_catalogue.py",),
    "plans/schedules/controllable_memory.py": ("tests/plans/schedules/test_orders.py",),
    "plans/schedules/problem.py": ("tests/plans/schedules/test_automatic.py",),
    "training/process.py": ("tests/cli/test_train.py",),
    "training/run/signals.py": ("tests/cli/test_train.py",),
    "plans/federation/records.py": ("tests/plans/federation/test_orders.py", "tests/plans/federation/test_rounds.py"),
    "prediction/cost/divided.py": ("tests/prediction/test_sequences.py",),
    "prediction/cost/": ("tests/prediction/cost/test_transformer.py", "tests/prediction/cost/test_ranks.py"),
    "program/memory.py": ("tests/program/test_working_memory.py", "tests/prediction/test_slices_of_sequences.py"),
    "program/": ("tests/program/test_lower.py", "tests/program/test_rank.py"),
    "runtime/assemble/build.py": ("tests/runtime/test_muon.py", "tests/runtime/models/test_initialise.py"),
    "runtime/mail.py": ("tests/runtime/test_order.py",),
    "runtime/models/conversion.py": ("tests/runtime/models/test_weights.py",),
    "runtime/models/divided.py": ("tests/runtime/test_sequence.py",),
    "runtime/models/sizes.py": ("tests/runtime/models/test_counting.py",),
    "runtime/models/tied.py": ("tests/runtime/test_ties.py",),
    "runtime/monitor.py": ("tests/runtime/test_failure.py", "tests/runtime/test_verdict.py"),
    "runtime/outline.py": ("tests/runtime/test_order.py",),
    "runtime/pipeline/block.py": ("tests/runtime/test_blocks.py", "tests/runtime/test_selective.py"),
    "runtime/pipeline/routing.py": ("tests/runtime/test_balance.py",),
    "runtime/rendezvous.py": ("tests/runtime/test_launch.py",),
    "runtime/sharding/gradients.py": ("tests/runtime/test_residency.py", "tests/runtime/test_lanes.py"),
    "runtime/sharding/host_steps.py": ("tests/runtime/test_host_memory.py", "tests/runtime/test_segment.py"),
    "runtime/sharding/matrices.py": ("tests/runtime/test_matrix.py", "tests/runtime/test_muon.py"),
    "runtime/transport/": ("tests/runtime/test_transport.py", "tests/runtime/test_shared_memory.py"),
    "runtime/sharding/": ("tests/runtime/test_segment.py", "tests/runtime/test_units.py"),
    "training/config/run.py": ("tests/training/config/test_load.py", "tests/training/run/test_loop.py"),
    "training/config/": ("tests/training/config/test_load.py", "tests/training/config/test_schema.py"),
    "training/data/split.py": ("tests/training/data/test_encoding.py",),
    "training/data/supply.py": ("tests/training/data/test_mixing.py", "tests/training/data/test_stream.py"),
    "training/models/pretrained.py": (
        "tests/training/models/test_sources.py",
        "tests/training/models/test_text_part.py",
    ),
    "training/report/": ("tests/training/report/test_report.py", "tests/training/report/test_page.py"),
    "training/run/checkpoints.py": ("tests/training/run/test_loop.py",),
    "training/run/measurements.py": ("tests/cli/test_calibrate.py", "tests/cli/test_comparison.py"),
    "training/run/utilisation.py": ("tests/training/output/test_loggers.py",),
    "plans/schedules/one_rank.py": ("tests/plans/schedules/test_bounds.py",),
    "plans/schedules/": ("tests/plans/schedules/test_orders.py", "tests/plans/schedules/test_kernels.py"),
}
"""Files that are a module's own and have another name, by the beginning of the module's path."""

MOST_SECONDS, MOST_TESTS = 25.0, 60
"""Tests are added until they take so much processor time without damage."""

FAR_SECONDS = 8.0
"""The same of tests that do not run the function, but something else of its module or of those that import it."""


@dataclass(frozen=True)
class Ran:
    """A test without damage: its processor time, and what it ran, as `module:Class.method`."""

    name: str
    seconds: float
    functions: frozenset[str]

    @property
    def file(self) -> str:
        """The test file."""
        return self.name.partition("::")[0]


def test_files() -> list[str]:
    """Return the test files, but those of `LEFT_OUT`."""
    found = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    return [name for name in found if not any(re.fullmatch(pattern, name) for pattern in LEFT_OUT)]


def own_files(module: str, files: Iterable[str]) -> list[str]:
    """Return the test files of a module below src/atoll, the nearest first."""
    *folders, name = module.removesuffix(".py").split("/")
    if name == "__init__":
        name = folders[-1] if folders else "atoll"
    words = [name.strip("_")]
    wanted = [f"{'/'.join(['tests', *folders[:depth]])}/test_{word}.py" for depth in _down(folders) for word in words]
    beside = [file for start, row in BESIDE.items() if module.startswith(start) for file in row]
    known = set(files)
    return [file for file in dict.fromkeys([*wanted, *beside]) if file in known]


def candidates(module: str, within: str, ran: Sequence[Ran], files: Sequence[str]) -> list[Ran]:
    """Return the tests that run a function, or else its module, or else what imports that; the most telling first."""
    own = own_files(module, files)
    outer = within.split(".") if within else []
    homes = [f"{module}:{'.'.join(outer[:depth])}" for depth in _down(outer) if depth]
    found = next((found for home in homes if (found := [each for each in ran if home in each.functions])), [])
    for modules in ({module}, set(importers().get(module, ()))):
        found = found or [each for each in ran if any(name.partition(":")[0] in modules for name in each.functions)]
    found = found or [each for each in ran if each.file in own]
    near = {each.file: 0 if each.file in own else 1 if module in imported_by(each.file) else 2 for each in found}
    return sorted(found, key=lambda each: (near[each.file], each.seconds, each.name))


def selected(found: Sequence[Ran], *, most_seconds: float = MOST_SECONDS, most: int = MOST_TESTS) -> list[Ran]:
    """Return the first tests that fit into the time that is allowed: at least one, and no more than `most`."""
    chosen: list[Ran] = []
    seconds = 0.0
    for each in found:
        if chosen and (seconds + each.seconds > most_seconds or len(chosen) == most):
            continue
        chosen.append(each)
        seconds += each.seconds
    return chosen


def is_near(module: str, within: str, found: Sequence[Ran]) -> bool:
    """Whether tests run the function itself, or the place is in none: at the top of a module or of a class."""
    outer = within.split(".") if within else []
    if outer and outer[-1].strip("_")[:1].isupper():
        return True
    homes = {f"{module}:{'.'.join(outer[:depth])}" for depth in _down(outer) if depth}
    return not homes or any(homes & each.functions for each in found[:1])


@cache
def importers() -> Mapping[str, tuple[str, ...]]:
    """Return the modules that import each module, directly."""
    found: dict[str, set[str]] = {module: set() for module in _texts()}
    for module, text in _texts().items():
        for target in _imported(text):
            found[target].add(module)
    return {module: tuple(sorted(each)) for module, each in found.items()}


@cache
def imported_by(file: str) -> frozenset[str]:
    """Return the modules that a test file imports. Of a name that a package re-exports, that is its home."""
    path = ROOT / file
    return frozenset(_imported(path.read_text(encoding="utf-8")) if path.is_file() else ())


@cache
def _texts() -> Mapping[str, str]:
    source = ROOT / "src" / "atoll"
    return {path.relative_to(source).as_posix(): path.read_text(encoding="utf-8") for path in source.rglob("*.py")}


def _imported(text: str) -> Iterator[str]:
    for home, name in _names(text):
        for path in filter(None, (_file_of(f"{home}/{name}"), _file_of(home))):
            yield path
            if path.endswith("__init__.py"):
                yield from (again for exported, again in _exports(path) if exported == name)


@cache
def _exports(package: str) -> tuple[tuple[str, str], ...]:
    """Return what an `__init__` imports: name and home."""
    return tuple((name, path) for home, name in _names(_texts()[package]) if (path := _file_of(home)))


def _names(text: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "atoll":
            home = (node.module or "").removeprefix("atoll").removeprefix(".").replace(".", "/")
            yield from ((home, each.name) for each in node.names)


def _file_of(path: str) -> str | None:
    path = path.strip("/")
    names = (f"{path}.py", f"{path}/__init__.py".removeprefix("/"))
    return next((name for name in names if name in _texts()), None)


def _down(words: Sequence[str]) -> range:
    return range(len(words), -1, -1)
