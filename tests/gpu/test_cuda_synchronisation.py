"""The host does not wait for the device where it need not: forward, backward, gathers, reductions.

Needed waits are elsewhere: the count of the tokens before the step, its loss and gradient norm after it.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.gpu import decoders

NOT_ALL_ARE_SEEN = "ignore:Synchronization debug mode is a prototype"


@pytest.mark.filterwarnings(NOT_ALL_ARE_SEEN)
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("layout", ["NNN", "IIG", "GGG"])
def test_forward_and_backward_never_wait(layout: str, recompute: str) -> None:
    engine = decoders.engine(layout, layers=2, recompute=recompute)
    batch = decoders.batch()
    engine.step(batch)
    run = engine._executor.run

    def strict(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine._executor.run = strict  # type: ignore[method-assign]
    result = engine.step(batch)
    engine.close()
    assert result.step == 2


def waits(layers: int) -> int:
    """How often the host waits in one step."""
    engine = decoders.engine("IIG", layers=layers)
    batch = decoders.batch()
    engine.step(batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    engine.close()
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


@pytest.mark.filterwarnings(NOT_ALL_ARE_SEEN)
def test_waits_of_a_step_do_not_grow_with_the_model() -> None:
    few, many = waits(2), waits(6)
    assert few == many
    assert 0 < few <= decoders.MICROBATCHES + 4
