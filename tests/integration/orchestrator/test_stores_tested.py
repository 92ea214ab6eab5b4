"""An orchestrator tries its store out before it drives runs on it."""

import asyncio

import pytest

from millrace.errors import InvalidStateError
from millrace.local.preflight import check_store
from millrace.orchestrator.serve import serve_orchestrator
from millrace.telemetry.settings import Settings
from millrace_testing.s3_answers import Server, s3_answers


@pytest.fixture
def careless(monkeypatch):
    """Yield a server that takes conditions of a write, and ignores them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    with s3_answers() as (handler, port):
        handler.has_conditions = False
        yield handler, f"s3://b?endpoint=http://127.0.0.1:{port}&region=us-east-1"


async def test_an_orchestrator_ends_on_a_store_that_cannot_carry_runs(
    redis_url, careless: tuple[type[Server], str], tmp_path, monkeypatch
):
    monkeypatch.setenv("MILLRACE_SCRATCH_DIR", str(tmp_path))
    settings = Settings(
        redis_url=redis_url, store_url=careless[1], prefix=tmp_path.name, listen="127.0.0.1:0", drain_s=0.0, grace_s=1.0
    )
    with pytest.raises(InvalidStateError, match=r"create-only PUT.*conditional writes") as raised:
        async with asyncio.timeout(30):
            await serve_orchestrator(settings, handle_signals=False)
    assert raised.value.reason == "STORE_SEMANTICS"


async def test_an_orchestrator_ends_when_a_second_winner_is_told_late(
    redis_url, careless: tuple[type[Server], str], tmp_path, monkeypatch
):
    monkeypatch.setenv("MILLRACE_SCRATCH_DIR", str(tmp_path))
    handler, url = careless
    handler.has_conditions, handler.second_winners_after_s = True, 1.0
    settings = Settings(
        redis_url=redis_url, store_url=url, prefix=tmp_path.name, listen="127.0.0.1:0", drain_s=0.0, grace_s=1.0
    )
    with pytest.raises(InvalidStateError, match=r"[2-4] of [24] create-only PUTs"):
        async with asyncio.timeout(60):
            await serve_orchestrator(settings, handle_signals=False)
    assert not [key for key in handler.stored if "passed" in key]


async def test_a_stack_does_not_start_on_one(careless: tuple[type[Server], str]):
    with pytest.raises(InvalidStateError) as raised:
        await check_store(careless[1], prefix="p")
    assert raised.value.reason == "STORE_SEMANTICS"


async def test_a_store_that_does_not_answer_yet_is_tested_later(redis_url, careless, tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_SCRATCH_DIR", str(tmp_path))
    handler, url = careless
    handler.refuses |= dict.fromkeys(("HEAD", "GET"), (403, "AccessDenied", "", ""))
    settings = Settings(
        redis_url=redis_url, store_url=url, prefix=tmp_path.name, listen="127.0.0.1:0", drain_s=0.0, grace_s=1.0
    )
    started = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve_orchestrator(settings, on_started=started.set_result, handle_signals=False))
    async with asyncio.timeout(30):
        await started
        while not handler.seen:
            await asyncio.sleep(0.02)
        handler.refuses = {}
        with pytest.raises(InvalidStateError):
            await running
