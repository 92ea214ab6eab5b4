"""The readers of an orchestrator, which finds them by the entry point `millrace.readers`."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from millrace.orchestrator.beside import LogPlace, RunSource
from millrace.readers.audit import audit_run
from millrace.readers.dashboard.lists import LogLists
from millrace.readers.dashboard.reading import ReaderClient
from millrace.readers.dashboard.web.serve import dashboard_server
from millrace.readers.exports.of_run import RunExports
from millrace.runlog.records.run_record import RunRecord
from millrace.v1 import audit_pb2


class LogReaders(LogLists):
    """`millrace.orchestrator.beside.Readers`: the lists of `LogLists`, audits, exports and pages."""

    def __init__(self, place: LogPlace) -> None:
        self._place = place
        self._client = ReaderClient.of(store_url=place.store_url, prefix=place.prefix)
        super().__init__(self._client)

    async def audit(self, uid: str, *, on_progress: Callable[[str], None]) -> audit_pb2.AuditReport:
        """Check the promises of a run against its log."""
        place = self._place
        return await audit_run(place.redis, place.store, prefix=place.prefix, uid=uid, on_progress=on_progress)

    def export(self, record: RunRecord, *, warn: Callable[[str, str], Awaitable[object]]) -> RunExports:
        """Start the exports that the run's config and the environment ask for."""
        return RunExports(record, store_url=self._place.store_url, prefix=self._place.prefix, warn=warn)

    def pages(self, address: str | None, source: RunSource) -> AbstractAsyncContextManager[int]:
        """Serve the dashboard at an address while the block runs; the value is its port."""
        return dashboard_server(address, source, self._client)

    async def close(self) -> None:
        """End the process that reads."""
        await self._client.close()
