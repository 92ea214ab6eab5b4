"""What every inference replica has, whichever engine it drives: PolicyService, health, registration, the updater.

Readiness is the PolicyService's name: SERVING while a policy is served. Liveness is the process: it fails when the
engine has work and makes no progress, is dead, or has failed with a model that nobody will send again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio

from millrace.errors import InternalError
from millrace.inference.engine import STALL_S, PolicyEngine
from millrace.inference.model_files import ModelSlot
from millrace.inference.service import SERVICE_NAME, PolicyServicer
from millrace.inference.settings import inference_worker
from millrace.inference.updater import PolicyUpdater
from millrace.internal.v1 import policy_service_pb2_grpc
from millrace.internal.v1.worker_service_pb2 import HeartbeatRequest
from millrace.policies.host_copy import HostCopy
from millrace.rpc.health import PROCESS, HealthBoard
from millrace.rpc.serve import RegisteredWorker
from millrace.rpc.worker import new_worker_id
from millrace.storage.opening import open_store
from millrace.telemetry import waits
from millrace.telemetry.settings import Settings

_HEALTH_PERIOD_S = 0.5
_STALL_SHOWN_S = 10.0  # one forward pass takes less: from here on a stall is a visible wait, overdue twice as late


class ReplicaParts:
    """Wires the parts around one engine; `run` lives until `stopping` is set (or a signal, if it handles them).

    `policy_dir` is where the host copy of the policy lies as a file, for engines in other processes; None keeps it in
    memory.
    """

    def __init__(
        self,
        settings: Settings,
        engine: PolicyEngine,
        slot: ModelSlot,
        *,
        stopping: asyncio.Event,
        extra_names: tuple[str, ...] = (),
        policy_dir: Path | None = None,
        worker_id: str | None = None,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._stopping = stopping
        self._worker_id = worker_id or new_worker_id("inference")
        self.board = HealthBoard()
        self.board.add(SERVICE_NAME, reason="no policy")
        store = open_store(settings.store_url) if settings.store_url else None
        stager = HostCopy(store, directory=policy_dir) if store is not None else None
        self.updater = PolicyUpdater(engine, slot, store, stager, extra_names=extra_names)
        self.servicer = PolicyServicer(engine, self.updater)

    async def run(
        self,
        http_url: Callable[[str], str],
        *,
        drain: Callable[[float], Awaitable[None]],
        warm_up: Callable[[], object] | None = None,
        handle_signals: bool = True,
    ) -> None:
        """Serve until it shall stop, then drain.

        `http_url` makes the registered URL from the host under which others reach this process. `drain` gets the grace
        period in seconds. `warm_up` runs in a thread once the server listens.
        """

        async def leave() -> None:
            """After load balancers looked away: open requests get the grace period, everything new goes elsewhere."""
            self.updater.leave()
            await drain(self._settings.grace_s)

        registered = RegisteredWorker(
            self._settings,
            inference_worker(self._worker_id),
            self._heartbeat,
            stopping=self._stopping,
            http_url=http_url,
        )

        async def import_meanwhile() -> None:
            """Import what the first policy will need, once the orchestrator knows this replica."""
            await registered.wait_started()
            if warm_up is not None:
                await asyncio.to_thread(warm_up)

        await registered.serve(
            self._add_services,
            health_board=self.board,
            handle_signals=handle_signals,
            drain=leave,
            beside=[self._update, self.watch_health, import_meanwhile],
        )

    async def _update(self) -> None:
        """Run the updater; its end is the replica's, which would serve an old version for ever, and say nothing."""
        task = asyncio.current_task()
        assert task is not None
        try:
            await self.updater.run()
        except asyncio.CancelledError:
            if task.cancelling():  # by those who end the replica
                raise
        raise InternalError(
            "the replica's updater has ended, though nobody ended it",
            reason="UPDATER_ENDED",
            remedy="the replica is started again; report this with its log",
        )

    def _add_services(self, server: grpc.aio.Server, _: asyncio.Event) -> list[str]:
        policy_service_pb2_grpc.add_PolicyServiceServicer_to_server(self.servicer, server)
        return [SERVICE_NAME]

    def _heartbeat(self) -> HeartbeatRequest:
        return HeartbeatRequest(policy=self.servicer.status(), is_leaving=self._stopping.is_set())

    async def watch_health(self) -> None:
        """Tell the health board of the engine's thread until cancelled."""
        wait = waits.LastingWait()
        while True:
            status = self.servicer.status()
            if status.has_version:
                self.board.set_ready(SERVICE_NAME)
            else:
                self.board.set_unready(SERVICE_NAME, status.error or "no policy")
            engine = self._engine.status()
            idle_s = engine.progress_age_s
            if idle_s > _STALL_SHOWN_S:
                open_now = engine.num_running + engine.num_waiting
                reason = f"its engine, which has {open_now} requests and did nothing for {idle_s:.0f} s"
                wait.on(reason, key="stall", deadline_s=_STALL_SHOWN_S)
            else:
                wait.over()
            if engine.is_dead or self.updater.is_lost:
                self.board.set_unready(PROCESS, engine.error)
            elif idle_s > STALL_S:
                self.board.set_unready(PROCESS, f"the engine has work and made no progress for {idle_s:.0f} s")
            else:
                self.board.set_ready(PROCESS)
            await asyncio.sleep(_HEALTH_PERIOD_S)
