"""The orchestrator as a process: killed and started again in its place, and stopped with care."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from millrace.errors import UnavailableError
from millrace.local.directory import free_port
from millrace.local.redis import die_with_parent
from millrace.rpc.channel import call, open_channel, stream
from millrace.runlog import Names, Stream
from millrace.runlog.event_archive import EventReader
from millrace.runlog.names import Deployment
from millrace.runlog.rebuild import ENDED_S
from millrace.runlog.records import frontier
from millrace.runlog.redis.log import RunLog
from millrace.runlog.token_use import load_use
from millrace.telemetry import faults
from millrace.v1 import run_service_pb2, run_service_pb2_grpc
from millrace_testing.lanes import by_default
from millrace_testing.leases import lease_holder
from millrace_testing.orchestrator.runs import (
    archived_tokens,
    bodies,
    create,
    headers_of,
    numbers,
    require_clean,
    resolutions,
    states,
    submit,
    watch,
)
from millrace_testing.polling import until

RECOVERY_S = 15.0
"""The goal of the issue, restart included."""


class Process:
    """An orchestrator process on a fixed port; a supervisor would start it again as `start` does."""

    def __init__(self, stack, tmp_path) -> None:
        self.stack, self.faults_dir = stack, tmp_path / "faults"
        self.log_path = tmp_path / "orchestrator.log"
        stack.address = f"127.0.0.1:{free_port()}"
        self.process: subprocess.Popen | None = None
        self.command = ["-m", "millrace.orchestrator.main"]

    async def start(self) -> None:
        environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "MILLRACE_REDIS_URL": self.stack.redis_url,
            "MILLRACE_STORE_URL": self.stack.store_url,
            "MILLRACE_PREFIX": self.stack.prefix,
            "MILLRACE_LISTEN": self.stack.address,
            "MILLRACE_DRAIN_S": "1",
            "MILLRACE_QUEUE_GROUPS": self.stack.queue_groups,
            faults.VARIABLE: str(self.faults_dir),
        }
        with self.log_path.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *self.command],
                env=environ,
                stdout=output,
                stderr=output,
                preexec_fn=die_with_parent,
            )

    async def listens(self) -> None:
        """Return when it answers."""
        request = run_service_pb2.ListRunsRequest()
        async with asyncio.timeout(60):
            while True:
                try:
                    await call(self.stack.runs.ListRuns, request)
                    return
                except UnavailableError:
                    await asyncio.sleep(0.1)

    async def ended(self, *, timeout_s: float) -> int:
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, timeout_s)

    def send(self, signum: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(signum)


@pytest.fixture
async def process(stack, tmp_path, request):
    stack.queue_groups = getattr(request, "param", "")
    await stack.kill_orchestrator()  # the one in this process
    process = Process(stack, tmp_path)
    await process.start()
    channel = await stack.exit.enter_async_context(open_channel(stack.address))
    stack.runs = run_service_pb2_grpc.RunServiceStub(channel)
    yield process
    process.send(signal.SIGKILL)
    await process.ended(timeout_s=10)
    print(process.log_path.read_text())  # shown if the test failed


async def workers(stack):
    env, _, trainer = await stack.env_server(delay_s=0.2), await stack.inference(), await stack.trainer()
    return env, trainer


async def steps_beyond(stack, trainer, count: int) -> None:
    await until(lambda: len(trainer.steps) > count, timeout_s=60.0, what=f"more than {count} batches")


POINTS = [
    faults.Point.ORCHESTRATOR_AFTER_DISPATCH,
    faults.Point.ORCHESTRATOR_AFTER_ROLLOUTS,
    faults.Point.ORCHESTRATOR_AFTER_HEADER,
]


@pytest.mark.parametrize("point", by_default(POINTS, POINTS[-1:]))
async def test_it_continues_soon_after_it_was_killed(stack, process, point, record_property) -> None:
    env, trainer = await workers(stack)
    fired = faults.arm(process.faults_dir, faults.Fault(point=point, when={"step": 2}))
    await process.listens()
    run = await create(stack, max_steps=6)
    assert await process.ended(timeout_s=60) == -signal.SIGKILL and fired.exists()
    killed, count = time.monotonic(), len(trainer.steps)
    await process.start()
    await steps_beyond(stack, trainer, count)
    recovery_s = time.monotonic() - killed
    record_property("recovery_s", round(recovery_s, 2))
    print(f"{point}: next batch {recovery_s:.2f} s after the kill")
    assert recovery_s < RECOVERY_S
    await process.listens()  # the trainer may have taken its last batch from the first process only now
    events = await watch(stack, run, timeout_s=60.0)
    assert states(events)[-1] == "SUCCEEDED"
    assert [header.step for header in trainer.steps] == list(range(7))
    resolutions(trainer.steps)
    assert len({header.writer_epoch for header in trainer.steps}) == 2
    assert env.requests
    names = Names(stack.prefix, run.uid)
    used, _ = load_use(stack.deps["store"], names)
    assert used == archived_tokens(stack.deps["store"], names) and used.sampled, "each rollout is counted once"


QUEUE_POINTS = [
    faults.Point.ORCHESTRATOR_PREEMPT_CHOSEN,
    faults.Point.ORCHESTRATOR_PREEMPT_INTENT,
    faults.Point.ORCHESTRATOR_PREEMPTED,
    faults.Point.ORCHESTRATOR_WORKERS_GIVEN,
    faults.Point.ORCHESTRATOR_CLAIMED,
]


@pytest.mark.parametrize("point", by_default(QUEUE_POINTS, QUEUE_POINTS[2:3]))
@pytest.mark.parametrize("process", ["a,b"], indirect=True)
async def test_a_scheduler_that_is_killed_loses_no_run_and_gives_none_a_part(stack, process, point) -> None:
    """A run is to pause for another one that needs both replicas."""
    await process.listens()
    await stack.env_server()
    for name in ("r1", "r2"):
        await stack.inference(name)
    trainer = await stack.trainer(worker_id="t1")
    trainer.hold.clear()
    low = await submit(stack, "low", max_steps=3, preemptible=True)
    await until(lambda: trainer.headers, timeout_s=60.0)
    fired = faults.arm(process.faults_dir, faults.Fault(point=point))
    high = await submit(stack, "high", priority=5, min_replicas=2)
    assert await process.ended(timeout_s=60) == -signal.SIGKILL and fired.exists()
    await process.start()
    trainer.hold.set()
    await process.listens()
    for run in (high, low):
        events = await watch(stack, run, timeout_s=120.0)
        assert states(events)[-1] == "SUCCEEDED"
        resolutions(await headers_of(stack, run))
        await require_clean(stack, run)
        given = [(each.trainer_accelerators, each.replica_accelerators) for each in bodies(events, "workers_assigned")]
        assert run is low or given[0] == (1, 2), "all that it needs at once"


@pytest.mark.parametrize("frozen_s", [12.5, 20.0])
@pytest.mark.long
async def test_its_own_freeze_is_told_as_its_own(stack, process, frozen_s) -> None:
    """Its reads of a healthy Redis time out while it is stopped; of the longer freeze, its lease runs out, too."""
    _, trainer = await workers(stack)
    trainer.hold.clear()
    await process.listens()
    run = await create(stack, max_steps=6)
    await until(lambda: trainer.headers, timeout_s=30.0)
    await asyncio.sleep(1.0)
    process.send(signal.SIGSTOP)
    await asyncio.sleep(frozen_s)
    process.send(signal.SIGCONT)

    async def summary() -> str:
        return (await call(stack.runs.ExplainRun, run_service_pb2.ExplainRunRequest(name=run.name))).summary

    said = await summary()
    assert re.match(r"orchestrator \S+ stood still for [12]\d s until \d+ s ago", said), said
    assert "Redis" not in said
    log = await RunLog.open(stack.deps["redis"], stack.deps["store"], prefix=stack.prefix, uid=run.uid)

    async def accusations() -> list[str]:
        found, cursor = [], ""
        while events := await EventReader(log).read(after=cursor):
            found += [event.warning.reason for event in events if event.HasField("warning")]
            waits = [event.wait_reported.wait for event in events if event.HasField("wait_reported")]
            found += [wait.waits_on for wait in waits if wait.waits_on == "redis"]
            cursor = events[-1].cursor
        return [reason for reason in found if reason.startswith(("ORCHESTRATOR_", "REDIS_", "WORKER_", "redis"))]

    await until(accusations, timeout_s=30.0, what="a word about the freeze")
    await asyncio.sleep(4.0)  # longer than what an outage takes to settle
    assert await accusations() == ["ORCHESTRATOR_STOOD_STILL"]
    trainer.hold.set()
    assert states(await watch(stack, run, timeout_s=60.0))[-1] == "SUCCEEDED"


async def test_a_term_gives_runs_back_before_the_drain_and_tells_watchers_where_to_go_on(stack, process) -> None:
    _, trainer = await workers(stack)
    trainer.hold.clear()
    await process.listens()
    run = await create(stack, max_steps=6)
    await until(lambda: trainer.headers, timeout_s=30.0)
    log = await RunLog.open(stack.deps["redis"], stack.deps["store"], prefix=stack.prefix, uid=run.uid)
    seen = []

    async def follow() -> None:
        request = run_service_pb2.WatchRunRequest(name=run.name)
        async for response in stream(stack.runs.WatchRun, request):
            seen.append(response.event)  # noqa: PERF401 - it is read while it grows

    watching = asyncio.create_task(follow())
    await until(lambda: seen)
    process.send(signal.SIGTERM)
    asked = time.monotonic()

    async def is_free() -> bool:
        return await lease_holder(log, "orchestrator") is None

    await until(is_free)
    assert process.process.poll() is None, f"free {time.monotonic() - asked:.1f} s after the signal, while it drains"
    with pytest.raises(UnavailableError) as raised:
        await watching
    assert raised.value.reason == "DRAINING" and raised.value.metadata["cursor"] == seen[-1].cursor
    assert await process.ended(timeout_s=15) == 0
    await process.start()
    await process.listens()
    trainer.hold.set()
    events = await watch(stack, run, timeout_s=60.0)
    assert states(events)[-1] == "SUCCEEDED"
    assert "failed" not in states(events) and bodies(events, "batch_committed")
    resolutions(trainer.steps)


SMALL_WINDOWS = """
from millrace.orchestrator import main, manager
from millrace.orchestrator.drive import housekeeping, sealer
from millrace.runlog import event_archive, rebuild
from millrace.runlog.records import frontier

