"""Sources: what is read, in which order, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import struct
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.base.errors import DataError
from atoll.training.data import documents, find_source, fingerprint


def _read(path: Path, **options: str) -> list[str]:
    return list(documents(find_source(str(path), **options)))


def test_the_standard_library_is_its_python_files_without_installed_packages() -> None:
    source = find_source("stdlib")
    names = [source.relative(file) for file in source.files]
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    assert not any({"site-packages", "dist-packages"} & set(name.split("/")) for name in names)
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert str(source.root) == sysconfig.get_path("stdlib")
    assert next(documents(source))


def test_a_text_file_is_one_document_whatever_its_suffix(tmp_path: Path) -> None:
    path = tmp_path / "corpus.weird"
    path.write_bytes("first\r\nsecond\né".encode())
    assert _read(path) == ["first\r\nsecond\né"]


def test_bytes_that_are_not_utf8_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    assert _read(tmp_path) == ["caf\ufffd au lait"]


def test_a_folder_gives_its_text_in_order_without_hidden_unknown_and_empty_files(tmp_path: Path) -> None:
    for name, text in {
        "b.txt": "3",
        "a/z.md": "2",
        "a/b/c.PY": "1",
        ".git/config.txt": "no",
        "a/.hidden.txt": "no",
        "picture.png": "no",
        "empty.txt": "",
        "c.jsonl": '{"text": "4"}\n{"text": "5"}\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _read(tmp_path) == ["1", "2", "3", "4", "5"]


def test_jsonl_reads_its_field_and_skips_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    rows = [{"body": "one\ntwo", "id": 1}, {"body": ""}, {"body": "half \ud800"}]
    path.write_text("\ufeff" + "\n\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    assert _read(path, text_field="body") == ["one\ntwo", "half ?"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2: not JSON"),
        ("[1, 2]", "line 2: a list, not an object"),
        ('{"body": "a", "id": 3}', r"line 2: no field 'text' \(it has body, id\); set data\.text_field"),
        ('{"text": 3}', "line 2: field 'text' is a int, not text"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        _read(path)


def test_a_saved_dataset_gives_its_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"content": ["one", "", "two", "three"], "id": [1, 2, 3, 4]})
    rows.select([3, 0, 1]).save_to_disk(str(tmp_path / "rows"))
    assert _read(tmp_path / "rows", text_field="content") == ["three", "one"]
    with pytest.raises(DataError, match=r"no column 'text' \(it has content, id\)"):
        _read(tmp_path / "rows")


def test_a_saved_dataset_of_several_splits_gives_train(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("test", "train")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
    assert _read(tmp_path / "both") == ["train"]


def test_a_broken_dataset_folder_is_named(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read as a datasets folder"):
        _read(tmp_path)


@pytest.mark.parametrize("end", [-1, 2**31 - 1, 7_000])
def test_offsets_of_a_dataset_lie_within_its_file(tmp_path: Path, end: int) -> None:
    """Arrow takes them as they are: it read what lies beyond the file in memory, or said "Negative size passed"."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a line", "another line"]}).save_to_disk(str(tmp_path / "d"))
    (file,) = (tmp_path / "d").glob("*.arrow")
    offsets = [struct.pack("<3i", 0, each, 18) for each in (6, end)]
    content = file.read_bytes()
    assert content.count(offsets[0]) == 1
    file.write_bytes(content.replace(*offsets))
    with pytest.raises(DataError, match="cannot be read as a datasets folder"):
        _read(tmp_path / "d")


def test_parquet_gives_its_column(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["one", "two"]}).to_parquet(str(tmp_path / "rows.parquet"))
    assert _read(tmp_path / "rows.parquet") == ["one", "two"]
    with pytest.raises(DataError, match=r"no column 'body' \(it has text\)"):
        _read(tmp_path, text_field="body")


