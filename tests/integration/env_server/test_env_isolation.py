"""What `MILLRACE_ENV_ISOLATION` keeps an environment's process from, tried from inside of it."""

import asyncio
import json
import os
import shutil
import signal
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from millrace.env_server.isolation import namespaces
from millrace.env_server.isolation.confinement import Confinement, Isolation
from millrace.env_server.workers.starter import WorkerStarter, WorkerTemplate
from millrace.env_server.workers.worker_process import WorkerProcess
from millrace.internal.v1.play_pb2 import EnvSpec
from millrace.processes.forked import ForkServerError

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

needs_landlock = pytest.mark.skipif(namespaces.version() < 6, reason="needs Linux 6.12 with Landlock")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to run workers as another user")
NOBODY = 65534


async def seen_by(confinement: Confinement, directory: Path, *, forks: bool = True, **asked: Any) -> dict[str, Any]:
    """Return what an environment that is confined like this sees and can do."""
    starter = WorkerStarter(confinement, forks=forks)
    into = directory / "seen"
    into.touch()
    into.chmod(0o666)
    env = EnvSpec(name="s", id="spying-env", args_json=json.dumps({"into": str(into), **asked}))
    worker = await WorkerProcess.spawn(env, starter, name="spying-env#0")
    try:
        await worker.loaded
        return json.loads(into.read_text())
    finally:
        await worker.close()
        await starter.close()


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.long)])
@needs_landlock
async def test_process_keeps_it_from_the_processes_around_it(tmp_path: Path, forks: bool) -> None:
    """Even root of the same machine: neither environment nor memory of the env-server, nor signals to it."""
    mine = f"/proc/{os.getpid()}"
    asked: dict[str, Any] = {"reads": [f"{mine}/environ", "/proc/self/environ"], "signals": os.getpid()}
    seen = await seen_by(Confinement(), tmp_path, forks=forks, **asked)
    assert seen["reads"] == {f"{mine}/environ": "PermissionError", "/proc/self/environ": ""}
    assert seen["signal"] == "PermissionError" and seen["no_new_privs"]


@pytest.mark.long
async def test_none_keeps_it_from_nothing_but_our_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    mine = f"/proc/{os.getpid()}/environ"
    seen = await seen_by(Confinement(isolation=Isolation.NONE), tmp_path, reads=[mine], signals=os.getpid())
    assert seen["reads"] == {mine: ""} and seen["signal"] == "" and not seen["no_new_privs"]
    assert "AWS_SECRET_ACCESS_KEY" not in seen["environ"] and seen["core"] == [0, 0]


@pytest.mark.long
@needs_landlock
async def test_only_the_named_ports_can_be_connected_to(tmp_path: Path) -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as engine,
        closing(socket.create_server(("127.0.0.1", 0))) as db,
    ):
        ports = [engine.getsockname()[1], db.getsockname()[1]]
        seen = await seen_by(Confinement(connect_ports=(ports[0],)), tmp_path, connects=ports)
        assert seen["connects"] == {str(ports[0]): "", str(ports[1]): "PermissionError"}
        seen = await seen_by(Confinement(), tmp_path, connects=ports)
        assert seen["connects"] == {str(port): "" for port in ports}


@needs_root
async def test_user_keeps_it_from_our_files() -> None:
    """A directory of 0700, as spool and scratch have at this level; below /tmp, as pytest's are private."""
    place = Path("/tmp") / f"millrace-test-isolation-{os.getpid()}"
    spool = place / "spool"
    spool.mkdir(parents=True)
    try:
        (spool / "a.rollout").write_text("secret")
        place.chmod(0o755)
        spool.chmod(0o700)
        asked: dict[str, Any] = {"reads": [str(spool / "a.rollout"), "/etc/shadow", "/etc/hostname"]}
        seen = await seen_by(Confinement(isolation=Isolation.USER, user=(NOBODY, NOBODY)), place, **asked)
    finally:
        shutil.rmtree(place)
    assert (seen["uid"], seen["gid"], seen["groups"]) == (NOBODY, NOBODY, [])
    assert seen["reads"] == dict(zip(asked["reads"], ["PermissionError", "PermissionError", ""], strict=True))
    assert seen["environ"]["HOME"].endswith("/home") and seen["environ"]["USER"] == "env"


@pytest.mark.long
async def test_a_template_that_is_killed_is_replaced(tmp_path: Path) -> None:
    """Its copies die with it, as if killed from outside; the next worker comes from a new one."""
    starter = WorkerStarter()
    env = EnvSpec(name="s", id="spying-env", args_json=json.dumps({"into": str(tmp_path / "seen")}))
    try:
        worker = await WorkerProcess.spawn(env, starter, name="spying-env#0")
        await worker.loaded
        assert starter.template is not None and starter.template.fork_server is not None
        first = starter.template.fork_server.pid
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(60):
            await worker.wait_ended()
        assert worker.process.returncode == -signal.SIGKILL
        again = await WorkerProcess.spawn(env, starter, name="spying-env#1")
        await again.loaded
        assert starter.template.fork_server.pid != first
        await again.close()
    finally:
        await starter.close()


@pytest.mark.long
async def test_without_a_template_workers_are_started_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise ForkServerError("the template has 2 threads")

    monkeypatch.setattr(WorkerTemplate, "fork", refuse)
    seen = await seen_by(Confinement(), tmp_path)
    assert "millrace.env_server.workers.env_worker" in seen["argv"]
