"""A replica that is killed or fails in the middle: its successor is empty, takes the policy and proves it again."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.inference.service import SERVICE_NAME
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import policy_service_pb2_grpc
from millrace.internal.v1 import worker_service_pb2 as workers
from millrace.internal.v1.policy_pb2 import PolicyEntry
from millrace.rpc.channel import call, open_channel
from millrace.storage.local import LocalStore
from millrace.telemetry import faults
from millrace.telemetry.faults import Action, Fault, Point
from millrace_testing.forked_services import ForkedService, ServiceHost
from millrace_testing.inference import updates
from millrace_testing.patience import patient
from millrace_testing.polling import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]
START_S = 90.0


@dataclass
class Place:
    """Where a replica runs, one process after the other: fixed ports, a store, a directory of faults."""

    environ: dict[str, str]
    servicer: Any
    faults: Path
    log: Path
    host: ServiceHost
    process: ForkedService | None = None

    async def start(self) -> workers.Worker:
        """Start a process there and wait until it registers."""
        before = len(self.servicer.registered)
        self.process = await asyncio.to_thread(self.host.start, self.environ, self.log)
        await until(lambda: len(self.servicer.registered) != before, timeout_s=START_S)
        return self.servicer.registered[-1]

    async def died_of(self) -> int:
        """Wait for its end."""
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, 30)


@pytest.fixture(scope="module")
def host() -> Iterator[ServiceHost]:
    made = ServiceHost("millrace.inference.main")
    yield made
    made.close()


@pytest.fixture
async def place(
    orchestrator, host: ServiceHost, tmp_path: Path, unused_port: Callable[[], int]
) -> AsyncIterator[Place]:
    servicer, port = orchestrator
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MILLRACE_DRAIN_S": "0",
        "MILLRACE_GRACE_S": "2",
        "MILLRACE_LISTEN": f"127.0.0.1:{unused_port()}",
        "MILLRACE_HTTP_LISTEN": f"127.0.0.1:{unused_port()}",
        "MILLRACE_STORE_URL": f"file://{tmp_path}/store",
        "MILLRACE_ORCHESTRATOR": f"127.0.0.1:{port}",
        "MILLRACE_MAX_MODEL_LEN": "128",
        faults.VARIABLE: str(tmp_path / "faults"),
    }
    made = Place(environ, servicer, tmp_path / "faults", tmp_path / "log", host)
    yield made
    if made.process is not None:
        made.process.kill()
        await made.died_of()


async def update(worker: workers.Worker, entry: PolicyEntry) -> pb.PolicyStatus:
    """Ask for a version until it is served or failed."""
    async with open_channel(worker.address) as channel:
        stub = policy_service_pb2_grpc.PolicyServiceStub(channel)
        request = pb.UpdatePolicyRequest(run_uid="run1", policy=entry, epoch=1, wait_seconds=10)
        return await updates.update(stub, request)


async def is_serving(worker: workers.Worker) -> bool:
    async with open_channel(worker.address) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        reply = await call(health_pb2_grpc.HealthStub(channel).Check, request)
        return reply.status == health_pb2.HealthCheckResponse.SERVING


async def generate(worker: workers.Worker, *, max_tokens: int, n: int = 1) -> tuple[int, dict[str, Any], Any]:
    body = {"model": "policy", "prompt": "x", "max_tokens": max_tokens, "n": n, "ignore_eos": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{worker.http_url}/completions", json=body) as reply,
    ):
        return reply.status, await reply.json(), reply.headers


async def test_killed_mid_decode(place: Place, local_store: LocalStore, publish, make_model) -> None:
    first = await place.start()
    entry = publish(local_store, make_model(0), 3)
    assert (await update(first, entry)).digest == entry.digest
    fired = faults.arm(place.faults, Fault(point=Point.INFERENCE_MID_DECODE, when={"version": 3}, skip=5))
    with pytest.raises(aiohttp.ClientError):  # which an env-server reports as ENGINE_LOST
        await generate(first, max_tokens=100)
    assert fired.exists() and await place.died_of() == -signal.SIGKILL
    second = await place.start()
    assert second.slot == first.slot != "" and second.worker_id != first.worker_id
    assert not await is_serving(second)
    code, body, headers = await generate(second, max_tokens=4)
    assert (code, "no policy" in str(body)) == (503, True) and int(headers["Retry-After"]) > 0
    status = await update(second, entry)
    assert (status.state, status.digest, status.proof) == (pb.POLICY_STATE_SERVING, entry.digest, "readback")
    assert (await generate(second, max_tokens=4))[0] == 200


async def test_killed_mid_apply(place: Place, local_store: LocalStore, publish, make_model) -> None:
    first = await place.start()
    await update(first, publish(local_store, make_model(0), 3))
    newer = publish(local_store, make_model(1), 4)
    fired = faults.arm(place.faults, Fault(point=Point.INFERENCE_MID_APPLY, when={"version": 4}))
    with contextlib.suppress(Exception):  # the answer is lost with the process
        await update(first, newer)
    assert fired.exists() and await place.died_of() == -signal.SIGKILL
    status = await update(await place.start(), newer)
    assert (status.state, status.version, status.digest) == (pb.POLICY_STATE_SERVING, 4, newer.digest)


async def test_a_failed_apply_does_not_serve_until_the_policy_is_loaded_anew(
    place: Place, local_store: LocalStore, publish, make_model
) -> None:
    worker = await place.start()
    await update(worker, publish(local_store, make_model(0), 3))
    newer = publish(local_store, make_model(1), 4)
    faults.arm(place.faults, Fault(point=Point.INFERENCE_MID_APPLY, action=Action.RAISE))
    status = await update(worker, newer)
    assert (status.state, status.has_version) == (pb.POLICY_STATE_BROKEN, False) and "FAULT" not in status.digest
    assert "fault injected" in status.error
    async with asyncio.timeout(10):
        while await is_serving(worker):
            await asyncio.sleep(0.05)
    assert (await generate(worker, max_tokens=4))[0] == 503
    status = await update(worker, newer)
    assert (status.state, status.version, status.digest) == (pb.POLICY_STATE_SERVING, 4, newer.digest)
    assert (await generate(worker, max_tokens=4))[0] == 200


async def test_sigterm_says_so_at_once_and_refuses_what_cannot_finish(
    place: Place, local_store: LocalStore, publish, make_model
) -> None:
    worker = await place.start()
    await update(worker, publish(local_store, make_model(0), 3))
    async with open_channel(worker.address) as channel:  # a paused engine finishes nothing within the grace period
        stub = policy_service_pb2_grpc.PolicyServiceStub(channel)
        await call(stub.PauseGeneration, pb.PauseGenerationRequest(run_uid="run1"))
    stuck = asyncio.create_task(generate(worker, max_tokens=8))
    await until(lambda: place.servicer.reported.num_requests != 0, timeout_s=10)
    assert place.process is not None and not place.servicer.is_leaving
    os.kill(place.process.pid, signal.SIGTERM)
    async with asyncio.timeout(patient(1.5)):  # before its grace period ends, as what is stuck shows below
        while not place.servicer.is_leaving:
            await asyncio.sleep(0.02)
    assert not await is_serving(worker) and not stuck.done()
    code, body, headers = await generate(worker, max_tokens=4)
    assert (code, "shutting down" in str(body)) == (503, True) and int(headers["Retry-After"]) > 0
    code, body, headers = await stuck
    assert (code, "shutting down" in str(body)) == (503, True) and int(headers["Retry-After"]) > 0
    async with asyncio.timeout(patient(5)):
        assert await place.died_of() == 0
