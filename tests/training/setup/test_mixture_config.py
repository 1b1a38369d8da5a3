"""A config with a mixture of experts: the model that it builds, and its work."""

from __future__ import annotations

from atoll.prediction.cost import Use
from atoll.runtime.models import Decoder, MixtureConfig, count
from atoll.training.config import from_dict
from atoll.training.setup.build import build_model
from atoll.training.setup.prediction import predict, workload_of

MODEL = {
    "layers": 3,
    "hidden": 32,
    "heads": 4,
    "config": {"experts": 4, "expert_ffn": 24, "shared_experts": 1, "dense_layers": 1, "scoring": "sigmoid"},
}


def test_the_decoder_has_the_mixture_of_the_config() -> None:
    model = build_model(from_dict({"model": MODEL}), 50)
    assert isinstance(model, Decoder)
    assert model.config.mixture == MixtureConfig(
        experts=4, expert_ffn=24, shared_experts=1, dense_layers=1, scoring="sigmoid"
    )
    dense = build_model(from_dict({"model": {**MODEL, "config": {}}}), 50)
    assert isinstance(dense, Decoder)
    assert dense.config.mixture is None


def test_its_work_is_that_of_its_experts_and_not_of_a_dense_decoder() -> None:
    config, use = from_dict({"model": MODEL}), Use(samples=2, sequence=16)
    workload = workload_of(config, 50)
    found = [block.work(use) for block in workload.blocks]
    counted = [block.work(use) for block in count(build_model(config, 50)).blocks]
    assert [work.parameters for work in found] == [work.parameters for work in counted]
    assert found[1] != found[2] == found[3]
    assert workload.experts == 4
    assert workload.active < workload.parameters


def test_bytes_of_a_plan_are_predicted() -> None:
    parallel = {"ranks": 4, "pipeline": 2, "intra": 2, "layout": "GGG"}
    found = predict(from_dict({"model": {**MODEL, "vocabulary": 64}, "parallel": parallel, "data": {"sequence": 16}}))
    assert all(found.peak(rank).total > 0 for rank in range(2))
