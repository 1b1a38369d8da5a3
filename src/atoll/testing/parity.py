"""Parity of n ranks with one: train a tiny model by a plan, and compare it with the unsplit model
(`atoll.testing.reference`)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from atoll.base.errors import CostWarning
from atoll.plans import schedules
from atoll.plans.host import HostState
from atoll.plans.ir.residency import Reduction, Residency
from atoll.plans.layouts import NO_CODECS, Codec, Codecs, Float8, Layout, Precision
from atoll.plans.outer import Outer
from atoll.plans.plan import AXES, MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.runtime.pipeline.routing import Balance
from atoll.runtime.pipeline.step_end import StepResult
from atoll.runtime.sharding.muon import Muon
from atoll.runtime.sharding.optimizer import decay_matrices
from atoll.runtime.sharding.tensors import whole_output
from atoll.runtime.transport import GlooTransport
from atoll.testing.buffers import rank_buffers
from atoll.testing.coded import CodecKind, Setting
from atoll.testing.pool import run_ranks
from atoll.testing.reference import (
    History,
    Recipe,
    ReferenceMuon,
    convert_layers,
    rows,
    rule_of,
    start,
    train_alone,
    train_islands,
)
from atoll.testing.tiny import TinyConfig

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Parity:
    """The result of a comparison: `print` it.

    worst: the largest `difference`.  where: its location as text.  histories: of the ranks.
    """

    case: Case
    worst: float
    where: str
    histories: list[History]

    def __str__(self) -> str:
        names = {name for history in self.histories for name in history.parameters}
        several = f"{self.case.ranks} ranks" if self.case.ranks > 1 else "1 rank"
        return (
            f"{several} against one process: loss and gradient norm of {self.case.steps} steps, and {len(names)} "
            f"parameters after them; the largest difference is {self.worst:.2g}, at {self.where}"
        )


@dataclass(frozen=True, slots=True)
class Case:
    """One run: a tiny model, a plan and an optimizer. `microbatches` are of all ranks together.

    optimizer: one of torch.optim; "Muon" is that of hidden matrices with AdamW for the rest.  options: what it takes
    besides `lr`, with pairs in place of mappings.
    """

    layout: str = "NNN"
    pipeline: int = 1
    inter: int = 1
    intra: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    vocabulary_parallel: bool = False
    schedule: str = "1f1b"
    microbatches: int = 8
    microbatch: int = 1
    precision: str = "fp64"
    recompute: str = "none"
    post_validation: bool = False
    compile: str = "none"
    prefetch: int | None = None
    reads_in_place: bool = True
    residency: Residency | None = None
    reduction: Reduction = "microbatch"
    unit: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    steps: int = 3
    clip: float | None = 0.05
    lr: float = 1e-2
    optimizer: str = "AdamW"
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 3
    device: str = "cpu"
    order: tuple[str, ...] = AXES
    codecs: Codecs = NO_CODECS
    outer: Outer | None = None
    expert: int = 1
    sequence: int = 1
    slices: int = 1
    slice_work: float = 0.0
    loss_chunks: int = 1
    expert_layout: str | None = None
    host: HostState | None = None
    balance: Balance | None = None
    bad_steps: str = "stop"
    float8: Float8 | None = None
    model: Recipe = field(default_factory=TinyConfig)

    @property
    def ranks(self) -> int:
        """World size."""
        return self.pipeline * self.inter * self.intra * self.tensor

    @property
    def plan(self) -> Plan:
        """The plan that the ranks run."""
        mesh = MeshShape(self.pipeline, self.inter, self.intra, self.tensor, self.order, self.expert, self.sequence)
        options: dict[str, Any] = {} if self.slices == 1 else {"slices": self.slices}
        count = self.microbatches // mesh.shares
        schedule = schedules.build(self.schedule, ranks=self.pipeline, microbatches=count, **options)
        precision = replace(Precision.preset(self.precision), products=self.float8)
        return Plan(
            mesh,
            Layout(self.layout),
            schedule,
            self.microbatch,
            precision=precision,
            recompute=self.recompute,
            post_validation=self.post_validation,
            compile=self.compile,
            prefetch=self.prefetch,
            residency=self.residency,
            reduction=self.reduction,
            unit=self.unit,
            sequence_parallel=self.sequence_parallel,
            vocabulary_parallel=self.vocabulary_parallel,
            layers_per_stage=self.layers_per_stage,
            codecs=self.codecs,
            outer=self.outer,
            expert_layout=None if self.expert_layout is None else Layout(self.expert_layout),
            host=self.host,
            slice_work=self.slice_work,
            loss_chunks=self.loss_chunks,
        )

    @property
    def islands(self) -> int:
        """Parts of the world that train independently."""
        return 1 if self.outer is None else self.inter

    @property
    def encodes_outer(self) -> bool:
        """True if outer gradients have a codec."""
        return self.outer is not None and self.outer.codec is not None

    @property
    def samples(self) -> int:
        """Number of samples per step over all ranks."""
        return self.microbatches * self.microbatch

    def engine(self) -> Engine:
        """Return this rank's engine."""
        with torch.device("meta"):
            model = self.model.build()
        if rule_of(self.model, model) is None:
            model = unsplit(self)
        with patch.object(GlooTransport, "shares_memory", self.reads_in_place), warnings.catch_warnings():
            warnings.simplefilter("ignore", CostWarning)
            return Engine(
                model,
                self.plan,
                optimizer=self.optimizer_of_engine(),
                groups=decay_matrices(0.1),
                clip=self.clip,
                seed=self.seed,
                device=self.device,
                loss=getattr(self.model, "engine_loss", None),
                balance=self.balance,
                bad_steps=self.bad_steps,
            )

    def optimizer_of_engine(self) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
        """Return what the engine is given as its optimizer."""
        if self.optimizer != "Muon":
            return self.make_optimizer
        mappings = ("split", "adamw")
        options: dict[str, Any] = {key: dict(value) if key in mappings else value for key, value in self.options}
        return Muon(lr=self.lr, **options)

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the optimizer of some groups: of Muon, that of the reference."""
        if self.optimizer == "Muon":
            return ReferenceMuon(groups, lr=self.lr, **dict(self.options))
        made: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(groups, lr=self.lr, **dict(self.options))
        return made

    def share(self, engine: Engine, step: int) -> dict[str, Any]:
        """Return a data-parallel rank's samples of a step: consecutive microbatches."""
        batch = self.model.batch(step, self.samples)
        each = self.samples // engine.plan.mesh.shares
        return rows(batch, engine.place.share * each, each, "cpu")


