"""What reads the logs of runs beside an orchestrator (lists, audits, exports, pages), and pages of lists.

It is found by an entry point, so that no service imports a reader.
"""

import base64
import re
import zlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol

import redis.asyncio
from google.protobuf.message import Message

from millrace.errors import InternalError, InvalidSpecError, Violation
from millrace.runlog.records.run_record import RunRecord
from millrace.storage import ObjectStore
from millrace.v1 import audit_pb2, run_pb2, run_service_pb2

GROUP = "millrace.readers"
"""The group of entry points in which exactly one distribution names a function of the type of `open_readers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlace:
    """Where the logs of a deployment are."""

    redis: redis.asyncio.Redis
    store: ObjectStore
    store_url: str
    """The same store for other processes."""
    redis_url: str = field(repr=False)
    """The same Redis for other processes; it may have a password."""
    prefix: str


class RunSource(Protocol):
    """The runs of a deployment that one caller sees. No other one exists for its methods.

    Answers come from memory where they can: Redis or the store may be away.
    """

    def list_runs(self, *, config: str = "") -> list[dict[str, Any]]:
        """Return a summary of every run, the newest first, without its config.

        With `config`, of those whose configs have its words.
        """
        ...

    async def find_run(self, name: str) -> dict[str, Any]:
        """Return a run with its config: every key with its value, its default, and whether they differ.

        Raises NotFoundError if there is no run of that name.
        """
        ...

    def uid_of(self, name: str) -> str:
        """Return the uid of a run that is known; raise NotFoundError if there is none."""
        ...

    async def checkpoints(self, name: str) -> list[dict[str, Any]]:
        """Return the run's committed checkpoints, oldest first."""
        ...

    def explain(self, name: str) -> dict[str, Any]:
        """Explain why the run does not move: a summary, the chain of waits as boxes, and the waits of its processes."""
        ...

    async def act(self, name: str, action: str, *, reason: str) -> None:
        """Ask that the run pauses, resumes or ends: `action` is "pause", "resume" or "cancel", `reason` is the
        user's.
        """
        ...

    async def audit(self, name: str) -> audit_pb2.AuditReport:
        """Audit the run's whole log and return the report."""
        ...

    def trouble(self) -> str:
        """Return in words what of Redis or the store does not answer at the moment; empty if both do."""
        ...


class RunSources(Protocol):
    """The runs of a deployment, which nobody gets at but as a caller."""

    def seen_by(self, tenant: str) -> RunSource:
        """Return the runs of a tenant, or with an empty `tenant` all, as an operator sees them."""
        ...


class Exports(Protocol):
    """What is written elsewhere of one run while this orchestrator holds it."""

    async def finish(self) -> None:
        """Wait a bounded time until everything of the run is written, because the run has ended."""
        ...

    async def close(self, *, has_ended: bool) -> None:
        """End the processes that write.

        If the run `has_ended`, no later claim of the run writes the rest, so they get a moment to write it first.
        """
        ...


class Readers(Protocol):
    """Reads the logs of a deployment for its orchestrator. Methods raise `millrace.errors`."""

    async def metrics(
        self, request: run_service_pb2.ListMetricsRequest, record: RunRecord
    ) -> run_service_pb2.ListMetricsResponse:
        """Return a page of a run's metrics by step, as the request asks."""
        ...

    async def rollouts(
        self, request: run_service_pb2.ListRolloutsRequest, record: RunRecord
    ) -> run_service_pb2.ListRolloutsResponse:
        """Return a page of a run's rollouts; all pages of a list are of the index as it was at the first page."""
        ...

    async def lineage(
        self, request: run_service_pb2.GetLineageRequest, record: RunRecord
    ) -> run_service_pb2.GetLineageResponse:
        """Return where a rollout or a policy version of a run comes from, and what came of it."""
        ...

    async def audit(self, uid: str, *, on_progress: Callable[[str], None]) -> audit_pb2.AuditReport:
        """Check the promises of the run with this uid against its log, and return the report.

        `on_progress` gets texts meanwhile.
        """
        ...

    def export(self, record: RunRecord, *, warn: Callable[[str, str], Awaitable[object]]) -> Exports:
        """Start to export what the run's config and the environment ask for.

        `warn` is called with the reason (UPPER_SNAKE) and the text of what a person has to change.
        """
        ...

    def pages(self, address: str | None, sources: RunSources) -> AbstractAsyncContextManager[int]:
        """Return a context that serves the dashboard over `sources` at `address` (host:port) while it is open.

        Its value is the port. With None it serves nothing, and the value is 0.
        """
        ...

    async def close(self) -> None:
        """End the processes that read logs."""
        ...


