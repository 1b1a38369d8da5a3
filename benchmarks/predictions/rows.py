"""The configurations that are run: what each changes of one base, and on how many ranks.

Those that are `fitted` calibrate the constants of the cluster; the others are judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.plans.layouts import EFFECTIVE
from atoll.plans.plan import Plan
from atoll.training.config import Config, from_dict

MODELS: Mapping[str, Mapping[str, Any]] = {
    "small": {"layers": 4, "hidden": 256, "heads": 4, "vocabulary": 2048, "config": {"tie_embeddings": False}},
    "wide": {
        "layers": 3,
        "hidden": 512,
        "heads": 8,
        "kv_heads": 4,
        "vocabulary": 4096,
        "config": {"tie_embeddings": False},
    },
    "deep": {"layers": 8, "hidden": 256, "heads": 8, "vocabulary": 4096, "config": {"tie_embeddings": True}},
    "llama": {
        "source": "transformers:llama",
        "vocabulary": 2048,
        "config": {
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        },
    },
    "tall": {"layers": 12, "hidden": 384, "heads": 6, "vocabulary": 2048, "config": {"tie_embeddings": False}},
    "tiny": {"layers": 8, "hidden": 64, "heads": 4, "vocabulary": 256, "config": {"tie_embeddings": False}},
    "mixture": {
        "layers": 4,
        "hidden": 256,
        "heads": 4,
        "ffn": 512,
        "vocabulary": 2048,
        "config": {"tie_embeddings": False, "experts": 8, "experts_per_token": 2, "expert_ffn": 512},
    },
    "gpt2": {
        "source": "transformers:gpt2",
        "vocabulary": 2048,
        "config": {"n_embd": 256, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    },
}
BASE: Mapping[str, Mapping[str, Any]] = {
    "data": {"sequence": 128},
    "train": {"global_batch": 16, "microbatch": 2},
    "parallel": {"device": "cpu"},
}


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration.

    ranks: how many run it.  changes: keys of the config and their values.  fitted: whether its step calibrates.
    """

    model: str
    ranks: int
    changes: tuple[str, ...]
    fitted: bool = False

    @property
    def name(self) -> str:
        """The name in tables."""
        words = (change.partition(".")[2].replace("=", " ") for change in self.changes)
        return ", ".join([self.model, f"{self.ranks} rank" + "s"[: self.ranks > 1], *words])

    @property
    def config(self) -> Config:
        """All of its keys."""
        return from_dict({**BASE, "model": MODELS[self.model]}, overrides=self.changes, source=self.name)

    @property
    def plan(self) -> Plan:
        """The plan that the ranks run."""
        return self.config.to_plan(self.ranks)


def _alone() -> Iterator[Row]:
    """One rank: models, precisions, recomputing."""
    yield Row("small", 1, (), fitted=True)
    yield Row("small", 1, ("train.precision=bf16",))
    yield Row("small", 1, ("train.precision=fp64",))
    yield Row("small", 1, ("parallel.recompute=block",), fitted=True)
    yield Row("small", 1, ("parallel.recompute=selective",))
    yield Row("small", 1, ("data.sequence=256", "train.microbatch=1"))
    yield Row("wide", 1, ())
    yield Row("wide", 1, ("train.precision=bf16",), fitted=True)
    yield Row("wide", 1, ("train.precision=fp64",), fitted=True)
    yield Row("wide", 1, ("train.microbatch=4",))
    yield Row("deep", 1, ("parallel.recompute=block",))
    yield Row("llama", 1, (), fitted=True)
    yield Row("llama", 1, ("train.precision=bf16",))
    yield Row("llama", 1, ("parallel.recompute=block",))
    yield Row("gpt2", 1, (), fitted=True)
    yield Row("gpt2", 1, ("parallel.recompute=block",))


def _sharded() -> Iterator[Row]:
    """Two data-parallel ranks, of one group or of two."""
    yield Row("small", 2, ("parallel.layout=NNN",), fitted=True)
    yield Row("small", 2, ("parallel.layout=NNG",))
    yield Row("small", 2, ("parallel.layout=NGG",))
    yield Row("small", 2, ("parallel.layout=GGG",), fitted=True)
    yield Row("small", 2, ("parallel.layout=NNI", "parallel.intra=2"))
    yield Row("small", 2, ("parallel.layout=III", "parallel.intra=2"), fitted=True)
    yield Row("wide", 2, ("parallel.layout=NNG", "parallel.recompute=block"))
    yield Row("wide", 2, ("parallel.layout=GGG", "train.precision=bf16"))
    yield Row("wide", 2, ("parallel.layout=NGG",), fitted=True)
    yield Row("deep", 2, ("parallel.layout=NNG", "parallel.intra=2"))
    yield Row("llama", 2, ("parallel.layout=GGG",))
    yield Row("gpt2", 2, ("parallel.layout=NGG",))


