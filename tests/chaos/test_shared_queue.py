"""Twelve runs of several groups and priorities share two trainers and three replicas while processes die.

Every log is clean, and every policy is what one trainer makes of the same batches that is never interrupted.
"""

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from millrace.local.directory import free_ports
from millrace.local.redis import die_with_parent
from millrace.runlog import Names
from millrace.storage.scratch import SCRATCH_VARIABLE
from millrace_testing.chaos.policies import published, recomputed
from millrace_testing.chaos.replica import END_S, extra_replica
from millrace_testing.chaos.run import ChaosRun
from millrace_testing.chaos.stack import PREFIX, ChaosStack
from millrace_testing.patience import patient

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

RUNS, STEPS = 12, 2
STALLS_S = patient(600)
"""A run that waits for eleven others makes no progress of its own."""


@contextlib.contextmanager
def extra_trainer(chaos: ChaosStack, name: str) -> Iterator[subprocess.Popen[str]]:
    """Run a second trainer during the block; it has ended afterwards whatever the test does."""
    directory = chaos.directory / name
    directory.mkdir()
    with (directory / "trainer.log").open("a") as output:
        process: subprocess.Popen[str] = chaos.workplace.popen(
            *("-m", "millrace.trainer.main"),
            stdout=output,
            preexec_fn=die_with_parent,
            env={
                "MILLRACE_ORCHESTRATOR": chaos.where["addresses"]["orchestrator"],
                "MILLRACE_REDIS_URL": chaos.redis_url,
                "MILLRACE_STORE_URL": chaos.where["store"],
                "MILLRACE_LISTEN": f"127.0.0.1:{free_ports(1)[0]}",
                SCRATCH_VARIABLE: str(directory / "scratch"),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            },
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(END_S)


def wait_begun(runs: list[ChaosRun], count: int) -> None:
    """Wait until so many of the runs have made a step, those that have ended included."""
    ends = time.monotonic() + STALLS_S
    while (begun := sum(bool(run.steps()) for run in runs)) < count:
        assert time.monotonic() < ends, f"{begun} of {count} runs have made a step; {runs[0].describe()}"
        time.sleep(0.1)


def test_twelve_runs_share_two_trainers_and_three_replicas_through_kills(make_chaos) -> None:
    stack: ChaosStack = make_chaos(env={"MILLRACE_QUEUE_GROUPS": "a:weight=2,b"})
    with contextlib.ExitStack() as extra:
        replicas = [extra.enter_context(extra_replica(stack, name)) for name in ("second", "third")]
        extra.enter_context(extra_trainer(stack, "second-trainer"))
        runs = [
            stack.submit(
                **{
                    "max_steps": STEPS,
                    "seed": number,
                    "ckpt.interval": 1,
                    "trainer.determinism": "strict",
                    "orchestrator.batch_size": 8,
                    "queue.group": "ab"[number % 2],
                    "queue.priority": number % 3,
                    "queue.min_replicas": number % 4 % 3,
                    "queue.preemptible": "true" if number % 3 == 0 else "false",
                }
            )
            for number in range(RUNS)
        ]
        kills: list[Callable[[], object]] = [
            lambda: stack.kill_running("trainer"),
            lambda: stack.kill_running("orchestrator"),
            lambda: replicas[0].process.kill(),
            lambda: stack.kill_running("orchestrator"),
            lambda: stack.kill_running("trainer"),
        ]
        for count, kill in zip(itertools.count(1, 2), kills, strict=False):
            wait_begun(runs, count)
            kill()
        for run in runs:
            stack.finish(run, stalls_s=STALLS_S)
    for run in runs:
        names = Names(PREFIX, run.uid)
        made = published(stack.store(), names)
        assert len(made) == STEPS + 1 and recomputed(stack.store(), names, steps=STEPS) == made, run.name
    print("steps per run:", [run.steps() for run in runs])
