"""What the pages say is missing or refused is tried: a page that says so of what works is wrong.

Each sentence, item and row of a section with one of `HEADINGS` is a key of `CLAIMS`, as it stands there, and has tries:
what a user would write, and words of the error. A paragraph that ends in a colon only introduces what follows.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import atoll
from atoll import Engine, Layout, MeshShape, Outer, Plan
from atoll.base.errors import AtollError
from atoll.plans import schedules
from atoll.plans.federation.records import Notice
from atoll.plans.federation.rounds import begin, hear
from atoll.plans.federation.rules import FederationRules
from atoll.plans.host import HostState
from atoll.runtime.assemble.describe import describe_rank
from atoll.runtime.federation.elements import ElementName, TensorPart, check_covered, check_sizes
from atoll.runtime.models import SequentialAdapter, adapter_for
from atoll.runtime.models.weights import weights_for
from atoll.runtime.rendezvous import host_store, torchrun_environment
from atoll.testing import run_ranks
from atoll.testing.tiny import TinyConfig
from atoll.training.config import Config, Train, from_dict
from atoll.training.dry_run import check_run
from atoll.training.models.sources import check_source
from atoll.training.output.lock import RunLock
from atoll.training.process import Request
from atoll.training.setup.optimizers import named_optimizer
from tests.mixtures import Mixture
from tests.pages import ROOT, name_of

HEADINGS = ("What is missing", "What is refused", "What is refused before anything starts", "What does not work yet")

Try = Callable[[Path], object]
"""Does what is refused. It is given an empty folder."""


RULES, NOTICE = FederationRules(("a", "b"), fragments=1), Notice("a", "aa", "ab")


def _beat(number: int) -> Notice:
    return Notice("b", "bb", "ab", beat=number)


@dataclass(frozen=True)
class Tried:
    """A try, and words of its error: a pattern. is_slow: it needs several ranks."""

    does: Try
    words: str
    is_slow: bool = False


def configured(**sections: Any) -> Tried:
    """Of a config's sections; its plan. words: what the error says."""
    words = sections.pop("words")
    return Tried(lambda _: from_dict(sections).to_plan(), words)


def dry_run(words: str, write: Callable[[Path], object] = lambda folder: None, **keys: Any) -> Tried:
    """Of a run that is only checked. write: is given the folder first.  keys: of [data] and [run], relative to it."""

    def check(folder: Path) -> None:
        write(folder)
        (folder / "text.txt").write_text("brown foxes\n" * 50)
        given = {"source": "text.txt", "tokenizer": "bytes", "sequence": "8", "cache": "cache", "folder": "run", **keys}
        sets = [f"{'run' if key == 'folder' else 'data'}.{key}={_at(folder, value)}" for key, value in given.items()]
        (folder / "config.toml").touch()
        check_run(Request(folder / "config.toml", tuple(sets)), elsewhere=True, say=lambda line: None)

    return Tried(check, words)


def _at(folder: Path, value: str) -> str:
    return str(folder / value) if value.endswith((".txt", ".json", "cache", "run", "elsewhere")) else value


def optimizer(name: str, words: str, **options: Any) -> Tried:
    return Tried(lambda _: named_optimizer(Train(optimizer=name, optimizer_options=options)), words)


# ---- engines


def plan_of(**changes: Any) -> Plan:
    mesh = changes.pop("mesh", MeshShape())
    schedule = schedules.build(changes.pop("schedule", "1f1b"), ranks=mesh.pipeline, microbatches=2)
    return Plan(mesh, Layout("NNN"), schedule, microbatch=1, **changes)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def built(model: Callable[[], nn.Module], *, make: Any = sgd, **changes: Any) -> Engine:
    return Engine(model(), plan_of(**changes), optimizer=make, device="cpu")


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return TinyConfig().build()


def chain(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(16, 8), *middle, nn.Linear(8, 16))


def with_a_parameter_outside() -> nn.Module:
    model = chain(nn.Linear(8, 8))
    model.extra = nn.Parameter(torch.ones(2))
    return model


def frozen() -> nn.Module:
    return tiny().requires_grad_(False)


