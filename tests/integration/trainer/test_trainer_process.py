"""The trainer as a process: registers over real gRPC, takes an assignment, trains, reports, answers health, ends."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.internal.v1 import worker_service_pb2
from millrace.runlog import Lease, Stream
from millrace_testing.leases import lease_holder

Recorder = Any  # conftest.Recorder; tests are not importable from one another
FakeOrchestrator = Any
TrainerProcesses = Any


async def test_a_trainer_process_from_registration_to_sigterm(
    orchestrator: FakeOrchestrator, trainers: TrainerProcesses, recorder: Recorder, make_config: Any
) -> None:
    recorder.record(make_config(ckpt={"interval": 2}), steps=3)
    process = trainers.start(recorder, MILLRACE_CUSTOM_CODE="my_losses, team.rl")
    await orchestrator.until(lambda status: True)
    assert orchestrator.worker.kind == worker_service_pb2.WORKER_KIND_TRAINER
    assert orchestrator.worker.slot.endswith(f"/{trainers.listen}")
    assert list(orchestrator.worker.custom_modules) == ["my_losses", "team.rl"]
    orchestrator.run_uid = recorder.uid
    await orchestrator.until(lambda status: status.is_finished)
    assert orchestrator.status.run_uid == recorder.uid
    assert orchestrator.status.step == 3 and orchestrator.status.epoch == 1 and not orchestrator.status.error_reason
    assert sorted(recorder.digests()) == [0, 1, 2, 3]

    async with grpc.aio.insecure_channel(trainers.listen) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = await check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    orchestrator.run_uid = ""
    await orchestrator.until(lambda status: status.run_uid == "")
    missing = type(recorder)(recorder.background, recorder.store, recorder.redis_url)
    missing.record(make_config(name="/nowhere/model"), steps=1)
    orchestrator.run_uid = missing.uid
    await orchestrator.until(lambda status: bool(status.error_reason))
    assert orchestrator.status.error_reason == "MODEL_NOT_FOUND"
    assert "/nowhere/model" in orchestrator.status.error_message and "model.name" in orchestrator.status.error_remedy
    before_s = sum(psutil.Process(process.pid).cpu_times()[:2])
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(240):
        _, status, used = await asyncio.to_thread(os.wait4, process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, trainers.log_path.read_text()
    # Taking the interpreter apart with torch in it took a quarter of what its whole life had taken.
    assert used.ru_utime + used.ru_stime - before_s < before_s / 10


async def test_let_go_and_sigterm_save_a_checkpoint_and_give_the_lease_back(
    orchestrator: FakeOrchestrator, trainers: TrainerProcesses, recorder: Recorder, make_config: Any
) -> None:
    recorder.create(make_config(ckpt={}))
    orchestrator.run_uid = recorder.uid
    process = trainers.fork(recorder)

    async def trained(step: int) -> None:
        await asyncio.to_thread(recorder.commit, step, recorder.make_samples(step))
        await orchestrator.until(lambda status: status.step == step + 1)

    def holder() -> Any:
        return recorder.call(lease_holder(recorder.log, "trainer"))

    await trained(0)
    assert holder() is not None
    orchestrator.let_go = [recorder.uid]  # paused, and still assigned: an old orchestrator's assignment loses
    await orchestrator.until(lambda status: status.run_uid == "")
    assert recorder.checkpoints() == [1] and holder() is None

    orchestrator.let_go = []  # resumed
    await trained(1)
    assert orchestrator.status.epoch == 2
    os.kill(process.pid, signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 240) == 0, trainers.log_path.read_text()
    assert recorder.checkpoints() == [1, 2] and holder() is None
    assert orchestrator.is_leaving and orchestrator.status.run_uid == ""


@pytest.mark.long
async def test_a_frozen_trainer_that_was_replaced_lets_go(
    orchestrator: FakeOrchestrator, trainers: TrainerProcesses, recorder: Recorder, make_config: Any
) -> None:
    recorder.create(make_config(ckpt={}))
    orchestrator.run_uid = recorder.uid
    frozen = trainers.fork(recorder)
    recorder.commit(0, recorder.make_samples(0))
    await orchestrator.until(lambda status: status.step == 1)
    async with asyncio.timeout(240):  # published beside the training
        while len(await asyncio.to_thread(recorder.call, recorder.log.read(Stream.POLICIES))) < 2:
            await asyncio.sleep(0.02)
    os.kill(frozen.pid, signal.SIGSTOP)
    # Its successor in the same place has the lease at once, and a newer epoch.
    slot = orchestrator.worker.slot
    assert recorder.call(Lease.acquire(recorder.log, "trainer", "successor", 60.0, slot=slot)) is not None
    assert recorder.call(recorder.log.acquire_epoch("trainer", "successor")).number == 2
    recorder.commit(1, recorder.make_samples(1))
    orchestrator.run_uid = ""
    os.kill(frozen.pid, signal.SIGCONT)
    await orchestrator.until(lambda status: status.run_uid == "")
    log = trainers.log_path.read_text()
    assert "another trainer continues the run" in log or "another process holds a newer epoch" in log
    assert recorder.call(lease_holder(recorder.log, "trainer")).owner == "successor"
    assert recorder.checkpoints() == []  # what it holds is not the run's any more
    entries = recorder.call(recorder.log.read(Stream.POLICIES))
    assert [entry.id for entry in entries] == ["0-1", "1-1"]


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"MILLRACE_REDIS_URL": ""}, 2, ["MILLRACE_REDIS_URL", "is not set"]),
        pytest.param({"MILLRACE_STORE_URL": "ftp://x"}, 2, ["MILLRACE_STORE_URL", "file://"], marks=pytest.mark.long),
        pytest.param(
            {"MILLRACE_TRAINER_PUBLISH": "fork"},
            2,
            ["MILLRACE_TRAINER_PUBLISH", "auto, thread, process"],
            marks=pytest.mark.long,
        ),
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
        [sys.executable, "-m", "millrace.trainer.main"], env=environ, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == code
    assert all(word in ended.stderr for word in words) and "Traceback" not in ended.stderr


async def test_a_taken_port_ends_the_process_naming_it(trainers: TrainerProcesses, recorder: Recorder) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(trainers.listen.rpartition(":")[2])))
        taken.listen()
        process = trainers.fork(recorder)
        code = await asyncio.to_thread(process.wait, 240)
    assert code == 5 and trainers.listen in trainers.log_path.read_text()
