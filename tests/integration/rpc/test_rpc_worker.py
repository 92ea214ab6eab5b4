"""The worker agent against a real orchestrator-side service that forgets, dies, refuses and comes back."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator

import pytest

from millrace import errors
from millrace.internal.v1 import worker_service_pb2 as pb
from millrace.internal.v1.worker_service_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from millrace.orchestrator.serve import WorkerServicer
from millrace.orchestrator.workers import WorkerKind, WorkerRegistry
from millrace.rpc import worker as worker_module
from millrace.rpc.worker import WorkerAgent, new_worker_id
from millrace.telemetry import waits
from millrace_testing.patience import patient
from millrace_testing.polling import until

TRAINER = pb.WORKER_KIND_TRAINER
NAME = "millrace.internal.v1.WorkerService"


class Registry(WorkerServiceServicer):
    """Knows the workers that registered since it began; counts what it hears."""

    def __init__(self, *, heartbeat_s: float = 0.05) -> None:
        self.heartbeat_s = heartbeat_s
        self.known: set[str] = set()
        self.num_registered = 0
        self.heartbeats: list[pb.HeartbeatRequest] = []
        self.heard = asyncio.Condition()
        self.error: Exception | None = None
        self.says_not_found = False

    async def RegisterWorker(self, request, context):
        if self.error is not None:
            raise self.error
        async with self.heard:
            self.known.add(request.worker.worker_id)
            self.num_registered += 1
            self.heard.notify_all()
        return pb.RegisterWorkerResponse(heartbeat_seconds=self.heartbeat_s, lease_seconds=7)

    async def Heartbeat(self, request, context):
        if request.worker_id not in self.known:
            if self.says_not_found:
                raise errors.NotFoundError("no such worker")
            return pb.HeartbeatResponse(register_again=True)
        async with self.heard:
            self.heartbeats.append(request)
            self.heard.notify_all()
        return pb.HeartbeatResponse(assignments=[pb.Assignment(run_uid="u1", resolved_below=len(self.heartbeats))])

    def register(self, server, draining):
        add_WorkerServiceServicer_to_server(self, server)
        return [NAME]

    async def until(self, what) -> None:
        async with asyncio.timeout(20), self.heard:
            await self.heard.wait_for(what)


class Agent:
    """An agent in a task, and what it heard."""

    def __init__(self, address: str, **options) -> None:
        self.replies: list[pb.HeartbeatResponse] = []
        self.stopping = asyncio.Event()
        self.agent = WorkerAgent(
            address,
            pb.Worker(worker_id="env-1", kind=options.pop("kind", pb.WORKER_KIND_ENV_SERVER)),
            report=options.pop("report", lambda: pb.HeartbeatRequest(num_playing=3)),
            on_assignments=options.pop("on_assignments", self.replies.append),
            **options,
        )
        self.task = asyncio.create_task(self.agent.run(self.stopping))


@contextlib.asynccontextmanager
async def running_agent(address: str, **options) -> AsyncIterator[Agent]:
    running = Agent(address, **options)
    try:
        yield running
    finally:
        running.stopping.set()
        await asyncio.wait_for(asyncio.gather(running.task, return_exceptions=True), 5)


async def test_it_registers_reports_and_hears_assignments(running_server) -> None:
    registry = Registry()
    async with running_server(registry.register) as server, running_agent(server.address) as running:
        assert running.agent.silence_s == math.inf
        with waits.waiting("a slot", waits_on="inference", deadline_s=9):
            await registry.until(lambda: len(registry.heartbeats) >= 3)
        assert running.agent.silence_s < patient(5)
    assert registry.num_registered == 1
    heartbeat = registry.heartbeats[0]
    assert (heartbeat.worker_id, heartbeat.num_playing) == ("env-1", 3)
    assert [(w.owner, w.reason, w.deadline_seconds) for w in heartbeat.waits if w.reason == "a slot"] == [
        ("env-1", "a slot", 9)
    ]
    assert running.replies[1].assignments[0] == pb.Assignment(run_uid="u1", resolved_below=2)
    assert running.task.exception() is None


async def test_an_asynchronous_callback_is_awaited(running_server) -> None:
    registry, heard = Registry(), []

    async def on_assignments(reply: pb.HeartbeatResponse) -> None:
        await asyncio.sleep(0)
        heard.append(reply)

    async with (
        running_server(registry.register) as server,
        running_agent(server.address, on_assignments=on_assignments),
    ):
        await registry.until(lambda: len(registry.heartbeats) >= 2)
    assert heard


@pytest.mark.parametrize("says_not_found", [False, True])
async def test_an_orchestrator_that_forgot_it_is_told_again(running_server, says_not_found: bool) -> None:
    registry = Registry()
    registry.says_not_found = says_not_found
    async with running_server(registry.register) as server, running_agent(server.address):
        await registry.until(lambda: len(registry.heartbeats) >= 1)
        registry.known.clear()
        await registry.until(lambda: registry.num_registered == 2)
        before = len(registry.heartbeats)
        await registry.until(lambda: len(registry.heartbeats) > before)


async def test_it_survives_a_restart_visibly_and_with_one_log_line_each_way(
    running_server, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Registry(), Registry()
    caplog.set_level(logging.INFO, logger=worker_module.__name__)
    async with running_server(first.register) as server:
        address = server.address
        running = Agent(address)
        await first.until(lambda: len(first.heartbeats) >= 1)
    found = await until(lambda: [w for w in waits.snapshot("env-1") if address in w.reason], timeout_s=20)
    assert found[0].waits_on == "orchestrator"
    assert "cannot reach the orchestrator at" in found[0].reason
    await asyncio.sleep(2.5)  # several attempts fail
    assert not running.task.done()
    async with running_server(second.register, address=address):
        await second.until(lambda: len(second.heartbeats) >= 2)
        assert running.agent.silence_s < patient(5)
        running.stopping.set()
        await asyncio.wait_for(running.task, patient(5))
    assert second.num_registered == 1
    assert [w for w in waits.snapshot("env-1") if address in w.reason] == []
    lines = [record.getMessage() for record in caplog.records]
    assert lines.count("orchestrator does not answer; trying again") == 1
    assert lines.count("orchestrator answers again") == 1
    assert lines.count("registered") == 2


async def test_it_may_start_before_the_orchestrator(running_server, unused_tcp_port: int) -> None:
    registry = Registry()
    address = f"127.0.0.1:{unused_tcp_port}"
    async with running_agent(address) as running:
        await asyncio.sleep(0.5)
        assert running.agent.silence_s == math.inf
        async with running_server(registry.register, address=address):
            await registry.until(lambda: len(registry.heartbeats) >= 1)


async def test_what_is_refused_for_good_ends_it(running_server) -> None:
    registry = Registry()
    registry.error = errors.InvalidStateError("log format 3 is too old", reason="FORMAT_TOO_OLD")
    async with running_server(registry.register) as server:
        running = Agent(server.address)
        with pytest.raises(errors.InvalidStateError, match="log format 3"):
            await asyncio.wait_for(running.task, 10)


@pytest.mark.parametrize("where", ["report", "on_assignments"])
async def test_a_callback_that_raises_ends_it_with_its_error(running_server, where: str) -> None:
    def broken(*_: object):
        raise errors.UnavailableError("the callback is broken")

    registry = Registry()
    async with running_server(registry.register) as server:
        running = Agent(server.address, **{where: broken})
        with pytest.raises(errors.UnavailableError, match="the callback is broken"):
            await asyncio.wait_for(running.task, 10)


async def test_stopping_does_not_wait_for_the_next_heartbeat(running_server) -> None:
    registry = Registry(heartbeat_s=3600)
    async with running_server(registry.register) as server, running_agent(server.address) as running:
        await registry.until(lambda: len(registry.heartbeats) == 1)
        running.stopping.set()
        await asyncio.wait_for(running.task, patient(2))


async def test_an_orchestrator_that_hangs_is_a_wait_not_a_hang(running_server) -> None:
    class Hanging(Registry):
        async def RegisterWorker(self, request, context):
            await asyncio.sleep(60)

    registry = Hanging()
    async with (
        running_server(registry.register, grace_s=0.0) as server,
        running_agent(server.address, rpc_timeout_s=0.2) as running,
        asyncio.timeout(20),
    ):
        while not [w for w in waits.snapshot("env-1") if "did not answer within 0.2 s" in w.reason]:
            await asyncio.sleep(0.05)
        assert not running.task.done()


async def test_an_interval_of_zero_is_not_a_busy_loop(running_server) -> None:
    registry = Registry(heartbeat_s=0.0)
    async with running_server(registry.register) as server, running_agent(server.address):
        began = time.monotonic()
        await registry.until(lambda: len(registry.heartbeats) >= 2)
        await asyncio.sleep(0.5)
        num_heard, took_s = len(registry.heartbeats), time.monotonic() - began
    assert 2 <= num_heard <= took_s / worker_module.MIN_INTERVAL_S + 2


async def test_an_answer_is_held_until_there_is_news_or_somebody_asks_at_once(running_server) -> None:
    registry = WorkerRegistry()

    def register(server, draining):
        add_WorkerServiceServicer_to_server(WorkerServicer(registry), server)
        return [NAME]

    def runs(running: Agent) -> list[str]:
        return [assignment.run_uid for reply in running.replies[-1:] for assignment in reply.assignments]

    async def hears(running: Agent, expected: list[str]) -> float:
        """Return seconds until the last answer names these runs."""
        began = time.monotonic()
        await until(lambda: running.replies and runs(running) == expected, timeout_s=20)
        return time.monotonic() - began

    async with running_server(register) as server, running_agent(server.address, is_held=True, kind=TRAINER) as running:
        await hears(running, [])
        took: list[float] = []
        for uid in ("u1", "u2", "u3"):
            await asyncio.sleep(0.2)  # most of the interval of a second is still to come
            registry.claim(WorkerKind.TRAINER, uid)
            took.append(await hears(running, [uid]))
            registry.release(uid)
            await hears(running, [])
        assert min(took) < 0.4, "by the interval alone it is 0.8 s"
        await asyncio.sleep(0.3)
        heard = len(running.replies)
        began = time.monotonic()
        assert await running.agent.heartbeat_now(timeout_s=patient(0.3))
        # One that is asked for, and what came by the interval meanwhile.
        assert heard + 1 <= len(running.replies) <= heard + 2 + (time.monotonic() - began)
        num_heard, began = len(running.replies), time.monotonic()
        await asyncio.sleep(2.0)
        most = num_heard + 1 + (time.monotonic() - began)
        assert len(running.replies) <= most, "without news it hears once per interval"


def test_worker_ids_are_new_every_time() -> None:
    assert new_worker_id("trainer").startswith("trainer-")
    assert new_worker_id("trainer") != new_worker_id("trainer")


async def test_a_silent_orchestrator_is_told_of_once_and_once_when_it_is_back(running_server) -> None:
    class Frozen(Registry):
        def __init__(self) -> None:
            super().__init__()
            self.thawed = asyncio.Event()
            self.thawed.set()

        async def Heartbeat(self, request, context):
            await self.thawed.wait()
            return await super().Heartbeat(request, context)

    registry, told = Frozen(), asyncio.Queue()
    async with (
        running_server(registry.register, grace_s=0.0) as server,
        running_agent(server.address, rpc_timeout_s=0.2, silent_s=0.5, on_silence=told.put_nowait),
        asyncio.timeout(30),
    ):
        await registry.until(lambda: len(registry.heartbeats) >= 1)
        registry.thawed.clear()
        began = await told.get()
        (wait,) = [w for w in waits.snapshot("env-1") if "an answer from" in w.reason]
        registry.thawed.set()
        ended = await told.get()
    assert (began.is_over, ended.is_over, began.orchestrator) == (False, True, server.address)
    assert 0.5 <= began.seconds <= ended.seconds
    assert f"the orchestrator at {server.address} has not answered for" in began.describe()
    assert "did not answer within 0.2 s" in began.describe()
    assert "answers again after" in ended.describe()
    assert (wait.waits_on, wait.deadline_s) == ("orchestrator", 0.5)
    assert told.empty()


async def test_a_heartbeat_carries_the_longest_waits_and_not_thousands(running_server) -> None:
    registry = Registry()
    with contextlib.ExitStack() as stack:
        for index in range(worker_module.MAX_WAITS + 20):
            stack.enter_context(waits.waiting(f"wait {index}"))
        async with running_server(registry.register) as server, running_agent(server.address):
            await registry.until(lambda: len(registry.heartbeats) >= 1)
    assert len(registry.heartbeats[0].waits) == worker_module.MAX_WAITS
    assert registry.heartbeats[0].waits[0].reason == "wait 0"
