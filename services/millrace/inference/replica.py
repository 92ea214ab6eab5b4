"""One inference replica: engine, HTTP API, PolicyService and registration in one event loop, from start to drain.

Readiness is the PolicyService's name: SERVING while a policy is served. Liveness is the process: it fails when the
engine has work and makes no progress, or its thread is dead.
"""

import asyncio
import logging
import socket
import sys

import grpc.aio

import millrace
from millrace.errors import MillraceError
from millrace.inference import loader
from millrace.inference.embedded import EmbeddedEngine
from millrace.inference.main import InferenceSettings
from millrace.inference.model_files import ModelSlot
from millrace.inference.server import STALL_S, HttpApi, start_http
from millrace.inference.service import SERVICE_NAME, PolicyServicer
from millrace.inference.updater import PolicyUpdater
from millrace.internal.v1 import policy_service_pb2_grpc
from millrace.internal.v1.worker_service_pb2 import WORKER_KIND_INFERENCE, HeartbeatRequest, Worker
from millrace.rpc.health import PROCESS, HealthBoard
from millrace.rpc.serve import serve
from millrace.rpc.slot import worker_slot
from millrace.rpc.worker import WorkerAgent, new_worker_id
from millrace.runlog.log import FORMAT_MAJOR
from millrace.storage.base import open_store
from millrace.telemetry import waits
from millrace.telemetry.settings import Settings, parse_address

log = logging.getLogger(__name__)

_HEALTH_PERIOD_S = 0.5
_STALL_SHOWN_S = 10.0  # one forward pass takes less: from here on a stall is a visible wait, overdue twice as late
# The engine's thread takes the interpreter lock between two torch operators; with Python's default of 5 ms it would
# wait that long, several times per token, whenever the HTTP API has work.
_SWITCH_INTERVAL_S = 0.0005
_FAREWELL_S = 1.0


class Replica:
    """Wires the parts together; `run` lives until SIGTERM, SIGINT or `stopping`."""

    def __init__(self, settings: Settings, own: InferenceSettings, *, stopping: asyncio.Event | None = None) -> None:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._settings = settings
        self._own = own
        self._stopping = stopping or asyncio.Event()
        self._board = HealthBoard()
        self._board.add(SERVICE_NAME, reason="no policy")
        self._engine = EmbeddedEngine(
            max_num_seqs=own.max_num_seqs,
            max_model_len=own.max_model_len,
            kv_bytes=own.kv_cache_bytes,
            num_threads=own.num_threads,
        )
        slot = ModelSlot()
        names = () if own.model_name is None else (own.model_name,)
        store = open_store(settings.store_url) if settings.store_url else None
        self._updater = PolicyUpdater(self._engine, slot, store, extra_names=names)
        self._servicer = PolicyServicer(self._engine, self._updater)
        self._api = HttpApi(self._engine, slot)
        self._started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._is_announced = asyncio.Event()
        self._is_gone = asyncio.Event()

    async def run(self) -> None:
        """Serves until it shall stop, then drains."""
        host, port = parse_address(self._settings.require("http_listen"))
        runner, http_port = await start_http(self._api, host.strip("[]"), port)
        log.info("listening for HTTP", extra={"address": f"{host}:{http_port}"})
        try:
            if self._own.model_dir is not None:
                await self._updater.serve_fixed(self._own.model_dir)
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(self._updater.run()), group.create_task(self._watch_health())]
                group.create_task(self._warm_up())
                agent = group.create_task(self._register(host, http_port))
                await serve(
                    self._settings.require("listen"),
                    self._add_services,
                    drain_s=self._settings.drain_s,
                    grace_s=self._settings.grace_s,
                    on_started=self._started.set_result,
                    stopping=self._stopping,
                    health_board=self._board,
                    before_stop=self._drain,
                )
                self._is_gone.set()
                await agent
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise _cause(errors) from errors
        finally:
            await runner.cleanup()
            await self._engine.close()

    async def _warm_up(self) -> None:
        """Imports meanwhile what the first policy will need: the orchestrator hears of this replica first."""
        await self._started
        await asyncio.to_thread(loader.warm_up)

    def _add_services(self, server: grpc.aio.Server, _: asyncio.Event) -> list[str]:
        policy_service_pb2_grpc.add_PolicyServiceServicer_to_server(self._servicer, server)
        return [SERVICE_NAME]

    async def _register(self, http_host: str, http_port: int) -> None:
        """Keeps the replica registered to its last moment; without an orchestrator it serves by itself."""
        if self._settings.orchestrator is None:
            return
        grpc_port = await self._started
        listen_host, _ = parse_address(self._settings.require("listen"))
        address = self._settings.advertise or f"{_reachable(listen_host)}:{grpc_port}"
        shown_host = parse_address(address)[0] if _is_wildcard(http_host) else http_host
        worker = Worker(
            worker_id=new_worker_id("inference"),
            kind=WORKER_KIND_INFERENCE,
            address=address,
            http_url=f"http://{shown_host}:{http_port}/v1",
            version=millrace.__version__,
            min_log_format=FORMAT_MAJOR,
            max_log_format=FORMAT_MAJOR,
            slot=worker_slot(address),
        )
        agent = WorkerAgent(self._settings.orchestrator, worker, self._heartbeat, lambda reply: None)
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(self._leave(agent))
            await agent.run(self._is_gone)
            leaving.cancel()

    async def _leave(self, agent: WorkerAgent) -> None:
        """Says at once that nothing new may come and that others take over what is here."""
        await self._stopping.wait()
        await agent.tell_now(timeout_s=_FAREWELL_S)
        self._is_announced.set()

    def _heartbeat(self) -> HeartbeatRequest:
        return HeartbeatRequest(policy=self._servicer.status(), is_leaving=self._stopping.is_set())

    async def _watch_health(self) -> None:
        wait = waits.LastingWait()
        while True:
            status = self._servicer.status()
            if status.has_version:
                self._board.set_ready(SERVICE_NAME)
            else:
                self._board.set_unready(SERVICE_NAME, status.error or "no policy")
            engine = self._engine.status()
            idle_s = engine.progress_age_s
            if idle_s > _STALL_SHOWN_S:
                open_now = engine.num_running + engine.num_waiting
                reason = f"its engine, which has {open_now} requests and did nothing for {idle_s:.0f} s"
                wait.on(reason, key="stall", deadline_s=_STALL_SHOWN_S)
            else:
                wait.over()
            if engine.is_dead:
                self._board.set_unready(PROCESS, engine.error)
            elif idle_s > STALL_S:
                self._board.set_unready(PROCESS, f"the engine has work and made no progress for {idle_s:.0f} s")
            else:
                self._board.set_ready(PROCESS)
            await asyncio.sleep(_HEALTH_PERIOD_S)

    async def _drain(self) -> None:
        """After load balancers looked away: the open requests get the grace period, everything new goes elsewhere."""
        self._updater.leave()
        await self._api.drain(self._settings.grace_s)
        if self._settings.orchestrator is not None:
            await self._is_announced.wait()  # at most _FAREWELL_S after the signal


def _is_wildcard(host: str) -> bool:
    return host in ("0.0.0.0", "[::]")


def _reachable(host: str) -> str:
    """The host under which others reach what listens on `host`."""
    return socket.gethostname() if _is_wildcard(host) else host


def _cause(errors: BaseExceptionGroup) -> BaseException:
    """The first error of ours in a group, or the first one."""
    found: list[BaseException] = []
    pending: list[BaseException] = [errors]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            found.append(error)
    return next((error for error in found if isinstance(error, MillraceError)), found[0])
