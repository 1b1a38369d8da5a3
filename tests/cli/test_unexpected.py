"""Messages of any length that come from outside: what a command prints is bounded, and the whole is not lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import RunError, UserError
from atoll.base.toml import nested_to_toml
from atoll.base.unexpected import LONGEST_ENTRY, LONGEST_LINE, LONGEST_TRACEBACK
from atoll.cli.main import main
from atoll.training.data.tokenizer import train_bpe

LONG = 1_000_000

MODEL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
CONFIG: dict[str, Any] = {
    "data": {"tokenizer": "bytes", "sequence": 16, "validation": 0.0, "source": "text.txt"},
    "train": {"steps": 1, "global_batch": 1, "microbatch": 1},
    "parallel": {"device": "cpu"},
    "run": {"folder": "run", "loggers": [], "restarts": 0},
}


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and stderr of a command in this process."""
    monkeypatch.setattr(sys, "argv", ["atoll", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), capsys.readouterr().err


def write(folder: Path, **sections: Any) -> str:
    (folder / "text.txt").write_text("a line of the corpus\n" * 50)
    (folder / "c.toml").write_text(nested_to_toml(CONFIG | sections))
    return "c.toml"


def test_what_nobody_expected_is_bounded_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    length = LONG

    def fails(*_: object, **__: object) -> None:
        try:
            raise KeyError("z" * length)
        except KeyError as cause:
            raise ValueError(f"begins\n{'y' * length} \ud800 ends") from cause

    monkeypatch.setattr("atoll.plans.schedules.build", fails)
    code, err = said(monkeypatch, capsys, "show", "schedule", "1f1b")
    *traceback, line, where = err.splitlines()
    assert code == 1
    assert len("\n".join(traceback)) <= LONGEST_TRACEBACK
    assert all(len(each) <= LONGEST_ENTRY for each in traceback)
    assert "direct cause" in "\n".join(traceback)
    assert line.startswith("error: ValueError: begins yyyy")
    assert line.endswith(", in fails)")
    assert f"{Path(__file__).name}, line " in line
    assert len(line) <= LONGEST_LINE + len("error: ")
    kept = Path(where.rpartition(" ")[2])
    assert kept.parent == tmp_path
    whole = kept.read_text()
    assert f"'{'z' * LONG}'" in whole
    assert f"{'y' * LONG} ? ends" in whole
    assert kept.stat().st_mode & 0o077 == 0

    length = 10
    code, err = said(monkeypatch, capsys, "show", "schedule", "1f1b")
    assert err.splitlines()[-1].startswith("error: ValueError: begins yyyyyyyyyy ? ends (")
    assert err.count("Traceback") == 2
    assert list(tmp_path.iterdir()) == [kept]


def test_a_panic_of_a_library_in_rust_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no `Exception`."""

    class PanicException(BaseException):
        pass

    def panics(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr("atoll.plans.schedules.build", panics)
    code, err = said(monkeypatch, capsys, "show", "schedule", "1f1b")
    assert code == 1
    assert "PanicException: index out of bounds (" in err.splitlines()[-1]


@pytest.mark.parametrize("door", ["constructor", "config", "template", "dataset"])
def test_what_a_library_says_at_a_door_is_bounded(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers, pydantic and jinja put what they do not take into their messages."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "m"
    model.mkdir()
    config: dict[str, Any] = {"model_type": "llama", "vocab_size": 256, **MODEL}
    sections: dict[str, Any] = {"model": {"source": "m"}}
    if door == "constructor":
        config["hidden_act"] = "x" * LONG
    elif door == "config":
        config["num_hidden_layers"] = "x" * LONG
    elif door == "template":
        (model / "tokenizer.json").write_text(train_bpe(["a b c"], 300).to_json())
        (model / "chat_template.jinja").write_text("{{ raise_exception('x' * " + str(LONG) + ") }}")
        record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        (tmp_path / "chat.jsonl").write_text(f"{json.dumps(record)}\n")
        config["vocab_size"] = 300
        sections["data"] = CONFIG["data"] | {"source": "chat.jsonl", "format": "chat", "tokenizer": "m"}
    else:
        record = {"prompt": "a", "completion": "b", "x" * LONG: 1}
        (tmp_path / "chat.jsonl").write_text(f"{json.dumps(record)}\n")
        (model / "tokenizer.json").write_text(train_bpe(["a b c"], 300).to_json())
        (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
        sections["data"] = CONFIG["data"] | {"source": "chat.jsonl", "format": "chat", "tokenizer": "m"}
    (model / "config.json").write_text(json.dumps(config))
    code, err = said(monkeypatch, capsys, "train", write(tmp_path, **sections), "--dry-run")
    errors = err[err.index("error: ") :]
    assert code == 2
    assert "Traceback" not in err
    assert "x" * 100 in errors
    assert "characters ...]" in errors
    assert len(errors) <= UserError.longest + len("error: \n")


BREAKS = """
import sys
from atoll.cli.main import main
from atoll.runtime.models.decoder import Attention

def fails(*_):
    raise ValueError("x" * 1_000_000)

Attention.forward = fails
main()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_what_a_model_says_in_a_rank_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS)
    name = write(tmp_path, model={"layers": 2, "hidden": 8, "heads": 1}, parallel={"device": "cpu", "ranks": 1})
    done = subprocess.run(
        [sys.executable, "breaks.py", "train", name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (line,) = (each for each in done.stderr.splitlines() if each.startswith("error: "))
    assert line.startswith(
        "error: rank 0 (pp 0, inter 0, intra 0, tp 0), step 1, action 0F0, global microbatch 0: Value"
    )
    assert len(line) <= RunError.longest + len("error: ")
    assert "Traceback" in done.stderr
    assert len(done.stderr) < LONGEST_TRACEBACK + 2 * RunError.longest
    kept = Path(done.stderr.splitlines()[-1].rpartition(" ")[2])
    assert "x" * LONG in kept.read_text()
    kept.unlink()
