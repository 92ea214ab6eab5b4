"""Find and read runs without a server: which object store, which run, and what is known about it."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.connection import running_stacks
from millrace.cli.errors import CliError
from millrace.cli.options import DEFAULT_DIRECTORY
from millrace.errors import InvalidSpecError, NotFoundError, UnavailableError
from millrace.runlog.names import Names
from millrace.runlog.records.run_record import RunRecord
from millrace.storage import ObjectStore
from millrace.storage.scratch import scratch_parent
from millrace.telemetry.settings import Settings

if TYPE_CHECKING:
    from millrace.client import Client
    from millrace.readers.dashboard.reader import Reader

_UID = re.compile(r"[a-z0-9]{20,60}")

_OUTPUTS = Path("outputs")
_MOST_NAMED = 8
DEFAULT_STORE = DEFAULT_DIRECTORY / "store"
"""The object store of `millrace up`, relative to the directory in which that was started."""


def open_run_store(url: str | None, *, environ: Mapping[str, str] = os.environ) -> "ObjectStore":
    """Open the object store at `url`, MILLRACE_STORE_URL, or the one of `millrace up`, in this order.

    Raises CliError if none is given and none is here, or if its directory does not exist.
    """
    from millrace.storage import open_store

    with naming("--store" if url else None):
        return open_store(_run_store_url(url, environ))


def _run_store_url(url: str | None, environ: Mapping[str, str]) -> str:
    """Return the URL of the object store: `url`, MILLRACE_STORE_URL, or the directory of `millrace up`, in this order.

    Raises CliError if none is given and none is here, or if its directory does not exist.
    """
    chosen = url or Settings.from_env(environ).store_url
    if chosen is None:
        if not DEFAULT_STORE.is_dir():
            raise CliError(
                f"no object store is named, and there is no {DEFAULT_STORE} here",
                hint="use --store file:///absolute/directory or s3://bucket/prefix, set MILLRACE_STORE_URL, or go to "
                "the directory in which `millrace up` was started",
            )
        chosen = DEFAULT_STORE.resolve().as_uri()
    path = Path(chosen.removeprefix("file://"))
    if chosen.startswith("file://") and not path.is_dir():
        raise CliError(f"the object store {chosen} is not there", hint="check the path; nothing was created")
    return chosen


@contextlib.contextmanager
def naming(option: str | None) -> Iterator[None]:
    """Name the command-line option in an InvalidSpecError of the block: `option` replaces the field of each violation.

    With `option` None the error is raised unchanged.
    """
    try:
        yield
    except InvalidSpecError as error:
        if option is None:
            raise
        found = [replace(each, field=option, source="command line") for each in error.violations]
        raise InvalidSpecError(found, remedy=error.remedy) from error


def redis_url(text: str) -> str:
    """Return the Redis URL for `--redis`: the text itself, or the URL in the file that it names.

    Raises CliError if it is neither.
    """
    if "://" in text:
        return text
    try:
        return Settings.from_env({"MILLRACE_REDIS_URL_FILE": text}).require("redis_url")
    except InvalidSpecError as error:
        raise CliError(
            f"--redis {text} is neither a URL nor a file that holds one: {error.violations[0].message}",
            hint="a stack on this machine names the file in its stack.json (redis_url_file)",
        ) from None


def store_prefix(prefix: str | None, *, environ: Mapping[str, str] = os.environ) -> str:
    """Return the deployment's prefix: the option, MILLRACE_PREFIX, or the default."""
    return prefix or Settings.from_env(environ).prefix


def find_uid(store: "ObjectStore", prefix: str, text: str) -> str:
    """Return the uid of the run that `text` refers to: a name, `runs/{name}`, the unique beginning of a name, a uid, or
    `-` for the newest run. Raises NotFoundError if there is none.
    """
    from millrace.runlog import names as run_name
    from millrace.runlog.index import read_names
    from millrace.runlog.names import Deployment

    index = read_names(store, Deployment(prefix))
    uids = index.runs
    if text not in uids and _UID.fullmatch(text) and _exists(store, prefix, text):
        return text  # also where its name leads nowhere
    name_only = text.removeprefix("runs/")
    if name_only in index.damaged:
        raise index.damaged[name_only]
    name = run_name.resolve(
        text, uids, holder=f"{store.describe()} holds", remedy=f"check --store and --prefix (now {prefix!r})"
    )
    return uids[name]


