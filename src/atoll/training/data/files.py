"""Documents of one file, whose format is detected from its content.

    gzip, zstd     any of the formats below, decompressed
    parquet        one document per row
    JSON lines     one document per object: .jsonl, .ndjson, and files that begin with two lines of objects
    a JSON array   one document per object or string: .json files that begin with a bracket and one of these
    text           everything else, one document

Invalid UTF-8 is read with replacement characters, because one bad byte must not stop a run. Binary files are refused.
"""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

from atoll.base.documents import parse_json
from atoll.base.errors import DataError, RecordError
from atoll.training.data.bad_records import BadRecords

PACKED_SUFFIXES = frozenset({".gz", ".zst", ".zstd"})
JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PARQUET_SUFFIXES = frozenset({".parquet"})

GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
FOREIGN = {
    b"PK\x03\x04": "a zip archive; unpack it",
    b"BZh": "compressed by bzip2; unpack it, or use gzip or zstd",
    b"\xfd7zXZ": "compressed by xz; unpack it, or use gzip or zstd",
    b"%PDF-": "a PDF; extract its text",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"\x7fELF": "a program",
    b"\x93NUMPY": "an array of numpy; give the text that its tokens were made of",
    b"ARROW1": "an Arrow file; give the folder that `Dataset.save_to_disk` wrote",
    b"SQLite format 3": "a database; export its text as .jsonl",
    b"\x89HDF": "an HDF5 file; export its text as .jsonl",
    b"\xff\xfe": "text in UTF-16; convert it to UTF-8",
    b"\xfe\xff": "text in UTF-16; convert it to UTF-8",
}
"""First bytes of files that are not UTF-8 text, and how to convert them."""

HEAD_BYTES = 1 << 16
CHUNK = 1 << 10
"""Number of bytes of a zstd file that are decompressed at once, to at most 64 MB."""
PACKED_FREELY, MOST_PACKED = 1 << 20, 64
"""Maximum decompressed size: a number of bytes, plus a multiple of the compressed size. Text compresses about 10:1."""
BOM = b"\xef\xbb\xbf"
"""Byte order mark of UTF-8."""


CONVERSATION_KEYS = frozenset({"messages", "conversations", "conversation", "prompt", "instruction"})
"""Keys that data.format = "chat" reads."""


class Form(StrEnum):
    """Format of a file."""

    TEXT = "text"
    LINES = "JSON lines"
    ARRAY = "JSON array"
    PARQUET = "parquet"


def inner_suffix(path: Path) -> str:
    """Return the last suffix in lower case, apart from the suffix of a compression."""
    name = Path(path.name.lower())
    return Path(name.stem).suffix if name.suffix in PACKED_SUFFIXES else name.suffix


def form_of(path: Path) -> Form:
    """Return the format of a file. Raises DataError for a file without text, and OSError."""
    with opened(path) as stream:
        head = stream.read(HEAD_BYTES)
    if head.startswith(PARQUET) or inner_suffix(path) in PARQUET_SUFFIXES:
        return Form.PARQUET
    for begin, words in FOREIGN.items():
        if head.startswith(begin):
            raise DataError(f"{path} is {words}")
    if b"\0" in head:
        raise DataError(f"{path} is binary: it has a NUL byte at {head.index(0)}; a corpus is text in UTF-8")
    if inner_suffix(path) in JSONL_SUFFIXES or _begins_with_objects(head):
        return Form.LINES
    if inner_suffix(path) == ".json" and b"".join(head.removeprefix(BOM).split()).startswith((b"[{", b'["')):
        return Form.ARRAY
    return Form.TEXT


def is_one_value(path: Path) -> bool:
    """Return True if a .json file that is read as text begins as an object or an array, so is no text."""
    if inner_suffix(path) != ".json":
        return False
    with opened(path) as stream:
        return stream.read(HEAD_BYTES).removeprefix(BOM).lstrip().startswith((b"{", b"["))


def _begins_with_objects(head: bytes) -> bool:
    """Return True if the first two lines are JSON objects."""
    lines = [line for line in head.removeprefix(BOM).split(b"\n") if line.strip()][:2]
    if len(lines) < 2 or any(not line.lstrip().startswith(b"{") for line in lines):
        return False
    try:
        return all(isinstance(parse_json(line.decode("utf-8", errors="replace")), dict) for line in lines)
    except ValueError:
        return False


Record = tuple[str, dict[str, Any]]
"""The location of a record for errors, and its content."""


RecordRange = tuple[int, int]
"""First record and one past the last: in bytes for JSON lines, row groups for parquet, rows for a dataset."""


