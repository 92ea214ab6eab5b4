"""What tests share is the installed package `millrace_testing`: nothing else is put on Python's path by tests."""

import ast
from collections.abc import Iterator
from pathlib import Path

from millrace_testing import syntax

ROOT = Path(__file__).resolve().parents[2]


def _path_changes(path: Path) -> Iterator[str]:
    """Yield calls of `sys.path.insert` and the like, modules loaded by their path, imports of test modules."""
    for node in ast.walk(syntax.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name("sys"), attr="path"))):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: changes sys.path"
            case ast.Call(func=ast.Attribute(attr="spec_from_file_location")):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: loads a module by its path"
            case ast.ImportFrom(module=str(name)) if name.startswith(("test_", "conftest")):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: imports {name}"


def test_tests_share_modules_by_package() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if "fixtures" not in path.parts]
    assert len(files) > 300
    assert not [found for path in files for found in _path_changes(path)]


def test_the_package_holds_no_tests() -> None:
    assert not list((ROOT / "tests" / "support").rglob("test_*.py"))
