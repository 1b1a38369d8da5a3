"""Atoll trains PyTorch models with any sharding layout under any pipeline schedule.

    import atoll

    schedule = atoll.schedules.build("1f1b", ranks=4, microbatches=16)
    trace = atoll.simulate(schedule, atoll.Costs(forward=1.0, input_grad=1.0, weight_grad=1.0))

Names are loaded on first access: `import atoll` imports neither torch nor numpy; only `Engine`, `MatricesAndRest`,
`MatrixUpdate`, `Muon` and `programs_of` do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll import (
        config,
        data,
        ir,
        layouts,
        models,
        planner,
        plans,
        program,
        runtime,
        schedules,
        sim,
        testing,
        trace,
    )
    from atoll.errors import AtollError
    from atoll.ir.action import Action, Op
    from atoll.ir.placement import Placement
    from atoll.ir.schedule import Schedule
    from atoll.layouts.layout import Layout
    from atoll.layouts.precision import Precision
    from atoll.outer import Outer
    from atoll.plans import MeshShape, Plan
    from atoll.runtime.assemble.describe import programs_of
    from atoll.runtime.engine import Engine
    from atoll.runtime.sharding.matrices import MatrixUpdate
    from atoll.runtime.sharding.muon import MatricesAndRest, Muon
    from atoll.sim import Costs, Rates, Speed, simulate
    from atoll.trace import Trace
    from atoll.training.choosing import plan

__version__ = "0.1.0"

_HOMES = {
    "Action": "atoll.ir",
    "AtollError": "atoll.errors",
    "Costs": "atoll.sim",
    "Engine": "atoll.runtime.engine",
    "Layout": "atoll.layouts.layout",
    "MatricesAndRest": "atoll.runtime.sharding.muon",
    "MatrixUpdate": "atoll.runtime.sharding.matrices",
    "MeshShape": "atoll.plans",
    "Muon": "atoll.runtime.sharding.muon",
    "Op": "atoll.ir",
    "Outer": "atoll.outer",
    "Placement": "atoll.ir",
    "Plan": "atoll.plans",
    "Precision": "atoll.layouts.precision",
    "Rates": "atoll.sim",
    "Schedule": "atoll.ir",
    "Speed": "atoll.sim",
    "Trace": "atoll.trace",
    "plan": "atoll.training.choosing",
    "programs_of": "atoll.runtime.assemble.describe",
    "simulate": "atoll.sim",
}
"""Module in which each public name is defined."""

_MODULES = (
    "config",
    "data",
    "errors",
    "ir",
    "layouts",
    "models",
    "planner",
    "plans",
    "program",
    "runtime",
    "schedules",
    "sim",
    "testing",
    "trace",
)

__all__ = [
    "Action",
    "AtollError",
    "Costs",
    "Engine",
    "Layout",
    "MatricesAndRest",
    "MatrixUpdate",
    "MeshShape",
    "Muon",
    "Op",
    "Outer",
    "Placement",
    "Plan",
    "Precision",
    "Rates",
    "Schedule",
    "Speed",
    "Trace",
    "__version__",
    "config",
    "data",
    "errors",
    "ir",
    "layouts",
    "models",
    "plan",
    "planner",
    "plans",
    "program",
    "programs_of",
    "runtime",
    "schedules",
    "sim",
    "simulate",
    "testing",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"atoll.{name}")
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
