"""The logs of a local stack's processes: where they lie, which lines are a run's, and what is added to them."""

import re
from collections.abc import Iterator
from pathlib import Path

from millrace.cli.stacks import OUTPUTS, running_stacks
from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError

LEVELS = ("debug", "info", "warning", "error")
COMPONENTS = ("orchestrator", "env-server", "inference", "trainer")
_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 20
_PATIENCE = 10
"""How many looks at an emptied file wait for what was in it to appear as the old one."""
_OURS = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ ")
_RUN = re.compile(r" run=(\S+)")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def process_logs(address: str, run_name: str, *, component: str | None = None, root: Path | None = None) -> list[Path]:
    """Log files of the stack that listens on `address`, and of the run's own stack; only `component`'s if given."""
    base = root or OUTPUTS
    directories = [base / run_name.removeprefix("runs/") / "logs", *stack_logs(address, root=root)]
    files = {path.resolve() for directory in directories for path in directory.glob("*.log")}
    return sorted(path for path in files if component is None or is_of(path, component))


def stack_logs(address: str, *, root: Path | None = None) -> list[Path]:
    """The directories of logs of the stacks below `root` that listen on `address`."""
    found = [stack.text("logs") for stack in running_stacks(root or OUTPUTS) if stack.address == address]
    return [Path(logs) for logs in found if logs is not None]


def files_of(directory: Path, component: str) -> list[Path]:
    """The logs of one component, of each of its replicas or ranks."""
    return sorted(path for path in directory.glob("*.log") if is_of(path, component))


def is_of(path: Path, component: str) -> bool:
    """Whether the file is `component.log`, or that of one of its replicas or ranks, such as `trainer-rank-1.log`."""
    return path.stem == component or path.stem.startswith(f"{component}-")


class RunLines:
    """Tells the lines of one run, in one file, from those of other runs and of the service itself."""

    def __init__(self, uid: str, name: str) -> None:
        self._names = frozenset({uid, name, f"runs/{name}"})
        self._is_own = False

    def has(self, line: str) -> bool:
        """Whether the line names the run, or belongs to the last one that does, as a traceback."""
        if line.startswith("{"):
            self._is_own = _json_run(line) in self._names
        elif _OURS.match(line):
            self._is_own = not self._names.isdisjoint(_RUN.findall(line))
        return self._is_own


class LevelLines:
    """Tells the lines of a level and of worse ones, in one file, from the others."""

    def __init__(self, level: str) -> None:
        """`level` is one of `LEVELS`."""
        self._levels = frozenset(name.upper() for name in LEVELS[LEVELS.index(level) :])
        self._is_shown = False

    def has(self, line: str) -> bool:
        """Return whether the line is of such a level, or belongs to the last one that is, as a traceback."""
        if line.startswith("{"):
            self._is_shown = _json_field(line, "level").upper() in self._levels
        elif _OURS.match(line):
            self._is_shown = line.split(" ", 2)[1] in self._levels
        return self._is_shown


def _json_run(line: str) -> str:
    return _json_field(line, "run")


def _json_field(line: str, name: str) -> str:
    try:
        return str(decode_object(line.encode(), what="a line of a log", reason="LINE_UNREADABLE").get(name, ""))
    except CorruptObjectError:
        return ""


class LogTail:
    """Reads a log from its beginning, the old file's included, and then what is added to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._old = path.with_name(f"{path.name}.1")
        self._old_seen = self._identity()
        self._at = 0
        self._rest = b""
        self._is_begun = False
        self._num_emptied = 0

    def read(self) -> Iterator[str]:
        """The whole lines that were added since the last call, without the control characters of a terminal."""
        found = self._identity()
        if not self._is_begun or found != self._old_seen:  # the file that was read so far is the old one now
            self._old_seen = found
            if found is not None:
                yield from self._lines(self._old, self._at)
            self._at = 0
            self._is_begun = True
        size = self._size()
        if size < self._at:  # emptied: what was in it appears as the old file, or was thrown away by somebody
            self._num_emptied += 1
            if self._num_emptied < _PATIENCE:
                return
            self._at = 0
        self._num_emptied = 0
        yield from self._lines(self.path, self._at)

    def finish(self) -> Iterator[str]:
        """What is left when nothing is added any more: a line without its end."""
        rest, self._rest = self._rest, b""
        if rest:
            yield _text(rest)

    def _lines(self, path: Path, begin: int) -> Iterator[str]:
        try:
            source = path.open("rb")
        except FileNotFoundError:
            return
        with source:
            source.seek(begin)
            while chunk := source.read(_CHUNK_BYTES):
                self._at = source.tell()
                *whole, self._rest = (self._rest + chunk).split(b"\n")
                if len(self._rest) > _MAX_LINE_BYTES:
                    whole, self._rest = [*whole, self._rest], b""
                yield from map(_text, whole)

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._old.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


def _text(line: bytes) -> str:
    return _CONTROL.sub("", line.decode(errors="replace").rstrip("\r"))
