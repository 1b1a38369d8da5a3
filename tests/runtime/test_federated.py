"""Islands that come and go equal replicas in one process that take the records of their rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.base.labels import IGNORED_LABEL
from atoll.plans.federation.records import Contribution, RoundRecord
from atoll.plans.outer import Apart, Outer
from atoll.runtime.engine import Engine
from atoll.runtime.federation.exchange import IslandExchange
from atoll.runtime.federation.seat import IslandAddress, IslandSeat
from atoll.runtime.sharding.optimizer import decay_matrices
from atoll.runtime.sharding.replicas import digest_of
from atoll.testing.parity import Case, difference, units_of
from atoll.testing.progress import wait_until
from atoll.testing.reference import train_federation
from tests.runtime.federation.ports import held_ports

APART = Apart(3, quorum=1, grace=30.0)
CASE = Case(microbatches=2, steps=8, outer=Outer(3, apart=APART))


@dataclass
class Told:
    """What an island has done, for the reference. digests: of anchors and momenta after each round."""

    events: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)


class Islands:
    """Islands of one rank each, in threads of this process. cases: of each."""

    def __init__(self, folder: Path, cases: dict[str, Case], ports: dict[str, int], **seat: Any) -> None:
        self.folder, self.cases, self.seat = folder, cases, seat
        self.addresses = {name: IslandAddress("127.0.0.1", port) for name, port in ports.items()}
        self.told = {name: Told() for name in cases}
        self.records: dict[int, RoundRecord] = {}
        self.engines: dict[str, Engine] = {}
        self.threads: dict[str, threading.Thread] = {}
        # Initial values are drawn from the process's generator, so nothing else may be drawn at that time: an engine of
        # later is made before the others train.
        self.building = threading.Lock()
        self.spare: dict[str, Engine] = {}
        self.errors: list[BaseException] = []
        self.units: tuple[tuple[str, ...], ...] = ()
        self.saves: dict[str, int] = {}
        # What an island waits for before it is lost.
        self.losing: Callable[[], bool] = lambda: True
        # What an island waits for before a step.
        self.gates: dict[str, Callable[[Engine], bool]] = {}
        self.is_new_c_open = False

    def start(
        self, name: str, end: Callable[[Engine], bool], *, leaves: str = "finish", load: Path | None = None
    ) -> None:
        """Train on an island until `end`. leaves: finish, hand over, or be lost."""
        thread = threading.Thread(target=self._run, args=(name, end, leaves, load), name=name)
        self.threads[name] = thread
        thread.start()

    def waits_for(self, name: str, *, count: int) -> Callable[[Engine], bool]:
        """Return the gate of an engine that needs what this island sends in each round, until it ends after `count` of
        them: the last round may be over before the engine looks."""

        def is_over(engine: Engine) -> bool:
            return name in self.engines and rounds(count)(self.engines[name])

        return lambda engine: _holds_one_of(engine, name) or is_over(engine)

    def silence(self, name: str) -> None:
        """Have the others hear nothing any more of an island that is lost, as after `silent` seconds."""
        for engine in [engine for other, engine in self.engines.items() if other != name]:
            link = engine.federation.steps._link
            assert link is not None
            assert link.first is not None
            with link.first.lock:
                link.first._new.pop(name, None)
                view, before = link.first._view, link.first._clock() - 1.5 * link.first.rules.silent
                link.first._view = replace(view, heard={**view.heard, name: before})

    def lose_c(self) -> None:
        """Lose c after five steps, until the others have had a round without it."""
        self.start("c", after(5), leaves="be lost")
        wait_until(lambda: not self.threads["c"].is_alive())
        wait_until(lambda: bool(self.errors) or self.silence("c") or ["a", "b"] in self.counted)

    def bring_back_c(self, end: Callable[[Engine], bool]) -> None:
        """Start c again, and wait for the end of all islands."""
        self.start("c", end)
        wait_until(lambda: bool(self.errors) or self.engines["c"].federation.steps.is_open)
        self.is_new_c_open = True
        self.join()

    @property
    def has_c_again(self) -> bool:
        """True once the new c is a member."""
        return self.is_new_c_open and self.engines["c"].federation.steps.standing.is_member

    def join(self) -> None:
        for thread in self.threads.values():
            wait_until(lambda thread=thread: not thread.is_alive() or self.errors)
        if self.errors:
            raise self.errors[0]

    def _run(self, name: str, end: Callable[[Engine], bool], leaves: str, load: Path | None) -> None:
        try:
            self._train(name, end, leaves, load)
        except BaseException as error:
            self.errors.append(error)

    def engine(self, name: str) -> Engine:
        case = self.cases[name]
        options = {"silent": 60.0, "away": 600.0, "poll": 0.02, "stock": 40, **self.seat}
        seat = IslandSeat(name, self.addresses, b"a secret of the tests", self.folder / name, **options)
        with torch.device("meta"):
            model = case.model.build()
        return Engine(
            model,
            case.plan,
            optimizer=case.make_optimizer,
            groups=decay_matrices(0.1),
            clip=case.clip,
            seed=case.seed,
            device="cpu",
            seat=seat,
        )

    def _train(self, name: str, end: Callable[[Engine], bool], leaves: str, load: Path | None) -> None:
        case, told = self.cases[name], self.told[name]
        with self.building:
            engine = self.spare.pop(name, None) or self.engine(name)
        self.engines[name], self.units = engine, units_of(engine)
        steps, size = engine.federation.steps, case.samples
        if load is None:
            told.events.append({"what": "new"})
        else:
            engine.load(load)
            told.events.append({"what": "loaded"})
        while not end(engine):
            engine.federation.join(size)
            self._note(name)
            if name in self.gates:
                wait_until(lambda: self.gates[name](engine) or bool(self.errors))
            samples = steps.standing.lots.read(steps.used, size)
            batch = [case.model.batch(position, 1) for position in samples]
            joined = {key: torch.cat([torch.as_tensor(each[key]) for each in batch]) for key in batch[0]}
            told.events.append({"what": "stepped", "step": engine.step_number, "samples": samples})
            steps.used += size
            told.losses.append(engine.step(joined).loss)
            self._note(name)
            if engine.step_number == self.saves.get(name):
                engine.save(self.folder / f"saved {name}")
                told.events.append({"what": "saved"})
        if leaves == "be lost":
            wait_until(lambda: self.losing() or bool(self.errors))
        else:
            engine.federation.depart(30.0, hands_over=leaves == "hand over")
            self._note(name)
        engine.close()

    def _note(self, name: str) -> None:
        """Keep what the island has done since."""
        steps, told = self.engines[name].federation.steps, self.told[name]
        for event in steps.events:
            for record in event.records:
                assert self.records.setdefault(record.round, record) == record
            match event.what:
                case "sent":
                    told.events.append({"what": "sent", "fragment": event.fragment, "digest": event.digest})
                case "joining" | "waited":
                    pass  # the reference needs neither
                case what:
                    rounds = [record.round for record in event.records]
                    told.events.append({"what": what, "rounds": rounds, "on_time": event.on_time})
        if steps.events:
            found = digest_of(tensor for anchor in steps._anchors() for tensor in anchor.tensors())
            assert told.digests.setdefault(steps.standing.rounds, found) == found
        steps.events.clear()

    def check(self) -> None:
        """Losses and parameters are those of the reference; anchors have equal bits on all islands."""
        for rounds in {at for told in self.told.values() for at in told.digests}:
            assert len({told.digests[rounds] for told in self.told.values() if rounds in told.digests}) == 1
        any_case = next(iter(self.cases.values()))
        outer = any_case.outer
        assert outer is not None
        unit_of = {name: at for at, names in enumerate(self.units) for name in names}
        wanted = train_federation(
            any_case.model,
            islands={name: told.events for name, told in self.told.items()},
            records={at: record.to_json() for at, record in self.records.items()},
            outer={
                "lr": outer.rate,
                "momentum": outer.inertia,
                "nesterov": outer.optimizer == "nesterov",
                "mix": outer.own_share,
                "tokens": outer.apart is None or outer.apart.weights == "tokens",
            },
            fragment_of=lambda name: outer.fragment_of(unit_of[name], len(self.units)),
            seed=any_case.seed,
            dtype=torch.float64,
            microbatches={name: case.microbatches for name, case in self.cases.items()},
            microbatch=any_case.microbatch,
            optimizer=any_case.make_optimizer,
            clip=any_case.clip,
        )
        for name, told in self.told.items():
            torch.testing.assert_close(torch.tensor(told.losses), torch.tensor(wanted.losses[name]), atol=1e-9, rtol=0)
        for name, engine in self.engines.items():
            for anchor in engine.federation.steps._anchors():
                for part in anchor.slices:
                    held = anchor.own[part.offset : part.offset + part.stop - part.start]
                    value = wanted.parameters[name][part.name].reshape(-1)[part.start : part.stop]
                    assert difference(held, value) < 1e-9, (name, part.name)

    @property
    def counted(self) -> list[list[str]]:
        """The islands whose contributions were counted, by each round that averaged."""
        every = [[each.island for each in self.records[at].contributions] for at in sorted(self.records)]
        return [each for each in every if each]


@pytest.fixture
def ports() -> Iterator[dict[str, int]]:
    with held_ports("abc") as found:
        yield found


def after(steps: int) -> Callable[[Engine], bool]:
    return lambda engine: engine.step_number >= steps


def rounds(count: int) -> Callable[[Engine], bool]:
    """Until the masters follow so many rounds that averaged."""
    return lambda engine: (
        engine.federation.steps.standing.at is not None and engine.federation.steps.standing.at.turn >= count
    )


EVERY = {
    "one fragment": Outer(3, apart=APART),
    "fragments and a delay": Outer(4, fragments=2, delay=1, apart=APART),
    "two in flight": Outer(4, fragments=0, delay=3, mix=0.3, apart=APART),
    "plain averaging, equal weights": Outer(2, optimizer="sgd", apart=replace(APART, weights="equal")),
}


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_islands_that_are_always_there_equal_replicas(name: str, tmp_path: Path, ports: dict[str, int]) -> None:
    case = replace(CASE, outer=EVERY[name])
    islands = Islands(tmp_path, dict.fromkeys("abc", case), ports)
    for island in "abc":
        islands.start(island, after(8))
    islands.join()
    islands.check()
    assert islands.counted == [["a", "b", "c"]] * len(islands.counted)
    for told in islands.told.values():
        last = max(at for at, event in enumerate(told.events) if event["what"] == "stepped")
        followed = [event for event in told.events[3:last] if event["what"] == "followed"]
        averaged = [event for event in followed if any(islands.records[at].contributions for at in event["rounds"])]
        assert all(event["on_time"] for event in averaged)
    read = [at for told in islands.told.values() for event in told.events for at in event.get("samples", ())]
    assert len(set(read)) == len(read), "no sample is read twice"


def test_islands_are_weighted_by_their_tokens(tmp_path: Path, ports: dict[str, int]) -> None:
    """One takes half as many steps between rounds, another has batches twice as large."""
    cases = {"a": CASE, "b": replace(CASE, microbatches=4), "c": replace(CASE, outer=replace(CASE.outer, every=6))}
    islands = Islands(tmp_path, cases, ports)
    for name, steps in {"a": 6, "b": 6, "c": 12}.items():
        islands.start(name, after(steps))
    islands.join()
    islands.check()
    (first,) = [record for record in islands.records.values() if record.turn == 1 and record.contributions]
    for each, steps in zip(first.contributions, (3, 3, 6), strict=True):
        events = [event for event in islands.told[each.island].events if event["what"] == "stepped"][:steps]
        read = [at for event in events for at in event["samples"]]
        labels = [torch.as_tensor(CASE.model.batch(at, 1)["labels"]) for at in read]
        assert each.tokens == sum(int((one != IGNORED_LABEL).sum()) for one in labels)
        assert each.used == len(read)


def test_a_lost_island_is_not_missed_and_a_new_one_takes_its_place(tmp_path: Path, ports: dict[str, int]) -> None:
    outer = Outer(4, fragments=2, delay=1, apart=APART)
    islands = Islands(tmp_path, dict.fromkeys("abc", replace(CASE, outer=outer)), ports)
    # With an empty folder, of other sizes and speed.
    other = Islands(tmp_path / "other disk", {"c": replace(CASE, outer=replace(outer, every=2), microbatches=4)}, ports)
    other.seat = islands.seat
    new = other.engine("c")
    for name in "ab":
        islands.gates[name] = lambda engine: engine.federation.steps.standing.rounds < 8 or islands.has_c_again
        islands.start(name, rounds(12))
    islands.lose_c()
    islands.cases["c"], islands.spare["c"] = other.cases["c"], new
    islands.bring_back_c(rounds(12))
    islands.check()
    assert ["a", "b"] in islands.counted
    assert ["a", "b", "c"] in islands.counted[2:]
    assert [event for event in islands.told["c"].events if event["what"] == "restarted"]


def test_who_came_back_contributes_as_soon_as_others_begin_a_round(tmp_path: Path, ports: dict[str, int]) -> None:
    """It is in the middle of an interval then, and is at its end afterwards."""
    case = replace(CASE, outer=Outer(6, apart=APART))
    islands = Islands(tmp_path, dict.fromkeys("abc", case), ports)
    new = Islands(tmp_path / "other disk", {"c": case}, ports)
    new.seat = islands.seat
    islands.spare["new c"] = new.engine("c")

    for name in "ab":  # c returns in the middle of their second interval, and they wait for it from then on
        islands.gates[name] = lambda engine: engine.step_number < 8 or islands.has_c_again
        islands.start(name, rounds(4))
    islands.lose_c()
    islands.spare["c"] = islands.spare.pop("new c")
    before = len(islands.told["c"].events)
    islands.gates["c"] = lambda engine: (
        engine.federation.steps.standing.rounds > 3 or engine.federation.steps.link.first.behind() > 0
    )
    islands.bring_back_c(rounds(4))
    islands.check()
    assert islands.counted[:2] == [["a", "b"], ["a", "b", "c"]]
    did = [each for each in islands.told["c"].events[before:] if each["what"] in ("stepped", "sent")]
    assert [each["what"] for each in did[:3]] == ["stepped", "sent", "stepped"]
    assert (did[0]["step"], did[2]["step"]) == (6, 12)


def test_islands_that_begin_from_other_values_do_not_hear_each_other(tmp_path: Path, ports: dict[str, int]) -> None:
    islands = Islands(tmp_path, dict.fromkeys("abc", CASE), ports)
    found = {name: islands.engine(name).federation.steps for name in "abc"}
    anchor = next(iter(found["c"]._anchors()))
    anchor.value = anchor.value.clone()
    anchor.value[0] += 1e-9
    for steps in found.values():
        steps.open()
    firsts = {name: steps.link.first for name, steps in found.items()}
    wait_until(lambda: "c" in firsts["a"].refused and {"a", "b"} <= firsts["c"].refused.keys())
    wait_until(lambda: "b" in firsts["a"].heard())
    assert "'c' begins from other values of the parameters" in firsts["a"].refused["c"]
    for steps in found.values():
        steps.close()


def test_a_late_contribution_is_a_part_of_the_next(tmp_path: Path, ports: dict[str, int]) -> None:
    outer = Outer(2, apart=Apart(3, grace=1.0))
    islands = Islands(tmp_path, dict.fromkeys("abc", replace(CASE, outer=outer)), ports)
    # It is slow in its second step, until the others have gone on; these wait for it later.
    islands.gates["c"] = lambda engine: engine.step_number != 1 or _round_of(engine) > 2
    may = islands.waits_for("c", count=5)
    for name in "ab":
        islands.gates[name] = lambda engine: engine.federation.steps.standing.rounds < 3 or may(engine)
    for name in "abc":
        islands.start(name, rounds(5))
    islands.join()
    islands.check()
    assert not any("c" in each for each in islands.counted[:2])
    assert any("c" in each for each in islands.counted)
    assert not [event for event in islands.told["c"].events if event["what"] == "restarted" and event["rounds"][0] > 0]


def test_who_was_late_leaves_out_steps_to_be_in_time(
    tmp_path: Path, ports: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second contribution of an island comes after the round, which is long ago when it knows that."""
    contribute, sent = IslandExchange.contribute, list[int]()

    def late(exchange: IslandExchange, *args: Any, **facts: Any) -> Contribution:
        if exchange.notice.island == "c":
            sent.append(exchange.notice.round)
            wait_until(lambda: len(sent) != 2 or exchange.notice.round > sent[1])
        return contribute(exchange, *args, **facts)

    def since(exchange: IslandExchange, record: RoundRecord, own: str | None = None) -> float:
        counted = {each.island for each in record.contributions}
        return 1e6 if own is None and exchange.notice.island not in counted else 0.0

    monkeypatch.setattr(IslandExchange, "contribute", late)
    monkeypatch.setattr(IslandExchange, "since", since)
    monkeypatch.setattr(IslandExchange, "behind", lambda exchange: 0.0)
    islands = Islands(tmp_path, dict.fromkeys("abc", replace(CASE, outer=Outer(4, apart=Apart(3, grace=1.0)))), ports)
    for name in "abc":
        islands.start(name, rounds(4))
    islands.join()
    islands.check()
    assert ["a", "b"] in islands.counted
    taken = {name: [each["step"] for each in islands.told[name].events if each["what"] == "stepped"] for name in "abc"}
    # Of the next interval it takes one step, and is in time; of the one after it takes all.
    assert taken["c"][8:12] == [11, 12, 13, 14]
    assert taken["a"][:12] == taken["b"][:12] == list(range(12))


