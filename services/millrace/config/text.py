"""Text of flags and environment variables as typed values, and `MILLRACE_CONFIG__a__b=value`.

Only the schema can tell whether `1` is a number or a name. Text that does not fit its type stays text, so that the
schema reports it with the type that it wanted.
"""

import json
from collections.abc import Mapping
from typing import Any, get_origin

from millrace.config.layers import Layer, Provenance, Strength, put
from millrace.config.tree import Kind, Path, SchemaKey, dotted
from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError, Violation

PREFIX = "MILLRACE_CONFIG__"
PRIME_PREFIX = "PRIME_"
WHOLE_LISTS = 'lists are replaced as a whole; give the list as JSON, such as \'[{"id": "reverse-text"}]\''
_NONE = ("none", "null")
_BOOLEANS = {"true": True, "false": False}
_OBJECT = 'a JSON object such as {"key": 1}'
_TABLES = {
    Kind.SECTION: _OBJECT,
    Kind.FREE_TABLE: _OBJECT,
    Kind.SECTION_LIST: 'a JSON list such as [{"id": "reverse-text"}]; lists are replaced as a whole',
}


class NotJsonError(ValueError):
    """Text that has to be JSON and is not; the message says why and what would do."""


class Key:
    """The key that was meant by parts in upper case or with dashes; free tables keep theirs as they are."""

    def __init__(self, parts: list[str], schema: SchemaKey) -> None:
        self.path: tuple[str, ...] = ()
        self.node: SchemaKey | None = schema
        """None where there is no such key."""
        self.is_free = False
        """Whether it lies in a free table, whose node it has."""
        self.is_in_list = False
        for part in parts:
            self.is_in_list |= self.node is not None and self.node.kind is Kind.SECTION_LIST
            if self.node is not None and self.node.kind is Kind.FREE_TABLE:
                self.is_free = True
            else:
                part = part.lower().replace("-", "_")
                self.node = self.node.child(part) if self.node else None
            self.path = (*self.path, part)

    def value(self, text: str) -> Any:
        """The value that the text means here. Raises NotJsonError for tables and lists."""
        if self.node is None or self.is_free:
            try:
                return _decoded(text)
            except CorruptObjectError:
                return text
        kind, annotation = self.node.kind, self.node.annotation
        if self.node.is_optional and is_none(text):
            return None
        if kind in _TABLES:
            return _json(text, _TABLES[kind])
        if annotation == list[str] and not text.startswith(("[", "{", '"')):
            return [text]  # one name or URL needs no brackets
        if get_origin(annotation) is list:
            return _json(text, 'a JSON list such as ["a", "b"]; lists are replaced as a whole')
        try:
            return _BOOLEANS[text.lower()] if self.node.is_switch else annotation(text)
        except (KeyError, TypeError, ValueError):  # TypeError: one of several texts, which is no type to call
            return text


def is_boolean(text: str) -> bool:
    """Whether the text is a truth value."""
    return text.lower() in _BOOLEANS


def is_none(text: str) -> bool:
    """Whether the text stands for an absent value."""
    return text.lower() in _NONE


def read_environment(env: Mapping[str, str], schema: SchemaKey, *, section: str = "") -> tuple[Layer, list[Violation]]:
    """The values of all `MILLRACE_CONFIG__*` and `PRIME_*` variables, and what is wrong with them.

    Keys may be in upper case. `PRIME_*` variables may leave out the name of `section`.
    """
    tree: dict[str, Any] = {}
    places: dict[Path, str] = {}
    violations: list[Violation] = []
    named = {name: name[len(PREFIX) :].split("__") for name in sorted(env) if name.startswith(PREFIX)}
    for variable, parts in {**_prime_variables(env, schema, section), **named}.items():
        field, text, message = variable, None, ""
        key = Key(parts, schema)
        if not all(parts):
            message = f"is no key; write {PREFIX}trainer__optim__lr for trainer.optim.lr"
        elif key.is_in_list:
            field, message = dotted(key.path), WHOLE_LISTS
        else:
            field, text = dotted(key.path), env[variable]
            text = text.lower() if variable == "PRIME_LOG_LEVEL" else text
            try:
                if not put(tree, key.path, key.value(text)):
                    message = "is set here and as a part of another variable; keep one of them"
            except NotJsonError as error:
                message = str(error)
        if message:
            violations.append(Violation(field=field, value=text, message=message, source=variable))
        else:
            places[key.path] = variable
            for length in range(1, len(key.path)):
                places.setdefault(key.path[:length], variable)
    return Layer(
        tree=tree, origin=Provenance(label="environment", places=places, strength=Strength.ENVIRONMENT)
    ), violations


def _prime_variables(env: Mapping[str, str], schema: SchemaKey, section: str) -> dict[str, list[str]]:
    """The keys of prime-rl's variables, by name: `PRIME_MODEL__NAME`, or `PRIME_MAX_STEPS` for a key at the top.

    Others that begin alike (`PRIME_API_KEY`) belong to other programs.
    """
    found: dict[str, list[str]] = {}
    own = schema.child(section) if section else None
    for name in sorted(name for name in env if name.startswith(PRIME_PREFIX)):
        parts = ["log", "level"] if name == "PRIME_LOG_LEVEL" else name[len(PRIME_PREFIX) :].split("__")
        first = parts[0].lower()
        is_bare = bool(own and (own.child(first) or not schema.child(first)))
        if len(parts) > 1 or schema.child(first) or (own and own.child(first)):
            found[name] = [section, *parts] if is_bare else parts
    return found


def _json(text: str, wanted: str) -> Any:
    try:
        return _decoded(text)
    except CorruptObjectError as error:
        cause = error.__cause__
        why = f"{cause.msg} at character {cause.pos + 1}" if isinstance(cause, json.JSONDecodeError) else str(error)
        raise NotJsonError(f"must be {wanted} ({why})") from error


def _decoded(text: str) -> Any:
    return decode_json(text, what="it", reason="CONFIG_INVALID")