def read_file(
    path: Path, text_field: str, part: RecordRange | None = None, bad: BadRecords | None = None
) -> Iterator[str]:
    """Yield the documents of a file or a part of it, including empty ones. text_field: key or column of their text.

    bad: collects broken records.

    Raises DataError for unreadable content, and OSError.
    """
    if form_of(path) is Form.TEXT:
        with opened(path) as stream:
            yield stream.read().decode("utf-8-sig", errors="replace")
        return
    bad = BadRecords() if bad is None else bad
    for where, record in file_records(path, [text_field], hint="set data.text_field", part=part, bad=bad):
        with bad.skipping():
            yield field(record, text_field, where)


def file_records(
    path: Path,
    columns: Sequence[str],
    *,
    hint: str,
    part: RecordRange | None = None,
    without: Collection[str] | None = None,
    bad: BadRecords | None = None,
) -> Iterator[Record]:
    """Yield the records of a file or a part of it.

    columns: columns to read of a table, which must have at least one of them.  hint: what to do if it has none.
    without: read all columns of a table but these; None: read `columns` only.  bad: collects broken records.

    Raises DataError for unreadable content or a file without records, and OSError.
    """
    match form_of(path):
        case Form.PARQUET:
            yield from _parquet(path, columns, hint, part, without)
        case Form.LINES:
            yield from _lines(path, part, bad or BadRecords())
        case Form.ARRAY:
            yield from _array(path, columns, bad or BadRecords())
        case Form.TEXT:
            raise DataError(f"{path} is text without records; give JSON lines, a JSON array or parquet")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file; a compressed one is decompressed."""
    with path.open("rb") as file:
        begin = file.read(4)
        file.seek(0)
        if begin.startswith(GZIP):
            try:
                with gzip.open(file) as stream:
                    yield cast(BinaryIO, io.BufferedReader(_Unpacked(stream, path)))
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise DataError(f"{path}: cannot be unpacked by gzip ({error}); the file is damaged") from error
        elif begin == ZSTD:
            zstd = optional("zstandard", "zstandard", path)
            try:
                yield cast(BinaryIO, io.BufferedReader(_Unpacked(_Frames(file, zstd.ZstdDecompressor()), path)))
            except (EOFError, zstd.ZstdError) as error:
                raise DataError(f"{path}: cannot be unpacked by zstd ({error}); the file is damaged") from error
        else:
            yield file


class _Frames:
    """Decompressed frames of a zstd file. zstandard's own reader does not detect a truncated frame."""

    def __init__(self, file: BinaryIO, unpacks: Any) -> None:
        self._file, self._unpacks = file, unpacks
        self._frame: Any = None
        self._ready = memoryview(b"")

    def read(self, count: int) -> memoryview:
        while not self._ready:
            begins = self._frame is None or self._frame.eof
            packed = (self._frame.unused_data if self._frame is not None and begins else b"") or self._file.read(CHUNK)
            if not packed and begins:
                break
            if not packed:
                raise EOFError("the file ends within a frame")
            if begins:
                self._frame = self._unpacks.decompressobj()
            self._ready = memoryview(self._frame.decompress(packed))
        content, self._ready = self._ready[:count], self._ready[count:]
        return content


class _Unpacked(io.RawIOBase):
    """Stream of the decompressed content of a file, limited to the ratio of text. Raises DataError beyond it."""

    def __init__(self, stream: Any, path: Path) -> None:
        self._stream, self._path = stream, path
        self._left = PACKED_FREELY + MOST_PACKED * path.stat().st_size

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        content = self._stream.read(len(target))
        self._left -= len(content)
        if self._left < 0:
            raise DataError(
                f"{self._path} unpacks to more than {MOST_PACKED} times its size, as no text does; unpack it, if it is "
                "meant"
            )
        target[: len(content)] = content
        return len(content)


class _Between(io.RawIOBase):
    """Lines of a file that begin within a range of bytes."""

    def __init__(self, file: BinaryIO, part: RecordRange) -> None:
        self._file = file
        begin, self._end = (self._line_from(at) for at in part)
        file.seek(begin)

    def _line_from(self, at: int) -> int:
        """Return the position of the first line that begins at or after a byte."""
        if at == 0:
            return 0
        self._file.seek(at - 1)
        self._file.readline()
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        content = self._file.read(max(0, min(len(target), self._end - self._file.tell())))
        target[: len(content)] = content
        return len(content)


def _lines(path: Path, part: RecordRange | None, bad: BadRecords) -> Iterator[Record]:
    with ExitStack() as held:
        stream = held.enter_context(opened(path))
        if part is not None:
            stream = cast(BinaryIO, io.BufferedReader(_Between(stream, part)))
        lines = held.enter_context(io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace"))
        behind = "" if part is None or part[0] == 0 else f" of those that begin from byte {part[0]} on"
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}{behind}"
            with bad.skipping():
                yield where, _object(line, where)


