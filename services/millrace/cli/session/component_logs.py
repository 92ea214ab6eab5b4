"""`millrace run logs RUN --component NAME`: what one service of a run has written."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from millrace.cli.errors import CliError
from millrace.cli.log_files import COMPONENTS, LevelLines, LogTail, RunLines, files_of, stack_logs
from millrace.cli.options import DEFAULT_DIRECTORY
from millrace.cli.stacks import OUTPUTS, running_stacks
from millrace.errors import MillraceError
from millrace.runlog import run_name

if TYPE_CHECKING:
    from millrace.client import Client

_POLL_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """What is to be shown."""

    component: str
    lines: int | None = None
    """The last so many; None: all."""
    is_follow: bool = False
    level: str | None = None
    """Only lines of this level and worse ones."""
    is_all: bool = False
    """Also the lines of a shared stack that are not this run's."""


def require_component(name: str, directories: Iterable[Path]) -> None:
    """CliError with what there is, if neither a service nor a log is called so."""
    there = {path.stem for directory in directories for path in directory.glob("*.log")}
    if name not in COMPONENTS and not any(stem == name or stem.startswith(f"{name}-") for stem in there):
        others = sorted(there - set(COMPONENTS))
        more = f"; beside them lie {', '.join(others)}" if others else ""
        raise CliError(
            f"no component is called {name!r}; there are {', '.join(COMPONENTS)}{more}",
            hint="leave --component out for the events of the run",
        )


def own_logs(text: str) -> Path | None:
    """The directory of logs of the run that is meant, if it had a stack (or a trainer) of its own: no server is asked.

    By its path, the run's name or the beginning of one; `-` is the newest, unless a `millrace up` works here.
    """
    if (Path(text) / "logs").is_dir():
        return Path(text) / "logs"
    found = {path.parent.name: path for path in OUTPUTS.glob("*/logs") if path.parent != DEFAULT_DIRECTORY}
    if text == "-":
        is_shared = any(stack.is_shared for stack in running_stacks())
        return max(found.values(), key=lambda path: path.stat().st_mtime, default=None) if not is_shared else None
    try:
        return found[run_name.resolve(text, {name: name for name in found})]
    except MillraceError:
        return None


async def show_own(directory: Path, query: LogQuery) -> None:
    """Print a log of a stack that serves this run alone; following ends with the stack."""
    await _print(lambda: files_of(directory, query.component), query, is_over=lambda: not _is_running(directory.parent))


async def show_shared(client: "Client", query: LogQuery, *, uid: str, name: str) -> bool:
    """Print the run's lines of a log of the stack that the client talks to; whether its logs are on this machine.

    Following raises what ends it before the run has ended, such as UnavailableError where the server is gone.
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
    """How to see the logs of services that run on other machines, or in containers."""
    follow = " --follow" if is_follow else ""
    pods = f"--namespace millrace logs --selector app.kubernetes.io/component={component} --prefix --tail=-1"
    return (
        f"the process logs of {component} are not on this machine; what follows is what it told the run's log.\n"
        f"  compose:     docker compose logs{follow} {component} | grep {uid}\n"
        f"  Kubernetes:  kubectl {pods}{follow} | grep {uid}"
    )


async def _until_end(client: "Client", name: str) -> None:
    async for _ in client.runs.watch(name):
        pass


def _is_running(directory: Path) -> bool:
    """Whether a stack, or a `millrace sft`, works in the directory."""
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
    """Print the logs, of several each line with its file's name, and what is added to them until `is_over`."""
    tails: dict[Path, LogTail] = {}
    chosen: dict[Path, list[RunLines | LevelLines]] = {}
    kept: deque[str] | None = None if query.lines is None else deque(maxlen=query.lines)
    while True:
        is_last = not query.is_follow or is_over()
        found = files()
        for path in found:
            tail = tails.setdefault(path, LogTail(path))
            if path not in chosen:
                by_level = [] if query.level is None else [LevelLines(query.level)]
                chosen[path] = [*by_level, *([] if of_run is None else [of_run()])]
            front = f"{path.stem}: " if len(found) > 1 else ""
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
