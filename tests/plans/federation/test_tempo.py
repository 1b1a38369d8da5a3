"""Islands of different speed that contribute to the same rounds, whenever they began and whatever stops them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from atoll.plans.federation.tempo import Tempo

INTERVAL, DELAY = 8, 6
"""Steps between two contributions, and until one arrives."""
GRACE, DECIDING = 1.5, 0.4
"""Seconds for which a round waits, and until everybody knows its record."""


@dataclass
class Island:
    """An island that sends after every `INTERVAL` steps. now: when its last step ended. turn: rounds it has followed.

    sent: the turn of its last contribution, and when that was."""

    pace: float
    now: float
    step: int = 0
    turn: int = 0
    sent: tuple[int, float] | None = None
    tempo: Tempo = field(default_factory=Tempo)
    stops: float = 0.0


@dataclass
class Rounds:
    """The rounds of some islands. came: when the contribution of each island to the open round came."""

    islands: list[Island]
    came: dict[int, float] = field(default_factory=dict)
    decided: list[dict[int, float]] = field(default_factory=list)

    def until(self, now: float) -> None:
        """Decide the round if its time is over."""
        if self.came:
            first, last = min(self.came.values()), max(self.came.values())
            ends = last if len(self.came) == len(self.islands) else first + GRACE
            if now >= ends + DECIDING:
                self.decided.append({at: came for at, came in self.came.items() if came <= ends})
                self.came = {}

    def step(self, at: int) -> None:
        """Have an island take a step, as the outer steps of a rank do."""
        own = self.islands[at]
        own.now += own.pace + own.stops
        own.stops, own.step = 0.0, own.step + 1
        own.tempo = replace(own.tempo, pace=own.pace)
        self.until(own.now)
        leaves, others_at = own.step % INTERVAL == 0, 0
        arrives = own.sent is not None and own.step >= INTERVAL * own.sent[0] + INTERVAL + DELAY
        if own.turn < len(self.decided) and (arrives or (leaves and own.sent is None)):
            last = self.decided[-1]
            meant = self.decided[-1 if own.sent is None else own.sent[0]]
            lag = (own.now if own.sent is None else own.sent[1]) - min(meant.values())
            if own.sent is not None or leaves:
                own.tempo = own.tempo.after(lag, INTERVAL, grace=GRACE, is_counted=at in meant)
            own.turn, own.sent = len(self.decided), None
            others_at = INTERVAL * own.turn + own.tempo.steps_since(own.now - min(last.values()))
        if leaves and own.sent is None and INTERVAL * own.turn < own.step:
            own.sent = len(self.decided), own.now
            self.came[at] = own.now
            others_at = max(others_at, own.step + own.tempo.steps_since(own.now - min(self.came.values())))
        least = max(own.step, INTERVAL * own.turn)
        own.step = max(least, min(others_at, least // INTERVAL * INTERVAL + INTERVAL - 1))


def play(islands: list[Island], rounds: int, *, stops: Iterable[tuple[float, int, float]] = ()) -> Rounds:
    """Return so many rounds. stops: when which island is stopped, and for how long."""
    stopped = iter(stops)
    found, coming = Rounds(islands), next(stopped, None)
    while len(found.decided) < rounds:
        at = min(range(len(islands)), key=lambda each: islands[each].now + islands[each].pace)
        if coming is not None and islands[at].now > coming[0]:
            islands[coming[1]].stops += coming[2]
            coming = next(stopped, None)
        found.step(at)
    return found


@given(st.lists(st.floats(0.0, 8.0), min_size=2, max_size=5), st.floats(0.3, 0.6))
def test_islands_of_one_speed_meet_whenever_they_began(begins: list[float], pace: float) -> None:
    found = play([Island(pace, begin) for begin in begins], 8)
    assert all(len(each) == len(begins) for each in found.decided[4:])


@given(st.lists(st.floats(0.4, 0.6), min_size=2, max_size=5), st.integers(0, 1000))
def test_islands_of_different_speeds_meet(paces: list[float], seed: int) -> None:
    found = play(begun(paces, seed), 40)
    counted = [len(each) for each in found.decided[20:]]
    assert sum(counted) >= 0.8 * len(counted) * len(paces)


@given(st.lists(st.floats(0.5, 1.0), min_size=2, max_size=5), st.integers(0, 1000))
def test_no_island_is_left_out_for_long(paces: list[float], seed: int) -> None:
    """To the slowest a contribution arrives after the fastest have sent two more."""
    found = play(begun(paces, seed), 60)
    for at in range(len(paces)):
        assert sum(at in each for each in found.decided[30:]) >= 30 / 5


def begun(paces: list[float], seed: int) -> list[Island]:
    draw = random.Random(seed)
    return [Island(pace, draw.uniform(0.0, 8.0)) for pace in paces]


def test_an_island_that_is_stopped_disturbs_the_others_little() -> None:
    """About every ten seconds one of four islands is stopped for some seconds."""
    counted, lengths = list[int](), list[float]()
    for seed in range(10):
        draw = random.Random(seed)
        stops = [(10.0 * at + draw.uniform(5.0, 12.0), draw.randrange(4), draw.uniform(2.0, 8.0)) for at in range(40)]
        found = play([Island(draw.uniform(0.48, 0.55), draw.uniform(0.0, 2.0)) for _ in range(4)], 60, stops=stops)
        counted += [len(each) for each in found.decided]
        lengths.append(max(island.now for island in found.islands) / len(found.decided))
    assert sum(counted) / len(counted) > 3.2
    assert min(lengths) > 0.9 * INTERVAL * 0.48


def test_steps_are_left_out_while_contributions_are_late() -> None:
    def late(tempo: Tempo) -> Tempo:
        return tempo.after(9.0, 16, grace=2.0, is_counted=False)

    assert [late(Tempo(0.5)).left_out, late(late(Tempo(0.5))).left_out, late(Tempo(0.5, 14)).left_out] == [2, 4, 15]
    assert [Tempo(0.5, 4).after(lag, 16, grace=2.0, is_counted=True).left_out for lag in (0.0, 0.6, 0.7, 1.4)] == [
        3,
        3,
        4,
        6,
    ]
    assert Tempo(0.5).after(0.0, 16, grace=2.0, is_counted=True).left_out == 0
    assert Tempo(0.5, 2).steps_since(1.2) == 2 + 2
    assert Tempo().steps_since(5.0) == 0
