"""A replica is driven forwards only: what a new driver has read of the policies may be older than what it serves."""

import asyncio
from types import SimpleNamespace

import grpc.aio
import pytest

from millrace.internal.v1 import policy_pb2, policy_service_pb2, policy_service_pb2_grpc, worker_service_pb2
from millrace.orchestrator.drive.policy_driver import PolicyDriver
from millrace.orchestrator.workers import WorkerKind, WorkerRegistry
from millrace_testing.orchestrator.fakes import FakeReplica


class CountingReplica(FakeReplica):
    """Remembers which versions it was told to serve."""

    async def UpdatePolicy(self, request, context):
        told.append(request.policy.version)
        return await super().UpdatePolicy(request, context)


told: list[int] = []


@pytest.fixture
async def replica():
    told.clear()
    replica = CountingReplica()
    server = grpc.aio.server()
    policy_service_pb2_grpc.add_PolicyServiceServicer_to_server(replica, server)
    replica.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield replica
    await server.stop(None)


async def test_a_replica_that_serves_a_newer_version_is_not_sent_back(replica) -> None:
    replica.status = policy_service_pb2.PolicyStatus(
        run_uid="run1", state=policy_service_pb2.POLICY_STATE_SERVING, has_version=True, version=14, model_name="policy"
    )
    registry = WorkerRegistry()
    for kind, name in (
        (worker_service_pb2.WORKER_KIND_INFERENCE, "inf"),
        (worker_service_pb2.WORKER_KIND_TRAINER, "t"),
    ):
        registry.register(worker_service_pb2.Worker(worker_id=name, kind=kind, address=replica.address))
    registry.claim(WorkerKind.TRAINER, "run1")
    events = SimpleNamespace(policy_served=_nothing, warning=_nothing)
    driver = PolicyDriver(run_uid="run1", epoch=1, registry=registry, events=events, on_change=lambda: None)  # type: ignore[arg-type]
    driver.publish(policy_pb2.PolicyEntry(version=10))
    running = asyncio.create_task(driver.run())
    try:
        async with asyncio.timeout(10):
            while driver.served_version() != 14:
                await asyncio.sleep(0.02)
            driver.publish(policy_pb2.PolicyEntry(version=15))
            while driver.served_version() != 15:
                await asyncio.sleep(0.02)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert told == [15]


async def _nothing(*args: object, **kwargs: object) -> None:
    return None
