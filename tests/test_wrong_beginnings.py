"""Ten wrong beginnings of a new user, as they come from other trainers: each is one error that says what to do, or the
right result. None is silent."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from atoll import Engine, Layout, MeshShape, Plan
from atoll.base.errors import AtollError
from atoll.base.toml import nested_to_toml
from atoll.cli.main import app
from atoll.plans import schedules
from tests.runtime.test_buffers import train as train_with_buffers

VOCABULARY = 48
PAD = 0
IDS = torch.randint(1, VOCABULARY, (4, 10), generator=torch.Generator().manual_seed(1))
NEXT = torch.cat([IDS[:, 1:], torch.full((4, 1), -100)], dim=1)


def chain(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, VOCABULARY)
    )


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def step(batch: Any, model: nn.Module | None = None, **options: Any) -> tuple[float, float]:
    """Loss and gradient norm of the first step on two microbatches of two samples, in one process."""
    plan = Plan(MeshShape(), Layout("NNN"), schedules.build("1f1b", ranks=1, microbatches=2), 2)
    engine = Engine(chain() if model is None else model, plan, **({"optimizer": sgd} | options))
    try:
        result = engine.step(batch)
        return result.loss, result.grad_norm
    finally:
        engine.close()


def refused(act: Callable[[], object]) -> str:
    """The one error of a wrong beginning."""
    with pytest.raises(AtollError) as caught:
        act()
    return str(caught.value)


RIGHT = {"input_ids": IDS, "labels": NEXT}


def test_labels_are_a_copy_of_the_input_as_for_transformers() -> None:
    copied = {"input_ids": IDS, "labels": IDS}
    said = refused(lambda: step(copied))
    assert "labels equal input_ids wherever they count" in said
    assert "give labels[:, t] = input_ids[:, t + 1]" in said
    assert 'or build the engine with labels="unshifted"' in said
    assert step(copied, labels="unshifted") == step(RIGHT)


def test_labels_are_shifted_by_hand_and_once_more_by_the_engine() -> None:
    """It learned the token after the next, without a word."""
    twice = {"input_ids": IDS[:, :-1], "labels": IDS[:, 1:]}
    said = refused(lambda: step(twice, labels="unshifted"))
    assert "labels are those of the next token already" in said
    assert "would learn the token after the next" in said
    assert 'build the engine with labels="shifted"' in said
    assert step(twice) == pytest.approx(step(RIGHT))

    constant = torch.full((4, 10), 7)  # labels that tell nothing are taken
    assert step({"input_ids": constant, "labels": constant}, labels="unshifted")[0] > 0


def test_padding_counts_or_nothing_does() -> None:
    """A tokenizer's padding was learned where labels are a copy of its ids."""
    mask = torch.ones_like(IDS)
    mask[:, 6:] = 0
    ids = torch.where(mask == 1, IDS, PAD)
    padded = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    said = refused(lambda: step(padded, labels="unshifted"))
    assert "labels of padding count: attention_mask is 0 there" in said
    assert "labels[attention_mask == 0] = -100" in said

    counted = {"input_ids": ids, "labels": torch.where(mask == 1, ids, -100)}
    short = {"input_ids": IDS[:, :6], "labels": IDS[:, :6]}
    assert step(counted, labels="unshifted") == pytest.approx(step(short, labels="unshifted"))

    nothing = refused(lambda: step({"input_ids": IDS, "labels": torch.full_like(IDS, -100)}))
    assert "no token that counts: every label is -100" in nothing


def test_a_batch_comes_as_a_loader_of_tuples_gives_it_or_too_small() -> None:
    for batch in (next(iter(DataLoader(TensorDataset(IDS, NEXT), batch_size=4))), (IDS, NEXT)):
        said = refused(lambda batch=batch: step(batch))  # type: ignore[misc]
        assert f"the batch is a {type(batch).__name__}" in said
        assert 'give tensors by name, such as {"input_ids": ..., "labels": ...}' in said
    assert "text is a list that cannot become a tensor" in refused(lambda: step({"text": ["a"] * 4}))
    said = refused(lambda: step({"input_ids": IDS[:2], "labels": NEXT[:2]}))
    assert "share is 4 (2 microbatches of 2)" in said


