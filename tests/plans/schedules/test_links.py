"""Links between pipeline ranks: the simulator, the program player, the search and the solver agree on what they do."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from atoll.base.errors import ConfigError
from atoll.plans.ir import Op, Placement, Schedule, lower
from atoll.plans.ir.placement import PlacementKind
from atoll.plans.schedules import Links, Memory, PipelineLink, Problem, build, lower_bound, search
from atoll.plans.schedules.automatic import find_order
from atoll.plans.schedules.links import Hops
from atoll.plans.schedules.memory import peak_of
from atoll.plans.schedules.portfolio import fixed_orders
from atoll.plans.schedules.search import Board
from atoll.program import Do, Programs, lower_row
from atoll.program.sim import Costs, Rates, Speed, simulate
from benchmarks.schedules import exact
from tests.plans.ir.shapes import typed
from tests.program.shapes import shapes_of

NAMES = ("gpipe", "1f1b", "interleaved", "gis-h", "zb-h1", "zb-h2", "zb-v", "v-half", "dualpipe-v")


def links_of(seed: int, ranks: int) -> Links:
    """A link for each pair of neighbours on a ring: some alone, some shared by a rank's messages, some by several."""
    chance = random.Random(seed)
    pairs = [(rank, (rank + step) % ranks) for rank in range(ranks) for step in (1, -1)]
    names = ("", "", "wan", "card")[: 2 + seed % 3]
    each = {
        pair: PipelineLink(
            chance.uniform(0.0, 0.7), chance.choice([0.0, chance.uniform(0.0, 0.9)]), chance.choice(names)
        )
        for pair in pairs
    }
    return Links(
        {pair: link for pair, link in each.items() if pair[0] != pair[1]}, PipelineLink(chance.uniform(0.0, 0.3))
    )


