"""Which damage is done: a sample of small mistakes, spread over the modules and the same in every run.

Changes are cosmic-ray's operators, and three of its kind that it lacks. A place is known by its words and not by its
line, and places are drawn by a hash: code that changes elsewhere draws the same.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Keyword

SEED = "atoll"
EACH = 160
"""One mutant for so many lines of a module, and at least one."""

WIDTH = 160
"""Letters of a line that are kept."""


class DropStatement(Operator):
    """Leaves out a call, a refusal, or what writes to something that stays."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """The statement, where it is one of them."""
        if node.type == "simple_stmt" and _can_be_dropped(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Write `pass` for it."""
        first = node.children[0]
        node.children[0] = Keyword("pass", first.start_pos, prefix=first.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        """None: cosmic-ray's own tests read them."""
        return ()


class SwapArguments(Operator):
    """Exchanges the first two arguments of a call."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """The arguments, where their order matters."""
        if node.type == "trailer" and node.children[0].value == "(" and node.children[1].type == "arglist":
            first, second = (*node.children[1].children[:3:2], None)[:2]
            called = node.get_previous_leaf().value
            if called in ("max", "min", "isinstance", "zip") or second is None:
                return
            if (
                not {first.type, second.type} & {"argument", "operator"}
                and first.get_code().strip() != second.get_code().strip()
            ):
                yield first.start_pos, second.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """The second before the first."""
        arguments = node.children[1].children
        arguments[0], arguments[2] = arguments[2], arguments[0]
        return node

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        """None: cosmic-ray's own tests read them."""
        return ()


class InvertMembership(Operator):
    """`in` for `not in`, and the other way round."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """The word."""
        if node.type == "comparison" and node.children[1].get_code().split() in (["in"], ["not", "in"]):
            yield node.children[1].start_pos, node.children[1].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """The other word."""
        word = node.children[1]
        other = "not in" if word.get_code().split() == ["in"] else "in"
        node.children[1] = Keyword(other, word.start_pos, prefix=" ")
        return node

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        """None: cosmic-ray's own tests read them."""
        return ()


KINDS = {
    "comparison": (
        *(f"ReplaceComparisonOperator_{pair}" for pair in ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt")),
        *(f"ReplaceComparisonOperator_{pair}" for pair in ("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")),
        InvertMembership,
    ),
    "arithmetic": (
        *(f"ReplaceBinaryOperator_{pair}" for pair in ("Add_Sub", "Sub_Add", "Mul_FloorDiv", "Div_Mul")),
        *(f"ReplaceBinaryOperator_{pair}" for pair in ("FloorDiv_Mul", "Mod_FloorDiv")),
    ),
    "number": ("NumberReplacer",),
    "condition": (
        *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
        "ReplaceUnaryOperator_Delete_Not",
    ),
    "loop": ("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
    "dropped": (DropStatement,),
    "swapped": (SwapArguments,),
}


@dataclass(frozen=True)
class Mutant:
    """One change of one module. `was` and `now` are the words of the lines that differ."""

    module: str
    within: str
    line: int
    kind: str
    was: str
    now: str
    source: str

    @property
    def name(self) -> str:
        """What it is known by as long as the words stay."""
        return f"{self.module}:{self.within}: {self.was} -> {self.now}"


def sample(module: str, source: str, excluded: Callable[[Mutant], bool]) -> list[Mutant]:
    """Mutants of one module, never two of one line. Empty where nothing is decided."""
    wanted = max(1, round(len(source.splitlines()) / EACH))
    found: list[Mutant] = []
    for place in sorted(_places(module, source), key=_draw):
        if len(found) == wanted:
            break
        if place.line in {mutant.line for mutant in found}:
            continue
        mutant = _mutated(place, source)
        if mutant is not None and not excluded(mutant):
            found.append(mutant)
    return sorted(found, key=lambda mutant: mutant.line)


@dataclass(frozen=True)
class _Place:
    module: str
    within: str
    line: int
    kind: str
    words: str
    operator: type[Operator]
    occurrence: int
    repeated: int


def _places(module: str, source: str) -> Iterator[_Place]:
    """Every change that could be made, one draw each."""
    tree = get_ast(source)
    nodes = list(ast_nodes(tree))
    seen: dict[tuple[str, ...], int] = {}
    for kind, names in KINDS.items():
        for name in names:
            operator = OperatorProvider()[name] if isinstance(name, str) else name
            positions = (start for node in nodes for start, _ in operator().mutation_positions(node))
            for occurrence, start in enumerate(positions):
                leaf = tree.get_leaf_for_position(start, include_prefixes=True)
                words = source.splitlines()[start[0] - 1].strip()
                within = _within(leaf)
                key = (within, operator.__name__, words)
                seen[key] = seen.get(key, -1) + 1
                if not _says_nothing(leaf):
                    yield _Place(module, within, start[0], kind, words, operator, occurrence, seen[key])


def _draw(place: _Place) -> str:
    words = (SEED, place.module, place.within, place.operator.__name__, place.words, place.repeated)
    return hashlib.sha256("\n".join(map(str, words)).encode()).hexdigest()


def _mutated(place: _Place, source: str) -> Mutant | None:
    """The change made, or None where it is none or is no Python."""
    code = mutate_code(source, place.operator(), place.occurrence)
    if code is None:
        return None
    try:
        compile(code, place.module, "exec")
    except SyntaxError:
        return None
    before, after = source.splitlines(), code.splitlines()
    blocks = difflib.SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes()
    changed = [each for each in blocks if each[0] != "equal"]
    if not changed:
        return None
    was = _words(before[changed[0][1] : changed[-1][2]])
    now = _words(after[changed[0][3] : changed[-1][4]])
    return Mutant(place.module, place.within, changed[0][1] + 1, place.kind, was, now, code)


def _words(lines: Sequence[str]) -> str:
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


def _can_be_dropped(node: Any) -> bool:
    match node.type:
        case "raise_stmt":
            return True
        case "atom_expr" | "power":
            last = node.children[-1]
            return bool(last.type == "trailer" and last.children[0].value == "(")
        case "expr_stmt":
            return node.children[0].type in ("atom_expr", "power") or _is_augmented(node.children[1])
    return False


def _is_augmented(node: Any) -> bool:
    return node.type == "operator" and node.value not in ("=", ":")


def _says_nothing(leaf: Any) -> bool:
    """Annotations, decorators, assertions for the type checker, words of errors, signs of a signature, strings."""
    child, node = leaf, leaf.parent
    while node is not None:
        match node.type:
            case "annassign":
                if child is node.children[1]:
                    return True
            case "tfpdef" | "decorator" | "assert_stmt" | "import_from" | "import_name":
                return True
            case "raise_stmt":
                return leaf is not node.children[0]
            case "parameters" | "lambdef":
                if child.type == "operator":
                    return True
            case "funcdef":
                if node.annotation is child:
                    return True
            case "arith_expr" | "term":
                if any(each.type in ("string", "strings", "fstring") for each in node.children):
                    return True
            case "if_stmt":
                if child is node.children[1] and node.children[1].get_code().strip() == "TYPE_CHECKING":
                    return True
        child, node = node, node.parent
    return False


def _within(leaf: Any) -> str:
    names = []
    node = leaf.parent
    while node is not None:
        if node.type in ("funcdef", "classdef"):
            names.append(node.name.value)
        node = node.parent
    return ".".join(reversed(names))
