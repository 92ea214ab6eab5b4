"""Every run of the deployment as views of the log, brought up to date on demand, and the search in configs."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import redis.asyncio

from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import (
    CapacityError,
    CorruptObjectError,
    InternalError,
    InvalidSpecError,
    LogGoneError,
    MillraceError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from millrace.rollouts.batch_wire import closes_run
from millrace.runlog import EventReader, RunLog, index
from millrace.runlog import names as run_name
from millrace.runlog.event_archive import load_archived_events, readable_event
from millrace.runlog.index import LogState, RunIndex, read_index, read_states
from millrace.runlog.names import Names
from millrace.runlog.rebuild import ENDED_S, open_or_rebuild, open_reopened
from millrace.runlog.records.revisions import has_ended, is_end, load_reopenings
from millrace.runlog.records.run_record import UNKNOWN, RunRecord
from millrace.runlog.records.sealed import is_sealed
from millrace.runlog.recover import load_history
from millrace.runlog.run_status import TERMINAL, RunStatus, state_name
from millrace.storage import ObjectStore
from millrace.telemetry import faults
from millrace.telemetry.logging import masked
from millrace.v1 import event_pb2, run_pb2

logger = logging.getLogger(__name__)

MAX_ENDED = 2000
"""Views of ended runs that stay in memory."""
COMPARE_S = 60.0
"""How often the list of open runs is compared with the store: a Redis that restarted may have lost its newest ones."""


# What a run looks like from outside: its record in the store, folded with the events of its log.
#
# Nothing here is stored: any orchestrator replica computes the same view from `run.json` and the event stream.


class RunView:
    """A run, and how far its log was read."""

    def __init__(self, record: RunRecord) -> None:
        """Make the view of a run from its record, before any event of its log is read."""
        self.record = record
        self.cursor = ""
        self.log_instance = ""
        """Which copy of the log the events were read from; empty before the first look."""
        self.is_closed = False
        """Known to be committed to its closing header; the events of it may be lost with Redis."""
        self.num_reopened = 0
        """How often it was reopened, at the last look."""
        self.damage: MillraceError | None = None
        """Why the run cannot be read at the moment."""
        self.state: LogState | None = None
        """What Redis held of the log before the events were read last; None if that is not known."""
        self._run = record.describe()
        self.status = RunStatus.begin(self._run)

    @property
    def run(self) -> run_pb2.Run:
        """Return the run as the API shows it; while it cannot be read, its state is DAMAGED, and its error says why."""
        self.status.fill(self._run)
        if self.damage is None:
            return self._run
        run = run_pb2.Run()
        run.CopyFrom(self._run)
        run.state = run_pb2.RUN_STATE_DAMAGED
        message = str(self.damage)
        if self.record.uid:
            message += f"; `millrace run repair {self.record.name}` says what can be restored from what"
        run.error.CopyFrom(run_pb2.RunError(reason=self.damage.reason, message=message, component="orchestrator"))
        return run

    def is_current(self, state: LogState) -> bool:
        """Return whether the view of an open run has all that its log held when it was in this state."""
        return self.state == state and self.damage is None and not self.is_terminal

    @property
    def is_terminal(self) -> bool:
        """Return whether the run has ended and can be read."""
        return self.damage is None and self.status.state in TERMINAL

    @property
    def has_failed(self) -> bool:
        """Return whether the run has ended as FAILED, which can be reopened."""
        return self.status.state == run_pb2.RUN_STATE_FAILED

    def reopen(self) -> None:
        """Set this view of a failed run back, because the run was reopened; the run's next event sets its state."""
        self.is_closed = False
        self.status.reopen()

    def apply(self, event: event_pb2.Event) -> None:
        """Update the view by an event of the run's log; events come in the order of their cursors."""
        self.cursor = event.cursor
        self.status.apply(event)


