"""Every run of the deployment as views that are brought up to date from the log on demand."""

import asyncio
import difflib
import logging

import redis.asyncio

from millrace.errors import LogGoneError, NotFoundError
from millrace.orchestrator.run_view import RunRecord, RunView
from millrace.runlog import EventReader, RunLog
from millrace.runlog.index import list_runs
from millrace.runlog.names import Names
from millrace.storage import ObjectStore

log = logging.getLogger(__name__)


class RunCatalog:
    """Views by uid. Terminal runs are read once; open ones at every look."""

    def __init__(self, *, redis: redis.asyncio.Redis, store: ObjectStore, prefix: str) -> None:
        self._redis = redis
        self._store = store
        self._prefix = prefix
        self._views: dict[str, RunView] = {}
        self._lock = asyncio.Lock()

    async def refresh(self) -> list[RunView]:
        """All runs, oldest first, with every event of their logs folded in."""
        async with self._lock:
            for uid in (await list_runs(self._redis, self._store, self._prefix)).values():
                await self._refresh_one(uid)
            return sorted(self._views.values(), key=lambda view: view.record.uid)

    async def find(self, name: str) -> RunView:
        """The run called `runs/{name}`, `{name}` or with that uid; NotFoundError with a suggestion otherwise."""
        wanted = name.removeprefix("runs/")
        views = await self.refresh()
        for view in views:
            if wanted in (view.record.name, view.record.uid):
                return view
        close = difflib.get_close_matches(wanted, [view.record.name for view in views], n=1)
        raise NotFoundError(
            f"run {wanted!r} does not exist",
            reason="RUN_NOT_FOUND",
            remedy=f"did you mean {close[0]!r}?" if close else "`millrace run list` shows the runs",
            metadata={"run": wanted},
        )

    async def open_log(self, uid: str) -> RunLog:
        """The run's log."""
        return await RunLog.open(self._redis, self._store, prefix=self._prefix, uid=uid)

    async def _refresh_one(self, uid: str) -> None:
        view = self._views.get(uid)
        if view is None:
            data = await asyncio.to_thread(self._store.get, Names(self._prefix, uid).run_json)
            view = self._views[uid] = RunView(RunRecord.decode(data))
        if view.is_terminal:
            return
        try:
            reader = EventReader(await self.open_log(uid))
            while events := await reader.read(after=view.cursor, block_s=0.0):
                for event in events:
                    view.apply(event)
        except LogGoneError as error:
            log.warning("log of a run is not in Redis", extra={"uid": uid, "error": str(error)})
