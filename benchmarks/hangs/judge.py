"""What was printed against what was done."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

LATEST = 5.0
"""Seconds behind the timeout in which all ranks must have left."""

_WAITS = re.compile(
    r"rank (\d+) (?:in|is in) (?P<doing>[^;]+?)(?: along (?P<axes>[\w, ]+?) on the \w+ lane)? for ranks? "
    r"(?P<peers>\d+(?:(?:, | to )\d+)*)"
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What there was to see of a run. truth: step and instruction that were struck.  codes: of what was started here.
    seconds: from the blow to the end of the last rank; None where they did not end."""

    truth: str
    printed: str
    codes: Sequence[int]
    seconds: float | None

    @property
    def errors(self) -> list[str]:
        """The messages, each without stacks and tracebacks."""
        found = re.split(r"^error: ", self.printed, flags=re.MULTILINE)[1:]
        return [" ".join(re.split(r"\nrank |Traceback \(most recent", each)[0].split()) for each in found]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the axes pp, inter, intra, tp, the outermost first."""

    sizes: Mapping[str, int]

    @property
    def ranks(self) -> int:
        count = 1
        for size in self.sizes.values():
            count *= size
        return count

    def coordinates(self, rank: int) -> dict[str, int]:
        found = {}
        for axis, size in reversed(self.sizes.items()):
            rank, found[axis] = divmod(rank, size)
        return found

    def peers(self, rank: int, axes: Sequence[str]) -> set[int]:
        """Other ranks that differ from this one along these axes alone."""
        own = self.coordinates(rank)
        return {
            other
            for other in range(self.ranks)
            if other != rank and all(at == own[axis] or axis in axes for axis, at in self.coordinates(other).items())
        }


def numbers(words: str) -> set[int]:
    """`0, 2 to 5` -> 0, 2, 3, 4, 5."""
    found: set[int] = set()
    for part in words.split(", "):
        first, _, last = part.partition(" to ")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def waits(message: str) -> dict[int, set[int]]:
    """Who waits for whom, as a message says."""
    return {int(each[1]): numbers(each["peers"]) for each in _WAITS.finditer(message)}


def wrong_peers(message: str, mesh: Mesh) -> list[str]:
    """Ranks that are said to wait along an axis for ranks that do not lie there."""
    problems = []
    for each in _WAITS.finditer(message):
        rank, peers, axes = int(each[1]), numbers(each["peers"]), each["axes"]
        every = axes is None or axes == "every axis"
        wanted = mesh.peers(rank, list(mesh.sizes) if every else axes.split(", "))
        if not peers <= wanted or (peers != wanted and axes != "pp"):
            problems.append(f"rank {rank} waits for {sorted(peers)} along {axes}, where {sorted(wanted)} lie")
    return problems


def blamed_together(message: str) -> set[int]:
    """Ranks that are said to wait for each other."""
    found = re.match(r"ranks ([\d, to]+) wait for each other", message)
    return numbers(found[1]) if found else set()


def judge_hang(seen: Seen, mesh: Mesh, *, rank: int, does: str, stack: str = "") -> list[str]:
    """One message: the rank, where it is, that all others wait, and for whom."""
    problems = _count(seen, 1)
    message = seen.errors[0] if seen.errors else ""
    begins = f"rank {rank} {does} {re.escape(seen.truth)}"
    if not re.match(begins + r"(?![\w.])", message):
        problems.append(f"not '{begins}'")
    waiting = waits(message)
    missing = set(range(mesh.ranks)) - {rank} - set(waiting)
    if missing:
        problems.append(f"{sorted(missing)} are not said to wait")
    if not any(rank in peers for peers in waiting.values()):
        problems.append(f"nobody waits for rank {rank}")
    if stack and stack not in seen.printed:
        problems.append(f"the stack has no {stack}")
    return [*problems, *wrong_peers(message, mesh)]


def judge_monitor(seen: Seen, mesh: Mesh, *, does: Mapping[int, str]) -> list[str]:
    """Of the monitor's host: each other rank says so for itself. does: how each of them must begin."""
    problems = _count(seen, len(does))
    for rank, begin in does.items():
        own = [each for each in seen.errors if each.startswith(begin) and f"did not answer rank {rank} " in each]
        if len(own) != 1:
            problems.append(f"rank {rank} does not say '{begin}'")
        elif rank not in waits(own[0]):
            problems.append(f"rank {rank} does not say for whom it waits")
        problems += [problem for each in own for problem in wrong_peers(each, mesh)]
    return problems


