"""The schema as a tree of keys: what loading, the messages and the generated documentation walk over."""

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

Path = tuple[str | int, ...]
"""Table keys and list indices."""


def dotted(path: Path) -> str:
    """Return a path as text: ``orchestrator.env[0].id``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


class Kind(StrEnum):
    """The kind of a key's value."""

    LEAF = "leaf"
    SECTION = "section"
    SECTION_LIST = "section_list"
    FREE_TABLE = "free_table"


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound that is the value of another key; `why` ends the message, with the remedy."""

    words: Literal["at least", "at most", "below"]
    key: str
    why: str
    is_clamped: bool = False
    """Whether a value that is just the bound is taken for the highest one below it, with a note."""


@dataclass(frozen=True, slots=True)
class OnlyFor:
    """A key that means something only where another key has one of some values; `says` may use `{value}`."""

    key: str
    values: tuple[str | bool, ...]
    says: str = "has no meaning for {value}; leave it out, or use {values}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a field declares about its key beside its type, its default and its own bounds.

    ``shared`` is the key at the top of a document that means the same; ``may_differ`` says of such a key that the keys
    that it fills may have different values where it is left out. ``follows`` is the key whose value is taken where this
    one is left out. ``needs`` is a key without which this one has no effect, and why. ``default_from`` makes the
    default from the raw table that the key is in. Keys are written with dots from the top of the document, or from the
    table that holds the field with a dot in front. ``is_own``: tables that follow others do not take the key over.
    """

    aliases: tuple[str, ...] = ()
    default_text: str | None = None
    shared: str | None = None
    may_differ: bool = False
    follows: str | None = None
    needs: tuple[str, str] | None = None
    default_from: Callable[[Mapping[str, Any]], Any] | None = None
    limit: Limit | None = None
    only_for: OnlyFor | None = None
    is_own: bool = False


_NO_FACTS = Facts()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaKey:
    """One key of the schema. ``children`` are the keys of its section, or of the sections in its list."""

    path: tuple[str, ...]
    kind: Kind
    annotation: Any
    is_optional: bool = False
    is_required: bool = False
    default: Any = None
    description: str = ""
    bounds: tuple[str, ...] = ()
    """`at least 1`, `below 2`: those of the field itself."""
    facts: Facts = _NO_FACTS
    children: dict[str, "SchemaKey"] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the last part of the path; empty for the root."""
        return self.path[-1] if self.path else ""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return other names of the key."""
        return self.facts.aliases

    @property
    def is_switch(self) -> bool:
        """Return whether true and false are values of the key, alone or among others."""
        return self.annotation is bool or (get_origin(self.annotation) is Literal and True in get_args(self.annotation))

    def is_value_of_switch(self, text: str) -> bool:
        """Return whether a text, in any case, is one of the values of a key that is a switch."""
        choices = get_args(self.annotation) if get_origin(self.annotation) is Literal else (True, False)
        return text.lower() in (str(choice).lower() for choice in choices)

    @property
    def is_variant(self) -> bool:
        """Return whether a `type` key decides what the other keys of the section mean."""
        return self.kind is Kind.SECTION and "type" in self.children

    def about(self, *, said: str = "") -> str:
        """Return the key's description with its bounds and its shared key, as messages and the documentation have it.

        `said` is a bound, such as `at least 1`, that is left out because the message has it already.
        """
        limit = self.facts.limit
        limits = [f"{limit.words} `{dotted(self.other(limit.key))}`"] if limit else []
        bounds = [bound for bound in (*self.bounds, *limits) if bound != said]
        text = f"{self.description} {' and '.join(bounds).capitalize()}." if bounds else self.description
        return f"{text} Shared: `{self.facts.shared}`." if self.facts.shared else text

    def other(self, key: str, *, at: Path | None = None) -> Path:
        """Return the path of another key, which this key's facts name as `key`.

        They name it with dots from the top, or as `.name` in the same table. `at` is the path of this key with indices
        of lists; None: the path in the schema.
        """
        return (*(at or self.path)[:-1], key[1:]) if key.startswith(".") else tuple(key.split("."))

    def child(self, key: str) -> "SchemaKey | None":
        """Return the key of that name or alias directly below this one; None if there is none."""
        if key in self.children:
            return self.children[key]
        return next((node for node in self.children.values() if key in node.aliases), None)

    def walk(self) -> Iterator["SchemaKey"]:
        """Yield all keys below this one at any depth, parents first."""
        for node in self.children.values():
            yield node
            yield from node.walk()

    def find(self, path: Path) -> "SchemaKey | None":
        """Return the key at a path below this one, which may have list indices and aliases.

        None if the schema has none there. Keys within a free table are not part of the schema.
        """
        node: SchemaKey | None = self
        for part in path:
            if not isinstance(part, int):
                node = node.child(part) if node else None
        return node


