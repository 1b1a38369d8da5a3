"""One case: run it on its ranks, compare what they hold with one process, and say how it went."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from atoll.base.errors import RankError
from atoll.testing import RankPool
from atoll.testing.parity import difference
from benchmarks.who_gets_it_right.contenders import build
from benchmarks.who_gets_it_right.work import Work, one_process

TOLERANCE: Mapping[str, float] = {"float64": 1e-10, "float32": 1e-4}
SECONDS = 90.0
"""After this a case hangs."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One parameter on one rank: its first gradient, and its value after the last step.

    gradient, value: their differences by the measure of DESIGN.md.  off: the gradient's, relative to its largest
    element.  moved: whether the first step changed anything.
    """

    gradient: float
    value: float
    off: float
    moved: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """right, wrong, refused (when it is built), fails (in a step) or hangs.

    difference: the largest, of gradients and values.  missing: parameters that the first step leaves as they were.
    wrong: others whose gradient differs.  off: by how much, the largest.  words: the first line of the error.
    """

    verdict: str
    difference: float = 0.0
    parameters: int = 0
    missing: int = 0
    wrong: int = 0
    off: float = 0.0
    words: str = ""


class PeerError(Exception):
    """What a contender raised, from its innermost cause: verdict and words."""


def judge(pool: RankPool, work: Work, *, system: str, row: str) -> dict[str, object]:
    """A row of the result."""
    try:
        verdict = weigh(pool.run(compare, work.ranks, work, system, row, timeout=SECONDS), TOLERANCE[work.dtype])
    except RankError as error:
        if isinstance(error.__cause__, PeerError):
            kind, words = error.__cause__.args
            verdict = Verdict(kind, words=words)
        else:
            verdict = Verdict("hangs" if "still ran" in str(error) else "fails", words=str(error).splitlines()[0])
    return {"system": system, "schedule": row, **asdict(verdict)}


def compare(work: Work, system: str, row: str) -> dict[str, Seen]:
    """One rank: this rank's parameters beside those of one process."""
    warnings.simplefilter("ignore")  # the peers' own
    kind = "refused"
    try:
        contender = build(work, system, row)
        got = [contender.parameters()]
        kind = "fails"
        for step in range(work.steps):
            contender.step(step)
            got.append(contender.parameters())
    except Exception as error:
        raise PeerError(kind, _first_line(error)) from error
    contender.close()

    wanted, seen = one_process(work), {}
    for name in got[0]:
        gradient, other = got[0][name] - got[1][name], wanted[0][name] - wanted[1][name]
        seen[name] = Seen(
            gradient=difference(gradient, other),
            value=difference(got[-1][name], wanted[-1][name]),
            off=float((gradient - other).abs().max() / other.abs().max()),
            moved=bool(gradient.any()),
        )
    return seen


def weigh(per_rank: Sequence[Mapping[str, Seen]], tolerance: float) -> Verdict:
    """The verdict over all ranks; a parameter is as bad as on its worst rank."""
    seen = [(name, each) for rank in per_rank for name, each in rank.items()]
    missing = {name for name, each in seen if not each.moved}
    wrong = {name for name, each in seen if each.gradient > tolerance} - missing
    largest = max(max(each.gradient, each.value) for _, each in seen)
    return Verdict(
        "right" if largest <= tolerance else "wrong",
        difference=largest,
        parameters=len({name for name, _ in seen}),
        missing=len(missing),
        wrong=len(wrong),
        off=max((each.off for name, each in seen if name in wrong), default=0.0),
    )


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
