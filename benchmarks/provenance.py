"""Which files a result depends on, and which of them have changed since it was measured.

A raw file keeps the path and the digest of every file that its benchmark's `run` reaches by imports, so that its age is
known without git's history. Comments, docstrings and formatting are not in a digest, nor is what only writes the page.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"atoll": "src/atoll", "benchmarks": "benchmarks", "tests": "tests"}
"""Where the packages that can be depended on are; what else is imported is in `constraints.txt`."""

Read = Callable[[str], str | None]
"""Path -> text; None if there is no such file."""

Raw = Mapping[str, Any]
Name = tuple[str, str | None]
"""A module, and a name that is imported from it; None for the module itself."""


@cache
def read(path: str) -> str | None:
    """A file of the working tree."""
    file = ROOT / path
    return file.read_text(encoding="utf-8") if file.is_file() else None


def load(name: str) -> Raw:
    """The raw file of a benchmark."""
    return json.loads((ROOT / raw_path(name)).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def raw_path(name: str) -> str:
    return f"benchmarks/{name}/results/latest.json"


def depends(name: str, read: Read = read) -> dict[str, str]:
    """Path -> digest of all files that a benchmark's numbers depend on."""
    return {path: digest(path, read(path) or "") for path in sorted(closure(f"benchmarks.{name}.bench", read))}


def changed(depended: Mapping[str, str], read: Read = read) -> list[str]:
    """The files that are other ones now, or gone."""
    return [path for path, was in depended.items() if (text := read(path)) is None or digest(path, text) != was]


def uncommitted(paths: Iterable[str]) -> list[str]:
    """Those of the files that are not as the last commit has them; all of them where there is no git."""
    paths = list(paths)
    try:
        command = ["git", "status", "--porcelain", "--", *paths]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return paths
    return [line[3:] for line in done.stdout.splitlines()]


@cache
def digest(path: str, text: str) -> str:
    """What a file says, in 16 digits; of a `bench.py` the part that `run` reaches."""
    if path.endswith(".py"):
        text = _shape(_counted(path, text))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def closure(module: str, read: Read = read) -> set[str]:
    """The files of a module and of all that it imports, at whatever depth and however late.

    A name that a package's `__init__` re-exports leads to the module that makes it, not to all that the package has,
    and a value that is written there (a version) leads nowhere. A module that is started as a process
    (`[..., "-m", "atoll", ...]`) counts as one that is imported.
    """
    found: set[str] = set()
    seen: set[Name] = set()
    waiting: list[Name] = [(module, None)]
    while waiting:
        home, name = waiting.pop()
        if (home, name) in seen:
            continue
        seen.add((home, name))
        if name is not None and _file_of(f"{home}.{name}", read):
            waiting.append((f"{home}.{name}", None))
            continue
        path = _file_of(home, read)
        if path is None:
            continue
        found.add(path)
        file = _scan(path, read(path) or "")
        if path.endswith("__init__.py") and name in file.homes:
            waiting.append(file.homes[name])
        elif path.endswith("__init__.py") and name in file.values:
            continue
        else:
            waiting += file.imports
            beside = [f"{path.rpartition('/')[0]}/{word}" for word in file.words]
            found |= {each for each in beside if read(each) is not None}
    return found


class _File(NamedTuple):
    homes: Mapping[str | None, Name]
    """By each name that an import binds: where that comes from."""
    values: frozenset[str | None]
    """Names that are assigned at the top."""
    imports: Sequence[Name]
    """Those that count."""
    words: Sequence[str]
    """Strings that could name a file that is no module."""


@cache
def _scan(path: str, text: str) -> _File:
    counted = [node for each in _counted(path, text) for node in ast.walk(each)]
    words = [node.value for node in counted if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    tree = ast.parse(text)
    assigned = [each for each in tree.body if isinstance(each, ast.Assign | ast.AnnAssign)]
    return _File(
        {bound: (home, name) for bound, home, name in _imports(ast.walk(tree))},
        frozenset(name for each in assigned for name in _bound(each)),
        [*((home, name) for _, home, name in _imports(counted)), *((home, None) for home in _started(counted))],
        [word for word in words if re.fullmatch(r"\w+\.(?!md\b)\w+", word)],
    )


def _started(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The modules that commands start: what follows "-m" in a list. Of a package that is its `__main__`."""
    for node in nodes:
        if not isinstance(node, ast.List | ast.Tuple):
            continue
        values = [each.value if isinstance(each, ast.Constant) else None for each in node.elts]
        for option, module in pairwise(values):
            if option == "-m" and isinstance(module, str):
                yield from (module, f"{module}.__main__")


def _file_of(module: str, read: Read) -> str | None:
    package, *rest = module.split(".")
    if package not in FOLDERS:
        return None
    path = "/".join([FOLDERS[package], *rest])
    return next((file for file in (f"{path}.py", f"{path}/__init__.py") if read(file) is not None), None)


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str, str | None]]:
    """Of every import: the name that it binds, the module, and the name in it."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((each.asname or each.name, each.name, None) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((each.asname or each.name, node.module, each.name) for each in node.names)


@cache
def _counted(path: str, text: str) -> list[ast.stmt]:
    """The statements that count: without those for type checkers, and of a `bench.py` those that `run` needs."""
    body = ast.parse(text).body
    if path.endswith("__init__.py"):
        return body
    body = [each for each in body if not (isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING")]
    if not path.endswith("/bench.py"):
        return body
    needed: set[str] = set()
    waiting = ["run"]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += [used for each in body if name in _bound(each) for used in _used(each)]
    return [kept for each in body if (kept := _cut(each, needed)) is not None]


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement at the top of a module makes."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(each.asname or each.name).partition(".")[0] for each in statement.names}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _used(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _cut(statement: ast.stmt, needed: set[str]) -> ast.stmt | None:
    """A statement if it makes one of the names, an import with those of its names alone."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        names = [each for each in statement.names if (each.asname or each.name).partition(".")[0] in needed]
        module = {"module": statement.module, "level": 0} if isinstance(statement, ast.ImportFrom) else {}
        return type(statement)(names=names, **module) if names else None
    return statement if _bound(statement) & needed else None


def _shape(node: object) -> str:
    """A syntax tree in words, without bare strings, and the same under every version of Python."""
    if isinstance(node, list):
        kept = [each for each in node if not (isinstance(each, ast.Expr) and _is_string(each.value))]
        return f"[{','.join(map(_shape, kept))}]"
    if isinstance(node, ast.JoinedStr):
        # From 3.12 on, parts that are joined over several lines end in an empty one.
        return f"JoinedStr(values={_shape([each for each in node.values if not _is_empty(each)])})"
    if isinstance(node, ast.AST):
        # Newer versions have more fields, which are empty where the older ones know no syntax for them.
        fields = [
            f"{name}={_shape(value)}" for name, value in ast.iter_fields(node) if value is not None and value != []
        ]
        return f"{type(node).__name__}({','.join(fields)})"
    return repr(node)


def _is_empty(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == ""


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
