"""Translation between DeepSpeed's `zero_optimization` block and a layout with a group size."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from atoll.base.errors import LayoutError
from atoll.plans.host import TRAINED_TOO, HostState
from atoll.plans.layouts import NO_CODECS, Codecs, Layout

WHERE = "parallel.zero_optimization"

LAYOUT_WORDS = ("stage", "paro_strategy", "mics_shard_size", "zero_hpz_partition_size")

PARAMETER_WORDS = ("offload_param", "cpu_offload_params")
"""Keys of parameters that rest in host memory."""

OPTIMIZER_WORDS = ("offload_optimizer", "cpu_offload")
"""Keys of the optimizer's state there."""

OFFLOAD_WORDS = (*PARAMETER_WORDS, *OPTIMIZER_WORDS, "cpu_offload_use_pin_memory")

_OF_PARAMETERS = ("device", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "nvme_path")
"""Keys of `offload_param`. `max_in_cpu` is of parameters on a disk."""

ON_HOST = "update-on-host"
"""`parallel.host.optimizer` as ZeRO-Offload has it: its Adam steps in host memory."""

_OF_OPTIMIZER = ("device", "ratio", "pin_memory", "buffer_count", "fast_init", "nvme_path")
"""Keys of `offload_optimizer`. Memory is pinned where the device is a GPU; buffers are as large as what rests there."""

_TABLES = {"offload_param": _OF_PARAMETERS, "offload_optimizer": _OF_OPTIMIZER}

QUANTIZED_WORDS = ("zero_quantized_weights", "zero_quantized_gradients", "zeropp_loco_param")

STORED_WORD = "zero_quantized_nontrainable_weights"

WEIGHTS, GRADIENTS = "int8", "int4"
"""The codecs of ZeRO++."""

LOCO = {"err_beta": 0.8, "reset_T": 1024}
"""Its error feedback, as DeepSpeed's documentation has it."""

