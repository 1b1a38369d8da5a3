"""`atoll watch`: islands that are read over loopback."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.base.errors import ConfigError
from atoll.cli.main import app
from atoll.plans.federation.records import Notice
from atoll.runtime.federation.http import Showcase
from atoll.testing.progress import finish, wait_until
from atoll.training.config import load
from atoll.training.watch import FederationReader
from tests.training.report.test_federation import A, B

SECRET = "a secret of tests"
CONFIG = """
[model]
layers = 2
hidden = 32
heads = 2
[data]
tokenizer = "bytes"
sequence = 32
[train]
steps = 8
global_batch = 4
microbatch = 2
[parallel]
ranks = 1
outer = {{ every = 4, fragments = 2, quorum = 2 }}
[federation]
island = "a"
islands = {{ {islands} }}
secret = "{folder}/secret"
"""


class Islands:
    """Islands that show what a test says, and their config."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self._ports: dict[str, int] = {}
        (folder / "secret").write_text(SECRET)

    def add(self, name: str, document: Callable[[], Any] | Notice | None, *, secret: str = SECRET) -> Showcase:
        showcase = Showcase(secret.encode(), "127.0.0.1")
        self._stack.callback(showcase.close)
        if isinstance(document, Notice):
            showcase.documents["/notice"] = document.to_json
        elif document is not None:
            showcase.documents["/notice"] = document
        self._ports[name] = showcase.port
        return showcase

    def add_socket(self, name: str, *, listens: bool) -> None:
        """An address where nothing listens, or where nobody answers."""
        held = self._stack.enter_context(socket.socket())
        held.bind(("127.0.0.1", 0))
        if listens:
            held.listen()
        self._ports[name] = held.getsockname()[1]

    @property
    def config(self) -> Path:
        path = self.folder / "island.toml"
        islands = ", ".join(f'{name} = "127.0.0.1:{port}"' for name, port in self._ports.items())
        path.write_text(CONFIG.format(islands=islands, folder=self.folder))
        return path


@pytest.fixture
def islands(tmp_path: Path) -> Iterator[Islands]:
    with ExitStack() as stack:
        yield Islands(tmp_path, stack)


