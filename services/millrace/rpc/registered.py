"""The life of a worker (env-server, inference or trainer): serve, register, announce that it leaves, drain, end.

    serve ── the port is known ──> register ──> heartbeats ...
    asked to stop ──> `leave`, and a last heartbeat at once, while load balancers look away ──> `drain` ──> end

The registration outlasts the server, so that what finishes during the drain is still reported.
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

LAST_HEARTBEAT_S = 1.0
"""Longest wait for the answer to the last heartbeat. Where everything stops at once, nobody answers it."""


async def _nothing() -> None: ...


def _ignore(_: HeartbeatResponse) -> None: ...


class RegisteredWorker:
    """One worker process; `serve` is its life. Without an orchestrator in the settings it registers nowhere."""

    def __init__(
        self,
        settings: Settings,
        worker: Worker,
        report: Report,
        *,
        on_assignments: OnAssignments = _ignore,
        on_silence: OnSilence | None = None,
        is_held: bool = False,
        stopping: asyncio.Event | None = None,
        http_url: Callable[[str], str] | None = None,
    ) -> None:
        """Take what is registered: `worker` has id, kind, log formats and capacity; its address is added later.

        The address follows from the settings and the port. `is_held` has assignments heard at once (`WorkerAgent`).
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
        self._is_held = is_held
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
        """Serve until it is asked to stop. Raises what the orchestrator refuses for good, and any error of `beside`.

        `leave` is called as soon as it is asked to stop, `drain` once load balancers have looked away. Without
        `register` nobody calls this worker: it registers no address, and its server, if the settings have an address
        for one, only tells its health. `beside` runs meanwhile.
        """

        async def drain_and_announce() -> None:
            await drain()
            await self._is_announced.wait()  # at most LAST_HEARTBEAT_S after `leave`

        try:
            async with asyncio.TaskGroup() as group:
                others = [group.create_task(each()) for each in beside]
                group.create_task(self._leave(leave), name="leave")
                if register is None:
                    self._find(worker_slot(self._settings.advertise or self._settings.listen or ""))
                registration = group.create_task(self._stay_registered(), name="registration")
                await self._serve_calls(register, drain_and_announce, health_board, handle_signals=handle_signals)
                self._is_gone.set()
                await registration
                for task in others:
                    task.cancel()
        except BaseExceptionGroup as errors:
            # One of them failed and the others were cancelled. The caller gets that error; ours come before others.
            found = list(all_errors(errors))
            raise next((error for error in found if isinstance(error, MillraceError)), found[0]) from None

    async def _serve_calls(
        self,
        register: Register | None,
        before_stop: Callable[[], Awaitable[None]],
        health_board: HealthBoard | None,
        *,
        handle_signals: bool,
    ) -> None:
        """Run the server until its end. A worker without calls and without an address has none, and only waits."""
        if register is None and self._settings.listen is None:
            await self.stopping.wait()
            await before_stop()
            return
        await serve(
            self._settings.require("listen"),
            register or (lambda server, draining: []),
            shutdown=Shutdown(drain_s=self._settings.drain_s, grace_s=self._settings.grace_s, before_stop=before_stop),
            on_started=None if register is None else self._find_address,
            stopping=self.stopping,
            health_board=health_board,
            handle_signals=handle_signals,
        )

    def tell_soon(self) -> None:
        """Send a heartbeat at once, also where the orchestrator holds the answer to the one before."""
        if self._agent is not None:
            self._agent.tell_soon()

    async def wait_started(self) -> None:
        """Return when it listens."""
        await self._started.wait()

    def _find_address(self, port: int) -> None:
        self._worker.address = advertised(self._settings, port)
        if self._http_url is not None:
            self._worker.http_url = self._http_url(parse_address(self._worker.address)[0])
        self._find(worker_slot(self._worker.address))

    def _find(self, slot: str) -> None:
        """Take the slot, which says where this worker runs: now it can register."""
        self._worker.slot = slot
        if self._settings.orchestrator is not None:
            self._agent = WorkerAgent(
                self._settings.orchestrator,
                self._worker,
                self._report,
                self._on_assignments,
                on_silence=self._on_silence,
                is_held=self._is_held,
            )
        self._started.set()

    async def _stay_registered(self) -> None:
        """Send heartbeats until this worker is gone."""
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
        """Tell the orchestrator at once, so that it sends nothing new and gives others what is here."""
        await self.stopping.wait()
        await leave()
        if self._agent is not None:
            await self._agent.tell_now(timeout_s=LAST_HEARTBEAT_S)
        self._is_announced.set()
