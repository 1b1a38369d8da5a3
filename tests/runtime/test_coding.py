"""Kernels of codecs: what arrives is what the reference makes of it, and nothing of a sum gets lost."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from atoll.plans.layouts import CODES, Codec
from atoll.runtime.sharding import coding
from atoll.testing.coded import CodecKind, coded

SIZES = (1, 7, 8, 65, 3000)


def message(codec: Codec, values: torch.Tensor, **options: torch.Tensor | None) -> torch.Tensor:
    sent = torch.full((codec.nbytes(len(values)),), 0xAB, dtype=torch.uint8)
    coding.encode(codec, values, sent, **options)
    return sent


def arrived(codec: Codec, values: torch.Tensor, **options: torch.Tensor | None) -> torch.Tensor:
    out = torch.full_like(values, torch.nan)
    coding.decode(codec, message(codec, values, **options), out)
    return out


def draws(numel: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=dtype)
    values[::5] *= 1e-3
    values[3::11] = 0.0
    return values


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", CODES)
def test_what_arrives_is_what_the_reference_says(name: str, rounding: Any) -> None:
    for numel in SIZES:
        codec, values = Codec(name, 8, rounding), draws(numel)
        noise = coding.draw_uniform(codec, numel, 5, torch.device("cpu"))
        wanted = coded(values, CodecKind(name, 8, rounding == "stochastic"), seed=5)
        assert torch.equal(arrived(codec, values, noise=noise), wanted)


@pytest.mark.parametrize(
    ("name", "largest"), [("bf16", 2**-8), ("fp8", 2**-4), ("int8", 1 / 254), ("int4", 1 / 14), ("int2", 1 / 2)]
)
def test_errors_are_at_most_half_a_step(name: str, largest: float) -> None:
    values = draws(3000, torch.float32)
    error = (arrived(Codec(name, 100), values) - values).abs().view(-1, 100)
    assert float((error.amax(1) / values.abs().view(-1, 100).amax(1)).max()) <= largest * (1 + 1e-6)


@pytest.mark.parametrize("name", CODES)
def test_the_residual_is_what_did_not_arrive(name: str) -> None:
    codec, values = Codec(name, 16, "stochastic"), draws(100)
    residual = torch.full_like(values, 0.01)
    noise = coding.draw_uniform(codec, 100, 1, torch.device("cpu"))
    came = arrived(codec, values, residual=residual, noise=noise)
    assert torch.allclose(came + residual, values + 0.01, rtol=0, atol=1e-15)
    assert float(residual.abs().max()) > 0


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step"), [("fp8", 1 / 14), ("int8", 1 / 127), ("int4", 1 / 7), ("int2", 1), ("bf16", 2**-7)]
)
def test_stochastic_rounding_keeps_the_mean(name: str, step: float) -> None:
    codec, values, times = Codec(name, 8, "stochastic"), draws(8), 2000
    came = [arrived(codec, values, noise=coding.draw_uniform(codec, 8, at, values.device)) for at in range(times)]
    assert float(torch.stack(came).std(0).max()) > 0
    off = (torch.stack(came).mean(0) - values).abs().max()
    assert float(off) < 3 * step * float(values.abs().max()) / times**0.5


@pytest.mark.parametrize("name", CODES)
def test_zeros_stay_zero_and_what_is_not_finite_stays_seen(name: str) -> None:
    codec = Codec(name, 8, "stochastic")
    noise = torch.full((32,), 1 - 2.0**-24)
    assert not arrived(codec, torch.zeros(32), noise=noise).any()
    assert not arrived(codec, torch.full((32,), 1e-45), noise=None if name == "bf16" else noise).count_nonzero() or (
        name == "bf16"
    )
    for bad in (torch.inf, -torch.inf, torch.nan):
        values = torch.ones(32)
        values[9] = bad
        came = arrived(Codec(name, 8), values)
        assert not came[9].isfinite()
        assert came[:8].isfinite().all()
        assert came[16:].isfinite().all()


def test_two_bits_keep_the_largest_element_and_zeros() -> None:
    for sign in (1.0, -1.0):
        values = sign * torch.tensor([2.0, 0.0, 0.4, 0.6, 1.4, -0.6, -1.4, -1.9])
        expected = sign * torch.tensor([2.0, 0.0, 0.0, 1.0, 1.0, -1.0, -1.0, -1.0])
        assert torch.equal(arrived(Codec("int2", 8), values), expected)


def test_two_bits_do_not_depend_on_rounding_errors() -> None:
    """Which of two elements that differ in sign alone is the largest may depend on the layout."""
    for error in (1e-16, -1e-16):
        values = torch.tensor([1.0, -1.0 - error, error, -1.0], dtype=torch.float64)
        assert arrived(Codec("int2", 4), values).tolist() == [1.0, -0.5, 0.0, -0.5]


def test_values_are_added_where_they_are_to_be() -> None:
    codec, values, out = Codec("int8", 8), draws(20, torch.float32), torch.ones(20)
    coding.decode(codec, message(codec, values), out, adds=True)
    assert torch.equal(out, 1 + arrived(codec, values))
    half = torch.ones(20, dtype=torch.bfloat16)
    coding.decode(codec, message(codec, values), half, adds=True)
    assert torch.equal(half, (1 + arrived(codec, values)).bfloat16())


@pytest.mark.parametrize("codec", [Codec("int4", 10), Codec("int2", 12)], ids=str)
def test_a_message_does_not_depend_on_how_much_is_encoded_at_a_time(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = draws(1003, torch.float32)
    whole = message(codec, values)
    monkeypatch.setattr(coding, "_AT_A_TIME", 64)
    assert torch.equal(message(codec, values), whole)


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", CODES)
def test_kernels_can_be_compiled(name: str) -> None:
    """As on a GPU, but without generated code: the graphs are the same."""
    torch._dynamo.reset()  # it limits how often a function is compiled, and each codec is compiled twice
    act = partial(torch.compile, dynamic=True, backend="aot_eager", fullgraph=True)
    rows, noise = draws(48, torch.float32).view(6, 8), torch.rand(6, 8)
    for given in (None, noise):
        found, wanted = (each(rows, given, name, is_lossy=True) for each in (act(coding._encode), coding._encode))
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        scales, payload, _ = wanted
        options = {"size": 8, "dtype": torch.float32}
        assert torch.equal(act(coding._decode)(scales, payload, name, **options),
                           coding._decode(scales, payload, name, **options))  # fmt: skip


def test_seeds_tell_messages_apart() -> None:
    names: dict[str, Any] = {"seed": 0, "step": 1, "unit": 2, "segment": 3, "what": "sync", "rank": 4, "to": 5}
    seeds = {coding.noise_seed(**names)}
    for name, other in (("seed", 9), ("step", 9), ("unit", 9), ("segment", 9), ("what", "I.0"), ("rank", 9), ("to", 9)):
        seeds.add(coding.noise_seed(**{**names, name: other}))
    assert len(seeds) == 8
