"""JSON and TOML from outside: what is within the bounds is read, and one ValueError says what is not."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from atoll.base.digests import digest, read_sealed
from atoll.base.documents import (
    DEEPEST,
    finite,
    parse_json,
    parse_toml,
    parse_yaml,
    read,
    read_json,
    read_text,
    read_toml,
    string,
    whole_number,
)
from atoll.base.errors import ConfigError
from atoll.plans.ir.text import from_csv
from atoll.training.data.files import read_file
from atoll.training.output.folder import RunFolder


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


def test_large_integers_are_rounded_where_they_mean_no_limit() -> None:
    """transformers writes int(1e30) for a tokenizer without a limit."""
    assert parse_json(f"[{int(1e30)}, {2**64}, -3]", rounds=True) == [1e30, float(2**64), -3]
    with pytest.raises(ValueError, match="an integer of 41 digits"):
        parse_json("9" * 41, rounds=True)


def test_json_within_the_depth_and_of_64_bits_is_read() -> None:
    value = parse_json("[" * DEEPEST + str(2**64 - 1) + "]" * DEEPEST)
    for _ in range(DEEPEST):
        (value,) = value
    assert value == 2**64 - 1


@pytest.mark.parametrize("body", [b"true", b"null", b"[]", b'"run"'])
def test_what_is_sealed_is_an_object(tmp_path: Path, body: bytes) -> None:
    """With the right digest `true` was let through, and a run that looked for its id failed with a TypeError."""
    folder = RunFolder(tmp_path)
    folder.identity.write_bytes(b'{"content": ' + body + b', "digest": "' + digest(body).encode() + b'"}\n')
    with pytest.raises(ValueError, match="not an object"):
        read_sealed(folder.identity)
    assert folder.run_id() is None
    folder.write_run_id("a")
    assert folder.run_id() == "a"


def test_every_error_can_be_printed() -> None:
    """Packages that read JSON themselves quote half of a surrogate pair, and the message of the error could not be
    printed."""
    assert str(ConfigError("no family '\ud800é'")) == "no family '?é'"


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


@pytest.mark.parametrize("value", [1, -2.5, 2**63])
def test_finite_numbers(value: float) -> None:
    assert finite(value) == value


@pytest.mark.parametrize("value", [True, None, "1", [], float("nan"), float("inf")])
def test_what_is_no_finite_number_is_shown(value: object) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(repr(value))} is not a finite number"):
        finite(value)


def test_counts_and_strings() -> None:
    assert [whole_number(0), whole_number(7, limit=7), whole_number(-1, least=-1), string("a")] == [0, 7, -1, "a"]
    for value in (-1, 8, 1.0, True, None, "1"):
        with pytest.raises(ValueError, match="is not a whole number from 0 to 7"):
            whole_number(value, limit=7)
    with pytest.raises(ValueError, match=r"^'aaa.*\.\.\..*a' is not a whole number"):  # of a megabyte some is shown
        whole_number("a" * 1_000_000)
    with pytest.raises(ValueError, match="7 is no string"):
        string(7)


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


def test_yaml_of_60000_brackets_is_refused() -> None:
    """libyaml's loader recursed on them in C until the process ended; fuzzing found it."""
    pytest.importorskip("yaml")
    for text in ("[" * 60_000, "[" * 30_000 + "]" * 30_000, "- " * 30_000 + "a", "{a: " * 15_000):
        with pytest.raises(ValueError, match="nested too deeply; at most 100 levels"):
            parse_yaml(text)
    assert parse_yaml("a:\n- b: [1, {c: 2}]\n") == {"a": [{"b": [1, {"c": 2}]}]}


def test_a_byte_order_mark_is_not_content(tmp_path: Path) -> None:
    """Editors of some systems write one: a config, a schedule and a corpus are read as without it."""
    mark = "\ufeff".encode()
    (tmp_path / "a.toml").write_bytes(mark + b"steps = 3\n")
    assert read_toml(tmp_path / "a.toml") == {"steps": 3}
    (tmp_path / "a.csv").write_bytes(mark + b"0F0,0B0\n1F0,1B0\n")
    assert from_csv(read_text(tmp_path / "a.csv", limit=99)).microbatches == 1
    (tmp_path / "a.txt").write_bytes(mark + b"words\n")
    assert list(read_file(tmp_path / "a.txt", "text")) == ["words\n"]
