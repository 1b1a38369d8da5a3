"""Writes the generated parts of the pages, and the pictures: `make docs`. `--check` writes nothing and exits with 1
when a page or a picture is out of date.

A part lies between `<!-- generated: name -->` and `<!-- end -->`; what is around it is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cluster_page
import explain_page
import program_page
import schedule_pages
import tradeoffs
import typer
import versions
from charts import markdown_table
from pydantic_core import PydanticUndefined
from schedule_pages import MICROBATCHES, RANKS

from atoll.base import errors
from atoll.base.toml import value_to_toml
from atoll.base.units import format_bytes
from atoll.cli.layouts import table as layouts_table
from atoll.cli.main import app
from atoll.cli.predict import describe as describe_prediction
from atoll.plans.ir.draw import SVG_STYLE, draw_svg
from atoll.plans.layouts import (
    ALL_LAYOUTS,
    GATHER_PARAMETER,
    REDUCE_GRADIENT,
    SYNC_GRADIENT,
    SYNC_PARAMETER,
    Axis,
    Layout,
    Level,
    Nest,
)
from atoll.plans.schedules import CATALOGUE, build
from atoll.prediction.cost import Cluster
from atoll.program.sim import Costs, simulate
from atoll.training.config import load
from atoll.training.config.schema import Config, OuterSection, Section
from atoll.training.prediction import predict_plan

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.families import CAUSAL, MASKED  # noqa: E402
from tests.tasks import CLASSIFIERS, IMAGES, LISTENERS, TRANSLATORS  # noqa: E402

ELSEWHERE = (ROOT / "docs" / "pictures" / "slow-networks.svg",)
"""Pictures that other scripts write, which take minutes."""
PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


# ---- the keys of a config

MEANINGS: Mapping[str, str] = {
    "model.source": '"builtin", the decoder of `atoll.runtime.models`; "transformers:llama" or another family, from '
    "scratch; "
    "or the folder of a Hugging Face model: [models.md](models.md)",
    "model.config": "values that override the `transformers` configuration; not for the builtin model",
    "model.weights": 'a folder of safetensors or a checkpoint to start from, or "initial" for random weights; by '
    "default the weights in the source's folder if it has any",
    "model.layers": "number of transformer layers; with embedding and head, at least as many blocks as stages",
    "model.hidden": "width of the hidden state; `hidden` / `heads` must be an even whole number",
    "model.heads": "attention heads",
    "model.kv_heads": "key and value heads (grouped-query attention), a divisor of `heads`",
    "model.ffn": "inner width of the SwiGLU feed-forward",
    "model.dropout": "dropout probability, on the attention weights and on both branches of a layer",
    "model.tie_embeddings": "share one weight between embedding and head",
    "model.rope_theta": "base of the rotary position embedding",
    "model.norm_eps": "epsilon of the RMSNorms",
    "model.vocabulary": "vocabulary size, at least the tokenizer's",
    "data.source": '"stdlib", or a file or folder, or a list of these: [data.md](data.md)',
    "data.streaming": "encode the sources during the run: [data.md](data.md#streaming)",
    "data.weights": "shares of the samples to draw from each source of a list: [data.md](data.md#several-sources)",
    "data.tokenizer": '"bytes" (256 ids, none special), "bpe-N" (trained on the corpus), or a tokenizer.json; "auto" '
    "takes the tokenizer in the model's folder if it has one, else bpe-4096",
    "data.format": '"text", or "chat" for [conversations and instructions](data.md#conversations)',
    "data.chat_template": "file with a Jinja template that replaces the tokenizer's own",
    "data.answers_only": "compute the loss on the assistant's answers only; false: on all tokens of a conversation",
    "data.ignored_keys": "keys of conversations and of their messages that are not used; any other unknown key is an "
    "error: [data.md](data.md#keys-of-a-record)",
    "data.bad_records": 'what to do with a broken record: "stop", or "skip" it and count it, up to a tenth of a '
    "source: [data.md](data.md#broken-records)",
    "data.sequence": "sequence length: tokens in a sample",
    "data.packing": 'what a sample contains: a block of joined documents ("blocks"), several whole documents '
    '("documents"), or one document with padding ("pad"); "auto" is "documents" for chat and "blocks" for text: '
    "[data.md](data.md#samples)",
    "data.too_long": '"split", "drop" or "truncate" documents longer than a sample; "auto" drops conversations and '
    "splits text",
    "data.validation": "share of the corpus held out for validation, from 0 to 0.5, or a separate file or folder",
    "data.text_field": "key or column that contains the text in JSONL, parquet and datasets",
    "data.cache": "folder in which tokenizers and token arrays are cached",
    "train.steps": "number of optimizer steps, counted from the start of the run",
    "train.epochs": "passes over the corpus, instead of train.steps: [data.md](data.md#epochs)",
    "train.global_batch": "sequences per step, over all ranks",
    "train.microbatch": "sequences per microbatch, on one data-parallel rank",
    "train.precision": "bf16 and fp16 keep master weights, optimizer state, gradients and reductions in fp32; fp16 "
    "scales the loss and skips steps that overflow",
    "train.seed": "seed of initial weights, dropout and sample order",
    "train.lr": "peak learning rate",
    "train.min_lr_ratio": 'learning rate of the last step, as a share of `lr`; ignored by "constant" and by functions',
    "train.warmup": "steps over which the learning rate rises linearly from 0 to `lr`",
    "train.lr_schedule": 'schedule after the warm-up: "cosine", "constant", "linear", "wsd" (constant, then a linear '
    'decay over the last `decay` steps), or "module:function": [Learning rates](#learning-rates)',
    "train.decay": 'number of last steps over which "wsd" decays',
    "train.optimizer": 'name of an optimizer of torch.optim, or "module:factory": [Optimizers](#optimizers)',
    "train.optimizer_options": "further arguments of the optimizer, as `{ momentum = 0.9 }`",
    "train.optimizer_states": 'state tensors per parameter of a "module:factory" optimizer, for predictions',
    "train.betas": "`betas` of optimizers that have them; the optimizer's own default if not given",
    "train.eps": "`eps` of the optimizer; its own default if not given",
    "train.weight_decay": "weight decay of matrices; vectors (norms, biases) are not decayed. If not given, the "
    "optimizer's own default applies to both",
    "train.clip": "maximum global gradient norm; 0: no clipping",
    "train.eval_every": "steps between validations; 0: at the start and the end only",
    "train.eval_batches": "maximum number of validation batches, each of `global_batch` sequences",
    "train.patience": "early stopping: end the run after so many consecutive validations without a lower loss; 0: off: "
    "[Best checkpoint](training.md#best-checkpoint)",
    "train.prompt": "a text that the model continues with 64 tokens at the end of the run; none if not given. The "
    "masked objective generates none",
    "train.trainable": "name patterns (`*`, `?`) of the only parameters to train, as in `*.mlp.*`",
    "train.frozen": "name patterns (`*`, `?`) of parameters not to train, as in `embed.*`",
    "train.objective": '"causal" predicts the next token; "masked" predicts masked tokens, as BERT does',
    "train.mask_ratio": 'share of tokens that "masked" predicts: of these 80 % are masked, 10 % are replaced by a '
    "random token, 10 % are kept",
    "train.bad_steps": 'action after a step whose loss or gradients are not finite: "stop", "skip", or "rollback N" to '
    "a checkpoint at least N steps older: [training.md](training.md#numbers-gone-bad)",
    "train.check_replicas": "steps between bitwise comparisons of replicated state across ranks; 0: none",
    "lora.rank": "rank of low-rank adapters on a frozen model; 0: no adapters. Needs `peft`",
    "lora.alpha": "the adapters' output is multiplied by alpha / rank",
    "lora.dropout": "dropout probability on the adapters' input",
    "lora.targets": 'name suffixes of the layers that get adapters, or "all-linear"',
    "lora.modules_to_save": "name suffixes of modules that are trained whole and exported with the adapters",
    "parallel.ranks": "number of local processes; under a launcher, its world size applies instead",
    "parallel.min_ranks": "smallest world size the run may continue with: [Fewer ranks](training.md#fewer-ranks)",
    "parallel.pipeline": "number of pipeline ranks",
    "parallel.schedule": "name of a schedule in the [catalogue](schedules.md), a CSV file in torch's format, or an "
    "order as text",
    "parallel.chunks": "stages per rank, for schedules with several",
    "parallel.layers_per_stage": "number of layers of each stage, as in `[3, 5, 5, 3]`; split evenly if not given",
    "parallel.post_validation": "take the optimizer step without waiting for the global norm, and check it afterwards",
    "parallel.prefetch": "bytes of parameters that may be prefetched; if not given, the bytes of one block for each "
    "link that a gather crosses. 0 uses the least memory: no prefetch, and each block's gradients are reduced before "
    "the next block's backward",
    "parallel.residency": "how long gathered parameters are kept: `action` for one action, `run` while the stage fits "
    "in the bytes of a rank's largest one, `step` for the whole step",
    "parallel.reduction": "how often gradients are reduced to their shards: after each microbatch, before another "
    "stage's backward, or once a step",
    "parallel.unit": "number of blocks that are gathered and reduced together: more means fewer, larger messages and "
    "more memory",
    "parallel.compile": '"block" compiles each block with torch.compile; "block-eager" only traces it and needs no '
    "compiler",
    "parallel.tensor": "number of tensor-parallel ranks, which split each layer and the vocabulary: "
    "[models.md](models.md)",
    "parallel.vocabulary": "split the rows of embedding and head over the pipeline ranks: "
    "[Vocabulary parallelism](models.md#vocabulary-parallelism)",
    "parallel.auto": "let the planner choose the keys that are not written, for `run.cluster`: [plan.md](plan.md)",
    "parallel.order": "axes of the mesh, outermost first: `pp` first sends pipeline messages between nodes, "
    '`["inter", "intra", "pp", "tp"]` keeps them inside',
    "parallel.sequence_parallel": "shard activations along the sequence between the tensor-parallel parts of a layer",
    "parallel.intra": "data-parallel ranks of a group; there are ranks / (pipeline · tensor · intra) groups",
    "parallel.layout": "three levels, or an alias such as `zero-2`: [layouts.md](layouts.md)",
    "parallel.recompute": 'activations to recompute in the backward: "block" all of a block\'s, "selective" all but '
    "the outputs of matrix products",
    "parallel.codecs.gradient": "codec of gradients: [codecs.md](codecs.md)",
    "parallel.codecs.parameter": "codec of parameters, or of their differences to the copy that a rank keeps",
    "parallel.codecs.rounding": "rounding of gradients and outer gradients; parameters are rounded to nearest",
    "parallel.codecs.feedback": "add the error of a rank's last encoding of gradients to its next one",
    "parallel.device": '"auto" uses one GPU per local rank if there are enough, else the CPU',
    "parallel.outer": "outer steps of groups that train independently: [outer.md](outer.md), keys below",
    "parallel.outer.every": "steps between two outer gradients of a block",
    "parallel.outer.optimizer": 'outer optimizer: "nesterov" or "sgd"',
    "parallel.outer.lr": "learning rate of the outer optimizer",
    "parallel.outer.momentum": "momentum of the outer optimizer",
    "parallel.outer.fragments": "number of parts of the model, sent after different steps; 0: each block is one",
    "parallel.outer.delay": "steps between sending a fragment and applying its mean, less than `every`",
    "parallel.outer.mix": "weight of a group's own parameters when the mean is applied",
    "parallel.outer.codec": "codec of outer gradients, with rounding and feedback of `[parallel.codecs]`: "
    "[outer.md](outer.md#codecs)",
    "parallel.timeout": "seconds that a rank may be silent, or keep another waiting, before all ranks end; derived "
    "from measured step times if not given: [timeout](#timeout)",
    "run.folder": "output folder of the run",
    "run.restarts": "maximum number of restarts of local ranks from the newest checkpoint after a failure; the count "
    "resets at each checkpoint",
    "run.tensorboard": "also write TensorBoard events, if the package is installed",
    "run.loggers": 'further loggers of metrics: "wandb", "mlflow", or "module:function": [Loggers](#loggers)',
    "run.cluster": "file of the [cluster](clusters.md) the run is on; the prediction is recorded with the measurements",
    "checkpoint.every": "steps between checkpoints; 0: after the last step only",
    "checkpoint.keep": "number of newest checkpoints to keep",
    "checkpoint.keep_best": "also keep this many checkpoints with the lowest validation loss, and save after each "
    "validation that is the best so far: [Best checkpoint](training.md#best-checkpoint)",
    "checkpoint.background": "write in the background while training continues, from a copy in host memory",
}

DEFAULTS: Mapping[str, str] = {
    "model.kv_heads": "`heads`",
    "model.ffn": "8/3 of `hidden`, rounded up to a multiple of 8",
    "model.vocabulary": "the tokenizer's",
    "model.weights": "those of the source",
    "parallel.residency": "`step` where a gather sends nothing, else `action`",
    "data.cache": "`$XDG_CACHE_HOME/atoll` or `~/.cache/atoll`",
    "data.weights": "as many as each has",
    "train.epochs": "none: `train.steps`",
    "train.decay": "a tenth of `steps`",
    "train.betas": "`[0.9, 0.95]` of AdamW",
    "train.eps": "`1e-08` of AdamW",
    "train.weight_decay": "`0.1` of AdamW",
    "parallel.outer": "none: all groups take each step together",
    "parallel.outer.every": "must be given",
    "parallel.outer.lr": "`0.7` of nesterov, `1.0` of sgd",
    "parallel.outer.momentum": "`0.9` of nesterov, `0.0` of sgd",
    "parallel.outer.mix": "`0.5` with a delay, else `0.0`",
}
"""Defaults that depend on something else."""


def config_keys() -> str:
    parts, seen = [], set()
    schema = Config.model_json_schema()
    waiting: list[tuple[str, Any]] = [(name, field.annotation) for name, field in Config.model_fields.items()]
    while waiting:
        section, model = waiting.pop(0)
        properties = schema["$defs"][model.__name__]["properties"]
        rows = []
        for key, each in model.model_fields.items():
            name = f"{section}.{key}"
            if isinstance(each.annotation, type) and issubclass(each.annotation, Section):
                waiting.insert(0, (name, each.annotation))
                continue
            if each.annotation == OuterSection | None:
                waiting.insert(0, (name, OuterSection))
            seen.add(name)
            value = each.get_default(call_default_factory=True)
            assert value is not PydanticUndefined or name in DEFAULTS, f"{name} has no default"
            default = DEFAULTS.get(name) or f"`{value_to_toml(value)}`"
            rows.append([f"`{key}`", _type_of(properties[key]), default, MEANINGS[name]])
        parts.append(f"### `[{section}]`\n\n" + markdown_table(["key", "type", "default", "meaning"], rows))
    unknown = set(MEANINGS) - seen
    assert not unknown, f"meanings of keys that do not exist: {sorted(unknown)}"
    return "\n".join(parts)


def _type_of(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        return "table"
    if "enum" in schema:
        return ", ".join(f'"{value}"' for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type_of(each) for each in schema["anyOf"] if each.get("type") != "null")
    if schema["type"] == "array":
        items = schema.get("prefixItems")
        kinds = {"string": "strings", "integer": "whole numbers", "number": "numbers"}
        return f"{len(items)} numbers" if items else f"list of {kinds[schema['items']['type']]}"
    bounds = [
        f"{sign} {schema[word]:g}"
        for word, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if word in schema
    ]
    name = {
        "integer": "whole number",
        "number": "number",
        "string": "string",
        "object": "table",
        "boolean": "true or false",
    }
    return " ".join([name[schema["type"]], ", ".join(bounds)]).strip()


# ---- layouts

EXAMPLE = {"parameters": 7e9, "trainable": 7e9, "inter": 4, "intra": 8, "microbatches": 10}
DIVISORS = {Level.N: "", Level.I: "/m", Level.G: "/n"}


def layout_formulas() -> str:
    rows = []
    for layout in ALL_LAYOUTS:
        p, g, os = layout.parameters, layout.gradients, layout.optimizer
        memory = f"2Ψ{DIVISORS[p]} + 2Ψ{DIVISORS[g]} + 12Ψ{DIVISORS[os]}"
        better = layout.dominated_by
        remark = ", ".join(layout.aliases) if better is None else f"dominated by {better}"
        name = f"**{layout}**" if layout.effective else str(layout)
        rows.append([name, memory, _sent(layout, Axis.INTRA, "A"), _sent(layout, Axis.INTER, "X"), remark])
    return markdown_table(["layout", "bytes held", "sent inside the group", "sent across groups", "also called"], rows)


def _sent(layout: Layout, axis: Axis, volume: str) -> str:
    """Bytes sent along an axis with all parameters trainable: a number of volumes a microbatch and one a step."""
    p, g, os = layout.parameters, layout.gradients, layout.optimizer

    def along(moves: Sequence[Any]) -> int:
        return sum(move.axis is axis for move in moves)

    each = 2 * along(GATHER_PARAMETER[p]) + along(REDUCE_GRADIENT[g])
    once = along(SYNC_GRADIENT[g, os]) + along(SYNC_PARAMETER[os, p])
    terms = [f"{'' if count == 1 else count}{unit}" for count, unit in ((each, "s"), (once, "")) if count]
    if not terms:
        return "0"
    factor = " + ".join(term or "1" for term in terms)
    return f"({factor}) {volume}" if len(terms) > 1 else f"{'' if factor == '1' else factor + ' '}{volume}"


def layout_example() -> str:
    rows = [row for row in layouts_table(**EXAMPLE) if row["effective"]]  # type: ignore[arg-type]
    rows.sort(key=lambda row: -row["bytes_per_rank"]["held"])
    cells = []
    for row in rows:
        amounts = (
            row["bytes_per_rank"]["total"],
            row["bytes_per_rank"]["held"],
            row["traffic"]["intra_bytes"],
            row["traffic"]["inter_bytes"],
        )
        cells.append([row["layout"], *(format_bytes(amount, decimal=True) for amount in amounts)])
    heads = ["layout", "published", "held by Atoll", "sent inside the group", "sent across groups"]
    return markdown_table(heads, cells)


# ---- the picture of the README

COLOURS = {"p": "#8fb8de", "g": "#e8998d", "os": "#a9cf9a"}
GROUPS, GROUP_RANKS = 2, 4


def overview_svg() -> str:
    """A step of 1F1B above, and below where one pipeline rank stores each state under IIG on two nodes of four."""
    layout = Layout("IIG")
    schedule = build("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    title = f"Schedule: 1F1B, {RANKS} pipeline ranks, {MICROBATCHES} microbatches"
    timeline = draw_svg(simulate(schedule, Costs()), width=960, title=title).replace(SVG_STYLE, "")
    height = 470
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" width="960" height="{height}">',
        "<title>A plan: the schedule of each pipeline rank, and where its model state is stored</title>",
        SVG_STYLE,
        f'<rect class="page" width="960" height="{height}" rx="6"/>',
        timeline.strip(),
        f'<text class="head" x="8" y="240">Layout {layout}: where a stage stores its state, on {GROUPS} nodes of '
        f"{GROUP_RANKS} ranks</text>",
    ]
    for group, x in enumerate((8, 542)):
        parts += _group(layout, group, x=x, y=254)
    parts += [
        '<path d="M434 346 H526 M444 339 L432 346 L444 353 M516 339 L528 346 L516 353" fill="none" stroke="#59636e" '
        'stroke-width="2"/>',
        '<text x="480" y="325" text-anchor="middle">slow network</text>',
        '<text class="quiet" x="480" y="374" text-anchor="middle">once a step</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _group(layout: Layout, group: int, *, x: int, y: int) -> list[str]:
    """A box with the ranks of one group, and of each state the blocks of the flat buffer that a rank keeps."""
    levels = {"p": layout.parameters, "g": layout.gradients, "os": layout.optimizer}
    words = {"p": "parameters", "g": "gradients", "os": "optimizer"}
    cell, pitch, blocks = 13, 116, GROUPS * GROUP_RANKS
    parts = [
        f'<rect class="lane" x="{x}" y="{y}" width="410" height="206" rx="6"/>',
        f'<text x="{x + 12}" y="{y + 24}" font-weight="600">node {group}: fast interconnect</text>',
    ]
    for column, (state, level) in enumerate(levels.items()):
        left = x + 64 + column * pitch
        parts.append(f'<text x="{left}" y="{y + 50}">{words[state]}: {level.name}</text>')
        for j in range(GROUP_RANKS):
            held = Nest(GROUPS, GROUP_RANKS, group, j).range(level, blocks)
            for block in range(blocks):
                look = f'fill="{COLOURS[state]}"' if block in held else 'class="tick" fill="none" stroke-width="0.6"'
                place = f'x="{left + block * cell}" y="{y + 60 + j * 28}" width="{cell - 1}" height="20"'
                parts.append(f"<rect {place} {look}/>")
    parts += [f'<text x="{x + 12}" y="{y + 75 + j * 28}">rank {j}</text>' for j in range(GROUP_RANKS)]
    parts.append(f'<text class="quiet" x="{x + 12}" y="{y + 192}">each microbatch: all-gather, reduce-scatter</text>')
    return parts


# ---- the command line and the errors


def command_line() -> str:
    parts = []
    for name, command in _commands(typer.main.get_command(app)):
        arguments = " ".join(each.name.upper() for each in command.params if each.opts == [each.name])
        paragraphs = [" ".join(each.split()) for each in command.help.split("\n\n")]
        text = "\n\n".join(each for each in paragraphs if not each.startswith("Keys of the JSON object"))
        rows = []
        for each in command.params:
            word = each.name.upper() if each.opts == [each.name] else each.opts[0]
            if each.metavar:
                word += f" {each.metavar}"
            rows.append([f"`{word}`", _default_of(each), each.help])
        usage = f"atoll {name} {arguments}".strip()
        parts.append(f"## `{usage}`\n\n{text}\n\n" + markdown_table(["option", "default", "meaning"], rows))
    return "\n".join(parts)


def _commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """The commands with their words, those of a group in its place."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{above}{name} ")
        else:
            yield f"{above}{name}", command