def test_a_loss_is_a_mean_which_the_engine_divides_again() -> None:
    """Its gradients were too small by as much as counts, without a word."""

    def entropy(outputs: Tensor, batch: Mapping[str, Any], how: str) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), reduction=how)

    said = refused(lambda: step(RIGHT, loss=lambda outputs, batch: entropy(outputs, batch, "mean")))
    assert "the loss returned 3." in said
    assert "for a microbatch of 2 samples" in said
    assert 'a mean. Give the sum over what counts, as reduction="sum" does' in said
    assert "or the pair (sum, count)" in said
    assert step(RIGHT, loss=lambda outputs, batch: entropy(outputs, batch, "sum")) == pytest.approx(step(RIGHT))

    def pair(outputs: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        count = (batch["labels"] != -100).sum()
        return entropy(outputs, batch, "mean") * count, count

    assert step(RIGHT, loss=pair) == pytest.approx(step(RIGHT))

    def of_pairs(outputs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Samples against one another: no sum of what parts give, and no mean."""
        means = outputs.mean(1)
        return F.cross_entropy(means @ means.T, torch.arange(len(means)), reduction="sum")

    assert step({"input_ids": IDS}, loss=of_pairs)[0] > 0
    assert "it is one number: add up" in refused(lambda: step(RIGHT, loss=lambda outputs, batch: outputs.sum((1, 2))))


def test_the_optimizer_is_made_before_the_engine_or_needs_whole_matrices() -> None:
    """The parameters of the model were stepped, which the engine's are not."""
    model = chain()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    said = refused(lambda: step(RIGHT, model, optimizer=made))
    assert "optimizer is a SGD, which steps the parameters that it was made with" in said
    assert "optimizer=lambda groups: torch.optim.SGD(groups, lr=...)" in said
    said = refused(lambda: step(RIGHT, model, optimizer=lambda groups: torch.optim.SGD(model.parameters(), lr=0.1)))
    assert "the optimizer has 0 of the 5 slices" in said
    assert "with the groups that the function is given" in said
    assert step(RIGHT, optimizer=torch.optim.AdamW) == step(RIGHT)  # a class is a function of groups
    said = refused(lambda: step(RIGHT, optimizer=torch.optim.Adafactor))
    assert "Adafactor needs whole matrices" in said
    assert "use an elementwise optimizer such as AdamW" in said


def test_the_model_is_in_eval_mode_or_in_half_precision_or_partly_frozen() -> None:
    assert step(RIGHT, chain(dropout=0.5).eval()) == step(RIGHT, chain(dropout=0.5)) != step(RIGHT, chain())

    rounded = chain().half().float()  # the plan's precision counts, from the values that are given
    assert step(RIGHT, chain().half()) == pytest.approx(step(RIGHT, rounded), rel=1e-6)

    model = chain()
    model[0].requires_grad_(requires_grad=False)
    plan = Plan(MeshShape(), Layout("NNN"), schedules.build("1f1b", ranks=1, microbatches=2), 2)
    engine = Engine(model, plan, optimizer=sgd)
    before = {name: value.clone() for name, value in engine.state_dict().items() if isinstance(value, Tensor)}
    engine.step(RIGHT)
    after = engine.state_dict()
    assert [name for name, value in before.items() if torch.equal(value, after[name])] == ["0.weight"]  # type: ignore[arg-type]
    engine.close()

    said = refused(lambda: step(RIGHT, chain().requires_grad_(requires_grad=False)))
    assert "no trainable parameter; set requires_grad on what is to be trained" in said


def test_batch_norm_is_trained_where_its_statistics_would_not_be_those_of_one_process() -> None:
    """On data-parallel ranks: tests/runtime/test_buffers.py."""
    said = train_with_buffers("norm", recompute="block")["refused"]
    assert "the forward changes buffers of 2 (Norm)" in said
    assert "turn recompute off" in said
    assert train_with_buffers("norm")["2.num_batches_tracked"] == 8


# ---- `atoll train`

CHAT = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}] * 9
TEXT = "".join(f"the {number} brown foxes jump over {number * number} lazy dogs\n" for number in range(400))


