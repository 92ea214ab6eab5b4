"""vLLM sleeps while the trainer has the device: when it has memory, what it refuses meanwhile, and how that ends."""

import asyncio
from typing import Any

import pytest

from millrace.errors import InvalidStateError, UnavailableError
from millrace.inference import service
from millrace.inference.engine import EngineState
from millrace.inference.service import OPERATOR, SLEEP, CallerPause
from millrace.inference.vllm import gate as rest
from millrace.inference.vllm.engine import VllmEngine
from millrace.telemetry import waits
from millrace_testing.inference import vllm_fakes as fakes
from millrace_testing.polling import until

client, gate, engine = fakes.client, fakes.gate, fakes.engine
policy, update = fakes.policy, fakes.update


@pytest.fixture
async def verifying(engine: VllmEngine, client: Any) -> Any:
    """Return the engine after an update, whose weights are read in the background, without an end."""
    client.num_unverified = 1
    await update(engine)
    before = client.num_verified
    await until(lambda: client.num_verified > before + 1)
    client.calls.clear()
    return engine


async def assert_nothing_is_verified(client: Any) -> None:
    before = client.num_verified
    await asyncio.sleep(0.2)  # some looks of the background's verification
    assert client.num_verified == before


async def test_it_wakes_before_the_next_version_and_is_not_asked_twice(engine: VllmEngine, client: Any) -> None:
    for _ in range(2):
        await engine.pause(SLEEP)
    assert client.is_asleep and client.is_paused
    for _ in range(2):
        await engine.resume(SLEEP)
    assert client.pauses() == ["sleep", "wake"] and not client.is_asleep
    await update(engine)
    assert engine.status().identity == fakes.SECOND and not client.is_paused


async def test_nothing_touches_its_memory_meanwhile(verifying: VllmEngine, client: Any) -> None:
    engine = verifying
    await engine.pause(SLEEP)
    await asyncio.sleep(0)
    for refused in (engine.check(policy()), engine.load_directory(None)):
        with pytest.raises(UnavailableError, match="the engine sleeps") as told:
            await refused
        assert told.value.reason == "ENGINE_ASLEEP"
    await assert_nothing_is_verified(client)
    assert engine.status().state is EngineState.READY, "what it holds is as good as before"
    before = client.num_verified
    await engine.resume(SLEEP)
    await until(lambda: client.num_verified > before)
    await update(engine)


async def test_an_operators_pause_outlasts_it(engine: VllmEngine, client: Any) -> None:
    await engine.pause(OPERATOR)
    await engine.pause(SLEEP)
    await engine.resume(SLEEP)
    assert client.is_paused and not client.is_asleep
    await engine.resume(OPERATOR)
    assert not client.is_paused
    assert client.pauses() == ["pause", "sleep", "wake", "pause", "resume"]


async def test_memory_that_is_there_later_is_taken_then(
    engine: VllmEngine, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest, "_RETRY_S", 0.01)
    await engine.pause(SLEEP)
    client.fails, client.error = "wake", RuntimeError("CUDA Error: out of memory")
    await engine.resume(SLEEP)
    assert client.pauses() == ["sleep", "wake", "wake"] and not client.is_paused
    await update(engine)