def test_a_link_carries_one_message_at_a_time() -> None:
    """Two forwards of 1 s, a link of 3 s and a latency of 0.5 s: the second message waits for the first."""
    schedule = typed("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    costs = Costs(1, 1, 1, hop=Links({(0, 1): PipelineLink(0.5, 3.0)}))
    start = {str(span.action): span.start for span in simulate(schedule, costs).spans}
    assert (start["1F0"], start["1F1"]) == (1 + 3 + 0.5, 1 + 3 + 3 + 0.5)
    assert start["0B0"] == start["1B0"] + 1, "the way back has no link of its own, and takes no time"


def test_who_asks_first_is_carried_first() -> None:
    """Both ranks ask for one link: rank 1 asks at 1.5 s and has it to 3.5 s, though rank 0's message is made later."""
    rows = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    both = Links({(0, 1): PipelineLink(0.0, 0.5, "wan"), (1, 0): PipelineLink(0.0, 2.0, "wan")})
    start = {str(span.action): span.start for span in simulate(typed(*rows), Costs(1, 1, 1, hop=both)).spans}
    assert start["1F0"] == 1.5  # asked at 1
    assert start["1B0"] == 2.5
    assert start["1F1"] == 4.5  # asked at 2, carried at once; the rank is busy until 4.5
    assert start["0B0"] == 5.5  # its I ends at 3.5, and the link takes 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(6))
def test_programs_take_what_their_schedule_takes(name: str, seed: int) -> None:
    """With a link for each pair of neighbours, shared by nobody, by one rank's messages, or by several ranks."""
    ranks = 3 + seed % 3
    schedule, links = build(name, ranks=ranks, microbatches=2 * ranks + seed % 2), links_of(seed, ranks)
    chance = random.Random(seed)
    takes = {(do, block): chance.uniform(0.5, 1.5) for do in (Do.F, Do.I) for block in range(ranks)}
    takes |= {(Do.W, block): chance.uniform(0.5, 1.5) for block in range(ranks)}
    costs = Costs(*(tuple(takes[do, rank] for rank in range(ranks)) for do in (Do.F, Do.I, Do.W)), hop=links)
    rates = []
    for rank in range(ranks):
        stages, share = schedule.placement.stages_of(rank), 1 / schedule.chunks
        compute = {(do, stage): share * takes[do, rank] for stage in stages for do in (Do.F, Do.I)}
        compute |= {(Do.W, stage + 1): share * takes[Do.W, rank] for stage in stages}
        to = {
            other: Speed(link.latency, 1 / link.seconds if link.seconds else float("inf"), pool=link.name or None)
            for other in range(ranks)
            if other != rank and (link := links.between(rank, other))
        }
        rates.append(Rates(compute, message=1.0, to=to))
    shapes = shapes_of(schedule.placement, blocks=1, rests=True)
    rows = (lower_row(row, shape) for row, shape in zip(lower(schedule).actions, shapes, strict=True))
    played = simulate(Programs(schedule.placement, tuple(rows)), rates)
    wanted = simulate(schedule, costs)
    assert played.makespan == pytest.approx(wanted.makespan)
    starts = {str(span.action): span.start for span in played.spans if span.action.op.is_compute}
    assert starts == pytest.approx({str(span.action): span.start for span in wanted.spans})
    assert simulate(lower(schedule), costs).makespan == wanted.makespan


@pytest.mark.parametrize("name", ["interleaved", "gis", "zb-v", "v-half"])
def test_stages_of_a_rank_may_be_unequal(name: str) -> None:
    """A list of as many numbers as stages is of stages: the simulator, the player and the search take it so."""
    schedule, chance = build(name, ranks=3, microbatches=7), random.Random(3)
    f, i, w = (tuple(chance.uniform(0.3, 2.0) for _ in range(schedule.stages)) for _ in range(3))
    costs = Costs(f, i, w, hop=0.2)
    compute = {(do, stage): times[stage] for do, times in ((Do.F, f), (Do.I, i)) for stage in range(schedule.stages)}
    compute |= {(Do.W, stage + 1): w[stage] for stage in range(schedule.stages)}
    shapes = shapes_of(schedule.placement, blocks=1, rests=True)
    rows = (lower_row(row, shape) for row, shape in zip(lower(schedule).actions, shapes, strict=True))
    played = simulate(Programs(schedule.placement, tuple(rows)), Rates(compute, links={"pp": Speed(latency=0.2)}))
    trace = simulate(schedule, costs)
    assert trace.makespan == pytest.approx(played.makespan)
    problem = Problem.of(schedule.placement, 7, costs=costs)
    board = Board(problem)
    board.load(schedule)
    cost = board.play()
    assert cost is not None
    assert cost == pytest.approx((trace.makespan, trace.span))
    assert lower_bound(problem) <= find_order(problem).cost.main * (1 + 1e-9)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_a_search_plays_orders_as_the_simulator_does(name: str, seed: int) -> None:
    schedule = build(name, ranks=4, microbatches=9)
    costs = Costs((1.0, 1.2, 0.9, 1.1), 1.3, 0.7, hop=links_of(seed, 4))
    board = Board(Problem.of(schedule.placement, 9, costs=costs))
    board.load(schedule)
    cost = board.play()
    trace = simulate(schedule, costs)
    assert cost is not None
    assert cost == pytest.approx((trace.makespan, trace.span))


def test_a_number_and_links_of_that_latency_are_the_same() -> None:
    for name in NAMES:
        schedule = build(name, ranks=4, microbatches=8)
        pairs = {(rank, (rank + step) % 4): PipelineLink(0.3) for rank in range(4) for step in (1, -1)}
        number, links = Costs(1, 1.1, 0.7, hop=0.3), Costs(1, 1.1, 0.7, hop=Links(pairs))
        assert simulate(schedule, links).spans == simulate(schedule, number).spans
        assert Hops.of(schedule.placement, 0.3).is_even
    assert not Hops.of(Placement("line", 3), Links({(0, 1): PipelineLink(0.3)})).is_even


def small(seed: int) -> Problem:
    chance = random.Random(seed)
    kind: PlacementKind = chance.choice(["line", "line", "v", "loop"])
    ranks, chunks = (3, 1) if kind == "line" else (2, 2)
    times = [tuple(chance.choice([0.5, 1.0, 1.5, 2.0]) for _ in range(ranks * chunks)) for _ in range(3)]
    names = ("", "wan") if seed % 2 else ("",)
    each = {
        (rank, other): PipelineLink(
            chance.choice([0.0, 0.5, 2.0]), chance.choice([0.0, 0.5, 1.5]), chance.choice(names)
        )
        for rank in range(ranks)
        for other in range(ranks)
        if rank != other
    }
    costs = Costs(*times, hop=Links(each), fused_backward=chance.random() < 0.3)
    memory = Memory(1.0, chance.choice([0.3, 1.0]), 0.0, tuple(chance.choice([1.5, 2, 3, 5]) for _ in range(ranks)))
    objective = chance.choice(["makespan", "makespan", "span"])
    placement, microbatches = Placement(kind, ranks, chunks), chance.randint(2, 4)
    return Problem.of(placement, microbatches, costs=costs, memory=memory, objective=objective)  # type: ignore[arg-type]


def test_a_full_backward_gives_its_result_with_the_input_gradient_unless_it_is_fused() -> None:
    """By stage: F, I, W and the full backward; what is taken, and when the result is released."""
    problems = [small(seed) for seed in range(12)]
    assert {problem.fused_backward for problem in problems} == {True, False}
    for problem in problems:
        model = search.model_of(problem)
        for stage in range(problem.placement.stages):
            takes, gives = (list(times[4 * stage : 4 * stage + 4]) for times in (model.takes, model.gives))
            assert takes[3] == takes[1] + takes[2]
            assert gives == [*takes[:3], takes[3 if problem.fused_backward else 1]]


@pytest.mark.wide(3)
@pytest.mark.parametrize("seed", range(16))
def test_no_order_is_below_the_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the search nor the solver, which improves on it, is told the bound."""
    pytest.importorskip("ortools")
    problem = small(seed)
    monkeypatch.setattr(search, "lower_bound", lambda _: 0.0)
    monkeypatch.setattr(exact, "lower_bound", lambda _: 0.0)
    monkeypatch.setattr(search, "_EFFORT", 50_000)
    assert lower_bound(problem) <= exact.solve(problem, effort=0.1).cost * (1 + 1e-9)


def test_the_bound_knows_what_a_link_carries() -> None:
    """Eight messages of 3 s each way over one link: F, 48 s, the I of rank 0 and its W."""
    both = Links({pair: PipelineLink(0.0, 3.0, "wan") for pair in ((0, 1), (1, 0))})
    problem = Problem.of(Placement("line", 2), 8, costs=Costs(1, 1, 1, hop=both))
    assert lower_bound(problem) == pytest.approx(1 + 16 * 3 + 1 + 1)
    found = find_order(problem)
    assert found.cost is not None
    assert found.cost.main == pytest.approx(found.bound)


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "chunks"), [("line", 1), ("loop", 2), ("v", 2)])
@pytest.mark.parametrize("seed", range(2))
def test_an_automatic_order_is_never_worse_than_a_closed_form(kind: PlacementKind, chunks: int, seed: int) -> None:
    """Under the same links, in the memory of each."""
    placement, microbatches = Placement(kind, 4, chunks), 10
    costs = Costs(1.0, 1.1, 0.8, hop=links_of(seed, 4))
    for rival in fixed_orders(Problem.of(placement, microbatches, costs=costs)):
        rows = zip(rival.actions, Memory().per_rank(4), strict=True)
        memory = Memory(limit=tuple(peak_of(row, chunks, bytes_of) for row, bytes_of in rows))
        found = find_order(Problem.of(placement, microbatches, costs=costs, memory=memory))
        schedule: Schedule = found.schedule("auto")
        trace = simulate(schedule, costs, memory)
        assert trace.makespan <= simulate(rival, costs).makespan * (1 + 1e-9), rival.name
        assert found.cost is not None
        assert found.cost.main == pytest.approx(trace.makespan)
        limits = [row.limit for row in memory.per_rank(4)]
        assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(trace.peak_bytes, limits, strict=True))


def test_an_order_made_for_a_slow_link_hides_it() -> None:
    """Two islands of two ranks: the automatic order is a fifth faster than 1F1B, and than ZB-V, in twice 1F1B's
    memory."""
    slow = PipelineLink(2.0, 0.5)
    costs = Costs(1, 1, 1, hop=Links({(1, 2): slow, (2, 1): slow}))
    fixed = min(simulate(build(name, ranks=4, microbatches=16), costs).makespan for name in ("1f1b", "zb-v"))
    schedule = build("zb-2p", ranks=4, microbatches=16, costs=costs)
    assert 1.2 * simulate(schedule, costs).makespan < fixed


def test_messages_of_a_split_vocabulary_take_the_longest_hop() -> None:
    from atoll.plans.ir import insert_vocabulary

    schedule = insert_vocabulary(build("1f1b", ranks=3, microbatches=4))
    number = simulate(schedule, Costs(hop=0.4, look_up=0.1, score=0.2, score_grad=0.1))
    pairs = {(rank, rank + 1): PipelineLink(0.4) for rank in range(2)} | {
        (rank + 1, rank): PipelineLink(0.4) for rank in range(2)
    }
    links = Links(pairs)
    assert simulate(schedule, Costs(hop=links, look_up=0.1, score=0.2, score_grad=0.1)).spans == number.spans
    far = simulate(schedule, Costs(hop=Links(pairs, PipelineLink(1.0)), look_up=0.1, score=0.2, score_grad=0.1))
    first = next(span.start for span in far.spans if span.action.op is Op.F)
    assert first == pytest.approx(1.1)


FILE = """
latency = 0.25

[[link]]
ranks = [1, 2]
latency = 2
seconds = 0.5
name = "wan"

[[link]]
ranks = [2, 1]
seconds = 0.5
name = "wan"
"""


def test_links_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "links.toml"
    path.write_text(FILE)
    links = Links.read(path)
    assert links.between(1, 2) == PipelineLink(2.0, 0.5, "wan")
    assert links.between(2, 1) == PipelineLink(0.0, 0.5, "wan")
    assert links.between(0, 1) == PipelineLink(0.25)
    hops = Hops.of(Placement("line", 4), links)
    assert (hops.links, hops.is_shared, hops.far) == (1, True, 2.5)
    assert hops.forward[1].link == hops.backward[2].link == 0
    assert not Hops.of(Placement("line", 2), links).is_shared


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("latency = -1", "a link's latency is -1.0"),
        ("[[link]]\nlatency = 1", "link 1: ranks is None"),
        ("[[link]]\nranks = [0, 1]\nrate = 3", "link 1: no key rate; there are latency, seconds, name"),
        ("[[link]]\nranks = [0, 1]\nseconds = 'x'", "seconds is not what it should be"),
        ("[[link]]\nranks = [0, 1]\n[[link]]\nranks = [0, 1]", "the link from rank 0 to rank 1 is there already"),
        ("latency = ", "cannot read the links"),
    ],
)
def test_a_file_that_is_wrong_says_what(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "links.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Links.read(path)
