"""Where rollouts, rewards and advantages are read and written, 0 is not taken for a number that is absent."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import millrace

ROOT = Path(millrace.__file__).parent
ROOMS = ("algorithms", "env_server/adapters", "rollouts")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
NUMBERS = ("float", "int")


def optional_numbers() -> set[str]:
    """Names of fields and arguments that are a number or None, anywhere in these rooms."""
    found: set[str] = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_optional(node.annotation):
                found.add(node.target.id)
            if isinstance(node, ast.arg) and node.annotation is not None and is_optional(node.annotation):
                found.add(node.arg)
            if isinstance(node, ast.FunctionDef) and node.returns is not None and is_optional(node.returns):
                found.add(node.name)
    return found


def is_optional(annotation: ast.expr) -> bool:
    words = [part.strip() for part in ast.unparse(annotation).strip("'\"").split("|")]
    return "None" in words and any(word in NUMBERS for word in words)


def truths(tree: ast.AST) -> Iterator[ast.expr]:
    """Every expression of which only the truth counts, or that another one stands in for where it is false."""
    for node in ast.walk(tree):
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


def mistaken(source: str, names: set[str]) -> list[str]:
    """What of a module takes 0 for absent: an optional number's truth, and a number that stands in for one."""
    tree = ast.parse(source)
    found = [
        f"{each.lineno}: {ast.unparse(each)}"
        for each in truths(tree)
        if (isinstance(each, ast.Attribute) and each.attr in names) or (isinstance(each, ast.Name) and each.id in names)
    ]
    for node in ast.walk(tree):
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
    assert not mistaken(path.read_text(), optional_numbers()), "say `is None`, and what absent means"


@pytest.mark.parametrize(
    "line",
    [
        "x = turn.reward or 0.0",
        "x = value or 1",
        "any(turn.reward for turn in turns)",
        "if reward: pass",
        "y = [turn for turn in turns if turn.reward]",
        "z = 1 if not turn.reward else 2",
        "bool(reward)",
    ],
)
def test_what_takes_0_for_absent_is_seen(line: str) -> None:
    assert mistaken(line, {"reward"})


def test_what_tells_them_apart_is_let_through() -> None:
    lines = "x = 0.0 if turn.reward is None else turn.reward\nif reward is not None and turn.reward > 0: pass"
    assert not mistaken(lines, {"reward"})