def step(labels: int, samples: int = 2) -> Callable[[Path], None]:
    """A step with samples whose labels are all the same."""

    def play(_: Path) -> None:
        engine = built(tiny)
        try:
            batch = torch.full((samples, 4), 3)
            engine.step({"input_ids": batch, "labels": torch.full_like(batch, labels)})
        finally:
            engine.close()

    return play


def begin_otherwise() -> None:
    """Each rank draws values of its own."""
    torch.manual_seed(torch.distributed.get_rank())
    Engine(TinyConfig().build(), plan_of(mesh=MeshShape(intra=2)), optimizer=sgd, device="cpu")


def on_a_small_machine() -> None:
    """One byte is left there. away: bytes of activations, as predicted."""
    with patch("atoll.runtime.assemble.rank.free_memory", lambda: 1):
        host = HostState("update-on-host", activations=1.0)
        Engine(tiny(), plan_of(host=host), optimizer=sgd, device="cpu", away=[100])


class Norm(nn.BatchNorm1d):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.flatten(0, 1)).view(hidden.shape)


def train_buffers() -> None:
    torch.manual_seed(0)
    plan = plan_of(mesh=MeshShape(inter=2), outer=Outer(2))
    engine = Engine(chain(Norm(8)), plan, optimizer=sgd, device="cpu")
    own = torch.full((2, 4), 3 + engine.place.inter)
    engine.step({"input_ids": own, "labels": torch.full_like(own, 7)})


def described(model: Callable[[], nn.Module], **changes: Any) -> Try:
    """The program of the first rank, of a model on `meta`."""

    def make() -> nn.Module:
        with torch.device("meta"):
            return model()

    return lambda _: describe_rank(make, plan_of(**changes), 0)


class Gathered(nn.Sequential):
    """Its layers are split one by one."""

    def atoll_adapter(self) -> SequentialAdapter:
        return SequentialAdapter(self, tensor_plan={"1": "colwise_gather_output"})


def read_before_update(_: Path) -> None:
    engine = built(tiny, post_validation=True)
    try:
        batch = torch.full((2, 4), 3)
        engine.step({"input_ids": batch, "labels": batch}, before_update=lambda: None)
    finally:
        engine.close()


