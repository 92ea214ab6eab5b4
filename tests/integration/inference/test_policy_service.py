"""PolicyService over real gRPC: policies from an object store, failures on the way, fencing."""

import asyncio
import copy
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from millrace.errors import FencedError, InvalidSpecError, InvalidStateError, UnavailableError
from millrace.inference import service
from millrace.inference.embedded import loader
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.held import HeldWeights
from millrace.inference.engine import GenerateRequest, InflightMode, SamplingParams
from millrace.inference.model_files import ModelSlot
from millrace.inference.service import SERVICE_NAME, PolicyServicer
from millrace.inference.updater import DesiredPolicy, PolicyUpdater
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import policy_service_pb2_grpc
from millrace.internal.v1.policy_pb2 import PolicyEntry
from millrace.policies.host_copy import HostCopy
from millrace.rpc.channel import call, open_channel
from millrace.rpc.serve import Shutdown, serve
from millrace.storage.local import LocalStore
from millrace.telemetry import waits
from millrace_testing.patience import patient
from millrace_testing.polling import until


@dataclass(slots=True, kw_only=True)
class Client:
    """Calls one replica's PolicyService."""

    stub: policy_service_pb2_grpc.PolicyServiceStub
    engine: EmbeddedEngine
    slot: ModelSlot
    copy: HostCopy

    async def update(self, entry, *, uid="run1", epoch=1, mode=pb.INFLIGHT_MODE_KEEP, wait_s=10.0) -> pb.PolicyStatus:
        request = pb.UpdatePolicyRequest(
            run_uid=uid, policy=entry, epoch=epoch, inflight_mode=mode, wait_seconds=wait_s
        )
        return (await call(self.stub.UpdatePolicy, request, timeout_s=30)).status

    async def status(self) -> pb.PolicyStatus:
        return (await call(self.stub.GetPolicyStatus, pb.GetPolicyStatusRequest())).status

    async def generate(self, number: int = 0, max_tokens: int = 20):
        return await self.engine.generate(
            GenerateRequest(
                request_id=f"t{number}",
                prompt_token_ids=(1, 2, 3),
                sampling=SamplingParams(max_tokens=max_tokens, seed=number, ignore_eos=True),
            )
        )


@pytest.fixture
async def client(local_store: LocalStore) -> AsyncIterator[Client]:
    engine, slot = EmbeddedEngine(max_num_seqs=8), ModelSlot()
    copy = HostCopy(local_store)
    updater = PolicyUpdater(engine, slot, local_store, copy)
    servicer, stopping = PolicyServicer(engine, updater), asyncio.Event()
    started = asyncio.get_running_loop().create_future()

    def register(server, _):
        policy_service_pb2_grpc.add_PolicyServiceServicer_to_server(servicer, server)
        return [SERVICE_NAME]

    serving = asyncio.create_task(
        serve(
            "127.0.0.1:0",
            register,
            shutdown=Shutdown(drain_s=0, grace_s=0),
            on_started=started.set_result,
            stopping=stopping,
            handle_signals=False,
        )
    )
    updating = asyncio.create_task(updater.run())
    async with open_channel(f"127.0.0.1:{await started}") as channel:
        yield Client(stub=policy_service_pb2_grpc.PolicyServiceStub(channel), engine=engine, slot=slot, copy=copy)
    stopping.set()
    await serving
    updating.cancel()
    await engine.close()


def assert_serves(status: pb.PolicyStatus, entry, *, uid: str = "run1") -> None:
    assert status.state == pb.POLICY_STATE_SERVING, status
    assert (status.run_uid, status.has_version, status.version) == (uid, True, entry.version)
    assert (status.digest, status.proof) == (entry.digest, "readback")
    assert status.error == ""


async def test_a_copy_that_no_delta_needs_is_given_up_once_it_serves(client, local_store, publish, make_model):
    for version, is_delta_base in enumerate([True, False, False, True]):
        entry = publish(local_store, make_model(version), version, is_delta_base=is_delta_base)
        assert_serves(await client.update(entry), entry)
        assert (client.copy.held is not None) == is_delta_base


async def test_versions_are_built_applied_and_proved(client, local_store, publish, make_model, reference):
    empty = await client.status()
    assert (empty.state, empty.has_version) == (pb.POLICY_STATE_EMPTY, False)
    models = [make_model(seed) for seed in range(3)]
    for version, model in enumerate(models):
        entry = publish(local_store, model, version)
        status = await client.update(entry)
        assert_serves(status, entry)
        got = await client.generate(version)
        expected = reference(model, [1, 2, 3], got.token_ids.tolist())
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)
        assert got.policy_spans[0].version == version
    assert status.model_name == "policy" and status.max_model_len == 256 and status.max_num_seqs == 8
    assert 0 < status.pause_seconds <= status.update_seconds
    assert client.slot.current.tokenizer.encode("a")
    assert_serves(await client.update(entry), entry)  # idempotent


