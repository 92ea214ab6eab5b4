"""Runs whose own stack has ended. They are found by their directories, and described from the logs in them."""

import json
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.cli.connection import OUTPUTS, read_stack
from millrace.cli.errors import EXIT_FAILED, CliError
from millrace.cli.options import DEFAULT_DIRECTORY
from millrace.decoding import decode_object
from millrace.errors import (
    AlreadyExistsError,
    CorruptObjectError,
    InvalidStateError,
    MillraceError,
    NotFoundError,
    UnavailableError,
)
from millrace.runlog import names as run_name
from millrace.runlog.records.frontier import ZERO_CHAIN_HASH, Frontier
from millrace.runlog.records.run_record import RL, RunRecord
from millrace.runlog.run_status import is_terminal

if TYPE_CHECKING:
    from millrace.client import Client
    from millrace.config import RLConfig
    from millrace.runlog.run_status import RunStatus
    from millrace.storage import ObjectStore
    from millrace.v1 import event_pb2, run_pb2

# Check a fork before it is made, as far as a client can. The server cannot do a dry run of ForkRun.


async def check_fork(client: "Client", parent: "run_pb2.Run", config: "RLConfig", *, step: int, name: str) -> str:
    """Check step, settings and name of a fork as the server would; return a text about what only the server can check.

    `parent` is the run that is forked, `config` that of the fork, `name` empty if none is chosen. Raises
    InvalidStateError if the step is not available or its settings need another checkpoint, InvalidSpecError if a fork
    cannot have these settings, AlreadyExistsError if the name is taken.
    """
    # They import numpy, which a client that only looks at runs does not have.
    from millrace.orchestrator.new_run import check_config
    from millrace.runlog.fork import ForkPlan

    saved = [int(each.step) for each in await client.runs.checkpoints(parent.name)]
    _require_kept(parent, saved, step)
    base = max((each for each in saved if each <= step), default=0)
    short = parent.name.removeprefix("runs/")
    plan = ForkPlan(
        uid=parent.uid,
        name=short,
        step=step,
        base_step=base,
        checkpoints=tuple(saved),
        chain_hash=ZERO_CHAIN_HASH,
        frontier=Frontier(),
    )
    check_config(config, _record(parent, short), plan)
    if name:
        await _require_free(client, name)
    if step > parent.progress.step:
        return (
            f"step {step} is not trained yet (it is at {parent.progress.step}): the batches before it must be committed"
        )
    return f"that the batches from step {base} on are still kept" if base < step else "nothing more"


def _require_kept(parent: "run_pb2.Run", saved: list[int], step: int) -> None:
    """Raise InvalidStateError if the step is later than all that is committed, or earlier than all that is kept.

    `saved` are the steps that have a checkpoint.
    """
    orchestrator = json.loads(parent.config_json).get("orchestrator", {})
    # A run that goes on may have committed batches beyond its last step.
    ahead = 0 if is_terminal(parent.state) else int(orchestrator.get("async_level") or 1)
    oldest = min(saved, default=0)
    is_whole = not parent.HasField("parent")  # only a run that is no fork begins with the start model
    newest = int(parent.progress.step)
    if step > newest + ahead:
        why, remedy = f"it has {newest} steps", f"choose a step up to {newest}"
    elif step < oldest and not is_whole:
        why, remedy = f"its oldest checkpoint is that of step {oldest}", f"choose a step from {oldest} on"
    else:
        return
    raise InvalidStateError(
        f"run {parent.name.removeprefix('runs/')!r} cannot be forked at step {step}: {why}",
        reason="STEP_NOT_KEPT",
        remedy=remedy,
    )


async def _require_free(client: "Client", name: str) -> None:
    """Raise AlreadyExistsError if the server has a run of this name."""
    try:
        await client.runs.get(f"runs/{name}")
    except NotFoundError:
        return
    raise AlreadyExistsError(f"there is a run {name!r} already", reason="RUN_EXISTS", remedy="choose another --name")


