"""No silent hang: each process of a running run is frozen (SIGSTOP), and what is told names exactly that one.

One stack and one run, frozen one process after the other: what one freeze leaves behind would show in the next one.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import redis.asyncio

from millrace.client import Client
from millrace.runlog import EventReader, RunLog
from millrace.runlog.redis.connection import OUTAGE_S
from millrace.v1 import event_pb2, run_service_pb2
from millrace_testing.chaos.run import ChaosRun
from millrace_testing.chaos.stack import PREFIX, ChaosStack
from millrace_testing.processes import env_workers_of

pytestmark = pytest.mark.long

NAMED_WITHIN_S = 30.0
BLAME = ("WORKER_", "ORCHESTRATOR_", "REDIS_")
"""Warnings that accuse somebody begin like this."""


class Told:
    """The events of a run that accuse somebody, read from the log itself: an orchestrator may be what is frozen."""

    def __init__(self, chaos: ChaosStack, run: ChaosRun) -> None:
        self._chaos, self._run = chaos, run
        self._cursor = ""
        self.news()

    def news(self) -> list[str]:
        """Return what was told since the last call, each as `REASON message` or as the words of a wait."""
        found, self._cursor = asyncio.run(self._read())
        return [text for event in found if (text := _accusation(event))]

    def wait(self, what: str) -> list[str]:
        """Return everything that was told until something contains `what`."""
        ends = time.monotonic() + NAMED_WITHIN_S
        said: list[str] = []
        while not any(what in text for text in said):
            assert time.monotonic() < ends, f"nobody named {what!r} within {NAMED_WITHIN_S:g} s, but {said}"
            time.sleep(0.2)
            said += self.news()
        return said

    async def _read(self) -> tuple[list[event_pb2.Event], str]:
        connection = redis.asyncio.Redis.from_url(self._chaos.redis_url)
        found: list[event_pb2.Event] = []
        cursor = self._cursor
        try:
            log = await RunLog.open(connection, self._chaos.store(), prefix=PREFIX, uid=self._run.uid)
            reader = EventReader(log)
            while events := await reader.read(after=cursor):
                found += events
                cursor = events[-1].cursor
        finally:
            await connection.aclose()
        return found, cursor


def _accusation(event: event_pb2.Event) -> str:
    match event.WhichOneof("body"):
        case "warning" if event.warning.reason.startswith(BLAME):
            return f"{event.warning.reason} {event.warning.message}"
        case "wait_reported":
            wait = event.wait_reported.wait
            return f"WAIT {wait.owner} waits for {wait.reason} <- {wait.waits_on}"
        case _:
            return ""


def explain(chaos: ChaosStack, run: ChaosRun) -> run_service_pb2.ExplainRunResponse:
    async def ask() -> run_service_pb2.ExplainRunResponse:
        async with Client(chaos.address) as client:
            return await client.runs.explain(run.name)

    return asyncio.run(ask())


def wait_why(chaos: ChaosStack, run: ChaosRun, matches: Callable[[str], bool]) -> str:
    """Return the summary of `millrace run why` once it matches; every answer comes within 5 s."""
    ends = time.monotonic() + NAMED_WITHIN_S
    while True:
        asked = time.monotonic()
        summary = explain(chaos, run).summary
        assert time.monotonic() - asked < 5.0
        if matches(summary):
            return summary
        assert time.monotonic() < ends, summary
        time.sleep(0.3)


def env_worker_of(pid: int) -> int:
    """Return the process that hosts the environment of an env-server."""
    found = env_workers_of(pid)
    assert found, f"env-server {pid} has no environment worker"
    return found[0]


@pytest.fixture(scope="module")
def stack(warm) -> Iterator[ChaosStack]:
    """Yield a stack that leaves what is frozen to us."""
    with ChaosStack(warm, "frozen", options=("--no-liveness",)) as started:
        yield started


def test_each_frozen_process_is_named_and_nobody_else(stack: ChaosStack) -> None:
    run = stack.submit(max_steps=120, **{"ckpt.interval": 10})
    run.wait_step(2)
    told = Told(stack, run)
    assert told.news() == []
    for name in ("trainer", "env-server", "inference"):
        pid = stack.freeze(name)
        began = time.monotonic()
        summary = wait_why(stack, run, lambda text, pid=pid: "has not answered for" in text and f"-{pid}-" in text)
        assert " has not answered for " in summary.rpartition(" ← ")[2] and f"-{pid}-" in summary.rpartition(" ← ")[2]
        said = told.wait(f"-{pid}-")
        print(f"{name}: named after {time.monotonic() - began:.1f} s: {said}")
        assert all(f"-{pid}-" in text for text in said), f"{name} ({pid}) is frozen, and told was: {said}"
        assert said[0].startswith(("WORKER_SILENT", "WORKER_LOST")) and f" {name} {name}-" in said[0]
        stack.thaw(pid)
        said = told.wait("WORKER_BACK")
        assert all(f"-{pid}-" in text for text in said), said
        goes_on(run)
    told.news()

    worker = env_worker_of(stack.pid("env-server"))
    os.kill(worker, signal.SIGSTOP)
    said = told.wait(f"(pid {worker})")
    print(f"env worker: {said}")
    assert all(f"(pid {worker})" in text and text.startswith("WAIT env-server-") for text in said), said
    stack.thaw(worker)
    goes_on(run)
    told.news()

    pid = stack.freeze("orchestrator")
    said = told.wait("ORCHESTRATOR_SILENT")
    print(f"orchestrator: {said}")
    assert all(text.startswith("ORCHESTRATOR_SILENT") and stack.address in text for text in said), said
    stack.thaw(pid)
    said = told.wait("ORCHESTRATOR_BACK")
    goes_on(run)
    said += told.news()
    assert all(text.startswith("ORCHESTRATOR_") for text in said), f"others were blamed for its own standstill: {said}"

    pid, frozen_at = stack.freeze("redis"), time.monotonic()
    summary = wait_why(stack, run, lambda text: "Redis at " in text)
    print(f"redis: {summary}")
    assert "which does not answer" in summary.rpartition(" ← ")[2]
    time.sleep(max(0.0, frozen_at + OUTAGE_S + 3.0 - time.monotonic()))  # shorter ones are no event
    stack.thaw(pid)
    said = told.wait("REDIS_SILENT")
    assert all(text.startswith(("REDIS_SILENT", "WAIT")) and "Redis at 127.0.0.1:" in text for text in said), said
    goes_on(run)
    stack.finish(run)


def goes_on(run: ChaosRun) -> None:
    """The run makes two more steps than it had made."""
    made = run.steps()[-1]
    run.wait_step(made + 2)
