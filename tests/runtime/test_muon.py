"""Muon on flat shards equals one process: layouts, schedules, kinds of models, checkpoints, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll import Engine
from atoll.errors import CheckpointError, PlanError, RankError
from atoll.layouts import EFFECTIVE
from atoll.runtime.sharding.muon import orthogonalize
from atoll.testing import run_ranks
from atoll.testing.families import Family
from atoll.testing.parity import (
    Case,
    assert_checkpoint_parity,
    assert_parity,
    reference,
    train,
    worst_difference,
)
from atoll.testing.tiny import TinyConfig, tiny_model

ADAMW = ("adamw", (("lr", 3e-3), ("betas", (0.8, 0.95))))
MODELS = (
    TinyConfig(layers=5, odd=True, dropout=0.2),
    TinyConfig(layers=5, tied=True, vocabulary=17, small=True, odd=True),
    TinyConfig(layers=5, frozen=True, unused=True),
)
SCHEDULES = ("1f1b", "zb-v", "breadth-first")


def muon(**options: Any) -> Case:
    chosen = {"optimizer": "Muon", "options": (ADAMW,), "steps": 2}
    return Case(**{**chosen, **options})


# ---- the same result


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_layout_equals_one_process(schedule: str) -> None:
    for at, layout in enumerate(EFFECTIVE):
        inter, intra = ((1, 2), (2, 1))[at % 2]
        model = MODELS[at % len(MODELS)]
        spread = {"pipeline": 2, "inter": inter, "intra": intra, "microbatches": 8}
        assert_parity(muon(layout=layout.name, schedule=schedule, model=model, **spread))


@pytest.mark.parametrize("layout", ["NNG", "III", "GGG"])
def test_matrices_lie_across_three_shards(layout: str) -> None:
    """A matrix of 13 x 8 in three parts, at places that divide no row."""
    assert_parity(muon(layout=layout, intra=3, microbatches=6, model=MODELS[0]))