def _record(parent: "run_pb2.Run", name: str) -> RunRecord:
    """Return the record of the parent run, as far as a client knows it."""
    config = json.loads(parent.config_json)
    return RunRecord(uid=parent.uid, name=name, kind=RL, config=config, run_hash=parent.run_hash)


_PATTERNS = ("*/store", "*/*/store", "*/stack.json", "*/*/stack.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """A run whose stack has ended, as its store records it."""

    directory: Path
    run: "run_pb2.Run"
    events: "list[event_pb2.Event]"
    status: "RunStatus"
    """The status after the last event."""

    @property
    def note(self) -> str:
        """Return a line that tells the user which directory the data was read from."""
        return f"note: the stack of {self.run.name} has ended; read from its log in {self.directory}"

    def explain(self) -> str:
        """Describe how the run ended; if only its stack has ended, how to continue the run."""
        from millrace.runlog.run_status import ended_words, is_terminal, resumed_words, state_name

        status = self.status
        name = self.run.name.removeprefix("runs/")
        if is_terminal(status.state):
            go_on = f"; the same command with --name {name} --resume goes on with it"
            return ended_words(name, status) + (go_on if status.error is not None else "")
        words = f"run {name} has not ended, and nothing works on it: its stack was stopped or killed while it was "
        words += f"{state_name(status.state)}, after step {status.num_steps}"
        if status.resumed is not None:
            words += f"; {resumed_words(status.resumed)}"
        return f"{words}; it goes on with the command that it was started with, and --name {name} --resume"


def ask_or_read(
    server: str | None,
    work: "Callable[[Client], Coroutine[Any, Any, None]]",
    read: Callable[[EndedRun], None],
    *,
    run: str,
) -> None:
    """Call `work` with a client of the run's server, or `read` with the run if its own stack has ended.

    `server` is the value of `--server`, `run` what the user called the run. If an option or the environment names a
    server, only that server is asked. Raises UnavailableError or NotFoundError if the run is in neither place, CliError
    if several directories have a run of that name.
    """
    from millrace.cli.connection import ask_server, is_listening, server_address

    try:
        address, origin = server_address(server, run=run)
    except CliError:  # several stacks run here, and none of them is the run's alone
        if (ended := find_ended(run)) is None:
            raise
        return _show(ended, read)
    if origin in ("--server", "MILLRACE_SERVER"):
        return ask_server(server, work, run=run)
    if not is_listening(address) and (ended := find_ended(run)) is not None:
        return _show(ended, read)
    try:
        return ask_server(server, work, run=run)
    except (NotFoundError, UnavailableError) as error:
        if error.reason not in ("RUN_NOT_FOUND", "UNREACHABLE"):
            raise
        if (ended := find_ended(run)) is None:
            raise type(error)(
                f"{error.message}; and none of the ended local runs below {OUTPUTS}/ is {run!r}",
                reason=error.reason,
                remedy=f"{error.remedy}; a local run that wrote elsewhere is named by its directory",
                metadata=error.metadata,
            ) from error
        return _show(ended, read)


def refuse(ended: EndedRun) -> None:
    """Raise CliError: no process works on the run, so a request to it cannot be answered."""
    name = ended.run.name.removeprefix("runs/")
    hint = f"the command that it was started with, and --name {name} --resume, goes on with a run that is not done; "
    hint += "--ckpt.resume_step K begins a fork of it at step K"
    raise CliError(ended.explain(), hint=hint, exit_code=EXIT_FAILED)


def _show(ended: EndedRun, read: Callable[[EndedRun], None]) -> None:
    """Print a note that the run is read from its directory, and call `read` with the run."""
    import click

    click.echo(ended.note, err=True)
    read(ended)


def find_ended(text: str, *, root: Path = OUTPUTS) -> EndedRun | None:
    """Return the ended run that `text` refers to; None if there is none.

    `text` is a directory, a name or its unique beginning, or `-` for the newest.
    """
    directory = _directory_of(text, root)
    return None if directory is None else read_ended(directory)


def _directory_of(text: str, root: Path) -> Path | None:
    """Return the directory of the ended run that `text` refers to; None if there is none.

    `text` is a directory, or below `root` a run's name, the unique beginning of one, or `-` for the newest. Raises
    CliError if several directories below `root` have that name.
    """
    if text != "-" and _is_ended(Path(text)):
        return Path(text)
    found: dict[str, list[Path]] = {}
    for path in _directories(root):
        found.setdefault(path.name, []).append(path)
    if text == "-":
        newest = [path for same in found.values() for path in same]
        return max(newest, key=lambda path: path.stat().st_mtime, default=None)
    try:
        meant = found[run_name.resolve(text, {name: name for name in found})]
    except NotFoundError:
        return None
    if len(meant) > 1:
        lines = "\n".join(f"  - {path}" for path in meant)
        raise CliError(
            f"{len(meant)} ended local runs are called {meant[0].name!r}:\n{lines}",
            hint=f"name one by its directory, such as {meant[0]}",
        )
    return meant[0]


def _directories(root: Path) -> list[Path]:
    """Return the directories, one or two levels below `root`, whose stack has ended, sorted.

    A stack is the services that one command started on this machine, mostly for one run. It left a `stack.json` or a
    `store` in its directory. It has ended if its supervisor does not live any more. The `DEFAULT_DIRECTORY` of
    `millrace up` is left out.
    """
    paths = sorted({path.parent for pattern in _PATTERNS for path in root.glob(pattern)})
    return [path for path in paths if path != DEFAULT_DIRECTORY and _is_ended(path)]


def list_ended(*, note: Callable[[str], None], root: Path = OUTPUTS) -> Iterator[EndedRun]:
    """Yield the ended runs below `root`, the most recently changed first.

    Those that cannot be read are reported with `note`.
    """
    for path in sorted(_directories(root), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            yield read_ended(path)
        except NotFoundError:  # what `millrace up --dir` leaves has no run of its name
            continue
        except MillraceError as error:
            note(f"note: {path} is left out: {error.message}")


def _is_ended(directory: Path) -> bool:
    """Return whether a stack worked in the directory and has ended."""
    has_worked = (directory / "stack.json").is_file() or (directory / "store").is_dir()
    return has_worked and read_stack(directory) is None


def read_ended(directory: Path) -> EndedRun:
    """Read the run of a directory from its store. Raises MillraceError if there is none, or if it cannot be read."""
    from millrace.cli.offline.run_store import find_uid
    from millrace.decoding import MAX_JSON_BYTES
    from millrace.runlog.event_archive import load_archived_events, readable_event
    from millrace.runlog.names import Names
    from millrace.runlog.records.run_record import RunRecord
    from millrace.runlog.run_status import RunStatus

    store, prefix = _store_of(directory)
    uid = find_uid(store, prefix, directory.resolve().name)
    names = Names(prefix, uid)
    record = RunRecord.decode(store.get(names.run_json, max_bytes=MAX_JSON_BYTES), where=store.uri(names.run_json))
    events = [readable_event(entry) for entry in load_archived_events(store, names)]
    run = record.describe()
    known, status = [event for event in events if event is not None], RunStatus.begin(run)
    for event in known:
        status.apply(event)
    status.fill(run)
    return EndedRun(directory=directory, run=run, events=known, status=status)


def _store_of(directory: Path) -> "tuple[ObjectStore, str]":
    """Return the object store of an ended stack, and the deployment's prefix in it."""
    from millrace.cli.offline.run_store import store_prefix
    from millrace.storage import open_store

    own = directory / "store"
    url = own.resolve().as_uri() if own.is_dir() else _stack_file(directory).get("store")
    if not isinstance(url, str):
        raise CliError(f"{directory}/stack.json names no store", hint="read it where it is: millrace run audit --store")
    return open_store(url), store_prefix(None)


def _stack_file(directory: Path) -> Mapping[str, Any]:
    """Return the contents of `stack.json` in the directory; empty if there is no readable one."""
    path = directory / "stack.json"
    try:
        return decode_object(path.read_bytes(), what=str(path), reason="STACK_FILE_CORRUPT")
    except (CorruptObjectError, OSError):
        return {}
