"""Probe workers end when nobody probes, whichever rollout went away meanwhile."""

import asyncio
from typing import Any, cast

import pytest

from millrace.env_server.workers.probes import MOST_STANDING, STANDS_S, Probes
from millrace.env_server.workers.worker_process import WorkerProcess
from millrace_testing.polling import until


class Worker:
    """A worker that only lives."""

    name, num_playing, standing_s = "worker", 0, 0.0

    def __init__(self) -> None:
        self.is_ready, self.is_ended = True, False

    async def close(self) -> None:
        self.is_ready, self.is_ended = False, True


async def test_a_spare_whose_task_was_cancelled_is_ended():
    started: list[Worker] = []
    go = asyncio.Event()

    async def start() -> WorkerProcess:
        if started:
            await go.wait()  # the spare takes its time
        started.append(Worker())
        return cast("Any", started[-1])

    probes = Probes("env", start, limit=2, idle_s=0.05)

    async def probe(task_id: str, *, is_deadly: bool) -> None:
        async with probes.turn(task_id), probes.worker() as worker:
            while not probes.spare:
                await asyncio.sleep(0.01)
            if is_deadly:
                await worker.close()

    async def play(task_id: str, *, is_deadly: bool) -> None:
        await asyncio.wait_for(probe(task_id, is_deadly=is_deadly), timeout=30.0)

    probes.num_waiting += 1  # somebody waits, so that a spare is started
    await play("deadly", is_deadly=True)
    probes.num_waiting -= 1
    waiting = asyncio.create_task(play("suspect", is_deadly=False))
    await asyncio.sleep(0.02)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0.1)
    go.set()
    await until(lambda: len(started) >= 2 and all(worker.is_ended for worker in started), timeout_s=20.0)
    await probes.close()


async def test_a_task_that_stands_gives_its_place_to_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("millrace.env_server.workers.probes._LOOK_S", 0.01)
    started: list[Worker] = []
    told: list[int] = []

    async def start() -> WorkerProcess:
        started.append(Worker())
        return cast("Any", started[-1])

    probes = Probes("env", start, limit=1, idle_s=0.05, on_blocked=lambda: told.append(len(started)))
    is_over = asyncio.Event()

    async def probe(task_id: str, *, standing_s: float) -> None:
        async with probes.turn(task_id) as give_place, probes.worker(give_place) as worker:
            worker.standing_s = standing_s
            await is_over.wait()
            await worker.close()

    tasks = [asyncio.create_task(probe("computes", standing_s=0.0))]
    tasks += [asyncio.create_task(probe(f"stands {n}", standing_s=STANDS_S)) for n in range(2 * MOST_STANDING)]
    await until(lambda: probes.num_probing == 1 and bool(started), timeout_s=20.0)
    await asyncio.sleep(0.1)
    assert probes.num_probing == 1 and not told, "what computes keeps its place"
    cast("Any", started[0]).standing_s = STANDS_S
    await until(lambda: probes.num_probing == MOST_STANDING and bool(told), timeout_s=20.0)
    await asyncio.sleep(0.1)
    assert probes.num_probing == MOST_STANDING, "memory is bounded"
    is_over.set()
    await asyncio.wait_for(asyncio.gather(*tasks), timeout=20.0)
    await probes.close()
