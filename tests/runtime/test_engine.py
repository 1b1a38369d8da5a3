"""The corners of the engine: what its hooks, its evaluation and its refusals do."""

from __future__ import annotations

import gc
import math
import re
import weakref
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atoll import Engine
from atoll.base.errors import PlanError, RankError, RunError
from atoll.plans.ir import Op, lower
from atoll.runtime.models import adapter_for, initialise_model
from atoll.runtime.pipeline.step_end import StepResult
from atoll.testing import run_ranks
from atoll.testing.parity import (
    Case,
    History,
    assert_parity,
    reference,
    train_case,
    unsplit,
    whole_parameters,
    worst_difference,
)
from atoll.testing.reference import token_loss
from atoll.testing.tiny import TinyConfig, tiny_batch, tiny_model
from tests.runtime.test_bad_steps import Poisoned, engine_of

EVERYTHING = TinyConfig.everything()


def make_engine(case: Case, model: nn.Module, **options: Any) -> Engine:
    chosen: dict[str, Any] = {"optimizer": lambda groups: torch.optim.SGD(groups, lr=0.1), "seed": case.seed}
    return Engine(model, case.plan, **{**chosen, **options})


def meta_model(config: TinyConfig) -> nn.Sequential:
    with torch.device("meta"):
        return tiny_model(config)


# ---- evaluation


def evaluate_between_steps(case: Case) -> tuple[list[float], list[float], list[Any], Any]:
    engine = case.engine()
    evaluated, losses, logits = [], [], []
    for step in range(case.steps):
        share = case.share(engine, 100 + step)
        evaluated.append(engine.evaluate(share).loss)
        given = engine.logits({"input_ids": tiny_batch(case.model, 100, 1)["input_ids"]})
        logits.append(None if given is None else given.clone())
        losses.append(engine.step(case.share(engine, step)).loss)
    parameters = whole_parameters(engine)
    engine.close()
    return evaluated, losses, logits, parameters


@pytest.mark.wide(1)
@pytest.mark.parametrize("layout", ["NNN", "IIG", "GGG"])
def test_evaluation_sees_the_new_values_and_changes_nothing(layout: str) -> None:
    case = Case(layout=layout, pipeline=2, intra=2, model=EVERYTHING)
    wanted = reference(replace(case, layout="NNN", pipeline=1, intra=1))
    model = unsplit(case).eval()
    batch = tiny_batch(EVERYTHING, 100, case.samples)
    with torch.no_grad():
        losses = [
            token_loss(model(ids[None]), labels[None])
            for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
        ]
        first_logits = model(tiny_batch(EVERYTHING, 100, 1)["input_ids"])
    first = float(sum(losses)) / int((batch["labels"] != -100).sum())
    for rank, (evaluated, trained, logits, parameters) in enumerate(run_ranks(evaluate_between_steps, 4, case)):
        assert math.isclose(evaluated[0], first, rel_tol=1e-10)
        assert len(set(evaluated)) == case.steps
        assert all(math.isclose(a, b, rel_tol=1e-10) for a, b in zip(trained, wanted.losses, strict=True))
        for name, value in parameters.items():
            assert torch.allclose(value, wanted.parameters[name], rtol=0, atol=1e-10), name
        is_last = rank >= 2
        assert (logits[0] is not None) == is_last
        if is_last:
            assert torch.allclose(logits[0], first_logits, rtol=0, atol=1e-10)


def evaluate_fewer(case: Case) -> tuple[float, float]:
    engine = case.engine()
    share = case.share(engine, 0)
    one = {name: value[:1] for name, value in share.items()}
    padded = {name: value[:2].clone() for name, value in share.items()}
    padded["labels"][1] = -100
    losses = engine.evaluate(one).loss, engine.evaluate(padded).loss
    engine.close()
    return losses


def test_evaluation_takes_fewer_microbatches_and_padding() -> None:
    case = Case(layout="GGG", pipeline=2, intra=2)
    for one, padded in run_ranks(evaluate_fewer, 4, case):
        assert one == padded


# ---- hooks


