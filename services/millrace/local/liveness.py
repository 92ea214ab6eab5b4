"""Whether a process that is alive still answers: probes, and the arithmetic of their failures.

A health check that fails says little on a busy laptop. A process is named after `NAME_AFTER_S` and killed after
`KILL_AFTER_S` without an answer, and only if as many checks failed in a row, if the supervisor itself was on time
meanwhile, and if the machine is not the reason: another process answered, or the kernel says that this one is stopped.
"""

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum, auto

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.local.redis import EmbeddedRedis
from millrace.rpc.access import ClientAccess
from millrace.rpc.channel import open_channel

PERIOD_S = 5.0
CHECK_TIMEOUT_S = 2.0
NAME_AFTER_S = 10.0
KILL_AFTER_S = 30.0
KILL_SICK_AFTER_S = 60.0
"""A process that says itself that it is not healthy has measured its own patience before: it gets longer."""
LEAST_FAILURES = 4
_LATE_S = 3 * PERIOD_S


class Answer(Enum):
    """What a probe heard."""

    SERVING = auto()
    SICK = auto()
    """It answers, and says that it does not serve."""
    SILENT = auto()


class LivenessAction(Enum):
    """What to do after an answer."""

    FINE = auto()
    NAME = auto()
    """Tell the user, once."""
    KILL = auto()


Probe = Callable[[], Awaitable[Answer]]


def probe_service(address: str, access: ClientAccess | None = None) -> Probe:
    """A health check of the process behind a gRPC address, on a new connection: an old one may be backing off.

    `access` says how to call it; by default as on loopback, in plain text.
    """
    how = ClientAccess.plain() if access is None else access

    async def ask() -> Answer:
        async with open_channel(address, access=how) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined] - set by its constructor
            try:
                answer = await check(health_pb2.HealthCheckRequest(service=""), timeout=CHECK_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return Answer.SILENT
        return Answer.SERVING if answer.status == health_pb2.HealthCheckResponse.SERVING else Answer.SICK

    return ask


def probe_redis(redis: EmbeddedRedis) -> Probe:
    """PING."""

    async def ask() -> Answer:
        is_ready = await asyncio.to_thread(redis.is_ready, timeout_s=CHECK_TIMEOUT_S)
        return Answer.SERVING if is_ready else Answer.SILENT

    return ask


class AnswerHistory:
    """The answers of one life of one process. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        """It serves now."""
        self.failures = 0
        self.answer = Answer.SERVING
        self._well_at = now
        self._asked_at = now
        self._is_named = False

    def silent_s(self, now: float) -> float:
        """Seconds since it was last well."""
        return now - self._well_at

    def hear(self, answer: Answer, now: float, *, is_certain: bool) -> LivenessAction:
        """Judge an answer; `is_certain`: the machine is not to blame for a silence."""
        was_late = now - self._asked_at > _LATE_S  # the machine slept, or we did not get the processor either
        self._asked_at, self.answer = now, answer
        if answer is Answer.SERVING or was_late:
            self._well_at, self.failures, self._is_named = now, 0, False
            return LivenessAction.FINE
        self.failures += 1
        bound_s = KILL_SICK_AFTER_S if answer is Answer.SICK else KILL_AFTER_S
        if self.silent_s(now) >= bound_s and self.failures >= LEAST_FAILURES and is_certain:
            return LivenessAction.KILL
        if self.silent_s(now) >= NAME_AFTER_S and not self._is_named:
            self._is_named = True
            return LivenessAction.NAME
        return LivenessAction.FINE
