"""Reading a config: defaults, overrides, and every problem at once with its place."""

import pickle
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from atoll.base.errors import ConfigError
from atoll.base.toml import to_toml
from atoll.training.config import Config, from_dict, known_keys, load
from atoll.training.config.foreign import WORDS
from atoll.training.config.load import REMOVED, line_of
from atoll.training.config.schema import tables

QUICKSTART = """\
# a comment
[model]
layers = 8
hidden = 128

[train]
steps = 300
lr = 3e-3
optimizer_options.betas = [0.9, 0.99]

[parallel]
ranks = 4
pipeline = 2
layout = "iig"
"""


@pytest.fixture
def quickstart(tmp_path: Path) -> Path:
    path = tmp_path / "quickstart.toml"
    path.write_text(QUICKSTART)
    return path


def _problems(path: Path, text: str, *overrides: str) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


def test_a_file_overrides_the_defaults(quickstart: Path) -> None:
    config = load(quickstart)
    assert (config.model.layers, config.model.heads, config.train.options["betas"]) == (8, 4, [0.9, 0.99])
    assert config.parallel.layout == "IIG"
    assert config.notes == ()


def test_an_empty_file_is_the_default_config(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("")
    assert load(path) == Config()


def test_overrides_are_toml_or_plain_strings(quickstart: Path) -> None:
    config = load(
        quickstart,
        [
            "train.steps=5",
            "train.lr=1",
            "parallel.layout=zero-3",
            "train.optimizer_options.betas=[0.8, 0.9]",
            "run.folder=2026-11-20",
            "run.loggers=[]",
            "data.source=/data/my corpus",
            'train.prompt="x = 1"',
            "train.steps=7",
        ],
    )
    assert (config.train.steps, config.train.lr, config.train.options["betas"]) == (7, 1.0, [0.8, 0.9])
    assert (config.parallel.layout, config.run.folder, config.run.loggers) == ("GGG", "2026-11-20", ())
    assert (config.data.source, config.train.prompt) == ("/data/my corpus", "x = 1")


def test_an_override_cannot_smuggle_in_another_key(quickstart: Path) -> None:
    config = load(quickstart, ["run.folder=runs\nport = 5"])
    assert (config.run.folder, config.run.restarts) == ("runs\nport = 5", 3)


@pytest.mark.parametrize("text", ["steps=5", "train.steps", "train..steps=5", "=5"])
def test_a_malformed_override_says_how_to_write_it(quickstart: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"write section\.key=value"):
        load(quickstart, [text])


def test_an_override_through_a_value_is_refused(quickstart: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.steps is a value, not a table"):
        load(quickstart, ["train.steps.x=1"])


def test_an_unknown_key_names_the_nearest_and_its_line(tmp_path: Path) -> None:
    message = _problems(tmp_path / "a.toml", "[train]\nsteps = 3\nwarmupp = 2\n")
    assert "a.toml: train.warmupp: unknown key; did you mean train.warmup? (line 3)" in message


def test_a_key_of_another_section_names_its_home(tmp_path: Path) -> None:
    message = _problems(tmp_path / "a.toml", "[train]\nlayout = 'GGG'\n")
    assert "train.layout: unknown key; did you mean parallel.layout? (line 2)" in message


def test_an_unknown_key_without_a_near_one_lists_what_the_section_has(tmp_path: Path) -> None:
    message = _problems(tmp_path / "a.toml", "[checkpoint]\nzzzzzz = 1\n")
    assert "[checkpoint] has every, keep" in message


def test_unknown_sections(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    assert "trian: unknown section; did you mean [train]? (line 1)" in _problems(path, "[trian]\nsteps = 1\n")
    assert "steps: unknown section; did you mean train.steps? (line 1)" in _problems(path, "steps = 1\n")
    # Of a key of several sections, that of the first in the order of the documentation.
    assert "sequence: unknown section; did you mean data.sequence? (line 1)" in _problems(path, "sequence = 8\n")
    assert "the sections are model, data" in _problems(path, "[qqqq]\n")


def test_a_seed_may_be_as_large_as_torchs_and_not_larger(tmp_path: Path) -> None:
    largest = (1 << 63) - 1
    torch.Generator().manual_seed(largest)
    assert from_dict({"train": {"seed": largest}}).train.seed == largest
    assert f"seed = {largest + 1}: must be" in _problems(tmp_path / "a.toml", f"[train]\nseed = {largest + 1}\n")
    assert "seed = -1: must be" in _problems(tmp_path / "a.toml", "[train]\nseed = -1\n")


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = """\
[model]
hidden = 130
heads = 4
kv_heads = 3
[train]
steps = "many"
precision = "int8"
[parallel]
layout = "IIX"
zero_optimization = { stage = 2 }
[data]
sequence = 0
"""
    message = _problems(tmp_path / "a.toml", text, "checkpoint.keep=0")
    assert "8 problems" in message
    for part in (
        "model.hidden = 130 is not a multiple of model.heads = 4; use hidden = 128 or 132",
        "model.heads = 4 is not a multiple of model.kv_heads = 3; use kv_heads = 1, 2 or 4",
        "train.steps = 'many': must be a valid integer (line 6)",
        "train.precision = 'int8': must be 'fp32', 'bf16', 'fp16', 'fp64', 'fp8-rowwise' or "
        "'fp8-rowwise_with_gw_hp' (line 7)",
        "parallel.layout = 'IIX': no layout 'IIX'",
        "data.sequence = 0: must be greater than or equal to 1 (line 12)",
        "checkpoint.keep = 0: must be greater than or equal to 1 (from --set)",
        "parallel.layout = 'IIX' and parallel.zero_optimization both choose the layout; keep one",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nsteps = 2.5", "train.steps = 2.5: must be a valid integer"),
        ("[train]\nsteps = true", "train.steps = True: must be a valid integer"),
        ("[train]\nlr = '3e-3'", "train.lr = '3e-3': must be a valid number"),
        ("[train]\nclip = -0.5", "train.clip = -0.5: must be greater than or equal to 0"),
        ("[parallel]\nunit = 0", "parallel.unit = 0: must be greater than or equal to 1"),
        ("[parallel]\nunit = -1", "parallel.unit = -1: must be greater than or equal to 1"),
        ("[train]\nlr = nan", "train.lr = nan: must be a finite number"),
        ("[train]\noptimizer_options.betas = [0.9]", "train.optimizer_options.betas.1"),
        ("[train]\noptimizer_options.betas = [0.9, 1.0]", "train.optimizer_options.betas.1 = 1.0: must be less than 1"),
        ("[train]\nobjective = 'masked 1.5'", "train.objective = 'masked 1.5': must be"),
        ("[model.config]\nrope_theta = 0", "model.config.rope_theta = 0: must be greater than 0"),
        ("[model.config]\nexperts = 8\ngroups = 3", "model.config.experts = 8 is not a multiple of groups = 3"),
        ("[model.config]\nexperts = 8\ndense_layers = 8", "model.config.dense_layers = 8 of 8 layers leaves no layer"),
        ("[model.config]\ngroups = 2", "model.config.groups: of a mixture of experts; set model.config.experts too"),
        ("[model.config]\nrope = 0", "model.config.rope = 0: unknown key; there are dropout, tie_embeddings"),
        ("[parallel.outer]\nevery = 4\noptimizer = { lrr = 1 }", "parallel.outer.optimizer.lrr = 1: unknown key"),
        ("[parallel]\nlayout = 'GIX'", "parallel.layout = 'GIX': no layout 'GIX'"),
        ("[parallel]\ntensor = 0", "parallel.tensor = 0"),
        ("[model]\nsource = 'gpt2'\nlayers = 2", "model.layers: sizes of the built-in decoder"),
        ("[model]\nhidden = 12\nheads = 4", "is odd; rotary positions need an even head size; use hidden = 8 or 16"),
        ("train = 5", "train = 5: must be a table, [train]"),
    ],
)
def test_wrong_values_say_what_they_must_be(tmp_path: Path, text: str, message: str) -> None:
    assert message in _problems(tmp_path / "a.toml", text)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    (tmp_path / "quickstart.toml").write_text("")
    with pytest.raises(ConfigError, match=r"no config at .*quikstart.toml; did you mean .*quickstart.toml\?"):
        load(tmp_path / "quikstart.toml")
    with pytest.raises(ConfigError, match="no config at"):
        load(tmp_path / "nowhere" / "a.toml")
    with pytest.raises(ConfigError, match="cannot read the config"):
        load(tmp_path)
    assert "is not valid TOML" in (message := _problems(tmp_path / "b.toml", "[train]\nsteps = = 1\n"))
    assert "line 2" in message
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read the config"):
        load(tmp_path / "c.toml")


def test_derived_sizes_follow_what_they_derive_from() -> None:
    config = from_dict({"model": {"heads": 6, "hidden": 96}})
    assert (config.model.kv_heads, config.model.ffn) == (6, 256)
    assert from_dict({"model": {"heads": 6, "hidden": 96, "kv_heads": 2}}).model.kv_heads == 2
    assert Config().model.ffn == from_dict({"model": {"hidden": 128}}).model.ffn


def test_a_dominated_layout_is_noted() -> None:
    config = from_dict({"parallel": {"layout": "GGN"}})
    note = "parallel.layout = 'GGN' is dominated by 'GGG', which uses less memory and no more traffic"
    assert config.notes == (note,)


@pytest.mark.parametrize("keys", REMOVED, ids=".".join)
def test_a_removed_key_is_one_error_that_says_what_happens_now(keys: tuple[str, ...]) -> None:
    """With what happens now as its value it is accepted: run folders of older versions have every key."""
    now, instead = REMOVED[keys]
    outer = {"parallel": {"outer": {"every": 2}}} if "outer" in keys else {}
    names = {keys[0]: {**outer.get(keys[0], {})}}
    table: dict[str, Any] = names
    for key in keys[:-1]:
        table = table.setdefault(key, {})
    table[keys[-1]] = "another"
    with pytest.raises(ConfigError) as caught:
        from_dict(names)
    assert f"{'.'.join(keys)} = 'another': this key is gone; {instead}" in str(caught.value)
    table[keys[-1]] = now
    assert from_dict(names) == from_dict(outer)


def test_there_are_no_more_keys_than_somebody_sets() -> None:
    assert len(keys()) <= 123


def test_each_key_says_what_it_is() -> None:
    """The description of a table within a table is that of the table above."""
    assert [name for name, description in keys().items() if not description] == []


def keys() -> dict[str, str | None]:
    """The description of each key that has a value of its own."""
    known = tables()
    return {
        f"{name}.{key}": field.description
        for name, table in known.items()
        for key, field in table.model_fields.items()
        if f"{name}.{key}" not in known
    }


def test_a_config_does_not_change() -> None:
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 5  # type: ignore[misc]


def test_a_config_survives_the_way_to_another_process() -> None:
    config = from_dict({"parallel": {"zero_optimization": {"stage": 2, "overlap_comm": True}}})
    assert config.notes
    copied = pickle.loads(pickle.dumps(config))
    assert (copied, copied.notes) == (config, config.notes)


def test_the_dump_reads_back_to_an_equal_config(tmp_path: Path, quickstart: Path) -> None:
    config = load(quickstart, ['train.prompt="a\\"b\\n\\\\c"', "train.frozen=['embed*']", "data.cache=/tmp/x"])
    path = tmp_path / "dumped.toml"
    path.write_text(config.dump())
    assert load(path) == config


@settings(deadline=None, max_examples=60)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    number=st.floats(allow_nan=False, allow_infinity=False),
    flags=st.lists(st.booleans()),
)
def test_emitted_toml_reads_back(text: str, number: float, flags: list[bool]) -> None:
    table = {"text": text, "number": number, "flags": flags, "left_out": None}
    assert tomllib.loads(to_toml({"section": table})) == {"section": {"text": text, "number": number, "flags": flags}}


def test_the_promised_keys_exist() -> None:
    known = known_keys()
    assert (
        " ".join(known) == "model data train train.router lora parallel parallel.codecs parallel.outer parallel.host "
        "run checkpoint federation"
    )
    promised = {
        "model": "source config layers hidden heads kv_heads ffn vocabulary",
        "data": "source tokenizer sequence validation text_field cache",
        "train": "steps global_batch microbatch precision seed lr min_lr_ratio warmup lr_schedule optimizer_options "
        "weight_decay clip eval_every eval_batches prompt frozen",
        "lora": "rank alpha dropout targets",
        "parallel": "ranks pipeline schedule tensor intra layout zero_optimization recompute device timeout",
        "run": "folder loggers",
        "checkpoint": "every keep",
    }
    for section, keys in promised.items():
        assert set(keys.split()) <= set(known[section])


def test_lines_are_found_in_every_spelling() -> None:
    text = 'parallel.ranks = 2\n[train]\n"steps" = 5\nbetas=[0.9,\n 2.0]\n[data]\n'
    assert line_of(text, ("parallel", "ranks")) == 1
    assert line_of(text, ("train", "steps")) == 3
    assert line_of(text, ("train", "betas", "1")) == 4
    assert line_of(text, ("data",)) == 6
    assert line_of(text, ("run", "port")) is None


def test_a_config_cannot_ask_to_delete_a_run() -> None:
    """It did, and the same command after a crash deleted every checkpoint. Old files still load."""
    assert from_dict({"run": {"overwrite": False}}).notes == ()
    (note,) = from_dict({"run": {"overwrite": True}}).notes
    assert "run.overwrite has no effect" in note
    assert "--overwrite" in note


@pytest.mark.parametrize(("key", "says"), [
    ("train.gradient_accumulation_steps", "train.global_batch is the number of sequences per step"),
    ("train.per_device_train_batch_size", "train.microbatch"),
    ("parallel.fsdp", 'full_shard is "GGG"'),
    ("parallel.zero_stage", 'stage 1 is "NNG"'),
    ("tensor_parallel_degree", "parallel.tensor"),
    ("train.max-steps", "train.steps"),
])  # fmt: skip
def test_a_word_of_another_system_is_answered(tmp_path: Path, key: str, says: str) -> None:
    """In a file, and on the command line."""
    head, _, name = key.rpartition(".")
    text = f'[{head}]\n"{name}" = 2\n' if head else f"{name} = 2\n"
    assert says in _problems(tmp_path / "a.toml", text)
    with pytest.raises(ConfigError, match=re.escape(says)):
        from_dict({}, overrides=[f"{key}=2"])


def test_what_other_systems_settings_are_here_exists() -> None:
    """Each key that an answer names."""
    known = {f"{section}.{name}" for section, names in known_keys().items() for name in names}
    for word, says in WORDS.items():
        named = re.findall(r"\b(?:train|parallel|data|run|model|checkpoint|lora)\.[a-z_]+\b(?!\.)", says)
        assert set(named) <= known | {"model.config"}, word


@pytest.mark.parametrize(("table", "key", "words"), [
    ("parallel", "expert_model_parallel_size", "parallel.expert, a divisor of parallel.intra"),
    ("parallel", "ep_size", "tensor-parallel ranks divide experts too, and do not count"),
    ("parallel", "expert_tensor_parallel_size", "no expert is cut"),
    ("parallel", "moe_token_dispatcher_type", "all-to-all"),
    ("train", "moe_z_loss_coeff", "train.router.z_loss"),
    ("train", "moe_router_bias_update_rate", "train.router.bias_rate"),
    ("train", "moe_aux_loss_coeff", "train.router.sequence_loss"),
    ("model", "moe_pad_expert_input_to_capacity", "experts have no capacity"),
    ("model", "moe_router_topk", "experts_per_token in [model.config]"),
])  # fmt: skip
def test_what_other_systems_call_settings_of_experts_is_answered(table: str, key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"{table}\.{key}: unknown key; here: .*{re.escape(words)}"):
        from_dict({table: {key: 2}})


def test_many_heads_are_refused_at_once() -> None:
    """The list of fitting kv_heads once tried every number up to model.heads: 4 s for this one, which fuzzing found."""
    began = time.process_time()
    with pytest.raises(ConfigError, match=r"model\.heads = 99999999 is not a multiple of model\.kv_heads = 4"):
        from_dict({"model": {"hidden": 64, "heads": 99_999_999, "kv_heads": 4}})
    assert time.process_time() - began < 1.0


def test_an_unknown_key_of_a_table_in_a_section_is_told_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"codecs.gradent: unknown key; did you mean parallel.codecs.gradient"):
        from_dict({"parallel": {"codecs": {"gradent": "int8"}}})
    with pytest.raises(ConfigError, match=r"parallel.codecs.rounding = .up."):
        from_dict({"parallel": {"codecs": {"rounding": "up"}}})
    with pytest.raises(ConfigError, match=r"parallel.outer.evry: unknown key; did you mean parallel.outer.every"):
        from_dict({"parallel": {"outer": {"evry": 4}}})
