"""One real vLLM replica for a module of tests, and a client of its two APIs."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import policy_service_pb2_grpc
from millrace.internal.v1.policy_pb2 import PolicyEntry
from millrace.local.redis import free_port
from millrace.rpc.channel import call, open_channel
from millrace.telemetry import faults
from millrace_testing import processes

START_S = 240.0  # 25 s on a quiet machine
END_S = 60.0
CALL_S = 60.0
_MARK = "TEST_OF_VLLM"


@dataclass(slots=True)
class Server:
    """A launcher with its vLLM. `directory` has its log, its faults and its store; `environ` is the launcher's."""

    process: subprocess.Popen[bytes]
    directory: Path
    grpc: str
    http: str
    environ: dict[str, str]

    @classmethod
    def start(
        cls,
        python: str,
        model: Path,
        directory: Path,
        flags: dict[str, Any],
        *,
        beside: Callable[["Server"], object] | None = None,
        start_s: float = START_S,
        **more: str,
    ) -> "Server":
        """Start a replica on a model directory, and wait until it serves.

        `beside` starts what the replica needs in addition; `more` goes into its environment.
        """
        grpc, http = (f"127.0.0.1:{free_port()}" for _ in range(2))
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "VLLM_"))}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        environ |= {
            "MILLRACE_ENGINE": "vllm",
            "MILLRACE_VLLM_PYTHON": python,
            "MILLRACE_VLLM_FLAGS": json.dumps({"kv_cache_memory_bytes": 256 << 20, "dtype": "float32", **flags}),
            "MILLRACE_MODEL": str(model),
            "MILLRACE_LISTEN": grpc,
            "MILLRACE_HTTP_LISTEN": http,
            "MILLRACE_STORE_URL": f"file://{directory}/store",
            "MILLRACE_FAULTS": str(directory / "faults"),
            "MILLRACE_DRAIN_S": "0",
            "PYTHONUNBUFFERED": "1",
            _MARK: str(directory),
            **more,
        }
        with (directory / "replica.log").open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "millrace.inference.main"], env=environ, stdout=sink, stderr=subprocess.STDOUT
            )
        server = cls(process, directory, grpc, f"http://{http}", environ)
        try:
            if beside is not None:
                beside(server)
            server.await_health(start_s)
        except BaseException:  # nothing is left behind, then raises
            server.kill()
            raise
        return server

    def log(self) -> str:
        """Return the end of its log."""
        return (self.directory / "replica.log").read_text()[-6000:]

    def arm(self, fault: faults.Fault) -> Path:
        """Arm a fault in the replica's processes; return the path of its record."""
        return faults.arm(self.directory / "faults", fault)

    def tree(self) -> list[psutil.Process]:
        """Return all processes of the replica."""
        return processes.bearing(_MARK, str(self.directory))

    def stop(self) -> tuple[int, float]:
        """Send SIGTERM; return the exit code and the seconds until the end."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S), time.monotonic() - began

    def kill(self) -> None:
        """Kill all processes that are left."""
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(END_S)

    def await_health(self, start_s: float = START_S) -> None:
        ends = time.monotonic() + start_s
        while True:
            assert time.monotonic() < ends and self.process.poll() is None, self.log()
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{self.http}/health", timeout=5).close()
                return
            time.sleep(0.2)  # an HTTP server has no other way to say that it is there

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator["Client"]:
        """Provide a client for one test, with nothing in flight at the beginning."""
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        # Tests compute what they expect on this loop, and servers end connections that are idle meanwhile: a request
        # on one of these would fail before the loop has seen its end.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        session = aiohttp.ClientSession(self.http, timeout=timeout, connector=connector)
        async with session, open_channel(self.grpc) as channel:
            yield Client(self, policy_service_pb2_grpc.PolicyServiceStub(channel), session)


@dataclass(slots=True)
class Completion:
    """One answer of `/inference/v1/generate`; spans are (version, start, end)."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]
    num_cached: int

    def version_of(self) -> list[int]:
        """Return the version of each token, from spans that have to follow each other and to cover all."""
        assert [start for _, start, _ in self.spans] == [0, *(end for _, _, end in self.spans[:-1])], self.spans
        assert self.spans[-1][2] == len(self.token_ids), self.spans
        return [version for version, start, end in self.spans for _ in range(start, end)]


