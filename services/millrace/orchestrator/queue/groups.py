"""`MILLRACE_QUEUE_GROUPS`: the groups of runs of a deployment, their weights and quotas."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from millrace.config.section import GROUP_PATTERN
from millrace.errors import InvalidSpecError, Violation
from millrace.orchestrator.queue.order import DEFAULT_GROUP, QueueGroup

VARIABLE = "MILLRACE_QUEUE_GROUPS"
NO_GROUPS: Mapping[str, QueueGroup] = MappingProxyType({})
_FORM = (
    "must be such as `research:weight=2:quota=16,batch`: names, each with a weight above 0 and a quota of at least 1"
)


def parse_groups(text: str) -> Mapping[str, QueueGroup]:
    """Return the groups that the setting names, with `default` among them; none for an empty text.

    Raises InvalidSpecError if it is malformed, or names a group twice.
    """
    if not text.strip():
        return NO_GROUPS
    groups: dict[str, QueueGroup] = {}
    for part in text.split(","):
        name, *options = (each.strip() for each in part.split(":"))
        try:
            group = QueueGroup(**_options(options))
        except ValueError as error:
            raise _wrong(part, str(error)) from error
        if not re.fullmatch(GROUP_PATTERN, name):
            raise _wrong(part, _FORM)
        if name in groups:
            raise _wrong(part, f"group {name!r} is named twice")
        groups[name] = group
    return MappingProxyType({DEFAULT_GROUP: QueueGroup(), **groups})


def _options(options: Sequence[str]) -> dict[str, Any]:
    """Return the weight and the quota that the options of a group give; ValueError if one is malformed."""
    found: dict[str, Any] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key in found:
            raise ValueError(f"{key} is given twice")
        if key == "weight" and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value) and float(value) > 0:
            found[key] = float(value)
        elif key == "quota" and re.fullmatch(r"[0-9]{1,9}", value) and int(value) > 0:
            found[key] = int(value)
        else:
            raise ValueError(_FORM)
    return found


def _wrong(text: str, message: str) -> InvalidSpecError:
    """Return the error that a part of the setting is malformed."""
    problem = Violation(field=VARIABLE, value=text[:80], message=message, source="environment")
    return InvalidSpecError([problem], reason="SETTINGS_INVALID", remedy="correct it and start again")
