"""The log files of a local stack's processes: where they are, which lines belong to a run, and `run logs
--component`.
"""

import asyncio
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from millrace.cli.connection import OUTPUTS, running_stacks
from millrace.cli.errors import CliError
from millrace.cli.options import DEFAULT_DIRECTORY
from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, MillraceError
from millrace.runlog import names

if TYPE_CHECKING:
    from millrace.client import Client

LEVELS = ("debug", "info", "warning", "error")
COMPONENTS = ("orchestrator", "env-server", "inference", "trainer")
_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 20
_PATIENCE = 10
"""How many reads of an emptied file wait for its contents to appear as the rotated file."""
_OURS = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ ")
_RUN = re.compile(r" run=(\S+)")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def process_logs(address: str, run_name: str, *, component: str | None = None, root: Path | None = None) -> list[Path]:
    """Return the log files of the stack that listens on `address`, and of the own stack of the run `run_name`.

    Both are looked for below `root`; None: below `outputs`. With `component`, only that component's files are returned.
    """
    base = root or OUTPUTS
    directories = [base / run_name.removeprefix("runs/") / "logs", *stack_logs(address, root=root)]
    files = {path.resolve() for directory in directories for path in directory.glob("*.log")}
    return sorted(path for path in files if component is None or is_of(path, component))


def stack_logs(address: str, *, root: Path | None = None) -> list[Path]:
    """Return the log directories of the stacks below `root` that listen on `address`."""
    found = [stack.text("logs") for stack in running_stacks(root or OUTPUTS) if stack.address == address]
    return [Path(logs) for logs in found if logs is not None]


def files_of(directory: Path, component: str) -> list[Path]:
    """Return the log files of one component, with those of its replicas or ranks."""
    return sorted(path for path in directory.glob("*.log") if is_of(path, component))


def is_of(path: Path, component: str) -> bool:
    """Return whether the file is `component.log`, or a replica's or a rank's file, such as `trainer-rank-1.log`."""
    return path.stem == component or path.stem.startswith(f"{component}-")


class RunLines:
    """Selects the lines of one run in a log file.

    Keeps state: lines without a header belong to the line before them.
    """

    def __init__(self, uid: str, name: str) -> None:
        """Select lines that name the run by its uid or its name, with or without `runs/`."""
        self._names = frozenset({uid, name, f"runs/{name}"})
        self._is_own = False

    def has(self, line: str) -> bool:
        """Return whether the line belongs to the run: it names the run, or continues a line that does, as a
        traceback.
        """
        if line.startswith("{"):
            self._is_own = _json_run(line) in self._names
        elif _OURS.match(line):
            self._is_own = not self._names.isdisjoint(_RUN.findall(line))
        return self._is_own


class LevelLines:
    """Selects the lines of one level and of worse ones in a log file. Keeps state, as `RunLines`."""

    def __init__(self, level: str) -> None:
        """Select lines of `level`, one of `LEVELS`, and of worse levels."""
        self._levels = frozenset(name.upper() for name in LEVELS[LEVELS.index(level) :])
        self._is_shown = False

    def has(self, line: str) -> bool:
        """Return whether the line has such a level, or continues a line that does, as a traceback."""
        if line.startswith("{"):
            self._is_shown = _json_field(line, "level").upper() in self._levels
        elif _OURS.match(line):
            self._is_shown = line.split(" ", 2)[1] in self._levels
        return self._is_shown


def _json_run(line: str) -> str:
    return _json_field(line, "run")


def _json_field(line: str, name: str) -> str:
    """Return a field of a log line that is a JSON object, as text; empty if it has none, or the line is damaged."""
    try:
        return str(decode_object(line.encode(), what="a line of a log", reason="LINE_UNREADABLE").get(name, ""))
    except CorruptObjectError:
        return ""


