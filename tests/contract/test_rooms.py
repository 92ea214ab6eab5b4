"""The layout of the packages: none is crowded, nothing imports in a circle, and arrows between rooms run down."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import millrace
from millrace_testing import syntax

ROOT = Path(millrace.__file__).parent
MOST_MODULES = 20
GENERATED = ("millrace.v1", "millrace.internal")
Graph = Mapping[str, set[str]]


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name: path for path in ROOT.rglob("*.py") if not (name := _name(path)).startswith(GENERATED)}
PACKAGES = sorted(name for name, path in MODULES.items() if path.name == "__init__.py")


def _imports(name: str) -> set[str]:
    """Return modules that a module names in any import, also in one that waits inside a function or is for types
    alone.
    """
    found: set[str] = set()
    for node in syntax.walk(syntax.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {each for each in found if each in MODULES and each != name}


@functools.cache
def _graph() -> Graph:
    """Of all modules. Every process of a test run imports this file, and only one of them needs what it reads."""
    return {name: _imports(name) for name in MODULES}


def _circles(graph: Graph) -> list[list[str]]:
    """Return groups of nodes that reach each other (Tarjan's strongly connected components), each sorted."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def _room(package: str, module: str) -> str:
    """Return what of a package holds a module: a sub-package, or the module itself."""
    return ".".join(module.split(".")[: package.count(".") + 2])


def _inside(package: str) -> Iterator[str]:
    return (name for name in MODULES if name.startswith(f"{package}."))


def _rooms(package: str) -> Graph:
    """Return which rooms of a package import which; the package's own face is none of them."""
    graph: defaultdict[str, set[str]] = defaultdict(set)
    for name in _inside(package):
        ours = _room(package, name)
        theirs = {_room(package, each) for each in _graph()[name] if each.startswith(f"{package}.")}
        graph[ours] |= theirs - {ours}
    return graph


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_not_crowded(package: str) -> None:
    modules = [name for name in _inside(package) if _room(package, name) == name and name not in PACKAGES]
    assert len(modules) <= MOST_MODULES, f"{package} has {len(modules)} modules: give those of one purpose a package"


def test_the_architecture_names_every_room() -> None:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text().partition("\n## Rooms\n")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    assert len(rows) > 10
    rooms = [name.split(".")[1:] for name in PACKAGES if name.count(".") == 2]
    assert not [f"{package}.{room}" for package, room in rooms if f"`{room}`" not in rows.get(package, "")]


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    assert _circles(_graph()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_between_the_rooms_of_a_package_run_down(package: str) -> None:
    assert _circles(_rooms(package)) == []


def test_a_circle_would_be_found() -> None:
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
