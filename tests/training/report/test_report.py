"""What the report is made of: timelines, traffic, memory, and the page as text."""

from __future__ import annotations

import base64
import json
import math
import re
import sys
import zlib
from array import array
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from atoll.base.errors import UserError
from atoll.plans.host import HostState
from atoll.plans.ir import Action
from atoll.prediction.cost.breakdown import PARTS
from atoll.program.host import IN, OUT
from atoll.program.trace import Span, Trace
from atoll.testing.progress import run
from atoll.training.report import (
    Sheet,
    StepTimeline,
    page,
    predicted_flows,
    predicted_sheet,
    recorded_timeline,
    traced_timeline,
)
from atoll.training.report.pack import BAR_COLUMNS
from atoll.training.report.page import CAUSE_COLOURS, PART_STYLES
from atoll.training.report.pictures import draw_layout
from atoll.training.report.sheet import memory
from atoll.training.report.timeline import PROGRAM, Bar, _read
from atoll.training.report.traffic import FLOW_CAUSES
from tests.training.report.sheets import RANKS, predict, run_sheet

pytestmark = pytest.mark.usefixtures("warm")

PLANS: list[dict[str, Any]] = [
    {},
    {"layout": "GGG", "schedule": "zb-h1"},
    {"pipeline": 1, "layout": "GGG", "inter": 4},
    {"pipeline": 4, "inter": 1, "schedule": "zb-v", "microbatches": 8, "layout": "NNG", "layers": 6},
    {"tensor": 2, "layout": "III"},
    {"post_validation": True, "layout": "NGG"},
    {"vocabulary_parallel": True, "layout": "NNG"},
    {"host": HostState("update-on-device")},
    {"host": HostState("update-on-host", activations=0.5)},
]


# ---- timelines


def test_an_instruction_without_a_microbatch_has_none_in_its_bar() -> None:
    """-1 stands for none, of stage, microbatch and unit."""
    assert _read(["GATHER", "2UNSHARD", 3, "", 0.5, 1.5]) == Bar("gathers", "GATHER", 0.5, 1.5, 2, -1, 3)
    assert _read(["F", "1F4", -1, "", 0.0, 1.0])[4:7] == (1, 4, -1)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_predicted_timeline_adds_up_to_the_breakdown(plan: dict[str, Any]) -> None:
    """What is drawn is what `atoll predict` prints: the program's bars of a part are the part's seconds."""
    prediction = predict(**plan)
    (timeline,) = predicted_sheet(prediction, "plan").timelines
    for rank, expected in enumerate(prediction.breakdown):
        found = timeline.parts(rank)
        for part, seconds in expected._asdict().items():
            assert found.get(part, 0.0) == pytest.approx(seconds, abs=1e-9), (rank, part)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_bars_of_a_row_do_not_overlap_and_begin_at_zero(plan: dict[str, Any]) -> None:
    for timeline in run_sheet(**plan).timelines:
        assert min(row.bars[0].start for row in timeline.rows) >= 0.0
        for row in timeline.rows:
            assert all(bar.end > bar.start or row.lane != PROGRAM for bar in row.bars)
            assert all(one.end <= other.start for one, other in zip(row.bars, row.bars[1:], strict=False))


def test_links_carry_what_the_program_sends() -> None:
    prediction = predict(layout="GGG", schedule="zb-h1")
    (timeline,) = predicted_sheet(prediction, "plan").timelines
    for rank, program in enumerate(prediction.ranks.programs.ranks):
        bars = [bar for row in timeline.rows if row.rank == rank and row.lane != PROGRAM for bar in row.bars]
        assert sum(bar.bytes for bar in bars) == sum(program.sent.values())
        assert {bar.of for bar in bars} <= set(program.shape.units)


