"""The env-server's life: take the spool over, connect, serve, register, drain."""

import asyncio
import contextlib
import logging
import time
from collections import Counter as Count
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field

import grpc.aio
from prometheus_client import CollectorRegistry

from millrace.env_server.isolation import namespaces
from millrace.env_server.isolation.confinement import Confinement
from millrace.env_server.isolation.inherited import teacher_key_problem
from millrace.env_server.play_meters import COUNTED, env_label, env_opened
from millrace.env_server.service import Admits, EnvService
from millrace.env_server.settings import EnvServerSettings
from millrace.env_server.sink import RolloutSink
from millrace.env_server.spool import Spool
from millrace.env_server.teacher.scorer import Teachers
from millrace.env_server.tokenizer_files import TokenizerFiles
from millrace.env_server.workers.pool import EnvPool, PoolLimits
from millrace.env_server.workers.starter import WorkerStarter
from millrace.internal.v1 import env_service_pb2, env_service_pb2_grpc
from millrace.internal.v1.worker_service_pb2 import (
    WORKER_KIND_ENV_SERVER,
    HeartbeatRequest,
    HeartbeatResponse,
    Worker,
)
from millrace.rollouts.requests import label_of
from millrace.rpc.metrics_server import metrics_server
from millrace.rpc.serve import RegisteredWorker
from millrace.rpc.worker import new_worker_id
from millrace.runlog.names import Names
from millrace.runlog.records.revisions import has_ended
from millrace.runlog.redis.connection import open_redis
from millrace.runlog.redis.log import FORMAT_MAJOR, RunLog
from millrace.storage import open_store
from millrace.telemetry.metrics import Family, MetricSheet, StateCollector, make_registry
from millrace.telemetry.settings import Settings

SERVICE_NAME = env_service_pb2.DESCRIPTOR.services_by_name["EnvService"].full_name
# Rollouts in the spool of a predecessor are appended before this env-server registers, so that the orchestrator finds
# them in the log instead of playing them again; an unreachable log must not keep it from registering.
_RECOVER_S = 3.0


# Which environments keep their workers while nobody plays them: for a bounded time, and a bounded number.
#
# The next run of the same environment, or the next evaluation, starts faster where the workers are still there; but
# every worker holds some hundred MB, and runs with new environments come and go.

DEFAULT_IDLE_S = 600.0
DEFAULT_IDLE_WORKERS = 4
_LOOK_S = 5.0
# The state of a resting environment (ids of tasks, quarantined ones) is small, but not nothing.
_MAX_RESTING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmLimits:
    """Limits of idle environments' workers."""

    idle_s: float = DEFAULT_IDLE_S
    """Seconds that an environment keeps its workers after its last rollout."""
    num_workers: int = DEFAULT_IDLE_WORKERS
    """Idle workers of environments that no live run has played; beyond it those used longest ago are ended."""


def to_rest(
    pools: Sequence[EnvPool], *, live_runs: Collection[str], now: float, limits: WarmLimits
) -> Sequence[EnvPool]:
    """Return those of the pools that are idle and whose workers are to be ended at `now` (monotonic seconds).

    These have failed, were idle for longer than `limits.idle_s`, or played for none of `live_runs` (uids) and are
    beyond `limits.num_workers`, counted from the one used last.
    """
    idle = [(since, pool) for pool in pools if (since := pool.idle_since) is not None and not pool.is_resting]
    # The one used last first, because the first ones of the loop keep their workers.
    idle.sort(key=lambda one: one[0], reverse=True)
    ending: list[EnvPool] = []
    num_kept = 0
    for since, pool in idle:
        is_of_live_run = not pool.runs.isdisjoint(live_runs)
        if not is_of_live_run:
            num_kept += pool.num_workers
        if (
            pool.failure is not None
            or now - since > limits.idle_s
            or (not is_of_live_run and num_kept > limits.num_workers)
        ):
            ending.append(pool)
            num_kept -= 0 if is_of_live_run else pool.num_workers
    return ending