async def test_a_request_in_flight_carries_both_versions(client, local_store, publish, make_model):
    await client.update(publish(local_store, make_model(0), 0))
    task = asyncio.create_task(client.generate(max_tokens=240))
    await until(lambda: client.engine.status().num_generated_tokens >= 20, timeout_s=10)
    await client.engine.pause("test")  # the update must not outlast the request
    await client.update(publish(local_store, make_model(1), 1))
    await client.engine.resume("test")
    first, second = (await task).policy_spans
    assert (first.version, first.start, second.version, second.end) == (0, 0, 1, 240)
    assert first.end == second.start


async def corrupt(store: LocalStore, entry) -> None:
    """Flips one bit in the weights' object."""
    prefix = entry.manifest_key.rsplit("/", 1)[0]
    key = next(info.key for info in store.list(prefix) if info.key.endswith(".safetensors"))
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))


async def test_corrupt_objects_leave_the_old_version_serving(client, local_store, publish, make_model, reference):
    good = publish(local_store, make_model(0), 0)
    bad = publish(local_store, make_model(1), 1)
    await corrupt(local_store, bad)
    assert_serves(await client.update(good), good)
    status = await client.update(bad)
    assert status.state == pb.POLICY_STATE_UPDATE_FAILED
    assert (status.has_version, status.version, status.digest) == (True, 0, good.digest)
    assert "sha256" in status.error and "model-00001.safetensors" in status.error
    got = await client.generate()
    np.testing.assert_allclose(got.logprobs, reference(make_model(0), [1, 2, 3], got.token_ids.tolist()), atol=1e-5)
    again = publish(local_store, make_model(2), 2)
    assert_serves(await client.update(again), again)


@pytest.mark.parametrize("change", ["missing", "hash", "version", "digest"])
async def test_a_manifest_that_is_not_the_announced_one_is_refused(client, local_store, publish, make_model, change):
    good = publish(local_store, make_model(0), 0)
    await client.update(good)
    bad = copy.deepcopy(good)
    bad.version = 1
    match change:
        case "missing":
            bad.manifest_key += "x"
        case "hash":
            bad.manifest_sha256 = bytes(32)
        case "digest":
            bad.version, bad.digest = 0, "00"
    status = await client.update(bad)
    assert status.state == pb.POLICY_STATE_UPDATE_FAILED and status.error
    assert status.is_damaged, "the orchestrator asks the trainer to publish it anew"
    assert (status.has_version, status.version) == (True, 0)
    assert (await client.generate()).token_ids.size == 20


async def test_a_policy_of_another_shape_leaves_the_old_one_serving(client, local_store, publish, make_model):
    good = publish(local_store, make_model(0), 0)
    await client.update(good)
    status = await client.update(publish(local_store, make_model(0, intermediate_size=64), 1))
    assert status.state == pb.POLICY_STATE_UPDATE_FAILED and status.version == 0
    assert "mlp" in status.error


async def test_weights_that_read_back_differently_break_the_replica_until_a_reload(
    client, local_store, publish, make_model, monkeypatch
):
    entries = [publish(local_store, make_model(seed), seed) for seed in range(2)]
    await client.update(entries[0])
    real = loader.copy_tensors

    def forgets_one(model: torch.nn.Module, tensors) -> None:
        real(model, {name: t for name, t in tensors.items() if name != "model.norm.weight" and "layers.1" not in name})

    monkeypatch.setattr(loader, "copy_tensors", forgets_one)
    status = await client.update(entries[1])
    assert status.state == pb.POLICY_STATE_BROKEN and not status.has_version
    assert "digest" in status.error
    with pytest.raises(Exception, match="digest"):
        await client.generate()
    monkeypatch.setattr(loader, "copy_tensors", real)
    assert_serves(await client.update(entries[1]), entries[1])  # level-triggered: the same request repairs it
    assert (await client.generate()).policy_spans[0].version == 1


async def test_memory_found_damaged_breaks_the_replica_until_a_reload_from_the_anchor(
    client, local_store, publish, make_model
):
    entry = publish(local_store, make_model(0), 0)
    await client.update(entry)
    await client.engine.fail("model.norm.weight is damaged")  # as an engine does that verifies in the background
    async with asyncio.timeout(20):
        while (status := await client.status()).state != pb.POLICY_STATE_BROKEN:
            await asyncio.sleep(0.01)
    assert not status.has_version and "damaged" in status.error
    with pytest.raises(UnavailableError, match="damaged"):
        await client.generate()
    status = await client.update(entry)
    assert_serves(status, entry)
    assert status.fetched_bytes >= status.full_bytes > 0  # nothing that was in memory was used again


