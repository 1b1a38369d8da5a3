"""What an island shows to the others, over HTTP: documents and elements that they read, and nothing that they write.

Islands do not share a process group: a group waits for all its ranks, and its store has no limit of time for a reader
that is cut off. Here every read has one, a read that was interrupted goes on where it was, from this island or from
another that has the same, and whoever is late, slow or gone takes a connection of its own with it and nothing else.

[Note: who may read] A request has a random word and the HMAC-SHA-256 of its path and that word, with the secret of the
federation; requests without it are refused. A document's answer has that of its content and the same word, so it is no
older than the request. A reader that names the content that it knows is told that it still holds, likewise signed, or
gets the next one as soon as there is one: on a slow link islands that have nothing new to say need next to nothing.
Elements are named by their SHA-256, which is in a document. Nothing is encrypted: across networks that others can read,
use a tunnel.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import http.server
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

from atoll.base.documents import parse_json
from atoll.runtime.monitor import family_of

LARGEST_DOCUMENT = 16 << 20
"""Largest document, in bytes."""
READ_SECONDS = 10.0
"""Limit of time for each read from a socket, on both sides."""
CONNECTIONS = 256
"""Connections at once; further ones are closed."""
READ_BYTES = 1 << 18
"""Bytes that are read at once."""
HOLD_SECONDS = 1.0
"""Seconds for which a reader that knows a document waits for the next one, at most."""

_WORD, _SIGNATURE, _KNOWN = "Atoll-Word", "Atoll-Signature", "Atoll-Known"
_ELEMENTS = "/elements/"
_RANGE = re.compile(r"bytes=(\d{1,18})-")


class PeerError(OSError):
    """Another island does not answer, or answers what it must not."""


def sign(secret: bytes, parts: Iterable[bytes | bytearray]) -> str:
    """Return the HMAC of the parts, which nobody gives without the secret."""
    found = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.hexdigest()


class Showcase:
    """A server in this process. `documents` and `elements` are what it shows, by path; both may change at any time.
    What `show` is given is read as well, and waited for.

    documents: path -> a function that returns a value of JSON.  elements: SHA-256 -> bytes, kept by whoever adds them.
    hold: seconds for which a reader that knows a document waits, at most.  is_alive: False if what was shown does not
    hold any more, since whoever shows it hangs.
    """

    def __init__(
        self,
        secret: bytes,
        host: str,
        port: int = 0,
        *,
        hold: float = HOLD_SECONDS,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self.documents: dict[str, Callable[[], Any]] = {}
        self.elements: dict[str, memoryview] = {}
        self.sent = 0
        self._secret, self._hold, self._is_alive = secret, hold, is_alive
        # Path -> content of a document that was shown, and its digest.
        self._shown: dict[str, tuple[bytes, str]] = {}
        self._news, self._is_over = threading.Condition(), False
        self._slots = threading.BoundedSemaphore(CONNECTIONS)
        self._open: set[Any] = set()
        showcase = self

        class Handler(_Handler):
            shows = showcase

        class Server(http.server.ThreadingHTTPServer):
            address_family = family_of(host)
            daemon_threads = True
            request_queue_size = 128

            def process_request(self, request: Any, client_address: Any) -> None:
                if not showcase._slots.acquire(blocking=False):
                    self.shutdown_request(request)
                    return
                super().process_request(request, client_address)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                showcase._open.add(request)
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    showcase._open.discard(request)
                    showcase._slots.release()

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A peer that has gone is no error of this island."""

        self._server = Server((host, port), Handler)
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="atoll-showcase", daemon=True)
        self._thread.start()

    def show(self, path: str, value: Any) -> None:
        """Show a value of JSON at a path, to those who wait for another than before, too."""
        content = json.dumps(value, allow_nan=False).encode()
        digest = hashlib.sha256(content).hexdigest()
        with self._news:
            if self._shown.get(path, (b"", ""))[1] != digest:
                self._shown[path] = content, digest
                self._news.notify_all()

    def read(self, path: str, known: str) -> tuple[bytes, str] | None:
        """Return the document at a path and its digest, None if there is none. known: the digest of what the reader
        has; then wait for another."""
        if path in self.documents:
            content = json.dumps(self.documents[path](), allow_nan=False).encode()
            return content, hashlib.sha256(content).hexdigest()
        with self._news:
            if path in self._shown:
                self._news.wait_for(lambda: self._is_over or self._shown[path][1] != known, self._hold)
            return self._shown.get(path) if self._is_alive() else None

    def close(self) -> None:
        """Stop listening, and end the connections."""
        self._server.shutdown()
        self._server.server_close()
        with self._news:
            self._is_over = True
            self._news.notify_all()
        for connection in tuple(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def is_from_a_member(self, path: str, word: str, signature: str) -> bool:
        """Return True if who asks has the secret."""
        return hmac.compare_digest(sign(self._secret, (path.encode(), word.encode())), signature)

    def sign(self, path: str, word: str, content: bytes) -> str:
        """Return the signature of an answer."""
        return sign(self._secret, (path.encode(), word.encode(), content))


class _Handler(http.server.BaseHTTPRequestHandler):
    shows: Showcase
    protocol_version = "HTTP/1.1"
    timeout = READ_SECONDS
    # Headers and a small answer would be two packets, and the second one wait for the acknowledgement of the first.
    wbufsize, disable_nagle_algorithm = READ_BYTES, True
    server_version, sys_version = "atoll", ""

    def do_GET(self) -> None:
        word, signature = self.headers.get(_WORD, ""), self.headers.get(_SIGNATURE, "")
        if not self.shows.is_from_a_member(self.path, word, signature):
            self._answer(HTTPStatus.UNAUTHORIZED)
        elif (found := self.shows.read(self.path, known := self.headers.get(_KNOWN, ""))) is not None:
            content, digest = found
            if digest == known:
                signed = self.shows.sign(self.path, word, known.encode())
                self._answer(HTTPStatus.NOT_MODIFIED, headers={_SIGNATURE: signed})
            else:
                self._answer(HTTPStatus.OK, content, headers={_SIGNATURE: self.shows.sign(self.path, word, content)})
        elif (held := self._elements()) is not None:
            asked = _RANGE.fullmatch(self.headers.get("Range", ""))
            begin = int(asked[1]) if asked else 0
            self._answer(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK, *_without(held, begin))
        else:
            self._answer(HTTPStatus.NOT_FOUND)

    def _elements(self) -> list[memoryview] | None:
        """Return the elements that are asked for; None if any is not here."""
        if not self.path.startswith(_ELEMENTS):
            return None
        found = [self.shows.elements.get(digest) for digest in self.path.removeprefix(_ELEMENTS).split(",")]
        held = [each for each in found if each is not None]
        return held if len(held) == len(found) else None

    def _answer(
        self, status: HTTPStatus, *contents: bytes | memoryview, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(sum(map(len, contents))))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        for content in contents:
            for begin in range(0, len(content), READ_BYTES):
                self.wfile.write(content[begin : begin + READ_BYTES])
                self.shows.sent += len(content[begin : begin + READ_BYTES])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Peers are not this process's output."""


class Peer:
    """Reads what another rank shows. Not for two threads at once.

    seconds: limit of time for each wait.  pace: bytes a second at most, or None.  stops: True once what is being read
    is not needed any more.
    """

    def __init__(
        self,
        secret: bytes,
        host: str,
        port: int,
        *,
        seconds: float = READ_SECONDS,
        pace: float | None = None,
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        self.host, self.port, self.pace = host, port, pace
        self.received = 0
        self._secret, self._stops = secret, stops
        self._known: dict[str, str] = {}
        self._connection = http.client.HTTPConnection(host, port, timeout=seconds)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def document(self, path: str) -> Any:
        """Return a document. Raises PeerError."""
        self._known.pop(path, None)
        return self.news(path)

    def news(self, path: str) -> Any:
        """Return a document once it is another than the last time; None if it still is the same. Raises PeerError."""
        known = self._known.get(path, "")
        answer, word = self._ask(path, known=known)
        is_known = answer.status == HTTPStatus.NOT_MODIFIED
        content = known.encode() if is_known else self._read(answer, bytearray(self._length(answer)), 0)
        if is_known:
            answer.read()
        expected = sign(self._secret, (path.encode(), word.encode(), content))
        if not hmac.compare_digest(expected, answer.headers.get(_SIGNATURE, "")):
            raise self._refuse(f"a document at {path} that is not signed with this federation's secret")
        if is_known:
            return None
        self._known[path] = hashlib.sha256(content).hexdigest()
        try:
            return parse_json(bytes(content))
        except ValueError as error:
            raise self._refuse(f"a document at {path} that cannot be read: {error}") from None

    def elements(self, sizes: Mapping[str, int], into: bytearray, *, begin: int = 0) -> int:
        """Read elements one after the other from byte `begin` on, and return how many bytes of `into` are written;
        fewer if the peer has gone.

        sizes: bytes of each, by digest.

        Raises PeerError if the peer does not have them, or if all were read and a digest differs.
        """
        answer, _ = self._ask(f"{_ELEMENTS}{','.join(sizes)}", begin)
        length = int(answer.headers.get("Content-Length", -1))
        if length != len(into) - begin:
            raise self._refuse(f"{length} bytes of elements {next(iter(sizes))[:12]}, expected {len(into) - begin}")
        end = self._fill(answer, into, begin)
        if end == len(into):
            for digest, held in elements_in(sizes, into).items():
                if hashlib.sha256(held).hexdigest() != digest:
                    raise self._refuse(f"other elements than {digest[:12]}")
        return end

    def content(self, digest: str) -> bytes:
        """Return elements of unknown size, at most that of a document. Raises PeerError."""
        answer, _ = self._ask(f"{_ELEMENTS}{digest}")
        content = self._read(answer, bytearray(self._length(answer)), 0)
        if hashlib.sha256(content).hexdigest() != digest:
            raise self._refuse(f"other elements than {digest[:12]}")
        return bytes(content)

    def close(self) -> None:
        """Close the connection; the next read opens another."""
        self._connection.close()

    def _ask(self, path: str, begin: int = 0, *, known: str = "") -> tuple[http.client.HTTPResponse, str]:
        word = secrets.token_hex(16)
        headers = {_WORD: word, _SIGNATURE: sign(self._secret, (path.encode(), word.encode()))}
        if begin:
            headers["Range"] = f"bytes={begin}-"
        if known:
            headers[_KNOWN] = known
        for is_again in (False, True):
            try:
                self._connection.request("GET", path, headers=headers)
                answer = self._connection.getresponse()
                break
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                # A connection that was kept may have been closed by its peer after the last answer.
                if is_again or isinstance(error, TimeoutError):
                    raise PeerError(f"{self} does not answer: {error or type(error).__name__}") from None
        expected = {HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT, *([HTTPStatus.NOT_MODIFIED] if known else [])}
        if answer.status not in expected:
            why = {HTTPStatus.UNAUTHORIZED: "another secret", HTTPStatus.NOT_FOUND: f"nothing at {path}"}
            raise self._refuse(why.get(HTTPStatus(answer.status), f"status {answer.status}"))
        return answer, word

    def _length(self, answer: http.client.HTTPResponse) -> int:
        length = int(answer.headers.get("Content-Length", -1))
        if not 0 <= length <= LARGEST_DOCUMENT:
            raise self._refuse(f"a document of {length} bytes")
        return length

    def _read(self, answer: http.client.HTTPResponse, into: bytearray, begin: int) -> bytearray:
        if self._fill(answer, into, begin) < len(into):
            raise PeerError(f"{self} has gone in the middle of an answer")
        return into

    def _fill(self, answer: http.client.HTTPResponse, into: bytearray, begin: int) -> int:
        """Read into the rest of a buffer, as fast as `pace`, until `stops`; return where it ends."""
        view, at, since = memoryview(into), begin, time.monotonic()
        while at < len(into):
            if self._stops():
                self._connection.close()
                break
            try:
                count = answer.readinto(view[at : at + READ_BYTES])
            except (OSError, http.client.HTTPException):
                count = 0
            if not count:
                self._connection.close()
                break
            at += count
            self.received += count
            if self.pace is not None:
                time.sleep(max(0.0, (at - begin) / self.pace - (time.monotonic() - since)))
        return at

    def _refuse(self, what: str) -> PeerError:
        # What is left of the answer must not be read as the next one.
        self._connection.close()
        return PeerError(f"{self} has {what}")


def elements_in(sizes: Mapping[str, int], content: bytearray) -> dict[str, memoryview]:
    """Return the elements in a buffer, by digest."""
    found, at, view = {}, 0, memoryview(content)
    for digest, size in sizes.items():
        found[digest] = view[at : at + size]
        at += size
    return found


def _without(contents: Iterable[memoryview], count: int) -> list[memoryview]:
    """Return contents without their first `count` bytes."""
    left = []
    for content in contents:
        gone = min(count, len(content))
        count -= gone
        left.append(content[gone:])
    return left


def own_secret(text: str) -> bytes:
    """Return the secret that a user gave. Raises ValueError for one that is easy to guess."""
    if len(text.strip()) < 16:
        raise ValueError("the secret of a federation has 16 characters or more, as of `openssl rand -hex 16`")
    return text.strip().encode()