def units_of(engine: Engine) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters of each unit of the model, for `references` of islands."""
    return tuple(spec.names for spec in engine._sharded.specs) if engine.outer is not None else ()


def whole_parameters(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the rank's units gathered, as copies by parameter name."""
    values = {}
    for unit in engine.units:
        unit.gather()
        values.update({name: whole_output(p.detach()).clone() for name, p in unit.parameters.items()})
        unit.free()
    return values


def biases_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the selection biases that the engine steps, by the names of what has them."""
    names = {id(buffer): name.rpartition(".")[0] for name, buffer in engine.model.named_buffers()}
    return {names[id(load.bias)]: load.bias.clone() for load in engine._end.routers.loads}


def results(case: Case, engine: Engine, first: int = 0) -> Iterator[StepResult]:
    """Return the results of steps first..steps-1, run without pauses."""
    share = case.share(engine, first)
    for step in range(first, case.steps):
        following = case.share(engine, step + 1) if step + 1 < case.steps else None
        result = engine.submit(share, following)
        if result is not None:
            yield result
        share = following or {}
    last = engine.settle()
    if last is not None:
        yield last


def train_case(case: Case, first: int = 0) -> History:
    """Run a case in this rank, steps first..steps-1."""
    return _train_with_units(case, first)[0]


def _train_with_units(case: Case, first: int = 0) -> tuple[History, tuple[tuple[str, ...], ...]]:
    engine = case.engine()
    history = History()
    for result in results(case, engine, first):
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.parameters = whole_parameters(engine)
    history.biases = biases_of(engine)
    if case.codecs.is_between_groups:
        with engine.full_parameters() as masters:
            history.masters = {name: value.clone() for name, value in masters.items()}
    if case.codecs.is_between_groups or case.encodes_outer:
        history.buffers = tuple(rank_buffers(case.model, engine))
    units = units_of(engine)
    engine.close()
    return history, units


def _kind(codec: Codec | None) -> CodecKind | None:
    return None if codec is None else CodecKind(codec.name, codec.block, codec.rounding == "stochastic")


def setting_of(case: Case, histories: Sequence[History]) -> Setting | None:
    """The codecs of a case for its reference. histories: of its ranks, which say where they have what."""
    codecs = case.codecs
    if case.outer is not None:  # codecs of moves within a step have no effect
        codecs = Codecs(case.outer.codec, feedback=case.outer.feedback)
    if not codecs.is_between_groups or case.inter == 1:
        return None
    places = [case.plan.mesh.place(rank) for rank in range(case.ranks)]
    firsts = [place.inter == 0 and place.intra < place.mesh.expert for place in places]
    own = [history.buffers for history, is_first in zip(histories, firsts, strict=True) if is_first]
    buffers = tuple(buffer for each in own for buffer in each)
    gradient, parameter = _kind(codecs.gradient), _kind(codecs.parameter)
    return Setting(case.inter, case.intra, gradient, parameter, codecs.feedback, case.seed, buffers)


def reference(case: Case, codecs: Setting | None = None) -> History:
    """Run the same training of the unsplit model in one process: no layout, schedule, adapter or engine. codecs: where
    messages are encoded, if they are."""
    return references(case, codecs=codecs)[0]


@lru_cache(maxsize=64)
def references(case: Case, units: tuple[tuple[str, ...], ...] = (), codecs: Setting | None = None) -> list[History]:
    """Run it for each island. units: names of the parameters of each unit of the model, needed for islands only.
    codecs: where messages are encoded, if they are."""
    common: dict[str, Any] = {
        "seed": case.seed,
        "dtype": _DTYPES[case.precision],
        "device": case.device,
        "steps": case.steps,
        "microbatches": case.microbatches,
        "microbatch": case.microbatch,
        "optimizer": case.make_optimizer,
        "clip": case.clip,
    }
    if case.outer is None:
        balance = None if case.balance is None else asdict(case.balance)
        convert = None
        if case.float8 is not None:
            options: dict[str, Any] = {"recipe": case.float8.recipe, "takes": case.float8.takes}
            convert = partial(convert_layers, **options, tensor=case.tensor)
        return [train_alone(case.model, **common, codecs=codecs, balance=balance, convert=convert)]
    outer, unit_of = case.outer, {name: at for at, names in enumerate(units) for name in names}
    return train_islands(
        case.model,
        islands=case.inter,
        outer={
            "every": outer.every,
            "fragments": outer.count(len(units)),
            "delay": outer.delay,
            "lr": outer.rate,
            "momentum": outer.inertia,
            "nesterov": outer.optimizer == "nesterov",
            "mix": outer.own_share,
        },
        fragment_of=lambda name: outer.fragment_of(unit_of[name], len(units)),
        **common,
        codecs=codecs,
    )


def unsplit(case: Case) -> nn.Module:
    """Return the unsplit model with which the reference starts."""
    return start(case.model, case.seed).to(device=case.device, dtype=_DTYPES[case.precision])


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return max|a-b| / max(1e-2, max|b|), the measure of DESIGN.md ("Same result")."""
    largest = max(1e-2, float(wanted.abs().max()) if wanted.numel() else 0.0)
    return float((got.double() - wanted.double()).abs().max()) / largest if got.numel() else 0.0


