"""The env-server's life: take the spool over, connect, serve, register, drain."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc.aio

from millrace.env_server.isolation import landlock
from millrace.env_server.isolation.confinement import Confinement
from millrace.env_server.isolation.inherited import teacher_key_problem
from millrace.env_server.meters import registry_of
from millrace.env_server.service import Admits, EnvService
from millrace.env_server.settings import EnvServerSettings
from millrace.env_server.spool.files import Spool
from millrace.env_server.spool.sink import RolloutSink
from millrace.env_server.teacher.scorer import Teachers
from millrace.env_server.tokenizer_files import TokenizerFiles
from millrace.env_server.warm import WarmKeeper, WarmLimits
from millrace.env_server.workers.pool import PoolLimits
from millrace.env_server.workers.starter import WorkerStarter
from millrace.internal.v1 import env_service_pb2, env_service_pb2_grpc
from millrace.internal.v1.worker_service_pb2 import (
    WORKER_KIND_ENV_SERVER,
    HeartbeatRequest,
    HeartbeatResponse,
    Worker,
)
from millrace.rpc.metrics_server import metrics_server
from millrace.rpc.registered import RegisteredWorker
from millrace.rpc.worker import new_worker_id
from millrace.runlog.names import Names
from millrace.runlog.records.revisions import has_ended
from millrace.runlog.redis.connection import open_redis
from millrace.runlog.redis.log import FORMAT_MAJOR, RunLog
from millrace.storage.opening import open_store
from millrace.telemetry.settings import Settings

SERVICE_NAME = env_service_pb2.DESCRIPTOR.services_by_name["EnvService"].full_name
# What a predecessor left is appended before this env-server registers, so that the orchestrator finds it in the log
# instead of playing it again; an unreachable log must not keep it from registering.
_RECOVER_S = 3.0

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
            limits=PoolLimits(num_workers=own.num_workers, num_probes=own.num_probes, waits_s=own.blocked_s),
            teachers=teachers,
            admits=Admits(pythons=own.pythons, image=own.image),
        )
        keeper = WarmKeeper(service=service, limits=WarmLimits(idle_s=own.idle_s, num_workers=own.idle_workers))
        try:
            await sink.recover(timeout_s=_RECOVER_S)
            async with metrics_server(settings.metrics_listen, registry_of(service, sink)):
                await _EnvWorker(settings, service, sink, keeper, worker_id).serve()
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


class _EnvWorker:
    """The env-server as a worker: what it tells the orchestrator, and what it takes from the answers."""

    def __init__(
        self, settings: Settings, service: EnvService, sink: RolloutSink, keeper: WarmKeeper, worker_id: str
    ) -> None:
        self._keeper = keeper
        self._grace_s = settings.grace_s
        self._service = service
        self._sink = sink
        worker = Worker(
            worker_id=worker_id,
            kind=WORKER_KIND_ENV_SERVER,
            min_log_format=FORMAT_MAJOR,
            max_log_format=FORMAT_MAJOR,
            capacity=service.capacity,
            env_image=service.admits.image,
        )
        self._registered = RegisteredWorker(settings, worker, self._report, on_assignments=self._note_assignments)

    async def serve(self) -> None:
        """Until SIGTERM or SIGINT; raises what the orchestrator refuses for good."""

        def add_service(server: grpc.aio.Server, _: asyncio.Event) -> list[str]:
            env_service_pb2_grpc.add_EnvServiceServicer_to_server(self._service, server)
            return [SERVICE_NAME]

        await self._registered.serve(
            add_service,
            leave=self._service.leave,
            drain=lambda: self._service.drain(grace_s=self._grace_s),
            beside=[self._keeper.run],
        )

    def _report(self) -> HeartbeatRequest:
        return HeartbeatRequest(num_playing=self._service.num_rollouts, is_leaving=self._service.is_leaving)

    def _note_assignments(self, reply: HeartbeatResponse) -> None:
        live: set[str] = set()
        for assignment in reply.assignments:
            if assignment.is_over:
                self._service.look_for_end(assignment.run_uid)
            else:
                live.add(assignment.run_uid)
                self._sink.note_run(assignment.run_uid, assignment.resolved_below, assignment.log_instance)
        self._keeper.live_runs = frozenset(live)
