"""Health that can fail: every name is ready only while its owner says so, and, where asked for, only while it moves.

The empty name is the process (liveness), each full service name is that service (readiness). A name can demand
progress: then it is SERVING only if it was touched within the last `within_s` seconds, so a loop that hangs turns
unhealthy although nobody notices that it hangs.

    board = HealthBoard()
    await serve(address, register, health_board=board, ...)
    board.set_ready("millrace.internal.v1.PolicyService")            # the model is loaded
    board.expect_progress("", within_s=60); board.touch("")          # in the main loop

All methods may be called from any thread.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

logger = logging.getLogger(__name__)

PROCESS = ""
SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_WATCH_POLL_S = 0.5  # progress runs out by the clock, so watchers look at the board this often


@dataclass(slots=True)
class _Entry:
    is_ready: bool
    reason: str
    within_s: float | None = None  # None: no progress demanded
    touched: float = 0.0
    was_serving: bool | None = None  # what was last logged


class HealthBoard:
    """The health of one process by name. A name that nobody set is unknown."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Make a board on which only the process itself is ready; `clock` gives monotonic seconds."""
        self._clock = clock
        self._entries: dict[str, _Entry] = {PROCESS: _Entry(True, "", was_serving=True)}
        self._is_draining = False

    def add(self, name: str, *, reason: str = "starting") -> None:
        """Make a name known, NOT_SERVING until `set_ready`; a name that is known stays as it is.

        `reason` is why it does not serve, for the log.
        """
        self._entries.setdefault(name, _Entry(False, reason, was_serving=False))

    def set_ready(self, name: str) -> None:
        """Mark a known name as ready: it serves from now on, if it makes the progress that is demanded of it.

        KeyError for an unknown name.
        """
        entry = self._entry(name)
        entry.is_ready, entry.reason = True, ""
        # Evaluated for its log line: a change is logged at the first look after it.
        self.is_serving(name)

    def set_unready(self, name: str, reason: str) -> None:
        """Mark a known name as not ready; `reason` is for the log. KeyError for an unknown name."""
        entry = self._entry(name)
        entry.is_ready, entry.reason = False, reason
        self.is_serving(name)

    def expect_progress(self, name: str, *, within_s: float | None) -> None:
        """Demand a `touch` of `name` at least every `within_s` seconds, from now on, or it does not serve.

        None demands none. KeyError for an unknown name.
        """
        entry = self._entry(name)
        entry.touched, entry.within_s = self._clock(), within_s

    def touch(self, name: str) -> None:
        """Note that `name` made progress now: the time that `expect_progress` allows it begins again.

        KeyError for an unknown name.
        """
        self._entry(name).touched = self._clock()

    def drain(self) -> None:
        """Report every name as NOT_SERVING from now on, for good, because this server ends."""
        self._is_draining = True
        for name in list(self._entries):
            self.is_serving(name)

    def reason(self, name: str) -> str:
        """Return in words why a known name does not serve now; empty if it serves. KeyError for an unknown name."""
        entry = self._entry(name)
        if self._is_draining:
            return "draining"
        if not entry.is_ready:
            return entry.reason or "not ready"
        idle_s = self._clock() - entry.touched
        if entry.within_s is not None and idle_s > entry.within_s:
            return f"no progress for {idle_s:.1f} s, {entry.within_s:g} s allowed"
        return ""

    def is_serving(self, name: str) -> bool | None:
        """Return whether the name serves now; None if it is unknown. Logs a change of the answer."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        reason = self.reason(name)
        if entry.was_serving != (not reason):
            entry.was_serving = not reason
            fields = {"name_checked": name or "(process)", "reason": reason}
            if reason and not self._is_draining:
                logger.warning("not serving", extra=fields)
            else:
                logger.info("health changed", extra=fields)
        return not reason

    def _entry(self, name: str) -> _Entry:
        """Return what the board keeps of a name; KeyError names those that are known."""
        if name not in self._entries:
            raise KeyError(f"{name!r} is not on the health board; known: {', '.join(map(repr, self._entries))}")
        return self._entries[name]


class HealthServicer(health_pb2_grpc.HealthServicer):
    """`grpc.health.v1.Health` over a board; every answer is evaluated when it is asked for.

    The library's servicer keeps the last value that was set, which cannot run out by the clock, and its watches hold up
    the end of the server for the whole grace period.
    """

    def __init__(self, board: HealthBoard, draining: asyncio.Event) -> None:
        """Answer from `board`; watches of clients end when `draining` is set."""
        self._board = board
        self._draining = draining

    def _status(self, name: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        """Return the protocol's status of a name at this moment: SERVING, NOT_SERVING or SERVICE_UNKNOWN."""
        match self._board.is_serving(name):
            case None:
                return _UNKNOWN
            case True:
                return _SERVING
            case False:
                return _NOT_SERVING

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Return whether the service that the request names serves at this moment; empty is the process.

        Ends the call with NOT_FOUND for an unknown name, as the protocol demands.
        """
        status = self._status(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yield the health of one name now and at every change, until the server drains.

        That of an unknown name is SERVICE_UNKNOWN.
        """
        last: int | None = None
        is_over = False
        while not is_over:
            is_over = self._draining.is_set()  # before the look: the last answer is that of a server that drains
            status = self._status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            try:
                async with asyncio.timeout(_WATCH_POLL_S):
                    await self._draining.wait()
            except TimeoutError:
                continue