def worst_difference(got: History, wanted: History) -> tuple[float, str]:
    """Return the largest difference of two histories and its location; parameters that `got` does not hold are left
    out.

    NaN has an infinite difference from everything: every comparison with it is false, so `max` would pass over it.
    """
    found = [(0.0, "nothing")]
    for step, (a, b) in enumerate(zip(got.losses, wanted.losses, strict=True)):
        found.append((abs(a - b) / max(1e-2, abs(b)), f"loss of step {step + 1}: {a} against {b}"))
    for step, (a, b) in enumerate(zip(got.norms, wanted.norms, strict=True)):
        found.append((abs(a - b) / max(1e-2, abs(b)), f"gradient norm of step {step + 1}: {a} against {b}"))
    for name, value in got.parameters.items():
        found.append((difference(value, wanted.parameters[name]), f"parameter {name}"))
    for name, value in got.biases.items():
        found.append((difference(value, wanted.biases[name]), f"selection bias of {name}"))
    for name, value in got.masters.items():
        if wanted.masters:
            found.append((difference(value, wanted.masters[name]), f"master of {name}"))
    for name, value in got.gradients.items():
        gradient = wanted.gradients.get(name, torch.zeros(()))  # torch has none for unused parameters
        found.append((difference(value, gradient), f"gradient of {name} in step 1"))
    return max((math.inf if math.isnan(worst) else worst, where) for worst, where in found)


