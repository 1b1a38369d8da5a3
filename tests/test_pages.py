"""Every fenced block of every page runs, or is read as what it is; what says what is printed says what is printed.

`RULES` names, for each language, the test of its blocks. Commands run in a folder with the files that the pages assume,
at a tiny size: trainings in one process on a CPU. What cannot run here is read by its own program's parser, and is in
`ONLY_READ` with the reason.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from atoll.base.errors import UserError
from atoll.cli.main import app
from atoll.plans.schedules import Links
from atoll.prediction.cost import Archipelago, Cluster
from atoll.runtime.same import describe_differences
from atoll.testing import progress
from atoll.training.config import from_dict, load
from benchmarks import claims
from benchmarks.hangs.judge import Mesh, Seen, judge_hang
from tests.clusters import TWO_CPUS
from tests.once import made_once
from tests.pages import PAGES, ROOT, Block, blocks, fenced, name_of, pages_with
from tests.training.settings.test_convert import ACCELERATE, DEEPSPEED, TORCHTITAN

pytestmark = pytest.mark.usefixtures("warm")

SHELLS = ("sh", "bash", "console")


# ---- every block has a rule


def said(block: Block) -> str:
    """The name of what a block of text says: its page, with its first word where a page has several."""
    name = name_of(block.page)
    return name if name in SAYS else f"{name}: {block.text.split()[0].partition(':')[0]}"


RULES: Mapping[str, Callable[[Block], bool]] = {
    "python: run": lambda block: block.language == "python" and not block.part,
    "python: lines of a test": lambda block: block.language == "python" and block.part == "tested",
    "toml: read as a config, a cluster or links": lambda block: block.language == "toml" and not block.part,
    "json: read as rows of steps": lambda block: block.language == "json" and not block.part,
    "jsonl: read as conversations (tests/training/data/test_conversations.py)": lambda block: (
        block.language == "jsonl" and name_of(block.page) == "docs/data.md"
    ),
    "shell: run or read": lambda block: block.language in SHELLS,
    "text: compared with what says it": lambda block: (
        block.language == "text" and not block.part and said(block) in {*SAYS, *SAID_BY_RANKS}
    ),
    "generated: written again and compared (tests/test_docs.py)": lambda block: (
        block.part == "generated" and block.page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    ),
    "planned: predicted again (tests/test_recipes.py)": lambda block: (
        block.part == "planned" and block.language not in SHELLS and name_of(block.page) == "docs/recipes.md"
    ),
    "result: written from its raw file and compared (tests/test_evidence.py)": lambda block: (
        block.page.is_relative_to(ROOT / "benchmarks") and block.page in written_from_raw_files()
    ),
}


@functools.cache
def written_from_raw_files() -> frozenset[Path]:
    return frozenset(ROOT / "benchmarks" / name / "README.md" for name in claims.raw_names())


def rules_of(block: Block) -> list[str]:
    return [name for name, covers in RULES.items() if covers(block)]


def test_every_block_of_every_page_has_one_rule() -> None:
    wrong = [
        f"{block.place}: {rules_of(block)}" for page in PAGES for block in fenced(page) if len(rules_of(block)) != 1
    ]
    assert wrong == []


def test_every_page_in_the_repository_is_looked_at() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"not a checkout: {listed.stderr.strip()}")
    assert set(listed.stdout.split()) <= {name_of(page) for page in PAGES}


@pytest.mark.parametrize(
    "text", ["```\nwords\n```\n", "```rust\nfn\n```\n", "  ~~~text\n  x\n  ~~~\n", "````md\n```\n````\n"]
)
def test_a_block_that_no_rule_knows_is_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"# A page\n\n{text}")
    (block,) = fenced(tmp_path / "page.md")
    assert rules_of(block) == []


# ---- python


@pytest.mark.parametrize("page", pages_with("python"))
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's own tools say so without ranks
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # transformers looks at whatever is installed
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a page, in order and in one namespace; a block of tests as a file that ranks import, as its reader has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {"__name__": name_of(page)}
    for block in fenced(page):
        if block.language != "python" or block.part:
            continue
        if not (tests := re.findall(r"^def (test_\w+)", block.text, flags=re.MULTILINE)):
            exec(compile(block.text, block.place, "exec"), names)
            continue
        name = f"{page.stem.lower()}_{block.line}"
        (tmp_path / f"{name}.py").write_text(block.text)
        module = importlib.import_module(name)
        for test in tests:
            getattr(module, test)()


def test_blocks_of_a_test_are_its_lines() -> None:
    """But for indentation, and marks of the formatter."""

    def lines_of(text: str) -> str:
        return "\n".join(line.partition("  # fmt:")[0].strip() for line in text.splitlines() if line.strip())

    found = [(block.text, ROOT / name) for block, name in blocks_of_tests()]
    assert found
    assert [text for text, path in found if lines_of(text) not in lines_of(path.read_text(encoding="utf-8"))] == []


def blocks_of_tests() -> list[tuple[Block, str]]:
    """The blocks between `<!-- tested: PATH -->` and `<!-- end -->`, each with the path of the test."""
    found = []
    for page in PAGES:
        paths = re.findall(r"<!-- tested: (\S+) -->\n", page.read_text(encoding="utf-8"))
        found += zip([each for each in fenced(page) if each.part == "tested"], paths, strict=True)
    return found


# ---- settings


@pytest.mark.parametrize("page", pages_with("toml"))
def test_toml_blocks_are_configs_clusters_or_links(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "toml"):
        values = tomllib.loads(text)
        if "device" in values or "nodes" in values:
            Cluster.of(values, source=name_of(page))
        elif "island" in values:
            assert Archipelago.of(values, source=name_of(page)).islands
        elif "link" in values:
            (tmp_path / "links.toml").write_text(text)
            assert Links.read(tmp_path / "links.toml").each
        else:
            config = from_dict(values, source=name_of(page), text=text)
            if not config.parallel.auto:
                config.to_plan()


def test_rows_in_json_are_those_that_a_command_of_the_page_reads() -> None:
    """They are the file of the command: see `with_its_rows`."""
    for page in PAGES:
        if blocks(page, "json"):
            assert name_of(page) == "docs/clusters.md"
            assert any(line.words[:4] == ["atoll", "doctor", "--calibrate", "rows.jsonl"] for line in lines_of(page))


# ---- commands

TINY = (
    *("model.layers=2", "model.hidden=16", "model.heads=2", "model.kv_heads=2", "model.ffn=48"),
    *("data.source=text.txt", "data.tokenizer=bytes", "data.sequence=16", "data.cache=cache"),
    *("train.steps=6", "train.global_batch=8", "train.microbatch=4", "train.precision=fp32", "train.warmup=0"),
    *("train.eval_every=3", "train.eval_batches=1"),
    *("parallel.ranks=1", "parallel.pipeline=1", "parallel.intra=1", "parallel.device=cpu"),
    *("run.loggers=[]", "checkpoint.every=3"),
)
"""What is added to a page's trainings: the last word of a key counts."""