class LogTail:
    """Reads a log file from the beginning, the rotated file first, then whatever is appended to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._old = path.with_name(f"{path.name}.1")
        self._old_seen = self._identity()
        self._at = 0
        self._rest = b""
        self._is_begun = False
        self._num_emptied = 0

    def read(self) -> Iterator[str]:
        """Yield the complete lines that were added since the last call, without terminal control characters.

        The first call yields all, those of the rotated file first.
        """
        found = self._identity()
        if not self._is_begun or found != self._old_seen:  # the file that was read so far is the old one now
            self._old_seen = found
            if found is not None:
                yield from self._lines(self._old, self._at)
            self._at = 0
            self._is_begun = True
        size = self._size()
        if size < self._at:  # emptied: what was in it appears as the old file, or was thrown away by somebody
            # A rotation empties the file before it puts the copy in its place: for a moment the lines are in neither.
            self._num_emptied += 1
            if self._num_emptied < _PATIENCE:
                return
            self._at = 0
        self._num_emptied = 0
        yield from self._lines(self.path, self._at)

    def finish(self) -> Iterator[str]:
        """Yield the last line if it has no line end. To be called once nothing more is written."""
        rest, self._rest = self._rest, b""
        if rest:
            yield _text(rest)

    def _lines(self, path: Path, begin: int) -> Iterator[str]:
        """Yield the complete lines of a file from the byte `begin` on, and remember where they end.

        The rest of an incomplete line is kept for the next call.
        """
        try:
            source = path.open("rb")
        except FileNotFoundError:
            return
        with source:
            source.seek(begin)
            while chunk := source.read(_CHUNK_BYTES):
                self._at = source.tell()
                *whole, self._rest = (self._rest + chunk).split(b"\n")
                # A line without an end is passed on in pieces, so that it does not grow in memory.
                if len(self._rest) > _MAX_LINE_BYTES:
                    whole, self._rest = [*whole, self._rest], b""
                yield from map(_text, whole)

    def _identity(self) -> tuple[int, int] | None:
        """Return inode and modification time of the rotated file, by which a rotation is noticed; None if there is no
        such file.
        """
        try:
            found = self._old.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _size(self) -> int:
        """Return the size of the file in bytes; 0 if it does not exist."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


def _text(line: bytes) -> str:
    """Return the text of a line without terminal control characters."""
    return _CONTROL.sub("", line.decode(errors="replace").rstrip("\r"))


# `millrace run logs RUN --component NAME`: what one service of a run has written.

_POLL_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """Which lines of which component are printed."""

    component: str
    lines: int | None = None
    """Print only the last so many lines; None prints all."""
    is_follow: bool = False
    level: str | None = None
    """Only lines of this level and of worse ones."""
    is_all: bool = False
    """Whether lines of other runs on a shared stack are printed, too."""


def require_component(name: str, directories: Iterable[Path]) -> None:
    """Raise CliError with the known names if `name` is neither a service nor has a log file in `directories`."""
    there = {path.stem for directory in directories for path in directory.glob("*.log")}
    if name not in COMPONENTS and not any(stem == name or stem.startswith(f"{name}-") for stem in there):
        others = sorted(there - set(COMPONENTS))
        more = f"; beside them are {', '.join(others)}" if others else ""
        raise CliError(
            f"no component is called {name!r}; there are {', '.join(COMPONENTS)}{more}",
            hint="leave --component out for the events of the run",
        )


def own_logs(text: str) -> Path | None:
    """Return the log directory of a run that has its own stack or trainer; None if no such run is found.

    `text` is a path, the run's name or the unique beginning of one. With `-` the newest directory is returned; None if
    a shared stack (`millrace up`) is running, because the newest run may be one of that stack.
    """
    if (Path(text) / "logs").is_dir():
        return Path(text) / "logs"
    found = {path.parent.name: path for path in OUTPUTS.glob("*/logs") if path.parent != DEFAULT_DIRECTORY}
    if text == "-":
        is_shared = any(stack.is_shared for stack in running_stacks())
        return max(found.values(), key=lambda path: path.stat().st_mtime, default=None) if not is_shared else None
    try:
        return found[names.resolve(text, {name: name for name in found})]
    except MillraceError:
        return None


