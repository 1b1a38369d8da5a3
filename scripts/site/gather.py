"""Gathers the pages of the site in `build/pages`: `make site` calls it before `mkdocs build --strict`.

The pages lie there as they lie in the repository, with every file they link to, so that their links work unchanged. The
reference is written beside them, in `docs/reference`.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from reference import PAGES, overview

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "build" / "pages"
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def main() -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    waiting = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*/README.md")]
    done: set[Path] = set()
    while waiting:
        source = waiting.pop()
        if source in done:
            continue
        done.add(source)
        target = TARGET / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        if source.suffix == ".md":
            waiting += linked(source)
    shutil.copyfile(Path(__file__).with_name("style.css"), TARGET / "style.css")
    for name, text in reference().items():
        path = TARGET / "docs" / "reference" / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def linked(page: Path) -> list[Path]:
    """The files of the repository that a page links to."""
    code = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
    targets = [link for link in LINK.findall(code.sub("", page.read_text(encoding="utf-8"))) if "://" not in link]
    return [path for path in ((page.parent / target).resolve() for target in targets) if path.is_file()]


def reference() -> dict[str, str]:
    """Name of a page -> its text."""
    return {"index": overview()} | {page.file: page.markdown() for page in PAGES}


if __name__ == "__main__":
    main()