def test_a_missing_corpus_says_where_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        find_source(str(tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in str(caught.value)
    assert '"stdlib"' in str(caught.value)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"png")
    with pytest.raises(DataError, match="no text below"):
        find_source(str(tmp_path))


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gone.txt"
    path.write_text("text")
    source = find_source(str(tmp_path))
    os.unlink(path)
    with pytest.raises(DataError, match=r"gone\.txt: cannot be read"):
        fingerprint(source)
    with pytest.raises(DataError, match=r"gone\.txt: cannot be read"):
        list(documents(source))


def test_the_fingerprint_follows_content_and_names_but_not_place(tmp_path: Path) -> None:
    def write(folder: str, **texts: str) -> str:
        for name, text in texts.items():
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{name}.txt").write_text(text)
        return fingerprint(find_source(str(tmp_path / folder)))

    assert write("one", a="x", b="y") == write("two", a="x", b="y")
    assert len({write("one"), write("three", a="x", b="z"), write("four", a="x", c="y"), write("five", a="xy")}) == 4


# ---- by content


ROWS = '{"text": "one"}\n{"text": "two"}\n'


def zstd(content: bytes) -> bytes:
    packs = pytest.importorskip("zstandard").ZstdCompressor().compress
    middle = len(content) // 2
    return bytes(packs(content[:middle]) + packs(b"") + packs(content[middle:]))  # a file may have several frames


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_what_unpacks_to_far_more_than_text_does_is_refused(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    """64 KiB of zstd held a billion empty lines, which were read for minutes."""
    for lines, is_read in ((1 << 20, True), (20 << 20, False)):
        (tmp_path / "a.jsonl.gz").write_bytes(pack(b'{"text": "one"}\n' + b"\n" * (lines - 17)))
        if is_read:
            assert _read(tmp_path) == ["one"]
        else:
            with pytest.raises(DataError, match="unpacks to more than 64 times its size"):
                _read(tmp_path)


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
@pytest.mark.parametrize(("name", "content", "expected"), [
    ("rows.jsonl", ROWS, ["one", "two"]),
    ("rows.json", '[{"text": "one"},\n {"text": "two"}]', ["one", "two"]),
    ("page.txt", "one\ntwo", ["one\ntwo"]),
])  # fmt: skip
def test_compressed_files_are_read_as_what_they_hold(
    tmp_path: Path, pack: Callable[[bytes], bytes], name: str, content: str, expected: list[str]
) -> None:
    """Past bug: a gzipped file was trained on as text full of replacement characters."""
    path = tmp_path / f"{name}.{'gz' if pack is gzip.compress else 'zst'}"
    path.write_bytes(pack(content.encode()))
    assert _read(path) == expected
    assert _read(tmp_path) == expected  # a folder uses the same readers
    renamed = path.rename(tmp_path / "something")
    assert _read(renamed) == (["one\ntwo"] if "page" in name else expected if "jsonl" in name else [content])


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_compressed_files_that_are_cut_short_are_named(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "cut.txt.gz"
    path.write_bytes(pack(os.urandom(100_000).hex().encode())[:-20_000])
    with pytest.raises(DataError, match=r"cut\.txt\.gz: cannot be unpacked"):
        _read(path)


def test_records_are_known_by_content(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text(ROWS)
    (tmp_path / "rows.json").write_text('\ufeff [\n {"text": "three"}]', encoding="utf-8")
    (tmp_path / "texts.json").write_text('["four", {"text": "five"}]')
    (tmp_path / "values.json").write_text("[1, 2]")
    (tmp_path / "one.json").write_text('{"text": "not a record"}')
    assert _read(tmp_path) == ['{"text": "not a record"}', "three", "one", "two", "four", "five", "[1, 2]"]


@pytest.mark.parametrize(("content", "words"), [
    (b"PK\x03\x04rest", "a zip archive"),
    (b"%PDF-1.7", "a PDF"),
    ("text".encode("utf-16"), "text in UTF-16"),
    (b"some text\0and more", "binary: it has a NUL byte at 9"),
    (b'[{"text": "a"}, 3]', "object 2: a int"),
    (b'[{"text": "a"}', "begins as an array"),
    (b'["a", 3]', "object 2: a int; an array of documents has objects or texts only"),
    (b"[1, 2]", "one JSON value without documents"),
])  # fmt: skip
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words):
        _read(path)


def test_a_field_of_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no records")
    for source in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(DataError, match=r"text_field = 'body' has no effect"):
            _read(source, text_field="body")
    (tmp_path / "b.jsonl").write_text('{"body": "a record"}\n')
    assert _read(tmp_path, text_field="body") == ["no records", "a record"]