SMALLER = {"step-000120": "step-000006", "--ranks=2": "--ranks=1"}
"""Names of a page that are others in a tiny run."""

ONLY_READ: Mapping[str, str] = {
    "git": "it would fetch this repository from where it is published",
    "pip": "it would install packages; CI installs from the same files",
    "make": "it is what runs the tests, or what they are part of; its targets are looked up",
    "torchrun": "several machines; one machine: tests/cli/test_train.py and tests/test_examples.py",
    "srun": "Slurm; stand-ins: tests/test_deploy.py",
    "sbatch": "Slurm; stand-ins: tests/test_deploy.py and tests/test_deploy_islands.py",
    "bash deploy/islands/island.sh": "it waits for the other islands; tests/test_deploy_islands.py starts them",
    "kubectl": "Kubernetes; its manifests are read by their schemas and their pods run in tests/test_deploy.py",
    "export": "it sets a variable for what runs on several machines; who reads it is looked up",
    "python -m venv": "it makes the environment that the tests run in",
    "python -m pytest": "the file is itself one of the tests",
    "python benchmarks/gpu/one_gpu.py": "tests/test_one_gpu.py rehearses it and its other modes",
    "python examples": "tests/test_examples.py runs the same command",
    "python deploy/ray/train.py": "Ray and GPUs; a stand-in: tests/test_deploy.py",
    "atoll plan": "a minute for a recipe; tests/test_recipes.py predicts the plan, tests/cli/test_plan.py runs others",
    "atoll train islands.toml": "it waits for the other islands; tests/training/run/test_federated.py starts them",
    "atoll doctor": "it starts processes, and fails where those are slow to start; tests/cli/test_doctor.py runs it",
}
"""Commands that do not run here, by how they begin, each with the reason."""

VARIABLES: Mapping[str, str] = {
    "ATOLL_SECRET": "atoll.runtime.rendezvous",
    "MASTER_ADDR": "atoll.runtime.rendezvous",
    "NCCL_SOCKET_IFNAME": "",  # NCCL itself, a library without a source here
    "PYTHONPATH": "",  # Python
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
}
"""Variables that pages set, and the module that reads them."""


