"""`attn_implementation` chooses the attention of a transformers model, for runs and for predictions."""

from __future__ import annotations

import pytest

from atoll.base.errors import ConfigError
from atoll.prediction.cost import Cluster, Product, Use, Work
from atoll.prediction.planner import Space
from atoll.training.config import Config
from atoll.training.setup.build import build_model
from atoll.training.setup.choosing import plan
from atoll.training.setup.prediction import predict, workload_of

pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
         "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
CLUSTER = Cluster.of({"device": {"preset": "h100-80gb"}, "node": {"devices": 2, "link": {"preset": "nvlink4"}}})


def config(family: str, attention: str | None = None) -> Config:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1} if family == "gpt_oss" else {}
    chosen = {} if attention is None else {"attn_implementation": attention}
    values = {"source": f"transformers:{family}", "config": {**SIZES, **experts, **chosen}, "vocabulary": 64}
    train = {"global_batch": 4, "microbatch": 1, "precision": "bf16"}
    parallel = {"ranks": 2, "intra": 2}
    return Config.model_validate({"model": values, "data": {"sequence": 32}, "train": train, "parallel": parallel})


def test_it_is_that_of_the_model_and_of_its_prediction() -> None:
    import torch

    use = Use(samples=1, sequence=32, compute="float32")
    kept = {}
    for name in ("eager", "sdpa", None):
        own = config("llama", attention=name)
        with torch.device("meta"):
            assert build_model(own, 64).config._attn_implementation == (name or "sdpa")
        kept[name] = workload_of(own, 64).blocks[1].work(use).kept
    assert kept["eager"] > kept["sdpa"] == kept[None]


def test_gpt_oss_is_predicted_and_planned() -> None:
    assert predict(config("gpt_oss"), CLUSTER).seconds > 0
    assert plan(config("gpt_oss"), CLUSTER, space=Space(precision=("bf16",), unit=(1,))).best.seconds > 0


def products(work: Work) -> list[Product]:
    return [kernel for kernel in work.forward if isinstance(kernel, Product)]


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_experts_are_counted_in_every_precision_of_their_kernels(family: str, precision: str) -> None:
    """torch's `meta` kernel of grouped products takes bf16 alone."""
    values = config(family).model_dump()
    values["train"]["precision"] = precision
    found, in_bf16 = (
        products(workload_of(own, 64).blocks[1].work(Use(samples=1, sequence=32, compute=dtype)))
        for own, dtype in (
            (Config.model_validate(values), {"fp32": "float32", "fp16": "float16"}[precision]),
            (config(family), "bfloat16"),
        )
    )
    assert found == in_bf16
    assert found


def test_an_attention_that_a_family_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match=r"attn_implementation = 'sdpa' .*does not support"):
        predict(config("gpt_oss", attention="sdpa"), CLUSTER)
    with pytest.raises(ConfigError, match=r"attn_implementation = 'fast'"):
        predict(config("mixtral", attention="fast"), CLUSTER)
