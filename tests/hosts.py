"""What tests of host memory share: plans that they run, and a comparison of the bits with those of a run without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from atoll.plans.host import HostState
from atoll.testing import run_ranks
from atoll.testing.parity import Case, train_case

SCHEDULES = ("1f1b", "zb-v", "interleaved", "breadth-first")
RECOMPUTE = ("none", "block", "selective")
PIPELINE: dict[str, Any] = {"pipeline": 2, "intra": 2, "microbatches": 8}


def parameters_after(case: Case) -> dict[str, torch.Tensor]:
    """The parameters of a rank after the steps of a case."""
    return dict(train_case(case).parameters)


def assert_same_bits(case: Case, *hosts: HostState) -> None:
    """Raise AssertionError unless each kind of host memory gives the parameters of the case without, to the bit."""
    plain = run_ranks(parameters_after, case.ranks, case)
    for host in hosts:
        for own, other in zip(plain, run_ranks(parameters_after, case.ranks, replace(case, host=host)), strict=True):
            assert own.keys() == other.keys()
            assert all(torch.equal(own[name], other[name]) for name in own)
