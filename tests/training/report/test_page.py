"""The report in a browser: pointed at, clicked, zoomed, driven by keyboard, on a phone, in the dark and printed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from atoll.training.report import Sheet, page, predicted_sheet
from benchmarks.browser import Page, browser, found
from tests.training.report.sheets import predict, run_sheet
from tests.training.report.test_report import hostile

pytestmark = pytest.mark.skipif(found() is None, reason="no Chromium on this machine: install Debian's chromium")


@pytest.fixture(scope="module")
def shown() -> Iterator[Page]:
    """One browser for all tests of this file; each opens a page of its own."""
    with browser() as page:
        yield page


def opened(shown: Page, folder: Path, *sheets: Sheet, width: int = 1200, is_phone: bool = False) -> Page:
    path = folder / "report.html"
    path.write_text(page(sheets), encoding="utf-8")
    shown.problems.clear()
    shown.asked.clear()
    shown.media(prefers_color_scheme="light")
    shown.size(width, 800, is_phone=is_phone)
    shown.open(path.as_uri())
    assert shown.problems == []
    assert shown.run("document.getElementById('trouble').hidden")
    return shown


@pytest.fixture
def run_page(shown: Page, tmp_path: Path) -> Page:
    return opened(shown, tmp_path, run_sheet())


def settled(shown: Page) -> None:
    """Wait for the next frames."""
    shown.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def bar_at(shown: Page, name: str, nth: int = 0, row: int | None = None) -> tuple[float, float]:
    """The middle of the nth bar of an instruction, in the window."""
    shown.box(".view")
    wanted = json.dumps(name)
    x, y = shown.run(
        f"""(() => {{
          const chart = atollReport.charts[0], canvas = chart.canvas.getBoundingClientRect();
          let left = {nth};
          for (const [at, row] of chart.rows.entries()) {{
            if ({json.dumps(row)} !== null && at !== {json.dumps(row)}) continue;
            for (let bar = row.first; bar < row.last; bar++)
              if (row.source.names[row.source.op[bar]] === {wanted} && !left--) {{
                const scale = chart.seen();
                const middle = (scale(row.source.start[bar]) + scale(row.source.end[bar])) / 2;
                return [canvas.x + middle, canvas.y + row.top + row.height / 2 - chart.box.scrollTop];
              }}
          }}
        }})()"""
    )
    return x, y


def detail(shown: Page) -> str:
    return str(shown.run("document.getElementById('detail').textContent"))


# ---- it is drawn


@pytest.mark.slow
def test_it_asks_for_nothing_but_itself(run_page: Page) -> None:
    assert [url for url in run_page.asked if not url.startswith(("file:", "data:"))] == []
    assert len(run_page.asked) == 1


def test_bars_have_their_colours(run_page: Page) -> None:
    """The first block's forward, on the measured row, is blue; the wait behind it is hatched in two colours. The upper
    edge of a bar is above its words."""

    def colours(name: str) -> set[tuple[int, ...]]:
        x, y = bar_at(run_page, name, row=measured_row(run_page))
        left, top = run_page.run(
            "(() => { const b = atollReport.charts[0].canvas.getBoundingClientRect(); return [b.x, b.y]; })()"
        )
        values = run_page.run(
            f"[...atollReport.charts[0].context.getImageData({x - left - 6}, {y - top - 10}, 12, 2).data]"
        )
        return {tuple(values[at : at + 3]) for at in range(0, len(values), 4)}

    assert (0x00, 0x72, 0xB2) in colours("F")
    hatched = colours("RECV_B")
    assert (0x8A, 0x8A, 0x8A) in hatched
    assert len(hatched) == 2


def measured_row(shown: Page) -> int:
    return int(shown.run("atollReport.charts[0].rows.findIndex((row) => row.source.title.startsWith('measured'))"))


def test_predicted_is_above_measured_for_each_rank(run_page: Page) -> None:
    rows = run_page.run("atollReport.charts[0].rows.map((row) => [row.rank, row.source.title, row.lane, row.top])")
    programs = [(rank, title.split(",")[0]) for rank, title, lane, _ in rows if lane == "program"]
    assert programs == [(0, "predicted"), (0, "measured"), (1, "predicted"), (1, "measured")]
    assert [row[3] for row in rows] == sorted(row[3] for row in rows)


def test_memory_has_limit_and_peak_and_metrics_have_lines(run_page: Page) -> None:
    said = run_page.run("document.querySelector('.memory svg').getAttribute('aria-label')")
    assert said.startswith("Memory of pipeline rank 0: predicted peak")
    assert "measured 286 MiB (allocated)" in said
    assert "device 9.31 GiB" in said
    names = run_page.run("[...document.querySelectorAll('.metric h3')].map((head) => head.textContent)")
    assert names == ["loss", "gradient norm, before clipping", "tokens a second"]
    assert run_page.run("document.querySelectorAll('.metric svg path[stroke]').length") >= 3


def test_hostile_names_stay_words(shown: Page, tmp_path: Path) -> None:
    opened(shown, tmp_path, hostile())
    assert shown.run("document.querySelectorAll('img').length") == 0
    assert "onerror" in shown.run("document.querySelector('h1').textContent")
    shown.mouse("mouseMoved", *bar_at(shown, "F", row=0))
    settled(shown)
    assert "onerror" in shown.run("document.getElementById('tip').textContent")
    assert shown.problems == []


# ---- it is pointed at and moved


def test_the_pointer_reads_the_instruction(run_page: Page) -> None:
    run_page.mouse("mouseMoved", *bar_at(run_page, "I", row=measured_row(run_page)))
    settled(run_page)
    lines = run_page.run("document.getElementById('tip').textContent").split("\n")
    assert lines == [
        "I: backward (I)",
        "stage 0, microbatch 0, block layers.0",
        "2 s, from 10.5 s to 12.5 s",
        "pipeline rank 0, program, measured, step 30",
    ]
    assert not run_page.run("document.getElementById('tip').hidden")
    run_page.mouse("mouseMoved", 2, 2)
    settled(run_page)
    assert run_page.run("document.getElementById('tip').hidden")


def test_a_click_keeps_the_instruction_and_escape_lets_it_go(run_page: Page) -> None:
    run_page.click(*bar_at(run_page, "RECV_F", nth=0, row=None))
    assert detail(run_page).startswith("RECV_F: ")
    run_page.run("document.querySelector('.view').focus()")
    run_page.press("Escape")
    assert detail(run_page).startswith("Point at a bar")


def test_a_bar_on_a_link_says_its_unit_and_bytes(shown: Page, tmp_path: Path) -> None:
    opened(shown, tmp_path, predicted_sheet(predict(layout="GGG"), "plan"))
    for _ in range(7):
        shown.run("document.querySelector('[data-act=in]').click()")
    shown.run("document.querySelector('[data-act=all]').click()")
    settled(shown)
    said = shown.run("atollReport.charts[0].rows.findIndex((row) => row.lane === 'gather')")
    words = shown.run(f"atollReport.charts[0].words({{row: {said}, bar: atollReport.charts[0].rows[{said}].first}})")
    assert words[0] == "GATHER: gathers of parameters"
    assert "unit" in words[1]
    assert words[2].endswith("iB")


def test_keys_walk_over_bars_and_rows(run_page: Page) -> None:
    run_page.run("document.querySelector('.view').focus()")
    run_page.press("ArrowRight")
    first = detail(run_page)
    assert "pipeline rank 0, program, predicted" in first
    run_page.press("ArrowRight")
    assert detail(run_page) != first
    run_page.press("ArrowLeft")
    assert detail(run_page) == first
    for _ in range(measured_row(run_page)):
        run_page.press("ArrowDown")
    assert "measured" in detail(run_page)
    run_page.press("ArrowUp")
    assert "measured" not in detail(run_page)


def test_keys_zoom_and_move(run_page: Page) -> None:
    run_page.run("document.querySelector('.view').focus()")
    for _ in range(4):
        run_page.press("+")
    assert run_page.run("atollReport.view.k") == pytest.approx(1.6**4)
    before = run_page.run("atollReport.view.x")
    run_page.press("ArrowRight", shift=True)
    assert run_page.run("atollReport.view.x") < before
    run_page.press("-")
    assert run_page.run("atollReport.view.k") == pytest.approx(1.6**3)
    run_page.press("0")
    assert run_page.run("[atollReport.view.k, atollReport.view.x]") == [1, 0]


def test_tab_reaches_the_timeline_and_the_outline_is_seen(run_page: Page) -> None:
    run_page.run("document.querySelector('[data-act=all]').focus()")
    run_page.press("Tab")
    assert run_page.run("document.activeElement.className") == "view"
    assert run_page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def time_at(shown: Page, x: float) -> float:
    return float(
        shown.run(
            f"""(() => {{ const chart = atollReport.charts[0], left = chart.canvas.getBoundingClientRect().x;
            return chart.seen().invert({x} - left); }})()"""
        )
    )


def test_the_wheel_zooms_where_the_pointer_is(run_page: Page) -> None:
    x, y = bar_at(run_page, "RECV_B", row=measured_row(run_page))
    before = time_at(run_page, x)
    run_page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400, modifiers=2)
    run_page.until("atollReport.view.k > 1.2")
    assert time_at(run_page, x) == pytest.approx(before, rel=1e-3)
    scale = run_page.run("atollReport.view.k")
    run_page.mouse("mouseWheel", x, y, deltaX=0, deltaY=40)  # without Ctrl the page scrolls
    settled(run_page)
    assert run_page.run("atollReport.view.k") == scale


def test_dragging_moves_time(run_page: Page) -> None:
    run_page.run("document.querySelector('[data-act=in]').click()")
    x, y = bar_at(run_page, "RECV_B", row=measured_row(run_page))
    before = time_at(run_page, x)
    run_page.mouse("mousePressed", x, y, button="left", clickCount=1)
    for step in range(1, 6):
        run_page.mouse("mouseMoved", x + 10 * step, y, button="left", buttons=1)
    run_page.mouse("mouseReleased", x + 50, y, button="left", clickCount=1)
    settled(run_page)
    assert time_at(run_page, x + 50) == pytest.approx(before, rel=1e-3)


def test_what_is_dragged_is_not_clicked(run_page: Page) -> None:
    """And a click, a drag back and forth included, moves nothing at the whole step."""
    x, y = bar_at(run_page, "RECV_B", row=measured_row(run_page))
    run_page.mouse("mouseMoved", x, y)
    run_page.mouse("mousePressed", x, y, button="left", clickCount=1)
    for at in (x + 400, x):
        run_page.mouse("mouseMoved", at, y, button="left", buttons=1)
    run_page.mouse("mouseReleased", x, y, button="left", clickCount=1)
    settled(run_page)
    assert detail(run_page).startswith("Point at a bar")
    assert run_page.run("[atollReport.view.k, atollReport.view.x]") == [1, 0]
    run_page.click(x, y)
    assert detail(run_page).startswith("RECV_B: ")


def test_nothing_but_the_step_is_seen(run_page: Page) -> None:
    """Moved to both ends and zoomed to both limits."""
    ends = "[atollReport.view.k, ...[92, atollReport.charts[0].width].map((x) => atollReport.view.invert(x))]"
    width = run_page.run("atollReport.charts[0].width")
    run_page.run("atollReport.charts[0].scale(4)")
    run_page.run("atollReport.charts[0].zoom.by(1e9)")
    assert run_page.run(ends) == pytest.approx([4, 92, 92 + (width - 92) / 4])
    run_page.run("atollReport.charts[0].zoom.by(-1e9)")
    assert run_page.run(ends) == pytest.approx([4, width - (width - 92) / 4, width])
    run_page.run("atollReport.charts[0].scale(1e-9)")
    assert run_page.run(ends) == [1, 92, width]
    run_page.run("atollReport.charts[0].scale(1e12)")
    assert run_page.run("atollReport.view.k") == 1e6


def test_a_double_click_zooms_in_and_with_shift_out(run_page: Page) -> None:
    x, y = map(round, bar_at(run_page, "RECV_B", row=measured_row(run_page)))  # a dblclick is at whole pixels
    before = time_at(run_page, x)

    def double(*, shift: bool) -> None:
        for count in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                run_page.mouse(kind, x, y, button="left", clickCount=count, modifiers=8 if shift else 0)

    run_page.mouse("mouseMoved", x, y)
    double(shift=False)
    run_page.until("atollReport.view.k === 2")
    assert time_at(run_page, x) == pytest.approx(before, rel=1e-6)
    double(shift=True)
    run_page.until("atollReport.view.k === 1")


def test_a_rank_can_be_chosen_for_memory(run_page: Page) -> None:
    run_page.run(
        "(() => { const s = document.querySelector('.memory select'); s.value = '1'; "
        "s.dispatchEvent(new Event('change')); })()"
    )
    settled(run_page)
    assert "rank 1" in run_page.run("document.querySelector('.memory svg').getAttribute('aria-label')")


def test_a_metric_is_read_step_by_step(run_page: Page) -> None:
    run_page.run("document.querySelector('.metric svg').focus()")
    for _ in range(3):
        run_page.press("ArrowRight")
    said = run_page.run("document.querySelector('.metric output').textContent")
    assert said == f"step 3 · run: {5 * math.exp(-3 / 20):.4g} · run, validation: 5.5"


def test_two_runs_share_the_scale_unless_asked(shown: Page, tmp_path: Path) -> None:
    opened(shown, tmp_path, run_sheet("one"), run_sheet("two", layout="GGG"))
    assert shown.run("document.querySelectorAll('figure.timeline').length") == 2
    assert shown.run("document.querySelectorAll('.metric').length") == 3
    assert "two" in shown.run("document.querySelector('.metric output').textContent")
    shown.run("atollReport.charts[0].scale(4)")
    settled(shown)
    seen = "atollReport.charts.slice(0, 2).map((each) => each.seen().domain)"
    one, two = shown.run(seen)
    assert one == two
    assert one[1] - one[0] == pytest.approx(13 / 4, rel=0.01)
    shown.run("document.querySelector('[data-act=same]').click()")
    assert shown.run("document.querySelector('[data-act=same]').getAttribute('aria-pressed')") == "false"


# ---- for everyone

CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_contrast_with_what_is_behind_them(run_page: Page, scheme: str) -> None:
    """At least 4.5, as WCAG 2.2 asks (1.4.3)."""
    run_page.media(prefers_color_scheme=scheme)
    settled(run_page)
    assert run_page.run(CONTRAST) == []
    ground = run_page.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


def test_everything_has_a_name(run_page: Page) -> None:
    assert run_page.run("document.documentElement.lang") == "en"
    assert run_page.run("document.querySelectorAll('h1').length") == 1
    unnamed = run_page.run(
        """[...document.querySelectorAll('button, select, [role], [tabindex="0"], svg:not([aria-hidden])')].filter(
          (e) => !e.getAttribute('aria-label') && !e.textContent.trim() && !e.closest('label') && e.id !== 'trouble' &&
          e.id !== 'tip').map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []
    ids = run_page.run("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    heads = run_page.run("[...document.querySelectorAll('h1, h2, h3')].map((e) => +e.tagName[1])")
    assert all(after - before <= 1 for before, after in pairwise(heads))


def test_a_phone_needs_no_sideways_scrolling(shown: Page, tmp_path: Path) -> None:
    opened(shown, tmp_path, run_sheet("one"), run_sheet("two"), width=390, is_phone=True)
    assert shown.run("document.documentElement.scrollWidth") <= 390
    small = shown.run(
        "[...document.querySelectorAll('button')].filter((e) => e.getBoundingClientRect().height < 32).length"
    )
    assert small == 0


class Fingers:
    """Fingers on the timeline of a phone. x and y: its middle."""

    def __init__(self, shown: Page) -> None:
        box = shown.box(".view canvas")
        self.shown, self.x, self.y = shown, box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def touch(self, kind: str, *points: tuple[float, float], first: int = 0) -> None:
        """Touch at points from the middle, one for each finger from the first on: "Start", "Move" or "End"."""
        fingers = [{"x": self.x + x, "y": self.y + y, "id": at} for at, (x, y) in enumerate(points, first)]
        self.shown.call("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=fingers)

    def seen(self, x: float) -> float:
        """The part of the step, in its whole pixels, that is seen at x from the middle."""
        return float(self.shown.run(f"atollReport.view.invert({self.x + x} - "
                                    "document.querySelector('.view canvas').getBoundingClientRect().x)"))  # fmt: skip


@pytest.fixture
def fingers(shown: Page, tmp_path: Path) -> Iterator[Fingers]:
    shown.call("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)
    opened(shown, tmp_path, run_sheet(), width=390, is_phone=True)
    yield Fingers(shown)
    shown.call("Emulation.setTouchEmulationEnabled", enabled=False)


@pytest.mark.parametrize("way", [(12, 0), (2, 12)], ids=["across", "down"])
def test_fingers_zoom_the_timeline(fingers: Fingers, way: tuple[float, float]) -> None:
    """What is between the fingers stays there, and one that remains moves it."""
    x, y = way

    def pair(step: int) -> list[tuple[float, float]]:
        return [(-10 - x * step, -10 - y * step), (10 + x * step, 10 + y * step)]

    middle = fingers.seen(0)
    fingers.touch("Start", *pair(0))
    for step in range(1, 6):
        fingers.touch("Move", *pair(step))
    settled(fingers.shown)
    zoomed = math.dist(*pair(5)) / math.dist(*pair(0))
    assert fingers.shown.run("atollReport.view.k") == pytest.approx(zoomed, rel=1e-6)
    assert fingers.seen(0) == pytest.approx(middle, abs=0.1)
    lifted, (right, down) = pair(5)
    fingers.touch("End", lifted)
    held = fingers.seen(right)
    for step in range(1, 6):
        fingers.touch("Move", (right - 9 * step, down), first=1)
    fingers.touch("End")
    assert fingers.seen(right - 45) == pytest.approx(held, abs=0.1)


def test_one_finger_scrolls_the_page_up_and_down(fingers: Fingers) -> None:
    before = fingers.shown.run("scrollY")
    fingers.touch("Start", (0, 0))
    for step in range(1, 10):
        fingers.touch("Move", (0, -12 * step))
    fingers.touch("End")
    fingers.shown.until(f"scrollY > {before} + 40")
    assert fingers.shown.run("[atollReport.view.k, atollReport.view.x]") == [1, 0]


def test_a_tap_chooses_a_bar_and_two_taps_zoom(fingers: Fingers) -> None:
    """Browsers send a dblclick too, which counts once."""
    fingers.x, fingers.y = bar_at(fingers.shown, "RECV_B", row=measured_row(fingers.shown))
    fingers.touch("Start", (0, 0))
    fingers.touch("End")
    fingers.shown.until("document.getElementById('detail').textContent.startsWith('RECV_B: ')")
    assert fingers.shown.run("atollReport.view.k") == 1
    fingers.x, fingers.y = bar_at(fingers.shown, "RECV_B", row=measured_row(fingers.shown))
    # Elsewhere, since the browser would send a dblclick for the first tap and the next one. That is a first one for the
    # page, and no slow machine takes too long for the second one.
    fingers.x += 80
    fingers.shown.run("{ const { zoom } = atollReport.charts[0]; zoom.tap = null; zoom.constructor.TAPS = 1e6; }")
    for off in (0, 3):
        fingers.touch("Start", (off, 0))
        fingers.touch("End")
    fingers.shown.until("atollReport.view.k === 2")
    settled(fingers.shown)
    assert fingers.shown.run("atollReport.view.k") == 2


@pytest.mark.slow
def test_print_is_light_and_shows_all_rows(run_page: Page, tmp_path: Path) -> None:
    run_page.media(prefers_color_scheme="dark")
    run_page.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    run_page.run(
        "addEventListener('beforeprint', () => { globalThis.printed = [atollReport.charts[0].visible, "
        "atollReport.charts[0].height, getComputedStyle(document.body).backgroundColor]; })"
    )
    run_page.pdf(tmp_path / "again.pdf")
    visible, height, ground = run_page.run("printed")
    assert visible == height
    assert ground == "rgb(255, 255, 255)"
    assert not run_page.run("document.documentElement.classList.contains('printing')")


def test_words_and_tables_are_there_without_scripts(shown: Page, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page([run_sheet()]), encoding="utf-8")
    shown.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        shown.call("Page.navigate", url=path.as_uri())
        shown.until("document.readyState === 'complete' && !!document.querySelector('#plan dl')")
        text = shown.run("document.body.innerText")
    finally:
        shown.call("Emulation.setScriptExecutionDisabled", value=False)
    for words in ("drawn by a script", "pipeline bubble", "between pipeline stages", "sharded inside each group"):
        assert words in text


def test_an_old_browser_is_told(shown: Page, tmp_path: Path) -> None:
    added = shown.call("Page.addScriptToEvaluateOnNewDocument", source="delete globalThis.DecompressionStream")
    try:
        path = tmp_path / "report.html"
        path.write_text(page([run_sheet()]), encoding="utf-8")
        shown.open(path.as_uri())
        assert "DecompressionStream" in shown.run("document.getElementById('trouble').textContent")
    finally:
        shown.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])


# ---- size


@pytest.mark.slow
def test_many_bars_are_a_small_page_that_opens(shown: Page, tmp_path: Path) -> None:
    """A lighter form of `benchmarks/report`: 8 ranks, some ten thousand bars."""
    sheet = predicted_sheet(predict(pipeline=8, inter=1, layers=16, microbatches=128), "many")
    (timeline,) = sheet.timelines
    assert timeline.count > 10_000
    text = page([sheet])
    assert len(text) < 8_000_000 * timeline.count / 128_000 + 90_000
    opened(shown, tmp_path, sheet)
    before = shown.run("atollReport.frames.drawn")
    shown.run("atollReport.charts[0].scale(3)")
    settled(shown)
    assert shown.run("atollReport.frames.drawn") == before + 1  # `benchmarks/report` measures how long a frame takes
