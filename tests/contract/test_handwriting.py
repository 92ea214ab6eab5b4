"""One handwriting, as far as a linter does not see it: loggers, the mood of docstrings, private names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVICES = Path(__file__).parents[2] / "services" / "millrace"
# What follows a verb and not a plural noun: "Reads a file" is the third person, "Reads of a file" is not.
OBJECT = re.compile(r"[A-Z][a-z]+,? (?:an?|the|its?|what|all|every|each|this|one|them|for|with the)\b")


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SERVICES.rglob("*.py")):
        if not path.stem.endswith(("_pb2", "_pb2_grpc")):
            yield str(path.relative_to(SERVICES)), ast.parse(path.read_text())


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and docstring of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            yield node.lineno, text


def _first_word(text: str) -> str:
    return found[0] if (found := re.match(r"[A-Z][a-z]+\b(?!['’-])", text)) else ""


def _imperative(verb: str) -> set[str]:
    """What the imperative of a verb in the third person may be: `Carries` → Carry, Carrie; `Has` → Have."""
    irregular = {"Has": "Have", "Is": "Be", "Does": "Do", "Goes": "Go"}
    if verb in irregular:
        return {irregular[verb]}
    if not verb.endswith("s") or verb.endswith("ss"):
        return set()
    return {verb[:-1], verb[:-2], f"{verb[:-3]}y"} - {""}


def test_loggers_are_called_logger() -> None:
    wrong = [
        f"{module}:{node.lineno}"
        for module, tree in _modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value) in ("logging.getLogger(__name__)", "getLogger(__name__)")
        and ast.unparse(node.targets[0]) != "logger"
    ]
    assert not wrong, f"write `logger = logging.getLogger(__name__)`: {wrong}"


def test_logging_is_the_standard_library_s() -> None:
    wrong = [
        f"{module}:{node.lineno}"
        for module, tree in _modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name in ("logging", "getLogger") for alias in node.names)
    ]
    assert not wrong, f"write `import logging`, and take `setup` and `bind` from `millrace.telemetry.logging`: {wrong}"


def test_docstrings_are_imperative() -> None:
    texts = [(f"{module}:{line}", text) for module, tree in _modules() for line, text in _docstrings(tree)]
    begun = {_first_word(text) for _, text in texts} | {"Return", "Raise"}
    third_person = [
        f"{place}: {text.splitlines()[0]}"
        for place, text in texts
        if OBJECT.match(text) and _imperative(_first_word(text)) & begun
    ]
    assert not third_person, "begin with the imperative (`Read`, not `Reads`):\n" + "\n".join(third_person)


@pytest.mark.parametrize(
    ("verb", "imperative"), [("Reads", "Read"), ("Carries", "Carry"), ("Pushes", "Push"), ("Has", "Have")]
)
def test_the_third_person_is_known(verb: str, imperative: str) -> None:
    assert imperative in _imperative(verb)


def test_private_names_stay_in_their_module() -> None:
    taken = [
        f"{module}:{node.lineno}: {alias.name} of {node.module}"
        for module, tree in _modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("millrace")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert not taken, f"what another module uses has a public name: {taken}"


def test_broad_excepts_say_why() -> None:
    bare = [
        f"{path.relative_to(SERVICES)}:{number}"
        for path in sorted(SERVICES.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.match(r"\s*except(:| (Base)?Exception\b(?!Group))", line) and " # " not in line
    ]
    assert not bare, f"say in a comment which edge this is: {bare}"
