"""Writes the generated parts of the pages, and the pictures: `make docs`. `--check` writes nothing and exits with 1
when a page or a picture is out of date.

A part lies between `<!-- generated: name -->` and `<!-- end -->`; what is around it is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import cluster_page
import experts_page
import explain_page
import host_page
import program_page
import schedule_pages
import tradeoffs
import typer
import versions
from charts import markdown_table
from schedule_pages import MICROBATCHES, RANKS

from atoll.base import errors
from atoll.base.toml import value_to_toml
from atoll.base.units import format_bytes
from atoll.cli.layouts import layouts_table as layouts_table
from atoll.cli.main import app
from atoll.cli.predict import describe_prediction as describe_prediction
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
from atoll.plans.plan import AXES
from atoll.plans.schedules import CATALOGUE, build
from atoll.prediction.cost import Archipelago, Cluster
from atoll.prediction.cost.mixture import MixtureConfig
from atoll.prediction.explain.islands import describe_islands, describe_outer_alternatives
from atoll.program.sim import Costs, simulate
from atoll.training.config import load
from atoll.training.config.model import DecoderOptions
from atoll.training.config.schema import tables
from atoll.training.config.section import Section
from atoll.training.setup.islands import predict_islands
from atoll.training.setup.prediction import predict_plan

ROOT = Path(__file__).resolve().parents[1]
LARGEST = (1 << 31) - 1
"""A bound this far from 0 only guards what computes with the number, and is not shown."""
sys.path.insert(0, str(ROOT))
from tests.families import CAUSAL, MASKED  # noqa: E402
from tests.tasks import CLASSIFIERS, IMAGES, LISTENERS, TRANSLATORS  # noqa: E402

ELSEWHERE = (ROOT / "docs" / "pictures" / "slow-networks.svg",)
"""Pictures that other scripts write, which take minutes."""
PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


# ---- the keys of a config

DEFAULTS: Mapping[str, str] = {
    "model.kv_heads": "`heads`",
    "model.ffn": "8/3 of `hidden`, rounded up to a multiple of 8",
    "model.vocabulary": "the tokenizer's",
    "model.weights": "those of the source",
    "model.config.expert_ffn": "`model.ffn`",
    "parallel.residency": "`step` where a gather sends nothing, else `action`",
    "data.cache": "`$XDG_CACHE_HOME/atoll` or `~/.cache/atoll`",
    "data.source": "must be given to train",
    "train.epochs": "none: `train.steps`",
    "train.weight_decay": "`0.1` of AdamW",
    "parallel.outer": "none: all groups take each step together",
    "parallel.outer.every": "must be given",
    "parallel.host": "none: all state rests on the device",
    "parallel.host.optimizer": "none: the state rests on the device",
    "parallel.host.parameters": "none: they rest on the device",
}
"""Defaults that depend on something else."""


PAGE = "training.md"
"""The page with the keys."""


def config_keys() -> str:
    known = tables()
    parts = []
    for table, section in known.items():
        keys = [key for key in section.model_fields if f"{table}.{key}" not in known or f"{table}.{key}" in DEFAULTS]
        parts.append(f"### `[{table}]`\n\n" + _keys_of(section, table, keys))
    return "\n".join(parts)


def mixture_keys() -> str:
    return _keys_of(DecoderOptions, "model.config", [field.name for field in fields(MixtureConfig)])


def _keys_of(section: type[Section], table: str, keys: Iterable[str]) -> str:
    properties = section.model_json_schema()["properties"]
    rows = []
    for key in keys:
        field = section.model_fields[key]
        value = field.get_default(call_default_factory=True)
        default = DEFAULTS.get(f"{table}.{key}") or ("not set" if value is None else f"`{value_to_toml(value)}`")
        rows.append([f"`{key}`", _type_of(properties[key]), default, _meaning(field.description)])
    return markdown_table(["key", "type", "default", "meaning"], rows)


def _meaning(description: str) -> str:
    """The description of a key, with links to the pages that it names."""

    def link(match: re.Match[str]) -> str:
        page, anchor = match[1], match[2] or ""
        if page == PAGE:
            return f"[{anchor[1:].replace('-', ' ').capitalize()}]({anchor})"
        return f"[{page}]({page}{anchor})"

    return re.sub(r"docs/([\w-]+\.md)(#[\w-]+)?", link, " ".join(description.split()))


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
        if abs(schema.get(word, LARGEST)) < LARGEST
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


def islands() -> str:
    """What `atoll explain` prints of that config on two islands, with little left to choose."""
    kept = {"auto": True, "tensor": 1, "order": [*AXES], "residency": "step", "reduction": "microbatch", "unit": 1}
    kept |= {"recompute": "none", "prefetch": 0, "post_validation": False, "vocabulary": False}
    kept["outer"] = {"every": 64, "fragments": 0, "delay": 16, "codec": "int8"}
    sets = [f"parallel.{key}={value_to_toml(value)}" for key, value in kept.items()]
    config = load(ROOT / "configs" / "llama-3-8b.toml", sets)
    archipelago = Archipelago.read(ROOT / "configs" / "clusters" / "two-islands.toml")
    found = predict_islands(config, archipelago)
    lines = [*describe_islands(found), "", *describe_outer_alternatives(found)]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def matrix() -> str:
    """What the whole matrix gave when it was last run, up to the last row of its tables."""
    page = (ROOT / "benchmarks" / "matrix" / "README.md").read_text(encoding="utf-8")
    return "".join(page.partition("## Result\n\n")[2].rpartition("|\n")[:2])


def mixtures() -> str:
    """The same of the matrix of mixtures."""
    path = ROOT / "benchmarks" / "mixtures" / "README.md"
    if not path.is_file():
        return "They have not been run.\n"
    return "".join(path.read_text(encoding="utf-8").partition("## Result\n\n")[2].rpartition("|\n")[:2])


PARTS: Mapping[str, Callable[[], str]] = {
    "adapter-example": adapter_example,
    "command-line": command_line,
    "config-keys": config_keys,
    "errors": error_table,
    "families": families,
    "islands": islands,
    "layout-example": layout_example,
    "layout-formulas": layout_formulas,
    "matrix": matrix,
    "mixture-keys": mixture_keys,
    "mixtures": mixtures,
    "prediction": prediction,
    **cluster_page.PARTS,
    **experts_page.PARTS,
    **host_page.PARTS,
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
    found[pictures / "experts.svg"] = experts_page.picture()
    found[pictures / "host.svg"] = host_page.picture()
    found[pictures / "slices.svg"] = schedule_pages.slices_svg()
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