@cache
def schema_tree(model: type[BaseModel]) -> SchemaKey:
    """Return the tree of a config class; the root has an empty path."""
    about = (model.__doc__ or "").strip()
    return SchemaKey(path=(), kind=Kind.SECTION, annotation=model, description=about, children=_children(model, ()))


def facts_of(info: FieldInfo) -> Facts:
    """Return the facts that a pydantic field declares about its key; empty ones if it declares none."""
    extra: Any = info.json_schema_extra
    return extra["facts"] if isinstance(extra, dict) else _NO_FACTS


def _children(model: type[BaseModel], path: tuple[str, ...]) -> dict[str, SchemaKey]:
    """Return the keys of a section class, by name; `path` is the section's own path."""
    return {name: _node(info, (*path, name)) for name, info in model.model_fields.items()}


def _node(info: FieldInfo, path: tuple[str, ...]) -> SchemaKey:
    """Return the key that a pydantic field declares, with the keys below it; `path` is the key's own."""
    annotation, is_optional = _without_none(info.annotation)
    kind, section = _kind(annotation)
    default = info.get_default(call_default_factory=True, validated_data={}) if kind is Kind.LEAF else info.default
    return SchemaKey(
        path=path,
        kind=kind,
        annotation=annotation,
        is_optional=is_optional,
        is_required=info.is_required(),
        default=None if default is PydanticUndefined else default,
        description=info.description or "",
        bounds=_bounds(info),
        facts=facts_of(info),
        children=_children(section, path) if section else {},
    )


def _bounds(info: FieldInfo) -> tuple[str, ...]:
    """Return the bounds of a pydantic field as texts, such as `at least 1`."""
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    found = [(text, getattr(bound, name, None)) for bound in info.metadata for name, text in words.items()]
    return tuple(f"{text} {value:g}" for text, value in found if value is not None)


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """Return the type X of ``X | None``, and True; another type is returned with False.

    Raise TypeError for a union of several types.
    """
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    others = [part for part in get_args(annotation) if part is not type(None)]
    if len(others) != 1:
        raise TypeError(f"a config key has one type besides None, not {annotation}")
    return others[0], True


def _kind(annotation: Any) -> tuple[Kind, type[BaseModel] | None]:
    """Return the kind of a key of this type, and the section class that the type has or lists; None for other kinds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Kind.SECTION, annotation
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return Kind.FREE_TABLE, None
    if origin is list and isinstance(arguments[0], type) and issubclass(arguments[0], BaseModel):
        return Kind.SECTION_LIST, arguments[0]
    return Kind.LEAF, None


def type_text(node: SchemaKey) -> str:
    """Return the type of a key in words, such as `list of strings`, or its choices, such as `"a" or "b"`."""
    if node.kind is not Kind.LEAF:
        return {Kind.SECTION: "table", Kind.SECTION_LIST: "list of tables", Kind.FREE_TABLE: "free table"}[node.kind]
    if get_origin(node.annotation) is Literal:
        choices = get_args(node.annotation)
        return " or ".join(str(choice).lower() if isinstance(choice, bool) else f'"{choice}"' for choice in choices)
    if get_origin(node.annotation) is list:
        return {str: "list of strings", int: "list of integers", float: "list of numbers"}[get_args(node.annotation)[0]]
    return {str: "string", int: "integer", float: "number", bool: "true or false"}[node.annotation]


# What of a resolved config differs from its defaults.


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigValue:
    """One key of a resolved config."""

    key: str
    value: Any
    default: Any
    """None where the key has none, or is not of the schema."""
    differs: bool


def differences(document: Mapping[str, Any], model: type[BaseModel]) -> list[ConfigValue]:
    """Return every key of a resolved document with its value and default, in the document's order.

    A key that has no default, or that `model` does not have, counts as different.
    """
    return list(_values(document, (), schema_tree(model)))


def _values(value: Any, path: Path, schema: SchemaKey) -> Iterator[ConfigValue]:
    """Yield the keys of `value`, which is at `path` of a resolved document, down to single values.

    A free table is one value.
    """
    node = schema.find(path) if path else schema
    if isinstance(value, Mapping) and value and not (node is not None and node.kind is Kind.FREE_TABLE):
        for name, item in value.items():
            yield from _values(item, (*path, str(name)), schema)
    elif isinstance(value, list) and node is not None and node.kind is Kind.SECTION_LIST and value:
        for index, item in enumerate(value):
            yield from _values(item, (*path, index), schema)
    else:
        has_default = node is not None and not node.is_required
        default = node.default if node is not None and has_default else None
        plain = default if isinstance(default, bool | int | float | str | list | None) else str(default)
        is_default = plain == value or (plain is None and value in ({}, []))  # tables are made, and have no default
        yield ConfigValue(key=dotted(path), value=value, default=plain, differs=not (has_default and is_default))