class _Checkpointing(nn.Module):
    """A user's block that recomputes part of itself, calls a module twice and takes what comes by keyword."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, hidden)
        self.twice = nn.Linear(hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = checkpoint(self._part, hidden, use_reentrant=False)
        out: Tensor = hidden + self.twice(torch.tanh(self.twice(mixed)))
        return out

    def _part(self, hidden: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.inner(hidden))
        return out


class _Merged(nn.Module):
    """A weight made of two others: its gradients need their values after the input's gradient has left."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.left = nn.Linear(hidden, 2, bias=False)
        self.right = nn.Linear(2, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        merged = self.right.weight @ self.left.weight
        return hidden + torch.tanh(hidden @ merged.T)


def corner_model(*, meta: bool) -> nn.Sequential:
    device = torch.device("meta" if meta else "cpu")
    with device:
        plain = tiny_model(TinyConfig(layers=2))
        return nn.Sequential(plain[0], _Checkpointing(8), plain[1], _Merged(8), plain[3])


class Corners:
    """The same as a recipe."""

    def build(self) -> nn.Module:
        return corner_model(meta=False)

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        return tiny_batch(TinyConfig(), step, samples)


def train_corners(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    engine = make_engine(case, corner_model(meta=True))
    losses = [engine.step(case.share(engine, step)).loss for step in range(case.steps)]
    parameters = whole_parameters(engine)
    engine.close()
    return losses, parameters


@pytest.mark.wide(2)
@pytest.mark.parametrize("layout", ["NNN", "INI", "IIG", "GGG"])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_users_checkpointing_modules_called_twice_and_merged_weights(layout: str, recompute: str) -> None:
    case = Case(layout=layout, pipeline=1, inter=2, intra=2, recompute=recompute)
    model = unsplit(replace(case, model=Corners()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(case.steps):
        batch = tiny_batch(case.model, step, case.samples)
        optimizer.zero_grad()
        loss = token_loss(model(batch["input_ids"]), batch["labels"]) / int((batch["labels"] != -100).sum())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    wanted = dict(model.named_parameters())
    for trained, parameters in run_ranks(train_corners, 4, case):
        assert all(math.isclose(a, b, rel_tol=1e-10) for a, b in zip(trained, losses, strict=True))
        for name, value in parameters.items():
            assert torch.allclose(value, wanted[name], rtol=0, atol=1e-10), name


def train_with_a_frozen_stage(case: Case) -> list[float]:
    model = meta_model(case.model)
    for at in (2, 3):
        model[at].requires_grad_(False)
    engine = make_engine(case, model)
    losses = [engine.step(case.share(engine, step)).loss for step in range(case.steps)]
    engine.close()
    return losses


def train_with_a_frozen_start(case: Case) -> list[float]:
    model = meta_model(case.model)
    for at in (0, 1, 2):
        model[at].requires_grad_(False)
    engine = make_engine(case, model)
    losses = [engine.step(case.share(engine, step)).loss for step in range(case.steps)]
    engine.close()
    return losses


@pytest.mark.wide(2)
@pytest.mark.parametrize("layout", ["NNG", "GGG"])
@pytest.mark.parametrize("function", [train_with_a_frozen_stage, train_with_a_frozen_start])
def test_a_stage_with_nothing_to_train_does_not_hang(function: Any, layout: str) -> None:
    """Past bug elsewhere: ZeRO-1 with a pipeline hangs when one stage has no trainable parameter."""
    alone = run_ranks(function, 1, Case())[0]
    assert alone[-1] != alone[0]
    for losses in run_ranks(function, 4, Case(layout=layout, pipeline=4)):
        assert all(math.isclose(a, b, rel_tol=1e-10) for a, b in zip(losses, alone, strict=True))


def read_freed(case: Case) -> tuple[bool, str, bool]:
    engine = case.engine()
    parameter = next(engine.model.parameters())
    reads_nan = bool(parameter.detach().isnan().all()) and tuple(parameter.shape) == (16, 8)
    try:
        with torch.no_grad():
            parameter.add_(1.0)
        written = "it did not raise"
    except RuntimeError as error:
        written = str(error)
    same = parameter is next(iter(engine.units[0].parameters.values()))
    engine.step(case.share(engine, 0))
    engine.close()
    return reads_nan, written, same and parameter is next(engine.model.parameters())


def test_a_freed_parameter_reads_nan_and_refuses_writes() -> None:
    for reads_nan, written, same in run_ranks(read_freed, 2, Case(layout="III", intra=2)):
        assert reads_nan
        assert "single memory location" in written
        assert same


def gradients_dropped_by_the_user(case: Case) -> Any:
    """`zero_grad(set_to_none=True)` on the model drops the views that gradients accumulate in."""
    engine = case.engine()
    for step in range(case.steps):
        engine.model.zero_grad(set_to_none=True)
        engine.step(case.share(engine, step))
    parameters = whole_parameters(engine)
    engine.close()
    return parameters


def test_dropping_gradients_between_steps_loses_nothing() -> None:
    case = Case(layout="NNG", intra=2)
    wanted = reference(replace(case, layout="NNN", intra=1)).parameters
    for parameters in run_ranks(gradients_dropped_by_the_user, 2, case):
        assert all(torch.allclose(value, wanted[name], rtol=0, atol=1e-10) for name, value in parameters.items())


def random_numbers_around_a_step(case: Case) -> bool:
    engine = case.engine()
    torch.manual_seed(5)
    undisturbed = torch.rand(3)
    torch.manual_seed(5)
    engine.step(case.share(engine, 0))
    engine.close()
    return torch.equal(undisturbed, torch.rand(3))


def test_a_step_leaves_the_users_generator_alone() -> None:
    assert run_ranks(random_numbers_around_a_step, 1, Case(model=TinyConfig(dropout=0.3))) == [True]


# ---- models that come with values, optimizers


def train_given_model(case: Case, differing: bool) -> Any:
    model = tiny_model(case.model)
    initialise_model(adapter_for(model), case.seed)
    rank = torch.distributed.get_rank()
    if differing and rank == 1:
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
    engine = Engine(
        model.double(),
        case.plan,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=case.lr, weight_decay=0.0),
        groups=lambda name, shape: {"weight_decay": 0.1 if len(shape) > 1 else 0.0},
        clip=case.clip,
        seed=case.seed,
    )
    for step in range(case.steps):
        engine.step(case.share(engine, step))
    parameters = whole_parameters(engine)
    engine.close()
    return parameters


def test_a_model_with_values_keeps_them() -> None:
    case = Case(layout="IIG", inter=2, intra=2, model=EVERYTHING)
    wanted = reference(replace(case, layout="NNN", inter=1, intra=1)).parameters
    for parameters in run_ranks(train_given_model, 4, case, False):
        assert all(torch.allclose(value, wanted[name], rtol=0, atol=1e-10) for name, value in parameters.items())


def test_a_model_whose_values_differ_between_ranks_is_refused() -> None:
    with pytest.raises(RankError, match="the initial state of 0\\.\\* differs between rank 0 and rank 1"):
        run_ranks(train_given_model, 2, Case(intra=2), True)


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3),
    "fused adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "muon": lambda groups: torch.optim.Muon(groups, lr=1e-2),
    "lbfgs": lambda groups: torch.optim.LBFGS(groups),
    "adafactor": lambda groups: torch.optim.Adafactor(groups),
}


def train_with(case: Case, optimizer: str) -> Any:
    engine = make_engine(case, meta_model(case.model), optimizer=OPTIMIZERS[optimizer])
    for step in range(case.steps):
        engine.step(case.share(engine, step))
    parameters = whole_parameters(engine)
    engine.close()
    return parameters


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", "fused adamw", "adagrad"])
def test_elementwise_optimizers_do_not_see_the_sharding(optimizer: str) -> None:
    case = Case(layout="IIG", inter=2, intra=2, model=EVERYTHING)
    (alone,) = run_ranks(train_with, 1, replace(case, layout="NNN", inter=1, intra=1), optimizer)
    for parameters in run_ranks(train_with, 4, case, optimizer):
        assert all(torch.allclose(value, alone[name], rtol=0, atol=1e-10) for name, value in parameters.items())


@pytest.mark.parametrize("optimizer", ["muon", "lbfgs", "adafactor"])
def test_an_optimizer_of_whole_matrices_is_refused_by_name(optimizer: str) -> None:
    with pytest.raises(RankError, match=rf"(?is){optimizer}.*needs whole matrices"):
        run_ranks(train_with, 1, Case(), optimizer)


def factory_arguments(case: Case) -> list[tuple[float, str, tuple[int, ...], int, int]]:
    seen: list[dict[str, Any]] = []

    def factory(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        seen.extend({**group, "params": list(group["params"])} for group in groups)
        return torch.optim.SGD(groups, lr=0.1)

    decay = {"groups": lambda name, shape: {"weight_decay": 0.5 if len(shape) > 1 else 0.0}}
    engine = make_engine(case, meta_model(case.model), optimizer=factory, **decay)
    engine.close()
    return [
        (group["weight_decay"], part.parameter_name, tuple(part.global_shape), part.start, part.stop)
        for group in seen
        for part in group["params"]
    ]


def test_the_factory_gets_groups_of_slices_that_cover_every_parameter() -> None:
    case = Case(layout="GGG", inter=2, intra=2, model=TinyConfig(odd=True, small=True))
    covered: dict[str, list[range]] = {}
    for parts in run_ranks(factory_arguments, 4, case):
        for decay, name, shape, start, stop in parts:
            assert decay == (0.5 if len(shape) > 1 else 0.0)
            covered.setdefault(name, []).append(range(start, stop))
    shapes = {name: p.shape for name, p in tiny_model(case.model).named_parameters()}
    assert set(covered) == set(shapes)
    for name, shape in shapes.items():
        elements = sorted(at for part in covered[name] for at in part)
        assert elements == list(range(math.prod(shape))), name


# ---- refusals and failures


def refuse_then_go_on(case: Case) -> tuple[str, int, float]:
    engine = case.engine()
    share = case.share(engine, 0)
    wrong = {name: value[:-1] for name, value in share.items()} if engine.place.rank == 1 else share
    try:
        engine.step(wrong)
        said, code = "it did not raise", 0
    except (PlanError, RankError) as error:
        said, code = str(error), error.exit_code
    loss = engine.step(share).loss
    engine.close()
    return said, code, loss


def test_a_refused_batch_is_refused_on_every_rank_and_nothing_is_lost() -> None:
    case = Case(layout="IIG", inter=2, intra=2)
    wanted = reference(replace(case, layout="NNN", inter=1, intra=1)).losses[0]
    for said, code, loss in run_ranks(refuse_then_go_on, 4, case):
        assert "rank 1 was given a batch" in said
        given = re.search(r"share is (\d+) \((\d+) microbatches of (\d+)\)", said)
        assert given is not None, said
        assert int(given[1]) == int(given[2]) * int(given[3])
        assert code == 2
        assert math.isclose(loss, wanted, rel_tol=1e-10)


class _Breaks(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        if torch.distributed.get_rank() == 1:
            raise ValueError("a defect of the user's model")
        return hidden


def break_in_one_rank(case: Case) -> None:
    model = meta_model(case.model)
    engine = make_engine(case, nn.Sequential(*model[:3], _Breaks(), *model[3:]))
    engine.step(case.share(engine, 0))


def test_an_error_in_one_rank_names_the_rank_the_step_and_the_action() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(break_in_one_rank, 4, Case(layout="NNG", pipeline=2, intra=2))
    assert "rank 1 (pp 0, inter 0, intra 1, tp 0), step 1, action 0F0, global microbatch 4" in str(caught.value)
    assert "ValueError: a defect of the user's model" in str(caught.value)


class _Explodes(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.inf


def explode(case: Case) -> tuple[str, bool]:
    model = meta_model(case.model)
    engine = make_engine(case, nn.Sequential(*model[:3], _Explodes(), *model[3:]))
    before = whole_parameters(engine)
    try:
        engine.step(case.share(engine, 0))
        said = "it did not raise"
    except RunError as error:
        said = str(error)
    after = whole_parameters(engine)
    return said, all(torch.equal(before[name], after[name]) for name in before)


def test_a_loss_that_is_not_finite_updates_nothing() -> None:
    for said, unchanged in run_ranks(explode, 2, Case(layout="NNG", intra=2)):
        assert "not finite" in said
        assert unchanged


def skip_late(case: Case) -> list[StepResult]:
    """The results of steps of which each is submitted before the verdict on the one before it."""
    with engine_of(case, "skip") as engine:
        found = [engine.submit(case.share(engine, step)) for step in range(case.steps)]
        return [result for result in (*found, engine.settle()) if result is not None]


def test_a_bad_step_is_traced_although_the_next_one_has_run() -> None:
    """The batch of the step before is kept for that. Sample 5 of the second step is bad, of two samples in each."""
    case = Case(layout="NNN", pipeline=2, post_validation=True, model=Poisoned(), steps=4, clip=None)
    for results in run_ranks(skip_late, 2, case):
        assert [result.step for result in results] == [1, 2, 3, 4]
        assert [result.skipped for result in results] == [False, True, False, False]
        fault = results[1].fault
        assert fault is not None
        assert fault.samples is not None
        assert 5 in fault.samples


def no_tokens(case: Case) -> str:
    engine = case.engine()
    share = case.share(engine, 0)
    share["labels"][:] = -100
    try:
        engine.step(share)
    except RunError as error:
        return str(error)
    return "it did not raise"


def test_a_step_without_tokens_is_refused() -> None:
    assert all("no token that counts" in said for said in run_ranks(no_tokens, 2, Case(intra=2)))


def build_frozen(case: Case) -> None:
    make_engine(case, meta_model(case.model).requires_grad_(False))


def build_for_three_ranks(case: Case) -> None:
    plan = replace(case.plan, mesh=replace(case.plan.mesh, intra=3))
    Engine(meta_model(case.model), plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))


def build(case: Case) -> None:
    case.engine().close()


@pytest.mark.slow
def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(RankError, match="no trainable parameter"):
        run_ranks(build_frozen, 2, Case(intra=2))
    with pytest.raises(RankError, match=r"the mesh has 3 ranks, torch.distributed has 2"):
        run_ranks(build_for_three_ranks, 2, Case(intra=2))
    with pytest.raises(RankError, match=r"4 stages for 3 blocks"):
        run_ranks(build, 4, Case(pipeline=4, model=TinyConfig(layers=1)))


def refuse_clip(case: Case, clips: list[float]) -> list[str]:
    found = []
    for clip in clips:
        try:
            make_engine(case, meta_model(case.model), clip=clip)
        except PlanError as error:
            found.append(str(error))
    return found


def test_a_clip_that_is_no_norm_is_refused() -> None:
    """A negative one would turn the gradients round, and 0 would train nothing."""
    clips = [-1.0, -1e-9, 0.0, float("nan")]
    for said in run_ranks(refuse_clip, 2, Case(intra=2), clips):
        assert [each.split(";")[0] for each in said] == [f"clip = {clip}" for clip in clips]
    assert_parity(Case(intra=2, steps=1, clip=float("inf")))


# ---- precision


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NNN", "IIG", "GGG"])
def test_fp32_and_bf16_follow_fp64(layout: str) -> None:
    steps = 10
    exact = reference(Case(steps=steps, model=EVERYTHING))
    for precision, tolerance in (("fp32", 1e-4), ("bf16", 3e-2)):
        case = Case(layout=layout, inter=2, intra=2, steps=steps, precision=precision, model=EVERYTHING)
        for history in run_ranks(train_case, 4, case):
            assert all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(history.losses, exact.losses, strict=True))


@pytest.mark.slow
def test_layouts_agree_in_fp32_to_rounding() -> None:
    """The layouts add in other orders; nothing else differs."""
    base = Case(precision="fp32", inter=2, intra=2, steps=2)
    wanted = run_ranks(train_case, 4, base)[0]
    for layout in ("NNG", "IIG", "GGG"):
        for history in run_ranks(train_case, 4, replace(base, layout=layout)):
            worst, where = worst_difference(history, wanted)
            assert worst < 1e-4, (layout, where)


class _Askew(nn.Module):
    """Passes its input on; what comes out, or its gradient, is off by a little on ranks, and right in the reference."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.factors = forward, backward

    def forward(self, hidden: Tensor) -> Tensor:
        forward, backward = self.factors if dist.is_initialized() else (1.0, 1.0)
        out = hidden * forward
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * (backward / forward))
        return out


@dataclass(frozen=True)
class _AskewModel:
    """A tiny model that is off by a factor after its second layer."""

    forward: float = 1.0
    backward: float = 1.0

    def build(self) -> nn.Module:
        model = tiny_model(TinyConfig())
        return nn.Sequential(*model[:3], _Askew(self.forward, self.backward), *model[3:])

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        return tiny_batch(TinyConfig(), step, samples)


@pytest.mark.slow
def test_parity_has_teeth() -> None:
    """The harness notices another seed, and a hidden state or a gradient that is off by a hundred-millionth."""
    case = Case(steps=1)
    other = reference(replace(case, seed=4))
    (history,) = run_ranks(train_case, 1, case)
    worst, _ = worst_difference(history, other)
    assert worst > 1e-3

    small = 1 + 1e-8
    for spread in ({}, {"layout": "GGG", "intra": 2}):
        assert_parity(Case(steps=2, clip=None, model=_AskewModel(), **spread))  # type: ignore[arg-type]
        for wrong in (_AskewModel(forward=small), _AskewModel(backward=small)):
            with pytest.raises(AssertionError, match=r"rank \d differs by .* at (loss|gradient norm|parameter)"):
                assert_parity(Case(steps=2, clip=None, model=wrong, **spread))  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_parity_takes_no_number_that_is_not_finite_for_an_equal_one(number: float) -> None:
    wanted = History([1.0, 2.0], [3.0, 4.0], {"one": torch.ones(3), "two": torch.ones(2)})
    assert worst_difference(replace(wanted), wanted)[0] == 0.0
    spoilt = {
        "loss of step 2": replace(wanted, losses=[1.0, number]),
        "gradient norm of step 1": replace(wanted, norms=[number, 4.0]),
        "parameter one": replace(wanted, parameters={"one": torch.tensor([1.0, number, 1.0]), "two": torch.ones(2)}),
    }
    for where, got in spoilt.items():
        for one, other in ((got, wanted), (wanted, got), (got, got)):
            if one is other and math.isinf(number):
                continue
            worst, said = worst_difference(one, other)
            assert worst == math.inf
            assert said.startswith(where)


# ---- timeline


def profile_a_step(case: Case) -> tuple[list[str], list[str]]:
    engine = case.engine()
    share = case.share(engine, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        engine.step(share)
    named = {event.key for event in profiler.key_averages()}
    spans = engine.timing.trace().spans
    engine.close()
    assert all(span.start <= span.end for span in spans)
    return [str(span.action) for span in spans], sorted(named)


def test_the_timeline_and_the_profiler_name_the_actions() -> None:
    """A full backward sends in its midst; what travels between data-parallel ranks is shown as it really does."""
    case = Case(pipeline=2, microbatches=2, layout="NNG")
    for rank, (actions, named) in enumerate(run_ranks(profile_a_step, 2, case)):
        lowered = lower(case.plan.schedule).actions[rank]
        row = [str(action) for action in lowered if not action.op.is_sharding and action.op is not Op.SEND_B]
        assert actions == [*row, f"{rank}STEP"]
        assert set(row) <= set(named)


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"layout": "GGG"}, {"recompute": "block"}, {"model": TinyConfig.everything()}])
def test_an_engine_that_nobody_holds_is_let_go(options: dict[str, Any]) -> None:
    """Hooks on parameters must not hold it: that circle goes through autograd, where the collector does not see it."""
    case = Case(steps=1, **options)
    engine = case.engine()
    engine.step(case.share(engine, 0))
    engine.close()
    held = [weakref.ref(engine), weakref.ref(engine.units[0].segments[0])]
    del engine
    gc.collect()
    assert [ref() for ref in held] == [None, None]
