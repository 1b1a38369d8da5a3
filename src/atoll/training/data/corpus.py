"""Sources of text. A source is a list of files that are read document by document.

"stdlib"             the .py files of the running interpreter's standard library
a file               records or text, see `atoll.training.data.files`
a folder             every file below it with a known suffix, in the order of their relative paths
a datasets folder    the output of Hugging Face `Dataset.save_to_disk`; of several splits, "train"

[Note: not datasets.load_dataset] The package `datasets` reads only folders that it wrote. Its `load_dataset` names a
cache by a file's path and time of change, so it returns the old records of a file that was changed and kept its time;
the caches here are named by digests of the content. One broken line makes a file unreadable, where `data.bad_records`
skips it, or names file and line. The text is stored a second time, as Arrow. And a stream resumes by reading a file
again up to its position, where a shard (`shards.py`) begins at a byte.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from atoll.base.errors import DataError
from atoll.training.data.bad_records import BadRecords
from atoll.training.data.files import (
    JSONL_SUFFIXES,
    PARQUET_SUFFIXES,
    Form,
    Record,
    RecordRange,
    field,
    file_records,
    form_of,
    inner_suffix,
    is_one_value,
    known_columns,
    optional,
    read_file,
    without_nulls,
)

STDLIB = "stdlib"

PROSE_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv", ".json", ".log"})
CODE_SUFFIXES = frozenset(
    {".c", ".cpp", ".css", ".go", ".h", ".hpp", ".java", ".js", ".py", ".rs", ".sh", ".sql", ".ts"}
)
TEXT_SUFFIXES = PROSE_SUFFIXES | CODE_SUFFIXES
"""Suffixes of files in a folder that are read as text; a single file may have any other suffix."""

RECORD_SUFFIXES = frozenset({".json"})
"""Suffixes of further files that may hold records, besides JSON lines and parquet."""

TEXT_FIELD = "text"
"""Default key or column of the text."""

_READ_BYTES = 1 << 20


class SourceKind(StrEnum):
    """The kind of a source's files."""

    FILES = "files"
    DATASETS = "datasets"


@dataclass(frozen=True, slots=True)
class Source:
    """Files of one corpus. `root` is the folder that their relative paths start from.

    key: the config's key that names the source.
    identity: identifies the contents; None: their hash does.
    parts: if the source is a part of another one, the records of each file that belong to it; None for all records.
    """

    name: str
    kind: SourceKind
    root: Path
    files: tuple[Path, ...]
    text_field: str = TEXT_FIELD
    key: str = "data.source"
    identity: str | None = None
    parts: tuple[RecordRange | None, ...] = ()

    @property
    def is_shard(self) -> bool:
        """True if the source is a part of another one."""
        return bool(self.parts)

    @property
    def pieces(self) -> Iterator[tuple[Path, RecordRange | None]]:
        """Return the files, each with the part of it that belongs to the source."""
        return zip(self.files, self.parts or (None,) * len(self.files), strict=True)

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.stat().st_size for file in self.files)

    def relative(self, file: Path) -> str:
        """Return a file's path relative to the root, with forward slashes."""
        return file.relative_to(self.root).as_posix()


def find_source(
    source: str, *, text_field: str = TEXT_FIELD, has_records: bool = False, key: str = "data.source"
) -> Source:
    """Return the files of a source, in a fixed order. Raises DataError if there are none.

    text_field: key or column of the text in JSONL, parquet and datasets.
    has_records: whether the source is read as records; text files of a folder are then skipped.
    key: the config's key that names the source.
    """
    return find_sources([source], text_field=text_field, has_records=has_records, key=key)[0]


def find_sources(
    sources: Sequence[str], *, text_field: str = TEXT_FIELD, has_records: bool = False, key: str = "data.source"
) -> tuple[Source, ...]:
    """Return several sources with the same settings, see `find_source`."""
    found = tuple(_find(source, text_field, has_records=has_records, key=key) for source in sources)
    files = [file for each in found if each.kind is SourceKind.FILES for file in each.files]
    has_fields = len(files) < sum(len(each.files) for each in found)
    if text_field != TEXT_FIELD and not has_fields and all(_form(file) is Form.TEXT for file in files):
        names = ", ".join(repr(source) for source in sources)
        raise DataError(
            f"data.text_field = {text_field!r} has no effect: {key} = {names} is text, without "
            "records that have fields; leave it out, or give JSON lines, a JSON array or parquet"
        )
    return found


def _find(source: str, text_field: str, *, has_records: bool, key: str) -> Source:
    if source == STDLIB:
        return _stdlib(text_field, key)
    path = Path(source).expanduser()
    if path.is_file():
        if not has_records and _form(path) is Form.TEXT and is_one_value(path):
            raise DataError(
                f"{key} = {source!r} is one JSON value without documents, whose brackets and keys would be learned as "
                "text; give JSON lines, an array of texts, or of objects that have one each, or the text itself in a "
                ".txt file"
            )
        return Source(source, SourceKind.FILES, path.parent, (path,), text_field, key)
    if not path.is_dir():
        raise DataError(
            f"{key} = {source!r}: there is no such file or folder (looked for {path.absolute()}); "
            f'give a text file, a .jsonl file, a folder, or "{STDLIB}"'
        )
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        files = tuple(file for file in _below(path) if file.suffix in {".arrow", ".json"})
        return Source(source, SourceKind.DATASETS, path, files, text_field, key)
    known = (RECORD_SUFFIXES if has_records else TEXT_SUFFIXES) | JSONL_SUFFIXES | PARQUET_SUFFIXES
    files = tuple(file for file in _below(path) if inner_suffix(file) in known)
    if not files:
        what = "records" if has_records else "text"
        raise DataError(
            f"{key} = {source!r}: no {what} below {path.absolute()}; known suffixes: {', '.join(sorted(known))}"
        )
    return Source(source, SourceKind.FILES, path, files, text_field, key)


