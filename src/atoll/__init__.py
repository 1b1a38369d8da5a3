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
    from atoll import plans, program, runtime, testing
    from atoll.base import errors
    from atoll.base.errors import AtollError
    from atoll.plans import ir, layouts, schedules
    from atoll.plans.ir.action import Action, Op
    from atoll.plans.ir.placement import Placement
    from atoll.plans.ir.schedule import Schedule
    from atoll.plans.layouts.layout import Layout
    from atoll.plans.layouts.precision import Precision
    from atoll.plans.outer import Outer
    from atoll.plans.plan import MeshShape, Plan
    from atoll.prediction import planner
    from atoll.program import sim, trace
    from atoll.program.sim import Costs, Rates, Speed, simulate
    from atoll.program.trace import Trace
    from atoll.runtime import models
    from atoll.runtime.assemble.describe import programs_of
    from atoll.runtime.engine import Engine
    from atoll.runtime.sharding.matrices import MatrixUpdate
    from atoll.runtime.sharding.muon import MatricesAndRest, Muon
    from atoll.training import config, data
    from atoll.training.choosing import plan

__version__ = "0.1.0"

_HOMES = {
    "Action": "atoll.plans.ir",
    "AtollError": "atoll.base.errors",
    "Costs": "atoll.program.sim",
    "Engine": "atoll.runtime.engine",
    "Layout": "atoll.plans.layouts.layout",
    "MatricesAndRest": "atoll.runtime.sharding.muon",
    "MatrixUpdate": "atoll.runtime.sharding.matrices",
    "MeshShape": "atoll.plans.plan",
    "Muon": "atoll.runtime.sharding.muon",
    "Op": "atoll.plans.ir",
    "Outer": "atoll.plans.outer",
    "Placement": "atoll.plans.ir",
    "Plan": "atoll.plans.plan",
    "Precision": "atoll.plans.layouts.precision",
    "Rates": "atoll.program.sim",
    "Schedule": "atoll.plans.ir",
    "Speed": "atoll.program.sim",
    "Trace": "atoll.program.trace",
    "plan": "atoll.training.choosing",
    "programs_of": "atoll.runtime.assemble.describe",
    "simulate": "atoll.program.sim",
}
"""Module in which each public name is defined."""

_MODULES = {
    "config": "atoll.training.config",
    "data": "atoll.training.data",
    "errors": "atoll.base.errors",
    "ir": "atoll.plans.ir",
    "layouts": "atoll.plans.layouts",
    "models": "atoll.runtime.models",
    "planner": "atoll.prediction.planner",
    "plans": "atoll.plans",
    "program": "atoll.program",
    "runtime": "atoll.runtime",
    "schedules": "atoll.plans.schedules",
    "sim": "atoll.program.sim",
    "testing": "atoll.testing",
    "trace": "atoll.program.trace",
}
"""Modules with more names, by a short one."""

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
        return import_module(_MODULES[name])
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
