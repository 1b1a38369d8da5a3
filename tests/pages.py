"""The pages, and what is fenced in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "src", "examples", "deploy", "benchmarks", "configs")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/**/*.md"))])

FENCE = re.compile(r"(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<language>.*)")
PART = re.compile(r"<!-- (?P<kind>generated|planned|tested): (?P<name>[\w./-]+) -->")


@dataclass(frozen=True, slots=True)
class Block:
    """What lies between two fences, without the indent of the first. line: that of the first, from 1.

    part: the kind of the part of the page that it is in and that a script writes, "generated" or "planned"; else "".
    """

    page: Path
    line: int
    language: str
    text: str
    part: str = ""

    @property
    def place(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name


def fenced(page: Path) -> list[Block]:
    """All blocks of a page, whatever their language, indent and marks."""
    found, part = [], ""
    opened: re.Match[str] | None = None
    begun, inside = 0, list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.fullmatch(line)
        if opened is None and fence:
            opened, begun, inside = fence, number, []
        elif opened is None:
            name = PART.fullmatch(line)
            part = name["kind"] if name else "" if line == "<!-- end -->" else part
        elif fence and fence["marks"].startswith(opened["marks"]) and not fence["language"].strip():
            text = "".join(f"{each.removeprefix(opened['indent'])}\n" for each in inside)
            found.append(Block(page, begun, opened["language"].strip(), text, part))
            opened = None
        else:
            inside.append(line)
    assert opened is None, f"{name_of(page)}:{begun}: a fence that does not end"
    return found


def blocks(page: Path, *languages: str) -> list[str]:
    """The text of a page's blocks in some languages."""
    return [block.text for block in fenced(page) if block.language in languages]


def pages_with(*languages: str) -> list[Any]:
    return [pytest.param(page, id=name_of(page)) for page in PAGES if blocks(page, *languages)]
