"""What a rank adds to rows that are sorted by its experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from atoll.runtime.experts.division import Division


@pytest.mark.parametrize("counts", [(2, 0, 1), (0, 0, 0), (1, 1, 1)], ids=str)
def test_each_row_gets_the_bias_of_its_expert(counts: tuple[int, ...]) -> None:
    module: Any = nn.Module()
    module.has_bias = True
    module.down_proj_bias = nn.Parameter(torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]))
    own: Any = SimpleNamespace(_module=module)
    rows = torch.full((sum(counts), 2), 0.5)
    found = Division._biased(own, rows, "down_proj_bias", counts)
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert found.tolist() == [[1.5 + expert, 10.5 + 10 * expert] for expert in experts]
    module.has_bias = False
    assert Division._biased(own, rows, "down_proj_bias", counts) is rows
