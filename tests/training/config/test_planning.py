"""Config -> Plan: sizes that fit, and what to change where they do not."""

import re
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import AtollError, ConfigError
from atoll.base.toml import value_to_toml
from atoll.plans.host import HostState
from atoll.plans.ir import lower
from atoll.plans.ir.text import from_text, to_csv
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape
from atoll.training.config import Config, from_dict, load


def _config(*, layers: int = 8, batch: int = 16, microbatch: int = 2, **parallel: Any) -> Config:
    return from_dict(
        {
            "model": {"layers": layers},
            "train": {"global_batch": batch, "microbatch": microbatch, "precision": "bf16"},
            "parallel": parallel,
        }
    )


def test_a_plan_has_what_the_config_says() -> None:
    plan = _config(ranks=8, pipeline=2, intra=2, layout="IIG", recompute="block", schedule="gpipe").to_plan()
    assert plan.mesh == MeshShape(pipeline=2, inter=2, intra=2, tensor=1)
    assert plan.layout == Layout("IIG")
    assert plan.precision == Precision.preset("bf16")
    assert (plan.schedule.name, plan.schedule.ranks, plan.schedule.microbatches) == ("gpipe", 2, 2)
    assert (plan.recompute, plan.microbatch, plan.global_batch) == ("block", 2, 16)


def test_the_launched_world_decides() -> None:
    config = _config(ranks=4, pipeline=2)
    assert config.to_plan().mesh.world == 4
    assert config.to_plan(world=8).mesh == MeshShape(pipeline=2, inter=4)


def test_a_world_that_does_not_factor() -> None:
    with pytest.raises(ConfigError) as caught:
        _config(ranks=6, pipeline=4).to_plan()
    assert str(caught.value) == (
        "parallel.ranks = 6 is not a multiple of pipeline * tensor * intra = 4 * 1 * 1 = 4; "
        "use 4 or 8 ranks, or a pipeline of 1 or 2 or 3 or 6"
    )
    with pytest.raises(ConfigError, match=r"the launched world = 3 .* = 2 \* 1 \* 2 = 4; use 4 ranks"):
        _config(ranks=4, pipeline=2, intra=2).to_plan(world=3)
    with pytest.raises(ConfigError, match="the launched world = 0"):
        _config().to_plan(world=0)


def test_a_batch_that_does_not_factor() -> None:
    with pytest.raises(ConfigError) as caught:
        _config(ranks=4, pipeline=2, batch=18, microbatch=4).to_plan()
    assert str(caught.value) == (
        "train.global_batch = 18 is not a multiple of train.microbatch * data-parallel ranks = 4 * 2 = 8; "
        "use a global_batch of 16 or 24, or a microbatch of 1 or 3"
    )
    with pytest.raises(ConfigError, match=r"4 \* 8 = 32; use a global_batch of 32$"):
        _config(ranks=8, batch=18, microbatch=4).to_plan()


def test_more_stages_than_blocks() -> None:
    with pytest.raises(ConfigError) as caught:
        _config(layers=1, ranks=4, pipeline=4).to_plan()
    assert str(caught.value) == (
        "parallel.pipeline = 4 with schedule '1f1b' and model.layers = 1 makes 4 stages for 3 blocks: each stage needs "
        "at least one; use at most 3 stages (pipeline x chunks) or a deeper model"
    )
    assert _config(layers=2, ranks=4, pipeline=4).to_plan().schedule.stages == 4


def test_layers_by_hand() -> None:
    assert _config(ranks=2, pipeline=2, layers_per_stage=[6, 2]).to_plan().layers_per_stage == (6, 2)
    assert _config(ranks=4, pipeline=4, layers_per_stage=[0, 4, 4, 0]).to_plan().layers_per_stage == (0, 4, 4, 0)
    with pytest.raises(ConfigError) as caught:
        _config(ranks=2, pipeline=2, layers_per_stage=[3, 3, 3]).to_plan()
    assert str(caught.value) == (
        "parallel.layers_per_stage = [3, 3, 3]: it has 3 numbers for 2 stages; give one a stage; its sum is 9, and "
        "there are 8 layers, 'layers.0' to 'layers.7'"
    )
    with pytest.raises(ConfigError, match=r"layers_per_stage.* greater than or equal to 0"):
        _config(ranks=2, pipeline=2, layers_per_stage=[9, -1])


def test_an_unknown_schedule_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"parallel.schedule: .*'1f1p'.*did you mean '1f1b'"):
        _config(schedule="1f1p").to_plan()


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (_config(ranks=5, pipeline=4, schedule="gpip"), ["parallel.ranks = 5", "did you mean 'gpipe'"]),
        (_config(layers=1, ranks=8, pipeline=4, batch=7), ["train.global_batch = 7", "model.layers = 1"]),
    ],
)
def test_problems_come_together(config: Config, parts: list[str]) -> None:
    with pytest.raises(ConfigError, match="2 problems") as caught:
        config.to_plan()
    assert all(part in str(caught.value) for part in parts)


def test_parts_of_a_sequence_are_of_one_size() -> None:
    config = _config(ranks=4, tensor=2, intra=2, sequence_parallel=True)
    assert config.to_plan().sequence_parallel
    odd = config.model_copy(update={"data": config.data.model_copy(update={"sequence": 33})})
    with pytest.raises(ConfigError, match=r"data.sequence = 33 is not a multiple of parallel.tensor = 2.* use 32"):
        odd.to_plan()


ORDER = """\
# mine: line, ranks 2, chunks 1, microbatches 4
0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
"""


