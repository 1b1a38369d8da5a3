"""What holds for every schedule of the catalogue: its picture, its closed forms, its memory, its order."""

import inspect
import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import ConfigError
from atoll.plans.ir import Op, Schedule, lower
from atoll.plans.ir.draw import draw
from atoll.plans.schedules import CATALOGUE, ClosedForm, Entry, Sizes, build
from atoll.plans.schedules.closed_form import RankForm
from atoll.program.sim import Costs, simulate
from tests.drawn import drawn, example

COST = st.floats(0.01, 10.0)
SEARCHED = [name for name, entry in CATALOGUE.items() if "placement" in entry.options]
RULED = [name for name in CATALOGUE if name not in SEARCHED]
FIXED = [name for name in RULED if name == "zb-v" or "costs" not in CATALOGUE[name].options]  # zb-v: without costs
SLICED = [name for name, entry in CATALOGUE.items() if "slices" in entry.options]
LISTED = [name for name in RULED if name not in FIXED]


def least_microbatches(name: str, ranks: int) -> int:
    return 2 * ranks - 1 if name == "dualpipe-v" else 1


PLACES = [
    lambda ranks: 1,
    lambda ranks: 2,
    lambda ranks: ranks - 1,
    lambda ranks: ranks,
    lambda ranks: ranks + 1,
    lambda ranks: 3 * ranks // 2,
    lambda ranks: 2 * ranks - 1,
    lambda ranks: 2 * ranks,
    lambda ranks: 2 * ranks + 1,
    lambda ranks: 3 * ranks,
    lambda ranks: 5 * ranks - 1,
    lambda ranks: 8 * ranks,
]
"""Numbers of microbatches around every place where a domain or a rule of construction changes."""
RANKS = list(range(1, 17))
SLICES = (1, 2, 3, 8)


def sizes_of(name: str) -> Iterator[tuple[int, int, int, int]]:
    """Ranks, microbatches, chunks and slices: two numbers of ranks at each place, others for each schedule."""
    at = 3 * RULED.index(name)
    axes = PLACES, RANKS[at % 16 :] + RANKS[: at % 16], (1, 2, 3), SLICES if name in SLICED else (1,)
    for place, ranks, chunks, slices in drawn(2 * len(PLACES), *axes):
        # Those that are listed take longer to build.
        least, most = (
            least_microbatches(name, ranks),
            128 if name in FIXED or ranks <= 8 or ranks % 4 == 0 else 3 * ranks,
        )
        yield ranks, min(max(place(ranks), least), most // slices), chunks, slices


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_entry_has_the_placement_of_its_schedule(name: str) -> None:
    placement, entry = build(name, ranks=3, microbatches=6).placement, CATALOGUE[name]
    assert (placement.kind, placement.chunks) == (entry.placement, entry.chunks)


def keeps(schedule: Schedule, ends: tuple[Op, ...]) -> list[float]:
    """Per rank, the most microbatches between F and one of `ends`."""
    peaks = []
    for row in schedule.actions:
        held = peak = 0
        for action in row:
            held += (action.op is Op.F) - (action.op in ends)
            peak = max(peak, held)
        peaks.append(peak / (schedule.chunks * schedule.slices))
    return peaks


def assert_related(found: float, form: ClosedForm | RankForm, bound: float, scale: float = 1.0) -> None:
    if form.relation == "exactly":
        assert found == pytest.approx(bound, abs=1e-9 * scale), form.text
    else:
        assert found <= bound + 1e-9 * scale, form.text


def check_forms(schedule: Schedule, entry: Entry, sizes: Sizes) -> None:
    for form in entry.bubbles:
        if not form.holds(sizes):
            continue
        for is_fused in {"fused": (True,), "early": (False,), "either": (True, False)}[form.backward]:
            costs = Costs(sizes.forward, sizes.input_grad, sizes.weight_grad, sizes.hop, fused_backward=is_fused)
            trace = simulate(schedule, costs)
            cost = trace.makespan if form.measure == "makespan" else trace.span
            assert_related(cost - sizes.work, form, form.value(sizes), cost)


def check_memory(schedule: Schedule, entry: Entry, sizes: Sizes) -> None:
    activations, kept = keeps(schedule, (Op.I, Op.B)), keeps(schedule, (Op.W, Op.B))
    for rank in range(schedule.ranks):
        assert_related(activations[rank], entry.activations, entry.activations.value(sizes, rank))
        assert_related(kept[rank], entry.kept, entry.kept.value(sizes, rank))


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.name)
def test_the_docstrings_drawing_is_true(entry: Entry) -> None:
    """Schedules that take slices are also drawn with them."""
    documentation = inspect.getdoc(entry.function) or ""
    paragraphs = [paragraph.splitlines() for paragraph in documentation.split("\n\n")]
    drawings = [[line.strip() for line in lines] for lines in paragraphs if lines[0].strip().startswith("rank ")]
    assert 1 <= len(drawings) <= 1 + (entry.name in SLICED)
    for drawing in drawings:
        numbers = re.findall(r"F(\d+)(?:\.(\d+))?", "\n".join(drawing))
        microbatches, slices = (1 + max(int(number or 0) for number in column) for column in zip(*numbers, strict=True))
        schedule = build(entry.name, ranks=len(drawing), microbatches=microbatches, slices=slices)
        assert draw(schedule).splitlines() == drawing