def _object(line: str, where: str) -> dict[str, Any]:
    """Return the object of a line. Raises RecordError if there is none."""
    try:
        record = parse_json(line)
    except ValueError as error:
        raise RecordError(where, "not JSON", f"not JSON ({error}); a JSONL file has one object a line") from error
    if not isinstance(record, dict):
        reason = f"a {type(record).__name__}, not an object; a JSONL file has one object a line"
        raise RecordError(where, "not an object", reason)
    return record


def _array(path: Path, columns: Sequence[str], bad: BadRecords) -> Iterator[Record]:
    """Yield the objects of an array. Where one column is read, a string is an object that has it."""
    with opened(path) as stream:
        content = stream.read()
    try:
        records = parse_json(content)
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}), though it begins as an array") from error
    if not isinstance(records, list):
        raise DataError(f"{path}: a {type(records).__name__}, not an array of documents")
    for number, record in enumerate(records, start=1):
        where = f"{path}, object {number}"
        if isinstance(record, str) and len(columns) == 1:
            record = {columns[0]: record}
        with bad.skipping():
            if not isinstance(record, dict):
                texts = " or texts" if len(columns) == 1 else ""
                reason = f"a {type(record).__name__}; an array of documents has objects{texts} only"
                raise RecordError(where, "not an object", reason)
            yield where, record


def _parquet(
    path: Path, columns: Sequence[str], hint: str, part: RecordRange | None, without: Collection[str] | None
) -> Iterator[Record]:
    parquet = optional("pyarrow.parquet", "pyarrow", path)
    try:
        with parquet.ParquetFile(path) as table:
            chosen = known_columns(table.schema_arrow.names, columns, str(path), hint, without=without)
            groups = range(*(part or (0, table.num_row_groups)))
            before = sum(table.metadata.row_group(group).num_rows for group in range(groups.start))
            batches = table.iter_batches(row_groups=list(groups), columns=chosen)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, record in enumerate(rows, start=before + 1):
                yield f"{path}, row {number}", {key: without_nulls(value) for key, value in record.items()}
    except DataError:
        raise
    except Exception as error:  # of several types, also OSError for corrupt content
        raise DataError(f"{path}: cannot be read as parquet ({error}); write it again") from error


def file_parts(path: Path, nbytes: int) -> list[RecordRange] | None:
    """Return parts of a file with about so many bytes, or None if it cannot be cut: text, an array, a compressed
    file."""
    size = path.stat().st_size
    match form_of(path):
        case Form.LINES if not _is_packed(path):
            ends = [*range(0, size, nbytes), size]
        case Form.PARQUET:
            parquet = optional("pyarrow.parquet", "pyarrow", path)
            try:
                groups = parquet.read_metadata(path).num_row_groups
            except Exception as error:  # see `_parquet`
                raise DataError(f"{path}: cannot be read as parquet ({error}); write it again") from error
            ends = [*range(0, groups, max(1, groups * nbytes // size)), groups]
        case _:
            return None
    return list(pairwise(ends))


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4).startswith((GZIP, ZSTD))


def known_columns(
    has: Sequence[str], wanted: Sequence[str], where: str, hint: str, *, without: Collection[str] | None = None
) -> list[str]:
    """Return the requested columns that a table has, or all but those in `without`. Raises DataError if it has none of
    the requested ones."""
    found = [name for name in wanted if name in has]
    if not found:
        raise DataError(f"{where}: no column {' or '.join(map(repr, wanted))} (it has {', '.join(has)}); {hint}")
    return found if without is None else [name for name in has if name in found or name not in without]


def without_nulls(value: Any) -> Any:
    """Return a value of a table without keys that are null: all objects of a column have the keys of each of them."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def field(record: dict[str, Any], text_field: str, where: str) -> str:
    """Return the text of a record. Raises RecordError if there is none."""
    if text_field not in record:
        keys = ", ".join(sorted(record)) or "no keys"
        is_chat = not CONVERSATION_KEYS.isdisjoint(record)
        hint = ', or data.format = "chat" for conversations and instructions' if is_chat else ""
        raise RecordError(
            where, f"no field {text_field!r}", f"no field {text_field!r} (it has {keys}); set data.text_field{hint}"
        )
    value = record[text_field]
    if not isinstance(value, str):
        reason = f"field {text_field!r} is a {type(value).__name__}, not text; set data.text_field"
        raise RecordError(where, f"field {text_field!r} is not text", reason)
    # JSON can hold half of a surrogate pair, which no encoding of text can.
    return value.encode("utf-8", errors="replace").decode("utf-8")


def optional(module: str, package: str, path: Path) -> Any:
    """Import a module of an optional extra. Raises DataError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f'{path}: reading it needs the package {package!r}, which is not installed; pip install "atoll[hf]", '
            "or convert the corpus to .jsonl or .txt"
        ) from error