def atoll(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_once(islands: Islands) -> None:
    islands.add("a", A)
    islands.add("b", B)
    islands.add_socket("c", listens=False)
    result = atoll("watch", islands.config, "--once")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "round 2 is to be decided, of fragment 1 of 2; 1 have averaged"
    assert lines[2] == "contributed  a; not yet b; quorum 2"
    assert [line.split()[:2] for line in lines[5:8]] == [["a", "trains"], ["b", "trains"], ["c", "unreachable"]]
    assert "does not answer" in lines[8]


def test_json(islands: Islands) -> None:
    """With the keys that the help names."""
    islands.add("a", A)
    result = atoll("watch", islands.config, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {*found} == {
        *("round", "fragment", "fragments", "averaged", "quorum", "members", "contributed", "islands", "records")
    }
    (island,) = found["islands"]
    assert {*island} == {
        *("island", "address", "state", "problem", "round", "anchors", "behind", "contributed", "samples", "tokens")
    }
    assert {*found["records"][0]} == {"round", "fragment", "counted", "tokens", "members", "restored"}
    assert (found["round"], island["state"], found["records"][1]["counted"]) == (2, "trains", {"a": 1000, "b": 1000})


def test_what_is_no_notice_of_this_federation_is_named(islands: Islands) -> None:
    islands.add("a", A)
    islands.add("other-secret", A, secret="another secret of tests")
    islands.add("damaged", lambda: {**A.to_json(), "round": -1})
    islands.add("wrong-name", A)
    islands.add("nothing", None)
    islands.add("other-run", replace(A, island="other-run", run="bb", contributions=()))
    result = atoll("watch", islands.config, "--json")
    found = {each["island"]: (each["state"], each["problem"] or "") for each in json.loads(result.stdout)["islands"]}
    assert {state for state, _ in [*found.values()][1:]} == {"refused"}
    assert "has another secret" in found["other-secret"][1]
    assert "notice.round: expected a count" in found["damaged"][1]
    assert "it is of island 'a'" in found["wrong-name"][1]
    assert "nothing at /notice" in found["nothing"][1]
    assert "trains something else" in found["other-run"][1]


def test_an_answer_without_a_signature_is_refused(islands: Islands, monkeypatch: pytest.MonkeyPatch) -> None:
    showcase = islands.add("a", A)
    monkeypatch.setattr(showcase, "sign", lambda path, word, content: "00")
    (island,) = FederationReader(load(islands.config), islands.config).state().islands
    assert island.state == "refused"
    assert "not signed with this federation's secret" in (island.problem or "")


def test_who_does_not_answer_delays_nobody(islands: Islands) -> None:
    islands.add("a", A)
    islands.add_socket("b", listens=True)
    islands.add_socket("c", listens=True)
    reader = FederationReader(load(islands.config), islands.config, seconds=0.3)
    begin = time.monotonic()
    state = reader.state()
    assert time.monotonic() - begin < 2.0
    assert [str(each.state) for each in state.islands] == ["trains", "unreachable", "unreachable"]
    assert [str(each.state) for each in reader.state().islands] == ["trains", "unreachable", "unreachable"]


def test_an_island_whose_notice_does_not_change_is_silent(islands: Islands) -> None:
    now, notices = [0.0], {"a": A, "b": B}
    islands.add("a", lambda: notices["a"].to_json())
    gone = islands.add("b", lambda: notices["b"].to_json())
    config = load(islands.config, ["federation.silent=10.0"])
    reader = FederationReader(config, islands.config, clock=lambda: now[0])

    def states() -> list[str]:
        return [str(each.state) for each in reader.state().islands]

    assert states() == ["trains", "trains"]
    now[0], notices["b"] = 9.0, replace(B, beat=1)
    assert states() == ["trains", "trains"]
    now[0] = 10.0
    assert states() == ["silent", "trains"]
    gone.close()
    now[0], notices["a"] = 12.0, replace(A, beat=1)
    state = reader.state()
    assert [str(each.state) for each in state.islands] == ["trains", "unreachable"]
    assert (state.islands[1].problem or "").endswith("; it answered 2 s ago")


def test_it_goes_on_until_ctrl_c_and_does_not_import_torch(islands: Islands) -> None:
    islands.add("a", A)
    program = (
        "import sys, runpy, atexit\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        "import atoll.cli.watch\n"
        "atoll.cli.watch.REFRESH_SECONDS = 0.05\n"
        "sys.argv[0] = 'atoll'\n"
        "runpy.run_module('atoll', run_name='__main__')\n"
    )
    command = [sys.executable, "-u", "-c", program, "watch", str(islands.config)]
    output = islands.folder / "output"
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.PIPE, text=True)
        try:
            wait_until(lambda: output.read_text().count("is to be decided") >= 3)
            process.send_signal(2)
            _, errors = finish(process)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "stopped\n")
    assert output.read_text().splitlines()[-1] == "False"


def test_if_nobody_answers_the_exit_code_is_1(islands: Islands) -> None:
    islands.add_socket("a", listens=False)
    for option in ("--once", "--json"):
        assert atoll("watch", islands.config, option).exit_code == 1


def test_a_folder_is_for_report(tmp_path: Path) -> None:
    result = atoll("watch", tmp_path)
    assert isinstance(result.exception, ConfigError)
    assert f"atoll report {tmp_path} --live" in str(result.exception)


def test_a_config_without_a_federation(islands: Islands) -> None:
    islands.add("a", A)
    path = islands.folder / "plain.toml"
    path.write_text(islands.config.read_text().split("[federation]")[0].replace("outer =", "# outer ="))
    result = atoll("watch", path, "--once")
    assert isinstance(result.exception, ConfigError)
    assert "has no [federation]" in str(result.exception)


def test_a_secret_that_cannot_be_read(islands: Islands) -> None:
    islands.add("a", A)
    for content in (None, "short"):
        path = islands.folder / "secret"
        path.unlink() if content is None else path.write_text(content)
        result = atoll("watch", islands.config, "--once")
        assert isinstance(result.exception, ConfigError)
        assert "federation.secret" in str(result.exception)
