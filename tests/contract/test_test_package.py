"""What tests share is the installed package `millrace_testing`: nothing else is put on Python's path by tests."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_CHANGE = re.compile(r"\bsys\.path\.|\bspec_from_file_location\b|\bfrom (?:test_|conftest)")
"""What a module has that may change the path: to parse all tests takes four seconds."""


def _path_changes(text: str) -> Iterator[str]:
    """Yield calls of `sys.path.insert` and the like, modules loaded by their path, imports of test modules."""
    for node in ast.walk(ast.parse(text if MAY_CHANGE.search(text) else "")):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name("sys"), attr="path"))):
                yield f"{node.lineno}: changes sys.path"
            case ast.Call(func=ast.Attribute(attr="spec_from_file_location")):
                yield f"{node.lineno}: loads a module by its path"
            case ast.ImportFrom(module=str(name)) if name.startswith(("test_", "conftest")):
                yield f"{node.lineno}: imports {name}"


def test_tests_share_modules_by_package() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if "fixtures" not in path.parts]
    assert len(files) > 300
    assert not [f"{path.relative_to(ROOT)}:{found}" for path in files for found in _path_changes(path.read_text())]


@pytest.mark.parametrize(
    "line",
    [
        "sys.path.insert(0, 'a')",
        "importlib.util.spec_from_file_location('a', 'a.py')",
        "from test_names import a",
        "from conftest import a",
    ],
)
def test_a_change_of_the_path_is_seen(line: str) -> None:
    assert list(_path_changes(f"def f():\n    {line}\n"))


def test_the_package_holds_no_tests() -> None:
    assert not list((ROOT / "tests" / "support").rglob("test_*.py"))
