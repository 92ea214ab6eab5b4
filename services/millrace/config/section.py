"""Base class and value types of every config section.

Sections are pydantic models that refuse unknown keys, coerce nothing (``"1"`` is not an integer) and cannot be changed
after they are built. Files, environment variables and command lines are turned into typed values before they get here
(see ``load``), so a value of the wrong type is always the user's and is always reported.
"""

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

IDENTIFIER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_./@-]*$"
RUN_NAME_PATTERN = r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"


class Section(BaseModel):
    """One table of a config file."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )


def _finite(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Refuse NaN and infinity at any depth: they have no JSON form, so the run hash could not cover them."""
    pending: list[Any] = [value]
    while pending:
        match pending.pop():
            case dict() as table:
                pending.extend(table.values())
            case list() as items:
                pending.extend(items)
            case float() as number if not math.isfinite(number):
                raise ValueError("must not contain NaN or infinity")
    return value


FreeTable = Annotated[dict[str, JsonValue], AfterValidator(_finite)]
"""A table whose keys belong to somebody else (an environment, an engine): any JSON value, passed on unchanged."""


def option(
    default: Any,
    description: str,
    *,
    aliases: tuple[str, ...] = (),
    default_text: str | None = None,
    **constraints: Any,
) -> Any:
    """A field with a default.

    ``aliases`` are other names of the key that files and command lines may use; ``default_text`` says in words what a
    key that is left out becomes, where that depends on other keys.
    """
    extra = {"aliases": list(aliases), "default_text": default_text}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def required(description: str, **constraints: Any) -> Any:
    """A field that has to be set."""
    return Field(..., description=description, **constraints)


def table(factory: Any, description: str, *, default_text: str | None = None) -> Any:
    """A sub-section, list or free table that exists with its defaults when nothing is written."""
    return Field(default_factory=factory, description=description, json_schema_extra={"default_text": default_text})


def as_tree(value: Any) -> Any:
    """A deep copy of plain tables and lists; sections that are already built become tables of what they were given."""
    match value:
        case BaseModel():
            return as_tree({name: getattr(value, name) for name in value.model_fields_set})
        case dict():
            return {key: as_tree(item) for key, item in value.items()}
        case list():
            return [as_tree(item) for item in value]
        case _:
            return value