NO_EFFECT_WORDS = (
    *("allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "elastic_checkpoint"),
    *("gather_16bit_weights_on_model_save", "grad_hooks", "ignore_unused_parameters", "leaf_module"),
    *("legacy_stage1", "load_from_fp32_weights", "log_trace_cache_warnings", "max_live_parameters"),
    *("max_reuse_distance", "memory_efficient_linear", "mics_hierarchical_params_gather"),
    *("model_persistence_threshold", "module_granularity_threshold", "overlap_comm", "override_module_apply"),
    *("param_persistence_threshold", "pipeline_loading_checkpoint", "prefetch_bucket_size", "reduce_bucket_size"),
    *("reduce_scatter", "round_robin_gradients", "stage3_gather_16bit_weights_on_model_save"),
    *("stage3_gather_fp16_weights_on_model_save", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
    *("stage3_model_persistence_threshold", "stage3_module_granularity_threshold"),
    *("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "stage3_use_all_reduce_for_fetch_params"),
    *("sub_group_size", "use_all_reduce_for_fetch_params", "use_multi_rank_bucket_allreduce"),
)
"""Keys that are valid in DeepSpeed but only tune how it moves data. They affect neither results nor where state is
stored."""

_STAGES = ("NNN", "NNG", "NGG", "GGG")
_GROUPED = {"III": "mics_shard_size", "IGG": "zero_hpz_partition_size"}


@dataclass(frozen=True, slots=True)
class Translation:
    """Meaning of a block. layout: None if the block is invalid, see problems.  intra: None if it sets no group size.
    codecs: keys of [parallel.codecs].  host: keys of [parallel.host].
    """

    layout: str | None
    intra: int | None = None
    codecs: Mapping[str, Any] = field(default_factory=dict)
    host: Mapping[str, Any] = field(default_factory=dict)
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
    found = _choose(block, notes)
    return found if found.layout is None else _with_host(_with_codecs(found, block), block)


def zero_block(
    layout: Layout, intra: int, codecs: Codecs = NO_CODECS, host: HostState | None = None
) -> dict[str, Any] | None:
    """Return the block that `translate` reads as a layout with groups of `intra` ranks, or None if DeepSpeed cannot
    express it. Codecs that it cannot express are left out, as are steps on the device of state in host memory."""
    found: dict[str, Any] | None = None
    if layout.name in _STAGES:
        found = {"stage": _STAGES.index(layout.name)}
    elif intra > 1 and layout.name in _GROUPED:
        found = {"stage": 3, _GROUPED[layout.name]: intra}
    if found is not None and found["stage"] > 0 and host is not None and host.optimizer == ON_HOST:
        share = {} if host.fraction == 1 else {"ratio": host.fraction}
        found["offload_optimizer"] = {"device": "cpu", "pin_memory": True, **share}
        if found["stage"] == 3 and host.parameters == TRAINED_TOO:
            found["offload_param"] = {"device": "cpu", "pin_memory": True}
    if found is not None and found["stage"] == 3:
        if codecs.parameter is not None and codecs.parameter.name == WEIGHTS:
            found["zero_quantized_weights"] = True
        if codecs.gradient is not None and codecs.gradient.name == GRADIENTS:
            found["zero_quantized_gradients"] = True
            if codecs.feedback:
                found["zeropp_loco_param"] = dict(LOCO)
    return found


def _with_codecs(found: Translation, block: Mapping[str, Any]) -> Translation:
    """Return the translation with the codecs of ZeRO++."""
    weights, gradients = (block.get(word, False) is True for word in QUANTIZED_WORDS[:2])
    has_feedback = block.get("zeropp_loco_param") is not None
    if not (weights or gradients):
        return found
    if "paro_strategy" not in block and block.get("stage", 0) != 3:
        words = " and ".join(word for word in QUANTIZED_WORDS[:2] if block.get(word, False) is True)
        return _problem(f"{WHERE}: {words} needs stage = 3, the block has stage = {block.get('stage', 0)}")
    codecs: dict[str, Any] = {}
    notes = list(found.notes)
    if weights:
        codecs["parameter"] = WEIGHTS
        notes.append(f"{WHERE}.zero_quantized_weights becomes parallel.codecs.parameter = {WEIGHTS!r}, between groups")
    if gradients:
        codecs |= {"gradient": GRADIENTS, "feedback": has_feedback}
        notes.append(
            f"{WHERE}.zero_quantized_gradients becomes parallel.codecs.gradient = {GRADIENTS!r}, between groups, "
            + ("with" if has_feedback else "without")
            + " error feedback; inside a group gradients are not encoded"
        )
    return replace(found, codecs=codecs, notes=tuple(notes))


def _with_host(found: Translation, block: Mapping[str, Any]) -> Translation:
    """Return the translation with the optimizer's state, and perhaps all parameters, in host memory."""
    given = block.get("offload_optimizer")
    parameters = next((word for word in PARAMETER_WORDS if _rests(block.get(word))), None)
    if not _rests(given) and not _rests(block.get("cpu_offload")):
        if parameters is None:
            return found
        return _problem(
            f"{WHERE}.{parameters}: parameters rest in host memory with the optimizer's state, which takes more of the "
            "device; add offload_optimizer. Frozen ones alone rest there with parallel.host.parameters = 'frozen'"
        )
    ratio = given.get("ratio", 1.0) if isinstance(given, Mapping) else 1.0
    host = {"optimizer": ON_HOST} | ({} if ratio == 1 else {"fraction": ratio})
    word = "offload_optimizer" if _rests(given) else "cpu_offload"
    notes = [f"{WHERE}.{word} becomes parallel.host.optimizer = {ON_HOST!r}"]
    if parameters is not None:
        if "paro_strategy" not in block and block.get("stage", 0) != 3:
            return _problem(f"{WHERE}: {parameters} needs stage = 3, the block has stage = {block.get('stage', 0)}")
        if ratio != 1:
            return _problem(
                f"{WHERE}.{word}.ratio = {ratio} with {parameters}: parameters rest in host memory with the whole "
                "state; use ratio = 1, or leave the parameters on the device"
            )
        host["parameters"] = TRAINED_TOO
        notes.append(f"{WHERE}.{parameters} becomes parallel.host.parameters = {TRAINED_TOO!r}")
    if "paro_strategy" not in block and block.get("stage", 0) > 1:
        notes.append(
            f"{WHERE}.{word}: DeepSpeed accumulates gradients in host memory in this stage; here they stay on the "
            "device until the step, unless parallel.host.gradients = true"
        )
    return replace(found, host=host, notes=(*found.notes, *notes))


def _rests(value: Any) -> bool:
    """Return True if an offload is on."""
    return value not in (None, False) and not (isinstance(value, Mapping) and value.get("device", "none") == "none")


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
        return Translation("III", mics, notes=tuple(notes))
    notes.append(
        f"{WHERE}.zero_hpz_partition_size = {hpz} becomes layout IGG with intra = {hpz}: it keeps the copy inside the "
        f"group and not the one over all ranks, so it holds less than hpZ and sends no more"
    )
    return Translation("IGG", hpz, notes=tuple(notes))


def _problem(text: str) -> Translation:
    return Translation(None, problems=(text,))


def _refused(block: Mapping[str, Any]) -> list[str]:
    problems = []
    for word in _TABLES:
        given = block.get(word)
        if isinstance(given, Mapping) and given.get("device", "none") not in ("none", "cpu"):
            problems.append(
                f"{WHERE}.{word}.device = {given['device']!r}: state rests in host memory at most: a disk gives "
                'less than a tenth of its bytes a second; use "cpu"'
            )
    if block.get(STORED_WORD, False) is not False:
        problems.append(
            f"{WHERE}.{STORED_WORD}: frozen parameters are stored in the training precision; remove it, and encode "
            "them between groups with zero_quantized_weights"
        )
    return problems


def _unknown(block: Mapping[str, Any]) -> list[str]:
    known = (*LAYOUT_WORDS, *OFFLOAD_WORDS, *QUANTIZED_WORDS, STORED_WORD, *NO_EFFECT_WORDS)
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
    problems.extend(
        f"{WHERE}.{word} = {block[word]!r}: must be true or false"
        for word in QUANTIZED_WORDS[:2]
        if type(block.get(word, False)) is not bool
    )
    loco = block.get("zeropp_loco_param")
    if loco is not None and not isinstance(loco, Mapping):
        problems.append(f"{WHERE}.zeropp_loco_param = {loco!r}: must be a table, as in {LOCO}")
    for word, words in _TABLES.items():
        given = block.get(word)
        if isinstance(given, Mapping):
            problems += [
                f"{WHERE}.{word}.{key}: unknown word; known: {', '.join(words)}" for key in given if key not in words
            ]
    given = block.get("offload_optimizer")
    if isinstance(given, Mapping):
        ratio = given.get("ratio", 1.0)
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
            problems.append(f"{WHERE}.offload_optimizer.ratio = {ratio!r}: must be a share above 0, up to 1")
    mics = block.get("mics_shard_size", -1)
    if type(mics) is not int or (mics < 1 and mics != -1):
        problems.append(f"{WHERE}.mics_shard_size = {mics!r}: must be a number of ranks, or -1 for none")
    hpz = block.get("zero_hpz_partition_size", 1)
    if type(hpz) is not int or hpz < 1:
        problems.append(f"{WHERE}.zero_hpz_partition_size = {hpz!r}: must be a number of ranks, 1 for none")
    return problems
