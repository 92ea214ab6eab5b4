"""The whole process: starts, registers, takes a policy, serves, drains on SIGTERM."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.inference.service import SERVICE_NAME
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import policy_service_pb2_grpc
from millrace.internal.v1 import worker_service_pb2 as workers
from millrace.rpc.channel import call, open_channel
from millrace.storage.local import LocalStore
from millrace_testing.inference.updates import update
from millrace_testing.polling import until

START_S = 110.0


async def start(**variables: str) -> asyncio.subprocess.Process:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MILLRACE_DRAIN_S": "0", "MILLRACE_GRACE_S": "5", **variables}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "millrace.inference.main", env=environ, stderr=asyncio.subprocess.PIPE
    )


async def finish(process: asyncio.subprocess.Process) -> tuple[int, str]:
    async with asyncio.timeout(START_S):
        _, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, errors.decode()


async def test_process_from_registration_to_drain(orchestrator, local_store: LocalStore, publish, make_model, tmp_path):
    servicer, port = orchestrator
    process = await start(
        MILLRACE_LISTEN="127.0.0.1:0",
        MILLRACE_HTTP_LISTEN="127.0.0.1:0",
        MILLRACE_STORE_URL=f"file://{tmp_path}/store",
        MILLRACE_ORCHESTRATOR=f"127.0.0.1:{port}",
        MILLRACE_MAX_MODEL_LEN="128",
        MILLRACE_GRACE_S="60",
    )
    try:
        async with asyncio.timeout(START_S):
            worker = await servicer.worker
        assert worker.kind == workers.WORKER_KIND_INFERENCE and worker.http_url.endswith("/v1")
        client = openai.AsyncOpenAI(base_url=worker.http_url, api_key="EMPTY", max_retries=0, timeout=30)
        async with open_channel(worker.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)

            async def is_serving(name: str) -> bool:
                reply = await call(health.Check, health_pb2.HealthCheckRequest(service=name))
                return reply.status == health_pb2.HealthCheckResponse.SERVING

            assert await is_serving("") and not await is_serving(SERVICE_NAME)
            with pytest.raises(openai.InternalServerError, match="no policy"):
                await client.models.list()
            stub = policy_service_pb2_grpc.PolicyServiceStub(channel)
            entry = publish(local_store, make_model(0), 3)
            request = pb.UpdatePolicyRequest(run_uid="run1", policy=entry, epoch=1, wait_seconds=10)
            status = await update(stub, request)
            assert status.state == pb.POLICY_STATE_SERVING and status.max_model_len == 128
            answer = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "x"}], max_tokens=8
            )
            assert answer.choices[0].policy_spans[0]["version"] == 3
            async with asyncio.timeout(10):
                while not (servicer.reported.has_version and await is_serving(SERVICE_NAME)):
                    await asyncio.sleep(0.05)
            await call(stub.PauseGeneration, pb.PauseGenerationRequest(run_uid="run1"))
            await until(lambda: "paused by run1" in servicer.waits, timeout_s=10)
            await call(stub.ResumeGeneration, pb.ResumeGenerationRequest(run_uid="run1"))
            slow = asyncio.create_task(
                client.completions.create(
                    model="policy", prompt="x", max_tokens=120, n=100, extra_body={"ignore_eos": True}, timeout=60
                )
            )
            await asyncio.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            assert (await slow).usage.completion_tokens == 12_000  # finished within the grace period
        code, errors = await finish(process)
        assert code == 0, errors
        assert "Traceback" not in errors
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.long
async def test_process_serves_a_fixed_model_without_any_neighbour(full_model_dir: Path, unused_port):
    grpc_port, http_port = unused_port(), unused_port()
    process = await start(
        MILLRACE_LISTEN=f"127.0.0.1:{grpc_port}",
        MILLRACE_HTTP_LISTEN=f"127.0.0.1:{http_port}",
        MILLRACE_MODEL=str(full_model_dir),
    )
    try:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{http_port}/v1", api_key="EMPTY", timeout=30)
        async with asyncio.timeout(START_S):
            while True:
                try:
                    names = [card.id for card in (await client.models.list()).data]
                    break
                except openai.APIError:
                    await asyncio.sleep(0.2)
        assert names == ["policy", str(full_model_dir)]
        answer = await client.completions.create(model=names[1], prompt="x", max_tokens=4)
        assert answer.choices[0].policy_spans[0]["version"] == 0
        process.send_signal(signal.SIGINT)
        code, errors = await finish(process)
        assert code == 0, errors
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_process_names_every_wrong_setting_and_exits_2():
    process = await start(MILLRACE_MAX_NUM_SEQS="-1", MILLRACE_MODEL="/nowhere")
    code, errors = await finish(process)
    assert code == 2 and "MILLRACE_MAX_NUM_SEQS" in errors and "MILLRACE_MODEL" in errors
    process = await start()
    code, errors = await finish(process)
    assert code == 2 and "MILLRACE_LISTEN" in errors and "MILLRACE_ORCHESTRATOR" in errors


@pytest.mark.long
async def test_an_interpreter_that_is_a_wrapper_is_entered_once(tmp_path: Path):
    """As pyenv's shims are: what they start has another name, which is no reason to start them again."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\necho entered >&2\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    code, errors = await finish(await start(MILLRACE_ENGINE="vllm", MILLRACE_VLLM_PYTHON=str(wrapper)))
    assert errors.count("entered") == 1
    assert code == 3 and f"{wrapper} cannot import vllm" in errors, errors


async def test_a_vllm_that_was_not_tried_is_refused_by_name(tmp_path: Path):
    """Before anything of it is imported: that would end in a chain of errors."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise AttributeError('imported')\n")
    (tmp_path / "vllm-0.31.2.dist-info").mkdir()
    (tmp_path / "vllm-0.31.2.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.2\n")
    listens = {"MILLRACE_LISTEN": "127.0.0.1:0", "MILLRACE_HTTP_LISTEN": "127.0.0.1:0"}
    given = {"MILLRACE_STORE_URL": f"file://{tmp_path}", "MILLRACE_ORCHESTRATOR": "127.0.0.1:1"}
    process = await start(MILLRACE_ENGINE="vllm", PYTHONPATH=str(tmp_path), **listens, **given)
    code, errors = await finish(process)
    assert code == 2 and "vLLM 0.31.2 is installed, and Millrace was tried with 0.32.0 and 0.33.0" in errors, errors
    assert "MILLRACE_UNTRIED=1" in errors and "Traceback" not in errors and "imported" not in errors
