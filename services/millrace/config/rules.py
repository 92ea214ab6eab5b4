"""Rules over several keys: values that are right alone and wrong together.

A rule that does not hold names every key that it looked at, so that a caller which already reported one of
those keys can leave the rule out. Most rules are declared on their field (`Limit`, `OnlyFor`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from millrace.config.tree import Path, SchemaKey, dotted, schema_tree

LOADING = "loading"
"""Key of pydantic's validation context where a document is filled already and its rules are checked afterwards."""
_HOLDS = {"at least": lambda a, b: a >= b, "at most": lambda a, b: a <= b, "below": lambda a, b: a < b}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRule:
    """A broken rule: the keys involved, the one to change first, and what is wrong with the remedy."""

    paths: tuple[Path, ...]
    message: str


def broken(message: str, *keys: str) -> BrokenRule:
    """A broken rule about keys that are written with dots."""
    return BrokenRule(paths=tuple(tuple(key.split(".")) for key in keys), message=message)


def declared_rules(config: BaseModel) -> Iterator[BrokenRule]:
    """The declared rules that do not hold, in every item of a list as well."""
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
    """Where the key of a schema's path stands: the path itself, or, within lists, one of each item."""
    for at in range(1, len(path)):
        items = value_at(config, path[:at])
        if isinstance(items, list):
            for index, item in enumerate(items):
                yield from ((*path[:at], index, *rest) for rest in _places(item, path[at:]))
            return
    yield path


def value_at(config: BaseModel, path: Path) -> Any:
    """The value at a path; None where a table on the way is off."""
    here: Any = config
    for part in path:
        here = None if here is None else here[part] if isinstance(part, int) else getattr(here, part, None)
    return here
