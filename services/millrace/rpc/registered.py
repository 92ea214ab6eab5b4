"""A worker's life: serve, register, announce the end, drain, be gone. Of env-server, inference and trainer.

    serve ── the port is known ──> register ──> heartbeats ...
    stop asked ──> `leave` and a last heartbeat at once, while load balancers look away ──> `drain` ──> gone

The registration outlasts the server: what finishes during the drain is still reported.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import millrace
from millrace.errors import MillraceError, all_errors
from millrace.internal.v1.worker_service_pb2 import HeartbeatResponse, Worker
from millrace.rpc.health import HealthBoard
from millrace.rpc.reach import advertised
from millrace.rpc.serve import Register, Shutdown, serve
from millrace.rpc.slot import worker_slot
from millrace.rpc.worker import OnAssignments, OnSilence, Report, WorkerAgent
from millrace.telemetry.settings import Settings, parse_address

FAREWELL_S = 1.0
"""Longest wait for the answer to the last heartbeat: where all is stopped at once, nobody answers any more."""


async def _nothing() -> None: ...


def _ignore(_: HeartbeatResponse) -> None: ...


class RegisteredWorker:
    """One worker process; `serve` is its life. Without an orchestrator in the settings it serves by itself."""

    def __init__(
        self,
        settings: Settings,
        worker: Worker,
        report: Report,
        *,
        on_assignments: OnAssignments = _ignore,
        on_silence: OnSilence | None = None,
        stopping: asyncio.Event | None = None,
        http_url: Callable[[str], str] | None = None,
    ) -> None:
        """`worker` says id, kind, log formats and capacity; where it is follows from the settings and its port.

        `http_url` makes the registered URL from the host under which others reach this process.
        """
        self.stopping = stopping or asyncio.Event()
        """Set it to end; signals do so where they are handled."""
        self._settings = settings
        self._worker = Worker(version=millrace.__version__)
        self._worker.MergeFrom(worker)
        self._report = report
        self._on_assignments = on_assignments
        self._on_silence = on_silence
        self._http_url = http_url
        self._agent: WorkerAgent | None = None
        self._started = asyncio.Event()
        self._is_announced = asyncio.Event()
        self._is_gone = asyncio.Event()

    async def serve(
        self,
        register: Register | None,
        *,
        health_board: HealthBoard | None = None,
        handle_signals: bool = True,
        leave: Callable[[], Awaitable[None]] = _nothing,
        drain: Callable[[], Awaitable[None]] = _nothing,
        beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        """Serve until it shall stop. Raises what the orchestrator refuses for good, and what ends one of `beside`.

        `leave` is called at once when it shall stop, `drain` when load balancers have looked away. Without `register`
        nobody calls this worker: it registers no address, and its server, if it has an address, tells the health.
        `beside` runs meanwhile.
        """

        async def drain_and_announce() -> None:
            await drain()
            await self._is_announced.wait()  # at most FAREWELL_S after `leave`

        listen = self._settings.listen
        try:
            async with asyncio.TaskGroup() as group:
                others = [group.create_task(each()) for each in beside]
                group.create_task(self._leave(leave), name="leave")
                if register is None:
                    self._find(worker_slot(self._settings.advertise or listen or ""))
                registration = group.create_task(self._stay_registered(), name="registration")
                if register is None and listen is None:
                    await self.stopping.wait()
                    await drain_and_announce()
                else:
                    await serve(
                        self._settings.require("listen"),
                        register or (lambda server, draining: []),
                        shutdown=Shutdown(
                            drain_s=self._settings.drain_s,
                            grace_s=self._settings.grace_s,
                            before_stop=drain_and_announce,
                        ),
                        on_started=None if register is None else self._find_address,
                        stopping=self.stopping,
                        health_board=health_board,
                        handle_signals=handle_signals,
                    )
                self._is_gone.set()
                await registration
                for task in others:
                    task.cancel()
        except BaseExceptionGroup as errors:
            # One of them failed and the others were cancelled; the caller wants the error, ours before others.
            found = list(all_errors(errors))
            raise next((error for error in found if isinstance(error, MillraceError)), found[0]) from None

    async def wait_started(self) -> None:
        """Return when it listens."""
        await self._started.wait()

    def _find_address(self, port: int) -> None:
        self._worker.address = advertised(self._settings, port)
        if self._http_url is not None:
            self._worker.http_url = self._http_url(parse_address(self._worker.address)[0])
        self._find(worker_slot(self._worker.address))

    def _find(self, slot: str) -> None:
        """Where this worker is is known: it can register."""
        self._worker.slot = slot
        if self._settings.orchestrator is not None:
            self._agent = WorkerAgent(
                self._settings.orchestrator,
                self._worker,
                self._report,
                self._on_assignments,
                on_silence=self._on_silence,
            )
        self._started.set()

    async def _stay_registered(self) -> None:
        """Until the last moment."""
        await self._started.wait()
        if self._agent is None:
            return
        try:
            await self._agent.run(self._is_gone)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RuntimeError("the worker agent was cancelled, though nobody ended this worker") from None

    async def _leave(self, leave: Callable[[], Awaitable[None]]) -> None:
        """Say at once that nothing new may come, and that others should take what is here."""
        await self.stopping.wait()
        await leave()
        if self._agent is not None:
            await self._agent.tell_now(timeout_s=FAREWELL_S)
        self._is_announced.set()
