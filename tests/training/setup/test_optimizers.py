"""Optimizers and learning rates that a config names: what they are, what they keep, and that no rank tells."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.base.errors import CheckpointError, ConfigError, RankError
from atoll.cli.predict import describe_prediction
from atoll.prediction.cost import Cluster
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_parity, whole_parameters
from atoll.testing.tiny import TinyConfig
from atoll.training.config import Config, Train
from atoll.training.config.load import from_dict
from atoll.training.output.folder import read_records
from atoll.training.report.traffic import predicted_flows
from atoll.training.setup.build import build_engine, build_model
from atoll.training.setup.choosing import question
from atoll.training.setup.optimizers import REASONS, check_optimizer, named_optimizer, planned, states_of
from atoll.training.setup.prediction import predict
from atoll.training.setup.rates import learning_rates
from tests.training.run.test_train import TEXT, assert_same_run, died_after_step_3, settings, train_on_ranks

ROOT = Path(__file__).parents[3]

OPTIONS: dict[str, tuple[dict[str, Any], int]] = {
    "Adadelta": ({}, 2),
    "Adagrad": ({"lr_decay": 0.1}, 1),
    "Adam": ({"amsgrad": True}, 3),
    "AdamW": ({}, 2),
    "Adamax": ({}, 2),
    "ASGD": ({"t0": 2.0}, 1),
    "NAdam": ({"decoupled_weight_decay": True}, 2),
    "RAdam": ({}, 2),
    "RMSprop": ({"momentum": 0.9, "centered": True}, 3),
    "Rprop": ({"etas": (0.6, 1.3)}, 2),
    "SGD": ({"momentum": 0.9, "nesterov": True}, 1),
}
"""Optimizers of torch that are elementwise, with options, and the tensors that they then keep of a parameter."""

SPREAD = [{"layout": "IIG", "intra": 2}, {"layout": "GGG", "inter": 2}]
MODEL = TinyConfig(tied=True, unused=True)


def case_of(name: str, **others: Any) -> Case:
    options = tuple(OPTIONS[name][0].items())
    return Case(pipeline=2, microbatches=4, model=MODEL, optimizer=name, options=options, **others)


# ---- the same as one process


@pytest.mark.wide(3)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("spread", SPREAD, ids=lambda spread: spread["layout"])
def test_every_elementwise_optimizer_of_torch_equals_one_process(name: str, spread: dict[str, Any]) -> None:
    assert_parity(case_of(name, **spread))


@pytest.mark.parametrize("name", ["Adam", "NAdam", "SGD"])
def test_a_post_validated_step_keeps_every_kind_of_state(name: str) -> None:
    """Counters and products of NAdam are taken back with a step, too."""
    assert_parity(case_of(name, layout="IIG", intra=2, post_validation=True))


def resume(case: Case, folder: str, states: int) -> tuple[list[str], bool]:
    """Train, and again from a checkpoint between: parameters that then differ, and whether as many bytes are held as
    `states` say."""
    first, second = case.engine(), case.engine()
    for step in range(4):
        first.step(case.share(first, step))
        if step == 1:
            first.save(folder)
    second.load(folder)
    for step in range(2, 4):
        second.step(case.share(second, step))
    wanted, found = whole_parameters(first), whole_parameters(second)
    differ = [name for name, value in wanted.items() if not torch.equal(value, found[name])]
    is_as_predicted = first.memory() == first.footprint(states=states).at_rest(case.plan.layout)
    for engine in (first, second):
        engine.close()
    return differ, is_as_predicted


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_every_optimizer_resumes_to_the_bit_and_holds_what_is_predicted(name: str, tmp_path: Path) -> None:
    case = replace(case_of(name, layout="IIG", intra=2), model=TinyConfig())
    found = run_ranks(resume, case.ranks, case, str(tmp_path / "saved"), OPTIONS[name][1], timeout=180)
    assert found == [([], True)] * case.ranks


# ---- what is named


def test_every_optimizer_of_torch_is_taken_or_refused_with_a_reason() -> None:
    known = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert known - {"Optimizer"} == {*OPTIONS, *REASONS, "Muon"}


@pytest.mark.parametrize("name", OPTIONS)
def test_states_are_counted(name: str) -> None:
    options, states = OPTIONS[name]
    found = named_optimizer(Train(optimizer=name, optimizer_options=options, lr=0.5))
    assert found.states == states
    made = found.factory([{"params": [torch.nn.Parameter(torch.zeros(3))]}])
    assert type(made) is getattr(torch.optim, name)
    assert made.defaults["lr"] == 0.5
    assert {key: made.defaults[key] for key in options} == options


def test_adamw_is_what_it_was_and_others_have_their_own_defaults() -> None:
    adamw, adam = Train(), Train(optimizer="Adam")
    assert (adamw.options, adamw.weight_decay) == ({"betas": (0.9, 0.95), "eps": 1e-8}, 0.1)
    assert (adam.options, adam.weight_decay) == ({}, None)
    changed = Train(optimizer_options={"betas": [0.8, 0.9]})
    assert changed.options == {"betas": [0.8, 0.9], "eps": 1e-8}
    assert named_optimizer(changed).factory([{"params": []}]).defaults["betas"] == (0.8, 0.9)
    made = named_optimizer(adam).factory([{"params": [torch.nn.Parameter(torch.zeros(3))]}])
    assert made.defaults["betas"] == (0.9, 0.999)
    again = from_dict(Config(train=adam).model_dump())
    assert again.train == adam


def by_halves(groups: Any, lr: float, scale: float = 1.0) -> torch.optim.Optimizer:
    """A factory of this module."""
    return torch.optim.SGD(groups, lr=lr * scale, momentum=0.5)


class Normed(torch.optim.SGD):
    """Divides by the norm of a whole gradient, as LARS does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad / parameter.grad.norm(), alpha=-group["lr"])


