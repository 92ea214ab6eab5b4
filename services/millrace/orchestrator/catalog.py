"""Every run of the deployment as views that are brought up to date from the log on demand."""

import asyncio
import difflib
import logging

import redis.asyncio

from millrace.errors import CorruptObjectError, LogGoneError, MillraceError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.orchestrator.run_view import RunRecord, RunView
from millrace.runlog import EventReader, RunLog
from millrace.runlog.index import list_runs
from millrace.runlog.names import Names
from millrace.runlog.rebuild import open_or_rebuild, open_reopened
from millrace.runlog.recover import load_history
from millrace.runlog.revisions import has_ended
from millrace.storage import ObjectStore

log = logging.getLogger(__name__)


class RunCatalog:
    """Views by uid. Terminal runs are read once; open ones at every look."""

    def __init__(self, *, redis: redis.asyncio.Redis, store: ObjectStore, prefix: str, owner: str) -> None:
        """`owner` names this orchestrator where it rebuilds a log."""
        self._owner = owner
        self._redis = redis
        self._store = store
        self._prefix = prefix
        self._views: dict[str, RunView] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._turn = 0
        self._unreadable: dict[str, str] = {}

    @property
    def views(self) -> list[RunView]:
        """Every run as it was at the last look."""
        return list(self._views.values())

    async def refresh(self) -> list[RunView]:
        """All readable runs, oldest first, with every event of their logs folded in.

        A run that cannot be read is left out and logged once: it must not hide the others. One of the runs that have
        failed is looked at in turn: another replica may have reopened it.
        """
        failed = [uid for uid, view in self._views.items() if view.has_failed]
        self._turn += 1
        looked_at = failed[self._turn % len(failed)] if failed else ""
        for uid in (await list_runs(self._redis, self._store, self._prefix)).values():
            try:
                await self._refresh_one(uid, is_looked_at=uid == looked_at)
            except (MillraceError, ValueError, KeyError) as error:  # run.json may hold anything
                if self._unreadable.get(uid) != str(error):
                    self._unreadable[uid] = str(error)
                    log.error("run cannot be read", extra={"uid": uid, "error": str(error)})
            else:
                self._unreadable.pop(uid, None)
        return sorted(self._views.values(), key=lambda view: view.record.uid)

    async def find(self, name: str) -> RunView:
        """The run called `runs/{name}`, `{name}` or with that uid; NotFoundError with a suggestion otherwise."""
        wanted = name.removeprefix("runs/")
        runs = await list_runs(self._redis, self._store, self._prefix)
        uid = runs.get(wanted) or (wanted if wanted in runs.values() else None)
        if uid is None:
            close = difflib.get_close_matches(wanted, list(runs), n=1)
            raise NotFoundError(
                f"run {wanted!r} does not exist",
                reason="RUN_NOT_FOUND",
                remedy=f"did you mean {close[0]!r}?" if close else "`millrace run list` shows the runs",
                metadata={"run": wanted},
            )
        try:
            return await self._refresh_one(uid, is_looked_at=True)
        except (ValueError, KeyError) as error:
            raise CorruptObjectError(
                f"run.json of run {wanted!r} cannot be read: {error!r}",
                reason="RUN_JSON_CORRUPT",
                remedy="restore the object from a replica of the bucket",
            ) from error

    def known(self, name: str) -> RunView | None:
        """The run as it was at the last look, from memory alone: by name, uid, unique beginning, or `-` the newest."""
        wanted = name.removeprefix("runs/")
        views = sorted(self._views.values(), key=lambda view: view.record.uid)
        exact = [view for view in views if wanted in (view.record.name, view.record.uid)]
        near = [view for view in views if wanted and view.record.name.startswith(wanted)]
        if wanted == "-":
            return views[-1] if views else None
        return exact[-1] if exact else near[0] if len(near) == 1 else None

    async def open_log(self, uid: str) -> RunLog:
        """The run's log, rebuilt from the store if Redis has lost it."""
        return await open_or_rebuild(self._redis, self._store, prefix=self._prefix, uid=uid, owner=self._owner)

    async def open_reopened(self, uid: str) -> RunLog:
        """The log of a run that was reopened, without the closing header that does not count any more."""
        return await open_reopened(self._redis, self._store, prefix=self._prefix, uid=uid, owner=self._owner)

    async def _refresh_one(self, uid: str, *, is_looked_at: bool) -> RunView:
        async with self._locks.setdefault(uid, asyncio.Lock()):
            view = self._views.get(uid)
            if view is None:
                data = await asyncio.to_thread(self._store.get, Names(self._prefix, uid).run_json)
                view = self._views[uid] = RunView(RunRecord.decode(data))
            if view.has_failed and is_looked_at:
                await self._look_for_reopening(view)
            if view.is_terminal:
                return view
            try:
                return await self._fold(view)
            except LogGoneError:  # between two commands: the next one opens the new copy
                return await self._fold(view)

    async def _fold(self, view: RunView) -> RunView:
        """Fold new events in. On another copy of the log all of them: ids of lost ones may be others' now."""
        run_log = await self.open_log(view.record.uid)
        instance = await run_log.read_instance()
        if view.log_instance not in ("", instance):
            view = RunView(view.record)
        if run_log.generation > 1 and not view.log_instance:
            committed = await load_history(run_log)
            is_closing = committed.last is not None and committed.last.kind == batch_pb2.BATCH_KIND_CLOSE
            view.is_closed = is_closing and not committed.is_reopened
        view.log_instance = instance
        reader = EventReader(run_log)
        while events := await reader.read(after=view.cursor, block_s=0.0):
            for event in events:
                view.apply(event)
        if view.has_failed:
            await self._look_for_reopening(view)
        self._views[view.record.uid] = view
        return view

    async def _look_for_reopening(self, view: RunView) -> None:
        """Notice that a run which has failed was reopened: the store says so before any event does."""
        names, number = Names(self._prefix, view.record.uid), view.num_reopened
        while await asyncio.to_thread(self._store.head, names.reopened(number + 1)) is not None:
            number += 1
        if number > view.num_reopened and not await asyncio.to_thread(has_ended, self._store, names):
            view.reopen()
        view.num_reopened = number