def store_of(name: str, url: str | None) -> "tuple[ObjectStore, str]":
    """Return the object store that has the run, and the run's name in it.

    `name` is what the user called the run; `url` is the value of `--store`. Without one, the first choice is the store
    in the run's own directory of results, then the store of a running stack, then `open_run_store`. Raises
    NotFoundError if only other local runs are found.
    """
    from millrace.storage import open_store

    found, meant = store_url_of(name, url)
    with naming("--store" if url else None):
        return open_store(found), meant


def store_url_of(name: str, url: str | None) -> tuple[str, str]:
    """Return the URL of the object store that has the run `name`, and the run's name in it.

    `url` is the value of `--store`. Without one, the first choice is the store in the run's own directory of results,
    then that of a running stack, MILLRACE_STORE_URL, and that of `millrace up`. Raises NotFoundError if only other
    local runs are found.
    """
    if url is None and (directory := directory_of(name)) is not None:
        return (directory / "store").resolve().as_uri(), directory.resolve().name
    if url is None and (running := _running_store()) is not None:
        return running, name
    local = sorted(path.parent.name for path in _OUTPUTS.glob("*/store") if path.parent.name != "local")
    if url is None and local and not DEFAULT_STORE.is_dir() and Settings.from_env(os.environ).store_url is None:
        more = ", …" if len(local) > _MOST_NAMED else ""
        raise NotFoundError(
            f"none of the runs below {_OUTPUTS}/ is {name!r}: there {'is' if len(local) == 1 else 'are'} "
            f"{', '.join(local[:_MOST_NAMED])}{more}",
            reason="RUN_NOT_FOUND",
            remedy="name one of them, a run's directory elsewhere, or the store that holds it: --store URL",
        )
    return _run_store_url(url, os.environ), name


def open_run(
    name: str, url: str | None, prefix: str | None, *, is_written: bool = False
) -> "tuple[ObjectStore, str, str]":
    """Return the object store that has the run, the deployment's prefix, and the run's uid.

    `name`, `url` and `prefix` are what the user wrote: RUN, `--store` and `--prefix`. With `is_written`, the store is
    tested first: raises InvalidStateError if it cannot carry runs.
    """
    from millrace.storage.self_test import require_tested

    (objects, meant), deployment = store_of(name, url), store_prefix(prefix)
    if is_written:
        require_tested(objects, prefix=deployment).result()
    return objects, deployment, find_uid(objects, deployment, meant)


def say_retired(store: "ObjectStore", names: Names) -> None:
    """Write to stderr which steps of a run were retired, and by which record, if any were."""
    from millrace.runlog.records.retirement import steps_retired

    _, why = steps_retired(store, names)
    if why:
        click.echo(why, err=True)


def _running_store() -> str | None:
    """Return the store URL of the shared stack here, or of the one at MILLRACE_SERVER.

    None if MILLRACE_STORE_URL is set, or the stack is not unique.
    """
    settings = Settings.from_env(os.environ)
    if settings.store_url is not None:
        return None
    shared = [each for each in running_stacks() if each.is_shared and settings.server in (None, each.address)]
    return shared[0].text("store") if len(shared) == 1 else None


def directory_of(name: str) -> Path | None:
    """Return the directory of results for `name`: a path, a run's name or its beginning, or `-` for the newest.

    None if there is none.
    """
    from millrace.runlog import names as run_name

    if (Path(name) / "store").is_dir():
        return Path(name)
    found = {path.parent.name: path.parent for path in _OUTPUTS.glob("*/store") if path.parent.name != "local"}
    if name == "-" and found and not (_OUTPUTS / "local" / "store").is_dir():
        return max(found.values(), key=lambda directory: directory.stat().st_mtime)
    try:
        return found[run_name.resolve(name, {each: each for each in found})]
    except NotFoundError:
        return None


def _exists(store: "ObjectStore", prefix: str, uid: str) -> bool:
    """Return whether the store has any object of the run."""
    return next(iter(store.list(Names(prefix, uid).root)), None) is not None


