"""Exchanges of rows between ranks that divide experts, in programs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from atoll.plans import schedules
from atoll.plans.layouts import Axis, Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.program import Do, Instruction, Operation, Program, Programs
from atoll.program.draw import draw_program, listing
from atoll.program.shape import UnitShape
from atoll.program.traffic import exchanges_of
from atoll.runtime.assemble.describe import programs_of
from atoll.runtime.models import Decoder, DecoderConfig, MixtureConfig

SIZES = {"vocabulary": 16, "layers": 6, "hidden": 8, "heads": 2, "kv_heads": 2, "ffn": 8}
CONFIG = DecoderConfig(**SIZES, mixture=MixtureConfig(experts=4))  # type: ignore[arg-type]


def programs(schedule: str, *, layout: str = "GGG", recompute: str = "none", expert: int = 2) -> Programs:
    plan = Plan(
        MeshShape(pipeline=2, intra=4, expert=expert),
        Layout(layout),
        schedules.build(schedule, ranks=2, microbatches=4),
        1,
        precision=Precision.preset("fp64"),
        recompute=recompute,
    )

    def model() -> Decoder:
        with torch.device("meta"):
            return Decoder(CONFIG)

    return programs_of(model, plan)


Key = tuple[object, ...]


def play(rows: Sequence[Sequence[Program]], places: Callable[[int], int], seed: int) -> bool:
    """Play replicas of a pipeline side by side, in a random order. rows: by replica and pipeline rank.

    A rank waits for its messages, and in an exchange until the other replicas' ranks are in it. Return False if all
    ranks wait.
    """
    random_ = random.Random(seed)
    ranks = [(replica, pp) for replica in range(len(rows)) for pp in range(len(rows[0]))]
    at = dict.fromkeys(ranks, 0)
    sent: set[Key] = set()

    def now(rank: tuple[int, int]) -> Instruction | None:
        program = rows[rank[0]][rank[1]].instructions
        return program[at[rank]] if at[rank] < len(program) else None

    def may(rank: tuple[int, int]) -> bool:
        step = now(rank)
        assert step is not None
        if step.do is Do.RECV_F:
            return (rank[0], "F", step.action.stage - 1, step.action.microbatch) in sent
        if step.do is Do.RECV_B:
            return (rank[0], "B", step.action.stage + 1, step.action.microbatch) in sent
        if exchanges_of(step, rows[rank[0]][rank[1]].shape):
            return all(now((other, rank[1])) == step for other in range(len(rows)))
        return True

    while any(now(rank) is not None for rank in ranks):
        ready = [rank for rank in ranks if now(rank) is not None and may(rank)]
        if not ready:
            return False
        rank = random_.choice(ready)
        step = now(rank)
        assert step is not None
        is_exchange = exchanges_of(step, rows[rank[0]][rank[1]].shape)
        moved = [(other, rank[1]) for other in range(len(rows))] if is_exchange else [rank]
        if step.do in (Do.SEND_F, Do.SEND_B):
            sent.add((rank[0], step.do.sends, step.action.stage, step.action.microbatch))
        for each in moved:
            at[each] += 1
    return True


@pytest.mark.wide(3)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v", "dualpipe-v"])
def test_replicas_that_exchange_never_wait_for_each_other(schedule: str) -> None:
    found = programs(schedule)
    assert all(play([found.ranks, found.ranks], found.placement.rank_of, seed) for seed in range(20))


def test_replicas_with_two_orders_would_wait_for_ever_and_are_told_apart() -> None:
    found = programs("1f1b")
    first, second = found.ranks
    steps = list(first.instructions)
    forwards = [at for at, step in enumerate(steps) if step.do is Do.F and exchanges_of(step, first.shape)]
    one, other = forwards[0], forwards[1]
    steps[one], steps[other] = steps[other], steps[one]
    other_order = object.__new__(Program)
    object.__setattr__(other_order, "instructions", tuple(steps))
    object.__setattr__(other_order, "shape", first.shape)
    assert not play([found.ranks, (other_order, second)], found.placement.rank_of, 0)
    assert other_order.digest != first.digest


def test_a_backward_exchanges_as_often_and_a_recomputed_one_twice() -> None:
    def counts(recompute: str) -> dict[str, set[int]]:
        program = programs("1f1b", recompute=recompute).ranks[0]
        steps, layers = program.instructions, {at for at, block in program.shape.blocks.items() if block.exchanges}
        return {
            do.name: {exchanges_of(each, program.shape) for each in steps if each.do is do and each.of in layers}
            for do in (Do.F, Do.I)
        }

    assert counts("none") == {"F": {2}, "I": {2}}
    assert counts("block") == {"F": {2}, "I": {4}}
    assert not any(block.exchanges for block in programs("1f1b", expert=1).ranks[0].shape.blocks.values())


def test_experts_are_gathered_and_reduced_by_instructions_of_their_own() -> None:
    def of(layout: str, expert: int) -> tuple[list[UnitShape], Counter[Operation]]:
        program = programs("1f1b", layout=layout, expert=expert).ranks[0]
        units = program.shape.units.values()
        own = [unit for unit in units if unit.sharding and unit.sharding.along[Axis.INTRA] == "shard"]
        indices = {unit.index for unit in own}
        return own, Counter(each.do for each in program.instructions if each.of in indices and each.do.is_of_unit)

    shared, dos = of("GGG", 2)
    assert shared
    assert all(unit.whole for unit in shared)
    assert dos[Do.FREE] == dos[Do.WHOLE] + dos[Do.FETCH] > 0
    alone, dos = of("III", 4)
    assert all(not unit.whole and not any(unit.flows.values()) for unit in alone), (
        "level I is N: no other rank has them"
    )
    assert dos[Do.FREE] == dos[Do.REDUCE] == 0
    assert {unit.sharding.layout.name for unit in alone if unit.sharding} == {"NII"}


def test_listing_and_picture_show_exchanges() -> None:
    program = programs("1f1b").ranks[0]
    lines = list(listing(program))
    assert sum(line.endswith(" x2") or " x2 " in line for line in lines) == 2 * 4 * sum(
        block.exchanges > 0 for block in program.shape.blocks.values()
    )
    assert "exchange of rows" in draw_program(program)
    assert "exchange" not in draw_program(programs("1f1b", expert=1).ranks[0])
    assert replace(program.shape.blocks[1], exchanges=0) != program.shape.blocks[1]