class RunCatalog:
    """Views of runs by uid: of those that may not have ended, updated at each refresh, and of ended ones on request.

    A problem with one run does not affect the others: the run is shown as DAMAGED, and read again at every refresh.
    """

    def __init__(self, *, redis: redis.asyncio.Redis, store: ObjectStore, prefix: str, owner: str) -> None:
        """Make a catalog without views; `owner` is the name of this orchestrator in logs that it rebuilds.

        `prefix` is the deployment's in the object store and in Redis.
        """
        self._owner = owner
        self._redis = redis
        self._store = store
        self._prefix = prefix
        self._views: dict[str, RunView] = {}
        self._unread: dict[str, str] = {}
        self._drive_damage: dict[str, MillraceError] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._turn = 0
        self._compare_at = 0.0

    @property
    def views(self) -> list[RunView]:
        """Return the views of every open run, and of the ended ones that were asked for, as they were last read."""
        return list(self._views.values())

    async def refresh(self) -> list[RunView]:
        """Read the new events of every run that may not have ended, and return the views of these runs, oldest first.

        One request asks Redis which of them have any. The others are not read.
        A run that ended since the last call is among them once more. A run that cannot be read is DAMAGED. While Redis
        or the store does not answer for a run, its view stays as it is; what fails to answer for the list of runs is
        raised. At each call one of the failed runs is checked in the store for a reopening.
        """
        is_compared = time.monotonic() >= self._compare_at
        runs = await index.read_open(self._redis, self._store, self._prefix, is_compared=is_compared)
        if is_compared:
            self._compare_at = time.monotonic() + COMPARE_S
        # Runs that the list has lost are still looked at, because Redis may have lost the entry alone.
        runs |= {uid: view.record.name for uid, view in self._views.items() if view.record.uid and not view.is_terminal}
        states = await read_states(self._redis, [Names(self._prefix, uid) for uid in runs])
        failed = [uid for uid in runs if uid in self._views and self._views[uid].has_failed]
        self._turn += 1
        # One at a time: each look costs requests to the store, and there may be hundreds of failed runs.
        looked_at = failed[self._turn % len(failed)] if failed else ""
        found: list[RunView] = []
        for uid, name in runs.items():
            view, state = self._views.get(uid), states.get(uid)
            if view is None or state is None or not view.is_current(state):
                view = await self._try_to_look_at(uid, name, is_looked_at=uid == looked_at)
                # What came after `state` was read is found at the next refresh, at the latest.
                if view is not None and uid not in self._unread:
                    view.state = state
            if view is not None:
                found.append(view)
        return sorted(found, key=lambda view: view.record.uid)

    async def list_names(self) -> list[tuple[str, str]]:
        """Return uid and name of every run, the newest first.

        A run whose entry in the index is damaged has a placeholder for its uid, and comes last.
        """
        found = await read_index(self._redis, self._store, self._prefix)
        self._note_names(found)
        runs = sorted(((uid, name) for name, uid in found.runs.items()), reverse=True)
        return [*runs, *((_key_of(name), name) for name in found.damaged)]

    async def read_listed(self, runs: Iterable[tuple[str, str]]) -> list[RunView]:
        """Return the views of these runs, pairs of uid and name (`list_names`), in the same order.

        An ended run is read once. A run for which Redis or the store does not answer has the view that was read last;
        it is left out if there is none. Beyond `MAX_ENDED` the views of the oldest ended runs are dropped from memory.
        """
        views: list[RunView] = []
        for uid, name in runs:
            view = self._views.get(uid)
            if view is None or (view.record.uid and not view.is_terminal):
                view = await self._try_to_look_at(uid, name, is_looked_at=True) or view
            if view is not None:
                views.append(view)
        # Uids sort by time. The newest ones are shown and counted most, also while old ones are read.
        ended = sorted(uid for uid, view in self._views.items() if view.is_terminal)
        for uid in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self._views[uid]
            self._locks.pop(uid, None)
        return views

    async def find(self, name: str) -> RunView:
        """Read the run with the name `runs/{name}` or `{name}`, or with that uid, as it is now, and return its view.

        It is DAMAGED if the run, or its entry in the index of names, cannot be read. Raises NotFoundError, with a
        suggestion, if there is no such run.
        """
        wanted = name.removeprefix("runs/")
        if wanted in self._views and self._views[wanted].record.uid:
            return await self.look_at(wanted, self._views[wanted].record.name, is_looked_at=True)
        # The list says which run it is, or shows it as damaged.
        with contextlib.suppress(CorruptObjectError):
            if (named := await index.find_uid(self._redis, self._store, self._prefix, wanted)) is not None:
                return await self.look_at(named[1], named[0], is_looked_at=True)
        listed = await read_index(self._redis, self._store, self._prefix)
        self._note_names(listed)
        if wanted in listed.damaged:
            return self._views[_key_of(wanted)]
        found = run_name.resolve(wanted, listed.runs, is_exact=True)
        return await self.look_at(listed.runs[found], found, is_looked_at=True)

    async def retire(self, run_log: RunLog) -> bool:
        """Let the log of an ended run expire from Redis, and take the run off the list of open ones.

        Return whether that was done: not if the run's end has no seal, or if the run is reopened meanwhile. From then
        on the run is read only on request.
        """
        names = run_log.names
        # A run may have ended several times: each end has a seal of its own, numbered by its reopenings.
        number = len(await asyncio.to_thread(load_reopenings, self._store, names))
        if await asyncio.to_thread(self._store.head, names.seal(number)) is None:
            return False
        await run_log.expire(ENDED_S)
        faults.reach(faults.Point.ORCHESTRATOR_MID_EXPIRE)
        # Who reopens writes its record, then keeps the log: either the record is seen here, or the log is kept later.
        if len(await asyncio.to_thread(load_reopenings, self._store, names)) != number:
            await run_log.persist()
            return False
        await index.note_ended(self._redis, self._store, self._prefix, uid=names.uid, number=number)
        return True

    def known(self, name: str) -> RunView | None:
        """Return the view in memory of a run, by name, uid, unique prefix, or `-` for the newest.

        None if no run in memory has that name, or several have the prefix.
        """
        if name in self._views:
            return self._views[name]
        views = {view.record.name: view for view in self._views.values()}
        try:
            return views[run_name.resolve(name, {name: view.record.uid for name, view in views.items()})]
        except (NotFoundError, InvalidSpecError):
            return None

    def forget(self, uid: str) -> None:
        """Drop the view of a run, by its uid, because the run is deleted."""
        for kept in (self._views, self._unread, self._drive_damage, self._locks):
            kept.pop(uid, None)

    async def open_log(self, uid: str) -> RunLog:
        """Open and return the run's log in Redis, rebuilt from the store if Redis has lost it."""
        return await open_or_rebuild(self._redis, self._store, prefix=self._prefix, uid=uid, owner=self._owner)

    async def open_reopened(self, uid: str) -> RunLog:
        """Open and return the log of a reopened run, in a copy without the closing header that does not count any more.

        The run is listed as open, so that every replica of the orchestrator reads it again.
        """
        run_log = await open_reopened(self._redis, self._store, prefix=self._prefix, uid=uid, owner=self._owner)
        number = len(await asyncio.to_thread(load_reopenings, self._store, run_log.names))
        name = self._views[uid].record.name
        await index.list_open(self._redis, self._prefix, uid=uid, name=name, number=number)
        return run_log

    async def is_end(self, uid: str, state: run_pb2.RunState) -> bool:
        """Return whether the store confirms that the run ended in the terminal state `state`, as an event says.

        It does if a closing header says so, even if the run was reopened after it, or if the run is deleted.
        """
        return await asyncio.to_thread(is_end, self._store, Names(self._prefix, uid), state_name(state))

    def drive_failed(self, uid: str, error: MillraceError) -> None:
        """Show the run with this uid as DAMAGED, because a drive found damage that reading does not show.

        It is shown so until its log has a new event of a changed state.
        """
        self._drive_damage[uid] = error
        self._note_damage(uid, error)

    def is_unreadable(self, view: RunView) -> bool:
        """Return whether the run could not be read last time, so that it cannot be driven.

        False for a run that can be read, and is DAMAGED only because of what a drive found (`drive_failed`).
        """
        return view.damage is not None and view.record.uid not in self._drive_damage

    def _note_names(self, index: RunIndex) -> None:
        """Show runs whose entry in the index of names is damaged as DAMAGED, under a placeholder for the uid.

        Views of such runs whose entry can be read again are removed.
        """
        known = {_key_of(name): (name, error) for name, error in index.damaged.items()}
        for key in [key for key, view in self._views.items() if not view.record.uid and key not in known]:
            del self._views[key]
        for key, (name, error) in known.items():
            self._views.setdefault(key, RunView(RunRecord.unreadable("", name)))
            self._note_damage(key, error)

    def _note_damage(self, uid: str, error: Exception, *, name: str = "") -> RunView:
        """Show the run as DAMAGED, because of `error`, until it can be read, and return its view.

        `name` is for a run that has no view.
        """
        view = self._views.get(uid)
        if view is None:
            view = self._views[uid] = RunView(RunRecord.unreadable(uid, name or uid))
        damage = _as_damage(error, view.record.name)
        if view.damage is None or view.damage.message != damage.message:
            logger.error("run is damaged", extra={"run": view.record.name, "uid": uid, "error": str(damage)})
        view.damage = damage
        return view

    async def _try_to_look_at(self, uid: str, name: str, *, is_looked_at: bool) -> RunView | None:
        """Return the view that `look_at` returns for these parameters.

        If Redis or the store does not answer, return the view that was read last, None if there is none.
        """
        try:
            view = await self.look_at(uid, name, is_looked_at=is_looked_at)
        except MillraceError as error:
            if self._unread.get(uid) != error.reason:
                self._unread[uid] = error.reason
                logger.warning("run cannot be read now", extra={"uid": uid, "error": str(error)})
            return self._views.get(uid)
        self._unread.pop(uid, None)
        return view

    async def look_at(self, uid: str, name: str, *, is_looked_at: bool) -> RunView:
        """Read the run as it is now and return its view, DAMAGED if it cannot be read.

        `name` is for a run that was never read. With `is_looked_at` a failed run is also checked in the store for a
        reopening. Raises UnavailableError and the like while Redis or the store does not answer.
        """
        try:
            view = await self._refresh_one(uid, is_looked_at=is_looked_at)
        except (UnavailableError, CapacityError, PermissionDeniedError):
            raise
        except Exception as error:  # noqa: BLE001 - the edge of a run: whatever is wrong with it, the others go on
            self._drive_damage.pop(uid, None)
            return self._note_damage(uid, error, name=name)
        return view

    async def _refresh_one(self, uid: str, *, is_looked_at: bool) -> RunView:
        """Read what is new of a run and return its view, made from `run.json` if there is none; one reader at a time.

        A view of a run that has ended is returned as it is. `is_looked_at` is that of `look_at`.
        """
        async with self._locks.setdefault(uid, asyncio.Lock()):
            view = self._views.get(uid)
            if view is None or view.record.kind == UNKNOWN:
                key = Names(self._prefix, uid).run_json
                data = await asyncio.to_thread(self._store.get, key, max_bytes=MAX_JSON_BYTES)
                record = RunRecord.decode(data, where=self._store.uri(key))
                # The object may have been copied there from another run.
                if record.uid != uid:
                    raise CorruptObjectError(
                        f"{self._store.uri(key)} is of run {record.uid[:80]!r}", reason="RUN_JSON_CORRUPT"
                    )
                view = self._views[uid] = RunView(record)
            if view.has_failed and is_looked_at:
                await self._look_for_reopening(view)
            if view.is_terminal:
                return view
            if not view.log_instance and await self._fold_archive(view):
                return view
            try:
                return await self._fold(view)
            except LogGoneError:  # between two commands: the next one opens the new copy
                return await self._fold(view)

    async def _fold_archive(self, view: RunView) -> bool:
        """Apply the archived events of a sealed run to its new view, without Redis.

        Returns False if the run is not sealed, or its archive does not contain its end.
        """
        names = Names(self._prefix, view.record.uid)
        if not await asyncio.to_thread(is_sealed, self._store, names):
            return False
        try:
            entries = await asyncio.to_thread(load_archived_events, self._store, names)
        except (CorruptObjectError, NotFoundError):
            return False  # Redis may have them
        # A view of its own: an archive without the end of the run must leave the given one as it was.
        archived = RunView(view.record)
        for event in map(readable_event, entries):
            if event is not None:
                archived.apply(event)
        if archived.is_terminal:
            view.status, view.cursor = archived.status, archived.cursor
        return view.is_terminal

    async def _fold(self, view: RunView) -> RunView:
        """Apply the new events of the run's log to the view and return it.

        If Redis holds another copy of the log, that is a new view, read from the beginning: the ids of lost events may
        be reused there. An end that no header confirms is taken back.
        """
        run_log = await self.open_log(view.record.uid)
        instance = await run_log.read_instance()
        # Ids in another copy may be those of other events, so that everything is read again.
        if view.log_instance not in ("", instance):
            view = RunView(view.record)
        # A rebuilt log may lack the event of the end, which the headers still have.
        if run_log.generation > 1 and not view.log_instance:
            committed = await load_history(run_log)
            is_closing = committed.last is not None and closes_run(committed.last)
            view.is_closed = is_closing and not committed.is_reopened
        view.log_instance = instance
        reader = EventReader(run_log)
        while events := await reader.read(after=view.cursor, block_s=0.0):
            for event in events:
                view.apply(event)
                if event.HasField("state_changed"):
                    self._drive_damage.pop(view.record.uid, None)
        # Before the look for a reopening: a run that is reopened in between has not ended.
        is_over = view.status.state in TERMINAL and await asyncio.to_thread(has_ended, self._store, run_log.names)
        if view.has_failed:
            await self._look_for_reopening(view)
        if view.status.state in TERMINAL and not is_over:
            logger.error(
                "an event says that the run has ended, and no header closes it: somebody else writes to this Redis",
                extra={"run": view.record.name, "state": state_name(view.status.state)},
            )
            view.status.retract_end()
        view.damage = self._drive_damage.get(view.record.uid)
        self._views[view.record.uid] = view
        return view

    async def _look_for_reopening(self, view: RunView) -> None:
        """Set the view of a failed run back if the store has a record that the run was reopened once more.

        The store has that record before the log has any event of it.
        """
        names, number = Names(self._prefix, view.record.uid), view.num_reopened
        while await asyncio.to_thread(self._store.head, names.reopened(number + 1)) is not None:
            number += 1
        if number > view.num_reopened and not await asyncio.to_thread(has_ended, self._store, names):
            view.reopen()
        view.num_reopened = number


