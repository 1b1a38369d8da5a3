"""Precisions name six dtypes that exist."""

import pytest

from atoll.base.errors import LayoutError
from atoll.plans.layouts import PRESETS, Precision


@pytest.mark.parametrize(("name", "dtype"), [("fp32", "float32"), ("fp64", "float64")])
def test_uniform_presets_have_one_dtype(name: str, dtype: str) -> None:
    preset = Precision.preset(name)
    assert {preset.compute, preset.travel, preset.stored, preset.gradient, preset.reduce, preset.master} == {dtype}


@pytest.mark.parametrize(("name", "half"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_mixed_presets_compute_in_half_and_keep_sums_in_fp32(name: str, half: str) -> None:
    preset = Precision.preset(name)
    assert (preset.compute, preset.travel, preset.stored) == (half, half, half)
    assert (preset.gradient, preset.reduce, preset.master) == ("float32", "float32", "float32")


def test_errors_name_what_exists() -> None:
    with pytest.raises(LayoutError, match=f"no precision 'fp8'; known: {', '.join(PRESETS)}"):
        Precision.preset("fp8")
    with pytest.raises(LayoutError, match="reduce = 'int8'"):
        Precision("odd", "float32", "float32", "float32", "float32", "int8", "float32")


def test_the_old_name_of_stored_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"use Precision\.stored"):
        assert Precision.preset("bf16").rest == "bfloat16"
