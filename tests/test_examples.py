"""The examples: the commands that their docstrings name run, and print what the docstrings say."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from atoll.testing import progress
from atoll.training.config import from_dict

pytestmark = pytest.mark.usefixtures("warm")

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""


def commands(name: str) -> list[list[str]]:
    return [shlex.split(line) for line in re.findall(r"^    ((?:python|torchrun) .+)$", docstring(name), re.MULTILINE)]


def run(command: list[str], folder: Path, *more: str) -> list[str]:
    """Lines that a docstring's command prints, with more options."""
    launch = {"python": [], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}[command[0]]
    words = [str(EXAMPLES.parent / word) if word.startswith("examples/") else word for word in command[1:]]
    result = progress.run([sys.executable, *launch, *words, *more], cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def shape(line: str) -> str:
    """A line without its numbers, all seconds in one unit."""
    line = re.sub(r"[-+]?\d[\d.]*", "0", line)
    return re.sub(r"\s+", " ", line.replace("0 ms", "0 s")).strip()


def is_as_said(lines: list[str], name: str) -> bool:
    said = {shape(line) for line in re.findall(r"^    (.+)$", docstring(name), re.MULTILINE)}
    return bool(lines) and {shape(line) for line in lines} <= said


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_says_its_command_and_is_on_the_page() -> None:
    page = (EXAMPLES / "README.md").read_text()
    for file in FILES:
        assert all(f"examples/{file.name}" in command for command in commands(file.stem))
        assert commands(file.stem), file
        assert re.search(r"\bprint(s|ed)?\b", docstring(file.stem)), file
    linked = set(re.findall(r"\]\((\w+\.(?:py|ipynb))\)", page))
    assert linked == {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".ipynb"}}


# ---- low-rank adapters


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_only_answers_are_learned() -> None:
    lora = load("finetune_lora")
    from transformers import PreTrainedTokenizerFast

    chat = [
        {"role": "user", "content": "What is an island?"},
        {"role": "assistant", "content": "A group of ranks."},
        {"role": "user", "content": "And the assistant?"},
        {"role": "assistant", "content": "Fast links join them."},
    ]
    words = lora.train_tokenizer([chat])
    assert isinstance(words, PreTrainedTokenizerFast)
    ids, labels = lora.encode(words, chat)
    assert "".join(words.convert_tokens_to_string(words.convert_ids_to_tokens(ids))) == (
        "<|user|>What is an island?<|end|><|assistant|>A group of ranks.<|end|>"
        "<|user|>And the assistant?<|end|><|assistant|>Fast links join them.<|end|>"
    )
    learned = [token for token, label in zip(ids, labels, strict=True) if label == token]
    assert words.decode(learned) == "A group of ranks.<|end|>Fast links join them.<|end|>"
    assert {label for token, label in zip(ids, labels, strict=True) if label != token} == {-100}

    batch = lora.collate([(ids, labels), (ids[:5], labels[:5])])
    assert {name: tuple(values.shape) for name, values in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "attention_mask"), (2, len(ids))
    )
    assert batch["attention_mask"].sum(1).tolist() == [len(ids), 5]
    assert set(batch["labels"][1].tolist()) == {-100}

    words.chat_template = "{{ messages | length }}" + lora.TEMPLATE
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        lora.encode(words, chat)


