"""The built-in decoder: what it computes, at which precision, and which sizes it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from atoll.base.errors import PlanError
from atoll.runtime.models import Decoder, DecoderAdapter, DecoderConfig, initialise_model
from atoll.runtime.models.decoder import Attention, rotate

SMALL = DecoderConfig(vocabulary=61, layers=3, hidden=24, heads=6, kv_heads=2, ffn=40)


def _decoder(config: DecoderConfig = SMALL, dtype: torch.dtype = torch.float64) -> Decoder:
    model = Decoder(config).to(dtype)
    initialise_model(DecoderAdapter(model), seed=3)
    return model


def _ids(rows: int = 2, columns: int = 13, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, SMALL.vocabulary, (rows, columns), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_have_the_parameters_dtype_and_one_row_a_token(dtype: torch.dtype) -> None:
    logits = _decoder(dtype=dtype)(_ids())
    assert logits.dtype == dtype
    assert logits.shape == (2, 13, SMALL.vocabulary)
    assert torch.isfinite(logits).all()


def test_future_tokens_do_not_change_past_logits() -> None:
    model = _decoder()
    ids = _ids()
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % SMALL.vocabulary
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-14)
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_past_tokens_and_their_order_do_change_logits() -> None:
    model = _decoder()
    ids = _ids(rows=1)
    swapped = ids.clone()
    swapped[0, 0], swapped[0, 1] = ids[0, 1], ids[0, 0]
    assert ids[0, 0] != ids[0, 1]
    assert (model(ids)[0, -1] - model(swapped)[0, -1]).abs().max() > 1e-6


def test_grouped_queries_equal_repeated_key_and_value_heads() -> None:
    grouped = Attention(SMALL).double()
    full = Attention(dataclasses.replace(SMALL, kv_heads=SMALL.heads)).double()
    repeats = SMALL.heads // SMALL.kv_heads
    with torch.no_grad():
        for name in ("query", "output"):
            getattr(full, name).weight.copy_(getattr(grouped, name).weight)
        for name in ("key", "value"):
            heads = getattr(grouped, name).weight.unflatten(0, (SMALL.kv_heads, SMALL.head_size))
            getattr(full, name).weight.copy_(heads.repeat_interleave(repeats, dim=0).flatten(0, 1))
    hidden = torch.randn(2, 9, SMALL.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(grouped(hidden), full(hidden), rtol=0, atol=1e-13)


def test_rotary_scores_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(8, dtype=torch.float64, generator=generator)
    key = torch.randn(8, dtype=torch.float64, generator=generator)
    length = 12
    queries = rotate(query.expand(1, 1, length, 8), 10_000.0)[0, 0]
    keys = rotate(key.expand(1, 1, length, 8), 10_000.0)[0, 0]
    scores = queries @ keys.T
    torch.testing.assert_close(scores[3:, 3:], scores[:-3, :-3], rtol=0, atol=1e-13)
    torch.testing.assert_close(scores[0, 0], query @ key)
    assert (scores[0] - scores[0, 0]).abs().max() > 0.1


def test_rotary_keeps_late_positions_apart_in_bf16() -> None:
    """bf16 cannot count past 256: angles taken in it would make positions 4094 and 4095 the same."""
    late = rotate(torch.ones(1, 1, 4096, 8, dtype=torch.bfloat16), 10_000.0)[0, 0]
    exact = rotate(torch.ones(1, 1, 4096, 8, dtype=torch.float64), 10_000.0)[0, 0]
    assert (late.double() - exact).abs().max() < 0.02


@pytest.mark.parametrize(("dtype", "steps"), [(torch.float64, 8), (torch.float32, 8), (torch.bfloat16, 0.51)])
def test_norms_compute_in_fp32_for_halves_and_in_fp64_for_fp64(dtype: torch.dtype, steps: float) -> None:
    """A half's error is its last rounding alone (half a step): sums in bf16 would be ten times worse."""
    norm = Decoder(SMALL).head.norm.to(dtype)
    hidden = (1 + torch.rand(4, SMALL.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(5))).to(
        dtype
    )
    precise = hidden.double()
    expected = precise * torch.rsqrt(precise.square().mean(-1, keepdim=True) + SMALL.norm_eps)
    assert (norm(hidden).double() - expected).abs().max() <= steps * torch.finfo(dtype).eps


def test_dropout_acts_in_training_only_and_follows_the_generator() -> None:
    model = _decoder(dataclasses.replace(SMALL, dropout=0.3))
    ids = _ids()
    model.eval()
    assert torch.equal(model(ids), model(ids))
    model.train()
    torch.manual_seed(11)
    first = model(ids)
    assert not torch.equal(first, model(ids))
    torch.manual_seed(11)
    assert torch.equal(first, model(ids))


def test_tied_embeddings_are_one_parameter() -> None:
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Decoder(dataclasses.replace(SMALL, tie_embeddings=True))
        assert model.head.output.weight is model.embed.weight
        assert "head.output.weight" not in dict(model.named_parameters())


def test_builds_on_meta_without_buffers() -> None:
    with torch.device("meta"):
        model = Decoder(SMALL)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())


@pytest.mark.slow
def test_learns_to_copy_a_cycle() -> None:
    model = _decoder(dtype=torch.float32)
    ids = (torch.arange(17) % 5).expand(4, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 25}, "hidden = 25 is not a multiple of heads = 6"),
        ({"kv_heads": 4}, "heads = 6 is not a multiple of kv_heads = 4"),
        ({"hidden": 18}, "18 / 6 = 3 is odd"),
        ({"layers": 0}, "layers = 0: must be at least 1"),
        ({"dropout": 1.0}, "dropout = 1.0"),
        ({"norm_eps": 0.0}, "norm_eps = 0.0: must be positive"),
    ],
)
def test_impossible_sizes_are_refused_with_their_values(changes: dict[str, float], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        dataclasses.replace(SMALL, **changes)
    assert message in str(caught.value)


def test_all_wrong_sizes_are_reported_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        dataclasses.replace(SMALL, vocabulary=0, dropout=-1.0)
    assert "vocabulary = 0" in str(caught.value)
    assert "dropout = -1.0" in str(caught.value)
