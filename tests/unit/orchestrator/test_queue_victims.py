"""Whom the queue has pause, over the real registry: not for a run that cannot be driven, and nobody for who is gone."""

import asyncio
import time
from types import SimpleNamespace

from millrace.internal.v1 import worker_service_pb2 as ws
from millrace.orchestrator import waiting
from millrace.orchestrator.catalog import RunView
from millrace.orchestrator.queue.limits import Terms
from millrace.orchestrator.waiting import RunQueue
from millrace.orchestrator.workers import WorkerRegistry
from millrace.runlog.records.run_record import RL, RunRecord
from millrace.v1 import run_pb2


def view(name: str, **queue: object) -> RunView:
    return RunView(
        RunRecord(
            uid=name, name=name, kind=RL, config={"queue": queue}, run_hash="00", request_id=name,
            create_time="2026-01-01T00:00:00Z", code_version="1", labels={},
        )
    )  # fmt: skip


def queue_of(*running: RunView) -> RunQueue:
    """Return a queue in which each of these runs has a trainer and a replica, and none is free."""
    registry = WorkerRegistry()
    for run in running:
        trainer, replica = f"t-{run.record.uid}", f"r-{run.record.uid}"
        registry.register(ws.Worker(worker_id=trainer, kind=ws.WORKER_KIND_TRAINER))
        registry.register(ws.Worker(worker_id=replica, kind=ws.WORKER_KIND_INFERENCE))
        registry.give(run.record.uid, (trainer, replica), Terms(group="default"))
        run.status.state = run_pb2.RUN_STATE_RUNNING
    known = {run.record.uid: run for run in running}
    return RunQueue(catalog=SimpleNamespace(known=known.get, views=list(running)), registry=registry)  # type: ignore[arg-type]


def test_nobody_pauses_for_a_run_whose_last_drive_failed() -> None:
    """It would have others pause at each of its tries, and those without checkpoints would never get anywhere."""
    low, high = view("low", preemptible=True), view("high", priority=5)
    queue = queue_of(low)
    queue.claim([(high, 0.0)])
    assert queue.note("low").startswith("it pauses for run high")
    queue.claim([(high, time.monotonic())])
    assert not queue.note("low")
    queue.claim([(high, time.monotonic() - waiting.FAILED_S - 1.0)])
    assert queue.note("low")


async def test_who_was_chosen_for_a_run_that_is_gone_is_not_asked() -> None:
    lows = [view(name, preemptible=True) for name in ("a", "b")]
    queue, asked = queue_of(*lows), list[str]()
    done = asyncio.Event()

    async def ask(uid: str, reason: str) -> bool:
        asked.append(uid)
        queue.claim([])  # another look, while the intent is written: the other run is gone
        done.set()
        return True

    queue.claim([(view("high", priority=5, min_replicas=2), 0.0)])
    assert queue.note("a") and queue.note("b")
    asking = asyncio.create_task(queue.preempt(ask))
    await asyncio.wait_for(done.wait(), 20)
    for _ in range(3):
        await asyncio.sleep(0)  # the loop goes on after its first answer without a pause
    assert len(asked) == 1
    asking.cancel()
