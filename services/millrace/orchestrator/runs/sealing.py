"""Runs whose process died between their end and their seal get the seal here."""

import asyncio
import logging
import time

from millrace.orchestrator.runs.catalog import RunCatalog
from millrace.orchestrator.runs.run_view import RunView
from millrace.runlog.events.run_status import state_name
from millrace.runlog.seal import seal_late

logger = logging.getLogger(__name__)

RETRY_S = 30.0
"""When a run is tried again that could not be sealed."""


class Sealer:
    """Looks once at every ended run of which it hears, one after the other."""

    def __init__(self, catalog: RunCatalog, *, owner: str) -> None:
        self._catalog = catalog
        self._owner = owner
        self._seen: set[tuple[str, int]] = set()
        self._not_before: dict[str, float] = {}
        self._todo: asyncio.Queue[RunView] = asyncio.Queue()

    def note(self, view: RunView) -> None:
        """A run has ended; one that was reopened meanwhile ends again."""
        end = view.record.uid, view.run.end_time.ToNanoseconds()
        if end not in self._seen and time.monotonic() >= self._not_before.get(view.record.uid, 0.0):
            self._seen.add(end)
            self._todo.put_nowait(view)

    async def run(self) -> None:
        """Seal what is not sealed; ends by cancellation."""
        while True:
            view = await self._todo.get()
            uid = view.record.uid
            state = state_name(view.status.state)
            try:
                if await seal_late(await self._catalog.open_log(uid), state=state, by=f"{self._owner}, later"):
                    logger.info("run sealed that had ended without", extra={"run": view.record.name})
            except Exception as error:  # noqa: BLE001 - the edge of a run: whatever is wrong with it, the others go on
                logger.warning("run not sealed, trying again", extra={"run": view.record.name, "error": str(error)})
                self._not_before[uid] = time.monotonic() + RETRY_S
                self._seen.discard((uid, view.run.end_time.ToNanoseconds()))  # a later scan names it again
