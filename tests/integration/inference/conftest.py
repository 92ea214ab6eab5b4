"""The tiny model of the unit tests, published policies, and servers on loopback."""

import asyncio
import importlib.util
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch

from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.http.server import HttpApi, start_http
from millrace.inference.model_files import ModelSlot
from millrace.inference.updater import PolicyUpdater
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import worker_service_pb2 as workers
from millrace.internal.v1 import worker_service_pb2_grpc
from millrace.internal.v1.policy_pb2 import PolicyEntry
from millrace.policies.manifest import PolicyPlace
from millrace.policies.publishing.publish import PolicyContents, PublishedPolicy, publish_policy
from millrace.storage.base import ObjectStore

# Test directories are no packages, so the unit tests' builders are loaded by path.
_spec = importlib.util.spec_from_file_location(
    "tiny_model_builders", Path(__file__).parents[2] / "unit" / "inference" / "conftest.py"
)
assert _spec is not None and _spec.loader is not None
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

reference = tiny.reference
make_model = tiny.make_model
model_dir = tiny.model_dir


class Orchestrator(worker_service_pb2_grpc.WorkerServiceServicer):
    """Notes who registers and what they report."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server with everything behind it."""

    base_url: str
    engine: EmbeddedEngine
    slot: ModelSlot
    updater: PolicyUpdater
    api: HttpApi
    model: torch.nn.Module


@pytest.fixture
def publish(model_dir: Path) -> Callable[..., PolicyEntry]:
    """Publishes a model as a version of a run, as a trainer does."""

    def run(store: ObjectStore, model: torch.nn.Module, version: int, *, uid: str = "run1", **more: Any) -> PolicyEntry:
        published: PublishedPolicy = publish_policy(
            store,
            PolicyPlace(prefix="test", uid=uid, lineage=0, version=version),
            PolicyContents(
                tensors=tiny.tensors_of(model).items(),
                files={path.name: path.read_bytes() for path in model_dir.iterdir()},
                **more,
            ),
            epoch=1,
        )
        return PolicyEntry(
            lineage=0,
            version=version,
            manifest_key=published.manifest_key,
            manifest_sha256=published.manifest_sha256,
            digest=published.manifest.digest,
        )

    return run


@pytest.fixture
def full_model_dir(tmp_path: Path) -> Path:
    """Config, tokenizer and weights of the model with seed 0."""
    path = tmp_path / "model"
    tiny.tiny_model(0).save_pretrained(path)
    tiny.tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
async def served(full_model_dir: Path) -> AsyncIterator[Served]:
    """The HTTP API over the model with seed 0."""
    engine, slot = EmbeddedEngine(max_num_seqs=16), ModelSlot()
    updater = PolicyUpdater(engine, slot, None, None, extra_names=("my-model",))
    await updater.serve_fixed(full_model_dir)
    api = HttpApi(engine, slot)
    server = await start_http(api, "127.0.0.1", 0)
    yield Served(
        base_url=f"http://127.0.0.1:{server.port}",
        engine=engine,
        slot=slot,
        updater=updater,
        api=api,
        model=tiny.tiny_model(0),
    )
    await server.stop()
    await engine.close()


@pytest.fixture
def unused_port() -> Callable[[], int]:
    """Finds ports that are free at the moment."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find
