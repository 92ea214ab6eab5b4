"""A worker's connection to the orchestrator: register, report, get assignments, and survive its restarts.

Used by env-server, inference and trainer. Heartbeats are level-triggered: each reply says everything that the worker
shall do, so a lost one costs one interval and nothing else. A worker whose work begins with an assignment (the trainer)
lets the orchestrator hold the answer for an interval, and so hears of it at once.

    UNREGISTERED --RegisterWorker--> REGISTERED --Heartbeat every heartbeat_seconds--> REGISTERED
         ^  ^ no answer: wait, 0.2 s to 5 s                       | register_again (the orchestrator restarted)
         |  '-----------------------------------------------------+
         '-- refused for good (wrong request, wrong state, denied): the error is raised, the service ends
"""

import asyncio
import contextlib
import inspect
import logging
import math
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from millrace import errors
from millrace.backoff import Backoff
from millrace.errors import MillraceError
from millrace.internal.v1 import worker_service_pb2
from millrace.internal.v1.worker_service_pb2 import (
    WORKER_KIND_INFERENCE,
    WORKER_KIND_TRAINER,
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterWorkerRequest,
    RegisterWorkerResponse,
    Worker,
)
from millrace.internal.v1.worker_service_pb2_grpc import WorkerServiceStub
from millrace.race import first_of
from millrace.rpc.channel import call, open_channel
from millrace.telemetry import waits
from millrace.telemetry.gpus import MAX_GPUS, GpuUse, GpuWatch
from millrace.telemetry.waits import Refusal, Wait
from millrace.v1 import event_pb2, run_pb2

logger = logging.getLogger(__name__)

RPC_TIMEOUT_S = 5.0
SILENT_S = 15.0
"""Silence of the orchestrator after which the worker's `on_silence` is called; three attempts to reach it."""
MAX_WAITS = 100
"""Waits in one heartbeat, the longest first."""
BACKOFF = Backoff(0.2, 5.0, spread=(0.5, 1.0))
# The interval is the orchestrator's choice, within these bounds: a reply of 0 must not become a busy loop.
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.05, 60.0
# Waiting does not turn these into success: the worker ends with them and its supervisor shows them. (NotFoundError is
# the exception: the orchestrator forgot the worker, which registers again.)
_NOT_RETRIED = (
    errors.NotFoundError,
    errors.InvalidSpecError,
    errors.AlreadyExistsError,
    errors.InvalidStateError,
    errors.PermissionDeniedError,
)
_USES_GPUS = (WORKER_KIND_TRAINER, WORKER_KIND_INFERENCE)

