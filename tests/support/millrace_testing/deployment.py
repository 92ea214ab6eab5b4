"""The compose stack of a checkout under a project name of its own: build, start, kill, cut off, look inside."""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from millrace_testing.polling import block_until
from millrace_testing.repository import REPOSITORY

ROOT = REPOSITORY
CEPH = "tests/compose/docker-compose.ceph.yml"
OURS = ("orchestrator", "env-server", "inference", "trainer")
COMMAND_S = 120.0


def run(argv: Sequence[str], *, timeout_s: float = COMMAND_S, env: dict[str, str] | None = None) -> str:
    """Run a command and return its output. Raise AssertionError with the output if it fails."""
    done = subprocess.run(
        argv, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s
    )
    assert done.returncode == 0, f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout


def free_gib() -> float:
    """Return what the disk has left where the engine keeps its data, in GiB; infinite if that is on another machine."""
    root = Path(run(["docker", "info", "--format", "{{.DockerRootDir}}"]).strip())
    return shutil.disk_usage(root).free / 2**30 if root.is_dir() else math.inf


until = partial(block_until, poll_s=0.5)
"""Looks seldom: each look starts a command."""


@dataclass(slots=True, kw_only=True)
class Deployment:
    """One stack. `pip_conf` configures the builds as pip is configured here, where it needs certificates."""

    project: str
    port: int
    files: tuple[str, ...] = ("docker-compose.yml", CEPH)
    variables: Mapping[str, str] = field(default_factory=dict)
    work: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="millrace-compose-")))

    def __post_init__(self) -> None:
        cert = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
        lines = ["[global]", "timeout = 180", *([f"cert = {cert}"] if cert else [])]
        (self.work / "pip.conf").write_text("\n".join(lines) + "\n")

    @property
    def env(self) -> dict[str, str]:
        """Return the environment of compose commands."""
        own = {
            "COMPOSE_PROJECT_NAME": self.project,
            "MILLRACE_PORT": str(self.port),
            "MILLRACE_DASHBOARD_LISTEN": "",
            "MILLRACE_DASHBOARD_PORT": "0",
            "MILLRACE_REGISTRY": "millrace-test",
            "PIP_CONFIG": str(self.work / "pip.conf"),
            "DOCKER_BUILDKIT": "1",
        }
        return {**os.environ, **own, **self.variables}

    def compose(self, *argv: str, timeout_s: float = COMMAND_S) -> str:
        """Run `docker compose …` on this stack, and return its output."""
        files = [part for name in self.files for part in ("-f", name)]
        return run(["docker", "compose", *files, *argv], timeout_s=timeout_s, env=self.env)

    def build(self) -> None:
        """Build all images, with a CPU build of torch if the machine's pip has one."""
        wheels = ROOT / "docker" / "wheels"
        if not list(wheels.glob("torch-*.whl")):
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
            run([*pip, "torch==2.13.*"], timeout_s=900)
        self.compose("build", timeout_s=3000)

    def up(self, *argv: str, timeout_s: float = 400) -> float:
        """Start and wait until every service is healthy; returns the seconds that took."""
        began = time.monotonic()
        try:
            self.compose("up", "--detach", *argv, timeout_s=timeout_s)
            for service in OURS:
                until(lambda name=service: self.is_healthy(name), what=f"{service} to be healthy", timeout_s=timeout_s)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"{self.project} does not come up: {error}\n{self.state()}") from None
        return time.monotonic() - began

    def state(self) -> str:
        """Return what helps to explain a failure: free disk space, containers, the last lines of their logs."""
        listed = self.compose("ps", "--all", "--format", "table {{.Service}}\t{{.Status}}")
        said = self.compose("logs", "--no-color", "--tail", "15")
        return f"{free_gib():.1f} GiB of disk left for the engine\n{listed}\n{said}"

    def cli(self, *argv: str, timeout_s: float = 400) -> str:
        """Run the `millrace` command inside the stack, and return its output."""
        return self.compose("run", "--rm", "-T", "--no-deps", "cli", *argv, timeout_s=timeout_s)

    def containers(self, service: str) -> list[str]:
        """Return the ids of the service's containers, running or not."""
        return self.compose("ps", "--all", "--quiet", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        """Return the output of `docker inspect` for a container."""
        return json.loads(run(["docker", "inspect", container]))[0]

    def is_healthy(self, service: str) -> bool:
        """Return whether every container of the service runs and passes its health check."""
        states = [self.inspect(container)["State"] for container in self.containers(service)]
        return bool(states) and all(s["Running"] and s.get("Health", {}).get("Status") == "healthy" for s in states)

    def kill_main_process(self, service: str) -> None:
        """Kill the service's own process, the child of the init process; the restart policy does the rest."""
        (container,) = self.containers(service)
        before = self.inspect(container)["State"]["StartedAt"]
        run(["docker", "exec", container, "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)"])
        until(
            lambda: self.inspect(container)["State"]["StartedAt"] != before,
            what=f"the restart policy to start {service} again",
            timeout_s=60,
        )

    def kill_container(self, service: str) -> None:
        """Kill the service's only container with `docker kill`, which triggers no restart policy, and start it
        again.
        """
        (container,) = self.containers(service)
        run(["docker", "kill", container])
        run(["docker", "start", container])

    def cut(self, service: str, other: str) -> Callable[[], None]:
        """Drop all packets between two services; return the function that ends this."""
        (container,), (peer,) = self.containers(service), self.containers(other)
        pid = str(self.inspect(container)["State"]["Pid"])
        (network,) = self.inspect(peer)["NetworkSettings"]["Networks"].values()
        inside = ["nsenter", "--target", pid, "--net", "iptables"]
        rules = [["OUTPUT", "-d", network["IPAddress"]], ["INPUT", "-s", network["IPAddress"]]]
        for chain, *rule in rules:
            run([*inside, "-I", chain, *rule, "-j", "DROP"])

        def heal() -> None:
            dropped = int(run([*inside, "-L", "OUTPUT", "1", "-v", "-x", "-n"]).split()[0])
            for chain, *rule in rules:
                run([*inside, "-D", chain, *rule, "-j", "DROP"])
            assert dropped > 0, f"nothing that {service} sent to {other} was dropped"

        return heal

    def close(self) -> None:
        """Remove containers and volumes."""
        try:
            self.compose("--profile", "cli", "down", "--volumes", "--timeout", "10", timeout_s=200)
        finally:
            self.forget()

    def forget(self) -> None:
        """Remove what was written for builds."""
        shutil.rmtree(self.work, ignore_errors=True)


@contextmanager
def started(stack: Deployment) -> Iterator[Deployment]:
    """Start the stack and wait until it is healthy; remove it at the end, and before if an aborted run left one."""
    try:
        stack.compose("--profile", "cli", "down", "--volumes", "--timeout", "5")
        print(f"\n{stack.project}: {stack.up():.1f} s from up to healthy")
        yield stack
    finally:
        stack.close()
