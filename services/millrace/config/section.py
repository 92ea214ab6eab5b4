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
GROUP_PATTERN = RUN_NAME_PATTERN
"""The name of a group of runs in the queue."""


class ConfigSection(BaseModel):
    """One table of a config file."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )

    @field_validator("*")
    @classmethod
    def _require_storable(cls, value: Any) -> Any:
        """Return `value`.

        Raise ValueError for an integer of more than 64 bits, or a number outside the range of float32. Logs, random
        generators and tensors hold no others.
        """
        if isinstance(value, int) and not -_MOST_INT - 1 <= value <= _MOST_INT:
            raise ValueError(f"must fit into 64 bits: at most {_MOST_INT}")
        if isinstance(value, float) and value and not _LEAST_FLOAT <= abs(value) <= _MOST_FLOAT:
            raise ValueError(f"must be 0, or between {_LEAST_FLOAT:g} and {_MOST_FLOAT:g}, the range of float32")
        return value

    @model_validator(mode="before")
    @classmethod
    def _make_defaults(cls, data: Any) -> Any:
        """Return the raw table of a section with the keys added whose default depends on its other keys
        (`Facts.default_from`).

        Data that is no table is returned unchanged.
        """
        if not isinstance(data, dict):
            return data
        made = {name: make(data) for name, info in cls.model_fields.items() if (make := facts_of(info).default_from)}
        # What is written goes before what is made.
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
    """Return a broken rule with its message.

    `keys` are dotted paths such as `trainer.loss.type`, the one to change first.
    """
    return BrokenRule(paths=tuple(tuple(key.split(".")) for key in keys), message=message)


def declared_rules(config: BaseModel) -> Iterator[BrokenRule]:
    """Yield the rules that fields declare (`Limit`, `OnlyFor`) and that `config` breaks.

    A key in a list of tables is checked in every table of the list.
    """
    for node in schema_tree(type(config)).walk():
        if node.facts.limit or node.facts.only_for:
            for path in _places(config, node.path):
                yield from _declared_of(config, node, path)


def _declared_of(config: BaseModel, node: SchemaKey, path: Path) -> Iterator[BrokenRule]:
    """Yield what the value at `path` breaks of the rules that its key `node` declares.

    A `Limit` bounds the value by another key's; an `OnlyFor` allows it only beside some values of another key.
    """
    limit, only, value = node.facts.limit, node.facts.only_for, value_at(config, path)
    if limit and value is not None:
        other = node.other(limit.key, at=path)
        bound = value_at(config, other)
        if bound is not None and not _HOLDS[limit.words](value, bound):
            message = f"must be {limit.words} `{dotted(other)}`, which is {bound}{limit.why}"
            yield BrokenRule(paths=(path, other), message=message)
    # A default was not written, so it is no contradiction.
    if only and value and value != node.default:
        other = node.other(only.key, at=path)
        if (chosen := value_at(config, other)) not in only.values:
            says = only.says.format(value=chosen, values=" or ".join(map(str, only.values)))
            yield BrokenRule(paths=(path, other), message=says)


def _places(config: BaseModel, path: Path) -> Iterator[Path]:
    """Yield the paths at which the key at `path` of the schema is in `config`.

    That is `path` itself, or one path per table of a list on the way.
    """
    for at in range(1, len(path)):
        items = value_at(config, path[:at])
        if isinstance(items, list):
            for index, item in enumerate(items):
                yield from ((*path[:at], index, *rest) for rest in _places(item, path[at:]))
            return
    yield path


def value_at(config: BaseModel, path: Path) -> Any:
    """Return the value at `path` of a built config; None where a table on the way is left out."""
    here: Any = config
    for part in path:
        here = None if here is None else here[part] if isinstance(part, int) else getattr(here, part, None)
    return here


class Document(ConfigSection):
    """A whole config: what its fields declare about each other is filled and checked when it is built."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any, info: ValidationInfo) -> Any:
        """Return the raw document with shared keys, the preset and keys that follow others filled in.

        It is returned unchanged if `load` validates it: `load` has filled it before.
        """
        is_filled = LOADING in (info.context or {})
        return data if is_filled or not isinstance(data, dict) else fill_document(cls, data)

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        """Return the document; raise ValueError if it breaks a rule over several keys.

        Rules are not checked if `load` validates: `load` reports them with the places where the keys are written.
        """
        if LOADING not in (info.context or {}) and (broken := self.broken_rules()):
            raise ValueError("; ".join(f"{dotted(rule.paths[0])} {rule.message}" for rule in broken))
        return self

    def broken_rules(self) -> list[BrokenRule]:
        """Return the rules over several keys that do not hold: those that fields declare; a subclass adds its own."""
        return list(declared_rules(self))

    def remarks(self) -> list[BrokenRule]:
        """Return notes about settings that are allowed but may be unintended, with their keys."""
        return []

    def resolved_json(self) -> str:
        """Return every field with its value as one canonical JSON document; loading it gives the same config."""
        tree = self.model_dump(mode="json")
        return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def run_hash(resolved_json: str) -> str:
    """Return the sha256, in hex, of a resolved config's JSON text."""
    return hashlib.sha256(resolved_json.encode()).hexdigest()


def _finite(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return `value`; raise ValueError if it contains NaN or infinity at any depth: these have no JSON form."""
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
    """Return the pydantic field of a key that has a default.

    `facts` say what the key has to do with other keys. `constraints` are pydantic's bounds such as `ge=1`; the
    generated documentation adds them to the description.
    """
    return Field(default, description=description, json_schema_extra=_extra(facts), **constraints)


def required(description: str, **constraints: Any) -> Any:
    """Return the pydantic field of a key that has to be set; `constraints` are pydantic's bounds such as `ge=1`."""
    return Field(..., description=description, **constraints)


def table(factory: Any, description: str, *, facts: Facts | None = None) -> Any:
    """Return the pydantic field of a sub-section, a list or a free table.

    `factory` makes its value where nothing is written.
    """
    return Field(default_factory=factory, description=description, json_schema_extra=_extra(facts))


def _extra(facts: Facts | None) -> Any:
    """Return `facts` as the extra data of a pydantic field; None without facts."""
    return {"facts": facts} if facts else None
