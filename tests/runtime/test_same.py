"""Ranks that would not run the same say so at the start, all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from atoll.base.errors import ConfigError
from atoll.runtime import same
from atoll.runtime.engine import Engine
from atoll.runtime.models.adapter import adapter_for
from atoll.runtime.same import describe_differences
from atoll.testing.parity import Case
from atoll.testing.pool import run_ranks
from atoll.testing.tiny import TinyConfig

FOUR = [{"atoll": "0.1.0", "atoll's source": "#1", "train.lr =": "0.1"}] * 4


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"atoll": "0.2.0"}, "atoll 0.1.0 on ranks 0 to 3, 0.2.0 on rank 4; install the same on every machine"),
        # another version may have another config: it is not the cause
        ({"atoll": "0.2.0", "train.lr =": "1"}, "atoll 0.1.0 on ranks 0 to 3, 0.2.0 on rank 4; install"),
        ({"train.lr =": "1"}, "train.lr = 0.1 on ranks 0 to 3, 1 on rank 4; start alike"),
        ({"atoll's source": "#77"}, "atoll's source differs between ranks 0 to 3 and rank 4; install"),
    ],
)
def test_who_has_what_is_named(last: dict[str, str], words: str) -> None:
    said = describe_differences([*FOUR, {**FOUR[0], **last}], advice="start alike")
    assert said.startswith(f"the ranks are not the same: {words}")


def test_several_differences_are_listed_and_not_all() -> None:
    said = describe_differences(
        [{f"key{at}": "1" for at in range(9)}, {f"key{at}": "2" for at in range(9)}], advice="start alike"
    )
    assert said.splitlines()[:2] == ["the ranks are not the same:", "  key0 1 on rank 0, 2 on rank 1"]
    assert said.splitlines()[-2:] == ["  and 3 more", "start alike"]


def test_the_same_is_nothing_to_speak_of() -> None:
    assert describe_differences(FOUR, advice="") == ""


def test_a_package_that_a_rank_has_not_loaded_is_no_difference() -> None:
    """Past bug: a process that had run other code before had loaded transformers, the one beside it had not."""
    loaded = {**FOUR[0], "transformers": "5.0.0"}
    assert describe_differences([*FOUR, loaded], advice="") == ""
    said = describe_differences([*FOUR, loaded, {**loaded, "transformers": "5.1.0"}], advice="")
    assert said.startswith("the ranks are not the same: transformers 5.0.0 on rank 4, 5.1.0 on rank 5; install")


def said_by(build: Callable[[Case], Engine], case: Case) -> str:
    try:
        build(case).close()
    except ConfigError as error:
        return str(error)
    return "it was built"


def with_another_torch(case: Case) -> Engine:
    with patch.object(torch, "__version__", "2.9.9" if dist.get_rank() == 1 else torch.__version__):
        return case.engine()


def with_another_seed(case: Case) -> Engine:
    return replace(case, seed=case.seed + dist.get_rank() // 2).engine()


def with_another_mesh(case: Case) -> Engine:
    return (replace(case, intra=2, inter=2) if dist.get_rank() == 3 else case).engine()


def with_another_model(case: Case) -> Engine:
    wider = replace(case, model=TinyConfig(layers=3))
    return (wider if dist.get_rank() == 3 else case).engine()


def from_an_adapter(case: Case) -> Engine:
    model = case.model.build()
    return Engine(adapter_for(model), case.plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))


def test_an_adapter_is_compared_as_its_model_is() -> None:
    """Past fault: an adapter in place of a model was an AttributeError on several ranks."""
    assert run_ranks(said_by, 2, from_an_adapter, Case("IGI", intra=2)) == ["it was built"] * 2


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (with_another_torch, f"torch {torch.__version__} on ranks 0, 2, 3, 2.9.9 on rank 1; install"),
        (with_another_seed, "seed = 3 on ranks 0, 1, 4 on ranks 2, 3; build"),
        (with_another_mesh, "plan.mesh = "),
        (with_another_model, "between ranks 0 to 2 and rank 3"),
    ],
)
def test_every_rank_hears_it(build: Callable[[Case], Engine], words: str) -> None:
    case = Case("IGI", intra=4)
    said = run_ranks(said_by, 4, build, case)
    assert len(set(said)) == 1
    assert words in said[0]
    assert run_ranks(said_by, 4, Case.engine, case) == ["it was built"] * 4


def test_the_package_of_another_checkout_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime").mkdir()
    monkeypatch.setattr(same, "__file__", str(tmp_path / "runtime" / "same.py"))
    found = []
    for text in ("a = 1", "a = 2", "a = 1"):
        (tmp_path / "__init__.py").write_text(text)
        found.append(same._source.__wrapped__())
    assert found[0] == found[2] != found[1]
