"""What of a resolved config differs from its defaults."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from millrace.config.tree import Kind, Path, SchemaKey, dotted, schema_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigValue:
    """One key of a resolved config."""

    key: str
    value: Any
    default: Any
    """None where the key has none, or is not of the schema."""
    differs: bool


def differences(document: Mapping[str, Any], model: type[BaseModel]) -> list[ConfigValue]:
    """Every value of a document, in its order, with the default of its key; what has none differs from it."""
    return list(_values(document, (), schema_tree(model)))


def _values(value: Any, path: Path, schema: SchemaKey) -> Iterator[ConfigValue]:
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
