"""The life of a registered worker with real gRPC on both sides: where it says it is, and in which order it ends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace import errors
from millrace.internal.v1 import worker_service_pb2 as pb
from millrace.internal.v1.worker_service_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from millrace.rpc.serve import RegisteredWorker
from millrace.rpc.worker import WorkerAgent
from millrace.telemetry.settings import Settings
from millrace_testing.polling import until

WITHIN_S = 20.0


class Orchestrator(WorkerServiceServicer):
    """Notes what it hears, in order; `error` is what it answers a registration with."""

    def __init__(self, told: list[str]) -> None:
        self.told = told
        self.workers: list[pb.Worker] = []
        self.registered = asyncio.Event()
        self.error: Exception | None = None

    async def RegisterWorker(self, request, context):
        if self.error is not None:
            raise self.error
        self.workers.append(request.worker)
        self.registered.set()
        return pb.RegisterWorkerResponse(heartbeat_seconds=30, lease_seconds=60)

    async def Heartbeat(self, request, context):
        self.told.append("leaving" if request.is_leaving else "heartbeat")
        return pb.HeartbeatResponse(assignments=[pb.Assignment(run_uid="u1")])

    def register(self, server, draining):
        add_WorkerServiceServicer_to_server(self, server)
        return ["millrace.internal.v1.WorkerService"]


class Life:
    """A worker whose steps are noted in `told`."""

    def __init__(self, settings: Settings, told: list[str], **options) -> None:
        self.told = told
        self.replies: list[pb.HeartbeatResponse] = []
        self.worker = RegisteredWorker(
            settings,
            pb.Worker(worker_id="env-1", kind=pb.WORKER_KIND_ENV_SERVER, capacity=7),
            lambda: pb.HeartbeatRequest(is_leaving=self.worker.stopping.is_set()),
            on_assignments=self.replies.append,
            **options,
        )

    async def serve(self, register=lambda server, draining: [], **options) -> None:
        async def note(what: str) -> None:
            self.told.append(what)

        await self.worker.serve(
            register, leave=lambda: note("leave"), drain=lambda: note("drain"), handle_signals=False, **options
        )


@pytest.fixture
async def orchestrator(running_server) -> AsyncIterator[tuple[Orchestrator, Settings]]:
    heard = Orchestrator([])
    async with running_server(heard.register) as server:
        yield heard, Settings(listen="127.0.0.1:0", orchestrator=server.address, drain_s=0.0, grace_s=1.0)


async def test_it_registers_where_it_listens_and_ends_in_order(orchestrator) -> None:
    heard, settings = orchestrator
    life = Life(settings, heard.told, http_url=lambda host: f"http://{host}:1/v1")
    serving = asyncio.create_task(life.serve())
    await asyncio.wait_for(heard.registered.wait(), WITHIN_S)
    [worker] = heard.workers
    assert (worker.worker_id, worker.capacity, worker.http_url) == ("env-1", 7, "http://127.0.0.1:1/v1")
    assert worker.version and worker.slot.endswith(worker.address)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = await check(health_pb2.HealthCheckRequest(), timeout=WITHIN_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await until(lambda: life.replies, timeout_s=WITHIN_S)
    life.worker.stopping.set()
    await asyncio.wait_for(serving, WITHIN_S)
    assert life.told[:2] == ["heartbeat", "leave"], "it says at once that it leaves, and then what is true"
    assert set(life.told[2:]) == {"leaving", "drain"}
    assert life.replies[0].assignments[0].run_uid == "u1"


async def test_who_is_not_called_registers_a_place_and_no_address(orchestrator) -> None:
    heard, settings = orchestrator
    for listen in (None, "127.0.0.1:0"):
        heard.registered.clear()
        life = Life(replace(settings, listen=listen, advertise="here:1"), heard.told)
        serving = asyncio.create_task(life.serve(None))
        await asyncio.wait_for(heard.registered.wait(), WITHIN_S)
        assert heard.workers[-1].address == "" and heard.workers[-1].slot.endswith("/here:1")
        life.worker.stopping.set()
        await asyncio.wait_for(serving, WITHIN_S)
        assert "leaving" in heard.told and "drain" in heard.told
        heard.told.clear()


async def test_a_refusal_for_good_ends_it(orchestrator) -> None:
    heard, settings = orchestrator
    heard.error = errors.InvalidStateError("another version")
    with pytest.raises(errors.InvalidStateError, match="another version"):
        await asyncio.wait_for(Life(settings, heard.told).serve(), WITHIN_S)


async def test_without_an_orchestrator_it_serves_by_itself() -> None:
    life = Life(Settings(listen="127.0.0.1:0", drain_s=0.0, grace_s=0.5), [])
    serving = asyncio.create_task(life.serve())
    await asyncio.wait_for(life.worker.wait_started(), WITHIN_S)
    life.worker.stopping.set()
    await asyncio.wait_for(serving, WITHIN_S)
    assert set(life.told) == {"leave", "drain"}


async def test_what_runs_beside_it_ends_with_it_and_ends_it(orchestrator) -> None:
    heard, settings = orchestrator
    ended = asyncio.Event()

    async def forever() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        ended.set()

    async def fails() -> None:
        await asyncio.wait_for(heard.registered.wait(), WITHIN_S)
        raise errors.InternalError("the updater has ended")

    with pytest.raises(errors.InternalError, match="the updater has ended"):
        await asyncio.wait_for(Life(settings, heard.told).serve(beside=[forever, fails]), WITHIN_S)
    assert ended.is_set()


async def test_an_agent_that_somebody_cancels_is_no_quiet_end(orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, settings = orchestrator

    async def cancelled(self: WorkerAgent, stopping: asyncio.Event) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(WorkerAgent, "run", cancelled)
    with pytest.raises(RuntimeError, match="the worker agent was cancelled"):
        await asyncio.wait_for(Life(settings, heard.told).serve(), WITHIN_S)
