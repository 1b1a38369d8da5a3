"""What holds for every test, and which of them `--quick` takes."""

import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    from tests.absent import skip_laws

    skip_laws()
    HAS_LAWS = False
else:
    HAS_LAWS = True
    # Other work on the machine must not fail a law, and a run must say the same twice.
    shared = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("atoll", max_examples=25, **shared)
    settings.register_profile("whole", max_examples=100, **shared)
    settings.load_profile("atoll")

# One thread for this process and for those that tests start, as ranks have: the threads of a tiny operation wait for
# each other on cores that other tests use. A run of one rank took 44 s of processor time on two threads, and takes 7.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as templates of ranks have it, so that theirs are forks, too

# A shell that starts a suite in the background has it ignore Ctrl-C, and whatever it starts does, too: tests of what
# Ctrl-C does would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Runs of tests measure no machine: it takes seconds, and the others would be in its way.
os.environ.setdefault("ATOLL_MEASURE", "false")


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    """Python programs that the module starts are forks, without the time of imports; see `tests/warm.py`."""
    if not sys.platform.startswith("linux"):
        yield
        return
    from tests.warm import programs, server

    with programs(server()):
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="where tests/gpu runs; on the CPU it is a rehearsal, which proves nothing of a GPU (default: cuda)",
    )
    parser.addoption("--most-skips", type=int, metavar="N", help="fail if more tests than that are skipped")
    parser.addoption(
        "--quick",
        action="store_true",
        help="every pair of settings, and one case of every other test that is not marked slow",
    )
    parser.addoption(
        "--whole",
        action="store_true",
        help="every case of tests that are marked wide, and four times the examples of laws",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--whole") and HAS_LAWS:
        settings.load_profile("whole")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, since some tests wait for seconds; each has ranks of half a GB."""
    return min(4, len(os.sched_getaffinity(0)) + 1)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that skips more tests than it may: what is missing on a machine must not look green."""
    most = session.config.getoption("--most-skips")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if most is None or reporter is None or hasattr(session.config, "workerinput"):
        return
    skipped = len(reporter.stats.get("skipped", ()))
    if skipped > most:
        reporter.write_line(f"{skipped} tests were skipped, and {most} may be; their reasons are below (-rs)", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_address = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if by_address:  # then workers collect different tests, and only some of the runs that start them
        raise pytest.UsageError(f"cases whose names have an object's address need ids of their own: {by_address}")
    if not config.getoption("--whole"):
        _keep(config, items, set(items) - set(_left_to_matrix(items)))
    if not config.getoption("--quick"):
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "slow" not in item.keywords:
            cases[item.nodeid.partition("[")[0]].append(item)
    # The case in the middle is seldom the plainest, and seldom the one that takes longest.
    kept = {each[len(each) // 2] for each in cases.values()} | {item for item in items if "pairs" in item.keywords}
    _keep(config, items, kept)


def _left_to_matrix(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases of wide tests, but for as many as the mark says, at equal distances."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("wide"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for each in cases.values():
        (count,) = each[0].get_closest_marker("wide").args  # type: ignore[union-attr]
        kept = {len(each) * (2 * at + 1) // (2 * count) for at in range(min(count, len(each)))}
        yield from (item for at, item in enumerate(each) if at not in kept)


def _keep(config: pytest.Config, items: list[pytest.Item], kept: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