housekeeping.ARCHIVE_S, housekeeping.TRIM_S, frontier.POINT_STEPS = 0.1, 0.1, 2
event_archive.KEPT_EVENTS = rebuild.KEPT_EVENTS = 4
manager.RETIRED_S = sealer.RETIRED_S = 0.0
sealer.RETRY_S = 0.5
main.main()
"""
"""A script that is an orchestrator whose windows are so small that a short run fills them."""


@pytest.fixture
def small_windows(process, monkeypatch):
    monkeypatch.setattr(frontier, "POINT_STEPS", 2)  # for the audit, which is of this process
    process.command = ["-c", SMALL_WINDOWS]
    return process


TRIMS = {
    "chain point": (faults.Point.ORCHESTRATOR_CHAIN_POINT, 3),
    "events archived, not trimmed": (faults.Point.ORCHESTRATOR_EVENTS_ARCHIVED, 0),
    "events trimmed": (faults.Point.ORCHESTRATOR_EVENTS_TRIMMED, 0),
    "batches trimmed": (faults.Point.ORCHESTRATOR_BATCHES_TRIMMED, 3),
}


RETIREMENTS = [faults.Point.ORCHESTRATOR_MID_EXPIRE, faults.Point.ORCHESTRATOR_MID_UNLIST]


@pytest.mark.long
@pytest.mark.parametrize("row", TRIMS)
async def test_a_kill_around_a_trim_or_a_chain_point_loses_nothing(stack, small_windows, row) -> None:
    """The successor reads every event of the run, which Redis keeps a window of, and the audit is clean."""
    process, (point, step) = small_windows, TRIMS[row]
    await restart(process)
    _, trainer = await workers(stack)
    fired = faults.arm(process.faults_dir, faults.Fault(point=point, when={"step": step} if step else {}))
    await process.listens()
    run = await create(stack, max_steps=8)
    assert await process.ended(timeout_s=60) == -signal.SIGKILL and fired.exists()
    await process.start()
    await process.listens()
    events = await watch(stack, run, timeout_s=60.0)
    assert events[0].cursor == "1-0" and states(events)[-1] == "SUCCEEDED"
    assert [header.step for header in trainer.steps] == list(range(9))
    assert all(found == list(range(1, len(found) + 1)) for found in numbers(events).values())
    resolutions(trainer.steps)
    key = Names(stack.prefix, run.uid).stream(Stream.EVENTS)

    async def is_trimmed() -> bool:
        return await stack.deps["redis"].xlen(key) < len(events) // 2

    await until(is_trimmed, what="a window of the events")
    await require_clean(stack, run)


@pytest.mark.long
@pytest.mark.parametrize("point", RETIREMENTS)
async def test_a_kill_while_an_ended_run_is_retired_is_made_good_by_the_next(stack, small_windows, point) -> None:
    process = small_windows
    await restart(process)
    await workers(stack)
    fired = faults.arm(process.faults_dir, faults.Fault(point=point))
    await process.listens()
    run = await create(stack, max_steps=2)
    assert await process.ended(timeout_s=60) == -signal.SIGKILL and fired.exists()
    await process.start()
    await process.listens()
    redis, deployment, names = stack.deps["redis"], Deployment(stack.prefix), Names(stack.prefix, run.uid)

    async def is_retired() -> bool:
        return not [mark for mark in await redis.hkeys(deployment.open_key) if mark != b"*"]

    await until(is_retired, timeout_s=30.0)
    assert not list(stack.deps["store"].list(deployment.open_prefix))
    assert all([0 < await redis.ttl(key) <= ENDED_S for key in names.all_keys if await redis.exists(key)])
    assert states(await watch(stack, run, timeout_s=60.0))[-1] == "SUCCEEDED"
    await require_clean(stack, run)


async def restart(process: Process) -> None:
    """Kill the process, and start what its command says now."""
    process.send(signal.SIGKILL)
    await process.ended(timeout_s=10)
    await process.start()
