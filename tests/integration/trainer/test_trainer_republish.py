"""A trainer that computes other weights than the one before: refused under strict, a lineage of its own otherwise."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.config.sections.rl import RLConfig
from millrace.errors import ConflictError, InvalidStateError
from millrace.internal.v1 import policy_pb2
from millrace.policies.host_copy import read_manifest
from millrace.runlog import Stream
from millrace.telemetry import faults
from millrace.telemetry.faults import Fault, Point

Recorder = Any  # conftest.Recorder; tests are not importable from one another
FakeOrchestrator = Any
TrainerProcesses = Any

DIFFERING = ("-m", "millrace_testing.trainer.differing_trainer")


async def _kill_after_version_3(
    orchestrator: FakeOrchestrator, trainers: TrainerProcesses, recorder: Recorder, tmp_path: Path
) -> None:
    """A trainer publishes versions 0 to 3, has checkpoint 2, and is killed."""
    faults.arm(tmp_path / "faults", Fault(point=Point.TRAINER_AFTER_PUBLISH, when={"step": 2}))
    orchestrator.run_uid = recorder.uid
    process = trainers.fork(recorder, MILLRACE_FAULTS=str(tmp_path / "faults"))
    assert await asyncio.to_thread(process.wait, 240) == -signal.SIGKILL, trainers.log_path.read_text()
    assert sorted(recorder.digests()) == [0, 1, 2, 3] and recorder.checkpoints() == [2]


def _manifest(recorder: Recorder, lineage: int, version: int) -> dict[str, Any]:
    return json.loads(recorder.store.get(f"{recorder.root}policies/{lineage:04d}-{version:08d}/manifest.json"))


@pytest.mark.long
async def test_under_strict_the_run_fails_with_both_digests(
    orchestrator: FakeOrchestrator,
    trainers: TrainerProcesses,
    recorder: Recorder,
    make_config: Callable[..., RLConfig],
    tmp_path: Path,
) -> None:
    recorder.record(make_config(ckpt={"interval": 2}, determinism="strict"), steps=4)
    await _kill_after_version_3(orchestrator, trainers, recorder, tmp_path)
    published = recorder.digests()
    process = trainers.start(recorder, *DIFFERING)
    await orchestrator.until(lambda status: bool(status.error_reason))
    # With this status the orchestrator closes the run as FAILED (test_a_trainer_that_gives_up_fails_the_run).
    assert orchestrator.status.error_reason == "POLICY_DIGEST_MISMATCH"
    message = orchestrator.status.error_message
    assert "policy 0-3 of run" in message and published[3] in message
    assert "this trainer computed" in message and "not bit-exact" in orchestrator.status.error_remedy
    computed = message.partition("this trainer computed ")[2].partition(";")[0]
    assert len(computed) == len(published[3]) and computed != published[3]
    assert recorder.digests() == published  # what is committed is as it was, and nothing came after it
    entries = recorder.call(recorder.log.read(Stream.POLICIES))
    assert [entry.id for entry in entries] == ["0-1", "1-1", "2-1", "3-1"]
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 240) == 0

    # The same log and the right trainer: it goes on.
    trainers.fork(recorder)
    await orchestrator.until(lambda status: status.is_finished)
    assert published.items() <= recorder.digests().items() and sorted(recorder.digests()) == [0, 1, 2, 3, 4]


@pytest.mark.long
async def test_under_best_effort_the_run_goes_on_in_a_new_lineage(
    orchestrator: FakeOrchestrator,
    trainers: TrainerProcesses,
    recorder: Recorder,
    make_config: Callable[..., RLConfig],
    tmp_path: Path,
) -> None:
    recorder.record(make_config(ckpt={"interval": 2}, determinism="best_effort"), steps=5)
    await _kill_after_version_3(orchestrator, trainers, recorder, tmp_path)
    published = recorder.digests()
    trainers.start(recorder, *DIFFERING)
    await orchestrator.until(lambda status: status.is_finished)
    entries = recorder.call(recorder.log.read(Stream.POLICIES))
    policies = [policy_pb2.PolicyEntry.FromString(entry.d) for entry in entries]
    assert [(p.lineage, p.version) for p in policies] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5)]
    assert published == {p.version: p.digest for p in policies if p.lineage == 0}
    first = read_manifest(recorder.store, policies[4].manifest_key, policies[4].manifest_sha256)
    assert (first.codecs, first.anchor, first.lineage, first.version) == ("full", 4, 1, 4)
    warnings = [event.warning for event in recorder.events() if event.HasField("warning")]
    assert [warning.reason for warning in warnings] == ["NEW_LINEAGE"]
    assert "version 4 begins lineage 1" in warnings[0].message
    assert recorder.checkpoints() == [2, 4, 5]
    newest = json.loads(recorder.store.get(f"{recorder.root}checkpoints/00000005/manifest.json"))
    assert newest["lineage"] == 1
    # The weights are really others: lineage 0 would have had another version 4.
    other = type(recorder)(recorder.background, recorder.store, recorder.redis_url)
    other.record(make_config(ckpt={"interval": 2}), steps=5)
    await asyncio.to_thread(other.train)
    assert other.digests()[3] == published[3] and other.digests()[4] != policies[4].digest


def test_a_changed_dropout_seed_is_refused_too(
    recorder: Recorder, make_config: Callable[..., RLConfig], dropout_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millrace.trainer.learning import learner

    config = make_config(name=str(dropout_model), model={"seq_len": 32, "dropout": True})
    recorder.record(config, steps=2)
    recorder.train(stop_at=2)
    seed_rank = learner.seed_rank
    monkeypatch.setattr(learner, "seed_rank", lambda seed, rank: seed_rank(seed + 1, rank=rank))
    with pytest.raises(ConflictError, match="policy 0-1 of run") as raised:
        recorder.train()
    assert raised.value.reason == "POLICY_DIGEST_MISMATCH"


def test_under_strict_other_conditions_are_refused_before_the_first_step(
    recorder: Recorder, make_config: Callable[..., RLConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.record(make_config(ckpt={}), steps=3)
    recorder.train(stop_at=1)
    threads = int(os.environ.get("OMP_NUM_THREADS") or 1)
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads + 1))
    try:
        with pytest.raises(InvalidStateError, match=f"num_threads was {threads}, is {threads + 1}") as raised:
            recorder.train()
    finally:
        torch.set_num_threads(threads)
    assert raised.value.reason == "CHECKPOINT_CONDITIONS_DIFFER" and "best_effort" in str(raised.value.remedy)
