"""`MILLRACE_CONFIG__a__b=value`: config values from environment variables."""

from collections.abc import Mapping
from typing import Any

from millrace.config.paths import Path, dotted
from millrace.config.sources import Origin, Source, Strength
from millrace.config.text import NotJsonError, free_value, typed_value
from millrace.config.tree import Kind, Node
from millrace.errors import Violation

PREFIX = "MILLRACE_CONFIG__"
WHOLE_LISTS = 'lists are replaced as a whole; give the list as JSON, such as \'[{"id": "reverse-text"}]\''


def read_environment(env: Mapping[str, str], schema: Node) -> tuple[Source, list[Violation]]:
    """The values of all `MILLRACE_CONFIG__*` variables. Keys may be in upper case; free tables keep theirs."""
    tree: dict[str, Any] = {}
    names: dict[Path, str] = {}
    violations: list[Violation] = []
    for variable in sorted(name for name in env if name.startswith(PREFIX)):
        parts = variable[len(PREFIX) :].split("__")
        if not all(parts):
            message = f"is no key; write {PREFIX}trainer__optim__lr for trainer.optim.lr"
            violations.append(Violation(field=variable, message=message, source=variable))
            continue
        path, node, is_free = spell(parts, schema)
        if below_list(path, schema):
            violations.append(Violation(field=dotted(path), value=None, message=WHOLE_LISTS, source=variable))
            continue
        try:
            value = free_value(env[variable]) if is_free or node is None else typed_value(env[variable], node)
        except NotJsonError as error:
            violations.append(Violation(field=dotted(path), value=env[variable], message=str(error), source=variable))
            continue
        if not put(tree, path, value):
            message = "is set here and as a part of another variable; keep one of them"
            violations.append(Violation(field=dotted(path), value=env[variable], message=message, source=variable))
            continue
        names[path] = variable
    return Source(tree=tree, origin=Origin(label="environment", names=names, strength=Strength.ENVIRONMENT)), violations


def spell(parts: list[str], schema: Node) -> tuple[tuple[str, ...], Node | None, bool]:
    """The path that was meant by parts in upper case or with dashes, its node, and whether it lies in a free table."""
    path: list[str] = []
    node: Node | None = schema
    for part in parts:
        if node is not None and node.kind is Kind.FREE_TABLE:
            path.append(part)
            continue
        plain = part.lower().replace("-", "_")
        path.append(plain)
        node = node.child(plain) if node else None
    is_free = node is not None and node.kind is Kind.FREE_TABLE and len(path) > len(node.path)
    return tuple(path), node, is_free


def below_list(path: tuple[str, ...], schema: Node) -> bool:
    """Whether a path goes into a list of tables."""
    above = (schema.find(path[:length]) for length in range(1, len(path)))
    return any(node is not None and node.kind is Kind.SECTION_LIST for node in above)


def put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> bool:
    """Set a value in nested tables; False if a value that is no table is in the way."""
    here = tree
    for key in path[:-1]:
        below = here.setdefault(key, {})
        if not isinstance(below, dict):
            return False
        here = below
    if isinstance(here.get(path[-1]), dict) and isinstance(value, dict):
        return all(put(here[path[-1]], (key,), item) for key, item in value.items())
    here[path[-1]] = value
    return True
