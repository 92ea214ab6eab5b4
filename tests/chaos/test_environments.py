"""Hostile environments through the whole stack: one that ends its workers, one that looks for what is not its own."""

import json
import os
import pwd
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.env_server.isolation.confinement import Confinement, Isolation, why_no_container
from millrace.env_server.isolation.namespaces import is_administrator, visible_to_workers
from millrace.local.directory import free_ports
from millrace.v1 import run_pb2
from millrace_testing.chaos.run import ChaosRun
from millrace_testing.chaos.stack import ChaosStack
from millrace_testing.patience import patient
from millrace_testing.workplaces import Workplace

ENVIRONMENTS = Path(__file__).parents[1] / "fixtures" / "environments"
NOBODY = "nobody"
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


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
    print(f"FAILED after {seconds:.1f} s")
    for part in ("ENV_KILLS_WORKERS", "ended their worker, alone in it", "task ", "exit code 3", "killed by SIGSEGV"):
        assert part in message, message
    assert "raise MILLRACE_ENV_MEMORY_BYTES" in message, "the remedy"
    chaos.audit(run)


class Passable(Workplace):
    """Its commands find Python where others may read it, although it is below somebody's home (as with pyenv)."""

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
    env["MILLRACE_ENV_ISOLATION"] = level
    if level != "none":
        env["MILLRACE_ENV_CONNECT_PORTS"] = str(http_port)
    stack = ChaosStack(Passable(place.path), level, env=env)
    stack.address, stack.http_port = f"127.0.0.1:{port}", http_port
    try:
        with stack:
            yield stack
    finally:
        shutil.rmtree(path, ignore_errors=True)


def submit_forbidden(chaos: ChaosStack, *names: str) -> ChaosRun:
    """Return a run whose environment must not read these paths, connect to Redis or the orchestrator, or signal
    anybody.
    """
    paths = [chaos.directory / name for name in names]
    ports = [chaos.redis().connection_pool.connection_kwargs["port"], int(chaos.address.rpartition(":")[2])]
    for path in paths:
        assert path.exists(), "what is not there keeps nobody out"
    for port in ports:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    pids = chaos.pids()
    reads = [*map(str, paths), *(f"/proc/{pids[name]}/environ" for name in ("orchestrator", "env-server"))]
    args = {"reads": reads, "connects": ports, "signals": pids["orchestrator"], "forbids": True}
    env = json.dumps([{"id": "spying-env", "args": args}])
    return chaos.submit(None, "--orchestrator.env", env, "--no-orchestrator.filter-zero-advantages", max_steps=2)


@pytest.mark.slow
def test_what_keeps_nobody_out_is_found_by_that_environment(warm) -> None:
    """So that the tests below can fail."""
    with isolated(warm, "none", **environ("spying_env")) as chaos:
        run = submit_forbidden(chaos, "redis/redis.url", "spool")
        run.wait_state(run_pb2.RUN_STATE_FAILED)
        message = run.of("state_changed")[-1].state_changed.error.message
        for part in ("could do what it must not", "redis.url", "spool", "/environ", "connects", "signals"):
            assert part in message, message


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to run workers as another user")
def test_level_user_plays_and_reads_nothing_of_ours(warm) -> None:
    with isolated(warm, "user", MILLRACE_ENV_USER=NOBODY, **environ("spying_env")) as chaos:
        chaos.finish(submit_forbidden(chaos, "redis", "redis/redis.url", "spool", "scratch"))


@pytest.mark.slow
def test_level_container_plays_and_reaches_nothing_of_ours(warm) -> None:
    user = {"MILLRACE_ENV_USER": NOBODY} if is_administrator() else {}
    if why := container_problem(user.get("MILLRACE_ENV_USER")):
        pytest.skip(f"needs a machine that can make level container: {why}")
    with isolated(warm, "container", **user, **environ("spying_env")) as chaos:
        kept = ["redis", "redis/redis.url", "spool", "scratch", "store", "logs", "."]
        chaos.finish(submit_forbidden(chaos, *kept))


def container_problem(user: str | None) -> str:
    """Why this machine cannot, or ""."""
    ids = None if user is None else (pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
    visible = visible_to_workers(os.environ, [])
    return why_no_container(Confinement(isolation=Isolation.CONTAINER, user=ids, visible=visible))
