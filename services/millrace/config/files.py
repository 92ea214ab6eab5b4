"""Config files: TOML and JSON, with the line of every key."""

import json
import re
import tomllib
from pathlib import Path as FilePath
from typing import Any

from millrace.config.paths import Path
from millrace.config.sources import Origin, Source
from millrace.config.suggest import close
from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError, Violation

MAX_FILE_BYTES = 16 << 20
"""Largest config file that is read."""


class UnreadableFileError(ValueError):
    """A config file that gives no tree; holds the violation to report."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(str(violation))
        self.violation = violation


def read_file(name: str, *, prefix: tuple[str, ...] = (), cwd: FilePath | None = None) -> Source:
    """Read a file whose content stands at ``prefix`` of the config.

    Raises UnreadableFileError if it is missing, not UTF-8, malformed, or not a table.
    """
    directory = cwd or FilePath.cwd()
    text = _read_text(name, directory)
    if FilePath(name).suffix == ".json":
        tree, lines = _parse_json(name, text), {}
    else:
        tree, lines = _parse_toml(name, text), toml_lines(text)
    for key in reversed(prefix):
        tree = {key: tree}
    return Source(tree=tree, origin=Origin(label=name, lines=lines, prefix=prefix))


def _read_text(name: str, directory: FilePath) -> str:
    """The text of a file; what is wrong with it, if it cannot be read, as an UnreadableFileError."""
    path = directory / name
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) <= MAX_FILE_BYTES:
            return data.decode("utf-8-sig")
        message = f"has more than {MAX_FILE_BYTES} bytes; it is no config file"
    except FileNotFoundError:
        beside = sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else []
        near = close(path.name, [entry for entry in beside if entry.endswith((".toml", ".json"))], most=1)
        hint = f"did you mean {FilePath(name).parent / near[0]}?" if near else "check the path after `@`"
        message = f"no such file in {directory}; {hint}"
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text (byte {error.start}); save it as UTF-8"
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}; check the path after `@`"
    raise UnreadableFileError(Violation(field="@", value=name, message=message, source="command line"))


def _parse_json(name: str, text: str) -> dict[str, Any]:
    try:
        tree = decode_json(text, what="it", reason="CONFIG_INVALID", max_bytes=MAX_FILE_BYTES)
    except CorruptObjectError as error:
        message, source = f"malformed JSON: {error}; fix it", name
        if isinstance(cause := error.__cause__, json.JSONDecodeError):
            message = f"malformed JSON: {cause.msg} (column {cause.colno}); fix the line"
            source = f"{name}:{cause.lineno}"
        raise UnreadableFileError(Violation(field="@", value=name, message=message, source=source)) from error
    if not isinstance(tree, dict):
        message = f"must hold one JSON object, not a {type(tree).__name__}"
        raise UnreadableFileError(Violation(field="@", value=name, message=message, source=name))
    return tree


_TOML_MESSAGE = re.compile(r"^(?P<what>.*) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


def _parse_toml(name: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        message = "its arrays or tables nest too deeply; at most a few levels mean anything"
        raise UnreadableFileError(Violation(field="@", value=name, message=message, source=name)) from error
    except ValueError as error:  # TOMLDecodeError, and numbers of more digits than Python reads
        found = _TOML_MESSAGE.match(str(error))
        lines = text.splitlines() or [""]
        number = int(found["line"]) if found and found["line"] else len(lines)
        what = found["what"] if found else str(error)
        column = f", column {found['column']}" if found and found["column"] else ""
        content = lines[min(number, len(lines)) - 1].strip()
        message = f"malformed TOML: {what} (line {number}{column}); fix the line"
        raise UnreadableFileError(
            Violation(field="@", value=content, message=message, source=f"{name}:{number}")
        ) from error


_HEADER = re.compile(r"^\s*(?P<open>\[\[?)(?P<keys>.+?)\]\]?\s*(#.*)?$")
_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_ASSIGNMENT = re.compile(rf"^\s*(?P<keys>{_KEY}(?:\s*\.\s*{_KEY})*)\s*=(?P<value>.*)$")


def toml_lines(text: str) -> dict[Path, int]:
    """The line (from 1) of every table and key of a TOML document that parses.

    A scan and not a parser: keys of inline tables are found under the key that holds the table.
    """
    lines: dict[Path, int] = {}
    table: Path = ()
    counts: dict[Path, int] = {}
    pending = _Pending()
    for number, line in enumerate(text.splitlines(), start=1):
        if pending.is_open:
            pending.feed(line)
        elif (header := _HEADER.match(line)) and "=" not in header["keys"].split("#")[0]:
            table = _resolve(_split(header["keys"]), counts, is_list=header["open"] == "[[")
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            keys = _split(assignment["keys"])
            for length in range(1, len(keys) + 1):
                lines.setdefault((*table, *keys[:length]), number)
            pending.feed(assignment["value"])
    return lines


def _split(keys: str) -> Path:
    """The parts of a dotted key, quotes removed."""
    return tuple(part.strip("\"'") for part in re.findall(_KEY, keys))


def _resolve(keys: Path, counts: dict[Path, int], *, is_list: bool) -> Path:
    """The path of a table header, with an index after every list of tables on the way."""
    path: Path = ()
    for position, key in enumerate(keys):
        path = (*path, key)
        if is_list and position == len(keys) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path


class _Pending:
    """Whether a value goes on in the next line: an open bracket or a multi-line string."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""

    @property
    def is_open(self) -> bool:
        """Whether the value has not ended."""
        return self._depth > 0 or bool(self._quote)

    def feed(self, text: str) -> None:
        """Read on to the end of a line."""
        position = 0
        while position < len(text):
            position = self._string(text, position) if self._quote else self._plain(text, position)
        if len(self._quote) == 1:  # a one-line string cannot go on
            self._quote = ""

    def _string(self, text: str, position: int) -> int:
        """Go on to behind the end of the string, or to the end of the line."""
        if text[position] == "\\" and '"' in self._quote:
            return position + 2
        if text.startswith(self._quote, position):
            position += len(self._quote)
            self._quote = ""
            return position
        return position + 1

    def _plain(self, text: str, position: int) -> int:
        """Go on by one character outside of strings, counting brackets."""
        for quote in ('"""', "'''", '"', "'"):
            if text.startswith(quote, position):
                self._quote = quote
                return position + len(quote)
        match text[position]:
            case "#":
                return len(text)
            case "[" | "{":
                self._depth += 1
            case "]" | "}":
                self._depth -= 1
        return position + 1
