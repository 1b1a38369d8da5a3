"""One CUDA device equals plain PyTorch on the same device, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.layouts import EFFECTIVE
from atoll.testing.parity import Case, reference, train, worst_difference
from atoll.testing.tiny import TinyConfig


@pytest.mark.parametrize("recompute", ["none", "block", "selective"])
@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_every_effective_layout(layout: str, recompute: str) -> None:
    """The reference runs on CUDA too, so that dropout draws from the same generator."""
    case = Case(layout=layout, recompute=recompute, microbatches=4, model=TinyConfig.everything(), device="cuda")
    wanted = reference(replace(case, layout="NNN", recompute="none"))
    got = train(case)

    assert all(value.is_cuda for value in got.parameters.values())
    assert got.parameters.keys() == wanted.parameters.keys()
    worst, where = worst_difference(got, wanted)
    assert worst <= 1e-10, f"{case} differs by {worst:.3g} at {where}"


def test_initial_values_do_not_depend_on_the_device() -> None:
    """Without dropout, whose generators differ, CUDA trains as the CPU does."""
    case = Case(layout="IIG", microbatches=4, model=TinyConfig(tied=True, odd=True), device="cuda")
    got = train(case)
    got.parameters = {name: value.cpu() for name, value in got.parameters.items()}
    wanted = reference(replace(case, layout="NNN", device="cpu"))
    worst, where = worst_difference(got, wanted)
    assert worst <= 1e-8, f"CUDA and CPU differ by {worst:.3g} at {where}"
