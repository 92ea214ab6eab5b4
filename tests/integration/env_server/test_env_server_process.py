"""The env-server as a process: registers, plays, drains on SIGTERM, and leaves no worker behind."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from millrace.errors import InvalidSpecError
from millrace.internal.v1 import (
    env_service_pb2,
    env_service_pb2_grpc,
    play_pb2,
    worker_service_pb2,
    worker_service_pb2_grpc,
)
from millrace.rpc.channel import call, open_channel
from millrace_testing.polling import until
from millrace_testing.processes import env_workers_of

IMAGE = "registry.example.com/team/own-env:1.2"

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


class Orchestrator(worker_service_pb2_grpc.WorkerServiceServicer):
    """Remembers who registers."""

    def __init__(self) -> None:
        self.worker: asyncio.Future[worker_service_pb2.Worker] = asyncio.get_running_loop().create_future()

    async def RegisterWorker(self, request: Any, context: Any) -> worker_service_pb2.RegisterWorkerResponse:
        if not self.worker.done():
            self.worker.set_result(request.worker)
        return worker_service_pb2.RegisterWorkerResponse(heartbeat_seconds=0.2, lease_seconds=5)

    async def Heartbeat(self, request: Any, context: Any) -> worker_service_pb2.HeartbeatResponse:
        return worker_service_pb2.HeartbeatResponse()


@pytest_asyncio.fixture(loop_scope="session")
async def process(redis_url: str, tmp_path: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, Orchestrator]]:
    orchestrator = Orchestrator()
    server = grpc.aio.server()
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(orchestrator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    environ = os.environ | {
        "MILLRACE_REDIS_URL": redis_url,
        "MILLRACE_STORE_URL": f"file://{tmp_path}",
        "MILLRACE_ORCHESTRATOR": f"127.0.0.1:{port}",
        "MILLRACE_LISTEN": "127.0.0.1:0",
        "MILLRACE_DRAIN_S": "0",
        "MILLRACE_ENV_CAPACITY": "32",
        "MILLRACE_ENV_IMAGE": IMAGE,
    }
    running = await asyncio.create_subprocess_exec(sys.executable, "-m", "millrace.env_server.main", env=environ)
    yield running, orchestrator
    if running.returncode is None:
        running.kill()
        await running.wait()
    await server.stop(0)


async def open_environment(orchestrator: Orchestrator) -> worker_service_pb2.Worker:
    worker = await asyncio.wait_for(orchestrator.worker, 120)
    async with open_channel(worker.address) as channel:
        stub = env_service_pb2_grpc.EnvServiceStub(channel)
        spec = play_pb2.EnvSpec(name="r", id="reverse-text", image=IMAGE)
        async with asyncio.timeout(120):
            state = env_service_pb2.ENV_STATE_LOADING
            while state == env_service_pb2.ENV_STATE_LOADING:
                state = (await call(stub.OpenEnv, env_service_pb2.OpenEnvRequest(env=spec), timeout_s=60)).state
                await asyncio.sleep(0.1)
    assert state == env_service_pb2.ENV_STATE_READY
    return worker


async def wait_gone(pids: list[int]) -> None:
    def is_running(pid: int) -> bool:
        stat = Path(f"/proc/{pid}/stat")
        return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"

    await until(lambda: not any(is_running(pid) for pid in pids), timeout_s=120)


async def test_registers_serves_and_drains(process: tuple[Any, Orchestrator]) -> None:
    running, orchestrator = process
    worker = await open_environment(orchestrator)
    assert worker.kind == worker_service_pb2.WORKER_KIND_ENV_SERVER and worker.capacity == 32
    assert worker.env_image == IMAGE
    async with open_channel(worker.address) as channel:
        spec = play_pb2.EnvSpec(name="r", id="reverse-text")
        request = env_service_pb2.OpenEnvRequest(env=spec)
        with pytest.raises(InvalidSpecError, match=f"plays only environments of {IMAGE}"):
            await call(env_service_pb2_grpc.EnvServiceStub(channel).OpenEnv, request, timeout_s=60)
    pids = env_workers_of(running.pid)
    assert len(pids) == 1
    running.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(running.wait(), 120) == 0
    await wait_gone(pids)


async def test_sigkill_leaves_no_worker_behind(process: tuple[Any, Orchestrator]) -> None:
    running, orchestrator = process
    await open_environment(orchestrator)
    pids = env_workers_of(running.pid)
    assert len(pids) == 1
    running.kill()
    await running.wait()
    await wait_gone(pids)


async def test_missing_settings_exit_2_and_name_every_variable() -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MILLRACE_")}
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "millrace.env_server.main",
        env=environ | {"MILLRACE_ENV_CAPACITY": "many"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await asyncio.wait_for(running.communicate(), 120)
    assert running.returncode == 2
    for name in ("MILLRACE_REDIS_URL", "MILLRACE_STORE_URL", "MILLRACE_ORCHESTRATOR", "MILLRACE_LISTEN"):
        assert name in stderr.decode()
    assert "MILLRACE_ENV_CAPACITY" in stderr.decode()


async def test_port_in_use_exits_5_and_names_the_address(redis_url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        environ = os.environ | {
            "MILLRACE_REDIS_URL": redis_url,
            "MILLRACE_STORE_URL": f"file://{tmp_path}",
            "MILLRACE_ORCHESTRATOR": "127.0.0.1:1",
            "MILLRACE_LISTEN": address,
        }
        running = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "millrace.env_server.main", env=environ, stderr=asyncio.subprocess.PIPE
        )
        _, stderr = await asyncio.wait_for(running.communicate(), 120)
    assert running.returncode == 5
    assert address in stderr.decode() and "Traceback" not in stderr.decode()
