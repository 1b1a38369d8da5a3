"""What holds for every test, and which of them `--quick` takes."""

import sys
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings

CASES = 2
"""Of a test with more, `--quick` takes so many, spread from the first to the last."""

# Other work on the machine must not fail a law, and a run must say the same twice.
settings.register_profile("atoll", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="every pair of settings, and a few cases of every other test that is not marked slow",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept = {
        item
        for every in cases.values()
        for at, item in enumerate(every)
        if "pairs" in item.keywords or ("slow" not in item.keywords and _is_taken(at, len(every)))
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _is_taken(at: int, cases: int) -> bool:
    """Whether a case is one of CASES that are spread over all, the first and the last among them."""
    return any(at == step * (cases - 1) // (CASES - 1) for step in range(CASES))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compute on one thread, as the ranks do: tiny operations on two cores take ten times as long on two threads."""
    del session
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
