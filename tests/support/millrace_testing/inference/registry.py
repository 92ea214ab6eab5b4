"""An orchestrator of which a replica sees the WorkerService only."""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import worker_service_pb2 as workers
from millrace.internal.v1 import worker_service_pb2_grpc


class Orchestrator(worker_service_pb2_grpc.WorkerServiceServicer):
    """A stand-in with the WorkerService only; records which workers register and what they report."""

    def __init__(self) -> None:
        self.worker: asyncio.Future[workers.Worker] = asyncio.get_running_loop().create_future()
        self.registered: list[workers.Worker] = []
        self.reported = pb.PolicyStatus()
        self.waits: list[str] = []
        self.is_leaving = False

    async def RegisterWorker(self, request, context):
        self.registered += [request.worker]
        if not self.worker.done():
            self.worker.set_result(request.worker)
        return workers.RegisterWorkerResponse(heartbeat_seconds=0.1, lease_seconds=5)

    async def Heartbeat(self, request, context):
        self.reported = request.policy
        self.is_leaving = request.is_leaving
        self.waits = [wait.reason for wait in request.waits]
        return workers.HeartbeatResponse()


@pytest.fixture
async def orchestrator() -> AsyncIterator[tuple[Orchestrator, int]]:
    server, servicer = grpc.aio.server(), Orchestrator()
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, port
    await server.stop(0)
