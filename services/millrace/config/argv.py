"""Text as typed values: the command line (files after `@`, one flag per key), and environment variables.

`@ a.toml @ b.toml`, `--trainer @ a.toml`, `--trainer.optim.lr 0`, `--trainer.optim.lr=0`, kebab or snake case, `--ckpt`
(enable with defaults), `--no-ckpt` (disable), JSON for lists and tables.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, get_origin

from millrace.config.files import UnreadableFileError, read_file
from millrace.config.layers import Layer, Provenance, Strength, put
from millrace.config.messages import close, shown
from millrace.config.tree import Kind, Path, SchemaKey, dotted
from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError, Violation

COMMAND_LINE = "command line"

RESERVED_FLAGS: Mapping[str, bool] = {
    "dry-run": False,
    "set-only": False,
    "check-environments": False,
    "server": True,
    "name": True,
    "follow": False,
    "resume": False,
    "plain": False,
    "debug": False,
    "help": False,
}
"""Flags that belong to the command and not to the config, and whether each takes a value."""


def _no_values() -> Layer:
    """Return an empty layer for the values of a command line."""
    return Layer(tree={}, origin=Provenance(label=COMMAND_LINE, strength=Strength.COMMAND_LINE))


@dataclass(slots=True, kw_only=True)
class CommandLine:
    """What a command line says: files in order, values, reserved flags, and what is wrong with it."""

    files: list[Layer] = field(default_factory=list)
    values: Layer = field(default_factory=_no_values)
    flags: dict[str, str | bool] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)


def read_command_line(
    argv: Sequence[str],
    schema: SchemaKey,
    *,
    reserved: Mapping[str, bool] = RESERVED_FLAGS,
    cwd: FilePath | None = None,
) -> CommandLine:
    """Return what the arguments of a command line say, without the program's name.

    Errors are in `violations`, none is raised. `schema` is the root of the document's keys. `reserved` are the flags of
    the command itself (name in kebab case -> whether it takes a value). File names are relative to `cwd`; None is the
    current directory.
    """
    return _Reader(argv, schema, reserved=reserved, cwd=cwd).read()


# Text of flags and environment variables as typed values, and `MILLRACE_CONFIG__a__b=value`.
#
# Only the schema can tell whether `1` is a number or a name. Text that does not fit its type stays text, so that the
# schema reports it with the type that it wanted.

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
        """Find the key of `schema` at these parts of a name, in any case and with dashes or underscores.

        Parts within a free table stay as they are written.
        """
        self.path: tuple[str, ...] = ()
        self.node: SchemaKey | None = schema
        """None where there is no such key."""
        self.is_free = False
        """Whether it is in a free table, whose node it has."""
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
        """Return the value that a text means for this key; text that does not fit stays text, which the schema reports.

        Raises NotJsonError for a table or a list that is not JSON.
        """
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
    """Return whether the text is `true` or `false`, in any case."""
    return text.lower() in _BOOLEANS


def is_none(text: str) -> bool:
    """Return whether the text is `none` or `null`, in any case."""
    return text.lower() in _NONE


def read_environment(env: Mapping[str, str], schema: SchemaKey, *, section: str = "") -> tuple[Layer, list[Violation]]:
    """Return the values of all `MILLRACE_CONFIG__*` and `PRIME_*` variables in `env`, and what is wrong with them.

    Keys may be in upper case. `PRIME_*` variables may leave out the name of `section`; empty: none may.
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
            # prime-rl takes the names of levels in any case, the schema in lower case.
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
    """Return the parts of the key that each of prime-rl's variables means, by the variable's name.

    `PRIME_MODEL__NAME` has two parts, `PRIME_MAX_STEPS` one. The name of `section` is added if the variable leaves it
    out. Variables such as `PRIME_API_KEY` that are no key belong to other programs and are left out.
    """
    found: dict[str, list[str]] = {}
    own = schema.child(section) if section else None
    for name in sorted(name for name in env if name.startswith(PRIME_PREFIX)):
        parts = ["log", "level"] if name == "PRIME_LOG_LEVEL" else name[len(PRIME_PREFIX) :].split("__")
        first = parts[0].lower()
        # A name that the section and the document share is the section's: prime-rl's processes have one section each.
        is_bare = bool(own and (own.child(first) or not schema.child(first)))
        if len(parts) > 1 or schema.child(first) or (own and own.child(first)):
            found[name] = [section, *parts] if is_bare else parts
    return found


