"""Config files: TOML and JSON, with the line of every key."""

import json
import re
import tomllib
from pathlib import Path as FilePath
from typing import Any

from millrace.config.layers import Layer, Provenance, put
from millrace.config.messages import close
from millrace.config.tree import Path
from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError, Violation

MAX_FILE_BYTES = 16 << 20
"""Largest config file that is read."""


class UnreadableFileError(ValueError):
    """A config file that gives no tree; holds the violation to report."""

    def __init__(self, name: str, message: str, *, source: str) -> None:
        """Hold the violation to report.

        `name` is the file or the line that is wrong, `source` the file with the line number.
        """
        self.violation = Violation(field="@", value=name, message=message, source=source)
        super().__init__(str(self.violation))


def read_file(name: str, *, prefix: tuple[str, ...] = (), cwd: FilePath | None = None) -> Layer:
    """Return the content of a JSON file (`.json`) or TOML file, with the line of every key of TOML.

    The content belongs at ``prefix`` of the config. Names are relative to `cwd`, None being the current directory.
    Raises UnreadableFileError if the file is missing, not UTF-8, malformed, or not a table.
    """
    text = _read_text(name, cwd or FilePath.cwd())
    is_json = FilePath(name).suffix == ".json"
    content = _parse_json(name, text) if is_json else _parse_toml(name, text)
    lines = {} if is_json else toml_lines(text)
    tree: dict[str, Any] = {}
    put(tree, prefix, content) if prefix else tree.update(content)
    places: dict[Path, str] = {(*prefix, *path): f"{name}:{line}" for path, line in lines.items()}
    return Layer(tree=tree, origin=Provenance(label=name, places=places))


def _read_text(name: str, directory: FilePath) -> str:
    """Return the text of the file `name` in `directory`.

    Raise UnreadableFileError with the reason if it cannot be read. A missing file's message names the most similar
    config file beside it.
    """
    path = directory / name
    try:
        with path.open("rb") as file:
            # One byte more shows that there is more; the file may be a device without an end.
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) <= MAX_FILE_BYTES:
            return data.decode("utf-8-sig")
        message = f"has more than {MAX_FILE_BYTES} bytes; it is no config file"
    except FileNotFoundError:
        near = near_file(path)
        hint = f"did you mean {FilePath(name).parent / near}?" if near else "check the path after `@`"
        message = f"no such file in {directory}; {hint}"
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text (byte {error.start}); save it as UTF-8"
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}; check the path after `@`"
    raise UnreadableFileError(name, message, source="command line")


def near_file(path: FilePath, endings: tuple[str, ...] = (".toml", ".json")) -> str:
    """Return the name of a file beside the missing one at `path` that is most like its name; "" if there is none.

    Only files with these endings count.
    """
    beside = sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else []
    found = close(path.name, [name for name in beside if name.endswith(endings)], most=1)
    return found[0] if found else ""


def _parse_json(name: str, text: str) -> dict[str, Any]:
    """Return the JSON object in `text`.

    Raise UnreadableFileError, with the line of the file `name`, for anything else.
    """
    try:
        tree = decode_json(text, what="it", reason="CONFIG_INVALID", max_bytes=MAX_FILE_BYTES)
    except CorruptObjectError as error:
        message, source = f"malformed JSON: {error}; fix it", name
        if isinstance(cause := error.__cause__, json.JSONDecodeError):
            message = f"malformed JSON: {cause.msg} (column {cause.colno}); fix the line"
            source = f"{name}:{cause.lineno}"
        raise UnreadableFileError(name, message, source=source) from error
    if not isinstance(tree, dict):
        raise UnreadableFileError(name, f"must hold one JSON object, not a {type(tree).__name__}", source=name)
    return tree


_TOML_MESSAGE = re.compile(r"^(?P<what>.*) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


def _parse_toml(name: str, text: str) -> dict[str, Any]:
    """Return the tables of the TOML document `text`.

    Raise UnreadableFileError with the wrong line of the file `name`.
    """
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        message = "its arrays or tables nest too deeply; at most a few levels mean anything"
        raise UnreadableFileError(name, message, source=name) from error
    except ValueError as error:  # TOMLDecodeError, and numbers of more digits than Python reads
        found = _TOML_MESSAGE.match(str(error))
        lines = text.splitlines() or [""]
        number = int(found["line"]) if found and found["line"] else len(lines)
        what = found["what"] if found else str(error)
        column = f", column {found['column']}" if found and found["column"] else ""
        content = lines[min(number, len(lines)) - 1].strip()
        message = f"malformed TOML: {what} (line {number}{column}); fix the line"
        raise UnreadableFileError(content, message, source=f"{name}:{number}") from error


_HEADER = re.compile(r"^\s*(?P<open>\[\[?)(?P<keys>.+?)\]\]?\s*(#.*)?$")
_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_ASSIGNMENT = re.compile(rf"^\s*(?P<keys>{_KEY}(?:\s*\.\s*{_KEY})*)\s*=(?P<value>.*)$")
_TOKEN = re.compile(r"""\"{3}|'{3}|"(?:\\.|[^"\\])*"|'[^']*'|\#.*|[][{}]""")
_STRING_END = {'"""': re.compile(r'(?:\\.|[^\\])*?"{3}'), "'''": re.compile(r".*?'{3}")}


def toml_lines(text: str) -> dict[Path, int]:
    """Return the line, from 1, of every table and key of a valid TOML document, by path.

    The text is scanned, not parsed: keys of inline tables are missing, for the line of the key that holds the table
    counts.
    """
    lines: dict[Path, int] = {}
    table: Path = ()
    counts: dict[Path, int] = {}
    quote, depth = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if quote or depth > 0:
            quote, depth = _read_on(line, quote, depth)
        elif (header := _HEADER.match(line)) and "=" not in header["keys"].split("#")[0]:
            table = _resolve(_split(header["keys"]), counts, is_list=header["open"] == "[[")
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            keys = _split(assignment["keys"])
            for length in range(1, len(keys) + 1):
                lines.setdefault((*table, *keys[:length]), number)
            quote, depth = _read_on(assignment["value"], "", 0)
    return lines


def _split(keys: str) -> Path:
    """Return the parts of a dotted key, quotes removed."""
    return tuple(part.strip("\"'") for part in re.findall(_KEY, keys))


def _resolve(keys: Path, counts: dict[Path, int], *, is_list: bool) -> Path:
    """Return the path of a table header with the index of the current table after every list of tables in it.

    `counts` has the index of the last table of each list. A header of a list (`is_list`) begins its next table there.
    """
    path: Path = ()
    for position, key in enumerate(keys):
        path = (*path, key)
        if is_list and position == len(keys) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path


def _read_on(text: str, quote: str, depth: int) -> tuple[str, int]:
    """Return the quotes of the multi-line string, and the depth of brackets, that are open at the end of the line
    `text`.

    `quote` and `depth` are those open at its beginning; "" and 0 mean none.
    """
    position = 0
    while position < len(text):
        found = _STRING_END[quote].match(text, position) if quote else _TOKEN.search(text, position)
        if found is None:
            break
        position, token = found.end(), found[0]
        depth += 0 if quote else (token in ("[", "{")) - (token in ("]", "}"))
        quote = token if not quote and token in _STRING_END else ""
    return quote, depth
