"""Report of plans and runs, predicted and measured, as one self-contained HTML page. Imports no torch."""

from atoll.training.report.page import fragment, page
from atoll.training.report.sheet import Curves, Layout, Memory, Sheet, measured, predicted_sheet
from atoll.training.report.timeline import Bar, Row, Timeline, predicted_timeline, recorded_timeline, traced_timeline
from atoll.training.report.traffic import Flow, traffic

__all__ = [
    "Bar",
    "Curves",
    "Flow",
    "Layout",
    "Memory",
    "Row",
    "Sheet",
    "Timeline",
    "fragment",
    "measured",
    "page",
    "predicted_sheet",
    "predicted_timeline",
    "recorded_timeline",
    "traced_timeline",
    "traffic",
]
