"""DeepSpeed's words as the source of the layout."""

from typing import Any

import pytest

from atoll.base.errors import ConfigError
from atoll.plans.host import HostState
from atoll.plans.layouts import Codec, Codecs, Layout
from atoll.training.config import Config, from_dict
from atoll.training.config.deepspeed import zero_block

_OFFLOADS = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def _read(block: Any, *overrides: str, **parallel: Any) -> Config:
    return from_dict({"parallel": {"zero_optimization": block, **parallel}}, overrides=overrides)


@pytest.mark.parametrize(
    ("block", "layout", "intra"),
    [
        ({}, "NNN", 1),
        ({"stage": 0}, "NNN", 1),
        ({"stage": 1}, "NNG", 1),
        ({"stage": 2}, "NGG", 1),
        ({"stage": 3}, "GGG", 1),
        ({"paro_strategy": "NIG"}, "NIG", 1),
        ({"stage": 3, "mics_shard_size": 8}, "III", 8),
        ({"stage": 3, "mics_shard_size": -1}, "GGG", 1),
        ({"stage": 3, "zero_hpz_partition_size": 8}, "IGG", 8),
        ({"stage": 3, "zero_hpz_partition_size": 1}, "GGG", 1),
        ({"stage": 2, "offload_optimizer": {"device": "none"}, "zero_quantized_weights": False}, "NGG", 1),
    ],
)
def test_words_become_a_layout(block: dict[str, Any], layout: str, intra: int) -> None:
    config = _read(block)
    assert (config.parallel.layout, config.parallel.intra) == (layout, intra)


def test_an_intra_that_agrees_is_fine_and_one_that_disagrees_is_an_error() -> None:
    block = {"stage": 3, "mics_shard_size": 8}
    assert _read(block, intra=8).parallel.intra == 8
    with pytest.raises(ConfigError, match=r"parallel.intra = 4 disagrees .* 8 ranks; remove intra or make it 8"):
        _read(block, intra=4)
    with pytest.raises(ConfigError, match=r"parallel.intra = 1 disagrees"):
        _read({"stage": 3, "zero_hpz_partition_size": 2}, intra=1)
    assert _read({"stage": 2}, intra=4).parallel.intra == 4


def test_hpz_says_what_it_became() -> None:
    (note,) = _read({"stage": 3, "zero_hpz_partition_size": 8}).notes
    assert "becomes layout IGG with intra = 8" in note
    assert "holds less than hpZ and sends no more" in note


def test_parameters_in_host_memory_go_out_and_come_back() -> None:
    host = HostState("update-on-host", parameters="all")
    block = zero_block(Layout("GGG"), 1, host=host)
    assert block is not None
    assert block["offload_param"] == {"device": "cpu", "pin_memory": True}
    config = _read({**block, "offload_param": {"device": "cpu", "buffer_count": 5, "max_in_cpu": 1e9}})
    assert config.parallel.host is not None
    assert config.parallel.host.value == host
    assert any("offload_param becomes parallel.host.parameters = 'all'" in note for note in config.notes)
    assert "offload_param" not in (zero_block(Layout("NGG"), 1, host=host) or {})  # ZeRO-3 alone reads it


@pytest.mark.parametrize(("stage", "is_said"), [(1, False), (2, True), (3, True)])
def test_gradients_of_zero_offload_are_named(stage: int, is_said: bool) -> None:
    notes = _read({"stage": stage, "offload_optimizer": {"device": "cpu"}}).notes
    assert any("unless parallel.host.gradients = true" in note for note in notes) == is_said