# A run as commands look at it: its state, config and metrics, from a server or from a directory of results.

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """A run's state, config and metrics at one moment."""

    name: str
    uid: str
    kind: str
    state: str
    config: Mapping[str, Any]
    metrics: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Columns by metric name, with `step` among them. None is a missing value."""

    def points(self, metric: str) -> list[tuple[int, float]]:
        """Return (step, value) pairs of a metric, without missing values."""
        values = self.metrics.get(metric, ())
        steps = self.metrics.get("step", ())
        return [(step, value) for step, value in zip(steps, values, strict=False) if value is not None]

    @property
    def num_steps(self) -> int:
        """Return the number of steps that are done: the last step with a mean reward, counted from 1; 0 if no step has
        one.
        """
        done = self.points("reward/mean")
        return done[-1][0] + 1 if done else 0


def snapshots_here(
    names: Sequence[str], *, store: str | None, prefix: str | None, note: Note
) -> dict[str, RunSnapshot]:
    """Return snapshots of the runs that can be read without a server, by the names given.

    With `store`, a URL, all are read from it; otherwise only those with a directory of results, and the others are left
    out. `prefix` is the value of `--prefix`. `note` is called with texts about the progress of indexes.
    """

    found: dict[str, RunSnapshot] = {}
    for name in names:
        if store is None and directory_of(name) is None:
            continue

        objects, meant = store_of(name, store)
        deployment = store_prefix(prefix)
        with open_log(objects, deployment, find_uid(objects, deployment, meant), note=note) as log:
            found[name] = _snapshot(log)
    return found


async def snapshots_of_server(client: "Client", names: Sequence[str], *, note: Note) -> dict[str, RunSnapshot]:
    """Return snapshots of runs on a server, by the names given.

    `note` is called with what the server says meanwhile.
    """
    from millrace.cli.options import resolve
    from millrace.decoding import decode_object
    from millrace.runlog.run_status import state_name
    from millrace.v1 import run_pb2

    found: dict[str, RunSnapshot] = {}
    for name in names:
        run = await resolve(client.runs, name)
        found[name] = RunSnapshot(
            name=run.name.removeprefix("runs/"),
            uid=run.uid,
            kind=run_pb2.RunKind.Name(run.kind).removeprefix("RUN_KIND_"),
            state=state_name(run.state),
            config=decode_object(run.config_json or "{}", what=f"the config of {run.name}", reason="CONFIG_UNREADABLE"),
            metrics=await client.runs.metrics(run.name, on_note=note),
        )
    return found


def _snapshot(log: "LogHere") -> RunSnapshot:
    """Return a snapshot of a run from its log: config, last state, and all metrics."""
    from millrace.client.runs import metric_columns
    from millrace.readers.dashboard.answers import metrics_page

    steps: list[Any] = []
    first: int | None = 0
    while first is not None:
        page = log.ask("list-metrics", {"first": str(first)})
        steps.extend(metrics_page(page).steps)
        first = page["next"]
    changes = log.ask("events", {"kinds": "state_changed", "size": "1"})["events"]
    state = str(changes[0]["body"].get("new_state", "")) if changes else ""
    return RunSnapshot(
        name=log.record.name,
        uid=log.record.uid,
        kind=log.record.kind,
        state=state.removeprefix("RUN_STATE_") or "–",
        config=log.record.config or {},
        metrics=metric_columns(steps),
    )


# The dashboard's reader, asked in this process: it reads the object store, so no server is needed.

GIVE_UP_S = 1800.0
"""How long building an index may take. The first index of a million rollouts takes minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHere:
    """One run's record, with a reader that answers questions about its log."""

    record: RunRecord
    reader: "Reader"
    note: Callable[[str], None]

    def ask(self, question: str, params: Mapping[str, str]) -> dict[str, Any]:
        """Return the answer to a question of the dashboard's reader, such as "get-lineage", with its parameters.

        While the index is being built, wait and report the progress with `note`. Raises UnavailableError if the index
        is not built within `GIVE_UP_S` seconds.
        """
        from millrace.readers.dashboard.answers import INDEX_GROWING

        begun = time.monotonic()
        while True:
            try:
                return self.reader.ask(question, self.record.uid, params)
            except UnavailableError as error:
                if error.reason != INDEX_GROWING or time.monotonic() - begun > GIVE_UP_S:
                    raise
                self.note(error.message)  # and the next question waits, too


@contextlib.contextmanager
def open_log(store: ObjectStore, prefix: str, uid: str, *, note: Callable[[str], None]) -> Iterator[LogHere]:
    """Open the log of the run `uid` below `prefix` in a store, with an index in the scratch directory.

    The reader is closed at the end of the block. `note` is called with the progress of the index.
    """
    from millrace.readers.dashboard.reader import Reader

    names = Names(prefix, uid)
    record = RunRecord.parse(store.get(names.run_json), where=store.uri(names.run_json), needs=["uid", "name"])
    reader = Reader(store, prefix, scratch_parent() / "dashboard" / "commands")
    try:
        yield LogHere(record=record, reader=reader, note=note)
    finally:
        reader.close()
