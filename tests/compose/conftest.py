"""The images, once for all tests of the folder where a Docker engine can be had; a client outside the containers."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.local.directory import free_ports
from millrace_testing.deployment import ROOT, Deployment, free_gib, run, started

NO_PACKAGE = 3
"""Exit code of base_images.sh."""
ROOM_GIB = 15.0
"""What base images, wheels, layers and a stack take at most, from nothing; the store stops writing on a full disk."""


@pytest.fixture(scope="session")
def base_images() -> None:
    """A Docker engine and what images are made of; skipped with the reason where one of them cannot be had."""
    no_engine = os.environ.get("MILLRACE_NO_ENGINE")
    """What run.sh found: why this machine can have no engine, empty if it has one; None: it was not asked."""
    if no_engine:
        pytest.skip(no_engine)
    for command in (["docker", "info"], ["docker", "compose", "version"], ["docker", "buildx", "version"]):
        code, said = _attempt(command)
        if code and no_engine is None:
            pytest.skip(f"no Docker engine: {said}; tests/compose/engine.sh gets one on Debian as root")
        if code:
            pytest.fail(f"{' '.join(command)} does not work any more: {said}")
    if (room := free_gib()) < ROOM_GIB:
        why = f"{room:.1f} GiB of disk are free where Docker keeps its data, and the tests need {ROOM_GIB:g}"
        pytest.fail(f"{why}: remove files, or run `docker system prune`")
    code, said = _attempt(["bash", "tests/compose/base_images.sh"], timeout_s=1200)
    if code:
        give_up = pytest.fail if os.environ.get("MILLRACE_COMPOSE_REQUIRED") else pytest.skip
        why = "the package mirrors do not have what they are made of" if code == NO_PACKAGE else f"exit code {code}"
        give_up(f"no base images here: {why}: {said}")


@pytest.fixture(scope="session")
def images(base_images: None) -> None:
    """All images of today's code."""
    builder = Deployment(project="millracetest", port=0)
    try:
        builder.build()
    finally:
        builder.forget()


@pytest.fixture(scope="module")
def deployment(images: None) -> Iterator[Deployment]:
    """Yield the stack of docker-compose.yml, up and healthy."""
    with started(Deployment(project="millracetest", port=free_ports(1)[0])) as stack:
        yield stack


@pytest.fixture(scope="session")
def thin_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin directory of a fresh environment with `millrace[client]` from a wheel, and nothing else."""
    place = tmp_path_factory.mktemp("client")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place), str(ROOT)], timeout_s=600)
    (wheel,) = place.glob("millrace-*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", str(place / "venv")])
    bin_ = place / "venv" / "bin"
    run([*pip, "--python", str(bin_ / "python"), "install", "--quiet", f"{wheel}[client]"], timeout_s=600)
    return bin_


def _attempt(command: list[str], *, timeout_s: float = 60.0) -> tuple[int, str]:
    """Return the command's exit code, and all that it said about it."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stderr or done.stdout).strip()
