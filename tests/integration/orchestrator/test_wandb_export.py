"""`[wandb]`: the orchestrator's exporter writes every value of a run once, and the run never waits for W&B."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from millrace.config.load import validate_document
from millrace.readers.exports import of_run
from millrace.readers.exports import of_run as keeper
from millrace.readers.exports.metrics import points, read_metrics
from millrace.rpc.channel import call
from millrace.runlog.names import Names
from millrace.telemetry import waits
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing import wandb_files
from millrace_testing.lanes import one_by_default
from millrace_testing.orchestrator.runs import CONFIG, bodies, states, watch
from millrace_testing.polling import until
from millrace_testing.wandb_server import WandbServer, serving

pytestmark = wandb_files.NEEDS_WANDB


async def create(stack, *, max_steps: int = 3, **wandb: object) -> run_pb2.Run:
    document = {**CONFIG, "max_steps": max_steps, "wandb": wandb}
    request = run_service_pb2.CreateRunRequest(
        kind=run_pb2.RUN_KIND_RL, config_json=validate_document(document).resolved_json()
    )
    return (await call(stack.runs.CreateRun, request)).run


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "wandb"))
    for name in [name for name in os.environ if name.startswith("WANDB_") and name != "WANDB_DIR"]:
        monkeypatch.delenv(name)
    return tmp_path / "wandb"


def socket_that_looks_refused() -> socket.socket:
    """Return listen on a port with 401 in it, which is no reason to take the key for refused."""
    for port in range(40100, 40200):
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise AssertionError("no such port is free")


@asynccontextmanager
async def answering(status: int | None) -> AsyncIterator[str]:
    """A server that answers every request with a status, or (None) never; yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if status is None:
            await asyncio.sleep(600)
        size = next((int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")), 0)
        await reader.readexactly(size)
        body = b'{"errors": [{"message": "invalid API key"}]}'
        writer.write(b"HTTP/1.1 %d No\r\nContent-Type: application/json\r\n" % status)
        writer.write(b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, sock=socket_that_looks_refused())
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def workers_of(stack):
    await stack.env_server()
    await stack.inference()
    return await stack.trainer()


async def test_an_offline_run_has_every_value_though_its_exporter_was_killed(stack, directory: Path) -> None:
    trainer = await workers_of(stack)
    trainer.hold.clear()
    run = await create(stack, offline=True, log_extras={"interval": 1})
    await until(lambda: [*directory.glob("*/wandb/offline-run-*/run-*.wandb")], what="a session")
    (process,) = (
        child for child in psutil.Process().children() if child.cmdline()[-1:] == ["millrace.readers.exports.live"]
    )
    os.killpg(process.pid, signal.SIGKILL)
    await until(lambda: len([*directory.glob("*/wandb/offline-run-*")]) >= 2, what="a second session")
    trainer.hold.set()
    events = await watch(stack, run)
    assert states(events)[-1] == "SUCCEEDED"
    assert "WANDB_EXPORTER_DIED" in {warning.reason for warning in bodies(events, "warning")}
    names = Names(stack.prefix, run.uid)
    expected = {(name, step): value for name, step, value in points(read_metrics(stack.deps["store"], names))}

    def found() -> dict:
        rows = wandb_files.history(directory / run.uid)
        seen: dict = {}
        for row in rows:
            for name, value in row.items():
                if name[0] != "_" and not isinstance(value, dict):
                    assert seen.setdefault((name, row["step"]), value) == value
        return seen

    await until(lambda: expected.keys() <= found().keys(), what="every value")
    assert {key: found()[key] for key in expected} == pytest.approx(expected) and (
        "batch/trained_groups",
        2,
    ) in expected


@pytest.mark.long
async def test_an_online_run_has_every_value_once_though_its_exporter_was_killed(
    stack, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next exporter goes on in the run after the rows that W&B says it has."""
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    with serving(WandbServer()) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        trainer = await workers_of(stack)
        trainer.hold.clear()
        run = await create(stack, project="letters", id="again")
        await until(lambda: "again" in server.runs and server.runs["again"].history, what="the first row")
        stored = server.runs["again"]
        (process,) = (
            child for child in psutil.Process().children() if child.cmdline()[-1:] == ["millrace.readers.exports.live"]
        )
        os.killpg(process.pid, signal.SIGKILL)
        before = len(stored.history)
        await until(lambda: server.num_resumed, what="a second session")
        trainer.hold.set()
        events = await watch(stack, run)
        assert states(events)[-1] == "SUCCEEDED"
        names = Names(stack.prefix, run.uid)
        expected = {(name, step): value for name, step, value in points(read_metrics(stack.deps["store"], names))}
        await until(lambda: stored.is_complete, what="the end of the session")
    rows = stored.rows()
    seen = [(name, row["step"]) for row in rows for name in row if name != "step" and name[0] != "_"]
    assert len(seen) == len(set(seen)) and set(expected) <= set(seen)
    assert {(n, row["step"]): row[n] for row in rows for n in row if (n, row["step"]) in expected} == pytest.approx(
        expected
    )
    assert [row["_step"] for row in rows] == list(range(len(rows))) and 0 < before < len(rows)
    assert (stored.project, stored.num_repeated, server.unknown) == ("letters", 0, [])


@pytest.mark.parametrize("kind", one_by_default(["refused", "down", "slow"]))
async def test_a_run_goes_on_while_wandb_does_not_take_it(
    stack, directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(of_run, "WANDB", replace(of_run.WANDB, finish_s=0.5))
    monkeypatch.setattr(keeper, "STOP_S", 0.5)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
    async with answering({"refused": 401, "down": 503, "slow": None}[kind]) as url:
        if kind == "down":
            with socket.create_server(("127.0.0.1", 0)) as closed:
                url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", url)
        trainer = await workers_of(stack)
        trainer.hold.clear()
        run = await create(stack)
        reason = "WANDB_REFUSED" if kind == "refused" else "WANDB_UNREACHABLE"

        def waiting() -> bool:
            return any("W&B" in wait.reason and wait.run == run.uid for wait in waits.snapshot("me"))

        await until(waiting, what="a named wait")
        told = asyncio.create_task(watch(stack, run, timeout_s=100))
        await asyncio.sleep(0)
        await until(lambda: any("W&B:" in wait.reason for wait in waits.snapshot("me")), what=reason)
        trainer.hold.set()
        events = await told
        assert states(events)[-1] == "SUCCEEDED"
        assert [each.reason for each in bodies(events, "warning")].count(reason) == 1
        text = json.dumps([each.message for each in bodies(events, "warning")])
        assert "0123456789" * 4 not in text


async def test_without_the_library_the_run_says_so_and_goes_on(
    stack, directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(of_run, "WANDB", replace(of_run.WANDB, finish_s=0.5))
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "wandb.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'shadow'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    trainer = await workers_of(stack)
    trainer.hold.clear()
    run = await create(stack, offline=True)
    await until(lambda: any("millrace[wandb]" in wait.reason for wait in waits.snapshot("me")))
    trainer.hold.set()
    events = await watch(stack, run)
    assert states(events)[-1] == "SUCCEEDED" and "EXTRA_MISSING" in {w.reason for w in bodies(events, "warning")}
