"""The launcher with real vLLM: flags, an empty replica that waits for a policy, deaths of every process of the tree."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.errors import UnavailableError
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import policy_service_pb2_grpc
from millrace.rpc.channel import call, open_channel
from millrace.storage.local import LocalStore
from millrace.storage.scratch import owned_directory
from millrace_testing import processes
from millrace_testing.inference import published

START_S = 180.0  # 25 s on a quiet machine
GONE_S = 10.0
HAND_OVER_S = 15.0  # far below the 30 s after which the local stack kills what does not answer
FLAGS = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 8, "kv_cache_memory_bytes": 256 << 20}
pytestmark = pytest.mark.timeout(300)


class Replica:
    """A launcher and everything that it starts, found by a mark in the environment."""

    def __init__(self, python: str, tmp_path: Path, flags: dict[str, object], **variables: str) -> None:
        self.log = tmp_path / "replica.log"
        self._mark = f"{tmp_path}"
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
        self._environ.pop("PYTHONDONTWRITEBYTECODE", None)
        self._environ |= {
            "MILLRACE_ENGINE": "vllm",
            "MILLRACE_VLLM_PYTHON": python,
            "MILLRACE_VLLM_FLAGS": json.dumps(flags),
            "MILLRACE_LISTEN": "127.0.0.1:0",
            "MILLRACE_HTTP_LISTEN": "127.0.0.1:0",
            "MILLRACE_DRAIN_S": "0",
            "TEST_OF_LAUNCH": self._mark,
            "PYTHONUNBUFFERED": "1",
            **variables,
        }
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("wb") as sink:
            self.process = await asyncio.create_subprocess_exec(
                # Started with our interpreter, as the CLI and the local stack of another environment would.
                sys.executable,
                "-m",
                "millrace.inference.main",
                env=self._environ,
                stdout=sink,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )

    def tree(self) -> list[psutil.Process]:
        return processes.bearing("TEST_OF_LAUNCH", self._mark)

    def server(self) -> psutil.Process:
        """Return vLLM's API server: the one that leads a process group, besides the launcher."""
        assert self.process is not None
        [found] = [one for one in self.tree() if os.getpgid(one.pid) == one.pid and one.pid != self.process.pid]
        return found

    async def exit_code(self, within_s: float = START_S) -> int:
        assert self.process is not None
        async with asyncio.timeout(within_s):
            return await self.process.wait()

    async def gone(self) -> None:
        ends = time.monotonic() + GONE_S
        while left := self.tree():
            assert time.monotonic() < ends, f"still there: {left}"
            await asyncio.sleep(0.05)


@pytest.fixture
async def replicas(vllm_python: str, tmp_path: Path) -> AsyncIterator[list[Replica]]:
    """Yield replicas that the test makes; nothing of them outlives it."""
    made: list[Replica] = []
    yield made
    for replica in made:
        for process in replica.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


async def test_flags_are_checked_by_vllm_before_anything_is_loaded(replicas, vllm_python, tmp_path):
    wrong = {
        "inference.vllm.enable_prefix_cachin": True,
        "inference.model.max_model_len": "long",
        "inference.vllm.logprobs_mode": "raw_logprobs",
        "inference.vllm.worker_extension_cls": "mine.Worker",
        "inference.vllm.kv_cache_dtype": "fp7",
        "inference.vllm.enable_chunked_prefill": False,  # this one is fine
    }
    replica = Replica(vllm_python, tmp_path, wrong, MILLRACE_MODEL="org/model")
    replicas.append(replica)
    await replica.start()
    assert await replica.exit_code() == 2
    said = replica.log.read_text()
    assert "enable_prefix_cachin: vLLM has no such flag; did you mean `enable_prefix_caching`? (got true)" in said
    assert "inference.model.max_model_len: vLLM refuses it" in said and "'long'" in said
    assert "logprobs_mode: is set by Millrace" in said and 'only "processed_logprobs" is possible' in said
    assert "worker_extension_cls: is set by Millrace" in said
    assert "kv_cache_dtype: vLLM refuses it: invalid choice: 'fp7'" in said
    assert "enable_chunked_prefill" not in said
    await replica.gone()


async def test_a_fixed_model_is_looked_at_before_it_is_loaded(replicas, vllm_python, tmp_path):
    model = published.model(0)
    published.files(model, tmp_path / "model")
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    model.save_pretrained(tmp_path / "model")
    replica = Replica(vllm_python, tmp_path, FLAGS, MILLRACE_MODEL=str(tmp_path / "model"))
    replicas.append(replica)
    await replica.start()
    assert await replica.exit_code() == 1
    said = replica.log.read_text()
    assert "do not fit its config.json: 1 tensor not finite: model.norm.weight" in said and "Traceback" not in said
    assert "Starting to load model" not in said
    await replica.gone()


