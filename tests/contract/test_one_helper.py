"""Two things that every service needs are written once: how a delay grows, and waiting for whichever comes first."""

import ast
from pathlib import Path

import pytest

from millrace_testing import syntax

ROOT = Path(__file__).parents[2] / "services" / "millrace"


def _names(node: ast.AST) -> set[str]:
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def _has(node: ast.AST, *operators: type[ast.operator]) -> bool:
    return any(isinstance(each, ast.BinOp) and isinstance(each.op, operators) for each in ast.walk(node))


def _is_growing_delay(node: ast.AST) -> bool:
    """Return whether it is "some seconds times a power" or "that many seconds times something, but no more than
    those".
    """
    is_power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and _has(node, ast.Pow)
    is_minimum = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "min"
    is_limited = is_minimum and _has(node, ast.Mult)
    return (is_power or is_limited) and any(name.lower().endswith("_s") for name in _names(node))


def _is_race(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="FIRST_COMPLETED") | ast.Name(id="FIRST_COMPLETED"):
            return True
        case _:
            return False


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Return every module of the services, parsed once."""
    return {path.relative_to(ROOT).as_posix(): syntax.parse(path.read_text()) for path in ROOT.rglob("*.py")}


@pytest.mark.parametrize(("home", "is_written"), [("race.py", _is_race), ("backoff.py", _is_growing_delay)])
def test_it_is_written_in_its_home_alone(home: str, is_written, trees: dict[str, ast.Module]) -> None:  # type: ignore[no-untyped-def]
    found = {name for name, tree in trees.items() if any(is_written(node) for node in syntax.walk(tree))}
    assert found == {home}, f"use `millrace.{home.removesuffix('.py')}`"


@pytest.mark.parametrize(
    "line",
    [
        "delay_s = min(2 * delay_s, _MAX_DELAY_S)",
        "backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)",
        "delay_s = min(_BACKOFF_S[1], _BACKOFF_S[0] * 2**attempt) * random.uniform(0.7, 1.3)",
        "rest_s = min(_GROWTH * rest_s, last_s)",
        "at = FIRST_S * 2 ** failures",
    ],
)
def test_a_delay_that_grows_by_hand_is_seen(line: str) -> None:
    assert any(_is_growing_delay(node) for node in syntax.walk(syntax.parse(line)))