@dataclass(kw_only=True)
class WarmKeeper:
    """Ends the workers of idle environments, looking every few seconds."""

    service: EnvService
    limits: WarmLimits = field(default_factory=WarmLimits)
    live_runs: frozenset[str] = frozenset()
    """Uids of the runs that go on, as the orchestrator's heartbeat replies have them."""

    async def run(self) -> None:
        """End the workers of idle environments, looking every `_LOOK_S` seconds until cancelled."""
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """End the workers of environments that were idle for too long or are too many.

        Environments without workers that no live run has played are removed from the service, the oldest first, beyond
        `_MAX_RESTING`.
        """
        for pool in to_rest(self.service.pools, live_runs=self.live_runs, now=time.monotonic(), limits=self.limits):
            logger.info("idle environment rests", extra={"env": pool.env.id, "workers": pool.num_workers})
            pool.rest()
        resting = [pool for pool in self.service.pools if pool.is_resting and pool.runs.isdisjoint(self.live_runs)]
        for pool in resting[: max(0, len(resting) - _MAX_RESTING)]:
            self.service.forget(pool)


logger = logging.getLogger(__name__)


async def run(settings: Settings, own: EnvServerSettings, confinement: Confinement) -> None:
    """Run the env-server until SIGTERM or SIGINT, then let its rollouts finish.

    `own` are the settings of the env-server alone, and `confinement` is how its workers are confined. Raises
    MillraceError if it cannot start or the orchestrator refuses it for good.
    """
    own.make_private()
    extra = {"isolation": confinement.isolation.value, "landlock": namespaces.version()}
    logger.info("environments are confined", extra=extra)
    store = await asyncio.to_thread(open_store, settings.require("store_url"))
    worker_id = new_worker_id("env-server")
    async with _open_sink(settings, own) as sink, _open_starter(confinement) as starter:
        # Workers that cannot read this user's files get the tokenizers in a directory that they can.
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
            # In this order, because plays use the teachers and the tokenizers.
            await service.close()
            await teachers.close()
            tokenizers.close()


@contextlib.asynccontextmanager
async def _open_starter(confinement: Confinement) -> AsyncIterator[WorkerStarter]:
    """Yield the starter of workers, while its template process imports in the background; close both at the end."""
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
    """Yield the sink that writes rollouts into the spool and appends them to the runs' logs in Redis; close it at
    the end.
    """
    spool = await asyncio.to_thread(Spool, own.spool_dir, limit_bytes=own.spool_bytes)
    store = await asyncio.to_thread(open_store, settings.require("store_url"))
    redis = open_redis(settings.require("redis_url"))

    async def open_log(run_uid: str) -> RunLog:
        """Open the run's log in Redis."""
        return await RunLog.open(redis, store, prefix=settings.prefix, uid=run_uid)

    async def is_over(run_uid: str) -> bool:
        """Return whether the store says that the run has ended."""
        return await asyncio.to_thread(has_ended, store, Names(settings.prefix, run_uid))

    sink = RolloutSink(spool, open_log, is_over)
    try:
        yield sink
    finally:
        await sink.close()
        await redis.aclose()


class _EnvWorker:
    """The env-server as a registered worker: its heartbeats, and what it does with the orchestrator's replies."""

    def __init__(
        self, settings: Settings, service: EnvService, sink: RolloutSink, keeper: WarmKeeper, worker_id: str
    ) -> None:
        """Prepare the registration of this env-server, which begins with `serve`.

        `keeper` ends the workers of idle environments, and `sink` appends rollouts; both get the orchestrator's news of
        runs.
        """
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
        """Register and serve until SIGTERM or SIGINT; raise the orchestrator's permanent refusals."""

        def add_service(server: grpc.aio.Server, _: asyncio.Event) -> list[str]:
            """Add EnvService to the gRPC server, and return its name."""
            env_service_pb2_grpc.add_EnvServiceServicer_to_server(self._service, server)
            return [SERVICE_NAME]

        await self._registered.serve(
            add_service,
            leave=self._service.leave,
            drain=lambda: self._service.drain(grace_s=self._grace_s),
            beside=[self._keeper.run],
        )

    def _report(self) -> HeartbeatRequest:
        """Return the heartbeat: how many rollouts are played, and whether this env-server is leaving."""
        return HeartbeatRequest(num_playing=self._service.num_rollouts, is_leaving=self._service.is_leaving)

    def _note_assignments(self, reply: HeartbeatResponse) -> None:
        """Take from a heartbeat's reply which runs go on, with what is resolved of each, and which are reported as
        over.

        A run that is reported as over is looked up in the store.
        """
        live: set[str] = set()
        for assignment in reply.assignments:
            if assignment.is_over:
                self._service.look_for_end(assignment.run_uid)
            else:
                live.add(assignment.run_uid)
                self._sink.note_run(assignment.run_uid, assignment.resolved_below, assignment.log_instance)
                self._service.groups.forget_finished(assignment.run_uid, resolved_below=assignment.resolved_below)
        self._keeper.live_runs = frozenset(live)