def not_an_optimizer(groups: Any, lr: float) -> int:
    return 3


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"optimizer": "adamw"}, "torch.optim has none of that name; did you mean 'AdamW'"),
        ({"optimizer": "Lion"}, "Adadelta, .*SGD; or name your own"),
        ({"optimizer": "Adafactor"}, "rows and columns of whole matrices.*use an elementwise one"),
        ({"optimizer": "Muon", "optimizer_options": {"betas": [0.9, 0.99]}}, r"train\.optimizer_options\.adamw\.betas"),
        ({"optimizer": "Muon", "optimizer_options": {"momentun": 0.9}}, "no option 'momentun'; did you mean momentum"),
        ({"optimizer": "Muon", "optimizer_options": {"adamw": {"beta": 0.9}}}, "unexpected keyword argument 'beta'"),
        ({"optimizer": "Muon", "optimizer_options": {"split": {"*": [0]}}}, "the rows of each part"),
        ({"optimizer": "LBFGS"}, "along a line"),
        ({"optimizer": "SparseAdam"}, "sparse gradients"),
        ({"optimizer": "SGD", "optimizer_options": {"momentun": 0.9}}, "no option 'momentun'; did you mean momentum"),
        ({"optimizer": "SGD", "optimizer_options": {"lr": 0.9}}, r"a key of its own, train\.lr"),
        ({"optimizer": "SGD", "optimizer_options": {"betas": [0.9, 0.99]}}, "SGD has no option 'betas'; "),
        ({"optimizer": "Rprop", "weight_decay": 0.1}, r"train\.weight_decay = 0\.1: Rprop does not take it"),
        ({"optimizer": "SGD", "optimizer_options": {"momentum": -1.0}}, "momentum = -1.0: .*Invalid momentum"),
        ({"optimizer": "SGD", "optimizer_options": {"momentum": "much"}}, "momentum = much: .* raised TypeError"),
        ({"optimizer": "no.such_module:factory"}, "importing no.such_module raised ModuleNotFoundError"),
        ({"optimizer": f"{__name__}:by_halvs"}, "has no function or class by_halvs; did you mean by_halves"),
        ({"optimizer": f"{__name__}:Normed"}, "update of one element depends on the others"),
        ({"optimizer": f"{__name__}:not_an_optimizer"}, "it made a int, not a torch.optim.Optimizer"),
        ({"optimizer": f"{__name__}:by_halves", "optimizer_options": {"size": 2}}, "has no option 'size'; It takes"),
        ({"optimizer": f"{__name__}:by_halves", "optimizer_options": {"states": 2}}, "by_halves keeps 1 tensors"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_optimizer_is_said(train: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_optimizer(Train(**train))


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"optimizer": "my optimizer"}, r"must be the name of an optimizer of torch\.optim"),
        (
            {"lr_schedule": "cosin"},
            "'cosine', 'constant', 'linear', 'wsd', \"wsd N\" with N steps, or \"module:function\"",
        ),
        ({"lr_schedule": "wsd many"}, '"wsd N" with N steps'),
        ({"optimizer": "SGD", "optimizer_options": {"states": 1}}, "the states of torch's SGD are counted"),
    ],
)
def test_what_cannot_be_named_is_refused_with_the_config(train: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_dict({"train": train})


def test_a_factory_of_a_module_is_called_with_its_options() -> None:
    train = Train(optimizer=f"{__name__}:by_halves", optimizer_options={"scale": 0.5}, lr=0.2)
    found = named_optimizer(train)
    made = found.factory([{"params": [torch.nn.Parameter(torch.zeros(3))]}])
    assert (type(made), made.defaults["lr"], found.states) == (torch.optim.SGD, 0.1, 1)


# ---- predicted bytes


def config_of(**train: Any) -> Config:
    sizes = {"layers": 2, "hidden": 16, "heads": 2, "vocabulary": 64}
    return from_dict({"model": sizes, "data": {"sequence": 16, "tokenizer": "bytes"}, "train": train})


def test_predictions_count_the_states_of_the_named_optimizer() -> None:
    adam, none = config_of(), config_of(optimizer="SGD")
    some = config_of(optimizer="RMSprop", optimizer_options={"momentum": 0.9})
    bytes_of = {config.train.optimizer: predict(config, None).ranks.of(0).footprint() for config in (adam, none, some)}
    parameters = bytes_of["SGD"].parameters
    times = {name: held.optimizer / parameters for name, held in bytes_of.items()}
    assert times == {"AdamW": 2, "SGD": 0, "RMSprop": 2}
    assert {held.parameters for held in bytes_of.values()} == {parameters}

    engine = build_engine(build_model(none, 64), replace(planned(none), microbatch=4), none, torch.device("cpu"))
    assert engine.footprint().optimizer == 0
    engine.close()


def test_predictions_count_one_state_of_a_matrix_and_two_of_the_rest() -> None:
    muon, adam = config_of(optimizer="Muon"), config_of()
    bytes_of = [predict(config, None).ranks.of(0).footprint() for config in (muon, adam)]
    matrices = 2 * (4 * 16 * 16 + 3 * 16 * 48)
    assert bytes_of[1].optimizer - bytes_of[0].optimizer == 4 * matrices
    engine = build_engine(build_model(muon, 64), replace(planned(muon), microbatch=4), muon, torch.device("cpu"))
    assert engine.footprint().optimizer == bytes_of[0].optimizer
    assert engine.plan.whole == planned(muon).whole
    decays = {(group["whole"], group["weight_decay"]) for group in engine.optimizer.param_groups}
    assert decays == {(True, 0.1), (False, 0.1), (False, 0.0)}
    engine.close()


def test_a_planner_and_a_prediction_know_what_is_transformed() -> None:
    cluster = Cluster.read(ROOT / "configs" / "clusters" / "h100.toml")
    spread = {"ranks": 4, "intra": 2, "layout": "IIG"}
    config = from_dict({**config_of(optimizer="Muon").model_dump(), "parallel": spread})
    found = predict(config, cluster)
    assert found.breakdown[0].optimizer > predict(config_of(), cluster).breakdown[0].optimizer
    assert found.peak(0).total > found.rest(0).total
    assert any(flow.cause == "matrices" and flow.link == "inter" for flow in predicted_flows(found))
    assert question(config_of(optimizer="Muon"), cluster).whole == found.plan.whole
    assert "transformed whole, on one of the 4 ranks" in "\n".join(describe_prediction(found))


def test_fewer_states_are_stepped_faster_and_a_planner_knows() -> None:
    cluster = Cluster.read(ROOT / "configs" / "clusters" / "h100.toml")
    adam, sgd = (predict(config_of(optimizer=name), cluster) for name in ("AdamW", "SGD"))
    assert sgd.durations.update_seconds == pytest.approx(adam.durations.update_seconds * 3 / 7)
    assert question(config_of(optimizer="SGD"), cluster).states == 0


def test_a_prediction_runs_no_code_that_a_config_names() -> None:
    own = f"{__name__}:by_halves"
    with pytest.raises(ConfigError, match=r"predictions do not run it.*train\.optimizer_options\.states = 2"):
        predict(config_of(optimizer=own), None)
    known = config_of(optimizer="no.such_module:factory", optimizer_options={"states": 1})
    assert states_of(known.train) == 1
    assert predict(known, None).ranks.of(0).footprint().optimizer > 0


# ---- learning rates


def test_wsd_warms_up_stays_and_falls() -> None:
    train = Train(steps=10, warmup=2, min_lr_ratio=0.0, lr_schedule="wsd 4")
    factors = [learning_rates(train)(done) for done in range(12)]
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0])
    tenth = Train(steps=20, warmup=0, min_lr_ratio=0.1, lr_schedule="wsd")
    assert [learning_rates(tenth)(done) for done in (0, 17, 18, 19)] == pytest.approx([1, 1, 0.55, 0.1])
    # A fall that would begin in the warm-up begins behind it.
    short = Train(steps=4, warmup=3, min_lr_ratio=0.5, lr_schedule="wsd 4")
    assert [learning_rates(short)(done) for done in range(4)] == pytest.approx([1 / 3, 2 / 3, 1, 0.5])