def _staged() -> Iterator[Row]:
    """A pipeline of two ranks."""
    for schedule in ("gpipe", "1f1b", "zb-h1", "zb-v"):
        yield Row("small", 2, ("parallel.pipeline=2", f"parallel.schedule={schedule}"), fitted=schedule == "1f1b")
    yield Row("small", 2, ("parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.chunks=2"))
    yield Row("small", 2, ("parallel.pipeline=2", "parallel.schedule=zb-h1", "parallel.recompute=selective"))
    yield Row("wide", 2, ("parallel.pipeline=2", "parallel.schedule=zb-h1", "train.precision=bf16"))
    yield Row("wide", 2, ("parallel.pipeline=2", "parallel.schedule=1f1b", "parallel.recompute=block"))
    yield Row("deep", 2, ("parallel.pipeline=2", "parallel.schedule=zb-v"))
    yield Row("llama", 2, ("parallel.pipeline=2", "parallel.schedule=zb-h1"))
    yield Row("gpt2", 2, ("parallel.pipeline=2", "parallel.schedule=1f1b"))


def _split() -> Iterator[Row]:
    """Two tensor-parallel ranks."""
    yield Row("small", 2, ("parallel.tensor=2",))
    yield Row("wide", 2, ("parallel.tensor=2",), fitted=True)
    yield Row("wide", 2, ("parallel.tensor=2", "parallel.sequence_parallel=true"))
    yield Row("gpt2", 2, ("parallel.tensor=2",))
    yield Row("gpt2", 2, ("parallel.tensor=2", "parallel.recompute=block"))


REAL = (*_alone(), *_sharded(), *_staged(), *_split())
"""Those that compute."""


def _emulated() -> Iterator[Row]:
    """Four ranks: pipelines, and pipelines of sharded ranks."""
    for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"):
        yield Row("tiny", 4, ("parallel.pipeline=4", f"parallel.schedule={schedule}"))
    yield Row("tiny", 4, ("parallel.pipeline=4", "parallel.schedule=interleaved", "parallel.chunks=2"))
    yield Row("tiny", 4, ("parallel.pipeline=4", "parallel.schedule=1f1b", "parallel.recompute=block"))
    for layout in ("NNN", "NNG", "NGG", "GGG"):
        yield Row("tiny", 4, ("parallel.pipeline=2", "parallel.schedule=zb-h1", f"parallel.layout={layout}"))
    yield Row("tiny", 4, ("parallel.layout=IIG", "parallel.intra=2"))
    yield Row("tiny", 4, ("parallel.layout=GGG", "parallel.intra=2"))


EMULATED = tuple(_emulated())
"""Those that sleep for as long as a given device would compute."""

LAYOUTS = tuple(
    Row("small", 4, (f"parallel.layout={layout.name}", "parallel.intra=2", "train.global_batch=32"))
    for layout in EFFECTIVE
)
"""Those whose bytes are counted by component: two groups of two ranks."""


def _mixtures() -> Iterator[Row]:
    """A mixture whose tokens are spread evenly over its experts, on four ranks."""
    group = "parallel.intra=4", "train.global_batch=32"
    for layout, expert in (("NNG", 1), ("NNG", 2), ("GGG", 1), ("GGG", 2), ("GGG", 4), ("IIG", 2)):
        yield Row("mixture", 4, (f"parallel.layout={layout}", f"parallel.expert={expert}", *group))
    yield Row("mixture", 4, ("parallel.layout=GGG", "parallel.expert=2", "parallel.recompute=block", *group))
    yield Row("mixture", 4, ("parallel.layout=NNG", "parallel.expert_layout=GGG", "parallel.expert=2", *group))
    pair = "parallel.intra=2", "parallel.expert=2", "train.global_batch=32"
    yield Row("mixture", 4, ("parallel.layout=GGG", *pair))
    yield Row("mixture", 4, ("parallel.pipeline=2", "parallel.schedule=zb-h1", "parallel.layout=NNG", *pair))
    yield Row("mixture", 4, ("parallel.tensor=2", "parallel.layout=GGG", *pair))


