"""A rollout's deadline counts its own time, not what other rollouts take of the worker's loop."""

import asyncio
import socket
import threading
import time

import pytest

from millrace.env_server.workers.env_worker import OwnTime, OwnTimeLoop
from millrace.env_server.workers.frames import EchoProbe, start_answering
from millrace_testing.patience import patient
from millrace_testing.polling import block_until


def test_what_others_take_of_the_loop_is_not_counted() -> None:
    seen: dict[int, tuple[float, float]] = {}
    blocked: dict[int, float] = {}

    async def play(number: int, blocks_s: float) -> None:
        own, began = OwnTime(number), time.monotonic()

        async def reward() -> None:  # a task of its own belongs to the play that made it
            reward_began = time.monotonic()
            time.sleep(blocks_s)
            blocked[number] = time.monotonic() - reward_began

        await asyncio.gather(asyncio.sleep(0.05), asyncio.create_task(reward()))
        seen[number] = (own.seconds, time.monotonic() - began)
        own.close()

    async def main() -> None:
        await asyncio.gather(*(play(number, 0.1) for number in range(4)), play(4, 0.0))

    with asyncio.Runner(loop_factory=OwnTimeLoop) as runner:
        runner.run(main())
    total = sum(blocked.values())
    for number in range(5):  # each less than its own and half of what the four others took of the loop
        assert blocked[number] <= seen[number][0] < blocked[number] + (total - blocked[number]) / 2, (seen, blocked)
    assert seen[4][1] >= 0.4, "the quick one has waited for the blocking ones"


def test_nothing_is_kept_of_a_play_that_is_over() -> None:
    """Each leaves callbacks that run after its end, the last step of its own task among them."""

    async def play(number: int) -> None:
        own = OwnTime(number)
        asyncio.get_running_loop().call_soon(time.sleep, 0.001)
        own.close()

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, OwnTimeLoop)
        for number in range(20):
            await asyncio.create_task(play(number))
            await asyncio.sleep(0)
        return [loop.own_s(number) for number in range(20)]

    with asyncio.Runner(loop_factory=OwnTimeLoop) as runner:
        assert runner.run(main()) == [0.0] * 20


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt()])
def test_an_exit_of_one_play_does_not_end_the_others(raised: BaseException) -> None:
    async def leaves() -> None:
        await asyncio.sleep(0)
        raise raised

    async def main() -> list[object]:
        other = asyncio.create_task(asyncio.sleep(0.01, "played"))
        try:
            await asyncio.gather(leaves(), asyncio.sleep(0))
        except BaseException as error:  # noqa: BLE001 - what is raised is what is tested
            return [error, await other]
        return [await other]

    with asyncio.Runner(loop_factory=OwnTimeLoop) as runner:
        assert runner.run(main()) == [raised, "played"]


def test_a_loop_that_runs_one_callback_is_told_from_a_busy_one() -> None:
    ours, theirs = socket.socketpair()
    go_on, stop, made = threading.Event(), threading.Event(), threading.Event()
    probe = EchoProbe(ours, stood_still_s=60.0)

    async def busy() -> None:
        while not stop.is_set():
            time.sleep(0.01)  # always something, never for long
            await asyncio.sleep(0)
        go_on.wait(patient(20.0))

    def run() -> None:
        loop = OwnTimeLoop()
        start_answering(theirs, loop.stuck_at)
        made.set()
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(busy())

    thread = threading.Thread(target=run)
    thread.start()
    made.wait(patient(20.0))
    try:
        for _ in range(8):
            time.sleep(0.1)
            probe.ask()
        assert probe.stuck_s < patient(0.4), "it gets ahead"
        stop.set()

        def is_stuck() -> bool:
            probe.ask()
            return probe.stuck_s > 0.5

        block_until(is_stuck, timeout_s=patient(10.0))
    finally:
        stop.set()
        go_on.set()
        thread.join()
        probe.close()