def test_a_recorded_timeline_cuts_what_is_played_within_and_waits_for_who_sends_late() -> None:
    """Block 1 runs inside the first block's call; rank 1 is sent its input at 104.5, and rank 0 its gradient at 109."""
    timeline = recorded_timeline(RANKS)
    program = [row for row in timeline.rows if row.lane == PROGRAM]
    first = [(bar.do, bar.of, bar.part, bar.start, bar.end) for bar in program[0].bars]
    assert first == [
        ("F", 0, "forward", 0.5, 1.5),
        ("F", 1, "forward", 1.5, 3.5),
        ("F", 0, "forward", 3.5, 4.5),
        ("SEND_F", -1, "other", 4.5, 5.0),
        ("RECV_B", -1, "bubble", 5.0, 9.5),
        ("RECV_B", -1, "messages", 9.5, 10.5),
        ("I", 1, "backward", 10.5, 12.5),
    ]
    assert timeline.parts(1) == {"bubble": 4.5, "messages": 0.5, "forward": 2.0, "backward": 1.5, "other": 0.5}
    lanes = [(row.lane, len(row.bars)) for row in timeline.rows if row.rank == 0 and row.lane != PROGRAM]
    assert lanes == [("gather", 1), ("gather", 1), ("reduce", 1)]
    assert timeline.seconds == 13.0


def test_a_message_that_seems_to_be_sent_after_it_arrived_is_all_bubble() -> None:
    """Clocks of two machines differ; no bar has a negative length."""
    late = json.loads(json.dumps(RANKS))
    late[0]["instructions"][2][4:] = [106.0, 106.5]
    parts = recorded_timeline(late).parts(1)
    assert parts["bubble"] == 5.0
    assert "messages" not in parts


@pytest.mark.parametrize(
    "broken", [[], [{}], [{"instructions": [["F", "0F0", 0, None, 2.0, 1.0]], "travels": []}], [{"instructions": 1}]]
)
def test_what_is_no_timeline_is_refused(broken: list[Any]) -> None:
    with pytest.raises(UserError):
        recorded_timeline(broken)


def test_a_trace_is_a_timeline_of_actions() -> None:
    spans = (
        Span(0, "compute", Action.parse("0F0"), 10.0, 11.0),
        Span(0, "receive", Action.parse("0RECV_B0"), 11.0, 13.0),
        Span(0, "gather", Action.parse("0UNSHARD"), 9.0, 10.5),
    )
    timeline = traced_timeline(Trace(spans, ranks=1))
    assert timeline.parts(0) == {"forward": 1.0, "messages": 2.0}
    assert timeline.seconds == 4.0


# ---- memory, traffic


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_memory_over_time_peaks_at_the_peak(plan: dict[str, Any]) -> None:
    prediction = predict(**plan)
    found = memory(prediction)
    assert found.limits == (10_000_000_000,) * len(found.times)
    for rank, columns in enumerate(found.held):
        assert max(map(sum, zip(*columns, strict=True))) == prediction.peak(rank).total
        assert found.times[rank][0] == 0.0
        assert list(found.times[rank]) == sorted(found.times[rank])


def test_without_a_cluster_memory_goes_by_instruction() -> None:
    sheet = predicted_sheet(predict(cluster=None), "plan")
    assert sheet.timelines == ()
    assert sheet.memory is not None
    assert sheet.memory.unit == "instructions"
    assert "step" not in sheet.figures
    assert "No cluster" in page([sheet])


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_traffic_is_what_programs_send(plan: dict[str, Any]) -> None:
    prediction = predict(**plan)
    flows = predicted_flows(prediction)
    for rank, program in enumerate(prediction.ranks.programs.ranks):
        for link in ("inter", "intra", IN, OUT):
            assert sum(flow.bytes for flow in flows if (flow.rank, flow.link) == (rank, link)) == program.sent[link]


def test_each_cause_has_a_colour_of_its_own() -> None:
    """Past fault: two causes had none, and a page of host memory ended in a ValueError."""
    assert len(set(CAUSE_COLOURS)) == len(FLOW_CAUSES)
    text = page([predicted_sheet(predict(host=HostState("update-on-host", activations=0.5)), "plan")])
    for words in ("from host memory", "to host memory", FLOW_CAUSES["kept"], FLOW_CAUSES["lowered"]):
        assert words in text