Report = Callable[[], HeartbeatRequest]
"""Makes the next heartbeat: the worker's kind-specific part. Must not block."""
OnAssignments = Callable[[HeartbeatResponse], Awaitable[None] | None]
"""Hears each reply. Must return soon: the next heartbeat waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """The orchestrator does not answer, or answers again after it did not."""

    orchestrator: str
    """Its address."""
    seconds: float
    is_over: bool
    problem: str
    """What the last attempt met, in words."""

    def describe(self) -> str:
        """Describe the silence for people: of which orchestrator, for how long, and what follows from it."""
        who = f"the orchestrator at {self.orchestrator}"
        if self.is_over:
            return f"{who} answers again after {self.seconds:.0f} s of silence"
        return (
            f"{who} has not answered for {self.seconds:.0f} s ({self.problem}): it is frozen or gone, or the network "
            "is; work goes on as far as it can without it"
        )


OnSilence = Callable[[Silence], None]
"""Hears once when the orchestrator was silent for `SILENT_S`, and once when it answers again. Must not block."""


def new_worker_id(service: str) -> str:
    """Return a worker id that is new at every start and says where it runs, such as `trainer-host7-4127-9f3ac1d2`."""
    return f"{service}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


class WorkerAgent:
    """Keeps one worker registered. `run` is its life; the properties may be read from any thread."""

    def __init__(
        self,
        address_of_orchestrator: str,
        worker: Worker,
        report: Report,
        on_assignments: OnAssignments,
        *,
        rpc_timeout_s: float = RPC_TIMEOUT_S,
        on_silence: OnSilence | None = None,
        silent_s: float = SILENT_S,
        is_held: bool = False,
    ) -> None:
        """Prepare the connection of one worker; `run` opens it. `worker` is what is registered.

        `report` makes each heartbeat, `on_assignments` gets each reply, `on_silence` is called when the orchestrator
        has not answered for `silent_s` seconds, and when it answers again; all are called on the event loop of `run`.
        `rpc_timeout_s` is the deadline of one call. With `is_held` the orchestrator answers a heartbeat when there is
        something new, or after an interval.
        """
        self._to = f"the orchestrator at {address_of_orchestrator}"
        self._address = address_of_orchestrator
        self._worker = worker
        self._report = report
        self._on_assignments = on_assignments
        self._rpc_timeout_s = rpc_timeout_s
        self._on_silence = on_silence
        self._silent_s = silent_s
        self._is_held = is_held
        self._gpus = GpuWatch() if worker.kind in _USES_GPUS else None
        self._interval_s = MAX_INTERVAL_S
        self._is_registered = False
        self._last_contact: float | None = None
        self._num_asked = 0
        self._num_answered = 0
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()

    @property
    def silence_s(self) -> float:
        """Return seconds since the orchestrator last answered; infinite before the first answer."""
        return float("inf") if self._last_contact is None else time.monotonic() - self._last_contact

    async def run(self, stopping: asyncio.Event) -> None:
        """Register and send heartbeats until `stopping` is set; raise what the orchestrator refuses for good.

        It tries again for ever while the orchestrator does not answer, and registers again where the orchestrator asks
        for it.
        """
        if self._gpus is not None:
            self._gpus.start()
        try:
            life, _ = await first_of(self._live(), stopping.wait())
        finally:
            if self._gpus is not None:
                self._gpus.stop()
        if life is not None:
            life.result()  # only an error ends it

    def heartbeat_soon(self) -> None:
        """Have a heartbeat sent at once, made after this call, and do not wait for its answer."""
        self._wake.set()

    async def heartbeat_now(self, *, timeout_s: float) -> bool:
        """Have a heartbeat sent at once, made after this call, and wait until its answer has come and was handled.

        Return whether that was within `timeout_s` seconds.
        """
        self._num_asked += 1
        mine = self._num_asked
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_s):
                # The answer to a heartbeat that was made before this call does not count.
                while self._num_answered < mine:
                    await self._answered.wait()
        except TimeoutError:
            return False
        return True

    async def _live(self) -> None:
        """Register, then send a heartbeat each interval or when woken, and hand its reply to `on_assignments`.

        Does not return.
        """
        async with open_channel(self._address) as channel:
            stub = WorkerServiceStub(channel)
            # unregistered wait: a periodic look; what it awaits is registered where it is awaited
            while True:
                if not self._is_registered:
                    await self._register(stub)
                # Before the heartbeat is made: a wake-up that comes meanwhile causes another one.
                self._wake.clear()
                num_asked = self._num_asked
                reply = await self._heartbeat(stub, is_urgent=num_asked > self._num_answered)
                if reply is None:
                    continue
                if reply.register_again:
                    self._is_registered = False
                    logger.info("registering again", extra={"worker_id": self._worker.worker_id})
                    await asyncio.sleep(MIN_INTERVAL_S)  # bounds the loop with an orchestrator that always forgets
                    continue
                if reply.heartbeat_seconds:
                    self._interval_s = _bounded(reply.heartbeat_seconds)
                handled = self._on_assignments(reply)
                if inspect.isawaitable(handled):
                    await handled
                # Counted only now: `heartbeat_now` promises that the answer's assignments were handled.
                self._num_answered = num_asked
                # An event for each answer: who waits is woken by the next one, and cannot take an old one for it.
                answered, self._answered = self._answered, asyncio.Event()
                answered.set()
                with contextlib.suppress(TimeoutError):
                    # Where the orchestrator holds its answer, the interval has passed there.
                    async with asyncio.timeout(MIN_INTERVAL_S if self._is_held else self._interval_s):
                        await self._wake.wait()

    async def _register(self, stub: WorkerServiceStub) -> None:
        """Register the worker, waiting until the orchestrator answers, and take the heartbeat interval from its
        reply.
        """

        def request() -> RegisterWorkerRequest:
            return RegisterWorkerRequest(worker=self._worker)

        reply: RegisterWorkerResponse = await self._until_answered("registration with", stub.RegisterWorker, request)
        self._interval_s = _bounded(reply.heartbeat_seconds)
        self._is_registered = True
        fields = {"worker_id": self._worker.worker_id, "orchestrator": self._address, "interval_s": self._interval_s}
        logger.info("registered", extra=fields)

    async def _heartbeat(self, stub: WorkerServiceStub, *, is_urgent: bool) -> HeartbeatResponse | None:
        """Send a heartbeat, waiting until the orchestrator answers, and return its reply.

        An urgent one is not held by the orchestrator. None if another heartbeat was requested while this one was held.
        A worker that the orchestrator does not know gets a reply that says to register again.
        """
        # Half of the call's deadline at most: an answer that is held must not look like silence.
        hold_s = min(self._interval_s, self._rpc_timeout_s / 2) if self._is_held and not is_urgent else 0.0

        def request() -> HeartbeatRequest:
            """Return the worker's report as a heartbeat, with its waits and the use of its GPUs."""
            heartbeat = self._report()
            heartbeat.worker_id = self._worker.worker_id
            heartbeat.hold_seconds = hold_s
            if self._gpus is not None:
                heartbeat.gpus.extend(map(gpu_to_proto, self._gpus.latest()))
            if not heartbeat.waits:
                heartbeat.waits.extend(to_proto(waits.snapshot(self._worker.worker_id)[:MAX_WAITS]))
            return heartbeat

        asked = self._until_answered("an answer from", stub.Heartbeat, request)
        try:
            if not hold_s:
                return await asked
            # A wake-up cancels the call that is held, and the next heartbeat tells the news.
            answered, _ = await first_of(asked, self._wake.wait())  # bounded by the call's own deadline
            return None if answered is None else answered.result()
        except errors.NotFoundError:
            return HeartbeatResponse(register_again=True)

    async def _until_answered(self, what: str, method: Callable[..., Any], make: Callable[[], Any]) -> Any:
        """Call `method` until the orchestrator answers, and return its answer.

        `make` makes the request of each attempt. `what` begins the reason of the wait, such as "an answer from". The
        wait is registered, with one log line when it begins and one when it ends. Raises what the orchestrator refuses
        for good.
        """
        answer, failure = await self._attempt(method, make())
        if failure is None:
            return answer
        began, num_failed, is_reported = time.monotonic(), 0, False
        # Silence began with the last answer, not with the first failure: the orchestrator may have died in between.
        silent_since = began if self._last_contact is None else self._last_contact
        fields: dict[str, Any] = {"orchestrator": self._address, "error": str(failure)}
        logger.warning("orchestrator does not answer; trying again", extra=fields)
        with waits.waiting(f"{what} {self._to}", waits_on="orchestrator", deadline_s=self._silent_s) as wait:
            while failure is not None:
                wait.update(reason=f"{what} {self._to}: {failure.message}")
                num_failed += 1
                # One failure alone may be our own: a process that was stopped finds its deadline passed.
                if not is_reported and num_failed > 1 and time.monotonic() - silent_since >= self._silent_s:
                    is_reported = True
                    self._report_silence(time.monotonic() - silent_since, is_over=False, problem=failure.message)
                await asyncio.sleep(BACKOFF.after(num_failed))
                answer, failure = await self._attempt(method, make())
        silent_s = time.monotonic() - silent_since
        logger.info("orchestrator answers again", extra={"orchestrator": self._address, "after_s": round(silent_s, 3)})
        if is_reported:
            self._report_silence(silent_s, is_over=True, problem="")
        return answer

    def _report_silence(self, seconds: float, *, is_over: bool, problem: str) -> None:
        """Log that the orchestrator was silent for `seconds`, or, if `is_over`, that it answers again.

        Call `on_silence`. `problem` says in words what the last attempt met.
        """
        silence = Silence(orchestrator=self._address, seconds=seconds, is_over=is_over, problem=problem)
        logger.warning(silence.describe())
        if self._on_silence is not None:
            self._on_silence(silence)

    async def _attempt(self, method: Callable[..., Any], request: Any) -> tuple[Any, MillraceError | None]:
        """Call once; return (answer, None), or (None, error) where another attempt may help. Raise any other error."""
        try:
            # `_until_answered` registers the wait, over all attempts.
            answer = await call(method, request, timeout_s=self._rpc_timeout_s, to=self._to, quiet_s=math.inf)
        except _NOT_RETRIED:
            raise
        except errors.UnauthenticatedError as error:
            if self._last_contact is None:
                raise
            return None, error  # tokens are being changed, and not every machine has the new ones yet
        except MillraceError as error:
            return None, error
        self._last_contact = time.monotonic()
        return answer, None


