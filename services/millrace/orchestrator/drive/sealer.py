"""Runs whose process died between their end and their seal get the seal here."""

import asyncio
import logging
import time

from millrace.orchestrator.catalog import RunCatalog, RunView
from millrace.orchestrator.workers import RETIRED_S
from millrace.runlog.run_status import state_name
from millrace.runlog.seal import seal_late

logger = logging.getLogger(__name__)

RETRY_S = 30.0
"""When a run is tried again that could not be sealed."""


class Sealer:
    """Seals ended runs that have no seal, and retires each when `RETIRED_S` have passed since its end.

    One run at a time.
    """

    def __init__(self, catalog: RunCatalog, *, owner: str) -> None:
        """Make a sealer without a queued run; `owner` names this orchestrator in seals."""
        self._catalog = catalog
        self._owner = owner
        self._queued: set[str] = set()
        self._not_before: dict[str, float] = {}
        self._todo: asyncio.Queue[RunView] = asyncio.Queue()

    def note(self, view: RunView) -> None:
        """Queue an ended run to be sealed and retired, unless it is queued.

        A run that could not be sealed is queued again after `RETRY_S`.
        """
        uid = view.record.uid
        if uid not in self._queued and time.monotonic() >= self._not_before.get(uid, 0.0):
            self._queued.add(uid)
            self._todo.put_nowait(view)

    async def run(self) -> None:
        """Seal the queued runs that have no seal, and retire those that ended long enough ago; until cancelled.

        A run that fails is logged, and can be queued again.
        """
        while True:
            view = await self._todo.get()
            uid = view.record.uid
            state = state_name(view.status.state)
            # Before the try, so that the looks meanwhile do not queue the run again, whatever comes of it.
            self._not_before[uid] = time.monotonic() + RETRY_S
            try:
                run_log = await self._catalog.open_log(uid)
                if await seal_late(run_log, state=state, by=f"{self._owner}, later"):
                    logger.info("run sealed that had ended without", extra={"run": view.record.name})
                # A successor, too, tells the workers that the run has ended: it is listed for so long.
                if not ended_lately(view) and await self._catalog.retire(run_log):
                    del self._not_before[uid]
            except Exception as error:  # noqa: BLE001 - the edge of a run: whatever is wrong with it, the others go on
                logger.warning("run not sealed, trying again", extra={"run": view.record.name, "error": str(error)})
            self._queued.discard(uid)


def ended_lately(view: RunView) -> bool:
    """Return whether a run ended within the last `RETIRED_S`."""
    end_time = view.status.end_time
    return end_time is not None and time.time() - end_time.ToNanoseconds() / 1e9 < RETIRED_S
