"""Wiring of the orchestrator process: Redis, store, registry, manager and the gRPC server."""

import asyncio
import contextlib
import itertools
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from millrace.backoff import Backoff
from millrace.config.section import IMAGE_PATTERN
from millrace.custom_code import CustomCode
from millrace.errors import InvalidSpecError, InvalidStateError, MillraceError, Violation, first_error
from millrace.internal.v1 import worker_service_pb2, worker_service_pb2_grpc
from millrace.orchestrator.beside import LogPlace, Readers, open_readers
from millrace.orchestrator.catalog import RunCatalog
from millrace.orchestrator.chain import storage_of
from millrace.orchestrator.dashboard_source import OrchestratorSources
from millrace.orchestrator.manager import RunManager
from millrace.orchestrator.meters import registry_of
from millrace.orchestrator.queue.groups import parse_groups
from millrace.orchestrator.service import RunServicer
from millrace.orchestrator.tenants import UsageReader
from millrace.orchestrator.workers import HEARTBEAT_S, KINDS, WorkerRegistry
from millrace.race import first_of
from millrace.rpc.health import PROCESS, HealthBoard
from millrace.rpc.metrics_server import metrics_server
from millrace.rpc.reach import worker_slot
from millrace.rpc.serve import Shutdown, serve
from millrace.rpc.worker import new_worker_id
from millrace.runlog import open_redis
from millrace.runlog.redis.connection import redis_self_test
from millrace.storage import open_store
from millrace.storage.clean_up import QUIET_S
from millrace.storage.self_test import require_tested
from millrace.telemetry import waits
from millrace.telemetry.settings import Settings, join_address, parse_address
from millrace.v1 import run_service_pb2, run_service_pb2_grpc

logger = logging.getLogger(__name__)

STALL_S = 60.0
"""Silence of the manager's scan after which the process counts as hung."""
GIVE_BACK_S = 15.0
"""How long a stop waits for leases to be released and the last events to be written; Redis may be away."""
TEST_STORES_S = 10.0
"""How long runs wait for the first try of the stores; what does not answer is tried while they wait for it."""
_TEST_AGAIN = Backoff(1.0, 30.0)
_RUN_SERVICE = run_service_pb2.DESCRIPTOR.services_by_name["RunService"].full_name
_WORKER_SERVICE = worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """What an orchestrator consists of."""

    settings: Settings
    owner: str
    place: LogPlace
    registry: WorkerRegistry
    catalog: RunCatalog
    board: HealthBoard
    manager: RunManager
    readers: Readers
    usage: UsageReader

    def servicer(self, draining: asyncio.Event) -> RunServicer:
        """Return the implementation of the public API; watches end once `draining` is set."""
        return RunServicer(
            place=self.place,
            readers=self.readers,
            catalog=self.catalog,
            manager=self.manager,
            registry=self.registry,
            usage=self.usage,
            owner=self.owner,
            draining=draining,
        )

    def register(self, server: grpc.aio.Server, draining: asyncio.Event) -> list[str]:
        """Add both services to the server and return their full names; `draining` ends watches of runs."""
        run_service_pb2_grpc.add_RunServiceServicer_to_server(self.servicer(draining), server)
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(self.registry), server)
        return [_RUN_SERVICE, _WORKER_SERVICE]

    def start(self, port: int) -> None:
        """Mark both services as ready, and expect scans of the manager from now on.

        Called once the server listens on `port`. The process that has bound the address holds its slot: it may take
        over the leases of a predecessor there.
        """
        host, _ = parse_address(self.settings.require("listen"))
        self.manager.slot = worker_slot(join_address(host, port))
        self.board.set_ready(_RUN_SERVICE)
        self.board.set_ready(_WORKER_SERVICE)
        self.board.expect_progress(PROCESS, within_s=STALL_S)


