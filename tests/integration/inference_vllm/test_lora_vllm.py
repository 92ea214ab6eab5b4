"""Adapters on real vLLM: put on their base, replaced while a request is in flight, taken away, refused."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from millrace.errors import UnavailableError
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import policy_service_pb2_grpc
from millrace.policies.peft.config import AdapterSpec
from millrace.rpc.channel import call, open_channel
from millrace.storage.local import LocalStore
from millrace_testing.inference import adapters, tiny
from millrace_testing.inference.logprobs import prompt_logprobs

START_S = 180.0  # 25 s on a quiet machine
FLAGS = {"enforce_eager": True, "max_model_len": 200, "max_num_seqs": 8, "kv_cache_memory_bytes": 256 << 20}
SPEC = AdapterSpec(rank=4, alpha=6.0, target_modules=("q_proj", "down_proj"))
pytestmark = pytest.mark.timeout(300)


class Replica:
    """One vLLM replica: its PolicyService and its HTTP API."""

    def __init__(self, stub: Any, http_url: str, log: Path, process: asyncio.subprocess.Process) -> None:
        self.stub, self.http_url, self.log, self.process = stub, http_url, log, process

    async def update(self, desired: Any) -> pb.PolicyStatus:
        """Ask until the version serves or failed, as the orchestrator does, and return the status."""
        request = pb.UpdatePolicyRequest(run_uid=desired.run_uid, policy=desired.entry, epoch=1, wait_seconds=1)
        ends = time.monotonic() + START_S
        while True:
            assert time.monotonic() < ends and self.process.returncode is None, self.log.read_text()[-4000:]
            try:
                status = (await call(self.stub.UpdatePolicy, request, timeout_s=60)).status
            except UnavailableError:  # not up yet, or the moment of the hand-over
                await asyncio.sleep(0.2)
                continue
            if status.state in (pb.POLICY_STATE_UPDATE_FAILED, pb.POLICY_STATE_BROKEN) or (
                status.state == pb.POLICY_STATE_SERVING and status.version == desired.entry.version
            ):
                return status

    async def complete(self, max_tokens: int) -> dict[str, Any]:
        """Return one sampled completion of tokens, with their log-probs and policy spans."""
        body = {
            "token_ids": [1, 2, 3],
            "sampling_params": {"max_tokens": max_tokens, "temperature": 1.0, "logprobs": 1, "ignore_eos": True},
        }
        timeout = aiohttp.ClientTimeout(total=60)
        root = self.http_url.removesuffix("/v1")
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{root}/inference/v1/generate", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            return (await response.json())["choices"][0]

    async def logprob_gap(self, twin: Any) -> float:
        """Return greatest difference between sampled log-probs and a forward pass of a fresh model."""
        choice = await self.complete(12)
        found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        expected = prompt_logprobs(twin, [1, 2, 3, *choice["token_ids"]])[2:]
        return max(abs(a - b) for a, b in zip(found, expected, strict=True))


@pytest.fixture
def run(local_store: LocalStore, tmp_path: Path) -> Any:
    base = tiny.tiny_model(0, head_dim=32)
    directory = tmp_path / "files"
    base.config.save_pretrained(directory)
    tiny.tiny_tokenizer().save_pretrained(directory)
    return adapters.Run(local_store, base, {path.name: path.read_bytes() for path in directory.iterdir()}, SPEC)


@pytest.fixture
async def replica(
    vllm_python: str, orchestrator: Any, tmp_path: Path, unused_tcp_port_factory: Any
) -> AsyncIterator[Replica]:
    """Yield a replica without a model, in a process group of its own that ends with the test."""
    grpc_port, http_port = unused_tcp_port_factory(), unused_tcp_port_factory()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    environ |= {
        "MILLRACE_ENGINE": "vllm",
        "MILLRACE_VLLM_PYTHON": vllm_python,
        "MILLRACE_VLLM_FLAGS": json.dumps(FLAGS),
        "MILLRACE_LISTEN": f"127.0.0.1:{grpc_port}",
        "MILLRACE_HTTP_LISTEN": f"127.0.0.1:{http_port}",
        "MILLRACE_STORE_URL": f"file://{tmp_path}/store",
        "MILLRACE_ORCHESTRATOR": f"127.0.0.1:{orchestrator[1]}",
        "MILLRACE_DRAIN_S": "0",
        "PYTHONUNBUFFERED": "1",
    }
    log = tmp_path / "replica.log"
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "millrace.inference.main", env=environ, stdout=sink, stderr=asyncio.subprocess.STDOUT
        )
    try:
        async with open_channel(f"127.0.0.1:{grpc_port}") as channel:
            stub = policy_service_pb2_grpc.PolicyServiceStub(channel)
            yield Replica(stub, f"http://127.0.0.1:{http_port}/v1", log, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(30):
                await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def test_adapters_on_real_vllm(run: Any, replica: Replica) -> None:
    first = await replica.update(run.adapter(1))  # joins in the middle of the run: base, then adapter
    assert first.state == pb.POLICY_STATE_SERVING, (first.error, replica.log.read_text()[-3000:])
    assert (first.proof, first.engine) == ("probe", "vllm")
    for desired in (None, run.adapter(2), run.base_desired, run.adapter(3)):
        if desired is not None:
            status = await replica.update(desired)
            assert status.state == pb.POLICY_STATE_SERVING, (status.error, replica.log.read_text()[-3000:])
            assert status.digest == desired.entry.digest
        version = 1 if desired is None else desired.entry.version
        for other, twin in run.twins.items():
            gap = await replica.logprob_gap(twin)
            assert (gap < 1e-5) == (other == version), (version, other, gap)

    in_flight = asyncio.create_task(replica.complete(190))
    await asyncio.sleep(0.05)
    await replica.update(run.adapter(4))
    choice = await in_flight
    assert len(choice["token_ids"]) == 190
    assert await replica.logprob_gap(run.twins[4]) < 1e-5

    refused = await replica.update(run.adapter(5, damage=adapters.half))
    assert refused.state == pb.POLICY_STATE_UPDATE_FAILED and "half an adapter" in refused.error
    assert await replica.logprob_gap(run.twins[4]) < 1e-5

    spoil = lambda tensors: tensors[f"{adapters.LAYERS[1]}.lora_B.weight"].mul_(1.5)  # noqa: E731
    broken = await replica.update(run.adapter(6, damage=spoil))
    assert broken.state == pb.POLICY_STATE_BROKEN and "probe" in broken.error
    healed = await replica.update(run.adapter(7))
    assert healed.state == pb.POLICY_STATE_SERVING, healed.error
    assert await replica.logprob_gap(run.twins[7]) < 1e-5
