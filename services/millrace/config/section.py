"""Base class and value types of config sections, what a field declares about its key, and rules over several keys.

Sections are pydantic models that refuse unknown keys, coerce nothing (``"1"`` is not an integer) and cannot be changed
after they are built. Files, environment variables and command lines are turned into typed values before they get here
(see ``load``), so a value of the wrong type is always the user's and is always reported.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
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
from millrace.config.tree import Facts, Path, SchemaKey, dotted, facts_of, schema_tree

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


# Rules over several keys: values that are right alone and wrong together.
#
# A rule that does not hold names every key that it looked at, so that a caller which already reported one of those
# keys can leave the rule out. Most rules are declared on their field (`Limit`, `OnlyFor`).

LOADING = "loading"
"""Key of pydantic's validation context where a document is filled already and its rules are checked afterwards."""
_HOLDS = {"at least": lambda a, b: a >= b, "at most": lambda a, b: a <= b, "below": lambda a, b: a < b}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRule:
    """A broken rule: the keys involved, the one to change first, and what is wrong with the remedy."""

    paths: tuple[Path, ...]
    message: str


def broken(message: str, *keys: str) -> BrokenRule:
    """Return a broken rule about keys that are written with dots."""
    return BrokenRule(paths=tuple(tuple(key.split(".")) for key in keys), message=message)


def declared_rules(config: BaseModel) -> Iterator[BrokenRule]:
    """Yield the declared rules that do not hold, in every item of a list as well."""
    for node in schema_tree(type(config)).walk():
        if node.facts.limit or node.facts.only_for:
            for path in _places(config, node.path):
                yield from _declared_of(config, node, path)


def _declared_of(config: BaseModel, node: SchemaKey, path: Path) -> Iterator[BrokenRule]:
    limit, only, value = node.facts.limit, node.facts.only_for, value_at(config, path)
    if limit and value is not None:
        other = node.other(limit.key, at=path)
        bound = value_at(config, other)
        if bound is not None and not _HOLDS[limit.words](value, bound):
            message = f"must be {limit.words} `{dotted(other)}`, which is {bound}{limit.why}"
            yield BrokenRule(paths=(path, other), message=message)
    if only and value and value != node.default:
        other = node.other(only.key, at=path)
        if (chosen := value_at(config, other)) not in only.values:
            says = only.says.format(value=chosen, values=" or ".join(map(str, only.values)))
            yield BrokenRule(paths=(path, other), message=says)


def _places(config: BaseModel, path: Path) -> Iterator[Path]:
    """Yield the places of the key of a schema's path: the path itself, or within lists one of each item."""
    for at in range(1, len(path)):
        items = value_at(config, path[:at])
        if isinstance(items, list):
            for index, item in enumerate(items):
                yield from ((*path[:at], index, *rest) for rest in _places(item, path[at:]))
            return
    yield path


def value_at(config: BaseModel, path: Path) -> Any:
    """Return the value at a path; None where a table on the way is off."""
    here: Any = config
    for part in path:
        here = None if here is None else here[part] if isinstance(part, int) else getattr(here, part, None)
    return here


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
        """Return rules over several keys that do not hold; a document adds its own to those that fields declare."""
        return list(declared_rules(self))

    def remarks(self) -> list[BrokenRule]:
        """Return notes about settings that are allowed but may be unintended, with their keys."""
        return []

    def resolved_json(self) -> str:
        """Return every field with its value as one canonical JSON document; loading it gives the same config."""
        tree = self.model_dump(mode="json")
        return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def run_hash(resolved_json: str) -> str:
    """Return sha256, in hex, of a resolved config."""
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
    """Return a field with a default; bounds are `constraints`, and are not part of the description."""
    return Field(default, description=description, json_schema_extra=_extra(facts), **constraints)


def required(description: str, **constraints: Any) -> Any:
    """Return a field that has to be set."""
    return Field(..., description=description, **constraints)


def table(factory: Any, description: str, *, facts: Facts | None = None) -> Any:
    """Return a sub-section, list or free table that exists with its defaults when nothing is written."""
    return Field(default_factory=factory, description=description, json_schema_extra=_extra(facts))


def _extra(facts: Facts | None) -> Any:
    return {"facts": facts} if facts else None