@dataclass(slots=True)
class Client:
    """The PolicyService and the HTTP API of a server."""

    server: Server
    stub: Any
    session: aiohttp.ClientSession
    uid: str = "run1"

    async def update(self, entry: PolicyEntry, mode: "pb.InflightMode" = pb.INFLIGHT_MODE_KEEP) -> pb.PolicyStatus:
        """Ask for a version; return the status after 25 s at most."""
        request = pb.UpdatePolicyRequest(run_uid=self.uid, policy=entry, epoch=1, inflight_mode=mode, wait_seconds=25)
        return (await call(self.stub.UpdatePolicy, request, timeout_s=CALL_S)).status

    async def serve(self, entry: PolicyEntry, mode: "pb.InflightMode" = pb.INFLIGHT_MODE_KEEP) -> pb.PolicyStatus:
        """Update to a valid version and return the status. Ask again while a full replica has no slot for the probe."""
        async with asyncio.timeout(CALL_S):
            while (status := await self.update(entry, mode)).state == pb.POLICY_STATE_APPLYING:
                pass  # each question waits at the replica
        assert status.state == pb.POLICY_STATE_SERVING, (status.error, self.server.log())
        assert (status.version, status.digest, status.has_version) == (entry.version, entry.digest, True)
        return status

    async def status(self) -> pb.PolicyStatus:
        """Return the replica's status."""
        return (await call(self.stub.GetPolicyStatus, pb.GetPolicyStatusRequest(), timeout_s=CALL_S)).status

    async def sleep(self) -> pb.PolicyStatus:
        """Make the replica release its GPU memory; return its status."""
        request = pb.PauseGenerationRequest(run_uid=self.uid, frees_memory=True, epoch=1)
        return (await call(self.stub.PauseGeneration, request, timeout_s=CALL_S)).status

    async def wake(self) -> pb.PolicyStatus:
        """Make the replica take its GPU memory again and continue; return its status."""
        request = pb.ResumeGenerationRequest(run_uid=self.uid, takes_memory=True, epoch=1)
        return (await call(self.stub.ResumeGeneration, request, timeout_s=CALL_S)).status

    async def pause(self) -> None:
        """Stop generation between two tokens."""
        await call(self.stub.PauseGeneration, pb.PauseGenerationRequest(), timeout_s=CALL_S)

    async def resume(self) -> None:
        """Resume generation."""
        await call(self.stub.ResumeGeneration, pb.ResumeGenerationRequest(), timeout_s=CALL_S)

    async def open_requests(self, number: int) -> None:
        """Wait until the replica has that many requests."""
        async with asyncio.timeout(CALL_S):
            while (await self.status()).num_requests != number:
                await asyncio.sleep(0.02)  # PolicyService has no event for it

    async def metric(self, name: str) -> float:
        """Return a number of vLLM's own metrics."""
        async with self.session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        """Return the status, JSON and headers of an answer."""
        async with self.session.post(path, json=body) as response:
            return response.status, await response.json(), dict(response.headers)

    async def generate(self, prompt: Sequence[int], max_tokens: int = 16, *, seed: int = 1) -> Completion:
        """Return a sampled completion of tokens."""
        sampling = {"max_tokens": max_tokens, "seed": seed, "temperature": 1.0, "ignore_eos": True}
        code, body, _ = await self.post(
            "/inference/v1/generate", {"token_ids": list(prompt), "sampling_params": sampling}
        )
        assert code == 200, body
        [choice] = body["choices"]
        found = Completion(
            choice["token_ids"],
            [entry["logprob"] for entry in choice["logprobs"]["content"]],
            [(span["version"], span["start"], span["end"]) for span in choice["policy_spans"]],
            (body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )
        assert len(found.token_ids) == len(found.logprobs) == max_tokens
        return found

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a streamed answer."""
        async with self.session.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                text = line.decode().strip().removeprefix("data: ")
                if text and text != "[DONE]":
                    yield json.loads(text)


def serving(
    python: str, model: Path, directory: Path, *, environ: Mapping[str, str] | None = None, **flags: Any
) -> Iterator[Server]:
    """Run a server for the tests of a module. At the end it must stop soon, without an error, and leave no process.

    To be used as the body of a fixture.
    """
    server = Server.start(python, model, directory, flags, **(environ or {}))
    try:
        yield server
        code, took_s = server.stop()
        assert code == 0, server.log()
        left, ends = server.tree(), time.monotonic() + 5
        while left and time.monotonic() < ends:
            time.sleep(0.05)  # the kernel tells no stranger about the end of a process
            left = server.tree()
        assert not left, f"still there: {left}"
        print(f"ended {took_s:.1f} s after SIGTERM")
    finally:
        server.kill()
