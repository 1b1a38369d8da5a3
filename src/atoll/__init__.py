"""Atoll trains PyTorch models with any sharding layout under any pipeline schedule.

    import atoll
    from atoll.program.sim import Costs

    schedule = atoll.schedule("1f1b", ranks=4, microbatches=16)
    trace = atoll.simulate(schedule, Costs(forward=1.0, input_grad=1.0, weight_grad=1.0))

Names are loaded on first access: `import atoll` imports neither torch nor numpy; only `Engine` and `Muon` do. All other
names are on the floor that they belong to, as in `from atoll.runtime.models import Decoder`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.base.errors import AtollError
    from atoll.plans.layouts.layout import Layout
    from atoll.plans.layouts.precision import Precision
    from atoll.plans.outer import Outer
    from atoll.plans.plan import MeshShape, Plan
    from atoll.plans.schedules.catalogue import build as schedule
    from atoll.prediction.cost import Cluster
    from atoll.program.sim import simulate
    from atoll.runtime.engine import Engine
    from atoll.runtime.sharding.muon import Muon
    from atoll.training.process import train
    from atoll.training.setup.choosing import plan
    from atoll.training.setup.prediction import predict

__version__ = "0.1.0"

_HOMES = {
    "AtollError": "atoll.base.errors",
    "Cluster": "atoll.prediction.cost",
    "Engine": "atoll.runtime.engine",
    "Layout": "atoll.plans.layouts.layout",
    "MeshShape": "atoll.plans.plan",
    "Muon": "atoll.runtime.sharding.muon",
    "Outer": "atoll.plans.outer",
    "Plan": "atoll.plans.plan",
    "Precision": "atoll.plans.layouts.precision",
    "plan": "atoll.training.setup.choosing",
    "predict": "atoll.training.setup.prediction",
    "schedule": "atoll.plans.schedules.catalogue",
    "simulate": "atoll.program.sim",
    "train": "atoll.training.process",
}
"""Module in which each public name is defined."""

__all__ = [
    "AtollError",
    "Cluster",
    "Engine",
    "Layout",
    "MeshShape",
    "Muon",
    "Outer",
    "Plan",
    "Precision",
    "plan",
    "predict",
    "schedule",
    "simulate",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), "build" if name == "schedule" else name)


def __dir__() -> list[str]:
    return sorted(__all__)