# What heartbeats carry, waits and the use of GPUs, on the wire; `millrace.telemetry` itself knows no protobuf.

_NAME_CHARS = 100


def to_proto(waits: Iterable[Wait]) -> list[event_pb2.Wait]:
    """Return the waits as messages, in the same order."""
    return [
        event_pb2.Wait(
            owner=wait.owner,
            reason=wait.reason,
            waits_on=wait.waits_on,
            age_seconds=wait.age_s,
            deadline_seconds=wait.deadline_s,
            run_uid=wait.run,
            refusal=_refusal_to_proto(wait.refusal),
        )
        for wait in waits
    ]


def _bounded(interval_s: float) -> float:
    """Return a heartbeat interval in seconds, brought within `MIN_INTERVAL_S` and `MAX_INTERVAL_S`."""
    return min(max(interval_s, MIN_INTERVAL_S), MAX_INTERVAL_S)


def from_proto(messages: Iterable[event_pb2.Wait]) -> list[Wait]:
    """Return the waits in messages of another process, in the same order."""
    return [
        Wait(
            owner=message.owner,
            reason=message.reason,
            waits_on=message.waits_on,
            age_s=message.age_seconds,
            deadline_s=message.deadline_seconds,
            run=message.run_uid,
            refusal=_refusal_from_proto(message.refusal) if message.HasField("refusal") else None,
        )
        for message in messages
    ]