MIXTURES = tuple(_mixtures())
"""Those with experts, whose bytes are counted."""


def _hosted() -> Iterator[Row]:
    """Two ranks, with state, parameters, gradients or activations in host memory. Adam's fused kernel is a GPU's."""
    given = "train.precision=bf16", "train.optimizer_options.fused=true"
    on_device, on_host = "parallel.host.optimizer=update-on-device", "parallel.host.optimizer=update-on-host"
    parameters, gradients = "parallel.host.parameters=all", "parallel.host.gradients=true"
    activations, block = "parallel.host.activations=1.0", "parallel.recompute=block"

    def staged(schedule: str) -> tuple[str, ...]:
        return *given, "parallel.pipeline=2", f"parallel.schedule={schedule}"

    yield Row("tall", 2, (*staged("zb-v"), on_device))
    yield Row("tall", 2, (*staged("1f1b"), on_host, parameters))
    yield Row("tall", 2, (*staged("zb-h1"), on_device, parameters, gradients))
    yield Row("tall", 2, (*staged("1f1b"), activations))
    yield Row("tall", 2, (*staged("zb-v"), on_host, activations, block))
    yield Row("tall", 2, (*given, "parallel.layout=NGG", on_device, gradients))
    yield Row("tall", 2, (*given, "parallel.layout=NGG", on_host, parameters, block))
    yield Row("tall", 2, (*given, "parallel.layout=GGG", on_host, parameters, gradients, block))


def _sliced() -> Iterator[Row]:
    """Two ranks that compute sequences in slices, some of which are shorter than others."""
    four, eight, longer = "parallel.slices=4", "parallel.slices=8", "data.sequence=1024"

    def staged(schedule: str, *others: str) -> tuple[str, ...]:
        return longer, "train.global_batch=8", "parallel.pipeline=2", f"parallel.schedule={schedule}", *others

    yield Row("small", 2, staged("1f1b", four))
    yield Row("small", 2, staged("1f1b", eight))
    yield Row("wide", 2, staged("gpipe", four, "parallel.recompute=block"))
    yield Row("wide", 2, staged("zb-h1", four, "parallel.recompute=selective"))
    yield Row("deep", 2, staged("zb-v", eight, "train.precision=bf16"))
    yield Row("deep", 2, staged("interleaved", four, "parallel.chunks=2"))
    yield Row("small", 2, staged("1f1b", four, "parallel.slice_work=0.002"))
    yield Row("llama", 2, staged("zb-h1", four, "train.precision=bf16"))
    yield Row("wide", 2, (longer, "train.global_batch=4", "parallel.intra=2", "parallel.sequence=2", four))


def _chunked() -> Iterator[Row]:
    """One or two ranks whose loss is computed in chunks."""
    four, many = "parallel.loss_chunks=4", "parallel.loss_chunks=32"
    given = "data.sequence=512", "train.global_batch=8", "train.microbatch=2"
    yield Row("small", 1, (*given, four))
    yield Row("wide", 1, (*given, many, "parallel.recompute=block"))
    yield Row("llama", 1, (*given, four, "train.precision=bf16"))


def _chunked_of_two() -> Iterator[Row]:
    four = "parallel.loss_chunks=4"
    given = "data.sequence=512", "train.global_batch=8", "train.microbatch=2", four
    yield Row("small", 2, (*given, "parallel.pipeline=2", "parallel.schedule=zb-h1"))
    yield Row("deep", 2, (*given, "parallel.pipeline=2", "parallel.schedule=zb-v", "train.precision=bf16"))
    yield Row("wide", 2, (*given, "parallel.layout=GGG", "parallel.recompute=selective"))
    yield Row("wide", 2, (*given, "parallel.layout=GGG", "parallel.recompute=block", "train.precision=bf16"))
    yield Row("small", 2, (*given, "parallel.tensor=2"))
    yield Row("llama", 2, (*given, "parallel.pipeline=2", "parallel.slices=2"))


CHUNKED = tuple(_chunked()), tuple(_chunked_of_two())
"""Those with a loss in chunks, of one rank and of two, whose bytes are counted."""

SLICED = tuple(_sliced())
"""Those with slices of sequences, whose bytes are counted."""

HOSTED = tuple(_hosted())
"""Those with host memory, whose bytes on the device are counted."""