def stairs(done: int, steps: int) -> float:
    return 1.0 if done < steps // 2 else 0.5


def endless(done: int, steps: int) -> float:
    return math.inf if done else 1.0


def without_steps(done: int) -> float:
    return 1.0


def test_a_function_of_a_module_says_every_factor() -> None:
    rates = learning_rates(Train(steps=4, warmup=2, lr_schedule=f"{__name__}:stairs"))
    assert [rates(done) for done in range(4)] == [1.0, 1.0, 0.5, 0.5]
    with pytest.raises(ConfigError, match="the factor after 9 steps is inf; it must be a number from 0"):
        learning_rates(Train(steps=10, lr_schedule=f"{__name__}:endless"))
    with pytest.raises(ConfigError, match=r"called with \(steps done, 10 steps\).*TypeError"):
        learning_rates(Train(steps=10, lr_schedule=f"{__name__}:without_steps"))


# ---- a run

NAMED = {
    "optimizer": "NAdam",
    "optimizer_options": {"momentum_decay": 0.01},
    "weight_decay": 0.01,
    "lr_schedule": "wsd 2",
}


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "spread",
    [{"ranks": 4, "pipeline": 2, "intra": 2, "layout": "IIG"}, {"ranks": 2, "intra": 2, "layout": "IIG"}],
    ids=["pipeline", "group"],
)
def test_a_run_with_a_named_optimizer_continues_to_the_bit(tmp_path: Path, spread: dict[str, Any]) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_text(TEXT)
    train_on_ranks(settings(tmp_path / "alone", corpus, train=NAMED))
    train_on_ranks(settings(tmp_path / "spread", corpus, train=NAMED, parallel=spread))
    assert_same_run(tmp_path / "spread", tmp_path / "alone")
    folder = died_after_step_3(tmp_path / "spread", tmp_path / "again")
    train_on_ranks(settings(folder, corpus, train=NAMED, parallel=spread))
    again, wanted = (read_records(each / "metrics.jsonl") for each in (folder, tmp_path / "spread"))
    for key in ("step", "loss", "grad_norm", "lr"):
        assert [record[key] for record in again] == [record[key] for record in wanted]

    other = died_after_step_3(tmp_path / "spread", tmp_path / "other")
    with pytest.raises(
        RankError, match=r"has exp_avg, exp_avg_sq, mu_product, step of .*SGD .*keeps nothing"
    ) as caught:
        train_on_ranks(settings(other, corpus, train={"optimizer": "SGD"}))
    assert isinstance(caught.value.__cause__, CheckpointError)
