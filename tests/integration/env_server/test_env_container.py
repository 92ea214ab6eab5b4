"""Level `container` of `MILLRACE_ENV_ISOLATION`, tried from inside: what a worker sees and reaches, and how it ends."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from millrace.env_server.isolation import namespaces
from millrace.env_server.isolation.confinement import Confinement, Isolation, why_no_container
from millrace.env_server.isolation.namespaces import visible_to_workers
from millrace.env_server.workers.pool import EnvPool, PoolLimits
from millrace.env_server.workers.starter import WorkerStarter
from millrace.env_server.workers.worker_process import WorkerProcess
from millrace.internal.v1 import rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, Sampling
from millrace.rollouts.types import Rollout, RolloutStatus

NOBODY = 65534
USER = (NOBODY, NOBODY) if namespaces.is_administrator() else None
WHY_NOT = why_no_container(
    Confinement(
        isolation=Isolation.CONTAINER,
        user=USER,
        visible=visible_to_workers(os.environ, [str(Path(__file__).parents[2])]),
    )
)
pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"needs a machine that can make level container: {WHY_NOT}"),
]


@pytest.fixture(scope="module")
def ours() -> Iterator[Path]:
    """Yield a directory of the deployment, with what no environment may read; beside PYTHONPATH's environments."""
    place = Path("/var/tmp") / f"millrace-test-container-{os.getpid()}"
    for name in ("spool", "redis"):
        (place / name).mkdir(parents=True)
    (place / "spool" / "a.rollout").write_text("secret")
    (place / "redis" / "redis.url").write_text("redis://:secret@127.0.0.1/0")
    (place / "redis" / "redis.conf").write_text("requirepass secret")
    (place / "shown").write_text("for all")
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def confinement(ours: Path, environments_on_path: None) -> Confinement:
    """As of an env-server whose PYTHONPATH has the whole directory, so that only hiding helps."""
    environ = {
        **os.environ,
        "MILLRACE_SPOOL_DIR": str(ours / "spool"),
        "MILLRACE_REDIS_URL_FILE": str(ours / "redis" / "redis.url"),
    }
    return Confinement(isolation=Isolation.CONTAINER, user=USER, visible=visible_to_workers(environ, [str(ours)]))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def contained(confinement: Confinement) -> AsyncIterator[WorkerStarter]:
    made = WorkerStarter(confinement)
    yield made
    await made.close()


def spec(env_id: str, **args: Any) -> EnvSpec:
    return EnvSpec(name=env_id, id=env_id, args_json=json.dumps(args))


async def seen_by(starter: WorkerStarter, **asked: Any) -> dict[str, Any]:
    worker = await WorkerProcess.spawn(spec("spying-env", into="/tmp/seen", **asked), starter, name="spying-env#0")
    try:
        await worker.loaded
        return json.loads((worker.started.directory / "tmp" / "seen").read_text())
    finally:
        await worker.close()
        assert not worker.started.directory.exists()


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_it_sees_no_file_no_process_and_no_network_of_ours(
    confinement: Confinement, contained: WorkerStarter, ours: Path, forks: bool
) -> None:
    starter = contained if forks else WorkerStarter(confinement, forks=False)
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as redis,
        closing(socket.socket(type=socket.SOCK_DGRAM)) as udp,
    ):
        port = redis.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        secrets = [ours / "spool" / "a.rollout", ours / "redis" / "redis.url", ours / "redis" / "redis.conf"]
        absent = ["/etc/shadow", f"/proc/{os.getpid()}/environ", "/root/.bashrc", "/var/log/dpkg.log", "/sys/kernel"]
        asked: dict[str, Any] = {
            "reads": [*map(str, secrets), *absent, str(ours / "shown")],
            "writes": ["/", "/usr", sys.prefix, str(ours), "/dev", "/tmp", "/dev/shm"],
            "signals": os.getpid(),
            "connects": [port],
        }
        try:
            seen = await seen_by(starter, **asked)
        finally:
            if not forks:
                await starter.close()
    answers = dict(seen["reads"])
    assert answers.pop(str(ours / "shown")) == ""
    assert set(answers.values()) <= {"FileNotFoundError", "PermissionError", "NotADirectoryError"}, answers
    writable = {path for path, problem in seen["writes"].items() if not problem}
    assert writable == {"/tmp", "/dev/shm"}, seen["writes"]
    assert seen["signal"] == "ProcessLookupError" and seen["processes"] == [1, 2]
    assert seen["connects"] == {str(port): "ConnectionRefusedError"}
    assert seen["datagrams"] == {str(port): "ConnectionRefusedError"}
    assert seen["hostname"] == "PermissionError" and seen["no_new_privs"] and seen["cwd"] == "/tmp"
    assert seen["environ"]["HOME"] == seen["environ"]["TMPDIR"] == "/tmp"
    assert not {"home", "work", "root/.ssh", "opt"} & set(seen["root"]) - {Path(p).parts[1] for p in sys.path if p}
    assert seen["uid"] == (NOBODY if USER else os.getuid())
    assert (not USER) or seen["groups"] == []


