"""Base class and value types of every config section, and what a field can declare about its key.

Sections are pydantic models that refuse unknown keys, coerce nothing (``"1"`` is not an integer) and cannot be changed
after they are built. Files, environment variables and command lines are turned into typed values before they get here
(see ``load``), so a value of the wrong type is always the user's and is always reported.
"""

import hashlib
import json
import math
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)

from millrace.config.filling import fill_document
from millrace.config.rules import LOADING, BrokenRule, declared_rules
from millrace.config.tree import Facts, dotted, facts_of

IDENTIFIER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_./@-]*$"
IMPORT_PATH_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"
IMAGE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,511}$"
"""A reference to a container image, as it is announced: registry, repository, tag or digest."""
_MOST_INT = 2**63 - 1
_LEAST_FLOAT, _MOST_FLOAT = 1.18e-38, 3.4e38
RUN_NAME_PATTERN = r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"


class ConfigSection(BaseModel):
    """One table of a config file."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )

    @field_validator("*")
    @classmethod
    def _require_storable(cls, value: Any) -> Any:
        """Refuse numbers beyond what logs, generators and tensors hold: 64 bits, and the range of float32."""
        if isinstance(value, int) and not -_MOST_INT - 1 <= value <= _MOST_INT:
            raise ValueError(f"must fit into 64 bits: at most {_MOST_INT}")
        if isinstance(value, float) and value and not _LEAST_FLOAT <= abs(value) <= _MOST_FLOAT:
            raise ValueError(f"must be 0, or between {_LEAST_FLOAT:g} and {_MOST_FLOAT:g}, the range of float32")
        return value

    @model_validator(mode="before")
    @classmethod
    def _make_defaults(cls, data: Any) -> Any:
        """Fill the keys whose default depends on other keys of the section."""
        if not isinstance(data, dict):
            return data
        made = {name: make(data) for name, info in cls.model_fields.items() if (make := facts_of(info).default_from)}
        return {**made, **data} if made else data


class Document(ConfigSection):
    """A whole config: what its fields declare about each other is filled and checked when it is built."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any, info: ValidationInfo) -> Any:
        is_filled = LOADING in (info.context or {})
        return data if is_filled or not isinstance(data, dict) else fill_document(cls, data)

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        """Refuse values that are right alone and wrong together."""
        if LOADING not in (info.context or {}) and (broken := self.broken_rules()):
            raise ValueError("; ".join(f"{dotted(rule.paths[0])} {rule.message}" for rule in broken))
        return self

    def broken_rules(self) -> list[BrokenRule]:
        """Rules over several keys that do not hold; a document adds its own to those that fields declare."""
        return list(declared_rules(self))

    def remarks(self) -> list[BrokenRule]:
        """Return what is allowed and may not be meant: it is told, with the keys that it is about."""
        return []

    def resolved_json(self) -> str:
        """Every field with its value as one canonical JSON document; loading it gives the same config."""
        tree = self.model_dump(mode="json")
        return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def run_hash(resolved_json: str) -> str:
    """sha256, in hex, of a resolved config."""
    return hashlib.sha256(resolved_json.encode()).hexdigest()


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


def option(default: Any, description: str, *, facts: Facts | None = None, **constraints: Any) -> Any:
    """A field with a default; bounds are `constraints`, and are not part of the description."""
    return Field(default, description=description, json_schema_extra=_extra(facts), **constraints)


def required(description: str, **constraints: Any) -> Any:
    """A field that has to be set."""
    return Field(..., description=description, **constraints)


def table(factory: Any, description: str, *, facts: Facts | None = None) -> Any:
    """A sub-section, list or free table that exists with its defaults when nothing is written."""
    return Field(default_factory=factory, description=description, json_schema_extra=_extra(facts))


def _extra(facts: Facts | None) -> Any:
    return {"facts": facts} if facts else None
