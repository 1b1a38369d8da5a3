"""Where text comes from: a source is a list of files, read document by document.

    "stdlib"             the .py files of the running interpreter's standard library
    a file               .jsonl / .ndjson: one object a line; .parquet: one row a document; anything else: one text
    a folder             every file below it with a known suffix, in the order of their relative paths
    a datasets folder    what Hugging Face `Dataset.save_to_disk` wrote; of several splits, "train"

Text that is not UTF-8 is read with replacement characters: a corpus may not stop at one bad byte.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from atoll.documents import parse_json
from atoll.errors import DataError

STDLIB = "stdlib"

PROSE_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv", ".json", ".log"})
CODE_SUFFIXES = frozenset(
    {".c", ".cpp", ".css", ".go", ".h", ".hpp", ".java", ".js", ".py", ".rs", ".sh", ".sql", ".ts"}
)
TEXT_SUFFIXES = PROSE_SUFFIXES | CODE_SUFFIXES
"""Files that a folder gives as text; a file named by itself may have any other suffix."""

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PARQUET_SUFFIXES = frozenset({".parquet"})

_READ_BYTES = 1 << 20


class Kind(StrEnum):
    """How the files of a source are read."""

    FILES = "files"
    DATASETS = "datasets"


@dataclass(frozen=True, slots=True)
class Source:
    """Files of one corpus. `root` is the folder that their relative paths start from."""

    name: str
    kind: Kind
    root: Path
    files: tuple[Path, ...]
    text_field: str = "text"

    def relative(self, file: Path) -> str:
        """A file's path below the root, with forward slashes."""
        return file.relative_to(self.root).as_posix()


def find_source(source: str, *, text_field: str = "text") -> Source:
    """The files of a source, in a fixed order. DataError if there is none.

    text_field: the key or column that holds the text of JSONL, parquet and datasets.
    """
    if source == STDLIB:
        return _stdlib(text_field)
    path = Path(source).expanduser()
    if path.is_file():
        return Source(source, Kind.FILES, path.parent, (path,), text_field)
    if not path.is_dir():
        raise DataError(
            f"data.source = {source!r}: there is no such file or folder (looked for {path.absolute()}); "
            f'give a text file, a .jsonl file, a folder, or "{STDLIB}"'
        )
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        files = tuple(file for file in _below(path) if file.suffix in {".arrow", ".json"})
        return Source(source, Kind.DATASETS, path, files, text_field)
    known = TEXT_SUFFIXES | JSONL_SUFFIXES | PARQUET_SUFFIXES
    files = tuple(file for file in _below(path) if file.suffix.lower() in known)
    if not files:
        raise DataError(
            f"data.source = {source!r}: no text below {path.absolute()}; known suffixes: {', '.join(sorted(known))}"
        )
    return Source(source, Kind.FILES, path, files, text_field)


def _stdlib(text_field: str) -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    below = _below(root, without=frozenset({"site-packages", "dist-packages"}))
    files = tuple(file for file in below if file.suffix == ".py")
    if not files:
        raise DataError(
            f'data.source = "{STDLIB}": the standard library of this interpreter has no .py files at {root}; '
            "give a file or a folder of text instead"
        )
    return Source(STDLIB, Kind.FILES, root, files, text_field)


def _below(root: Path, *, without: frozenset[str] = frozenset()) -> list[Path]:
    """The regular files below a folder, by relative path.

    Hidden files and folders (a name that starts with a dot) are left out, and so are folders named in `without`.
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in without]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        found += [path for path in paths if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def fingerprint(source: Source) -> str:
    """A hash of the relative paths and the bytes of every file: the same content anywhere gives the same value."""
    total = hashlib.sha256()
    for file in source.files:
        content = hashlib.sha256()
        try:
            with file.open("rb") as stream:
                while chunk := stream.read(_READ_BYTES):
                    content.update(chunk)
        except OSError as error:
            raise _unreadable(file, error) from error
        total.update(source.relative(file).encode("utf-8", errors="surrogateescape") + b"\0" + content.digest())
    return total.hexdigest()


def documents(source: Source) -> Iterator[str]:
    """The documents that are not empty, in a fixed order."""
    if source.kind is Kind.DATASETS:
        texts = _saved_dataset(source)
    else:
        texts = (text for file in source.files for text in _file(file, source))
    return (text for text in texts if text)


def _file(path: Path, source: Source) -> Iterator[str]:
    suffix = path.suffix.lower()
    try:
        if suffix in JSONL_SUFFIXES:
            yield from _jsonl(path, source.text_field)
        elif suffix in PARQUET_SUFFIXES:
            yield from _parquet(path, source.text_field)
        else:
            yield path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise _unreadable(path, error) from error


def _jsonl(path: Path, text_field: str) -> Iterator[str]:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = parse_json(line)
            except ValueError as error:
                raise DataError(f"{where}: not JSON ({error}); a JSONL file has one object a line") from error
            if not isinstance(record, dict):
                raise DataError(
                    f"{where}: a {type(record).__name__}, not an object; a JSONL file has one object a line"
                )
            yield _field(record, text_field, where)


def _field(record: dict[str, Any], text_field: str, where: str) -> str:
    if text_field not in record:
        keys = ", ".join(sorted(record)) or "no keys"
        raise DataError(f"{where}: no field {text_field!r} (it has {keys}); set data.text_field")
    value = record[text_field]
    if not isinstance(value, str):
        raise DataError(f"{where}: field {text_field!r} is a {type(value).__name__}, not text; set data.text_field")
    # JSON can hold half of a surrogate pair, which no encoding of text can.
    return value.encode("utf-8", errors="replace").decode("utf-8")


def _parquet(path: Path, text_field: str) -> Iterator[str]:
    parquet = _optional("pyarrow.parquet", "pyarrow", path)
    try:
        with parquet.ParquetFile(path) as table:
            columns = list(table.schema_arrow.names)
            if text_field not in columns:
                raise DataError(f"{path}: no column {text_field!r} (it has {', '.join(columns)}); set data.text_field")
            for batch in table.iter_batches(columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    yield _field({text_field: value}, text_field, str(path))
    except DataError:
        raise
    except Exception as error:  # of several kinds, and OSError for what is no fault of the disk
        raise DataError(f"{path}: cannot be read as parquet ({error}); write it anew") from error


def _saved_dataset(source: Source) -> Iterator[str]:
    datasets = _optional("datasets", "datasets", source.root)
    try:
        loaded = datasets.load_from_disk(str(source.root))
    except Exception as error:  # whatever the package raises for a broken folder, it is this folder's fault
        raise DataError(f"{source.root}: cannot be read as a datasets folder ({error})") from error
    splits = [loaded]
    if isinstance(loaded, dict):
        splits = [loaded["train"]] if "train" in loaded else list(loaded.values())
    for split in splits:
        if source.text_field not in split.column_names:
            columns = ", ".join(split.column_names)
            raise DataError(f"{source.root}: no column {source.text_field!r} (it has {columns}); set data.text_field")
        for record in split.select_columns([source.text_field]):
            yield _field(record, source.text_field, str(source.root))


def _optional(module: str, package: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f'{path}: reading it needs the package {package!r}, which is not installed; pip install "atoll[hf]", '
            "or convert the corpus to .jsonl or .txt"
        ) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror or error}); check the file and its permissions")
