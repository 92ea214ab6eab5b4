"""Where config values come from, and how values of several sources become one tree.

A source is a tree of raw values with an ``Origin`` that can say where each of them is written. Sources are normalised
one by one (aliases renamed, unknown keys reported and left out) and then merged: tables key by key, all else replaced.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from millrace.config.paths import Path, dotted
from millrace.config.redact import shown
from millrace.config.section import as_tree
from millrace.config.suggest import unknown_key_message
from millrace.config.tree import Kind, Node
from millrace.errors import Violation

MAX_SECTIONS = 1024
"""Most tables of one list, such as environments."""
MAX_UNKNOWN_KEYS = 200
"""Most unknown keys that are named: what each was meant to be takes a while to find."""


class Strength(IntEnum):
    """How strong the kinds of sources are; among files, and where keys are not shared, the later one wins."""

    ENVIRONMENT = 0
    FILE = 1
    COMMAND_LINE = 2


@dataclass(slots=True, kw_only=True)
class Origin:
    """Where the values of one source are written.

    ``label`` names the source; ``lines`` holds line numbers of a file by path as written; ``names`` holds a label per
    path where each value has its own (a flag, a variable); ``prefix`` is where in the config a file was put;
    ``written`` maps paths whose keys were aliases to the paths as they were written; ``strength`` is the source's kind.
    """

    label: str
    lines: Mapping[Path, int] = field(default_factory=dict)
    names: Mapping[Path, str] = field(default_factory=dict)
    prefix: Path = ()
    written: dict[Path, Path] = field(default_factory=dict)
    strength: Strength = Strength.FILE

    def locate(self, path: Path) -> str:
        """The place of the value at a path: `rl.toml:12`, `command line (--max-steps)`, or the label alone."""
        for length in range(len(path), -1, -1):
            spelled = self._spelled(path[:length])
            if spelled in self.names:
                return self.names[spelled]
            if len(spelled) >= len(self.prefix) and (line := self.lines.get(spelled[len(self.prefix) :])):
                return f"{self.label}:{line}"
        return self.label

    def _spelled(self, path: Path) -> Path:
        """The path with its keys as the source writes them."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.written:
                return (*self.written[path[:length]], *path[length:])
        return path


@dataclass(slots=True, kw_only=True)
class Source:
    """Raw values and where they are written."""

    tree: dict[str, Any]
    origin: Origin


