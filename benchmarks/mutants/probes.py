"""Which functions does a test run, in any of its processes? A copy of the source in which every function says so.

A function's first statement becomes `at(n)`. In each process the first call of a test appends 8 bytes to a file: the
number of the test, which `warm` announces, and that of the function. Compiled functions are left alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

RAN = "ran"
"""File of a tree with an entry of 8 bytes for each function of each test."""

_SHIFT = 20
_PROBE = f'''
import mmap, os
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
with open(os.path.join(_ROOT, "now"), "rb") as _file:
    _NOW = memoryview(mmap.mmap(_file.fileno(), 4, prot=mmap.PROT_READ)).cast("I")
_RAN, _OPEN, _WRITE, _CLOSE = os.path.join(_ROOT, "{RAN}"), os.open, os.write, os.close
_MODE = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_seen = set()

def at(number):
    key = _NOW[0] << {_SHIFT} | number
    if key not in _seen:
        _seen.add(key)
        descriptor = _OPEN(_RAN, _MODE)
        _WRITE(descriptor, key.to_bytes(8, "little"))
        _CLOSE(descriptor)
'''


def probe(root: Path) -> list[str]:
    """Rewrite src/atoll below `root`. Return the functions by number, as `module:Class.method`."""
    names: list[str] = []
    for path in sorted((root / "src" / "atoll").rglob("*.py")):
        module = path.relative_to(root / "src" / "atoll").as_posix()
        path.write_text(_probed(path.read_text(encoding="utf-8"), module, names), encoding="utf-8")
    (root / "src" / "_atoll_probe.py").write_text(_PROBE, encoding="utf-8")
    (root / "now").write_bytes(bytes(4))
    return names


def ran(root: Path, names: list[str]) -> dict[int, list[str]]:
    """Return the functions that each test has run, by the number of the test; 0 is the import."""
    found: dict[int, set[str]] = {}
    content = (root / RAN).read_bytes() if (root / RAN).is_file() else b""
    for start in range(0, len(content) - 7, 8):
        key = int.from_bytes(content[start : start + 8], "little")
        found.setdefault(key >> _SHIFT, set()).add(names[key & ((1 << _SHIFT) - 1)])
    (root / RAN).unlink(missing_ok=True)
    return {number: sorted(functions) for number, functions in found.items()}


def _probed(source: str, module: str, names: list[str]) -> str:
    tree = ast.parse(source)
    for within, function in _functions(tree, ()):
        if not _is_compiled(function):
            function.body.insert(_after_docstring(function.body), ast.parse(f"_atoll_at({len(names)})").body[0])
            names.append(f"{module}:{'.'.join(within)}")
    at = _after_docstring(tree.body)
    while at < len(tree.body) and isinstance(first := tree.body[at], ast.ImportFrom) and first.module == "__future__":
        at += 1
    tree.body.insert(at, ast.parse("from _atoll_probe import at as _atoll_at").body[0])
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _functions(node: ast.AST, within: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        inner = within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*within, child.name)
        if isinstance(child, ast.FunctionDef):
            yield inner, child
        yield from _functions(child, inner)


def _is_compiled(function: ast.FunctionDef) -> bool:
    return any(word in ast.unparse(each) for each in function.decorator_list for word in ("compile", "kernel", "jit"))


def _after_docstring(body: list[ast.stmt]) -> int:
    first = body[0] if body else None
    return int(isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant))