def _key_of(name: str) -> str:
    """Return a placeholder uid for a run of which only the name is known; no uid begins like it."""
    return f"?{name}"


def _as_damage(error: Exception, name: str) -> MillraceError:
    """Return the problem with the run called `name` as a Millrace error.

    An error of another class, or one of the config, becomes an InternalError that names it.
    """
    if isinstance(error, MillraceError) and not isinstance(error, InvalidSpecError):
        return error
    return InternalError(
        f"run {name!r} cannot be read: {type(error).__name__}: {error}"[:500],
        reason="RUN_UNREADABLE",
        remedy="see the orchestrator's log",
    )


# Finds runs by what is in their configs: `lr=1e-5`, `grpo`, `env.id=reverse`. Secrets are not to be found.

MAX_WORDS = 20


@dataclass(frozen=True, slots=True)
class ConfigText:
    """The keys of one config, dotted and in lower case, with their values."""

    values: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, config: Mapping[str, Any], *, secrets: tuple[str, ...]) -> Self:
        """Return the searchable text of a resolved config, with values that contain one of `secrets` masked."""
        return cls(tuple(_values(masked(config, secrets), "")))

    def matches(self, words: str) -> bool:
        """Return whether each of the first `MAX_WORDS` words is part of a key or value.

        `key=value` must match at one key.
        """
        return all(any(_matches(word, *each) for each in self.values) for word in words.lower().split()[:MAX_WORDS])