def _assemble(settings: Settings) -> _Process:
    """Make the parts of an orchestrator process and connect them to each other; nothing works yet."""
    groups = parse_groups(settings.queue_groups)  # before anything is opened, as it may be malformed
    owner = new_worker_id("orchestrator")
    redis_url = settings.require("redis_url")
    redis = open_redis(redis_url)
    store_url = settings.require("store_url")
    store = open_store(store_url)
    place = LogPlace(redis=redis, store=store, store_url=store_url, redis_url=redis_url, prefix=settings.prefix)
    readers = open_readers(place)
    registry, board = WorkerRegistry(), HealthBoard()
    catalog = RunCatalog(redis=redis, store=store, prefix=settings.prefix, owner=owner)
    manager = RunManager(
        owner=owner,
        place=place,
        catalog=catalog,
        registry=registry,
        readers=readers,
        on_scan=lambda: board.touch(PROCESS),
        custom_code=CustomCode.parse(settings.custom_code),
        groups=groups,
    )
    return _Process(
        settings=settings,
        owner=owner,
        place=place,
        registry=registry,
        catalog=catalog,
        board=board,
        manager=manager,
        readers=readers,
        usage=UsageReader(store, settings.prefix),
    )


def _dashboard(process: _Process) -> contextlib.AbstractAsyncContextManager[int]:
    """Return the context in which the dashboard is served, over the same parts as the public API."""
    sources = OrchestratorSources(
        service=process.servicer(asyncio.Event()),
        catalog=process.catalog,
        manager=process.manager,
        registry=process.registry,
        owner=process.owner,
    )
    return process.readers.pages(process.settings.dashboard_listen, sources)


async def serve_orchestrator(
    settings: Settings, *, on_started: Callable[[int], None] | None = None, handle_signals: bool = True
) -> None:
    """Serve RunService and WorkerService until a signal; raise what ends the manager.

    `on_started` gets the port once the server listens. Runs are claimed after that and after the test of the stores,
    which is waited for `TEST_STORES_S` at most. Without `handle_signals` only cancellation or an error ends it.
    """
    # Looked up before anything is opened that would have to be closed after an error.
    listen = settings.require("listen")
    process = _assemble(settings)
    started_once, tested_once, stopping = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def started(port: int) -> None:
        """Mark the process as started, and report the port."""
        process.start(port)
        started_once.set()
        if on_started is not None:
            on_started(port)

    exported = registry_of(process.manager, process.catalog, process.registry, process.usage)
    try:
        async with (
            metrics_server(settings.metrics_listen, exported),
            _dashboard(process),
            asyncio.TaskGroup() as tasks,
        ):
            counting = tasks.create_task(process.usage.keep(process.catalog), name="use by tenant")
            testing = tasks.create_task(_test_stores(process, tested_once), name="test of the stores")
            managing = tasks.create_task(
                _manage(process.manager, started_once, tested_once, stopping), name="run manager"
            )
            await serve(
                listen,
                process.register,
                shutdown=Shutdown(drain_s=settings.drain_s, grace_s=settings.grace_s),
                on_started=started,
                stopping=stopping,
                health_board=process.board,
                handle_signals=handle_signals,
            )
            # A server that never listened has not set them, and `_manage` waits for them.
            started_once.set()
            tested_once.set()
            testing.cancel()
            counting.cancel()
            await managing
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    finally:
        await process.readers.close()
        await process.place.redis.aclose()


async def _test_stores(process: _Process, tested: asyncio.Event) -> None:
    """Check Redis and the object store until both pass; raise InvalidStateError if one of them cannot hold runs.

    `tested` is set after the first try, whatever came of it, and before the store's last answers. One that does not
    answer, or is no primary at the moment, is tried again.
    """
    prefix = process.settings.prefix
    for failures in itertools.count(1):
        try:
            await redis_self_test(process.place.redis, prefix=prefix)
            answered = await asyncio.to_thread(require_tested, process.place.store, prefix=prefix)
            tested.set()
            with waits.waiting("the last answers of the store's self-test", waits_on="object store", quiet_s=QUIET_S):
                await asyncio.wrap_future(answered)
            return
        except MillraceError as error:
            # A store or a Redis that cannot carry runs stays so, whenever it is asked.
            if isinstance(error, InvalidStateError):
                raise
            logger.warning("cannot test Redis and the object store, trying again", extra={"error": str(error)})
            waits_on = storage_of(error)
            reason, refusal = f"{waits_on} to be tested, which failed: {error.message}", waits.Refusal.of(error)
        finally:
            tested.set()
        with waits.waiting(reason, waits_on=waits_on, refusal=refusal):
            await asyncio.sleep(_TEST_AGAIN.after(failures))


