"""`first_of`: what learns of those that came first, and what becomes of the others."""

import asyncio

import pytest

from millrace.race import first_of


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
