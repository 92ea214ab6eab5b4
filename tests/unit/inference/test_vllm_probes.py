"""Probes and foreseen digests of the vLLM engine: what fails the engine or only the version, and what is waited for."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.errors import InternalError, UnavailableError
from millrace.inference.engine import EngineState
from millrace.inference.model_files import ModelSlot
from millrace.inference.service import ReplicaParts
from millrace.inference.vllm import staging
from millrace.telemetry import waits
from millrace.telemetry.settings import Settings
from millrace_testing.inference import vllm_fakes as fakes
from millrace_testing.patience import patient

client, gate, engine = fakes.client, fakes.gate, fakes.engine
policy, update = fakes.policy, fakes.update


@pytest.mark.parametrize("failed", ["millrace_stage", "millrace_foreseen"])
async def test_an_error_of_a_worker_before_the_pause_refuses_the_version_alone(
    engine: Any, client: Any, gate: Any, failed: str
) -> None:
    client.fails = failed
    client.error = InternalError("no space left on device", reason="WORKER_FAILED")
    with pytest.raises(InternalError, match="no space left"):
        await engine.check(policy())
    assert engine.status().state is EngineState.READY and not gate.refusal
    assert client.calls[-1] == "millrace_discard"
    staged = policy()
    await engine.check(staged)
    await update(engine, staged)
    assert engine.status().identity == fakes.SECOND


async def test_memory_that_is_not_what_was_proved_shows_before_the_pause(engine: Any, client: Any) -> None:
    client.answers["millrace_foreseen"] = {"is_pending": False, "rows": [["w", "0:(4,)", 4, fakes.digest_hex(1)]]}
    with pytest.raises(InternalError, match="digest"):
        await engine.check(policy())
    assert engine.status().state is EngineState.FAILED and "damaged" in engine.status().error
    assert not client.pauses()


async def test_a_large_delta_is_staged_in_small_calls(
    engine: Any, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client.answers["millrace_stage"] = {"units": [], "slices": [10 << 20] * 3, "seconds": 0.5}
    client.answers["millrace_gather"] = 0.25
    staged = policy()
    await engine.check(staged)
    assert client.calls.count("millrace_gather") == 3
    with caplog.at_level("INFO"):
        await update(engine, staged)
    [told] = [record for record in caplog.records if record.message == "policy applied and proved"]
    assert (vars(told)["busy_s"], vars(told)["longest_busy_s"]) == (1.25, 0.5)


async def test_an_engine_that_fails_while_a_probe_is_computed_is_told_as_an_error(engine: Any, client: Any) -> None:
    reached, _ = client.block("probe")
    task = asyncio.create_task(update(engine))
    async with asyncio.timeout(5):
        await reached.wait()
        await engine.fail("damaged")
        with pytest.raises(UnavailableError, match="taken back"):
            await task
    assert engine.status().state is EngineState.FAILED and engine.gate.refusal == "damaged"


def busy(client: Any) -> Any:
    """Return a request that runs, and whose tokens the test counts up."""
    state = SimpleNamespace(num=0, is_prefilling=False)
    state.detokenizer = SimpleNamespace(num_output_tokens=lambda: state.num)
    client.output_processor.request_states["a"] = state
    return state


async def test_a_probe_waits_for_a_slot_as_long_as_tokens_come(
    engine: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall_s = patient(0.5)
    for name, value in (("LOOK_S", 0.01), ("_SHOWN_S", 0.0), ("_STALL_S", stall_s)):
        monkeypatch.setattr(staging, name, value)
    state = busy(client)
    reached, going_on = client.block("probe")
    task = asyncio.create_task(update(engine))
    async with asyncio.timeout(60):
        await reached.wait()
        ends = time.monotonic() + 1.5 * stall_s  # longer than it would wait for one that stands still
        while time.monotonic() < ends:
            state.num += 1
            await asyncio.sleep(0.01)
        assert [one.reason for one in waits.snapshot("me") if "probe" in one.reason] == ["the probe to get a slot"]
        going_on.set()
        await task
    assert engine.status().state is EngineState.READY and engine.status().identity == fakes.SECOND


@pytest.mark.parametrize(
    ("limit", "word"), [("_STALL_S", "gives no token"), ("_LIMIT_S", "got no slot"), ("_SILENT_S", "answers nothing")]
)
async def test_a_probe_that_nothing_speaks_for_ends_with_the_reason(
    engine: Any, client: Any, monkeypatch: pytest.MonkeyPatch, limit: str, word: str
) -> None:
    monkeypatch.setattr(staging, "LOOK_S", 0.01)
    monkeypatch.setattr(staging, limit, 0.05)
    busy(client)
    if limit == "_SILENT_S":
        engine.ping.stop()
        engine.ping.asked_at = 0.0
    client.block("probe")
    async with asyncio.timeout(20):
        with pytest.raises(UnavailableError, match=word):
            await update(engine)


async def test_an_updater_that_ends_by_itself_ends_the_replica(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.from_env({"MILLRACE_LISTEN": "127.0.0.1:0"}, required=["listen"])
    for end in (asyncio.CancelledError(), None):
        stopping = asyncio.Event()
        parts = ReplicaParts(settings, engine, ModelSlot(), stopping=stopping)

        async def run(end: BaseException | None = end) -> None:
            if end is not None:
                raise end

        monkeypatch.setattr(parts.updater, "run", run)

        async def drain(_: float) -> None: ...

        async with asyncio.timeout(30):
            with pytest.raises(InternalError, match="updater has ended"):
                await parts.run(lambda host: host, drain=drain, handle_signals=False)
