"""WorkerService, the gRPC service that workers register with and send their heartbeats to, over the registry."""

import re

import grpc

from millrace.config.section import IMAGE_PATTERN
from millrace.errors import InvalidSpecError, Violation
from millrace.internal.v1 import worker_service_pb2, worker_service_pb2_grpc
from millrace.orchestrator.workers import HEARTBEAT_S, KINDS, LEASE_S, WorkerRegistry
from millrace.telemetry.settings import parse_address

_URL = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\](:\d+)?|[^\s/\[\]@]+)(/\S*)?")


class WorkerServicer(worker_service_pb2_grpc.WorkerServiceServicer):
    """WorkerService over a registry."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry

    async def RegisterWorker(
        self, request: worker_service_pb2.RegisterWorkerRequest, context: grpc.aio.ServicerContext
    ) -> worker_service_pb2.RegisterWorkerResponse:
        """Add a worker to the registry."""
        _check_worker(request.worker)
        self._registry.register(request.worker)
        return worker_service_pb2.RegisterWorkerResponse(heartbeat_seconds=HEARTBEAT_S, lease_seconds=LEASE_S)

    async def Heartbeat(
        self, request: worker_service_pb2.HeartbeatRequest, context: grpc.aio.ServicerContext
    ) -> worker_service_pb2.HeartbeatResponse:
        """Renew a worker's lease and answer its assignments: as soon as they are new, if it asks to hold the answer."""
        record = self._registry.heartbeat(request)
        if record is not None and request.hold_seconds > 0:
            await record.hold(min(request.hold_seconds, HEARTBEAT_S))
            record = self._registry.by_id.get(request.worker_id)  # it may be gone meanwhile
        if record is None:
            return worker_service_pb2.HeartbeatResponse(register_again=True)
        return worker_service_pb2.HeartbeatResponse(
            assignments=list(self._registry.assignments(record)), let_go=self._registry.retired_runs()
        )


def _check_worker(worker: worker_service_pb2.Worker) -> None:
    """InvalidSpecError unless the worker says who it is and where it can be called."""
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
