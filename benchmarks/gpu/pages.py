"""What pages say of GPUs, from the committed lines: the README's paragraph, a table a card, a section of evidence."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from benchmarks.gpu import lines
from benchmarks.gpu.figures import Figure, figures
from benchmarks.gpu.lines import Line
from benchmarks.gpu.one_gpu import STAGES

PART = re.compile(r"(<!-- gpu -->\n).*?(<!-- end of gpu -->)", re.DOTALL)
"""The part of a page that is generated."""

NOTHING = "No line is committed: nothing has been proved on a GPU."

LIMITS = (
    "One GPU cannot show NCCL between ranks, links between devices, or several nodes: none of that has been proved."
)

_NOT_YET = (
    "**Nothing has been proved on a GPU yet.** The NCCL transport, its streams and the GPU tests (`make gpu`) are "
    "written, but every figure here and in the evidence was measured on CPUs over gloo, with two cores. Atoll has not "
    "run on more than one machine, on more than 8 ranks, or with more than 100 million parameters. "
    "[Evidence](docs/evidence.md) lists each claim with its raw file, command, commit and date."
)

_ELSEWHERE = (
    "All other figures, here and in the evidence, were measured on CPUs over gloo, with two cores. Atoll has not run "
    "on more than one machine or on more than 8 ranks. [Evidence](docs/evidence.md) lists each claim with its raw "
    "file, command, commit and date."
)


def cards(given: Iterable[Line]) -> dict[str, list[Line]]:
    """Device -> the newest good line of each stage, in the order of the stages. Cards are never mixed."""
    newest = lines.newest(given)
    found: dict[str, list[Line]] = {}
    for device in sorted({device for device, _ in newest}):
        found[device] = [newest[device, stage.name] for stage in STAGES if (device, stage.name) in newest]
    return found


def figures_of(line: Line) -> list[Figure]:
    """The figures of a line."""
    return figures(line["name"], line["result"], device=line["device"])


def paragraph(given: Iterable[Line]) -> str:
    """The README's paragraph: what is proved on which card, and what is not."""
    found = cards(given)
    if not found:
        return _wrapped(_NOT_YET)
    newest, *others = sorted(found, key=lambda device: max(line["date"] for line in found[device]), reverse=True)
    said = [_said(newest, found[newest])]
    claims = {each.what for line in found[newest] for each in figures_of(line) if each.claim and each.passed}
    said += [_said_besides(device, found[device], claims) for device in others]
    said.append(f"[The table](benchmarks/gpu/README.md) has every figure and its target. {LIMITS} {_ELSEWHERE}")
    return _wrapped(" ".join(said))


def _said(device: str, own: Sequence[Line]) -> str:
    """Return the sentences about a card: claims that are proved, by commit, and targets that were missed."""
    proved: dict[str, list[str]] = {}
    missed = []
    for line in own:
        for each in figures_of(line):
            if each.claim and each.passed:
                proved.setdefault(_source(line), []).append(each.claim)
            elif each.claim:
                missed.append(each.what)
    said = [f"{'; '.join(claims)} ({commit})." for commit, claims in proved.items()]
    said += [f"Not reached: {'; '.join(missed)}."] if missed else []
    return " ".join([f"**{'Proved' if proved else 'Measured'} on one {device}:**", *said])


def _said_besides(device: str, own: Sequence[Line], claims: set[str]) -> str:
    """Return the sentences about an older card: which of `claims` hold there too, what holds there alone, the rest."""
    judged = [(line, each) for line in own for each in figures_of(line) if each.claim]
    too = [_source(line) for line, each in judged if each.passed and each.what in claims]
    said = [f"{len(too)} of these claims hold ({'; '.join(dict.fromkeys(too))})"] if too else []
    said += [f"{each.claim} ({_source(line)})" for line, each in judged if each.passed and each.what not in claims]
    missed = [each.what for _, each in judged if not each.passed and each.what in claims]
    missed = [f"Not reached there: {'; '.join(missed)}."] if missed else []
    return " ".join([f"**On one {device}:**", f"{'; '.join(said) or 'nothing is proved'}.", *missed])


def _source(line: Line) -> str:
    """Commit and date of a line, and whether its code is today's."""
    commit, age, date, _ = _origin(line)
    return f"{commit}, {date}, {'current' if age == 'current' else 'older than the code'}"


def tables(given: Iterable[Line]) -> str:
    """A table a card: every figure with its target, and the commit and age of its line."""
    found = cards(given)
    if not found:
        return f"{NOTHING}\n"
    parts = [
        "Figures of the newest good line of each stage. *older*: sources that the stage depends on have changed since. "
        f"Cards are not compared with each other. {LIMITS}"
    ]
    for device, own in found.items():
        rows = [row for line in own for row in _rows(line)]
        head = ["stage", "figure", "value", "target", "", "commit", "sources", "date", "driver"]
        parts += [f"### {device}", _table(head, rows)]
    return "\n\n".join(parts) + "\n"


def evidence(given: Iterable[Line]) -> str:
    """The section of docs/evidence.md, without its heading."""
    found = cards(given)
    page = "[GPU kit](../benchmarks/gpu/README.md)"
    if not found:
        return f"No line of the {page} is committed: nothing has been proved on a GPU."
    rows = []
    for device, own in found.items():
        for line in own:
            judged = [each for each in figures_of(line) if each.passed is not None]
            reached = sum(bool(each.passed) for each in judged)
            rows.append([device, line["name"], f"{reached} of {len(judged)} targets", *_origin(line)])
    head = ["device", "stage", "reached", "commit", "sources", "date", "driver"]
    raw = "[raw file](../benchmarks/gpu/results/stages.jsonl)"
    return f"Lines of the {page}, {raw}. {LIMITS}\n\n{_table(head, rows)}"


def _rows(line: Line) -> list[list[str]]:
    rows = []
    for at, each in enumerate(figures_of(line)):
        mark = {None: "", True: "reached", False: "**missed**"}[each.passed]
        ends = _origin(line) if at == 0 else [""] * 4
        rows.append([line["name"] if at == 0 else "", each.what, each.value, each.target, mark, *ends])
    return rows


def _origin(line: Line) -> list[str]:
    (stage,) = [each for each in STAGES if each.name == line["name"]]
    age = "current" if stage.digest == line["digest"] else "older"
    return [f"`{line['commit'][:8]}`", age, line["date"][:10], line["driver"]]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *others = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([first, "|---" * len(head) + "|", *others])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, width=120, break_long_words=False, break_on_hyphens=False) + "\n"
