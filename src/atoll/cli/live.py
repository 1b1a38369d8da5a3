"""Server of a run's report, for `atoll report --live`."""

from __future__ import annotations

import hashlib
import time
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from atoll.runtime.rendezvous import LOOPBACK

if TYPE_CHECKING:
    from atoll.training.report import Sheet
    from atoll.training.sheet import RunReader

REST = 9.0
"""Pause between two renderings of the content, as a multiple of the time one takes."""


def serve_until_interrupted(reader: RunReader, port: int) -> None:
    """Print the address of a run's page and serve it until Ctrl-C. Raises RunError if the port is in use."""
    from atoll.base.errors import RunError

    try:
        server = serve(reader, port)
    except OSError as error:
        raise RunError(
            f"cannot listen on {LOOPBACK}:{port} ({error.strerror or error}); choose another --port"
        ) from error
    with server:
        try:
            typer.echo(f"http://{LOOPBACK}:{server.server_port}/")
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)


def serve(reader: RunReader, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of a run's page on the loopback address. Raises OSError if the port is in use."""
    server = ThreadingHTTPServer((LOOPBACK, port), partial(_Handler, source=_Source(reader)))
    server.daemon_threads = True
    return server


class _Content(NamedTuple):
    """Content of the page. tag: its entity tag.  text: its HTML."""

    tag: str
    sheet: Sheet
    text: str


class _Source:
    """Source of the page's content, rendered again after a file of the run has changed, in at most a tenth of the
    time."""

    def __init__(self, reader: RunReader) -> None:
        self.reader = reader
        self._lock = Lock()
        self._stamp: object = None
        self._content: _Content | None = None
        self._due = 0.0

    def newest(self) -> _Content:
        """Return the content of the run's files, rendered now or a moment ago."""
        with self._lock:
            stamp, begun = self.reader.stamp(), time.monotonic()
            if self._content is None or (stamp != self._stamp and begun >= self._due):
                self._content, self._stamp = self._make(stamp), stamp
                ended = time.monotonic()
                self._due = ended + REST * (ended - begun)  # leave the processors to the run
            return self._content

    def _make(self, stamp: object) -> _Content:
        from atoll.training.report import fragment

        sheet = self._read()
        return _Content(f'"{hashlib.sha256(repr(stamp).encode()).hexdigest()[:16]}"', sheet, fragment([sheet]))

    def _read(self) -> Sheet:
        from atoll.base.errors import UserError
        from atoll.training.report import Sheet

        try:
            return self.reader.sheet()
        except UserError as error:  # an empty folder, or a half-written file
            return Sheet(self.reader.root.name, "run", notes=(f"waiting: {error}",))


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests for `/`, the page, and `/report`, its content."""

    server_version = "atoll"
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def __init__(self, *args: Any, source: _Source) -> None:
        self.source = source
        super().__init__(*args)

    def do_GET(self) -> None:
        """Answer one GET request."""
        from atoll.training.report import page

        # The name of a page of another origin may resolve to this host (DNS rebinding); its requests carry that name.
        port = self.connection.getsockname()[1]
        if self.headers.get("Host") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server only answers requests to its loopback address")
            return
        if self.path not in ("/", "/report"):
            self._refuse(HTTPStatus.NOT_FOUND, "there is only / here")
            return
        tag, sheet, text = self.source.newest()
        if self.path == "/":
            self._send(HTTPStatus.OK, page([sheet], live=tag), "text/html")
        elif self.headers.get("If-None-Match") == tag:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._send(HTTPStatus.OK, text, "text/html", ETag=tag)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, f"{why}\n", "text/plain")

    def _send(self, status: HTTPStatus, text: str, kind: str, **headers: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Do not log requests."""