@dataclass(frozen=True, slots=True)
class Line:
    """A command of a page. words: its own, the first without its folder.  printed: what the block says it prints."""

    block: Block
    words: list[str]
    printed: str = ""

    @property
    def is_training(self) -> bool:
        is_whole = "--dry-run" not in self.words and not self.printed and not begins(self)
        return self.words[:2] == ["atoll", "train"] and is_whole


def lines_in(block: Block) -> Iterator[Line]:
    """The commands of a block. After a `$ ` in it, lines without one are what is printed."""
    text = block.text.replace("\\\n", " ")
    if "$ " not in text[:2]:
        text = "".join(f"$ {line}\n" for line in text.splitlines())
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        for each in command.split(" && "):
            if words := shlex.split(each, comments=True):
                yield Line(
                    block, [words[0].removeprefix(".venv/bin/").replace("python3", "python"), *words[1:]], printed
                )


def lines_of(page: Path) -> list[Line]:
    return [line for block in fenced(page) if block.language in SHELLS for line in lines_in(block)]


def begins(line: Line) -> str:
    """The row of `ONLY_READ` that a command is; empty for one that runs."""
    text = shlex.join(line.words)
    return next((words for words in ONLY_READ if text == words or text.startswith((f"{words} ", f"{words}/"))), "")


def run_config(**more: Any) -> str:
    """A config that a page takes for granted."""
    config = load(ROOT / "configs" / "quickstart.toml", [*TINY, *(f"{key}={value}" for key, value in more.items())])
    return config.dump()


AS_RANK = """
import json, os, sys
import torch, atoll.training.run.session
from atoll.cli.main import main
from tests.cli.test_train import free_port

for number, words in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        with open(f"{number}.log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.argv = ["atoll", *words]
        main()
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    if code:
        sys.exit(f"atoll {words}: exit code {code}: " + open(f"{number}.log").read())
"""
"""Runs commands one after another, each as the only rank of a launcher, in copies of one warm process."""


