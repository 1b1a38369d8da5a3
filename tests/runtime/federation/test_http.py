"""What islands show each other: read by who has the secret, whole or refused."""

import contextlib
import hashlib
import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from atoll.runtime.federation.http import CONNECTIONS, Peer, PeerError, Showcase, own_secret

SECRET = b"a secret of tests"


@pytest.fixture
def showcase() -> Iterator[Showcase]:
    """It lets nobody wait for news."""
    shown = Showcase(SECRET, "127.0.0.1", hold=0.01)
    yield shown
    shown.close()


@pytest.fixture
def peer(showcase: Showcase) -> Iterator[Peer]:
    reader = Peer(SECRET, showcase.host, showcase.port)
    yield reader
    reader.close()


def show(showcase: Showcase, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    showcase.elements[digest] = memoryview(content)
    return digest


def test_documents_are_those_of_now(showcase: Showcase, peer: Peer) -> None:
    values = iter(range(3))
    showcase.documents["/notice"] = lambda: {"beat": next(values)}
    assert [peer.document("/notice") for _ in range(3)] == [{"beat": 0}, {"beat": 1}, {"beat": 2}]


def test_elements_are_whole(showcase: Showcase, peer: Peer) -> None:
    content = bytes(range(256)) * 4096
    digest = show(showcase, content)
    into = bytearray(len(content))
    assert peer.elements({digest: len(into)}, into) == len(content)
    assert into == content
    # A read that was interrupted goes on where it was.
    into = bytearray(content[:1000]) + bytearray(len(content) - 1000)
    before = peer.received
    assert peer.elements({digest: len(into)}, into, begin=1000) == len(content)
    assert into == content
    assert peer.received - before == len(content) - 1000


def test_other_elements_than_their_name_says_are_refused(showcase: Showcase, peer: Peer) -> None:
    digest = show(showcase, b"1" * 1000)
    showcase.elements[digest] = memoryview(b"1" * 999 + b"2")
    with pytest.raises(PeerError, match="other elements than"):
        peer.elements({digest: 1000}, bytearray(1000))
    showcase.elements[digest] = memoryview(b"1" * 999)
    with pytest.raises(PeerError, match="999 bytes of elements"):
        peer.elements({digest: 1000}, bytearray(1000))
    # The connection is of use afterwards.
    showcase.documents["/notice"] = lambda: 1
    assert peer.document("/notice") == 1


def test_who_has_another_secret_reads_nothing(showcase: Showcase) -> None:
    showcase.documents["/notice"] = lambda: "secret"
    digest = show(showcase, b"elements")
    stranger = Peer(b"another secret!!", showcase.host, showcase.port)
    for read in (lambda: stranger.document("/notice"), lambda: stranger.elements({digest: 8}, bytearray(8))):
        with pytest.raises(PeerError, match="another secret"):
            read()
    plain = http.client.HTTPConnection(showcase.host, showcase.port, timeout=10)
    plain.request("GET", "/notice")
    assert plain.getresponse().status == 401
    plain.close()
    stranger.close()


def test_an_answer_without_the_secret_is_refused(showcase: Showcase, peer: Peer) -> None:
    showcase.documents["/notice"] = lambda: 1
    showcase.sign = lambda path, word, content: "0" * 64  # type: ignore[method-assign]
    with pytest.raises(PeerError, match="not signed"):
        peer.document("/notice")


def test_an_old_answer_is_refused(showcase: Showcase, peer: Peer) -> None:
    """Whoever records an answer cannot give it again: it has the word of its request."""
    showcase.documents["/notice"] = lambda: 1
    sign, proofs = showcase.sign, []

    def record(path: str, word: str, content: bytes) -> str:
        proofs.append(sign(path, word, content))
        return proofs[0]

    showcase.sign = record  # type: ignore[method-assign]
    assert peer.document("/notice") == 1
    with pytest.raises(PeerError, match="not signed"):
        peer.document("/notice")


def test_what_is_not_there_is_said(showcase: Showcase, peer: Peer) -> None:
    with pytest.raises(PeerError, match="nothing at /notice"):
        peer.document("/notice")
    with pytest.raises(PeerError, match="nothing at /elements"):
        peer.elements({"0" * 64: 4}, bytearray(4))


def test_a_document_that_is_too_large_is_not_read(
    showcase: Showcase, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    showcase.documents["/notice"] = lambda: "1" * 1000
    monkeypatch.setattr("atoll.runtime.federation.http.LARGEST_DOCUMENT", 100)
    with pytest.raises(PeerError, match="1002 bytes"):
        peer.document("/notice")


def test_elements_of_no_bytes_are_whole(showcase: Showcase, peer: Peer) -> None:
    """A fragment may have nothing on a rank."""
    digest = show(showcase, b"")
    assert peer.content(digest) == b""
    assert peer.elements({digest: 0}, bytearray()) == 0


def test_who_does_not_answer_is_left(showcase: Showcase) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    reader = Peer(SECRET, "127.0.0.1", port, seconds=0.2)
    with pytest.raises(PeerError, match="does not answer"):
        reader.document("/notice")
    silent.close()
    reader.close()
    gone = Peer(SECRET, "127.0.0.1", port, seconds=0.2)
    with pytest.raises(PeerError, match="does not answer"):
        gone.document("/notice")


def test_who_goes_in_the_middle_of_an_answer_leaves_what_came() -> None:
    content = bytes(range(200))
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n" + content[:70])
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    reader, into = Peer(SECRET, "127.0.0.1", listener.getsockname()[1]), bytearray(200)
    assert reader.elements({hashlib.sha256(content).hexdigest(): 200}, into) == 70
    assert into[:70] == content[:70]
    thread.join()
    listener.close()


def test_many_readers_at_once(showcase: Showcase) -> None:
    content = b"0123456789" * 100_000
    digest = show(showcase, content)
    found: list[bool] = []

    def read() -> None:
        reader, into = Peer(SECRET, showcase.host, showcase.port), bytearray(len(content))
        reader.elements({digest: len(into)}, into)
        found.append(into == content)
        reader.close()

    threads = [threading.Thread(target=read) for _ in range(16)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [True] * 16
    assert CONNECTIONS >= 16


def test_secrets_are_not_easy_to_guess() -> None:
    assert own_secret(" 0123456789abcdef\n") == b"0123456789abcdef"
    with pytest.raises(ValueError, match="16 characters"):
        own_secret("password")


def test_news_are_read_when_there_are_any(showcase: Showcase, peer: Peer) -> None:
    showcase.show("/notice", {"beat": 1})
    assert peer.news("/notice") == {"beat": 1}
    assert peer.news("/notice") is None
    showcase.show("/notice", {"beat": 1})
    assert peer.news("/notice") is None
    showcase.show("/notice", {"beat": 2})
    assert peer.news("/notice") == {"beat": 2}
    assert peer.document("/notice") == {"beat": 2}, "who asks for a document gets it"
    with pytest.raises(PeerError, match="nothing at /orders"):
        peer.news("/orders")


def test_who_waits_for_news_gets_them_at_once() -> None:
    shown = Showcase(SECRET, "127.0.0.1", hold=1e6)
    peer = Peer(SECRET, shown.host, shown.port, seconds=1e6)
    shown.show("/notice", 1)
    assert peer.news("/notice") == 1
    later = threading.Timer(0.05, shown.show, ("/notice", 2))
    later.start()
    assert peer.news("/notice") == 2
    # Nobody waits for a process that ends.
    later = threading.Timer(0.05, shown.close)
    later.start()
    with contextlib.suppress(PeerError):
        assert peer.news("/notice") is None
    later.join()
    peer.close()


def test_what_a_stalled_island_has_shown_does_not_hold() -> None:
    is_alive = [True]
    with (
        contextlib.closing(Showcase(SECRET, "127.0.0.1", hold=0.01, is_alive=lambda: is_alive[0])) as shown,
        contextlib.closing(Peer(SECRET, shown.host, shown.port)) as peer,
    ):
        shown.show("/notice", 1)
        assert peer.news("/notice") == 1
        is_alive[0] = False
        with pytest.raises(PeerError, match="nothing at /notice"):
            peer.news("/notice")


def test_that_nothing_has_changed_is_signed_as_well(showcase: Showcase, peer: Peer) -> None:
    showcase.show("/notice", 1)
    assert peer.news("/notice") == 1
    showcase.sign = lambda path, word, content: "0" * 64  # type: ignore[method-assign]
    with pytest.raises(PeerError, match="not signed"):
        peer.news("/notice")


def test_what_is_not_needed_any_more_is_not_read_to_its_end(showcase: Showcase) -> None:
    content = bytes(range(256)) * 8192
    digest = show(showcase, content)
    counts = iter([False, False, True, True])
    peer = Peer(SECRET, showcase.host, showcase.port, stops=lambda: next(counts))
    into = bytearray(len(content))
    end = peer.elements({digest: len(content)}, into)
    assert 0 < end < len(content)
    assert into[:end] == content[:end]
    # It can be read from there by whoever needs it after all.
    other = Peer(SECRET, showcase.host, showcase.port)
    assert other.elements({digest: len(content)}, into, begin=end) == len(content)
    assert into == content
    peer.close()
    other.close()
