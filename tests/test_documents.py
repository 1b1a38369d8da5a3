"""JSON and TOML from outside: what is within the bounds is read, and one ValueError says what is not."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from atoll.documents import DEEPEST, parse_json, parse_toml, read, read_json, read_text, read_toml


@pytest.mark.parametrize(
    "document", ['{"a": [1, -2.5, null, "é"]}', '{"a": [1, -2.5, null, "é"]}'.encode(), b"\xef\xbb\xbf[]"]
)
def test_json_is_read(document: str | bytes) -> None:
    assert parse_json(document) in ({"a": [1, -2.5, None, "é"]}, [])


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), f"at most {DEEPEST} levels"),
        ("9" * 5000, "an integer of 5000 digits"),
        (str(2**64), "an integer of 20 digits"),
        (b"\xff{}", "invalid start byte"),
        ('"\xed\xb8\x80"'.encode("latin-1"), "invalid continuation byte"),
        ("{", "Expecting"),
    ],
)
def test_what_is_no_bounded_json_is_refused(document: str | bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(document)


def test_json_within_the_depth_and_of_64_bits_is_read() -> None:
    value = parse_json("[" * DEEPEST + str(2**64 - 1) + "]" * DEEPEST)
    for _ in range(DEEPEST):
        (value,) = value
    assert value == 2**64 - 1


def test_half_of_a_surrogate_pair_is_a_question_mark() -> None:
    assert parse_json(r'{"\ud800": "a\udc00b", "pair": "\ud83d\ude00"}') == {"?": "a?b", "pair": "\U0001f600"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = " + "[" * 5000, "nested too deeply"),
        (".".join("a" * 5000) + " = 1", "nested too deeply"),
        ("a = 0x" + "F" * 5000, "an integer of 20000 bits"),
        ("a = [", "Invalid value"),
    ],
)
def test_what_is_no_bounded_toml_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_toml(text)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b"a = 1\r\nb = '\xc3\xa9'\r\n")
    assert read_toml(path) == {"a": 1, "b": "é"}
    assert read_text(path, limit=100) == "a = 1\nb = 'é'\n"
    with pytest.raises(ValueError, match="it has 17 bytes or more; at most 8 are read"):
        read(path, limit=8)
    path.write_text("[1, 2]")
    assert read_json(path) == [1, 2]


def test_a_pipe_is_read_up_to_its_limit(tmp_path: Path) -> None:
    """As in `atoll train <(...)`: its size is not known beforehand."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for limit, fits in ((100, True), (10, False)):
        writer = threading.Thread(target=path.write_bytes, args=(b"a = 1 # a comment",))
        writer.start()
        if fits:
            assert read(path, limit=limit) == b"a = 1 # a comment"
        else:
            with pytest.raises(ValueError, match="at most 10 are read"):
                read(path, limit=limit)
        writer.join()
