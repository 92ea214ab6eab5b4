"""A trainer whose policies are published by a process of its own: the same versions, also where that is killed."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.config.sections.rl import RLConfig
from millrace.policies.host_copy import read_manifest
from millrace.processes.table import is_running
from millrace.telemetry import faults
from millrace.telemetry.faults import Fault, Point
from millrace.trainer.publish.executor import VARIABLE, Executor
from millrace_testing.trainer.torchrun import train_gang

Recorder = Any  # conftest.Recorder; tests are not importable from one another
FakeOrchestrator = Any
TrainerProcesses = Any


def deaths(recorder: Recorder) -> list[str]:
    warnings = [event.warning for event in recorder.events() if event.HasField("warning")]
    return [warning.message for warning in warnings if warning.reason == "PUBLISHER_DIED"]


def versions(recorder: Recorder) -> list[tuple[Any, ...]]:
    """Return what is published, but for names and times."""
    found = []
    for version in sorted(recorder.digests()):
        manifest = read_manifest(recorder.store, f"{recorder.root}policies/0000-{version:08d}/manifest.json")
        sizes = [(each.codec, each.base, [entry.size_bytes for entry in each.objects]) for each in manifest.encodings]
        found.append((version, manifest.digest, manifest.tensors, manifest.probe, sizes, manifest.anchor))
    return found


async def test_a_run_goes_on_when_the_process_that_publishes_is_killed(
    orchestrator: FakeOrchestrator,
    trainers: TrainerProcesses,
    new_recorder: Callable[[], Recorder],
    make_config: Callable[..., RLConfig],
    tmp_path: Path,
) -> None:
    killed, thread = new_recorder(), new_recorder()
    for recorder in (killed, thread):
        recorder.record(make_config(ckpt={"interval": 2}, policy={"skip_deltas": []}), steps=4)
    fired = faults.arm(tmp_path / "faults", Fault(point=Point.TRAINER_MID_UPLOAD, when={"version": 2}))
    orchestrator.run_uid = killed.uid
    process = trainers.fork(killed, **{VARIABLE: "process", faults.VARIABLE: str(tmp_path / "faults")})
    await orchestrator.until(lambda status: status.is_finished or bool(status.error_reason))
    assert orchestrator.status.is_finished, trainers.log_path.read_text()
    assert json.loads(fired.read_text())["pid"] != process.pid and process.poll() is None
    await asyncio.to_thread(thread.train)
    assert versions(killed) == versions(thread)
    [message] = deaths(killed)
    assert message.startswith("the process that publishes died while it had to upload policy 2: signal SIGKILL")
    assert len([e for e in killed.events() if e.HasField("policy_published")]) == 5  # each once
    assert killed.checkpoints() == thread.checkpoints()
    assert not psutil.Process(process.pid).children()  # it ended with the run
    os.kill(process.pid, signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 240) == 0


@pytest.mark.long
async def test_a_killed_trainer_leaves_no_process_that_publishes(
    orchestrator: FakeOrchestrator,
    trainers: TrainerProcesses,
    recorder: Recorder,
    make_config: Callable[..., RLConfig],
    tmp_path: Path,
) -> None:
    recorder.record(make_config(ckpt={"interval": 2}), steps=4)
    fault = Fault(point=Point.TRAINER_MID_UPLOAD, action=faults.Action.SLEEP, seconds=600.0, when={"version": 3})
    fired = faults.arm(tmp_path / "faults", fault)
    orchestrator.run_uid = recorder.uid
    process = trainers.fork(recorder, **{VARIABLE: "process", faults.VARIABLE: str(tmp_path / "faults")})
    async with asyncio.timeout(240):
        while not (fired.exists() and fired.read_text()):
            await asyncio.sleep(0.05)
        publisher = json.loads(fired.read_text())["pid"]
        while not any("policy 3 to be uploaded by the process that publishes" in wait for wait in orchestrator.waits):
            await asyncio.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        while is_running(publisher):  # in the middle of its work
            await asyncio.sleep(0.05)
    assert await asyncio.to_thread(process.wait, 240) == -signal.SIGKILL
    trainers.fork(recorder, **{VARIABLE: "process"})
    await orchestrator.until(lambda status: status.is_finished)
    assert sorted(recorder.digests()) == [0, 1, 2, 3, 4] and not deaths(recorder)


@pytest.mark.long
@pytest.mark.parametrize("keys", [{}, {"model": {"seq_len": 32, "lora": {"rank": 2}}}], ids=["whole", "adapters"])
def test_a_process_publishes_what_a_thread_publishes(
    new_recorder: Callable[[], Recorder], make_config: Callable[..., RLConfig], keys: dict[str, Any]
) -> None:
    process, thread = new_recorder(), new_recorder()
    for recorder in (process, thread):
        recorder.record(make_config(ckpt={"interval": 2}, policy={"skip_deltas": [4]}, **keys), steps=5)
    process.train(stop_at=3, executor=Executor.PROCESS)
    process.train(executor=Executor.PROCESS)
    thread.train(stop_at=3)
    thread.train()
    assert versions(process) == versions(thread) and len(versions(process)) == 6
    assert not deaths(process)


@pytest.mark.long
@pytest.mark.timeout(1600)
def test_the_process_of_one_of_two_ranks_is_killed(
    new_recorder: Callable[[], Recorder], make_config: Callable[..., RLConfig], tmp_path: Path
) -> None:
    process, thread = new_recorder(), new_recorder()
    for recorder in (process, thread):
        recorder.record(make_config(ckpt={"interval": 2}, policy={"skip_deltas": []}), steps=4)
    fired = faults.arm(tmp_path / "faults", Fault(point=Point.TRAINER_MID_UPLOAD, when={"version": 3}))
    train_gang(process, **{VARIABLE: "process", faults.VARIABLE: str(tmp_path / "faults")})
    train_gang(thread, **{VARIABLE: "thread"})
    assert fired.exists()
    assert versions(process) == versions(thread) and len(versions(process)) == 5
    [message] = deaths(process)
    assert "the process that publishes at rank" in message and "to upload policy 3: signal SIGKILL" in message
