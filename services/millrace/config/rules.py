"""Rules over several keys: values that are right alone and wrong together.

A rule that does not hold names every key that it looked at, so that a caller which already reported one of
those keys can leave the rule out. Most rules are declared on their field (`Limit`, `OnlyFor`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from millrace.config.tree import Path, dotted, schema_tree

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
    """The declared rules that do not hold; keys in lists declare none."""
    for node in schema_tree(type(config)).walk():
        limit, only = node.facts.limit, node.facts.only_for
        value = value_at(config, node.path) if limit or only else None
        if limit and value is not None:
            other = node.other(limit.key)
            bound = value_at(config, other)
            if bound is not None and not _HOLDS[limit.words](value, bound):
                message = f"must be {limit.words} `{dotted(other)}`, which is {bound}{limit.why}"
                yield BrokenRule(paths=(node.path, other), message=message)
        if only and value and value != node.default:
            other = node.other(only.key)
            if (chosen := value_at(config, other)) not in only.values:
                says = only.says.format(value=chosen, values=" or ".join(map(str, only.values)))
                yield BrokenRule(paths=(node.path, other), message=says)


def value_at(config: BaseModel, path: Path) -> Any:
    """The value at a path; None where a table on the way is off."""
    here: Any = config
    for part in path:
        here = None if here is None else here[part] if isinstance(part, int) else getattr(here, part, None)
    return here
