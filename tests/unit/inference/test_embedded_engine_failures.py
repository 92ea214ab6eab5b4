"""The embedded engine when something in its thread goes wrong: every caller hears of it, and the thread goes on."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from functools import partial

import numpy as np
import pytest

from millrace.errors import InternalError, UnavailableError
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.rows import RowTable
from millrace.inference.embedded.scheduler import Scheduler
from millrace.inference.engine import (
    EngineState,
    FinishReason,
    GenerateRequest,
    Generation,
    PolicyIdentity,
    SamplingParams,
)
from millrace_testing import polling
from millrace_testing.inference.dying import dying, threads

V0 = PolicyIdentity(run_uid="r", lineage=0, version=0)
LIMIT_S = 20.0  # what must not hang gets this long


class Panic(BaseException):
    """What a panic in a Rust extension raises is no Exception."""


def request(number: int, **sampling) -> GenerateRequest:
    params = {"max_tokens": 20, "seed": number, "ignore_eos": True, **sampling}
    return GenerateRequest(request_id=str(number), prompt_token_ids=(1, 2, 3), sampling=SamplingParams(**params))


until = partial(polling.until, timeout_s=LIMIT_S, poll_s=0.001)  # soon enough to meet a request that is generated


@pytest.fixture
async def engine(model_dir, make_model, make_staged) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(max_num_seqs=6)
    await engine.load(model_dir, make_staged(make_model(0)), identity=V0)
    yield engine
    await engine.close()


async def start_paused(engine: EmbeddedEngine, requests: list[GenerateRequest]) -> list[asyncio.Task]:
    """Return requests that will be admitted together when "test" resumes."""
    await engine.pause("test")
    tasks = [asyncio.create_task(engine.generate(item)) for item in requests]
    await until(lambda: engine.status().num_waiting == len(requests))
    return tasks


async def assert_loads_and_generates(engine: EmbeddedEngine, model_dir, staged) -> None:
    async with asyncio.timeout(LIMIT_S):
        await engine.load(model_dir, staged, identity=V0)
        got = await engine.generate(request(50))
    assert len(got.token_ids) == 20 and engine.status().state is EngineState.READY


async def test_a_request_that_fits_no_column_fails_alone(engine, make_model, reference):
    tasks = await start_paused(engine, [request(0), request(1, top_k=3_000_000_000), request(2)])
    await engine.resume("test")
    async with asyncio.timeout(LIMIT_S):
        first, wrong, last = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(wrong, InternalError) and "admitted" in str(wrong)
    for got in (first, last):
        assert isinstance(got, Generation), got
        expected = reference(make_model(0), [1, 2, 3], got.token_ids.tolist())
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)
    with pytest.raises(InternalError):
        async with asyncio.timeout(LIMIT_S):
            await engine.generate(request(3, top_k=3_000_000_000))  # alone in its batch
    async with asyncio.timeout(LIMIT_S):
        assert len((await engine.generate(request(4))).token_ids) == 20
    assert engine.status().state is EngineState.READY


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, Panic])
async def test_a_step_that_raises_ends_its_requests_and_the_engine_loads_again(
    engine, model_dir, make_model, make_staged, monkeypatch, kind
):
    tasks = await start_paused(engine, [request(n, max_tokens=200) for n in range(8)])  # six run, two wait
    lived, append, steps = threads(), RowTable.append, []

    def explode(table: RowTable, rows: slice, *columns) -> np.ndarray:
        steps.append(rows)
        if len(steps) == 1:
            return append(table, rows, *columns)  # the pass over the prompts, not the one after it
        table.count += 3  # table and requests disagree, as after any half-done change
        raise kind("boom")

    with monkeypatch.context() as patch:
        patch.setattr(RowTable, "append", explode)
        await engine.resume("test")
        async with asyncio.timeout(LIMIT_S):
            results = await asyncio.gather(*tasks)
    assert steps == [slice(0, 6)] * 2
    assert {got.finish_reason for got in results} == {FinishReason.ABORT}
    status = engine.status()
    assert (status.state, status.is_dead, status.num_requests) == (EngineState.FAILED, False, 0)
    assert "boom" in status.error and lived and threads() == lived
    with pytest.raises(UnavailableError, match="boom"):
        await engine.generate(request(9))
    await assert_loads_and_generates(engine, model_dir, make_staged(make_model(1)))


async def test_a_command_that_raises_where_none_should_leaves_the_thread_alive(
    engine, model_dir, make_model, make_staged, monkeypatch
):
    def explode(*_: object) -> None:
        raise Panic("boom")

    with monkeypatch.context() as patch, pytest.raises(InternalError, match="boom"):
        patch.setattr(Scheduler, "submit", explode)
        async with asyncio.timeout(LIMIT_S):
            await engine.generate(request(1))
    assert engine.status().state is EngineState.FAILED and not engine.status().is_dead
    await assert_loads_and_generates(engine, model_dir, make_staged(make_model(1)))


async def test_a_dead_thread_is_visible_and_fails_everything_that_waits_for_it(
    engine, model_dir, make_model, make_staged
):
    running = asyncio.create_task(engine.generate(request(0, max_tokens=250)))
    await until(lambda: engine.status().num_running == 1)
    queued: list[Future] = []
    loop = asyncio.get_running_loop()

    def post() -> None:
        """Commands that are posted before the death, and never run."""
        queued.append(asyncio.run_coroutine_threadsafe(engine.resume("nobody"), loop))
        queued.append(asyncio.run_coroutine_threadsafe(engine.generate(request(1)), loop))
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(LIMIT_S)  # begun after both

    with dying(Panic("boom"), first=post):
        async with asyncio.timeout(LIMIT_S):
            assert (await running).finish_reason is FinishReason.ABORT
            for future in queued:
                with pytest.raises(UnavailableError, match="thread died"):
                    await asyncio.wrap_future(future)
    assert len(queued) == 2
    status = engine.status()
    assert (status.state, status.is_dead) == (EngineState.FAILED, True) and "boom" in status.error
    for call in (
        engine.generate(request(2)),
        engine.load(model_dir, make_staged(make_model(1)), identity=V0),
        engine.pause("test"),
    ):
        with pytest.raises(UnavailableError, match="thread died"):
            async with asyncio.timeout(LIMIT_S):
                await call


async def test_a_command_after_the_threads_last_one_is_refused(engine, monkeypatch):
    def look_and_close(_: Scheduler) -> int:
        if threading.current_thread() is threading.main_thread():
            # Between the look at the engine and the command: the thread drains and ends.
            closing = threading.Thread(target=asyncio.run, args=(engine.close(),))
            closing.start()
            closing.join(LIMIT_S)
            assert not threads()
        return 0

    monkeypatch.setattr(Scheduler, "num_waiting", property(look_and_close))
    with pytest.raises(UnavailableError, match="closed"):
        async with asyncio.timeout(LIMIT_S):
            await engine.generate(request(1))
    with pytest.raises(UnavailableError, match="closed"):
        async with asyncio.timeout(LIMIT_S):
            await engine.pause("test")


async def test_commands_posted_before_closing_are_answered(engine):
    async with asyncio.timeout(LIMIT_S):
        calls = [asyncio.create_task(engine.generate(request(n, max_tokens=250))) for n in range(20)]
        await asyncio.sleep(0)
        await engine.close()
        results = await asyncio.gather(*calls)
    assert {got.finish_reason for got in results} == {FinishReason.ABORT}