def _default_of(option: Any) -> str:
    if option.required:
        return "required"
    return "" if option.default in (None, False) else f"`{option.default}`"


def error_table() -> str:
    rows = [
        [f"`{name}`", str(kind.exit_code), (kind.__doc__ or "").split("\n")[0]]
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.AtollError)
    ]
    return markdown_table(["error", "exit code", "meaning"], rows)


# ---- pages


def families() -> str:
    """Families that the tests train, by what they predict."""
    kinds: Mapping[str, Iterable[str]] = {
        "next token": CAUSAL,
        "hidden tokens": MASKED,
        "classes of samples, classes of tokens": CLASSIFIERS,
        "classes of images": IMAGES,
        "text from text": TRANSLATORS,
        "text from sound": LISTENERS,
    }
    rows = [[what, ", ".join(sorted(names))] for what, names in kinds.items()]
    return markdown_table(["predicts", "families, as transformers calls them"], rows)


def adapter_example() -> str:
    text = (ROOT / "docs" / "examples" / "ranker.py").read_text(encoding="utf-8")
    return f"```python\n{text}```\n"


def prediction() -> str:
    """What `atoll predict` prints of a config that is shipped."""
    config = load(ROOT / "configs" / "llama-3-8b.toml")
    cluster = Cluster.read(ROOT / "configs" / "clusters" / "h100.toml")
    lines = describe_prediction(predict_plan(config, config.to_plan(), cluster))
    return "```text\n" + "\n".join(lines) + "\n```\n"


