"""The schema as a tree of keys: what `load`, the messages and the generated documentation walk over."""

import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


class Kind(StrEnum):
    """What stands behind a key."""

    LEAF = "leaf"
    SECTION = "section"
    SECTION_LIST = "section_list"
    FREE_TABLE = "free_table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One key of the schema. ``children`` are the keys of its section, or of the sections in its list."""

    path: tuple[str, ...]
    kind: Kind
    annotation: Any
    is_optional: bool = False
    is_required: bool = False
    default: Any = None
    default_text: str | None = None
    description: str = ""
    aliases: tuple[str, ...] = ()
    children: dict[str, "Node"] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of the path; empty for the root."""
        return self.path[-1] if self.path else ""

    @property
    def is_variant(self) -> bool:
        """Whether a `type` key decides what the other keys of the section mean."""
        return self.kind is Kind.SECTION and "type" in self.children

    def child(self, key: str) -> "Node | None":
        """The child of that name or alias."""
        if key in self.children:
            return self.children[key]
        return next((node for node in self.children.values() if key in node.aliases), None)

    def walk(self) -> Iterator["Node"]:
        """Every key below, parents first."""
        for node in self.children.values():
            yield node
            yield from node.walk()

    def find(self, path: tuple[str | int, ...]) -> "Node | None":
        """The key at a path; list indices and aliases may be part of it. None below free tables and where none is."""
        node: Node | None = self
        for part in path:
            if isinstance(part, int):
                continue
            node = node.child(part) if node else None
        return node


@cache
def schema_tree(model: type[BaseModel]) -> Node:
    """The tree of a config class; the root has an empty path."""
    return Node(path=(), kind=Kind.SECTION, annotation=model, description=_doc(model), children=_children(model, ()))


def _doc(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip()


def _children(model: type[BaseModel], path: tuple[str, ...]) -> dict[str, Node]:
    return {name: _node(info, (*path, name)) for name, info in model.model_fields.items()}


def _node(info: FieldInfo, path: tuple[str, ...]) -> Node:
    """The node of one pydantic field."""
    annotation, is_optional = _without_none(info.annotation)
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    kind, section = _kind(annotation)
    default = info.get_default(call_default_factory=True, validated_data={}) if kind is Kind.LEAF else info.default
    aliases, default_text = extra.get("aliases") or (), extra.get("default_text")
    return Node(
        path=path,
        kind=kind,
        annotation=annotation,
        is_optional=is_optional,
        is_required=info.is_required(),
        default=None if default is PydanticUndefined else default,
        default_text=default_text if isinstance(default_text, str) else None,
        description=info.description or "",
        aliases=tuple(str(alias) for alias in aliases) if isinstance(aliases, list) else (),
        children=_children(section, path) if section else {},
    )


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """Split ``X | None`` into X and whether None is allowed."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    others = [part for part in get_args(annotation) if part is not type(None)]
    if len(others) != 1:
        raise TypeError(f"a config key has one type besides None, not {annotation}")
    return others[0], True


def _kind(annotation: Any) -> tuple[Kind, type[BaseModel] | None]:
    """The kind of a type, and the section behind it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Kind.SECTION, annotation
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return Kind.FREE_TABLE, None
    if origin is list and isinstance(arguments[0], type) and issubclass(arguments[0], BaseModel):
        return Kind.SECTION_LIST, arguments[0]
    return Kind.LEAF, None


def type_text(node: Node) -> str:
    """The type of a key for people."""
    match node.kind:
        case Kind.SECTION:
            text = "table"
        case Kind.SECTION_LIST:
            text = "list of tables"
        case Kind.FREE_TABLE:
            text = "free table"
        case Kind.LEAF if get_origin(node.annotation) is Literal:
            text = " or ".join(f'"{choice}"' for choice in get_args(node.annotation))
        case Kind.LEAF if get_origin(node.annotation) is list:
            text = "list of strings"
        case Kind.LEAF:
            text = {str: "string", int: "integer", float: "number", bool: "true or false"}[node.annotation]
    return text
