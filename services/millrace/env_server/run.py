"""The env-server's life: take the spool over, connect, serve, register, drain."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from millrace import __version__
from millrace.env_server import landlock
from millrace.env_server.confinement import Confinement
from millrace.env_server.meters import registry_of
from millrace.env_server.pool import PoolLimits
from millrace.env_server.service import EnvService, teacher_key_problem
from millrace.env_server.settings import EnvServerSettings
from millrace.env_server.sink import RolloutSink
from millrace.env_server.spool import Spool
from millrace.env_server.starter import WorkerStarter
from millrace.env_server.teacher import Teachers
from millrace.env_server.tokenizer_files import TokenizerFiles
from millrace.env_server.warm import WarmKeeper, WarmLimits
from millrace.errors import first_error
from millrace.internal.v1 import env_service_pb2, env_service_pb2_grpc
from millrace.internal.v1.worker_service_pb2 import (
    WORKER_KIND_ENV_SERVER,
    HeartbeatRequest,
    HeartbeatResponse,
    Worker,
)
from millrace.rpc.metrics_server import metrics_server
from millrace.rpc.reach import advertised
from millrace.rpc.serve import serve
from millrace.rpc.slot import worker_slot
from millrace.rpc.worker import WorkerAgent, new_worker_id
from millrace.runlog.connection import open_redis
from millrace.runlog.log import FORMAT_MAJOR, RunLog
from millrace.runlog.names import Names
from millrace.runlog.revisions import has_ended
from millrace.storage.opening import open_store
from millrace.telemetry.settings import Settings

SERVICE_NAME = env_service_pb2.DESCRIPTOR.services_by_name["EnvService"].full_name
# What a predecessor left is appended before this env-server registers, so that the orchestrator finds it in the log
# instead of playing it again; an unreachable log must not keep it from registering.
_RECOVER_S = 3.0
_FAREWELL_S = 1.0
# Watermark of a run that has ended.
_EVERYTHING = 2**63 - 1

logger = logging.getLogger(__name__)


async def run(settings: Settings, own: EnvServerSettings, confinement: Confinement) -> None:
    """Serve until SIGTERM or SIGINT. Raises MillraceError if it cannot start or is refused for good."""
    own.make_private()
    extra = {"isolation": confinement.isolation.value, "landlock": landlock.version()}
    logger.info("environments are confined", extra=extra)
    store = await asyncio.to_thread(open_store, settings.require("store_url"))
    worker_id = new_worker_id("env-server")
    async with _open_sink(settings, own) as sink, _open_starter(confinement) as starter:
        readable = starter.shared if confinement.user is not None or confinement.is_container else None
        tokenizers = await asyncio.to_thread(TokenizerFiles, store, parent=readable)
        teachers = Teachers(store, tokenizers, prefix=settings.prefix, key_problem=teacher_key_problem)
        service = EnvService(
            sink=sink,
            tokenizers=tokenizers,
            worker_id=worker_id,
            starter=starter,
            capacity=own.capacity,
            limits=PoolLimits(num_workers=own.num_workers, num_probes=own.num_probes),
            teachers=teachers,
        )
        keeper = WarmKeeper(service=service, limits=WarmLimits(idle_s=own.idle_s, num_workers=own.idle_workers))
        try:
            await sink.recover(timeout_s=_RECOVER_S)
            async with metrics_server(settings.metrics_listen, registry_of(service, sink)):
                await _Registered(settings, service, sink, keeper, worker_id).serve()
        finally:
            await service.close()
            await teachers.close()
            tokenizers.close()


@contextlib.asynccontextmanager
async def _open_starter(confinement: Confinement) -> AsyncIterator[WorkerStarter]:
    """What starts workers; its template imports while the rest starts."""
    starter = WorkerStarter(confinement)
    warming = asyncio.create_task(starter.warm(), name="warm the template")
    try:
        yield starter
    finally:
        warming.cancel()
        await asyncio.gather(warming, return_exceptions=True)
        await starter.close()


@contextlib.asynccontextmanager
async def _open_sink(settings: Settings, own: EnvServerSettings) -> AsyncIterator[RolloutSink]:
    """The sink over the spool, the logs in Redis and the store."""
    spool = await asyncio.to_thread(Spool, own.spool_dir, limit_bytes=own.spool_bytes)
    store = await asyncio.to_thread(open_store, settings.require("store_url"))
    redis = open_redis(settings.require("redis_url"))

    async def open_log(run_uid: str) -> RunLog:
        return await RunLog.open(redis, store, prefix=settings.prefix, uid=run_uid)

    async def is_over(run_uid: str) -> bool:
        return await asyncio.to_thread(has_ended, store, Names(settings.prefix, run_uid))

    sink = RolloutSink(spool, open_log, is_over)
    try:
        yield sink
    finally:
        await sink.close()
        await redis.aclose()


class _Registered:
    """Serves gRPC, and keeps the worker registered from the moment that the port is known until the last moment."""

    def __init__(
        self, settings: Settings, service: EnvService, sink: RolloutSink, keeper: WarmKeeper, worker_id: str
    ) -> None:
        self._keeper = keeper
        self._settings = settings
        self._service = service
        self._sink = sink
        self._worker_id = worker_id
        self._stopping = asyncio.Event()
        self._is_announced = asyncio.Event()
        self._is_gone = asyncio.Event()
        self._agent: asyncio.Future[WorkerAgent] = asyncio.get_running_loop().create_future()

    async def serve(self) -> None:
        """Until SIGTERM or SIGINT; raises what the orchestrator refuses for good."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._announce(), name="announce")
                group.create_task(self._leave(), name="leave")
                keeping = group.create_task(self._keeper.run(), name="keep warm")
                await serve(
                    self._settings.require("listen"),
                    self._add_service,
                    drain_s=self._settings.drain_s,
                    grace_s=self._settings.grace_s,
                    on_started=self._found,
                    stopping=self._stopping,
                    before_stop=self._drain,
                )
                self._is_gone.set()
                keeping.cancel()
        except BaseExceptionGroup as errors:
            # One of them failed and the others were cancelled; the caller wants the error, not the group.
            raise first_error(errors) from None

    def _add_service(self, server: object, draining: asyncio.Event) -> list[str]:
        env_service_pb2_grpc.add_EnvServiceServicer_to_server(self._service, server)
        return [SERVICE_NAME]

    def _found(self, port: int) -> None:
        address = advertised(self._settings, port)
        worker = Worker(
            worker_id=self._worker_id,
            kind=WORKER_KIND_ENV_SERVER,
            address=address,
            version=__version__,
            min_log_format=FORMAT_MAJOR,
            max_log_format=FORMAT_MAJOR,
            capacity=self._service.capacity,
            slot=worker_slot(address),
        )
        agent = WorkerAgent(self._settings.require("orchestrator"), worker, self._report, self._note_assignments)
        self._agent.set_result(agent)

    async def _announce(self) -> None:
        agent = await self._agent
        try:
            await agent.run(self._is_gone)
        finally:
            # Refused for good: a server that nobody knows must not go on as if all were well.
            self._stopping.set()

    async def _leave(self) -> None:
        """Say at once that nothing new may come, and that others should take what is here."""
        await self._stopping.wait()
        await self._service.leave()
        await (await self._agent).tell_now(timeout_s=_FAREWELL_S)
        self._is_announced.set()

    async def _drain(self) -> None:
        await self._service.drain(grace_s=self._settings.grace_s)
        await self._is_announced.wait()  # at most _FAREWELL_S after the signal

    def _report(self) -> HeartbeatRequest:
        return HeartbeatRequest(num_playing=self._service.num_rollouts, is_leaving=self._service.is_leaving)

    def _note_assignments(self, reply: HeartbeatResponse) -> None:
        live = (assignment.run_uid for assignment in reply.assignments if assignment.resolved_below != _EVERYTHING)
        self._keeper.live_runs = frozenset(live)
        for assignment in reply.assignments:
            self._sink.note_run(assignment.run_uid, assignment.resolved_below, assignment.log_instance)