def open_readers(place: LogPlace) -> Readers:
    """Return the installed readers of the logs at `place`.

    Raise InternalError unless exactly one package has readers.
    """
    found = metadata.entry_points(group=GROUP)
    if len(found) != 1:
        raise InternalError(
            f"{len(found)} entry points of the group {GROUP!r} are installed, and one is needed",
            remedy="install millrace again: its own distribution has one",
        )
    (point,) = found
    return point.load()(place)


# Pages of lists: their sizes, and the tokens between them.

PAGE_DEFAULT, PAGE_MAX = 50, 1000
_NUMBERS = re.compile(r"[0-9a-f]{8}((?:\.[0-9]{1,10}){1,4})")


def page_size(size: int) -> int:
    """Return the number of items on a page: `size`, at most `PAGE_MAX`, or `PAGE_DEFAULT` for 0.

    Raise InvalidSpecError if `size` is negative.
    """
    if size < 0:
        raise InvalidSpecError([Violation(field="page_size", value=str(size), message="must not be negative")])
    return min(size or PAGE_DEFAULT, PAGE_MAX)


def page(size: int, token: str) -> tuple[int, int]:
    """Return the size of a page and the index of its first item, from the `size` and `token` of a request.

    A size of 0 means `PAGE_DEFAULT`, an empty token the first page. Raises InvalidSpecError if either is invalid.
    """
    wanted = page_size(size)
    try:
        # What is no base64, or no number, raises a ValueError, too.
        start = int(base64.urlsafe_b64decode(token.encode())) if token else 0
        if start < 0:
            raise ValueError("negative")
    except ValueError as error:
        raise _no_token(token) from error
    return wanted, start


def next_token(start: int, total: int) -> str:
    """Return the token of the page whose first item has index `start`; empty if there are only `total` items."""
    return base64.urlsafe_b64encode(str(start).encode()).decode() if start < total else ""


def token_of(request: Any, *numbers: int) -> str:
    """Return a page token with these numbers, which is valid for the next page of this request only."""
    return base64.urlsafe_b64encode(".".join([_digest(request), *map(str, numbers)]).encode()).decode()


def numbers_of(request: Any, *, count: int) -> tuple[int, ...] | None:
    """Return the `count` numbers in the page token of a request; None without a token.

    Raises InvalidSpecError if the token is malformed, has another number of them, or belongs to another request.
    """
    token: str = request.page_token
    if not token:
        return None
    try:
        text = base64.urlsafe_b64decode(token.encode()).decode("ascii")
    except ValueError as error:
        raise _no_token(token) from error
    match = _NUMBERS.fullmatch(text)
    numbers = tuple(int(number) for number in match[1].split(".")[1:]) if match else ()
    if len(numbers) != count:
        raise _no_token(token)
    # The numbers mean nothing under another filter or order.
    if not text.startswith(_digest(request)):
        problem = Violation(field="page_token", message="belongs to another request: only page_size may change")
        raise InvalidSpecError([problem], reason="PAGE_TOKEN_INVALID", remedy="leave it out for the first page")
    return numbers


def _digest(request: Message) -> str:
    """Return the CRC32 (hex) of a request without its page token and page size."""
    asked = type(request)()
    asked.CopyFrom(request)
    asked.ClearField("page_token")
    # Pages of one list may differ in size, so the size is no part of what was asked.
    asked.ClearField("page_size")
    return f"{zlib.crc32(asked.SerializeToString(deterministic=True)):08x}"


def _no_token(token: str) -> InvalidSpecError:
    """Return the error that `token` is no page token of this API."""
    problem = Violation(field="page_token", value=token[:80], message="is not a token of this API: leave it out")
    return InvalidSpecError([problem], reason="PAGE_TOKEN_INVALID")


PAGE_BYTES = 16 << 20
"""Largest page of runs: configs are part of them. The next page begins after it."""


def of_bounded_size(runs: list[run_pb2.Run]) -> list[run_pb2.Run]:
    """Return as many of the first runs as fit into a page of `PAGE_BYTES`, and at least one."""
    size = 0
    for index, run in enumerate(runs):
        size += run.ByteSize()
        if index and size > PAGE_BYTES:
            return runs[:index]
    return runs