async def test_an_empty_replica_starts_with_the_policy_that_is_asked_for(
    replicas, vllm_python, orchestrator, local_store: LocalStore, tmp_path
):
    servicer, port = orchestrator
    replica = Replica(
        vllm_python,
        tmp_path,
        FLAGS,
        MILLRACE_STORE_URL=f"file://{tmp_path}/store",
        MILLRACE_ORCHESTRATOR=f"127.0.0.1:{port}",
        MILLRACE_SCRATCH_DIR=f"{tmp_path}/policies",
    )
    replicas.append(replica)
    await replica.start()
    async with asyncio.timeout(START_S):
        worker = await servicer.worker
    entry = published.Publisher(local_store, tmp_path, "run1").full(published.model(1), 0)
    async with open_channel(worker.address) as channel:
        stub = policy_service_pb2_grpc.PolicyServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)

        async def ask(manifest_sha256: bytes, until: "pb.PolicyState") -> pb.PolicyStatus:
            """As the orchestrator does: until the replica is where it shall be; it answers its health all the time."""
            wanted = pb.UpdatePolicyRequest(run_uid="run1", policy=entry, epoch=1, wait_seconds=0.5)
            wanted.policy.manifest_sha256 = manifest_sha256
            ends, answered_at = time.monotonic() + START_S, time.monotonic()
            while True:
                assert time.monotonic() < ends, replica.log.read_text()[-3000:]
                try:
                    reply = await call(stub.UpdatePolicy, wanted, timeout_s=30)
                    alive = await call(health.Check, health_pb2.HealthCheckRequest(), timeout_s=30)
                    is_well = alive.status == health_pb2.HealthCheckResponse.SERVING
                except UnavailableError:
                    is_well = False
                if not is_well:  # the moment of the hand-over
                    assert time.monotonic() - answered_at < HAND_OVER_S, "nobody answers for the replica"
                    await asyncio.sleep(0.1)
                    continue
                answered_at = time.monotonic()
                if reply.status.state == until:
                    return reply.status

        refused = await ask(bytes(32), pb.POLICY_STATE_UPDATE_FAILED)
        assert "sha256" in refused.error and not refused.has_version, "a damaged manifest starts nothing"
        served = await ask(entry.manifest_sha256, pb.POLICY_STATE_SERVING)
        assert (served.version, served.digest, served.engine) == (0, entry.digest, "vllm")
        assert "probe" in served.proof
    assert {one.worker_id for one in servicer.registered} == {worker.worker_id}, "the same worker goes on"
    assert {one.http_url for one in servicer.registered} == {worker.http_url}

    assert len(replica.tree()) >= 3, "launcher, API server, engine core"
    assert len(list((tmp_path / "policies").glob("millrace-policy-*/policy.safetensors"))) == 1
    replica.server().send_signal(signal.SIGKILL)
    assert await replica.exit_code(GONE_S) == 1
    assert "vLLM died: signal SIGKILL" in replica.log.read_text()
    await replica.gone()
    assert not list((tmp_path / "policies").iterdir()), "the policy does not stay on the disk"


async def test_nothing_outlives_a_killed_launcher(replicas, vllm_python, tmp_path):
    full_model_dir = tmp_path / "model"
    published.model(0).save_pretrained(full_model_dir)
    published.tiny.tiny_tokenizer().save_pretrained(full_model_dir)
    with tempfile.TemporaryDirectory() as directory:  # paths of sockets have to be short
        own = {"MILLRACE_MODEL": str(full_model_dir), "TMPDIR": directory, "MILLRACE_SCRATCH_DIR": directory}
        replica = Replica(vllm_python, tmp_path, {**FLAGS, "dtype": "float32"}, **own)
        replicas.append(replica)
        await _require_gone_once_killed(replica, Path(directory))


async def _require_gone_once_killed(replica: Replica, directory: Path) -> None:
    await replica.start()
    assert replica.process is not None
    ends = time.monotonic() + START_S
    while "Application startup complete" not in replica.log.read_text():
        assert time.monotonic() < ends and replica.process.returncode is None, replica.log.read_text()[-3000:]
        await asyncio.sleep(0.1)
    assert len(replica.tree()) >= 3
    assert not [path for path in directory.iterdir() if path.is_socket()]
    assert [path for path in directory.glob("millrace-ipc-*/*") if path.is_socket()]
    replica.process.kill()
    await replica.gone()
    with owned_directory("next", parent=directory) as own:
        assert list(directory.glob("millrace-*")) == [own], "the next one removes what it has left"
