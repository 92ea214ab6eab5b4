"""`millrace rl` with `opd`: a half-trained student comes near a frozen teacher, through a takeover."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.internal.v1 import batch_pb2
from millrace.readers.audit import audit_run
from millrace.rollouts.batch_wire import decode_header
from millrace.rollouts.types import RolloutStatus
from millrace.rollouts.wire import decode_archive
from millrace.runlog.names import Names
from millrace.storage import open_store
from millrace_testing import teachers
from millrace_testing.workplaces import Workplace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

STEPS = 24
KEY = "key-of-the-teacher-0d7e" * 2
RL = f"""
max_steps = {STEPS}
seq_len = 64
output_dir = "outputs"
[model]
name = "start"
[trainer.optim]
lr = 1e-3
weight_decay = 0.0
betas2 = 0.95
[trainer.scheduler]
warmup_steps = 5
[orchestrator]
batch_size = 64
[orchestrator.algo]
type = "opd"
[orchestrator.algo.teacher]
name = "good"
api_key_var = "MILLRACE_KEY_TEACHER"
[orchestrator.sampling]
max_tokens = 12
[[orchestrator.env]]
id = "reverse-text"
args = {{ num_train = 512, num_eval = 8 }}
"""


@pytest.fixture(scope="module")
def teacher(warm: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the base URL of an engine that serves the warmed-up model to every client that shows the key."""
    with teachers.serving(warm, tmp_path_factory.mktemp("teacher"), key=KEY) as url:
        yield url


def student_place(warm: Workplace, path: Path) -> Workplace:
    """Return a workplace whose model `start` has weights half-way between the untrained and the warmed-up one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = warm.twin(path)
    models = place.path / "outputs" / "reverse-text"
    student = AutoModelForCausalLM.from_pretrained(models / "base")
    trained = AutoModelForCausalLM.from_pretrained(models / "sft" / "model").state_dict()
    student.load_state_dict({name: (value + trained[name]) / 2 for name, value in student.state_dict().items()})
    student.save_pretrained(place.path / "start")
    AutoTokenizer.from_pretrained(models / "base").save_pretrained(place.path / "start")
    return place


def test_a_student_comes_near_its_teacher_although_its_orchestrator_dies(
    warm: Workplace, tmp_path: Path, teacher: str
) -> None:
    place = student_place(warm, tmp_path / "student")
    (place.path / "opd.toml").write_text(RL)
    argv = ("rl", "@", "opd.toml", "--orchestrator.algo.teacher.base-url", teacher, "--name", "student")
    with place.following(*argv, env={"MILLRACE_KEY_TEACHER": KEY}) as process:
        place.read_until(process, "step   6/")
        stack = json.loads((place.path / "outputs" / "student" / "stack.json").read_text())
        os.kill(stack["pids"]["orchestrator"], signal.SIGKILL)
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    summary = json.loads((place.path / "outputs" / "student" / "summary.json").read_text())
    assert summary["steps"] == STEPS
    store = open_store(stack["store"])
    uid = _uid(store)
    report = asyncio.run(audit_run(None, store, prefix="millrace", uid=uid))
    assert [f"{found.check}: {found.message}" for found in report.violations] == []
    gaps = [_reverse_kl(store, Names("millrace", uid), step) for step in range(STEPS)]
    # Per token, in nats; a step of 64 rollouts knows it to some 15 percent, and without learning it stays.
    assert np.mean(gaps[:2]) > 0.4 and np.mean(gaps[-5:]) < 0.65 * np.mean(gaps[:2]), gaps
    seen = [path for path in place.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert seen == [], "the key was written down"


def test_without_the_key_the_run_says_so_at_its_start(warm: Workplace, tmp_path: Path, teacher: str) -> None:
    place = student_place(warm, tmp_path / "keyless")
    (place.path / "opd.toml").write_text(RL)
    code, said = place.attempt(
        *("-m", "millrace.cli", "rl", "@", "opd.toml", "--orchestrator.algo.teacher.base-url", teacher)
    )
    assert code != 0 and "MILLRACE_KEY_TEACHER is not set in the env-server's environment" in said, said
    assert "\nstep " not in said


def _uid(store: Any) -> str:
    [prefix] = store.list_prefixes("millrace/runs/")
    return prefix.rstrip("/").rpartition("/")[2]


def _reverse_kl(store: Any, names: Names, step: int) -> float:
    """Mean over the rollouts that a step trains."""
    header = decode_header(store.get(names.batch_header(step)))
    trained = {r.ordinal for r in header.resolutions if r.outcome == batch_pb2.ORDINAL_OUTCOME_TRAINED}
    rollouts = decode_archive(store.get(header.rollouts_key))
    used = [r for r in rollouts if r.ordinal in trained and r.status is RolloutStatus.OK and not r.is_duplicate]
    assert len(used) == 64
    return float(np.mean([rollout.metrics["teacher_reverse_kl"] for rollout in used]))