@pytest.mark.wide(1)
@pytest.mark.parametrize("name", RULED)
def test_closed_forms_and_memory_at_equal_costs(name: str) -> None:
    """p 1 to 16, m up to 8p, F = I = W, one to three chunks, one to eight slices where a schedule takes these."""
    entry = CATALOGUE[name]
    for ranks, microbatches, number, slices in sizes_of(name):
        with example(f"ranks={ranks}", f"microbatches={microbatches}", f"chunks={number}", f"slices={slices}"):
            options = {"chunks": number} if "chunks" in entry.options else {}
            schedule = build(name, ranks=ranks, microbatches=microbatches, slices=slices, **options)
            sizes = Sizes(ranks, microbatches, chunks=options.get("chunks", entry.chunks), slices=slices)
            check_forms(schedule, entry, sizes)
            check_memory(schedule, entry, sizes)


@pytest.mark.parametrize(
    ("microbatches", "chunks", "weight_grad", "holds"),
    [(12, 2, 2.0, False), (12, 2, 1.0, True), (7, 2, 2.0, True), (8, 2, 2.0, False), (12, 1, 2.0, True)],
)
def test_the_early_form_of_interleaved_holds_where_it_says(
    microbatches: int, chunks: int, weight_grad: float, holds: bool
) -> None:
    """T_W <= T_F, or mn < 2p, or v = 1; on 4 ranks."""
    (form,) = [form for form in CATALOGUE["interleaved"].bubbles if form.backward == "early"]
    assert form.domain == "T_W <= T_F, or mn < 2p, or v = 1"
    assert form.holds(Sizes(4, microbatches, 1.0, 1.0, weight_grad, chunks=chunks)) == holds


def test_every_place_and_number_of_ranks_is_drawn_for_every_schedule() -> None:
    for name in RULED:
        sizes = list(sizes_of(name))
        assert {ranks for ranks, _, _, _ in sizes} == set(RANKS)
        assert {chunks for _, _, chunks, _ in sizes} == {1, 2, 3}
        assert {slices for _, _, _, slices in sizes} == (set(SLICES) if name in SLICED else {1})


