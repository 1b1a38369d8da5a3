"""Hugging Face folders in and out: bit for bit, onto any layout, with or without adapters."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from atoll.base.errors import CheckpointError, ConfigError, PlanError, RankError
from atoll.cli.main import app
from atoll.runtime.checkpoint import Archive, Piece, step_folder
from atoll.runtime.checkpoint import save as save_checkpoint
from atoll.runtime.checkpoint.archive import read_state
from atoll.runtime.engine import Engine
from atoll.runtime.models import adapter_for
from atoll.runtime.models.weights import weights_for
from atoll.testing import run_ranks
from atoll.testing.parity import Case, whole_parameters
from atoll.training.config import from_dict
from atoll.training.data.tokenizer import FileTokenizer
from atoll.training.models import interchange
from atoll.training.models.interchange import export_folder, import_folder
from atoll.training.models.pretrained import hugging_face_config, hugging_face_model
from atoll.training.output.folder import RunFolder, Start
from atoll.training.run.session import run_session
from atoll.training.run.signals import StopRequest
from atoll.training.setup.build import build_model
from tests.families import Family

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers looks at whatever else is installed

SPREAD = [
    Case(layout="IIG", pipeline=2, intra=2, precision="fp32", microbatches=4),
    Case(layout="GGG", tensor=2, inter=2, precision="fp32", microbatches=4),
]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.utils.logging.disable_progress_bar()


def save(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Family(name).build().to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, **how)
    return model


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000; at most 1000"),  # it made them one by one
        ({"model_type": "\ud800"}, r"model.source = .*\?"),  # the message could not be printed
        ({"dtype": "float77"}, "no attribute 'float77'"),
        ({"rms_norm_eps": 64}, "rms_norm_eps"),
        ({"num_attention_heads": 3}, "multiple of the number of attention heads"),
        ({"layer_types": [[[]] * 3]}, "unhashable"),
        ({"rope_theta": "llama"}, "unsupported operand"),
        ({"hidden_size": 10**30}, "an integer of 31 digits"),
    ],
)
def test_a_config_that_transformers_does_not_bound_is_one_error(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    """transformers and its validators raise whatever they meet; only some of it was caught."""
    plain = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(plain | changed))
    config = from_dict({"model": {"source": str(tmp_path)}})
    with pytest.raises(ConfigError, match=words) as caught, torch.device("meta"):
        hugging_face_model(config, None)
    assert str(caught.value).encode()


@pytest.mark.parametrize("name", ["qwen2_moe", "nemotron_h"])
def test_the_width_of_an_expert_is_no_count(name: str) -> None:
    """Past bug: Qwen1.5-MoE, whose shared expert has 5632 features, was refused for more than 1000 modules."""
    config = from_dict({"model": {"source": f"transformers:{name}", "config": {"num_hidden_layers": 1}}})
    sizes = hugging_face_config(config)
    assert max(value for key, value in sizes.to_dict().items() if key.endswith("expert_intermediate_size")) > 1000


def first_values(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = case.model.build()
    engine = Engine(model, case.plan, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2), weights=folder)
    values = whole_parameters(engine)
    engine.close()
    return values


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gemma2", "opt"])
@pytest.mark.parametrize("case", SPREAD, ids=["pp2-IIG", "tp2-GGG"])
def test_a_folder_is_read_by_every_rank(name: str, case: Case, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    seen = set()
    for values in run_ranks(first_values, 4, replace(case, model=Family(name)), tmp_path):
        for each, value in values.items():
            assert torch.equal(value, model.get_parameter(each)), each
            seen.add(id(model.get_parameter(each)))
    assert seen == {id(parameter) for parameter in model.parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_rank_reads_only_what_it_keeps(name: str, tmp_path: Path) -> None:
    """Also where the folder has a tensor for each expert, and the model one for all."""
    model = save(name, tmp_path)
    read = sum(run_ranks(elements_read, 4, replace(SPREAD[0], model=Family(name)), tmp_path))
    wanted = sum(parameter.numel() for parameter in model.parameters())
    # IIG keeps masters once over all ranks; parameters are views of them.
    assert read <= 2 * wanted * 1.02


def elements_read(case: Case, folder: Path) -> int:
    from atoll.runtime.models.unread import StoredTensor

    read = 0
    original = StoredTensor.fill

    def fill(self: StoredTensor, target: torch.Tensor, offsets: tuple[int, ...]) -> None:
        nonlocal read
        read += target.numel()
        original(self, target, offsets)

    StoredTensor.fill = fill  # type: ignore[method-assign]
    try:
        first_values(case, folder)
    finally:
        StoredTensor.fill = original  # type: ignore[method-assign]
    return read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mixtral"])
def test_in_and_out_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = save(name, tmp_path / "given", dtype=dtype, max_shard_size="20KB")
    moved = import_folder(tmp_path / "given", tmp_path / "checkpoint")
    assert not moved.read_whole
    export_folder(tmp_path / "checkpoint", tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(model)
    assert back.dtype == dtype
    wanted = model.state_dict()
    assert set(back.state_dict()) == set(wanted)
    for each, value in back.state_dict().items():
        assert torch.equal(value, wanted[each]), each


def test_a_large_model_goes_out_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an index that says which part a parameter lies in, as transformers writes it."""
    model = save("qwen2", tmp_path / "given")
    import_folder(tmp_path / "given", tmp_path / "checkpoint")
    monkeypatch.setattr(interchange, "SHARD_BYTES", 10_000)
    moved = export_folder(tmp_path / "checkpoint", tmp_path / "back")
    assert len(moved.files) > 2
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert set(index["weight_map"].values()) == set(moved.files)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    for each, value in back.state_dict().items():
        assert torch.equal(value, model.state_dict()[each]), each


