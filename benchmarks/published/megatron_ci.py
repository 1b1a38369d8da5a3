"""Rows of Megatron-LM's functional tests, which list the arguments of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atoll.plans.layouts import Layout
from atoll.plans.plan import MeshShape
from atoll.prediction.cost import Transformer
from benchmarks.published.record import Fields, Published
from benchmarks.published.sizes import UnclearError, padded

CASES = "tests/functional_tests/test_cases/"

UNDERSTOOD = frozenset(
    {
        "attention-backend",
        "attention-dropout",
        "bf16",
        "cross-entropy-loss-fusion",
        "data-parallel-sharding-strategy",
        "decoder-first-pipeline-num-layers",
        "decoder-last-pipeline-num-layers",
        "disable-bias-linear",
        "ffn-hidden-size",
        "fp16",
        "group-query-attention",
        "hidden-dropout",
        "kv-channels",
        "make-vocab-size-divisible-by",
        "no-gradient-accumulation-fusion",
        "normalization",
        "num-distributed-optimizer-instances",
        "num-layers-per-virtual-pipeline-stage",
        "num-query-groups",
        "overlap-grad-reduce",
        "overlap-param-gather",
        "position-embedding-type",
        "recompute-granularity",
        "recompute-method",
        "recompute-num-layers",
        "sequence-parallel",
        "swiglu",
        "tensor-model-parallel-size",
        "tokenizer-type",
        "transformer-impl",
        "untie-embeddings-and-output-weights",
        "use-megatron-fsdp",
        "vocab-size",
    }
)
"""Arguments that are read, or that change neither sizes nor the plan. A row with another one is left out."""

VOCABULARIES: Mapping[str, int] = {"gpt": 50_257, "bert": 30_522}
"""Vocabulary sizes for tests that do not name a tokenizer: those of GPT-2 and of uncased BERT."""

SHARDED: Mapping[str, str] = {
    "no_shard": "NNN",
    "optim": "NNG",
    "optim_grads": "NGG",
    "optim_grads_params": "GGG",
}
"""Layout for each sharding strategy of Megatron-FSDP."""

Arguments = Mapping[str, str]


def megatron_ci(row: Fields) -> Published:
    """Bytes are of the last rank. Recipes (tests/test_utils/recipes) run a test on eight devices, of one node.

    GB200 are two nodes of four in one domain of NVLink, or one for tests whose name ends in `_1node`.
    With fp16, the optimizer keeps gradients in fp32 besides: 20 bytes a parameter, where bf16 has 18.
    """
    kind, _, test = str(row.row.get("table", "")).removeprefix(CASES).partition("/")
    if kind != row.model.text("kind"):
        raise UnclearError(f"{test}: a test of {kind!r} is no model of kind {row.model.text('kind')!r}")
    arguments: Arguments = row.plan.get("megatron_args", {})
    unknown = sorted(set(arguments) - UNDERSTOOD)
    if unknown or "grpo" in test:
        raise UnclearError(f"{test}: no plan says {', '.join(unknown) or 'reinforcement learning'}")
    row = _planned(_placed(row, test), arguments)
    eager = arguments.get("attention-backend") == "unfused" or arguments.get("transformer-impl") == "local"
    fused = "cross-entropy-loss-fusion" in arguments
    found = row.published(
        "megatron-fsdp" if "use-megatron-fsdp" in arguments else "megatron",
        _model(row, arguments),
        row.use(attention="eager" if eager else "flash", loss="fused" if fused else "eager"),
        layers_per_stage=_ends(row, arguments),
    )
    instances = int(arguments.get("num-distributed-optimizer-instances", "1"))
    if instances > 1:
        found = replace(found, mesh=_grouped(found.mesh, instances), layout=Layout("NNI"))
    rest, peak = row.result.number("rest_bytes"), row.result.number("peak_bytes")
    return replace(
        found.timed(seconds=row.result.number("step_s_median")),
        gradient_bytes=2 if found.use.compute == "float16" else 4,
        rest_bytes=None if rest is None else round(rest),
        peak_bytes=None if peak is None else round(peak),
        bytes_on="last",
        assumed=("vocabulary",) if "vocab-size" not in arguments else (),
    )


def _placed(row: Fields, test: str) -> Fields:
    """With the devices of the recipe: rows assume four of GB200, which only tests of one node have."""
    gpus = 4 if row.cluster.text("gpu") == "GB200" and test.endswith("_1node") else 8
    data, rest = divmod(gpus, row.pipeline * row.tensor * row.plan.count("cp", 1))
    if rest or not data:
        raise UnclearError(f"{test}: {gpus} devices are no whole number of replicas")
    return row.changed("cluster", gpus=gpus, per_node=gpus).changed("plan", dp=data)


def _planned(row: Fields, arguments: Arguments) -> Fields:
    """With the plan's words for arguments."""
    granularity = arguments.get("recompute-granularity", "none")
    if arguments.get("recompute-num-layers", "1") != "1" or arguments.get("recompute-method", "uniform") != "uniform":
        raise UnclearError("only recomputing of each layer alone has a plan")
    words: dict[str, Any] = {
        "recompute": "block" if granularity == "full" else granularity,
        "precision": next((name for name in ("fp16", "bf16") if name in arguments), "fp32"),
        "sequence_parallel": "sequence-parallel" in arguments,
    }
    if "use-megatron-fsdp" in arguments:
        words["layout"] = SHARDED.get(arguments.get("data-parallel-sharding-strategy", "no_shard"))
    each = arguments.get("num-layers-per-virtual-pipeline-stage")
    if each is None:
        return row.changed("plan", **words, schedule="1f1b")
    chunks = row.model.count("layers") // (row.pipeline * int(each))
    return row.changed("plan", **words, schedule="interleaved", vpp=chunks)


