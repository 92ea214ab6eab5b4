"""The failure table: a process is killed at a named point, the run finishes by itself, and its log is clean."""

import time

import pytest

from millrace.runlog import Names
from millrace.telemetry.faults import Point
from millrace.trainer.publish import executor
from millrace_testing.chaos.rows import ROWS
from millrace_testing.chaos.stack import PREFIX, ChaosStack
from millrace_testing.lanes import by_default
from millrace_testing.patience import patient

CORNERS = (
    "env-server mid-episode",
    "engine mid-apply",
    "orchestrator mid-commit",
    "trainer after publish before checkpoint",
)
"""One kill of each process; that of the env-server loses work, those of the others leave something half known."""


@pytest.mark.parametrize("row", by_default(ROWS, CORNERS))
def test_a_kill_loses_and_repeats_nothing(chaos: ChaosStack, row: str) -> None:
    victim, point, when = ROWS[row].victim, ROWS[row].point, ROWS[row].when
    fault = chaos.arm(point, when=when)
    before = chaos.pid(victim)
    run = chaos.submit(max_steps=6)
    record = fault.wait(run)
    assert record["pid"] == before, f"{victim} was to be killed"
    chaos.finish(run)
    assert chaos.pid(victim) != before
    resumed = [event.training_resumed for event in run.of("training_resumed")]
    assert [each.epoch for each in resumed] == ([2] if victim == "trainer" else [])
    if resumed:
        (told,) = resumed
        assert told.step <= told.published <= 4 and told.start == (
            f"checkpoint {told.step}" if told.step else "the start of the run"
        )
        assert "ended without giving the run back" in told.reason or "was killed" in told.reason
    print(f"{row}: {run.require_recovery(record['time'])}")


@pytest.mark.long
def test_a_process_that_publishes_dies_and_so_does_its_trainer(make_chaos) -> None:
    stack: ChaosStack = make_chaos(env={executor.VARIABLE: "process"})
    stack.wait_ready()
    for point, dies in ((Point.TRAINER_MID_UPLOAD, False), (Point.TRAINER_BEFORE_MANIFEST, True)):
        fault = stack.arm(point, when={"version": 4})
        before = stack.pid("trainer")
        run = stack.submit(max_steps=6)
        record = fault.wait(run)
        assert (record["pid"] == before) == dies
        stack.finish(run)  # by itself, with a clean audit
        assert (stack.pid("trainer") != before) == dies
        assert [reason for reason, _ in run.warnings() if reason == "PUBLISHER_DIED"] == ["PUBLISHER_DIED"][dies:]
        stack.wait_ready()


def test_a_run_whose_orchestrator_died_before_the_seal_is_sealed_by_its_successor(chaos: ChaosStack) -> None:
    fault = chaos.arm(Point.ORCHESTRATOR_BEFORE_SEAL)
    before = chaos.pid("orchestrator")
    run = chaos.submit(max_steps=3)
    fault.wait()  # not for the run: it is over before
    ends = time.monotonic() + patient(60)
    key = Names(PREFIX, run.uid).seal(0)
    while chaos.store().head(key) is None:
        assert time.monotonic() < ends, "nobody sealed the run"
        time.sleep(0.2)
    assert chaos.pid("orchestrator") != before
    assert "SEALED_LATER" in {note.check for note in chaos.finish(run).notes}
