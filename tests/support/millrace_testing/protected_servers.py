"""Servers with TLS and tokens on loopback, what they are set up with, and clients of them."""

import asyncio
import contextlib
import datetime
import time
from pathlib import Path

import pytest

from millrace.client import Client
from millrace.errors import UnauthenticatedError
from millrace.internal.v1 import worker_service_pb2 as worker_pb2
from millrace.internal.v1 import worker_service_pb2_grpc
from millrace.rpc.access import ClientAccess, ServerAccess
from millrace.rpc.channel import call, open_channel
from millrace.rpc.tokens import new_token, token_line
from millrace.telemetry.settings import Settings
from millrace.v1 import run_service_pb2 as pb
from millrace.v1.run_service_pb2_grpc import RunServiceServicer, add_RunServiceServicer_to_server
from millrace_testing.certificates import Authority

NAMES = ["millrace.v1.RunService", "millrace.internal.v1.WorkerService"]
SOON_S = 10.0


class Runs(RunServiceServicer):
    """Answers every unary call it implements, and streams until it is told to end."""

    def __init__(self) -> None:
        self.calls = 0
        self.next = asyncio.Event()

    async def ListRuns(self, request, context):
        self.calls += 1
        return pb.ListRunsResponse()

    async def WatchRun(self, request, context):
        self.calls += 1
        while True:
            yield pb.WatchRunResponse()
            await self.next.wait()
            self.next.clear()


class Workers(worker_service_pb2_grpc.WorkerServiceServicer):
    calls = 0

    async def RegisterWorker(self, request, context):
        self.calls += 1
        return worker_pb2.RegisterWorkerResponse(heartbeat_seconds=0.05, lease_seconds=5)

    async def Heartbeat(self, request, context):
        self.calls += 1
        return worker_pb2.HeartbeatResponse()


class Place:
    """Certificates, token files and settings of one deployment, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory / "ca")
        self.server = self.authority.issue("server")
        self.tokens = directory / "tokens"
        self.workers = directory / "workers"
        self.mine = directory / "mine"
        self.token, self.worker_token = new_token(), new_token()
        self.accept(self.token)
        self.mine.write_text(self.token + "\n")
        self.workers.write_text(self.worker_token + "\n")

    def accept(self, *tokens: str, expires: datetime.datetime | None = None) -> None:
        lines = [token_line(token, f"user{i}", expires=expires) for i, token in enumerate(tokens)]
        self.tokens.write_text("# accepted tokens\n" + "\n".join(lines) + "\n")

    def settings(self, **more) -> Settings:
        base = {
            "tls_cert": str(self.server.cert),
            "tls_key": str(self.server.key),
            "tokens_file": str(self.tokens),
            "worker_token_file": str(self.workers),
        }
        return Settings(**{**base, **more})

    def client(self, **more) -> ClientAccess:
        return ClientAccess.public(
            Settings(**{"tls_ca": str(self.authority.path), "token_file": str(self.mine), **more})
        )

    def peer(self, **more) -> ClientAccess:
        base = {"tls_ca": str(self.authority.path), "worker_token_file": str(self.workers)}
        return ClientAccess.internal(Settings(**{**base, **more}))


@contextlib.asynccontextmanager
async def serving(running_server, settings: Settings, **options):
    runs, workers = Runs(), Workers()

    def register(server, draining):
        add_RunServiceServicer_to_server(runs, server)
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(workers, server)
        return NAMES

    async with running_server(register, access=ServerAccess.of(settings), **options) as running:
        yield running, runs, workers


async def list_runs(address: str, access: ClientAccess) -> None:
    async with Client(address, access=access) as client:
        await client.runs.list()


async def heartbeat(address: str, access: ClientAccess) -> None:
    async with open_channel(address, access=access) as channel:
        stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
        await call(stub.Heartbeat, worker_pb2.HeartbeatRequest(), timeout_s=SOON_S)


async def refused(address: str, access: ClientAccess, *, expected=UnauthenticatedError):
    """Call ListRuns, and return its error; the error must come soon."""
    began = time.monotonic()
    with pytest.raises(expected) as caught:
        await list_runs(address, access)
    assert time.monotonic() - began < SOON_S
    return caught.value
