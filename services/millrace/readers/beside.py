"""The readers of an orchestrator, found by the entry point `millrace.readers`: lists, dashboard, audits, exports."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from millrace.decoding import decode_object
from millrace.errors import InvalidSpecError, Violation
from millrace.orchestrator.beside import LogPlace, RunSources, numbers_of, page_size, token_of
from millrace.readers.audit.process import audit_beside
from millrace.readers.dashboard import answers
from millrace.readers.dashboard.answers import error_of
from millrace.readers.dashboard.reading import ReaderClient
from millrace.readers.exports.of_run import RunExports
from millrace.rpc.access import PUBLIC, ServerAccess
from millrace.runlog.records.run_record import RunRecord
from millrace.telemetry.settings import parse_address
from millrace.v1 import audit_pb2
from millrace.v1 import run_service_pb2 as rs

# Metrics, rollouts and lineage of a run as the public API answers them: asked of the reader's process.

MAX_NAMES_CHARS = 64 << 10
_PAGING = ("sort", "offset", "size", "rows")
"""Parameters of the reader that are no filters."""


class LogLists:
    """Answers from the log of one run at a time. Raises `millrace.errors`."""

    def __init__(self, reader: ReaderClient) -> None:
        self._reader = reader

    async def metrics(self, request: rs.ListMetricsRequest, record: RunRecord) -> rs.ListMetricsResponse:
        """Return a page of the run's metrics by step, for the public API, with the token of the next page.

        Raise InvalidSpecError for a bad page size or token, or too many names. `record` is the run's.
        """
        size, at = page_size(request.page_size), numbers_of(request, count=1)
        names = ",".join(request.names)
        if len(names) > MAX_NAMES_CHARS:
            wrong = Violation(field="names", message=f"has more than {MAX_NAMES_CHARS} characters in all")
            raise InvalidSpecError([wrong], remedy="leave it out for all metrics")
        params = {"size": str(size), "first": str(at[0] if at else 0)} | ({"names": names} if names else {})
        answer = await self._ask("list-metrics", record, params)
        found = answers.metrics_page(answer)
        found.next_page_token = "" if answer["next"] is None else token_of(request, answer["next"])
        return found

    async def rollouts(self, request: rs.ListRolloutsRequest, record: RunRecord) -> rs.ListRolloutsResponse:
        """Return a page of the run's rollouts, for the public API, with the token of the next page.

        All pages of a list are of the index as it was at the first one. Raise InvalidSpecError for a bad filter, order
        or page. `record` is the run's.
        """
        size, at = page_size(request.page_size), numbers_of(request, count=2)
        params = _filters(request.filter) | {"size": str(size), "sort": _sort(request.order_by)}
        params |= {"rows": str(at[0]), "offset": str(at[1])} if at else {}
        answer = await self._ask("list-rollouts", record, params)
        found = answers.rollouts_page(answer, run=record.name)
        end = answer["offset"] + len(found.rollouts)
        if found.rollouts and end < found.total_size:
            found.next_page_token = token_of(request, answer["rows"], end)
        return found

    async def lineage(self, request: rs.GetLineageRequest, record: RunRecord) -> rs.GetLineageResponse:
        """Return the origin of a rollout or of a policy version, and what came of it, for the public API.

        Raise InvalidSpecError if the request names neither. `record` is the run's.
        """
        match request.WhichOneof("subject"):
            case "rollout":
                params = {"sample": request.rollout}
            case "version":
                params = {"version": str(request.version)}
            case _:
                wrong = Violation(field="subject", message="is not set: nothing says what to trace")
                raise InvalidSpecError([wrong], remedy="set rollout, such as 12-3, or version")
        return answers.lineage(await self._ask("get-lineage", record, params), run=record.name)

    async def _ask(self, question: str, record: RunRecord, params: Mapping[str, str]) -> dict[str, Any]:
        """Ask the reader's process a question about a run, and return its answer as JSON.

        Raise the error that it answers with.
        """
        answer = await self._reader.ask(question, record.uid, params)
        document = await asyncio.to_thread(
            decode_object, answer.body, what="an answer of the reader", reason="ANSWER_UNREADABLE"
        )
        if answer.status != 200:
            raise error_of(answer.status, document)
        return document


def _filters(asked: Mapping[str, str]) -> dict[str, str]:
    """Return the filters of a request as the reader's parameters: the same names and values.

    InvalidSpecError if one has the name of a parameter that is no filter (`_PAGING`).
    """
    wrong = [
        Violation(field=f"filter[{name!r}]", message="is no filter: use order_by, page_size and page_token")
        for name in _PAGING
        if name in asked
    ]
    if wrong:
        raise InvalidSpecError(wrong)
    return dict(asked)


def _sort(order_by: str) -> str:
    """Return an order of the API, such as `reward desc`, in the reader's form, `-reward`; by step if it is empty.

    Raise InvalidSpecError if it is malformed.
    """
    name, _, direction = order_by.strip().partition(" ")
    if direction.strip() not in ("", "asc", "desc"):
        wrong = Violation(
            field="order_by", value=order_by[:80], message="must be one name, optionally followed by ` desc`"
        )
        raise InvalidSpecError([wrong], remedy="such as `reward desc`")
    return f"{'-' if direction.strip() == 'desc' else ''}{name or 'step'}"


class LogReaders(LogLists):
    """`millrace.orchestrator.beside.Readers`: the lists of `LogLists`, audits, exports and pages."""

    def __init__(self, place: LogPlace) -> None:
        """Create the readers of the deployment at `place`; the process that reads starts with the first question."""
        self._place = place
        self._client = ReaderClient.of(store_url=place.store_url, prefix=place.prefix)
        super().__init__(self._client)

    async def audit(self, uid: str, *, on_progress: Callable[[str], None]) -> audit_pb2.AuditReport:
        """Audit a run in a process of its own (compare its log in store and Redis with the promises), and return the
        report.

        `on_progress` gets, from another thread, the part that is being read. UnavailableError if the process dies.
        """
        place = self._place
        return await audit_beside(
            redis_url=place.redis_url,
            store_url=place.store_url,
            prefix=place.prefix,
            uid=uid,
            on_progress=on_progress,
        )

    def export(self, record: RunRecord, *, warn: Callable[[str, str], Awaitable[object]]) -> RunExports:
        """Start the exports that the run's config and the environment ask for, and return them, to be finished and
        closed.

        `warn` gets the reason and the text of what somebody has to change.
        """
        return RunExports(record, store_url=self._place.store_url, prefix=self._place.prefix, warn=warn)

    def pages(self, address: str | None, sources: RunSources) -> AbstractAsyncContextManager[int]:
        """Return a context that serves the dashboard at `address` (host:port) while it is open; its value is the port.

        With None it serves nothing, and the value is 0.
        """
        return dashboard_server(address, sources, self._client)

    async def close(self) -> None:
        """End the process that reads runs for lists and pages."""
        await self._client.close()


# Starts and stops the dashboard of one orchestrator.

logger = logging.getLogger(__name__)

FIELD = "MILLRACE_DASHBOARD_LISTEN"
MAX_CONNECTIONS = 64
REQUEST_S = 10.0
IDLE_S = 30.0


@contextlib.asynccontextmanager
async def dashboard_server(
    address: str | None,
    sources: RunSources,
    reader: ReaderClient,
    *,
    access: ServerAccess | None = None,
) -> AsyncIterator[int]:
    """Serve the dashboard at `address` (host:port) while the block runs; the value is the port that was taken.

    None serves nothing, and the value is 0. `sources` answers for the orchestrator, `reader` for the log; it stays open
    after the block. `access` says who may look, by default by this process's variables. InvalidSpecError if the address
    needs protection that is not set up, UnavailableError if it cannot be bound.
    """
    if address is None:
        yield 0
        return
    from millrace.readers.dashboard.app import MAX_BODY_BYTES, Dashboard, Guard, Sessions
    from millrace.rpc.http_server import HttpBounds, HttpServer

    access = ServerAccess.from_environ() if access is None else access
    access.require_safe(address, {PUBLIC}, field=FIELD)
    host, port = parse_address(address)
    sessions = Sessions()
    guard = Guard(access, sessions, host=host)
    dashboard = Dashboard(sources, reader, guard, sessions, port=port, is_tls=access.tls is not None)
    bounds = HttpBounds(
        connections=MAX_CONNECTIONS, request_s=REQUEST_S, idle_s=IDLE_S, message_bytes=MAX_BODY_BYTES, shutdown_s=1.0
    )
    server = await HttpServer.start(dashboard.app(), host, port, tls=access.tls, bounds=bounds, field=FIELD)
    logger.info("the dashboard listens", extra={"address": address, "port": server.port})
    try:
        yield server.port
    finally:
        await server.stop()