async def _manage(manager: RunManager, started: asyncio.Event, tested: asyncio.Event, stopping: asyncio.Event) -> None:
    """Run the manager from when the server listens (`started`) until `stopping` is set, then give its runs back.

    It begins after the first test of the stores (`tested`), or after `TEST_STORES_S`, and ends `GIVE_BACK_S` after
    `stopping`. Raises what ends the manager by itself.
    """
    # Before it listens, its slot is not known, and a lease of a dead predecessor could not be taken over.
    await started.wait()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TEST_STORES_S):
            await tested.wait()
    running = asyncio.create_task(manager.run())
    try:
        ended, _ = await first_of(running, stopping.wait())
        if ended is not None:
            ended.result()
        logger.info("giving every run back")
    finally:
        running.cancel()
        # Bounded: Redis may be away, and the leases end by themselves.
        _, left = await asyncio.wait((running,), timeout=GIVE_BACK_S)
        if left:
            logger.warning("not every run could be given back", extra={"within_s": GIVE_BACK_S})


# WorkerService, the gRPC service that workers register with and send their heartbeats to, over the registry.

_URL = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\](:\d+)?|[^\s/\[\]@]+)(/\S*)?")


class WorkerServicer(worker_service_pb2_grpc.WorkerServiceServicer):
    """WorkerService over a registry."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry

    async def RegisterWorker(
        self, request: worker_service_pb2.RegisterWorkerRequest, context: grpc.aio.ServicerContext
    ) -> worker_service_pb2.RegisterWorkerResponse:
        """Add a worker to the registry, or renew its description; raise InvalidSpecError if that is invalid."""
        _check_worker(request.worker)
        record = self._registry.register(request.worker)
        lease_s = record.lease_ends - record.last_seen
        return worker_service_pb2.RegisterWorkerResponse(heartbeat_seconds=record.interval_s, lease_seconds=lease_s)

    async def Heartbeat(
        self, request: worker_service_pb2.HeartbeatRequest, context: grpc.aio.ServicerContext
    ) -> worker_service_pb2.HeartbeatResponse:
        """Take a worker's report and answer with its assignments.

        A worker that is not known is asked to register again.

        With `hold_seconds` in the request, the answer waits until there are new assignments, for at most that time or
        `HEARTBEAT_S`.
        """
        record = self._registry.heartbeat(request)
        if record is not None and request.hold_seconds > 0:
            # No longer than an interval, after which the worker's next report is due.
            await record.hold(min(request.hold_seconds, HEARTBEAT_S))
            # The worker may have been removed while this call waited.
            record = self._registry.by_id.get(request.worker_id)
        if record is None:
            return worker_service_pb2.HeartbeatResponse(register_again=True)
        return worker_service_pb2.HeartbeatResponse(
            assignments=self._registry.assignments(record),
            let_go=self._registry.retired_runs(),
            heartbeat_seconds=record.interval_s,
        )


def _check_worker(worker: worker_service_pb2.Worker) -> None:
    """Raise InvalidSpecError unless the worker has an id and a kind.

    Its address, URL and image must be well-formed if they are set.
    """
    wrong: list[Violation] = []
    if not worker.worker_id:
        wrong.append(Violation(field="worker.worker_id", message="must not be empty"))
    if worker.kind not in KINDS:
        wrong.append(Violation(field="worker.kind", message="must be set"))
    if worker.address:
        try:
            parse_address(worker.address)
        except ValueError as error:
            wrong.append(Violation(field="worker.address", value=worker.address[:200], message=str(error)))
    if worker.http_url and not _URL.fullmatch(worker.http_url):
        message = "must be a URL such as http://10.0.0.1:8000/v1"
        wrong.append(Violation(field="worker.http_url", value=worker.http_url[:200], message=message))
    if worker.env_image and not re.fullmatch(IMAGE_PATTERN, worker.env_image):
        message = "must be the name of a container image, such as registry.example.com/team/my-env:1.2"
        wrong.append(Violation(field="worker.env_image", value=worker.env_image[:200], message=message))
    if wrong:
        raise InvalidSpecError(wrong, reason="REQUEST_INVALID")
