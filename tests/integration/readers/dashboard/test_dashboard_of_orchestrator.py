"""The dashboard of a real orchestrator: its runs, what is asked of them, and the command that opens it."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from millrace.cli.commands.dashboard import dashboard
from millrace.internal.v1 import worker_service_pb2 as ws
from millrace.internal.v1.worker_service_pb2_grpc import WorkerServiceStub
from millrace.local.redis import free_port
from millrace.orchestrator.serve import serve_orchestrator
from millrace.rpc.channel import call, open_channel
from millrace.telemetry.settings import Settings
from millrace.v1 import run_pb2, run_service_pb2
from millrace.v1.run_service_pb2_grpc import RunServiceStub
from millrace_testing.dashboard import KnownRuns, Served

CONFIG = {
    "model": {"name": "m"},
    "max_steps": 3,
    "orchestrator": {
        "batch_size": 8,
        "rollouts_per_example": 4,
        "env": [{"id": "reverse-text", "args": {"api_key": "sk-abcdefgh12345"}}],
    },
}


@pytest.fixture
def rpc_port() -> int:
    """Return where the orchestrator listens for workers and clients."""
    return free_port()


@pytest.fixture
async def served(rpc_port, redis_url, tmp_path, monkeypatch):
    """Yield an orchestrator without workers, with one queued run."""
    monkeypatch.setenv("MILLRACE_SCRATCH_DIR", str(tmp_path / "scratch"))
    port = free_port()
    settings = Settings(
        redis_url=redis_url, store_url=(tmp_path / "store").as_uri(), prefix=f"dash{port}",
        listen=f"127.0.0.1:{rpc_port}", dashboard_listen=f"127.0.0.1:{port}", drain_s=0.0, grace_s=1.0,
    )  # fmt: skip
    (tmp_path / "store").mkdir()
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(
        serve_orchestrator(settings, on_started=started.set_result, handle_signals=False), name="orchestrator"
    )
    await asyncio.wait({started, running}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    async with open_channel(f"127.0.0.1:{started.result()}") as channel:
        request = run_service_pb2.CreateRunRequest(
            run_id="first", kind=run_pb2.RUN_KIND_RL, config_json=json.dumps(CONFIG)
        )
        await call(RunServiceStub(channel).CreateRun, request, timeout_s=30)
    yield Served(port, KnownRuns())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_workers_of_a_run_have_short_names_and_gpus(served, rpc_port):
    """Those that they report with their heartbeats, and none where there is none."""
    ids = {
        "trainer-node-7-412-9f3ac1d2": ws.WORKER_KIND_TRAINER,
        "env-server-a-b-7-aa3ac1d2": ws.WORKER_KIND_ENV_SERVER,
    }
    gpu = ws.GpuUse(
        index=1, uuid="GPU-1", name="NVIDIA Test", memory_used_bytes=5, memory_total_bytes=8, utilization=0.5
    )
    found: list = []
    async with open_channel(f"127.0.0.1:{rpc_port}") as channel:
        stub = WorkerServiceStub(channel)
        for worker_id, kind in ids.items():
            worker = ws.Worker(worker_id=worker_id, kind=kind, address="127.0.0.1:1", capacity=4)
            await call(stub.RegisterWorker, ws.RegisterWorkerRequest(worker=worker), timeout_s=30)
        for _ in range(300):
            for worker_id, kind in ids.items():
                gpus = [gpu] if kind == ws.WORKER_KIND_TRAINER else []
                await call(stub.Heartbeat, ws.HeartbeatRequest(worker_id=worker_id, gpus=gpus), timeout_s=30)
            _, run = await asyncio.to_thread(served.json, "/api/runs/first")
            found = run["workers"]
            if len(found) == 2:
                break
            await asyncio.sleep(0.1)
    trainer, env_server = found
    assert (trainer["name"], trainer["host"], trainer["state"]) == ("trainer-1", "node-7", "ready")
    assert trainer["gpus"] == [
        {"index": 1, "id": "GPU-1", "name": "NVIDIA Test", "memory_used": 5, "memory_total": 8, "utilization": 0.5,
         "power_watts": None}
    ]  # fmt: skip
    assert (env_server["name"], env_server["host"], env_server["gpus"]) == ("env-server-1", "a-b", [])
    assert run["held_by"] == ["trainer-node-7-412-9f3ac1d2"]
    assert run["names"] == dict(zip(ids, ["trainer-1", "env-server-1"], strict=True))


async def test_runs_are_shown_explained_and_paused(served):
    async def ask(path, **options):
        return await asyncio.to_thread(served.json, path, **options)

    status, found = await ask("/api/runs")
    assert status == 200 and [run["name"] for run in found["runs"]] == ["first"]
    assert (found["runs"][0]["state"], found["trouble"]) == ("QUEUED", "")
    assert found["runs"][0]["queue_place"] == "no trainer worker is free (none is registered)"
    for words, count in {"batch_size=8+reverse-text": 1, "batch_size=9": 0, "batch_size%3D8+nowhere": 0}.items():
        status, found = await ask(f"/api/runs?config={words}")
        assert status == 200 and len(found["runs"]) == count, words
    assert (await ask("/api/runs?config=a&config=b"))[0] == 400
    _, run = await ask("/api/runs/first")
    differs = {each["key"]: each["value"] for each in run["config"] if each["differs"]}
    assert differs["orchestrator.batch_size"] == 8 and differs["max_steps"] == 3
    assert "sk-abcdefgh12345" not in str(run) and {"api_key": "***"} in differs.values()
    assert "no trainer worker is free" in run["why"]["summary"]
    assert (await ask("/api/runs/first/checkpoints")) == (200, {"checkpoints": []})
    status, page = await ask("/api/runs/first/samples")
    assert status == 200 and page["total"] == 0
    status, report = await ask("/api/runs/first/audit", method="POST", body={})
    assert status == 200 and report["run"] == "runs/first" and "violations" not in report and report["not_seen"]
    assert (await ask("/api/runs/first/audit"))[0] == 404  # a link of somebody else's must not cost a whole audit
    assert (await ask("/api/runs/nobody/audit", method="POST", body={}))[0] == 404
    assert (await ask("/api/runs/first/pause", method="POST", body={}))[0] == 200
    assert (await ask("/api/runs/first/cancel", method="POST", body={"reason": "enough"}))[0] == 200
    for _ in range(300):
        _, run = await ask("/api/runs/first")
        if run["state"] == "CANCELLED":
            break
        await asyncio.sleep(0.1)
    assert run["state"] == "CANCELLED" and run["has_ended"]
    status, refused = await ask("/api/runs/first/pause", method="POST", body={})
    assert status == 409 and refused["error"]["reason"]


async def test_the_command_prints_an_address_that_logs_in(served):
    done = await asyncio.to_thread(CliRunner().invoke, dashboard, ["--url", served.url, "--no-browser"])
    assert done.exit_code == 0, done.output
    path = done.output.strip().removeprefix(served.url)
    status, headers, _ = await asyncio.to_thread(served.ask, path)
    assert status == 200 and "set-cookie" in headers


async def test_the_code_is_not_on_the_command_line_of_the_browser(served, tmp_path):
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(f'#!/bin/sh\necho "$@" > {seen}\n')
    browser.chmod(0o700)
    environ = {**os.environ, "BROWSER": f"{browser} %s", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for _ in range(2):  # the second one writes over nothing of the first
        command = [sys.executable, "-m", "millrace.cli.main", "dashboard", "--url", served.url, "--browser"]
        done = await asyncio.to_thread(
            subprocess.run, command, env=environ, capture_output=True, text=True, check=True, timeout=60
        )
        address = done.stdout.strip()
        page = Path(seen.read_text().strip().removeprefix("file://"))
        assert address not in seen.read_text() and f"url={address}" in page.read_text()
        assert page.stat().st_mode & 0o777 == 0o600
    status, headers, _ = await asyncio.to_thread(served.ask, address.removeprefix(served.url))
    assert status == 200 and "set-cookie" in headers


async def test_a_home_that_cannot_be_written_leaves_the_browser_closed(served, tmp_path):
    seen, cache = tmp_path / "seen", tmp_path / "file"
    cache.write_text("")
    environ = {**os.environ, "BROWSER": f"touch {seen} %s", "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "millrace.cli.main", "dashboard", "--url", served.url, "--browser"]
    done = await asyncio.to_thread(subprocess.run, command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith(served.url) and not seen.exists()
    assert "open the address yourself" in done.stderr


def test_the_command_says_what_is_missing(tmp_path):
    nobody = CliRunner().invoke(dashboard, ["--dir", str(tmp_path)])
    assert "no stack with a dashboard runs" in str(nobody.exception)
    silent = CliRunner().invoke(dashboard, ["--url", f"http://127.0.0.1:{free_port()}"])
    assert "no dashboard answers" in str(silent.exception)
    odd = CliRunner().invoke(dashboard, ["--url", "ftp://x"])
    assert "is no address of a dashboard" in str(odd.exception)