def _form(path: Path) -> Form:
    try:
        return form_of(path)
    except OSError as error:
        raise unreadable(path, error) from error


def _stdlib(text_field: str, key: str) -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    below = _below(root, without=frozenset({"site-packages", "dist-packages"}))
    files = tuple(file for file in below if file.suffix == ".py")
    if not files:
        raise DataError(
            f'{key} = "{STDLIB}": the standard library of this interpreter has no .py files at {root}; '
            "give a file or a folder of text instead"
        )
    return Source(STDLIB, SourceKind.FILES, root, files, text_field, key)


def _below(root: Path, *, without: frozenset[str] = frozenset()) -> list[Path]:
    """Return the regular files below a folder, by relative path.

    Hidden files and folders (a name that starts with a dot) are skipped, and so are folders named in `without`.
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in without]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        found += [path for path in paths if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def fingerprint(source: Source) -> str:
    """Return the source's `identity`; without one, a hash of the relative path and the bytes of every file.

    The hash does not depend on the location of the folder."""
    if source.identity is not None:
        return source.identity
    total = hashlib.sha256()
    for file in source.files:
        content = hashlib.sha256()
        try:
            with file.open("rb") as stream:
                while chunk := stream.read(_READ_BYTES):
                    content.update(chunk)
        except OSError as error:
            raise unreadable(file, error) from error
        total.update(source.relative(file).encode("utf-8", errors="surrogateescape") + b"\0" + content.digest())
    return total.hexdigest()


def documents(source: Source, bad: BadRecords | None = None) -> Iterator[str]:
    """Yield the documents that are not empty, in a fixed order. bad: collects broken records."""
    bad, column = BadRecords() if bad is None else bad, source.text_field
    if source.kind is SourceKind.DATASETS:
        texts = _column(source, column, bad)
    else:
        texts = (text for file, part in source.pieces for text in _readable(file, read_file(file, column, part, bad)))
    return (text for text in texts if text)


def _column(source: Source, column: str, bad: BadRecords) -> Iterator[str]:
    for where, record in _saved_dataset(source, [column], "set data.text_field"):
        with bad.skipping():
            yield field(record, column, where)


def records(
    source: Source,
    columns: Sequence[str],
    *,
    hint: str,
    without: Collection[str] | None = None,
    bad: BadRecords | None = None,
) -> Iterator[Record]:
    """Yield the records of a source, in a fixed order. See `file_records`."""
    if source.kind is SourceKind.DATASETS:
        return _saved_dataset(source, columns, hint, without)
    return (
        each
        for file, part in source.pieces
        for each in _readable(file, file_records(file, columns, hint=hint, part=part, without=without, bad=bad))
    )


T = TypeVar("T")


def _readable(path: Path, found: Iterator[T]) -> Iterator[T]:
    try:
        yield from found
    except OSError as error:
        raise unreadable(path, error) from error


def _saved_dataset(
    source: Source, columns: Sequence[str], hint: str, without: Collection[str] | None = None
) -> Iterator[Record]:
    begin, end = next((part for part in source.parts if part is not None), (0, dataset_rows(source)))
    for split in _splits(source):
        chosen = known_columns(split.column_names, columns, str(source.root), hint, without=without)
        first, last = min(begin, len(split)), min(end, len(split))
        begin, end = begin - first, end - last
        if first == last:
            continue
        try:
            rows = split.select(range(first, last)).select_columns(chosen)
            rows.data.table.validate(full=True)  # arrow uses offsets of the file without checks
            for number, record in enumerate(rows, start=first + 1):
                yield f"{source.root}, row {number}", {key: without_nulls(value) for key, value in record.items()}
        except DataError:
            raise
        except Exception as error:
            raise _no_dataset(source, error) from error


def dataset_rows(source: Source) -> int:
    """Yield the records of a datasets folder."""
    return sum(len(split) for split in _splits(source))


def _splits(source: Source) -> list[Any]:
    datasets = optional("datasets", "datasets", source.root)
    try:
        loaded = datasets.load_from_disk(str(source.root))
    except Exception as error:  # the package raises various errors for a broken folder
        raise _no_dataset(source, error) from error
    if isinstance(loaded, dict):
        return [loaded["train"]] if "train" in loaded else list(loaded.values())
    return [loaded]


def _no_dataset(source: Source, error: Exception) -> DataError:
    return DataError(f"{source.root}: cannot be read as a datasets folder ({error})")


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error for an unreadable file."""
    return DataError(f"{path}: cannot be read ({error.strerror or error}); check the file and its permissions")
