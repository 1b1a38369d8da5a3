"""Writes `docs/pictures/report.png`, the page of a plan in headless Chromium: `python scripts/screenshot.py`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from atoll.training.report import page
    from atoll.training.sheet import sheet_of_config
    from benchmarks.browser import browser

    cluster = ROOT / "configs/clusters/h100.toml"
    sheet = sheet_of_config(ROOT / "configs/llama-3-8b.toml", (f'run.cluster="{cluster}"',))
    with tempfile.TemporaryDirectory() as folder, browser() as shown:
        path = Path(folder) / "report.html"
        path.write_text(page([sheet]), encoding="utf-8")
        shown.size(1000, 1130)
        shown.open(path.as_uri())
        shown.screenshot(ROOT / "docs/pictures/report.png")


if __name__ == "__main__":
    main()
