"""Pauses, proofs and loads of the vLLM engine that meet each other, or fail, over a client that the test directs."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.backoff import Backoff
from millrace.errors import InternalError, InvalidStateError, UnavailableError
from millrace.inference import service
from millrace.inference.engine import EngineState, PolicyIdentity
from millrace.inference.service import CallerPause
from millrace.inference.vllm import engine as engine_module
from millrace.inference.vllm import ranks, staging
from millrace.inference.vllm.engine import VllmEngine
from millrace.inference.vllm.gate import GenerationGate
from millrace.inference.vllm.ranks import Ranks
from millrace.inference.vllm.staging import Ping
from millrace.policies.digest import digest_hex
from millrace.policies.manifest import Probe, TensorEntry
from millrace.telemetry import waits
from millrace_testing.inference import vllm_fakes as fakes
from millrace_testing.patience import patient
from millrace_testing.polling import until

client, gate, engine = fakes.client, fakes.gate, fakes.engine
FIRST, SECOND, policy, update = fakes.FIRST, fakes.SECOND, fakes.policy, fakes.update


def refusal(gate: GenerationGate) -> str:
    """Why nothing begins."""
    return gate.refusal


async def test_an_update_pauses_once_and_says_for_how_long(engine: VllmEngine, client: Any) -> None:
    reached, going_on = client.block("millrace_activate")
    task = asyncio.create_task(update(engine))
    async with asyncio.timeout(5):
        await reached.wait()
        await asyncio.sleep(0.05)  # the length of the pause that has to be told
        going_on.set()
        reached, going_on = client.block("probe")
        await reached.wait()
        told = engine.status().pause_s
        await asyncio.sleep(0.05)  # not a part of it: vLLM generates
        going_on.set()
        await task
    assert client.pauses() == ["pause", "resume"]
    assert told is not None and told >= 0.05
    assert engine.status().pause_s == told


async def test_an_operators_resume_during_a_proof_counts(engine: VllmEngine, client: Any, gate: GenerationGate) -> None:
    await engine.pause("operator")
    reached, going_on = client.block("probe")
    task = asyncio.create_task(update(engine))
    async with asyncio.timeout(5):
        await reached.wait()
        await engine.resume("operator")
        going_on.set()
        await task
    assert not client.is_paused and not engine.status().is_paused
    assert client.pauses() == ["pause", "resume"]


async def test_an_operators_pause_during_a_proof_begins_after_it(engine: VllmEngine, client: Any) -> None:
    reached, going_on = client.block("millrace_digests")
    task = asyncio.create_task(update(engine))
    async with asyncio.timeout(5):
        await reached.wait()
        await engine.pause("operator")
        assert not client.is_paused, "the probe is still to be computed"
        going_on.set()
        await task
    assert client.is_paused and engine.status().is_paused and engine.status().state is EngineState.READY
    await engine.resume("operator")
    assert not client.is_paused


async def test_a_pause_of_before_the_update_lasts_after_it(engine: VllmEngine, client: Any) -> None:
    await engine.pause("operator")
    await update(engine)
    assert client.is_paused and client.pauses() == ["pause", "resume", "pause"]


async def test_after_a_pause_that_failed_a_reload_generates(engine: VllmEngine, client: Any, tmp_path: Path) -> None:
    client.fails = "pause"
    with pytest.raises(UnavailableError, match="too slow"):
        await engine.pause("update")
    status = engine.status()
    assert (status.state, status.is_paused, client.is_paused) == (EngineState.FAILED, False, True)
    await engine.load(tmp_path, policy(), identity=SECOND)
    await engine.prove(policy())
    assert engine.status().state is EngineState.READY and not client.is_paused


async def test_a_failed_pause_is_undone_by_the_next_resume(engine: VllmEngine, client: Any) -> None:
    client.fails = "pause"
    with pytest.raises(UnavailableError):
        await engine.pause("update")
    await engine.resume("update")
    assert not client.is_paused


async def test_a_resume_that_failed_is_tried_again(engine: VllmEngine, client: Any, tmp_path: Path) -> None:
    client.fails = "resume"
    await engine.pause("operator")
    with pytest.raises(UnavailableError, match="too slow"):
        await engine.resume("operator")
    assert engine.status().state is EngineState.FAILED and client.is_paused
    await engine.load(tmp_path, policy(), identity=SECOND)
    assert not client.is_paused


async def test_an_adapter_is_proved_by_its_probe_alone(engine: VllmEngine, client: Any) -> None:
    held = await engine.prove(policy(adapter=SimpleNamespace()))
    assert held.proof == "probe" and client.calls == ["probe handed in", "probe"]


async def test_what_is_held_is_read_back_in_parts(engine: VllmEngine, client: Any) -> None:
    entries = [
        TensorEntry(name=name, shape=(16 << 20,), dtype="float32", digest=digest_hex(0)) for name in ("a", "b", "c")
    ]
    await engine.prove(policy(tensors=tuple(entries)))
    assert sorted(client.calls) == ["millrace_digests"] * 3 + ["probe", "probe handed in"]


async def test_a_delta_is_proved_by_what_was_foreseen_and_the_probe_of_the_first_step(
    engine: VllmEngine, client: Any
) -> None:
    staged = policy()
    await engine.check(staged)
    await update(engine, staged)
    [*prepared, paused, written, handed_in, resumed, probed] = client.calls
    assert prepared == ["millrace_check", "millrace_stage", "millrace_foreseen"]
    assert (paused, written, handed_in) == ("pause", "millrace_activate", "probe handed in")
    assert (resumed, probed) == ("resume", "probe"), "nothing is read back whole"
    await until(lambda: client.num_verified)
    assert engine.status().state is EngineState.READY


async def test_damage_that_verification_finds_ends_it(engine: VllmEngine, client: Any, gate: GenerationGate) -> None:
    client.damage = "w is damaged"
    await update(engine)
    await until(lambda: engine.status().state is EngineState.FAILED)
    assert refusal(gate) == engine.status().error == "w is damaged"


async def test_a_probe_that_differs_keeps_the_gate_shut(engine: VllmEngine, client: Any, gate: GenerationGate) -> None:
    entering = asyncio.create_task(gate.enter("early"))
    await entering
    staged = policy(probe=Probe(token_ids=(1, 2), logprobs=(-3.0,)))
    with pytest.raises(InternalError, match="probe"):
        await update(engine, staged)
    late = asyncio.create_task(gate.enter("late"))
    await asyncio.sleep(0)
    assert not late.done() and not gate.may_leave.is_set(), "what the unproved version made stays here"
    await engine.fail("unproved")
    with pytest.raises(UnavailableError, match="unproved"):
        await late


async def test_weights_of_a_directory_do_not_open_the_gate_of_a_run(
    client: Any, gate: GenerationGate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "write_order", lambda *_: {})
    engine = VllmEngine(client, gate, directory=tmp_path)
    fixed = PolicyIdentity(run_uid="", lineage=0, version=0)
    await engine.load(tmp_path, None, identity=fixed)
    reached, going_on = client.block("millrace_reload_directory")
    is_reloading, going_on_with_run = client.block("millrace_reload")
    directory = asyncio.create_task(engine.load_directory(None))
    async with asyncio.timeout(5):
        await reached.wait()
        run = asyncio.create_task(engine.load(tmp_path, policy(), identity=FIRST))
        while not refusal(gate):
            await asyncio.sleep(0)
        assert "millrace_reload" not in client.calls, "one after the other"
        going_on.set()
        with pytest.raises(InvalidStateError, match="run's policy"):
            await directory
        assert refusal(gate)
        await is_reloading.wait()
        assert client.is_paused
        late = asyncio.create_task(engine.load_directory(None))
        going_on_with_run.set()
        await run
        with pytest.raises(InvalidStateError, match="run's policy"):
            await late
    assert refusal(gate) and engine.status().identity == FIRST and not client.is_paused
    assert client.calls.count("millrace_reload_directory") == 1
    await engine.close()


async def test_a_ping_that_fails_is_seen_and_goes_on(client: Any) -> None:
    client.fails = "ping"
    reached, going_on = client.block("ping")
    ping = Ping(client, Ranks(client), period_s=0.001)
    async with asyncio.timeout(5):
        await reached.wait()
        going_on.set()
        while not ping.error:
            await asyncio.sleep(0)
        assert "too slow" in ping.error and ping.age_s > 0
        while ping.error:
            await asyncio.sleep(0.001)
    ping.stop()


@pytest.mark.parametrize("call", ["pause", "resume"])
async def test_a_caller_that_goes_away_while_vllm_answers_fails_nothing(
    engine: VllmEngine, client: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(service, "PAUSE_LIMIT_S", 1.0)
    caller = CallerPause(engine)
    reached, going_on = client.block(call)
    if call == "resume":
        await caller.pause("")
    task = asyncio.create_task(caller.pause("") if call == "pause" else caller.resume())
    async with asyncio.timeout(5):
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        going_on.set()
        if call == "pause":
            assert engine.status().is_paused and client.is_paused, "it lasts until its limit"
        while client.pauses() != ["pause", "resume"] or client.is_paused:
            await asyncio.sleep(0.01)
    assert engine.status().state is EngineState.READY and not engine.status().is_paused and not refusal(engine.gate)


async def test_a_resume_after_a_pause_whose_caller_went_away_goes_on(engine: VllmEngine, client: Any) -> None:
    caller = CallerPause(engine)
    reached, going_on = client.block("pause")
    task = asyncio.create_task(caller.pause("r"))
    async with asyncio.timeout(5):
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        resuming = asyncio.create_task(caller.resume())
        going_on.set()
        await resuming
    assert engine.status().state is EngineState.READY and not client.is_paused and not caller.is_by("r")


async def test_a_pause_that_fails_leaves_no_wait_and_no_end(engine: VllmEngine, client: Any) -> None:
    caller = CallerPause(engine)
    client.fails = "pause"
    with pytest.raises(UnavailableError, match="too slow"):
        await caller.pause("r")
    assert not caller.is_by("r")
    await asyncio.sleep(0)
    assert not [one for one in waits.snapshot("me") if "paused by" in one.reason]


async def test_a_base_whose_adapter_is_to_come_is_not_served(
    engine: VllmEngine, gate: GenerationGate, tmp_path: Path
) -> None:
    await engine.load(tmp_path, policy(), identity=SECOND)
    await engine.prove(policy(), opens=False)
    assert refusal(gate) and not gate.may_leave.is_set()
    await engine.prove(policy())
    assert not refusal(gate) and gate.may_leave.is_set()


async def test_reading_back_goes_on_after_an_error_and_says_so(
    engine: VllmEngine, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "BACKOFF", Backoff(0.01, 60.0))
    client.verify_error = UnavailableError("busy", reason="ENGINE_SILENT")
    client.num_verified = 0
    await update(engine)

    def shown() -> list[str]:
        return [one.reason for one in waits.snapshot("me") if "busy" in one.reason]

    async with asyncio.timeout(20):
        while client.num_verified < 2:
            await asyncio.sleep(0.001)
        assert shown()
        client.verify_error = None
        while shown():
            await asyncio.sleep(0.001)
    assert engine.status().state is EngineState.READY


async def test_what_is_not_known_is_not_called_proved(
    engine: VllmEngine, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client.is_proved = False
    with caplog.at_level("INFO"):
        await update(engine)
        await until(lambda: "what they should be is not known" in caplog.text, timeout_s=20)
    assert "as they were proved" not in caplog.text


async def load(engine: VllmEngine, tmp_path: Path) -> None:
    await engine.load(tmp_path, policy(), identity=SECOND)


async def apply_without_a_look_ahead(engine: VllmEngine, tmp_path: Path) -> None:
    await update(engine)


async def check_and_apply(engine: VllmEngine, tmp_path: Path) -> None:
    staged = policy()
    await engine.check(staged)
    await update(engine, staged)


@pytest.mark.parametrize(
    ("act", "method", "limit"),
    [
        (load, "millrace_reload", "_RELOAD_DEADLINE_S"),
        (apply_without_a_look_ahead, "millrace_activate", "_RELOAD_DEADLINE_S"),
        (check_and_apply, "millrace_activate", "_RPC_DEADLINE_S"),
    ],
)
async def test_a_load_of_all_weights_has_longer_than_a_change_of_some_and_neither_is_waited_for_without_end(
    engine: VllmEngine,
    client: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[VllmEngine, Path], Awaitable[None]],
    method: str,
    limit: str,
) -> None:
    for name in ("_RELOAD_DEADLINE_S", "_RPC_DEADLINE_S"):
        monkeypatch.setattr(engine_module, name, 0.05 if name == limit else 3600.0)
    client.block(method)
    async with asyncio.timeout(patient(20)):
        with pytest.raises(UnavailableError, match="did not answer within 0 s") as raised:
            await act(engine, tmp_path)
    assert raised.value.reason == "ENGINE_SILENT"
    assert client.calls[-1] != "probe" and method in client.calls
    assert engine.status().state is EngineState.FAILED and "failed half-way" in engine.status().error
    assert not client.is_paused, "who waits behind the pause is answered with the failure"