def test_words_without_effect_are_noted() -> None:
    config = _read({"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True})
    assert config.parallel.layout == "NGG"
    assert config.notes == tuple(
        f"parallel.zero_optimization.{word} has no effect here"
        for word in ("contiguous_gradients", "overlap_comm", "reduce_bucket_size")
    )


def test_a_stage_beside_a_strategy_is_noted() -> None:
    config = _read({"stage": 2, "paro_strategy": "IIG"})
    assert config.parallel.layout == "IIG"
    assert "stage has no effect beside paro_strategy" in config.notes[0]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"stage": 4}, r"stage = 4: must be 0, 1, 2 or 3"),
        ({"stage": True}, r"stage = True: must be 0, 1, 2 or 3"),
        ({"stag": 2}, r"zero_optimization.stag: unknown word; did you mean 'stage'\?"),
        ({"overlap_com": True}, r"did you mean 'overlap_comm'\?"),
        ({"qqqqqqqq": True}, r"the layout's keys are stage, paro_strategy"),
        ({"paro_strategy": "NIX"}, r"paro_strategy: no layout 'NIX'"),
        ({"paro_strategy": 3}, r"paro_strategy = 3: must be three levels"),
        ({"stage": 2, "mics_shard_size": 8}, r"mics_shard_size = 8 needs stage = 3, the block has stage = 2"),
        ({"mics_shard_size": 8}, r"needs stage = 3, the block has stage = 0"),
        ({"stage": 3, "mics_shard_size": 0}, r"mics_shard_size = 0: must be a number of ranks"),
        ({"stage": 3, "zero_hpz_partition_size": 0}, r"zero_hpz_partition_size = 0"),
        ({"stage": 3, "mics_shard_size": 8, "zero_hpz_partition_size": 8}, r"exclude each other"),
        ({"paro_strategy": "III", "mics_shard_size": 8}, r"exclude each other"),
        ({"stage": 2, "offload_optimizer": {"device": "nvme"}}, r"device = 'nvme': state rests in host memory at most"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0}}, r"ratio = 0: must be a share above 0"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "rate": 1}}, r"offload_optimizer.rate: unknown word"),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, r"rest in host memory with the optimizer's state.* add"),
        ({"stage": 2, **_OFFLOADS}, r"offload_param needs stage = 3, the block has stage = 2"),
        (
            {"stage": 3, **_OFFLOADS, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            r"ratio = 0.5 with offload_p",
        ),
        ({"stage": 3, "offload_param": {"device": "cpu", "size": 1}}, r"offload_param.size: unknown word"),
        (
            {"stage": 3, "offload_param": {"device": "nvme"}},
            r"offload_param.device = 'nvme': state rests in host memory",
        ),
        (
            {"stage": 2, "zero_quantized_weights": True},
            r"zero_quantized_weights needs stage = 3, the block has stage = 2",
        ),
        ({"stage": 3, "zero_quantized_gradients": 1}, r"zero_quantized_gradients = 1: must be true or false"),
        ({"stage": 3, "zeropp_loco_param": True}, r"zeropp_loco_param = True: must be a table"),
        ({"stage": 3, "zero_quantized_nontrainable_weights": True}, r"stored in the training precision"),
        (2, r"zero_optimization = 2: must be a table, as in \{ stage = 2 \}"),
    ],
)
def test_what_cannot_be_read_is_an_error(block: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _read(block)


def test_several_problems_of_a_block_come_together() -> None:
    with pytest.raises(ConfigError, match="3 problems") as caught:
        _read({"stage": 7, "overlap_com": True, "offload_param": {"device": "nvme"}})
    assert all(word in str(caught.value) for word in ("stage = 7", "overlap_com", "offload_param"))


def test_two_sources_of_the_layout_are_an_error() -> None:
    with pytest.raises(ConfigError, match="both choose the layout; keep one"):
        _read({"stage": 2}, layout="IIG")
    with pytest.raises(ConfigError, match="both choose the layout; keep one"):
        from_dict({}, overrides=["parallel.layout=IIG", "parallel.zero_optimization={stage=2}"])


def test_an_override_replaces_the_other_spelling() -> None:
    assert _read({"stage": 2}, "parallel.layout=IIG").parallel.layout == "IIG"
    words = ["parallel.zero_optimization={stage = 2}"]
    assert from_dict({"parallel": {"layout": "IIG"}}, overrides=words).parallel.layout == "NGG"
    assert _read({"stage": 2}, "parallel.zero_optimization.stage=3").parallel.layout == "GGG"


def test_codecs_of_zero_plus_plus() -> None:
    config = _read({"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True})
    codecs = config.parallel.codecs
    assert (codecs.parameter, codecs.gradient, codecs.feedback) == ("int8", "int4", False)
    assert config.parallel.layout == "GGG"
    assert all("between groups" in note for note in config.notes)


def test_the_words_of_a_plan_with_codecs_are_read_back() -> None:
    for codecs in (
        Codecs(Codec("int4"), Codec("int8")),
        Codecs(Codec("int4"), feedback=False),
        Codecs(None, Codec("int8")),
    ):
        block = zero_block(Layout("IGG"), 2, codecs)
        assert block is not None
        assert _read(block).parallel.codecs.value == codecs
    block = zero_block(Layout("GGG"), 1, Codecs(Codec("int8"), Codec("int4")))
    assert block == {"stage": 3}, "DeepSpeed has no words for these"


def test_a_table_beside_the_words_is_an_error() -> None:
    with pytest.raises(ConfigError, match="both choose codecs"):
        from_dict(
            {
                "parallel": {
                    "zero_optimization": {"stage": 3, "zero_quantized_weights": True},
                    "codecs": {"parameter": "int4"},
                }
            }
        )
