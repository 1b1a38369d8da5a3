"""Seconds of kernels, from figures that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.prediction.cost import Device, Efficiency, Exchange, FusedAttention, KernelClock, Pass, Product, collective
from atoll.program.sim import Speed

IDEAL = Efficiency(products=1.0, depth=0.0, waves=0.0, attention=1.0, memory=1.0, launch=0.0, dispatch=0.0)
DEVICE = Device(memory=10**10, bandwidth=1e12, units=100, rates={"bfloat16": 1e14}, efficiency=IDEAL)


def clock(**constants: float) -> KernelClock:
    efficiency = IDEAL.model_copy(update=constants)
    return KernelClock(DEVICE.model_copy(update={"efficiency": efficiency}), "bfloat16", 2)


BIG = Product(4096, 4096, 8192)


def test_a_large_product_takes_its_operations() -> None:
    assert clock().of(BIG) == pytest.approx(BIG.flops / 1e14)
    assert clock(products=0.5).of(BIG) == pytest.approx(2 * BIG.flops / 1e14)


def test_a_share_of_the_rate_is_that_of_the_gradients_too() -> None:
    slow = replace(BIG, share=0.25)
    for product in (slow, slow.swapped, slow.learnt):
        assert clock().of(product) == pytest.approx(4 * BIG.flops / 1e14)


def test_a_product_of_a_thin_matrix_takes_its_bytes() -> None:
    thin = Product(1, 4096, 4096)
    assert clock().of(thin) == pytest.approx(2 * (4096 + 4096**2 + 4096) / 1e12)


def test_a_shallow_product_reaches_less() -> None:
    assert clock(depth=4096.0).of(BIG) == pytest.approx(2 * BIG.flops / 1e14)


def test_the_empty_part_of_the_last_wave_is_lost() -> None:
    """101 tiles on 100 units: two waves, of which 99 places are empty."""
    product = Product(101 * 128, 4096, 256)
    assert clock(waves=1.0).of(product) == pytest.approx(product.flops / 1e14 * 200 / 101)
    assert clock(waves=0.5).of(product) == pytest.approx(product.flops / 1e14 * (1 + 0.5 * 99 / 101))


def test_gradients_of_a_product_take_as_many_operations() -> None:
    product = Product(3, 5, 7, 2)
    assert product.flops == 2 * 3 * 5 * 7 * 2 == product.swapped.flops == product.learnt.flops
    assert (product.swapped.rows, product.swapped.columns) == (3, 5)
    assert (product.learnt.rows, product.learnt.columns) == (5, 7)


def test_passes_and_attention() -> None:
    assert clock(memory=0.5).of(Pass(1e9)) == pytest.approx(2e-3)
    assert clock(attention=0.25).of(FusedAttention(1e12, 1e6)) == pytest.approx(4e-2)
    assert clock(attention=0.25).of(FusedAttention(1e6, 1e9)) == pytest.approx(1e-3)


def test_a_kernel_takes_no_less_than_its_launch_and_a_block_than_the_host() -> None:
    assert clock(launch=1e-5).of(Pass(1.0, 3)) == pytest.approx(3e-5)
    assert clock(launch=1e-5).of(Product(1, 1, 1)) == pytest.approx(1e-5)
    small = [Pass(1.0), Product(1, 1, 1), Pass(1.0, 2)]
    assert clock(dispatch=1e-4).seconds(small) == pytest.approx(4e-4)
    assert clock(dispatch=1e-4).seconds([BIG]) == pytest.approx(BIG.flops / 1e14)


def test_collectives_are_rings() -> None:
    link = Speed(latency=1e-6, rate=1e9)
    assert collective("all-gather", 8e9, ranks=8, link=link) == pytest.approx(7 * (1e-6 + 1.0))
    assert collective("reduce-scatter", 8e9, ranks=8, link=link) == pytest.approx(7 * (1e-6 + 1.0))
    assert collective("all-reduce", 8e9, ranks=8, link=link) == pytest.approx(14 * (1e-6 + 1.0))
    assert collective("all-reduce", 8e9, ranks=1, link=link) == 0.0
    group = KernelClock(DEVICE, "bfloat16", 2, {"tp": (8, link)})
    assert group.of(Exchange("all-gather", 8e9)) == pytest.approx(7 * (1e-6 + 1.0))
