"""Config values in layers: raw tables, each with an origin, laid over each other into one tree that knows where each
value comes from.

A layer is normalised while it is laid (aliases renamed, unknown keys reported and left out). Tables are merged key by
key, all else is replaced. What is filled afterwards (see ``filling``) keeps the origin of the key that it came from.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from pydantic import BaseModel

from millrace.config.messages import Effect, Note, shown, unknown_key_message
from millrace.config.tree import Kind, Path, SchemaKey, dotted
from millrace.errors import Violation

MAX_SECTIONS = 1024
"""Most tables of one list, such as environments."""
MAX_UNKNOWN_KEYS = 200
"""Most unknown keys that are named: what each was meant to be takes a while to find."""
ABSENT = object()
"""No value, where None is one."""


class Strength(IntEnum):
    """How strong the kinds of layers are; among files, and where keys are not shared, the later one wins."""

    ENVIRONMENT = 0
    FILE = 1
    COMMAND_LINE = 2


@dataclass(slots=True, kw_only=True)
class Provenance:
    """Where the values of one layer are written: its name, and more exactly by path."""

    label: str
    places: dict[Path, str] = field(default_factory=dict)
    strength: Strength = Strength.FILE

    def locate(self, path: Path) -> str:
        """Return where the value at `path` is written.

        That is `rl.toml:12`, `command line (--max-steps)`, or the layer's label alone. A value without a place of its
        own has that of the nearest table that contains it.
        """
        above = (path[:length] for length in range(len(path), -1, -1))
        return next((self.places[known] for known in above if known in self.places), self.label)


@dataclass(slots=True, kw_only=True)
class Layer:
    """Raw values and where they are written."""

    tree: dict[str, Any]
    origin: Provenance


def as_tree(value: Any) -> Any:
    """Return a deep copy of a value as plain tables and lists.

    A built section becomes a table of the keys it was given.
    """
    match value:
        case BaseModel():
            return as_tree({name: getattr(value, name) for name in value.model_fields_set})
        case dict():
            return {key: as_tree(item) for key, item in value.items()}
        case list():
            return [as_tree(item) for item in value]
        case _:
            return value


def put(tree: dict[str, Any], path: Path, value: Any) -> bool:
    """Set the value at `path` of nested tables, in place, and return True; tables on the way are made.

    A table is merged into a table that is there. Return False if something on the way is no table.
    """
    here: Any = tree
    for part in path[:-1]:
        match here, part:
            case dict(), str():
                here = here.setdefault(part, {})
            case list(), int() if part < len(here):
                here = here[part]
            case _:
                return False
    match here, path[-1]:
        case dict(), str() as key if isinstance(here.get(key), dict) and isinstance(value, dict):
            return all(put(here[key], (inner,), item) for inner, item in value.items())
        case dict(), str() as key:
            here[key] = value
        case list(), int() as index:
            here[index] = value
        case _:
            return False
    return True


class Tree:
    """The values that all layers make together. ``origins`` has one entry per written leaf, list and replaced value.

    ``filled`` has the keys that were filled, each with the key that it came from. ``suspects`` are keys that an unknown
    key was probably meant to be: messages about their absence would mislead.
    """

    def __init__(self, schema: SchemaKey, values: dict[str, Any] | None = None) -> None:
        """Begin with `values`, an already laid tree, or with none."""
        self.schema = schema
        self.values: dict[str, Any] = values or {}
        self.origins: dict[Path, Provenance] = {}
        self.filled: dict[Path, Path] = {}
        self.violations: list[Violation] = []
        self.notes: list[Note] = []
        self.suspects: set[Path] = set()
        self._num_unknown = 0

    def get(self, path: Path) -> Any:
        """Return the value at a path; ABSENT if there is none."""
        here: Any = self.values
        for part in path:
            match here, part:
                case dict(), str() if part in here:
                    here = here[part]
                case list(), int() if part < len(here):
                    here = here[part]
                case _:
                    return ABSENT
        return here

    def fill(self, path: Path, value: Any, source: Path) -> None:
        """Set the key at `path` to `value`, and remember that it was filled from the key at `source`.

        Do nothing if something on the way to `path` is no table.
        """
        if put(self.values, path, as_tree(value)):
            self.filled[path] = source

    def drop(self, path: Path) -> None:
        """Remove the value at a path of table keys, and its origin, as if it had not been written."""
        if isinstance(parent := self.get(path[:-1]), dict):
            parent.pop(path[-1], None)
        self._forget(path)

    def source(self, path: Path) -> Path:
        """Return the path at which the value of the key at `path` is written: `path` itself unless it was filled."""
        seen: set[Path] = set()
        while path not in seen:  # keys that were filled from each other end where they began
            seen.add(path)
            known = next((length for length in range(len(path), 0, -1) if path[:length] in self.filled), 0)
            if known:
                path = (*self.filled[path[:known]], *path[known:])
        return path

    def is_written(self, path: Path) -> bool:
        """Return whether there is a value at a path that was not filled from elsewhere."""
        return self.get(path) is not ABSENT and self.source(path) == path

    def strength(self, path: Path) -> Strength:
        """Return the strength of the layer that wrote the value at a path; of a table, that of its strongest key."""
        inside = [origin.strength for known, origin in self.origins.items() if known[: len(path)] == path]
        origin = self._origin(path)
        return max(inside, default=origin.strength if origin else Strength.ENVIRONMENT)

    def locate(self, path: Path) -> str | None:
        """Return the place where the value at a path is written, such as `rl.toml:12`; None for a default."""
        source = self.source(path)
        origin = self._origin(source)
        return origin.locate(source) if origin else None

    def report(self, path: Path, message: str) -> None:
        """Record an error of the value at a path, at the key where the value is written."""
        source = self.source(path)
        value = self.get(source)
        text = None if value is ABSENT else shown(source, value)
        self.violations.append(Violation(field=dotted(source), value=text, message=message, source=self.locate(source)))

    def note(self, path: Path, effect: Effect, text: str) -> None:
        """Record for the user what became of the key at a path."""
        self.notes.append(Note(path=path, source=self.locate(path) or "config", effect=effect, text=text))

    def lay(self, layers: Iterable[Layer]) -> None:
        """Merge layers into the tree, in order: a later one overrides; unknown keys are recorded as errors."""
        for layer in layers:
            self._lay(self.values, layer.tree, self.schema, (), layer.origin)
        if (more := self._num_unknown - MAX_UNKNOWN_KEYS) > 0:
            self.violations.append(Violation(field="…", message=f"and {more} more unknown keys"))

    def _lay(
        self, base: dict[str, Any], over: dict[str, Any], node: SchemaKey | None, path: Path, origin: Provenance
    ) -> None:
        """Merge the table `over` into `base`, which is at `path`, in place; `origin` says where `over` is written.

        `node` is the section of the schema; None within a free table, whose keys are not checked.
        """
        clean = over if node is None else self._normalised(over, node, path, origin)
        # Another `type` gives the other keys of the table another meaning, so what was written before is dropped.
        if node and node.is_variant and "type" in base and clean.get("type", base["type"]) != base["type"]:
            base.clear()
            self._forget(path)
        for key, value in clean.items():
            here, child = (*path, key), node.child(key) if node else None
            if isinstance(value, dict) and (child is None or child.kind is not Kind.LEAF):
                if not isinstance(base.get(key), dict):
                    self._forget(here)
                    base[key] = {}
                self._lay(base[key], value, child if child and child.kind is Kind.SECTION else None, here, origin)
                # An empty table has no key that could say where it was written.
                if not value or not base[key]:
                    self.origins.setdefault(here, origin)
            else:
                self._forget(here)
                base[key] = as_tree(value)
                self.origins[here] = origin

    def _normalised(self, table: dict[str, Any], node: SchemaKey, path: Path, origin: Provenance) -> dict[str, Any]:
        """Return the table `table`, written at `path`, with aliases renamed and unknown keys recorded as errors and
        left out.

        Tables in lists are treated alike. `node` is the section of the schema.
        """
        clean: dict[str, Any] = {}
        for key, value in table.items():
            child = node.child(key)
            if child is None:
                self._unknown(key, value, node, path, origin)
                continue
            here, written = (*path, child.name), (*path, key)
            # A key and its alias in one table: equal values are harmless, different ones have no answer.
            if child.name in clean and clean[child.name] != value:
                other = next(name for name in (child.name, *child.aliases) if name != key and name in table)
                message = f"means the same as `{other}`, which has another value; keep `{child.name}` only"
                self._wrong(written, value, message, origin)
                continue
            if key != child.name and written in origin.places:
                origin.places[here] = origin.places[written]
            if child.kind is Kind.SECTION_LIST and isinstance(value, list):
                value = self._normalised_list(value, child, here, origin)
            clean[child.name] = value
        return clean

    def _normalised_list(self, items: list[Any], node: SchemaKey, path: Path, origin: Provenance) -> list[Any]:
        """Return a list of tables, each as `_normalised` returns it.

        Too long a list is an error, and cut to one table.
        """
        if len(items) > MAX_SECTIONS:
            message = f"has {len(items)} entries; at most {MAX_SECTIONS} are taken"
            self.violations.append(Violation(field=dotted(path), message=message, source=origin.locate(path)))
            items = items[:1]
        return [
            self._normalised_item(item, node, (*path, index), origin) if isinstance(item, dict) else item
            for index, item in enumerate(items)
        ]

    def _normalised_item(
        self, table: dict[str, Any], node: SchemaKey, path: Path, origin: Provenance
    ) -> dict[str, Any]:
        """Return one table of a list as `_normalised` does, with the tables in it, which no merge visits."""
        clean = self._normalised(table, node, path, origin)
        for key, value in clean.items():
            child = node.children[key]
            if child.kind is Kind.SECTION and isinstance(value, dict):
                clean[key] = self._normalised_item(value, child, (*path, key), origin)
        return clean

    def _unknown(self, key: str, value: Any, node: SchemaKey, path: Path, origin: Provenance) -> None:
        """Record the error of a key that the section `node`, at `path`, does not have, and which keys it may be meant
        for.

        Keys after the first `MAX_UNKNOWN_KEYS` are only counted.
        """
        self._num_unknown += 1
        if self._num_unknown <= MAX_UNKNOWN_KEYS:
            message, meant = unknown_key_message(key, value, node, path, schema=self.schema)
            self._wrong((*path, key), value, message, origin, is_table=isinstance(value, dict))
            self.suspects |= meant

    def _wrong(self, path: Path, value: Any, message: str, origin: Provenance, *, is_table: bool = False) -> None:
        """Record an error of the value at `path` with the place where `origin` has it.

        A table (`is_table`) is not shown.
        """
        text = None if is_table else shown(path, value)
        where = origin.locate(path)
        self.violations.append(Violation(field=dotted(path), value=text, message=message, source=where))

    def _origin(self, path: Path) -> Provenance | None:
        """Return the origin of the value at a path: its own, that of the nearest table above it, or that of a key below
        it.

        None if none of them has an origin.
        """
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return next((origin for known, origin in self.origins.items() if known[: len(path)] == path), None)

    def _forget(self, path: Path) -> None:
        """Remove the origins of the value at a path and of all below it, because it is replaced."""
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]