def test_buffers_that_are_not_persistent_are_not_exported(tmp_path: Path) -> None:
    """Checkpoints of earlier versions have them."""
    model = save("gemma", tmp_path / "given")
    import_folder(tmp_path / "given", tmp_path / "checkpoint")
    values = {**dict(model.named_parameters()), "model.embed_tokens.embed_scale": torch.ones(1)}
    pieces = [
        Piece(("model", name), tuple(each.shape), 0, each.numel(), each.detach().reshape(-1))
        for name, each in values.items()
    ]
    save_checkpoint(tmp_path / "older", pieces, read_state(tmp_path / "checkpoint"))
    assert export_folder(tmp_path / "older", tmp_path / "back").tensors == len(values) - 1


def test_a_tie_that_a_folder_contradicts_is_said_and_both_values_are_imported(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "given")
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    tensors[head] = tensors[embedding] + 1.0
    model.config.tie_word_embeddings = True
    model.config.save_pretrained(tmp_path / "given")
    save_file(tensors, tmp_path / "given" / "model.safetensors", metadata={"format": "pt"})
    moved = import_folder(tmp_path / "given", tmp_path / "checkpoint")
    assert moved.tensors == len(tensors)
    (note,) = (note for note in moved.notes if "not tied" in note)
    assert f"ties {head} to {embedding}" in note


def test_an_imported_model_stands_at_its_beginning(tmp_path: Path) -> None:
    save("qwen2", tmp_path / "given")
    import_folder(tmp_path / "given", tmp_path / "checkpoint")
    assert read_state(tmp_path / "checkpoint")["step"] == 0


def config(folder: Path, **model: Any) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text("".join(f"{number} brown foxes\n" for number in range(200)))
    return {
        "model": model,
        "data": {"source": str(text), "tokenizer": "bytes", "sequence": 8, "cache": str(folder / "cache")},
        "train": {"steps": 2, "global_batch": 4, "microbatch": 1, "precision": "fp64", "lr": 1e-2},
        "parallel": {"ranks": 4, "pipeline": 2, "intra": 2, "layout": "IIG"},
        "run": {"folder": str(folder / "run"), "loggers": []},
    }


LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def train_and_look(values: dict[str, Any]) -> tuple[str, torch.Tensor | None]:
    """Train a config; the last checkpoint, and logits of an engine that starts from it."""
    found = from_dict(values)
    RunFolder(Path(found.run.folder)).check(Start.OVERWRITE)
    ending = run_session(found, found.to_plan(), device=torch.device("cpu"), start=Start.OVERWRITE, stop=StopRequest())
    from atoll.training.setup.build import build_engine, build_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = build_engine(build_model(found, 256), found.to_plan(), found, torch.device("cpu"))
    engine.load(ending.checkpoint)
    logits = engine.logits({"input_ids": torch.arange(8)[None]})
    engine.close()
    return str(ending.checkpoint), logits


