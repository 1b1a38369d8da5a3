"""Translation between DeepSpeed's `zero_optimization` block and a layout with a group size."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.errors import LayoutError
from atoll.layouts import Layout

WHERE = "parallel.zero_optimization"

LAYOUT_WORDS = ("stage", "paro_strategy", "mics_shard_size", "zero_hpz_partition_size")

OFFLOAD_WORDS = (
    "offload_param",
    "offload_optimizer",
    "cpu_offload",
    "cpu_offload_params",
    "cpu_offload_use_pin_memory",
)

QUANTIZED_WORDS = (
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
    "zeropp_loco_param",
)

NO_EFFECT_WORDS = (
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "elastic_checkpoint",
    "gather_16bit_weights_on_model_save",
    "grad_hooks",
    "ignore_unused_parameters",
    "leaf_module",
    "legacy_stage1",
    "load_from_fp32_weights",
    "log_trace_cache_warnings",
    "max_live_parameters",
    "max_reuse_distance",
    "memory_efficient_linear",
    "mics_hierarchical_params_gather",
    "model_persistence_threshold",
    "module_granularity_threshold",
    "overlap_comm",
    "override_module_apply",
    "param_persistence_threshold",
    "pipeline_loading_checkpoint",
    "prefetch_bucket_size",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
    "use_all_reduce_for_fetch_params",
    "use_multi_rank_bucket_allreduce",
)
"""Keys that are valid in DeepSpeed but only tune how it moves data. They affect neither results nor where state is
stored."""

_STAGES = ("NNN", "NNG", "NGG", "GGG")


@dataclass(frozen=True, slots=True)
class Translation:
    """Meaning of a block. layout: None if the block is invalid, see problems.  intra: None if it sets no group size."""

    layout: str | None
    intra: int | None = None
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def translate(block: Any) -> Translation:
    """Translate a `zero_optimization` block. Never raises; the result lists every problem."""
    if not isinstance(block, Mapping):
        return Translation(None, problems=(f"{WHERE} = {block!r}: must be a table, as in {{ stage = 2 }}",))
    problems = [*_refused(block), *_unknown(block), *_ill_typed(block)]
    if problems:
        return Translation(None, problems=tuple(problems))
    ignored = sorted(word for word in block if word in NO_EFFECT_WORDS)
    notes = [f"{WHERE}.{word} has no effect here" for word in ignored]
    return _choose(block, notes)


def zero_block(layout: Layout, intra: int) -> dict[str, Any] | None:
    """Return the block that `translate` reads as a layout with groups of `intra` ranks, or None if DeepSpeed cannot
    express it."""
    match layout.name:
        case "III" if intra > 1:
            return {"stage": 3, "mics_shard_size": intra}
        case "IGG" if intra > 1:
            return {"stage": 3, "zero_hpz_partition_size": intra}
    return {"stage": _STAGES.index(layout.name)} if layout.name in _STAGES else None


def _choose(block: Mapping[str, Any], notes: list[str]) -> Translation:
    """Return the layout and group size of a block with known keys and valid types."""
    mics = block.get("mics_shard_size", -1)
    hpz = block.get("zero_hpz_partition_size", 1)
    strategy = block.get("paro_strategy")
    grouping = [word for word, given in (("mics_shard_size", mics > 0), ("zero_hpz_partition_size", hpz > 1)) if given]
    sources = [*(["paro_strategy"] if strategy is not None else []), *grouping]
    if len(sources) > 1:
        return _problem(f"{WHERE}: {' and '.join(sources)} exclude each other; keep one and give the group as intra")

    if strategy is not None:
        try:
            layout = Layout.parse(strategy)
        except LayoutError as error:
            return _problem(f"{WHERE}.paro_strategy: {error}")
        if "stage" in block:
            notes.append(f"{WHERE}.stage has no effect beside paro_strategy, which names all three levels")
        return Translation(layout.name, notes=tuple(notes))

    stage = block.get("stage", 0)
    if not grouping:
        return Translation(_STAGES[stage], notes=tuple(notes))
    if stage != 3:
        return _problem(f"{WHERE}: {grouping[0]} = {block[grouping[0]]} needs stage = 3, the block has stage = {stage}")
    if grouping == ["mics_shard_size"]:
        return Translation("III", mics, tuple(notes))
    notes.append(
        f"{WHERE}.zero_hpz_partition_size = {hpz} becomes layout IGG with intra = {hpz}: it keeps the copy inside the "
        f"group and not the one over all ranks, so it holds less than hpZ and sends no more"
    )
    return Translation("IGG", hpz, tuple(notes))


def _problem(text: str) -> Translation:
    return Translation(None, problems=(text,))


def _refused(block: Mapping[str, Any]) -> list[str]:
    problems = []
    for word in OFFLOAD_WORDS:
        value = block.get(word, False)
        off = value is False or (isinstance(value, Mapping) and value.get("device", "none") == "none")
        if not off:
            problems.append(
                f"{WHERE}.{word}: offload to CPU or NVMe is not supported; remove it and use a finer layout "
                f"(IGG, GGG), more ranks or recompute to save memory"
            )
    problems.extend(
        f"{WHERE}.{word}: quantized communication is not supported; remove it; values are sent in the training "
        "precision"
        for word in QUANTIZED_WORDS
        if block.get(word, False) is not False
    )
    return problems


def _unknown(block: Mapping[str, Any]) -> list[str]:
    known = (*LAYOUT_WORDS, *OFFLOAD_WORDS, *QUANTIZED_WORDS, *NO_EFFECT_WORDS)
    problems = []
    for word in block:
        if word in known:
            continue
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the layout's keys are {', '.join(LAYOUT_WORDS)}"
        problems.append(f"{WHERE}.{word}: unknown word; {hint}")
    return problems


def _ill_typed(block: Mapping[str, Any]) -> list[str]:
    problems = []
    stage = block.get("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:
        problems.append(f"{WHERE}.stage = {stage!r}: must be 0, 1, 2 or 3")
    strategy = block.get("paro_strategy", "NNN")
    if not isinstance(strategy, str):
        problems.append(f"{WHERE}.paro_strategy = {strategy!r}: must be three levels, as in 'NIG'")
    mics = block.get("mics_shard_size", -1)
    if type(mics) is not int or (mics < 1 and mics != -1):
        problems.append(f"{WHERE}.mics_shard_size = {mics!r}: must be a number of ranks, or -1 for none")
    hpz = block.get("zero_hpz_partition_size", 1)
    if type(hpz) is not int or hpz < 1:
        problems.append(f"{WHERE}.zero_hpz_partition_size = {hpz!r}: must be a number of ranks, 1 for none")
    return problems
