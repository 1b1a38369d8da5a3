"""Sizes of a config's model: by formulas where there are any, and otherwise counted."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.training.config import from_dict
from atoll.training.setup.prediction import _sizes, workload_of

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