def _round_of(engine: Engine) -> int:
    link = engine.federation.steps._link
    return 0 if link is None or link.first is None else link.first.notice.round


def _holds_one_of(engine: Engine, island: str) -> bool:
    """Return True if the engine's island holds a contribution of another one that the round can count."""
    link = engine.federation.steps._link
    assert link is not None
    exchange = link.first
    assert exchange is not None
    own, other = exchange.notice, exchange.heard().get(island)
    offered = () if other is None else other.contributions
    return any(exchange.rules.is_valid(each, own) and each.digest in own.holds for each in offered)


def test_an_island_that_leaves_hands_over_what_it_has_learned(tmp_path: Path, ports: dict[str, int]) -> None:
    outer = Outer(4, fragments=2, apart=APART)
    islands = Islands(tmp_path, dict.fromkeys("abc", replace(CASE, outer=outer)), ports)
    # The others are in the middle of an interval until it has left.
    for name in "ab":
        islands.gates[name] = lambda engine: engine.step_number != 5 or not islands.threads["c"].is_alive()
    islands.start("c", after(5), leaves="hand over")
    for name in "ab":
        islands.start(name, after(12))
    islands.join()
    islands.check()
    assert [each for each in islands.counted if "c" in each][-2:] == [["a", "b", "c"]] * 2
    assert "c" not in islands.counted[-1]
    assert "c" not in {each.island for each in islands.records[max(islands.records)].members}


