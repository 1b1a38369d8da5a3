"""The parts of docs/explain.md: a plan that is shipped, explained."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from charts import markdown_table

from atoll.prediction.cost import Cluster
from atoll.prediction.explain import QUESTIONS, Explanation, ask, text
from atoll.training.config import Config, load
from atoll.training.prediction import predict_plan
from atoll.training.settings import SYSTEMS, Settings, settings_for

ROOT = Path(__file__).resolve().parents[1]
NETWORK = "ethernet-25"
ASKED = ("fullest-rank", "pipeline-with-zero-2", "why-not-zb-v", "another-node", "fit")


def config() -> Config:
    return load(ROOT / "configs" / "llama-3-8b.toml")


@cache
def explanation() -> Explanation:
    own = config()
    return Explanation(predict_plan(own, own.to_plan(), Cluster.read(ROOT / "configs" / "clusters" / "h100.toml")))


def fenced(lines: Iterable[str], language: str = "text") -> str:
    return "\n".join([f"```{language}", *lines, "```", ""])


def whole() -> str:
    return fenced(text.describe(explanation()))


def slow() -> str:
    """Return the bottleneck and the layouts for nodes with one card of 25 Gb/s each."""
    own, fast = config(), explanation().prediction.given
    node = fast.node.model_copy(update={"cards": 1})
    cluster = Cluster.of(
        {"device": fast.device.model_dump(), "node": node.model_dump(), "network": {"preset": NETWORK}}
    )
    found = Explanation(predict_plan(own, own.to_plan(), cluster))
    return fenced([*text.SECTIONS["Bottleneck"](found), "", *text.SECTIONS["Layouts"](found)])


def questions() -> str:
    rows = [[f"`{key}`", each.text] for key, each in QUESTIONS.items()]
    return markdown_table(["key", "question"], rows)


def answers() -> str:
    found = ["\n".join(text.answer_lines(ask(explanation(), key))) for key in ASKED]
    return fenced(["\n\n".join(found)])


@cache
def settings(system: str) -> Settings:
    return settings_for(system, config(), explanation().prediction)


def megatron() -> str:
    (script,) = settings("megatron").files.values()
    return fenced([script.rstrip()])


def limits() -> str:
    rows = []
    for system in SYSTEMS:
        found = settings(system)
        rows.append([f"`{system}`", found.version, ", ".join(f"`{name}`" for name in found.files), _listed(system)])
    return markdown_table(["`--as`", "version", "writes", "not expressed, of this plan"], rows)


def _listed(system: str) -> str:
    return "; ".join(settings(system).limits) or "nothing"


PARTS = {
    "explanation": whole,
    "explained-slow": slow,
    "explained-answers": answers,
    "explained-limits": limits,
    "explained-megatron": megatron,
    "explained-questions": questions,
}
