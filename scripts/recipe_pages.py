"""Plans the recipes of configs/recipes and writes docs/recipes.md: `python scripts/recipe_pages.py [NAME ...]`.

Planning takes up to a minute per recipe, so `make docs` does not rebuild the page. Without names all recipes are
planned again, with names only those. A part lies between `<!-- planned: name -->` and `<!-- end -->`: the output of
`atoll plan`, its reasons, and the settings of the plan, which tests/test_recipes.py predicts again.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import atoll
from atoll.base.toml import nested_to_toml, to_toml
from atoll.base.units import format_bytes, format_seconds
from atoll.plans.ir.text import to_csv
from atoll.prediction.cost import Archipelago, read_hardware
from atoll.prediction.cost.breakdown import busiest_rank
from atoll.prediction.explain.islands import describe_islands
from atoll.prediction.planner import Answer, choices, settings
from atoll.prediction.planner.islands import IslandsAnswer
from atoll.prediction.planner.text import SMALLEST_SHARE
from atoll.training.config import load
from atoll.training.setup.islands import plan_islands

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "recipes.md"
RECIPES = ROOT / "configs" / "recipes"
PART = re.compile(r"(<!-- planned: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def planned(name: str) -> str:
    """The part of a recipe."""
    config = load(RECIPES / f"{name}.toml")
    assert config.run.cluster is not None, f"{name} names no cluster"
    hardware = read_hardware(ROOT / config.run.cluster)
    if isinstance(hardware, Archipelago):
        return of_islands(name, plan_islands(config, hardware))
    answer = atoll.plan(config, ROOT / config.run.cluster)
    parts = [
        f"```console\n$ atoll plan configs/recipes/{name}.toml\n```",
        f"```text\n{answer}\n```",
        " ".join(reasons(answer)),
        "```ini\n" + nested_to_toml(written(answer, RECIPES / f"{name}.csv")).strip() + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def of_islands(name: str, found: IslandsAnswer) -> str:
    """The part of a recipe for islands: the plan of each."""
    parts = [
        f"```console\n$ atoll plan configs/recipes/{name}.toml\n```",
        "```text\n" + "\n".join(describe_islands(found.federated)) + "\n```",
    ]
    for island, each in found.choices.items():
        tables: dict[str, dict[str, Any]] = settings(each.answer.best)
        tables["train"]["global_batch"] = each.batch
        tables["parallel.outer"] = {"every": each.outer.every, "delay": each.outer.delay}
        parts += [f"Island {island}:", f"```ini\n{to_toml(tables).strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def written(answer: Answer, path: Path) -> dict[str, dict[str, Any]]:
    """The settings of the plan. An order that was made for it goes to a file, which they name."""
    found, made = settings(answer.best), answer.best.order.made
    path.unlink(missing_ok=True)
    if made is not None:
        path.write_text(to_csv(made.schedule), encoding="utf-8")
        found["parallel"]["schedule"] = str(path.relative_to(ROOT))
    return found


def reasons(answer: Answer) -> Iterator[str]:
    """Sentences made from the numbers of a plan."""
    best, prediction = answer.best, answer.prediction
    parts = prediction.breakdown[busiest_rank(prediction.breakdown)]
    computed = (parts.forward + parts.backward + parts.weights) / parts.total
    waits = {"gathers": "gathers of parameters", "reductions": "reductions of gradients", "bubble": "the bubble",
             "messages": "messages between stages", "tensor": "tensor-parallel collectives",
             "exchanges": "exchanges between experts"}  # fmt: skip
    name = max(waits, key=lambda each: float(getattr(parts, each)))
    share = getattr(parts, name) / parts.total
    yield f"The busiest rank computes for {computed:.1%} of the step."
    if share >= SMALLEST_SHARE:
        yield f"The largest wait, {share:.1%}, is for {waits[name]}."
    fullest = min(range(prediction.plan.mesh.pipeline), key=prediction.margin)
    memory, margin = format_bytes(prediction.seats.memory(fullest)), format_bytes(prediction.margin(fullest))
    which = "fullest rank" if prediction.given.groups else "rank with the highest peak"
    yield f"The {which} leaves {margin} of {memory} free."
    if answer.runners_up:
        other = answer.runners_up[0]
        own, theirs = choices(best), choices(other)
        differs = ", ".join(f"{key} {theirs[key]}" for key in own if theirs.get(key, own[key]) != own[key])
        more = f"{other.seconds / best.seconds - 1.0:.1%}"
        longer = "as long" if more == "0.0%" else f"{more} longer"
        yield f"The nearest plan that differs in two main choices ({differs}) takes {longer}."
    for change in answer.changes:
        if change.same is not None and change.same > 1.001 * best.seconds:
            yield f"With {change.what}, the plan takes {format_seconds(change.same)}."
        elif change.what.endswith("less memory") and change.same is None and change.best is not None:
            yield f"With {change.what} it does not fit, and the best takes {format_seconds(change.best.seconds)}."


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan the recipes and write docs/recipes.md.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="all if not given")
    names = set(parser.parse_args().names)
    for _, name, _ in PART.findall(PAGE.read_text(encoding="utf-8")):
        if not names or name in names:
            part = planned(name)
            head, _, rest = PAGE.read_text(encoding="utf-8").partition(f"<!-- planned: {name} -->\n")
            _, _, tail = rest.partition("<!-- end -->")
            text = f"{head}<!-- planned: {name} -->\n\n{part}\n<!-- end -->{tail}"
            PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