def _matches(word: str, key: str, value: Any) -> bool:
    """Return whether a word is part of this key or value; `key=value` must match both."""
    name, is_pair, wanted = word.rpartition("=")
    if is_pair:
        return name in key and (_is_number(wanted, value) or _holds(value, wanted, whole=not isinstance(value, str)))
    return word in key or _holds(value, word) or _is_number(word, value)


def _holds(value: Any, wanted: str, *, whole: bool = False) -> bool:
    """Return whether a value, as lower-case text, contains `wanted`; with `whole`, whether it is equal to it."""
    text = str(value).lower()
    return wanted == text if whole else wanted in text


def _is_number(word: str, value: Any) -> bool:
    """Return whether `word` is another spelling of the number `value`, such as "1e-5" of 0.00001."""
    with contextlib.suppress(ValueError):
        return isinstance(value, int | float) and not isinstance(value, bool) and float(word) == value
    return False


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every key of a nested config, dotted and in lower case, with its value; null values are left out.

    `path` is the key of `value` itself.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _values(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _values(item, f"{path}[{index}]")
    elif value is not None:
        yield path.lower(), value


# The events of a run for somebody who watches: each once and in order, also across a Redis that lost some of them.


class EventFeed:
    """Reads after a cursor. When Redis holds another copy of the log, it begins anew and skips what it has given out.

    Another copy may have given the ids of lost events to others, so a cursor alone does not say what was seen: the
    number of each writer's newest event does.
    """

    def __init__(self, catalog: RunCatalog, uid: str, *, after: str) -> None:
        """Make the reader of a run's events for one watcher.

        `after` is the cursor that it has, "" for the beginning.
        """
        self._catalog = catalog
        self._uid = uid
        self._after = after
        self._log: RunLog | None = None
        self._reader: EventReader | None = None
        self._instance = ""
        self._given: dict[str, int] = {}
        self._is_replay = False
        self.cursor = after
        """Cursor of the newest event that was read."""

    async def read(self, *, block_s: float) -> Sequence[event_pb2.Event]:
        """Return the next events that the watcher does not have; wait up to `block_s` seconds for the first one.

        Empty if there are none, and if the log is gone: the next call opens the rebuilt one.
        """
        try:
            run_log, reader = self._log, self._reader
            if run_log is None or reader is None or await run_log.read_instance() != self._instance:
                reader = await self._open()
            events = await reader.read(after=self.cursor, block_s=block_s)
        except LogGoneError:
            self._log = None  # the next read opens the rebuilt log
            return []
        fresh = []
        for event in events:
            self.cursor = event.cursor
            if self._is_replay and self._was_given(event):
                continue
            self._given[event.writer] = event.writer_sequence
            fresh.append(event)
        return fresh

    async def _open(self) -> EventReader:
        """Open the run's log and return its reader; if Redis holds another copy than before, reading begins anew."""
        run_log = await self._catalog.open_log(self._uid)
        instance = await run_log.read_instance()
        if self._instance and instance != self._instance:
            self.cursor, self._is_replay = "", True
        self._log, self._instance = run_log, instance
        self._reader = EventReader(run_log)
        return self._reader

    def _was_given(self, event: event_pb2.Event) -> bool:
        """Return whether the watcher has the event already, from this feed or by its cursor from an earlier one."""
        is_before = bool(self._after) and _position(event.cursor) <= _position(self._after)
        return is_before or event.writer_sequence <= self._given.get(event.writer, 0)


def _position(cursor: str) -> tuple[int, ...]:
    """Return the numbers of a cursor, which order events."""
    return tuple(int(part) for part in cursor.split("-"))
