"""Killed wherever it hurts, a trainer that is started again makes the same policies, bit for bit, from one log.

The model has dropout, the learning rate a schedule, and gradients are clipped at every step.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.config.sections.rl import RLConfig
from millrace.runlog import Stream
from millrace.telemetry import faults
from millrace.telemetry.faults import Fault, Point

Recorder = Any  # conftest.Recorder; tests are not importable from one another
FakeOrchestrator = Any
TrainerProcesses = Any

STEPS = 8
MAX_NORM = 0.05
KILLS = (
    Fault(point=Point.TRAINER_MID_BACKWARD, when={"step": 1}),
    Fault(point=Point.TRAINER_AFTER_STEP, when={"step": 2}),
    Fault(point=Point.TRAINER_AFTER_MANIFEST, when={"version": 4}),
    Fault(point=Point.TRAINER_BEFORE_UPLOAD, when={"version": 5}),
    Fault(point=Point.TRAINER_BEFORE_MANIFEST, when={"version": 7}),
    Fault(point=Point.TRAINER_AFTER_PUBLISH, when={"step": 5}),
    Fault(point=Point.TRAINER_MID_RESUME, when={"step": 4}),
    Fault(point=Point.TRAINER_MID_CHECKPOINT, when={"step": 6}),
)


@pytest.fixture
def config(make_config: Callable[..., RLConfig], dropout_model: Path) -> RLConfig:
    return make_config(
        name=str(dropout_model),
        max_steps=STEPS,
        model={"seq_len": 32, "dropout": True},
        optim={"lr": 0.01, "max_norm": MAX_NORM},
        scheduler={"type": "cosine", "warmup_steps": 2},
        ckpt={"interval": 2},
        determinism="strict",
        micro_batch_tokens=48,
    )


def _fired(directory: Path) -> dict[Point, dict[str, Any]]:
    """Return what the faults that struck left: the step or version, and the process."""
    found = {}
    for fault in KILLS:
        path = directory / f"{fault.point.value}.fired"
        if path.exists():
            found[fault.point] = json.loads(path.read_text())
    return found


def _require_every_kill(directory: Path) -> None:
    fired = _fired(directory)
    assert fired.keys() == {fault.point for fault in KILLS}
    assert len({record["pid"] for record in fired.values()}) == len(KILLS)
    struck = {point: next(iter(record["where"].values())) for point, record in fired.items()}
    assert struck == {fault.point: next(iter(fault.when.values())) for fault in KILLS}


def _require_whole(recorder: Recorder) -> None:
    """Every version announced once, and of the torn checkpoint nothing in use."""
    entries = recorder.call(recorder.log.read(Stream.POLICIES))
    assert [entry.id for entry in entries] == [f"{version}-1" for version in range(STEPS + 1)]
    assert recorder.checkpoints() == [2, 4, 6, 8]
    prefix = f"{recorder.root}checkpoints/00000006/"
    manifest = json.loads(recorder.store.get(prefix + "manifest.json"))
    used = {item["key"] for item in manifest["objects"]}
    torn = {info.key for info in recorder.store.list(prefix)} - used - {prefix + "manifest.json"}
    assert torn and len(torn) < len(used) + 1


@pytest.mark.slow  # test_skipped_steps.py kills it at three
@pytest.mark.timeout(900)
async def test_a_trainer_killed_at_every_point_makes_the_same_policies(
    orchestrator: FakeOrchestrator, trainers: TrainerProcesses, recorder: Recorder, config: RLConfig, tmp_path: Path
) -> None:
    recorder.record(config, steps=STEPS)
    await asyncio.to_thread(recorder.train)
    unkilled = recorder.digests()
    assert len(set(unkilled.values())) == STEPS + 1
    steps = [event.step_completed.metrics for event in recorder.events() if event.HasField("step_completed")]
    assert all(step["optim/grad_norm"] > MAX_NORM for step in steps)
    assert len({step["optim/lr"] for step in steps}) > STEPS / 2

    recorder.forget_training()
    for fault in KILLS:
        faults.arm(tmp_path / "faults", fault)
    orchestrator.run_uid = recorder.uid
    for _ in KILLS:
        process = trainers.fork(recorder, MILLRACE_FAULTS=str(tmp_path / "faults"))
        await orchestrator.until(
            lambda status, process=process: process.poll() is not None or bool(status.error_reason)
        )
        assert not orchestrator.status.error_reason, orchestrator.status.error_message
        assert process.returncode == -signal.SIGKILL, trainers.log_path.read_text()
        assert not orchestrator.status.is_finished
    trainers.fork(recorder, MILLRACE_FAULTS=str(tmp_path / "faults"))
    await orchestrator.until(lambda status: status.is_finished)
    _require_every_kill(tmp_path / "faults")
    assert recorder.digests() == unkilled
    _require_whole(recorder)


def _torchrun(recorder: Recorder, directory: Path, *, num_restarts: int) -> None:
    """A gang of two that is started again when one of it dies, as torchrun does it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--local-addr=127.0.0.1"]  # this machine's name need not resolve
    command += [f"--max-restarts={num_restarts}", "--monitor-interval=0.1"]
    command += ["-m", "millrace_testing.trainer.gang_rank"]
    command += [recorder.redis_url, recorder.store_url.removeprefix("file://"), recorder.prefix, recorder.uid, ""]
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MILLRACE_FAULTS": str(directory)}
    ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=800)
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_a_gang_killed_at_every_point_makes_the_same_policies(
    recorder: Recorder, config: RLConfig, tmp_path: Path
) -> None:
    recorder.record(config, steps=STEPS)
    _torchrun(recorder, tmp_path / "none", num_restarts=0)
    unkilled = recorder.digests()
    assert len(set(unkilled.values())) == STEPS + 1

    recorder.forget_training()
    for fault in KILLS:
        faults.arm(tmp_path / "faults", fault)
    _torchrun(recorder, tmp_path / "faults", num_restarts=len(KILLS))
    _require_every_kill(tmp_path / "faults")
    assert recorder.digests() == unkilled
    _require_whole(recorder)


def _digests(
    new_recorder: Callable[[], Recorder], make_config: Callable[..., RLConfig], model: Path, **choices: Any
) -> dict[int, str]:
    recorder = new_recorder()
    config = make_config(
        name=str(model), seed=choices["seed"], model={"seq_len": 32, "dropout": choices.get("dropout", True)}
    )
    recorder.record(config, steps=2)
    recorder.train()
    return recorder.digests()


def test_dropout_is_active_only_where_it_is_asked_for(
    new_recorder: Callable[[], Recorder], make_config: Callable[..., RLConfig], tiny_model: Path, dropout_model: Path
) -> None:
    one, same, other = (_digests(new_recorder, make_config, dropout_model, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one[0] == other[0] and one[1] != other[1] and one[2] != other[2]
    without = [_digests(new_recorder, make_config, dropout_model, seed=seed, dropout=False) for seed in (1, 2)]
    assert without[0] == without[1] == _digests(new_recorder, make_config, tiny_model, seed=3)
    assert without[0][1] != one[1]