def test_messages_between_stages_are_counted() -> None:
    prediction = predict(pipeline=4, inter=1, microbatches=8)
    sent = {(flow.rank, flow.cause): flow.bytes for flow in predicted_flows(prediction) if flow.link == "pp"}
    message = 8.0 * prediction.ranks.message_bytes
    forward = {(rank, "activations"): message for rank in range(3)}
    assert sent == forward | {(rank, "backward"): message for rank in range(1, 4)}


def test_a_layer_sends_four_all_reduces_a_microbatch_to_its_tensor_parallel_group() -> None:
    """Two in F and two in I, each of (ranks - 1) / ranks of 128 x 256 elements of 2 bytes, there and back."""

    def sent(layers: int) -> float:
        prediction = predict(pipeline=1, inter=1, intra=1, tensor=2, layout="NNN", layers=layers)
        (flow,) = predicted_flows(prediction)
        assert (flow.link, flow.cause) == ("tp", "tensor")
        return flow.bytes

    microbatches = 4
    assert sent(6) - sent(4) == 2 * 4 * microbatches * (2 * 0.5 * 128 * 256 * 2)


# ---- the page


class Tags(HTMLParser):
    """The elements of a page, with what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.refers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.refers += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "poster")]


def tags(text: str) -> Tags:
    parser = Tags()
    parser.feed(text)
    return parser


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found is not None
    values: dict[str, Any] = json.loads(found[1])
    return values


def unpacked(code: str, text: str) -> array[Any]:
    found = array(code)
    found.frombytes(zlib.decompress(base64.b64decode(text)))
    return found


def test_every_part_has_a_style_of_its_own() -> None:
    """Waits are hatched, so that they differ from compute without colours."""
    text = page([run_sheet()])
    styles = {part: re.findall(rf"^\.part-{part} {{ (.*) }}$", text, re.MULTILINE) for part in PARTS}
    assert all(len(found) == 1 for found in styles.values())
    assert len({found[0] for found in styles.values()}) == len(PARTS)
    hatched = {part for part, found in styles.items() if "gradient(" in found[0]}
    assert hatched == {"bubble", "messages", "gathers", "reductions", "host", "sums"}


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((1, 1, 1, 1), "1 rank"),
        ((2, 1, 1, 1), "2 ranks: 2 pipeline ranks"),
        ((2, 3, 2, 1), "12 ranks: 2 pipeline ranks × 3 groups × 2 ranks in a group"),
        ((1, 1, 2, 4), "8 ranks: 2 ranks in a group × 4 tensor-parallel ranks"),
    ],
)
def test_a_mesh_in_words(sizes: tuple[int, ...], words: str) -> None:
    names = ("pipeline", "inter", "intra", "tensor")
    sheet = predicted_sheet(predict(**dict(zip(names, sizes, strict=True)), layout="NNN", cluster=None), "plan")
    assert dict(sheet.words)["mesh"] == words


def test_the_page_refers_to_nothing_outside_itself() -> None:
    text = page([run_sheet("one"), predicted_sheet(predict(), "two")])
    assert all(each.startswith("#") for each in tags(text).refers)
    assert "connect-src" not in text
    assert "@import" not in text
    assert "url(" not in text.split("<script")[0]


def test_the_page_carries_the_timeline_to_a_billionth_of_the_step() -> None:
    sheet = run_sheet()
    for timeline, packed in zip(sheet.timelines, data_of(page([sheet]))["sheets"][0]["timelines"], strict=True):
        columns = unpacked("i", packed["data"])
        count = len(columns) // len(BAR_COLUMNS)
        gap, length, part, do, *_ = (columns[nth * count : (nth + 1) * count] for nth in range(len(BAR_COLUMNS)))
        at = 0
        for row, (rank, lane, bars) in zip(timeline.rows, packed["rows"], strict=True):
            assert (row.rank, row.lane, len(row.bars)) == (rank, lane, bars)
            ticks = 0
            for bar in row.bars:
                ticks += gap[at]
                assert ticks * packed["tick"] == pytest.approx(bar.start, abs=1e-9 * timeline.seconds)
                ticks += length[at]
                assert ticks * packed["tick"] == pytest.approx(bar.end, abs=1e-9 * timeline.seconds)
                assert [*PART_STYLES][part[at]] == bar.part
                assert packed["names"][do[at]] == bar.do
                at += 1


HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<b>"


def hostile() -> Sheet:
    """A sheet all of whose words try to leave their place."""
    sheet = run_sheet(HOSTILE)
    assert sheet.layout is not None
    stages = tuple(replace(stage, blocks=((HOSTILE,),)) for stage in sheet.layout.stages)
    timelines = tuple(replace(each, title=HOSTILE) for each in sheet.timelines)
    return replace(
        sheet,
        words=((HOSTILE, HOSTILE),),
        figures={HOSTILE: (HOSTILE, HOSTILE)},
        notes=(HOSTILE,),
        blocks=tuple(HOSTILE for _ in sheet.blocks),
        units=dict.fromkeys(sheet.units, HOSTILE),
        layout=replace(sheet.layout, stages=stages),
        timelines=timelines,
    )


def test_names_cannot_leave_their_place() -> None:
    text = page([hostile()])
    found = tags(text).found
    assert "img" not in found
    assert "b" not in found
    assert found.count("script") == tags(page([run_sheet()])).found.count("script")
    assert data_of(text)["sheets"][0]["name"] == HOSTILE


def test_missing_values_are_no_json_numbers() -> None:
    sheet = run_sheet()
    text = page([sheet])
    curves = data_of(text)["sheets"][0]["curves"]["training"]
    values = unpacked("d", curves["data"])
    norms = values[curves["columns"].index("grad_norm") * curves["count"] :][: curves["count"]]
    assert math.isnan(norms[2])
    assert norms[3] == 0.25


def test_an_empty_sheet_is_a_page() -> None:
    """Of styles and scripts alone, which every page carries."""
    text = page([Sheet("nothing", "run", notes=("The run has not built its plan yet.",))])
    assert len(text) < 65_000
    assert "has not built its plan" in text
    assert 'id="timeline"' not in text


def test_waits_differ_from_what_computes_by_more_than_colour() -> None:
    waits = {"bubble", "messages", "gathers", "reductions", "host", "sums"}
    assert {part for part, style in PART_STYLES.items() if style.hatch} == waits
    assert len({PART_STYLES[part].hatch for part in waits}) == len(waits)
    solid = [style.colour for part, style in PART_STYLES.items() if part not in waits]
    assert len(set(solid)) == len(solid)


def test_the_report_imports_neither_torch_nor_numpy() -> None:
    script = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import atoll.training.report"
    run([sys.executable, "-c", script], check=True)


def test_a_timeline_without_rows_has_no_ranks() -> None:
    assert StepTimeline("empty", 0.0, ()).ranks == 0


def test_bars_of_what_a_rank_keeps_do_not_overlap() -> None:
    layout = predicted_sheet(predict(layout="GGG"), "plan").layout
    assert layout is not None
    bars = re.findall(r'<rect class="whole" x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)"/>', draw_layout(layout))
    places = sorted(tuple(map(int, each)) for each in bars)
    assert len(places) == 3 * layout.mesh.data
    for (x, y, _, height), (right, below, _, _) in pairwise(places):
        assert right > x or below > y + height


def test_a_stage_is_named_by_its_first_and_its_last_block() -> None:
    layout = predicted_sheet(predict(pipeline=2, schedule="zb-v"), "a").layout
    assert layout is not None
    found = re.findall(r'<th scope="row">(\d)</th><td class="text">(.*?)</td>', draw_layout(layout))
    assert found == [("0", "embedding … layers.0, layers.3 … head"), ("1", "layers.1, layers.2")]


def test_units_are_named_by_their_blocks() -> None:
    found = [list(predicted_sheet(predict(pipeline=1, unit=blocks), "a").units.values()) for blocks in (1, 2)]
    assert found[0] == ["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head"]
    assert found[1] == ["embedding", "layers.0 to layers.1", "layers.2 to layers.3", "head"]