# The env-server's metrics: `play_meters` counts, and what is looked up when Prometheus asks is here.

ROLLOUTS = Family(
    "millrace_env_server_rollouts",
    "Rollouts that count against the capacity: playing in a worker, queued (for a worker, or behind one), or "
    "unappended (ended, and not in the log yet).",
    ("state",),
)
CAPACITY = Family("millrace_env_server_capacity_rollouts", "Rollouts that it takes at once.")
SPOOL_ROLLOUTS = Family("millrace_env_server_spool_rollouts", "Rollouts that the spool keeps, appended ones included.")
SPOOL_BYTES = Family("millrace_env_server_spool_bytes", "Bytes that the spool keeps.")
SPOOL_LIMIT = Family("millrace_env_server_spool_limit_bytes", "Bytes from which on no new groups are taken.")
QUARANTINED = Family("millrace_env_server_quarantined_tasks", "Tasks that are not played any more.", ("env",))
WORKERS = Family("millrace_env_server_workers", "Loaded env workers that live.", ("env",))
IDLE_WORKERS = Family("millrace_env_server_idle_workers", "Env workers that live and whose environment nobody plays.")
WORKER_MEMORY = Family("millrace_env_server_worker_memory_bytes", "Memory of env workers and their children.", ("env",))
FAMILIES = (
    ROLLOUTS,
    CAPACITY,
    SPOOL_ROLLOUTS,
    SPOOL_BYTES,
    SPOOL_LIMIT,
    QUARANTINED,
    WORKERS,
    IDLE_WORKERS,
    WORKER_MEMORY,
)


def registry_of(service: EnvService, sink: RolloutSink) -> CollectorRegistry:
    """Return a registry with this env-server's metrics: its state, read when Prometheus asks, and the counters."""

    def read(sheet: MetricSheet) -> None:
        """Write the env-server's present state into the sheet."""
        unappended, playing = sink.num_pending, sum(pool.num_playing for pool in service.pools)
        states = {"playing": playing, "unappended": unappended}
        # The three counts are not taken at the same moment, so the difference may be below 0.
        states["queued"] = max(0, service.num_rollouts - playing - unappended)
        for state, count in states.items():
            sheet.put(ROLLOUTS, count, state)
        sheet.put(CAPACITY, service.capacity)
        sheet.put(SPOOL_ROLLOUTS, sink.spool.num_rollouts)
        sheet.put(SPOOL_BYTES, sink.spool.num_bytes)
        sheet.put(SPOOL_LIMIT, sink.spool.limit_bytes)
        quarantined, workers, memory = Count[str](), Count[str](), Count[str]()
        for pool in service.pools:
            env = env_label(label_of(pool.env))
            env_opened(env)  # before `COUNTED` is asked, which comes later
            quarantined[env] += len(pool.quarantined_tasks)
            workers[env] += pool.num_workers
            memory[env] += sum(worker.memory_bytes for worker in pool.workers)
        for env in quarantined:
            sheet.put(QUARANTINED, quarantined[env], env)
            sheet.put(WORKERS, workers[env], env)
            sheet.put(WORKER_MEMORY, memory[env], env)
        idle = [pool.num_workers for pool in service.pools if pool.idle_since is not None]
        sheet.put(IDLE_WORKERS, sum(idle))

    return make_registry("env-server", [StateCollector(FAMILIES, read), *COUNTED])
