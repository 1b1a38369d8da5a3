"""The memory that a control group leaves to a process, and the names of processors and GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.base.machine import free_memory, graphics_names, machine_memory, processor_name

WHOLE = machine_memory(Path("/nowhere"))


@pytest.mark.parametrize(
    ("groups", "files", "bytes_"),
    [
        ("0::/jobs/seven\n", {"jobs/seven/memory.max": "max", "jobs/memory.max": "1000000"}, 1_000_000),
        ("0::/jobs/seven\n", {"memory.max": "2000000"}, 2_000_000),  # a container that is its own root
        ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "3000000"}, 3_000_000),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, WHOLE),  # version 1: no limit
        ("3:cpu,cpuacct:/a\n0::/\n", {"memory.max": "max"}, WHOLE),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, groups: str, files: dict[str, str], bytes_: int) -> None:
    for name, text in files.items():
        path = tmp_path / "limits" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (tmp_path / "cgroup").write_text(groups)
    assert machine_memory(tmp_path / "cgroup", tmp_path / "limits") == bytes_


@pytest.mark.parametrize(("group", "files", "bytes_"), [
    ("0::/jobs\n", {"jobs/memory.max": "5000", "jobs/memory.current": "1500"}, 3500),
    ("0::/jobs\n", {"jobs/memory.max": "5000", "jobs/memory.current": "7000"}, 0),
    ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "300", "memory/a/memory.usage_in_bytes": "100"}, 200),
    ("0::/a\n", {"a/memory.max": "900", "a/memory.current": "0", "memory.max": "800", "memory.current": "1"}, 799),
])  # fmt: skip
def test_what_a_control_group_can_still_give(tmp_path: Path, group: str, files: dict[str, str], bytes_: int) -> None:
    for name, text in files.items():
        path = tmp_path / "limits" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (tmp_path / "cgroup").write_text(group)
    assert free_memory(tmp_path / "cgroup", tmp_path / "limits") == bytes_
    assert 0 < free_memory(Path("/nowhere")) < WHOLE


def test_this_machine() -> None:
    assert 2**28 < machine_memory() <= WHOLE < 2**50
    assert processor_name()


def test_gpus_are_named_by_their_driver(tmp_path: Path) -> None:
    driver, kernel = tmp_path / "gpus", tmp_path / "kfd"
    assert graphics_names(driver, kernel) == ()
    kernel.touch()
    assert graphics_names(driver, kernel) == ("AMD",)
    texts = {
        "0000:01:00.0": "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t 18\n",
        "0000:41:00.0": "IRQ: 19\nModel: NVIDIA A100-SXM4-80GB \n",
        "0000:81:00.0": "IRQ: 20\n",  # a driver that does not say
    }
    for address, text in texts.items():
        (driver / address).mkdir(parents=True)
        (driver / address / "information").write_text(text)
    assert graphics_names(driver, kernel) == ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA")
