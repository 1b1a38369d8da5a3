"""Kernels that are compiled if numba is installed."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.plans.schedules.jit import IS_COMPILED, kernel


@kernel
def double(number: int) -> int:
    return 2 * number


@kernel
def call_with_constants(number: int) -> int:
    return double(1) + double(2) + double(number)


@pytest.mark.skipif(not IS_COMPILED, reason="numba is not installed")
def test_a_kernel_is_compiled_once_whatever_constants_another_one_passes() -> None:
    compiled: Any = double
    assert call_with_constants(3) == 12
    assert len(compiled.signatures) == 1
