"""The failure table: a process is killed at a named point, the run finishes by itself, and its log is clean."""

import pytest
from chaos_stack import ChaosStack

from millrace.telemetry.faults import Point

ROWS = {
    "env-server mid-episode": (Point.ENV_SERVER_MID_EPISODE, {"step": 2}),
    "env-server before append": (Point.ENV_SERVER_BEFORE_APPEND, {"step": 2}),
    "env-server after append": (Point.ENV_SERVER_AFTER_APPEND, {"step": 2}),
    "engine mid-decode": (Point.INFERENCE_MID_DECODE, {"version": 1}),
    "engine mid-apply": (Point.INFERENCE_MID_APPLY, {"version": 2}),
    "orchestrator after dispatch": (Point.ORCHESTRATOR_AFTER_DISPATCH, {"step": 2}),
    "orchestrator after rollouts arrived": (Point.ORCHESTRATOR_AFTER_ROLLOUTS, {"step": 2}),
    "orchestrator mid-commit": (Point.ORCHESTRATOR_MID_COMMIT, {"step": 2}),
    "orchestrator after header": (Point.ORCHESTRATOR_AFTER_HEADER, {"step": 2}),
    "orchestrator after commit": (Point.ORCHESTRATOR_AFTER_COMMIT, {"step": 2}),
    "trainer mid-backward": (Point.TRAINER_MID_BACKWARD, {"step": 3}),
    "trainer after step before publish": (Point.TRAINER_AFTER_STEP, {"step": 3}),
    "trainer after manifest": (Point.TRAINER_AFTER_MANIFEST, {"version": 4}),
    "trainer after publish before checkpoint": (Point.TRAINER_AFTER_PUBLISH, {"step": 3}),
    "trainer mid-checkpoint": (Point.TRAINER_MID_CHECKPOINT, {"step": 4}),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_kill_loses_and_repeats_nothing(chaos: ChaosStack, row: str) -> None:
    point, when = ROWS[row]
    fault = chaos.arm(point, when=when)
    run = chaos.submit(max_steps=6)
    killed_at = fault.wait(run)["time"]
    chaos.finish(run)
    print(f"{row}: {run.recovery_s(killed_at):.1f} s to the next progress, {run.standstill_s(killed_at):.1f} s at most")
