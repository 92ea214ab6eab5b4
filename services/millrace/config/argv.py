"""The command line of `millrace rl` and `millrace sft`: files after `@`, one flag per key, a few reserved flags.

`@ a.toml @ b.toml`, `--trainer @ a.toml`, `--trainer.optim.lr 0`, `--trainer.optim.lr=0`, kebab or snake case, `--ckpt`
(enable with defaults), `--no-ckpt` (disable), JSON for lists and tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from millrace.config.environment import WHOLE_LISTS, below_list, put, spell
from millrace.config.files import UnreadableFileError, read_file
from millrace.config.paths import Path, dotted
from millrace.config.redact import shown
from millrace.config.sources import Origin, Source, Strength
from millrace.config.suggest import close
from millrace.config.text import NotJsonError, free_value, is_boolean, is_none, typed_value
from millrace.config.tree import Kind, Node
from millrace.errors import Violation

COMMAND_LINE = "command line"

RESERVED_FLAGS: Mapping[str, bool] = {
    "dry-run": False,
    "server": True,
    "name": True,
    "follow": False,
    "plain": False,
    "debug": False,
    "help": False,
}
"""Flags that belong to the command and not to the config, and whether each takes a value."""


@dataclass(slots=True, kw_only=True)
class CommandLine:
    """What a command line says: files in order, values, reserved flags, and what is wrong with it."""

    files: list[Source] = field(default_factory=list)
    values: Source
    flags: dict[str, str | bool] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)


def read_command_line(
    argv: Sequence[str], schema: Node, *, reserved: Mapping[str, bool] = RESERVED_FLAGS, cwd: FilePath | None = None
) -> CommandLine:
    """Read a command line. Nothing is raised: what is wrong is in ``violations``."""
    return _Reader(argv, schema, reserved=reserved, cwd=cwd).read()


class _Reader:
    """One pass over the arguments."""

    def __init__(
        self, argv: Sequence[str], schema: Node, *, reserved: Mapping[str, bool], cwd: FilePath | None
    ) -> None:
        self._arguments = list(argv)
        self._position = 0
        self._schema = schema
        self._reserved = reserved
        self._cwd = cwd
        self._names: dict[Path, str] = {}
        self._tree: dict[str, Any] = {}
        origin = Origin(label=COMMAND_LINE, names=self._names, strength=Strength.COMMAND_LINE)
        self._result = CommandLine(values=Source(tree=self._tree, origin=origin))

    def read(self) -> CommandLine:
        """Read all arguments."""
        while (argument := self._next()) is not None:
            if argument.startswith("@"):
                self._file(argument, ())
            elif argument.startswith("--") and len(argument) > 2:
                name, equals, value = argument[2:].partition("=")
                self._flag(name, value if equals else None)
            else:
                self._stray(argument)
        return self._result

    def _next(self) -> str | None:
        """Take the next argument."""
        if self._position >= len(self._arguments):
            return None
        self._position += 1
        return self._arguments[self._position - 1]

    def _peek(self) -> str | None:
        """The next argument if it can be a value: not a flag and not a file."""
        if self._position >= len(self._arguments):
            return None
        argument = self._arguments[self._position]
        is_flag = argument.startswith("--") and len(argument) > 2
        return None if is_flag or argument == "@" else argument

    def _wrong(self, subject: str, message: str, value: str | None = None) -> None:
        self._result.violations.append(Violation(field=subject, value=value, message=message, source=COMMAND_LINE))

    def _stray(self, argument: str) -> None:
        """An argument that belongs to no flag."""
        if argument.endswith((".toml", ".json")):
            self._wrong(argument, f"is not a flag; to read the file, write `@ {argument}`")
        else:
            self._wrong(argument, "belongs to no flag; write `--key value`, or `@ file.toml` for a file")

    def _file(self, argument: str, prefix: tuple[str, ...]) -> None:
        """Read `@file` or `@ file` for a place in the config."""
        name = argument[1:] or self._next()
        if not name:
            self._wrong("@", "needs the name of a file behind it")
            return
        try:
            self._result.files.append(read_file(name, prefix=prefix, cwd=self._cwd))
        except UnreadableFileError as error:
            self._result.violations.append(error.violation)

    def _flag(self, name: str, value: str | None) -> None:
        """Read one flag and the value behind it."""
        kebab = name.replace("_", "-")
        if kebab in self._reserved or kebab.removeprefix("no-") in self._reserved:
            self._reserved_flag(kebab, value)
            return
        path, node, is_free = spell(name.split("."), self._schema)
        if node is None and (disabled := self._disabled(name)):
            self._disable(name, *disabled)
        elif value is None and self._takes_file(path, node):
            pass
        elif value is None and (bare := self._bare(node)) is not None:
            self._put(name, path, bare)
        else:
            self._valued_flag(name, path, node, is_free=is_free, value=value)

    def _reserved_flag(self, name: str, value: str | None) -> None:
        if not self._reserved.get(name, False):  # a switch, or `--no-` in front of one
            is_negated = name not in self._reserved
            if value is not None and not is_boolean(value):
                self._wrong(f"--{name}", "takes no value", value)
                return
            self._result.flags[name.removeprefix("no-") if is_negated else name] = is_negated == (value == "false")
            return
        value = self._next() if value is None and self._peek() is not None else value
        if not value:
            self._wrong(f"--{name}", "needs a value behind it")
            return
        self._result.flags[name] = value

    def _takes_file(self, path: tuple[str, ...], node: Node | None) -> bool:
        """Read `--section @ file` if that is what follows; the value of any other key may begin with `@`."""
        if self._position >= len(self._arguments) or not self._arguments[self._position].startswith("@"):
            return False
        if node is None or node.kind is Kind.LEAF or node.kind is Kind.SECTION_LIST:
            return False
        self._file(self._next() or "@", path)
        return True

    def _bare(self, node: Node | None) -> Any:
        """The value of a flag with nothing behind it: an empty section, or true. None if a value has to follow."""
        following = self._peek()
        if node is None:
            return None
        if node.kind is Kind.SECTION and (following is None or not (following.startswith("{") or is_none(following))):
            return {}
        if node.annotation is bool and (following is None or not is_boolean(following)):
            return True
        return None

    def _disabled(self, name: str) -> tuple[tuple[str, ...], Node] | None:
        """The key that `--no-a.b` or `--a.no-b` switches off; None if the name is neither."""
        parts = name.split(".")
        for index in (0, len(parts) - 1):
            if parts[index].startswith(("no-", "no_")):
                path, node, _ = spell([*parts[:index], parts[index][3:], *parts[index + 1 :]], self._schema)
                if node is not None:
                    return path, node
        return None

    def _disable(self, name: str, path: tuple[str, ...], node: Node) -> None:
        if node.annotation is bool:
            self._put(name, path, False)
        elif node.is_optional:
            self._put(name, path, None)
        else:
            self._wrong(f"--{name}", f"`{dotted(path)}` cannot be switched off; leave the flag out for its default")

    def _valued_flag(
        self, name: str, path: tuple[str, ...], node: Node | None, *, is_free: bool, value: str | None
    ) -> None:
        if value is None:
            value = self._next() if self._peek() is not None else None
        if value is None and node is not None:
            self._wrong(f"--{name}", "needs a value behind it")
            return
        if below_list(path, self._schema):
            self._wrong(dotted(path), WHOLE_LISTS)
            return
        try:
            typed = free_value(value or "") if is_free or node is None else typed_value(value or "", node)
        except NotJsonError as error:
            self._wrong(dotted(path), str(error), shown(path, value))
            return
        if node is None and len(path) == 1 and (near := close(path[0].replace("_", "-"), self._reserved, most=1)):
            self._wrong(f"--{name}", f"unknown flag; did you mean `--{near[0]}`?", value)
            return
        self._put(name, path, typed)

    def _put(self, name: str, path: tuple[str, ...], value: Any) -> None:
        if not put(self._tree, path, value):
            self._wrong(dotted(path), "is set here and switched off or replaced by another flag; keep one of them")
            return
        self._names[path] = f"{COMMAND_LINE} (--{name})"
