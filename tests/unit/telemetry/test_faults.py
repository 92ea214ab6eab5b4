"""Fault points cost nothing when unset, strike once, and only under their conditions."""

import json
import os
import signal
import subprocess
import sys

import pytest

from millrace.errors import UnavailableError
from millrace.telemetry import faults
from millrace.telemetry.faults import Action, Fault, Point


@pytest.fixture
def armed(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "DIRECTORY", str(tmp_path))
    return tmp_path


def test_without_a_directory_nothing_happens(tmp_path) -> None:
    record = faults.arm(tmp_path, Fault(point=Point.TRAINER_AFTER_STEP, action=Action.RAISE))
    faults.reach(Point.TRAINER_AFTER_STEP, step=1)
    assert not record.exists()


def test_a_fault_strikes_once_when_its_condition_holds(armed) -> None:
    record = faults.arm(armed, Fault(point=Point.TRAINER_AFTER_STEP, action=Action.RAISE, when={"step": 3}))
    for step in (0, 1, 2):
        faults.reach(Point.TRAINER_AFTER_STEP, step=step)
    assert not record.exists()
    with pytest.raises(UnavailableError, match=r"trainer\.after_step"):
        faults.reach(Point.TRAINER_AFTER_STEP, step=4)
    assert json.loads(record.read_text())["where"] == {"step": 4}
    faults.reach(Point.TRAINER_AFTER_STEP, step=5)


def test_a_fault_lets_passes_go_by_first(armed) -> None:
    faults.arm(armed, Fault(point=Point.INFERENCE_MID_DECODE, action=Action.RAISE, skip=2))
    faults.reach(Point.INFERENCE_MID_DECODE)
    faults.reach(Point.INFERENCE_MID_DECODE)
    with pytest.raises(UnavailableError):
        faults.reach(Point.INFERENCE_MID_DECODE)


def test_disarm_takes_faults_and_records_away(armed) -> None:
    faults.arm(armed, Fault(point=Point.TRAINER_AFTER_STEP))
    faults.disarm(armed)
    faults.reach(Point.TRAINER_AFTER_STEP)
    assert not list(armed.iterdir())


def test_kill_is_a_real_sigkill(tmp_path) -> None:
    faults.arm(tmp_path, Fault(point=Point.ORCHESTRATOR_MID_COMMIT))
    code = "from millrace.telemetry import faults; faults.reach(faults.Point.ORCHESTRATOR_MID_COMMIT, step=1)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, faults.VARIABLE: str(tmp_path)}, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "orchestrator.mid_commit.fired").exists()