def test_an_order_is_given_as_text_or_in_a_file(tmp_path: Path) -> None:
    order = from_text(ORDER)
    plan = _config(ranks=4, pipeline=2, schedule=ORDER).to_plan()
    assert plan.schedule == order
    path = tmp_path / "mine.csv"
    for written in (order, lower(order)):  # what a plan adds is left out
        path.write_text(to_csv(written), encoding="utf-8")
        read = _config(ranks=4, pipeline=2, schedule=str(path)).to_plan().schedule
        assert (read.name, read.placement, read.actions) == (str(path), order.placement, order.actions)


def test_a_config_with_an_order_is_read_back() -> None:
    config = _config(ranks=4, pipeline=2, schedule=ORDER)
    assert from_dict(tomllib.loads(config.dump())) == config
    assert load_override(config, ORDER).to_plan() == config.to_plan()


def load_override(config: Config, order: str) -> Config:
    """The config with its order as `--set` gives it."""
    values = tomllib.loads(config.dump())
    values["parallel"]["schedule"] = "1f1b"
    return from_dict(values, overrides=[f"parallel.schedule={value_to_toml(order)}"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_config(ranks=4, pipeline=4, schedule=ORDER), "is for 2 pipeline ranks, parallel.pipeline makes 4"),
        (_config(ranks=2, pipeline=2, schedule=ORDER), "is for 4 microbatches, train.global_batch makes 8"),
        (_config(ranks=4, pipeline=2, chunks=2, schedule=ORDER), "is for 1 stages a rank, parallel.chunks makes 2"),
        (
            _config(ranks=4, pipeline=2, schedule=ORDER.replace("mine", "1f1b")),
            "has the name of a schedule that Atoll builds; give it another",
        ),
        (_config(ranks=4, pipeline=2, schedule="nowhere.csv"), "cannot read the schedule nowhere.csv"),
        (_config(ranks=4, pipeline=2, schedule=ORDER.replace("1B3", "")), "1B3"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        config.to_plan()
    assert "parallel.schedule: " in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"layers": 1_000_000}}, "model.layers = 1000000: must be less than or equal to 1000"),
        (
            {"parallel": {"ranks": 65536, "pipeline": 65536}, "train": {"global_batch": 65536, "microbatch": 1}},
            "has 4,294,967,296 forwards a step",
        ),
        ({"train": {"global_batch": 10**15, "microbatch": 3}}, "global_batch = 1000000000000000: must be less than"),
        ({"train": {"global_batch": 2**31 - 1, "microbatch": 2}}, "is not a multiple of train.microbatch"),
    ],
)
def test_sizes_that_would_compute_for_long_are_refused_at_once(sections: dict[str, Any], words: str) -> None:
    begun = time.thread_time()
    with pytest.raises(ConfigError, match=re.escape(words)):
        from_dict(sections).to_plan()
    assert time.thread_time() - begun < 30  # of processor time


def test_a_split_decoder_is_compiled_with_split_sequences_alone() -> None:
    """The ranks started, and the first backward ended in an AttributeError of torch."""
    parallel = {"ranks": 2, "tensor": 2, "compile": "block-eager"}
    with pytest.raises(ConfigError, match=r"parallel\.sequence_parallel = true"):
        from_dict({"parallel": parallel}).to_plan()
    assert from_dict({"parallel": {**parallel, "sequence_parallel": True}}).to_plan().mesh.tensor == 2


def test_balance_without_experts_or_biases() -> None:
    def problems(**options: object) -> str:
        given = {"train": {"router": {"bias_rate": 0.001}}, "model": {"config": options}}
        with pytest.raises(ConfigError) as caught:
            from_dict(given).to_plan()
        return str(caught.value)

    assert "set model.config.experts, or leave it out" in problems()
    assert "set model.config.selection_bias = true" in problems(experts=4)


@pytest.mark.parametrize(("written", "found"), [
    ('"update-on-host"', HostState("update-on-host")),
    ('{ optimizer = "update-on-device", fraction = 0.5, budget = 1000 }', HostState("update-on-device", 0.5, 1000)),
    ("{ activations = [1, 0.5] }", HostState(activations=(1.0, 0.5))),
    ("false", None),
])  # fmt: skip
def test_host_memory_is_a_table_or_a_word(written: str, found: HostState | None, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[parallel]\npipeline = 2\nranks = 2\nhost = {written}\n")
    assert load(path).to_plan().host == found
    assert load(path, ["parallel.host=false"]).to_plan().host is None


@pytest.mark.parametrize("written", ["1.5", "[0.5, -1]", "[]", '"auto"', "true"])
def test_shares_of_activations_are_numbers_from_0_to_1(written: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[parallel.host]\nactivations = {written}\n")
    with pytest.raises(
        ConfigError, match=r"parallel\.host\.activations.*must be a share from 0 to 1, or a list with a"
    ):
        load(path)


def test_shares_of_stages_are_written_and_need_a_share_for_each(tmp_path: Path) -> None:
    config = from_dict({"parallel": {"pipeline": 2, "ranks": 2, "host": {"activations": [1.0, 0.5]}}})
    path = tmp_path / "run.toml"
    path.write_text(config.dump())
    assert load(path) == config
    with pytest.raises(AtollError, match=r"of 2 stages, and the schedule has 1; give a share for each, or one number"):
        load(path, ["parallel.pipeline=1"]).to_plan()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"train": {"objective": "masked"}, "data": {"packing": "documents"}},
            r"masks tokens of joined text; it is not",
        ),
        ({"train": {"epochs": 2.0}, "data": {"streaming": True}}, "number of samples in an epoch is unknown"),
        ({"train": {"patience": 2}, "data": {"validation": 0.0}}, "patience = 2 needs a validation loss"),
    ],
)
def test_what_is_trained_for_needs_its_data(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_dict(values).to_plan()