@pytest_asyncio.fixture(loop_scope="session")
async def pool(contained: WorkerStarter, request: pytest.FixtureRequest) -> AsyncIterator[EnvPool]:
    made = EnvPool(spec("hungry-env", tasks=request.param), PoolLimits(num_probes=2), contained)
    made.start()
    async with asyncio.timeout(240):
        while made.info is None:
            assert made.failure is None, made.failure
            await asyncio.sleep(0.02)
    yield made
    await made.close()


async def play(pool: EnvPool, base_url: str, task_index: int = 0) -> Rollout:
    request = PlayGroupRequest(
        run_uid="r-container",
        purpose=rollout_pb2.PURPOSE_TRAIN,
        ordinal=task_index,
        members=[0],
        group_size=1,
        env=pool.env,
        task_index=task_index,
        base_url=base_url,
        model="policy",
        sampling=Sampling(temperature=1.0, max_tokens=8),
        rollout_timeout_seconds=60,
    )
    [rollout] = await pool.play(request, tokenizer_dir="")
    return rollout


@pytest.mark.parametrize("pool", [[{"mode": "slow", "seconds": 0}]], indirect=True)
async def test_engines_are_reached_by_address_and_by_name(
    pool: EnvPool, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the URLs that everybody uses; what the worker knows of names is its own /etc/hosts."""
    real = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        return real("127.0.0.1" if host == "engine.test" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    address = engine.base_url("ok")
    for url in [address, address.replace("127.0.0.1", "localhost"), address.replace("127.0.0.1", "engine.test")]:
        rollout = await play(pool, url)
        assert rollout.status == RolloutStatus.OK, (url, rollout.error)
    many = await asyncio.gather(*(play(pool, address) for _ in range(40)))
    assert {rollout.status for rollout in many} == {RolloutStatus.OK}


@pytest.mark.parametrize("pool", [[{"mode": "slow", "seconds": 0}]], indirect=True)
async def test_an_engine_that_is_gone_is_a_lost_engine(pool: EnvPool, engine: Any) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    rollout = await play(pool, f"http://127.0.0.1:{port}/ok/v1")
    assert rollout.status == RolloutStatus.ENGINE_LOST, rollout.error
    rollout = await play(pool, engine.base_url("reset"))
    assert rollout.status == RolloutStatus.ENGINE_LOST, rollout.error


@pytest.mark.parametrize("pool", [[{"mode": "exit"}, {"mode": "segfault"}]], indirect=True)
async def test_how_it_ended_is_told_as_without_a_container(pool: EnvPool, engine: Any) -> None:
    rollouts = [await play(pool, engine.base_url("ok"), n) for n in range(2)]
    assert "exit code 3, peak memory" in rollouts[0].error.message
    assert "killed by SIGSEGV, peak memory" in rollouts[1].error.message


async def test_nothing_of_it_is_left(contained: WorkerStarter) -> None:
    """Neither when it is asked to end, nor when the process that is known outside is killed."""
    for is_killed in (False, True):
        worker = await WorkerProcess.spawn(spec("spying-env", into="/tmp/seen"), contained, name="spying-env#0")
        await worker.loaded
        inside = psutil.Process(worker.process.pid).children(recursive=True)
        assert len(inside) == 2
        if is_killed:
            os.kill(worker.process.pid, 9)
            await worker.wait_ended()
        else:
            await worker.close()
        assert worker.process.returncode == (-9 if is_killed else 0)
        gone, left = psutil.wait_procs(inside, timeout=10)
        assert len(gone) == 2 and not left


async def test_a_machine_that_cannot_is_refused_with_what_it_can() -> None:
    """Really refused: in a user namespace without users nobody may make another one."""
    code = (
        "from millrace.env_server.settings import EnvServerSettings as S\n"
        "S.from_env({'MILLRACE_ENV_ISOLATION': 'container'}).confinement()"
    )
    command = ["unshare", "-U", sys.executable, "-c", code]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "MILLRACE_ENV_ISOLATION: cannot be kept here: cannot make namespaces (the kernel" in done.stderr
    assert "Level process can, which keeps out less" in done.stderr
