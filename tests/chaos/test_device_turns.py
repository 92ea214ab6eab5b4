"""Replicas that sleep while the trainer computes: kills and freezes in turns, an evaluation, a pause."""

import re

import pytest

from millrace.telemetry.faults import Action, Point
from millrace_testing.chaos.stack import ChaosStack
from millrace_testing.patience import patient
from millrace_testing.polling import block_until

pytestmark = pytest.mark.long

TURNS = {"async-level": 0, "inference.sleep-while-training": "true"}
EVALS = ("--orchestrator.eval.interval=2", "--orchestrator.eval.num-examples=4")


def rests(stack: ChaosStack) -> list[bool]:
    """When the replica fell asleep (True) and woke up, in order."""
    lines = stack.log_of("inference", 100_000).splitlines()
    told = [line for line in lines if re.search(r"\bholder\W+sleep\b", line)]
    return ["is paused" in line for line in told]


def test_processes_that_die_in_a_turn_lose_nothing_and_leave_nobody_asleep(make_chaos) -> None:
    stack: ChaosStack = make_chaos()
    stack.wait_ready()
    run = None
    for point, when in (
        (Point.TRAINER_MID_BACKWARD, {"step": 1}),
        (Point.ORCHESTRATOR_AFTER_HEADER, {"step": 3}),
        (Point.TRAINER_BEFORE_MANIFEST, {"version": 6}),
    ):
        fault = stack.arm(point, when=when)
        run = run or stack.submit(None, *EVALS, max_steps=8, **{"ckpt.interval": 2, **TURNS})
        fault.wait(run)
        stack.wait_ready()
    assert run is not None
    stack.finish(run)
    assert run.steps()[-1] == 7 and set(run.steps()) == set(range(8))
    told = rests(stack)
    assert told.count(True) >= 8 and told[-1] is False, told
    stack.finish(stack.submit(max_steps=2))  # whose replicas are awake


def test_a_replica_that_dies_asleep_comes_back_and_why_names_who_has_the_devices(make_chaos) -> None:
    stack: ChaosStack = make_chaos()
    stack.wait_ready()
    fault = stack.arm(Point.TRAINER_MID_BACKWARD, Action.SLEEP, when={"step": 2}, seconds=patient(20))
    run = stack.submit(max_steps=5, **TURNS)
    fault.wait(run)

    def why() -> str:
        return stack.workplace.millrace("run", "why", run.name, "--server", stack.address)

    # A replica reports its waits about once a second.
    asleep = f"asleep while the trainer of {run.uid} has the device"
    block_until(lambda: asleep in why(), timeout_s=patient(10), what=asleep)
    # Not its read of batch 3, which nobody needs yet.
    lines = why().splitlines()
    assert lines[1].endswith("works on step 2") and not any("waits for batch" in line for line in lines), lines
    before = stack.pid("inference")
    stack.kill("inference")
    stack.wait_replaced("inference", before)
    stack.finish(run)
    assert run.steps() == list(range(5))


def test_a_run_that_is_paused_wakes_its_replicas(make_chaos) -> None:
    stack: ChaosStack = make_chaos()
    stack.wait_ready()
    run = stack.submit(max_steps=8, **TURNS)
    run.wait_step(2)
    run.pause()
    stack.finish(stack.submit(max_steps=2), stalls_s=patient(60))  # another one takes them
    run.resume()
    stack.finish(run)
    assert run.steps() == list(range(8))