def quantized(folder: Path) -> None:
    with torch.device("meta"):
        adapter = adapter_for(TinyConfig().build())
    shapes = {name: value.shape for block in adapter.blocks() for name, value in block.named_parameters()}
    save_file(
        {name: torch.zeros(shape, dtype=torch.int8) for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    weights_for(adapter, folder)


def port_in_use(_: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        host_store("127.0.0.1", taken.getsockname()[1])


def lock_twice(folder: Path) -> None:
    with RunLock(folder).held(), RunLock(folder).held():
        pass


def source(name: str) -> Try:
    return lambda _: check_source(from_dict({"model": {"source": name}}))


HEADS = {"hidden": 64, "heads": 8, "kv_heads": 2}
ON_DISK = [
    configured(
        parallel={"zero_optimization": {"stage": 3, word: {"device": "nvme"}}},
        words=f"{word}.device = 'nvme': state rests in host memory at most",
    )
    for word in ("offload_optimizer", "offload_param")
]
WHOLE = [
    optimizer("Adafactor", "sums of the rows and columns of whole matrices"),
    optimizer("LBFGS", "searches along a line"),
    optimizer("SparseAdam", "sparse gradients"),
]
OUTER = {"outer": {"every": 4}}

CLAIMS: dict[tuple[str, str], list[Tried]] = {
    ("docs/migration.md", "State on NVMe"): ON_DISK,
    ("docs/migration.md", "Quantized frozen weights"): [Tried(quantized, "Quantized weights are not read")],
    (
        "docs/migration.md",
        "Rings of attention, for more ranks than there are heads, and sizes that differ by sample",
    ): [
        configured(parallel={"ranks": 8, "intra": 8, "sequence": 8}, words="does not divide model.heads = 4"),
        configured(parallel={"hybrid_context_parallel": True}, words="hybrid_context_parallel: unknown key"),
    ],
    ("docs/migration.md", "Experts with a capacity, and a balance loss over all tokens of a batch"): [
        configured(parallel={"moe_expert_capacity_factor": 1.25}, words="experts have no capacity"),
        configured(parallel={"moe_aux_loss_coeff": 0.01}, words="as a mean over sequences, not over a batch"),
    ],
    ("docs/migration.md", "FP8 in matrix products"): [configured(train={"precision": "fp8"}, words="train.precision")],
    (
        "docs/migration.md",
        "Adafactor, LBFGS and SparseAdam; of optimizers that need whole matrices there are "
        "[Muon](training.md#muon) and [your own](training.md#your-own-optimizer-of-whole-matrices)",
    ): WHOLE,
    (
        "docs/migration.md",
        "Training data of `atoll train` other than text and chats; your own training loop can pass `Engine.step` any "
        "batch that [an adapter](adapters.md) accepts",
    ): [configured(data={"format": "images"}, words="data.format")],
    # ---- errors
    ("docs/errors.md", "config keys that do not exist, and values out of range"): [
        configured(train={"stepss": 3}, words="train.stepss: unknown key"),
        configured(train={"lr": -1.0}, words="train.lr"),
    ],
    ("docs/errors.md", "sizes that do not factor"): [
        configured(train={"global_batch": 7, "microbatch": 2}, words="is not a multiple of train.microbatch"),
        configured(parallel={"ranks": 3, "intra": 2}, words="is not a multiple of pipeline"),
    ],
    ("docs/errors.md", "more stages than layers"): [
        configured(model={"layers": 1}, parallel={"ranks": 8, "pipeline": 8}, words="model.layers = 1")
    ],
    ("docs/errors.md", "heads that tensor-parallel ranks cannot share"): [
        configured(model=HEADS, parallel={"ranks": 4, "tensor": 4}, words="cannot split 2 key and value heads evenly")
    ],
    ("docs/errors.md", "layouts, schedules and codecs that do not exist"): [
        configured(parallel={"layout": "IIX"}, words="parallel.layout"),
        configured(parallel={"schedule": "2f2b"}, words="parallel.schedule"),
        configured(parallel={"codecs": {"gradient": "int3"}}, words="parallel.codecs.gradient"),
    ],
    ("docs/errors.md", "a corpus or tokenizer that is missing or too small"): [
        dry_run("nowhere.txt", source="nowhere.txt"),
        dry_run("nowhere.json", tokenizer="nowhere.json"),
        dry_run("data.sequence", sequence="100000"),
        dry_run("bpe-100", tokenizer="bpe-100"),
    ],
    ("docs/errors.md", "a run folder that cannot be written or that another run writes to"): [
        dry_run("run.folder", lambda folder: (folder / "run").touch()),
        Tried(lock_twice, "in use by another run"),
    ],
    ("docs/errors.md", "a port in use"): [Tried(port_in_use, "this port")],
    ("docs/errors.md", "inconsistent environment variables of a launcher"): [
        Tried(lambda _: torchrun_environment({"RANK": "0"}), "WORLD_SIZE"),
        Tried(
            lambda _: torchrun_environment(
                {"RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
            ),
            "RANK",
        ),
    ],
    ("docs/errors.md", "a model folder or family that does not exist"): [
        Tried(source("nowhere"), "model.source = 'nowhere'"),
        Tried(source("transformers:nothing"), "has no family 'nothing'"),
    ],
    (
        "docs/errors.md",
        "optimizers that are neither elementwise nor [Muon](training.md#muon), and options that an optimizer does not "
        "take",
    ): [
        *WHOLE,
        optimizer("tests.test_missing:Normed", "elementwise"),
        optimizer("Shampoo", "Shampoo"),
        optimizer("SGD", "amsgrad", amsgrad=True),
        optimizer("Muon", "amsgrad", amsgrad=True),
    ],
    ("docs/errors.md", "state on a disk"): ON_DISK,
    ("docs/errors.md", "a model without an adapter"): [Tried(lambda _: built(lambda: nn.Linear(2, 2)), "adapter")],
    ("docs/errors.md", "parameters outside of all blocks"): [
        Tried(lambda _: built(with_a_parameter_outside), "parameters that are in no block: extra")
    ],
    ("docs/errors.md", "a model without trainable parameters"): [
        Tried(lambda _: built(frozen), "no trainable parameter")
    ],
    (
        "docs/errors.md",
        "optimizers that need whole matrices and are neither `atoll.Muon` nor an "
        "[`MatrixUpdate`](training.md#your-own-optimizer-of-whole-matrices)",
    ): [
        Tried(lambda _, name=name: built(tiny, make=getattr(torch.optim, name)), "whole matrices")
        for name in ("Adafactor", "LBFGS", "Muon")
    ],
    ("docs/errors.md", "batches of another size than the plan's"): [
        Tried(step(3, samples=3), r"share is 2 \(2 microbatches of 1\)")
    ],
    ("docs/errors.md", "a step without a label that counts"): [Tried(step(-100), "label")],
    ("docs/errors.md", "initial values that differ between ranks"): [
        Tried(lambda _: run_ranks(begin_otherwise, 2), "seed", is_slow=True)
    ],
    (
        "docs/errors.md",
        "[host memory](host.md#memory) that a machine does not have for all of its ranks, activations included where "
        "their bytes are predicted",
    ): [Tried(lambda _: on_a_small_machine(), r"has 1 B of memory left, .* B for activations; use a smaller fraction")],
    # ---- outer steps
    ("docs/outer.md", "one island"): [configured(parallel={"ranks": 2, "intra": 2, **OUTER}, words="there is one")],
    ("docs/outer.md", "`fragments` or `delay` that do not fit into `every`"): [
        Tried(lambda _: Outer(4, fragments=5), "use at most 4 fragments"),
        Tried(lambda _: Outer(4, delay=4), "0 to 3 steps"),
    ],
    (
        "docs/outer.md",
        '`bad_steps = "rollback N"`, which would bring one island back alone ("skip" skips a step on the island where '
        "it was bad)",
    ): [
        configured(
            train={"bad_steps": "rollback 1"}, parallel={"ranks": 2, **OUTER}, words="would bring one group back"
        )
    ],
    (
        "docs/outer.md",
        "buffers that a forward changes: they differ between islands, as they do between ranks",
    ): [Tried(lambda _: run_ranks(train_buffers, 2), "the forward changes buffers of 1", is_slow=True)],
    ("docs/islands.md", "another secret, another model, data, seed or rule: by name, on both sides"): [
        Tried(lambda _: hear(begin(NOTICE, RULES, 0.0), Notice("b", "bb", "cd"), 0.0), "trains something else"),
    ],
    ("docs/islands.md", "two islands of one name, an island with an older notice than one that was seen"): [
        Tried(lambda _: hear(begin(NOTICE, RULES, 0.0), Notice("a", "bb", "ab"), 0.0), "name of two islands"),
        Tried(lambda _: hear(hear(begin(NOTICE, RULES, 0.0), _beat(2), 0.0), _beat(1), 0.0), "an old one"),
    ],
    ("docs/islands.md", "a contribution of another size or with parts missing; one that is not finite is not sent"): [
        Tried(lambda _: check_sizes({TensorPart("w", 0, 4): ElementName("aa", 8)}, lambda part: 16), "expected 16"),
        Tried(lambda _: check_covered([TensorPart("w", 0, 4)], [TensorPart("w", 0, 2)]), "elements 2 to 3 of w"),
    ],
    (
        "docs/islands.md",
        '`bad_steps = "rollback N"`, and loading or editing parameters while the island takes part',
    ): [
        configured(
            train={"bad_steps": "rollback 2"},
            parallel={"outer": {"every": 4}},
            federation={"island": "a", "islands": {"a": "h:1", "b": "h:2"}, "secret": "s"},
            words="would bring one group back",
        ),
    ],
    # ---- combinations
    ("docs/together.md", "`tensor` above 1 and a model without a matching tensor-parallel plan"): [
        Tried(described(lambda: chain(nn.Linear(8, 8)), mesh=MeshShape(tensor=2)), "tensor_plan")
    ],
    ("docs/together.md", "`sequence_parallel` and layers that are not split by outputs and then by inputs"): [
        Tried(
            described(lambda: Gathered(*chain(nn.Linear(8, 8))), mesh=MeshShape(tensor=2), sequence_parallel=True),
            "sequence_parallel needs layers",
        )
    ],
    (
        "docs/together.md",
        "`vocabulary` and one pipeline rank, or a model whose embedding and head cannot be split",
    ): [
        Tried(described(tiny, vocabulary_parallel=True), "pipeline"),
        Tried(
            described(lambda: chain(nn.Linear(8, 8)), mesh=MeshShape(pipeline=2), vocabulary_parallel=True),
            "vocabulary",
        ),
    ],
    ("docs/together.md", "`expert` or `expert_layout` and a model without experts that can be divided"): [
        Tried(described(TinyConfig().build, mesh=MeshShape(intra=2, expert=2)), "the model has none that can be"),
        Tried(described(TinyConfig().build, expert_layout=Layout("GGG")), "the model has none that can be"),
    ],
    ("docs/together.md", "`expert` that does not divide `intra`, or, times `tensor`, the number of experts"): [
        Tried(lambda _: MeshShape(intra=3, expert=2), "does not divide intra = 3"),
        Tried(described(Mixture().build, mesh=MeshShape(intra=3, expert=3)), "has 8 experts"),
    ],
    ("docs/together.md", "`post_validation` and `before_update`"): [Tried(read_before_update, "turn one of them off")],
    ("docs/together.md", "more stages than blocks, or sizes that a schedule does not support"): [
        Tried(described(lambda: chain(), mesh=MeshShape(pipeline=4)), "blocks"),
        Tried(lambda _: schedules.build("dualpipe-v", ranks=4, microbatches=4), "dualpipe-v"),
    ],
    # ---- the first page
    (
        "README.md",
        "Of optimizers that need whole matrices Atoll has [Muon](docs/training.md#muon); Shampoo, SOAP or Dion would "
        "be an [optimizer of your own](docs/training.md#your-own-optimizer-of-whole-matrices). Adafactor and L-BFGS "
        "are refused with an error that names them.",
    ): [
        *WHOLE[:2],
        *(optimizer(name, f"no optimizer.*{name}|{name}") for name in ("Shampoo", "SOAP", "Dion")),
    ],
    (
        "README.md",
        "[Codecs](docs/codecs.md) encode what is sent between groups, along `inter`, and between stages. Inside a "
        "group nothing is encoded.",
    ): [
        Tried(
            lambda _: built(tiny, codecs=atoll.plans.layouts.Codecs(atoll.plans.layouts.Codec("int8"))),
            "the 1 data-parallel ranks are one group",
        )
    ],
    ("README.md", "What has not been proved on GPUs, see above."): [],
}


class Normed(torch.optim.SGD):
    """Not elementwise."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.grad /= value.grad.norm()
        super().step(closure)


def claims(page: Path) -> Iterator[str]:
    """The items, rows and sentences of a page's sections of what is missing."""
    parts = re.split(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for heading, section in zip(parts[1::2], parts[2::2], strict=True):
        if heading in HEADINGS:
            for paragraph in re.split(r"\n\n+|\n(?=- )", section.strip()):
                text = re.sub(r"\s+", " ", paragraph)
                if paragraph.startswith("|"):
                    _, _, *rows = paragraph.splitlines()
                    yield from (row.split("|")[1].strip() for row in rows)
                elif text.startswith("- "):
                    yield text.removeprefix("- ")
                elif not text.endswith(":"):
                    yield from re.split(r"(?<=\.) ", text)


PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def test_all_that_pages_say_is_missing_is_tried() -> None:
    said = [(name_of(page), claim) for page in PAGES for claim in claims(page)]
    assert set(said) - set(CLAIMS) == set(), "give each a try in CLAIMS"
    assert set(CLAIMS) - set(said) == set(), "no page says so any more"


@pytest.mark.parametrize(
    "tried",
    [
        pytest.param(tried, id=f"{page}-{claim[:40]}-{at}", marks=[pytest.mark.slow] * tried.is_slow)
        for (page, claim), tries in CLAIMS.items()
        for at, tried in enumerate(tries)
    ],
)
@pytest.mark.filterwarnings("error::atoll.base.errors.CostWarning")
def test_what_pages_say_is_missing_is_refused(tried: Tried, tmp_path: Path) -> None:
    # ValueError: of what another island shows, which is logged and not raised to the user.
    with pytest.raises((AtollError, UserWarning, ValueError), match=tried.words):
        tried.does(tmp_path)


def test_what_pages_except_works() -> None:
    """Muon, and offload of nothing."""
    found = named_optimizer(Train(optimizer="Muon"))
    assert found.whole is not None
    assert isinstance(from_dict({"train": {"optimizer": "Muon"}}), Config)
    engine = built(tiny, make=atoll.Muon(lr=0.02))
    engine.close()
