"""What is described before a run is what ranks play."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from atoll.plans.ir.residency import Residency
from atoll.program import Do, Program
from atoll.program.sim import Rates, simulate
from atoll.runtime.assemble.describe import describe_rank, programs_of
from atoll.runtime.models import Decoder, DecoderConfig
from atoll.testing import run_ranks
from atoll.testing.parity import Case
from atoll.testing.tiny import TinyConfig

EVERYTHING = TinyConfig.everything()


class Splittable:
    """The built-in decoder, which has a tensor plan."""

    def build(self) -> nn.Module:
        return Decoder(DecoderConfig(vocabulary=16, layers=3, hidden=8, heads=2, kv_heads=2, ffn=12))


CASES = {
    "one rank": Case(),
    "two levels": Case("GGG", inter=2, intra=2, microbatches=8, model=EVERYTHING),
    "two levels, by messages": Case("GGG", inter=2, intra=2, microbatches=8, reads_in_place=False),
    "a pipeline": Case("IIG", pipeline=2, intra=2, schedule="zb-v", model=EVERYTHING, residency="run", reduction="run"),
    "post-validated halves": Case("NNG", pipeline=2, intra=2, precision="bf16", post_validation=True),
    "recomputed": Case("GGG", pipeline=2, intra=2, recompute="block", prefetch=0, unit=2, model=TinyConfig(layers=6)),
    "a split vocabulary": Case(
        "GGG", pipeline=2, intra=2, vocabulary_parallel=True, model=TinyConfig(layers=4, vocabulary=40)
    ),
    "slices that stay": Case(
        "GGG",
        pipeline=2,
        intra=2,
        vocabulary_parallel=True,
        model=TinyConfig(layers=4, vocabulary=40, tied=True),
        residency="run",
        reduction="run",
    ),
    "slices beside a tensor-parallel group": Case(
        "IIG", pipeline=2, intra=2, tensor=2, vocabulary_parallel=True, model=TinyConfig(layers=4, vocabulary=40)
    ),
    "a tensor-parallel group": Case("GGG", intra=2, tensor=2, model=Splittable()),  # type: ignore[arg-type]
}


def meta_model(case: Case) -> nn.Module:
    with torch.device("meta"):
        return case.model.build()


def programs_that_ranks_have(case: Case) -> tuple[int, Program, bool]:
    engine = case.engine()
    engine.close()
    return engine.place.pp, engine.program, engine.reads_in_place


@pytest.mark.wide(2)
@pytest.mark.parametrize("name", CASES)
def test_the_programs_that_are_described_are_those_that_ranks_play(name: str) -> None:
    case = CASES[name]
    for rank, program, in_place in run_ranks(programs_that_ranks_have, case.ranks, case):
        found = describe_rank(lambda: meta_model(case), case.plan, rank, reads_in_place=in_place).program
        assert found.instructions == program.instructions
        assert found.shape == program.shape
        assert found.peaks == program.peaks


def test_a_large_model_is_described_without_its_memory() -> None:
    """Eighty blocks of a gigabyte each."""
    sizes = DecoderConfig(vocabulary=32_000, layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28_672)
    case = replace(Case("GGG", pipeline=4, inter=2, intra=8, precision="bf16"), microbatches=16 * 8)

    def model() -> nn.Module:
        with torch.device("meta"):
            return Decoder(sizes)

    program = describe_rank(model, case.plan, 3).program
    assert sum(unit.whole for unit in program.shape.units.values()) > 30e9
    assert 2 * 1.7e9 < program.peaks.parameters < 4 * 1.8e9


def test_slices_of_a_vocabulary_stay_where_there_is_room() -> None:
    case = replace(CASES["slices that stay"], microbatches=16)

    def gathers(resident: int | None, residency: Residency) -> int:
        plan = replace(case.plan, resident=resident, residency=residency)
        program = describe_rank(lambda: meta_model(case), plan, 1).program
        slices = set(program.shape.slices.values())
        return sum(each.do in (Do.WHOLE, Do.FETCH) and each.of in slices for each in program.instructions)

    # 8 microbatches on a rank, looked up and scored; where a row turns round a slice stays anyway.
    assert gathers(1 << 20, "run") == gathers(None, "step") == 1
    assert 1 < gathers(None, "run") <= gathers(0, "run") <= gathers(None, "action") <= 16


def test_the_programs_of_all_ranks_can_be_simulated() -> None:
    case = CASES["a pipeline"]
    programs = programs_of(lambda: meta_model(case), case.plan)
    assert [program.shape.rank for program in programs.ranks] == [0, 1]
    one = simulate(programs, Rates({(do, block): 1.0 for do in (Do.F, Do.I) for block in range(8)}))
    assert one.makespan > 0
    forward = programs_of(lambda: meta_model(case), case.plan, training=False)
    assert not any(each.do in (Do.I, Do.STEP) for program in forward.ranks for each in program.instructions)