def start(folder: Path, **changes: Mapping[str, Any]) -> str:
    """What `atoll train` says before it starts anything: of an error, the error."""
    values: dict[str, dict[str, Any]] = {
        "model": {"layers": 2, "hidden": 16, "heads": 2},
        "data": {"source": "a.txt", "tokenizer": "bytes", "sequence": 16, "cache": "cache"},
        "train": {"steps": 2, "global_batch": 8, "microbatch": 1},
        "parallel": {"ranks": 1, "device": "cpu"},
        "run": {"folder": "run", "loggers": []},
    }
    for section, more in changes.items():
        values[section] = {**({} if "pretrained" in more.values() else values[section]), **more}
    (folder / "run.toml").write_text(nested_to_toml(values))
    result = CliRunner().invoke(app, ["train", "run.toml", "--dry-run"])
    if result.exception is None:
        return result.output
    assert isinstance(result.exception, AtollError), result.exception
    return f"error: {result.exception}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(TEXT)
    return tmp_path


def test_the_corpus_has_another_form_than_the_config_says(folder: Path) -> None:
    files: dict[str, bytes] = {
        "chat.jsonl": "".join(f"{json.dumps(each)}\n" for each in CHAT).encode(),
        "chat.json": json.dumps(CHAT).encode(),
        "one.json": json.dumps({"data": [{"text": TEXT}]}).encode(),
        "rows.json": json.dumps([{"text": TEXT}]).encode(),
        "rows.jsonl.gz": gzip.compress(json.dumps({"text": TEXT}).encode()),
        "archive.txt": b"PK\x03\x04rest",
        "empty.txt": b"",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)

    for name in ("chat.jsonl", "chat.json"):
        said = start(folder, data={"source": name})
        assert f"error: {name}, " in said
        assert "no field 'text' (it has messages)" in said
        assert 'data.format = "chat" for conversations' in said
    said = start(folder, data={"source": "one.json"})
    assert "one JSON value without documents, whose brackets and keys would be learned as text; give JSON lines" in said
    assert "is a zip archive" in start(folder, data={"source": "archive.txt"})
    assert "data.text_field = 'body' has no effect" in start(folder, data={"text_field": "body"})
    assert "data.validation = 'empty.txt': no text" in start(folder, data={"validation": "empty.txt"})
    said = start(folder, data={"validation": "a.txt"})
    assert "is data.source itself" in said
    assert "give another file or folder, or a share" in said
    for name in ("a.txt", "rows.json", "rows.jsonl.gz"):
        assert "error" not in start(folder, data={"source": name})


def test_model_tokenizer_and_schedule_do_not_go_together(folder: Path) -> None:
    """Weights of a folder were given the ids of another tokenizer, without a word."""
    said = start(folder, model={"vocabulary": 100})
    assert "model.vocabulary = 100 is smaller than the 256 ids of data.tokenizer = 'bytes'" in said
    assert "use at least 256, or leave it out" in said

    pretrained = folder / "pretrained"
    pretrained.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (pretrained / name).write_text("{}")
    (pretrained / "model.safetensors").write_bytes(b"")
    said = start(folder, model={"source": "pretrained"})
    assert "data.tokenizer = 'bytes' with the weights of model.source = 'pretrained'" in said
    assert "leave data.tokenizer out to use the model's own" in said

    assert "did you mean 'AdamW'" in start(folder, train={"optimizer": "adamw"})
    assert "rows and columns of whole matrices" in start(folder, train={"optimizer": "Adafactor"})
    said = start(folder, train={"lr_schedule": "constant", "decay": 1})
    assert "train.decay = 1: this key is gone; write the steps in train.lr_schedule" in said