@pytest.mark.parametrize(("world_size", "within_s"), [(1, 0.0), (2, 60.0)], ids=["too late", "one rank of two"])
async def test_memory_that_is_not_there_again_restarts_it(
    verifying: VllmEngine, client: Any, monkeypatch: pytest.MonkeyPatch, world_size: int, within_s: float
) -> None:
    engine, asked = verifying, list[str]()
    monkeypatch.setattr(rest, "ask_restart", lambda reason: asked.append(reason) or True)
    monkeypatch.setattr(rest, "WAKES_WITHIN_S", within_s)
    client.vllm_config.parallel_config.world_size = world_size
    await engine.pause(SLEEP)
    client.fails, client.error = "wake", RuntimeError("CUDA Error: out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        await engine.resume(SLEEP)
    with pytest.raises(UnavailableError, match="out of memory") as again:
        await engine.resume(SLEEP)
    assert "start the replica again" in str(again.value)
    status = engine.status()
    assert status.state is EngineState.FAILED and "out of memory" in status.error and not status.has_memory
    assert asked == ["vLLM does not get its memory on the device again: RuntimeError: CUDA Error: out of memory"]
    await assert_nothing_is_verified(client)  # though nobody pauses it any more


async def test_a_sleep_that_failed_restarts_it_as_nobody_knows_what_is_where(
    verifying: VllmEngine, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = verifying, list[str]()
    monkeypatch.setattr(rest, "ask_restart", lambda reason: asked.append(reason) or True)
    caller = CallerPause(engine, holder=SLEEP)
    client.fails, client.error = "sleep", RuntimeError("Memory usage increased after sleeping.")
    with pytest.raises(RuntimeError, match="increased"):
        await caller.pause("r")
    assert not caller.is_on and not engine.status().has_memory, "what it tells is what it knows"
    assert len(asked) == 1 and asked[0].startswith("vLLM did not fall asleep")
    await assert_nothing_is_verified(client)


async def test_an_answer_that_some_memory_is_not_there_is_no_wake(
    engine: VllmEngine, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest, "_RETRY_S", 0.01)
    answers, wake = [False, False], client.wake_up

    async def partly(tags: list[str] | None) -> bool:
        return answers.pop() if answers and tags is None else await wake(tags)

    monkeypatch.setattr(client, "wake_up", partly)
    await engine.pause(SLEEP)
    await engine.resume(SLEEP)
    assert not answers and client.pauses() == ["sleep", "wake"] and engine.status().has_memory


async def test_a_wake_that_comes_while_it_falls_asleep_lets_nothing_read_in_between(
    verifying: VllmEngine, client: Any
) -> None:
    engine = verifying
    reached, going_on = client.block("sleep")
    falling = asyncio.create_task(engine.pause(SLEEP))
    async with asyncio.timeout(5):
        await reached.wait()
        waking = asyncio.create_task(engine.resume(SLEEP))
        await assert_nothing_is_verified(client)
        with pytest.raises(UnavailableError, match="the engine sleeps"):
            await engine.check(policy())
        going_on.set()
        await asyncio.gather(falling, waking)
    assert not client.is_asleep and not client.is_paused


@pytest.mark.parametrize(("device", "refuses"), [("cuda", True), ("cpu", False)])
async def test_a_vllm_without_sleep_mode_refuses_unless_it_has_no_device(
    engine: VllmEngine, client: Any, device: str, refuses: bool
) -> None:
    client.model_config.enable_sleep_mode, client.vllm_config.device_config.device_type = False, device
    caller = CallerPause(engine, holder=SLEEP)
    if refuses:
        with pytest.raises(InvalidStateError, match="MILLRACE_VLLM_FLAGS") as refused:
            await caller.pause("r")
        assert refused.value.reason == "SLEEP_NOT_ENABLED"
        assert not caller.is_on and not client.pauses() and engine.status().state is EngineState.READY
    else:
        await caller.pause("r")
        assert caller.is_on and client.pauses() == ["sleep"]
        await caller.resume()
    assert not caller.is_on and not engine.status().is_paused


async def test_a_sleep_that_nobody_ends_is_visible_and_ends(
    engine: VllmEngine, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = CallerPause(engine, holder=SLEEP)
    await caller.pause("run1")
    await asyncio.sleep(0)
    told = [each for each in waits.snapshot("me") if "asleep while the trainer of run1" in each.reason]
    assert [each.waits_on for each in told] == ["trainer"]
    assert not await caller.over(timeout_s=0.01)
    monkeypatch.setattr(service, "PAUSE_LIMIT_S", 0.05)
    await caller.pause("run1")  # prolongs it
    assert await caller.over(timeout_s=60)
    await until(lambda: not client.is_paused and not client.is_asleep)