def _model(row: Fields, arguments: Arguments) -> Transformer:
    kind, vocabulary = row.model.text("kind"), _vocabulary(row, arguments)
    layers, hidden, heads = (row.model.count(key) for key in ("layers", "hidden", "heads"))
    if kind == "bert":
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary}
        return Transformer.bert(**sizes, positions=row.sequence)
    dropouts = {float(arguments.get(f"{each}-dropout", "0.1")) for each in ("hidden", "attention")}
    if len(dropouts) > 1:
        raise UnclearError("dropout is on in one place and off in another")
    rotary = arguments.get("position-embedding-type") == "rope"
    return Transformer(
        name="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=_feed_forward(hidden, arguments),
        vocabulary=vocabulary,
        kv_heads=int(arguments["num-query-groups"]) if "group-query-attention" in arguments else None,
        width=int(arguments["kv-channels"]) if "kv-channels" in arguments else None,
        gated="swiglu" in arguments,
        norm=1 if arguments.get("normalization") == "RMSNorm" else 2,
        biases="disable-bias-linear" not in arguments,
        positions=0 if rotary else row.sequence,
        rotary=rotary,
        tied="untie-embeddings-and-output-weights" not in arguments,
        dropout=dropouts != {0.0},
    )


def _feed_forward(hidden: int, arguments: Arguments) -> int:
    """Megatron's default takes two thirds for a gated one, so that it has as many parameters; rows always print 4 h."""
    if "ffn-hidden-size" in arguments:
        return int(arguments["ffn-hidden-size"])
    return int(4 * hidden * 2 / 3) // 64 * 64 if "swiglu" in arguments else 4 * hidden


def _vocabulary(row: Fields, arguments: Arguments) -> int:
    if arguments.get("tokenizer-type", "NullTokenizer") != "NullTokenizer" and "vocab-size" not in arguments:
        raise UnclearError(f"the size of the vocabulary of {arguments['tokenizer-type']} is not said")
    kind = row.model.text("kind")
    if kind not in VOCABULARIES:
        raise UnclearError(f"a model of kind {kind!r} is neither GPT nor BERT")
    size = int(arguments["vocab-size"]) if "vocab-size" in arguments else VOCABULARIES[kind]
    return padded(size, row.tensor, multiple=int(arguments.get("make-vocab-size-divisible-by", "128")))


def _ends(row: Fields, arguments: Arguments) -> tuple[int, ...] | None:
    """Layers of each stage where the first or the last has a number of its own; the others share the rest evenly."""
    first, last = (arguments.get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if first is None and last is None:
        return None
    if row.schedule[0] != "1f1b" or first is None or last is None or row.pipeline < 3:
        raise UnclearError("layers of the first and the last stage are only read together, of 1F1B with three or more")
    each, rest = divmod(row.model.count("layers") - int(first) - int(last), row.pipeline - 2)
    if rest:
        raise UnclearError("the layers between the first stage and the last are not even")
    return (int(first), *(each,) * (row.pipeline - 2), int(last))


def _grouped(mesh: MeshShape, instances: int) -> MeshShape:
    """Each instance of the distributed optimizer is a group."""
    return replace(mesh, inter=instances, intra=mesh.data // instances)
