"""One CUDA device equals plain PyTorch on the same device, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.plans.layouts import EFFECTIVE
from atoll.testing.parity import Case, reference, train_case, worst_difference
from atoll.testing.tiny import TinyConfig
from tests.gpu.ranks import on_host


@pytest.mark.parametrize("recompute", ["none", "block", "selective"])
@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_every_effective_layout(layout: str, recompute: str, device: str) -> None:
    """The reference runs on CUDA too, so that dropout draws from the same generator."""
    case = Case(layout=layout, recompute=recompute, microbatches=4, model=TinyConfig.everything(), device=device)
    case = replace(case, residency="action")  # each block is gathered for each use, as where it is sent
    wanted = reference(replace(case, layout="NNN", recompute="none"))
    got = train_case(case)

    assert {value.device.type for value in got.parameters.values()} == {device}
    assert got.parameters.keys() == wanted.parameters.keys()
    worst, where = worst_difference(got, wanted)
    assert worst <= 1e-10, f"{case} differs by {worst:.3g} at {where}"


def test_initial_values_do_not_depend_on_the_device(device: str) -> None:
    """Without dropout, whose generators differ, CUDA trains as the CPU does."""
    case = Case(layout="IIG", microbatches=4, model=TinyConfig(tied=True, odd=True), device=device)
    assert_equals_the_cpu(case)


@pytest.mark.parametrize("layout", ["NNN", "GGG"])
def test_muon(layout: str, device: str) -> None:
    """Matrices are orthogonalized in float64, as the masters are."""
    model = TinyConfig(layers=5, tied=True, odd=True)
    options = (("adamw", (("lr", 3e-3),)),)
    assert_equals_the_cpu(
        Case(layout, microbatches=4, model=model, optimizer="Muon", options=options, steps=2, device=device)
    )


def assert_equals_the_cpu(case: Case) -> None:
    wanted = reference(replace(case, layout="NNN", device="cpu"))
    worst, where = worst_difference(on_host(train_case(case)), wanted)
    assert worst <= 1e-8, f"{case.device} and the CPU differ by {worst:.3g} at {where}"