@pytest.mark.slow
def test_what_was_trained_is_exported_and_trains_on(tmp_path: Path) -> None:
    values = config(tmp_path, source="transformers:llama", config=LLAMA)
    results = run_ranks(train_and_look, 4, values)
    (checkpoint, _), logits = results[0], next(found for _, found in results if found is not None)
    export_folder(Path(checkpoint).parents[1], tmp_path / "out", dtype="float64")  # the run, of which it is the newest
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.allclose(model(input_ids=torch.arange(8)[None]).logits, logits, rtol=0, atol=1e-12)
    again = config(tmp_path, source=str(tmp_path / "out"))
    again["parallel"] = {"ranks": 4, "pipeline": 2, "tensor": 2}
    run_ranks(train_and_look, 4, again)
    started = config(tmp_path, source="transformers:llama", config=LLAMA, weights=checkpoint)
    run_ranks(train_and_look, 4, started)


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's model."""
    stored = Archive(checkpoint).contents.tensors
    return interchange._read(checkpoint, {n: n for n in stored if n.startswith("model.")}, stored, dtypes={})


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("whole", "tied"),
    [((), False), (("embed_tokens", "lm_head"), False), (("lm_head", "layers.1.input_layernorm"), True)],
)
def test_adapters_are_saved_as_peft_does(whole: tuple[str, ...], tied: bool, tmp_path: Path) -> None:
    """And come back bit for bit, with the modules that were trained whole beside them; and train on."""
    torch.manual_seed(0)
    sizes = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=tied)
    base = transformers.AutoModelForCausalLM.from_config(sizes).double()
    base.save_pretrained(tmp_path / "base")
    values = config(tmp_path, source=str(tmp_path / "base"))
    values |= {"lora": {"rank": 2, "alpha": 8.0, "targets": ["q_proj", "v_proj"], "modules_to_save": list(whole)}}
    values["parallel"]["layout"] = "ING"
    results = run_ranks(train_and_look, 4, values)
    logits = next(found for _, found in results if found is not None)
    trained = Path(results[0][0])
    export_folder(trained, tmp_path / "adapters")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters").double().eval()
    with torch.no_grad():
        assert torch.allclose(adapted(input_ids=torch.arange(8)[None]).logits, logits, rtol=0, atol=1e-12)
        assert not torch.allclose(base.eval()(input_ids=torch.arange(8)[None]).logits, logits, atol=1e-6)
    written = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert written.keys() == peft.get_peft_model_state_dict(adapted).keys()
    for suffix in whole:
        (name,) = (name for name in written if name.endswith(f"{suffix}.weight"))
        own = name.removeprefix("base_model.model.")
        assert not torch.equal(written[name], base.state_dict()[own]), "it was not trained"

    import_folder(tmp_path / "adapters", tmp_path / "back")
    first, back = tensors_of(trained), tensors_of(tmp_path / "back")
    assert first.keys() == back.keys()
    assert all(torch.equal(value, back[name]) for name, value in first.items())
    export_folder(tmp_path / "back", tmp_path / "again")
    files = [tmp_path / folder / "adapter_model.safetensors" for folder in ("adapters", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    values["model"]["weights"] = str(tmp_path / "back")
    run_ranks(train_and_look, 4, values)


@pytest.mark.slow
def test_adapters_on_experts_are_saved_as_peft_does(tmp_path: Path) -> None:
    """Of experts that two ranks divide, under a split backward."""
    torch.manual_seed(0)
    sizes = transformers.MixtralConfig(**LLAMA, num_local_experts=4)
    transformers.AutoModelForCausalLM.from_config(sizes).double().save_pretrained(tmp_path / "base")
    values = config(tmp_path, source=str(tmp_path / "base"))
    stacked = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    values |= {"lora": {"rank": 2, "alpha": 8.0, "targets": ["q_proj"], "target_parameters": stacked}}
    values["parallel"] |= {"layout": "GGG", "expert": 2, "schedule": "zb-h1"}
    results = run_ranks(train_and_look, 4, values)
    logits = next(found for _, found in results if found is not None)
    export_folder(Path(results[0][0]), tmp_path / "adapters")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").double()
    plain.set_experts_implementation("eager")
    with torch.no_grad():
        before = plain.eval()(input_ids=torch.arange(8)[None]).logits
        adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters").double().eval()
        assert torch.allclose(adapted(input_ids=torch.arange(8)[None]).logits, logits, rtol=0, atol=1e-12)
        assert not torch.allclose(before, logits, atol=1e-6)
    import_folder(tmp_path / "adapters", tmp_path / "back")
    first, back = tensors_of(Path(results[0][0])), tensors_of(tmp_path / "back")
    assert all(torch.equal(value, back[name]) for name, value in first.items())


def test_parameters_with_adapters_that_a_model_does_not_have_are_refused() -> None:
    given = {"model": {"source": "transformers:llama", "config": LLAMA}}
    lora = {"rank": 2, "target_parameters": ["mlp.experts.down_proj"]}
    with (
        pytest.raises(ConfigError, match=r"no parameter's name ends in 'mlp\.experts\.down_proj'"),
        torch.device("meta"),
    ):
        hugging_face_model(from_dict({**given, "lora": lora}), None)
    with pytest.raises(ConfigError, match=r"target_parameters = .* without adapters: set lora.rank"):
        from_dict({**given, "lora": {**lora, "rank": 0}})


def test_modules_to_save_that_a_model_does_not_have_are_refused(tmp_path: Path) -> None:
    """`peft` skips them."""
    given = {"model": {"source": "transformers:llama", "config": LLAMA}}
    lora = {"rank": 2, "modules_to_save": ["lm_head", "embed_token"]}
    words = r"no module's name ends in 'embed_token'; did you mean 'embed_tokens'\?"
    with pytest.raises(ConfigError, match=words), torch.device("meta"):
        hugging_face_model(from_dict({**given, "lora": lora}), None)
    trained = {**given, "lora": {"rank": 2}, "train": {"trainable": ["*lora*", "*.norm.weight"]}}
    with pytest.raises(ConfigError, match=r"1 parameters of the base .* model\.norm\.weight.* lora\.modules_to_save"):
        build_model(from_dict(trained), 256)
    with pytest.raises(ConfigError, match=r"modules_to_save = \['lm_head'\] without adapters: set lora.rank"):
        from_dict({**given, "lora": {"modules_to_save": ["lm_head"]}})
    with pytest.raises(
        ConfigError, match=r'lora.rank = 2 is for models of transformers, and model.source is "builtin"'
    ):
        from_dict({"lora": {"rank": 2}}).to_plan()


def save_adapters(folder: Path, **options: Any) -> Path:
    """A base and adapters beside it, as `peft` saves them."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**LLAMA))
    model.save_pretrained(folder / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    made = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], **options)
    peft.get_peft_model(base, made).save_pretrained(folder / "adapters")
    return folder / "adapters"


def test_adapters_that_peft_has_trained_are_imported(tmp_path: Path) -> None:
    given = save_adapters(tmp_path, task_type="CAUSAL_LM")
    import_folder(given, tmp_path / "checkpoint")
    export_folder(tmp_path / "checkpoint", tmp_path / "back")
    wanted, found = (load_file(folder / "adapter_model.safetensors") for folder in (given, tmp_path / "back"))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, r"has use_dora = True, which \[lora\] cannot say"),
        ({"rank_pattern": {"q_proj": 4}}, "has rank_pattern = "),
        ({"target_modules": ".*q_proj"}, r"target_modules = '\.\*q_proj'; Atoll trains LoRA on layers that are listed"),
        ({"base_model_name_or_path": "somebody/model"}, "is 'somebody/model', not a folder here"),
        ({"base_model_name_or_path": None}, "is None, not a folder here"),
        ({"r": 3}, "adapter_model.safetensors is of another model: 8 problems\n.* there and .* here"),
        ({"target_modules": ["q_proj", "k_proj"]}, "it lacks base_model.model.model.layers.0.self_attn.k_proj.lora_A"),
        ({"modules_to_save": None}, "it has base_model.model.lm_head.weight, which the model does not have"),
    ],
    ids=str,
)
def test_adapters_that_a_config_cannot_say_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = save_adapters(tmp_path)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **options}))
    with pytest.raises((ConfigError, CheckpointError), match=words):
        import_folder(folder, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.slow
def test_the_run_s_tokenizer_goes_with_the_model(tmp_path: Path) -> None:
    values = config(tmp_path, source="transformers:llama", config={**LLAMA, "vocab_size": 300})
    values["data"]["tokenizer"] = "bpe-300"
    checkpoint = Path(run_ranks(train_and_look_at_nothing, 4, values)[0])
    assert (checkpoint.parent.parent / "tokenizer.json").is_file()
    with warnings.catch_warnings(record=True) as caught:
        export_folder(checkpoint, tmp_path / "out")
    assert not [each for each in caught if "token_id" in str(each.message)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    own = FileTokenizer.read(checkpoint.parent.parent / "tokenizer.json")
    assert tokenizer("12 brown foxes", add_special_tokens=False)["input_ids"] == own.encode("12 brown foxes").tolist()
    assert tokenizer.eos_token_id == own.end_of_text
    plain = config(tmp_path, source="transformers:llama", config=LLAMA)
    folder = Path(run_ranks(train_and_look_at_nothing, 4, plain)[0]).parent.parent
    assert not (folder / "tokenizer.json").exists()


@pytest.mark.slow
def test_masked_models_train(tmp_path: Path) -> None:
    sizes = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "vocab_size")}
    values = config(tmp_path, source="transformers:bert", config=sizes)
    values["train"] |= {"objective": "masked 0.3", "prompt": "a"}
    assert run_ranks(train_and_look_at_nothing, 4, values)[0].endswith("step-000002")
    assert not (tmp_path / "run" / "sample.txt").exists()


def train_and_look_at_nothing(values: dict[str, Any]) -> str:
    found = from_dict(values)
    RunFolder(Path(found.run.folder)).check(Start.OVERWRITE)
    return str(
        run_session(
            found, found.to_plan(), device=torch.device("cpu"), start=Start.OVERWRITE, stop=StopRequest()
        ).checkpoint
    )


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Family("llama").build()
    adapter = adapter_for(model)
    with pytest.raises(PlanError, match=r"neither a checkpoint nor a folder with model\.safetensors"):
        weights_for(adapter, tmp_path)
    save("qwen2", tmp_path / "other")
    with torch.device("meta"):
        larger = adapter_for(Family("llama", (("intermediate_size", 32),)).build())
    with pytest.raises(PlanError, match=r"is of another size: .*gate_proj\.weight is"):
        weights_for(larger, tmp_path / "other")
    with torch.device("meta"):
        stranger = adapter_for(Family("gpt2").build())
    with pytest.raises(PlanError, match=r"lacks .* of the model's"):
        weights_for(stranger, tmp_path / "other")
    with pytest.raises(CheckpointError, match="is neither a finished checkpoint"):
        export_folder(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"model\.source = 'nowhere'"):
        import_folder(Path("nowhere"), tmp_path / "out")


def test_the_commands_say_what_they_wrote(tmp_path: Path) -> None:
    save("qwen2", tmp_path / "given")
    runner = CliRunner()
    result = runner.invoke(app, ["import", str(tmp_path / "given"), str(tmp_path / "checkpoint"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["read_whole"] is False
    result = runner.invoke(app, ["export", str(tmp_path / "checkpoint"), str(tmp_path / "back")])
    assert result.exit_code == 0, result.output
    assert "51 tensors" in result.stdout
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    result = runner.invoke(app, ["export", str(tmp_path / "checkpoint"), str(tmp_path / "full")])
    assert "is not empty" in str(result.exception)


def test_ranks_refuse_a_folder_together(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="neither a checkpoint nor a folder"):
        run_ranks(first_values, 4, replace(SPREAD[0], model=Family("llama")), tmp_path)


def test_a_checkpoint_of_another_program_is_not_exported(tmp_path: Path) -> None:
    """It is whole, and does not name its model."""
    folder = step_folder(tmp_path, 1)
    save_checkpoint(folder, [Piece(("model", "w"), (4,), 0, 4, torch.ones(4))], {"step": 1})
    with pytest.raises(CheckpointError, match="does not name its model"):
        export_folder(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
