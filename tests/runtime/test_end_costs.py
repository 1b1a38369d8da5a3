"""What a step's end reads, and in which order: nothing twice, and nothing before it is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.runtime.models import Decoder, DecoderConfig
from atoll.runtime.models.batch import as_tensors, on_device
from atoll.runtime.sharding.gradient_buffer import GradientBuffer
from atoll.runtime.sharding.norm import _AT_A_TIME, _sum_by_rows
from atoll.runtime.sharding.optimizer import fused_by_default

SIZES = DecoderConfig(vocabulary=32, layers=1, hidden=16, heads=2, kv_heads=2, ffn=32)


def engine(*, clip: float | None = 0.1, precision: str = "fp32", **options: bool) -> Engine:
    with torch.device("meta"):
        model = Decoder(SIZES)
    schedule = schedules.build("1f1b", ranks=1, microbatches=2)
    plan = Plan(MeshShape(), Layout("NNN"), schedule, 1, precision=Precision.preset(precision))
    return Engine(model, plan, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2, **options), clip=clip)


def batch(step: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(SIZES.vocabulary, (2, 9), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def test_a_fused_optimizer_clips_as_any_other() -> None:
    """The factor goes into its kernel, and gradients are not multiplied before it."""
    runs = []
    for options in ({"fused": True}, {"foreach": False}):
        run = engine(**options)
        scaled = []
        for unit in run.units:
            unit.scale_gradients = lambda factor, scaled=scaled: scaled.append(factor)  # type: ignore[method-assign, misc]
        if "fused" not in options:
            for unit in run.units:
                del unit.scale_gradients
        results = [run.step(batch(step)) for step in range(4)]
        assert not scaled
        runs.append(([each.loss for each in results], [each.grad_norm for each in results], run.state_dict()))
        run.close()
    (losses, norms, fused), (other_losses, other_norms, other) = runs
    assert min(norms) > 0.1  # every step is clipped
    assert losses == pytest.approx(other_losses, rel=1e-5)
    assert norms == pytest.approx(other_norms, rel=1e-4)
    for name, value in other.items():
        assert isinstance(value, torch.Tensor)
        torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-5)


def test_a_run_keeps_its_own_kernels_when_it_loads(tmp_path: Path) -> None:
    """They follow from the device, not from the run that saved; its other options do not."""
    saved, loaded = engine(fused=True), engine(foreach=True)
    saved.step(batch(0))
    saved.save(tmp_path / "step")
    wanted = saved.step(batch(1))
    loaded.load(tmp_path / "step")
    (group,) = loaded._optimizer.torch.param_groups
    assert (group["fused"], group["foreach"], group["lr"]) == (None, True, 1e-2)
    got = loaded.step(batch(1))
    assert (got.loss, got.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-5)
    saved.load(tmp_path / "step")
    again = saved.step(batch(1))
    assert (again.loss, again.grad_norm) == (wanted.loss, wanted.grad_norm)
    for run in (saved, loaded):
        run.close()


@pytest.mark.parametrize("numel", [1, _AT_A_TIME - 1, _AT_A_TIME, 3 * _AT_A_TIME + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_by_rows(numel: int, dtype: torch.dtype) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    wanted = float(values.double().square().sum())
    found = _sum_by_rows(values)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(wanted, rel=1e-5)


def test_large_and_infinite_values_are_not_lost() -> None:
    assert float(_sum_by_rows(torch.tensor([1e30, 1.0]))) > 1e30
    assert not torch.isfinite(_sum_by_rows(torch.tensor([1.0, torch.inf])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_written_and_then_added(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, gradient = torch.randn(2, 3, 8, generator=generator), torch.randn(2, 3, 4, generator=generator)
    hidden, gradient = hidden.to(dtype), gradient.to(dtype)
    view = torch.full((4, 8), torch.nan)
    GradientBuffer(view, is_empty=True).add_product(hidden, gradient)
    product = gradient.reshape(6, 4).float().t() @ hidden.reshape(6, 8).float()
    torch.testing.assert_close(view, product, rtol=1e-2, atol=1e-2)
    GradientBuffer(view, is_empty=False).add_product(hidden, gradient)
    torch.testing.assert_close(view, 2 * product, rtol=1e-2, atol=1e-2)


def test_a_batch_stays_where_it_is_until_it_is_moved() -> None:
    given = {"input_ids": torch.ones(2, 3), "more": {"mask": torch.zeros(2)}}
    tensors = as_tensors(given)
    assert tensors["input_ids"] is given["input_ids"]
    moved = on_device(tensors, torch.device("meta"))
    assert moved["more"]["mask"].is_meta
    assert on_device(tensors, torch.device("cpu"))["more"]["mask"] is given["more"]["mask"]  # type: ignore[index]


def test_fused_kernels_are_the_default_on_a_gpu_alone() -> None:
    def groups(device: str) -> list[dict[str, list[torch.Tensor]]]:
        with FakeTensorMode():
            return [{"params": [torch.empty(2, device=device)]}, {"params": []}]

    assert fused_by_default({}, groups("cuda")) == {"fused": True}
    assert fused_by_default({"amsgrad": True}, groups("cuda")) == {"fused": True}
    for chosen in ("fused", "foreach", "capturable", "differentiable"):
        assert fused_by_default({chosen: False}, groups("cuda")) == {}
    assert fused_by_default({}, groups("cpu")) == {}
    assert fused_by_default({}, [{"params": []}]) == {}