@pytest.mark.wide(1)
@pytest.mark.parametrize("is_counted", [False, True])
def test_an_island_goes_on_from_its_checkpoint(is_counted: bool, tmp_path: Path, ports: dict[str, int]) -> None:
    """is_counted: the others count what it sent after the checkpoint, and before it was lost."""
    # Who is lost comes back, however long that takes.
    case = replace(CASE, outer=Outer(2, delay=1, apart=replace(APART, grace=1e6)))
    islands = Islands(tmp_path, dict.fromkeys("abc", case), ports, silent=1e5, away=1e6)
    islands.saves["c"] = 3
    may = islands.waits_for("c", count=8)
    for name in "ab":
        islands.gates[name] = lambda engine: engine.federation.steps.standing.rounds < 5 or may(engine)
        islands.start(name, rounds(8))
    if is_counted:
        islands.losing = lambda: islands.counted[1:2] == [["a", "b", "c"]]
    islands.start("c", after(4), leaves="be lost")
    wait_until(lambda: not islands.threads["c"].is_alive())
    before = len(islands.told["c"].events)
    islands.start("c", rounds(8), load=tmp_path / "saved c")
    islands.join()
    islands.check()
    if is_counted:
        assert any(event["what"] == "restarted" for event in islands.told["c"].events[before:])
    assert ["a", "b", "c"] in islands.counted[2:]
