"""Several things at once: those that came first, and the others; work despite cancelling; code in its own thread."""

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from millrace.race import finished, first_of, in_own_thread


async def _raise(error: Exception) -> None:
    raise error


async def test_the_others_are_cancelled_and_have_ended() -> None:
    ended = []

    async def slow() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            ended.append("slow")

    done, other = await first_of(asyncio.sleep(0, "done"), slow())
    assert done is not None
    assert done.result() == "done"
    assert other is None
    assert ended == ["slow"]


async def test_several_may_be_done() -> None:
    event = asyncio.Event()
    event.set()
    first, second, third = await first_of(event.wait(), event.wait(), asyncio.Event().wait())
    assert first is not None
    assert second is not None
    assert third is None


async def test_futures_belong_to_the_caller() -> None:
    theirs = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(asyncio.sleep(600))
    done, *others = await first_of(asyncio.sleep(0), theirs, task)
    assert done is not None
    assert others == [None, None]
    assert not theirs.done()
    assert not task.cancelling()
    task.cancel()


async def test_after_the_time_limit_none_is_done() -> None:
    assert await first_of(asyncio.sleep(600), asyncio.sleep(600), timeout_s=0.01) == (None, None)


async def test_an_error_is_for_the_caller_to_raise() -> None:
    failed, other = await first_of(_raise(KeyError("x")), asyncio.sleep(600))
    assert failed is not None
    assert other is None
    with pytest.raises(KeyError, match="x"):
        failed.result()


async def test_a_future_of_the_caller_that_was_cancelled_does_not_cancel_the_caller() -> None:
    task = asyncio.create_task(asyncio.sleep(600))
    asyncio.get_running_loop().call_soon(task.cancel)
    _, cancelled = await first_of(asyncio.sleep(600), task)
    assert cancelled is not None
    assert cancelled.cancelled()


async def test_the_end_of_the_caller_ends_what_it_waits_for() -> None:
    began, ended, foreign = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future()

    async def work() -> None:
        try:
            began.set()
            await asyncio.sleep(600)
        finally:
            ended.set()

    caller = asyncio.create_task(first_of(work(), foreign))
    await began.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()
    assert not foreign.done()


async def test_code_that_blocks_keeps_no_thread_of_the_event_loop() -> None:
    released, blocked = threading.Event(), 40
    try:
        for _ in range(blocked):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await in_own_thread(released.wait)
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(lambda: "answered") == "answered"
    finally:
        released.set()


async def test_code_in_its_own_thread_returns_raises_and_sees_the_callers_context() -> None:
    variable = contextvars.ContextVar("variable", default="")
    variable.set("the caller's")
    assert await in_own_thread(variable.get) == "the caller's"
    with pytest.raises(ZeroDivisionError):
        await in_own_thread(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="it raised StopIteration"):
        await in_own_thread(lambda: next(iter(())))
    with pytest.raises(RuntimeError, match=r"it raised SystemExit\(3\)"):
        await in_own_thread(lambda: sys.exit(3))


async def _cancelled_during(work: Callable[[], Coroutine[Any, Any, str]], *, grace_s: float) -> object:
    """Return what `finished` returns or raises if its task is cancelled once `work` has begun."""
    begun = asyncio.Event()

    async def awaited() -> str:
        begun.set()
        return await work()

    task = asyncio.create_task(finished(awaited(), grace_s=grace_s))
    await begun.wait()
    task.cancel()
    [found] = await asyncio.gather(task, return_exceptions=True)
    return found


async def test_work_that_may_finish_returns_its_result_with_the_cancellation() -> None:
    assert await finished(asyncio.sleep(0, "done"), grace_s=0) == ("done", None)
    with pytest.raises(ZeroDivisionError):
        await finished(_raise(ZeroDivisionError()), grace_s=0)
    found = await _cancelled_during(lambda: asyncio.sleep(0.01, "done"), grace_s=600)
    assert isinstance(found, tuple)
    assert found[0] == "done" and isinstance(found[1], asyncio.CancelledError)


async def test_work_that_fails_or_takes_too_long_leaves_the_cancellation() -> None:
    ended = []

    async def slow() -> str:
        try:
            return await asyncio.sleep(600, "never")
        finally:
            ended.append("slow")

    async def failing() -> str:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    assert isinstance(await _cancelled_during(failing, grace_s=600), asyncio.CancelledError)
    assert isinstance(await _cancelled_during(slow, grace_s=0.01), asyncio.CancelledError)
    assert ended == ["slow"], "it does not go on unseen"
