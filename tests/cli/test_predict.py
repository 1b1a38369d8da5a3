"""`atoll predict` and `atoll train --dry-run`: what is printed, what is refused, and that nothing is written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.base.errors import CheckpointError, ConfigError, DataError, PlanError, UserError
from atoll.cli.main import app
from atoll.prediction.cost import Breakdown, Held

MODEL = """
[model]
layers = 6
hidden = 64
heads = 4
kv_heads = 2
ffn = 160
vocabulary = 1000
"""

CONFIG = """
[data]
source = "{folder}/text.txt"
tokenizer = "bytes"
sequence = 32
cache = "{folder}/cache"
[train]
steps = 4
global_batch = 64
microbatch = 1
precision = "bf16"
[parallel]
ranks = 8
pipeline = 2
intra = 2
layout = "GGG"
device = "cpu"
[run]
folder = "{folder}/run"
"""

CLUSTER = """
[device]
preset = "h100-80gb"
context = 1_000_000_000
efficiency = { spread = 0.1 }
[node]
devices = 4
link = { preset = "nvlink4" }
[network]
preset = "infiniband-ndr"
"""

LLAMA = """
[model]
source = "transformers:{family}"
[model.config]
hidden_size = 64
intermediate_size = 160
num_hidden_layers = 6
num_attention_heads = 4
num_key_value_heads = 2
vocab_size = 1000
tie_word_embeddings = true
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a config, its corpus and a cluster."""
    (tmp_path / "text.txt").write_text("".join(f"line {number} of the corpus\n" for number in range(500)))
    (tmp_path / "run.toml").write_text(MODEL + CONFIG.format(folder=tmp_path))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


def run(command: str, folder: Path, *arguments: object, cluster: bool = True) -> Any:
    words = [command, str(folder / "run.toml"), *map(str, arguments)]
    if cluster:
        words += ["--cluster", str(folder / "cluster.toml")]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result


def predicted(folder: Path, *overrides: str) -> dict[str, Any]:
    sets = [word for override in overrides for word in ("--set", override)]
    found: dict[str, Any] = json.loads(run("predict", folder, "--json", *sets).stdout)
    return found


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


# ---- atoll predict


def test_json_adds_up(folder: Path) -> None:
    found = predicted(folder)
    assert found["world"] == 8
    tied = 1000 * 64
    assert found["parameters"] == tied + 6 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 160 + 2 * 64) + 64
    assert found["interval"] == pytest.approx([0.9 * found["seconds"], 1.1 * found["seconds"]])
    assert found["tokens_per_second"] == pytest.approx(64 * 32 / found["seconds"])
    assert found["tokens_per_second_per_device"] == pytest.approx(found["tokens_per_second"] / 8)
    assert 0 < found["mfu"] < 1
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert set(rank["breakdown"]) == set(Breakdown._fields)
        assert sum(rank["breakdown"].values()) == pytest.approx(found["seconds"])
        for when in ("peak", "rest"):
            assert set(rank[when]) == {*Held._fields, "total"}
            assert sum(rank[when].values()) == 2 * rank[when]["total"]
        assert rank["saved_bytes"] > 0
        assert rank["margin_bytes"] == 85_029_158_912 - rank["peak"]["total"]
        assert rank["peak"]["total"] > rank["rest"]["total"]
    assert found["margin_bytes"] == min(rank["margin_bytes"] for rank in found["ranks"])
    assert found["fits"] is True
    busiest = found["breakdown"]["busiest_rank"]
    assert found["breakdown"]["busiest"] == found["ranks"][busiest]["breakdown"]
    means = [sum(rank["breakdown"][part] for rank in found["ranks"]) / 2 for part in Breakdown._fields]
    assert list(found["breakdown"]["mean"].values()) == pytest.approx(means)


def test_the_report_says_what_json_says(folder: Path) -> None:
    found, text = predicted(folder), run("predict", folder).stdout
    parts = text.split("time of a step")[1].split("\n\n")[0]
    shares = [float(share) for share in re.findall(r"([\d.]+)%", parts)]
    assert sum(shares[0::2]) == pytest.approx(100, abs=1)
    assert sum(shares[1::2]) == pytest.approx(100, abs=1)
    assert "pipeline bubble" in parts
    assert "tensor-parallel" not in parts
    assert f"MFU     {found['mfu']:.1%} of 989.4 TFLOP/s a device in bfloat16" in text
    assert "from " in text.split("a step  ")[1].splitlines()[0]
    for title in ("bytes at the peak", "bytes between steps"):
        table = text.split(title)[1].split("\n\n")[0].splitlines()[1:]
        assert [len(line) for line in table] == [len(table[0])] * 3
        assert table[0].split()[0] == "rank"
        assert table[0].split()[-2:] == ["context", "total"]
    assert text.splitlines()[-1].startswith("fits: rank ")


def test_a_plan_that_does_not_fit_says_by_how_much(folder: Path) -> None:
    (folder / "cluster.toml").write_text(CLUSTER.replace("context", "memory = 1_001_000_000\ncontext"))
    found, text = predicted(folder), run("predict", folder).stdout
    assert found["fits"] is False
    assert found["margin_bytes"] < 0
    fullest = min(found["ranks"], key=lambda rank: rank["margin_bytes"])["rank"]
    share = -found["margin_bytes"] / 1_001_000_000
    assert text.splitlines()[-1].startswith(f"does not fit: rank {fullest} has the highest peak and needs ")
    assert f"{share:.1%}, more than" in text.splitlines()[-1]


def test_any_world_size_works_in_one_process(folder: Path) -> None:
    many = predicted(folder, "parallel.ranks=16384", "parallel.tensor=2", "train.global_batch=65536")
    assert many["world"] == 16384
    assert many["breakdown"]["mean"]["tensor"] > 0
    assert len(many["ranks"]) == 2


def test_nothing_is_written_and_no_corpus_is_needed(folder: Path) -> None:
    (folder / "text.txt").unlink()
    before = files(folder)
    run("predict", folder)
    assert files(folder) == before


def test_the_tokenizer_says_how_many_ids_there_are(folder: Path) -> None:
    text = (folder / "run.toml").read_text().replace("vocabulary = 1000", "")
    (folder / "run.toml").write_text(text)
    counts = {}
    for name in ("bytes", "bpe-1000", "bpe-2000"):
        counts[name] = predicted(folder, f"data.tokenizer={name}")["parameters"]
    assert counts["bpe-2000"] - counts["bpe-1000"] == 1000 * 64
    assert counts["bpe-1000"] - counts["bytes"] == (1000 - 256) * 64
    with pytest.raises(DataError, match='neither "bytes" nor'):
        predicted(folder, "data.tokenizer=nowhere.json")


def test_a_llama_of_transformers_takes_what_the_decoder_takes_but_keeps_more(folder: Path) -> None:
    own = predicted(folder, "parallel.device=cuda")
    (folder / "run.toml").write_text(LLAMA.format(family="llama") + CONFIG.format(folder=folder))
    other = predicted(folder, "parallel.device=cuda")
    differ = {key for key in own if own[key] != other[key]}
    assert differ == {"ranks", "margin_bytes"}
    for one, kept in zip(own["ranks"], other["ranks"], strict=True):
        assert kept["peak"].pop("activations") > one["peak"].pop("activations")


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gpt2"])
def test_other_families(folder: Path, family: str) -> None:
    text = LLAMA.format(family=family)
    if family == "gpt2":
        text = re.sub(
            r"hidden_size.*?num_key_value_heads = 2\n", "n_embd = 64\nn_layer = 6\nn_head = 4\n", text, flags=re.S
        )
    (folder / "run.toml").write_text(text + CONFIG.format(folder=folder))
    found = predicted(folder)
    import torch
    import transformers

    own = {"n_embd": 64, "n_layer": 6, "n_head": 4} if family == "gpt2" else {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(family, vocab_size=1000, tie_word_embeddings=True, **own)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert found["parameters"] == count


@pytest.mark.parametrize("family", ["decoder", "llama"])
def test_a_split_vocabulary_evens_ranks_out(folder: Path, family: str) -> None:
    if family != "decoder":
        (folder / "run.toml").write_text(LLAMA.format(family=family) + CONFIG.format(folder=folder))
    sizes = "model.vocabulary=64000" if family == "decoder" else "model.config.vocab_size=64000"
    long = [sizes, "data.sequence=1024", "train.microbatch=8"]
    whole, split = (predicted(folder, *long, f"parallel.vocabulary={each}") for each in ("false", "true"))
    assert split["parameters"] == whole["parameters"]
    assert split["seconds"] < whole["seconds"]
    fullest = [max(rank["peak"]["total"] for rank in found["ranks"]) for found in (split, whole)]
    assert fullest[0] < fullest[1]
    first, last = (rank["rest"]["optimizer"] for rank in split["ranks"])
    assert first == pytest.approx(last, rel=0.01)
    for rank in split["ranks"]:
        assert sum(rank["breakdown"].values()) == pytest.approx(split["seconds"], rel=1e-6)


def test_families_without_formulas_are_counted(folder: Path) -> None:
    experts = "\nnum_local_experts = 4\nnum_experts_per_tok = 2\n"
    (folder / "run.toml").write_text(LLAMA.format(family="mixtral") + experts + CONFIG.format(folder=folder))
    found = predicted(folder)
    layer = 64 * (2 * 64 + 2 * 32) + 4 * 3 * 64 * 160 + 4 * 64 + 2 * 64  # attention, experts, router, norms
    assert found["parameters"] == 1000 * 64 + 6 * layer + 64
    assert found["seconds"] > 0


def test_adapters_leave_little_to_train(folder: Path) -> None:
    pytest.importorskip("peft")
    (folder / "run.toml").write_text(LLAMA.format(family="llama") + CONFIG.format(folder=folder))
    whole, few = predicted(folder), predicted(folder, "lora.rank=2", "parallel.layout=IIG")
    adapters = 6 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 160))
    assert few["parameters"] == whole["parameters"] + adapters
    assert sum(rank["rest"]["optimizer"] for rank in few["ranks"]) * 4 == pytest.approx(12 * adapters, rel=0.02)
    assert few["mfu"] < whole["mfu"]


@pytest.mark.wide(3)
@pytest.mark.parametrize(
    ("overrides", "kind", "words"),
    [
        (["train.frozen=['embed.*']", "parallel.tensor=2"], ConfigError, "without tensor parallelism"),
        (["train.frozen=['embed.*']", "parallel.vocabulary=true"], PlanError, "a split vocabulary are not known for"),
        (["train.frozen=['embd.*']"], ConfigError, "'embd.*' matches no parameter"),
        (["parallel.vocabulary=true", "model.vocabulary=1"], PlanError, "one of 2 ranks is left without any"),
        (["parallel.tensor=8", "parallel.ranks=32"], ConfigError, "tensor = 8 ranks cannot split 4 attention heads"),
        (["model.kv_heads=2", "parallel.tensor=4"], ConfigError, "tensor = 4 ranks cannot split 2 key and value heads"),
        (["parallel.ranks=9"], ConfigError, "parallel.ranks = 9 is not a multiple of"),
    ],
)
def test_what_is_refused(folder: Path, overrides: list[str], kind: type[UserError], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        predicted(folder, *overrides)


def test_without_a_cluster_it_is_said_what_one_is(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run("predict", folder, cluster=False)
    text = str(caught.value)
    assert "name its file with --cluster" in text
    assert "h100-80gb" in text
    assert "nvlink4" in text
    (folder / "cluster.toml").write_text(text.split("with\n")[1].split("\ndevices:")[0])
    assert predicted(folder)["fits"] is True


def test_a_cluster_without_a_network_is_refused_before_anything_is_printed(folder: Path) -> None:
    (folder / "cluster.toml").write_text(CLUSTER.split("[network]")[0])
    words = ["predict", str(folder / "run.toml"), "--cluster", str(folder / "cluster.toml")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ConfigError)
    assert "the cluster no [network]" in str(result.exception)
    assert result.stdout == ""


# ---- atoll train --dry-run


def test_a_dry_run_writes_nothing_and_gives_the_bytes(folder: Path) -> None:
    before = files(folder)
    found = json.loads(run("train", folder, "--dry-run", "--json", cluster=False).stdout)
    assert files(folder) == before
    assert found["seconds"] is found["fits"] is found["breakdown"] is None
    assert all(rank["peak"]["total"] > rank["rest"]["total"] > 0 for rank in found["ranks"])
    text = run("train", folder, "--dry-run", cluster=False).stdout
    assert "bytes at the peak" in text
    assert "MFU" not in text


def test_a_dry_run_for_a_cluster_gives_the_prediction(folder: Path) -> None:
    words = ["--set", "parallel.device=cuda"]
    found = json.loads(run("train", folder, "--dry-run", "--json", *words).stdout)
    assert found == predicted(folder, "parallel.device=cuda")


@pytest.mark.parametrize(
    ("override", "kind", "words"),
    [
        ("parallel.ranks=9", ConfigError, "parallel.ranks = 9 is not a multiple of"),
        ("train.global_batch=7", ConfigError, "train.global_batch = 7 is not a multiple of"),
        ("data.source=nowhere", DataError, "there is no such file or folder"),
        ("data.sequence=4096", DataError, "the corpus is too small"),
        ("model.vocabulary=100", ConfigError, "model.vocabulary = 100 is smaller than the 256 ids"),
        ("parallel.layers_per_stage=[1, 2]", ConfigError, "layers"),
        ("run.folder={folder}/text.txt/run", ConfigError, "cannot be written"),
        ("train.frozen=['no-such.*']", ConfigError, "matches no parameter"),
        ("model.weights=nowhere", UserError, "nowhere"),
        ("parallel.device=cuda", ConfigError, "each needs one of its own"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(
    folder: Path, override: str, kind: type[UserError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    before = files(folder)
    with pytest.raises(kind, match=re.escape(words)):
        run("train", folder, "--dry-run", "--set", override.replace("{folder}", str(folder)), cluster=False)
    assert files(folder) == before


def test_a_tensor_split_that_the_model_does_not_allow_is_refused(folder: Path) -> None:
    sets = [word for each in ("parallel.ranks=32", "parallel.tensor=8") for word in ("--set", each)]
    with pytest.raises(UserError, match="8"):
        run("train", folder, "--dry-run", *sets, cluster=False)


@pytest.mark.slow
def test_a_folder_with_a_run_is_refused_and_one_without_cannot_be_resumed(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no finished checkpoint to resume from"):
        run("train", folder, "--dry-run", "--resume", "always", cluster=False)
    held = folder / "run"
    held.mkdir()
    (held / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="holds a run already"):
        run("train", folder, "--dry-run", "--resume", "never", cluster=False)
    for start in ((), ("--overwrite",)):
        run("train", folder, "--dry-run", *start, cluster=False)
    assert (held / "metrics.jsonl").is_file()


def test_a_run_that_would_start_and_is_not_predicted_is_no_error(folder: Path) -> None:
    frozen = ["--set", "train.frozen=['embed.*']", "--set", "parallel.tensor=2", "--set", "parallel.layout=NNN"]
    result = run("train", folder, "--dry-run", *frozen, cluster=False)
    assert result.stdout == ""
    assert "note: the run can start but cannot be predicted: " in result.stderr


@pytest.mark.slow
def test_a_large_corpus_that_is_not_prepared_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.training.data.store.PREVIEWED_BYTES", 100)
    result = run("train", folder, "--dry-run", cluster=False)
    assert "note: the corpus is not prepared yet" in result.stderr
    assert "bytes at the peak" in result.stdout


def test_a_run_with_a_cluster_that_cannot_be_read_does_not_start(folder: Path) -> None:
    (folder / "cluster.toml").write_text("[device]\n")
    before = files(folder)
    with pytest.raises(ConfigError, match="node: Field required"):
        run("train", folder)
    assert files(folder) == before


def test_the_config_may_name_the_cluster(folder: Path) -> None:
    named = ["--set", f"run.cluster={folder / 'cluster.toml'}"]
    for command in (["predict"], ["train", "--dry-run"]):
        name, *flags = command
        found = json.loads(run(name, folder, *flags, "--json", *named, cluster=False).stdout)
        assert found["seconds"] == predicted(folder)["seconds"]


def test_state_in_host_memory_is_listed(folder: Path) -> None:
    """What rests there, what is left of a node's memory, and that a step waits for it."""
    cluster, host = folder / "cluster.toml", 'parallel.host={ optimizer = "update-on-device" }'
    tables = cluster.read_text()
    cluster.write_text(tables.replace("[node]", '[node]\nhost = { preset = "dgx-h100" }'))
    text = run("predict", folder, "--set", host).stdout
    assert "optimizer state in host memory, update-on-device" in text
    assert re.search(r"^state that rests in host memory: at most \S+ \S+ per rank$", text, re.MULTILINE)
    kept = run("predict", folder, "--set", "parallel.host={ activations = 1.0 }").stdout
    assert re.search(r"at most (\S+ \S+) per rank, with \1 of activations$", kept, re.MULTILINE)
    few = ["--set", "parallel.host={ activations = 0.01 }"]  # of which none leaves
    assert "state that rests in host memory: at most 0 B per rank\n" in run("predict", folder, *few).stdout
    assert re.search(r"^host memory +\d", text, re.MULTILINE)
    found = predicted(folder, host)
    assert all(rank["host_bytes"] > 0 for rank in found["ranks"])
    assert 0 < found["host_margin_bytes"] < 2_199_023_255_552
    assert found["breakdown"]["mean"]["host"] > 0
    cluster.write_text(tables.replace("[node]", '[node]\nhost = { preset = "dgx-h100", memory = 1_000 }'))
    assert "does not fit: state in host memory and saves need" in run("predict", folder, "--set", host).stdout
    cluster.write_text(tables)
    with pytest.raises(ConfigError, match=r"has no \[node.host\], and the plan keeps state in host memory"):
        run("predict", folder, "--set", host)
