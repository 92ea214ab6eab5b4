"""The registry of waits: age, order, updates, threads."""

import asyncio
import threading

import pytest

from millrace.telemetry import waits
from millrace.telemetry.waits import Wait, WaitRegistry


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_is_registered_while_its_block_runs() -> None:
    clock = Clock()
    registry = WaitRegistry(clock=clock)
    with registry.waiting("batch 12", waits_on="orchestrator", deadline_s=60):
        clock.now += 2.5
        assert registry.snapshot("trainer-0") == [
            Wait(owner="trainer-0", reason="batch 12", waits_on="orchestrator", age_s=2.5, deadline_s=60)
        ]
    assert registry.snapshot("trainer-0") == []


def test_an_error_ends_the_wait_and_goes_on() -> None:
    registry = WaitRegistry()
    with pytest.raises(RuntimeError, match="boom"), registry.waiting("x"):
        raise RuntimeError("boom")
    assert registry.snapshot("o") == []


def test_longest_first_and_minimum_age() -> None:
    clock = Clock()
    registry = WaitRegistry(clock=clock)
    with registry.waiting("old"):
        clock.now += 5
        with registry.waiting("young"):
            clock.now += 1
            assert [(wait.reason, wait.age_s) for wait in registry.snapshot("o")] == [("old", 6), ("young", 1)]
            assert [wait.reason for wait in registry.snapshot("o", min_age_s=2)] == ["old"]


def test_update_keeps_the_age() -> None:
    clock = Clock()
    registry = WaitRegistry(clock=clock)
    with registry.waiting("batch 12", waits_on="a") as wait:
        clock.now += 3
        wait.update(reason="batch 12, chunk 2 of 3", deadline_s=9)
        (found,) = registry.snapshot("o")
    assert (found.reason, found.waits_on, found.age_s, found.deadline_s) == ("batch 12, chunk 2 of 3", "a", 3, 9)


def test_overdue_is_past_its_deadline_only() -> None:
    assert Wait(owner="o", reason="r", age_s=2, deadline_s=1).is_overdue
    assert not Wait(owner="o", reason="r", age_s=1, deadline_s=2).is_overdue
    assert not Wait(owner="o", reason="r", age_s=1e9, deadline_s=0).is_overdue


def test_threads_register_and_leave_while_another_looks() -> None:
    registry = WaitRegistry()
    barrier = threading.Barrier(5)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            barrier.wait(10)
            for turn in range(300):
                with registry.waiting(f"{index}.{turn}") as wait:
                    wait.update(reason=f"{index}.{turn}.x")
                    assert any(found.reason == f"{index}.{turn}.x" for found in registry.snapshot("o"))
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    barrier.wait(10)
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert registry.snapshot("o") == []


def test_the_module_functions_share_one_registry() -> None:
    with waits.waiting("module wait", waits_on="redis"):
        assert "module wait" in [wait.reason for wait in waits.snapshot("o")]
    assert "module wait" not in [wait.reason for wait in waits.snapshot("o")]


def test_a_quiet_wait_shows_itself_once_it_is_old() -> None:
    clock = Clock()
    registry = WaitRegistry(clock=clock)
    with registry.waiting("Redis", quiet_s=2):
        clock.now += 1.9
        assert registry.snapshot("o") == []
        clock.now += 0.2
        assert [round(wait.age_s, 3) for wait in registry.snapshot("o")] == [2.1]


def test_what_many_wait_for_is_one_wait_with_a_count_and_the_age_of_the_oldest() -> None:
    clock = Clock()
    registry = WaitRegistry(clock=clock)
    first = registry.shared("{n} rollouts for the engine", waits_on="inference", deadline_s=9)
    first.__enter__()
    clock.now += 3
    with registry.shared("{n} rollouts for the engine", waits_on="inference", deadline_s=9):
        clock.now += 1
        assert [(w.reason, w.age_s, w.deadline_s) for w in registry.snapshot("o")] == [
            ("2 rollouts for the engine", 4, 9)
        ]
        first.__exit__(None, None, None)
        assert [(w.reason, w.age_s) for w in registry.snapshot("o")] == [("1 rollouts for the engine", 1)]
    assert registry.snapshot("o") == []


def test_shared_waits_of_two_runs_are_two() -> None:
    registry = WaitRegistry()
    with waits.of_run("a"), registry.shared("Redis"), waits.of_run("b"), registry.shared("Redis"):
        assert sorted((w.run, w.reason) for w in registry.snapshot("o")) == [("a", "Redis"), ("b", "Redis")]
        with registry.shared("Redis"):
            assert sorted((w.run, w.reason) for w in registry.snapshot("o")) == [
                ("a", "Redis"),
                ("b", "Redis (2 at once)"),
            ]


def test_a_lasting_wait_keeps_its_age_under_one_key() -> None:
    clock = Clock()
    registry = WaitRegistry(clock=clock)
    wait = waits.LastingWait(registry)
    wait.on("2 of 8 groups", waits_on="env-server", key="groups 3", deadline_s=60)
    clock.now += 5
    wait.on("1 of 8 groups", waits_on="env-server-a", key="groups 3", deadline_s=70)
    (found,) = registry.snapshot("o")
    assert (found.reason, found.waits_on, found.age_s, found.deadline_s) == ("1 of 8 groups", "env-server-a", 5, 70)
    wait.on("8 of 8 groups", key="groups 4")
    assert [(w.reason, w.age_s) for w in registry.snapshot("o")] == [("8 of 8 groups", 0)]
    wait.over()
    assert registry.snapshot("o") == []


async def test_waits_of_work_done_ahead_are_shown_once_its_result_is_needed() -> None:
    clock = Clock()
    registry = WaitRegistry(clock=clock)
    ahead, is_read = waits.Ahead(clock=clock), asyncio.Event()

    async def read_chunk() -> None:
        with registry.waiting("a chunk", waits_on="object store"):
            await is_read.wait()

    async def read() -> None:
        with ahead, registry.waiting("batch 3", waits_on="orchestrator"):
            await asyncio.create_task(read_chunk())

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    clock.now += 60
    with registry.waiting("of the caller's own"):
        assert [found.reason for found in registry.snapshot("trainer")] == ["of the caller's own"]
    ahead.need()
    clock.now += 2
    ahead.need()
    clock.now += 1
    found = registry.snapshot("trainer")
    assert sorted((wait.reason, wait.age_s) for wait in found) == [("a chunk", 3), ("batch 3", 3)]
    is_read.set()
    await task
    assert registry.snapshot("trainer") == []