async def show_own(directory: Path, query: LogQuery) -> None:
    """Print the log lines that `query` selects in `directory`, the logs of a stack that serves a single run.

    With `query.is_follow` new lines are printed until the stack ends.
    """
    await _print(lambda: files_of(directory, query.component), query, is_over=lambda: not _is_running(directory.parent))


async def show_shared(client: "Client", query: LogQuery, *, uid: str, name: str) -> bool:
    """Print the run's lines from the logs of the stack that `client` is connected to.

    Return False if its logs are not on this machine. While following, errors of the connection are raised, such as
    UnavailableError.
    """
    directories = stack_logs(client.address, root=OUTPUTS)
    require_component(query.component, directories)

    def files() -> list[Path]:
        return [path for directory in directories for path in files_of(directory, query.component)]

    if not files():
        return False
    name = name.removeprefix("runs/")
    if not query.is_all:
        click.echo(f"only lines of {name}: the stack serves other runs, too (--all shows every line)", err=True)
    ended = asyncio.create_task(_until_end(client, f"runs/{name}")) if query.is_follow else None
    try:
        of_run = None if query.is_all else lambda: RunLines(uid, name)
        await _print(files, query, is_over=lambda: ended is None or ended.done(), of_run=of_run)
        if ended is not None:
            ended.result()  # the run has ended, or nobody says any more whether it has
    finally:
        if ended is not None:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)
    return True


def elsewhere(component: str, uid: str, *, is_follow: bool) -> str:
    """Return a message: how to see the logs of a component that runs on other machines or in containers."""
    follow = " --follow" if is_follow else ""
    pods = f"--namespace millrace logs --selector app.kubernetes.io/component={component} --prefix --tail=-1"
    return (
        f"the process logs of {component} are not on this machine; what follows is what it wrote to the run's log.\n"
        f"  compose:     docker compose logs{follow} {component} | grep {uid}\n"
        f"  Kubernetes:  kubectl {pods}{follow} | grep {uid}"
    )


async def _until_end(client: "Client", name: str) -> None:
    """Wait until the run has ended."""
    async for _ in client.runs.watch(name):
        pass


def _is_running(directory: Path) -> bool:
    """Return whether a stack or a `millrace sft` is running in the directory."""
    from millrace.local.directory import StackId

    try:
        stack = StackId.parse((directory / ".lock").read_text())
    except FileNotFoundError:
        return False
    return stack is not None and stack.is_supervised


async def _print(
    files: Callable[[], list[Path]],
    query: LogQuery,
    *,
    is_over: Callable[[], bool],
    of_run: Callable[[], RunLines] | None = None,
) -> None:
    """Print the lines of `files()` that the query selects; with `is_follow` also those that are added until
    `is_over()`.

    `files` is called before each read, because replicas may have started. `of_run` makes the object that selects the
    lines of a run in one file; None selects all lines. With several files, each line begins with its file's name.
    """
    tails: dict[Path, LogTail] = {}
    chosen: dict[Path, list[RunLines | LevelLines]] = {}
    kept: deque[str] | None = None if query.lines is None else deque(maxlen=query.lines)
    while True:
        # Asked before the read: what is written until the end is still printed.
        is_last = not query.is_follow or is_over()
        found = files()
        for path in found:
            tail = tails.setdefault(path, LogTail(path))
            if path not in chosen:
                by_level = [] if query.level is None else [LevelLines(query.level)]
                chosen[path] = [*by_level, *([] if of_run is None else [of_run()])]
            front = f"{path.stem}: " if len(found) > 1 else ""
            # What has no line end is only complete once nothing more is written.
            for line in itertools.chain(tail.read(), tail.finish() if is_last else ()):
                if not all(tuple(each.has(line) for each in chosen[path])):  # each sees every line
                    continue
                if kept is None:
                    click.echo(front + line)
                else:
                    kept.append(front + line)
        for line in kept or ():
            click.echo(line)
        kept = None
        if is_last:
            return
        await asyncio.sleep(_POLL_S)