@dataclass(slots=True, kw_only=True)
class Merged:
    """The tree that all sources make together; ``origins`` has one entry per leaf, list and replaced value.

    ``suspects`` are keys that an unknown key was probably meant to be: messages about their absence would mislead.
    """

    schema: Node
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    suspects: set[Path] = field(default_factory=set)
    num_unknown: int = 0

    def origin_of(self, path: Path) -> Origin | None:
        """The origin of the value at a path, or of the nearest value that contains it or that it contains."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return next((origin for known, origin in self.origins.items() if known[: len(path)] == path), None)

    def locate(self, path: Path) -> str | None:
        """Where the value at a path is written; None for a default."""
        origin = self.origin_of(path)
        return origin.locate(path) if origin else None

    def value(self, path: Path) -> tuple[bool, Any]:
        """Whether a path is written anywhere, and its raw value."""
        here: Any = self.tree
        for part in path:
            match here, part:
                case dict(), str() if part in here:
                    here = here[part]
                case list(), int() if part < len(here):
                    here = here[part]
                case _:
                    return False, None
        return True, here

    def drop(self, path: Path) -> None:
        """Take out the value at a path of table keys, as if it had not been written."""
        _, parent = self.value(path[:-1])
        if isinstance(parent, dict):
            parent.pop(path[-1], None)
        _forget(self, path)

    def report(self, path: Path, message: str) -> None:
        """Add a violation of the value at a path."""
        exists, value = self.value(path)
        text = shown(path, value) if exists else None
        self.violations.append(Violation(field=dotted(path), value=text, message=message, source=self.locate(path)))


def merge(sources: list[Source], schema: Node) -> Merged:
    """Normalise sources and merge them, the last one winning."""
    merged = Merged(schema=schema)
    for source in sources:
        clean = _normalise(source.tree, schema, (), source.origin, merged)
        _overlay(merged, merged.tree, clean, schema, (), source.origin)
    if (more := merged.num_unknown - MAX_UNKNOWN_KEYS) > 0:
        merged.violations.append(Violation(field="…", message=f"and {more} more unknown keys"))
    return merged


def _normalise(tree: dict[str, Any], node: Node, path: Path, origin: Origin, merged: Merged) -> dict[str, Any]:
    """A copy of a table with aliases renamed and unknown keys left out and reported."""
    clean: dict[str, Any] = {}
    for key, value in tree.items():
        child = node.child(key)
        if child is None:
            merged.num_unknown += 1
            if merged.num_unknown > MAX_UNKNOWN_KEYS:
                continue
            message, meant = unknown_key_message(key, node, path, schema=merged.schema)
            merged.violations.append(
                Violation(
                    field=dotted((*path, key)),
                    value=None if isinstance(value, dict) else shown((*path, key), value),
                    message=message,
                    source=origin.locate((*path, key)),
                )
            )
            merged.suspects |= meant
            continue
        here = (*path, child.name)
        if child.name in clean and clean[child.name] != value:
            other = next(name for name in (child.name, *child.aliases) if name != key and name in tree)
            message = f"means the same as `{other}`, which has another value; keep `{child.name}` only"
            merged.violations.append(
                Violation(
                    field=dotted((*path, key)),
                    value=shown(here, value),
                    message=message,
                    source=origin.locate((*path, key)),
                )
            )
            continue
        if key != child.name:
            origin.written[here] = (*origin.written.get(path, path), key)
        clean[child.name] = _normalise_value(value, child, here, origin, merged)
    return clean


def _normalise_value(value: Any, node: Node, path: Path, origin: Origin, merged: Merged) -> Any:
    """Normalise the sections inside a value; anything of the wrong shape is left for the schema to complain about."""
    match node.kind, value:
        case Kind.SECTION, dict():
            return _normalise(value, node, path, origin, merged)
        case Kind.SECTION_LIST, list() if len(value) > MAX_SECTIONS:
            message = f"has {len(value)} entries; at most {MAX_SECTIONS} are taken"
            merged.violations.append(Violation(field=dotted(path), message=message, source=origin.locate(path)))
            return _normalise_value(value[:1], node, path, origin, merged)
        case Kind.SECTION_LIST, list():
            return [
                _normalise(item, node, (*path, index), origin, merged) if isinstance(item, dict) else item
                for index, item in enumerate(value)
            ]
        case _:
            return as_tree(value)


def _overlay(
    merged: Merged, base: dict[str, Any], over: dict[str, Any], node: Node, path: Path, origin: Origin
) -> None:
    """Lay a normalised table over the merged one, in place."""
    if node.is_variant and "type" in over and "type" in base and over["type"] != base["type"]:
        base.clear()
        _forget(merged, path)
    for key, value in over.items():
        here, child = (*path, key), node.children.get(key)
        is_table = isinstance(value, dict)
        if is_table and isinstance(base.get(key), dict):
            _overlay(merged, base[key], value, child or _FREE, here, origin)
            if not value:
                merged.origins.setdefault(here, origin)
            continue
        _forget(merged, here)
        base[key] = value
        for leaf in _leaves(value, here) if is_table else [here]:
            merged.origins[leaf] = origin


_FREE = Node(path=(), kind=Kind.FREE_TABLE, annotation=dict)


def _forget(merged: Merged, path: Path) -> None:
    """Drop what is known about values that are replaced."""
    for known in [known for known in merged.origins if known[: len(path)] == path]:
        del merged.origins[known]


def _leaves(tree: dict[str, Any], path: Path) -> list[Path]:
    """The paths in a table that hold no further table; the table itself if it is empty."""
    leaves: list[Path] = [] if tree else [path]
    for key, value in tree.items():
        leaves += _leaves(value, (*path, key)) if isinstance(value, dict) else [(*path, key)]
    return leaves