def train_all(folder: Path, commands: list[list[str]]) -> None:
    """Run them in a folder; all must succeed."""
    result = progress.run(
        [sys.executable, "-c", AS_RANK, json.dumps(commands)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages take for granted, all of it small. Every training of every page has run in it."""
    return made_once(tmp_path_factory, "desk", furnish)


def furnish(folder: Path) -> None:
    for name in ("configs", "deploy", "examples", "tests", "constraints.txt", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "text.txt").write_text("".join(f"line {number} of the corpus\n" for number in range(500)))
    (folder / "cluster.toml").write_text(TWO_CPUS)
    for name in ("run", "config", "other"):
        own = {"run": "mine", "config": "config", "other": "other"}[name]
        (folder / f"{name}.toml").write_text(run_config(**{"run.folder": f"runs/{own}", "run.cluster": "cluster.toml"}))
    (folder / "ds_config.json").write_text(json.dumps(DEEPSPEED))
    (folder / "accelerate.yaml").write_text(ACCELERATE)
    (folder / "train.toml").write_text(TORCHTITAN)
    (folder / "islands.toml").write_text(blocks(ROOT / "docs" / "islands.md", "toml")[0])

    lines = [line for page in PAGES for line in lines_of(page) if line.is_training]
    train_all(folder, [[*line.words[1:], *(word for each in TINY for word in ("--set", each))] for line in lines])
    for copy in ("one", "two"):
        shutil.copytree(folder / "runs" / "quickstart", folder / "runs" / copy)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if lines_of(page)], ids=name_of)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
# A test before this one may have imported distutils.
@pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils:UserWarning")
def test_commands_work(page: Path, desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a page, in order and in one folder."""
    folder = tmp_path / "desk"
    shutil.copytree(desk, folder, symlinks=True)
    monkeypatch.chdir(folder)
    with_its_rows(page, folder)
    for line in lines_of(page):
        if line.is_training:
            check_training(line)
        elif begins(line):
            READERS[line.words[0]](line.words[1:])
        else:
            RUNNERS[line.words[0]](line)


def test_every_reason_is_for_a_command_of_some_page() -> None:
    assert {begins(line) for page in PAGES for line in lines_of(page)} - {""} == set(ONLY_READ)


def with_its_rows(page: Path, folder: Path) -> None:
    for text in blocks(page, "json"):
        (folder / "rows.jsonl").write_text(text)


def check_training(line: Line) -> None:
    """It ran, and at its own size it is a plan."""
    config, *options = line.words[2:]
    values = load(Path(config), [word for flag, word in pairwise(options) if flag == "--set"])
    values.to_plan()
    assert (Path(values.run.folder) / "checkpoints" / "step-000006").is_dir()


# ---- commands that run


def one_line(text: str) -> str:
    return " ".join(text.split())


def run_atoll(line: Line) -> None:
    words = [SMALLER.get(part, part) for part in line.words[1:]]
    words = [functools.reduce(lambda word, pair: word.replace(*pair), SMALLER.items(), word) for word in words]
    if words == ["verify", "~/.cache/atoll/<key>"]:
        words[1] = str(next(Path("cache").iterdir()))
    if words[0] == "train" and not line.printed:
        words += [word for each in TINY for word in ("--set", each)]
    if words[:2] == ["show", "program"]:  # without the minutes that a tokenizer takes to learn
        words += ["--set", 'data.tokenizer="bytes"']
    if "-o" in words:  # a block may show several ways to write one file, and none overwrites it
        Path(words[words.index("-o") + 1]).unlink(missing_ok=True)
    if words[0] == "import":
        save_model(Path(words[1]))
    if words[0] == "export":
        shutil.copytree("runs/start", words[1])
    if "--live" in words:
        signal.signal(signal.SIGALRM, signal.default_int_handler)  # Ctrl-C, in a moment
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    result = CliRunner().invoke(app, words)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    place = f"{line.block.place}: atoll {shlex.join(words)}"
    if not line.printed:
        assert result.exit_code == 0, f"{place}: {result.output}{result.exception or ''}"
        return
    assert isinstance(result.exception, UserError), place
    assert one_line(f"error: {result.exception}") == one_line(line.printed), place


def save_model(folder: Path) -> None:
    """A small model of transformers, for a page that has one."""
    from tests.families import Family

    model: Any = Family("qwen3").build()
    model.save_pretrained(folder)


def run_python(line: Line) -> None:
    if line.words[1].startswith("docs/examples/bugs/"):  # tests/test_bugs_elsewhere.py runs them
        assert (ROOT / line.words[1]).is_file(), line.block.place
        return
    option, text = line.words[1:]
    assert option == "-c"
    exec(compile(text, line.block.place, "exec"), {})


RUNNERS: Mapping[str, Callable[[Line], None]] = {"atoll": run_atoll, "python": run_python, "cd": lambda line: None}


# ---- commands that are read


def read_atoll(words: list[str]) -> None:
    """The options are its own, and the configs are there."""
    group: Any = typer.main.get_command(app)
    command = group.commands[words[0]]
    if hasattr(command, "commands"):
        command, words = command.commands[words[1]], words[1:]
    given = command.make_context(words[0], words[1:]).params
    config = given.get("config")
    if config is not None:
        load(config, given.get("overrides") or ()).parallel.auto or load(config).to_plan()


def read_torchrun(words: list[str]) -> None:
    from torch.distributed.run import config_from_args, get_args_parser

    words = [word for word in words if word != "..."]  # how the machines find one another
    given = get_args_parser().parse_args(words)
    config_from_args(given)
    if given.module:
        read_python(["-m", given.training_script, *given.training_script_args])
    else:
        read_example("torchrun", words)


def read_python(words: list[str]) -> None:
    match words:
        case ["-m", "atoll", *rest]:
            read_atoll(rest)
        case ["-m", "pytest", path]:
            assert Path(path).is_file()
        case ["-m", "venv", ".venv"]:
            assert importlib.util.find_spec("venv")
        case ["deploy/ray/train.py" | "benchmarks/gpu/one_gpu.py" as path, *rest]:
            assert {word for word in rest if word.startswith("--")} <= options_of(ROOT / path)
        case _:
            read_example("python", words)


def read_example(program: str, words: list[str]) -> None:
    """The docstring of an example names the same command, and tests/test_examples.py runs what docstrings name."""
    (path,) = [Path(word) for word in words if word.startswith("examples/")]
    assert shlex.join([program, *words]) in (ast.get_docstring(ast.parse(path.read_text())) or "")


def options_of(path: Path) -> set[str]:
    return {
        call.args[0].value
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        if isinstance(call.args[0], ast.Constant)
    }


def read_pip(words: list[str]) -> None:
    """Its own parser takes the options; files and extras are there."""
    from pip._internal.commands import create_command

    command, *rest = words
    options, names = create_command(command).parse_args(rest)
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in (*names, *getattr(options, "editables", ())):
        found = re.fullmatch(r"\.(?:\[([\w,]+)\])?|torch|dist/atoll-\*\.whl|build/wheels/\*\.whl", name)
        if found is None and options.constraints:
            assert any(f"\n{name}==" in Path(path).read_text() for path in options.constraints), name
            continue
        assert found, name
        assert set((found[1] or "").split(",")) - {""} <= set(extras), name
    assert all(Path(path).is_file() for path in options.constraints)


def read_srun(words: list[str]) -> None:
    at = words.index("python")
    options = dict(zip(words[:at:2], words[1:at:2], strict=True))
    assert set(options) <= {"--ntasks", "--ntasks-per-node"}
    assert all(number.isdecimal() for number in options.values())
    read_python(words[at + 1 :])


def read_sbatch(words: list[str]) -> None:
    if words[0].startswith("--nodelist="):
        del words[0]
    script, *rest = words
    assert "#SBATCH " in Path(script).read_text()
    read_atoll(["train", *rest])


def read_bash(words: list[str]) -> None:
    """A script that starts an island, by its name."""
    script, island, config, *rest = words
    assert Path(script).is_file()
    read_atoll(["train", config, "--set", f"federation.island={island}", *rest])


def read_kubectl(words: list[str]) -> None:
    yaml = pytest.importorskip("yaml")
    match words:
        case ["apply", "-f", path]:
            for each in yaml.safe_load_all(Path(path).read_text()):
                assert {"apiVersion", "kind", "metadata", "spec"} <= set(each)
        case ["create", "secret", "generic", name, "--from-file=secret"]:
            assert f"secretName: {name}\n" in Path("deploy/islands/kubernetes/oslo.yaml").read_text()
        case _:
            raise AssertionError(words)


def read_export(words: list[str]) -> None:
    name, _, value = words[0].partition("=")
    assert value
    if reader := VARIABLES[name]:
        spec = importlib.util.find_spec(reader)
        assert spec is not None
        assert spec.origin is not None
        assert name in Path(spec.origin).read_text()


def read_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(words) <= set(targets)


def read_git(words: list[str]) -> None:
    assert words == ["clone", "<this", "repository>", "atoll"]


READERS: Mapping[str, Callable[[list[str]], None]] = {
    "atoll": read_atoll,
    "bash": read_bash,
    "export": read_export,
    "git": read_git,
    "kubectl": read_kubectl,
    "make": read_make,
    "pip": read_pip,
    "python": read_python,
    "sbatch": read_sbatch,
    "srun": read_srun,
    "torchrun": read_torchrun,
}


# ---- what says it


def says_the_ladder(block: Block, desk: Path) -> None:
    """Every layer that the import linter has, from the top down."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [each["layers"] for each in contracts if "atoll.cli" in each.get("layers", ())]
    named = [name for line in block.text.splitlines() for name in line.partition("  ")[0].split()]
    for layer in layers:
        names = re.findall(r"atoll\.(\w+)", layer)
        assert set(named[: len(names)]) == set(names)
        del named[: len(names)]
    assert named == []


def says_the_folder(block: Block, desk: Path) -> None:
    """Every file of a run's checkpoint, and those that the page has in each step's folder."""
    root = desk / "runs" / "quickstart" / "checkpoints"
    named = [line.split()[0] for line in block.text.splitlines()]
    kinds = {re.sub(r"\d+", "0", name.rstrip("/")) for name in named}
    there = {re.sub(r"\d+", "0", path.name) for path in (root, *root.rglob("*"))}
    assert there == kinds - {"damaged-step-0"}
    assert (root / "latest").read_text().strip() == "step-000006"


def says_who_is_late(block: Block, desk: Path) -> None:
    """As the bench of hangs judges what ranks print."""
    mesh = Mesh({"pp": 1, "inter": 2, "intra": 2, "tp": 1})
    seen = Seen("step 4, 0F0.0", f"{one_line(block.text)}\n", (1,), 6.0)
    assert judge_hang(seen, mesh, rank=1, does="is stopped in") == []


def says_what_is_unlike(block: Block, desk: Path) -> None:
    versions = [{"atoll": "0.1.0" if rank < 4 else "0.2.0"} for rank in range(8)]
    assert block.text == f"error: {describe_differences(versions, advice='')}\n"


SAID_BY_RANKS = {"docs/training.md: step", "docs/checkpoints.md: rank"}
"""Compared where four ranks say it: test_bad_steps.py and test_memory.py of tests/training/run."""

SAYS: Mapping[str, Callable[[Block, Path], None]] = {
    "DESIGN.md": says_the_ladder,
    "docs/checkpoints.md: checkpoints/": says_the_folder,
    "docs/errors.md": says_who_is_late,
    "docs/training.md: error": says_what_is_unlike,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_what_a_page_says_is_printed_is_printed(name: str, desk: Path) -> None:
    (block,) = [
        each
        for page in PAGES
        for each in fenced(page)
        if each.language == "text" and not each.part and said(each) == name
    ]
    SAYS[name](block, desk)