@pytest.mark.slow
def test_a_model_learns_its_answers(tmp_path: Path) -> None:
    lines = run(commands("finetune_lora")[0], tmp_path)
    assert is_as_said(lines, "finetune_lora")
    assert "assistant: Nobody: each rank keeps a shard." in lines
    assert {path.name for path in (tmp_path / "runs/finetune/adapters").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


# ---- weights to a sampler


@pytest.mark.slow
def test_a_policy_learns_from_what_another_process_samples(tmp_path: Path) -> None:
    lines = run(commands("grpo")[1], tmp_path)
    assert is_as_said(lines, "grpo")
    rewards = [float(line.split()[-1]) for line in lines]
    assert len(rewards) == 4
    assert rewards[0] < 0.5 < 0.8 < rewards[-1]


# ---- models of one's own


@pytest.mark.slow
def test_a_model_of_ones_own_has_the_same_losses_on_four_ranks(tmp_path: Path) -> None:
    one, four = (run(command, tmp_path, "--tiny", "--steps", "12") for command in commands("own_model"))
    assert is_as_said(one, "own_model")
    assert (one[0], four[0]) == (
        "pipeline stages 1, data-parallel ranks 1",
        "pipeline stages 2, data-parallel ranks 2",
    )
    assert one[1:] == four[1:]
    assert len(one) == 5


@pytest.mark.slow
def test_a_classifier_learns(tmp_path: Path) -> None:
    lines = run(commands("classify")[1], tmp_path)
    assert is_as_said(lines, "classify")
    shares = [float(share) for share in re.findall(r"points ([\d.]+)%", "\n".join(lines))]
    assert len(shares) == 6
    assert shares[-1] > 90


# ---- clusters


@pytest.mark.wide(0)
@pytest.mark.slow
def test_two_islands_send_what_is_predicted(tmp_path: Path) -> None:
    lines = run(commands("two_islands")[0], tmp_path, "--tiny", "--steps", "4")
    layouts = ["GGG", "IGG", "IIG", "NNG"]
    assert [line[:3] for line in lines[-4:]] == layouts
    if len(lines) == 6:
        assert lines[1].startswith("this machine cannot make islands, so nothing is measured: ")
        pytest.skip(lines[1])
    assert is_as_said(lines, "two_islands")
    for line in lines[1:]:
        (predicted, measured) = (float(value) for value in re.findall(r"([\d.]+) MB", line))
        assert predicted < measured < 1.15 * predicted + 0.05, line


def test_without_the_tools_islands_are_predicted_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    lines = run(commands("two_islands")[0], tmp_path, "--tiny")
    assert lines[1] == (
        "this machine cannot make islands, so nothing is measured: unshare, nsenter, ip, tc not found; "
        "install util-linux and iproute2"
    )
    assert len(lines) == 6
    assert "measured" not in "".join(lines[2:])


@pytest.mark.slow
def test_a_plan_for_a_cluster_is_a_config(tmp_path: Path) -> None:
    lines = run(commands("plan_512")[1], tmp_path, "--tiny")
    assert lines[0] == "16 GPUs, 2 nodes of 8, ethernet-25 between them"
    assert lines[1].startswith("mesh ")
    assert is_as_said(lines[2:4], "plan_512")
    at = lines.index("[parallel]")
    text = "\n".join(lines[at:])
    values = tomllib.loads(text)
    values["train"] |= {"global_batch": 32}
    values["model"] = {"layers": 8, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocabulary": 32000}
    assert from_dict(values, source="plan_512", text=text).to_plan().mesh.world == 16


# ---- notebooks

SMALLER = {"plan_512": ("NODES, LAYERS, SAMPLES = 64, 80, 1024", "NODES, LAYERS, SAMPLES = 2, 8, 32")}
SAYS = {"classify": r"accuracy (9\d\.\d|100\.0)%, by chance 33\.3%", "plan_512": r"0\.25 of the rate: \d+\.\d\d s"}


@pytest.mark.wide(1)  # the script beside the other one takes most of its path
@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb"), reverse=True), ids=lambda path: path.stem)
def test_notebooks_run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the first cell to the last, in a kernel as Jupyter starts it, at a smaller size where one is known."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not kept: clear them"
    if path.stem in SMALLER:
        large, small = SMALLER[path.stem]
        assert sum(large in cell.source for cell in notebook.cells) == 1
        for cell in notebook.cells:
            cell.source = cell.source.replace(large, small)
    options = {"timeout": int(progress.MOST), "resources": {"metadata": {"path": str(EXAMPLES)}}}
    nbclient.NotebookClient(notebook, **options).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert re.search(SAYS[path.stem], printed), printed