async def test_a_version_counts_only_when_its_digest_is_proved(client, local_store, publish, make_model, monkeypatch):
    entries = [publish(local_store, make_model(seed), seed) for seed in range(2)]
    await client.update(entries[0])
    real, reached, go_on = HeldWeights.prove, threading.Event(), threading.Event()

    def slow(held, staged):
        reached.set()
        assert go_on.wait(20)
        return real(held, staged)

    monkeypatch.setattr(HeldWeights, "prove", slow)
    await client.update(entries[1], wait_s=0)
    try:
        assert await asyncio.to_thread(reached.wait, 20)  # the new weights are in, the proof is not
        status = await client.status()  # heartbeats carry the same message
        assert status.state == pb.POLICY_STATE_APPLYING
        assert (status.has_version, status.version, status.digest) == (True, 0, entries[0].digest)
    finally:
        go_on.set()
    assert_serves(await client.update(entries[1]), entries[1])


async def test_weights_that_cannot_be_read_back_do_not_serve(client, local_store, publish, make_model, monkeypatch):
    entries = [publish(local_store, make_model(seed), seed) for seed in range(2)]
    await client.update(entries[0])

    def unreadable(held, staged):
        raise MemoryError("no room to read back")

    with monkeypatch.context() as patch:
        patch.setattr(HeldWeights, "prove", unreadable)
        status = await client.update(entries[1])
    assert status.state == pb.POLICY_STATE_BROKEN and not status.has_version and "read back" in status.error
    with pytest.raises(UnavailableError):
        await client.generate()
    assert_serves(await client.update(entries[1]), entries[1])


async def test_another_run_replaces_the_model(client, local_store, publish, make_model):
    await client.update(publish(local_store, make_model(0), 5))
    other = publish(local_store, make_model(1), 0, uid="run2")
    assert_serves(await client.update(other, uid="run2"), other, uid="run2")


async def test_a_stale_orchestrator_is_fenced(client, local_store, publish, make_model):
    entry = publish(local_store, make_model(0), 0)
    await client.update(entry, epoch=3)
    with pytest.raises(FencedError, match="epoch 2"):
        await client.update(publish(local_store, make_model(1), 1), epoch=2)
    assert (await client.status()).version == 0
    other = publish(local_store, make_model(1), 0, uid="run2")
    assert_serves(await client.update(other, uid="run2", epoch=1), other, uid="run2")  # epochs are per run


async def test_without_waiting_the_answer_is_the_present_state(client, local_store, publish, make_model):
    entry = publish(local_store, make_model(0), 0)
    status = await client.update(entry, wait_s=0)
    assert status.state in (pb.POLICY_STATE_EMPTY, pb.POLICY_STATE_FETCHING) and not status.has_version
    async with asyncio.timeout(20):
        while (await client.status()).state != pb.POLICY_STATE_SERVING:
            await asyncio.sleep(0.01)


def pause_waits() -> list[waits.Wait]:
    return [wait for wait in waits.snapshot("test") if wait.reason.startswith("paused by")]


async def test_a_pause_is_a_wait_until_it_is_resumed(client, local_store, publish, make_model):
    await client.update(publish(local_store, make_model(0), 0))
    await call(client.stub.PauseGeneration, pb.PauseGenerationRequest(run_uid="run1"))
    await call(client.stub.PauseGeneration, pb.PauseGenerationRequest(run_uid="run1"))
    await asyncio.sleep(0)
    (wait,) = pause_waits()
    assert (wait.reason, wait.deadline_s) == ("paused by run1", service.PAUSE_LIMIT_S)
    other = publish(local_store, make_model(1), 0, uid="run2")
    assert_serves(await client.update(other, uid="run2"), other, uid="run2")
    await call(client.stub.ResumeGeneration, pb.ResumeGenerationRequest(run_uid="run1"))  # its own pause
    await asyncio.sleep(0)
    assert pause_waits() == [] and not client.engine.status().is_paused


