"""What reads the logs of runs beside an orchestrator (lists, audits, exports, pages), and pages of lists.

It is found by an entry point, so that no service imports a reader.
"""

import base64
import re
import zlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol

import redis.asyncio
from google.protobuf.message import Message

from millrace.errors import InternalError, InvalidSpecError, Violation
from millrace.runlog.records.run_record import RunRecord
from millrace.storage import ObjectStore
from millrace.v1 import audit_pb2, run_service_pb2

GROUP = "millrace.readers"
"""The group of entry points in which exactly one distribution names a function of the type of `open_readers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlace:
    """Where the logs of a deployment are."""

    redis: redis.asyncio.Redis
    store: ObjectStore
    store_url: str
    """The same store for other processes."""
    prefix: str


class RunSource(Protocol):
    """The runs of a deployment. Answers come from memory where they can: Redis or the store may be away."""

    def list_runs(self, *, config: str = "") -> list[dict[str, Any]]:
        """Return every run, or those whose configs match these words, the newest first, without its config."""
        ...

    async def find_run(self, name: str) -> dict[str, Any]:
        """Return one run with its config: every key with its value, its default, and whether they differ.

        Raise NotFoundError if there is none.
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
        """Pause, resume or cancel the run, as `action` says."""
        ...

    async def audit(self, name: str) -> audit_pb2.AuditReport:
        """Audit the run's whole log and return the report."""
        ...

    def trouble(self) -> str:
        """Return what of Redis or the store does not answer at the moment, in words; empty if both do."""
        ...


class Exports(Protocol):
    """What is written elsewhere of one run while this orchestrator holds it."""

    async def finish(self) -> None:
        """Wait a bounded time for the rest to be written, as the run has ended."""
        ...

    async def close(self, *, has_ended: bool) -> None:
        """End the processes; `has_ended` says that no later claim of the run goes on with it."""
        ...


class Readers(Protocol):
    """Reads the logs of a deployment for its orchestrator. Methods raise `millrace.errors`."""

    async def metrics(
        self, request: run_service_pb2.ListMetricsRequest, record: RunRecord
    ) -> run_service_pb2.ListMetricsResponse:
        """Return a page of metrics by step."""
        ...

    async def rollouts(
        self, request: run_service_pb2.ListRolloutsRequest, record: RunRecord
    ) -> run_service_pb2.ListRolloutsResponse:
        """Return a page of rollouts; all pages of a list are of the index as it was at the first one."""
        ...

    async def lineage(
        self, request: run_service_pb2.GetLineageRequest, record: RunRecord
    ) -> run_service_pb2.GetLineageResponse:
        """Return where a rollout or a version comes from, and what came of it."""
        ...

    async def audit(self, uid: str, *, on_progress: Callable[[str], None]) -> audit_pb2.AuditReport:
        """Check the promises of a run against its log."""
        ...

    def export(self, record: RunRecord, *, warn: Callable[[str, str], Awaitable[object]]) -> Exports:
        """Start what the run's config and the environment ask for; `warn` gets a reason and a text."""
        ...

    def pages(self, address: str | None, source: RunSource) -> AbstractAsyncContextManager[int]:
        """Serve the dashboard at an address while the block runs; the value is its port, 0 without an address."""
        ...

    async def close(self) -> None:
        """End the processes that read."""
        ...


def open_readers(place: LogPlace) -> Readers:
    """Open the installed readers of a deployment's logs; raise InternalError unless exactly one is installed."""
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
    """Return the size of a page and the index of its first item; raise InvalidSpecError if either argument is invalid.

    `size` and `token` are those of the request: 0 means `PAGE_DEFAULT`, and an empty token the first page.
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
    """Return the token of the page that begins at index `start`; empty if there are only `total` items."""
    return base64.urlsafe_b64encode(str(start).encode()).decode() if start < total else ""


def token_of(request: Any, *numbers: int) -> str:
    """Return a token with these numbers that is valid for the next page of this request only."""
    return base64.urlsafe_b64encode(".".join([_digest(request), *map(str, numbers)]).encode()).decode()


def numbers_of(request: Any, *, count: int) -> tuple[int, ...] | None:
    """Return the `count` numbers in the request's page token, or None without a token.

    Raise InvalidSpecError if the token is malformed, has another number of them, or belongs to another request.
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
    """Return a digest of a request without its page token and page size."""
    asked = type(request)()
    asked.CopyFrom(request)
    asked.ClearField("page_token")
    # Pages of one list may differ in size, so the size is no part of what was asked.
    asked.ClearField("page_size")
    return f"{zlib.crc32(asked.SerializeToString(deterministic=True)):08x}"


def _no_token(token: str) -> InvalidSpecError:
    problem = Violation(field="page_token", value=token[:80], message="is not a token of this API: leave it out")
    return InvalidSpecError([problem], reason="PAGE_TOKEN_INVALID")