def _json(text: str, wanted: str) -> Any:
    """Return the value of a JSON text.

    Raise NotJsonError if it is none, with `wanted`, which describes what it has to be.
    """
    try:
        return _decoded(text)
    except CorruptObjectError as error:
        cause = error.__cause__
        why = f"{cause.msg} at character {cause.pos + 1}" if isinstance(cause, json.JSONDecodeError) else str(error)
        raise NotJsonError(f"must be {wanted} ({why})") from error


def _decoded(text: str) -> Any:
    """Return the value of a JSON text; raise CorruptObjectError if it is none."""
    return decode_json(text, what="it", reason="CONFIG_INVALID")


class _Reader:
    """One pass over the arguments."""

    def __init__(
        self, argv: Sequence[str], schema: SchemaKey, *, reserved: Mapping[str, bool], cwd: FilePath | None
    ) -> None:
        self._arguments = list(reversed(argv))
        self._schema = schema
        self._reserved = reserved
        self._cwd = cwd
        self._result = CommandLine()
        self._table: tuple[str, SchemaKey] | None = None
        """The flag just read, if it is a section's that is alone."""

    def read(self) -> CommandLine:
        """Read all arguments, and return what they say."""
        while self._arguments:
            argument = self._arguments.pop()
            if argument.startswith("@"):
                self._file(argument, ())
            elif argument.startswith("--") and len(argument) > 2:
                name, equals, value = argument[2:].partition("=")
                self._flag(name, value if equals else None)
            elif argument.endswith((".toml", ".json")):
                self._wrong(argument, f"is not a flag; to read the file, write `@ {argument}`")
            else:
                self._wrong(argument, self._stray(argument))
        return self._result

    def _stray(self, argument: str) -> str:
        """Return the message about an argument that belongs to no flag.

        After a table's flag it names keys of the table.
        """
        if self._table is None:
            return "belongs to no flag; write `--key value`, or `@ file.toml` for a file"
        name, node = self._table
        keys = " or ".join(f"`--{name}.{key}`" for key in list(node.children)[:2])
        return (
            f"belongs to no flag: `--{name}` is a table and stands alone; set a key of it ({keys}), or pass it as JSON"
        )

    def _peek(self) -> str | None:
        """Return the next argument without taking it, if it can be a value.

        None if the next argument is a flag or begins with `@`, and at the end.
        """
        # At the end there is as little a value as before a file.
        argument = self._arguments[-1] if self._arguments else "@"
        is_flag = argument.startswith("--") and len(argument) > 2
        return None if is_flag or argument == "@" else argument

    def _take(self) -> str | None:
        """Take the next argument and return it if it can be a value; else return None and leave it."""
        return None if self._peek() is None else self._arguments.pop()

    def _wrong(self, subject: str, message: str, value: str | None = None) -> None:
        """Record an error of the command line about `subject`, a flag, key or argument.

        `value` is what was given for it.
        """
        self._result.violations.append(Violation(field=subject, value=value, message=message, source=COMMAND_LINE))

    def _file(self, argument: str, prefix: tuple[str, ...]) -> None:
        """Read the file that `@file`, or the argument after a lone `@`, names, as the part of the config at `prefix`.

        A file that cannot be read is recorded as an error.
        """
        name = argument[1:] or (self._arguments.pop() if self._arguments else "")
        if not name:
            self._wrong("@", "needs the name of a file after it")
            return
        try:
            self._result.files.append(read_file(name, prefix=prefix, cwd=self._cwd))
        except UnreadableFileError as error:
            self._result.violations.append(error.violation)

    def _flag(self, name: str, value: str | None) -> None:
        """Read one flag and record its value; `name` has no dashes before it.

        `value` is the text after `=`. If it is None, the value is in the next argument or arguments, or the flag has
        none.
        """
        self._table = None
        kebab = name.replace("_", "-")
        key = Key(name.split("."), self._schema)
        is_section_file = value is None and self._file_follows(key.node)  # `--orchestrator @ file` is no address
        if not is_section_file and (kebab in self._reserved or kebab.removeprefix("no-") in self._reserved):
            self._reserved_flag(kebab, value)
            return
        if key.node is None and (off := self._switched_off(name)):
            if value is None or value.lower() == "true":
                self._switch_off(name, off)
            else:
                self._wrong(f"--{name}", f"takes no value; set `--{dotted(off.path)}`, or leave it out", value)
        elif is_section_file:
            self._file(self._arguments.pop(), key.path)
        elif value is None and (bare := self._bare(key.node)) is not None:
            self._put(name, key, bare)
            if bare == {} and key.node is not None:
                self._table = (name, key.node)
        elif value is None and key.is_free and self._peek() is None:
            self._put(name, key, True)
        else:
            self._valued_flag(name, key, value)

    def _reserved_flag(self, name: str, value: str | None) -> None:
        """Record a flag of the command itself: a switch as true or false (`--no-NAME`), another one with its value."""
        if not self._reserved.get(name, False):  # a switch, or `--no-` in front of one
            is_negated = name not in self._reserved
            if value is not None and not is_boolean(value):
                self._wrong(f"--{name}", "takes no value", value)
                return
            is_off = value is not None and value.lower() == "false"
            # `--no-x=false` means x: two negations cancel.
            self._result.flags[name.removeprefix("no-") if is_negated else name] = is_negated == is_off
        elif value := self._take() if value is None else value:
            self._result.flags[name] = value
        else:
            self._wrong(f"--{name}", "needs a value after it")

    def _file_follows(self, node: SchemaKey | None) -> bool:
        """Return whether a file is next for the table `node`; the value of any other key may begin with `@`."""
        is_table = node is not None and node.kind in (Kind.SECTION, Kind.FREE_TABLE)
        return is_table and bool(self._arguments) and self._arguments[-1].startswith("@")

    def _bare(self, node: SchemaKey | None) -> Any:
        """Return what a flag without a value means for the key `node`: an empty table, or true.

        None if a value has to follow.
        """
        following = self._peek()
        if node is None:
            return None
        if node.kind is Kind.SECTION and (following is None or not (following.startswith("{") or is_none(following))):
            return {}
        if not node.is_switch or (following is not None and node.is_value_of_switch(following)):
            return None
        return None if node.is_optional and following is not None and is_none(following) else True

    def _switched_off(self, name: str) -> Key | None:
        """Return the key that `--no-a.b` or `--a.no-b` switches off; None if the name is neither."""
        parts = name.split(".")
        for index in (0, len(parts) - 1):
            if parts[index].startswith(("no-", "no_")):
                key = Key([*parts[:index], parts[index][3:], *parts[index + 1 :]], self._schema)
                if key.node is not None:
                    return key
        return None

    def _switch_off(self, name: str, key: Key) -> None:
        """Record that the flag `name` switches off the key `key`: false for a switch, None for a key that may be left
        out.

        For any other key record an error instead.
        """
        is_boolean_key = key.node is not None and key.node.is_switch
        if is_boolean_key or (key.node is not None and key.node.is_optional):
            self._put(name, key, False if is_boolean_key else None)
        else:
            self._wrong(f"--{name}", f"`{dotted(key.path)}` cannot be switched off; leave the flag out for its default")

    def _valued_flag(self, name: str, key: Key, value: str | None) -> None:
        """Record the value of a flag: `value`, or the next argument if that is None; errors are recorded."""
        value = self._take() if value is None else value
        if value is None and key.node is not None:
            self._wrong(f"--{name}", "needs a value after it")
            return
        if key.is_in_list:
            self._wrong(dotted(key.path), WHOLE_LISTS)
            return
        try:
            typed = key.value(value or "")
        except NotJsonError as error:
            self._wrong(dotted(key.path), str(error), shown(key.path, value))
            return
        near = close(key.path[0].replace("_", "-"), self._reserved, most=1)
        if key.node is None and len(key.path) == 1 and near:
            self._wrong(f"--{name}", f"unknown flag; did you mean `--{near[0]}`?", value)
            return
        self._put(name, key, typed)

    def _put(self, name: str, key: Key, value: Any) -> None:
        """Set the key to the value, and note the flag `name` as its place.

        A key that other flags exclude is an error.
        """
        if put(self._result.values.tree, key.path, value):
            self._result.values.origin.places[key.path] = f"{COMMAND_LINE} (--{name})"
        else:
            message = "is set here and switched off or replaced by another flag; keep one of them"
            self._wrong(dotted(key.path), message)
