"""Folders whose head and config disagree: what transformers does, said in one sentence, in an engine and in a file."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from atoll import Engine, Layout, MeshShape, Plan
from atoll.base.errors import PlanError, WeightsWarning
from atoll.base.toml import nested_to_toml
from atoll.cli.main import app
from atoll.plans import schedules
from atoll.runtime.assemble.describe import describe_rank
from atoll.runtime.models import SequentialAdapter, weights_for
from atoll.training.config import Config
from atoll.training.config.load import from_dict
from atoll.training.dry_run import check_run
from atoll.training.models.interchange import export_folder, import_folder
from atoll.training.process import Request
from atoll.training.setup.build import build_as_stored, build_engine, build_model
from atoll.training.setup.prediction import predict
from tests.families import Family, quietly

transformers = pytest.importorskip("transformers")
save_file = pytest.importorskip("safetensors.torch").save_file
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

PLAN = Plan(MeshShape(), Layout("NNN"), schedules.build("gpipe", ranks=1, microbatches=1), microbatch=2)
IDS = torch.arange(3, 9)[None]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def folder_of(
    folder: Path, *, ties: bool, family: str = "llama", vocabulary: int = 48, **changed: torch.Tensor | None
) -> Path:
    """A folder of an untied model, with a config that may say otherwise. changed: "head" or "embedding" or other names;
    None leaves one out."""
    torch.manual_seed(0)
    model: Any = Family(family, (("tie_word_embeddings", False), ("vocab_size", vocabulary))).build()
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in changed.items():
        full = {"head": HEAD, "embedding": EMBEDDING}.get(name, name)
        if value is None:
            del tensors[full]
        else:
            tensors[full] = value
    if "head" in changed and changed["head"] is not None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
    model.config.tie_word_embeddings = ties
    with quietly():
        model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def loaded(folder: Path) -> Any:
    with quietly():
        return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def engine_of(config: Any, weights: Path) -> tuple[Engine, list[str]]:
    with torch.device("meta"), quietly():
        model = transformers.AutoModelForCausalLM.from_config(config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = Engine(model, PLAN, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), weights=weights)
    said = [str(each.message) for each in caught if each.category is WeightsWarning]
    assert said == list(engine.notes)
    return engine, said


@pytest.mark.wide(3)
@pytest.mark.parametrize(
    ("ties", "changed", "words"),
    [
        (True, {}, "ties lm_head.weight to model.embed_tokens.weight, and the folder has both with different values"),
        (True, {"head": torch.ones(())}, None),
        (True, {"head": None}, None),
        (True, {"embedding": None}, None),
        (
            True,
            {"head": None, "model.layers.9.more": torch.ones(2)},
            "has 1 tensors (model.layers.9.more) that are none",
        ),
        (True, {"head": None, "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(2)}, None),
    ],
    ids=["own head", "equal head", "no head", "head alone", "one more", "old positions"],
)
def test_a_tie_is_that_of_transformers(
    ties: bool, changed: dict[str, torch.Tensor | None], words: str | None, tmp_path: Path
) -> None:
    """In an engine that starts from the folder or from the imported checkpoint, and in what is exported."""
    folder = folder_of(tmp_path / "given", ties=ties, **changed)
    model = loaded(folder)
    moved = import_folder(folder, tmp_path / "checkpoint")
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
    config = transformers.AutoConfig.from_pretrained(folder)
    for weights in (folder, tmp_path / "checkpoint"):
        engine, said = engine_of(config, weights)
        if weights == folder:
            assert [words in each for each in said] == [True] if words is not None else said == []
            assert list(moved.notes) == said
        assert torch.equal(engine.logits({"input_ids": IDS}), wanted)
        engine.save(tmp_path / f"saved {weights.name}")
        engine.load(tmp_path / f"saved {weights.name}")
        engine.close()
    export_folder(tmp_path / "checkpoint", tmp_path / "back")
    back = loaded(tmp_path / "back")
    assert back.config.tie_word_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
    for name, value in back.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_a_head_that_is_not_there_and_not_tied_is_initialized(tmp_path: Path) -> None:
    """As `from_pretrained` does, from another seed; the engine says so."""
    folder = folder_of(tmp_path / "given", ties=False, head=None)
    engine, said = engine_of(transformers.AutoConfig.from_pretrained(folder), folder)
    assert [HEAD in each and "it is initialized" in each for each in said] == [True]
    state = engine.state_dict()
    assert torch.equal(state[EMBEDDING], loaded(folder).model.embed_tokens.weight)
    assert 0.01 < float(state[HEAD].std()) < 0.04
    engine.close()
    import_folder(folder, tmp_path / "checkpoint")
    again, said = engine_of(transformers.AutoConfig.from_pretrained(folder), tmp_path / "checkpoint")
    assert said == []
    assert torch.equal(again.state_dict()[HEAD], state[HEAD])
    again.close()


def test_buffers_that_a_folder_lacks_are_named(tmp_path: Path) -> None:
    """They keep the values of a new model, as in `from_pretrained`; those of another kind are refused."""
    model: Any = Family("deepseek_v3").build()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    with quietly():
        model.config.save_pretrained(tmp_path)
    tensors = model.state_dict()
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    engine, said = engine_of(model.config, tmp_path)
    assert [f"lacks 1 persistent buffers ({name}), which keep" in each for each in said] == [True]
    assert torch.equal(engine.state_dict()[name], torch.zeros(4))
    engine.close()
    save_file({**tensors, name: torch.ones(4, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match=r"buffers of another kind: .*bias is int64 there and float32 here"):
        engine_of(model.config, tmp_path)


def test_experts_that_do_not_make_one_tensor_are_named(tmp_path: Path) -> None:
    """One lacks, or is of another size than the others."""
    model: Any = Family("mixtral").build()
    with quietly():
        model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    name = next(key for key in tensors if ".experts.3.w1." in key)
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match=r"w1\.weight.* do not become .*gate_up_proj: .*do not join"):
        engine_of(model.config, tmp_path)
    save_file({**tensors, name: torch.ones(3, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match=r"do not join; copy the files again"):
        engine_of(model.config, tmp_path)


def test_a_shared_parameter_with_two_values_is_refused(tmp_path: Path) -> None:
    """A model of no known class cannot be untied."""
    with torch.device("meta"):
        first, last = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    save_file({"0.weight": torch.ones(4, 4), "1.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match=r"different values for 0\.weight and 1\.weight"):
        weights_for(SequentialAdapter(torch.nn.Sequential(first, last)), tmp_path)


def described(config: Config, folder: Path) -> dict[str, Any]:
    """What commands say of a run before it starts."""
    path = folder / "run.toml"
    path.write_text(nested_to_toml(config.model_dump(exclude_none=True, exclude_defaults=True)))
    notes: list[str] = []
    programs = []
    for rank in range(config.parallel.pipeline):
        done = CliRunner().invoke(app, ["show", "program", str(path), "--rank", str(rank), "--json"])
        assert done.exit_code == 0, done.output
        programs.append(json.loads(done.stdout))
    prediction = predict(config, None)
    check_run(Request(path), say=notes.append)
    return {
        "programs": programs,
        "parameters": prediction.workload.parameters,
        "bytes": [prediction.peak(rank) for rank in range(config.parallel.pipeline)],
        "notes": [note for note in notes if "tied" in note],
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"], ids=["by formula", "counted"])
def test_what_is_said_of_a_run_is_of_the_head_that_its_folder_has(family: str, tmp_path: Path) -> None:
    """Programs, bytes and the dry run were those of the tied model, and the run trained one that was not."""
    (tmp_path / "text.txt").write_text("a line of the corpus\n" * 50)

    def config_of(source: Path, pipeline: int) -> Config:
        return from_dict(
            {
                "model": {"source": str(source)},
                "data": {
                    "source": str(tmp_path / "text.txt"),
                    "tokenizer": "bytes",
                    "sequence": 8,
                    "cache": str(tmp_path),
                },
                "train": {"global_batch": 2, "microbatch": 1, "steps": 1},
                "parallel": {"ranks": pipeline, "pipeline": pipeline, "layout": "GGG", "device": "cpu"},
                "run": {"folder": str(tmp_path / "run")},
            }
        )

    made = {"family": family, "vocabulary": 256}
    other = folder_of(tmp_path / "other", ties=True, **made)  # the config ties what the file has apart
    apart = folder_of(tmp_path / "apart", ties=False, **made)
    tied = folder_of(tmp_path / "tied", ties=True, head=None, **made)
    found, wanted, before = (described(config_of(each, 2), tmp_path) for each in (other, apart, tied))
    assert ["both with different values" in note for note in found.pop("notes")] == [True]
    assert wanted.pop("notes") == before.pop("notes") == []
    assert found == wanted
    assert found["parameters"] > before["parameters"]
    assert found["programs"] != before["programs"]
    found_bytes, tied_bytes = (predict(config_of(each, 1), None).peak(0).total for each in (other, tied))
    assert found_bytes > tied_bytes

    config = config_of(other, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = build_engine(build_model(config, 256), config.to_plan(), config, torch.device("cpu"))
    model, untied = build_as_stored(config, 256)
    program = describe_rank(lambda: model, config.to_plan(), 0, reads_in_place=engine.reads_in_place).program
    assert program.digest == engine.program.digest
    assert untied == [note for note in engine.notes if "tied" in note]
    engine.close()