@pytest.mark.parametrize("name", FIXED)
@given(
    ranks=st.integers(1, 16),
    rounds=st.floats(0, 8),
    chunks=st.integers(1, 5),
    costs=st.tuples(COST, COST, COST),
    hop=st.floats(0, 0.5),
    slices=st.integers(1, 9),
)
@settings(max_examples=60)
@pytest.mark.wide(1)
def test_closed_forms_at_unequal_costs(
    name: str, ranks: int, rounds: float, chunks: int, costs: tuple[float, float, float], hop: float, slices: int
) -> None:
    entry = CATALOGUE[name]
    slices = slices if name in SLICED else 1
    microbatches = max(round(rounds * ranks) // slices, least_microbatches(name, ranks))
    options = {"chunks": chunks} if "chunks" in entry.options else {}
    options |= {"slices": slices}
    schedule = build(name, ranks=ranks, microbatches=microbatches, **options)
    for latency in (0.0, hop * min(costs)):
        sizes = Sizes(ranks, microbatches, *costs, hop=latency, chunks=schedule.chunks, slices=slices)
        check_forms(schedule, entry, sizes)


@pytest.mark.parametrize("name", RULED)
@given(data=st.data(), ranks=st.integers(1, 16))
@settings(max_examples=15)
@pytest.mark.wide(1)
def test_any_size_is_valid_and_lowers_without_deadlock(name: str, data: st.DataObject, ranks: int) -> None:
    """Building validates, and so does lowering: messages complete, in order by direction, nobody waits for ever."""
    entry = CATALOGUE[name]
    least = least_microbatches(name, ranks)
    microbatches = data.draw(st.integers(least, max(least, 4 * ranks if ranks < 10 else 2 * ranks + 5)))
    options = {}
    if "chunks" in entry.options:
        options["chunks"] = data.draw(st.integers(1, 5))
    if "unit" in entry.options:
        options["unit"] = data.draw(st.integers(1, microbatches))
    if "slices" in entry.options:
        options["slices"] = data.draw(st.integers(1, 6))
        microbatches = max(1, microbatches // options["slices"])
    schedule = build(name, ranks=ranks, microbatches=microbatches, **options)
    assert (schedule.placement.kind, schedule.chunks) == (entry.placement, options.get("chunks", entry.chunks))
    lowered = lower(schedule)
    costs = Costs(1.0, 1.3, 0.7, hop=0.1)
    assert simulate(lowered, costs).makespan == simulate(schedule, costs).makespan
    assert lowered.compute_only().actions == schedule.actions
    sizes = Sizes(
        ranks, microbatches, chunks=schedule.chunks, unit=options.get("unit"), slices=options.get("slices", 1)
    )
    check_memory(schedule, entry, sizes)


@pytest.mark.parametrize("name", CATALOGUE)
def test_backwards_keep_the_microbatch_order(name: str) -> None:
    """Gradients of a stage are then summed in the same order under every schedule, bit for bit."""
    for row in build(name, ranks=4, microbatches=9).actions:
        for stage in {action.stage for action in row}:
            for ops in ((Op.F,), (Op.I, Op.B), (Op.W, Op.B)):
                numbers = [action.microbatch for action in row if action.stage == stage and action.op in ops]
                assert numbers == list(range(9))


@pytest.mark.parametrize("name", SLICED)
def test_slices_run_forward_in_order_and_backward_in_reverse(name: str) -> None:
    for row in build(name, ranks=4, microbatches=2, slices=3).actions:
        for stage in {action.stage for action in row}:
            for ops in ((Op.F,), (Op.I, Op.B), (Op.W, Op.B)):
                numbers = [action.microbatch for action in row if action.stage == stage and action.op in ops]
                assert numbers == ([0, 1, 2, 3, 4, 5] if ops == (Op.F,) else [2, 1, 0, 5, 4, 3])


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_schedule_takes_slices_or_says_which_do(name: str) -> None:
    sizes = {"ranks": 2, "microbatches": 3}
    assert build(name, **sizes, slices=1) == build(name, **sizes)
    if name in SLICED:
        schedule = build(name, **sizes, slices=2)
        assert (schedule.slices, schedule.whole_microbatches, schedule.microbatches) == (2, 3, 6)
        return
    message = (
        f"schedule '{name}' runs whole sequences, not slices of them: use one of {', '.join(SLICED)}, or leave out"
    )
    with pytest.raises(ConfigError, match=message):
        build(name, **sizes, slices=2)


@pytest.mark.parametrize("name", CATALOGUE)
def test_building_is_a_function(name: str) -> None:
    first, second = (build(name, ranks=3, microbatches=7, costs=Costs(1, 2, 0.5, hop=0.2)) for _ in range(2))
    assert first == second
    assert first.name == name


def test_known_makespans() -> None:
    """The facts' examples: m=16, F=I=W=20."""
    schedule = build("1f1b", ranks=4, microbatches=16)
    assert simulate(schedule, Costs(20, 20, 20, fused_backward=True)).makespan == 1140
    assert simulate(schedule, Costs(20, 20, 20)).makespan == 1080
    assert simulate(build("1f1b", ranks=8, microbatches=16), Costs(20, 20, 20)).makespan == 1240
    for name, makespan, span in (("zb-h1", 1020, 1020), ("zb-h2", 1020, 960), ("zb-v", 990, 960)):
        trace = simulate(build(name, ranks=4, microbatches=16), Costs(20, 20, 20))
        assert (trace.makespan, trace.span) == (makespan, span)


def test_the_last_rank_of_1f1b_alternates_from_the_start() -> None:
    """Past bug of others: one of two published descriptions lets the last rank run one forward too many."""
    row = build("1f1b", ranks=4, microbatches=3).actions[-1]
    assert " ".join(map(str, row)) == "3F0 3B0 3F1 3B1 3F2 3B2"


def test_every_schedule_takes_costs_and_options_that_are_not_given() -> None:
    costs = Costs(1, 2, 3)
    for name in CATALOGUE:
        plain = build(name, ranks=2, microbatches=4, chunks=None, unit=None)
        assert plain == build(name, ranks=2, microbatches=4)
        assert build(name, ranks=2, microbatches=4, costs=costs).microbatches == 4


def test_unknown_names_and_sizes() -> None:
    with pytest.raises(ConfigError, match=r"schedule '1f1' does not exist; did you mean '1f1b'\?: choose one of gpipe"):
        build("1f1", ranks=2, microbatches=2)
    with pytest.raises(ConfigError, match="did you mean 'gpipe'"):
        build("GPipe", ranks=2, microbatches=2)
    with pytest.raises(ConfigError, match="at least 1 of ranks, not 0"):
        build("gpipe", ranks=0, microbatches=2)
    with pytest.raises(ConfigError, match="at least 1 of microbatches, not -3"):
        build("gpipe", ranks=1, microbatches=-3)
    with pytest.raises(ConfigError, match="no option 'memory_limit'"):
        build("gpipe", ranks=1, microbatches=1, memory_limit=3)
    with pytest.raises(ConfigError, match="no option 'chunk'; did you mean 'chunks'"):
        build("interleaved", ranks=2, microbatches=2, chunk=3)
    with pytest.raises(ConfigError, match="at least 1 of chunks, not 0"):
        build("interleaved", ranks=2, microbatches=2, chunks=0)
    with pytest.raises(ConfigError, match="at least 1 of slices, not 0"):
        build("1f1b", ranks=2, microbatches=2, slices=0)
    with pytest.raises(ConfigError, match=r"at least 1 of unit, not 1\.5"):
        build("unit", ranks=2, microbatches=2, unit=1.5)
    with pytest.raises(ConfigError, match="cost forward has 3 numbers for 2 ranks"):
        build("v-half", ranks=2, microbatches=2, costs=Costs((1, 2, 3)))


def test_sizes_are_of_one_chunk_of_equal_costs_unless_more_is_said() -> None:
    sizes = Sizes(3, 7)
    assert sizes == Sizes(3, 7, 1.0, 1.0, 1.0, hop=0.0, chunks=1, unit=None, slices=1)
    assert (sizes.work, sizes.is_even, sizes.all_slices) == (21.0, True, 7)
    for name in ("gpipe", "1f1b", "zb-h1"):
        check_forms(build(name, ranks=3, microbatches=7), CATALOGUE[name], sizes)


def test_a_rank_has_as_many_stages_as_a_schedule_says_unless_more_is_asked_for() -> None:
    two = {"interleaved", "gis", "gis-h", "breadth-first", "zb-v", "v-half", "v-min", "dualpipe-v", "unit"}
    named = [name for name in CATALOGUE if name not in ("auto", "zb-1p", "zb-2p")]  # one, and they take long
    made = {name: build(name, ranks=2, microbatches=6).chunks for name in named}
    assert made == {name: 2 if name in two else 1 for name in named}
    assert made == {name: CATALOGUE[name].chunks for name in named}
