"""Report of plans and runs, predicted and measured, as one self-contained HTML page. Imports no torch."""

from atoll.training.report.page import fragment, page
from atoll.training.report.sheet import Curves, MemoryCurves, Sheet, StateLayout, predicted_sheet, with_measurements
from atoll.training.report.timeline import (
    Bar,
    BarRow,
    StepTimeline,
    predicted_timeline,
    recorded_timeline,
    traced_timeline,
)
from atoll.training.report.traffic import Flow, predicted_flows

__all__ = [
    "Bar",
    "BarRow",
    "Curves",
    "Flow",
    "MemoryCurves",
    "Sheet",
    "StateLayout",
    "StepTimeline",
    "fragment",
    "page",
    "predicted_flows",
    "predicted_sheet",
    "predicted_timeline",
    "recorded_timeline",
    "traced_timeline",
    "with_measurements",
]
