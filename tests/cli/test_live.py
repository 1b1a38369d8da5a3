"""`atoll report --live`: what its server answers, to whom, and a page that follows a run."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.base.errors import RunError
from atoll.cli.live import _Source, serve
from atoll.cli.main import app
from atoll.testing.progress import Activity, finish, join_thread, run
from atoll.training.report import Sheet
from atoll.training.sheet import RunReader
from benchmarks.browser import browser, found
from tests.cli.test_report import run_folder, step


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    """A server of a run that goes on."""
    run_folder(tmp_path / "run", is_over=False)
    server = serve(RunReader(tmp_path / "run"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    join_thread(thread)
    server.server_close()


def ask(server: ThreadingHTTPServer, path: str = "/", method: str = "GET", **headers: str) -> HTTPResponse:
    connection = HTTPConnection("127.0.0.1", server.server_port)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    answer.text = answer.read().decode()  # type: ignore[attr-defined]
    connection.close()
    return answer


def test_it_listens_on_the_loopback_alone(served: ThreadingHTTPServer) -> None:
    assert served.server_address[0] == "127.0.0.1"


def test_it_serves_the_page_and_its_content(served: ThreadingHTTPServer) -> None:
    answer = ask(served)
    assert answer.status == 200
    assert "<!doctype html>" in answer.text
    assert "connect-src 'self'" in answer.text
    assert answer.getheader("Cache-Control") == "no-store"
    content = ask(served, "/report")
    assert content.text.startswith("<main")
    assert ask(served, "/report", If_None_Match=content.getheader("ETag") or "").status == 304


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", "[::1]"])
def test_another_host_is_refused(served: ThreadingHTTPServer, host: str) -> None:
    """A name that an attacker points at 127.0.0.1 is in the Host of the browser's request (DNS rebinding)."""
    answer = ask(served, "/report", Host=host)
    assert answer.status == 421
    assert "<main" not in answer.text


def test_its_own_names_are_not(served: ThreadingHTTPServer) -> None:
    for host in ("127.0.0.1", "localhost"):
        assert ask(served, Host=f"{host}:{served.server_port}").status == 200


@pytest.mark.parametrize("path", ["/config.toml", "/../config.toml", "/report/", "/report?x", "/run/metrics.jsonl"])
def test_there_is_nothing_else(served: ThreadingHTTPServer, path: str) -> None:
    answer = ask(served, path)
    assert answer.status == 404
    assert "layers" not in answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_only_get_is_answered(served: ThreadingHTTPServer, method: str) -> None:
    assert ask(served, method=method).status == 501


def test_a_folder_without_a_run_waits(tmp_path: Path) -> None:
    server = serve(RunReader(tmp_path / "later"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        first = ask(server, "/report")
        assert "waiting: " in first.text
        run_folder(tmp_path / "later")
        progress = Activity()
        while (second := ask(server, "/report", If_None_Match=first.getheader("ETag") or "")).status == 304:
            progress.check()
            time.sleep(0.02)
        assert second.status == 200
        assert 'id="timeline"' in second.text
    finally:
        server.shutdown()
        join_thread(thread)
        server.server_close()


def test_it_reads_and_leaves_no_file(served: ThreadingHTTPServer, tmp_path: Path) -> None:
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "run").iterdir())
    ask(served)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "run").iterdir()) == before


@pytest.mark.slow
def test_the_command_prints_its_address_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    # A shell's background jobs ignore Ctrl-C, and so would what they start.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "atoll", "report", str(tmp_path / "run"), "--live"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        _, said = finish(process)
    assert (process.returncode, said) == (0, "stopped\n")


@pytest.mark.parametrize(("given", "port"), [((), 0), (("--port", "8080"), 8080)])
def test_a_free_port_is_taken_if_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], port: int
) -> None:
    asked: list[int] = []

    def refuse(reader: RunReader, port: int) -> ThreadingHTTPServer:
        asked.append(port)
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr("atoll.cli.live.serve", refuse)
    words = rf"cannot listen on 127.0.0.1:{port} \(Address already in use\); choose another --port"
    with pytest.raises(RunError, match=words):
        CliRunner().invoke(app, ["report", str(tmp_path), "--live", *given], catch_exceptions=False)
    assert asked == [port]
    assert CliRunner().invoke(app, ["report", str(tmp_path), "--live", "--port", "65536"]).exit_code == 2


@pytest.mark.slow
def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "atoll", "report", str(tmp_path / "run"), "--live", "--port", port]
        result = run(command)
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(found() is None, reason="no Chromium on this machine: install Debian's chromium")
def test_the_page_follows_the_run_and_keeps_the_readers_place(served: ThreadingHTTPServer, tmp_path: Path) -> None:
    with browser() as shown:
        shown.size(1200, 800)
        shown.open(f"http://127.0.0.1:{served.server_port}/")
        shown.until("!!document.querySelector('.metric output')?.textContent.startsWith('step 5 ')")
        shown.run("document.querySelector('.view').focus()")
        for key in ("ArrowRight", "ArrowRight", "+", "+"):
            shown.press(key)
        detail = shown.run("document.getElementById('detail').textContent")
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(step(6)) + "\n")
        shown.until("!!document.querySelector('.metric output')?.textContent.startsWith('step 6 ')")
        assert shown.run("atollReport.view.k") == pytest.approx(1.6**2)
        assert shown.run("document.getElementById('detail').textContent") == detail
        assert shown.run("document.activeElement.className") == "view"
        assert shown.run("atollReport.charts[0].rows.some((row) => row.source.title.startsWith('measured'))") is False
        done = run_folder(tmp_path / "done")
        for name in ("timing.json", "timeline.json"):
            os.replace(done / name, tmp_path / "run" / name)
        shown.until("atollReport.charts[0].rows.some((row) => row.source.title.startsWith('measured'))")
        assert shown.problems == []


class Files:
    """A reader of a run whose files have a stamp. read: how often they were read."""

    def __init__(self) -> None:
        self.root, self.read, self.at = Path("run"), 0, 0

    def stamp(self) -> object:
        return self.at

    def sheet(self) -> Sheet:
        self.read += 1
        return Sheet("run", "run", notes=(f"read {self.read}",))


def test_a_page_is_made_again_once_files_have_changed_and_a_moment_has_passed() -> None:
    files: Any = Files()
    source = _Source(files)
    first = source.newest()
    source._due = 0.0
    assert source.newest() is first
    files.at, source._due = 1, math.inf
    assert source.newest() is first
    source._due = 0.0
    second = source.newest()
    assert (second.sheet.notes, files.read) == (("read 2",), 2)
    assert second.tag != first.tag
