"""Hostile environments through the whole stack: one that ends its workers, one that looks for what is not its own."""

import json
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chaos_stack import ChaosStack
from patience import patient
from workplaces import Workplace

from millrace.local.ports import free_ports
from millrace.v1 import run_pb2

ENVIRONMENTS = Path(__file__).parents[1] / "fixtures" / "environments"
NOBODY = "nobody"
pytestmark = pytest.mark.timeout(900)


def environ(*names: str) -> dict[str, str]:
    search = [str(ENVIRONMENTS / name) for name in names]
    return {"PYTHONPATH": os.pathsep.join([*search, *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_an_environment_that_ends_every_worker_ends_its_run(make_chaos) -> None:
    """FAILED within about a minute, with ids of tasks and how their processes ended."""
    chaos: ChaosStack = make_chaos(env=environ("hungry_env"))
    tasks = [{"mode": "exit" if n % 2 else "segfault"} for n in range(40)]
    began = time.monotonic()
    run = chaos.submit(None, "--orchestrator.env", json.dumps([{"id": "hungry-env", "args": {"tasks": tasks}}]))
    run.wait_state(run_pb2.RUN_STATE_FAILED, timeout_s=patient(90))
    seconds = time.monotonic() - began
    message = str(run.of("state_changed")[-1])
    print(f"FAILED after {seconds:.1f} s: {message}")
    for part in ("ENV_KILLS_WORKERS", "ended their worker, alone in it", "task ", "exit code 3", "killed by SIGSEGV"):
        assert part in message, message
    assert "raise MILLRACE_ENV_MEMORY_BYTES" in message, "the remedy"
    chaos.audit(run)


class Passable(Workplace):
    """Its commands find Python where others may read it, although it lies below somebody's home (as with pyenv)."""

    def program(self) -> list[str]:
        closed = [parent for parent in Path(sys.base_prefix).parents if not parent.stat().st_mode & stat.S_IXOTH]
        if not closed:
            return super().program()
        opened = (
            'd=$(mktemp -d) && mount --bind "$1" $d && mount -t tmpfs -o mode=755 none "$2" && mkdir -p "$1" '
            '&& mount --bind $d "$1" && shift 2 && exec "$@"'
        )
        place = [sys.base_prefix, str(closed[-1])]
        return ["unshare", "--mount", "sh", "-c", opened, "sh", *place, *super().program()]


@contextmanager
def isolated(warm: Workplace, level: str, **env: str) -> Iterator[ChaosStack]:
    """A stack of that level, below a directory through which everybody may go; its engine may be connected to."""
    path = Path("/var/tmp") / f"millrace-test-{level}-{os.getpid()}"
    place = warm.twin(path)
    port, http_port = free_ports(2)
    env |= {"MILLRACE_ENV_ISOLATION": level, "MILLRACE_ENV_CONNECT_PORTS": str(http_port)}
    stack = ChaosStack(Passable(place.path), level, env=env)
    stack.address, stack._http_port = f"127.0.0.1:{port}", http_port
    try:
        with stack:
            yield stack
    finally:
        shutil.rmtree(path, ignore_errors=True)


def play_forbidden(chaos: ChaosStack, *paths: Path, ports: list[int]) -> None:
    """A run whose environment must not read these paths, connect to these ports, or signal the orchestrator."""
    for path in paths:
        assert path.exists(), "what is not there keeps nobody out"
    for port in ports:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    pids = chaos.pids()
    reads = [*map(str, paths), *(f"/proc/{pids[name]}/environ" for name in ("orchestrator", "env-server"))]
    args = {"reads": reads, "connects": ports, "signals": pids["orchestrator"], "forbids": True}
    env = json.dumps([{"id": "spying-env", "args": args}])
    run = chaos.submit(None, "--orchestrator.env", env, "--no-orchestrator.filter-zero-advantages", max_steps=2)
    chaos.finish(run)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to run workers as another user")
def test_level_user_plays_and_reads_nothing_of_ours(warm) -> None:
    with isolated(warm, "user", MILLRACE_ENV_USER=NOBODY, **environ("spying_env")) as chaos:
        redis_port = chaos.redis().connection_pool.connection_kwargs["port"]
        orchestrator = int(chaos.address.rpartition(":")[2])
        kept = [chaos.directory / name for name in ("redis", "redis/redis.url", "spool", "scratch")]
        play_forbidden(chaos, *kept, ports=[redis_port, orchestrator])


@pytest.mark.slow
def test_level_container_plays_and_reaches_nothing_of_ours(warm) -> None:
    env = {"MILLRACE_ENV_USER": NOBODY} if os.geteuid() == 0 else {}
    with isolated(warm, "container", **env, **environ("spying_env")) as chaos:
        redis_port = chaos.redis().connection_pool.connection_kwargs["port"]
        orchestrator = int(chaos.address.rpartition(":")[2])
        kept = [chaos.directory / name for name in ("redis", "redis/redis.url", "spool", "scratch", "store", "logs")]
        play_forbidden(chaos, *kept, chaos.directory, ports=[redis_port, orchestrator])