async def test_a_pause_that_nobody_ends_ends_by_itself(client, local_store, publish, make_model, monkeypatch, caplog):
    monkeypatch.setattr(service, "PAUSE_LIMIT_S", limit_s := patient(1.0))
    await client.update(publish(local_store, make_model(0), 0))
    await call(client.stub.PauseGeneration, pb.PauseGenerationRequest())
    task = asyncio.create_task(client.generate())
    await asyncio.sleep(0.6 * limit_s)
    await call(client.stub.PauseGeneration, pb.PauseGenerationRequest())  # prolongs it
    await asyncio.sleep(0.6 * limit_s)
    assert not task.done() and client.engine.status().is_paused
    assert [wait.reason for wait in pause_waits()] == ["paused by an operator"]
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(20):
            assert (await task).token_ids.size == 20
    assert "a pause was not resumed" in caplog.text and pause_waits() == []


async def test_pause_resume_and_bad_requests(client, local_store, publish, make_model):
    await client.update(publish(local_store, make_model(0), 0))
    await call(client.stub.PauseGeneration, pb.PauseGenerationRequest(run_uid="run1"))
    task = asyncio.create_task(client.generate())
    await asyncio.sleep(0.05)
    assert not task.done()
    with pytest.raises(InvalidStateError, match="run1, not other"):
        await call(client.stub.ResumeGeneration, pb.ResumeGenerationRequest(run_uid="other"))
    await call(client.stub.ResumeGeneration, pb.ResumeGenerationRequest(run_uid="run1"))
    assert (await task).token_ids.size == 20
    with pytest.raises(InvalidSpecError) as caught:
        await call(client.stub.UpdatePolicy, pb.UpdatePolicyRequest(epoch=1))
    assert {v.field for v in caught.value.violations} == {"run_uid", "policy.manifest_key", "policy.manifest_sha256"}


async def test_a_replica_that_sleeps_takes_a_version_once_it_is_woken(client, local_store, publish, make_model):
    first, second = (publish(local_store, make_model(seed), seed) for seed in range(2))
    assert_serves(await client.update(first), first)
    sleep = pb.PauseGenerationRequest(run_uid="run1", frees_memory=True, epoch=1)
    stale = pb.PauseGenerationRequest(run_uid="run1", frees_memory=True)
    with pytest.raises(FencedError, match="epoch 0 of run run1 is stale"):
        await call(client.stub.PauseGeneration, stale)
    for _ in range(2):  # asking again prolongs it
        assert (await call(client.stub.PauseGeneration, sleep)).status.is_asleep
    waiting = asyncio.create_task(client.generate())
    status = await client.update(second, wait_s=0.2)
    assert status.is_asleep and status.version == 0 and status.state == pb.POLICY_STATE_SERVING, "not even fetched"
    updating = asyncio.create_task(client.update(second))
    await asyncio.sleep(0.1)
    assert not updating.done() and not waiting.done()
    await call(client.stub.ResumeGeneration, pb.ResumeGenerationRequest(run_uid="run1"))  # ends another pause
    assert (await client.status()).is_asleep
    wake = pb.ResumeGenerationRequest(run_uid="run1", takes_memory=True)
    with pytest.raises(FencedError, match="epoch 0 of run run1 is stale"):
        await call(client.stub.ResumeGeneration, wake)
    wake.epoch = 1
    woken = await call(client.stub.ResumeGeneration, wake)
    assert not woken.status.is_asleep
    assert_serves(await updating, second)
    assert len((await waiting).token_ids) == 20


async def test_a_replica_does_not_fall_asleep_over_an_update(client, local_store, publish, make_model, monkeypatch):
    entry = publish(local_store, make_model(0), 0)
    going_on, prove = threading.Event(), HeldWeights.prove
    monkeypatch.setattr(HeldWeights, "prove", lambda *args: going_on.wait(10) and prove(*args))
    status = await client.update(entry, wait_s=0.2)
    assert status.state in (pb.POLICY_STATE_FETCHING, pb.POLICY_STATE_APPLYING)
    sleep = pb.PauseGenerationRequest(run_uid="run1", frees_memory=True, epoch=1)
    with pytest.raises(UnavailableError, match="cannot sleep now: it takes another policy") as refused:
        await call(client.stub.PauseGeneration, sleep)
    assert refused.value.reason == "UPDATING"
    going_on.set()
    assert_serves(await client.update(entry), entry)
    assert (await call(client.stub.PauseGeneration, sleep)).status.is_asleep
    await call(client.stub.ResumeGeneration, pb.ResumeGenerationRequest(takes_memory=True))


async def test_a_version_that_is_desired_is_work_to_do_before_anybody_has_begun(client, local_store):
    updater = PolicyUpdater(client.engine, ModelSlot(), local_store, HostCopy(local_store))
    assert updater.is_idle
    policy = DesiredPolicy(run_uid="r", entry=PolicyEntry(version=1, manifest_key="k"))
    updater.desire(policy, mode=InflightMode.KEEP, epoch=1)
    assert not updater.is_idle, "though its state says nothing of it yet"
