"""Runs without a server: which object store a command reads, which run is meant, and what is known of it."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.cli.connection import running_stacks
from millrace.cli.errors import CliError
from millrace.cli.options import DEFAULT_DIRECTORY
from millrace.errors import InvalidSpecError, NotFoundError
from millrace.runlog.names import Names
from millrace.storage import ObjectStore
from millrace.telemetry.settings import Settings

if TYPE_CHECKING:
    from millrace.cli.offline.log_here import LogHere
    from millrace.client import Client

_UID = re.compile(r"[a-z0-9]{20,60}")

_OUTPUTS = Path("outputs")
_MOST_NAMED = 8
DEFAULT_STORE = DEFAULT_DIRECTORY / "store"
"""Where `millrace up` keeps its objects, seen from the directory that it is started in."""


def open_run_store(url: str | None, *, environ: Mapping[str, str] = os.environ) -> "ObjectStore":
    """Return the store that is named, by the option, MILLRACE_STORE_URL, or the local stack's.

    A directory must exist.
    """
    from millrace.storage import open_store

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
    with naming("--store" if url else None):
        return open_store(chosen)


@contextlib.contextmanager
def naming(option: str | None) -> Iterator[None]:
    """Let an error of the block name the option that the value came from, if any."""
    try:
        yield
    except InvalidSpecError as error:
        if option is None:
            raise
        found = [replace(each, field=option, source="command line") for each in error.violations]
        raise InvalidSpecError(found, remedy=error.remedy) from error


def redis_url(text: str) -> str:
    """Return the value of `--redis` if it is a URL, else the URL in the file that it names."""
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
    """Return the prefix of the deployment: the option, MILLRACE_PREFIX, or its default."""
    return prefix or Settings.from_env(environ).prefix


def find_uid(store: "ObjectStore", prefix: str, text: str) -> str:
    """Return the uid of a run: by name, `runs/{name}`, a unique beginning of one, the uid, or `-` for the newest
    run.
    """
    from millrace.runlog import names as run_name
    from millrace.runlog.index import read_names
    from millrace.runlog.names import Deployment

    index = read_names(store, Deployment(prefix))
    uids = index.runs
    if text not in uids and _UID.fullmatch(text) and _exists(store, prefix, text):
        return text  # also where its name leads nowhere
    wanted = text.removeprefix("runs/")
    if wanted in index.damaged:
        raise index.damaged[wanted]
    name = run_name.resolve(
        text, uids, holder=f"{store.describe()} holds", remedy=f"check --store and --prefix (now {prefix!r})"
    )
    return uids[name]


def store_of(name: str, url: str | None) -> "tuple[ObjectStore, str]":
    """Return the store that holds the run, and the run's name there.

    A directory of results has a store of its own. Otherwise it is the one that is named, that of the stack that runs
    here, or that of `outputs/local`.
    """
    from millrace.storage import open_store

    if url is None and (directory := directory_of(name)) is not None:
        return open_store((directory / "store").resolve().as_uri()), directory.resolve().name
    if url is None and (running := _running_store()) is not None:
        return open_store(running), name
    local = sorted(path.parent.name for path in _OUTPUTS.glob("*/store") if path.parent.name != "local")
    if url is None and local and not DEFAULT_STORE.is_dir() and Settings.from_env(os.environ).store_url is None:
        more = ", …" if len(local) > _MOST_NAMED else ""
        raise NotFoundError(
            f"none of the runs below {_OUTPUTS}/ is {name!r}: there {'is' if len(local) == 1 else 'are'} "
            f"{', '.join(local[:_MOST_NAMED])}{more}",
            reason="RUN_NOT_FOUND",
            remedy="name one of them, a run's directory elsewhere, or the store that holds it: --store URL",
        )
    return open_run_store(url), name


def open_run(
    name: str, url: str | None, prefix: str | None, *, is_written: bool = False
) -> "tuple[ObjectStore, str, str]":
    """Return the store that holds the run, the prefix of its deployment there, and the run's uid.

    InvalidStateError if something is to be written there, and the store cannot carry runs.
    """
    from millrace.storage.self_test import require_tested

    (objects, meant), deployment = store_of(name, url), store_prefix(prefix)
    if is_written:
        require_tested(objects, prefix=deployment).result()
    return objects, deployment, find_uid(objects, deployment, meant)


def _running_store() -> str | None:
    """Return the store of the stack that runs here, or of the one at MILLRACE_SERVER, unless a store is configured."""
    settings = Settings.from_env(os.environ)
    if settings.store_url is not None:
        return None
    shared = [each for each in running_stacks() if each.is_shared and settings.server in (None, each.address)]
    return shared[0].text("store") if len(shared) == 1 else None


def directory_of(name: str) -> Path | None:
    """Return the directory of results that is meant, if it is one: by its path, by the run's name, or as the newest."""
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

    return next(iter(store.list(Names(prefix, uid).root)), None) is not None


# A run as commands look at it: its state, config and metrics, from a server or from a directory of results.

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """What is known of a run at one moment."""

    name: str
    uid: str
    kind: str
    state: str
    config: Mapping[str, Any]
    metrics: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Columns by name, with `step`; None is a value that is not there."""

    def points(self, metric: str) -> list[tuple[int, float]]:
        """Return (step, value) of a metric, where it has one."""
        values = self.metrics.get(metric, ())
        steps = self.metrics.get("step", ())
        return [(step, value) for step, value in zip(steps, values, strict=False) if value is not None]

    @property
    def num_steps(self) -> int:
        """Return steps that are done."""
        done = self.points("reward/mean")
        return done[-1][0] + 1 if done else 0


def looks_here(names: Sequence[str], *, store: str | None, prefix: str | None, note: Note) -> dict[str, RunSnapshot]:
    """Return the named runs that can be read without a server, by the names they were given: all of a store, if one is
    named, else those with a directory of results.
    """

    found: dict[str, RunSnapshot] = {}
    for name in names:
        if store is None and directory_of(name) is None:
            continue

        objects, meant = store_of(name, store)
        deployment = store_prefix(prefix)
        from millrace.cli.offline.log_here import open_log

        with open_log(objects, deployment, find_uid(objects, deployment, meant), note=note) as log:
            found[name] = _look(log)
    return found


async def looks_there(client: "Client", names: Sequence[str], *, note: Note) -> dict[str, RunSnapshot]:
    """Return the named runs of a server."""
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


def _look(log: "LogHere") -> RunSnapshot:
    from millrace.client.runs import metric_columns
    from millrace.readers.dashboard.answers import metrics_page

    steps: list[Any] = []
    first: int | None = 0
    while first is not None:
        said = log.ask("list-metrics", {"first": str(first)})
        steps.extend(metrics_page(said).steps)
        first = said["next"]
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