def judge_apart(seen: Seen, mesh: Mesh, *, cut: Sequence[int]) -> list[str]:
    """Of ranks that are cut off from the monitor: its side names them, and each of them says so for itself.

    Their side knows the instruction. The monitor's knows where each was last heard, up to a heartbeat before the cut.
    """
    problems = _count(seen, 1 + len(cut))
    first = next((each for each in seen.errors if "did not answer" not in each), "")
    head = first.partition(". Waiting: ")[0]
    named = re.match(r"ranks? ([\d, to]+) sent no heartbeat", head)
    if named is None or numbers(named[1]) != set(cut):
        problems.append(f"{list(cut)} are not named")
    heard = head.partition("last heard in ")[2]
    several = {rank for each in re.findall(r"\(ranks? ([\d, to]+)\)", heard) for rank in numbers(each)}
    if not heard or several not in (set(), set(cut)):
        problems.append("it is not said where they were last heard")
    waiting = waits(first)
    if set(waiting) != set(range(mesh.ranks)) - set(cut):
        problems.append(f"{sorted(waiting)} are said to wait")
    if not any(peers & set(cut) for peers in waiting.values()):
        problems.append("nobody waits for who is cut off")
    others = Seen(seen.truth, "".join(f"error: {each}\n" for each in seen.errors if each != first), (), None)
    for each in others.errors:
        if not re.search(r"is in step \d+, \w+", each):
            problems.append("no instruction is named")
    told = judge_monitor(others, mesh, does=dict.fromkeys(cut, "rank 0 did not answer"))
    return [*problems, *told, *wrong_peers(first, mesh)]


def judge_lost(seen: Seen, mesh: Mesh, *, sides: tuple[set[int], set[int]]) -> list[str]:
    """Of messages that were lost: who waits for each other lies on both sides of the cut, and waits for the other."""
    problems = _count(seen, 1)
    message = seen.errors[0] if seen.errors else ""
    blamed, waiting = blamed_together(message), waits(message)
    here, there = blamed & sides[0], blamed & sides[1]
    if not here or not there or not blamed <= sides[0] | sides[1]:
        problems.append(f"{sorted(blamed)} are blamed")
    if not any(waiting.get(rank, set()) & there for rank in here):
        problems.append("nobody waits across the cut")
    if not re.search(r"in step \d+, \w+", message):
        problems.append("no instruction is named")
    return [*problems, *wrong_peers(message, mesh)]


def judge_gone(seen: Seen, begins: Collection[str]) -> list[str]:
    """Of a process that was killed: a message for each of these beginnings."""
    missing = [begin for begin in begins if sum(each.startswith(begin) for each in seen.errors) != 1]
    return [*_count(seen, len(begins)), *(f"nobody says '{begin}'" for begin in missing)]


def judge_unharmed(seen: Seen) -> list[str]:
    """The run goes on to its end."""
    return [*_count(seen, 0), *(f"exit code {code}" for code in seen.codes if code)]


def judge_time(seen: Seen, timeout: float) -> list[str]:
    """All ranks have left in time."""
    if seen.seconds is None:
        return ["ranks are left"]
    late = seen.seconds > timeout + LATEST
    return [f"the last rank left after {seen.seconds:.1f} s"] if late else []


def _count(seen: Seen, wanted: int) -> list[str]:
    count = len(seen.errors)
    return [] if count == wanted else [f"{count} messages, not {wanted}"]
