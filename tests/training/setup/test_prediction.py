"""Sizes of a config's model: by formulas where there are any, and otherwise counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import ConfigError
from atoll.training.config import from_dict, load
from atoll.training.setup.prediction import _sizes, predict, workload_of

pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


@pytest.mark.wide(2)
@pytest.mark.parametrize(
    ("family", "objective", "has_formulas"),
    [
        ("llama", "causal", True),
        ("gpt_bigcode", "causal", False),
        ("falcon", "causal", False),
        ("bert", "masked", False),
    ],
)
def test_families_without_formulas_are_counted(family: str, objective: str, has_formulas: bool) -> None:
    names = {"gpt_bigcode": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64}}
    config = from_dict(
        {
            "model": {"source": f"transformers:{family}", "config": names.get(family, SMALL)},
            "train": {"objective": objective},
        }
    )
    sizes = _sizes(config, 64, False)
    assert (sizes is not None) == has_formulas
    workload = workload_of(config, 64)
    assert workload.parameters > 64 * 16
    assert len(workload.layers) == 2


def test_ranks_are_on_the_nodes_that_the_config_names() -> None:
    recipe = Path(__file__).parents[3] / "configs" / "recipes" / "llama-7b-a100-4090.toml"
    cluster = recipe.parents[1] / "clusters" / "a100-rtx4090.toml"
    plan = ["parallel.auto=false", "parallel.pipeline=2", "parallel.intra=8", "parallel.layers_per_stage=[10, 22]"]
    found = predict(load(recipe, [*plan, 'run.nodes=["rtx4090", "a100"]']), cluster)
    assert [found.seats.name(rank) for rank in range(2)] == ["rank 0 on rtx4090", "rank 1 on a100"]
    assert found.seconds < predict(load(recipe, plan), cluster).seconds
    with pytest.raises(ConfigError, match="nodes = h100: the cluster has the kinds a100, rtx4090"):
        predict(load(recipe, [*plan, 'run.nodes=["h100"]']), cluster)