def matrix() -> str:
    """What the whole matrix gave when it was last run, up to the last row of its tables."""
    page = (ROOT / "benchmarks" / "matrix" / "README.md").read_text(encoding="utf-8")
    return "".join(page.partition("## Result\n\n")[2].rpartition("|\n")[:2])


PARTS: Mapping[str, Callable[[], str]] = {
    "adapter-example": adapter_example,
    "command-line": command_line,
    "config-keys": config_keys,
    "errors": error_table,
    "families": families,
    "layout-example": layout_example,
    "layout-formulas": layout_formulas,
    "matrix": matrix,
    "prediction": prediction,
    **cluster_page.PARTS,
    **explain_page.PARTS,
    **program_page.PARTS,
    **schedule_pages.PARTS,
    **versions.PARTS,
    **tradeoffs.TABLES,
}


def wanted_files() -> dict[Path, str]:
    """Every page and picture, as it should be."""
    pictures = ROOT / "docs" / "pictures"
    found = {pictures / f"{name}.svg": schedule_pages.schedule_svg(name) for name in CATALOGUE}
    found |= {pictures / f"{name}.svg": draw_figure() for name, draw_figure in tradeoffs.PICTURES.items()}
    found[pictures / "plan.svg"] = overview_svg()
    found[pictures / "program.svg"] = program_page.picture()
    used = set()
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        text = page.read_text(encoding="utf-8")
        used |= {name for _, name, _ in PART.findall(text)}
        found[page] = PART.sub(lambda match: f"{match[1]}{PARTS[match[2]]()}{match[3]}", text)
    assert used == set(PARTS), f"parts in no page: {sorted(set(PARTS) - used)}"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated parts of the pages, and the pictures.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is out of date")
    check = parser.parse_args().check
    wanted = wanted_files()
    pictures = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    stale = [path for path in pictures if path not in wanted and path not in ELSEWHERE]
    if not check:
        for path in stale:
            path.unlink()
    for path, text in wanted.items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for path in stale:
        done = "out of date" if check else "wrote" if path in wanted else "removed"
        print(f"{done}: {path.relative_to(ROOT)}", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
