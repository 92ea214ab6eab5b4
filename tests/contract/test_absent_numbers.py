"""Where rollouts, rewards and advantages are read and written, 0 is not taken for a number that is absent."""

import ast
import functools
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import millrace
from millrace_testing import syntax

ROOT = Path(millrace.__file__).parent
ROOMS = ("algorithms", "env_server", "rollouts", "orchestrator/drive", "orchestrator/play", "trainer/losses")
ROOMS += ("trainer/learning", "readers/dashboard", "readers/exports", "runlog/events")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
NUMBERS = ("float", "int")


@functools.cache
def optional_numbers(room: str) -> frozenset[str]:
    """Return names of fields and of what is called that are a number or None, in a room and in what all of them
    read.
    """
    files = [path for path in FILES if path.relative_to(ROOT).parts[0] in (room, "rollouts")]
    return frozenset(name for path in files for name in declared(syntax.parse(path.read_text())))


def declared(tree: ast.Module) -> Iterator[str]:
    for kind in (node for node in syntax.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in kind.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_optional(node.annotation):
                yield node.target.id
    for node in syntax.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns and is_optional(node.returns):
            yield node.name


def own_names(tree: ast.Module) -> set[str]:
    """Return names of variables and arguments of one module that are a number or None."""
    found: set[str] = set()
    for node in syntax.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_optional(node.annotation):
            found.add(node.target.id)
        if isinstance(node, ast.arg) and node.annotation is not None and is_optional(node.annotation):
            found.add(node.arg)
    return found


def is_optional(annotation: ast.expr) -> bool:
    if not any(isinstance(each, ast.Constant) and isinstance(each.value, str | None) for each in ast.walk(annotation)):
        return False
    words = [part.strip() for part in ast.unparse(annotation).strip("'\"").split("|")]
    return "None" in words and any(word in NUMBERS for word in words)


def truths(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield every expression of which only the truth counts, or that another one replaces where it is false."""
    for node in syntax.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            yield node.test
        elif isinstance(node, ast.BoolOp):
            yield from node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.operand
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("any", "all", "bool"):
            yield from (each.elt if isinstance(each, ast.GeneratorExp | ast.ListComp) else each for each in node.args)


def name_of(node: ast.expr) -> str:
    """Return what an expression reads: a field, or what a function or a method returns."""
    if isinstance(node, ast.Call):
        node = node.func
        return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return node.attr if isinstance(node, ast.Attribute) else ""


def mistaken(source: str, names: Collection[str]) -> list[str]:
    """Return what of a module takes 0 for absent: an optional number's truth, and a number that replaces one."""
    tree = syntax.parse(source)
    own = own_names(tree)
    found = [
        f"{each.lineno}: {ast.unparse(each)}"
        for each in truths(tree)
        if name_of(each) in names or (isinstance(each, ast.Name) and each.id in own)
    ]
    for node in syntax.walk(tree):
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            last = node.values[-1]
            if (
                isinstance(last, ast.Constant)
                and isinstance(last.value, int | float)
                and not isinstance(last.value, bool)
            ):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_0_is_not_absent(path: Path) -> None:
    names = optional_numbers(path.relative_to(ROOT).parts[0])
    assert not mistaken(path.read_text(), names), "say `is None`, and what absent means"


@pytest.mark.parametrize(
    "line",
    [
        "x = turn.reward or 0.0",
        "x = value or 1",
        "any(turn.reward for turn in turns)",
        "def f(reward: float | None) -> None:\n    if reward: pass",
        "if turn.reward(): pass",
        "y = [turn for turn in turns if turn.reward]",
        "z = 1 if not turn.reward else 2",
        "bool(turn.reward)",
    ],
)
def test_what_takes_0_for_absent_is_seen(line: str) -> None:
    assert mistaken(line, {"reward"})


def test_what_tells_them_apart_is_let_through() -> None:
    lines = "x = 0.0 if turn.reward is None else turn.reward\nif reward is not None and turn.reward > 0: pass"
    assert not mistaken(lines, {"reward"})