def assert_parity(case: Case, *, tolerance: float = 1e-10) -> Parity:
    """Run a case on its ranks and compare every rank with the single process. Return the comparison."""
    worst, where, histories = measure_parity(case)
    assert worst <= tolerance, f"{case}: {where}"
    return Parity(case, worst, where.partition(" at ")[2] or where, histories)


def measure_parity(case: Case) -> tuple[float, str, list[History]]:
    """Run a case on its ranks. Return the largest difference of any from the single process, its location, and the
    ranks' histories. Infinite if no rank holds a parameter."""
    place = case.plan.mesh.place  # before the ranks: a search's kernels are compiled once, here, and cached
    trained = run_ranks(_train_with_units, case.ranks, case, timeout=180)
    histories = [history for history, _ in trained]
    wanted = references(_neutral(case), trained[0][1], setting_of(case, histories))
    of = [wanted[0 if case.outer is None else place(rank).inter] for rank in range(case.ranks)]
    found = [
        (*worst_difference(history, own), rank) for rank, (history, own) in enumerate(zip(histories, of, strict=True))
    ]
    worst, where, rank = max(found)
    missing = set(wanted[0].parameters).difference(*(history.parameters for history in histories))
    if missing:
        return float("inf"), f"no rank holds {sorted(missing)}", histories
    return worst, f"rank {rank} differs by {worst:.3g} at {where}", histories


def assert_checkpoint_parity(first: Case, second: Case, folder: Path) -> None:
    """Run one step of `first`, save it in `folder`, load it, continue with `second`, and compare with the single
    process."""
    run_ranks(_save_one_step, first.ranks, first, folder)
    wanted = reference(_neutral(second)).parameters
    seen = set()
    for values in run_ranks(_load_and_finish, second.ranks, second, folder):
        for name, value in values.items():
            assert difference(value, wanted[name]) <= 1e-10, name
            seen.add(name)
    assert seen == set(wanted)


def _save_one_step(case: Case, folder: Path) -> None:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    engine.save(folder)
    engine.close()


def _load_and_finish(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    engine = case.engine()
    engine.load(folder)
    for step in range(1, case.steps):
        engine.step(case.share(engine, step))
    values = whole_parameters(engine)
    engine.close()
    return values


def _neutral(case: Case) -> Case:
    """Return the case with the same single process."""
    return replace(
        case,
        layout="NNN",
        pipeline=1,
        inter=case.islands,
        intra=1,
        tensor=1 if case.float8 is None else case.tensor,  # which scales of factors follow
        sequence_parallel=False,
        vocabulary_parallel=False,
        schedule="1f1b",
        recompute="none",
        post_validation=False,
        compile="none",
        residency="action",
        reduction="microbatch",
        unit=1,
        prefetch=None,
        reads_in_place=True,
        layers_per_stage=None,
        codecs=NO_CODECS,
        expert=1,
        expert_layout=None,
        host=None,
        loss_chunks=1,
    )
