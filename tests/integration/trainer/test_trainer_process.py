"""The trainer as a process: registers over real gRPC, takes an assignment, trains, reports, answers health, ends."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.internal.v1 import worker_service_pb2, worker_service_pb2_grpc

Recorder = Any  # conftest.Recorder; tests are not importable from one another


class FakeOrchestrator(worker_service_pb2_grpc.WorkerServiceServicer):
    """Assigns one run and remembers what the trainer says."""

    def __init__(self) -> None:
        self.worker: worker_service_pb2.Worker | None = None
        self.run_uid = ""
        self.status = worker_service_pb2.TrainerStatus()

    async def RegisterWorker(self, request: Any, context: Any) -> worker_service_pb2.RegisterWorkerResponse:
        self.worker = request.worker
        return worker_service_pb2.RegisterWorkerResponse(heartbeat_seconds=0.1, lease_seconds=10)

    async def Heartbeat(self, request: Any, context: Any) -> worker_service_pb2.HeartbeatResponse:
        self.status = request.trainer
        assignments = [worker_service_pb2.Assignment(run_uid=self.run_uid)] if self.run_uid else []
        return worker_service_pb2.HeartbeatResponse(assignments=assignments)

    async def until(self, condition: Callable[[worker_service_pb2.TrainerStatus], bool]) -> None:
        async with asyncio.timeout(60):
            while self.worker is None or not condition(self.status):
                await asyncio.sleep(0.05)


@pytest.fixture
async def orchestrator() -> AsyncIterator[tuple[FakeOrchestrator, str]]:
    server = grpc.aio.server()
    servicer = FakeOrchestrator()
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(0)


def _free_address() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _environ(recorder: Recorder, orchestrator: str, listen: str) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MILLRACE_REDIS_URL": recorder.redis_url,
        "MILLRACE_STORE_URL": recorder.store_url,
        "MILLRACE_PREFIX": recorder.prefix,
        "MILLRACE_ORCHESTRATOR": orchestrator,
        "MILLRACE_LISTEN": listen,
        "MILLRACE_DRAIN_S": "0",
    }


async def test_a_trainer_process_from_registration_to_sigterm(
    orchestrator: tuple[FakeOrchestrator, str], recorder: Recorder, make_config: Any, tmp_path: Path
) -> None:
    servicer, address = orchestrator
    listen = _free_address()
    environ = _environ(recorder, address, listen)
    recorder.record(make_config(ckpt={"interval": 2}), steps=3)
    log_path = tmp_path / "trainer.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "millrace.trainer.main"], env=environ, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        await servicer.until(lambda status: True)
        assert servicer.worker is not None and servicer.worker.kind == worker_service_pb2.WORKER_KIND_TRAINER
        servicer.run_uid = recorder.uid
        await servicer.until(lambda status: status.is_finished)
        assert servicer.status.run_uid == recorder.uid
        assert servicer.status.step == 3 and servicer.status.epoch == 1 and not servicer.status.error_reason
        assert sorted(recorder.digests()) == [0, 1, 2, 3]

        async with grpc.aio.insecure_channel(listen) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = await check(health_pb2.HealthCheckRequest(), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

        servicer.run_uid = ""
        await servicer.until(lambda status: status.run_uid == "")
        missing = type(recorder)(recorder.background, recorder.store, recorder.redis_url)
        missing.record(make_config(name="/nowhere/model"), steps=1)
        servicer.run_uid = missing.uid
        await servicer.until(lambda status: bool(status.error_reason))
        assert servicer.status.error_reason == "MODEL_NOT_FOUND"
        assert "/nowhere/model" in servicer.status.error_message and "model.name" in servicer.status.error_message
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0, log_path.read_text()
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.slow
async def test_a_killed_trainer_is_continued_bit_for_bit(
    orchestrator: tuple[FakeOrchestrator, str],
    new_recorder: Callable[[], Recorder],
    make_config: Any,
    tmp_path: Path,
) -> None:
    servicer, address = orchestrator
    config = make_config(ckpt={"interval": 4})
    unbroken, killed = new_recorder(), new_recorder()
    unbroken.record(config, steps=12)
    unbroken.train()
    killed.create(config)
    for step in range(8):  # the rest comes after the kill, so that the kill always comes in time
        killed.commit(step, killed.make_samples(step))
    servicer.run_uid = killed.uid
    with (tmp_path / "trainer.log").open("wb") as log:

        def start() -> subprocess.Popen[bytes]:
            environ = _environ(killed, address, _free_address())
            command = [sys.executable, "-m", "millrace.trainer.main"]
            return subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)

        first = start()
        try:
            await servicer.until(lambda status: status.step >= 6)
        finally:
            first.kill()
            first.wait(10)
        assert not servicer.status.is_finished
        for step in range(8, 12):
            killed.commit(step, killed.make_samples(step))
        killed.commit(12, killed.make_samples(12, count=4, version=12), closing=True)
        second = start()
        try:
            await servicer.until(lambda status: status.is_finished)  # after the first one's lease has run out
        finally:
            second.kill()
            second.wait(10)
    assert servicer.status.epoch == 2
    assert killed.digests() == unbroken.digests()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"MILLRACE_REDIS_URL": ""}, 2, ["MILLRACE_REDIS_URL", "is not set"]),
        ({"MILLRACE_STORE_URL": "ftp://x"}, 2, ["MILLRACE_STORE_URL", "file://"]),
    ],
)
def test_bad_settings_end_the_process_with_one_line(
    changes: dict[str, str], code: int, words: list[str], tmp_path: Path
) -> None:
    environ = {
        **os.environ,
        "MILLRACE_REDIS_URL": "redis://127.0.0.1:1/0",
        "MILLRACE_STORE_URL": tmp_path.as_uri(),
        "MILLRACE_ORCHESTRATOR": "127.0.0.1:1",
        **changes,
    }
    ended = subprocess.run(
        [sys.executable, "-m", "millrace.trainer.main"], env=environ, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == code
    assert all(word in ended.stderr for word in words) and "Traceback" not in ended.stderr


def test_a_taken_port_ends_the_process_naming_it(tmp_path: Path, redis_url: str) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        environ = {
            **os.environ,
            "MILLRACE_REDIS_URL": redis_url,
            "MILLRACE_STORE_URL": tmp_path.as_uri(),
            "MILLRACE_ORCHESTRATOR": "127.0.0.1:1",
            "MILLRACE_LISTEN": address,
            "MILLRACE_DRAIN_S": "0",
        }
        ended = subprocess.run(
            [sys.executable, "-m", "millrace.trainer.main"], env=environ, capture_output=True, text=True, timeout=60
        )
    assert ended.returncode == 5 and address in ended.stderr
