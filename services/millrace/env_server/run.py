"""The env-server's life: connect, serve, register, drain."""

import asyncio

from millrace import __version__
from millrace.env_server.pool import PoolLimits
from millrace.env_server.service import EnvService
from millrace.env_server.sink import RolloutLog, RolloutSink
from millrace.env_server.tokenizer_files import TokenizerFiles
from millrace.internal.v1 import env_service_pb2, env_service_pb2_grpc
from millrace.internal.v1.worker_service_pb2 import (
    WORKER_KIND_ENV_SERVER,
    HeartbeatRequest,
    HeartbeatResponse,
    Worker,
)
from millrace.rpc.serve import serve
from millrace.rpc.worker import WorkerAgent, new_worker_id
from millrace.runlog.connection import open_redis
from millrace.runlog.log import FORMAT_MAJOR, RunLog
from millrace.storage.base import open_store
from millrace.telemetry.settings import Settings, parse_address

SERVICE_NAME = env_service_pb2.DESCRIPTOR.services_by_name["EnvService"].full_name


async def run(settings: Settings, *, num_workers: int, capacity: int) -> None:
    """Serve until SIGTERM or SIGINT. Raises MillraceError if it cannot start or is refused for good."""
    redis = open_redis(settings.require("redis_url"))
    store = await asyncio.to_thread(open_store, settings.require("store_url"))
    tokenizers = TokenizerFiles(store)
    worker_id = new_worker_id("env-server")

    async def open_log(run_uid: str) -> RolloutLog:
        return await RunLog.open(redis, store, prefix=settings.prefix, uid=run_uid)

    service = EnvService(
        sink=RolloutSink(open_log),
        tokenizers=tokenizers,
        worker_id=worker_id,
        capacity=capacity,
        limits=PoolLimits(num_workers=num_workers),
    )
    try:
        await _serve_registered(settings, service, worker_id=worker_id, capacity=capacity)
    finally:
        await service.close()
        tokenizers.close()
        await redis.aclose()


async def _serve_registered(settings: Settings, service: EnvService, *, worker_id: str, capacity: int) -> None:
    """Serve gRPC, and keep the worker registered from the moment that the port is known."""
    stopping = asyncio.Event()
    port_known: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def register(server: object, draining: asyncio.Event) -> list[str]:
        env_service_pb2_grpc.add_EnvServiceServicer_to_server(service, server)
        return [SERVICE_NAME]

    async def announce() -> None:
        worker = Worker(
            worker_id=worker_id,
            kind=WORKER_KIND_ENV_SERVER,
            address=_advertised(settings, await port_known),
            version=__version__,
            min_log_format=FORMAT_MAJOR,
            max_log_format=FORMAT_MAJOR,
            capacity=capacity,
        )
        agent = WorkerAgent(
            settings.require("orchestrator"),
            worker,
            lambda: HeartbeatRequest(num_playing=service.groups.num_rollouts),
            lambda reply: _note_assignments(service, reply),
        )
        try:
            await agent.run(stopping)
        finally:
            # Refused for good: a server that nobody knows must not go on as if all were well.
            stopping.set()

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(announce(), name="announce")
            await serve(
                settings.require("listen"),
                register,
                drain_s=settings.drain_s,
                grace_s=settings.grace_s,
                on_started=port_known.set_result,
                stopping=stopping,
            )
    except BaseExceptionGroup as errors:
        # One of the two failed and the other was cancelled; the caller wants the error, not the group.
        raise errors.exceptions[0] from None


def _note_assignments(service: EnvService, reply: HeartbeatResponse) -> None:
    for assignment in reply.assignments:
        service.groups.note_resolved(assignment.run_uid, assignment.resolved_below)


def _advertised(settings: Settings, port: int) -> str:
    """Where others reach this server: the explicit address, or the listening host with the port that was taken."""
    if settings.advertise:
        return settings.advertise
    host, _ = parse_address(settings.require("listen"))
    return f"{host}:{port}"