def _refusal_to_proto(refusal: Refusal | None) -> run_pb2.RunError | None:
    """Return the refusal for which something waits, as a message; None stays None."""
    if refusal is None:
        return None
    return run_pb2.RunError(reason=refusal.reason, message=refusal.message, remedy=refusal.remedy)


def _refusal_from_proto(message: run_pb2.RunError) -> Refusal:
    """Return the refusal that a message holds."""
    return Refusal(reason=message.reason, message=message.message, remedy=message.remedy)


def gpu_to_proto(gpu: GpuUse) -> worker_service_pb2.GpuUse:
    """Return a GPU as a message."""
    return worker_service_pb2.GpuUse(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        memory_used_bytes=gpu.memory_used,
        memory_total_bytes=gpu.memory_total,
        utilization=gpu.utilization,
        power_watts=gpu.power_watts,
    )


def gpus_from_proto(messages: Sequence[worker_service_pb2.GpuUse]) -> list[GpuUse]:
    """Return the GPUs that a worker reports, `MAX_GPUS` at most, with texts cut to `_NAME_CHARS`.

    What a worker did not measure, and a utilization or power that is out of range, is None.
    """
    return [
        GpuUse(
            index=each.index,
            uuid=each.uuid[:_NAME_CHARS],
            name=each.name[:_NAME_CHARS],
            memory_used=each.memory_used_bytes if each.HasField("memory_used_bytes") else None,
            memory_total=each.memory_total_bytes if each.HasField("memory_total_bytes") else None,
            utilization=_within(each.utilization, 1.0) if each.HasField("utilization") else None,
            power_watts=_within(each.power_watts, 1e6) if each.HasField("power_watts") else None,
        )
        for each in messages[:MAX_GPUS]
    ]


def _within(value: float, most: float) -> float | None:
    """Return the value if it is finite and within 0 and `most`; else None."""
    return value if math.isfinite(value) and 0 <= value <= most else None
